"""Times of first calls with a bundle, each row in a new process with empty caches.

    python -m benchmarks.host.first_call --bundle FILE --save FOLDER/nvidia-h200-first-call.json.gz
    python -m benchmarks.host.first_call --none --save FOLDER/nvidia-h200-first-call-none.json.gz

need a GPU, and take five minutes each. CUDA's context and torch are initialised and flashtune is imported
before a call is timed, except in the rows of whole processes. Without `--bundle`, the bundle of
`FLASHTUNE_BUNDLE` or of an installed package is used. `--none` uses no bundle, for comparison. If FOLDER is
benchmarks/results, `python -m benchmarks.documents --write` puts both runs into docs/bundles.md.

A process imports this module before it is timed, so the module imports the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.saved import Saved

SCRIPT = "benchmarks/host/first_call.py"
# Results with a bundle, and without one.
SAVED = "nvidia-h200-first-call.json.gz", "nvidia-h200-first-call-none.json.gz"
ROOT = Path(__file__).resolve().parent.parent.parent
# The line with the rows of a process begins so.
MARK = "rows: "
# Scenarios that are measured in several processes. The median and the worst count.
REPEATED, PROCESSES = ("plain", "training", "process flashtune", "process torch"), 3
SEED = 7
UNTUNED = 12
# Of prompts with one feature: batch, heads, heads of keys, length, head dim.
SHAPE = 2, 24, 8, 1536, 128
LAYERS = 16
# Forward and backward passes of the model until it is given up.
MAX_STEPS = 400

# The figure with its unit, the case, a number, and the number of kernels that were compiled.
Row = tuple[str, str, float, int]
Call = Callable[[], Any]


def started() -> Any:
    """Returns torch after it used the GPU: both passes of SDPA, from a given gradient, and a synchronisation.

    Torch imports sympy for the first given gradient, which takes longer than the call.
    """
    import torch

    q, k, v = (torch.randn(1, 4, 256, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))
    torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(torch.ones_like(q))
    torch.cuda.synchronize()
    return torch


def compiled() -> int:
    """Returns the number of kernels that this process took from no bundle."""
    from flashtune.runtime.session import SESSION

    return len(SESSION.loader.rendered)


def timed(figure: str, case: str, call: Call) -> Row:
    """Returns the row of a call, in ms."""
    import torch

    before = compiled()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return figure, case, 1e3 * (time.perf_counter() - start), compiled() - before


def dense(
    batch: int, heads: int, kv_heads: int, seqlen: int, head_dim: int, *, grad: bool = False, **options: Any
) -> Call:
    """Returns a call of a prompt with random tensors, and of its gradients with `grad`."""
    import torch

    import flashtune

    q, k, v = (
        torch.randn(batch, count, seqlen, head_dim, device="cuda").bfloat16().requires_grad_(grad)
        for count in (heads, kv_heads, kv_heads)
    )
    if not grad:
        return lambda: flashtune.attention(q, k, v, prefer="generated", **options)
    gradient = torch.randn_like(q)
    return lambda: flashtune.attention(q, k, v, prefer="generated", **options).backward(gradient)


def paged(batch: int, heads: int, kv_heads: int, seqlen: int, head_dim: int, page: int = 16) -> Call:
    """Returns a call of one token for each of some sequences in pages."""
    import torch

    import flashtune

    pages = seqlen // page
    k, v = (torch.randn(batch * pages, page, kv_heads, head_dim, device="cuda").bfloat16() for _ in range(2))
    table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, pages)
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, heads, head_dim, device="cuda").bfloat16()
    return lambda: flashtune.attention_paged(q, k, v, table, lengths, prefer="generated")


def packed(
    batch: int, heads: int, kv_heads: int, longest: int, head_dim: int, tokens: int | None = None
) -> Call:
    """Returns a call of packed sequences, the first one with the largest length."""
    import torch

    import flashtune

    tokens = tokens or batch * longest
    q, k, v = (
        torch.randn(tokens, count, head_dim, device="cuda").bfloat16()
        for count in (heads, kv_heads, kv_heads)
    )
    starts = torch.linspace(longest, tokens, batch, device="cuda").int()
    starts = torch.cat((starts.new_zeros(1), starts))
    lengths = starts, starts, longest, longest
    return lambda: flashtune.attention_varlen(q, k, v, *lengths, causal=True, prefer="generated")


def masked(name: str) -> Call:
    """Returns a call of a prompt with a feature that takes a tensor."""
    import torch

    import flashtune

    batch, heads, _, seqlen, _ = SHAPE
    visible = torch.ones(seqlen, seqlen, dtype=torch.bool, device="cuda").tril()
    blocks = visible[::128, ::128]
    values: dict[str, Callable[[], Any]] = {
        "alibi_slopes": lambda: torch.rand(heads, device="cuda"),
        "attn_bias": lambda: torch.randn(1, heads, seqlen, seqlen, device="cuda").bfloat16(),
        "attn_mask": lambda: visible.view(1, 1, seqlen, seqlen),
        "block_mask": lambda: flashtune.BlockMask.from_blocks(blocks),
        "sinks": lambda: torch.randn(heads, device="cuda"),
        "prefix_lengths": lambda: torch.full((batch,), 100, dtype=torch.int32, device="cuda"),
        "kv_lengths": lambda: torch.full((batch,), 1000, dtype=torch.int32, device="cuda"),
    }
    return dense(*SHAPE, causal=name in ("alibi_slopes", "prefix_lengths", "sinks"), **{name: values[name]()})


FEATURES: dict[str, Callable[[], Call]] = {
    "window": lambda: dense(*SHAPE, causal=True, window=(1023, 0)),
    "softcap": lambda: dense(*SHAPE, causal=True, softcap=30.0),
    "chunk": lambda: dense(*SHAPE, causal=True, chunk=512),
    "dropout": lambda: dense(*SHAPE, causal=True, dropout_p=0.1),
    "deterministic": lambda: dense(*SHAPE, causal=True, deterministic=True, grad=True),
    "log-sum-exp": lambda: dense(*SHAPE, causal=True, return_lse=True),
    "packed": lambda: packed(*SHAPE),
    "pages": lambda: paged(16, 24, 8, 2048, 128),
    **{
        name: lambda name=name: masked(name)  # type: ignore[misc]
        for name in (
            "alibi_slopes", "attn_bias", "attn_mask", "block_mask", "sinks", "prefix_lengths", "kv_lengths",
        )
    },
}  # fmt: skip


def plain() -> Iterator[Row]:
    """The first call of a process, and the first calls of other kernels and shapes."""
    started()
    start = time.perf_counter()
    import flashtune

    flashtune.attention  # noqa: B018 - imports the function's module
    yield "import of flashtune after torch, ms", "", 1e3 * (time.perf_counter() - start), 0
    yield timed("first call of a tuned plain shape, ms", "D128", dense(1, 32, 8, 4096, 128, causal=True))
    yield timed("then another tuned kernel, ms", "D64", dense(4, 32, 32, 4096, 64))
    yield timed("then another tuned kernel, ms", "D128", dense(8, 16, 16, 2048, 128, causal=True))
    drawn = random.Random(SEED)  # noqa: S311 - shapes are no secrets
    for _ in range(UNTUNED):
        heads, group = drawn.choice((8, 16, 24, 32, 40)), drawn.choice((1, 2, 4, 8))
        shape = (
            drawn.choice((1, 2, 3, 6)), heads, heads // group, drawn.randint(200, 9000),
            drawn.choice((32, 64, 80, 96, 128, 160, 192, 256)),
        )  # fmt: skip
        causal = drawn.choice((False, True))
        case = f"b{shape[0]} h{shape[1]}x{shape[2]} s{shape[3]} d{shape[4]}{' causal' if causal else ''}"
        yield timed("then an untuned plain shape, ms", case, dense(*shape, causal=causal))


def training() -> Iterator[Row]:
    """The first forward and backward pass."""
    started()
    import flashtune.api.attention  # noqa: F401

    yield timed("first forward and backward, ms", "", dense(8, 16, 16, 2048, 128, causal=True, grad=True))


def feature(name: str) -> Iterator[Row]:
    """The first call with a feature."""
    started()
    import flashtune.api.attention
    import flashtune.api.paged
    import flashtune.api.varlen  # noqa: F401

    call = FEATURES[name]()
    yield timed("first call with a feature, ms", name, call)


def process(name: str) -> Iterator[Row]:
    """A whole process, from the import of torch to the first result of flashtune or SDPA."""
    start = time.perf_counter()
    if name == "flashtune":
        import flashtune
    import torch

    q = torch.zeros(1, 32, 4096, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.zeros(1, 8, 4096, 128, dtype=torch.bfloat16, device="cuda")
    if name == "flashtune":
        flashtune.attention(q, k, k, causal=True, prefer="generated")
    else:
        torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    count = compiled() if name == "flashtune" else 0
    yield f"import of {name} to its first result, ms", "", 1e3 * seconds, count


def model(*, grad: bool) -> Iterator[Row]:
    """A model of the size of Llama 3.2 1B in torch, until flashtune serves every call of attention."""
    torch = started()
    nn = torch.nn

    class Layer(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(2048, 3072, bias=False), nn.Linear(2048, 2048, bias=False)
            self.up, self.down = nn.Linear(2048, 16384, bias=False), nn.Linear(8192, 2048, bias=False)
            self.first, self.second = nn.RMSNorm(2048), nn.RMSNorm(2048)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.first(x)).unflatten(-1, (48, 64)).transpose(1, 2).split((32, 8, 8), 1)
            k, v = (each.repeat_interleave(4, 1) for each in (k, v))
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(out.transpose(1, 2).flatten(2))
            gate, up = self.up(self.second(x)).chunk(2, -1)
            return x + self.down(nn.functional.silu(gate) * up)

    layers = nn.Sequential(*(Layer() for _ in range(LAYERS))).to("cuda", torch.bfloat16)
    x = torch.randn(2, 2048, 2048, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        with torch.set_grad_enabled(grad):
            out = layers(x)
            if grad:
                out.sum().backward()
        torch.cuda.synchronize()

    step()
    yield _served("training" if grad else "inference", step)


def _served(name: str, step: Call) -> Row:
    """Returns the seconds until every kind of call is decided: served, or left to SDPA."""
    start = time.perf_counter()
    import flashtune.integrations.torch as integration

    integration.activate()
    from flashtune.runtime.session import SESSION

    steps, seconds, decided = 0, 0.0, False
    while not decided and steps < MAX_STEPS:
        step()
        steps += 1
        seconds = time.perf_counter() - start
        entries = [*SESSION.entries.values()]
        decided = bool(entries) and all(entry.passes or entry.is_refused for entry in entries)
    refused = sum(entry.is_refused for entry in entries)
    words = (
        f"{steps} steps, {refused} of {len(entries)} kinds of calls go to SDPA" if decided else "not decided"
    )
    return f"model of 1B, {name}, until all calls are served, s", words, seconds, compiled()


def bare() -> Iterator[Row]:
    """Calls without Triton, without a C compiler and without a home folder, compared with torch."""
    sys.modules["triton"] = None  # type: ignore[assignment]
    torch = started()
    import flashtune

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        q, k, v = (torch.randn(8, 16, 2048, 128, device="cuda").bfloat16().requires_grad_() for _ in range(3))
        reference = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        wanted = torch.autograd.grad(reference.sum(), (q, k, v))
        out = flashtune.attention(q, k, v, causal=True, prefer="generated")
        given = torch.autograd.grad(out.sum(), (q, k, v))
        for mine, its in zip((out, *given), (reference, *wanted), strict=True):
            error = (mine.float() - its.float()).abs().max().item() / its.float().abs().max().item()
            assert error < 0.02, error
        assert torch.isfinite(paged(16, 32, 8, 8192, 128)()).all()
        assert torch.isfinite(packed(24, 32, 8, 8192, 128, 32768)()).all()
    ours = [str(warning.message) for warning in seen if "flashtune" in str(warning.category)]
    yield "warnings without Triton, a C compiler and a home folder", "; ".join(ours), len(ours), compiled()


def memory() -> Iterator[Row]:
    """The size of the bundle, and the memory that it and its kernels use on the host and on the GPU."""
    torch = started()
    import flashtune.api.attention
    import flashtune.launch.bundle_binding  # noqa: F401
    from flashtune.dispatch.platform import PLATFORM
    from flashtune.launch.bundles import bundle_paths

    path = next(iter(bundle_paths(10 * torch.cuda.get_device_capability()[0], None)), None)
    if path is not None and path.is_file():  # not the null device
        yield "size of the bundle, MB", "", path.stat().st_size / 1e6, 0
    PLATFORM.records(PLATFORM.target(torch.device("cuda")).name)
    shapes = {"bundle and first kernel": (1, 32, 8, 4096, 128), "next kernel": (4, 32, 32, 4096, 64)}
    for name, shape in shapes.items():
        call = dense(*shape, causal=True)
        torch.cuda.empty_cache()
        host, free = _resident(), torch.cuda.mem_get_info()[0]
        call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        on_gpu = free - torch.cuda.mem_get_info()[0]
        yield f"memory of the {name}, host, MB", "", (_resident() - host) / 1e6, compiled()
        yield f"memory of the {name}, GPU, MB", "", on_gpu / 1e6, compiled()


def _resident() -> int:
    """Returns the resident memory of this process, in bytes."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


SCENARIOS: dict[str, Callable[[], Iterator[Row]]] = {
    "plain": plain,
    "training": training,
    "memory": memory,
    "bare": bare,
    "model inference": lambda: model(grad=False),
    "model training": lambda: model(grad=True),
    "process flashtune": lambda: process("flashtune"),
    "process torch": lambda: process("torch"),
    **{f"feature {name}": lambda name=name: feature(name) for name in FEATURES},  # type: ignore[misc]
}


def run(name: str, environment: dict[str, str]) -> list[Row]:
    """Returns the rows of a scenario in a new process with empty caches. Prints the error of a failed one."""
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "FLASHTUNE_CACHE_DIR": folder,
            "TRITON_CACHE_DIR": folder,
            "FLASHTUNE_DB": f"{folder}/none.sqlite",
        }
        if name == "bare":
            # Folders that do not exist.
            own = dict.fromkeys(("HOME", "PATH", "XDG_CACHE_HOME"), "/nonexistent/folder")
        command = [sys.executable, "-m", "benchmarks.host.first_call", "--one", name]
        done = subprocess.run(
            command, env={**environment, **own}, cwd=ROOT, text=True, capture_output=True, check=False
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        print(f"{name} failed:\n{done.stderr[-3000:]}", flush=True)
        return [("failed", name, 0.0, 0)]
    return [tuple(row) for row in json.loads(lines[-1].removeprefix(MARK))]


def summary(rows: list[Row]) -> Iterator[tuple[str, str, str, str]]:
    """Yields lines of the figures: the median and the worst row of each, and the kernels compiled."""
    medians = {}
    for figure in dict.fromkeys(row[0] for row in rows):
        own = [row for row in rows if row[0] == figure]
        medians[figure] = statistics.median(row[2] for row in own)
        worst = max(own, key=lambda row: row[2])
        count = str(sum(row[3] for row in own))
        yield figure, _number(medians[figure]), f"{_number(worst[2])} {worst[1]}".strip(), count
    ours, theirs = (
        medians.get(f"import of {name} to its first result, ms") for name in ("flashtune", "torch")
    )
    if ours and theirs:
        yield "import to first result, flashtune over torch", _number(ours / theirs), "", ""


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 10.0 else f"{value:.2f}"


def texts(runs: Sequence[Saved[list[Row]]] | None = None) -> dict[str, str]:
    """Returns the table of saved runs with and without a bundle, by name."""
    from benchmarks.saved import RESULTS, load, run_of
    from flashtune.tuner.cli.output import table

    bundled, compiling = runs or [load(RESULTS / name, list[Row]) for name in SAVED]
    others = {figure: median for figure, median, *_ in summary(compiling.rows)}
    heads = "figure", "with a bundle, median", "worst", "kernels compiled", "without a bundle, median"
    lines = table(heads, ((*line, others.get(line[0], "")) for line in summary(bundled.rows)))
    where = run_of(bundled.source, f", driver {bundled.source.driver}")
    return {"first-call": "\n".join((f"{where}, new processes with empty caches:", "", *lines))}


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="the bundle of kernels")
    parser.add_argument("--none", action="store_true", help="use no bundle")
    parser.add_argument("--only", metavar="TEXT", default="", help="scenarios whose names begin so")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write all rows to FILE, in JSON")
    parser.add_argument("--one", choices=SCENARIOS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(MARK + json.dumps(list(SCENARIOS[options.one]())))
        return
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    # An installation has the modules' bytecode.
    subprocess.run([sys.executable, "-m", "compileall", "-q", "flashtune"], cwd=ROOT, check=True)
    if options.bundle:
        environment["FLASHTUNE_BUNDLE"] = str(options.bundle.resolve())
    if options.none:
        environment["FLASHTUNE_BUNDLE"] = os.devnull
    rows: list[Row] = []
    for number in range(PROCESSES):
        for name in SCENARIOS if number == 0 else REPEATED:
            if not name.startswith(options.only) or (options.none and name == "bare"):
                continue
            own = run(name, environment)
            rows += own
            for row in own:
                print("", *row, sep=" | ", flush=True)
    print("figure | median | worst | kernels compiled")
    for line in summary(rows):
        print(*line, sep=" | ")
    if options.save:
        from benchmarks.saved import save

        save(options.save, rows)


if __name__ == "__main__":
    main()
