"""Tests of kernels from bundles: verified ones are loaded, and all others are compiled."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.bundle.bundle_file import bundle_of, dump_bundle
from flashtune.bundle.driver import Driver
from flashtune.bundle.records import Entry, Receipt
from flashtune.core.errors import KernelError
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.record import Record, Selection, Verdict, VerificationStatus
from flashtune.core.target import find_target
from flashtune.db.eligibility import by_problem
from flashtune.dispatch.bound_request import KernelKey
from flashtune.dispatch.platform import PLATFORM, table_hash
from flashtune.dispatch.tables import Tables
from flashtune.launch.binding import bind, compile_binary
from flashtune.launch.bundle_binding import BundledBinary
from flashtune.launch.bundle_entries import entry_of, tail_entry
from flashtune.launch.bundles import VARIABLE, Bundles, bundle_paths, bundled_kernel, recipe_of
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.launch.kernel_cache import kernel_of
from flashtune.launch.tensors import ForwardTensors
from flashtune.request.request import Prefer
from flashtune.runtime import kernel_loader
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.tuner.verify import bundle_verification
from tests.emulator.cuda_library import CudaLibrary
from tests.support.records import CONTIGUOUS, VERDICT, make_record
from tests.support.values import present

H200 = find_target("h200")
CPU = torch.device("cpu", 0)
PROBLEM = testing.problem("heads=4,seqlen=256,head_dim=64,dtype=fp16")
OTHER = msgspec.structs.replace(PROBLEM, seqlen_q=512, seqlen_kv=512)


@pytest.fixture(autouse=True)
def on_a_device(no_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches run without a GPU."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture
def record() -> Record:
    return make_record(PROBLEM)


@pytest.fixture
def entry(record: Record) -> tuple[Entry, dict[str, bytes]]:
    """The entry of the record's kernel, with a receipt of the GPU under driver 580."""
    kernel = kernel_of(record, CONTIGUOUS)
    recipes = [recipe_of(record, CONTIGUOUS)]
    made, codes = entry_of(kernel, PROBLEM, compile_binary(kernel, H200), "12.8", recipes)
    receipt = Receipt(made.machine, "nvidia-h200", "580.95", VERDICT)
    return msgspec.structs.replace(made, receipts=(receipt,)), codes


@pytest.fixture
def path(tmp_path: Path, entry: tuple[Entry, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The bundle of the entry, which the variable names."""
    file = tmp_path / "kernels.bundle"
    file.write_bytes(dump_bundle("sm_90", "1.0", [entry[0]], entry[1]))
    monkeypatch.setenv(VARIABLE, str(file))
    return file


@pytest.mark.slow
def test_verified_kernel_is_launched_without_its_source(path: Path, entry: Any, record: Record) -> None:
    library = CudaLibrary()
    bundles = Bundles(Driver(library))
    found = bundles.find(record, CONTIGUOUS, H200)
    assert found is not None
    assert found.entry == entry[0]
    binary = bundles.load(found, H200, CPU)
    assert binary is not None
    kernel = bundled_kernel(found.entry, record, CONTIGUOUS)
    assert (kernel.source, kernel.digest) == ("", record.kernel)
    q, k, v, out = (torch.zeros(1, 4, 256, 64, dtype=torch.float16) for _ in range(4))
    bind(kernel, H200, ForwardTensors(q, k, v, out), compiled=binary)((q, k, v, out, None), 0.125)
    assert [launched.function for launched in library.launches] == ["forward_q_outer"]
    assert bundles.load(found, H200, CPU) is binary
    assert len(library.codes) == 1, "it is loaded once"


def test_loader_neither_renders_nor_compiles_a_verified_kernel(
    path: Path, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_loader, "kernel_of", None)
    loader = KernelLoader(bundles=Bundles(Driver(CudaLibrary())))
    key = KernelKey(PROBLEM, CONTIGUOUS, Prefer.GENERATED, CPU)
    # Without the bundle's receipt, an unproven kernel would need a self-check.
    selection = Selection(record=record, standing=VerificationStatus.UNPROVEN)
    loaded = loader.load(selection, H200, key)
    assert isinstance(loaded.binary, BundledBinary)
    assert loaded.kernel.digest == record.kernel
    loader.compile_apart(CompilerProcess(), record, CONTIGUOUS, H200)


@pytest.mark.parametrize("has_lse", [True, False])
def test_rows_after_packed_sequences_are_cleared_by_the_kernel_of_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_lse: bool
) -> None:
    made, codes = tail_entry(torch.float16, H200, "12.8")
    file = tmp_path / "kernels.bundle"
    file.write_bytes(dump_bundle("sm_90", "1", [made], codes))
    monkeypatch.setenv(VARIABLE, str(file))
    library = CudaLibrary()
    loader = KernelLoader(bundles=Bundles(Driver(library)))
    out, starts = torch.zeros(40, 4, 64, dtype=torch.float16), torch.zeros(4, dtype=torch.int32)
    lse = torch.zeros(4, 40) if has_lse else None
    request: Any = SimpleNamespace(
        device=torch.device("meta", 0), out_like=out.to("meta"), return_lse=has_lse
    )
    loader.tail_clearer(request, 3, H200)(out, lse, starts)
    (launched,) = library.launches
    assert (launched.function, launched.grid) == ("clear_tail", (160, 1, 1))
    addresses = [tensor.data_ptr() for tensor in (out, out if lse is None else lse, starts)]
    expected = [*addresses, 3, 40, 4, 64, 4 if has_lse else 0, 0, 0]
    assert [int.from_bytes(raw, "little") for raw in launched.parameters] == expected


def test_kernel_of_another_length_is_found_by_its_recipe(path: Path, entry: Any, record: Record) -> None:
    bundles = Bundles(Driver(CudaLibrary()))
    untuned = msgspec.structs.replace(record, problem=OTHER, kernel=None)
    assert present(bundles.find(untuned, CONTIGUOUS, H200)).entry == entry[0]
    with_lse = msgspec.structs.replace(CONTIGUOUS, lse=True)
    assert bundles.find(record, with_lse, H200) is None


def test_kernel_without_a_receipt_of_this_gpu_is_not_used(path: Path, record: Record) -> None:
    assert Bundles(Driver(CudaLibrary())).find(record, CONTIGUOUS, find_target("h100")) is None


def test_receipt_of_other_machine_code_is_not_used(
    path: Path, entry: tuple[Entry, dict[str, bytes]], record: Record
) -> None:
    made, codes = entry
    slower = msgspec.structs.replace(made.stages[0], early=True)
    path.write_bytes(dump_bundle("sm_90", "1", [msgspec.structs.replace(made, stages=(slower,))], codes))
    assert Bundles(Driver(CudaLibrary())).find(record, CONTIGUOUS, H200) is None


def test_unusable_bundle_is_one_warning(path: Path, entry: Any, record: Record) -> None:
    content = path.read_bytes()
    for damaged in (content[:-1], content[:70] + b"x" + content[71:], b"", dump_bundle("sm_80", "1", [], {})):
        path.write_bytes(damaged)
        bundles = Bundles(Driver(CudaLibrary()))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                assert bundles.find(record, CONTIGUOUS, H200) is None
        assert all(isinstance(warning.message, FlashtuneWarning) for warning in seen)
        assert len(seen) <= 1


def test_damaged_code_or_failed_load_is_compiled_instead(path: Path, entry: Any, record: Record) -> None:
    class Refusing(CudaLibrary):
        def cuModuleLoadData(self, module: Any, code: bytes) -> int:
            return 209

    content = bytearray(path.read_bytes())
    for library, file in ((Refusing(), content), (CudaLibrary(), content[:-40] + bytes(40))):
        path.write_bytes(file)
        bundles = Bundles(Driver(library))
        found = bundles.find(record, CONTIGUOUS, H200)
        assert found is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert bundles.load(found, H200, CPU) is None
        assert bundles.find(record, CONTIGUOUS, H200) is None


def test_bundle_stays_in_use_if_memory_is_short(path: Path, entry: Any, record: Record) -> None:
    class Full(CudaLibrary):
        def cuModuleLoadData(self, module: Any, code: bytes) -> int:
            return 2

        def cuGetErrorString(self, status: int, text: Any) -> int:
            text._obj.value = b"out of memory"
            return 0

    bundles = Bundles(Driver(Full()))
    with pytest.raises(KernelError, match="out of memory"):
        bundles.load(present(bundles.find(record, CONTIGUOUS, H200)), H200, CPU)
    assert bundles.find(record, CONTIGUOUS, H200) is not None


def test_hash_of_dispatch_covers_bundles(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for content in (path.read_bytes(), dump_bundle("sm_90", "2.0", [], {})):
        path.write_bytes(content)
        monkeypatch.setattr(PLATFORM, "bundles", Bundles())
        hashes.add(table_hash(H200.name))
    assert len(hashes) == 2


def test_without_a_bundle_nothing_is_found(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert bundle_paths(90, None) == []
    assert Bundles().find(record, CONTIGUOUS, H200) is None


def test_named_bundle_comes_before_those_of_the_database_and_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, database = tmp_path / "named.bundle", tmp_path / "database.bundle"
    package = tmp_path / "flashtune_kernels_sm90"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert bundle_paths(90, database) == [package / "kernels.bundle"], "the database has no bundle"
    database.touch()
    monkeypatch.setenv(VARIABLE, str(named))
    assert bundle_paths(90, database) == [named, database, package / "kernels.bundle"]


def test_bundle_of_the_database_serves_unless_another_user_can_write_it(
    path: Path, entry: Any, record: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database = path.rename(tmp_path / "database.bundle")
    path.write_bytes(dump_bundle("sm_90", "1.0", [], {}))
    made = Bundles(Driver(CudaLibrary()), lambda arch: database)
    found = present(made.find(record, CONTIGUOUS, H200))
    assert (found.entry, found.bundle.where) == (entry[0], str(database))
    assert made.load(found, H200, CPU) is not None
    database.chmod(0o666)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Bundles(of_database=lambda arch: database).find(record, CONTIGUOUS, H200) is None


def test_failed_verification_is_no_receipt(path: Path, entry: Any, record: Record) -> None:
    made, codes = entry
    verdict = msgspec.structs.replace(VERDICT, passed=False, failed="needle")
    failed = msgspec.structs.replace(made.receipts[0], verdict=verdict)
    path.write_bytes(dump_bundle("sm_90", "1", [msgspec.structs.replace(made, receipts=(failed,))], codes))
    assert Bundles(Driver(CudaLibrary())).find(record, CONTIGUOUS, H200) is None


@pytest.mark.parametrize("passes", [True, False])
def test_verified_kernel_that_passes_has_a_receipt(entry: Any, record: Record, passes: bool) -> None:
    made, codes = entry
    bundle = bundle_of(dump_bundle("sm_90", "1", [msgspec.structs.replace(made, receipts=())], codes), "here")
    kernels = bundle_verification.unverified(bundle, H200)
    tables = Tables(by_problem([record]), {})
    uses = bundle_verification.uses_of(bundle, kernels, [(PROBLEM, CONTIGUOUS)], H200, tables)
    assert {*uses} == kernels == {made.kernel}

    def check(*arguments: Any, compiled: BundledBinary) -> Verdict:
        assert (arguments[1], compiled.entry.kernel) == (PROBLEM, made.kernel)
        return VERDICT if passes else msgspec.structs.replace(VERDICT, passed=False, failed="needle")

    result = bundle_verification.receipt_of(
        bundle, uses[made.kernel], H200, CPU, Driver(CudaLibrary()), check
    )
    if passes:
        assert isinstance(result, Receipt)
        assert (result.machine, result.target) == (made.machine, H200.name)
    else:
        assert result == "its results are wrong: needle"
