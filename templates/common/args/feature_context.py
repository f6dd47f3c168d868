"""A problem's features for templates, and their arguments."""

from __future__ import annotations

import msgspec

from flashtune.core.kernel import Argument, Specialization
from flashtune.core.problem import Bias, BlockLists, Causal, Feature, KvScale, Problem
from flashtune.templates.common.args.arguments import forward_arguments, pointer_type
from flashtune.templates.common.args.side import side_numbers, side_strides, side_tensors
from flashtune.templates.family import Context

# Longer windows and chunks hide nothing, and the sum of two of these fits 32 bits.
FARTHEST = 2**30 - 1
# Value for no bound.
UNBOUNDED = -1
COUNT = 5
# The first NVIDIA architecture that converts 8-bit floats with 4 exponent bits.
CONVERTS_E4M3 = 89
# The features that `common/masks.jinja` computes.
FEATURES = frozenset(
    {
        *(Feature.WINDOW, Feature.SINK_TOKENS, Feature.CHUNK, Feature.PREFIX, Feature.SOFTCAP),
        *(Feature.ALIBI, Feature.BIAS, Feature.SINKS, Feature.PACKED, Feature.KV_LENGTHS, Feature.PAGES),
        *(Feature.QUANTIZED_KV, Feature.DROPOUT),
    }
)


class FeatureContext(Context, frozen=True, kw_only=True):
    """The compile-time values of a problem's features, for `common/masks.jinja`.

    Attributes:
        window_left: Visible keys before a query's position, or -1.
        window_right: Visible keys after a query's position, or -1.
        first_tokens: Keys at the start that are visible despite window and chunk.
        chunk: Keys of a chunk, or 0.
        prefix: Whether each sequence has a prefix that all its queries see.
        block_mask: Queries and keys of a block of the block mask, or 0.
        block_groups: Whether the query heads of one KV head share the lists of the block mask.
        softcap: Whether scores have a softcap.
        alibi: Whether ALiBi is subtracted from the scores.
        bias: Kind of bias or mask tensor.
        sinks: Whether each head has a learned sink.
        packed: Whether the batch is varlen.
        lengths: Whether `seqlens_kv` has each sequence's number of keys; always true with pages.
        page_size: Keys of a page, or 0.
        quantized: Whether keys and values are stored in 8 bits.
        page_scales: Whether each head's part of a page has its own scales, stored in the page.
        dropout: Whether there is dropout.
        causal: How queries are aligned with keys, if causal.
        block_n: Keys of a tile; 0 if unknown.
        names: Names of all features, for the header of a rendered file.
    """

    window_left: int
    window_right: int
    first_tokens: int
    chunk: int
    prefix: bool
    block_mask: int
    block_groups: bool
    softcap: bool
    alibi: bool
    bias: Bias
    sinks: bool
    packed: bool
    lengths: bool
    page_size: int
    quantized: bool
    page_scales: bool
    dropout: bool
    causal: Causal
    block_n: int
    names: tuple[Feature, ...]

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
    def has_first_tokens(self) -> bool:
        """Whether the first keys are visible despite window and chunk."""
        return self.first_tokens > 0

    @property
    def has_right(self) -> bool:
        """Whether causality or the window hides keys after a query's position."""
        return self.causal is not Causal.NONE or self.has_window_right

    @property
    def ends_by_row(self) -> bool:
        """Whether the end of the visible keys differs between queries."""
        return self.has_right or self.has_chunk

    @property
    def starts_by_row(self) -> bool:
        """Whether the start of the visible keys differs between queries."""
        return self.has_window_left or self.has_chunk

    @property
    def is_bounded(self) -> bool:
        """Whether the visible keys differ between queries."""
        return self.ends_by_row or self.starts_by_row

    @property
    def lifts(self) -> bool:
        """Whether keys at the start of a sequence are visible before the window or chunk."""
        return self.starts_by_row and (self.has_first_tokens or self.prefix)

    @property
    def lifts_by_row(self) -> bool:
        """Whether the end of these keys differs between queries."""
        return self.lifts and self.has_right and self.has_first_tokens

    @property
    def has_prefix(self) -> bool:
        """Whether a prefix makes keys visible that would be hidden without it."""
        return self.prefix and self.is_bounded

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
    def has_positions(self) -> bool:
        """Whether the position of a query among the keys matters."""
        return self.is_bounded or self.alibi

    @property
    def is_changed(self) -> bool:
        """Whether changed scores are in units of log2, instead of products of queries and keys."""
        return self.softcap or self.alibi or self.has_bias

    @property
    def is_paged(self) -> bool:
        """Whether keys and values are in pages."""
        return self.page_size > 0

    @property
    def one_page(self) -> bool:
        """Whether one page has all keys of a tile, so that its number is one scalar."""
        return self.page_size >= self.block_n

    @property
    def head_scales(self) -> bool:
        """Whether quantised keys and values have one scale for each head of a sequence."""
        return self.quantized and not self.page_scales


def feature_context(problem: Problem, block_n: int = 0) -> FeatureContext:
    """Returns the values of a problem's features for templates, for tiles of `block_n` keys."""
    return FeatureContext(
        window_left=_bound(problem.window_left),
        window_right=_bound(problem.window_right),
        first_tokens=min(problem.sink_tokens, FARTHEST),
        chunk=min(problem.chunk, FARTHEST),
        prefix=problem.prefix,
        block_mask=problem.block_mask,
        block_groups=problem.block_mask > 0 and problem.block_lists is BlockLists.GROUP,
        softcap=problem.softcap,
        alibi=problem.alibi,
        bias=problem.bias,
        sinks=problem.sinks,
        packed=problem.packed > 0,
        lengths=problem.kv_lengths or problem.page_size > 0,
        page_size=problem.page_size,
        quantized=problem.kv_dtype is not None,
        page_scales=problem.kv_dtype is not None and problem.kv_scale is KvScale.PAGE,
        dropout=problem.dropout,
        causal=problem.causal,
        block_n=block_n,
        names=tuple(sorted(problem.features)),
    )


def feature_arguments(
    problem: Problem, specialization: Specialization, workspaces: tuple[str, ...]
) -> tuple[Argument, ...]:
    """Returns the arguments of `forward_arguments`, with those of the problem's features.

    The order is q, k, v, out, lse, side tensors, workspaces, scale, numbers. Then come twelve strides, those
    of side tensors, five counts and, for varlen batches, the number of sequences.
    """
    plain = forward_arguments(problem.dtype, specialization, workspaces)
    tensors, rest = plain[:5], plain[5:]
    if problem.kv_dtype is not None:
        stored = pointer_type(problem.kv_dtype)
        tensors = tuple(
            msgspec.structs.replace(one, type=stored) if one.name in ("k", "v") else one for one in tensors
        )
    split = len(workspaces) + 1
    return (
        *tensors,
        *side_tensors(problem),
        *rest[:split],
        *side_numbers(problem),
        *rest[split:-COUNT],
        *side_strides(problem, specialization),
        *rest[-COUNT:],
        *((Argument("sequences", "i32"),) if problem.packed else ()),
    )


def _bound(keys: int | None) -> int:
    return UNBOUNDED if keys is None else min(keys, FARTHEST)
