"""Calls by the executors of a session: one dictionary look-up for each call of a known kind."""

from torch import Tensor

from flashtune.core.arguments import MAX_FLOAT32
from flashtune.core.caches import keep
from flashtune.request.autocast import any_autocast, autocast_dtype
from flashtune.request.call import Call
from flashtune.request.request import Executor, Result
from flashtune.runtime.call_key import call_key, short_key, tensor_key, unsigned
from flashtune.runtime.executors import write_output
from flashtune.runtime.session import SESSION
from flashtune.runtime.torch_modes import runs_eagerly

# Bound once, because each call uses them.
executors, repeated = SESSION.executors, SESSION.repeated


def known_executor(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: object,
    scale: float | None,
    layout: object,
    return_lse: object,
    prefer: object,
    deterministic: object,
) -> Executor | None:
    """Returns the executor of an eager call without features if the cache has it.

    Most calls of a program need no more than this. The arguments are not checked, but invalid ones are never
    found. A scale that is negative or not a float is not found either.
    """
    if scale is not None and not (type(scale) is float and 0.0 <= scale <= MAX_FLOAT32):
        return None
    # 1 and 0 are equal to the flags in keys.
    if type(return_lse) is not bool or type(deterministic) is not bool or not runs_eagerly(q, k, v):
        return None
    if q.is_neg() or k.is_neg() or v.is_neg():
        return None
    causal = "bottom_right" if causal is True else "none" if causal is False else causal
    try:
        if any_autocast():
            dtype = autocast_dtype(q.device)
            if dtype is not None and not (q.dtype is k.dtype is v.dtype is dtype):
                return None
        return executors.get(tensor_key(q, k, v, (causal, layout, return_lse, prefer), deterministic))
    except (RuntimeError, TypeError):
        # A tensor has no strides, or an option is not hashable.
        return None


def run_call(call: Call) -> Result:
    """Returns attention of tensors with memory, by the executor of their kind of call."""
    key = short_key(call)
    known = None if key is None else repeated.get(key)
    if known is not None:
        result: Result = known(call.q, call.k, call.v, call.scale, call.side)
        return result
    call = unsigned(call)
    executor = SESSION.executor(call)
    # Another thread may have forgotten it.
    with SESSION.preparing:
        if key is not None and executors.get(call_key(call)) is executor:
            keep(repeated, key, executor)
    return executor(call.q, call.k, call.v, call.scale, call.side)


def write_call(out: Tensor, call: Call) -> None:
    """Writes the output of a call without a log-sum-exp to a tensor, which overlaps no input.

    Raises the errors of `run_call`.
    """
    call = unsigned(call)
    write_output(SESSION.executor(call), out, call.q, call.k, call.v, call.scale, call.side)
