"""GPU time of gradients with an additive bias: flashtune and SDPA's cuDNN and memory-efficient backends.

    python -m benchmarks.kernels.bias_gradients --save bias_gradients.json
    python -m benchmarks.kernels.bias_gradients --head-dims 64 --seqlens 1000 --shared

Backward passes of 16 heads in bf16, without and with a gradient of the bias, which has an element for each
score. With `--shared`, all sequences share it. Gradients are first compared with float64, at 1000 queries
and keys. Passes are interleaved, with a cold L2 before each, and times are medians. A backend that refuses
the call has no time. Needs a GPU.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from benchmarks.saved import RESULTS, load, run_of, save
from flashtune.dispatch.versions import driver_version
from flashtune.tuner.cli.output import table
from flashtune.tuner.execution.timing import measure_interleaved

SCRIPT = "benchmarks/kernels/bias_gradients.py"
SAVED = RESULTS / "nvidia-h200-bias-gradients.json.gz"
HEADS, CHECKED, ROUNDS = 16, 1000, 21
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
# The largest accepted error of a gradient over its largest element.
ALLOWED = 2e-2
Gradients = Callable[[], tuple[Tensor, ...]]


class Row(msgspec.Struct, frozen=True):
    """One shape. Times are in milliseconds."""

    head_dim: int
    seqlen: int
    batch: int
    shared: bool
    trained: bool  # Whether the bias has a gradient.
    family: str
    ours: float
    error: float  # The largest error of a gradient over its largest element.
    theirs: dict[str, float]  # By backend.


def main() -> None:
    """Measures, prints, and writes the requested file."""
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("bias_gradients.py measures GPU time, and no GPU is visible here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, driver {driver_version()}")
    rows = []
    for head_dim in options.head_dims:
        for seqlen in options.seqlens:
            for trained in (False, True):
                rows.append(measure(head_dim, seqlen, options.batch, options.shared, trained))
                print(line(rows[-1]), flush=True)
    if options.save:
        save(options.save, rows)
    raise SystemExit(any(row.error > ALLOWED for row in rows))


def measure(head_dim: int, seqlen: int, batch: int, shared: bool, trained: bool) -> Row:
    """Returns the times of all implementations in one run, after a comparison of ours with float64."""
    error = error_of(head_dim, shared, trained)
    tensors = made(head_dim, seqlen, batch, shared, trained)
    q, k, v, bias = tensors
    explained = flashtune.explain(q, k, v, attn_bias=bias).backward
    family = explained.selection.record.family if explained and explained.selection else "none"
    runs = {"": backward(flashtune_attention, tensors, trained)}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                runs[name] = backward(sdpa, tensors, trained)
                runs[name]()
        except RuntimeError as refusal:
            runs.pop(name, None)
            print(f"{name} refuses the call: {str(refusal).splitlines()[0]}")
    measured = measure_interleaved([*runs.values()], torch.device("cuda", 0), rounds=ROUNDS)
    times = dict(zip(runs, (measurement.ms for measurement in measured), strict=True))
    return Row(head_dim, seqlen, batch, shared, trained, family, times.pop(""), error, times)


def made(head_dim: int, seqlen: int, batch: int, shared: bool, trained: bool) -> tuple[Tensor, ...]:
    """Returns q, k, v and the bias."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = [(batch, HEADS, seqlen, head_dim)] * 3 + [(1 if shared else batch, HEADS, seqlen, seqlen)]
    q, k, v, bias = (
        torch.randn(size, device="cuda", dtype=torch.bfloat16, generator=generator) for size in sizes
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), bias.requires_grad_(trained)


def flashtune_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Returns attention by flashtune."""
    return flashtune.attention(q, k, v, attn_bias=bias)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Returns attention by the enabled backend of SDPA."""
    return scaled_dot_product_attention(q, k, v, bias)


def by_definition(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Returns attention by separate operations."""
    scale: float = q.shape[-1] ** -0.5
    scores: Tensor = q @ k.mT * scale + bias
    return scores.softmax(-1) @ v


def backward(attend: Callable[..., Tensor], tensors: tuple[Tensor, ...], trained: bool) -> Gradients:
    """Returns the backward pass alone."""
    out = attend(*tensors)
    generator = torch.Generator("cuda").manual_seed(1)
    dout = torch.randn(out.shape, device="cuda", generator=generator).to(torch.bfloat16).to(out.dtype)
    inputs = tensors if trained else tensors[:3]
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def error_of(head_dim: int, shared: bool, trained: bool) -> float:
    """Returns the largest error of our gradients, relative to the largest elements."""
    tensors = made(head_dim, CHECKED, 2, shared, trained)
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in tensors)
    exact = backward(by_definition, wide, trained)()
    own = backward(flashtune_attention, tensors, trained)()
    pairs = zip(own, exact, strict=True)
    # Unlike Python's, torch's maximum is NaN if a number is.
    errors = [(one.double() - other).abs().max() / other.abs().max() for one, other in pairs]
    return torch.stack(errors).nan_to_num(torch.inf).max().item()


def line(row: Row) -> str:
    """Returns the text of a row."""
    gradient = "with" if row.trained else "without"
    theirs = ", ".join(f"{ms / row.ours:.2f}x {name} ({ms:.3f})" for name, ms in row.theirs.items())
    verdict = "" if row.error <= ALLOWED else f"; WRONG: error {row.error:.2g}"
    shape = f"D={row.head_dim}, S={row.seqlen}, batch {row.batch}, {gradient} gradient of the bias"
    return f"{shape}: {row.ours:.3f} ms by {row.family}, {theirs}{verdict}"


def texts() -> dict[str, str]:
    """Returns the table of the saved run, by name."""
    saved = load(SAVED, tuple[Row, ...])
    rows = [
        (
            *(str(number) for number in (row.head_dim, row.seqlen)),
            "yes" if row.trained else "no",
            f"{row.ours:.3f}",
            *(f"{row.theirs[name]:.3f}" if name in row.theirs else "refused" for name in BACKENDS),
            f"{min(row.theirs.values()) / row.ours:.2f}",
        )
        for row in saved.rows
    ]
    heads = (
        *("head dim", "tokens", "gradient of the bias", "ms"),
        *(f"{name}, ms" for name in BACKENDS),
        "speed over the faster",
    )
    batch = saved.rows[0].batch
    intro = f"{run_of(saved.source)}, bf16, {HEADS} heads, batch {batch}:"
    return {"bias-gradients": "\n".join((intro, "", *table(heads, rows)))}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1000, 2048, 4096])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--shared", action="store_true", help="sequences share the bias")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
