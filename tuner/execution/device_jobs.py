"""Jobs in one process for each of several GPUs."""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, TypeVar

from flashtune.core.errors import KernelError
from flashtune.tuner.execution.processes import Workers, failure_of

Result = TypeVar("Result")


def run_on_devices(
    function: Callable[..., Result],
    jobs: Sequence[tuple[Any, ...]],
    devices: Sequence[int],
    seconds: float,
) -> Generator[Result]:
    """Calls a function with each job's arguments and the index of a GPU, and yields the results in order.

    A GPU that is free takes the next job. Each job has a time limit.

    Raises:
        KernelError: The process of a job was lost.
    """
    workers = {device: Workers(1) for device in devices}
    free: SimpleQueue[int] = SimpleQueue()
    for device in devices:
        free.put(device)

    def call(arguments: tuple[Any, ...]) -> Result:
        device = free.get()
        try:
            job = workers[device].schedule(function, (*arguments, device), seconds)
            lost = failure_of(job)
            if lost is not None:
                raise KernelError(f"GPU {device}: a job has no result ({lost.words}): run flashtune doctor")
            return job.result()
        finally:
            free.put(device)

    threads = ThreadPoolExecutor(len(devices))
    try:
        yield from threads.map(call, jobs)
    finally:
        for pool in workers.values():
            pool.stop()
        threads.shutdown()
