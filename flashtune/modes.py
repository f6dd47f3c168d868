"""Whether torch may be gone past: no compiler traces, no mode watches, no tensor is of another kind."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashtune.errors import ProblemError

# Bound once: each is asked in every call.
is_compiling = torch.compiler.is_dynamo_compiling
function_mode = torch._C._is_torch_function_mode_enabled
dispatch_modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]


def runs_eagerly(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call of these tensors may go past torch's operators."""
    return (
        not is_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and not (
            function_mode() or dispatch_modes() or transforms() is not None or forward_ad._current_level >= 0
        )
    )


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Refuses a derivative in forward mode, which would come out as zeros.

    Raises:
        ProblemError: A tensor has a tangent.
    """
    if not _derives_forward():
        return
    if any(one is not None and forward_ad.unpack_dual(one).tangent is not None for one in tensors):
        raise ProblemError(
            "flashtune.attention has no derivatives in forward mode: go back through it, or let "
            "torch.nn.functional.scaled_dot_product_attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) serve"
        )


def _derives_forward() -> bool:
    """Whether tensors may have tangents, with torch.func or without."""
    return forward_ad._current_level >= 0
