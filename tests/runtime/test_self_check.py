"""Tests of self-checks: one per machine, by one process of many, stored with their duration."""

import contextlib
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import msgspec
import pytest
import torch

from flashtune.core.errors import KernelError
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.record import Verdict
from flashtune.core.target import find_target
from flashtune.db.codec import Check
from flashtune.db.store import open_store
from flashtune.dispatch.versions import current_versions
from flashtune.launch.compilation import kernel_folder
from flashtune.launch.kernel_cache import kernel_of
from flashtune.runtime.self_check import CheckTask, SelfChecks
from flashtune.templates.registry import find_family
from tests.support.fakes import install
from tests.support.machine import PROBLEM
from tests.support.records import make_record

TARGET = find_target("h200")
DEVICE = torch.device("cuda", 0)


class Checker:
    """Replaces the check on a GPU."""

    def __init__(self, passed: bool) -> None:
        self.verdict = Verdict(passed, 0.5 if passed else 7.0, 9, "" if passed else "rows", "NVIDIA H200")
        self.calls = 0

    def __call__(self, *_: object, compiled: object) -> Verdict:
        self.calls += 1
        return self.verdict


RECORD = make_record(PROBLEM)
KERNEL = kernel_of(RECORD, RECORD.specialization)
TASK = CheckTask(KERNEL, PROBLEM, find_family(RECORD.family).default(PROBLEM, TARGET), TARGET, DEVICE)


@pytest.mark.parametrize("passed", [True, False])
def test_verdict_is_cached_in_process_and_database(passed: bool) -> None:
    checker = Checker(passed)
    checks = SelfChecks(checker)
    assert checks.known_verdict(KERNEL, TARGET) is None
    for _ in range(3):
        assert checks.passes(TASK) is passed
    assert checker.calls == 1
    checks = SelfChecks(checker)
    assert checks.passes(TASK) is passed
    assert checks.failed_comparison(KERNEL, TARGET) == ("the comparison is not known" if passed else "rows")
    assert checker.calls == 1, "the database remembers for other processes"
    checks = SelfChecks(checker)
    assert checks.known_verdict(KERNEL, find_target("a100")) is None


def test_verdict_under_other_versions_is_ignored() -> None:
    versions = msgspec.structs.replace(current_versions(RECORD.family), driver="another")
    with open_store() as store:
        store.remember_check(
            Check(digest=KERNEL.digest, target=TARGET.name, versions=versions, verdict=Checker(True).verdict)
        )
    assert SelfChecks().known_verdict(KERNEL, TARGET) is None


def test_unreachable_database_causes_a_check_in_every_process(own_database: Path) -> None:
    own_database.write_bytes(b"no database at all, but long enough to be read as one" * 40)
    checker = Checker(True)
    checks = SelfChecks(checker)
    with pytest.warns(FlashtuneWarning, match="checked again in every process"):
        assert checks.passes(TASK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checks.passes(TASK)
    assert checker.calls == 1


def test_launch_failure_stores_no_verdict() -> None:
    def fail(*_: object, compiled: object) -> Verdict:
        raise KernelError("out of resources")

    checks = SelfChecks(fail)
    with pytest.raises(KernelError):
        checks.passes(TASK)
    assert checks.known_verdict(KERNEL, TARGET) is None


def test_duration_of_a_check_is_stored() -> None:
    checks = SelfChecks(Checker(True))
    assert checks.known_seconds(KERNEL, TARGET) is None
    checks.passes(TASK)
    seconds = checks.known_seconds(KERNEL, TARGET)
    assert seconds is not None
    assert 0 <= seconds < 1


def test_verdict_of_another_process_is_used_after_the_wait() -> None:
    checker = Checker(True)
    checks = SelfChecks(checker)

    def after_another() -> Path:
        """Returns the folder of the lock, for which another process waited that has stored its verdict."""
        with open_store() as store:
            versions = current_versions(KERNEL.family)
            wrong = Checker(False).verdict
            store.remember_check(
                Check(digest=KERNEL.digest, target=TARGET.name, versions=versions, verdict=wrong)
            )
        return kernel_folder()

    checks = SelfChecks(checker, folder=after_another)
    assert not checks.passes(TASK)
    assert checker.calls == 0


class FakePreload:
    """Replaces a preload: waits until its last argument returns true."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.began, self.ended = threading.Event(), threading.Event()

    def __call__(self, *asked: object) -> None:
        self.began.set()
        if self.fails:
            raise RuntimeError("out of memory")
        enough = asked[-1]
        assert callable(enough)
        while not enough():
            time.sleep(0.001)
        self.ended.set()


class Contexts:
    """Devices and streams without a GPU: those that were entered."""

    def __init__(self) -> None:
        self.entered: list[object] = []

    def current_stream(self, device: object) -> str:
        return f"the caller's on {device}"

    def stream(self, context: object) -> contextlib.AbstractContextManager[None]:
        self.entered.append(context)
        return contextlib.nullcontext()

    def device(self, context: object) -> contextlib.AbstractContextManager[None]:
        return self.stream(context)


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    fake = Contexts()
    install(monkeypatch, fake, torch.cuda)
    return fake.entered


@pytest.mark.parametrize("error", [None, KernelError("does not compile")], ids=str)
def test_preload_runs_while_the_kernel_compiles(entered: list[object], error: KernelError | None) -> None:
    preload = FakePreload()
    checks = SelfChecks(preload=preload)
    raised = contextlib.nullcontext() if error is None else pytest.raises(KernelError)
    with raised, checks.preloading(TASK):
        assert preload.began.wait(600)
        assert not preload.ended.is_set()
        if error is not None:
            raise error
    assert preload.ended.is_set()
    assert entered == [DEVICE, f"the caller's on {DEVICE}"]


def test_preload_runs_once_for_kernels_of_a_kind(entered: list[object]) -> None:
    checks = SelfChecks(preload=lambda *_: None)
    kinds = (
        PROBLEM,
        msgspec.structs.replace(PROBLEM, seqlen_q=77),
        msgspec.structs.replace(PROBLEM, window_left=9),
    )
    for kind, devices in zip(kinds, (1, 1, 2), strict=True):
        with checks.preloading(TASK._replace(problem=kind)):
            pass
        assert entered.count(DEVICE) == devices


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.usefixtures("entered")
def test_errors_of_the_preload_are_ignored() -> None:
    preload = FakePreload(fails=True)
    checks = SelfChecks(preload=preload)
    with checks.preloading(TASK):
        assert preload.began.wait(600)


def test_verified_kernel_needs_no_preload(entered: list[object]) -> None:
    preload = FakePreload()
    checks = SelfChecks(Checker(True), preload)
    checks.passes(TASK)
    checks = SelfChecks(preload=preload)
    with checks.preloading(TASK):
        pass
    assert not preload.began.is_set()
    assert not entered


def test_without_a_lock_every_process_checks(tmp_path: Path) -> None:
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    checker = Checker(True)
    checks = SelfChecks(checker, folder=lambda: no_folder)
    assert checks.passes(TASK)
    assert checker.calls == 1


def test_processes_share_the_lock_of_a_kernel(tmp_path: Path) -> None:
    assert SelfChecks(Checker(True), folder=lambda: tmp_path / "locks").passes(TASK)
    assert (tmp_path / "locks" / f"{KERNEL.family}_{KERNEL.digest}.lock").exists()


def test_self_check_imports_neither_sqlalchemy_nor_gradients(own_database: Path) -> None:
    """Importing them would take longer than the check."""
    program = (
        "import sys\n"
        "from flashtune.db.codec import Check\n"
        "from flashtune.db.light.self_checks import remember_check\n"
        "from flashtune.core.record import Verdict, Versions\n"
        "verdict = Verdict(True, 0.5, 9, '', 'NVIDIA H200')\n"
        "versions = Versions('0', '0', '0', '0', '0', '0')\n"
        "remember_check(Check(digest='0' * 32, target='nvidia-h200', versions=versions, verdict=verdict))\n"
        "import flashtune.verification.check\n"
        "unneeded = {'sqlalchemy', 'alembic', 'mako', 'optuna', 'flashtune.verification.gradients'}\n"
        "print(*unneeded & set(sys.modules))\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == ""
    assert own_database.exists()
