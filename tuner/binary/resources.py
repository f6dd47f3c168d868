"""The compiler's report of a kernel on a target, and the resulting occupancy.

Needs no GPU: Triton cross-compiles, and the requested resources are read from the binary.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from flashtune.core.config import LaunchOptions
from flashtune.core.errors import KernelError
from flashtune.core.machine import machine_errors
from flashtune.core.record import Resources
from flashtune.core.target import KIB, Target
from flashtune.launch.compilation import compile_kernel
from flashtune.tuner.binary.disassembly import dump, run_tool, unwritten

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from flashtune.core.kernel import Kernel

# Shared memory that the driver reserves for each resident block, on sm_80 and later.
RESERVED_SRAM = KIB
SRAM_GRANULE = 128
# Registers are allocated per warp, in units of this many per thread.
REGISTER_GRANULE = 8
TENSOR_MEMORY_GRANULE = 32
HOPPER = 90
# ptxas reports C7510 to C7519 if it has to wait after each asynchronous matrix instruction. C7517 reports one
# inserted wait, which costs nothing if another follows.
WARPGROUP_INSTRUCTION = "wgmma.mma_async"
SERIALIZED = re.compile(r"\(C751[0-689]\)|wgmma\.mma_async instructions are serialized")


class Occupancy(msgspec.Struct, frozen=True):
    """Resident blocks of a kernel on one SM, and the resource that limits their number."""

    blocks: int  # Resident blocks, 0 if not even one fits.
    warps: int  # Resident warps.
    limit: str  # `sram`, `registers`, `threads` or `tensor memory`, the first to run out.


class Part(NamedTuple):
    """The compiler's report of one of the kernels of a launch, and its options."""

    resources: Resources
    options: LaunchOptions  # The compiler's options.
    flaw: str = ""  # An error in its machine code that its source does not contain; empty if none.


def read_resources(kernel: Kernel, target: Target) -> Resources:
    """Compiles a kernel with prologue and epilogue for a target, and returns the resources of their launch.

    `read_parts` also reports whether the machine code is correct.
    """
    return combined(read_parts(kernel, target))


def read_parts(kernel: Kernel, target: Target) -> tuple[Part, ...]:
    """Returns the resources of a kernel, then of its steps if it has them."""
    with machine_errors():
        return tuple(_read(part, target) for part in kernel.parts)


def read_sizes(kernel: Kernel, target: Target) -> Resources:
    """Compiles a kernel as `read_resources` does, and returns its maximum shared and tensor memory.

    Both are in the compiler's metadata. Registers, spills and serialisation are left out: they need a run of
    a tool for each kernel.
    """
    with machine_errors():
        compiled = [compile_kernel(part, target).metadata for part in kernel.parts]
    return Resources(
        sram_bytes=max(metadata.shared for metadata in compiled),
        tensor_memory_columns=max(getattr(metadata, "tmem_size", None) or 0 for metadata in compiled),
    )


def combined(parts: tuple[Part, ...]) -> Resources:
    """Returns the resources of a launch of several kernels, the main one first, and their total compile time.

    Registers and warps are those of the main kernel, since their product limits its occupancy. Other sizes
    are the maxima of all kernels.
    """
    taken = [part.resources for part in parts]
    return Resources(
        sram_bytes=max(resources.sram_bytes for resources in taken),
        tensor_memory_columns=max(resources.tensor_memory_columns for resources in taken),
        registers=taken[0].registers,
        spill_bytes=max(resources.spill_bytes for resources in taken),
        serialized_wgmma=any(resources.serialized_wgmma for resources in taken),
        compile_seconds=sum(resources.compile_seconds for resources in taken),
        warps=taken[0].warps,
    )


def _read(kernel: Kernel, target: Target) -> Part:
    start = time.perf_counter()
    compiled, remarks = _compile(kernel, target)
    seconds = time.perf_counter() - start
    usage = _nvidia_usage(compiled) if target.is_nvidia else _amd_usage(compiled)
    specialized = compiled.metadata.num_warps != kernel.options.num_warps
    resources = Resources(
        sram_bytes=compiled.metadata.shared,
        tensor_memory_columns=getattr(compiled.metadata, "tmem_size", None) or 0,
        registers=usage.registers,
        spill_bytes=usage.spill_bytes,
        serialized_wgmma=_is_serialized(compiled, remarks, suspect=specialized or usage.spill_bytes > 0),
        compile_seconds=seconds,
        warps=compiled.metadata.num_warps if specialized else msgspec.UNSET,
    )
    # Serialised kernels are not launched anyway.
    suspect = _multiplies_by_warpgroups(compiled) and not resources.serialized_wgmma
    return Part(resources, kernel.options, _flaw(compiled) if suspect else "")


def _flaw(compiled: CompiledKernel) -> str:
    """Returns an error in machine code, which is checked only where ptxas is known to make errors."""
    reader = unwritten(dump(compiled.asm["cubin"], "--dump-sass"))
    return f"ptxas made code that reads a register which nothing wrote ({reader})" if reader else ""


def _multiplies_by_warpgroups(compiled: CompiledKernel) -> bool:
    return WARPGROUP_INSTRUCTION in compiled.asm.get("ptx", "")


def overflow(resources: Resources, target: Target, verb: str = "asks for") -> str:
    """Returns the exceeded capacity of the target as a clause, or an empty text if the kernel fits."""
    if resources.sram_bytes > target.sram_per_block:
        return f"{verb} {resources.sram_bytes} B of SRAM, and {target.name} has {target.sram_per_block}"
    required, available = resources.tensor_memory_columns, target.tensor_memory_columns
    if required > available:
        return f"{verb} {required} columns of tensor memory, and {target.name} has {available}"
    return ""


def misfit(part: Part, target: Target) -> str:
    """Returns why a target cannot launch a compiled kernel, or an empty text."""
    over = overflow(part.resources, target)
    if over:
        return over
    resident = occupancy(part.resources, part.options, target)
    if not resident.blocks:
        return f"not one block fits a multiprocessor of {target.name}: too much of its {resident.limit}"
    return ""


def occupancy(resources: Resources, options: LaunchOptions, target: Target) -> Occupancy:
    """Returns the number of blocks with these resources that are resident on one SM of the target."""
    warps = options.num_warps if resources.warps is msgspec.UNSET else resources.warps
    threads = warps * target.warp_size
    reserved = RESERVED_SRAM if target.is_nvidia else 0
    sram = _rounded(resources.sram_bytes, SRAM_GRANULE) + reserved
    registers = _rounded(max(resources.registers, 1), REGISTER_GRANULE) * threads
    limits = {
        "sram": target.sram_per_sm // sram if sram else target.threads_per_sm,
        "registers": target.registers_per_sm // registers,
        "threads": target.threads_per_sm // threads,
    }
    if resources.tensor_memory_columns:
        columns = _rounded(resources.tensor_memory_columns, TENSOR_MEMORY_GRANULE)
        limits["tensor memory"] = target.tensor_memory_columns // columns
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limit], limits[limit] * warps, limit)


class _Usage(NamedTuple):
    registers: int
    spill_bytes: int


def _rounded(amount: int, granule: int) -> int:
    return -(-amount // granule) * granule


def _nvidia_usage(compiled: CompiledKernel) -> _Usage:
    report = dump(compiled.asm["cubin"], "--dump-resource-usage")
    fields = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report))
    if "REG" not in fields:
        raise KernelError("cuobjdump named no registers for this kernel: reinstall triton")
    # Spilled registers are on the stack, and Triton's kernels have no other data there.
    return _Usage(int(fields["REG"]), int(fields["STACK"]) + int(fields["LOCAL"]))


def _amd_usage(compiled: CompiledKernel) -> _Usage:
    fields = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"]))
    try:
        return _Usage(int(fields["vgpr_count"]), int(fields["private_segment_fixed_size"]))
    except KeyError as missing:
        raise KernelError(
            f"the compiler's output for this kernel has no {missing.args[0]}: reinstall triton"
        ) from None


def _compile(kernel: Kernel, target: Target) -> tuple[CompiledKernel, str]:
    """Returns the binary and ptxas's remarks. The remarks are empty if the binary was in Triton's cache."""
    from triton import knobs

    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as printed:
        knobs.nvidia.dump_ptxas_log = True
        compiled = compile_kernel(kernel, target)
    return compiled, printed.getvalue()


def _is_serialized(compiled: CompiledKernel, remarks: str, suspect: bool) -> bool:
    """Returns whether ptxas serialised matrix instructions.

    It does so if registers are scarce, and then mostly spills too, except in kernels whose warps exchange
    registers at run time. If the remarks of such a suspect are missing, ptxas runs again.
    """
    if not _multiplies_by_warpgroups(compiled):
        return False
    if not remarks and suspect:
        remarks = _assemble_again(compiled.asm["ptx"])
    return SERIALIZED.search(remarks) is not None


def _assemble_again(ptx: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        binary = str(Path(folder, "kernel.cubin"))
        return run_tool(_assembler(), "-v", "--gpu-name=sm_90a", str(source), "-o", binary)


def _assembler() -> str:
    """Returns the ptxas that Triton runs for Hopper. A wheel contains several."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(HOPPER).path)
