"""Rows of one sequence in several calls of emulated Hopper kernels, to compare bits.

Numbers are float64, so that another order of arithmetic changes the last bits of most rows.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import torch

from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, Problem
from flashtune.templates.family import ORDERED_KEYS
from tests.emulator.hardware import Array
from tests.emulator.program import emulate
from tests.emulator.splits import PARTIALS, empty_parts

KEYS, HEADS, KV_HEADS = 650, 4, 2


class Surrounding(NamedTuple):
    """The queries of each sequence of a call, and the keys. The compared sequence is `own`."""

    queries: int
    keys: tuple[int, ...]
    own: int = 0


SURROUNDINGS = (
    Surrounding(KEYS, (KEYS,)),
    Surrounding(130, (333, KEYS), 1),
    Surrounding(70, (900, 290), 1),
    Surrounding(7, (200,)),
    Surrounding(1, (KEYS, 841, 3)),
    Surrounding(1, (129,)),
)


def rows_in_surroundings(kernel: Kernel, problem: Problem) -> Iterator[tuple[int, Array]]:
    """Yields the first position and the rows [heads, rows, columns] of the sequence in each call.

    The kernel is causal, and has lengths on the device.
    """
    assert problem.kv_lengths
    assert problem.causal is Causal.BOTTOM_RIGHT
    chance = torch.Generator().manual_seed(3)
    widths = (HEADS, problem.head_dim), (KV_HEADS, problem.head_dim), (KV_HEADS, problem.value_head_dim)
    own = [torch.randn(heads, KEYS, width, generator=chance, dtype=torch.float64) for heads, width in widths]
    for queries, keys, place in SURROUNDINGS:
        longest = max(keys) + 5
        rows = (queries, longest, longest)
        q, k, v = (
            torch.randn(len(keys), heads, many, width, generator=chance, dtype=torch.float64)
            for (heads, width), many in zip(widths, rows, strict=True)
        )
        end = keys[place]
        q[place] = own[0][:, end - queries : end]
        k[place, :, :end], v[place, :, :end] = own[1][:, :end], own[2][:, :end]
        yield end - queries, _output(kernel, problem, (q, k, v), keys)[place]


def _output(
    kernel: Kernel, problem: Problem, inputs: tuple[torch.Tensor, ...], keys: tuple[int, ...]
) -> Array:
    q, _, v = inputs
    out = np.zeros((*q.shape[:3], v.shape[3]))
    side = ExtraInputs(seqlens_kv=torch.tensor(keys).int())
    shapes = (*(tuple(tensor.shape) for tensor in inputs), out.shape)
    like = tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    memory = (*(tensor.flatten().numpy() for tensor in inputs), out.reshape(-1))
    parts = empty_parts(kernel, like, side)
    extra = tuple(tensor.numpy() for tensor in side.tensors)
    lse = np.zeros(out[..., 0].size)
    emulate(kernel, like, memory, extra, lse, problem.head_dim**-0.5, 2, parts)
    if len(parts) == PARTIALS:
        return combined_in_order(parts[0], parts[1], out.shape)
    return memory[3].reshape(out.shape)


def shortened(kernel: Kernel) -> Kernel:
    """Returns a kernel with splits of two blocks."""
    (block,) = re.findall(r"BLOCK_N = gl.constexpr\((\d+)\)", kernel.source)
    source = re.sub(r"SPLIT_BLOCKS = .*", "SPLIT_BLOCKS = gl.constexpr(2)", kernel.source)
    source = source.replace(f", {ORDERED_KEYS})", f", {2 * int(block)})")
    return msgspec.structs.replace(kernel, source=source)


def combined_in_order(parts: Array, logs: Array, shape: tuple[int, ...]) -> Array:
    """Combines splits one by one from the last to the first, as `combine` of batch-invariant kernels does."""
    # Splits beyond the last key of a sequence are not written.
    parts, logs = np.nan_to_num(parts), np.nan_to_num(logs, nan=-np.inf, neginf=-np.inf)
    largest, total, out = np.full(logs.shape[1], -np.inf), np.zeros(logs.shape[1]), np.zeros(parts.shape[1:])
    with np.errstate(invalid="ignore"):
        for part, log in zip(parts[::-1], logs[::-1], strict=True):
            new = np.maximum(largest, log)
            shift = np.where(np.isneginf(new), 0.0, new)
            kept, added = np.exp2(largest - shift), np.exp2(log - shift)
            total = total * kept + added
            out = part * added[:, None] + out * kept[:, None]
            largest = new
    factor = 1.0 / np.where(total == 0.0, 1.0, total)
    combined: Array = (out * factor[:, None]).reshape(shape)
    return combined


def differing(kernel: Kernel, problem: Problem, expected: Kernel) -> int:
    """Counts the elements with other bits than those of the whole sequence alone, by the kernel `expected`.

    Splits are shorter than those of both kernels.
    """
    problem = msgspec.structs.replace(problem, heads=HEADS, kv_heads=KV_HEADS)
    calls = rows_in_surroundings(shortened(kernel), problem)
    alone = next(rows_in_surroundings(shortened(expected), problem))[1]
    return sum(int((rows != alone[:, first : first + rows.shape[1]]).sum()) for first, rows in calls)
