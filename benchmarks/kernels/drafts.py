"""Verifies and times attention of drafts on pages: trees, and batches of which some sequences have drafts.

    python -m benchmarks.kernels.drafts --verify 100 --seconds 120 --save FILE.json.gz

Needs an H100 or H200. Each row is one interleaved run with a cold L2. A row of trees has each config with and
without the mask. A row of batches has the kernel that dispatch selects from the shipped table, other numbers
of splits, and FlashInfer if it is installed. `--verify` bounds the checks at the full level, `--seconds` the
timing.
"""

import argparse
import importlib.util
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from benchmarks.dispatch_regret.analysis import dispatched
from benchmarks.dispatch_regret.timing import compile_all
from benchmarks.kernels.splits import (
    BEST,
    DECODING,
    HOPELESS,
    HOPPER,
    Check,
    Time,
    candidates,
    verify,
)
from benchmarks.saved import RESULTS, load, run_of, save
from flashtune.core.canonical import without
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Feature, Problem
from flashtune.core.target import Target, device_target
from flashtune.db.table import shipped_table
from flashtune.templates.forward_hopper.space import usual_config
from flashtune.templates.registry import find_family
from flashtune.tuner.bench.flashinfer import FLASHINFER, flashinfer_run
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.cli.output import table
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.execution.timed_runs import kernel_run
from flashtune.tuner.execution.timing import Run, measure_interleaved, once
from flashtune.tuner.workloads.shapes import parse_shape

ROUNDS, SPLIT = 31, 5
SCRIPT = "benchmarks/kernels/drafts.py"
SAVED = RESULTS / "nvidia-h200-drafts.json.gz"
PLAIN, TREE = "plain", "tree"
HEADS = ("heads=8,kv_heads=1", "heads=32,kv_heads=8", "heads=64,kv_heads=8")
PAGES = "dtype=bf16,head_dim=128,page_size=16,causal"
# Sequences of a batch of which the first DRAFTED have DRAFTS queries, and the others one.
SEQUENCES, DRAFTED, DRAFTS = 32, 8, 8
SMALL = "heads=8,kv_heads=2,head_dim=128,batch=2,seqlen_q=64,seqlen_kv=4096"
# Shapes with the family and the number of splits of a config, which are verified.
VERIFIED = (
    (f"dtype=bf16,{SMALL},causal,page_size=16,tree", HOPPER, 8),
    (f"dtype=bf16,{SMALL},causal,page_size=16,tree", HOPPER, 1),
    (f"dtype=bf16,{SMALL},page_size=1,tree,packed=100", HOPPER, 1),
    (f"dtype=bf16,{SMALL},causal,page_size=64,tree,packed=100,window=1000,sinks", HOPPER, 3),
    (f"dtype=bf16,{SMALL},causal,page_size=16,tree,kv_dtype=e4m3", HOPPER, 1),
    (f"dtype=fp16,{SMALL},page_size=64,tree,alibi,prefix,window=700", HOPPER, 1),
    (f"dtype=bf16,{SMALL},causal,page_size=16,tree", DECODING, 0),
    (f"dtype=fp16,{SMALL},page_size=64,tree,packed=100,kv_dtype=int8", DECODING, 0),
    (f"dtype=bf16,{SMALL},causal,page_size=16,tree", "forward_masked", 0),
    (f"dtype=bf16,{SMALL},page_size=16,tree,packed=100,softcap", "forward_masked", 0),
)


class Row(msgspec.Struct, frozen=True):
    """A shape with the times of its implementations, the fastest first.

    `ratio` is the least time without the mask over that with it, or FlashInfer's time over the least.
    """

    shape: str
    times: tuple[Time, ...]
    ratio: float | None


class Report(msgspec.Struct, frozen=True):
    """All results of a run. A verdict is an empty text if it passed."""

    verdicts: dict[str, str]
    rows: tuple[Row, ...]


def trees() -> list[Problem]:
    """Returns the problems with masks of 64 drafts over 8,192 keys."""
    grid = itertools.product((1, 4, 16), HEADS)
    texts = (f"{PAGES},{heads},batch={batch},seqlen_q=64,seqlen_kv=8192,tree" for batch, heads in grid)
    return [problem for text in texts for problem in parse_shape(text)]


def batches() -> list[Problem]:
    """Returns the problems of batches of which some sequences have drafts."""
    tokens = DRAFTED * DRAFTS + SEQUENCES - DRAFTED
    lengths = f"batch={SEQUENCES},packed={tokens},seqlen_q={DRAFTS}"
    grid = itertools.product((8192, 2048, 32768), HEADS[1:])
    texts = (f"{PAGES},{heads},{lengths},seqlen_kv={keys}" for keys, heads in grid)
    return [problem for text in texts for problem in parse_shape(text)]


def mixed_tensors(problem: Problem, device: torch.device) -> Tensors:
    """Returns random inputs of such a batch. Sequences have from half of the keys to all of them."""
    tensors = make_tensors(msgspec.structs.replace(problem, packed=0), device)
    counts = torch.tensor([DRAFTS] * DRAFTED + [1] * (SEQUENCES - DRAFTED))
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
    q, out = (
        tensor.transpose(1, 2).flatten(0, 1)[: problem.packed].transpose(0, 1)[None]
        for tensor in (tensors.q, tensors.out)
    )
    return msgspec.structs.replace(tensors, q=q, out=out, side=tensors.side._replace(cu_seqlens_q=starts))


def texts() -> dict[str, str]:
    """Returns the table of trees, by name."""
    saved, rows = load(SAVED, Report), []
    for row in saved.rows.rows:
        times = {entry.name: entry.ms for entry in reversed(row.times)}
        if row.ratio is not None and TREE in times:
            cells = f"{times[PLAIN]:.4f}", f"{times[TREE]:.4f}", f"{row.ratio:.3f}"
            rows.append((f"`{row.shape}`", *cells))
    heads = "problem", "ms without a mask", "ms with a tree mask", "speed over no mask"
    return {"drafts": "\n".join((f"{run_of(saved.source)}:", "", *table(heads, rows)))}


def tree_candidates(problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """Returns the config without splits, a few split ones, and the default of the decoding family."""
    found = candidates(HOPPER, problem, target)
    return (*found[:SPLIT], *(candidate for candidate in found if candidate.family == DECODING))


def batch_candidates(problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """Returns the dispatched kernel, and other numbers of splits of the decoding family."""
    shipped, decoding = shipped_table(target.name), find_family(DECODING)
    chosen = dispatched(target, problem, () if shipped is None else shipped.records)
    default = decoding.default(problem, target)
    others = sorted(
        decoding.schedule_variants(problem, default, target),
        key=lambda config: decoding.makespan_ms(problem, config, target),
    )
    found = (chosen, *(Candidate(DECODING, config) for config in (default, *others[:BEST])))
    return tuple(dict.fromkeys(found))


def tree_checks(target: Target) -> Iterator[Check]:
    """Yields the checks of kernels with masks of trees."""
    for shape, name, splits in VERIFIED:
        (problem,) = parse_shape(shape)
        config = find_family(name).default(problem, target)
        if name == HOPPER:
            config = msgspec.structs.replace(usual_config(problem), num_splits=splits, split_epilogue=False)
        yield f"{name} {problem.key} {splits} splits", problem, Candidate(name, config)


def measured(labels: list[tuple[str, str]], runs: list[Run], device: torch.device) -> tuple[Time, ...]:
    """Returns the times of FlashInfer and of runs that are not far slower than the fastest, sorted."""
    looks = [once(run, device) for run in runs]
    close = [at for at, ms in enumerate(looks) if ms < HOPELESS * min(looks) or labels[at][0] == FLASHINFER]
    results = measure_interleaved([runs[at] for at in close], device, rounds=ROUNDS)
    times = (Time(*labels[at], round(result.ms, 5)) for at, result in zip(close, results, strict=True))
    return tuple(sorted(times, key=lambda row: row.ms))


def tree_row(problem: Problem, target: Target, device: torch.device) -> Row:
    """Returns the times of configs with and without the mask."""
    tensors = make_tensors(problem, device)
    plain = without(problem, [Feature.TREE])
    bare = msgspec.structs.replace(tensors, side=tensors.side._replace(tree=None))
    labels, runs = [], []
    for candidate in tree_candidates(problem, target):
        for name, own, inputs in ((TREE, problem, tensors), (PLAIN, plain, bare)):
            runs.append(kernel_run(own, candidate, Specialization(), target, inputs))
            labels.append((name, f"{candidate.family} {candidate.config.label()}"))
    times = measured(labels, runs, device)
    masked, unmasked = (next((row.ms for row in times if row.name == name), None) for name in (TREE, PLAIN))
    return Row(problem.key, times, unmasked / masked if masked and unmasked else None)


def batch_row(problem: Problem, target: Target, device: torch.device) -> Row:
    """Returns the times of a batch of which some sequences have drafts."""
    tensors = mixed_tensors(problem, device)
    found = batch_candidates(problem, target)
    runs = [kernel_run(problem, candidate, Specialization(), target, tensors) for candidate in found]
    labels = [(candidate.family, candidate.config.label()) for candidate in found]
    labels[0] = ("dispatched", f"{found[0].family} {found[0].config.label()}")
    if importlib.util.find_spec(FLASHINFER) is not None:
        runs.append(flashinfer_run(problem, tensors))
        labels.append((FLASHINFER, ""))
    times = measured(labels, runs, device)
    peer = next((row.ms for row in times if row.name == FLASHINFER), None)
    own = next(row.ms for row in times if row.name != FLASHINFER)
    return Row(problem.key, times, peer / own if peer else None)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--verify", type=float, default=100.0, help="seconds of checks")
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of timing")
    parser.add_argument("--save", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    target, device = device_target(0), torch.device("cuda", 0)
    jobs = {problem: tree_candidates(problem, target) for problem in trees()}
    jobs |= {without(problem, [Feature.TREE]): found for problem, found in jobs.items()}
    jobs |= {problem: batch_candidates(problem, target) for problem in batches()}
    # Kernels compile on other cores during the checks.
    with ThreadPoolExecutor(1) as thread:
        compiled = thread.submit(compile_all, jobs, target, print)
        verdicts = verify(tree_checks(target), arguments.verify, target, device)
        compiled.result()
    rows: list[Row] = []
    end = time.monotonic() + arguments.seconds
    for problem in (*batches()[:2], *trees()[:3], *batches()[2:], *trees()[3:]):
        if time.monotonic() > end:
            break
        rows.append((tree_row if problem.tree else batch_row)(problem, target, device))
        save(arguments.save, Report(verdicts, tuple(rows)))
        print(f"{problem.key}: ratio {rows[-1].ratio}", flush=True)
        print("   ", ", ".join(f"{row.name} {row.config} {row.ms:.4f}" for row in rows[-1].times), flush=True)


if __name__ == "__main__":
    main()
