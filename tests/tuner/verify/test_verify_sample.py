"""`flashtune verify --sample`: one kernel of each class."""

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from flashtune import testing
from flashtune.core.problem import Bias, Causal, Dtype
from flashtune.core.record import Record
from flashtune.tuner.cli import main
from flashtune.tuner.tables.lookup import shipped_selections
from flashtune.tuner.verify import record_checks
from flashtune.tuner.verify.record_checks import Report, sample
from tests.support.records import DIGEST, make_record, write_table

PROBLEM = testing.problem("heads=4,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16")
PLAIN = make_record(PROBLEM, kernel=DIGEST)


def record_of(family: str = "forward_q_outer", **changes: Any) -> Record:
    problem = msgspec.structs.replace(PROBLEM, **changes)
    return msgspec.structs.replace(PLAIN, problem=problem, family=family)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "forward_masked"},
        {"dtype": Dtype.FP16},
        {"head_dim": 128},
        {"value_head_dim": 128},
        {"causal": Causal.BOTTOM_RIGHT},
        {"window_left": 7},
        {"bias": Bias.ADDITIVE},
    ],
)
def test_records_of_different_classes_are_sampled(changes: dict[str, Any]) -> None:
    records = (record_of(), record_of(**changes))

    assert sample(records) == records


def test_records_of_two_gpus_are_sampled() -> None:
    records = (PLAIN, msgspec.structs.replace(PLAIN, target="nvidia-a100"))

    assert sample(records) == records


def test_one_record_of_a_class_is_sampled_in_any_order() -> None:
    alike = [record_of(), record_of(heads=8), record_of(seqlen_q=64, seqlen_kv=64), record_of(batch=3)]
    first = min(alike, key=lambda record: record.problem.key)

    assert {sample(order) for order in permutations(alike)} == {(first,)}


def test_records_without_a_config_are_sampled() -> None:
    baselines = tuple(
        msgspec.structs.replace(record_of("unfused", batch=batch), config=None) for batch in (1, 2)
    )

    assert sample((*baselines, PLAIN)) == (*baselines, PLAIN)


def test_every_class_of_the_shipped_tables_is_in_their_sample() -> None:
    records = [entry.record for entry in shipped_selections()]

    def classes(of: tuple[Record, ...] | list[Record]) -> set[object]:
        return {(r.family, r.problem.dtype, r.problem.head_dim, r.problem.causal) for r in of}

    chosen = sample(records)
    assert classes(chosen) == classes(records)
    assert len(chosen) < len(records) / 3


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "table.json", record_of(), record_of(heads=8), record_of(dtype=Dtype.FP16))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the problems that a command verified; nothing is compiled."""
    keys: list[str] = []

    def verify_records(records: tuple[Record, ...], **options: Any) -> Report:
        keys.extend(record.problem.key for record in records)
        return Report((), 0)

    monkeypatch.setattr(record_checks, "verify_records", verify_records)
    return keys


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["verify", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_checks_one_of_each_class_on_request(table: Path, checked: list[str]) -> None:
    shown = run("--table", str(table), "--sample")

    assert checked == [record_of().problem.key, record_of(dtype=Dtype.FP16).problem.key]
    assert "1 more kernels were left out" in shown

    assert json.loads(run("--table", str(table), "--json"))["left_out"] == 0
    assert len(checked) == 2 + 3
