"""The operators of torch's FlashAttention, dense, packed and paged, as calls of flashtune.

SDPA's flash backend and `torch.nn.attention.varlen` call them. Tensors are [batch, seqlen, heads, head_dim],
or [tokens, heads, head_dim] of packed sequences, or pages [pages, page_size, heads, head_dim] of keys. The
causal mask is aligned bottom-right. The log-sum-exp is natural and float32, [batch, heads, seqlen_q] or
[heads, tokens]. Outputs and gradients have the strides of the inputs, or are dense in the same order.

Since torch 2.14, `varlen` prefers the operators of cuDNN on Hopper. They have the same tensors. The dense
operators of `sdpa_operators` call them too. Those calls are passed on at once.
"""

from typing import Any

import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import POINTER_ALIGNMENT
from flashtune.integrations.operator_overrides import Reading, is_marked, random_states
from flashtune.integrations.sdpa_operators import is_dense
from flashtune.request.call import Call, Options
from flashtune.request.gradients import Gradients
from flashtune.request.request import Result

# The backend's name in records, which have no times of packed and paged sequences.
USUAL = "sdpa-flash"
# Options of the forward operators. Other ones are not known here, so calls with them are passed on.
OPTIONS = frozenset(
    {"scale", "window_size_left", "window_size_right", "seqused_k", "block_table", "num_splits"}
)
CUDNN_FORWARD = "_cudnn_attention_forward"
CUDNN_OPTIONS = frozenset({"scale", "seqused_k", "block_table"})


def has_known_results(name: str) -> bool:
    """Whether an operator's log-sum-exp has the shape that this module knows.

    In versions of torch whose `varlen` does not call cuDNN's operators, they had [tokens, heads, 1].
    """
    if name not in (CUDNN_FORWARD, CudnnForwardInto.name, CudnnBackward.name):
        return True
    forward = getattr(torch.ops.aten, CUDNN_FORWARD, None)
    return forward is not None and any(
        argument.name == "block_table" for argument in forward.default._schema.arguments
    )


class ReadCalls:
    """Forward operators of which each call is read, because packed sequences differ in each."""

    flags = 2
    has_options = True
    is_packed = False

    def inputs(self, *_: object) -> None:
        """Returns nothing."""


class FlashForward(ReadCalls):
    """`_flash_attention_forward`.

    Its arguments are query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal and
    return_debug_mask.
    """

    name = "_flash_attention_forward"
    flags = 1

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call, or None with dropout, a debug mask or options that change results otherwise."""
        q, k, v, starts_q, starts_k, max_q, max_k, dropout, causal, debug = args
        if dropout or debug or not OPTIONS.issuperset(options):
            return None
        if options.get("num_splits") == 1:
            return None  # results must have the same bits in any batch
        # Of packed sequences the backward operator is not known to follow, and is chosen by itself.
        needs_grad = starts_q is None and "seqused_k" not in options and torch.is_grad_enabled()
        return _reading((q, k, v), (starts_q, starts_k, max_q, max_k), causal, options, needs_grad)

    def results(self, result: Result, args: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
        """Returns all results of the operator."""
        out, lse = result
        out = _in_layout(out, options.layout)
        return out, lse, *random_states(args[0], torch.uint64, 2), args[0].new_empty(0)


class FlashForwardInto(ReadCalls):
    """`_flash_attention_forward_no_dropout_inplace`, which has the output as its first argument."""

    name = "_flash_attention_forward_no_dropout_inplace"

    def __init__(self) -> None:
        self._forward = FlashForward()

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call as `FlashForward`."""
        return self._forward.read(args[1:], options)

    def results(self, result: Result, args: tuple[Any, ...], options: Options) -> Tensor:
        """Writes the output and returns the log-sum-exp."""
        out, lse = result
        args[0].copy_(_in_layout(out, options.layout))
        return lse


class FlashBackward:
    """`_flash_attention_backward`.

    Its arguments are grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, rng_state and unused.
    """

    name = "_flash_attention_backward"

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call, or None unless flashtune served the forward pass.

        `varlen_attn` does not keep the random state. A backward pass of packed sequences is therefore served
        after any forward pass without dropout. The log-sum-exp is the same.
        """
        starts_q, dropout, causal, state = args[6], *args[10:13]
        if dropout or not OPTIONS.issuperset(options) or (starts_q is None and not is_marked(state)):
            return None
        return _reading(args[1:4], args[6:10], causal, options, True)

    def saved(self, args: tuple[Any, ...], reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, the log-sum-exp and the gradient of the output, in the call's layout."""
        layout = reading.call.options.layout
        return _in_layout(args[4], layout), args[5].contiguous(), _in_layout(args[0], layout)

    def results(self, gradients: Gradients, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients of query, key and value."""
        return _in_layout(gradients.dq, reading.call.options.layout), gradients.dk, gradients.dv


class CudnnForward(ReadCalls):
    """`_cudnn_attention_forward` of packed and paged sequences.

    Its arguments are query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, compute_log_sumexp,
    dropout_p, is_causal and return_debug_mask. Defaults at the end may be missing.
    """

    name = CUDNN_FORWARD
    is_packed = True

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call, or None with a bias, dropout, a debug mask or another alignment."""
        dropout, causal, debug = args[9:] + (0.0, False, False)[len(args) - 9 :]
        if args[3] is not None or dropout or debug:
            return None
        return _cudnn_reading(args[:3], args[4:8], causal, options)

    def results(self, result: Result, args: tuple[Any, ...], _: Options) -> tuple[Any, ...]:
        """Returns all results of the operator."""
        out, lse = result
        return (
            out,
            lse if args[8] else None,
            None,
            None,
            *args[6:8],
            *random_states(args[0], torch.int64),
            None,
        )


class CudnnForwardInto(ReadCalls):
    """`_cudnn_attention_forward_no_dropout_inplace`.

    Its arguments are out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k and is_causal.
    """

    name = "_cudnn_attention_forward_no_dropout_inplace"
    is_packed = True

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call as `CudnnForward`."""
        return _cudnn_reading(args[1:4], args[4:8], len(args) > 8 and args[8], options)

    def results(self, result: Result, args: tuple[Any, ...], _: Options) -> Tensor:
        """Writes the output and returns the log-sum-exp."""
        out, lse = result
        args[0].copy_(out)
        return lse


class CudnnBackward(FlashBackward):
    """`_cudnn_attention_backward` of packed sequences.

    Its arguments are grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias,
    cum_seq_q, cum_seq_k, max_q, max_k, dropout_p and is_causal.
    """

    name = "_cudnn_attention_backward"

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call after any forward pass without dropout, as `FlashBackward`; None if dense."""
        if args[8] is not None or args[9] is None or args[13]:
            return None
        return _cudnn_reading(args[1:4], args[9:13], args[14], options, needs_grad=True)


def _cudnn_reading(
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: tuple[Tensor, Tensor | None, int, int],
    causal: bool,
    options: dict[str, Any],
    needs_grad: bool = False,
) -> Reading | None:
    """Returns the call of an operator of cuDNN, or None if flashtune does not compute it.

    Its causal mask is aligned bottom-right with lengths, and else top-left. Both are equal if the starts are.
    """
    if not CUDNN_OPTIONS.issuperset(options):
        return None
    starts_q, starts_k = starts[:2]
    if causal and "seqused_k" not in options and (starts_k is None or _memory(starts_q) != _memory(starts_k)):
        return None
    return _reading(tensors, starts, causal, options, needs_grad)


def _memory(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _reading(
    tensors: tuple[Tensor, Tensor, Tensor],
    starts: tuple[Tensor | None, Tensor | None, int, int],
    causal: bool,
    options: dict[str, Any],
    needs_grad: bool,
) -> Reading | None:
    """Returns the call of an operator, or None if flashtune does not compute it."""
    q, k, v = tensors
    starts_q, starts_k, max_q, max_k = starts
    lengths, table = options.get("seqused_k"), options.get("block_table")
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % POINTER_ALIGNMENT:
        return None
    left, right = (_bound(options.get(f"window_size_{side}")) for side in ("left", "right"))
    mask: dict[str, Any] = {
        "causal": "bottom_right" if causal else "none",
        "window_left": left,
        "window_right": None if causal else right,
        # The log-sum-exp of a call with gradients is returned in any case, and has no gradient.
        "return_lse": not needs_grad,
    }
    if starts_q is None:
        side = NO_EXTRA_INPUTS if lengths is None else ExtraInputs(seqlens_kv=lengths)
        layout = _layout(q)
        if table is not None or not layout:
            return None  # without a layout the output would have other strides
        baseline = USUAL
        call_options = Options(layout=layout, kv_layout="bshd", **mask)
        q = _in_layout(q, layout)
    else:
        if not is_dense(q, (0, 1)):
            return None  # the output would have other strides
        baseline = None
        if table is not None and lengths is not None:
            side = ExtraInputs(cu_seqlens_q=starts_q, seqlens_kv=lengths, block_table=table)
            call_options = Options(layout="thd", kv_layout="bshd", max_seqlen_q=max_q, **mask)
        elif table is None and lengths is None and starts_k is not None:
            side = ExtraInputs(cu_seqlens_q=starts_q, cu_seqlens_kv=starts_k)
            call_options = Options(
                layout="thd", kv_layout="thd", max_seqlen_q=max_q, max_seqlen_k=max_k, **mask
            )
        else:
            return None
    return Reading(Call(q, k, v, options.get("scale"), call_options, side), needs_grad, baseline)


def _bound(size: int | None) -> int | None:
    """Returns a window's bound. Negative sizes mean none."""
    return None if size is None or size < 0 else size


def _layout(tensor: Tensor) -> str:
    """Returns the order of a tensor's dimensions in memory; empty if it is neither "bshd" nor "bhsd"."""
    return "bshd" if is_dense(tensor, (0, 1, 2)) else "bhsd" if is_dense(tensor, (0, 2, 1)) else ""


def _in_layout(tensor: Tensor, layout: str) -> Tensor:
    """Returns a view of a dense tensor in a layout, or the inverse view, which is the same."""
    return tensor.transpose(1, 2) if layout == "bhsd" else tensor
