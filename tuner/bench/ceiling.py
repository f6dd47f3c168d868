"""Speeds of a plain matrix product and a plain copy in the same run: upper bounds for attention."""

import functools

import torch

from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Dtype
from flashtune.tuner.bench.results import Ceiling, Copy
from flashtune.tuner.execution.sdpa import precision_of
from flashtune.tuner.execution.timing import Run, clock_mhz, measure_interleaved

# Large enough to make wave quantization, edges and launches negligible.
SIDE = 8192
# Much larger than any last-level cache.
COPIED_BYTES = 2**29


def measure_ceiling(dtype: Dtype, device: torch.device, *, rounds: int) -> Ceiling:
    """Times a square product of an element type.

    Values are random, since power and thus the clock depend on them.
    """
    with torch.cuda.device(device), precision_of(dtype):
        run = _product(TORCH_DTYPES[dtype], device)
        (measured,) = measure_interleaved([run], device, rounds=rounds)
        run()
        clock = clock_mhz(device)
    return Ceiling(dtype, SIDE, measured.ms, 2 * SIDE**3 / measured.ms / 1e9, clock)


def _product(dtype: torch.dtype, device: torch.device) -> Run:
    left, right = (torch.randn(SIDE, SIDE, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    if dtype.itemsize == 1:
        # 8-bit factors need scales, and a column-major second factor.
        unit_scale = torch.ones((), device=device)
        # torch has no public name for it.
        multiply = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        return functools.partial(
            multiply, left, right.t(), unit_scale, unit_scale, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return functools.partial(torch.mm, left, right, out=torch.empty_like(left))


def measure_copy(device: torch.device, *, rounds: int) -> Copy:
    """Times a copy of device memory."""
    with torch.cuda.device(device):
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=device)
        run = functools.partial(torch.empty_like(source).copy_, source)
        (measured,) = measure_interleaved([run], device, rounds=rounds)
    moved = 2 * COPIED_BYTES
    return Copy(moved, measured.ms, moved / measured.ms / 1e6)
