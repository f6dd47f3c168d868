"""The operators of SDPA's cuDNN and efficient backends, as calls of flashtune.

Tensors are [batch, heads, seqlen, head_dim]. Outputs and gradients have the strides that torch's meta kernels
state: those of the cuDNN backend are as the inputs', and those of the efficient one [batch, seqlen, heads,
head_dim] in memory. The log-sum-exp is natural, and float32 [batch, heads, seqlen_q, 1] of the cuDNN backend.
That of the efficient one is padded with infinity to a multiple of 32 queries.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import POINTER_ALIGNMENT
from flashtune.integrations.operator_overrides import Inputs, Reading, is_marked, random_states
from flashtune.request.call import Call, Options
from flashtune.request.gradients import Gradients
from flashtune.request.request import Result

CUDNN = "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
# Names of the backends in records.
USUAL = {CUDNN: "sdpa-cudnn", EFFICIENT: "sdpa-efficient"}
# The efficient backend pads the log-sum-exp to a multiple of this number of queries.
PADDED_QUERIES = 32
# Orders of the dimensions of [batch, heads, seqlen, head_dim] in memory, without the last one.
HEADS_FIRST, HEADS_LAST = (0, 1, 2), (0, 2, 1)
# The options of all calls, by the alignment of the causal mask and whether the heads are last in memory.
OPTIONS = {
    (causal, heads_last): Options(causal, "bshd" if heads_last else "bhsd")
    for causal in ("none", "bottom_right", "top_left")
    for heads_last in (False, True)
}


class DenseForward:
    """The forward operator of a backend.

    Its arguments are query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, and
    return_debug_mask of the cuDNN backend. Defaults at the end may be missing.
    """

    flags = 0
    has_options = False
    is_packed = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._usual = USUAL[name]

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call, or None with dropout, a debug mask or a bias that requires grad."""
        q, k, v, bias, needs_grad = args[:5]
        dropout, causal, debug = args[5:] + (0.0, False, False)[len(args) - 5 :]
        if dropout or debug or (bias is not None and bias.requires_grad and torch.is_grad_enabled()):
            return None
        return _reading(self._usual, (q, k, v), bias, causal, needs_grad, options.get("scale"))

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, other: Tensor | None, known: Options) -> Inputs | None:
        """Returns the inputs of a call with known options, or None if it must be read."""
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
        side = NO_EXTRA_INPUTS
        if other is not None:
            if other.requires_grad:
                return None
            addresses |= other.data_ptr()
            side = ExtraInputs(bias=other)
        if addresses % POINTER_ALIGNMENT:
            return None
        return q.transpose(1, 2) if known.layout == "bshd" else q, k, v, side

    def results(self, result: Result, args: tuple[Any, ...], options: Options) -> tuple[Any, ...]:
        """Returns all results of the operator."""
        q, k = args[:2]
        out, lse = result if isinstance(result, tuple) else (result, None)
        out = _heads_first(out, options)
        states = random_states(q, torch.int64)
        if self.name == CUDNN:
            lse = None if lse is None else lse.unsqueeze(-1)
            return out, lse, None, None, q.shape[2], k.shape[2], *states, None
        if lse is None:
            lse = q.new_empty((*q.shape[:2], 0), dtype=torch.float32)
        elif missing := -q.shape[2] % PADDED_QUERIES:
            lse = pad(lse, (0, missing), value=torch.inf)
        return out, lse, *states


class DenseBackward:
    """The backward operator of a backend.

    The arguments of the cuDNN backend's are grad_out, query, key, value, out, logsumexp, philox_seed,
    philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p and is_causal. Those of the
    efficient one's are grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset,
    dropout_p, grad_input_mask and is_causal.
    """

    def __init__(self, name: str) -> None:
        self.name = f"{name}_backward"
        self._usual = USUAL[name]
        self._is_cudnn = name == CUDNN

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call, or None unless flashtune served its forward pass, which had no dropout."""
        state, dropout = (args[6], args[13]) if self._is_cudnn else (args[7], args[9])
        if args[0] is None or dropout or not is_marked(state):
            return None
        if self._is_cudnn:
            bias, causal = args[8], args[14]
        else:
            bias, causal = args[4], len(args) > 11 and args[11]
            if args[10][3]:
                return None  # the gradient of a bias is padded
        return _reading(self._usual, args[1:4], bias, causal, True, options.get("scale"))

    def saved(self, args: tuple[Any, ...], reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, the log-sum-exp and the gradient of the output, in the call's layout."""
        dout = args[0]
        out, lse = args[4:6] if self._is_cudnn else args[5:7]
        lse = lse.squeeze(-1) if self._is_cudnn else lse[..., : dout.shape[2]]
        options = reading.call.options
        return _in_layout(out, options), lse.contiguous(), _in_layout(dout, options)

    def results(self, gradients: Gradients, reading: Reading) -> tuple[Tensor | None, ...]:
        """Returns the gradients of query, key and value. The efficient backend has one of the bias too."""
        returned = _heads_first(gradients.dq, reading.call.options), gradients.dk, gradients.dv
        return returned if self._is_cudnn else (*returned, None)


def _reading(
    usual: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    causal: bool,
    needs_grad: bool,
    scale: float | None,
) -> Reading | None:
    """Returns the call, or None if the outputs or gradients would not have the operator's strides."""
    q, k, v = tensors
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % POINTER_ALIGNMENT:
        return None
    heads_last = is_dense(q, HEADS_LAST)
    if not (heads_last or is_dense(q, HEADS_FIRST)):
        return None
    if usual == USUAL[EFFICIENT]:
        if needs_grad and not (heads_last and is_dense(k, HEADS_LAST) and is_dense(v, HEADS_LAST)):
            return None
        heads_last = True
    alignment = "none" if not causal else "bottom_right" if q.shape[2] == k.shape[2] else "top_left"
    side = NO_EXTRA_INPUTS if bias is None else ExtraInputs(bias=bias)
    call = Call(q.transpose(1, 2) if heads_last else q, k, v, scale, OPTIONS[alignment, heads_last], side)
    return Reading(call, needs_grad, usual)


def is_dense(tensor: Tensor, order: tuple[int, ...]) -> bool:
    """Whether a tensor's dimensions are in this order in memory, the last one contiguous, none expanded.

    Its rows may be apart, as those of a slice are.
    """
    strides, shape = tensor.stride(), tensor.shape
    if strides[-1] != 1 and shape[-1] > 1:
        return False
    least = shape[-1]
    for dimension in reversed(order):
        if shape[dimension] > 1:
            if strides[dimension] < least:
                return False
            least = strides[dimension] * shape[dimension]
    return True


def _in_layout(tensor: Tensor, options: Options) -> Tensor:
    """Returns a view in the call's layout, or the inverse view, which is the same."""
    return tensor.transpose(1, 2) if options.layout == "bshd" else tensor


_heads_first = _in_layout
