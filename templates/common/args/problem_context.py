"""A problem's values for templates, which all families and `common/masks.jinja` share."""

from typing import Any

from flashtune.core.features.functions import has_full_lists, has_positions
from flashtune.core.problem import Bias, BlockLists, Causal, Dtype, Problem

# Longer windows and chunks hide nothing, and the sum of two of these fits 32 bits.
FARTHEST = 2**30 - 1
# Value for no bound.
UNBOUNDED = -1


def problem_values(problem: Problem, **changes: int) -> dict[str, Any]:
    """Returns the compile-time values of a problem. `changes` replace bounds, from which others follow."""
    bounds = {
        # Visible keys before and after a query's position, or -1.
        "window_left": bound(problem.window_left),
        "window_right": bound(problem.window_right),
        # Keys at the start that are visible despite window and chunk.
        "first_tokens": min(problem.sink_tokens, FARTHEST),
        # Keys of a chunk, or 0.
        "chunk": min(problem.chunk, FARTHEST),
    } | changes
    return bounds | {
        "dtype": problem.dtype,
        "is_fp16": problem.dtype is Dtype.FP16,
        "head_dim": problem.head_dim,
        "value_head_dim": problem.value_head_dim,
        "causal": problem.causal,
        "is_causal": problem.causal is not Causal.NONE,
        # Query i is at key i, instead of the last query at the last key.
        "is_top_left": problem.causal is Causal.TOP_LEFT,
        "has_window_left": bounds["window_left"] != UNBOUNDED,
        "has_window_right": bounds["window_right"] != UNBOUNDED,
        # Queries see only keys of their own chunk.
        "has_chunk": bounds["chunk"] > 0,
        # Each sequence has a prefix that all its queries see.
        "prefix": problem.prefix,
        # Queries and keys of a block of the block mask, or 0. Lists name the visible blocks of keys.
        "block_mask": problem.block_mask,
        "has_block_mask": problem.block_mask > 0,
        # The query heads of one KV head share the lists.
        "block_groups": problem.block_mask > 0 and problem.block_lists is BlockLists.GROUP,
        # Expressions of a score function and a mask function.
        "functions": problem.functions,
        "has_functions": bool(problem.functions),
        "has_score_function": problem.functions.score >= 0,
        "has_mask_function": problem.functions.mask >= 0,
        # The query of a function is its position in the sequence, in place of its index.
        "by_position": has_positions(problem),
        # Lists of the block mask begin with blocks in which the mask function has no effect.
        "has_full_lists": has_full_lists(problem),
        # Scores are in natural units, where sums are rounded as in unfused attention.
        "is_natural": problem.bias is Bias.ADDITIVE or problem.functions.score >= 0,
        "softcap": problem.softcap,
        "alibi": problem.alibi,
        # A bias or mask tensor has an element for each pair of a query and a key.
        "bias": problem.bias,
        "has_bias": problem.bias is Bias.ADDITIVE,
        "has_mask": problem.bias is Bias.BOOLEAN,
        "has_pairs": problem.bias is not Bias.NONE,
        # Each head has a learned sink.
        "sinks": problem.sinks,
        # The batch is varlen.
        "packed": problem.packed > 0,
        # `seqlens_kv` has each sequence's number of keys.
        "lengths": problem.kv_lengths or problem.page_size > 0,
        # Keys of a page, or 0.
        "page_size": problem.page_size,
        "is_paged": problem.page_size > 0,
        "dropout": problem.dropout,
        # A mask has the pairs of a sequence's queries and of its newest keys.
        "tree": problem.tree,
    }


def bound(keys: int | None, farthest: int = FARTHEST) -> int:
    """Returns one side of a window for templates: -1 is no bound."""
    return UNBOUNDED if keys is None else min(keys, farthest)
