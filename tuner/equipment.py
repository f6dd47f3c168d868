"""What a search works with: compiler processes and the GPU's own process, kept from shape to shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from flashtune.tuner.clock import Clock, WallClock
from flashtune.tuner.compile_pool import CompilePool, Compiler
from flashtune.tuner.evaluation import Measurer
from flashtune.tuner.prediction import Predictor
from flashtune.tuner.processes import usable_cores
from flashtune.tuner.worker import GpuWorker


class Equipment(NamedTuple):
    """What compiles and what measures.

    Attributes:
        compiler: Compiles candidates, several at once.
        measurer: Verifies and times them, or predicts their times.
        width: How many compile at once.
        clock: Tells how long that takes.
    """

    compiler: Compiler
    measurer: Measurer
    width: int = 1
    clock: Clock = WallClock()


@contextlib.contextmanager
def open_equipment(device: int | None, jobs: int | None = None) -> Iterator[Equipment]:
    """Starts the processes of a search, and ends them with it.

    Args:
        device: The GPU to measure on; None predicts in place of measuring.
        jobs: Compiler processes; as many as there are cores where None, less one that feeds the GPU.
    """
    width = compilers_of(device, jobs)
    with contextlib.ExitStack() as stack:
        measurer: Measurer = Predictor() if device is None else stack.enter_context(GpuWorker(device))
        yield Equipment(stack.enter_context(CompilePool(width)), measurer, width)


def compilers_of(device: int | None, jobs: int | None = None) -> int:
    """How many compiler processes a search has: one for each core, less one where a GPU must be fed."""
    return jobs or max(1, usable_cores() - (device is not None))
