"""Sources from the cache, and self-checks: nothing unproven runs, nothing tampered with is loaded."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from flashtune.compilation import kernel_folder, load_module
from flashtune.db.checks import Check
from flashtune.db.codec import encode_record
from flashtune.db.store import open_store
from flashtune.errors import KernelError
from flashtune.kernel import Alignment, Kernel, Specialization
from flashtune.notices import FlashtuneWarning
from flashtune.problem import Problem
from flashtune.proof import check
from flashtune.record import Record, Verdict
from flashtune.rendered import kernel_of
from flashtune.self_check import forget_verdicts, known_verdict, passes_self_check
from flashtune.target import find_target
from flashtune.versions import current_versions

TARGET = find_target("h200")
DEVICE = torch.device("cuda", 0)
Make = Callable[..., Record]


def copy_of(record: Record) -> Path:
    return kernel_folder() / f"{record.family}_{record.kernel}.py"


def test_a_proven_copy_needs_no_template_engine(problem: Problem, make_record: Make, tmp_path: Path) -> None:
    record = make_record(problem)
    kernel = kernel_of(record, record.specialization)
    assert kernel.digest == record.kernel
    load_module(kernel)
    stored = tmp_path / "record.json"
    stored.write_bytes(encode_record(record))
    program = (
        "import sys, pathlib\n"
        "from flashtune.db.codec import decode_record\n"
        "from flashtune.rendered import kernel_of\n"
        f"record = decode_record(pathlib.Path({str(stored)!r}).read_bytes())\n"
        "kernel = kernel_of(record, record.specialization)\n"
        "assert kernel.digest == record.kernel\n"
        "print('jinja2' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "False"


@pytest.mark.parametrize("content", ["raise SystemExit('tampered')\n", "", "\udcff"])
def test_a_copy_that_was_changed_is_rendered_again(problem: Problem, make_record: Make, content: str) -> None:
    record = make_record(problem)
    path = copy_of(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode(errors="surrogateescape"))
    sys.modules.pop(f"flashtune_kernel_{record.kernel}", None)
    kernel = kernel_of(record, record.specialization)
    assert kernel.digest == record.kernel
    assert "tampered" not in kernel.source
    assert load_module(kernel).launch_plan
    assert path.read_text() == kernel.source
    path.unlink()
    sys.modules.pop(f"flashtune_kernel_{kernel.digest}")


def test_bytecode_beside_a_copy_is_not_run(problem: Problem, make_record: Make) -> None:
    record = make_record(problem)
    kernel = kernel_of(record, record.specialization)
    path = copy_of(record)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Of the size and the time that Python's loader would compare.
    path.write_text("raise SystemExit('tampered')".ljust(len(kernel.source)))
    compiled = Path(py_compile.compile(str(path), doraise=True) or "")
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_text(kernel.source)
    os.utime(path, ns=times)
    sys.modules.pop(f"flashtune_kernel_{kernel.digest}", None)
    assert load_module(kernel).launch_plan
    compiled.unlink()
    path.unlink()
    sys.modules.pop(f"flashtune_kernel_{kernel.digest}")


def test_another_specialisation_or_template_is_rendered(problem: Problem, make_record: Make) -> None:
    record = make_record(problem)
    load_module(kernel_of(record, record.specialization))
    unaligned = kernel_of(record, Specialization(Alignment.ANY))
    assert unaligned.digest != record.kernel
    other = msgspec.structs.replace(record.versions, template="0" * 32)
    copy_of(record).write_text("# of another template")
    old = msgspec.structs.replace(record, versions=other)
    assert "another template" not in kernel_of(old, record.specialization).source
    copy_of(record).unlink()


class Checker:
    """Stands in for the check on a GPU."""

    def __init__(self, passed: bool) -> None:
        self.verdict = Verdict(passed, 0.5 if passed else 7.0, 9, "" if passed else "rows", "NVIDIA H200")
        self.calls = 0

    def __call__(self, *_: object) -> Verdict:
        self.calls += 1
        return self.verdict


def kernel_for(record: Record) -> Kernel:
    return kernel_of(record, record.specialization)


@pytest.mark.parametrize("passed", [True, False])
def test_a_verdict_is_remembered_by_process_and_database(
    problem: Problem, make_record: Make, monkeypatch: pytest.MonkeyPatch, passed: bool
) -> None:
    checker = Checker(passed)
    monkeypatch.setattr(check, "check_rendered", checker)
    record = make_record(problem)
    kernel = kernel_for(record)
    assert record.config is not None
    assert known_verdict(kernel, TARGET) is None
    for _ in range(3):
        assert passes_self_check(kernel, problem, record.config, TARGET, DEVICE) is passed
    assert checker.calls == 1
    forget_verdicts()
    assert passes_self_check(kernel, problem, record.config, TARGET, DEVICE) is passed
    assert checker.calls == 1, "the database remembers for other processes"
    forget_verdicts()
    assert known_verdict(kernel, find_target("a100")) is None


def test_a_verdict_under_other_versions_does_not_count(problem: Problem, make_record: Make) -> None:
    record = make_record(problem)
    kernel = kernel_for(record)
    versions = msgspec.structs.replace(current_versions(record.family), driver="another")
    with open_store() as store:
        store.remember_check(
            Check(digest=kernel.digest, target=TARGET.name, versions=versions, verdict=Checker(True).verdict)
        )
    assert known_verdict(kernel, TARGET) is None


def test_a_database_out_of_reach_means_checking_in_every_process(
    problem: Problem, make_record: Make, monkeypatch: pytest.MonkeyPatch, own_database: Path
) -> None:
    own_database.write_bytes(b"no database at all, but long enough to be read as one" * 40)
    checker = Checker(True)
    monkeypatch.setattr(check, "check_rendered", checker)
    record = make_record(problem)
    assert record.config is not None
    kernel = kernel_for(record)
    with pytest.warns(FlashtuneWarning, match="checked again in every process"):
        assert passes_self_check(kernel, problem, record.config, TARGET, DEVICE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert passes_self_check(kernel, problem, record.config, TARGET, DEVICE)
    assert checker.calls == 1


def test_a_kernel_that_does_not_launch_is_no_verdict(
    problem: Problem, make_record: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Verdict:
        raise KernelError("out of resources")

    monkeypatch.setattr(check, "check_rendered", fail)
    record = make_record(problem)
    assert record.config is not None
    with pytest.raises(KernelError):
        passes_self_check(kernel_for(record), problem, record.config, TARGET, DEVICE)
    assert known_verdict(kernel_for(record), TARGET) is None
