"""The inputs and results of backward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs

if TYPE_CHECKING:
    from torch import Tensor


class BackwardInputs(NamedTuple):
    """The inputs of the backward pass of a call, in the call's layout.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        out: The output.
        lse: The log-sum-exp.
        dout: The gradient of the output.
        dlse: The gradient of the log-sum-exp, or None if the call does not return it.
        scale: Factor of the scores, not negative. None means the default.
        side: The extra inputs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    scale: float | None
    side: ExtraInputs = NO_EXTRA_INPUTS


class Gradients(NamedTuple):
    """Gradients of all inputs that may have one. Portable kernels do not write that of the sinks.

    Attributes:
        dq: Gradient of q, in the call's layout and q's type.
        dk: Gradient of k, likewise.
        dv: Gradient of v, likewise.
        dsinks: Gradient of the sinks, float32 [heads], or None. Kernels write [batch, heads].
        dbias: Gradient of an additive bias in its type, [batch, heads, seqlen_q, seqlen_kv], or None.
        dslopes: Gradient of the ALiBi slopes, float32 [batch, heads], or None.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None
    dbias: Tensor | None = None
    dslopes: Tensor | None = None


# Computes the backward passes of one kind of call.
BackwardExecutor: TypeAlias = Callable[[BackwardInputs], Gradients]
