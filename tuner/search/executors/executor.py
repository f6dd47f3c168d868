"""The interface that runs many searches at once."""

from collections.abc import Generator, Sequence
from typing import Protocol

from flashtune.tuner.search.request import Observer, SearchRequest, SearchResult


class Executor(Protocol):
    """Runs searches of different problems. A search compares only times of one physical GPU.

    A search that goes on at another GPU reuses no stored times.
    """

    def run(self, requests: Sequence[SearchRequest], observer: Observer) -> Generator[SearchResult]:
        """Runs searches, and yields the result of each as soon as it is stored, in any order.

        Searches start in the given order. The executor decides on which GPU each runs, so it ignores
        `device` of requests. The observer gets the progress of every running search, several times a
        second, in the thread of the caller.

        After an error, or when the generator is closed, no search starts, and each running search selects the
        best kernel so far. The same requests then continue the searches.

        Raises:
            DeviceLostError: No GPU is left, or a search lost two.
            MachineError: A machine cannot compile or time, for example because its disk is full.
        """
        ...


def longest_first(requests: Sequence[SearchRequest]) -> list[SearchRequest]:
    """Returns searches of gradients before the others. They take about twice as long.

    Searches on several GPUs then end at nearly the same time.
    """
    return sorted(requests, key=lambda request: not request.problem.is_backward)
