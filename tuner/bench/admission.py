"""Selects the contestants to time: those with correct results. Each becomes a CUDA graph."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from flashtune.launch.compilation import first_line
from flashtune.tuner.bench.peer_runs import Call, Contestant, RefusalError
from flashtune.tuner.bench.results import LeftOut
from flashtune.tuner.execution.timing import Run

MAX_MESSAGE = 300

Bind = Callable[[], Contestant]
Judge = Callable[[object], float]


class Admitted(NamedTuple):
    """A contestant with a correct result: its error, and its run as a graph."""

    contestant: Contestant
    error: float
    replay: Run


def admit(binders: dict[str, Bind], judge: Judge, capture: Callable[[Call], Run]) -> list[Admitted | LeftOut]:
    """Returns the contestants that compute the problem correctly, in the order given, and those left out.

    `judge` returns the error of a result as a multiple of the tolerance. `capture` captures a run as a graph,
    and returns its replay function.
    """
    entries: list[Admitted | LeftOut] = []
    for name, bind in binders.items():
        try:
            contestant = bind()
            error = judge(contestant.run())
            entries.append(
                Admitted(contestant, error, capture(contestant.run))
                if error <= 1
                else LeftOut(name, error if math.isfinite(error) else None)
            )
        except RefusalError as refusal:
            entries.append(LeftOut(name, None, str(refusal)))
        except Exception as failure:  # noqa: BLE001 - a peer may raise anything, and what it says is shown
            entries.append(LeftOut(name, None, first_line(failure)[:MAX_MESSAGE]))
    return entries


def capture(run: Call) -> Run:
    """Captures one run as a graph, so that samples contain no host time."""
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def capture_here(run: Call) -> Run:
    """Captures one run on the current stream, which is not the default one.

    Autograd runs a backward pass on the stream of its forward pass. A pass recorded on one stream cannot be
    captured on another.
    """
    stream = torch.cuda.current_stream()
    run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay
