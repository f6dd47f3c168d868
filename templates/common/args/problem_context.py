"""A problem's values for templates, which all native families and `common/masks.jinja` share."""

from typing import Any

from flashtune.core.problem import Bias, BlockLists, Causal, Dtype, Problem
from flashtune.templates.family import Context

# Longer windows and chunks hide nothing, and the sum of two of these fits 32 bits.
FARTHEST = 2**30 - 1
# Value for no bound.
UNBOUNDED = -1


class ProblemContext(Context, frozen=True, kw_only=True):
    """The compile-time values of a problem."""

    dtype: Dtype
    head_dim: int
    value_head_dim: int
    causal: Causal  # How queries are aligned with keys, if causal.
    window_left: int  # Visible keys before a query's position, or -1.
    window_right: int  # Visible keys after a query's position, or -1.
    first_tokens: int  # Keys at the start that are visible despite window and chunk.
    chunk: int  # Keys of a chunk, or 0.
    prefix: bool  # Whether each sequence has a prefix that all its queries see.
    block_mask: int  # Queries and keys of a block of the block mask, or 0.
    block_groups: bool  # Whether the query heads of one KV head share the lists of the block mask.
    softcap: bool  # Whether scores have a softcap.
    alibi: bool  # Whether ALiBi is subtracted from the scores.
    bias: Bias  # Kind of bias or mask tensor.
    sinks: bool  # Whether each head has a learned sink.
    packed: bool  # Whether the batch is varlen.
    lengths: bool  # Whether `seqlens_kv` has each sequence's number of keys.
    page_size: int  # Keys of a page, or 0.
    dropout: bool  # Whether there is dropout.

    @property
    def is_causal(self) -> bool:
        """Whether attention is causal."""
        return self.causal is not Causal.NONE

    @property
    def is_top_left(self) -> bool:
        """Whether query i is at key i, instead of the last query at the last key."""
        return self.causal is Causal.TOP_LEFT

    @property
    def is_fp16(self) -> bool:
        """Whether queries are in fp16."""
        return self.dtype is Dtype.FP16

    @property
    def has_window_left(self) -> bool:
        """Whether there is a bound on visible keys before a query's position."""
        return self.window_left != UNBOUNDED

    @property
    def has_window_right(self) -> bool:
        """Whether there is a bound on visible keys after a query's position."""
        return self.window_right != UNBOUNDED

    @property
    def has_chunk(self) -> bool:
        """Whether queries see only keys of their own chunk."""
        return self.chunk > 0

    @property
    def has_block_mask(self) -> bool:
        """Whether lists name the visible blocks of keys."""
        return self.block_mask > 0

    @property
    def has_bias(self) -> bool:
        """Whether there is an additive bias."""
        return self.bias is Bias.ADDITIVE

    @property
    def has_mask(self) -> bool:
        """Whether there is a mask tensor."""
        return self.bias is Bias.BOOLEAN

    @property
    def has_pairs(self) -> bool:
        """Whether a bias or mask tensor has an element for each pair of a query and a key."""
        return self.bias is not Bias.NONE

    @property
    def is_paged(self) -> bool:
        """Whether keys and values are in pages."""
        return self.page_size > 0


def problem_fields(problem: Problem) -> dict[str, Any]:
    """Returns the fields of a `ProblemContext`, by name."""
    return {
        "dtype": problem.dtype,
        "head_dim": problem.head_dim,
        "value_head_dim": problem.value_head_dim,
        "causal": problem.causal,
        "window_left": bound(problem.window_left),
        "window_right": bound(problem.window_right),
        "first_tokens": min(problem.sink_tokens, FARTHEST),
        "chunk": min(problem.chunk, FARTHEST),
        "prefix": problem.prefix,
        "block_mask": problem.block_mask,
        "block_groups": problem.block_mask > 0 and problem.block_lists is BlockLists.GROUP,
        "softcap": problem.softcap,
        "alibi": problem.alibi,
        "bias": problem.bias,
        "sinks": problem.sinks,
        "packed": problem.packed > 0,
        "lengths": problem.kv_lengths or problem.page_size > 0,
        "page_size": problem.page_size,
        "dropout": problem.dropout,
    }


def bound(keys: int | None, farthest: int = FARTHEST) -> int:
    """Returns one side of a window for templates: -1 is no bound."""
    return UNBOUNDED if keys is None else min(keys, farthest)
