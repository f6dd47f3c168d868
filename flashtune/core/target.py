"""`Target`: the properties of one GPU that determine its limits and speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec

from flashtune.core.errors import TargetError, nearest, quoted

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

KIB = 1024
MIB = 1024 * KIB

# Bounds of a GPU's properties in stored records; `$` would allow a line break at the end.
TargetName = Annotated[str, msgspec.Meta(max_length=100, pattern=r"^[!-~]+\Z")]
ArchName = Annotated[str, msgspec.Meta(pattern=r"^(sm_[0-9]{2,3}|gfx[0-9a-f]{3,4})\Z")]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e9)]


class PeakFlops(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dense peak rates in TFLOP/s: Tensor Cores with 16-bit inputs, and fp32 without Tensor Cores."""

    half: Rate
    fp32: Rate

    @property
    def fp8(self) -> float:
        """Rate of Tensor Cores with 8-bit floats: twice that of 16 bits on every GPU that supports them."""
        return 2 * self.half


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Properties of one GPU."""

    name: TargetName  # Marketing name in lower case with dashes, such as `nvidia-h200`.
    arch: ArchName  # Compiler architecture: `sm_90`, `gfx942`.
    sram_per_block: Count  # The largest shared memory of one CTA (opt-in), in bytes.
    sram_per_sm: Count  # Shared memory of one SM, in bytes.
    registers_per_sm: Count  # 32-bit registers of one SM.
    threads_per_sm: Count  # Resident threads of one SM.
    # Columns of tensor memory (sm_100: 512), 0 without tensor memory.
    tensor_memory_columns: Annotated[int, msgspec.Meta(ge=0, le=2**16)]
    sm_count: Annotated[int, msgspec.Meta(ge=1, le=2**16)]  # Number of SMs (compute units on AMD).
    l2_bytes: Count  # Last-level cache, in bytes.
    hbm_bandwidth: Rate  # Device memory bandwidth from the datasheet, in GB/s.
    clock_mhz: Count  # Boost clock.
    peak: PeakFlops  # Dense peak rates, in TFLOP/s.
    warp_size: Annotated[int, msgspec.Meta(ge=1, le=128)] = 32  # Threads of a warp (64 on CDNA).

    @property
    def is_listed(self) -> bool:
        """Whether the table lists a GPU of this name."""
        return any(self.name == target.name for target in TARGETS)

    @property
    def short_name(self) -> str:
        """The name without the vendor: `h200`. `find_target` accepts both."""
        return self.name.partition("-")[2] or self.name

    @property
    def is_nvidia(self) -> bool:
        """Whether this is a CUDA GPU."""
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> int:
        """Compute capability as a number: 90 for `sm_90`; 0 for other vendors."""
        return int(self.arch.removeprefix("sm_")) if self.is_nvidia else 0

    @property
    def has_descriptors(self) -> bool:
        """Whether the GPU supports tensor descriptors (TMA)."""
        return self.capability >= 90

    def triton_target(self) -> GPUTarget:
        """Returns the GPU as a target of Triton's compiler."""
        from triton.backends.compiler import GPUTarget

        if self.is_nvidia:
            return GPUTarget("cuda", self.capability, self.warp_size)
        return GPUTarget("hip", self.arch, self.warp_size)


def _nvidia(
    name: str,
    arch: str,
    sram_kib: int,
    sm_count: int,
    l2_mib: int,
    bandwidth: float,
    clock: int,
    half: float,
    fp32: float,
    threads: int = 2048,
    tensor_memory: int = 0,
) -> Target:
    # The driver reserves 1 KiB of shared memory per resident CTA.
    return Target(
        name,
        arch,
        (sram_kib - 1) * KIB,
        sram_kib * KIB,
        65536,
        threads,
        tensor_memory,
        sm_count,
        l2_mib * MIB,
        bandwidth,
        clock,
        PeakFlops(half, fp32),
    )


# From vendors' datasheets and the CUDA programming guide (capacities). Rates are dense, with 16-bit inputs
# and fp32 accumulation.
TARGETS: tuple[Target, ...] = (
    _nvidia("nvidia-a100", "sm_80", 164, 108, 40, 2039, 1410, 312, 19.5),
    _nvidia("nvidia-l4", "sm_89", 100, 58, 48, 300, 2040, 121, 30.3, threads=1536),
    _nvidia("nvidia-l40s", "sm_89", 100, 142, 96, 864, 2520, 362, 91.6, threads=1536),
    _nvidia("nvidia-h100", "sm_90", 228, 132, 50, 3350, 1980, 989, 67),
    _nvidia("nvidia-h200", "sm_90", 228, 132, 50, 4800, 1980, 989, 67),
    _nvidia("nvidia-b200", "sm_100", 228, 148, 126, 8000, 1965, 2250, 75, tensor_memory=512),
    _nvidia("nvidia-rtx-4090", "sm_89", 100, 128, 72, 1008, 2520, 165, 82.6, threads=1536),
    _nvidia("nvidia-rtx-5090", "sm_120", 100, 170, 96, 1792, 2407, 209, 104.8, threads=1536),
    Target(
        "amd-mi300x",
        "gfx942",
        64 * KIB,
        64 * KIB,
        131072,
        2048,
        0,
        304,
        256 * MIB,
        5300,
        2100,
        PeakFlops(1307, 163.4),
        64,
    ),
)


def find_target(name: str) -> Target:
    """Returns the table's entry for a name. The vendor prefix is optional (`h100`)."""
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    for target in TARGETS:
        if wanted in (target.name, target.name.split("-", 1)[1], target.name.replace("-rtx-", "-")):
            return target
    names = (target.short_name for target in TARGETS)
    raise TargetError(f"there is no target {quoted(name)}: {nearest(wanted, names, cutoff=0.8)}")


def device_uuid(index: int) -> str:
    """Returns the UUID of a GPU of this machine."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def device_target(index: int = 0) -> Target:
    """Returns the properties of a GPU of this machine: capacities from the device, rates from the table.

    The rates of an unlisted GPU are scaled from the nearest architecture by the number of SMs. A search then
    has an approximate roofline model.
    """
    import torch

    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise TargetError("no GPU is visible here: name one to work for it offline (--target NAME)")
    properties = torch.cuda.get_device_properties(index)
    name = canonical_name(properties.name)
    listed = {target.name: target.sm_count for target in TARGETS}
    if listed.get(name) != properties.multi_processor_count:
        # Another model of the same name, such as a laptop's, or a MIG slice: stored times do not apply to it.
        name = device_slug(properties.name)
    arch = (
        getattr(properties, "gcnArchName", "").split(":")[0]
        if torch.version.hip
        else f"sm_{properties.major}{properties.minor}"
    )
    base = _nearest(name, arch)
    sm_count = properties.multi_processor_count
    scale = sm_count / base.sm_count if name != base.name else 1.0
    return msgspec.structs.replace(
        base,
        name=name,
        arch=arch,
        sram_per_block=getattr(properties, "shared_memory_per_block_optin", 0) or base.sram_per_block,
        sram_per_sm=getattr(properties, "shared_memory_per_multiprocessor", 0) or base.sram_per_sm,
        registers_per_sm=getattr(properties, "regs_per_multiprocessor", 0) or base.registers_per_sm,
        sm_count=sm_count,
        l2_bytes=getattr(properties, "L2_cache_size", 0) or base.l2_bytes,
        hbm_bandwidth=base.hbm_bandwidth,
        peak=PeakFlops(base.peak.half * scale, base.peak.fp32 * scale),
    )


def device_slug(device_name: str) -> str:
    """Returns a device's name in lower case with dashes: `NVIDIA H100 PCIe` is `nvidia-h100-pcie`."""
    return "-".join(device_name.lower().replace("geforce", "").replace("instinct", "").split())


def canonical_name(device_name: str) -> str:
    """Returns a device's name as a target's: `NVIDIA H100 80GB HBM3` is `nvidia-h100`, or its slug."""
    slug = device_slug(device_name)
    for target in sorted(TARGETS, key=lambda target: -len(target.name)):
        if slug == target.name or slug.startswith(target.name + "-"):
            return target.name
    return slug


def names_gpu(target_name: str, device_name: str) -> bool:
    """Returns whether a device's name matches a target's."""
    return target_name in (canonical_name(device_name), device_slug(device_name))


def _nearest(name: str, arch: str) -> Target:
    for target in TARGETS:
        if target.name == name:
            return target
    vendor = "sm_" if arch.startswith("sm_") else "gfx"
    same_vendor = [target for target in TARGETS if target.arch.startswith(vendor)]
    if not same_vendor:
        raise TargetError(f"{name} ({arch}) is an architecture that flashtune does not support")
    if vendor == "gfx":
        return same_vendor[0]
    capability = int(arch.removeprefix("sm_"))
    return min(same_vendor, key=lambda target: abs(target.capability - capability))
