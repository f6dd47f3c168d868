"""Earlier names of stored fields: the maps, and data with these names."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.saved import content
from flashtune.core.earlier_names import (
    BASELINES,
    CONFIG_FIELDS,
    ORDERS,
    PROBLEM_FIELDS,
    present_bench_report,
    present_call,
    present_label,
    present_record,
)
from flashtune.core.errors import UsageError
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.db import codec
from flashtune.recording.recorder import read_counts
from flashtune.templates.forward_hopper.space import Order
from flashtune.templates.registry import families, find_family
from flashtune.tuner.tables.kernel_choice import change_config
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.tuner.workloads.shapes_file import read_shapes_file

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EARLIER_SHAPE = "heads=8,seqlen=64,head_dim=64,window=9,first_tokens=4,chunk=32,packed=96,lengths,latent"
SHAPE = "heads=8,seqlen=64,head_dim=64,window=9,sink_tokens=4,attention_chunk=32,total_q=96,seqlens_k,mla"
MAPS = {
    **{
        name: (names, find_family(name).config_type.__struct_fields__)
        for name, names in CONFIG_FIELDS.items()
    },
    "problem": (PROBLEM_FIELDS, Problem.__struct_fields__),
    "order": (ORDERS, tuple(Order)),
    "baseline": (BASELINES, tuple(codec.BASELINES)),
}


@pytest.mark.parametrize("name", MAPS)
def test_an_earlier_name_has_one_present_name(name: str) -> None:
    names, present = MAPS[name]
    assert set(names.values()) <= set(present)
    assert not names.keys() & set(present)
    assert len(set(names.values())) == len(names)


def test_every_family_with_earlier_names_exists() -> None:
    assert CONFIG_FIELDS.keys() == {family.name for family in families()}


def test_earlier_shapes_are_read(tmp_path: Path) -> None:
    assert parse_shape(EARLIER_SHAPE) == parse_shape(SHAPE)
    path = tmp_path / "shapes"
    path.write_text(
        f'{EARLIER_SHAPE}\n{{"heads": 8, "seqlen": 64, "head_dim": 64, "window": "9", "first_tokens": 4, '
        '"chunk": 32, "packed": 96, "lengths": true, "latent": true}\n'
    )
    assert read_shapes_file(path) == parse_shape(SHAPE)


def test_a_key_under_both_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="packed is given twice"):
        parse_shape("heads=8,seqlen=64,head_dim=64,packed=9,total_q=9")
    path = tmp_path / "shapes"
    path.write_text('{"heads": 8, "seqlen": 64, "head_dim": 64, "packed": 9, "total_q": 9}')
    with pytest.raises(UsageError, match="packed is given twice"):
        read_shapes_file(path)


def test_earlier_words_of_a_config_are_read() -> None:
    (problem,) = parse_shape("heads=8,seqlen=64,head_dim=64,causal")
    base = find_family("forward_hopper").default(problem, find_target("h200"))
    earlier = change_config(base, "groups=1,order=alternate,late_wait")
    assert earlier == change_config(base, "num_consumer_groups=1,order=serpentine,defer_pv_wait")
    assert present_label("forward_hopper", "forward_hopper rows=64 order=long_first even=1 (database)") == (
        "forward_hopper rows_per_group=64 order=lpt balanced_grid=1 (database)"
    )


def test_earlier_recorded_calls_are_read(tmp_path: Path) -> None:
    (problem,) = parse_shape(SHAPE)
    path = tmp_path / "calls"
    call = {"problem": problem, "specialization": {"alignment": 16, "index_bits": 32}, "calls": 3}
    earlier = present = msgspec.json.encode(call)
    for before, after in PROBLEM_FIELDS.items():
        earlier = earlier.replace(f'"{after}"'.encode(), f'"{before}"'.encode())
    assert earlier != present
    path.write_bytes(earlier)
    (count,) = read_counts(path)
    assert (count.problem, count.calls) == (problem, 3)


def test_earlier_reports_have_present_names() -> None:
    report = content(RESULTS / "nvidia-h200-bench.json.gz")
    earlier = report.replace(b" num_consumer_groups=", b" groups=").replace(b'"unfused"', b'"standard"')
    assert earlier != report
    assert msgspec.json.decode(present_bench_report(earlier)) == msgspec.json.decode(report)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b'{"family": [1]}',
        b'{"family": "sdpa", "config": 3}',
        b'{"a":"\xff"}',
        b"[" * 9999,
    ],
)
def test_other_json_is_not_changed(raw: bytes) -> None:
    assert present_record(raw) == raw
    assert present_call(b'{"problem": 3}') == b'{"problem": 3}'
