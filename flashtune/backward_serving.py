"""What computes the gradients of one kind of call: proven once, then bound to strides as they come.

The gradient of the output is somebody else's tensor: it may be expanded or transposed. What a kernel can
address it takes as it lies; else it is copied, so that nothing is compiled while a program goes back.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import torch

from flashtune.backward import BackwardTensors, bind_backward
from flashtune.choices import Asked, Choice, chosen, first_that_serves
from flashtune.decision import Decision, Server
from flashtune.dispatch import default_selection
from flashtune.errors import KernelError
from flashtune.kernel import POINTER_ALIGNMENT, Specialization
from flashtune.pair_decision import backward_specialization, backward_tensors, specialization_of_pass
from flashtune.problem import Dtype
from flashtune.rendered import kernel_of
from flashtune.side import NO_SIDE, Side
from flashtune.side_inputs import side_views

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.backward import Backward
    from flashtune.record import Selection
    from flashtune.request import Request
    from flashtune.target import Target


class Gradients(NamedTuple):
    """Gradients of a call's inputs, in its layout and their types."""

    dq: Tensor
    dk: Tensor
    dv: Tensor


class ServeBackward(Protocol):
    """Computes the gradients of one kind of call; tensors are in its layout, the scale is not negative."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        scale: float | None,
        side: Side = ...,
    ) -> Gradients:
        """Gradients of q, k and v for those of the output and, where the call returns it, the log-sum-exp."""
        ...


def prepare_backward(
    decision: Decision, request: Request, q: Tensor, k: Tensor, v: Tensor, side: Side = NO_SIDE
) -> ServeBackward:
    """What computes the gradients of a request from now on: compiled, loaded and proven.

    Raises:
        KernelError: No kernel compiles and loads.
        VerificationError: They are wrong on this GPU.
    """
    if decision.server is Server.INTERPRETER:
        return functools.partial(_interpreted, decision, request)
    needed = backward_specialization(request, q, k, v, side)
    asked = Asked(request.backward, needed, request.prefer, request.device)

    def attempt(selection: Selection, target: Target) -> ServeBackward:
        server = BackwardServer(chosen(selection, target, asked), request)
        server.bind_usual(q, k, v, side)
        return server

    return first_that_serves(decision, asked, attempt)


class BackwardServer:
    """A proven kernel of the backward pass, bound to each set of strides once."""

    __slots__ = ("_choice", "_default_scale", "_launches", "_request")

    def __init__(self, choice: Choice, request: Request) -> None:
        self._choice = choice
        self._request = request
        self._default_scale = request.default_scale
        # By the strides of all that is read; None where the output's gradient must be copied first.
        self._launches: dict[tuple[object, ...], Backward | None] = {}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        scale: float | None,
        side: Side = NO_SIDE,
    ) -> Gradients:
        """As `ServeBackward`.

        Raises:
            KernelError: A hook of saved tensors gave them strides that the kernel cannot address.
        """
        if dout.data_ptr() % POINTER_ALIGNMENT:
            dout = dout.clone()
        if dlse is not None:
            dlse = dlse.contiguous()
        key = q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()
        if key not in self._launches:
            self._launches[key] = self._bind(q, k, v, out, dout, side)
        launch = self._launches[key]
        if launch is None:
            return self(q, k, v, out, lse, dout.contiguous(), dlse, scale, side)
        gradients = Gradients(torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        tensors = BackwardTensors(q, k, v, out, lse, dout, *gradients, dlse)
        launch(tensors, self._default_scale if scale is None else scale, side)
        return gradients

    def bind_usual(self, q: Tensor, k: Tensor, v: Tensor, side: Side) -> None:
        """Binds the kernel to a gradient that lies as the output does.

        Raises:
            KernelError: It does not load.
        """
        out = torch.empty(self._request.out_shape, dtype=self._request.out_dtype, device="meta")
        key = q.stride(), k.stride(), v.stride(), out.stride(), out.stride()
        self._launches[key] = self._bind(q, k, v, out, out, side)

    def _bind(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, side: Side
    ) -> Backward | None:
        tensors = backward_tensors(self._request, q, k, v, out, out, dout)
        if _has_rows(dout) and _covers(self._choice.kernel.specialization, self._needed(tensors, side)):
            beside = _beside(self._request, side, tensors)
            kernel, target, binary = self._choice
            return bind_backward(kernel, target, tensors, beside, compiled=binary)
        if dout.is_contiguous():
            raise KernelError(
                "tensors that were saved for the backward pass came back with strides that its kernel cannot "
                "address: let hooks of saved tensors keep their strides"
            )
        return None

    def _needed(self, tensors: BackwardTensors, side: Side) -> Specialization:
        return specialization_of_pass(self._request, tensors, side)


def _covers(assumed: Specialization, needed: Specialization) -> bool:
    """Whether a kernel that assumes so much is right for tensors of which so much may be assumed."""
    return assumed.alignment <= needed.alignment and assumed.index_bits >= needed.index_bits


def _has_rows(tensor: Tensor) -> bool:
    """Whether the last dimension is contiguous, as kernels take for granted."""
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def _beside(request: Request, side: Side, tensors: BackwardTensors) -> Side:
    if side is NO_SIDE:
        return side
    return side_views(request.problem, side, tensors.k.shape[0])


def _interpreted(
    decision: Decision,
    request: Request,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    scale: float | None,
    side: Side = NO_SIDE,
) -> Gradients:
    """The kernels under Triton's interpreter, in float32, as in `flashtune.servers.interpreted`."""
    assert decision.target is not None
    q_wide, k_wide, v_wide, out_wide = (tensor.float() for tensor in (q, k, v, out))
    dout_wide = dout.float().contiguous()
    if side.bias is not None and side.bias.dtype is not torch.bool:
        side = side._replace(bias=side.bias.float())
    gradients = [torch.empty_like(tensor) for tensor in (q_wide, k_wide, v_wide)]
    views, heads_first = request.views, request.layout.heads_first
    tensors = BackwardTensors(
        *views(q_wide, k_wide, v_wide),
        heads_first(out_wide),
        lse,
        heads_first(dout_wide),
        *views(*gradients),
        None if dlse is None else dlse.contiguous(),
    )
    needed = specialization_of_pass(request, tensors, side)
    problem = msgspec.structs.replace(request.backward, dtype=Dtype.FP32)
    kernel = kernel_of(default_selection(problem, decision.target, needed).record, needed)
    beside = _beside(request, side, tensors)
    launch = bind_backward(kernel, decision.target, tensors, beside)
    launch(tensors, request.default_scale if scale is None else scale, beside)
    return Gradients(*(one.to(tensor.dtype) for one, tensor in zip(gradients, (q, k, v), strict=True)))
