"""The cache of executors for calls with masks, packed sequences, pages or a quantized cache.

It is the cache of `flashtune.runtime.call_cache`, with side inputs in the keys. Each number of packed tokens
is another kind of call. These kinds share the selected kernel and its binary, which are slow to make
(`flashtune.runtime.prepare`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashtune.core.arguments import MAX_FLOAT32
from flashtune.core.canonical import rounded_up
from flashtune.dispatch.pair_decision import side_gradients
from flashtune.request.feature_request import read_call
from flashtune.request.quantization import with_positive_scale
from flashtune.request.request import Executor, Result, requires_grad
from flashtune.runtime.call_cache import gradient_key, known_executor, prepared

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.request.options import Call
    from flashtune.request.request import Request


def key_of_call(call: Call) -> tuple[object, ...]:
    """Returns the cache key of a call: its options and its tensors' properties, except values and addresses.

    Of the lengths of packed sequences, the key contains only the longest, rounded up to a power of two. An
    invalid call may raise the errors that `flashtune.core.arguments.checked` handles.
    """
    q, k, v, _, options, side = call
    if options.max_seqlen_q or options.max_seqlen_k:
        options = options._replace(
            max_seqlen_q=rounded_up(options.max_seqlen_q), max_seqlen_k=rounded_up(options.max_seqlen_k)
        )
    if side.dropout is not None:
        # Seeds of all calls have the same properties, and plans are made before there is a seed.
        side = side._replace(seed=None)
    extra = tuple(None if tensor is None else _kind(tensor) for tensor in side.optional_tensors)
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15 == 0,
        q.dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        options,
        *extra,
        side.bias is None or side.bias.data_ptr() & 15 == 0,
        side.softcap is None,
        side.dropout is None,
        torch.is_grad_enabled()
        and requires_grad(q, k, v, side)
        and (gradient_key(options.deterministic), side_gradients(side)),
    )


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def run_call(call: Call) -> Result:
    """Returns attention of tensors with memory, by the executor of their kind of call.

    Raises:
        ProblemError: The call is invalid, or no backend supports it.
        KernelError: The call is new, and a CUDA graph is being captured or no kernel can be loaded.
        VerificationError: The call is new, `prefer` is "generated" and the kernels are wrong on this GPU.
    """
    call = unsigned(call)
    key = key_of_call(call)
    executor = known_executor(key)
    if executor is None:
        executor = executor_of_call(key, call)
    result: Result = executor(call.q, call.k, call.v, call.scale, call.side)
    return result


def unsigned(call: Call) -> Call:
    """Returns a call with a scale that is not negative. A negative scale is replaced by negated queries.

    Raises:
        ProblemError: The scale is not a finite number.
    """
    scale = call.scale
    if scale is None or (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32):
        return call
    q, scale = with_positive_scale(call.q, scale)
    return call._replace(q=q, scale=scale)


def executor_of_call(key: tuple[object, ...], call: Call) -> Executor:
    """Returns the executor of a kind of call. It is prepared if the cache does not contain it.

    Raises:
        ProblemError: The call is invalid, or no backend supports it.
        KernelError: A CUDA graph is being captured, or `prefer` is "generated" and no kernel loads.
        VerificationError: `prefer` is "generated" and the kernels are wrong on this GPU.
    """

    def read() -> Request:
        return read_call(call, requires_grad(call.q, call.k, call.v, call.side))

    return prepared(key, call.q, call.k, call.v, call.side, read)
