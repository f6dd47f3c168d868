"""Fakes of the compiler, the GPU and its process; worker processes can import them."""

import errno
import functools
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from flashtune import testing
from flashtune.core.config import Axis, Space
from flashtune.core.errors import FlashtuneError
from flashtune.core.problem import Problem
from flashtune.core.record import Measurement, Outcome, PeerTime, Provenance, Resources, Verdict
from flashtune.templates.forward_q_outer.space import Loads, QOuterConfig
from flashtune.tuner.candidates import Candidate, SearchTask
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.tuner.execution.evaluation import Evaluation, MachineCode
from flashtune.tuner.execution.machine_probe import Probe
from flashtune.tuner.search.ranking import Ranked

Result = TypeVar("Result")

FAMILY = "forward_q_outer"
KERNEL = "0123456789abcdef" * 2
PASSED = Verdict(passed=True, worst_ratio=0.5, checks=9, failed="", device="fake")
a_problem = functools.partial(testing.problem, "heads=4,seqlen=256,head_dim=64,dtype=fp16")


def a_space(block_ms: tuple[int, ...] = (64, 128), warps: tuple[int, ...] = (4, 8)) -> Space:
    """A space with a conditional axis: `overlap_qk` is searched only with descriptors."""
    axes = (
        Axis("block_m", block_ms),
        Axis("block_n", (32, 64)),
        Axis("num_warps", warps),
        Axis("num_stages", (2,)),
        Axis("loads", (Loads.POINTER, Loads.DESCRIPTOR), ordered=False),
        Axis("overlap_qk", (False, True), only_if=lambda chosen: chosen["loads"] is Loads.DESCRIPTOR),
    )
    return Space(QOuterConfig, axes)


def a_config(**changes: Any) -> QOuterConfig:
    values: dict[str, Any] = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 2}
    return QOuterConfig(**(values | changes))


def alike(scope: SearchTask) -> tuple[Ranked, ...]:
    """A ranking without predictions."""
    return tuple(Ranked(candidate, 1.0) for candidate in scope.candidates())


def a_measurement(ms: float, samples: int = 9, spread: float = 0.0) -> Measurement:
    return Measurement(ms, ms - spread / 2, ms + spread / 2, samples)


def done(result: Result) -> Future[Result]:
    future: Future[Result] = Future()
    future.set_result(result)
    return future


class FakeCompiler:
    """Returns the given result for a candidate without compiling it."""

    def __init__(self, judge: Callable[[Candidate], Compiled] | None = None, width: int = 2) -> None:
        self.judge = judge or compiled
        self.width = width
        self.seen: list[Candidate] = []

    def submit(self, scope: SearchTask, candidate: Candidate) -> Future[Compiled]:
        self.seen.append(candidate)
        future: Future[Compiled] = Future()
        try:
            future.set_result(self.judge(candidate))
        except FlashtuneError as error:
            future.set_exception(error)
        return future

    def compile_delayed(self, scope: SearchTask, candidate: Candidate) -> None:
        pass


def compiled(candidate: Candidate) -> Compiled:
    config = candidate.config
    assert isinstance(config, QOuterConfig)
    return Compiled(
        Outcome.OK, KERNEL, Resources(config.block_m * config.block_n, registers=config.num_warps)
    )


class FakeMeasurer:
    """Returns given times immediately, and records the requests."""

    provenance = Provenance.MEASURED

    def __init__(
        self,
        judge: Callable[[Candidate], Evaluation],
        judge_delayed: Callable[[Candidate], Evaluation | None] = lambda candidate: None,
        gpu_uuid: str | None = None,
    ) -> None:
        self.judge = judge if gpu_uuid is None else lambda candidate: on_gpu(judge(candidate), gpu_uuid)
        self.gpu_uuid = gpu_uuid
        self.judge_delayed = judge_delayed
        self.delayed: list[Candidate] = []
        self.seen: list[Candidate] = []
        self.limits: list[float | None] = []
        self.entrants: list[tuple[Candidate, ...]] = []
        self.codes: dict[Candidate, MachineCode] = {}

    def evaluate(
        self, scope: SearchTask, candidate: Candidate, compiled: Compiled, drop_above_ms: float | None
    ) -> Future[Evaluation]:
        self.seen.append(candidate)
        self.limits.append(drop_above_ms)
        future: Future[Evaluation] = Future()
        try:
            future.set_result(self.judge(candidate))
        except (FlashtuneError, KeyboardInterrupt) as error:
            future.set_exception(error)
        return future

    def warm_up(self, scope: SearchTask, candidate: Candidate) -> None:
        pass

    def finals(
        self, scope: SearchTask, candidates: tuple[Candidate, ...], closest_seconds: float
    ) -> Future[tuple[Measurement, ...]]:
        self.entrants.append(candidates)
        measured = [self.judge(candidate).measurement for candidate in candidates]
        peers = (PeerTime("sdpa-cudnn", 1.0),)
        return done(
            tuple(
                msgspec.structs.replace(own, samples=21, peers=peers) for own in measured if own is not None
            )
        )

    def evaluate_delayed(self, scope: SearchTask, candidate: Candidate) -> Future[Evaluation | None]:
        self.delayed.append(candidate)
        return done(self.judge_delayed(candidate))

    def machine_code(self, scope: SearchTask, candidate: Candidate) -> Future[MachineCode]:
        return done(self.codes.get(candidate, ()))


def right(ms: float) -> Evaluation:
    return Evaluation(Outcome.OK, PASSED, a_measurement(ms))


def on_gpu(evaluation: Evaluation, gpu_uuid: str) -> Evaluation:
    """An evaluation with the time of a physical GPU."""
    timed = evaluation.measurement and msgspec.structs.replace(evaluation.measurement, gpu_uuid=gpu_uuid)
    return msgspec.structs.replace(evaluation, measurement=timed)


def by_tile(candidate: Candidate) -> Evaluation:
    """A landscape with one best point: large tiles, descriptors, QK ahead, four warps."""
    config = candidate.config
    assert isinstance(config, QOuterConfig)
    ms = 4096 / config.block_m / config.block_n + 0.1 * config.num_warps
    ms *= 0.8 if config.loads is Loads.DESCRIPTOR else 1.0
    return right(ms * (0.9 if config.overlap_qk else 1.0))


# ---- what a worker process is made to do ------------------------------------------------------


def crash(*_: object) -> None:
    time.sleep(0.3)
    os.abort()


def leave_with_illegal_access(*_: object) -> None:
    time.sleep(0.5)
    os._exit(64)


def hang(*_: object) -> None:
    time.sleep(600)


def succeed(*_: object) -> None:
    return None


def agree(*_: object) -> bool:
    return True


def process_id(*_: object) -> int:
    return os.getpid()


def with_process_id(*arguments: int) -> tuple[int, ...]:
    return *arguments, os.getpid()


def evaluate_right(*_: object) -> Evaluation:
    return right(1.0)


def lose_device(*_: object) -> None:
    from flashtune.tuner.execution.evaluation import lost_device

    raise lost_device(0, "it was unplugged")


def break_context(*_: object) -> Evaluation:
    """Breaks the GPU's context, as a kernel's stray access does, in the way that a job meets it."""
    import torch

    from flashtune.tuner.execution.gpu_jobs import leave_if_broken

    device = torch.device("cuda", 0)
    table = torch.zeros(4, device=device)
    try:
        table[torch.tensor([2**30], device=device)].sum().item()
    except RuntimeError as error:
        leave_if_broken(device, error)
    return Evaluation(Outcome.OK)


def compile_well(*_: object) -> Compiled:
    return Compiled(Outcome.OK)


def fail_with_a_tool(*_: object) -> Compiled:
    return Compiled(Outcome.COMPILE_ERROR, message="ptxas failed", tool_failed=True)


def nothing_wrong(*_: object) -> Probe:
    return Probe("")


def triton_cache_full(*_: object) -> Probe:
    return Probe("the Triton cache is full")


def no_space(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def compile_without_space(problem: Problem, candidate: Candidate, *rest: Any) -> Compiled:
    """Compiles with a disk that is full when Triton writes to it."""
    import triton

    from flashtune.tuner.execution.compile_pool import compile_candidate

    triton.compile = no_space
    return compile_candidate(problem, candidate, *rest)


def kill_itself(*_: object) -> None:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


def hang_on_gpu(*_: object) -> None:
    import torch

    torch.cuda._sleep(2**40)
    torch.cuda.synchronize()


def blocked_signals(process: str = "self") -> set[int]:
    """The signals that a process blocks."""
    lines = Path("/proc", process, "status").read_text().splitlines()
    mask = int(next(line for line in lines if line.startswith("SigBlk:")).split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def blocked_by_worker_and_server() -> tuple[set[int], set[int]]:
    return blocked_signals(), blocked_signals(str(os.getppid()))
