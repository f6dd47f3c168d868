"""A fake GPU for tests of executors: it computes on the CPU and records launches."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.errors import KernelError
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, Problem
from flashtune.core.record import Record
from flashtune.core.target import Target, find_target
from flashtune.db.eligibility import by_problem
from flashtune.dispatch.platform import Platform
from flashtune.dispatch.tables import Tables
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.launch.kernel_cache import Binaries
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from flashtune.runtime.kernel_loader import KernelLoader
from flashtune.runtime.self_check import CheckTask, SelfChecks
from tests.support.unfused import unfused

TARGET = find_target("h200")
PROBLEM = testing.problem("heads=8,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal,batch=2")


class Machine(Platform, KernelLoader):
    """A GPU that computes on the CPU: kernels are rendered for it, never compiled."""

    def __init__(self) -> None:
        Platform.__init__(self)
        KernelLoader.__init__(self, Checks(self))
        self.binaries = Loaded(self)
        self.tables = Tables({}, {})
        # How often records were read, which each choice of a kernel does once.
        self.reads = 0
        self.right = True
        # The verdict on a kernel, in place of `right`.
        self.judge: Callable[[Kernel], bool] | None = None
        self.compiles = True
        self.is_untrusted = False
        self.capturing = False
        self.kernels: list[Kernel] = []
        self.checked: list[Kernel] = []
        self.steps: list[str] = []
        # Kernels that threads compile, and the number of steps before.
        self.started: list[tuple[Kernel, int]] = []
        self.launches = 0
        self.backward_launches = 0
        self.usual: str | None = "sdpa-cudnn"
        self.usual_of_trials: str | None = None
        self.compiler = Compiler()
        # Called with each loaded kernel.
        self.loading: Callable[[Kernel], object] = lambda kernel: None
        # Makes launches, in place of the computation on the CPU.
        self.launch: Callable[..., Any] | None = None

    def target(self, device: torch.device) -> Target:
        return TARGET

    def records(self, target_name: str) -> Tables:
        self.reads += 1
        return self.tables

    def has_kernels(self, device: torch.device) -> bool:
        return True

    def is_capturing(self, device: torch.device) -> bool:
        return self.capturing

    def sdpa_backend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, shared: bool | None = None
    ) -> str | None:
        """Trials of masks say whether heads are shared."""
        return self.usual if shared is None else self.usual_of_trials or self.usual

    def bind(
        self,
        kernel: Kernel,
        target: object,
        tensors: ForwardTensors | BackwardTensors,
        side: ExtraInputs,
        binary: object,
    ) -> Any:
        """A launch of the standard computation or its derivative."""
        if not self.compiles:
            raise KernelError("PTXASError: out of registers")
        if self.launch is not None:
            return self.launch(kernel, target, tensors, side, compiled=binary)
        self.kernels.append(kernel)
        shapes = [(tensor.shape, tensor.stride()) for tensor in tensors.planned]

        def seen(arguments: ForwardTensors | BackwardTensors) -> list[Tensor]:
            pairs = zip(arguments.planned, shapes, strict=True)
            return [tensor.as_strided(*bound) for tensor, bound in pairs]

        def forward(values: tuple[Tensor, ...], scale: float, side: ExtraInputs = NO_EXTRA_INPUTS) -> None:
            self.launches += 1
            arguments = ForwardTensors(*values)
            q, k, v, out = seen(arguments)
            causal = Causal(kernel.source.split("causal: ")[1].split()[0].rstrip(","))
            result, row_lse = unfused(q, k, v, scale=scale, causal=causal, return_lse=True)
            out.copy_(result)
            if arguments.lse is not None and row_lse is not None:
                arguments.lse.copy_(row_lse)

        def backward(values: tuple[Tensor, ...], scale: float, side: ExtraInputs = NO_EXTRA_INPUTS) -> None:
            self.backward_launches += 1
            arguments = BackwardTensors(*values)
            q, k, v, _, dout, *gradients = seen(arguments)
            causal = Causal(kernel.source.split("causal: ")[1].split()[0].rstrip(","))
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
                out, lse = unfused(*leaves, scale=scale, causal=causal, return_lse=True)
                assert lse is not None
                dlse = torch.zeros_like(lse) if arguments.dlse is None else arguments.dlse
                computed = torch.autograd.grad([out, lse], leaves, [dout, dlse])
            for gradient, value in zip(gradients, computed, strict=True):
                gradient.copy_(value)

        return forward if isinstance(tensors, ForwardTensors) else backward


class Checks(SelfChecks):
    """Self-checks that note the checked kernels."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    @contextlib.contextmanager
    def preloading(self, *_: object) -> Iterator[None]:
        self.machine.steps.append("preload")
        yield
        self.machine.steps.append("end")

    def passes(self, task: CheckTask, *_: object) -> bool:
        self.machine.steps.append("check")
        self.machine.checked.append(task.kernel)
        return self.machine.right if self.machine.judge is None else self.machine.judge(task.kernel)

    def failed_comparison(self, *_: object) -> str:
        return "rows 7 of 1 allowed"

    def known_verdict(self, kernel: Kernel, target: Target) -> bool | None:
        judge = self.machine.judge
        return super().known_verdict(kernel, target) if judge is None else judge(kernel)


class Loaded(Binaries):
    """Binaries of nothing."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine

    def start(self, kernel: Kernel, *_: object) -> None:
        self.machine.started.append((kernel, len(self.machine.steps)))

    def of(self, kernel: Kernel, *_: object) -> Any:
        self.machine.steps.append("compile")
        self.machine.loading(kernel)


class Compiler(CompilerProcess):
    """Starts no process. Each kernel waits for `release`, and then fails with `failure`."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.release.set()
        self.failure: Exception | None = None
        self.threads: set[str] = set()

    def prepared(self, *_: object) -> None:
        self.threads.add(threading.current_thread().name)
        self.release.wait(600)
        if self.failure is not None:
            raise self.failure


def inputs(problem: Problem, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    q = torch.randn(problem.batch, problem.heads, problem.seqlen_q, problem.head_dim, dtype=dtype)
    k = torch.randn(problem.batch, problem.kv_heads, problem.seqlen_kv, problem.head_dim, dtype=dtype)
    v = torch.randn(problem.batch, problem.kv_heads, problem.seqlen_kv, problem.value_head_dim, dtype=dtype)
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor, causal: str = "bottom_right", scale: float = 0.125) -> Tensor:
    return unfused(q, k, v, scale=scale, causal=Causal(causal))[0]


def tuned(machine: Machine, *records: Record) -> None:
    machine.tables = Tables(by_problem(records), {})
