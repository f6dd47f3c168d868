"""The autograd function of a call, whose backward pass runs a kernel too.

Eager calls use the function directly. Compilers, dispatch modes and torch.func's transforms see operators,
whose autograd kernels use the same function (`flashtune.runtime.backward_ops`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.core.features.records import NO_EXTRA_INPUTS, TABLES, ExtraInputs
from flashtune.core.kernel import POINTER_ALIGNMENT
from flashtune.request.gradients import BackwardInputs
from flashtune.runtime.torch_modes import refuse_batches

if TYPE_CHECKING:
    from torch.autograd import Function

    from flashtune.core.layouts import Layout
    from flashtune.request.gradients import BackwardExecutor, Gradients
    from flashtune.request.request import Executor, Result
else:
    # The base of `torch.autograd.Function` without the check that rejects torch.func's transforms. An
    # operator's autograd kernel handles one level of transforms at a time.
    from torch.autograd.function import _SingleLevelFunction as Function

TWICE = (
    "flashtune.attention was differentiated twice and its kernels compute first derivatives alone: pass "
    "float64 tensors, or let torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) serve"
)


# As `BackwardExecutor`, with the gradients of extra inputs. Without such inputs, only the first three are
# used.
ServeAll = Callable[[BackwardInputs], tuple[Tensor | None, ...]]
# Bound once, because each call uses them. torch has no public function for the hooks of saved tensors.
is_grad_enabled = torch.is_grad_enabled
saving_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Pair(NamedTuple):
    """Both passes of one kind of call."""

    forward: Executor  # Returns the output and the log-sum-exp.
    backward: ServeAll  # Returns the gradients of all inputs.
    return_lse: bool  # Whether the call returns the log-sum-exp too.
    # Whether the backward pass is an operator with its own autograd kernel.
    is_traced: bool = False


def differentiable(pair: Pair) -> Executor:
    """Returns a differentiable executor."""
    # Bound once, because each call uses it.
    apply: Callable[..., Result] = Attend.apply

    def run(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, side: ExtraInputs = NO_EXTRA_INPUTS
    ) -> Result:
        if side is NO_EXTRA_INPUTS:
            return apply(pair, scale, side, q, k, v)
        tables = () if side.table_0 is None else [getattr(side, name) for name in TABLES]
        return apply(pair, scale, side, q, k, v, side.sinks, side.bias, side.slopes, *tables)

    return run


def with_side(backward: BackwardExecutor, layout: Layout, wanted: tuple[str, ...]) -> BackwardExecutor:
    """Returns a backward pass with all gradients. Those of side inputs have the shapes of these inputs.

    `layout` is the order of the output's dimensions. `wanted` are the names of the side inputs that require
    grad.
    """

    def run(inputs: BackwardInputs) -> Gradients:
        gradients, side = backward(inputs), inputs.side
        if side is NO_EXTRA_INPUTS:
            return gradients
        has_trained_bias = "bias" in wanted and side.bias is not None and side.bias.is_floating_point()
        # Without queries or keys, nothing writes it.
        assert (
            not has_trained_bias or gradients.dbias is not None or not (inputs.q.numel() and inputs.k.numel())
        )
        changes: dict[str, Any] = {
            f"d{name}": gradient.sum_to_size(getattr(side, name).shape) if name in wanted else None
            for name, gradient in (("bias", gradients.dbias), ("slopes", gradients.dslopes))
            if gradient is not None
        }
        if side.sinks is not None and "sinks" in wanted:
            if gradients.dsinks is None:
                changes["dsinks"] = sink_gradient(layout, side.sinks, inputs)
            else:
                changes["dsinks"] = gradients.dsinks.sum(0)
        elif gradients.dsinks is not None:
            changes["dsinks"] = None
        return gradients._replace(**changes)

    return run


class Attend(Function):
    """Attention as one node of autograd's graph.

    The GPU may be idle during these methods, so they do little for a call without extra inputs. Autograd runs
    the backward pass in another thread, whose CPU caches are cold.
    """

    @staticmethod
    def forward(
        ctx: Any,
        pair: Pair,
        scale: float | None,
        side: ExtraInputs,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *tracked: Tensor | None,
    ) -> Result:
        """Runs the forward pass and saves the tensors. `tracked` are extra inputs that may require grad."""
        del tracked  # arguments only so that autograd tracks them
        out, lse = pair.forward(q, k, v, scale, side)
        if side is NO_EXTRA_INPUTS:
            saved: tuple[Tensor | None, ...] = q, k, v, out, lse
            ctx.call = pair, scale, None
        else:
            saved = q, k, v, out, lse, *side.optional_tensors
            ctx.call = pair, scale, side.numbers
        ctx.save_for_backward(*saved)
        ctx.forms = None if saving_hooks(True) is None or pair.is_traced else tuple(map(Form.of, saved))
        return (out, lse) if pair.return_lse else out

    @staticmethod
    def backward(ctx: Any, *results: Tensor) -> tuple[Tensor | None, ...]:
        """Runs the backward pass for gradients of the results. Batches of gradients raise ProblemError."""
        pair, scale, numbers = ctx.call
        # Gradients of negated views have their sign in a flag.
        results = tuple(result.resolve_neg() for result in results)
        dlse = results[1] if pair.return_lse else None
        saved = ctx.saved_tensors
        if ctx.forms is not None:
            saved = tuple(map(restored, saved, ctx.forms))
        try:
            if is_grad_enabled() and not pair.is_traced:
                gradients = only_once(_gradients, *ctx.call, results[0], dlse, *saved)
            elif numbers is None:
                gradients = pair.backward(
                    BackwardInputs._make((*saved, results[0], dlse, scale, NO_EXTRA_INPUTS))
                )
            else:
                gradients = _gradients(*ctx.call, results[0], dlse, *saved)
        except RuntimeError:
            refuse_batches(results)
            raise
        return None, None, None, *gradients


class Form(NamedTuple):
    """Properties of a saved tensor, which hooks may change."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_aligned: bool

    @classmethod
    def of(cls, tensor: Tensor | None) -> Form | None:
        """Returns the properties of a tensor."""
        if tensor is None:
            return None
        is_aligned = tensor.data_ptr() % POINTER_ALIGNMENT == 0
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, is_aligned)


def restored(tensor: Tensor | None, form: Form | None) -> Tensor | None:
    """Returns a saved tensor, which a hook may have replaced, with its earlier type and device.

    It has its earlier strides or is contiguous. Kernels are bound to either.
    """
    if tensor is None or form is None:
        return tensor
    if tensor.shape != form.shape:
        raise ProblemError(
            f"a hook of saved tensors returned shape {list(tensor.shape)} for a tensor of shape "
            f"{list(form.shape)}: return the tensor that was saved, or a copy"
        )
    tensor = tensor.to(form.device, form.dtype).resolve_neg()
    if tensor.stride() != form.strides:
        tensor = tensor.contiguous()
    if form.is_aligned and tensor.data_ptr() % POINTER_ALIGNMENT:
        tensor = tensor.clone()
    return tensor


def only_once(
    compute: Callable[..., tuple[Tensor | None, ...]], *arguments: object
) -> tuple[Tensor | None, ...]:
    """Returns the result of a function of the other arguments. Differentiating it raises ProblemError."""
    gradients: tuple[Tensor | None, ...] = FirstDerivative.apply(compute, *arguments)  # type: ignore[no-untyped-call]
    return gradients


class FirstDerivative(Function):
    """A backward pass with `create_graph`: differentiating it again raises an error."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
        """Returns the gradients as a function of the other arguments."""
        del ctx
        return tuple(compute(*arguments))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Raises an error, because kernels compute first derivatives only."""
        del ctx, gradients
        raise ProblemError(TWICE)


def _gradients(
    pair: Pair,
    scale: float | None,
    numbers: tuple[float | None, ...] | None,
    dout: Tensor,
    dlse: Tensor | None,
    *saved: Any,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients, as a function of tensors and numbers alone."""
    if numbers is None:
        return pair.backward(BackwardInputs._make((*saved, dout, dlse, scale, NO_EXTRA_INPUTS)))
    side = ExtraInputs(*saved[5:], *numbers)
    return pair.backward(BackwardInputs._make((*saved[:5], dout, dlse, scale, side)))


def sink_gradient(layout: Layout, sinks: Tensor, inputs: BackwardInputs) -> Tensor:
    """Returns the gradient of the sinks, float32 [heads]. A sink reduces all weights and has no value.

    `layout` is the order of the output's dimensions. `sinks` are float32 [heads]. The log-sum-exp of `inputs`
    is float32.
    """
    lse, starts = inputs.lse, inputs.side.cu_seqlens_q
    dout, out = layout.heads_first(inputs.dout).float(), layout.heads_first(inputs.out).float()
    delta = (dout * out).sum(-1).reshape(lse.shape)
    if inputs.dlse is not None:
        delta = delta - inputs.dlse
    # In a row without visible keys, sink and log-sum-exp may both be -inf: the gradient is 0.
    taken = torch.exp(sinks.view(-1, 1) - lse).masked_fill(lse == -torch.inf, 0.0) * delta
    if starts is not None:
        # Rows outside of all sequences were not written.
        rows = torch.arange(lse.shape[-1], device=lse.device)
        taken = taken.masked_fill((rows < starts[0]) | (rows >= starts[-1]), 0.0)
    return -taken.sum(-1).view(-1, sinks.numel()).sum(0)


def leaves_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors without their autograd history, so that a backward pass ends at them."""
    fresh = {id(tensor): tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors}
    return tuple(fresh[id(tensor)] for tensor in tensors)


def go_back(result: Result, inputs: tuple[Tensor, ...]) -> None:
    """Runs the backward pass once, if there is one, and discards the gradients."""
    results = (result,) if isinstance(result, Tensor) else result
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if wanted and all(tensor.requires_grad for tensor in results):
        torch.autograd.grad(
            results, wanted, [torch.ones_like(tensor) for tensor in results], allow_unused=True
        )
