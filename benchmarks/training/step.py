"""Host time of attention in a training step, forward and backward, with flashtune and with SDPA.

    python -m benchmarks.training.step
    python -m benchmarks.training.step --seqlen 128 --head-dim 128 --save step.json

Tensors are so small that launches only queue and the host never waits for the GPU. Every figure is a median
of interleaved rounds. `benchmarks.kernels.dropout` measures GPU time with dropout, and
`benchmarks/host/compare.py` calls without gradients. Needs a GPU.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune.dispatch.versions import driver_version

# Fewer steps than a launch queue holds launches, of up to five kernels each.
STEPS = 100
ROUNDS = 41
SDPA, DROPPING = "sdpa", "sdpa, dropout"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


class Row(msgspec.Struct, frozen=True):
    """One way."""

    name: str  # The implementation.
    forward_us: float  # Host time of the forward pass of a call that autograd records.
    both_us: float  # That of forward and backward pass.
    over_sdpa: float  # The latter over SDPA's, of calls with dropout over SDPA's with dropout.
    gpu_us: float  # GPU time of both passes with queued launches.


class Document(msgspec.Struct, frozen=True):
    """Measurements, their GPU and versions."""

    gpu: str
    torch: str
    triton: str
    driver: str
    shape: dict[str, int]
    rows: tuple[Row, ...]


def main() -> None:
    """Measures, prints, and writes the requested files."""
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("training_step.py measures launches, and no GPU is visible here")
    document = measure(options.batch, options.heads, options.seqlen, options.head_dim)
    print(f"{document.gpu}, torch {document.torch}, Triton {document.triton}, {document.shape}")
    for row in document.rows:
        print(line(row))
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    print(encoded.decode(), end="")
    if options.save:
        options.save.write_bytes(encoded)


def measure(batch: int, heads: int, seqlen: int, head_dim: int) -> Document:
    """All ways in one run."""
    device = torch.device("cuda", 0)
    shape = batch, heads, seqlen, head_dim
    made = [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(4)]
    dout = made.pop()
    q, k, v = (tensor.requires_grad_() for tensor in made)
    attends = ways()
    forward = host_us({name: functools.partial(attend, q, k, v) for name, attend in attends.items()})
    steps = {name: functools.partial(step, attend, (q, k, v), dout) for name, attend in attends.items()}
    both = host_us(steps)
    rows = tuple(
        Row(name, forward[name], both[name], both[name] / both[_base(name)], gpu_us(run))
        for name, run in steps.items()
    )
    named = dict(zip(("batch", "heads", "seqlen", "head_dim"), shape, strict=True))
    return Document(
        torch.cuda.get_device_name(device),
        str(torch.__version__),
        triton.__version__,
        driver_version(),
        named,
        rows,
    )


def ways() -> dict[str, Attend]:
    """The implementations, by name."""
    ours = functools.partial(flashtune.attention, causal=True, prefer="generated")
    return {
        SDPA: functools.partial(scaled_dot_product_attention, is_causal=True),
        "flashtune": ours,
        "flashtune, deterministic": functools.partial(ours, deterministic=True),
        "flashtune, window": functools.partial(ours, window=(64, 0)),
        "flashtune, dropout": functools.partial(ours, dropout_p=0.1),
        DROPPING: functools.partial(scaled_dot_product_attention, is_causal=True, dropout_p=0.1),
    }


def _base(name: str) -> str:
    return DROPPING if "dropout" in name else SDPA


def step(attend: Attend, inputs: Triple, dout: Tensor) -> None:
    """One pass forward and one back."""
    torch.autograd.grad(attend(*inputs), inputs, dout)


def host_us(runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Microseconds of the host for one run of each, in turn round by round."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            run()
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(STEPS):
                run()
            samples[name].append((time.perf_counter() - started) / STEPS * 1e6)
    return {name: round(statistics.median(values), 2) for name, values in samples.items()}


def gpu_us(run: Callable[[], object]) -> float:
    """Microseconds of the GPU for one run, replayed from a graph: the host waits for nothing below them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            graph.replay()
        end.record()
    torch.cuda.synchronize()
    return round(1e3 * float(start.elapsed_time(end)) / STEPS, 2)


def line(row: Row) -> str:
    """A row as it is printed."""
    return (
        f"{row.name}: {row.both_us:.1f} µs of the host for both passes ({row.over_sdpa:.2f} of SDPA's), "
        f"{row.forward_us:.1f} for the forward pass; {row.gpu_us:.1f} of the GPU"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("batch", 1), ("heads", 4), ("seqlen", 64), ("head-dim", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures there as JSON too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
