"""Runs kernels under compute-sanitizer, many in one process, and keeps what it says of each; needs a GPU."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from flashtune.backward import BackwardTensors, bind_backward
from flashtune.dtypes import TORCH_DTYPES
from flashtune.launch import bind
from flashtune.problem import Dtype
from flashtune.record import Outcome
from flashtune.target import Target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Scope
from flashtune.tuner.compile_pool import CompilePool
from flashtune.tuner.processes import usable_cores
from flashtune.tuner.sanitizing import FOUND, Finding, Subject, command, read_log, row_stride

# Kernels of one process: starting it takes as long as running many kernels.
BATCH = 12
START_SECONDS = 60.0
KERNEL_SECONDS = 15.0
MAX_FAILURE = 200

# The program that runs the kernels of some numbers.
Program = Callable[[Iterable[int]], list[str]]


class Examination(msgspec.Struct, frozen=True):
    """How kernels are examined.

    Attributes:
        sanitizer: The compute-sanitizer.
        tool: Which of its tools.
        program: What it runs.
        until: When to begin no more, by `time.monotonic`.
        jobs: Processes at a time.
    """

    sanitizer: Path
    tool: str
    program: Program
    until: float
    jobs: int


def runnable(listed: Sequence[Subject], target: Target, samples: int) -> dict[int, str]:
    """The digests of what compiles, by number: of all that ships, and of so many samples of each family."""
    with CompilePool(usable_cores()) as pool:
        jobs = [
            pool.submit(Scope(subject.problem, target, subject.specialization, ()), subject.candidate)
            for subject in listed
        ]
        compiled = [job.result() for job in jobs]
    taken: dict[str, int] = {}
    digests: dict[int, str] = {}
    for number, (subject, made) in enumerate(zip(listed, compiled, strict=True)):
        family = "" if subject.shipped else subject.candidate.family
        usable = made.outcome is Outcome.OK and made.kernel is not None
        if usable and (subject.shipped or taken.get(family, 0) < samples):
            taken[family] = taken.get(family, 0) + 1
            digests[number] = made.kernel or ""
    return digests


def examine(
    how: Examination, listed: Sequence[Subject], digests: dict[int, str]
) -> Generator[tuple[Finding, ...]]:
    """What a tool says of kernels, batch by batch as they end.

    A batch in which nothing is found is done. Of another one each kernel is run again by itself, so that what
    is found is told of the kernel that it is about. What time ran out for is left out.
    """
    numbers = list(digests)
    batches = [tuple(numbers[start : start + BATCH]) for start in range(0, len(numbers), BATCH)]
    with ThreadPoolExecutor(how.jobs) as pool:
        jobs = [pool.submit(_examine_batch, how, listed, digests, batch) for batch in batches]
        try:
            for job in as_completed(jobs):
                yield job.result()
        finally:
            # Whoever interrupts it waits for the processes that run, and for no others.
            pool.shutdown(wait=False, cancel_futures=True)


def _examine_batch(
    how: Examination, listed: Sequence[Subject], digests: dict[int, str], batch: tuple[int, ...]
) -> tuple[Finding, ...]:
    blank = {number: _blank(how.tool, listed[number], digests[number]) for number in batch}
    found = _run(how, batch)
    if found is None:
        return ()
    if found.errors == found.warnings == 0 and not found.failed:
        return tuple(blank.values())
    findings = []
    for number in batch:
        alone = found if len(batch) == 1 else _run(how, (number,))
        if alone is not None:
            errors, warnings, failed, first = alone.errors, alone.warnings, alone.failed, alone.first
            changes = {"errors": errors, "warnings": warnings, "failed": failed, "first": first}
            findings.append(msgspec.structs.replace(blank[number], **changes))
    return tuple(findings)


class _Said(msgspec.Struct, frozen=True):
    errors: int = 0
    warnings: int = 0
    failed: str = ""
    first: str = ""


def _run(how: Examination, numbers: tuple[int, ...]) -> _Said | None:
    """One process under the tool; None where there is no time left for it."""
    seconds = min(START_SECONDS + KERNEL_SECONDS * len(numbers), how.until - time.monotonic())
    if seconds <= 0:
        return None
    # Every tensor is then an allocation of its own, whose borders the tool knows.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    line = command(how.sanitizer, how.tool, how.program(numbers))
    try:
        done = subprocess.run(
            line, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None if time.monotonic() >= how.until else _Said(failed="did not end within its time limit")
    read = read_log(done.stdout)
    if read is None or done.returncode not in (0, FOUND):
        lines = [line for line in (*done.stdout.splitlines(), *done.stderr.splitlines()) if line.strip()]
        last = lines[-1] if lines else "no output"
        return _Said(failed=f"exit code {done.returncode}: {last}"[:MAX_FAILURE])
    return _Said(read[0], read[1], "", read[2])


def _blank(tool: str, subject: Subject, digest: str) -> Finding:
    return Finding(tool, digest, subject.candidate.family, subject.label, subject.shipped)


def launch_once(subject: Subject, target: Target, device: torch.device) -> None:
    """Launches a kernel on tensors that end where their memory ends.

    Raises:
        KernelError: It does not compile or load.
        RuntimeError: It failed on the device.
    """
    problem = subject.problem
    family = find_family(subject.candidate.family)
    kernel = render(family, problem, subject.candidate.config, subject.specialization)

    def make(heads: int, length: int, width: int, dtype: Dtype) -> Tensor:
        row = row_stride(width, subject.specialization.alignment)
        shape = (problem.batch, heads, length, width)
        size = (problem.batch * heads * length - 1) * row + width
        memory = torch.zeros(size, dtype=TORCH_DTYPES[dtype], device=device)
        return memory.as_strided(shape, (heads * length * row, length * row, row, 1))

    q = make(problem.heads, problem.seqlen_q, problem.head_dim, problem.dtype)
    k = make(problem.kv_heads, problem.seqlen_kv, problem.head_dim, problem.dtype)
    v = make(problem.kv_heads, problem.seqlen_kv, problem.value_head_dim, problem.dtype)
    out = make(problem.heads, problem.seqlen_q, problem.value_head_dim, problem.out_dtype)
    rows = (problem.batch, problem.heads, problem.seqlen_q)
    # Of a backward pass its gradient, which is read.
    lse = torch.zeros(rows, device=device) if subject.specialization.lse else None

    def make_like(tensor: Tensor) -> Tensor:
        _, heads, length, width = tensor.shape
        return make(heads, length, width, problem.dtype)

    scale = problem.head_dim**-0.5
    with torch.cuda.device(device):
        if problem.is_backward:
            given = torch.zeros(rows, device=device)
            dout, dq, dk, dv = map(make_like, (out, q, k, v))
            tensors = BackwardTensors(q, k, v, out, given, dout, dq, dk, dv, lse)
            bind_backward(kernel, target, tensors)(tensors, scale)
        else:
            bind(kernel, target, q, k, v, out)(q, k, v, out, lse, scale)
        torch.cuda.synchronize(device)
