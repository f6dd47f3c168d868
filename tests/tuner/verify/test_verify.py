"""Tests of `flashtune verify` without a GPU: compilation, size, interpretation and receipts."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from flashtune import testing
from flashtune.core.errors import MachineError, VerificationError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Dtype
from flashtune.core.record import Provenance, Record, Verdict
from flashtune.core.target import find_target
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import find_family, template_hash
from flashtune.templates.rendering import render
from flashtune.tuner.cli import main
from flashtune.tuner.tables.admission import Receipt, digest_of
from flashtune.tuner.tables.lookup import shipped_selections
from flashtune.tuner.verify import record_checks, verify_jobs
from flashtune.tuner.verify.record_checks import CheckMethod, Report, Result, verify_records
from flashtune.tuner.verify.verify_jobs import Runs
from flashtune.verification.probes import EVERY_LEVEL
from tests.support import records
from tests.support.jobs import FakePool
from tests.support.records import write_table

FAMILY = find_family("forward_q_outer")
TARGET = find_target("h200")
CONFIG = "block_m=64,block_n=32,num_warps=4,num_stages=2"
GOOD = Verdict(True, 0.6, 300, "", "NVIDIA H200", probes=tuple(EVERY_LEVEL))


def make_record(seqlen: int = 512, **changes: Any) -> Record:
    problem = testing.problem("heads=4,kv_heads=2,seqlen=1,head_dim=64,dtype=bf16", seqlen=seqlen)
    versions = msgspec.structs.replace(current_versions(FAMILY.name), triton="3.6.0", driver="580.1")
    fields: dict[str, Any] = {
        "problem": problem,
        "config": CONFIG,
        "verdict": GOOD,
        "versions": versions,
    } | changes
    return records.make_record(**fields)


def only_result(record: Record, **options: Any) -> Result:
    (result,) = verify_records([record], gpu=None, **options).results
    return result


@pytest.mark.slow
def test_table_is_compiled_checked_for_size_and_interpreted() -> None:
    too_large = "block_m=128,block_n=256,num_warps=8,num_stages=8"
    seen: set[str] = set()
    report = verify_records(
        [make_record(64), make_record(128), make_record(256, config=too_large)],
        gpu=None,
        runs=Runs(progress=lambda phase, done, total: seen.add(phase)),
    )
    good, alike, large = report.results
    assert not good.failed
    assert not alike.failed
    assert good.method is alike.method is CheckMethod.INTERPRETER
    assert good.receipt is not None
    assert good.receipt.triton == "3.6.0"
    assert "SRAM" in large.failed or "compile" in large.failed
    assert seen == {"compiling", "under the interpreter"}


class Jobs(Runs):
    """Runs no jobs, but records them by function. All pass, except those of one function."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.done: dict[str, list[tuple[Any, ...]]] = {}
        self._fails = fails

    def run(
        self, phase: str, start: object, function: Any, jobs: Any, seconds: float, devices: object = ()
    ) -> dict[Any, tuple[str, Any]]:
        name = function.__name__
        self.done[name] = list(jobs.values())
        passed = {"why_not_compiled": "", "check_interpreted": GOOD}[name]
        return dict.fromkeys(jobs, ("it failed" if name == self._fails else "", passed))


def current(record: Record) -> Record:
    """A record whose receipt is of the installed template."""
    versions = msgspec.structs.replace(record.versions, template=template_hash(record.family))
    return msgspec.structs.replace(record, kernel=digest_of(record), versions=versions)


@pytest.mark.slow
def test_kernels_of_every_family_are_compiled_and_interpreted() -> None:
    records = {row.record.family: row.record for row in shipped_selections() if row.record.config}
    by_family = {family: current(record) for family, record in records.items()}
    jobs = Jobs()
    report = verify_records(by_family.values(), gpu=None, runs=jobs)
    assert [result.failed for result in report.results] == [""] * len(by_family)
    compiled = {(kernel.digest, target.name) for kernel, target in jobs.done["why_not_compiled"]}
    assert compiled == {(record.kernel, record.target) for record in by_family.values()}
    interpreted = {task.family for (task,) in jobs.done["check_interpreted"]}
    assert interpreted == {name for name in by_family if find_family(name).interpreted}
    for fails, failed in (("why_not_compiled", set(by_family)), ("check_interpreted", interpreted)):
        report = verify_records(by_family.values(), gpu=None, runs=Jobs(fails))
        assert {result.family for result in report.results if result.failed} == failed


def test_every_kernel_of_a_launch_must_compile_and_fit() -> None:
    family = find_family("backward_split")
    problem = testing.problem("heads=4,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal,backward")
    kernel = render(family, problem, family.default(problem, TARGET), Specialization())
    assert verify_jobs.why_not_compiled(kernel, TARGET) == ""
    tight = msgspec.structs.replace(TARGET, sram_per_block=1024)
    assert "of SRAM" in verify_jobs.why_not_compiled(kernel, tight)
    assert kernel.epilogue is not None
    lost = msgspec.structs.replace(kernel.epilogue, arguments=())
    broken = msgspec.structs.replace(kernel, epilogue=lost)
    assert "does not compile" in verify_jobs.why_not_compiled(broken, TARGET)


@pytest.mark.usefixtures("quick_jobs")
def test_valid_receipt_passes() -> None:
    record = make_record()
    result = only_result(record)
    assert (result.failed, result.method) == ("", CheckMethod.INTERPRETER)
    versions = current_versions(FAMILY.name)
    assert result.receipt == Receipt(
        "NVIDIA H200",
        "580.1",
        "3.6.0",
        versions.ptxas,
        versions.torch,
        record.kernel or "",
        0.6,
        300,
        tuple(EVERY_LEVEL),
    )


@pytest.mark.usefixtures("quick_jobs")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verdict": None}, "no receipt"),
        ({"verdict": msgspec.structs.replace(GOOD, device="interpreter")}, "no receipt"),
        ({"verdict": msgspec.structs.replace(GOOD, passed=False, failed="needle")}, "needle"),
        ({"kernel": "0" * 32}, "stale"),
        ({"versions": msgspec.structs.replace(current_versions(FAMILY.name), template="0" * 32)}, "stale"),
        ({"target": "nvidia-h2000"}, "there is no target"),
        ({"family": "forward_none"}, "no kernel family"),
    ],
)
def test_missing_and_stale_receipts_fail(changes: dict[str, Any], words: str) -> None:
    assert words in only_result(msgspec.structs.replace(make_record(), **changes)).failed


@pytest.mark.usefixtures("quick_jobs")
def test_kernels_without_a_gpu_fail_on_request() -> None:
    assert "not compared" in only_result(make_record(), require_gpu=True).failed


@pytest.mark.usefixtures("quick_jobs")
def test_interpreted_predictions_need_no_receipt() -> None:
    record = make_record(verdict=None, provenance=Provenance.PREDICTED)
    assert not only_result(record).failed


@pytest.mark.usefixtures("quick_jobs")
def test_baselines_are_counted_but_not_checked() -> None:
    report = verify_records([make_record(family="unfused")], gpu=None)
    assert report == Report((), 1)


@pytest.fixture
def native_family(quick_jobs: FakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(FAMILY), "interpreted", False)


@pytest.mark.usefixtures("native_family")
def test_native_kernels_pass_by_receipt() -> None:
    assert only_result(make_record()).method is CheckMethod.RECEIPT
    for changes, words in (
        ({"verdict": None}, "no receipt"),
        ({"kernel": "0" * 32}, "stale receipt"),
        ({"specialization": Specialization(lse=True)}, "stale receipt"),
    ):
        result = only_result(msgspec.structs.replace(make_record(), **changes))
        assert (result.method, result.receipt) == (CheckMethod.NONE, None)
        assert words in result.failed


@pytest.mark.usefixtures("native_family")
def test_unverified_kernels_pass_if_allowed() -> None:
    for verdict in (None, msgspec.structs.replace(GOOD, device="interpreter")):
        record = make_record(verdict=verdict, provenance=Provenance.PREDICTED)
        assert "no receipt" in only_result(record).failed
        result = only_result(record, allow_unproven=True)
        assert (result.method, result.failed, result.receipt) == (CheckMethod.NONE, "", None)
    stale = make_record(versions=msgspec.structs.replace(current_versions(FAMILY.name), template="0" * 32))
    assert "stale receipt" in only_result(stale).failed
    assert only_result(stale, allow_unproven=True).failed == ""
    # Receipts of a GPU are still checked.
    elsewhere = msgspec.structs.replace(GOOD, device="NVIDIA A100-SXM4-80GB")
    for changes, words in (
        ({"verdict": Verdict(False, 2.0, 3, "needle", "NVIDIA H200")}, "receipt of failure"),
        ({"kernel": "0" * 32}, "stale receipt"),
        ({"verdict": elsewhere, "versions": stale.versions}, "receipt of another GPU"),
    ):
        assert words in only_result(make_record(**changes), allow_unproven=True).failed


@pytest.mark.usefixtures("native_family")
def test_option_allows_unverified_kernels(table: Callable[..., Path]) -> None:
    path = str(table(make_record(verdict=None, provenance=Provenance.PREDICTED)))
    assert CliRunner().invoke(main, ["verify", "--table", path]).exit_code == 1
    result = CliRunner().invoke(main, ["verify", "--table", path, "--allow-unproven", "--verbose"])
    assert result.exit_code == 0, result.output
    assert "by receipt alone and 1 not at all; 0 failed" in result.stdout
    assert "passed (none)" in result.stderr
    both = CliRunner().invoke(main, ["verify", "--table", path, "--allow-unproven", "--require-gpu"])
    assert both.exit_code == 2


def test_failures_of_the_interpreter_fail(quick_jobs: FakePool) -> None:
    failed = Verdict(False, 2.0, 9, "needle 7", "interpreter")
    quick_jobs.replaced[verify_jobs.check_interpreted] = lambda _: failed
    assert only_result(make_record()).failed == "needle 7"


def test_kernels_equal_under_the_interpreter_are_interpreted_once() -> None:
    def source(record: Record) -> object:
        subject = record_checks._subject(record)
        assert not isinstance(subject, str)
        return record_checks._source(subject)

    record = make_record()
    assert record.config is not None
    stages = msgspec.structs.replace(record.config, num_stages=3)
    half = msgspec.structs.replace(record.problem, dtype=Dtype.FP16, heads=32, batch=8)
    tile = msgspec.structs.replace(record.config, block_n=64)
    assert source(record) == source(make_record(config=stages)) == source(make_record(problem=half))
    assert source(record) != source(make_record(config=tile))


def test_kernels_that_start_early_are_interpreted_without_a_wait() -> None:
    decode = find_family("decode_split_kv")
    problem = msgspec.structs.replace(make_record().problem, seqlen_q=1, seqlen_kv=4096)
    config = "num_splits=4,early_combine=True,early_start=True"
    record = make_record(problem=problem, family=decode.name, config=config)
    assert record.config is not None
    assert "gdc_wait" in render(decode, problem, record.config, Specialization()).source
    subject = record_checks._subject(record)
    assert isinstance(subject, verify_jobs.Subject)
    task = record_checks._task(subject)
    assert "gdc_wait" not in render(decode, task.problem, task.config, task.specialization).source


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_table, tmp_path / "table.json")


@pytest.mark.usefixtures("quick_jobs")
def test_command_prints_counts_and_fails_by_exit_code(table: Callable[..., Path]) -> None:
    path = table(make_record(512), make_record(1024, kernel="0" * 32))
    result = CliRunner().invoke(main, ["verify", "--table", str(path)])
    assert result.exit_code == 1
    printed = " ".join(result.stdout.split())
    assert "of 2 selected kernels 1 were checked here (0 on the GPU, 1 under" in printed
    assert "0 by receipt alone and 1 not at all; 1 failed" in printed
    assert "1 of 2 have a receipt: NVIDIA H200, driver 580.1, Triton 3.6.0, ptxas " in printed
    assert "stale receipt" in printed
    assert "1 of 2 kernels failed" in result.stderr


@pytest.mark.usefixtures("quick_jobs")
def test_command_prints_json(table: Callable[..., Path]) -> None:
    result = CliRunner().invoke(main, ["verify", "--table", str(table(make_record())), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    counts = [report[name] for name in ("kernels", "gpu", "interpreter", "receipt", "none", "failed")]
    assert counts == [1, 0, 1, 0, 0, 0]
    assert report["results"][0]["receipt"]["triton"] == "3.6.0"
    assert report["results"][0]["receipt"]["worst_ratio"] == 0.6


def test_interpreter_processes_require_triton_interpret() -> None:
    subject = record_checks._subject(make_record())
    assert not isinstance(subject, str)
    with pytest.raises(VerificationError, match="in its own process"):
        verify_jobs.check_interpreted(record_checks._task(subject))


def test_failed_start_of_workers_is_held_so_that_results_can_be_stored() -> None:
    def start() -> Any:
        raise MachineError("no process can be started")

    runs = Runs(hold_errors=True)
    assert runs.run("checking", start, print, {"job": ()}, 1.0) == {}
    assert isinstance(runs.error, MachineError)
    assert runs.ended
    with pytest.raises(MachineError, match="no process can be started"):
        Runs().run("checking", start, print, {"job": ()}, 1.0)
