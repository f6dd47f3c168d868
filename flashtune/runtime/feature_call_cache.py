"""The memo of servers for calls with masks, packed sequences, pages or a quantised cache.

As `flashtune.runtime.call_cache`, whose memo this is, with the side inputs in the keys. Of packed sequences
every number of tokens is another kind of call; they share what is slow to make, the choice and the binary
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
from flashtune.runtime.call_cache import asked_gradients, known_server, prepared

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.request.options import Call
    from flashtune.request.request import Request


def key_of_call(call: Call) -> tuple[object, ...]:
    """All that a server depends on: of the tensors everything but their values and addresses.

    Of the lengths of packed sequences the longest counts, and of it only the next power of two.
    An invalid call may raise the errors that `flashtune.core.arguments.checked` handles.
    """
    q, k, v, _, options, side = call
    if options.max_seqlen_q or options.max_seqlen_k:
        options = options._replace(
            max_seqlen_q=rounded_up(options.max_seqlen_q), max_seqlen_k=rounded_up(options.max_seqlen_k)
        )
    if side.dropout is not None:
        # Where it lies is the same for all calls, and plans are made before there is one.
        side = side._replace(seed=None)
    beside = tuple(None if tensor is None else _kind(tensor) for tensor in side.optional_tensors)
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
        *beside,
        side.bias is None or side.bias.data_ptr() & 15 == 0,
        side.softcap is None,
        side.dropout is None,
        torch.is_grad_enabled()
        and requires_grad(q, k, v, side)
        and (asked_gradients(options.deterministic), side_gradients(side)),
    )


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def serve_call(call: Call) -> Result:
    """Attention of real tensors, by the server of their kind of call.

    Raises:
        ProblemError: The call is invalid, or nobody can serve it.
        KernelError: It is new, and a CUDA graph is being captured or no kernel can be loaded.
        VerificationError: It is new, only generated kernels may serve and they are wrong here.
    """
    call = unsigned(call)
    key = key_of_call(call)
    server = known_server(key)
    if server is None:
        server = server_of_call(key, call)
    result: Result = server(call.q, call.k, call.v, call.scale, call.side)
    return result


def unsigned(call: Call) -> Call:
    """Returns a call with a scale that is not negative: its queries have turned signs instead.

    Raises:
        ProblemError: The scale is no finite number.
    """
    scale = call.scale
    if scale is None or (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32):
        return call
    q, scale = with_positive_scale(call.q, scale)
    return call._replace(q=q, scale=scale)


def server_of_call(key: tuple[object, ...], call: Call) -> Executor:
    """The server of a kind of call, prepared now if this process has none.

    Raises:
        ProblemError: The call is invalid, or nobody can serve it.
        KernelError: A CUDA graph is being captured, or only generated kernels may serve and none loads.
        VerificationError: Only generated kernels may serve and they are wrong on this GPU.
    """

    def read() -> Request:
        return read_call(call, requires_grad(call.q, call.k, call.v, call.side))

    return prepared(key, call.q, call.k, call.v, call.side, read)
