"""Run-time arguments for the extra inputs of a problem."""

from __future__ import annotations

from flashtune.core.kernel import Argument, Specialization
from flashtune.core.problem import Bias, Feature, Problem
from flashtune.templates.common.args.arguments import pointer_type

# Strides after those of q, k, v and out, by their extra input.
SIDE_STRIDES = {
    "slopes": ("stride_slopes_b",),
    "bias": ("stride_bias_b", "stride_bias_h", "stride_bias_s"),
    "block_table": ("stride_table",),
    "k_scale": ("stride_k_scale_p", "stride_k_scale_h"),
    "v_scale": ("stride_v_scale_p", "stride_v_scale_h"),
}


def side_tensors(problem: Problem) -> tuple[Argument, ...]:
    """Returns pointers to the side tensors, in the order of `ExtraInputs`."""
    features = problem.features
    paged = Feature.PAGES in features
    bias = "*i1" if problem.bias is Bias.BOOLEAN else pointer_type(problem.dtype)
    given = (
        ("k_scale", "*fp32", Feature.QUANTIZED_KV in features),
        ("v_scale", "*fp32", Feature.QUANTIZED_KV in features),
        ("slopes", "*fp32", Feature.ALIBI in features),
        ("bias", bias, Feature.BIAS in features),
        ("sinks", "*fp32", Feature.SINKS in features),
        ("prefix", "*i32", Feature.PREFIX in features),
        ("cu_seqlens_q", "*i32", Feature.VARLEN in features),
        ("cu_seqlens_kv", "*i32", Feature.VARLEN in features and not paged),
        ("seqlens_kv", "*i32", paged or Feature.SEQLENS_K in features),
        ("block_table", "*i32", paged),
        ("seed", "*i64", Feature.DROPOUT in features),
    )
    return tuple(Argument(name, kind) for name, kind, present in given if present)


def side_numbers(problem: Problem) -> tuple[Argument, ...]:
    """Returns the arguments that are passed by value after the scale."""
    given = (("softcap", problem.softcap), ("dropout", problem.dropout))
    return tuple(Argument(name, "fp32") for name, present in given if present)


def side_strides(problem: Problem, specialization: Specialization) -> tuple[Argument, ...]:
    """Returns strides of the side tensors, in their order, without assumed divisors.

    A bias always has 64-bit strides: it holds a number for each pair.
    """
    narrow = f"i{specialization.index_bits}"
    return tuple(
        Argument(name, "i64" if tensor.name == "bias" else narrow)
        for tensor in side_tensors(problem)
        for name in SIDE_STRIDES.get(tensor.name, ())
    )
