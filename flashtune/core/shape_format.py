"""A problem as the text of `--shape`, so that users can copy the commands in warnings and advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtune.core.problem import Bias, Causal, KvScale

if TYPE_CHECKING:
    from flashtune.core.problem import Problem

CAUSAL_WORDS = {Causal.NONE: "", Causal.BOTTOM_RIGHT: "causal", Causal.TOP_LEFT: "causal=top_left"}


def shape_text(problem: Problem) -> str:
    """Returns the shape of a problem: `heads=8,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,batch=1`."""
    lengths = (
        f"seqlen={problem.seqlen_q}"
        if problem.seqlen_q == problem.seqlen_kv
        else f"seqlen_q={problem.seqlen_q},seqlen_kv={problem.seqlen_kv}"
    )
    widths = f"head_dim={problem.head_dim}"
    if problem.value_head_dim != problem.head_dim:
        widths += f",value_head_dim={problem.value_head_dim}"
    words = (
        f"heads={problem.heads}",
        f"kv_heads={problem.kv_heads}",
        lengths,
        widths,
        f"dtype={problem.dtype}",
        CAUSAL_WORDS[problem.causal],
        f"batch={problem.batch}",
        "backward" if problem.is_backward else "",
        *_feature_texts(problem),
    )
    return ",".join(word for word in words if word)


def _feature_texts(problem: Problem) -> tuple[str, ...]:
    """Returns the features of a problem except the causal mask, each as a key or an empty text."""
    return (
        _window_text(problem),
        f"first_tokens={problem.first_tokens}" if problem.first_tokens else "",
        f"chunk={problem.chunk}" if problem.chunk else "",
        "prefix" if problem.prefix else "",
        "softcap" if problem.softcap else "",
        "alibi" if problem.alibi else "",
        f"bias={problem.bias}" if problem.bias is not Bias.NONE else "",
        "sinks" if problem.sinks else "",
        f"packed={problem.packed}" if problem.packed else "",
        "lengths" if problem.lengths else "",
        f"page_size={problem.page_size}" if problem.page_size else "",
        f"kv_dtype={problem.kv_dtype}" if problem.kv_dtype else "",
        f"kv_scale={problem.kv_scale}" if problem.kv_dtype and problem.kv_scale is not KvScale.TENSOR else "",
        "latent" if problem.latent else "",
        "dropout" if problem.dropout else "",
        "deterministic" if problem.deterministic else "",
    )


def _window_text(problem: Problem) -> str:
    left, right = problem.window_left, problem.window_right
    if left is None and right is None:
        return ""
    before = "" if left is None else str(left)
    return f"window={before}" if right is None else f"window={before}:{right}"
