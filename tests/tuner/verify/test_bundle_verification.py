"""Tests of the verification of bundles: processes, lost processes, and files that are always complete."""

from pathlib import Path

import msgspec
import pytest

from flashtune import testing
from flashtune.bundle.bundle_file import bundle_of, dump_bundle, joined, open_bundle
from flashtune.core.target import find_target
from flashtune.tuner.verify.bundle_verification import Use, unverified, verify
from flashtune.tuner.verify.verify_jobs import Runs
from tests.bundle.conftest import make_entry
from tests.support.bundle_checks import FATAL, WRONG, pass_most
from tests.support.records import CONTIGUOUS, make_record

H200 = find_target("h200")
COUNT = 8


def name(number: int) -> str:
    return f"{number:032x}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A bundle of kernels without receipts."""
    made = [make_entry(number, bytes([number]) * 50) for number in range(COUNT)]
    codes = {sha256: code for _, codes in made for sha256, code in codes.items()}
    entries = [msgspec.structs.replace(entry, receipts=()) for entry, _ in made]
    file = tmp_path / "kernels.bundle"
    file.write_bytes(dump_bundle("sm_90", "1.0", entries, codes))
    return file


@pytest.fixture
def uses() -> dict[str, Use]:
    """Two kernels for each problem, which are verified by one process."""
    records = [
        make_record(testing.problem(f"heads=4,seqlen={64 + i},head_dim=64")) for i in range(COUNT // 2)
    ]
    return {
        name(number): Use(name(number), record.problem, record, CONTIGUOUS)
        for number, record in enumerate(records * 2)
    }


def test_all_gpus_verify_kernels_and_lost_processes_fail_only_their_own(
    path: Path, uses: dict[str, Use]
) -> None:
    shown: list[tuple[int, int]] = []
    results = verify(
        path, path, uses, (0, 1), 2, Runs(), lambda phase, done, total: shown.append((done, total)), pass_most
    )
    reasons = {kernel: result for kernel, result in results.items() if isinstance(result, str)}
    assert reasons == {name(WRONG): "wrong", name(FATAL): "its process died (killed by signal 6)"}
    assert len(results) == COUNT, "the kernel that shared the job of the fatal one is verified"
    assert (path.parent / "crowded").exists()
    assert shown[-1] == (COUNT, COUNT)
    bundle = open_bundle(path)
    bundle.check_all()
    assert unverified(bundle, H200) == {*reasons}
    drivers = {
        receipt.driver for result in results.values() if not isinstance(result, str) for receipt in [result]
    }
    assert drivers == {"on 0", "on 1"}


def test_time_limit_starts_no_kernel_and_keeps_the_file(path: Path, uses: dict[str, Use]) -> None:
    out = path.with_name("verified.bundle")
    assert verify(path, out, uses, (0,), 1, Runs(0.0), check=pass_most) == {}
    assert out.read_bytes() == path.read_bytes()


def test_stopped_or_broken_verification_keeps_its_receipts(path: Path, uses: dict[str, Use]) -> None:
    passing = {kernel: uses[kernel] for kernel in (name(0), name(1), name(5), name(6), name(7))}
    runs, out = Runs(), path.with_name("verified.bundle")

    def fail(phase: str, done: int, total: int) -> None:
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        verify(path, path, passing, (0,), 1, runs, fail, pass_most)
    lacking = unverified(open_bundle(path), H200)
    assert len(lacking) == COUNT - 1
    rest = {kernel: use for kernel, use in passing.items() if kernel in lacking}
    verify(path, out, rest, (0,), 1, runs, lambda phase, done, total: runs.stop(), pass_most)
    assert len(rest) > len(lacking - unverified(open_bundle(out), H200)) >= 1


def test_bundle_with_other_entries_is_that_of_a_new_build(path: Path) -> None:
    bundle = open_bundle(path)
    made = [make_entry(number, bytes([number]) * 50) for number in range(COUNT)]
    codes = {sha256: code for _, codes in made for sha256, code in codes.items()}
    content = joined([bundle], changed=[entry for entry, _ in made[:5]])
    content = joined([bundle_of(content, "here")], changed=[entry for entry, _ in made[5:]])
    assert content == dump_bundle("sm_90", "1.0", [entry for entry, _ in made], codes)
