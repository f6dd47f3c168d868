"""Verifies and times kernels of `forward_hopper` and `forward_masked` that split keys. Needs an H100 or H200.

    python -m benchmarks.kernels.splits --verify 150 --seconds 180 --save FILE.json.gz
    python -m benchmarks.kernels.splits --family forward_masked --verify 150 --seconds 180 --save FILE.json.gz

Each shape is one interleaved run with a cold L2: the configs of the family without splits and the best with
splits by the performance model, the default of `decode_split_kv`, and SDPA's backends. `--verify` bounds the
checks at the full level, and `--seconds` the timing. On other GPUs only `forward_masked` runs. `python -m
benchmarks.documents --write` puts the table into docs/dispatch.md.
"""

import argparse
import itertools
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.dispatch_regret.timing import compile_all
from benchmarks.saved import RESULTS, Saved, load, run_of, save
from flashtune.core.config import Config
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target, device_target
from flashtune.templates.forward_hopper import perf_model as hopper
from flashtune.templates.forward_hopper.space import usual_config
from flashtune.templates.forward_masked import perf_model as masked
from flashtune.templates.registry import find_family
from flashtune.tuner.bench.peer_runs import CUDNN
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.cli.output import table
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.timed_runs import kernel_run, sdpa_runs
from flashtune.tuner.execution.timing import measure_interleaved, once
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification.check import check_kernel

SCRIPT = "benchmarks/kernels/splits.py"
HOPPER, MASKED, DECODING = "forward_hopper", "forward_masked", "decode_split_kv"
SAVED = (
    ("splits", HOPPER, RESULTS / "nvidia-h200-splits.json.gz"),
    ("masked-splits", MASKED, RESULTS / "nvidia-h200-masked-splits.json.gz"),
)
WHOLE, SPLIT = "whole", "split"
# The name of a check, its problem, and the kernel.
Check = tuple[str, Problem, Candidate]
ROUNDS, BEST, HOPELESS = 11, 6, 2.0
SHOWN_KEYS = (4096, 65536)
LONG = "dtype=bf16,heads=8,kv_heads=1,head_dim=128,batch=1,seqlen_q=17,seqlen_kv=65536"
# Shapes with one of their split configs each, which are verified.
VERIFIED = (
    (LONG, {"num_splits": 44, "num_consumer_groups": 1, "ping_pong": False, "pack_gqa": 8}),
    (f"{LONG},causal", {"num_splits": 66, "pack_gqa": 4}),
    (f"{LONG},causal,sinks,softcap", {"num_splits": 6, "pack_gqa": 8}),
    (f"{LONG},causal,window=4095,sink_tokens=4", {"num_splits": 5, "pack_gqa": 2}),
    (f"{LONG},causal,alibi,kv_lengths", {"num_splits": 16, "pack_gqa": 4}),
    (f"{LONG},chunk=8192,prefix,kv_lengths", {"num_splits": 3, "pack_gqa": 1}),
    (f"{LONG},causal,packed=17", {"num_splits": 8}),
    (f"{LONG},causal,packed=17,page_size=16", {"num_splits": 33}),
    (f"{LONG},page_size=1", {"num_splits": 12, "pack_gqa": 4}),
    (f"{LONG},causal,page_size=64,kv_dtype=e4m3", {"num_splits": 16, "split_epilogue": False}),
    (f"{LONG},packed=17,page_size=16,kv_dtype=int8,kv_scale=page",
     {"num_splits": 7, "split_epilogue": False}),
    ("dtype=fp16,heads=4,kv_heads=2,head_dim=64,batch=2,seqlen_q=200,seqlen_kv=8192,causal",
     {"num_splits": 4, "num_consumer_groups": 3, "pack_gqa": 1}),
    ("dtype=bf16,heads=8,kv_heads=2,head_dim=256,batch=1,seqlen_q=64,seqlen_kv=8192,causal",
     {"num_splits": 9, "split_epilogue": False}),
)  # fmt: skip
VERIFIED_MASKED = (
    (LONG, {"num_splits": 33}),
    (f"{LONG},causal", {"num_splits": 16, "block_m": 32, "num_warps": 4}),
    (f"{LONG},causal,sinks,softcap", {"num_splits": 6}),
    (f"{LONG},causal,window=4095,sink_tokens=4", {"num_splits": 5, "split_masked_loop": False}),
    (f"{LONG},causal,alibi,kv_lengths", {"num_splits": 16, "heads_innermost": True}),
    (f"{LONG},chunk=8192,prefix,kv_lengths", {"num_splits": 3}),
    (f"{LONG},causal,packed=17", {"num_splits": 8, "lpt": True}),
    (f"{LONG},causal,packed=17,page_size=16", {"num_splits": 33}),
    (f"{LONG},causal,page_size=64,kv_dtype=e4m3", {"num_splits": 16}),
    (f"{LONG},packed=17,page_size=16,kv_dtype=int8,kv_scale=page", {"num_splits": 7}),
    ("dtype=fp16,heads=4,kv_heads=2,head_dim=96,batch=2,seqlen_q=200,seqlen_kv=8192,causal",
     {"num_splits": 4, "block_n": 64}),
)  # fmt: skip


class Time(msgspec.Struct, frozen=True):
    """One implementation at a shape."""

    name: str
    config: str
    ms: float


class Row(msgspec.Struct, frozen=True):
    """A shape with the times of its implementations, the fastest first."""

    shape: str
    times: tuple[Time, ...]


class Report(msgspec.Struct, frozen=True):
    """All results of a run. A verdict is an empty text if it passed."""

    verdicts: dict[str, str]
    rows: tuple[Row, ...]


def shapes() -> Iterator[Problem]:
    """Yields the shapes of the grid, those over 65,536 keys first."""
    heads = ("heads=8,kv_heads=1", "heads=32,kv_heads=8", "heads=64,kv_heads=8")
    grid = itertools.product((65536, 16384, 4096, 131072), (17, 64, 256, 32, 512), heads, (1, 4))
    for page, (keys, queries, group, batch) in itertools.product(("", ",page_size=16"), grid):
        few = batch == 1 or (keys < 65536 and queries <= 64)
        if few and not (page and (queries > 64 or batch > 1)):
            lengths = f"batch={batch},seqlen_q={queries},seqlen_kv={keys}"
            yield from parse_shape(f"dtype=bf16,{group},head_dim=128,{lengths},causal{page}")


def whole_config(name: str, problem: Problem, target: Target) -> Config:
    """Returns the default config of a family without splits."""
    if name == HOPPER:
        return usual_config(problem)
    return msgspec.structs.replace(find_family(name).default(problem, target), num_splits=1)


def candidates(name: str, problem: Problem, target: Target) -> tuple[Candidate, ...]:
    """Returns the config without splits, split configs, and the default of the decoding family."""
    family, decoding = find_family(name), find_family(DECODING)
    whole: Any = whole_config(name, problem, target)
    variants = (hopper if name == HOPPER else masked).split_variants(problem, whole, target)
    split = sorted(variants, key=lambda config: family.makespan_ms(problem, config, target))
    found = [Candidate(name, config) for config in (whole, *split[:BEST])]
    if decoding.supports(problem, target) is None:
        found.append(Candidate(DECODING, decoding.default(problem, target)))
    return tuple(found)


def verify(checks: Iterable[Check], seconds: float, target: Target, device: torch.device) -> dict[str, str]:
    """Returns the verdicts of checks at the full level by their names. After some seconds none starts."""
    end, verdicts = time.monotonic() + seconds, {}
    for name, problem, candidate in checks:
        verdicts[name] = "not checked"
        if time.monotonic() < end:
            family, lse = find_family(candidate.family), Specialization(lse=True)
            try:
                verdict = check_kernel(family, problem, candidate.config, lse, target, device)
                verdicts[name] = "" if verdict.passed else verdict.failed
            except KernelError as error:
                verdicts[name] = str(error)
        print(f"{name}: {verdicts[name] or 'passed'}", flush=True)
    return verdicts


def split_checks(family: str, target: Target) -> Iterator[Check]:
    """Yields the checks of a family's configs with splits."""
    for shape, changes in VERIFIED if family == HOPPER else VERIFIED_MASKED:
        (problem,) = parse_shape(shape)
        config = _changed(whole_config(family, problem, target), changes)
        yield f"{problem.key} {config.num_splits} splits", problem, Candidate(family, config)


def _changed(config: Config, changes: dict[str, Any]) -> Any:
    changed: Any = msgspec.structs.replace(config, **changes)
    if not hasattr(changed, "ping_pong"):
        return changed
    return msgspec.structs.replace(changed, ping_pong=changed.ping_pong and changed.num_consumer_groups > 1)


def timed(family: str, problem: Problem, target: Target, device: torch.device) -> Row:
    """Returns the times of one shape."""
    tensors = make_tensors(problem, device)
    runs, labels = [], []
    for candidate in candidates(family, problem, target):
        try:
            runs.append(kernel_run(problem, candidate, Specialization(), target, tensors))
        except KernelError as error:
            print(f"{problem.key}: {candidate.config.label()}: {error}")
            continue
        labels.append((candidate.family, candidate.config.label()))
    if not problem.page_size:
        for name, run in sdpa_runs(problem, tensors):
            runs.append(run)
            labels.append((name, ""))
    looks = [once(run, device) for run in runs]
    close = [at for at, ms in enumerate(looks) if ms < HOPELESS * min(looks)]
    measured = dict(
        zip(close, measure_interleaved([runs[at] for at in close], device, rounds=ROUNDS), strict=True)
    )
    times = (
        Time(*labels[at], round(measured[at].ms if at in measured else looks[at], 5))
        for at in range(len(runs))
    )
    return Row(problem.key, tuple(sorted(times, key=lambda row: row.ms)))


def texts() -> dict[str, str]:
    """Returns the tables of shapes with one sequence, by name."""
    return {name: "\n".join(_table(family, load(path, Report))) for name, family, path in SAVED}


def _table(family: str, saved: Saved[Report]) -> Iterator[str]:
    found = {row.shape: _fastest(family, row) for row in saved.rows.rows}
    rows = []
    for problem in shapes():
        times = found.get(problem.key)
        if times is None or problem.batch > 1 or problem.page_size or problem.seqlen_kv not in SHOWN_KEYS:
            continue
        paged = found.get(f"{problem.key}_page16", {})
        kinds = (times, WHOLE), (times, SPLIT), (times, DECODING), (paged, SPLIT), (times, CUDNN)
        names = f"{problem.heads}/{problem.kv_heads}", str(problem.seqlen_q), f"{problem.seqlen_kv:,}"
        shown = (f"{some[kind]:.4f}" if kind in some else "–" for some, kind in kinds)
        rows.append(((problem.seqlen_kv, problem.heads, problem.seqlen_q), (*names, *shown)))
    yield f"{run_of(saved.source)}, `{family}`, bf16, D128, causal, one sequence, pages of 16, least ms:"
    yield ""
    heads = "heads", "queries", "keys", "`num_splits=1`", "splits", f"`{DECODING}`", "splits, pages", CUDNN
    yield from table(heads, [row for _, row in sorted(rows)])


def _fastest(family: str, row: Row) -> dict[str, float]:
    """Returns the least time of each kind of implementation."""
    times: dict[str, float] = {}
    for entry in row.times:
        kind = entry.name
        if kind == family:
            kind = WHOLE if f"{entry.config} ".endswith("num_splits=1 ") else SPLIT
        times[kind] = min(entry.ms, times.get(kind, entry.ms))
    return times


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--family", choices=(HOPPER, MASKED), default=HOPPER, help="the family that splits keys"
    )
    parser.add_argument("--verify", type=float, default=150.0, help="seconds of checks")
    parser.add_argument("--seconds", type=float, default=180.0, help="seconds of timing")
    parser.add_argument("--save", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    target, device = device_target(0), torch.device("cuda", 0)
    problems = tuple(shapes())
    # Kernels of the grid compile on other cores during the checks.
    with ThreadPoolExecutor(1) as thread:
        jobs = {problem: candidates(arguments.family, problem, target) for problem in problems}
        compiled = thread.submit(compile_all, jobs, target, print)
        checks = split_checks(arguments.family, target)
        verdicts = verify(checks, arguments.verify, target, device)
        compiled.result()
    rows: list[Row] = []
    end = time.monotonic() + arguments.seconds
    for problem in problems:
        if time.monotonic() > end:
            break
        rows.append(timed(arguments.family, problem, target, device))
        save(arguments.save, Report(verdicts, tuple(rows)))
        first = rows[-1].times[0]
        print(f"{problem.key}: {first.name} {first.config} {first.ms:.4f} ms", flush=True)
        print("   ", ", ".join(f"{row.name} {row.ms:.4f}" for row in rows[-1].times[1:]), flush=True)


if __name__ == "__main__":
    main()
