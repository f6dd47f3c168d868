"""A problem's features for templates, and their arguments."""

import msgspec

from flashtune.core.kernel import Argument, Specialization
from flashtune.core.problem import Feature, KvScale, Problem
from flashtune.templates.common.args.arguments import forward_arguments, pointer_type
from flashtune.templates.common.args.problem_context import ProblemContext, problem_fields
from flashtune.templates.common.args.side import side_numbers, side_strides, side_tensors

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


class FeatureContext(ProblemContext, frozen=True, kw_only=True):
    """The compile-time values of a problem's features, for `common/masks.jinja`."""

    quantized: bool  # Whether keys and values are stored in 8 bits.
    page_scales: bool  # Whether each head's part of a page has its own scales, stored in the page.
    block_n: int  # Keys of a tile; 0 if unknown.
    names: tuple[Feature, ...]  # Names of all features, for the header of a rendered file.

    @property
    def has_first_tokens(self) -> bool:
        """Whether the first keys are visible despite window and chunk."""
        return self.first_tokens > 0

    @property
    def has_right(self) -> bool:
        """Whether causality or the window hides keys after a query's position."""
        return self.is_causal or self.has_window_right

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
    def has_positions(self) -> bool:
        """Whether the position of a query among the keys matters."""
        return self.is_bounded or self.alibi

    @property
    def is_changed(self) -> bool:
        """Whether changed scores are in units of log2, instead of products of queries and keys."""
        return self.softcap or self.alibi or self.has_bias

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
        **problem_fields(problem),
        quantized=problem.kv_dtype is not None,
        page_scales=problem.kv_dtype is not None and problem.kv_scale is KvScale.PAGE,
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
            msgspec.structs.replace(argument, type=stored) if argument.name in ("k", "v") else argument
            for argument in tensors
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
