"""What a problem costs whoever computes it: floating-point operations, and bytes of HBM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flashtune.features import Feature
from flashtune.visibility import distinct_keys

if TYPE_CHECKING:
    from flashtune.problem import Problem

# Bytes of an element of the log-sum-exp.
LSE_BYTES = 4
# Scores and weights are float32 until the weights meet the values.
SCORE_BYTES = 4


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


def keys_read(problem: Problem) -> int:
    """Returns the keys of one KV head of all sequences that at least one query sees.

    Lengths that a tensor holds are taken to be those of a tuned shape on average: one sequence is the
    longest, and the others have three quarters of its keys. Packed sequences count as in `flops`.
    """
    keys = distinct_keys(problem.sight)
    if problem.packed:
        return problem.batch * keys * problem.packed // max(1, problem.batch * problem.seqlen_q)
    if problem.batch and problem.features & {Feature.LENGTHS, Feature.PAGES}:
        usual = msgspec.structs.replace(problem, seqlen_kv=problem.seqlen_kv * 3 // 4)
        return keys + (problem.batch - 1) * distinct_keys(usual.sight)
    return problem.batch * keys


def minimal_bytes(problem: Problem) -> int:
    """HBM bytes when each input is read once and each output written once."""
    inputs, outputs = _tensor_bytes(problem)
    if not problem.is_backward:
        return inputs + outputs
    # Each has a gradient: that of the output is read, the others are written.
    return 2 * (inputs + outputs) + _rows(problem) * LSE_BYTES


def written_bytes(problem: Problem) -> int:
    """Returns the bytes of the outputs, or of the gradients of the inputs in the backward pass."""
    inputs, outputs = _tensor_bytes(problem)
    return inputs if problem.is_backward else outputs


def _rows(problem: Problem) -> int:
    """Rows of queries of all heads."""
    return (problem.packed or problem.batch * problem.seqlen_q) * problem.heads


def _tensor_bytes(problem: Problem) -> tuple[int, int]:
    """Bytes of queries, keys and values, and of outputs."""
    rows = _rows(problem)
    width = problem.head_dim + (0 if problem.latent else problem.value_head_dim)
    queries = rows * problem.head_dim * problem.dtype.itemsize
    keys = problem.kv_heads * keys_read(problem) * width * problem.kv_itemsize
    return queries + keys, rows * problem.value_head_dim * problem.out_dtype.itemsize


def score_bytes(problem: Problem) -> int:
    """Bytes of all scores of a problem; `standard_attention` holds two and a half times as many at once."""
    return problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv * SCORE_BYTES
