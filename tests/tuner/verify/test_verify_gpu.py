"""Tests of `flashtune verify` on a fake GPU: checked, timed, skipped and written records."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from flashtune import testing
from flashtune.core.errors import KernelError, MachineError
from flashtune.core.kernel import Kernel
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.record import Measurement, PeerTime, Record, Resources, SharedTime, Verdict
from flashtune.core.target import Target, find_target
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable, load_table
from flashtune.dispatch.masked_sdpa import timed_ways
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.cli import main
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.table_receipts import sibling
from flashtune.tuner.verify import on_gpu, record_checks, verify_jobs
from flashtune.tuner.verify.verify_jobs import Runs
from flashtune.verification import check, passes
from flashtune.verification.cases import Level
from flashtune.verification.check import full_probes
from tests.support.jobs import FakePool
from tests.support.records import shipped_table_of, write_table
from tests.tuner.conftest import GpuMemory

TARGET = find_target("h200")
MEASURED = Measurement(0.25, 0.24, 0.26, 25)
PEER = PeerTime("sdpa-cudnn", 0.3)
SHARED = (SharedTime(MaskSharing.HEADS, 0.2, (PEER,)),)
READ = Resources(sram_bytes=1024, registers=99)


def record_of(family: str) -> Record:
    """The first shipped record of a family, with versions older than the current ones."""
    table = shipped_table_of(TARGET.name)
    return next(record for record in table.records if record.family == family)


def kernel_of(record: Record, *, of_sibling: bool = False) -> Kernel:
    assert record.config is not None
    specialization = sibling(record) if of_sibling else record.specialization
    return render(find_family(record.family), record.problem, record.config, specialization)


class Machine(FakePool):
    """Worker processes and a GPU that note their jobs.

    Attributes:
        checked: Whether the kernel of each check writes the log-sum-exp.
        timed: The records that were timed.
        failing: A kernel's digest, and why it fails.
        at_check: Called at each check.
        unfit: Why a search would not launch changed kernels, empty if it would.
        workers: The number of processes that may check kernels at once.
        hangs_after: The number of checks after which one never ends.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                verify_jobs.why_not_compiled: lambda *_: "",
                verify_jobs.check_on_gpu: self.check,
                verify_jobs.time_on_gpu: self.time,
                verify_jobs.read_compiled: self.read,
            }
        )
        self.checked: list[bool] = []
        self.timed: list[str] = []
        self.failing: dict[str, str] = {}
        self.at_check: Callable[[], None] = lambda: None
        self.unfit = ""
        self.workers = 1
        self.hangs_after: int | None = None

    def schedule(self, function: Callable[..., Any], args: Any = (), timeout: float = 0.0) -> Future[Any]:
        if function == verify_jobs.check_on_gpu and len(self.checked) == self.hangs_after:
            return Future()
        return super().schedule(function, args, timeout)

    def check(self, kernel: Kernel, record: Record, index: int) -> Check:
        self.at_check()
        assert index == 0
        assert record.config is not None
        self.checked.append(kernel.specialization.lse)
        failed = self.failing.get(kernel.digest, "")
        if failed == "crash":
            raise KernelError("launch failed")
        verdict = Verdict(not failed, 0.5, 100, failed, "NVIDIA H200")
        if not failed:
            probes = tuple(sorted(full_probes(kernel, record.problem, record.config, TARGET)))
            verdict = msgspec.structs.replace(verdict, probes=probes)
        versions = current_versions(record.family)
        return Check(digest=kernel.digest, target=TARGET.name, versions=versions, verdict=verdict)

    def read(self, kernel: Kernel, target: Target) -> Resources:
        if self.unfit:
            raise KernelError(self.unfit)
        return READ

    def time(self, record: Record, index: int) -> Measurement:
        assert index == 0
        self.timed.append(record.problem.key)
        shared = SHARED if timed_ways(record.problem) else msgspec.UNSET
        return msgspec.structs.replace(MEASURED, peers=(PEER,), shared=shared)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Machine]:
    made = Machine().use(monkeypatch, record_checks, on_gpu)
    monkeypatch.setattr(on_gpu, "_workers", lambda index: made.workers)
    monkeypatch.setenv("FLASHTUNE_DB", str(tmp_path / "flashtune.sqlite"))
    with testing.fake_gpu(TARGET.name):
        yield made


@pytest.fixture
def record() -> Record:
    return record_of("forward_q_outer")


@pytest.fixture
def paths(record: Record, tmp_path: Path) -> tuple[Path, Path]:
    """A table of one record, and a file to write."""
    return write_table(tmp_path / "table.json", record), tmp_path / "written.json"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["verify", *map(str, arguments)])


def verified(folder: Path, *records: Record, options: tuple[str, ...] = ()) -> TunedTable:
    """Verifies a table of records, and returns the written one."""
    path, written = write_table(folder / "table.json", *records), folder / "written.json"
    done = run("--table", path, "--write", written, *options)
    assert done.exit_code == 0, done.output
    return load_table(written)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The checks of a process, each with its kernel and its level, and other steps in between."""
    noted: list[Any] = []

    def checked(kernel: Kernel, problem: object, config: object, *rest: Any, **_: object) -> Verdict:
        noted.append((kernel, rest[2] if len(rest) > 2 else Level.FULL))
        return Verdict(True, 0.5, 100, "", "NVIDIA H200", probes=("random",))

    monkeypatch.setattr(check, "check_rendered", checked)
    with testing.fake_gpu(TARGET.name):
        yield noted


@pytest.mark.parametrize(("family", "delays"), [("forward_hopper", True), ("forward_q_outer", False)])
def test_sibling_is_checked_like_the_kernel_of_the_record(
    steps: list[Any], family: str, delays: bool
) -> None:
    record = record_of(family)
    for of_sibling in (False, True):
        kernel = kernel_of(record, of_sibling=of_sibling)
        made = verify_jobs.check_on_gpu(kernel, record, 0)
        assert (made.digest, made.verdict.passed) == (kernel.digest, True)
        assert made.verdict.probes == (("random", "delays") if delays else ("random",))
    seen = [(kernel.specialization.lse, level, "fall_behind()" in kernel.source) for kernel, level in steps]
    late = [True] if delays else []
    assert sorted(seen) == [
        (lse, Level.FULL, with_delays) for lse in (False, True) for with_delays in (False, *late)
    ]


@pytest.mark.parametrize(("reserved", "dropped"), [(2**30, False), (2**33, True)])
def test_process_frees_memory_before_its_next_check(
    monkeypatch: pytest.MonkeyPatch,
    steps: list[Any],
    gpu_memory: GpuMemory,
    record: Record,
    reserved: int,
    dropped: bool,
) -> None:
    gpu_memory.reserved, gpu_memory.release.side_effect = reserved, lambda: steps.append("empty")
    monkeypatch.setattr(passes, "forget", lambda: steps.append("forget"))
    kernel = kernel_of(record)
    verify_jobs.check_on_gpu(kernel, record, 0)
    assert steps == [*(["forget", "empty"] if dropped else []), (kernel, Level.FULL)]


def test_kernels_of_checks_are_compiled_on_all_cores(machine: Machine) -> None:
    compiled: list[tuple[bool, bool]] = []

    def compile_(kernel: Kernel, target: object) -> str:
        compiled.append((kernel.specialization.lse, "fall_behind()" in kernel.source))
        return ""

    machine.replaced[verify_jobs.why_not_compiled] = compile_
    report = record_checks.verify_records([record_of("forward_hopper")], gpu=((0,), TARGET))
    assert not report.failures
    assert sorted(compiled) == [(False, False), (False, True), (True, False), (True, True)]


@pytest.mark.parametrize(("why", "words"), [("needle 7", "needle 7"), ("crash", "launch failed")])
def test_failing_sibling_is_reported(
    machine: Machine, record: Record, paths: tuple[Path, Path], why: str, words: str
) -> None:
    machine.failing[kernel_of(record, of_sibling=True).digest] = why
    done = run("--table", paths[0], "--write", paths[1])
    assert done.exit_code == 1
    assert f"its sibling with lse: {words}" in " ".join(done.output.split())
    written = load_table(paths[1])
    assert [receipt.digest for receipt in written.receipts] == [kernel_of(record).digest]


def test_check_that_ran_out_of_memory_is_repeated_alone(machine: Machine, record: Record) -> None:
    machine.workers = 8
    full = iter([True, False])

    def lack() -> None:
        if machine.starts[-1] > 1 and next(full):
            raise KernelError("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")

    machine.at_check = lack
    report = record_checks.verify_records([record], gpu=((0,), TARGET))
    assert not report.failures
    assert len(report.on_gpu.receipts) == 2
    assert machine.starts[-2:] == [8, 1]


def test_check_that_runs_out_of_memory_alone_fails(machine: Machine, record: Record) -> None:
    def lack() -> None:
        raise KernelError("OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")

    machine.at_check = lack
    (result,) = record_checks.verify_records([record], gpu=((0,), TARGET)).results
    assert "out of memory" in result.failed


def test_a_kernel_that_fails_loses_its_earlier_receipt(
    machine: Machine, record: Record, paths: tuple[Path, Path]
) -> None:
    assert run("--table", paths[0], "--write", paths[1]).exit_code == 0
    machine.failing[kernel_of(record).digest] = "needle 7"
    assert run("--table", paths[1], "--write", paths[1]).exit_code == 1
    siblings = [kernel_of(record, of_sibling=True).digest]
    assert [receipt.digest for receipt in load_table(paths[1]).receipts] == siblings


def test_a_kernel_that_fails_at_one_shape_has_no_receipt(machine: Machine, record: Record) -> None:
    longer = msgspec.structs.replace(record.problem, batch=2 * record.problem.batch)
    other = msgspec.structs.replace(record, problem=longer)
    results = iter(["", "", "needle 7", ""])
    failing = kernel_of(record).digest
    machine.at_check = lambda: machine.failing.update({failing: next(results)})
    report = record_checks.verify_records([record, other], gpu=((0,), TARGET))
    assert [result.failed for result in report.results] == ["", "needle 7"]
    assert [check.digest for check in report.on_gpu.receipts] == [kernel_of(record, of_sibling=True).digest]


def test_timed_record_of_other_versions_takes_those_of_the_machine(
    machine: Machine, record: Record, paths: tuple[Path, Path]
) -> None:
    done = run("--table", paths[0], "--write", paths[1], "--time")
    assert done.exit_code == 0, done.output
    (renewed,) = load_table(paths[1]).records
    assert (renewed.kernel, renewed.versions) == (record.kernel, current_versions(record.family))
    assert renewed.measurement == msgspec.structs.replace(MEASURED, peers=(PEER,))
    assert renewed.resources == READ


def changed(record: Record) -> Record:
    """Returns a record whose kernel was changed since."""
    versions = msgspec.structs.replace(record.versions, template="0" * 16)
    return msgspec.structs.replace(record, kernel="0" * 32, versions=versions)


@pytest.mark.parametrize("timed", [False, True])
def test_record_with_a_changed_kernel_takes_the_timed_kernel(
    machine: Machine, record: Record, tmp_path: Path, timed: bool
) -> None:
    earlier = changed(record)
    table = verified(tmp_path, earlier, options=("--time",) if timed else ())
    (renewed,) = table.records
    if not timed:
        assert renewed == earlier
        return
    assert renewed.kernel == kernel_of(record).digest
    assert renewed.versions == current_versions(record.family)
    assert renewed.verdict is not None
    assert renewed.verdict.passed
    assert renewed.measurement == msgspec.structs.replace(MEASURED, peers=(PEER,))
    assert renewed.resources == READ
    assert [receipt.digest for receipt in table.receipts] == [kernel_of(record, of_sibling=True).digest]


def test_record_with_an_equal_kernel_takes_the_template_version(
    machine: Machine, record: Record, tmp_path: Path
) -> None:
    here = current_versions(record.family)
    earlier = msgspec.structs.replace(record, versions=msgspec.structs.replace(here, template="0" * 16))
    table = verified(tmp_path, earlier, options=("--time",))
    (renewed,) = table.records
    assert (renewed.versions, renewed.measurement) == (here, record.measurement)
    assert machine.timed == []
    assert [receipt.digest for receipt in table.receipts] == [kernel_of(record, of_sibling=True).digest]


def test_record_with_a_changed_kernel_is_renewed_by_a_second_run(
    machine: Machine, record: Record, tmp_path: Path
) -> None:
    written = tmp_path / "written.json"
    verified(tmp_path, changed(record))
    machine.checked.clear()
    assert run("--table", written, "--write", written, "--time", "--missing").exit_code == 0
    assert machine.checked == []
    (renewed,) = load_table(written).records
    assert (renewed.kernel, renewed.versions) == (kernel_of(record).digest, current_versions(record.family))
    siblings = [kernel_of(record, of_sibling=True).digest]
    assert [receipt.digest for receipt in load_table(written).receipts] == siblings
    # Nothing is left to be done.
    assert run("--table", written, "--write", written, "--time", "--missing").exit_code == 0
    assert (machine.checked, len(machine.timed)) == ([], 1)


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, "0" * 16])
@pytest.mark.parametrize("timed", [False, True])
def test_record_of_current_versions_takes_missing_shared_mask_times(
    machine: Machine, tmp_path: Path, timed: bool, template: str | None
) -> None:
    shipped = shipped_table_of(TARGET.name)
    present = [row for row in shipped.records if row.config is not None]
    masked = next(row for row in present if timed_ways(row.problem))
    unmasked = next(row for row in present if row.family == "forward_hopper" and not timed_ways(row.problem))
    masked, unmasked = (msgspec.structs.replace(row, kernel=digest_of(row)) for row in (masked, unmasked))
    assert masked.measurement is not None
    measurement = msgspec.structs.replace(masked.measurement, shared=msgspec.UNSET)
    masked, plain = (
        msgspec.structs.replace(record, versions=current_versions(record.family))
        for record in (msgspec.structs.replace(masked, measurement=measurement), unmasked)
    )
    if template is not None:
        # Another version of the template, which renders the same kernel.
        versions = msgspec.structs.replace(masked.versions, template=template)
        masked = msgspec.structs.replace(masked, versions=versions)
    written = tmp_path / "written.json"
    table = verified(tmp_path, masked, plain, options=("--time",) if timed else ())
    assert machine.timed == ([masked.problem.key] if timed else [])
    measurements = {record.problem: record.measurement for record in table.records}
    # The time that was measured next to the peers stays.
    kept = msgspec.structs.replace(measurement, shared=SHARED if timed else msgspec.UNSET)
    assert measurements == {masked.problem: kept, plain.problem: plain.measurement}
    if timed:
        machine.checked.clear()
        assert run("--table", written, "--write", written, "--time", "--missing").exit_code == 0
        assert (machine.checked, len(machine.timed)) == ([], 1)
        assert {record.problem: record.measurement for record in load_table(written).records} == measurements


def test_changed_kernel_that_a_search_rejects_is_not_timed(
    machine: Machine, record: Record, tmp_path: Path
) -> None:
    earlier = changed(record)
    path, written = write_table(tmp_path / "table.json", earlier), tmp_path / "written.json"
    machine.unfit = "ptxas serialised the matrix instructions"

    result = run("--table", path, "--write", written, "--time")

    assert result.exit_code == 1
    assert "cannot be timed: ptxas serialised the matrix instructions" in " ".join(result.output.split())
    assert machine.timed == []
    assert load_table(written).records == (earlier,)


def test_machine_error_ends_the_run_after_writing_results(
    machine: Machine, record: Record, paths: tuple[Path, Path]
) -> None:
    def fail(record: Record, index: int) -> Measurement:
        raise MachineError("the disk is full: free some space")

    machine.replaced[verify_jobs.time_on_gpu] = fail

    result = run("--table", paths[0], "--write", paths[1], "--time")

    assert result.exit_code == 1
    assert "the disk is full: free some space" in result.output
    assert {receipt.digest for receipt in load_table(paths[1]).receipts} == {
        kernel_of(record, of_sibling=lse).digest for lse in (False, True)
    }


def test_failed_kernel_is_not_timed(machine: Machine, record: Record) -> None:
    machine.failing[kernel_of(record).digest] = "needle 7"
    report = record_checks.verify_records([record], gpu=((0,), TARGET), timed=True)
    assert [result.failed for result in report.failures] == ["needle 7"]
    assert machine.timed == []


def test_missing_skips_existing_evidence(machine: Machine, record: Record, paths: tuple[Path, Path]) -> None:
    table, written = paths
    assert run("--table", table, "--write", written).exit_code == 0
    assert machine.checked == [False, True]
    done = run("--table", written, "--write", written, "--missing", "--time")
    assert done.exit_code == 0, done.output
    assert machine.checked == [False, True]
    assert machine.timed == [record.problem.key]
    again = run("--table", written, "--write", written, "--missing", "--time")
    assert "1 by receipt alone" in again.output
    assert "no interpreter runs" not in again.output
    assert machine.timed == [record.problem.key]
    siblings = [kernel_of(record, of_sibling=True).digest]
    assert [receipt.digest for receipt in load_table(written).receipts] == siblings


@pytest.mark.parametrize(
    "changes", [{"probes": ("random",)}, {"probes": msgspec.UNSET}, {"device": "interpreter"}]
)
def test_missing_repeats_checks_without_a_probe_or_the_gpu(
    machine: Machine, record: Record, changes: dict[str, Any]
) -> None:
    done = record_checks.verify_records([record], gpu=((0,), TARGET)).on_gpu.receipts
    first = msgspec.structs.replace(done[0], verdict=msgspec.structs.replace(done[0].verdict, **changes))
    table = TunedTable(target=TARGET.name, records=(record,), receipts=(first, done[1]))
    machine.checked.clear()
    record_checks.verify_records([record], gpu=((0,), TARGET), table=table)
    assert machine.checked == [kernel_of(record).specialization.lse]


def test_signal_writes_finished_results(machine: Machine, record: Record, paths: tuple[Path, Path]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    ended = iter([False, True])

    def stop() -> None:
        if next(ended):
            os.kill(os.getpid(), signal.SIGTERM)

    machine.at_check = stop
    done = run("--table", paths[0], "--write", paths[1], "--time")
    assert done.exit_code == 130
    assert len(load_table(paths[1]).receipts) == 2
    assert machine.timed == []
    assert signal.getsignal(signal.SIGTERM) is handler


def test_time_limit_writes_finished_results_and_the_resume_command(
    machine: Machine, record: Record, paths: tuple[Path, Path]
) -> None:
    machine.hangs_after = 1
    done = run("--table", paths[0], "--write", paths[1], "--seconds", "3")
    assert done.exit_code == 1
    assert "1 more were not reached" in done.output
    assert f"continue with --missing --table {paths[1]}" in done.output
    assert [receipt.digest for receipt in load_table(paths[1]).receipts] == [kernel_of(record).digest]
    machine.checked.clear()
    done = run("--table", paths[1], "--write", paths[1], "--missing", "--seconds", "100")
    assert done.exit_code == 0, done.output
    assert len(load_table(paths[1]).receipts) == 2


def test_ended_run_starts_no_checks(machine: Machine, record: Record) -> None:
    runs = Runs(seconds=1e-9)
    report = record_checks.verify_records([record], gpu=((0,), TARGET), runs=runs)
    assert (report.results, report.missed, machine.checked) == ((), 1, [])
