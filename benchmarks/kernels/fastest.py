"""Compares `flashtune.attention` with the fastest backend of torch's SDPA at every tuned forward shape.

    python -m benchmarks.kernels.fastest               # all tuned shapes that SDPA computes, without dropout
    python -m benchmarks.kernels.fastest --only bias   # those with a text in their keys
    python -m benchmarks.kernels.fastest --limit 20    # the first 20, calls with a bias or a mask first
    python -m benchmarks.kernels.fastest --untuned 24  # with 24 random shapes outside of the table

Tuned are the shapes of the shipped table and of the user's database (`FLASHTUNE_DB`). `flashtune search
--shapes-file benchmarks/kernels/masked_shapes.txt` tunes calls with a bias or a mask.

Times are medians of the GPU time of CUDA-graph replays with a cold L2. All contestants of a shape are
interleaved in one run. flashtune is called as in a program with `prefer="fastest"`: a generated kernel or
SDPA serves. SDPA gets the mask unchanged. Both add a causal mask to a bias in each call. Ratios below 0.98
are timed again three times, and their median counts. Bias and mask problems are also timed with masks that
heads, sequences or rows share. Rows are written after each shape. The exit code is 1 if a tuned shape failed,
was not reached, or is below 0.98 with any mask.
"""

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.dispatch_regret.analysis import dispatched, draw_problems
from benchmarks.saved import RESULTS, load, run_of, save
from flashtune.core.errors import FlashtuneError, UsageError
from flashtune.core.mask_sharing import MaskSharing, distinct_ways, narrowed
from flashtune.core.problem import Bias, Feature, Problem
from flashtune.core.record import Record
from flashtune.core.target import Target, device_target
from flashtune.dispatch.tables import tuned_records
from flashtune.launch.compilation import first_line
from flashtune.tuner.cli.output import table

SCRIPT = "benchmarks/kernels/fastest.py"
SAVED = RESULTS / "nvidia-h200-fastest.json.gz"
# Below this a pair is timed again, and fails if it stays there.
LEAST = 0.98
AGAIN = 3
ROUNDS = 15
# A backend that one launch shows to be so much slower than the fastest one is timed no more closely.
HOPELESS = 1.5
# Features of the problems that are timed: SDPA computes them by a mask.
BY_MASK = frozenset({Feature.BIAS, Feature.WINDOW, Feature.CHUNK})
# A mask of its own for each head, sequence and row.
OWN = "own"
TUNED, MASKS, UNTUNED = "tuned", "shared masks", "untuned"

Times = dict[str, float]
Timer = Callable[[], tuple[float, Times]]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One shape, or one way of sharing its mask."""

    group: str  # `tuned`, `shared masks` or `untuned`.
    problem: str  # Its key.
    # The sharing of its mask; `own` if each head and sequence has its own, or there is none.
    mask: str
    server: str = ""  # The backend: a kernel's family, or `sdpa`.
    ms: float = 0.0  # flashtune's time.
    peers: Times = {}  # Times of SDPA's backends in the same run.
    ratio: float = 0.0  # The fastest of these over flashtune's time; of retimed pairs the median.
    again: tuple[float, ...] = ()  # The ratios of further runs, if any.
    difference: float = 0.0  # Largest difference from the output of the fastest backend.
    failed: str = ""  # Why there are no times; empty where there are.


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rows, and how many shapes time did not suffice for."""

    rows: tuple[Row, ...]
    not_reached: int
    seconds: float
    cudnn: str


class Case(msgspec.Struct, frozen=True):
    """One shape and one way of sharing its mask."""

    group: str
    problem: Problem
    mask: str = OWN


def main() -> None:
    """Measures, prints, writes, and exits with 1 where a tuned shape is slower than SDPA."""
    try:
        report = _measured(_options())
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    print(*summary(report), "", *map(line, faults(report)), sep="\n")
    sys.exit(1 if faults(report) else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Default attention and SDPA's fastest backend.")
    parser.add_argument("--only", default="", metavar="TEXT", help="only shapes with this text in their keys")
    parser.add_argument("--limit", type=int, help="the first so many")
    parser.add_argument("--untuned", type=int, default=0, metavar="N", help="additional random shapes")
    parser.add_argument("--seed", type=int, default=0, help="of the random shapes")
    parser.add_argument("--seconds", type=float, default=440.0, help="limit of the run, compiling included")
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--out", type=Path, help="where to write; a name in benchmarks/results if left out")
    return parser.parse_args()


def cases(records: Iterable[Record], untuned: int, seed: int) -> list[Case]:
    """The cases: tuned shapes with a bias or a mask first, and the others by increasing FLOPs."""
    tuned = list(dict.fromkeys(record.problem for record in records if _by_sdpa(record.problem)))
    masked = [problem for problem in tuned if problem.bias is not Bias.NONE]
    plain = [problem for problem in tuned if problem.bias is Bias.NONE]
    chosen = [Case(TUNED, problem) for problem in masked]
    chosen += [Case(TUNED, problem) for problem in sorted(plain, key=lambda problem: problem.flops())]
    chosen += [Case(MASKS, problem, way) for problem in masked for way in distinct_ways(problem)]
    return chosen + [Case(UNTUNED, problem) for problem in draw_problems(untuned, seed, tuned)]


def _by_sdpa(problem: Problem) -> bool:
    forward = not problem.is_backward and not problem.dtype.is_quantized
    return forward and problem.features <= BY_MASK


def _measured(options: argparse.Namespace) -> Report:
    import torch

    from flashtune.tuner.bench.peer_runs import cudnn_version

    if not torch.cuda.is_available():
        raise UsageError("fastest.py measures GPU time, and no GPU is visible here: run it on one")
    started = time.monotonic()
    target = device_target(options.device)
    records = _records(target)
    listed = [
        case for case in cases(records, options.untuned, options.seed) if options.only in case.problem.key
    ]
    listed = listed[: options.limit]
    path = options.out or RESULTS / f"{target.name}-fastest.json.gz"
    _compile(listed, target, records)
    rows: list[Row] = []
    for number, case in enumerate(listed, start=1):
        if time.monotonic() - started > options.seconds:
            break
        rows.append(_attempted(case, torch.device("cuda", options.device)))
        print(f"{number}/{len(listed)} {line(rows[-1])}", flush=True)
        done = Report(tuple(rows), len(listed) - number, time.monotonic() - started, cudnn_version())
        save(path, done)
    return Report(tuple(rows), len(listed) - len(rows), time.monotonic() - started, cudnn_version())


def _records(target: Target) -> tuple[Record, ...]:
    """The kernels that dispatch selects from."""
    records = tuple(record for record in tuned_records(target.name).effective() if record.config)
    if not records:
        raise UsageError(f"nothing is tuned for {target.name}: there is nothing to compare")
    return records


def _compile(listed: Sequence[Case], target: Target, records: tuple[Record, ...]) -> None:
    """Leaves the generated kernels in Triton's cache, compiled on all cores: a first call compiles alone."""
    from benchmarks.dispatch_regret.timing import Jobs, compile_all

    jobs: Jobs = {case.problem: (dispatched(target, case.problem, records),) for case in listed}
    compile_all(jobs, target, functools.partial(print, flush=True))


def _attempted(case: Case, device: Any) -> Row:
    """The row of a case, also for an error."""
    import torch

    try:
        return _row(case, device)
    except (FlashtuneError, RuntimeError) as error:
        return Row(group=case.group, problem=case.problem.key, mask=case.mask, failed=first_line(error))
    finally:
        torch.cuda.empty_cache()


def _row(case: Case, device: Any) -> Row:
    import torch

    import flashtune
    from flashtune.tuner.bench.admission import capture
    from flashtune.tuner.bench.calls import program_call
    from flashtune.tuner.execution.inputs import make_tensors
    from flashtune.tuner.execution.sdpa import BACKENDS
    from flashtune.tuner.execution.timing import measure_interleaved, once

    problem = case.problem
    with torch.cuda.device(device), torch.no_grad():
        tensors = _sharing(make_tensors(problem, device), case.mask)
        call = program_call(problem, tensors)
        options = {**call.named, **call.options, "prefer": "fastest"}
        attend = functools.partial(flashtune.attention, tensors.q, tensors.k, tensors.v, **options)
        explanation = flashtune.explain(tensors.q, tensors.k, tensors.v, **options)
        selection = explanation.selection if explanation.backend == "generated" else None
        served = selection.record.family if selection else explanation.backend
        out = attend()
        ours = capture(attend)
        runs = {name: _capture_peer(problem, tensors, backend) for name, backend in BACKENDS.items()}
        theirs = {name: run for name, run in runs.items() if run is not None}
        if not theirs:
            raise UsageError("no fused backend of SDPA takes it")
        looks = {name: once(run, device) for name, (run, _) in theirs.items()}
        near = [name for name, ms in looks.items() if ms <= HOPELESS * min(looks.values())]

        def timed() -> tuple[float, Times]:
            timings = measure_interleaved([ours, *(theirs[name][0] for name in near)], device, rounds=ROUNDS)
            return timings[0].ms, {name: timing.ms for name, timing in zip(near, timings[1:], strict=True)}

        ms, peers, ratio, again = judged(timed)
        fastest = min(peers, key=lambda name: peers[name])
        return Row(
            group=case.group,
            problem=problem.key,
            mask=case.mask,
            server=served,
            ms=ms,
            peers=peers,
            ratio=ratio,
            again=again,
            difference=float((out.float() - theirs[fastest][1].float()).abs().max()),
        )


def judged(timed: Timer) -> tuple[float, Times, float, tuple[float, ...]]:
    """Times and their ratio; a ratio below the bound is replaced by the median of further runs."""

    def ratio_of(ms: float, peers: Times) -> float:
        return min(peers.values()) / ms

    ms, peers = timed()
    ratio = ratio_of(ms, peers)
    if ratio >= LEAST:
        return ms, peers, ratio, ()
    again = tuple(ratio_of(*timed()) for _ in range(AGAIN))
    return ms, peers, statistics.median(again), again


def _sharing(tensors: Any, way: str) -> Any:
    """The tensors with a mask that is 1 wide where it is shared."""
    bias = tensors.side.bias
    if way == OWN or bias is None:
        return tensors
    shared = narrowed(bias, MaskSharing(way))
    return msgspec.structs.replace(tensors, side=tensors.side._replace(bias=shared))


def _capture_peer(problem: Problem, tensors: Any, backend: Any) -> tuple[Callable[[], object], Any] | None:
    """A graph of SDPA by one backend and its output, or None where the backend does not take the call."""
    import warnings

    from torch.nn.attention import sdpa_kernel

    from flashtune.tuner.bench.admission import capture

    attend = _sdpa(problem, tensors)
    if attend is None:
        return None
    with warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")
        try:
            return capture(attend), attend()
        except RuntimeError:
            # Backends say by raising that they do not take a call.
            return None


def _sdpa(problem: Problem, tensors: Any) -> Callable[[], Any] | None:
    """SDPA as a program calls it: a bias or a mask is passed as it is, without flashtune's conversion."""
    from torch.nn.functional import scaled_dot_product_attention

    from flashtune.dispatch.masked_sdpa import is_masked
    from flashtune.tuner.execution.sdpa import sdpa_call

    if not is_masked(problem) or problem.is_causal:
        return sdpa_call(problem, tensors)
    return functools.partial(
        scaled_dot_product_attention,
        tensors.q,
        tensors.k,
        tensors.v,
        attn_mask=tensors.side.bias,
        scale=tensors.scale,
        enable_gqa=problem.group_size > 1,
    )


def faults(report: Report) -> list[Row]:
    """Tuned shapes that are slower than the bound allows or failed, and a row for those not reached."""
    slow = [row for row in report.rows if row.group != UNTUNED and (row.failed or row.ratio < LEAST)]
    if report.not_reached:
        slow.append(Row(group=TUNED, problem=f"{report.not_reached} shapes", mask="", failed="not reached"))
    return slow


def summary(report: Report) -> Iterator[str]:
    """The table in Markdown that has a row for each group."""
    groups = dict.fromkeys(row.group for row in report.rows)
    yield from table(
        ("", "shapes", "served by SDPA", "geometric mean", "worst", "below 0.98", "failed"),
        (_group(name, [row for row in report.rows if row.group == name]) for name in groups),
    )


def _group(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    ratios = [row.ratio for row in rows if not row.failed]
    mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else math.nan
    return (
        name,
        str(len(rows)),
        str(sum(row.server == "sdpa" for row in rows)),
        f"{mean:.3f}",
        f"{min(ratios, default=math.nan):.3f}",
        str(sum(ratio < LEAST for ratio in ratios)),
        str(sum(bool(row.failed) for row in rows)),
    )


def texts() -> dict[str, str]:
    """The table of the saved run, by name: a row for each group."""
    saved = load(SAVED, Report)
    return {"fastest": "\n".join([f"{run_of(saved.source)}:", "", *summary(saved.rows)])}


def line(row: Row) -> str:
    """A row as one line of progress."""
    if row.failed:
        return f"{row.problem} {row.mask}: {row.failed}"
    again = f" (again: {' '.join(f'{ratio:.3f}' for ratio in row.again)})" if row.again else ""
    return f"{row.problem} {row.mask}: {row.server} {row.ms:.4f} ms, {row.ratio:.3f} of SDPA's speed{again}"


if __name__ == "__main__":
    main()
