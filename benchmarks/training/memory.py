"""Memory of attention in training, forward and backward, over sequence length.

    python -m benchmarks.training.memory --save memory.json  # benchmarks.training.report draws it
    python -m benchmarks.training.memory --heads 32 --head-dim 64 --full --lengths 1024 16384

The shape is one sequence of each length, 16 heads of 128 columns in bf16, causal. The result is the peak of
torch's allocator during one forward and one backward pass, inputs included. It is measured for flashtune,
each of SDPA's backends and unfused attention, which stores its probabilities. An implementation that runs out
of memory has no figure. At one length, each kernel family of the backward pass is also measured alone. Ratios
are over the unavoidable memory: queries, keys, values, the output and the gradients of all four. Each
implementation runs twice, since first calls compile and verify kernels, and the second run is measured. Needs
a GPU.
"""

import argparse
import functools
import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flashtune
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Causal, Direction, Dtype, Problem
from flashtune.core.record import Versions
from flashtune.core.target import Target, device_target
from flashtune.dispatch.versions import current_versions
from flashtune.runtime.unfused import unfused_attention
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import families
from flashtune.tuner.candidates import Candidate, contiguous_specialization
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.sdpa import BACKENDS
from flashtune.tuner.execution.timed_runs import kernel_run
from flashtune.tuner.tables.kernel_choice import choose

LENGTHS = tuple(1024 << step for step in range(8))
FAMILIES_AT = 16_384
GIB = 2**30
OURS = "flashtune"
UNFUSED = "unfused"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Peak(msgspec.Struct, frozen=True):
    """The memory of one implementation at one length."""

    name: str  # The implementation, or a kernel family.
    bytes: int | None  # The peak; None if it does not fit, or is unsupported.
    over_held: float | None  # The peak over the memory of inputs, output and gradients.
    message: str = ""  # The reason for None.


class Row(msgspec.Struct, frozen=True):
    """One length: bytes of inputs, output and gradients, and of each implementation."""

    seqlen: int
    held: int
    peaks: tuple[Peak, ...]


class Document(msgspec.Struct, frozen=True):
    """Measurements, their GPU and versions."""

    gpu: str
    versions: Versions  # Of the software.
    problem: str  # Key of the backward problem at the first length.
    rows: tuple[Row, ...]  # One for each length.
    families: Row  # Each family of the backward pass by itself, at one length.


def main() -> None:
    """Measures, prints, and writes the requested files."""
    options = _options()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark measures a GPU's memory, and no GPU is visible here")
    device = torch.device("cuda", 0)
    target = device_target(0)
    posed = [_problem(options, seqlen) for seqlen in options.lengths]
    rows = []
    for problem in posed:
        rows.append(measure_row(problem, device))
        print(line(rows[-1]), flush=True)
    by_family = measure_families(_problem(options, options.families_at), target, device)
    print(f"families: {line(by_family)}")
    family = choose(posed[0], target, None).family.name
    document = Document(
        torch.cuda.get_device_name(device), current_versions(family), posed[0].key, tuple(rows), by_family
    )
    if options.save:
        options.save.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--families-at", type=int, default=FAMILIES_AT, metavar="LENGTH")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the figures there as JSON")
    return parser.parse_args()


def _problem(options: argparse.Namespace, seqlen: int) -> Problem:
    return Problem(
        dtype=Dtype.BF16,
        head_dim=options.head_dim,
        value_head_dim=options.head_dim,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        batch=1,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        causal=Causal.NONE if options.full else Causal.BOTTOM_RIGHT,
        direction=Direction.BACKWARD,
    )


def held_bytes(problem: Problem) -> int:
    """Queries, keys, values and the output, and the gradients of all four, in bytes."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv
    return 2 * (rows + keys) * (problem.head_dim + problem.value_head_dim) * problem.dtype.itemsize


def measure_row(problem: Problem, device: torch.device) -> Row:
    """Peaks of all ways to compute a problem."""
    steps = {name: functools.partial(step, attend, problem, device) for name, attend in ways(problem).items()}
    return _row(problem, steps, device)


def measure_families(problem: Problem, target: Target, device: torch.device) -> Row:
    """Peaks of the kernels of each family that computes a backward problem, selected or by default."""
    assumed = contiguous_specialization(problem)
    able = [
        family.name for family in families() if unsupported_reason(family, problem, target, assumed) is None
    ]
    steps = {name: functools.partial(family_step, name, problem, target, device) for name in able}
    return _row(problem, steps, device)


def _row(problem: Problem, steps: Mapping[str, Callable[[], None]], device: torch.device) -> Row:
    held = held_bytes(problem)
    return Row(problem.seqlen_q, held, tuple(measure(name, run, held, device) for name, run in steps.items()))


def ways(problem: Problem) -> dict[str, Attend]:
    """The implementations by name."""
    causal, grouped = problem.is_causal, problem.group_size > 1
    scale = problem.head_dim**-0.5

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flashtune.attention(q, k, v, causal=causal, prefer="generated")
        assert isinstance(out, Tensor)
        return out

    def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return unfused_attention(problem, q, k, v, scale=scale)[0]

    def by_backend(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(BACKENDS[name]):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return {OURS: ours, **{name: functools.partial(by_backend, name) for name in BACKENDS}, UNFUSED: standard}


def step(attend: Attend, problem: Problem, device: torch.device) -> None:
    """One forward and one backward pass on fresh tensors, all of which it lets go."""
    dtype = TORCH_DTYPES[problem.dtype]

    def leaf(heads: int, seqlen: int) -> Tensor:
        shape = (problem.batch, heads, seqlen, problem.head_dim)
        return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)

    q = leaf(problem.heads, problem.seqlen_q)
    k, v = (leaf(problem.kv_heads, problem.seqlen_kv) for _ in range(2))
    out = attend(q, k, v)
    torch.autograd.grad(out, (q, k, v), torch.empty_like(out).normal_())


def family_step(name: str, problem: Problem, target: Target, device: torch.device) -> None:
    """The same by one family's kernels, without autograd."""
    tensors = make_tensors(problem, device)
    config = choose(problem, target, None, name).config
    assumed = contiguous_specialization(problem)
    kernel_run(problem, Candidate(name, config), assumed, target, tensors)()


def measure(name: str, run: Callable[[], None], held: int, device: torch.device) -> Peak:
    """The peak of the second run."""
    try:
        run()
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
    except torch.OutOfMemoryError:
        return Peak(name, None, None, "out of memory")
    except RuntimeError as error:
        return Peak(name, None, None, str(error).splitlines()[0][:200])
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return Peak(name, peak, round(peak / held, 4))


def line(row: Row) -> str:
    """One row as text."""
    cells = [
        f"{peak.name} {peak.bytes / GIB:.3f} GiB ({peak.over_held:.3f}x)"
        if peak.bytes is not None and peak.over_held is not None
        else f"{peak.name} {peak.message}"
        for peak in row.peaks
    ]
    return f"{row.seqlen} tokens, {row.held / GIB:.3f} GiB held: {', '.join(cells)}"


if __name__ == "__main__":
    main()
