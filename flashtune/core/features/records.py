"""The features of attention, the fields of a problem that describe them, and the extra inputs of a call.

The module imports no torch, so that commands without a GPU start fast.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from flashtune.core.expressions.nodes import MAX_TABLES, NO_FUNCTIONS, Functions
from flashtune.core.features.plain_problem import Extent, PlainProblem

if TYPE_CHECKING:
    from torch import Tensor


class Feature(enum.StrEnum):
    """A part of a problem that not every kernel family computes."""

    WINDOW = "window"
    SOFTCAP = "softcap"
    ALIBI = "alibi"
    BIAS = "bias"
    SINKS = "sinks"
    SINK_TOKENS = "sink_tokens"
    PREFIX = "prefix"
    CHUNK = "chunk"
    BLOCK_MASK = "block_mask"
    TREE = "tree"
    FUNCTIONS = "functions"
    PACKED = "packed"
    KV_LENGTHS = "kv_lengths"
    PAGES = "pages"
    QUANTIZED_KV = "quantized_kv"
    MLA = "mla"
    DROPOUT = "dropout"
    DETERMINISTIC = "deterministic"
    BATCH_INVARIANT = "batch_invariant"


class Bias(enum.StrEnum):
    """The kind of the attention bias of a call.

    none      No bias.
    additive  Numbers in q's type, added to the scaled (and capped) scores.
    boolean   Whether a query sees a key.
    """

    NONE = "none"
    ADDITIVE = "additive"
    BOOLEAN = "boolean"


class BlockLists(enum.StrEnum):
    """The heads that share the lists of a block mask.

    head   Each query head has its own lists.
    group  The query heads of one KV head share lists.
    """

    HEAD = "head"
    GROUP = "group"


class KvDtype(enum.StrEnum):
    """Element types of quantised caches with queries that are not quantised."""

    E4M3 = "e4m3"
    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 1


class KvScale(enum.StrEnum):
    """The granularity of the scales of a quantised cache: per tensor, per head, or per head and page."""

    TENSOR = "tensor"
    HEAD = "head"
    PAGE = "page"


class FeatureFields(PlainProblem, frozen=True, kw_only=True):
    """The fields of a problem. Their order is that of stored problems."""

    # A query at p sees no key before p - window_left; None means unbounded.
    window_left: Extent | None = None
    # A query at p sees no key after p + window_right; None means unbounded.
    window_right: Extent | None = None
    # Keys at the start that stay visible at any distance (Xiao et al., 2023).
    sink_tokens: Extent = 0
    # A query sees only keys of its own chunk of this size; 0 means no chunks (Llama 4).
    chunk: Extent = 0
    prefix: bool = False  # Whether each sequence has a prefix that all its queries see.
    block_mask: Extent = 0  # Queries and keys of a block of the block mask; 0 means no block mask.
    block_lists: BlockLists = BlockLists.HEAD  # The heads that share its lists.
    functions: Functions = NO_FUNCTIONS  # The score function and the mask function of a program.
    softcap: bool = False  # Whether scores s become cap · tanh(s / cap).
    # Whether slope · distance is subtracted from the scores (Press et al., 2022).
    alibi: bool = False
    bias: Bias = Bias.NONE  # The kind of the attention bias.
    sinks: bool = False  # Whether each head has a learned logit without a value (gpt-oss).
    # Number of query tokens of all packed sequences. The lengths above are then those of the longest
    # sequence. 0 means that sequences are not packed.
    packed: Extent = 0
    # Whether a tensor on the device has the number of keys of each sequence, at most `seqlen_kv`.
    kv_lengths: bool = False
    page_size: Extent = 0  # Keys per page of a paged cache; 0 means no pages.
    kv_dtype: KvDtype | None = None  # Element type of keys and values if it is not q's.
    kv_scale: KvScale = KvScale.TENSOR  # Granularity of the scales of a quantised cache.
    # Whether values are the first `value_head_dim` columns of the keys (DeepSeek's MLA).
    mla: bool = False
    # Whether probabilities are dropped at random. Both passes use the same seed.
    dropout: bool = False
    # Whether gradients must be reproducible bit for bit. Without effect on the forward pass.
    deterministic: bool = False
    # Whether a mask has the pairs of a sequence's queries and of its newest keys, as many as queries.
    tree: bool = False
    # Whether the bits of a row must not depend on the batch, nor on the other queries of the call.
    batch_invariant: bool = False


class ExtraInputs(NamedTuple):
    """The inputs of a call besides q, k and v, in the order in which kernels take them. None means absent."""

    # Scale of a quantised q: float32 [batch, heads], positive; None means 1.
    q_scale: Tensor | None = None
    # Likewise of k, [batch, kv_heads]. With a quantised cache and q that is not quantised, k_scale and
    # v_scale are float32 [pages, kv_heads] of any strides. A scale per tensor or head is expanded.
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None  # Likewise of v.
    slopes: Tensor | None = None  # ALiBi slopes, float32 [batch, heads], any stride of batch.
    # Additive bias in q's type, or a bool mask: [batch, heads, seqlen_q, seqlen_kv], last dimension
    # contiguous, others of any stride.
    bias: Tensor | None = None
    sinks: Tensor | None = None  # A learned logit per head without a value: float32 [heads].
    # Number of keys that all queries of a sequence see: int32 [batch].
    prefix: Tensor | None = None
    # Offsets of the queries of each sequence, and their end: int32 [batch + 1].
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None  # Likewise of varlen keys that are not in pages.
    seqlens_kv: Tensor | None = None  # Number of keys of each sequence: int32 [batch].
    # The pages of each sequence, in order: int32 [batch, pages of the longest].
    block_table: Tensor | None = None
    # Number of visible key blocks of each query block: int32 [batch, heads or kv_heads, query blocks].
    block_counts: Tensor | None = None
    # These key blocks in ascending order: int32 [batch, heads or kv_heads, query blocks, blocks of the
    # longest list]. Elements after a list's count are ignored.
    block_indices: Tensor | None = None
    # Number of first blocks of each list in which the mask function hides no key. Like `block_counts`.
    full_counts: Tensor | None = None
    # Captured ints of the functions, then the sizes and the strides of each captured tensor: int32 [n].
    function_ints: Tensor | None = None
    function_floats: Tensor | None = None  # Captured floats of the functions: float32 [n].
    # The captured tensors of the functions, of any strides.
    table_0: Tensor | None = None
    table_1: Tensor | None = None
    table_2: Tensor | None = None
    table_3: Tensor | None = None
    table_4: Tensor | None = None
    table_5: Tensor | None = None
    seed: Tensor | None = None  # The seed of dropout: int64 [1].
    # Whether query i of a sequence of n queries sees key j of its last n keys: bool [batch, seqlen_q,
    # seqlen_q], last dimension contiguous, others of any stride. Shorter sequences use the first n rows and
    # columns.
    tree: Tensor | None = None
    softcap: float | None = None  # Scores s become softcap · tanh(s / softcap).
    dropout: float | None = None  # The fraction of probabilities that are dropped.

    @property
    def scales(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The scales of q, k and v."""
        return self.q_scale, self.k_scale, self.v_scale

    @property
    def presence(self) -> tuple[bool, ...]:
        """Whether each input is present."""
        return tuple(value is not None for value in self)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The present tensors, in order."""
        return tuple(tensor for tensor in self.optional_tensors if tensor is not None)

    @property
    def optional_tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, in the order of `TENSORS`."""
        return self[: len(TENSORS)]  # type: ignore[return-value]

    @property
    def numbers(self) -> tuple[float | None, ...]:
        """The inputs that are passed by value, in the order of `NUMBERS`."""
        return self[len(TENSORS) :]  # type: ignore[return-value]


NO_EXTRA_INPUTS = ExtraInputs()
# The names of the captured tensors of functions.
TABLES = tuple(f"table_{place}" for place in range(MAX_TABLES))
# Inputs that are passed by value, after the scale. They are last in `ExtraInputs`.
NUMBERS = ("softcap", "dropout")
TENSORS = ExtraInputs._fields[: -len(NUMBERS)]
# The fields of features, in the order of stored problems, and their defaults.
FIELDS = FeatureFields.__struct_fields__[len(PlainProblem.__struct_fields__) :]
DEFAULTS: Mapping[str, Any] = dict(
    zip(FIELDS, FeatureFields.__struct_defaults__[-len(FIELDS) :], strict=True)
)
# The types of the values of each field, with NoneType if the field is optional.
TYPES: Mapping[str, tuple[type, ...]] = {
    name: typing.get_args(hint) or (hint,)
    for name, hint in typing.get_type_hints(FeatureFields).items()
    if name in DEFAULTS
}


class FeatureOptions(TypedDict, total=False):
    """The keyword arguments of all entry points that become extra inputs; see `flashtune.attention`."""

    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    prefix_lengths: Tensor | None
