"""Compares the bits of batch-invariant rows in many surroundings, and times kernels. Needs an H100 or H200.

    python -m benchmarks.kernels.invariance --problems 200 --seconds 500 --save FILE.json.gz
    python -m benchmarks.kernels.invariance --problems 0 --seconds 500 --time --save FILE.json.gz

Each problem is one sequence, and a causal prefill computes its rows. A surrounding computes some of these
rows in another call: in a batch, packed, in chunks, by decoding, in pages. Rows must have equal bits.
`--time` also times the kernels of dispatch with and without the constraint, and without splits, in
interleaved runs.
"""

import argparse
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from pebble import ProcessPool
from torch import Tensor

import flashtune
from benchmarks.dispatch_regret.timing import compile_all
from benchmarks.saved import RESULTS, Saved, load, run_of, save
from flashtune.api.explain import Explanation, explain, explain_paged, explain_varlen
from flashtune.core.errors import KernelError, VerificationError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target, device_target
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import tuned_records
from flashtune.templates.forward_hopper.perf_model import split_variants
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.templates.registry import find_family
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.cli.output import table
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.timed_runs import kernel_run
from flashtune.tuner.execution.timing import measure_interleaved
from flashtune.tuner.workloads.shapes import parse_shape

SURROUNDINGS, LONGEST, ROUNDS, VARIANTS = 20, 6000, 11, 3
EXPLAIN: dict[Callable[..., Any], Callable[..., Explanation]] = {
    flashtune.attention: explain,
    flashtune.attention_varlen: explain_varlen,
    flashtune.attention_paged: explain_paged,
}


class Kind(NamedTuple):
    """Heads and features that have one order of arithmetic."""

    name: str
    heads: int
    kv_heads: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    options: tuple[tuple[str, Any], ...] = ()
    kv_dtype: torch.dtype | None = None  # Of pages, if it is not that of queries.
    inputs: tuple[str, ...] = ()  # Options that are tensors of one number for each head.


KINDS = (
    Kind("plain", 8, 2, 128),
    Kind("narrow, sinks", 8, 1, 64, inputs=("sinks",)),
    Kind("window, sink tokens", 4, 4, 128, options=(("window", (700, 0)), ("sink_tokens", 4))),
    Kind("softcap, fp16", 8, 2, 128, torch.float16, (("softcap", 20.0),)),
    Kind("wide", 4, 2, 256),
    Kind("alibi, head dim 96", 6, 2, 96, inputs=("alibi_slopes",)),
    Kind("window, sinks", 16, 2, 64, options=(("window", (127, 0)),), inputs=("sinks",)),
    Kind("e4m3 cache", 8, 2, 128, kv_dtype=torch.float8_e4m3fn),
)
GQA = "dtype=bf16,heads=32,kv_heads=8,head_dim=128"
DECODE = (
    f"{GQA},seqlen_q=1,batch=1,seqlen_kv=8192|65536|131072",
    f"{GQA},seqlen_q=1,batch=16,seqlen_kv=8192",
    f"{GQA},seqlen_q=1,batch=64,seqlen_kv=4096",
    "dtype=bf16,heads=64,kv_heads=8,head_dim=128,seqlen_q=1,batch=128,seqlen_kv=4096",
    "dtype=bf16,heads=32,kv_heads=1,head_dim=128,seqlen_q=1,batch=16,seqlen_kv=8192",
    "dtype=bf16,heads=16,kv_heads=16,head_dim=64,seqlen_q=1,batch=64,seqlen_kv=4096",
)
PREFILL = (
    "dtype=bf16,heads=32,head_dim=64,tokens=16384,seqlen=1024|4096|16384,causal",
    "dtype=bf16,heads=16,head_dim=128,tokens=16384,seqlen=1024|4096|16384,causal",
    "dtype=bf16,heads=8,head_dim=256,tokens=16384,seqlen=1024|4096|16384,causal",
    "dtype=bf16,heads=16,head_dim=128,tokens=16384,seqlen=1024|4096|16384",
)
CHUNKED = (
    f"{GQA},batch=16,seqlen_q=512,seqlen_kv=8192,causal,page_size=16|64",
    f"{GQA},batch=1,seqlen_q=512|2048,seqlen_kv=16384|65536,causal,page_size=64",
)
UNSPLIT = (f"{GQA},seqlen_q=1,batch=1|8,seqlen_kv=4096|8192|16384|65536",)
SCRIPT = "benchmarks/kernels/invariance.py"
SAVED = RESULTS / "nvidia-h200-invariance.json.gz"
BITS = RESULTS / "nvidia-h200-invariance-bits.json.gz"
GROUPS = {"decode": DECODE, "prefill": PREFILL, "chunked prefill": CHUNKED, "splits": UNSPLIT}


class Row(msgspec.Struct, frozen=True):
    """The times of one shape in ms, by candidate."""

    group: str
    shape: str
    unconstrained: str
    times: dict[str, float]


class Report(msgspec.Struct, frozen=True):
    """All results. `differing` names the surroundings with other bits, each with the number of its rows."""

    problems: int
    surroundings: int
    rows: int
    differing: dict[str, int]
    transformer: dict[str, int]
    times: tuple[Row, ...]


class Prompt(NamedTuple):
    """A sequence: q [n, heads, width], k and v [n, kv_heads, width]."""

    q: Tensor
    k: Tensor
    v: Tensor

    def last(self, first: int, end: int) -> "Prompt":
        """Returns the queries from `first` to `end` with all keys up to there."""
        return Prompt(self.q[first:end], self.k[:end], self.v[:end])


class Surrounding(NamedTuple):
    """A call, and the places of the sequence's rows in its output and among its positions."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    pick: Callable[[Tensor], Tensor]
    first: int


def a_prompt(kind: Kind, length: int, device: torch.device) -> Prompt:
    """Returns random tensors."""
    stored = kind.kv_dtype or kind.dtype
    q = torch.randn(length, kind.heads, kind.width, device=device, dtype=kind.dtype)
    k, v = (
        torch.randn(length, kind.kv_heads, kind.width, device=device, dtype=kind.dtype).to(stored)
        for _ in range(2)
    )
    return Prompt(q, k, v)


def options_of(kind: Kind, device: torch.device) -> dict[str, Any]:
    """Returns the options of all calls of a kind."""
    made = {name: torch.linspace(0.1, 1.5, kind.heads, device=device) for name in kind.inputs}
    scales = {name: torch.full((1,), 0.5, device=device) for name in ("k_scale", "v_scale") if kind.kv_dtype}
    return {**dict(kind.options), **made, **scales, "causal": True, "batch_invariant": True}


def paged(kind: Kind, parts: list[Prompt], own: int, page: int, packed: bool, chance: random.Random,
          options: dict[str, Any], name: str, first: int) -> Surrounding:  # fmt: skip
    """Returns a call of sequences in shuffled pages, all with as many queries as the first if not packed."""
    device = parts[0].q.device
    counts = [-(-part.k.shape[0] // page) for part in parts]
    width, total = max(counts) + chance.choice((0, 1, 7, 64)), sum(counts) + 3
    order = torch.tensor(chance.sample(range(total), total), device=device, dtype=torch.int32)
    table = torch.zeros(len(parts), width, device=device, dtype=torch.int32)
    caches = [
        torch.zeros(total, page, kind.kv_heads, kind.width, device=device, dtype=parts[0].k.dtype)
        for _ in range(2)
    ]
    taken = 0
    for row, (part, count) in enumerate(zip(parts, counts, strict=True)):
        pages = order[taken : taken + count]
        table[row, :count] = pages
        for cache, values in zip(caches, (part.k, part.v), strict=True):
            room = torch.zeros(count * page, *values.shape[1:], device=device, dtype=values.dtype)
            room[: values.shape[0]] = values
            cache[pages.long()] = room.view(count, page, *values.shape[1:])
        taken += count
    lengths = torch.tensor([part.k.shape[0] for part in parts], device=device, dtype=torch.int32)
    queries = [part.q.shape[0] for part in parts]
    start = sum(queries[:own])
    if packed:
        q = torch.cat([part.q for part in parts])
        ends = torch.tensor([0, *queries], device=device).cumsum(0).int()
        options = {**options, "cu_seqlens_q": ends, "max_seqlen_q": max(queries)}
        pick = lambda out: out[start : start + queries[own]]  # noqa: E731
    else:
        q = torch.stack([part.q for part in parts])
        pick = lambda out: out[own]  # noqa: E731
    return Surrounding(name, flashtune.attention_paged, (q, *caches, table, lengths), options, pick, first)


def surrounding(kind: Kind, prompt: Prompt, chance: random.Random, options: dict[str, Any]) -> Surrounding:
    """Returns a random call that computes some rows of a prompt."""
    device, length = prompt.q.device, prompt.q.shape[0]
    names = ["pages", "packed pages", "decode in pages"]
    if kind.kv_dtype is None:
        names += ["repeated", "batch", "chunk", "packed", "lengths", "decode"]
    name = chance.choice(names)
    end = length if chance.random() < 0.3 else chance.randint(1, length)
    many = 1 if "decode" in name else min(end, chance.choice((1, 2, 5, 16, 33, 130, end)))
    if name in ("repeated", "batch"):
        first, end = 0, length
    else:
        first = end - many
    part = prompt.last(first, end)
    same = "packed" not in name
    own = chance.randrange(4)
    others = []
    for _ in range(3):
        queries = part.q.shape[0] if same else chance.randint(1, 600)
        keys = queries + chance.randint(0, 2 * LONGEST)
        others.append(a_prompt(kind, keys, device).last(keys - queries, keys))
    parts = [*others[:own], part, *others[own:]]
    if "pages" in name:
        page = chance.choice((16, 64))
        return paged(kind, parts, own, page, not same, chance, options, f"{name} of {page}", first)
    if name == "packed":
        starts = [
            torch.tensor([0, *(getattr(each, side).shape[0] for each in parts)], device=device)
            .cumsum(0)
            .int()
            for side in "qk"
        ]
        longest = [max(getattr(each, side).shape[0] for each in parts) for side in "qk"]
        tensors = [torch.cat([getattr(each, side) for each in parts]) for side in "qkv"]
        begin = sum(each.q.shape[0] for each in parts[:own])
        pick = lambda out: out[begin : begin + part.q.shape[0]]  # noqa: E731
        return Surrounding(
            name, flashtune.attention_varlen, (*tensors, *starts, *longest), options, pick, first
        )
    options = {**options, "layout": "bshd"}
    if name in ("lengths", "batch"):
        if name == "batch":
            parts = [part if row == own else a_prompt(kind, length, device) for row in range(4)]
        longest_k = max(each.k.shape[0] for each in parts) + (5 if name == "lengths" else 0)
        q = torch.stack([each.q for each in parts])
        k, v = (torch.zeros(4, longest_k, *part.k.shape[1:], device=device, dtype=part.k.dtype) for _ in "kv")
        for row, each in enumerate(parts):
            k[row, : each.k.shape[0]], v[row, : each.v.shape[0]] = each.k, each.v
        if name == "lengths":
            counts = [each.k.shape[0] for each in parts]
            options["kv_lengths"] = torch.tensor(counts, device=device, dtype=torch.int32)
        return Surrounding(name, flashtune.attention, (q, k, v), options, lambda out: out[own], first)
    tensors = [tensor[None] for tensor in part]
    return Surrounding(name, flashtune.attention, tuple(tensors), options, lambda out: out[0], first)


def prefilled(kind: Kind, prompt: Prompt, options: dict[str, Any]) -> Tensor:
    """Returns all rows of a prompt, by one call."""
    if kind.kv_dtype is not None:
        call = paged(kind, [prompt], 0, 64, True, random.Random(0), options, "", 0)  # noqa: S311
        return call.pick(call.function(*call.arguments, **call.options))
    q, k, v = (tensor[None] for tensor in prompt)
    out: Tensor = flashtune.attention(q, k, v, layout="bshd", **options)
    return out[0]


def a_problem(number: int, device: torch.device) -> tuple[Kind, Prompt, random.Random]:
    """Returns one of the kinds in turn with a random prompt; the same in every run."""
    chance = random.Random(number)  # noqa: S311
    torch.manual_seed(number)
    kind = KINDS[number % len(KINDS)]
    length = int(2 ** chance.uniform(3, 12.55)) if number >= len(KINDS) else 2500
    return kind, a_prompt(kind, min(length, LONGEST), device), chance


def compile_ahead(count: int, target: Target, device: torch.device) -> None:
    """Compiles most kernels of the first problems on all cores."""
    jobs: dict[Problem, tuple[Candidate, ...]] = {}
    for number in range(min(count, 4 * len(KINDS))):
        kind, prompt, chance = a_problem(number, device)
        for _ in range(SURROUNDINGS):
            call = surrounding(kind, prompt, chance, options_of(kind, device))
            found = EXPLAIN[call.function](*call.arguments, **call.options)
            assert found.selection is not None
            record = found.selection.record
            assert record.config is not None
            candidate = Candidate(record.family, record.config)
            known = jobs.get(found.problem, ())
            jobs[found.problem] = known if candidate in known else (*known, candidate)
    compile_all(jobs, target, print)


def compared_problem(number: int) -> Report:
    """Returns the comparison of one problem, on one of the GPUs in turn."""
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    kind, prompt, chance = a_problem(number, device)
    rows, differing = 0, {}
    options = options_of(kind, device)
    expected = prefilled(kind, prompt, options)
    if not (expected.isfinite().all() and expected.any()):
        raise VerificationError(
            f"{kind.name}: the rows of {prompt.q.shape[0]} tokens are zeros or not finite"
        )
    for _ in range(SURROUNDINGS):
        call = surrounding(kind, prompt, chance, options)
        own = call.pick(call.function(*call.arguments, **call.options)).reshape(-1, *expected.shape[1:])
        wanted = expected[call.first : call.first + own.shape[0]]
        wrong = int((own.view(torch.int16) != wanted.view(torch.int16)).flatten(1).any(1).sum())
        rows += own.shape[0]
        if wrong:
            worst = (own.float() - wanted.float()).abs().max().item()
            name = f"{kind.name}, {prompt.q.shape[0]} tokens: {call.name} from {call.first}"
            differing[f"{name}, by up to {worst:.2g}"] = wrong
    return Report(1, SURROUNDINGS, rows, differing, {}, ())


def compared(count: int, jobs: int, end: float, target: Target, device: torch.device) -> Report:
    """Returns the comparison of bits by several processes. Prints the problems that did not end in time."""
    compile_ahead(count, target, device)
    total = Report(0, 0, 0, {}, {}, ())
    with ProcessPool(jobs, context=multiprocessing.get_context("spawn")) as pool:
        waiting: dict[Any, int] = {
            pool.schedule(compared_problem, (number,)): number for number in range(count)
        }
        try:
            for future in as_completed(waiting, timeout=max(0.0, end - time.monotonic())):
                report, number = future.result(), waiting.pop(future)
                total = Report(
                    total.problems + 1,
                    total.surroundings + report.surroundings,
                    total.rows + report.rows,
                    total.differing | report.differing,
                    {},
                    (),
                )
                kind = KINDS[number % len(KINDS)].name
                print(f"problem {number} ({kind}): {report.rows} rows, {report.differing}", flush=True)
        except TimeoutError:
            running = [number for future, number in waiting.items() if future.running()]
            print(f"{len(waiting)} problems have not ended in time; running are {running}", flush=True)
            pool.stop()  # type: ignore[no-untyped-call]
    return total


def transformer(device: torch.device) -> dict[str, int]:
    """Returns the logits of a small transformer that differ from those of its prompt alone, by the way.

    All but attention is computed in blocks of 64 rows. Their bits do not depend on other blocks.
    """
    kind, tokens, hidden, layers, words = KINDS[0], 3000, 512, 3, 1024
    torch.manual_seed(1)
    sizes = [kind.heads * kind.width, *(kind.kv_heads * kind.width,) * 2]
    shapes = [*((hidden, size) for size in (*sizes, 2048)), (sizes[0], hidden), (2048, hidden)]
    weights = [
        [torch.randn(shape, device=device, dtype=kind.dtype) / shape[0] ** 0.5 for shape in shapes]
        for _ in range(layers)
    ]
    head = torch.randn(hidden, words, device=device, dtype=kind.dtype)
    embedded = torch.randn(tokens, hidden, device=device, dtype=kind.dtype)
    options = options_of(kind, device)

    def in_blocks(function: Callable[..., Tensor], rows: Tensor, *factors: Tensor) -> Tensor:
        full = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % 64))
        return torch.cat([function(block, *factors) for block in full.split(64)])[: rows.shape[0]]

    def projected(rows: Tensor, factor: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(rows, (hidden,)) @ factor

    def perceptron(rows: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return torch.relu(projected(rows, up)) @ down

    def logits(attend: Callable[[Prompt], Tensor]) -> Tensor:
        x = embedded
        for *inputs, up, output, down in weights:
            q, k, v = (in_blocks(projected, x, factor).view(tokens, -1, kind.width) for factor in inputs)
            attended = attend(Prompt(q, k, v)).reshape(tokens, -1)
            x = x + in_blocks(torch.matmul, attended, output)
            x = x + in_blocks(perceptron, x, up, down)
        return in_blocks(projected, x, head)

    def in_chunks(prompt: Prompt, step: int, first: int = 0) -> list[Tensor]:
        parts = (prompt.last(at, min(at + step, tokens)) for at in range(first, tokens, step))
        return [prefilled(kind, part, options) for part in parts]

    def in_batch(prompt: Prompt) -> Tensor:
        others = [a_prompt(kind, length, device) for length in (3000, 70)]
        call = paged(kind, [others[0], prompt, others[1]], 1, 16, True, random.Random(1), options, "", 0)  # noqa: S311
        return call.pick(call.function(*call.arguments, **call.options))

    alone = logits(lambda prompt: prefilled(kind, prompt, options))
    ways: dict[str, Callable[[Prompt], Tensor]] = {
        "in a batch": in_batch,
        "in chunks": lambda prompt: torch.cat(in_chunks(prompt, 200)),
        "by decode": lambda prompt: torch.cat(
            [prefilled(kind, prompt.last(0, tokens - 40), options), *in_chunks(prompt, 1, tokens - 40)]
        ),
    }
    differing = {
        name: int((logits(attend).view(torch.int16) != alone.view(torch.int16)).sum())
        for name, attend in ways.items()
    }
    print(f"logits of a transformer that differ: {differing}", flush=True)
    return differing


def summary(rows: list[Row]) -> Iterator[str]:
    """Yields the speed over unconstrained kernels, and over kernels without splits, by group."""
    for group in GROUPS:
        for peer in ("unconstrained", "unsplit"):
            ratios = [
                row.times[peer] / row.times["invariant"]
                for row in rows
                if row.group == group and {peer, "invariant"} <= row.times.keys()
            ]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                yield f"{group}: {mean:.3f} of {peer}, worst {min(ratios):.3f}, {len(ratios)} shapes"


def texts() -> dict[str, str]:
    """Returns the tables of the saved times and comparisons, by name."""
    saved, rows = load(SAVED, Report), []
    for group in GROUPS:
        own = [row.times for row in saved.rows.times if row.group == group]
        cells = []
        for peer in ("unconstrained", "unsplit"):
            ratios = [times[peer] / times["invariant"] for times in own if peer in times]
            cells += (
                [f"{statistics.geometric_mean(ratios):.3f}", f"{min(ratios):.3f}"] if ratios else ["–", "–"]
            )
        rows.append((group, str(len(own)), *cells))
    heads = (
        "calls",
        "shapes",
        "speed over unconstrained, mean",
        "worst",
        "over one program for a tile, mean",
        "worst",
    )
    return {
        "invariance": "\n".join((f"{run_of(saved.source)}:", "", *table(heads, rows))),
        "invariance-bits": "\n".join(_bits(load(BITS, Report))),
    }


def _bits(saved: Saved[Report]) -> Iterator[str]:
    report = saved.rows
    numbers = report.problems, report.surroundings, report.rows, len(report.differing)
    logits = sum(report.transformer.values())
    yield f"{run_of(saved.source)}:"
    yield ""
    heads = "problems", "calls", "rows", "calls with other bits", "logits of a transformer with other bits"
    yield from table(heads, [tuple(f"{number:,}" for number in (*numbers, logits))])


def candidates(problem: Problem, target: Target) -> tuple[tuple[str, Problem, Candidate], ...]:
    """Returns the kernels of a shape: unconstrained, invariant, invariant without splits, and variants."""
    bound = msgspec.structs.replace(problem, batch_invariant=True)
    tables = tuned_records(target.name)
    record, chosen = (
        select(each, target, tables, Specialization(), generated=True).record for each in (problem, bound)
    )
    family, own = find_family("forward_hopper"), chosen.config
    assert record.config is not None
    assert isinstance(own, HopperConfig)
    found = [
        ("unconstrained", problem, Candidate(record.family, record.config)),
        ("invariant", bound, Candidate(family.name, own)),
    ]
    unsplit = msgspec.structs.replace(own, num_splits=1)
    if unsplit != own:
        found.append(("unsplit", bound, Candidate(family.name, unsplit)))
    others = {*family.schedule_variants(bound, own, target), *split_variants(bound, own, target)} - {own}
    near = sorted(others, key=lambda config: family.makespan_ms(bound, config, target))[:VARIANTS]
    found += [(f"variant {config.label()}", bound, Candidate(family.name, config)) for config in near]
    return tuple(found)


def timed(end: float, target: Target, device: torch.device) -> Iterator[Row]:
    """Yields the times of all shapes until the time is up."""
    shapes = [
        (group, problem) for group, texts in GROUPS.items() for text in texts for problem in parse_shape(text)
    ]
    chosen = {problem: candidates(problem, target) for _, problem in shapes}
    jobs: dict[Problem, tuple[Candidate, ...]] = {}
    for name, problem, candidate in (entry for entries in chosen.values() for entry in entries):
        del name
        jobs[problem] = (*jobs.get(problem, ()), candidate)
    compile_all(jobs, target, print)
    for group, problem in shapes:
        if time.monotonic() > end:
            return
        tensors = make_tensors(problem, device)
        names, runs = [], []
        for name, own, candidate in chosen[problem]:
            try:
                runs.append(kernel_run(own, candidate, Specialization(), target, tensors))
                names.append(name)
            except KernelError as error:
                print(f"{problem.key}: {name}: {error}")
        measured = measure_interleaved(runs, device, rounds=ROUNDS)
        times = {name: round(each.ms, 5) for name, each in zip(names, measured, strict=True)}
        first = chosen[problem][0][2]
        row = Row(group, problem.key, f"{first.family} {first.config.label()}", times)
        print(
            f"{group}: {row.shape}: {times}; invariant is {chosen[problem][1][2].config.label()}", flush=True
        )
        yield row


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=8, help="processes that compare bits, on all GPUs")
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--time", action="store_true", help="time the kernels too")
    parser.add_argument("--save", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    target, device = device_target(0), torch.device("cuda", 0)
    end = time.monotonic() + arguments.seconds
    report = Report(0, 0, 0, {}, {}, ())
    if arguments.problems:
        report = compared(arguments.problems, arguments.jobs, end, target, device)
        save(arguments.save, report)
        report = msgspec.structs.replace(report, transformer=transformer(device))
    save(arguments.save, report)
    rows: list[Row] = []
    for row in timed(end, target, device) if arguments.time else ():
        rows.append(row)
        save(arguments.save, msgspec.structs.replace(report, times=tuple(rows)))
    print("\n".join(summary(rows)))
    counts = f"{report.problems} problems, {report.surroundings} calls, {report.rows} rows"
    print(f"{counts}: {len(report.differing)} calls differ")


if __name__ == "__main__":
    main()
