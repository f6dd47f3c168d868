"""GPU time of attention with dropout in training: flashtune and SDPA's flash backend (FlashAttention-2).

    python -m benchmarks.kernels.dropout
    python -m benchmarks.kernels.dropout --dropout 0.1 --save dropout.json

Each time is that of the forward and backward pass together, as autograd queues them. Runs are interleaved,
with a cold L2 before each, and times are medians. The defaults are 16k tokens in bf16 and 2048 columns over
all heads. A second measurement without dropout shows the cost of dropout. Tune the shapes first, by
`flashtune search --phase training --shape ...,dropout` (the printed command). Needs a GPU.
"""

import argparse
import functools
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune.dispatch.versions import driver_version
from flashtune.tuner.execution.timing import measure_interleaved

TOKENS, WIDTH = 16_384, 2048
ROUNDS = 21


class Row(msgspec.Struct, frozen=True):
    """One shape."""

    shape: str  # As `flashtune search --shape` takes it.
    ours: float  # Milliseconds of forward and backward pass with dropout.
    theirs: float  # Likewise of SDPA's flash backend.
    share: float  # Ours over theirs.
    ours_without: float  # Ours without dropout.
    theirs_without: float  # Likewise theirs.


def main() -> None:
    """Measures, prints, and writes the requested files."""
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("dropout.py measures GPU time, and no GPU is visible here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, driver {driver_version()}")
    shapes = [
        (head_dim, causal, seqlen)
        for head_dim in options.head_dims
        for causal in (False, True)
        for seqlen in options.seqlens
    ]
    named = " ".join(f"--shape {shlex.quote(shape_text(*shape))}" for shape in shapes)
    print(f"flashtune search --phase training {named}")
    rows = []
    for shape in shapes:
        rows.append(measure(*shape, options.dropout))
        print(line(rows[-1]), flush=True)
    if options.save:
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")


def shape_text(head_dim: int, causal: bool, seqlen: int) -> str:
    """A shape of so many tokens, as the command line takes it."""
    heads = WIDTH // head_dim
    mask = "bottom_right" if causal else "none"
    batch = TOKENS // seqlen
    return f"batch={batch},heads={heads},seqlen={seqlen},head_dim={head_dim},causal={mask},dtype=bf16,dropout"


def measure(head_dim: int, causal: bool, seqlen: int, dropout: float) -> Row:
    """Both implementations with and without dropout, in one run."""
    device = torch.device("cuda", 0)
    q, k, v, dout = (
        torch.randn(
            TOKENS // seqlen, WIDTH // head_dim, seqlen, head_dim, dtype=torch.bfloat16, device=device
        )
        for _ in range(4)
    )
    inputs = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    runs = [
        functools.partial(step, attend, inputs, dout)
        for share in (dropout, 0.0)
        for attend in (
            functools.partial(flashtune.attention, causal=causal, dropout_p=share, prefer="generated"),
            functools.partial(scaled_dot_product_attention, is_causal=causal, dropout_p=share),
        )
    ]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        times = [measurement.ms for measurement in measure_interleaved(runs, device, rounds=ROUNDS)]
    return Row(shape_text(head_dim, causal, seqlen), times[0], times[1], times[0] / times[1], *times[2:])


def step(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], dout: Tensor) -> None:
    """One pass forward and one back."""
    torch.autograd.grad(attend(*inputs), inputs, dout)


def line(row: Row) -> str:
    """A row as it is printed."""
    return (
        f"{row.shape}: {row.ours:.3f} ms of {row.theirs:.3f} ({row.share:.2f}); without dropout "
        f"{row.ours_without:.3f} of {row.theirs_without:.3f}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="the share of weights that fall")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
