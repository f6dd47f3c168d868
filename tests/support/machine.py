"""A fake GPU for tests of executors: it computes on the CPU and records launches."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flashtune.core.errors import KernelError
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, Problem
from flashtune.core.record import Record
from flashtune.db.eligibility import by_problem
from flashtune.dispatch.tables import Tables
from flashtune.launch.tensors import BackwardTensors, ForwardTensors
from tests.support.unfused import unfused


class Machine:
    """A GPU that computes on the CPU: kernels are rendered for it, never compiled."""

    def __init__(self) -> None:
        self.tables = Tables({}, {})
        self.right = True
        self.compiles = True
        self.kernels: list[Kernel] = []
        self.checked: list[Kernel] = []
        self.steps: list[str] = []
        self.launches = 0
        self.backward_launches = 0
        self.usual: str | None = "sdpa-cudnn"

    @contextlib.contextmanager
    def preloading(self, *_: object) -> Iterator[None]:
        self.steps.append("preload")
        yield
        self.steps.append("end")

    def binary_of(self, *_: object) -> None:
        self.steps.append("compile")

    def passes(self, kernel: Kernel, *_: object) -> bool:
        self.steps.append("check")
        self.checked.append(kernel)
        return self.right

    def bind(
        self,
        kernel: Kernel,
        target: object,
        tensors: ForwardTensors | BackwardTensors,
        side: ExtraInputs,
        *,
        compiled: object,
    ) -> Callable[..., None]:
        """A launch of the standard computation or its derivative."""
        if not self.compiles:
            raise KernelError("PTXASError: out of registers")
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
