"""The operators of SDPA's cuDNN and efficient backends, as calls of flashtune.

Tensors are [batch, heads, seqlen, head_dim]. Outputs and gradients have the strides that torch's meta kernels
state: those of the cuDNN backend are as the inputs', and those of the efficient one [batch, seqlen, heads,
head_dim] in memory. The log-sum-exp is natural, and float32 [batch, heads, seqlen_q, 1] of the cuDNN backend.
That of the efficient one is padded with infinity to a multiple of 32 queries.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.features.table import NUMBER_INPUTS
from flashtune.core.kernel import POINTER_ALIGNMENT
from flashtune.integrations.operator_overrides import (
    Inputs,
    Reading,
    States,
    dropout_states,
    is_marked,
    random_states,
)
from flashtune.request.call import Call, Options

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.request.request import Result
    from flashtune.runtime.backward_executors import Gradients

CUDNN = "_scaled_dot_product_cudnn_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
# Names of the backends in records.
USUAL = {CUDNN: "sdpa-cudnn", EFFICIENT: "sdpa-efficient"}
# The efficient backend pads the log-sum-exp to a multiple of this number of queries.
PADDED_QUERIES = 32
DROPOUT = NUMBER_INPUTS["dropout"]
# Orders of the dimensions of [batch, heads, seqlen, head_dim] in memory, without the last one.
HEADS_FIRST, HEADS_LAST = (0, 1, 2), (0, 2, 1)
# Hashes of the kinds of calls with dropout that were served. They are never forgotten, because backward
# passes may follow.
_with_dropout: set[int] = set()


class DenseForward:
    """The forward operator of a backend.

    Its arguments are query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, and
    return_debug_mask of the cuDNN backend. Defaults at the end may be missing.

    With `dropout`, calls with dropout are computed too. They drop other weights than torch's operator would.
    """

    flags = 0
    has_options = False

    def __init__(self, name: str, dropout: bool = False) -> None:
        self.name = name
        self._usual = USUAL[name]
        self._dropout = dropout

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call, or None with a debug mask, a bias that requires grad, or unwanted dropout."""
        q, k, v, bias, needs_grad = args[:5]
        dropout, causal, debug = args[5:] + (0.0, False, False)[len(args) - 5 :]
        if debug or (bias is not None and bias.requires_grad and torch.is_grad_enabled()):
            return None
        if not dropout:
            return _reading(self._usual, (q, k, v), bias, causal, needs_grad, options.get("scale"))
        if not (self._dropout and DROPOUT.least <= dropout <= DROPOUT.most):
            return None
        states = dropout_states(q)
        drops = states[0].view(1), dropout
        found = _reading(self._usual, (q, k, v), bias, causal, needs_grad, options.get("scale"), drops)
        return None if found is None else found._replace(states=states)

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

    def results(
        self, result: Result, args: tuple[Any, ...], options: Options, states: States | None = None
    ) -> tuple[Any, ...]:
        """Returns all results of the operator."""
        q, k = args[:2]
        out, lse = result if isinstance(result, tuple) else (result, None)
        out = _heads_first(out, options)
        if states is None:
            states = random_states(q, torch.int64)
        else:
            note_dropout(args[:3], args[5])
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
        self.is_cudnn = name == CUDNN
        self._usual = USUAL[name]

    def read(self, args: tuple[Any, ...], options: dict[str, Any]) -> Reading | None:
        """Returns the call, or None unless flashtune served its forward pass, which had no dropout."""
        state, _, dropout = self.randomness(args)
        if args[0] is None or dropout or not is_marked(state) or self.wants_bias(args):
            return None  # the gradient of a bias is padded
        bias, causal = self.mask(args)
        return _reading(self._usual, args[1:4], bias, causal, True, options.get("scale"))

    def read_dropout(self, args: tuple[Any, ...], options: dict[str, Any], seed: Tensor) -> Reading | None:
        """Returns the call with dropout by a seed, or None if gradients would have other strides."""
        bias, causal = self.mask(args)
        drops = seed, self.randomness(args)[2]
        return _reading(self._usual, args[1:4], bias, causal, True, options.get("scale"), drops)

    def randomness(self, args: tuple[Any, ...]) -> tuple[Tensor | None, Tensor | None, float]:
        """Returns both random states and the probability of dropout."""
        return (*args[6:8], args[13]) if self.is_cudnn else args[7:10]

    def mask(self, args: tuple[Any, ...]) -> tuple[Tensor | None, bool]:
        """Returns the bias, and whether the call is causal."""
        return (args[8], args[14]) if self.is_cudnn else (args[4], len(args) > 11 and args[11])

    def wants_bias(self, args: tuple[Any, ...]) -> bool:
        """Whether the gradient of the bias is wanted."""
        return not self.is_cudnn and bool(args[10][3])

    def saved(self, args: tuple[Any, ...], reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the output, the log-sum-exp and the gradient of the output, in the call's layout."""
        dout = args[0]
        out, lse = args[4:6] if self.is_cudnn else args[5:7]
        lse = lse.squeeze(-1) if self.is_cudnn else lse[..., : dout.shape[2]]
        options = reading.call.options
        return _in_layout(out, options), lse.contiguous(), _in_layout(dout, options)

    def results(self, gradients: Gradients, reading: Reading) -> tuple[Tensor | None, ...]:
        """Returns the gradients of query, key and value. The efficient backend has one of the bias too."""
        found = _heads_first(gradients.dq, reading.call.options), gradients.dk, gradients.dv
        return found if self.is_cudnn else (*found, None)


def note_dropout(tensors: tuple[Tensor, Tensor, Tensor], dropout: float) -> None:
    """Notes for the rest of the process that flashtune served a call with dropout of such tensors."""
    _with_dropout.add(_dropout_kind(tensors, dropout))


def had_dropout(tensors: tuple[Tensor, Tensor, Tensor], dropout: float) -> bool:
    """Whether flashtune may have served a call with dropout of such tensors."""
    return _dropout_kind(tensors, dropout) in _with_dropout


def _dropout_kind(tensors: tuple[Tensor, Tensor, Tensor], dropout: float) -> int:
    q, k, v = tensors
    return hash((q.shape, k.shape, v.shape, q.dtype, dropout))


def _reading(
    usual: str,
    tensors: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    causal: bool,
    needs_grad: bool,
    scale: float | None,
    drops: tuple[Tensor, float] | None = None,
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
    side = NO_EXTRA_INPUTS if bias is None else ExtraInputs(bias=bias)
    if drops is not None:
        # The user chose flashtune's dropout, and records have no times with dropout.
        side = ExtraInputs(bias=bias, seed=drops[0], dropout=drops[1])
    options = _options(alignment_of(causal, q, k), heads_last)
    call = Call(q.transpose(1, 2) if heads_last else q, k, v, scale, options, side)
    return Reading(call, needs_grad, usual if drops is None else None)


def alignment_of(causal: bool, q: Tensor, k: Tensor) -> str:
    """Returns the causal mask and its alignment, a value of `Causal`."""
    return "none" if not causal else "bottom_right" if q.shape[2] == k.shape[2] else "top_left"


@functools.cache
def _options(causal: str, heads_last: bool) -> Options:
    return Options(causal, "bshd" if heads_last else "bhsd")


def is_dense(tensor: Tensor, order: tuple[int, ...]) -> bool:
    """Whether a tensor's dimensions are in this order in memory, the last one contiguous, none expanded.

    Its rows may be apart, as those of a slice are.
    """
    strides, shape = tensor.stride(), tensor.shape
    if strides[-1] != 1 and shape[-1] > 1:
        return False
    least = shape[-1]
    for place in reversed(order):
        if shape[place] > 1:
            if strides[place] < least:
                return False
            least = strides[place] * shape[place]
    return True


def _in_layout(tensor: Tensor, options: Options) -> Tensor:
    """Returns a view in the call's layout, or the inverse view, which is the same."""
    return tensor.transpose(1, 2) if options.layout == "bshd" else tensor


_heads_first = _in_layout
