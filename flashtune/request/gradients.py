"""The inputs and results of backward passes."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs


class BackwardInputs(NamedTuple):
    """The inputs of the backward pass of a call, in the call's layout."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor  # The gradient of the output.
    dlse: Tensor | None  # The gradient of the log-sum-exp, or None if the call does not return it.
    scale: float | None  # Factor of the scores, not negative. None means the default.
    side: ExtraInputs = NO_EXTRA_INPUTS


class Gradients(NamedTuple):
    """Gradients of all inputs that may have one. Portable kernels do not write that of the sinks."""

    dq: Tensor  # Gradient of q, in the call's layout and q's type.
    dk: Tensor  # Gradient of k, likewise.
    dv: Tensor  # Gradient of v, likewise.
    # Gradient of the sinks, float32 [heads], or None. Kernels write [batch, heads].
    dsinks: Tensor | None = None
    # Gradient of an additive bias in its type, [batch, heads, seqlen_q, seqlen_kv], or None.
    dbias: Tensor | None = None
    dslopes: Tensor | None = None  # Gradient of the ALiBi slopes, float32 [batch, heads], or None.
    # Gradients of captured tensors, of their shapes and types, or None.
    dtable_0: Tensor | None = None
    dtable_1: Tensor | None = None
    dtable_2: Tensor | None = None
    dtable_3: Tensor | None = None
    dtable_4: Tensor | None = None
    dtable_5: Tensor | None = None


# Computes the backward passes of one kind of call.
BackwardExecutor: TypeAlias = Callable[[BackwardInputs], Gradients]
