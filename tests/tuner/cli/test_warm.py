"""Tests of `flashtune warm`: kernels are compiled ahead, and later processes find them."""

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Bias, Problem
from flashtune.core.record import Outcome, Record, Resources
from flashtune.core.target import find_target
from flashtune.db.table import TunedTable, dump_table
from flashtune.dispatch.tables import tuned_records
from flashtune.launch.bundles import Located
from flashtune.recording.recorder import CallCount, add_counts
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled, CompilePool
from flashtune.tuner.tables.warm import calls_of, needs_of, warm
from flashtune.tuner.workloads.models import training_passes
from tests.bundle.conftest import make_entry
from tests.tuner.cli.conftest import Run

# No table ships for it.
A100 = find_target("a100")


@pytest.fixture
def compiled() -> list[Compiled]:
    """The report of fake compilers: success."""
    return [Compiled(Outcome.OK, None, Resources(1024, compile_seconds=1.5))]


@pytest.fixture
def submitted(
    monkeypatch: pytest.MonkeyPatch, compiled: list[Compiled]
) -> list[tuple[SearchTask, Candidate]]:
    """The jobs of fake compilers."""
    jobs: list[tuple[SearchTask, Candidate]] = []

    def submit(_: CompilePool, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        jobs.append((scope, candidate))
        done: Future[Compiled] = Future()
        done.set_result(compiled[0])
        return done

    monkeypatch.setattr(CompilePool, "submit", submit)
    return jobs


def test_warm_for_training_compiles_lse_and_backward_kernels(problem: Problem) -> None:
    calls = calls_of(training_passes([problem]))
    asked = [(called.direction.value, assumed.lse) for called, assumed in calls]
    assert asked == [("forward", False), ("backward", False), ("forward", True)]
    needs = needs_of(calls, A100, tuned_records(A100.name))
    assert [need.kernel.specialization.lse for need in needs.kernels.values()] == [False, False, True]
    assert not needs.left_out


def test_warm_for_training_compiles_backward_kernels_of_trained_and_constant_biases(problem: Problem) -> None:
    biased = msgspec.structs.replace(problem, bias=Bias.ADDITIVE)
    calls = [called for called in calls_of(training_passes([biased])) if called[0].is_backward]
    assert [assumed.constant_bias for _, assumed in calls] == [msgspec.UNSET, True]
    needs = needs_of(calls, A100, tuned_records(A100.name))
    assert [need.kernel.writes("dbias") for need in needs.kernels.values()] == [True, False]


def test_calls_with_one_kernel_compile_it_once(problem: Problem) -> None:
    wider = msgspec.structs.replace(problem, batch=problem.batch * 2)
    impossible = msgspec.structs.replace(problem, head_dim=512, value_head_dim=512)
    needs = needs_of(calls_of([problem, wider, impossible]), A100, tuned_records(A100.name))
    assert len(needs.kernels) == 1
    (sentence,) = needs.left_out
    assert "no kernel family computes" in sentence


@pytest.mark.usefixtures("submitted")
def test_command_prints_a_summary(run: Run, shape: str) -> None:
    result = run("warm", "--target", "a100", "--shape", shape, "--phase", "training", "--verbose")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 of 3 kernels are compiled for nvidia-a100, for 3 kinds of calls, in ")
    assert result.stderr.count("compiled in 1.5 s") == 3
    rows = json.loads(run("warm", "--target", "a100", "--shape", shape, "--json").stdout)
    assert [(row["lse"], row["loaded"], row["failed"]) for row in rows] == [(False, False, "")]


def test_warm_of_a_table_uses_its_kernels(
    run: Run,
    make_record: Callable[..., Record],
    submitted: list[tuple[SearchTask, Candidate]],
    tmp_path: Path,
) -> None:
    record = make_record("block_m=64,block_n=32", of=msgspec.structs.replace(make_record().problem, batch=7))
    path = tmp_path / "h200.json"
    path.write_bytes(dump_table(TunedTable(target="nvidia-h200", records=(record,))))
    result = run("warm", "--target", "h200", "--table", path)
    assert result.exit_code == 0, result.output
    assert record.config is not None
    assert submitted[0][1] == Candidate(record.family, record.config)
    other = run("warm", "--target", "a100", "--table", path)
    assert other.exit_code == 2
    assert "a table of nvidia-h200 cannot be warmed for nvidia-a100" in other.stderr


def test_warm_of_recorded_calls_uses_their_specialization(
    run: Run, problem: Problem, submitted: list[tuple[SearchTask, Candidate]], tmp_path: Path
) -> None:
    assumed = Specialization(alignment=Alignment.EIGHT, lse=True)
    recorded = tmp_path / "calls.jsonl"
    add_counts(recorded, [CallCount(problem, assumed, 3)])
    result = run("warm", "--target", "a100", "--from", recorded)
    assert result.exit_code == 0, result.output
    assert [scope.specialization for scope, _ in submitted] == [assumed]


@pytest.mark.slow
@pytest.mark.usefixtures("submitted")
def test_compile_failure_is_an_error(run: Run, shape: str, compiled: list[Compiled]) -> None:
    compiled[0] = Compiled(Outcome.COMPILE_ERROR, message="PassManager::run failed")
    result = run("warm", "--target", "a100", "--shape", shape)
    assert result.exit_code == 1
    assert "0 of 1 kernels are compiled" in result.stdout
    assert "1 kernels cannot serve" in result.stderr
    assert "PassManager::run failed" in result.stderr


def test_calls_of_no_family_are_an_error(run: Run) -> None:
    shape = "heads=1,seqlen=16,head_dim=512"
    result = run("warm", "--target", "a100", "--shape", shape)
    assert result.exit_code == 1
    assert "no kernel family computes any of these calls" in result.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_later_process_does_not_compile(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that cannot even begin finds the binary."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    # A process of its own: compilers here may have begun with another cache.
    arguments = f"-m flashtune.tuner.cli warm --target a100 --json --shape {shape}"
    command = [sys.executable, *arguments.split()]
    warmed = subprocess.run(command, capture_output=True, text=True)
    assert warmed.returncode == 0, warmed.stderr
    (row,) = json.loads(warmed.stdout)
    assert row["failed"] == ""
    code = (
        "import sys\n"
        "from triton.compiler import ASTSource\n"
        "from flashtune.launch.binding import compile_binary\n"
        "from flashtune.dispatch.tables import tuned_records\n"
        "from flashtune.core.target import find_target\n"
        "from flashtune.tuner.workloads.shapes import parse_shape\n"
        "from flashtune.tuner.tables.warm import calls_of, needs_of\n"
        "def refuse(*_): raise RuntimeError('compiles')\n"
        "ASTSource.make_ir = refuse\n"
        "target = find_target('a100')\n"
        "for shape in sys.argv[1:]:\n"
        "    needs = needs_of(calls_of(parse_shape(shape)), target, tuned_records(target.name))\n"
        "    for digest, need in needs.kernels.items():\n"
        "        compile_binary(need.kernel, target)\n"
        "        print(digest, flush=True)\n"
    )
    # Another shape's kernel is not there, and compiling it is seen.
    other = shape.replace("head_dim=64", "head_dim=32")
    done = subprocess.run([sys.executable, "-c", code, shape, other], capture_output=True, text=True)
    assert done.stdout.split() == [row["kernel"]], done.stderr
    assert "RuntimeError: compiles" in done.stderr


def test_kernels_of_bundles_are_not_compiled(
    problem: Problem, submitted: list[tuple[SearchTask, Candidate]]
) -> None:
    entry, _ = make_entry(1, b"code")
    located = Located(entry, SimpleNamespace(where="some.bundle"))  # type: ignore[arg-type]
    bundles: Any = SimpleNamespace(
        of=lambda target: [located.bundle],
        find=lambda record, assumed, target: None if assumed.lse else located,
    )
    calls = [(problem, Specialization(lse=lse)) for lse in (False, True)]
    needs = needs_of(calls, A100, tuned_records(A100.name), bundles)
    results = warm(needs, A100, ())
    assert [(result.bundle, result.seconds) for result in results] == [("some.bundle", 0.0), ("", 1.5)]
    assert results[0].kernel == entry.kernel
    assert [scope.specialization.lse for scope, _ in submitted] == [True]
