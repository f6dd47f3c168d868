"""Compares `flashtune search` with `triton.autotune` on the same kernels: time to a result, and its speed.

    python -m benchmarks.search.autotune --save autotune.json  # one shape, at most six minutes
    python -m benchmarks.search.autotune --shape heads=32,seqlen=4096,head_dim=64,tokens=16384 --limit 200

Both choose among all configs of a portable family that fit by the SRAM model, with empty caches. Triton
compiles configs in sequence, and times each with its own defaults. At the limit, its time for the whole list
is extrapolated from the finished configs, which are in random order. The table says so. The two results are
then timed in one interleaved run. Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
from triton.runtime.autotuner import Autotuner

from benchmarks.exhaustive.fitting import NOTHING
from flashtune.core.errors import FlashtuneError
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Problem
from flashtune.core.target import Target, device_target
from flashtune.db.store import open_store
from flashtune.launch.compilation import load_module
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate, SearchTask, contiguous_specialization, demand, open_spaces
from flashtune.tuner.execution.inputs import Tensors, make_tensors
from flashtune.tuner.execution.timed_runs import run_finals
from flashtune.tuner.perf_model.prediction import shipped_fit
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import Budget, SearchRequest, WarmStart
from flashtune.tuner.search.selection import candidate_of
from flashtune.tuner.workloads.shapes import parse_shape

SHAPE = "heads=16,seqlen=2048,head_dim=128,tokens=16384,causal"
FAMILY = "forward_q_outer"
ROUNDS = 41


class OutOfTimeError(Exception):
    """The limit was reached before every config was tried."""


class Comparison(msgspec.Struct, frozen=True):
    """One shape by both.

    Attributes:
        problem: The problem's key.
        configs: Number of configs.
        search_seconds: Wall clock of the search with its final measurement.
        search_ms: Time of its result, interleaved with the other's.
        autotune_seconds: Wall clock of `triton.autotune`.
        autotune_tried: Number of configs that it timed.
        autotune_ms: Time of its result.
    """

    problem: str
    configs: int
    search_seconds: float
    search_ms: float
    autotune_seconds: float
    autotune_tried: int
    autotune_ms: float

    @property
    def whole_seconds(self) -> float:
        """The time of `triton.autotune` for all configs: measured, or extrapolated."""
        return self.autotune_seconds * self.configs / max(1, self.autotune_tried)


class AllConfigs:
    """The kernels of all configs as one function that takes its config's number."""

    def __init__(self, kernels: Sequence[Kernel], tensors: Tensors) -> None:
        self._kernels = kernels
        self._tensors = tensors

    @staticmethod
    def fn() -> None:
        """A kernel function whose name Triton reads."""

    def run(self, *pointers: Any, number: int, **options: Any) -> None:
        """Launches one config; its first launch compiles it."""
        kernel, tensors = self._kernels[number], self._tensors
        module = load_module(kernel)
        grid, _, integers = module.launch_plan(tensors.q, tensors.k, tensors.v, tensors.out)
        del options["num_ctas"]
        getattr(module, kernel.entry)[grid](*pointers, tensors.scale, *integers, **options)


class LimitedAutotuner(Autotuner):  # type: ignore[misc]
    """Triton's autotuner, with a record of its times and a time limit."""

    def __init__(self, kernels: Sequence[Kernel], tensors: Tensors, is_over: Callable[[], bool]) -> None:
        configs = [
            triton.Config(
                {"number": number},
                num_warps=kernel.options.num_warps,
                num_stages=kernel.options.num_stages,
                maxnreg=kernel.options.maxnreg or None,
            )
            for number, kernel in enumerate(kernels)
        ]
        super().__init__(AllConfigs(kernels, tensors), [], configs, [], None, None)
        self.timed: list[tuple[float, int]] = []
        self._is_over = is_over

    def _bench(self, *args: Any, config: triton.Config, **meta: Any) -> list[float]:
        if self._is_over():
            raise OutOfTimeError
        try:
            times: list[float] = super()._bench(*args, config=config, **meta)
        except RuntimeError:
            # The compiler gave up: outside of a benchmark this would have ended the tuning.
            times = [float("inf")]
        self.timed.append((times[0], config.kwargs["number"]))
        return times


def compare(
    problem: Problem, target: Target, device: torch.device, options: argparse.Namespace
) -> Comparison:
    """Both on one shape, each with empty caches.

    Raises:
        FlashtuneError: The family does not compute the problem, or nothing works.
    """
    spaces = open_spaces(problem, target, (FAMILY,))
    scope = SearchTask(problem, target, contiguous_specialization(problem), spaces)
    candidates = [candidate for candidate in scope.candidates() if not demand(scope, candidate).excess]
    random.Random(0).shuffle(candidates)  # noqa: S311 - no secret
    found, search_seconds = by_search(scope, options)
    chosen, tried, autotune_seconds = by_autotune(scope, candidates, device, options.limit)
    ours, theirs = run_finals(problem, (found, chosen), scope.specialization, target, device, rounds=ROUNDS)
    return Comparison(
        problem=problem.key,
        configs=len(candidates),
        search_seconds=round(search_seconds, 1),
        search_ms=round(ours.ms, 5),
        autotune_seconds=round(autotune_seconds, 1),
        autotune_tried=tried,
        autotune_ms=round(theirs.ms, 5),
    )


def by_search(scope: SearchTask, options: argparse.Namespace) -> tuple[Candidate, float]:
    """The result of the search, and its wall clock with the start of its processes."""
    budget = Budget(options.trials, None, None) if options.trials else Budget()
    # Without the winners of near shapes, like Triton's autotuner.
    experience = WarmStart((), shipped_fit() if options.predictions else NOTHING)
    request = SearchRequest(
        problem=scope.problem,
        target=scope.target,
        device=options.device,
        budget=budget,
        families=(FAMILY,),
        experience=experience,
    )
    with tempfile.TemporaryDirectory() as folder:
        _use_caches(Path(folder))
        started = time.monotonic()
        with open_store(str(Path(folder, "records.sqlite"))) as store:
            best = run_search(request, store).best
        seconds = time.monotonic() - started
    if best is None:
        raise FlashtuneError(f"no config of {FAMILY} works for {scope.problem.key}")
    return candidate_of(best), seconds


def by_autotune(
    scope: SearchTask, candidates: Sequence[Candidate], device: torch.device, limit: float
) -> tuple[Candidate, int, float]:
    """The result of `triton.autotune`, its number of tried configs, and its wall clock."""
    family = scope.spaces[0].family
    kernels = [
        render(family, scope.problem, candidate.config, scope.specialization) for candidate in candidates
    ]
    tensors = make_tensors(scope.problem, device)
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    with tempfile.TemporaryDirectory() as folder:
        _use_caches(Path(folder))
        started = time.monotonic()
        tuner = LimitedAutotuner(kernels, tensors, lambda: time.monotonic() - started > limit)
        with contextlib.suppress(OutOfTimeError):
            tuner.run(tensors.q, tensors.k, tensors.v, tensors.out, tensors.out)
        seconds = time.monotonic() - started
    _, number = min(tuner.timed)
    return candidates[number], len(tuner.timed), seconds


def _use_caches(folder: Path) -> None:
    """Sets an empty cache folder for this process and its children."""
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["FLASHTUNE_CACHE_DIR"] = str(folder / "flashtune")


def _lines(found: Sequence[Comparison]) -> str:
    lines = [
        "| problem | configs | triton.autotune | tried | search | time over its | speed over its |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for entry in found:
        cut = "" if entry.autotune_tried == entry.configs else "extrapolated "
        lines.append(
            f"| {entry.problem} | {entry.configs} | {cut}{entry.whole_seconds:.0f} s "
            f"| {entry.autotune_tried} in {entry.autotune_seconds:.0f} s | {entry.search_seconds:.1f} s "
            f"| {entry.search_seconds / entry.whole_seconds:.3f} "
            f"| {entry.autotune_ms / entry.search_ms:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Compares on the shapes of the command line."""
    parser = argparse.ArgumentParser(description="flashtune search against triton.autotune.")
    parser.add_argument("--shape", action="append", help="as for flashtune search; repeatable")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for triton.autotune on a shape")
    parser.add_argument("--trials", type=int, help="the search's budget; its default where left out")
    parser.add_argument("--predictions", action="store_true", help="let the search use its fitted constants")
    parser.add_argument("--device", type=int, default=0, help="index of the GPU")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the figures, in JSON")
    options = parser.parse_args()
    try:
        target, device = device_target(options.device), torch.device("cuda", options.device)
        problems = [problem for shape in options.shape or [SHAPE] for problem in parse_shape(shape)]
        found = [compare(problem, target, device, options) for problem in problems]
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    print(_lines(found))
    if options.save is not None:
        options.save.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main()
