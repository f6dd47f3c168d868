"""`Problem`: the computation to perform, its optional features, and its cost in FLOPs and bytes."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from flashtune.core.errors import ProblemError
from flashtune.core.mask_geometry import MaskInfo, distinct_keys, visible_pairs

PAGE_SIZES = (16, 32, 64, 128, 256)


class Feature(enum.StrEnum):
    """A part of a problem that not every kernel family computes."""

    WINDOW = "window"
    SOFTCAP = "softcap"
    ALIBI = "alibi"
    BIAS = "bias"
    SINKS = "sinks"
    SINK_TOKENS = "sink_tokens"
    PREFIX = "prefix"
    ATTENTION_CHUNK = "attention_chunk"
    VARLEN = "varlen"
    SEQLENS_K = "seqlens_k"
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


class KvDtype(enum.StrEnum):
    """Element types of quantised caches with queries that are not quantised."""

    E4M3 = "e4m3"
    INT8 = "int8"


class KvScale(enum.StrEnum):
    """The granularity of the scales of a quantised cache: per tensor, per head, or per head and page."""

    TENSOR = "tensor"
    HEAD = "head"
    PAGE = "page"


def feature_words(problem: Problem) -> str:
    """Returns the features of a problem as the end of its key, empty without features."""
    left, right = ("" if side is None else side for side in (problem.window_left, problem.window_right))
    words = (
        (Feature.WINDOW, f"window{left}:{right}"),
        (Feature.SINK_TOKENS, f"first{problem.sink_tokens}"),
        (Feature.ATTENTION_CHUNK, f"chunk{problem.attention_chunk}"),
        (Feature.PREFIX, "prefix"),
        (Feature.SOFTCAP, "softcap"),
        (Feature.ALIBI, "alibi"),
        (Feature.BIAS, f"bias-{problem.bias}"),
        (Feature.SINKS, "sinks"),
        (Feature.VARLEN, f"packed{problem.total_q}"),
        (Feature.SEQLENS_K, "lengths"),
        (Feature.PAGES, f"page{problem.page_size}"),
        (Feature.QUANTIZED_KV, f"kv-{problem.kv_dtype}-{problem.kv_scale}"),
        (Feature.MLA, "latent"),
        (Feature.DROPOUT, "dropout"),
        (Feature.DETERMINISTIC, "deterministic"),
    )
    has = problem.features
    return "".join(f"_{text}" for feature, text in words if feature in has)


MAX_HEAD_DIM = 256
Extent = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
HeadDim = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Direction(enum.StrEnum):
    """The pass: forward computes the output, backward the gradients of the inputs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Dtype(enum.StrEnum):
    """The element type of queries, keys and values. Outputs have it too, except for `e4m3`.

    `e4m3` is an 8-bit float of 4 exponent and 3 mantissa bits (torch's `float8_e4m3fn`), for quantised
    tensors with a scale for each head.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    E4M3 = "e4m3"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {Dtype.E4M3: 1, Dtype.FP32: 4}.get(self, 2)

    @property
    def is_quantized(self) -> bool:
        """Whether tensors of this type come with scales."""
        return self is Dtype.E4M3

    @property
    def out(self) -> Dtype:
        """The element type of the output. 8 bits are not precise enough for it."""
        return Dtype.BF16 if self.is_quantized else self


class Causal(enum.StrEnum):
    """The causal mask and its alignment.

    Top-left: query i sees keys 0..i, as with SDPA's `is_causal`. Bottom-right: query i sees keys
    0..i + seqlen_kv - seqlen_q, as in flash_attn, so that the last query sees every key.
    """

    NONE = "none"
    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"


# Defaults are omitted from stored problems, so that older stored problems still load with the same hash. The
# mask and the direction were always stored.
class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One attention computation.

    The position p of a query among the keys is its index plus `diagonal`.

    Attributes:
        dtype: Element type of q, k and v. The output has `out_dtype`.
        head_dim: Width of queries and keys.
        value_head_dim: Width of values and outputs.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        batch: Number of sequences.
        seqlen_q: Queries per sequence.
        seqlen_kv: Keys per sequence.
        causal: The causal mask and its alignment.
        direction: Forward or backward pass.
        window_left: A query at p sees no key before p - window_left; None means unbounded.
        window_right: A query at p sees no key after p + window_right; None means unbounded.
        sink_tokens: Keys at the start that stay visible at any distance (Xiao et al., 2023).
        attention_chunk: A query sees only keys of its own chunk of this size; 0 means no chunks (Llama 4).
        prefix: Whether each sequence has a prefix that all its queries see.
        softcap: Whether scores s become cap · tanh(s / cap).
        alibi: Whether slope · distance is subtracted from the scores (Press et al., 2022).
        bias: The kind of the attention bias.
        sinks: Whether each head has a learned logit without a value (gpt-oss).
        total_q: Number of query tokens in a varlen batch. The lengths above are then those of the longest
            sequence. 0 means no varlen batch.
        seqlens_k: Whether a tensor on the device has the number of keys of each sequence, at most
            `seqlen_kv`.
        page_size: Keys per page of a paged cache; 0 means no pages.
        kv_dtype: Element type of keys and values if it is not q's.
        kv_scale: Granularity of the scales of a quantised cache.
        mla: Whether values are the first `value_head_dim` columns of the keys (DeepSeek's MLA).
        dropout: Whether probabilities are dropped at random. Both passes use the same seed.
        deterministic: Whether gradients must be reproducible bit for bit. Without effect on the forward pass.
    """

    dtype: Dtype
    head_dim: HeadDim
    value_head_dim: HeadDim
    heads: Count
    kv_heads: Count
    batch: Extent
    seqlen_q: Extent
    seqlen_kv: Extent
    causal: Causal = msgspec.field(default_factory=lambda: Causal.NONE)
    direction: Direction = msgspec.field(default_factory=lambda: Direction.FORWARD)
    window_left: Extent | None = None
    window_right: Extent | None = None
    sink_tokens: Extent = 0
    attention_chunk: Extent = 0
    prefix: bool = False
    softcap: bool = False
    alibi: bool = False
    bias: Bias = Bias.NONE
    sinks: bool = False
    total_q: Extent = 0
    seqlens_k: bool = False
    page_size: Extent = 0
    kv_dtype: KvDtype | None = None
    kv_scale: KvScale = KvScale.TENSOR
    mla: bool = False
    dropout: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ProblemError(
                f"{self.heads} query heads do not divide among {self.kv_heads} KV heads: "
                "make heads a multiple of kv_heads"
            )

        if self.page_size and self.page_size not in PAGE_SIZES:
            sizes = ", ".join(map(str, PAGE_SIZES))
            raise ProblemError(f"pages of {self.page_size} keys are not supported: make them one of {sizes}")
        if self.page_size and self.seqlens_k:
            raise ProblemError("a paged cache always has lengths: leave seqlens_k out")
        if self.kv_dtype is not None and self.dtype.is_quantized:
            raise ProblemError(f"with keys of {self.kv_dtype} leave queries in bf16, fp16 or fp32")

    @property
    def key(self) -> str:
        """The unique and stable key of the problem in databases and results, as one line.

        It has words of its own: `first`, `chunk`, `packed`, `lengths`, `latent`. They do not follow renamed
        fields.
        """
        value_dim = "" if self.value_head_dim == self.head_dim else f"v{self.value_head_dim}"
        return (
            f"{self.direction}_{self.dtype}_d{self.head_dim}{value_dim}_h{self.heads}x{self.kv_heads}"
            f"_b{self.batch}_q{self.seqlen_q}_k{self.seqlen_kv}_{self.causal}{feature_words(self)}"
        )

    @property
    def features(self) -> frozenset[Feature]:
        """The features that the problem needs and not every family supports."""
        has = {
            Feature.WINDOW: self.window_left is not None or self.window_right is not None,
            Feature.SINK_TOKENS: self.sink_tokens > 0,
            Feature.ATTENTION_CHUNK: self.attention_chunk > 0,
            Feature.PREFIX: self.prefix,
            Feature.SOFTCAP: self.softcap,
            Feature.ALIBI: self.alibi,
            Feature.BIAS: self.bias is not Bias.NONE,
            Feature.SINKS: self.sinks,
            Feature.VARLEN: self.total_q > 0,
            Feature.SEQLENS_K: self.seqlens_k,
            Feature.PAGES: self.page_size > 0,
            Feature.QUANTIZED_KV: self.kv_dtype is not None,
            Feature.MLA: self.mla,
            Feature.DROPOUT: self.dropout,
            Feature.DETERMINISTIC: self.deterministic,
        }
        return frozenset(feature for feature, given in has.items() if given)

    @property
    def computation(self) -> Problem:
        """The problem without its extents. With the config, it determines a kernel's source."""
        return msgspec.structs.replace(
            self, heads=1, kv_heads=1, batch=1, seqlen_q=1, seqlen_kv=1, total_q=min(self.total_q, 1)
        )

    @property
    def is_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.direction is Direction.BACKWARD

    @property
    def is_causal(self) -> bool:
        """Whether queries see no keys after their position."""
        return self.causal is not Causal.NONE

    @property
    def kv_itemsize(self) -> int:
        """Bytes of one element of keys and values."""
        return 1 if self.kv_dtype else self.dtype.itemsize

    @property
    def out_dtype(self) -> Dtype:
        """Element type of the output."""
        return self.dtype.out

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def diagonal(self) -> int:
        """The position of query 0 among the keys, from the alignment of the causal mask."""
        return 0 if self.causal is Causal.TOP_LEFT else self.seqlen_kv - self.seqlen_q

    @property
    def sight(self) -> MaskInfo:
        """The visible keys of a query, as far as the host knows."""
        right = 0 if self.causal is not Causal.NONE else self.window_right
        if right is not None and self.window_right is not None:
            right = min(right, self.window_right)
        return MaskInfo(
            self.seqlen_q,
            self.seqlen_kv,
            self.diagonal,
            self.window_left,
            right,
            self.sink_tokens,
            self.attention_chunk,
        )

    def visible_pairs(self) -> int:
        """Returns the number of visible (query, key) pairs of one head."""
        return visible_pairs(self.sight)

    def flops(self) -> int:
        """Returns the floating-point operations of the products over the visible pairs."""
        return flops(self)

    def nominal_flops(self) -> int:
        """Returns the nominal number of operations: 4·B·H·Sq·Sk·D, 2.5 times that backward, half if causal.

        All reported TFLOP/s use it. With a window, chunks or varlen sequences only visible pairs count.
        """
        return nominal_flops(self)

    def minimal_bytes(self) -> int:
        """Returns the HBM bytes if each input is read once and each output is written once."""
        return minimal_bytes(self)

    def written_bytes(self) -> int:
        """Returns the bytes of the outputs, a part of `minimal_bytes`."""
        return written_bytes(self)


# Bytes of an element of the log-sum-exp.
LSE_BYTES = 4
# Scores and probabilities are float32 until the product with the values.
SCORE_BYTES = 4


def product_widths(problem: Problem) -> int:
    """Returns the sum of the head dims of all products of a pass.

    The forward pass has two products, for scores and outputs. The backward pass has five: for scores, the
    gradients of the probabilities, dq, dk and dv.
    """
    if problem.is_backward:
        return 3 * problem.head_dim + 2 * problem.value_head_dim
    return problem.head_dim + problem.value_head_dim


def flops(problem: Problem) -> int:
    """Returns the operations of the products over the visible pairs.

    A varlen batch counts as sequences of the longest length, as many as its tokens fill.
    """
    pairs = problem.batch * problem.visible_pairs()
    if problem.total_q:
        pairs = pairs * problem.total_q // max(1, problem.batch * problem.seqlen_q)
    return 2 * problem.heads * pairs * product_widths(problem)


def nominal_flops(problem: Problem) -> int:
    """Returns the nominal number of operations; see `Problem.nominal_flops`."""
    if problem.features & {Feature.WINDOW, Feature.ATTENTION_CHUNK, Feature.VARLEN}:
        return flops(problem)
    pairs = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv
    full = 2 * pairs * product_widths(problem)
    return full // 2 if problem.is_causal else full


def keys_read(problem: Problem) -> int:
    """Returns the keys of one KV head of all sequences that at least one query sees.

    Lengths in a tensor on the device are unknown. They are assumed to be distributed as in a tuned shape:
    one sequence is the longest, and the others have three quarters of its keys. Varlen batches count as in
    `flops`.
    """
    keys = distinct_keys(problem.sight)
    if problem.total_q:
        return problem.batch * keys * problem.total_q // max(1, problem.batch * problem.seqlen_q)
    if problem.batch and problem.features & {Feature.SEQLENS_K, Feature.PAGES}:
        usual = msgspec.structs.replace(problem, seqlen_kv=problem.seqlen_kv * 3 // 4)
        return keys + (problem.batch - 1) * distinct_keys(usual.sight)
    return problem.batch * keys


def minimal_bytes(problem: Problem) -> int:
    """Returns the HBM bytes if each input is read once and each output is written once."""
    inputs, outputs = _tensor_bytes(problem)
    if not problem.is_backward:
        return inputs + outputs
    # Each tensor has a gradient. The gradient of the output is read, the others are written.
    return 2 * (inputs + outputs) + _rows(problem) * LSE_BYTES


def written_bytes(problem: Problem) -> int:
    """Returns the bytes of the outputs, or of the gradients of the inputs in the backward pass."""
    inputs, outputs = _tensor_bytes(problem)
    return inputs if problem.is_backward else outputs


def _rows(problem: Problem) -> int:
    """Returns the number of query rows of all heads."""
    return (problem.total_q or problem.batch * problem.seqlen_q) * problem.heads


def _tensor_bytes(problem: Problem) -> tuple[int, int]:
    """Returns the bytes of queries, keys and values, and those of outputs."""
    rows = _rows(problem)
    width = problem.head_dim + (0 if problem.mla else problem.value_head_dim)
    queries = rows * problem.head_dim * problem.dtype.itemsize
    keys = problem.kv_heads * keys_read(problem) * width * problem.kv_itemsize
    return queries + keys, rows * problem.value_head_dim * problem.out_dtype.itemsize


def score_bytes(problem: Problem) -> int:
    """Returns the bytes of all scores of a problem. `unfused_attention` needs 2.5 times as many at once."""
    return problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv * SCORE_BYTES
