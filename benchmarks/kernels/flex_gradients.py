"""GPU time of gradients of score and mask functions: flashtune and torch's compiled flex_attention.

    python -m benchmarks.kernels.flex_gradients --save flex_gradients.json
    python -m benchmarks.kernels.flex_gradients --functions alibi bias --head-dims 128 --seqlens 4096

Gradients of q, k, v and captured tensors are first compared with torch's uncompiled function in float64, at
1000 queries and keys. The error may be twice that of torch's compiled function. The first call of both passes
is timed there, with its compilation. A kernel that another row or Triton's cache on disk has is not compiled
again. Then backward passes are interleaved in random order, with a cold L2 before each. Times are medians.
Shapes have 16k tokens in bf16. With --backend FLASH, torch's function uses FlashAttention-4, as in flex.py.
Block masks have random blocks of 64 or 128, of which a share is visible: those of flashtune, and of torch
with a function. Needs a GPU.
"""

import functools
import random
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import torch
import torch._functorch.config as compiling
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import flashtune
from benchmarks.kernels.flex import (
    AUTO,
    CHECKED,
    ROUNDS,
    TOKENS,
    Function,
    Functions,
    block_mask,
    compiled,
    gallery,
    inputs,
    measured_rows,
    options_of,
)
from benchmarks.saved import RESULTS, load, run_of, save
from flashtune.core.target import find_target
from flashtune.dispatch.versions import driver_version
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import read_resources
from flashtune.tuner.cli.output import table
from flashtune.tuner.execution.timing import measure_interleaved, once

SCRIPT = "benchmarks/kernels/flex_gradients.py"
SAVED = tuple(
    RESULTS / f"nvidia-h200-flex-gradients{part}.json.gz"
    for part in ("", "-second", "-third", "-fourth", "-fifth", "-sixth")
)

# Torch adds gradients of captured tensors by atomics, which takes seconds if a head has one element.
SLOW_MS, FEW_ROUNDS = 100.0, 1
# The smaller blocks of a block mask.
SMALL = 64


class Row(msgspec.Struct, frozen=True):
    """One case at one shape. Times are in milliseconds."""

    function: str
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int
    ours: float
    theirs: float  # Of torch's compiled function.
    error: float  # The largest error of a gradient over its largest element, at CHECKED queries.
    their_error: float  # Likewise of torch's compiled function.
    family: str = ""  # The kernel of flashtune, and the bytes that each thread of it spills.
    spilled: int = 0
    # The time of the first call of both passes, with their compilation, in seconds; 0 if it was not measured.
    first_call_s: float = 0.0
    their_first_call_s: float = 0.0  # Likewise of torch's compiled function.

    @property
    def is_right(self) -> bool:
        """Whether the error is at most twice theirs."""
        return self.error <= 2 * self.their_error + 1e-4


def cases(batch: int, heads: int, seqlen: int, device: torch.device) -> dict[str, Functions]:
    """Returns the functions of the gallery and more, with captured tensors for these extents."""
    generator = torch.Generator(device).manual_seed(0)
    bias, caps = (
        torch.rand(shape, device=device, generator=generator) + 0.5 for shape in ((seqlen, seqlen), (heads,))
    )
    blocks = {
        f"blocks of {size}, {percent}%": _blocks(size, percent, seqlen, generator)
        for size in (SMALL, 128)
        for percent in (20, 30, 60)
    }
    found = {
        **gallery(batch, heads, seqlen, device),
        "bias": Functions(lambda s, b, h, q, k: s + bias[q, k], captured=(bias,)),
        "learned cap": Functions(lambda s, b, h, q, k: caps[h] * torch.tanh(s / caps[h]), captured=(caps,)),
        **blocks,
    }
    for case in found.values():
        _trained(case.captured)
    return found


def _blocks(size: int, percent: int, seqlen: int, generator: torch.Generator) -> Functions:
    """Returns random blocks, with those on the diagonal."""
    count = -(-seqlen // size)
    seen = torch.rand(count, count, device=generator.device, generator=generator) < percent / 100
    seen |= torch.eye(count, dtype=torch.bool, device=generator.device)
    return Functions(mask=lambda b, h, q, k: seen[q // size, k // size], size=size, visible=seen)


def main() -> None:
    """Measures, prints, and writes the requested file."""
    options = options_of(__doc__, [*cases(1, 1, 1, torch.device("cpu"))])
    if not torch.cuda.is_available():
        raise SystemExit("flex_gradients.py measures GPU time, and no GPU is visible here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, driver {driver_version()}")
    # Backward passes run repeatedly with the same saved tensors.
    compiling.donated_buffer = False
    rows: list[Row] = []
    for row in measured_rows(measure, options):
        rows.append(row)
        print(line(row), flush=True)
        if options.save:
            save(options.save, rows)
    if not rows:
        raise SystemExit("no shape has a result")
    speedups = torch.tensor([row.theirs / row.ours for row in rows], dtype=torch.float64)
    wrong = sum(not row.is_right for row in rows)
    mean = speedups.log().mean().exp()
    print(f"{len(rows)} rows: geometric mean {mean:.2f}x, least {speedups.min():.2f}x, {wrong} wrong")
    raise SystemExit(wrong > 0)


def measure(
    name: str, heads: int, kv_heads: int, seqlen: int, head_dim: int, small: bool = False, backend: str = AUTO
) -> Row:
    """Returns the times of both implementations of a case in one run, after their comparison."""
    torch.compiler.reset()
    device = torch.device("cuda", 0)
    checked = check(name, heads, kv_heads, head_dim, device, small, backend)
    theirs = torch_function(name, small, backend)
    batch = max(1, TOKENS // seqlen)
    case = cases(batch, heads, seqlen, device)[name]
    tensors = _trained(inputs(batch, heads, kv_heads, seqlen, head_dim, device))
    runs = [backward(function, case, tensors) for function in (flashtune.flex_attention, theirs)]
    order = random.Random(f"{name} {heads} {seqlen} {head_dim}").sample(range(2), 2)  # noqa: S311 - an order
    slowest = max(once(run, device) for run in runs)
    rounds = ROUNDS if slowest < SLOW_MS else FEW_ROUNDS
    measured = measure_interleaved([runs[place] for place in order], device, rounds=rounds)
    times = dict(zip(order, (measurement.ms for measurement in measured), strict=True))
    own = kernel(case, tensors)
    ms = times[0], times[1]
    return Row(name, heads, kv_heads, seqlen, head_dim, *ms, *checked.errors, *own, *checked.first_s)


def torch_function(name: str, small: bool, backend: str) -> Function:
    """Returns torch's compiled function for a case. Its usual tiles are larger than small blocks of masks."""
    return compiled(small, autotuned=name.startswith(f"blocks of {SMALL},"), backend=backend)


def kernel(case: Functions, tensors: list[Tensor]) -> tuple[str, int]:
    """Returns the family of flashtune's kernel, and the bytes that each of its threads spills."""
    mask, options = arguments(flashtune.flex_attention, case, tensors)
    q, k, v = tensors
    found = flashtune.explain_flex(q, k, v, case.score, mask, enable_gqa=options["enable_gqa"]).backward
    if found is None or found.selection is None or found.specialization is None:
        return ("" if found is None else found.backend), 0
    record = found.selection.record
    assert record.config is not None
    rendered = render(find_family(record.family), found.problem, record.config, found.specialization)
    return record.family, read_resources(rendered, find_target(found.target)).spill_bytes


class Check(NamedTuple):
    """Figures of flashtune and of torch's compiled function at CHECKED queries and keys."""

    errors: tuple[float, float]  # The largest errors of the gradients, relative to the largest elements.
    first_s: tuple[float, float]  # The times of the first calls of both passes.


@functools.cache
def check(
    name: str, heads: int, kv_heads: int, head_dim: int, device: torch.device, small: bool, backend: str
) -> Check:
    """Returns errors and first times. Later rows with these heads have the figures of the first one."""
    case = cases(2, heads, CHECKED, device)[name]
    tensors = _trained(inputs(2, heads, kv_heads, CHECKED, head_dim, device))
    wide = _trained(tensor.detach().double() for tensor in tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exact = backward(flex_attention, case, wide)()
    largest, seconds = [], []
    # Torch is first. If its tiles do not fit, the check starts again, and nothing of flashtune was compiled.
    for function in (torch_function(name, small, backend), flashtune.flex_attention):
        torch.cuda.synchronize()
        started = time.perf_counter()
        gradients = backward(function, case, tensors)()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        pairs = zip(gradients, exact, strict=True)
        largest.append(
            # Unlike Python's, torch's maximum is NaN if a number is.
            torch.stack([(own.double() - other).abs().max() / other.abs().max() for own, other in pairs])
            .max()
            .item()
        )
    return Check((largest[1], largest[0]), (seconds[1], seconds[0]))


def backward(function: Any, case: Functions, tensors: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    """Returns the backward pass alone, with the gradients of captured tensors."""
    q = tensors[0]
    mask, options = arguments(function, case, tensors)
    out = function(*tensors, case.score, mask, **options)
    generator = torch.Generator(q.device).manual_seed(2)
    dout = torch.randn(out.shape, device=q.device, generator=generator).to(torch.bfloat16).to(out.dtype)
    return lambda: torch.autograd.grad(out, (*tensors, *case.captured), dout, retain_graph=True)


def arguments(function: Any, case: Functions, tensors: list[Tensor]) -> tuple[Any, dict[str, Any]]:
    """Returns the block mask and the options of a call of either function."""
    q, k, _ = tensors
    is_own = function is flashtune.flex_attention
    options: dict[str, Any] = {"enable_gqa": q.shape[1] > k.shape[1]}
    if case.visible is not None and is_own:
        return flashtune.BlockMask.from_blocks(case.visible, case.size), options
    return block_mask(case, q.shape[0], q.shape[2], q.device), options


def _trained(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.requires_grad_() for tensor in tensors]


def texts() -> dict[str, str]:
    """Returns the table of the saved runs, by name."""
    runs = [load(path, tuple[Row, ...]) for path in SAVED]
    names = [*cases(1, 1, 1, torch.device("cpu"))]
    measured = [row for run in runs for row in run.rows]
    measured.sort(key=lambda row: (names.index(row.function), row.head_dim, row.seqlen))
    rows = [
        (
            row.function,
            str(row.seqlen),
            str(row.head_dim),
            f"{row.ours:.3f}",
            f"{row.theirs:.3f}",
            f"{row.theirs / row.ours:.2f}",
        )
        for row in measured
    ]
    first = measured[0]
    heads = "function", "tokens", "head dim", "ms", "torch, ms", "speed over torch"
    intro = f"{run_of(runs[0].source)}, bf16, {first.heads}/{first.kv_heads} heads:"
    return {"flex-gradients": "\n".join((intro, "", *table(heads, rows)))}


def line(row: Row) -> str:
    """Returns the text of a row."""
    shape = f"{row.heads}/{row.kv_heads} heads, S={row.seqlen}, D={row.head_dim}"
    verdict = "" if row.is_right else f"; WRONG: error {row.error:.2g} of {row.their_error:.2g}"
    speedup = row.theirs / row.ours
    times = f"{row.ours:.3f} ms of {row.theirs:.3f} ({speedup:.2f}x)"
    first = f"first call {row.first_call_s:.1f} s of {row.their_first_call_s:.1f}"
    return f"{row.function}, {shape}: {times}; {row.family}, {row.spilled} bytes spilled, {first}{verdict}"


if __name__ == "__main__":
    main()
