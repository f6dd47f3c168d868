"""Whether torch may be gone past: no compiler traces, no mode watches, no tensor is of another kind."""

from __future__ import annotations

import torch
from torch import Tensor

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
        and not (function_mode() or dispatch_modes() or transforms() is not None)
    )
