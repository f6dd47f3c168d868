"""Probes of this machine: its folders are written, then a kernel that is known to be good is compiled.

A crash, a time-out or a tool that failed may be a candidate's fault or the machine's. A probe decides which.
"""

from __future__ import annotations

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
from flashtune.tuner.execution.processes import Lost, Workers, failure_of

PROBE_SECONDS = 60.0
# A machine is too busy for time limits where a process waits so many times as long as it computes.
BUSY = 3.0
# Waiting of less than this is no sign of load, in seconds.
SHORT = 2.0
# A compiler that crashes under a lower limit of memory, in bytes, may have met that limit.
LOW_LIMIT = 16 << 30
KNOWN_GOOD = "forward_q_outer"

NOTHING_LOST = "what was finished is stored, and the same command goes on"


class Probe(msgspec.Struct, frozen=True):
    """What a probe found.

    Attributes:
        fault: A sentence for what is wrong, empty if nothing is.
        slowness: Wall clock of the compilation over its CPU time.
    """

    fault: str
    slowness: float = 1.0


def start_probe(target: Target) -> Future[Probe]:
    """Starts a probe in a new process.

    Args:
        target: For which GPU the kernel is compiled.

    Raises:
        MachineError: No process can be started.
    """
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
    """Writes to the folders that compiling writes, then compiles a kernel that is known to be good, here."""
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
            # Triton's cache would answer without running anything.
            knobs.compilation.always_compile = True
            read_resources(kernel, target)
    except MachineError as error:
        return Probe(str(error))
    except FlashtuneError as error:
        return Probe(f"a kernel that is known to be good does not compile ({error}): reinstall triton")
    used = sum(os.times()[:4]) - sum(before[:4])
    wall = time.monotonic() - wall
    return Probe("", wall / used if wall - used > SHORT else 1.0)


def fault_of(lost: Lost, probe: Probe, process: str) -> str:
    """A sentence for a machine that lost a process, empty where the fault is the candidate's.

    Args:
        lost: How the process was lost.
        probe: What a probe found after it.
        process: What sentences call it.
    """
    if probe.fault:
        return probe.fault
    if lost.timed_out:
        return _load_fault(probe.slowness, process)
    if not lost.taken:
        return f"{process} died before it took a job, twice: {FREE_MEMORY}"
    return outside_fault(lost, process) or _memory_limit_fault(lost, process)


def outside_fault(lost: Lost, process: str) -> str:
    """A sentence for a process that was ended from outside, which takes no probe to tell; else empty."""
    return (signal_fault(lost.signal, process) or "") if lost.signal else ""


def stopped(fault: str) -> MachineError:
    """The error that stops a search for what is wrong with the machine."""
    return MachineError(f"{fault}; {NOTHING_LOST}")


def settle_after_probe(
    target: Target, settled: Future[Any], judge: Callable[[Probe], str], otherwise: Any
) -> None:
    """Gives a future its result once a probe found this machine well, else the error that stops the search.

    Args:
        target: For which GPU the probe compiles.
        settled: The future.
        judge: Gives a sentence for the machine's fault, or an empty one.
        otherwise: The result, if the machine is well.
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


def _lost_probe(lost: Lost) -> str:
    process = "a process that compiles a small kernel"
    if lost.timed_out:
        return f"{process} did not end in {PROBE_SECONDS:.0f} s: this machine is too busy, or a disk hangs"
    return outside_fault(lost, process) or f"{process} died: {FREE_MEMORY}"


def _memory_limit_fault(lost: Lost, process: str) -> str:
    """A sentence for a crash under a low limit of memory: LLVM crashes when it gets no more."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if not lost.signal or not any(0 <= limit < LOW_LIMIT for limit in limits):
        return ""
    return f"{process} crashed under a limit of memory (`ulimit -v` or `ulimit -d`): {FREE_MEMORY}"


def _load_fault(slowness: float, process: str) -> str:
    """A sentence for a time-out on a machine that other programs keep busy."""
    # The mean of the last minute knows of load that has gone since.
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if max(slowness, load) < BUSY:
        return ""
    return (
        f"{process} met its time limit on a machine that is too busy ({max(slowness, load):.0f} programs for "
        "each core): end other programs, or use fewer processes (--jobs)"
    )
