"""What `flashtune verify` does in worker processes: compile, run on the GPU, run under the interpreter.

Nothing that imports Triton is imported at the top: an interpreter's worker sets its variable first.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec
from pebble import ProcessPool

from flashtune.errors import KernelError, MachineError, VerificationError

if TYPE_CHECKING:
    from flashtune.config import Config
    from flashtune.db.checks import Check
    from flashtune.kernel import Kernel, Specialization
    from flashtune.problem import Problem
    from flashtune.record import Record, Verdict
    from flashtune.target import Target

COMPILE_SECONDS = 120.0
GPU_SECONDS = 240.0
INTERPRETER_SECONDS = 120.0
BROKEN_CONTEXT = 70


class Interpretable(msgspec.Struct, frozen=True):
    """All that decides what a kernel computes under the interpreter."""

    family: str
    problem: Problem
    config: Config
    specialization: Specialization
    target: Target


def start_interpreters(workers: int) -> ProcessPool:
    """Workers in which Triton interprets; each is a fresh process, since Triton decides at import."""
    return ProcessPool(
        max_workers=workers, context=multiprocessing.get_context("spawn"), initializer=_become_interpreter
    )


def _become_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    # Every worker has a core to itself: threads of numpy's would spin for one another at each small product.
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)


def why_not_compiled(kernel: Kernel, target: Target) -> str:
    """Compiles a kernel for a target: why it cannot run there, empty if it can.

    Raises:
        MachineError: The machine cannot compile, as with a full disk.
    """
    from flashtune.compilation import compile_kernel
    from flashtune.record import Resources
    from flashtune.tuner.resources import overflow

    try:
        steps = (compile_kernel(step, target) for step in (kernel, kernel.first, kernel.last) if step)
        found = [step.metadata for step in steps]
    except MachineError:
        raise
    except KernelError as error:
        return f"does not compile: {error}"
    # Capacity is all that is asked here: registers would cost a tool's run for each kernel.
    taken = (Resources(one.shared, getattr(one, "tmem_size", None) or 0) for one in found)
    return next(filter(None, (overflow(one, target) for one in taken)), "")


def check_interpreted(task: Interpretable) -> Verdict:
    """Compares a kernel with the reference on the CPU, in float32 and at small sizes.

    Raises:
        KernelError: It does not run.
    """
    import torch

    from flashtune.compilation import interpreting
    from flashtune.proof.cases import Level
    from flashtune.proof.check import check_kernel
    from flashtune.templates.registry import find_family

    if not interpreting():
        raise VerificationError(
            "Triton was imported before it was told to interpret: run flashtune verify by itself"
        )
    family = find_family(task.family)
    cpu = torch.device("cpu")
    return check_kernel(family, task.problem, task.config, task.specialization, task.target, cpu, Level.QUICK)


def check_on_gpu(record: Record, index: int) -> tuple[Check, ...]:
    """Proves a record's kernel on a GPU at its shape, and its sibling with (or without) the log-sum-exp.

    A kernel with barriers of its own is proven with injected delays too; its verdict then names `delays`.
    The sibling of a backward pass is given (or not given) the gradient of the log-sum-exp.

    Returns:
        The verdict of the record's kernel, then, if that passed, of its sibling.

    Raises:
        KernelError: It does not run. Where that broke the GPU's context, the process ends instead.
    """
    import torch

    from flashtune.proof.cases import Level
    from flashtune.target import device_target

    target, device = device_target(index), torch.device("cuda", index)
    sibling = msgspec.structs.replace(record.specialization, lse=not record.specialization.lse)
    try:
        first = _check(record, record.specialization, target, device, Level.FULL)
        if first.verdict.passed:
            first = _with_delays(record, first, target, device)
        if not first.verdict.passed:
            return (first,)
        return first, _check(record, sibling, target, device, Level.QUICK)
    except KernelError:
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            os._exit(BROKEN_CONTEXT)
        raise


def _with_delays(record: Record, first: Check, target: Target, device: Any) -> Check:
    """The check with the verdict of injected delays, for kernels with barriers of their own."""
    from flashtune.proof.check import check_delayed, joined
    from flashtune.templates.registry import find_family
    from flashtune.templates.rendering import render

    assert record.config is not None
    kernel = render(find_family(record.family), record.problem, record.config, record.specialization)
    late = check_delayed(kernel, record.problem, record.config, target, device)
    return first if late is None else msgspec.structs.replace(first, verdict=joined([first.verdict, late]))


def gpu_kernels(record: Record, kernel: Kernel) -> tuple[Kernel, ...]:
    """The further kernels that `check_on_gpu` compiles: the sibling and the one with injected delays."""
    from flashtune.proof.delays import delayed
    from flashtune.templates.registry import find_family
    from flashtune.templates.rendering import render

    assert record.config is not None
    sibling = msgspec.structs.replace(record.specialization, lse=not record.specialization.lse)
    further = (render(find_family(record.family), record.problem, record.config, sibling), delayed(kernel))
    return tuple(one for one in further if one is not None)


def _check(record: Record, specialization: Specialization, target: Target, device: Any, level: Any) -> Check:
    from flashtune.db.checks import Check
    from flashtune.proof.check import check_rendered
    from flashtune.templates.registry import find_family
    from flashtune.templates.rendering import render
    from flashtune.versions import current_versions

    assert record.config is not None
    kernel = render(find_family(record.family), record.problem, record.config, specialization)
    verdict = check_rendered(kernel, record.problem, record.config, target, device, level)
    return Check(
        digest=kernel.digest, target=target.name, versions=current_versions(record.family), verdict=verdict
    )


def failure(job: Future[Any]) -> str:
    """Why a job gave no result, empty if it gave one.

    Raises:
        MachineError: The machine failed, as with a full disk.
    """
    from flashtune.tuner.processes import failure_of

    lost = failure_of(job)
    if lost is not None:
        return lost[1]
    error = job.exception()
    if error is not None and (isinstance(error, MachineError) or not isinstance(error, KernelError)):
        raise error
    return str(error) if error else ""
