"""The call of flashtune that computes a problem, as a program writes it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

import flashtune
from flashtune.api.explain import Explanation
from flashtune.core.block_mask import BlockMask
from flashtune.core.errors import UsageError
from flashtune.core.problem import Bias, Feature, KvScale, Problem
from flashtune.core.record import Selection
from flashtune.tuner.bench.peer_runs import Contestant
from flashtune.tuner.bench.results import OURS
from flashtune.tuner.execution.inputs import Tensors


class ProgramCall(NamedTuple):
    """A call of one of flashtune's entry points."""

    attend: Callable[..., Any]  # `flashtune.attention`, `attention_varlen` or `attention_paged`.
    plan: Callable[..., Callable[..., Any]]  # The function that prepares such a call.
    explain: Callable[..., Explanation]  # The function that returns its kernel.
    inputs: tuple[Tensor | None, ...]  # The positional tensors, in the layout of the entry point.
    # Tensors that are passed by name, also to a prepared call.
    named: Mapping[str, Tensor | BlockMask | None]
    options: Mapping[str, Any]  # All other options.
    # Brings the output to [batch, heads, seqlen_q, value_head_dim], or to [1, heads, total_q, value_head_dim]
    # for packed sequences.
    heads_first: Callable[[Tensor], Tensor]


def require_call(problem: Problem) -> None:
    """Checks that one call of flashtune computes the problem with the same result in every run."""
    features = problem.features
    if Feature.DROPOUT in features:
        reason = "implementations drop other probabilities, so that their outputs cannot be compared"
    elif Feature.FUNCTIONS in features:
        reason = "its score and mask functions are those of a program: time flashtune.flex_attention there"
    elif problem.mla and not problem.page_size:
        reason = "latent keys are read from pages: add page_size=64"
    elif problem.packed and problem.kv_lengths and not problem.page_size:
        reason = "packed sequences have their lengths in offsets: leave kv_lengths out"
    elif (problem.packed or problem.page_size) and features & {Feature.BIAS, Feature.BLOCK_MASK}:
        reason = "calls of packed sequences and pages take no bias and no block mask"
    elif problem.tree and not problem.page_size:
        reason = "calls take tree masks with pages: add page_size=16"
    elif problem.dtype.is_quantized and features:
        reason = f"calls with features take no queries in {problem.dtype}"
    elif problem.kv_dtype and problem.kv_scale is KvScale.PAGE and not problem.page_size:
        reason = "there are scales of pages without pages: add page_size=64"
    else:
        return
    raise UsageError(f"bench cannot time {problem.key}: {reason}")


def program_call(problem: Problem, tensors: Tensors) -> ProgramCall:
    """Returns the call that computes a problem on these tensors by a generated kernel, even if it is slower.

    `require_call` accepts the problem. Its direction is ignored.
    """
    side = tensors.side
    named = {
        "alibi_slopes": side.slopes,
        "sinks": side.sinks,
        "prefix_lengths": side.prefix,
        "k_scale": _shared(problem, side.k_scale),
        "v_scale": _shared(problem, side.v_scale),
    }
    options: dict[str, Any] = {"causal": problem.causal.value, "prefer": "generated"}
    if problem.window_left is not None or problem.window_right is not None:
        options["window"] = problem.window_left, problem.window_right
    if problem.sink_tokens:
        options["sink_tokens"] = problem.sink_tokens
    if problem.chunk:
        options["chunk"] = problem.chunk
    if side.softcap is not None:
        options["softcap"] = side.softcap
    if problem.deterministic:
        options["deterministic"] = True
    if problem.batch_invariant:
        options["batch_invariant"] = True
    if problem.page_size:
        call = _paged(problem, tensors)
    elif problem.packed:
        call = _packed(problem, tensors)
    else:
        call = _dense(problem, tensors)
    present = {name: value for name, value in {**named, **call.named}.items() if value is not None}
    return call._replace(named=present, options={**options, **call.options})


def _shared(problem: Problem, scale: Tensor | None) -> Tensor | None:
    """Returns the scale of a cache as programs pass it: one number, one for each head, or all."""
    if scale is None or problem.kv_dtype is None or problem.kv_scale is KvScale.PAGE:
        return scale
    return scale[0] if problem.kv_scale is KvScale.HEAD else scale[0, :1]


def _dense(problem: Problem, tensors: Tensors) -> ProgramCall:
    side = tensors.side
    named: dict[str, Tensor | BlockMask | None] = {"q_scale": side.q_scale, "kv_lengths": side.seqlens_kv}
    if side.bias is not None:
        named["attn_mask" if problem.bias is Bias.BOOLEAN else "attn_bias"] = side.bias
    if side.block_counts is not None and side.block_indices is not None:
        named["block_mask"] = BlockMask(side.block_counts, side.block_indices, problem.block_mask)
    inputs = tensors.q, tensors.k, tensors.v
    entries = flashtune.attention, flashtune.plan, flashtune.explain
    return ProgramCall(*entries, inputs, named, {}, lambda out: out)


def _packed(problem: Problem, tensors: Tensors) -> ProgramCall:
    side = tensors.side
    inputs = (*map(_tokens, (tensors.q, tensors.k, tensors.v)), side.cu_seqlens_q, side.cu_seqlens_kv)
    longest = {"max_seqlen_q": problem.seqlen_q, "max_seqlen_k": problem.seqlen_kv}
    entries = flashtune.attention_varlen, flashtune.plan_varlen, flashtune.explain_varlen
    return ProgramCall(*entries, inputs, {}, longest, _one_batch)


def _paged(problem: Problem, tensors: Tensors) -> ProgramCall:
    side = tensors.side
    k, v = (pages.transpose(1, 2) for pages in (tensors.k, tensors.v))
    named: dict[str, Tensor | BlockMask | None] = {"cu_seqlens_q": side.cu_seqlens_q, "tree_mask": side.tree}
    options = {"value_head_dim": problem.value_head_dim} if problem.mla else {}
    q, heads_first = tensors.q.transpose(1, 2), _swapped
    if problem.packed:
        q, heads_first = _tokens(tensors.q), _one_batch
        options["max_seqlen_q"] = problem.seqlen_q
    inputs = q, k, None if problem.mla else v, side.block_table, side.seqlens_kv
    entries = flashtune.attention_paged, flashtune.plan_paged, flashtune.explain_paged
    return ProgramCall(*entries, inputs, named, options, heads_first)


def _tokens(packed: Tensor) -> Tensor:
    """Returns [tokens, heads, width] of [1, heads, tokens, width]."""
    # The gradient of an index would be copied into zeros.
    return packed.squeeze(0).transpose(0, 1)


def _one_batch(out: Tensor) -> Tensor:
    """Returns [1, heads, tokens, width] of [tokens, heads, width]."""
    return out.transpose(0, 1)[None]


def _swapped(out: Tensor) -> Tensor:
    return out.transpose(1, 2)


def selected(call: ProgramCall) -> tuple[str, str]:
    """Returns the family and a description of the kernel that dispatch selects, never a baseline."""
    explanation = call.explain(*call.inputs, **call.named, **call.options)
    assert explanation.selection is not None
    return described(explanation.selection)


def described(selection: Selection) -> tuple[str, str]:
    """Returns the family and a description of a selected kernel."""
    record = selection.record
    label = record.config.label() if record.config else ""
    return record.family, f"{record.family} {label} ({selection.source})"


def bind_program(call: ProgramCall, detail: str) -> Contestant:
    """Binds flashtune. The replayed run is a prepared call, the host time that of a usual call."""
    planned = call.plan(*call.inputs, **call.named, **call.options)

    def run() -> Tensor:
        return call.heads_first(planned(*call.inputs, **call.named))

    attend = functools.partial(call.attend, *call.inputs, **call.named, **call.options)
    return Contestant(OURS, detail, run, attend)
