"""Probes of this machine: write to its folders, then compile a kernel that is known to be good.

The cause of a crash, a time-out or a failed tool is the candidate or the machine. A probe decides which.
"""

import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from flashtune.core.errors import FlashtuneError, MachineError
from flashtune.core.kernel import Specialization
from flashtune.core.machine import FREE_MEMORY, signal_fault, written_folder_fault
from flashtune.core.problem import Dtype, Problem
from flashtune.core.target import Target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import read_resources
from flashtune.tuner.execution.processes import LostJob, Workers, failure_of, stopped

PROBE_SECONDS = 60.0
# A machine is too busy for time limits if wall-clock time is this many times the CPU time.
BUSY = 3.0
# A shorter wait, in seconds, is no sign of load.
SHORT = 2.0
# A compiler may crash because of a memory limit below this, in bytes.
LOW_LIMIT = 16 << 30
KNOWN_GOOD = "forward_q_outer"


class Probe(msgspec.Struct, frozen=True):
    """The result of a probe."""

    fault: str  # A sentence about the machine's fault; empty if there is none.
    slowness: float = 1.0  # Wall-clock time of the compilation over its CPU time.


def start_probe(target: Target) -> Future[Probe]:
    """Starts a probe in a new process."""
    worker = Workers(1)
    settled: Future[Probe] = Future()

    def settle(job: Future[Probe]) -> None:
        worker.stop_soon()
        lost = failure_of(job)
        error = None if lost else job.exception()
        if lost is not None:
            settled.set_result(Probe(_lost_probe(lost)))
        elif error is not None:
            settled.set_exception(error)
        else:
            settled.set_result(job.result())

    worker.schedule(look_for_fault, (target,), PROBE_SECONDS).add_done_callback(settle)
    return settled


def look_for_fault(target: Target) -> Probe:
    """Writes to the folders that the compiler uses, then compiles a known good kernel, in this process."""
    fault = written_folder_fault()
    if fault:
        return Probe(fault)
    from triton import knobs

    problem = Problem(
        dtype=Dtype.FP16,
        head_dim=16,
        value_head_dim=16,
        heads=1,
        kv_heads=1,
        batch=1,
        seqlen_q=64,
        seqlen_kv=64,
    )
    family = find_family(KNOWN_GOOD)
    kernel = render(family, problem, family.default(problem, target), Specialization())
    wall, before = time.monotonic(), os.times()
    try:
        with knobs.compilation.scope():
            # A hit in Triton's cache would run no compiler.
            knobs.compilation.always_compile = True
            read_resources(kernel, target)
    except MachineError as error:
        return Probe(str(error))
    except FlashtuneError as error:
        return Probe(f"a kernel that is known to be good does not compile ({error}): reinstall triton")
    used = sum(os.times()[:4]) - sum(before[:4])
    wall = time.monotonic() - wall
    return Probe("", wall / used if wall - used > SHORT else 1.0)


def fault_of(lost: LostJob, probe: Probe, process: str) -> str:
    """Returns a sentence about the machine's fault; empty if the candidate is the cause."""
    if probe.fault:
        return probe.fault
    if lost.timed_out:
        return _load_fault(probe.slowness, process)
    if not lost.taken:
        return f"{process} died before it took a job, twice: {FREE_MEMORY}"
    return outside_fault(lost, process) or _memory_limit_fault(lost, process)


def outside_fault(lost: LostJob, process: str) -> str:
    """Returns a sentence about a process that another program killed, else an empty text."""
    return (signal_fault(lost.signal, process) or "") if lost.signal else ""


def settle_after_probe(
    target: Target, settled: Future[Any], judge: Callable[[Probe], str], otherwise: Any
) -> None:
    """Sets a future's result if a probe finds no fault of this machine, else the error that stops the search.

    `judge` returns a sentence about the machine's fault, or an empty one.
    """

    def settle(done: Future[Probe]) -> None:
        error = done.exception()
        if error is not None:
            settled.set_exception(error)
            return
        fault = judge(done.result())
        if fault:
            settled.set_exception(stopped(fault))
        else:
            settled.set_result(otherwise)

    try:
        probe = start_probe(target)
    except MachineError as error:
        settled.set_exception(stopped(str(error)))
        return
    probe.add_done_callback(settle)


def _lost_probe(lost: LostJob) -> str:
    process = "a process that compiles a small kernel"
    if lost.timed_out:
        return f"{process} did not end in {PROBE_SECONDS:.0f} s: this machine is too busy, or a disk hangs"
    return outside_fault(lost, process) or f"{process} died: {FREE_MEMORY}"


def _memory_limit_fault(lost: LostJob, process: str) -> str:
    """Returns a sentence if a low memory limit is set: LLVM crashes if an allocation fails."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if not lost.signal or not any(0 <= limit < LOW_LIMIT for limit in limits):
        return ""
    return f"{process} crashed under a limit of memory (`ulimit -v` or `ulimit -d`): {FREE_MEMORY}"


def _load_fault(slowness: float, process: str) -> str:
    """Returns a sentence if other programs keep the machine busy, else an empty text."""
    # The mean of the last minute includes load that has ended since.
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if max(slowness, load) < BUSY:
        return ""
    return (
        f"{process} met its time limit on a machine that is too busy ({max(slowness, load):.0f} programs for "
        "each core): end other programs, or use fewer processes (--jobs)"
    )
