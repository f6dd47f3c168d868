"""What a problem costs whoever computes it: floating-point operations, and bytes of HBM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashtune.features import Feature
from flashtune.visibility import distinct_keys

if TYPE_CHECKING:
    from flashtune.problem import Problem

# Bytes of an element of the log-sum-exp.
LSE_BYTES = 4


def product_widths(problem: Problem) -> int:
    """Head dims of all products of a pass over the visible pairs, added up.

    The forward pass has two products, scores and outputs. The backward pass makes scores and the weights'
    gradients again, and multiplies for each of dq, dk and dv.
    """
    if problem.is_backward:
        return 3 * problem.head_dim + 2 * problem.value_head_dim
    return problem.head_dim + problem.value_head_dim


def flops(problem: Problem) -> int:
    """Operations of the products over the visible pairs.

    Packed sequences count as so many of the longest length as there are tokens for.
    """
    pairs = problem.batch * problem.visible_pairs()
    if problem.packed:
        pairs = pairs * problem.packed // max(1, problem.batch * problem.seqlen_q)
    return 2 * problem.heads * pairs * product_widths(problem)


def nominal_flops(problem: Problem) -> int:
    """The field's convention: 4·B·H·Sq·Sk·D, 2.5 times that backward, halved when causal."""
    if problem.features & {Feature.WINDOW, Feature.CHUNK, Feature.PACKED}:
        return flops(problem)
    pairs = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv
    full = 2 * pairs * product_widths(problem)
    return full // 2 if problem.is_causal else full


def minimal_bytes(problem: Problem) -> int:
    """HBM bytes when each input is read once and each output written once."""
    rows = (problem.packed or problem.batch * problem.seqlen_q) * problem.heads
    keys = problem.batch * problem.kv_heads * distinct_keys(problem.sight)
    if problem.packed:
        keys = keys * problem.packed // max(1, problem.batch * problem.seqlen_q)
    width = problem.head_dim + (0 if problem.latent else problem.value_head_dim)
    queries = rows * problem.head_dim * problem.dtype.itemsize
    outputs = rows * problem.value_head_dim * problem.out_dtype.itemsize
    moved = queries + keys * width * problem.kv_itemsize + outputs
    if not problem.is_backward:
        return moved
    # Each has a gradient: that of the output is read, the others are written.
    return 2 * moved + rows * LSE_BYTES
