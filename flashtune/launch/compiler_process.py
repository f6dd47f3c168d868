"""Renders and compiles kernels in another process, which writes them to Triton's cache.

Python's and Triton's compilers hold Python's lock for up to 60 ms at once. A thread that compiles would delay
all others.
"""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import msgspec

from flashtune.core.decoders import json_decoder
from flashtune.core.errors import KernelError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.machine import TRITON_CACHE, triton_folder
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.core.target import Target
from flashtune.launch.binding import compile_binary
from flashtune.launch.compilation import is_compiled
from flashtune.launch.kernel_cache import proven_copy
from flashtune.templates.registry import find_family

# The priority of the process is lower by this.
NICENESS = 5


class Work(msgspec.Struct, frozen=True):
    """A kernel to compile, as one line of JSON. The config's type depends on the family."""

    family: str
    problem: Problem
    config: msgspec.Raw
    specialization: Specialization
    target: Target
    cache: str  # Triton's cache. torch.compile may change its path after the process started.


class CompilerProcess:
    """A process that compiles one kernel after another. It starts with the first one."""

    def __init__(self) -> None:
        self._forget()
        # The process belongs to the parent of a forked process.
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def prepared(self, record: Record, specialization: Specialization, target: Target) -> Kernel | None:
        """Returns the kernel of a record, rendered and compiled by the process unless caches have it.

        None if there can be no process. This process then compiles the kernel, or reports the error.
        """
        kernel = proven_copy(record, find_family(record.family), specialization)
        if kernel is not None and all(is_compiled(part, target) for part in kernel.parts):
            return kernel
        config = msgspec.Raw(msgspec.json.encode(record.config))
        cache = str(triton_folder().absolute())
        work = Work(record.family, record.problem, config, specialization, target, cache)
        # A pipe that `close` or `kill` has closed raises a ValueError.
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            answer = self._ask(msgspec.json.encode(work) + b"\n")
            if answer:
                return json_decoder(Kernel).decode(answer)
        status = self.close()
        if status < 0:
            raise KernelError(f"the compiler's process ended by signal {-status}")
        return None

    def _ask(self, line: bytes) -> bytes:
        """Returns the answer to a line. It is empty if the process has ended."""
        if self._process is None:
            self._process = _started()
        sent, answers = self._process.stdin, self._process.stdout
        assert sent is not None
        assert answers is not None
        sent.write(line)
        sent.flush()
        return answers.readline()

    def close(self) -> int:
        """Ends the process after its present kernel. Returns its exit status, or 0 without a process."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            process.communicate()
        return process.wait()

    def kill(self) -> None:
        """Ends the process at once. Another thread that waits for a kernel then raises a KernelError."""
        process = self._process
        if process is not None:
            process.kill()


def _started() -> subprocess.Popen[bytes]:
    """Starts the process."""
    if not sys.executable or getattr(sys, "frozen", False):
        raise FileNotFoundError("there is no Python interpreter")
    # Without the present folder, whose modules may have the names of others. flashtune's own folder is last.
    folders = [path for path in sys.path if path] + [str(Path(__file__).parents[2])]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        # Ctrl-C is for this process alone.
        process_group=0,
    )


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Compiles the kernel of each line and answers with it, until the other process closes the pipe."""
    from flashtune.templates.rendering import render

    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Work)
    for line in requests:
        work = decoder.decode(line)
        os.environ[TRITON_CACHE] = work.cache
        family = find_family(work.family)
        config = msgspec.json.decode(work.config, type=family.config_type)
        kernel = render(family, work.problem, config, work.specialization)
        # The other process compiles the kernel too, and reports the error.
        with contextlib.suppress(Exception):
            compile_binary(kernel, work.target)
        answers.write(msgspec.json.encode(kernel) + b"\n")
        answers.flush()


if __name__ == "__main__":
    os.nice(NICENESS)
    # Compilers may print to the standard output.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as pipe:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        _serve(sys.stdin.buffer, pipe)
