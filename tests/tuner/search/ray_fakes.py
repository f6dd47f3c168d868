"""A Ray cluster on this machine, and processes with fakes of the compiler and the GPU."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashtune.core.errors import UsageError
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import Evaluation
from flashtune.tuner.fleet.ray_cluster import Classes, Cluster, open_cluster
from flashtune.tuner.fleet.ray_nodes import CompileNode, GpuNode, Identity, identity
from tests.tuner.fleet.killed_workers import NoisyMeasurer
from tests.tuner.search.fakes import FakeCompiler, FakeMeasurer, by_tile
from tests.tuner.search.small_search import H100

GPUS = 3
START_SECONDS = 60.0


class FakeGpuNode(GpuNode):
    """A GPU that returns given times."""

    def __init__(self) -> None:
        self._worker = FakeMeasurer(by_tile)  # type: ignore[assignment]

    def identity(self) -> Identity:
        return Identity(H100, identity(None).versions)

    def use(self, judge: Callable[[Candidate], Evaluation]) -> None:
        self._worker = FakeMeasurer(judge)  # type: ignore[assignment]

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FakeCompileNode(CompileNode):
    """Compilers that compile nothing."""

    def __init__(self, width: int) -> None:
        self._compiler = FakeCompiler(width=width)

    async def compile(self, task: SearchTask, candidate: Candidate) -> tuple[Compiled, bytes]:
        return await asyncio.wrap_future(self._compiler.submit(task, candidate)), b""

    async def compile_delayed(self, task: SearchTask, candidate: Candidate) -> bytes:
        return b""

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class NoisyGpuNode(FakeGpuNode):
    """A GPU that returns another time at each call."""

    def __init__(self) -> None:
        self._worker = NoisyMeasurer()  # type: ignore[assignment]


CLASSES = Classes(FakeGpuNode, FakeCompileNode)
NOISY = Classes(NoisyGpuNode, FakeCompileNode)


@contextlib.contextmanager
def started_cluster(folder: Path) -> Iterator[str]:
    """Starts a cluster with GPUs that do not exist, and gives its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)),
        *("--node-ip-address", "127.0.0.1", "--num-cpus", "4", "--num-gpus", str(GPUS)),
        *("--include-dashboard", "false", "--disable-usage-stats", "--temp-dir", str(folder)),
    ]
    # A token in the home folder would be asked for.
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


@contextlib.contextmanager
def opened_cluster(address: str, classes: Classes = CLASSES) -> Iterator[Cluster]:
    """Opens a cluster when it is ready."""
    end = time.monotonic() + START_SECONDS
    with contextlib.ExitStack() as stack:
        while True:
            try:
                cluster = stack.enter_context(open_cluster(address, H100, 2, classes))
            except UsageError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.5)
            else:
                break
        yield cluster


def wait_for(process: Any) -> None:
    """Returns when a killed process is back."""
    import ray
    from ray.exceptions import RayError

    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            ray.get(process.identity.remote())
        except RayError:
            time.sleep(0.5)
        else:
            return
