"""Compares default calls of `flashtune.attention` with SDPA at random calls: types, masks, views, gradients.

    python -m benchmarks.kernels.random_calls                  # 300 calls, at most four minutes
    python -m benchmarks.kernels.random_calls --count 40 --seed 7
    python -m benchmarks.kernels.random_calls --only fp32      # calls with a text in their names

SDPA chooses its backend. For gradients with a mask it is the memory-efficient one, because those of cuDNN are
NaN at some lengths. Both get the same tensors and mask. SDPA gets copies of tensors whose addresses or
strides are no multiples of 16 bytes: its backends need that and do not check it. The copies are timed. Times
are medians of the GPU time of CUDA-graph replays with a cold L2, interleaved in one run. Ratios below 0.98
are timed again three times, and their median counts.

First, processes run each call of flashtune once, so that its kernels are compiled and checked. Then one
process times all calls. The exit code is 1 if a call failed, was not reached, differs from SDPA, or is below
0.98.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.kernels.fastest import LEAST, judged
from flashtune.core.errors import FlashtuneError, UsageError
from flashtune.launch.compilation import first_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DTYPES = ("bf16", "bf16", "fp16", "fp32")
HEAD_DIMS = (16, 32, 40, 64, 64, 72, 80, 96, 128, 128, 128, 160, 192, 256)
HEADS = (1, 2, 4, 8, 12, 16, 32, 64)
GROUPS = (1, 1, 1, 2, 4, 8)
# Square: as many keys as queries. Free: both lengths are drawn.
LENGTHS = ("square", "square", "square", "few queries", "free")
MASKS = ("none", "none", "none", "causal", "causal", "padding", "boolean", "bias", "shared bias")
# `gated`: slices of a projection whose rows are no multiples of 16 bytes. `shifted`: such addresses.
VIEWS = ("dense", "dense", "rows first", "fused", "gated", "shifted")
GRADIENTS = (False, False, False, True)
MAX_BYTES = 2**31
MAX_FLOPS = {"bf16": 1e12, "fp16": 1e12, "fp32": 1e11}
# Largest difference from SDPA, relative to the largest output or gradient.
TOLERANCES = {"bf16": 2.0**-5, "fp16": 2.0**-8, "fp32": 2.0**-8}
ALIGNMENT = 16
FEW, MANY = 5, 9
LONG_MS = 1.0
PROCESSES = 14


class RandomCall(msgspec.Struct, frozen=True):
    """One call. `causal` hides keys as SDPA's `is_causal`, from the first query and key on."""

    number: int
    dtype: str
    head_dim: int
    heads: int
    kv_heads: int
    batch: int
    seqlen_q: int
    seqlen_kv: int
    mask: str
    view: str
    has_gradients: bool

    @property
    def name(self) -> str:
        """A description of the call in one line."""
        passes = " both passes" if self.has_gradients else ""
        return (
            f"{self.number} {self.dtype} d{self.head_dim} h{self.heads}x{self.kv_heads} b{self.batch} "
            f"q{self.seqlen_q} k{self.seqlen_kv} {self.mask} {self.view}{passes}"
        )

    @property
    def is_unaligned(self) -> bool:
        """Whether an address or a stride is no multiple of 16 bytes."""
        return self.view in ("gated", "shifted")

    @property
    def flops(self) -> float:
        """Operations of the products, masks left out."""
        pairs = float(self.batch * self.heads * self.seqlen_q * self.seqlen_kv)
        return 4.0 * pairs * self.head_dim * (3.5 if self.has_gradients else 1.0)

    @property
    def bytes(self) -> int:
        """Bytes of queries, keys, values and the mask, all heads of the latter included."""
        rows = self.batch * (self.heads * self.seqlen_q + 2 * self.kv_heads * self.seqlen_kv)
        return 4 * (rows * self.head_dim + math.prod(self.mask_shape))

    @property
    def mask_shape(self) -> tuple[int, ...]:
        """Shape of the mask or bias. Empty without one."""
        shapes = {
            "padding": (self.batch, 1, 1, self.seqlen_kv),
            "boolean": (self.batch, 1, self.seqlen_q, self.seqlen_kv),
            "bias": (self.batch, self.heads, self.seqlen_q, self.seqlen_kv),
            "shared bias": (1, self.heads, self.seqlen_q, self.seqlen_kv),
        }
        return shapes.get(self.mask, (0,))


class Row(msgspec.Struct, frozen=True):
    """Times of one call."""

    call: str  # Its name.
    server: str = ""  # The backend of flashtune: a kernel's family or a baseline.
    ms: float = 0.0  # flashtune's time.
    sdpa_ms: float = 0.0  # SDPA's time.
    ratio: float = 0.0  # The latter over the former; of calls that were timed again the median.
    again: tuple[float, ...] = ()  # The ratios of further runs.
    # Largest difference from SDPA's output and gradients, as a multiple of the tolerance. See
    # `largest_difference`.
    difference: float = 0.0
    failed: str = ""  # The error of flashtune, or empty.
    skipped: str = ""  # Why there is no comparison, such as an error of SDPA, or empty.


def main() -> None:
    """Measures, prints, and exits with 1 if a call does not meet the bound."""
    options = _options()
    try:
        are_met = measured(options)
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if are_met else 1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Random default calls and SDPA.")
    parser.add_argument("--count", type=int, default=300, help="number of calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", metavar="TEXT", help="only calls with this text in their names")
    parser.add_argument("--all", action="store_true", help="print all calls")
    parser.add_argument("--seconds", type=float, default=240.0, help="limit of the run, compiling included")
    return parser.parse_args()


def drawn(count: int, seed: int) -> list[RandomCall]:
    """Returns random calls. The same seed gives the same calls, whatever their number."""
    chance = random.Random(seed)  # noqa: S311 - shapes, no secrets
    calls: list[RandomCall] = []
    while len(calls) < count:
        call = _drawn(chance, len(calls))
        if call.flops <= MAX_FLOPS[call.dtype] and call.bytes <= MAX_BYTES:
            calls.append(call)
    return calls


def _drawn(chance: random.Random, number: int) -> RandomCall:
    kind, heads = chance.choice(LENGTHS), chance.choice(HEADS)
    seqlen_q = round(2 ** chance.uniform(4, 14))
    seqlen_kv = seqlen_q
    if kind == "few queries":
        seqlen_q, seqlen_kv = round(2 ** chance.uniform(0, 8)), round(2 ** chance.uniform(7, 17))
    elif kind == "free":
        seqlen_kv = round(2 ** chance.uniform(0, 15))
    return RandomCall(
        number=number,
        dtype=chance.choice(DTYPES),
        head_dim=chance.choice(HEAD_DIMS),
        heads=heads,
        kv_heads=max(1, heads // chance.choice(GROUPS)),
        batch=round(2 ** chance.uniform(0, 5)),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        mask=chance.choice(MASKS),
        view=chance.choice(VIEWS),
        has_gradients=chance.choice(GRADIENTS),
    )


class Inputs(msgspec.Struct, frozen=True):
    """Tensors of a call; the gradient of the output is that of a sum of weighted outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    dout: Tensor


def make_inputs(call: RandomCall, device: torch.device) -> Inputs:
    """Returns the tensors of a call, [batch, heads, seqlen, head_dim]."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[call.dtype]
    generator = torch.Generator(device).manual_seed(call.number)
    random_of = functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)
    widths = [heads * call.head_dim for heads in (call.heads, call.kv_heads, call.kv_heads)]
    lengths = (call.seqlen_q, call.seqlen_kv, call.seqlen_kv)

    def heads_first(rows: Tensor) -> Tensor:
        split: Tensor = rows.unflatten(-1, (-1, call.head_dim))
        return split.transpose(1, 2)

    if call.view in ("fused", "gated"):
        gate = ALIGNMENT // 2 // dtype.itemsize if call.view == "gated" else 0
        equal_lengths = call.seqlen_q == call.seqlen_kv
        rows = [
            random_of(call.batch, length, sum(widths) + gate).split([*widths, gate], -1)
            for length in (lengths[:1] if equal_lengths else lengths)
        ]
        q, k, v = (heads_first((rows[0] if equal_lengths else rows[index])[index]) for index in range(3))
    elif call.view == "rows first":
        q, k, v = (
            heads_first(random_of(call.batch, length, width))
            for length, width in zip(lengths, widths, strict=True)
        )
    else:
        start = int(call.view == "shifted")
        q, k, v = (
            random_of(call.batch * length * width + start)[start:].view(
                call.batch, width // call.head_dim, length, call.head_dim
            )
            for length, width in zip(lengths, widths, strict=True)
        )
    if call.has_gradients:
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
    dout = random_of(call.batch, call.heads, call.seqlen_q, call.head_dim)
    return Inputs(q, k, v, _mask(call, random_of, generator), dout)


def _mask(call: RandomCall, random_of: Callable[..., Tensor], generator: torch.Generator) -> Tensor | None:
    import torch

    if call.mask in ("none", "causal"):
        return None
    device, keys = generator.device, torch.arange(call.seqlen_kv, device=generator.device)
    if call.mask == "padding":
        lengths = torch.randint(
            (call.seqlen_kv + 1) // 2, call.seqlen_kv + 1, (call.batch,), generator=generator, device=device
        )
        return (keys < lengths[:, None])[:, None, None]
    if call.mask == "boolean":
        seen = torch.rand(call.mask_shape, generator=generator, device=device) < 0.7
        return seen | (keys == 0)
    return random_of(call.mask_shape)


def flashtune_call(call: RandomCall, inputs: Inputs, *, explained: bool = False) -> Any:
    """Returns the attention of flashtune, or its explanation."""
    import flashtune

    options: dict[str, Any] = {}
    if call.mask == "causal":
        options["causal"] = "top_left"
    elif inputs.mask is not None:
        options["attn_bias" if inputs.mask.is_floating_point() else "attn_mask"] = inputs.mask
    attend = flashtune.explain if explained else flashtune.attention
    return attend(inputs.q, inputs.k, inputs.v, **options)


def sdpa_call(call: RandomCall, inputs: Inputs) -> Tensor:
    """Returns the attention of SDPA, of copies if tensors are not aligned."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (
        tensor.clone(memory_format=torch.contiguous_format) if call.is_unaligned else tensor
        for tensor in (inputs.q, inputs.k, inputs.v)
    )
    options = {"enable_gqa": call.heads != call.kv_heads, "is_causal": call.mask == "causal"}
    if call.has_gradients and inputs.mask is not None:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return scaled_dot_product_attention(q, k, v, inputs.mask, **options)
    return scaled_dot_product_attention(q, k, v, inputs.mask, **options)


def _results(
    call: RandomCall, inputs: Inputs, attend: Callable[[RandomCall, Inputs], Tensor]
) -> tuple[Tensor, ...]:
    """Returns the output, and the gradients if the call has a backward pass."""
    import torch

    out = attend(call, inputs)
    if not call.has_gradients:
        return (out,)
    return (out, *torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout))


def warmed(call: RandomCall) -> str:
    """Runs a call of flashtune once, which caches its kernels. Returns its error, or an empty string."""
    import torch

    warnings.simplefilter("ignore")
    try:
        _results(call, make_inputs(call, torch.device("cuda")), flashtune_call)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except (FlashtuneError, RuntimeError) as error:
        return f"{call.name}: {first_line(error)}"
    return ""


def measured(options: argparse.Namespace) -> bool:
    """Times the calls of the options and prints those that do not meet the bound. Returns whether all do."""
    import torch

    if not torch.cuda.is_available():
        raise UsageError("random_calls.py measures GPU time, and no GPU is visible here: run it on one")
    warnings.simplefilter("ignore")
    started = time.monotonic()
    calls = [call for call in drawn(options.count, options.seed) if options.only in call.name]
    processes = max(1, min(PROCESSES, len(os.sched_getaffinity(0)) - 1))
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        # Gradients compile the longest.
        for error in pool.imap_unordered(warmed, sorted(calls, key=lambda call: not call.has_gradients)):
            if error:
                print(f"while compiling: {error}", flush=True)
    rows: list[Row] = []
    stream = torch.cuda.Stream()
    for call in calls:
        if time.monotonic() - started > options.seconds:
            break
        with torch.cuda.stream(stream):
            rows.append(_attempted(call))
        if options.all or rows[-1].skipped or _is_fault(rows[-1]):
            print(line(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    ratios = [row.ratio for row in rows if row.ratio]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"{len(ratios)} calls: geometric mean {mean:.3f}, worst {min(ratios):.3f}")
    if len(rows) < len(calls):
        print(f"{len(calls) - len(rows)} calls were not reached")
    return len(rows) == len(calls) and not any(map(_is_fault, rows))


def _attempted(call: RandomCall) -> Row:
    import torch

    from flashtune.tuner.bench.admission import capture_here

    inputs = make_inputs(call, torch.device("cuda"))
    try:
        explanation = flashtune_call(call, inputs, explained=True)
        served = explanation.selection is not None and explanation.backend == "generated"
        server = explanation.selection.record.family if served else str(explanation.backend)
        ours = _results(call, inputs, flashtune_call)
        run = capture_here(functools.partial(_results, call, inputs, flashtune_call))
    except (FlashtuneError, RuntimeError) as error:
        return Row(call.name, failed=first_line(error))
    try:
        theirs = _results(call, inputs, sdpa_call)
        peer = capture_here(functools.partial(_results, call, inputs, sdpa_call))
    except RuntimeError as error:
        return Row(call.name, server=server, skipped=first_line(error))
    if not all(bool(tensor.isfinite().all()) for tensor in theirs):
        return Row(call.name, server=server, skipped="SDPA's results are not finite")
    difference = largest_difference(ours, theirs)
    ms, peers, ratio, again = judged(functools.partial(_timed, run, peer))
    return Row(call.name, server, ms, peers["sdpa"], ratio, again, difference / TOLERANCES[call.dtype])


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Returns the largest difference of outputs and gradients, relative to the largest of their kind.

    Gradients are compared with the largest of all gradients: with a single key, those of queries and keys are
    zero up to rounding.
    """
    largest = [float(other.float().abs().max()) for other in theirs]
    scales = largest[:1] + [max(largest[1:], default=0.0)] * len(largest[1:])
    return max(
        float((own.float() - other.float()).abs().max()) / max(scale, 1e-3)
        for own, other, scale in zip(ours, theirs, scales, strict=True)
    )


def _timed(run: Callable[[], object], peer: Callable[[], object]) -> tuple[float, dict[str, float]]:
    import torch

    from flashtune.tuner.execution.timing import measure_interleaved, once

    device = torch.device("cuda", torch.cuda.current_device())
    rounds = FEW if once(run, device) > LONG_MS else MANY
    own, other = measure_interleaved((run, peer), device, rounds=rounds)
    return own.ms, {"sdpa": other.ms}


def _is_fault(row: Row) -> bool:
    if row.skipped:
        return False
    # Not a number is a fault too.
    return bool(row.failed) or row.ratio < LEAST or not row.difference <= 1


def line(row: Row) -> str:
    """Returns a row as one line."""
    if row.failed or row.skipped:
        return f"{row.call}: {'failed' if row.failed else 'not compared'}: {row.failed or row.skipped}"
    again = "".join(f" {ratio:.3f}" for ratio in row.again)
    wrong = "" if row.difference <= 1 else f", wrong by {row.difference:.3g}"
    return f"{row.ratio:.3f} {row.call}: {row.server} {row.ms:.4f} ms, SDPA {row.sdpa_ms:.4f}{again}{wrong}"


if __name__ == "__main__":
    main()
