"""A fake GPU for tests of executors: it computes on the CPU and records launches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flashtune.core.errors import KernelError
from flashtune.core.extra_inputs import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, Problem
from flashtune.core.record import Record
from flashtune.db.eligibility import by_problem
from flashtune.dispatch.tables import Tables
from flashtune.launch.backward import BackwardTensors
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

    def bind(self, kernel: Kernel, target: object, *tensors: Tensor, compiled: object) -> Callable[..., None]:
        if not self.compiles:
            raise KernelError("PTXASError: out of registers")
        self.kernels.append(kernel)
        shapes = [tensor.shape for tensor in tensors]
        strides = [tensor.stride() for tensor in tensors]

        def launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float) -> None:
            self.launches += 1
            views = [
                tensor.as_strided(shape, stride)
                for tensor, shape, stride in zip((q, k, v, out), shapes, strides, strict=True)
            ]
            causal = Causal(kernel.source.split("causal: ")[1].split()[0].rstrip(","))
            result, row_lse = unfused(*views[:3], scale=scale, causal=causal, return_lse=True)
            views[3].copy_(result)
            if lse is not None and row_lse is not None:
                lse.copy_(row_lse)

        return launch

    def bind_backward(
        self, kernel: Kernel, target: object, tensors: BackwardTensors, side: ExtraInputs, *, compiled: object
    ) -> Callable[..., None]:
        """A launch that differentiates the standard computation."""
        if not self.compiles:
            raise KernelError("PTXASError: out of registers")
        self.kernels.append(kernel)
        shapes = [tensor.shape for tensor in tensors.planned]
        strides = [tensor.stride() for tensor in tensors.planned]

        def launch(values: tuple[Tensor, ...], scale: float, side: ExtraInputs = NO_EXTRA_INPUTS) -> None:
            self.backward_launches += 1
            given = BackwardTensors(*values)
            q, k, v, _, dout, *gradients = (
                tensor.as_strided(shape, stride)
                for tensor, shape, stride in zip(given.planned, shapes, strides, strict=True)
            )
            causal = Causal(kernel.source.split("causal: ")[1].split()[0].rstrip(","))
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
                out, lse = unfused(*leaves, scale=scale, causal=causal, return_lse=True)
                assert lse is not None
                dlse = torch.zeros_like(lse) if given.dlse is None else given.dlse
                found = torch.autograd.grad([out, lse], leaves, [dout, dlse])
            for gradient, one in zip(gradients, found, strict=True):
                gradient.copy_(one)

        return launch


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
