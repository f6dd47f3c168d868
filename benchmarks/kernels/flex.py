"""GPU time of score and mask functions: flashtune, torch's compiled flex_attention, and built-in features.

    python -m benchmarks.kernels.flex --save FILE.json.gz
    python -m benchmarks.kernels.flex --functions alibi softcap --head-dims 128 --seqlens 4096

Outputs are first compared with torch's uncompiled function in float64, at 1000 queries and keys. The error
may be two and a half times that of torch's compiled function. Then runs are interleaved in random order, with
a cold L2 before each, and times are medians. Functions that compute a feature are also timed as features of
`flashtune.attention`. Shapes have 16k tokens in bf16. With --backend FLASH, torch's function uses
FlashAttention-4, and functions without a kernel there have no row. Needs a GPU.
"""

import argparse
import functools
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor
from torch._inductor.exc import InductorError
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flashtune
from benchmarks.saved import RESULTS, load, run_of, save
from flashtune.dispatch.versions import driver_version
from flashtune.launch.compilation import first_line
from flashtune.tuner.cli.output import table
from flashtune.tuner.execution.timing import measure_interleaved

SCRIPT = "benchmarks/kernels/flex.py"
SAVED = tuple(RESULTS / f"nvidia-h200-flex{part}.json.gz" for part in ("", "-second"))
SAVED_FLASH = (RESULTS / "nvidia-h200-flex-flash.json.gz",)
# Backends of torch's function: that of Triton, and FlashAttention-4 in the package flash-attn-4.
AUTO, FLASH = "AUTO", "FLASH"
TOKENS = 16_384
ROUNDS = 21
CHECKED, CALLS = 1000, 100
WINDOW, CAP, IMAGE, NEAR = 1024, 20.0, 64, 6
# Of torch, where its usual tiles do not fit shared memory.
SMALL_TILES = {
    "BLOCK_M": 64,
    "BLOCK_N": 64,
    "BLOCK_M1": 32,
    "BLOCK_N1": 64,
    "BLOCK_M2": 64,
    "BLOCK_N2": 32,
}
Function = Callable[..., Tensor]
Measured = TypeVar("Measured")


class Functions(NamedTuple):
    """The functions of one case, and the arguments of `flashtune.attention` that compute the same."""

    score: Function | None = None
    mask: Function | None = None
    batches: bool = False  # Whether the mask differs between sequences.
    built_in: dict[str, Any] | None = None
    captured: tuple[Tensor, ...] = ()  # Captured tensors that a program would train.
    size: int = 128  # Queries and keys of a block of the block mask.
    visible: Tensor | None = None  # The visible blocks, [queries, keys], in place of functions.


class Row(msgspec.Struct, frozen=True):
    """One case at one shape. Times are in milliseconds."""

    function: str
    heads: int
    kv_heads: int
    seqlen: int
    head_dim: int
    family: str  # The kernel of flashtune.
    ours: float
    theirs: float  # Of torch's compiled function.
    speedup: float  # Theirs over ours.
    built_in: float | None  # Of `flashtune.attention` with the feature.
    error: float  # The largest error of the output against float64, at CHECKED queries.
    their_error: float  # Likewise of torch's compiled function.
    first_call_s: float  # The time of the first call, with its compilation.
    host_us: float  # The time in which the host queues a warm call.
    built_in_host_us: float | None  # Likewise of `flashtune.attention` with the feature.

    @property
    def is_right(self) -> bool:
        """Whether the error is at most two and a half times theirs.

        Rows are rescaled only if their maximum grew by much, so that the largest weight is rounded too.
        """
        return self.error <= 2.5 * self.their_error + 1e-5


def gallery(batch: int, heads: int, seqlen: int, device: torch.device) -> dict[str, Functions]:
    """Returns the functions, with captured tensors for these extents."""
    generator = torch.Generator(device).manual_seed(0)
    slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    table = torch.randn(heads, 257, device=device, generator=generator)
    documents = torch.arange(seqlen, device=device) * 7 // seqlen
    prefixes = torch.arange(1, batch + 1, device=device) * seqlen // (2 * batch + 2)
    gates = torch.randn(batch, heads, seqlen, device=device, generator=generator)
    temperatures = torch.rand(heads, device=device, generator=generator) + 0.5
    return {
        "causal": Functions(mask=lambda b, h, q, k: q >= k, built_in={"causal": True}),
        "window": Functions(
            mask=lambda b, h, q, k: (q >= k) & (q - k < WINDOW),
            built_in={"causal": True, "window": (WINDOW - 1, 0)},
        ),
        "alibi": Functions(
            lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(),
            built_in={"alibi_slopes": slopes},
            captured=(slopes,),
        ),
        "softcap": Functions(lambda s, b, h, q, k: CAP * torch.tanh(s / CAP), built_in={"softcap": CAP}),
        "relative bias": Functions(
            lambda s, b, h, q, k: s + table[h, (q - k).clamp(-128, 128) + 128], captured=(table,)
        ),
        "documents": Functions(mask=lambda b, h, q, k: (documents[q] == documents[k]) & (q >= k)),
        "prefix": Functions(mask=lambda b, h, q, k: (k < prefixes[b]) | (q >= k), batches=True),
        "dilated window": Functions(mask=lambda b, h, q, k: ((q - k).abs() <= WINDOW) & ((q - k) % 4 == 0)),
        "neighbourhood": Functions(
            mask=lambda b, h, q, k: (
                ((q % IMAGE - k % IMAGE).abs() <= NEAR) & ((q // IMAGE - k // IMAGE).abs() <= NEAR)
            )
        ),
        "gated scores": Functions(lambda s, b, h, q, k: s * torch.sigmoid(gates[b, h, q]), captured=(gates,)),
        "temperature": Functions(lambda s, b, h, q, k: s / temperatures[h], captured=(temperatures,)),
    }


def main() -> None:
    """Measures, prints, and writes the requested file."""
    options = options_of(__doc__, [*gallery(1, 1, 1, torch.device("cpu"))])
    if not torch.cuda.is_available():
        raise SystemExit("flex.py measures GPU time, and no GPU is visible here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, driver {driver_version()}")
    rows: list[Row] = []
    for row in measured_rows(measure, options):
        rows.append(row)
        print(line(row), flush=True)
        if options.save:
            save(options.save, rows)
    if not rows:
        raise SystemExit("no shape has a result")
    print(summary(rows))
    raise SystemExit(not all(row.is_right for row in rows))


def measured_rows(measured: Callable[..., Measured], options: argparse.Namespace) -> Iterator[Measured]:
    """Yields the rows of the requested shapes, and prints the errors of those that FLASH does not compile."""
    for shape in shapes_of(options):
        if options.backend == AUTO:
            yield fitting(measured, shape)
            continue
        try:
            yield measured(*shape, backend=options.backend)
        except InductorError as error:
            print(f"{shape}: no result: {first_line(error)}", flush=True)


def fitting(measured: Callable[..., Measured], shape: tuple[object, ...]) -> Measured:
    """Returns the row of a shape, with small tiles of torch if its usual ones do not fit shared memory."""
    try:
        return measured(*shape)
    except InductorError:
        return measured(*shape, small=True)


def measure(
    name: str, heads: int, kv_heads: int, seqlen: int, head_dim: int, small: bool = False, backend: str = AUTO
) -> Row:
    """Returns the times of all implementations of a case in one run, after their comparison."""
    device = torch.device("cuda", 0)
    torch.compiler.reset()
    checked = check(name, heads, kv_heads, head_dim, device, small, backend)
    batch = max(1, TOKENS // seqlen)
    case = gallery(batch, heads, seqlen, device)[name]
    q, k, v = inputs(batch, heads, kv_heads, seqlen, head_dim, device)
    mask = block_mask(case, batch, seqlen, device)
    own = functools.partial(flashtune.flex_attention, q, k, v, case.score, mask, enable_gqa=heads > kv_heads)
    function = compiled(small, backend=backend)
    theirs = functools.partial(function, q, k, v, case.score, mask, enable_gqa=heads > kv_heads)
    runs: dict[str, Callable[[], Any]] = {"ours": own, "theirs": theirs}
    if case.built_in is not None:
        runs["built_in"] = functools.partial(
            flashtune.attention, q, k, v, prefer="generated", **case.built_in
        )
    seed = f"{name} {heads} {kv_heads} {seqlen} {head_dim}"
    order = random.Random(seed).sample([*runs], len(runs))  # noqa: S311 - an order
    with torch.no_grad():
        explained = flashtune.explain_flex(q, k, v, case.score, mask, enable_gqa=heads > kv_heads)
        measured = measure_interleaved([runs[each] for each in order], device, rounds=ROUNDS)
    family = explained.backend if explained.selection is None else explained.selection.record.family
    times = dict(zip(order, (measurement.ms for measurement in measured), strict=True))
    return Row(
        name, heads, kv_heads, seqlen, head_dim, family, times["ours"], times["theirs"],
        times["theirs"] / times["ours"], times.get("built_in"), *checked,
    )  # fmt: skip


class Check(NamedTuple):
    """The last fields of a row."""

    error: float
    their_error: float
    first_call_s: float
    host_us: float
    built_in_host_us: float | None


def compiled(small: bool, *, autotuned: bool = False, backend: str = AUTO) -> Function:
    """Returns torch's compiled function, with small tiles or the fastest of its tiles if requested."""
    mode = "max-autotune-no-cudagraphs" if autotuned else None
    function: Function = torch.compile(flex_attention, dynamic=False, mode=mode)
    if backend == FLASH:
        return functools.partial(function, kernel_options={"BACKEND": FLASH})
    return functools.partial(function, kernel_options=SMALL_TILES) if small else function


@functools.cache
def check(
    name: str, heads: int, kv_heads: int, head_dim: int, device: torch.device, small: bool, backend: str
) -> Check:
    """Returns errors, the time of the first call, and host times of later calls."""
    case = gallery(2, heads, CHECKED, device)[name]
    q, k, v = inputs(2, heads, kv_heads, CHECKED, head_dim, device)
    mask = block_mask(case, 2, CHECKED, device)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gqa = heads > kv_heads
        exact = flex_attention(q.double(), k.double(), v.double(), case.score, mask, enable_gqa=gqa)
        theirs = compiled(small, backend=backend)(q, k, v, case.score, mask, enable_gqa=gqa)
        torch.cuda.synchronize()
        started = time.perf_counter()
        ours = flashtune.flex_attention(q, k, v, case.score, mask, enable_gqa=gqa)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        own = functools.partial(flashtune.flex_attention, q, k, v, case.score, mask, enable_gqa=gqa)
        built_in = functools.partial(flashtune.attention, q, k, v, prefer="generated", **case.built_in or {})
        host = host_us(own), host_us(built_in) if case.built_in else None
    largest = [float((out.double() - exact).abs().max()) for out in (ours, theirs)]
    return Check(largest[0], largest[1], seconds, *host)


def host_us(run: Callable[[], object]) -> float:
    """Returns the time in which the host queues a call."""
    for _ in range(CALLS):
        run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(CALLS):
        run()
    seconds = time.perf_counter() - started
    torch.cuda.synchronize()
    return 1e6 * seconds / CALLS


def inputs(
    batch: int, heads: int, kv_heads: int, seqlen: int, head_dim: int, device: torch.device
) -> tuple[Tensor, ...]:
    """Returns random queries, keys and values."""
    generator = torch.Generator(device).manual_seed(1)
    return tuple(
        torch.randn(batch, count, seqlen, head_dim, dtype=torch.bfloat16, device=device, generator=generator)
        for count in (heads, kv_heads, kv_heads)
    )


def block_mask(case: Functions, batch: int, seqlen: int, device: torch.device) -> Any:
    """Returns torch's block mask of a case, or None."""
    if case.mask is None:
        return None
    extents = batch if case.batches else None, None, seqlen, seqlen
    return create_block_mask(case.mask, *extents, device=device, BLOCK_SIZE=case.size)


def line(row: Row) -> str:
    """Returns the text of a row."""
    shape = f"{row.heads}/{row.kv_heads} heads, S={row.seqlen}, D={row.head_dim}"
    built_in = f", {row.built_in:.3f} built in ({row.built_in / row.ours:.2f})" if row.built_in else ""
    host = f" of {row.built_in_host_us:.0f}" if row.built_in_host_us else ""
    verdict = "" if row.is_right else f" WRONG: error {row.error:.2g} of {row.their_error:.2g}"
    return (
        f"{row.function}, {shape}: {row.ours:.3f} ms of {row.theirs:.3f} ({row.speedup:.2f}x){built_in}; "
        f"{row.family}, first call {row.first_call_s:.1f} s, host {row.host_us:.0f} us{host}{verdict}"
    )


def summary(rows: list[Row]) -> str:
    """Returns the geometric mean and the smallest speedup, and the numbers of wrong results."""
    speedups = torch.tensor([row.speedup for row in rows], dtype=torch.float64)
    shares = [row.built_in / row.ours for row in rows if row.built_in]
    least = f", least share of the built-in speed {min(shares):.2f}" if shares else ""
    wrong = sum(not row.is_right for row in rows)
    return (
        f"{len(rows)} rows: geometric mean {speedups.log().mean().exp():.2f}x, "
        f"least {speedups.min():.2f}x{least}, {wrong} wrong"
    )


def texts() -> dict[str, str]:
    """Returns the tables of the saved runs, by name."""
    return {"flex": _speeds(SAVED), "flex-flash": _speeds(SAVED_FLASH)}


def _speeds(paths: tuple[Path, ...]) -> str:
    runs = [load(path, tuple[Row, ...]) for path in paths]
    source = runs[0].source
    names = [*gallery(1, 1, 1, torch.device("cpu"))]
    measured = [row for run in runs for row in run.rows]
    measured.sort(key=lambda row: (names.index(row.function), row.kv_heads, row.head_dim, row.seqlen))
    rows = [
        (
            row.function,
            f"{row.heads}/{row.kv_heads}",
            *(str(number) for number in (row.seqlen, row.head_dim)),
            *(f"{ms:.3f}" for ms in (row.ours, row.theirs)),
            f"{row.speedup:.2f}",
            f"{row.built_in / row.ours:.2f}" if row.built_in else "–",
        )
        for row in measured
    ]
    heads = (
        *("function", "heads", "tokens", "head dim", "ms", "torch, ms", "speed over torch"),
        "over the built-in feature",
    )
    packages = f", {source.note}" if source.note else ""
    return "\n".join((f"{run_of(source, packages)}, bf16:", "", *table(heads, rows)))


def _heads(text: str) -> tuple[int, int]:
    heads, kv_heads = map(int, text.split("/"))
    return heads, kv_heads


def shapes_of(options: argparse.Namespace) -> list[tuple[str, int, int, int, int]]:
    """Returns the requested functions and shapes: name, heads, KV heads, tokens and head dim."""
    return [
        (name, heads, kv_heads, seqlen, head_dim)
        for name in options.functions
        for head_dim in options.head_dims
        for heads, kv_heads in options.heads
        for seqlen in options.seqlens
    ]


def options_of(description: str | None, names: list[str]) -> argparse.Namespace:
    """Returns the options of the command line, for functions of these names."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--functions", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--heads", type=_heads, nargs="+", default=[(16, 16), (32, 8)], metavar="Q/KV")
    parser.add_argument("--backend", choices=(AUTO, FLASH), default=AUTO, help="of torch's compiled function")
    parser.add_argument("--save", type=Path, help="write the rows as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
