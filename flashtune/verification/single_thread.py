"""What torch does on the CPU, kept from waiting for cores that others keep busy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """What this thread has torch do on the CPU it does alone; other threads share theirs as before.

    A tenth of a millisecond's comparisons, shared by two threads, took 8 to 20 ms where other processes kept
    the cores busy: each thread waits for those that have no core.
    """
    # A thread takes its count from the process's at its first use of torch, and setting it sets the
    # process's as well: what that was is put back at once, for threads that begin meanwhile.
    own = torch.get_num_threads()
    others = _in_a_new_thread(torch.get_num_threads)

    def share(count: int) -> None:
        torch.set_num_threads(count)
        _in_a_new_thread(lambda: torch.set_num_threads(others))

    share(1)
    try:
        yield
    finally:
        share(own)


def _in_a_new_thread(function: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result()
