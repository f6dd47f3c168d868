"""Tests of the resources of compiled kernels and their occupancy."""

import sys
from pathlib import Path

import msgspec
import pytest

from flashtune import testing
from flashtune.core.config import LaunchOptions
from flashtune.core.errors import KernelError, MachineError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.record import Resources
from flashtune.core.target import find_target
from flashtune.templates.forward_q_outer.space import QOuterConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.binary import disassembly
from flashtune.tuner.binary import resources as room
from flashtune.tuner.binary.resources import (
    Part,
    combined,
    occupancy,
    overflow,
    read_parts,
    read_resources,
    read_sizes,
)
from flashtune.tuner.workloads.shapes import parse_shape
from tests.support.records import shipped_table_of

FAMILY = find_family("forward_q_outer")


def a_kernel(head_dim: int = 64, **fields: int) -> Kernel:
    problem = testing.problem("heads=8,seqlen=512,head_dim=64,dtype=bf16", head_dim=head_dim)
    config = QOuterConfig(**{"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2, **fields})  # type: ignore[arg-type]
    return render(FAMILY, problem, config, Specialization())


def test_a_hopper_kernel() -> None:
    resources = read_resources(a_kernel(), find_target("h100"))
    # Two stages of keys and values, and the queries.
    assert resources.sram_bytes == 2 * (64 + 2 * 2 * 32) * 64
    assert 32 <= resources.registers <= 255
    assert resources.tensor_memory_columns == 0
    assert not resources.serialized_wgmma
    assert resources.compile_seconds > 0


def test_a_blackwell_kernel_takes_tensor_memory() -> None:
    assert read_resources(a_kernel(block_m=128), find_target("b200")).tensor_memory_columns == 128


@pytest.mark.slow
@pytest.mark.parametrize("target", ["b200", "mi300x"])
def test_sizes_are_read_without_external_tools(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = a_kernel(block_m=128)
    expected = read_resources(kernel, find_target(target))

    def run(*arguments: object) -> None:
        raise AssertionError(f"a tool was run: {arguments}")

    monkeypatch.setattr("subprocess.run", run)
    sizes = read_sizes(kernel, find_target(target))
    assert sizes == Resources(expected.sram_bytes, expected.tensor_memory_columns)
    assert sizes.sram_bytes > 0


@pytest.mark.slow
def test_an_amd_kernel() -> None:
    resources = read_resources(a_kernel(), find_target("mi300x"))
    assert 0 < resources.sram_bytes <= 64 * 1024
    assert 32 <= resources.registers <= 512
    assert resources.spill_bytes == 0


def test_tool_that_cannot_be_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly, "tool_path", lambda name: f"/nowhere/{name}")
    with pytest.raises(MachineError, match="cuobjdump cannot be run at /nowhere/cuobjdump"):
        read_resources(a_kernel(), find_target("a100"))


def test_missing_tool_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    class Lacking:
        @property
        def cuobjdump(self) -> None:
            raise RuntimeError("Cannot find cuobjdump")

    monkeypatch.setattr(knobs, "nvidia", Lacking())
    with pytest.raises(MachineError, match="this installation of Triton has no cuobjdump: reinstall triton"):
        disassembly.dump(b"", "--dump-sass")


def test_errors_of_tools_are_reported() -> None:
    with pytest.raises(KernelError, match="failed: no instruction"):
        disassembly.run_tool(sys.executable, "-c", "raise SystemExit('in a file:\\nno instruction')")


@pytest.mark.parametrize(
    ("target", "resources", "warps", "blocks", "limit"),
    [
        # Two blocks of 112 KiB, with a KiB of the driver's each, are all of 228 KiB less two.
        ("h100", Resources(sram_bytes=112 * 1024, registers=64), 4, 2, "sram"),
        ("h100", Resources(sram_bytes=114 * 1024, registers=64), 4, 1, "sram"),
        ("h100", Resources(sram_bytes=1024, registers=255), 8, 1, "registers"),
        ("h100", Resources(sram_bytes=1024, registers=128), 4, 4, "registers"),
        ("h100", Resources(sram_bytes=1024, registers=24), 16, 4, "threads"),
        ("l40s", Resources(sram_bytes=1024, registers=32), 8, 6, "threads"),
        ("b200", Resources(sram_bytes=1024, registers=64, tensor_memory_columns=256), 4, 2, "tensor memory"),
        ("h100", Resources(sram_bytes=300 * 1024, registers=64), 4, 0, "sram"),
        ("mi300x", Resources(sram_bytes=32 * 1024, registers=128), 4, 2, "sram"),
    ],
)
def test_occupancy(target: str, resources: Resources, warps: int, blocks: int, limit: str) -> None:
    result = occupancy(resources, LaunchOptions(warps, 2), find_target(target))
    assert (result.blocks, result.warps, result.limit) == (blocks, blocks * warps, limit)


def test_kernel_without_resources_is_limited_by_threads() -> None:
    result = occupancy(Resources(sram_bytes=0), LaunchOptions(4, 1), find_target("mi300x"))
    assert (result.blocks, result.limit) == (8, "threads")


def test_overflow_names_the_exceeded_resource() -> None:
    b200 = find_target("b200")
    assert overflow(Resources(sram_bytes=b200.sram_per_block), b200) == ""
    assert "232449 B of SRAM" in overflow(Resources(sram_bytes=b200.sram_per_block + 1), b200)
    columns = overflow(Resources(sram_bytes=0, tensor_memory_columns=640), b200)
    assert columns == "asks for 640 columns of tensor memory, and nvidia-b200 has 512"


@pytest.mark.slow
def test_spills_and_serialised_wgmma_are_found_without_ptxas_remarks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    calls: list[str] = []
    real = room._assemble_again

    def counted(ptx: str) -> str:
        calls.append("again")
        return real(ptx)

    monkeypatch.setattr(room, "_assemble_again", counted)
    kernel = a_kernel(128, block_m=128, block_n=128)
    resources = read_resources(kernel, find_target("h100"))
    assert resources.registers == 255
    assert resources.spill_bytes > 0
    assert resources.serialized_wgmma
    assert calls == [], "a fresh compilation tells by itself"
    assert read_resources(kernel, find_target("h100")).serialized_wgmma
    assert calls == ["again"], "a binary from the cache does not"


def test_resources_of_a_launch_are_those_of_all_kernels_but_registers_of_the_main_one() -> None:
    (problem,) = parse_shape("heads=8,kv_heads=2,seqlen_q=1,seqlen_kv=512,head_dim=64")
    target = find_target("h100")
    family = find_family("decode_split_kv")
    kernel = render(family, problem, family.default(problem, target), Specialization())
    main, last = read_parts(kernel, target)
    assert kernel.epilogue is not None
    assert (main.options, last.options) == (kernel.options, kernel.epilogue.options)
    longer = msgspec.structs.replace(last.resources, registers=254, spill_bytes=8, serialized_wgmma=True)
    together = combined((main, Part(longer, last.options)))
    assert together.sram_bytes == max(main.resources.sram_bytes, longer.sram_bytes)
    # Occupancy is that of the main kernel.
    assert (together.registers, together.spill_bytes) == (main.resources.registers, 8)
    assert together.serialized_wgmma
    assert together.warps is msgspec.UNSET
    seconds = main.resources.compile_seconds + last.resources.compile_seconds
    assert together.compile_seconds == pytest.approx(seconds)


@pytest.mark.parametrize("name", ["nvidia-h100", "nvidia-h200"])
def test_shipped_kernels_fit_a_multiprocessor(name: str) -> None:
    table = shipped_table_of(name)
    target = find_target(name)
    for record in table.records:
        if record.config is not None:
            assert record.resources is not None
            options = find_family(record.family).options(record.config)
            assert occupancy(record.resources, options, target).blocks, record.problem.key
