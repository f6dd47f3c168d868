"""Errors of attention in 8 bits and in 16, as root mean squares against float64.

    python -m benchmarks.kernels.fp8_error  # prints the table, in Markdown
    python -m benchmarks.kernels.fp8_error --save benchmarks/results/nvidia-h200-fp8-error.json.gz

Inputs are FlashAttention-3's (Shah et al., 2024): normal numbers, of which one in a thousand is ten times as
large. They are rounded to bfloat16 before use. So the error of the 16-bit kernel is that of its arithmetic
alone. The error of the 8-bit kernel includes the quantisation of its inputs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import flashtune
from benchmarks.saved import RESULTS, Source, load, run_of, save, this_run
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Dtype
from flashtune.request.quantization import E4M3, LARGEST, given_scales, quantize
from flashtune.tuner.cli.output import table
from flashtune.verification.tolerance import WEIGHT_RANGE

SEED = 7
OUTLIER_SHARE = 0.001
OUTLIER_SIZE = 10.0
QUERY_HEADS, KV_HEADS = 16, 4
# Head dim and sequence length.
SHAPES = ((64, 4096), (128, 1024), (128, 4096), (128, 16384), (256, 4096))
COLUMNS = ("bf16 kernel", "fp8 kernel", "plain fp8", "plain fp8, a scale for each tensor")
SCRIPT = "benchmarks/kernels/fp8_error.py"
SAVED = RESULTS / "nvidia-h200-fp8-error.json.gz"

Attend = Callable[[int], Tensor]


class Case(NamedTuple):
    """One row of the table."""

    head_dim: int
    seqlen: int
    causal: bool


class Row(NamedTuple):
    """Root mean squares: of the exact output, and of each column's error."""

    case: Case
    size: float
    errors: tuple[float, ...]


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description="What attention errs in 8 bits and in 16.")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep what was measured, in JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kernels are compared here and no GPU is visible: run it on a machine with one")
    rows = [measure(Case(width, seqlen, causal)) for width, seqlen in SHAPES for causal in (False, True)]
    print(*_lines(this_run(), rows), sep="\n")
    if options.save is not None:
        save(options.save, rows)


def measure(case: Case) -> Row:
    """All columns of a row."""
    generator = torch.Generator("cuda").manual_seed(SEED)
    q, k, v = (
        normal_with_outliers((1, heads, case.seqlen, case.head_dim), generator)
        for heads in (QUERY_HEADS, KV_HEADS, KV_HEADS)
    )
    (low_q, q_scale), (low_k, k_scale), (low_v, v_scale) = map(quantize, (q, k, v))
    results = (
        flashtune.attention(q, k, v, causal=case.causal, prefer="generated"),
        flashtune.attention(
            low_q, low_k, low_v, causal=case.causal, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
        ),
        plain(low_q, low_k, low_v, ExtraInputs(q_scale, k_scale, v_scale), case.causal),
        plain(*per_tensor(q, k, v), case.causal),
    )
    truth = exact(q, k, v, case.causal)
    return Row(case, rms(truth), tuple(rms(result.double() - truth) for result in results))


def normal_with_outliers(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal numbers, one in a thousand of which is ten times as large, in bfloat16."""
    device = generator.device
    rare = torch.rand(shape, generator=generator, device=device) < OUTLIER_SHARE
    ordinary, large = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    return (ordinary + OUTLIER_SIZE * rare * large).bfloat16()


def per_tensor(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, ExtraInputs]:
    """The tensors in e4m3 with one scale for all heads of each."""
    factors = [tensor.float().abs().amax() / LARGEST for tensor in (q, k, v)]
    low = [(tensor.float() / factor).to(E4M3) for tensor, factor in zip((q, k, v), factors, strict=True)]
    scales = (factor.expand(tensor.shape[:2]) for tensor, factor in zip((q, k, v), factors, strict=True))
    return low[0], low[1], low[2], given_scales(*scales)


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention in float64, head by head."""

    def attend(head: int) -> Tensor:
        kv_head = head * k.shape[1] // q.shape[1]
        scores = masked(q[0, head].double() @ k[0, kv_head].double().mT * q.shape[-1] ** -0.5, causal)
        return scores.softmax(-1) @ v[0, kv_head].double()

    return by_head(attend, q.shape[1])


def plain(q: Tensor, k: Tensor, v: Tensor, scales: ExtraInputs, causal: bool) -> Tensor:
    """Attention of 8-bit inputs as one would write it: scores in float32, weights in 8 bits, exact sums."""
    q_scale, k_scale, v_scale = scales.scales
    assert q_scale is not None
    assert k_scale is not None
    assert v_scale is not None
    weight_range = WEIGHT_RANGE[Dtype.E4M3]

    def attend(head: int) -> Tensor:
        kv_head = head * k.shape[1] // q.shape[1]
        factor = q_scale[0, head] * k_scale[0, kv_head] * q.shape[-1] ** -0.5
        scores = masked((q[0, head].double() @ k[0, kv_head].double().mT).float() * factor, causal)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        low_weights = (weights * weight_range).to(E4M3)
        total = weights.sum(-1, keepdim=True) * weight_range
        return ((low_weights.double() @ v[0, kv_head].double()) * v_scale[0, kv_head] / total).bfloat16()

    return by_head(attend, q.shape[1])


def masked(scores: Tensor, causal: bool) -> Tensor:
    """Scores of a square problem, those of later keys at -inf."""
    if not causal:
        return scores
    hidden = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).triu_(1)
    return scores.masked_fill_(hidden, float("-inf"))


def by_head(attend: Attend, heads: int) -> Tensor:
    """[1, heads, seqlen, head_dim] of results for each head."""
    return torch.stack([attend(head) for head in range(heads)])[None]


def rms(tensor: Tensor) -> float:
    """Root of the mean square."""
    return float(tensor.double().square().mean().sqrt())


def texts() -> dict[str, str]:
    """The tables of the saved run, by name."""
    saved = load(SAVED, list[Row])
    return {"errors": "\n".join(_lines(saved.source, saved.rows))}


def _lines(source: Source, rows: Sequence[Row]) -> Iterator[str]:
    yield f"{run_of(source)}, {QUERY_HEADS} query and {KV_HEADS} KV heads:"
    yield ""
    cells = (
        (
            str(case.head_dim),
            f"{case.seqlen:,}",
            "causal" if case.causal else "none",
            *(f"{value:.2e}" for value in (size, *errors)),
        )
        for case, size, errors in rows
    )
    yield from table(("head dim", "length", "mask", "exact output", *COLUMNS), cells)


if __name__ == "__main__":
    main()
