"""Tables are compared by each problem's speed relative to peers in the same run."""

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from benchmarks.saved import load
from flashtune.core.errors import TableError, UsageError
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, PeerTime, Record
from flashtune.core.target import find_target
from flashtune.db.eligibility import by_problem, serves_any_tensors
from flashtune.db.table import TunedTable, parse_table
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.cli import main
from flashtune.tuner.execution import timed_runs
from flashtune.tuner.tables import table_compare
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.table_compare import Change, Retimed, compare, losses, retime_losses
from flashtune.tuner.tables.table_receipts import sibling
from tests.support.records import shipped_table_of

# The kernel that replaced it took 1.5% longer in another run. No baseline computes the problem.
UNCOMPARED = ("forward_bf16_d128_h32x8_b16_q1_k8192_bottom_right_kv-e4m3-head", "not comparable")
# Records for any tensors that the shipped table did not take over: their verdicts name no probes.
NOT_TAKEN_OVER = [
    ("forward_bf16_d256_h32x8_b128_q128_k128_none", "lost"),
    ("forward_bf16_d256_h32x8_b2_q8192_k8192_none", "0.892"),
]
# The kernels of equal configs before and after a change of a template, timed in turn.
RENDERED_AGAIN = "nvidia-h200-rendered-again.json"
PREDECESSORS = sorted((Path(__file__).parents[2] / "data" / "tables").glob("*-predecessor.json.gz"))


def table_with(scale: float = 1.0, **changes: Any) -> TunedTable:
    """The first records of a shipped table, their times multiplied by a factor."""
    table = shipped_table_of("nvidia-h200")
    records = tuple(_scaled(record, scale) for record in table.records[:4])
    return msgspec.structs.replace(table, **{"records": records, **changes})


def _scaled(record: Record, scale: float) -> Record:
    assert record.measurement is not None
    times = {name: getattr(record.measurement, name) * scale for name in ("ms", "p20", "p80")}
    return msgspec.structs.replace(record, measurement=msgspec.structs.replace(record.measurement, **times))


def test_slower_clock_is_not_a_loss() -> None:
    table = table_with(1.1)
    records = []
    for record in table.records:
        assert record.measurement is not None
        peers = tuple(PeerTime(peer.name, peer.ms * 1.1) for peer in record.measurement.peers)
        measurement = msgspec.structs.replace(record.measurement, peers=peers)
        records.append(msgspec.structs.replace(record, measurement=measurement))
    changes = compare(table_with(), msgspec.structs.replace(table, records=tuple(records)))
    assert len(changes) == 4
    assert not losses(changes)


@pytest.mark.parametrize(("scale", "lost"), [(1.01, 0), (1.03, 4), (0.9, 0)])
def test_speed_relative_to_baselines_decides(scale: float, lost: int) -> None:
    assert len(losses(compare(table_with(), table_with(scale)))) == lost


def test_a_missing_problem_is_a_loss() -> None:
    table = table_with()
    (lost,) = losses(compare(table, msgspec.structs.replace(table, records=table.records[1:])))
    assert (lost.old, lost.new, lost.ratio) == (table.records[0], None, None)


def test_tables_of_two_gpus_are_refused() -> None:
    with pytest.raises(TableError, match="tables of one GPU"):
        compare(table_with(), table_with(target="nvidia-h100", records=()))


def test_repeated_timing_requires_the_gpu_of_the_table() -> None:
    with pytest.raises(UsageError, match="needs the table's GPU"):
        retime_losses(compare(table_with(), table_with(1.03)), table_with(target="nvidia-a100-80gb"))


@pytest.mark.parametrize("path", PREDECESSORS, ids=lambda path: path.name)
def test_shipped_selections_keep_the_speed_of_their_predecessors(path: Path) -> None:
    target = path.name.removesuffix("-predecessor.json.gz")
    shipped = shipped_table_of(target)
    before = parse_table(gzip.decompress(path.read_bytes()), path.name)
    changes = compare(before, shipped)
    assert len(changes) > 300
    timed = load(path.with_name(RENDERED_AGAIN), tuple[Retimed, ...]).rows
    again = {(retimed.problem, retimed.new): retimed for retimed in timed}
    assert all(retimed.new_ms <= 1.02 * retimed.old_ms for retimed in again.values())
    lost = [change for change in losses(changes) if not _keeps_its_config(change, again)]
    assert [(change.problem, change.words) for change in lost] == [UNCOMPARED, *NOT_TAKEN_OVER]
    assert all(serves_any_tensors(change.old) for change in lost[1:])


def _keeps_its_config(change: Change, again: dict[tuple[str, str], Retimed]) -> bool:
    """Whether a record has the same config, and its kernel was timed in turn with the old one.

    Such times are compared in place of baselines, which other processes may have disturbed.
    """
    old, new = change.old, change.new
    if new is None or (old.family, old.config) != (new.family, new.config):
        return False
    return (change.problem, str(new.kernel)) in again


def test_every_shipped_table_has_a_predecessor() -> None:
    assert [path.name for path in PREDECESSORS] == ["nvidia-h200-predecessor.json.gz"]


def test_the_command_names_losses_and_exits_with_1(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from flashtune.tuner.tables.table_files import json_table

    paths = tmp_path / "old.json", tmp_path / "new.json"
    for path, scale in zip(paths, (1.0, 1.05), strict=True):
        path.write_bytes(json_table("nvidia-h200", table_with(scale).records))
    done = CliRunner().invoke(main, ["db", "compare", *map(str, paths)])
    assert done.exit_code == 1
    assert "4 records differ; 4 problems lose more than 2%, 0 are lost or not comparable" in done.output
    assert "0.952" in done.output
    done = CliRunner().invoke(main, ["db", "compare", "--limit", "10", *map(str, paths)])
    assert done.exit_code == 0


def with_peers(record: Record, ms: float, **peers: float) -> Record:
    times = tuple(PeerTime(name.replace("_", "-"), time) for name, time in peers.items())
    return msgspec.structs.replace(record, measurement=Measurement(ms, ms, ms, 21, peers=times))


def test_only_common_baselines_are_compared() -> None:
    (record, *_) = table_with().records
    old = with_peers(record, 1.0, sdpa_cudnn=0.5, sdpa_flash=2.0)
    # The fastest peer was not timed again. The machine was as fast as before.
    new = with_peers(record, 1.1, sdpa_flash=2.0)
    (lost,) = losses([Change(record.problem.key, old, new)])
    assert lost.words == "0.909"
    # One of three peers was disturbed.
    many = {"sdpa_cudnn": 0.5, "sdpa_flash": 2.0, "unfused": 9.0}
    change = Change(
        record.problem.key,
        with_peers(record, 1.0, **many),
        with_peers(record, 1.0, **{**many, "sdpa_cudnn": 0.4}),
    )
    assert change.ratio == 1.0


@pytest.mark.parametrize("peers", [{}, {"sdpa_flash": 0.5}])
def test_change_without_common_baselines_is_a_loss(peers: dict[str, float]) -> None:
    (record, *_) = table_with().records
    change = Change(
        record.problem.key, with_peers(record, 1.0, sdpa_cudnn=0.5), with_peers(record, 0.5, **peers)
    )
    assert losses([change]) == (change,)
    assert change.words == "not comparable"


def test_a_record_with_the_same_measurement_is_as_fast() -> None:
    (record, *_) = table_with().records
    old = with_peers(record, 1.0)
    assert Change(record.problem.key, old, msgspec.structs.replace(old, kernel="0" * 32)).ratio == 1.0


def pair() -> tuple[Record, Record]:
    """The two records of a problem: for contiguous tensors, and for any. Their kernels render here."""
    table = shipped_table_of("nvidia-h200")
    configured = [record for record in table.records if record.config is not None]
    first, second = next(
        both
        for both in by_problem(configured).values()
        if len(both) == 2 and all(record.kernel == digest_of(record) for record in both)
    )
    return first, second


def table_of(*records: Record) -> TunedTable:
    return TunedTable(target="nvidia-h200", records=records)


def test_record_for_contiguous_tensors_is_compared_with_the_only_one() -> None:
    fast, sole = pair()
    assert sole.measurement is not None
    peers = {peer.name.replace("-", "_"): peer.ms for peer in sole.measurement.peers}
    slower = with_peers(fast, 1.1 * sole.measurement.ms, **peers)
    (lost,) = losses(compare(table_of(sole), table_of(slower, sole)))
    assert (lost.old, lost.new) == (sole, slower)
    assert compare(table_of(sole), table_of(sole)) == ()


def test_a_lost_record_for_any_tensors_is_a_loss() -> None:
    fast, other = pair()
    (lost,) = losses(compare(table_of(fast, other), table_of(fast)))
    assert (lost.old, lost.new) == (other, None)


class Finals:
    """A GPU that times candidates: the old one, then the new one."""

    def __init__(self, old_ms: float, new_ms: float) -> None:
        self.times = old_ms, new_ms
        self.timed: list[tuple[Candidate, ...]] = []

    def run(self, problem: Problem, candidates: tuple[Candidate, ...], *_: object) -> tuple[Measurement, ...]:
        self.timed.append(candidates)
        peers = (PeerTime("sdpa-cudnn", 0.7),)
        return tuple(Measurement(ms, ms, ms, 21, peers=peers) for ms in self.times)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Finals]:
    def use(old_ms: float, new_ms: float) -> Finals:
        made = Finals(old_ms, new_ms)
        monkeypatch.setattr(timed_runs, "run_finals", made.run)
        monkeypatch.setattr(
            table_compare, "_gpu", lambda table: (find_target(table.target), torch.device("cpu"))
        )
        return made

    return use


@pytest.mark.slow
@pytest.mark.parametrize(("old_ms", "new_ms"), [(0.8, 0.9), (0.9, 0.8)])
def test_faster_kernel_of_other_versions_keeps_its_own_time(
    on_gpu: Callable[..., Finals], old_ms: float, new_ms: float
) -> None:
    gpu = on_gpu(old_ms, new_ms)
    fast, other = pair()
    assert fast.config is not None
    config = msgspec.structs.replace(fast.config, num_stages=2 if fast.config.num_stages != 2 else 3)
    changed = msgspec.structs.replace(fast, config=config)
    changed = msgspec.structs.replace(with_peers(changed, 1.0), kernel=digest_of(changed))
    (change,) = losses(compare(table_of(fast, other), table_of(changed, other)))
    (row,), raw = retime_losses([change], table_of(changed, other))
    assert row == Retimed(fast.problem.key, str(fast.kernel), str(changed.kernel), old_ms, new_ms)
    assert gpu.timed == [(Candidate(fast.family, fast.config), Candidate(changed.family, config))]
    table = parse_table(raw, "here")
    faster = fast if old_ms < new_ms else changed
    assert set(table.records) == {faster, other}


def test_record_of_current_versions_takes_its_new_time(on_gpu: Callable[..., Finals]) -> None:
    on_gpu(0.9, 0.8)
    (fast, other) = (
        msgspec.structs.replace(record, versions=current_versions(record.family)) for record in pair()
    )
    new = with_peers(fast, 1.0)
    _, raw = retime_losses([Change(fast.problem.key, fast, new)], table_of(new, other))
    table = parse_table(raw, "here")
    (timed,) = (record for record in table.records if record != other)
    assert timed.ms == 0.8
    assert timed.measurement is not None
    assert timed.measurement.peers == (PeerTime("sdpa-cudnn", 0.7),)
    assert timed.versions == fast.versions


@pytest.mark.parametrize("kind", ["stale kernel", "another specialization"])
def test_time_of_another_kernel_is_not_used(on_gpu: Callable[..., Finals], kind: str) -> None:
    on_gpu(0.8, 0.9)
    fast, other = pair()
    if kind == "stale kernel":
        versions = msgspec.structs.replace(fast.versions, template="0" * 32)
        old = msgspec.structs.replace(fast, kernel="0" * 32, versions=versions)
    else:
        old = msgspec.structs.replace(fast, specialization=sibling(fast))
        old = msgspec.structs.replace(old, kernel=digest_of(old))
    new = with_peers(fast, 1.0)
    _, raw = retime_losses([Change(fast.problem.key, old, new)], table_of(new, other))
    assert set(parse_table(raw, "here").records) == {old, other}


def test_slower_contiguous_record_does_not_replace_the_only_one(on_gpu: Callable[..., Finals]) -> None:
    on_gpu(0.8, 0.9)
    fast, sole = pair()
    slower = with_peers(fast, 99.0)
    (lost,) = losses(compare(table_of(sole), table_of(slower, sole)))
    _, raw = retime_losses([lost], table_of(slower, sole))
    assert parse_table(raw, "here").records == (sole,)


def test_timing_is_skipped_without_comparisons() -> None:
    table = table_with()
    assert retime_losses((), table)[0] == ()
    lost = compare(table, msgspec.structs.replace(table, records=table.records[1:]))
    rows, raw = retime_losses(lost, msgspec.structs.replace(table, records=table.records[1:]))
    assert rows == ()
    assert set(parse_table(raw, "here").records) == set(table.records)


def test_baselines_are_not_timed_again(on_gpu: Callable[..., Finals]) -> None:
    on_gpu(0.8, 0.9)
    fast, _ = pair()
    baseline = msgspec.structs.replace(fast, family="unfused", config=None, kernel=None)
    with pytest.raises(UsageError, match="a baseline serves"):
        retime_losses([Change(fast.problem.key, baseline, fast)], table_of(fast))
