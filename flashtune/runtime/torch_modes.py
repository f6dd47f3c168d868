"""Whether a call may bypass torch's dispatcher: no compiler, mode, transform or tensor subclass."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flashtune.core.errors import ProblemError

# Bound once, because each call uses them.
is_compiling = torch.compiler.is_dynamo_compiling
function_mode = torch._C._is_torch_function_mode_enabled
dispatch_modes = torch._C._len_torch_dispatch_stack
is_tracing: Callable[[], bool] = torch._C._is_tracing
transforms = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]


def runs_eagerly(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call of these tensors may bypass torch's operators."""
    return (
        not is_compiling()
        and type(q) is type(k) is type(v) is Tensor
        and not (
            function_mode() or dispatch_modes() or transforms() is not None or forward_ad._current_level >= 0
        )
    )


def count_flops(formulas: dict[Any, Callable[..., int]]) -> None:
    """Adds formulas of operators to torch's counters, also to active ones, which have a copy.

    A program that counts has imported torch's module. The module would import Triton, so it is not imported.
    """
    flop_counter: Any = sys.modules.get("torch.utils.flop_counter")
    if flop_counter is None:
        return
    flop_counter.flop_registry.update(formulas)
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, flop_counter._FlopCounterMode):
            mode.counter.flop_registry.update(formulas)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raises an error for forward-mode derivatives, which would be zeros."""
    if not _derives_forward():
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise ProblemError(
            "flashtune.attention has no forward-mode derivatives: use reverse mode, or "
            "torch.nn.functional.scaled_dot_product_attention under "
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH)"
        )


def refuse_batches(gradients: tuple[Tensor | None, ...]) -> None:
    """Raises an error for batches of gradients of an eager call's results, which have no address."""
    if any(gradient is not None and _is_batched(gradient) for gradient in gradients):
        raise ProblemError(
            "flashtune.attention's backward pass takes one gradient of the output, not a batch "
            "(is_grads_batched or vectorize): loop over them, or use torch.func.jacrev, or torch.func.vmap "
            "over the function that torch.func.vjp returns"
        ) from None


def _is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is a batched tensor of autograd or of torch.func, which are two kinds."""
    return "Batched" in str(torch._C._dispatch_keys(tensor))


def _derives_forward() -> bool:
    """Whether tensors may have tangents, in or outside of torch.func."""
    return forward_ad._current_level >= 0
