"""The features of attention, the fields of a problem that describe them, and the extra inputs of a call.

The module imports no torch, so that commands without a GPU start fast.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

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
    PACKED = "packed"
    KV_LENGTHS = "kv_lengths"
    PAGES = "pages"
    QUANTIZED_KV = "quantized_kv"
    MLA = "mla"
    DROPOUT = "dropout"
    DETERMINISTIC = "deterministic"


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
    """The fields of a problem. Their order is that of stored problems.

    Attributes:
        window_left: A query at p sees no key before p - window_left; None means unbounded.
        window_right: A query at p sees no key after p + window_right; None means unbounded.
        sink_tokens: Keys at the start that stay visible at any distance (Xiao et al., 2023).
        chunk: A query sees only keys of its own chunk of this size; 0 means no chunks (Llama 4).
        prefix: Whether each sequence has a prefix that all its queries see.
        block_mask: Queries and keys of a block of the block mask; 0 means no block mask.
        block_lists: The heads that share its lists.
        softcap: Whether scores s become cap · tanh(s / cap).
        alibi: Whether slope · distance is subtracted from the scores (Press et al., 2022).
        bias: The kind of the attention bias.
        sinks: Whether each head has a learned logit without a value (gpt-oss).
        packed: Number of query tokens of all packed sequences. The lengths above are then those of the
            longest sequence. 0 means that sequences are not packed.
        kv_lengths: Whether a tensor on the device has the number of keys of each sequence, at most
            `seqlen_kv`.
        page_size: Keys per page of a paged cache; 0 means no pages.
        kv_dtype: Element type of keys and values if it is not q's.
        kv_scale: Granularity of the scales of a quantised cache.
        mla: Whether values are the first `value_head_dim` columns of the keys (DeepSeek's MLA).
        dropout: Whether probabilities are dropped at random. Both passes use the same seed.
        deterministic: Whether gradients must be reproducible bit for bit. Without effect on the forward pass.
    """

    window_left: Extent | None = None
    window_right: Extent | None = None
    sink_tokens: Extent = 0
    chunk: Extent = 0
    prefix: bool = False
    block_mask: Extent = 0
    block_lists: BlockLists = BlockLists.HEAD
    softcap: bool = False
    alibi: bool = False
    bias: Bias = Bias.NONE
    sinks: bool = False
    packed: Extent = 0
    kv_lengths: bool = False
    page_size: Extent = 0
    kv_dtype: KvDtype | None = None
    kv_scale: KvScale = KvScale.TENSOR
    mla: bool = False
    dropout: bool = False
    deterministic: bool = False


class ExtraInputs(NamedTuple):
    """The inputs of a call besides q, k and v, in the order in which kernels take them. None means absent.

    Attributes:
        q_scale: Scale of a quantised q: float32 [batch, heads], positive; None means 1.
        k_scale: Likewise of k, [batch, kv_heads]. With a quantised cache and q that is not quantised, k_scale
            and v_scale are float32 [pages, kv_heads] of any strides. A scale per tensor or head is expanded.
        v_scale: Likewise of v.
        slopes: ALiBi slopes, float32 [batch, heads], any stride of batch.
        bias: Additive bias in q's type, or a bool mask: [batch, heads, seqlen_q, seqlen_kv], last dimension
            contiguous, others of any stride.
        sinks: A learned logit per head without a value: float32 [heads].
        prefix: Number of keys that all queries of a sequence see: int32 [batch].
        cu_seqlens_q: Offsets of the queries of each sequence, and their end: int32 [batch + 1].
        cu_seqlens_kv: Likewise of varlen keys that are not in pages.
        seqlens_kv: Number of keys of each sequence: int32 [batch].
        block_table: The pages of each sequence, in order: int32 [batch, pages of the longest].
        block_counts: Number of visible key blocks of each query block: int32 [batch, heads or kv_heads,
            query blocks].
        block_indices: These key blocks in ascending order: int32 [batch, heads or kv_heads, query blocks,
            blocks of the longest list]. Elements after a list's count are ignored.
        seed: The seed of dropout: int64 [1].
        softcap: Scores s become softcap · tanh(s / softcap).
        dropout: The fraction of probabilities that are dropped.
    """

    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    prefix: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_kv: Tensor | None = None
    seqlens_kv: Tensor | None = None
    block_table: Tensor | None = None
    block_counts: Tensor | None = None
    block_indices: Tensor | None = None
    seed: Tensor | None = None
    softcap: float | None = None
    dropout: float | None = None

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
