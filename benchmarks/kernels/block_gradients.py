"""GPU time of gradients with block masks: flashtune and torch's compiled flex_attention.

    python -m benchmarks.kernels.block_gradients --save block_gradients.json
    python -m benchmarks.kernels.block_gradients --sizes 128 --percents 30 --head-dims 128

Blocks are random, and each query sees its own block. Heads and sequences share the mask. Gradients are first
compared with those of a dense mask in float32. The error may be twice that of torch's
compiled function. Then backward passes are interleaved in random order, with a cold L2 before each. Times are
medians, and shapes are measured in random order. Needs a GPU.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
import torch._functorch.config as compiling
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashtune
from benchmarks.kernels.flex import inputs
from benchmarks.saved import save
from flashtune.dispatch.versions import driver_version
from flashtune.tuner.execution.timing import measure_interleaved

ROUNDS = 21
Pass = Callable[[], tuple[Tensor, ...]]


class Row(msgspec.Struct, frozen=True):
    """One shape. Times are in milliseconds."""

    size: int  # Queries and keys of a block.
    percent: int  # Of visible blocks.
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int
    family: str  # Of our kernel.
    ours: float
    theirs: float  # Of torch's compiled function.
    error: float  # The largest error of a gradient over its largest element.
    their_error: float  # Likewise of torch's compiled function.

    @property
    def is_right(self) -> bool:
        """Whether the error is at most twice theirs."""
        return self.error <= 2 * self.their_error + 1e-4


def main() -> None:
    """Measures, prints, and writes the requested file."""
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("block_gradients.py measures GPU time, and no GPU is visible here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, driver {driver_version()}")
    # Backward passes run repeatedly with the same saved tensors.
    compiling.donated_buffer = False
    shapes = [
        (size, percent, heads, seqlen, head_dim)
        for size in options.sizes
        for percent in options.percents
        for heads in options.heads
        for seqlen in options.seqlens
        for head_dim in options.head_dims
    ]
    rows: list[Row] = []
    for size, percent, (heads, kv_heads), seqlen, head_dim in random.sample(shapes, len(shapes)):
        rows.append(measure(size, percent, heads, kv_heads, seqlen, head_dim))
        print(line(rows[-1]), flush=True)
        if options.save:
            save(options.save, rows)
    speedups = torch.tensor([row.theirs / row.ours for row in rows], dtype=torch.float64)
    wrong = sum(not row.is_right for row in rows)
    mean = speedups.log().mean().exp()
    print(f"{len(rows)} rows: geometric mean {mean:.2f}x, least {speedups.min():.2f}x, {wrong} wrong")
    raise SystemExit(wrong > 0)


def measure(size: int, percent: int, heads: int, kv_heads: int, seqlen: int, head_dim: int) -> Row:
    """Both implementations at a shape in one run, after their comparison."""
    torch.compiler.reset()
    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)
    count = -(-seqlen // size)
    seen = torch.rand(count, count, device=device, generator=generator) < percent / 100
    seen |= torch.eye(count, dtype=torch.bool, device=device)
    mask = flashtune.BlockMask.from_blocks(seen, size)
    extents = None, None, seqlen, seqlen
    torch_mask = create_block_mask(
        lambda b, h, q, k: seen[q // size, k // size], *extents, device=device, BLOCK_SIZE=size
    )
    is_grouped = heads > kv_heads
    tensors = q, k, v = tuple(
        tensor.requires_grad_() for tensor in inputs(1, heads, kv_heads, seqlen, head_dim, device)
    )
    dout = torch.randn(q.shape, dtype=torch.bfloat16, device=device, generator=generator)

    def backward(out: Tensor) -> Pass:
        return lambda: torch.autograd.grad(out, tensors, dout, retain_graph=True)

    compiled = torch.compile(flex_attention, dynamic=False)
    runs = [
        backward(flashtune.attention(q, k, v, block_mask=mask, prefer="generated")),
        backward(compiled(q, k, v, block_mask=torch_mask, enable_gqa=is_grouped)),
    ]
    exact = reference([*tensors], seen.repeat_interleave(size, 0).repeat_interleave(size, 1), dout)
    errors = [largest_error(run(), exact) for run in runs]
    order = random.sample(range(2), 2)
    measured = measure_interleaved([runs[place] for place in order], device, rounds=ROUNDS)
    times = dict(zip(order, (measurement.ms for measurement in measured), strict=True))
    explained = flashtune.explain(q, k, v, block_mask=mask, prefer="generated").backward
    selection = None if explained is None else explained.selection
    family = "" if selection is None else selection.record.family
    shape = size, percent, heads, kv_heads, seqlen, head_dim
    return Row(*shape, family, times[0], times[1], *errors)


def reference(tensors: list[Tensor], seen: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """The gradients in float32. `seen` has the visible pairs."""
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    q, *grouped = wide
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in grouped)
    rows, columns = q.shape[2], k.shape[2]
    scores = (q @ k.mT * q.shape[3] ** -0.5).masked_fill(~seen[:rows, :columns], -torch.inf)
    return torch.autograd.grad(scores.softmax(-1) @ v, wide, dout.float())


def largest_error(gradients: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """The largest error of a gradient over its largest element, NaN if a number is."""
    pairs = zip(gradients, exact, strict=True)
    errors = [(own.float() - other).abs().max() / other.abs().max() for own, other in pairs]
    return torch.stack(errors).max().item()


def line(row: Row) -> str:
    """A row as it is printed."""
    shape = f"{row.heads}/{row.kv_heads} heads, S={row.seqlen}, D={row.head_dim}"
    verdict = "" if row.is_right else f"; WRONG: error {row.error:.2g} of {row.their_error:.2g}"
    times = f"{row.ours:.3f} ms of {row.theirs:.3f} ({row.theirs / row.ours:.2f}x)"
    return f"blocks of {row.size}, {row.percent}%, {shape}: {row.family} {times}{verdict}"


def _heads(text: str) -> tuple[int, int]:
    heads, kv_heads = map(int, text.split("/"))
    return heads, kv_heads


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--percents", type=int, nargs="+", default=[20, 30, 60])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[6144])
    parser.add_argument("--heads", type=_heads, nargs="+", default=[(16, 16), (32, 8)], metavar="Q/KV")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
