"""Tests of exported machine code: bundles of verified selections, and their launches by kernel packages."""

import importlib.util
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from flashtune.bundle.bundle_file import bundle_of
from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Record
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.tables import bundles, hub_bundle
from flashtune.tuner.tables.export_bundle import the_bundle, verified_bundles
from flashtune.tuner.tables.hub_package import VARIANT, package_files
from tests.emulator.cuda_library import CudaLibrary
from tests.support.bundle_checks import Passes
from tests.support.records import make_record

PLAIN = "heads=4,seqlen=256,head_dim=64,causal"
PAGES = "heads=4,seqlen_q=1,seqlen_kv=2048,head_dim=64,batch=2,page_size=16"
FORMATS = {"pointer": "<Q", "i32": "<i", "i64": "<q", "f32": "<f"}


def unwatched(phase: str, done: int, total: int) -> None:
    """Ignores progress."""


def package_of(folder: Path, record: Record, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, CudaLibrary]:
    """The package's module of a kernel and of machine code, after use on an H200."""
    monkeypatch.setattr(bundles, "load_receipts", Passes)
    contents = verified_bundles([record], unwatched)
    for name, content in package_files([record], bundles=contents).items():
        path = folder / Path(name).relative_to(VARIANT)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 7}))
    modules = [loaded(path) for path in (*folder.glob("kernels/*.py"), folder / "bundle.py")]
    module, loader = modules
    library = CudaLibrary()
    driver = loaded(folder / "driver.py").Driver(library)
    assert record.kernel is not None
    loader.use(module, loader.Bundle(folder / "kernels.sm_90.bundle"), record.kernel, "nvidia-h200", driver)
    return module, loader, library


def loaded(path: Path) -> Any:
    """Imports a file. Those of a package import nothing of flashtune."""
    assert "flashtune" not in "".join(
        line for line in path.read_text().splitlines() if line.startswith(("from ", "import "))
    )
    spec = importlib.util.spec_from_file_location(f"hub_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read_code(make: Any, path: Path) -> None:
    bundle = make(path)
    bundle.code(next(iter(bundle._codes)))


def verified_record(shape: str, family: str) -> Record:
    return make_record(shape, family=family, config="num_splits=4" if family == "decode_split_kv" else "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "family"), [(PLAIN, "forward_hopper"), (PAGES, "decode_split_kv")], ids=["hopper", "pages"]
)
def test_package_launches_machine_code_with_the_arguments_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str, family: str
) -> None:
    record = verified_record(shape, family)
    module, _, library = package_of(tmp_path, record, monkeypatch)
    made = make_tensors(record.problem, torch.device("cpu"))
    q, k, v, out = made.q, made.k, made.v, made.out
    functions = [name for name, value in vars(module).items() if type(value).__name__ == "Launcher"]
    assert len(functions) == 1 + (family == "decode_split_kv")
    side = [tensor for tensor in (made.side.seqlens_kv, made.side.block_table) if tensor is not None]
    grid, shapes, integers = module.launch_plan(q, k, v, out, *side)
    described = [each for parts in module.descriptors(q, k, v, out) for each in parts] if not side else []
    tensors = [out] if described else [q, k, v, out, out, *side]
    arguments: list[Any] = [*described, *tensors, *map(torch.empty, shapes), 0.125, *integers]
    getattr(module, functions[0])[grid](*arguments, num_warps=4)
    (launched,) = library.launches
    assert (launched.function, launched.grid[: len(grid)], launched.stream) == (functions[0], grid, 7)
    values: list[Any] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            values.append(argument.data_ptr())
        elif hasattr(argument, "block_shape"):
            values += ["map", *argument.shape, *argument.strides]
        else:
            values.append(argument)
    entry = bundle_of((tmp_path / "kernels.sm_90.bundle").read_bytes(), "").entry(str(record.kernel))
    assert entry is not None
    stage = next(stage for stage in entry.stages if stage.function == functions[0])
    found = [
        "map" if parameter.type == "map" else struct.unpack(FORMATS[parameter.type], raw)[0]
        for parameter, raw in zip(stage.parameters, launched.parameters, strict=True)
    ]
    assert found == [*values, 0, 0]
    assert [made[1] for made in library.maps] == [each.base.data_ptr() for each in described]


@pytest.mark.slow
def test_package_compiles_on_other_gpus_and_with_damaged_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = verified_record(PLAIN, "forward_q_outer")
    module, loader, library = package_of(tmp_path, record, monkeypatch)
    assert type(module.forward_q_outer).__name__ == "Launcher"
    assert len(library.codes) == 1
    path = tmp_path / "kernels.sm_90.bundle"
    bundle = loader.Bundle(path)
    assert bundle.entry(record.kernel, "nvidia-h100") is None
    assert bundle.entry("0" * 32, "nvidia-h200") is None
    content = path.read_bytes()
    damages = (content[:70] + b"x" + content[71:], content[:60], b"version https", content[:-60] + bytes(60))
    for damaged in damages:
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match="is damaged"):
            read_code(loader.Bundle, path)


def test_unverified_machine_code_is_left_out() -> None:
    record = verified_record(PLAIN, "forward_q_outer")
    others = [record, msgspec.structs.replace(record, target="amd-mi300x")]
    assert verified_bundles(others, unwatched) == {}, "the verdict was on another compilation"
    with pytest.raises(FlashtuneError, match="search"):
        the_bundle({})
    with pytest.raises(FlashtuneError, match="name a GPU by --target"):
        the_bundle({"sm_80": b"", "sm_90": b""})
    assert hub_bundle.HEAD.size == 52
