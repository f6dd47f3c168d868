"""Problems for `flashtune bench` that are small enough for the CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.problem import Bias, BlockLists, Causal, KvDtype, KvScale, Problem
from flashtune.request.call import Call, dense_call, varlen_call
from flashtune.request.read_call import read_call
from flashtune.request.side_inputs import side_views
from flashtune.runtime.unfused import unfused_attention

CPU = torch.device("cpu")


BLOCKS = {"block_mask": 64, "seqlen_q": 300, "seqlen_kv": 300}
PACKED = {"packed": 110, "seqlen_q": 70, "seqlen_kv": 70}
PAGES = {"page_size": 16}
DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window_left": 20},
    "two-sided window": {"window_left": 20, "window_right": 5, "causal": Causal.NONE},
    "window and first tokens": {"window_left": 8, "sink_tokens": 4},
    "chunks": {"chunk": 32},
    "full chunks": {"chunk": 32, "causal": Causal.NONE},
    "prefix": {"prefix": True},
    "prefix and window": {"prefix": True, "window_left": 9},
    "block mask": BLOCKS,
    "shared block mask": {**BLOCKS, "block_lists": BlockLists.GROUP},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True, "causal": Causal.NONE},
    "additive bias": {"bias": Bias.ADDITIVE},
    "additive bias from the top": {"bias": Bias.ADDITIVE, "causal": Causal.TOP_LEFT},
    "boolean mask": {"bias": Bias.BOOLEAN},
    "boolean mask of all keys": {"bias": Bias.BOOLEAN, "causal": Causal.NONE},
    "boolean mask and alibi": {"bias": Bias.BOOLEAN, "alibi": True},
    "sinks": {"sinks": True},
    "sinks, window and softcap": {"sinks": True, "window_left": 16, "softcap": True},
    "lengths": {"kv_lengths": True},
    "lengths from the top": {"kv_lengths": True, "causal": Causal.TOP_LEFT},
}
VARLEN: dict[str, dict[str, Any]] = {
    "packed": PACKED,
    "packed from the top": {**PACKED, "causal": Causal.TOP_LEFT, "seqlen_kv": 90},
    "packed with features": {**PACKED, "alibi": True, "sinks": True, "window_left": 20},
}
CACHES: dict[str, dict[str, Any]] = {
    "pages": PAGES,
    "packed pages": {**PAGES, **PACKED},
    "e4m3 pages": {**PAGES, "kv_dtype": KvDtype.E4M3},
    "pages with scales of heads": {**PAGES, "kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD},
    "packed pages with scales": {**PAGES, **PACKED, "kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE},
    "e4m3 cache": {"kv_lengths": True, "kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.HEAD},
    "latent pages": {**PAGES, "mla": True, "kv_heads": 1, "head_dim": 32, "value_head_dim": 16},
}
FEATURES = DENSE | VARLEN | CACHES
a_problem = functools.partial(
    testing.problem, "heads=4,kv_heads=2,seqlen_q=70,seqlen_kv=90,head_dim=16,dtype=bf16,causal,batch=2"
)


def by_unfused(make: Callable[..., Call]) -> Callable[..., Tensor]:
    """Returns an entry point that computes on the CPU, with gradients."""

    def attend(*inputs: Tensor, **options: Any) -> Tensor:
        call = make(*inputs, **options)
        request = read_call(call)
        views = request.views(call.q, call.k, call.v)
        side = side_views(request.problem, call.side, views[1].shape[0])
        return request.layout.as_given(
            unfused_attention(request.problem, *views, side, scale=request.default_scale)[0]
        )

    return attend


class FakeFlashAttention4:
    """The interface of flash-attn-4 over unfused attention, in its own layout."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
        assert all(tensor.is_contiguous() for tensor in (q, k, v))
        assert not ("window_size" in options and options["causal"])
        left, right = options.get("window_size", (None, 0 if options["causal"] else None))
        call = dict[str, Any](
            causal="bottom_right" if right == 0 else "none",
            window=(left, None if right == 0 else right),
            softcap=options.get("softcap"),
            sinks=options.get("learnable_sink"),
        )
        if not self.problem.packed:
            return by_unfused(dense_call)(q, k, v, layout="bshd", **call), None
        starts = options["cu_seqlens_q"], options["cu_seqlens_k"]
        longest = options["max_seqlen_q"], options["max_seqlen_k"]
        return by_unfused(varlen_call)(q, k, v, *starts, *longest, **call), None

    flash_attn_func = flash_attn_varlen_func = attend
