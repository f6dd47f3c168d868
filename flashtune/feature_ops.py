"""The torch operator `flashtune::attention_features`: all calls that plain attention does not cover.

One operator for dense, packed and paged calls: compilers and dispatch modes see one opaque node of known
shapes. Eager calls go past it, as in `flashtune.ops`. Its second result is the log-sum-exp, or empty.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtune.arguments import checked
from flashtune.backward_ops import differentiated
from flashtune.feature_calls import serve_call, unsigned
from flashtune.feature_request import check_call, read_call
from flashtune.layouts import Layout
from flashtune.modes import refuse_tangents, runs_eagerly
from flashtune.operators import CALL_ARGUMENTS, TAGS, call_of, contiguous, library, operands
from flashtune.options import Call, seeded
from flashtune.request import require_tensors, requires_grad
from flashtune.serving import Result

NAME = "attention_features"


def attend(call: Call) -> Result:
    """Attention of whatever a call holds: at once, or by the operator where torch wants to see one.

    Raises:
        ProblemError: The call is invalid, or nobody can serve it.
        KernelError: It is new, and a CUDA graph is being captured or no kernel can be loaded.
        VerificationError: It is new, only generated kernels may serve and they are wrong here.
    """
    if runs_eagerly(call.q, call.k, call.v):
        return checked(serve_call, check_call, seeded(call))
    require_tensors(call.q, call.k, call.v)
    return checked(_by_operator, check_call, seeded(call))


def _by_operator(call: Call) -> Result:
    out, lse = torch.ops.flashtune.attention_features(*operands(call))
    return (out, lse) if call.options.return_lse else out


def _both(result: Result, q: Tensor) -> tuple[Tensor, Tensor]:
    result = contiguous(result)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return (result, q.new_empty(0, dtype=dtype)) if isinstance(result, Tensor) else result


def _compute(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    return _both(serve_call(call_of(q, *rest)), q)  # type: ignore[arg-type]


def _shapes(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    call = call_of(q, *rest)  # type: ignore[arg-type]
    width = call.options.latent or call.v.shape[-1]
    layout = Layout(call.options.layout)
    out = q.new_empty((*q.shape[:-1], width))
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    if not call.options.return_lse:
        return out, q.new_empty(0, dtype=dtype)
    shape = tuple(q.shape[:-1])
    if layout in (Layout.BSHD, Layout.THD):
        shape = (*shape[:-2], shape[-1], shape[-2])
    return out, q.new_empty(shape, dtype=dtype)


def _differentiate(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    call = call_of(q, *rest)  # type: ignore[arg-type]
    refuse_tangents(call.q, call.k, call.v, *call.side.optional_tensors)
    if requires_grad(call.q, call.k, call.v, call.side):
        call = unsigned(call)
        return _both(differentiated(read_call(call, True), call, _forward_of_features), q)
    with torch._C._AutoDispatchBelowAutograd():
        found: tuple[Tensor, Tensor] = torch.ops.flashtune.attention_features(q, *rest)
        return found


def _forward_of_features(call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the operator."""
    options = call.options._replace(return_lse=True)
    found: tuple[Tensor, Tensor] = torch.ops.flashtune.attention_features(
        *operands(call._replace(options=options))
    )
    return found


library.define(f"{NAME}({CALL_ARGUMENTS}) -> (Tensor, Tensor)", tags=TAGS)
library.impl(NAME, _compute, "CompositeExplicitAutograd")
library.impl(NAME, _differentiate, "Autograd")
torch.library.register_fake(f"flashtune::{NAME}", _shapes, lib=library)
