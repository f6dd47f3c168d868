"""The memory of each known GPU, from registers to device memory: sizes, bandwidths and their sources."""

from typing import NamedTuple

from flashtune.core.target import TARGETS
from flashtune.tuner.analysis.charts import BYTES, Chart

GB, GIB = 10**9, 2**30
REGISTER_BYTES = 4
# Shared memory has 32 banks of 4 bytes.
SRAM_BYTES_PER_CLOCK = 128


class Memory(NamedTuple):
    """Device memory of a GPU, and the bandwidth of its last-level cache if the vendor publishes it."""

    bytes: int
    source: str  # The vendor's document.
    l2_gbps: float | None = None
    l2_source: str = ""


A100_L2 = "derived: 5120 bytes a clock (NVIDIA A100 architecture white paper) times the boost clock"
MI300X_L2 = "the Infinity Cache (AMD CDNA 3 architecture white paper)"
SRAM_RATE = (
    "derived: 128 bytes a clock and SM (CUDA C++ Programming Guide; ROCm Compute Profiler documentation) "
    "times the boost clock"
)
SPECIFICATIONS = "CUDA C++ Programming Guide; AMD GPU specifications (ROCm documentation)"
MEMORIES = {
    "nvidia-a100": Memory(80 * GB, "NVIDIA A100 datasheet (80GB SXM)", 5120 * 1.41, A100_L2),
    "nvidia-l4": Memory(24 * GB, "NVIDIA L4 datasheet"),
    "nvidia-l40s": Memory(48 * GB, "NVIDIA L40S datasheet"),
    "nvidia-h100": Memory(80 * GB, "NVIDIA H100 datasheet (SXM)"),
    "nvidia-h200": Memory(141 * GB, "NVIDIA H200 datasheet (SXM)"),
    "nvidia-b200": Memory(180 * GB, "derived: an eighth of a DGX B200 (NVIDIA DGX B200 User Guide)"),
    "nvidia-rtx-4090": Memory(24 * GB, "NVIDIA Ada GPU architecture white paper"),
    "nvidia-rtx-5090": Memory(32 * GB, "NVIDIA RTX Blackwell GPU architecture white paper"),
    "amd-mi300x": Memory(192 * GIB, "AMD GPU specifications (ROCm documentation)", 17200, MI300X_L2),
}


def memory_levels() -> tuple[Chart, ...]:
    """Returns the sizes of each level on the whole GPU and on one SM, and the bandwidths."""
    gpus = [(target, MEMORIES[target.name]) for target in TARGETS]
    registers = [gpu.registers_per_sm * REGISTER_BYTES for gpu in TARGETS]
    whole = {
        "registers": tuple(gpu.sm_count * size for gpu, size in zip(TARGETS, registers, strict=True)),
        "SRAM": tuple(gpu.sm_count * gpu.sram_per_sm for gpu in TARGETS),
        "L2": tuple(gpu.l2_bytes for gpu in TARGETS),
        "HBM": tuple(memory.bytes for _, memory in gpus),
    }
    one = {
        "registers": tuple(registers),
        "SRAM": tuple(gpu.sram_per_sm for gpu in TARGETS),
        "SRAM of a block": tuple(gpu.sram_per_block for gpu in TARGETS),
    }
    rates = {
        "SRAM": tuple(gpu.sm_count * SRAM_BYTES_PER_CLOCK * gpu.clock_mhz / 1000 for gpu in TARGETS),
        "L2": tuple(memory.l2_gbps for _, memory in gpus),
        "HBM": tuple(gpu.hbm_bandwidth for gpu in TARGETS),
    }
    sizes = {f"HBM of {gpu.short_name}": memory.source for gpu, memory in gpus}
    sizes["registers and SRAM"] = "derived: those of one SM times the number of SMs"
    sources = {f"L2 of {gpu.short_name}": memory.l2_source for gpu, memory in gpus if memory.l2_source}
    names = tuple(target.short_name for target in TARGETS)
    return tuple(
        Chart(title=title, across="target", positions=names, unit=unit, lines=lines, notes=notes)
        for title, unit, lines, notes in (
            ("Memory of the whole GPU", BYTES, whole, sizes),
            ("Memory of one SM", BYTES, one, {"source": SPECIFICATIONS}),
            ("Bandwidth", "GB/s", rates, {**sources, "SRAM": SRAM_RATE, "HBM": "the vendors' datasheets"}),
        )
    )
