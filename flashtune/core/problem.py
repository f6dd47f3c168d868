"""`Problem`: the computation to perform, its optional features, and its cost in FLOPs and bytes."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from flashtune.core.errors import ProblemError
from flashtune.core.mask_geometry import Sight, distinct_keys, visible_pairs

PAGE_SIZES = (16, 32, 64, 128, 256)


class Feature(enum.StrEnum):
    """A part of a problem that not every kernel family computes."""

    WINDOW = "window"
    SOFTCAP = "softcap"
    ALIBI = "alibi"
    BIAS = "bias"
    SINKS = "sinks"
    FIRST_TOKENS = "first_tokens"
    PREFIX = "prefix"
    CHUNK = "chunk"
    PACKED = "packed"
    LENGTHS = "lengths"
    PAGES = "pages"
    QUANTIZED_KV = "quantized_kv"
    LATENT = "latent"
    DROPOUT = "dropout"
    DETERMINISTIC = "deterministic"


class Bias(enum.StrEnum):
    """What is laid over the scores of a call.

    none      Nothing.
    additive  Numbers in q's type, added to the scaled (and capped) scores.
    boolean   Whether a query sees a key.
    """

    NONE = "none"
    ADDITIVE = "additive"
    BOOLEAN = "boolean"


class KvDtype(enum.StrEnum):
    """Element types of caches that were quantised, beside queries that were not."""

    E4M3 = "e4m3"
    INT8 = "int8"


class KvScale(enum.StrEnum):
    """What shares one scale in a quantised cache: all of it, a head, or a head's part of a page."""

    TENSOR = "tensor"
    HEAD = "head"
    PAGE = "page"


def feature_words(problem: Problem) -> str:
    """What a problem asks for beside shapes, as the end of its key; nothing where it asks for nothing."""
    left, right = ("" if side is None else side for side in (problem.window_left, problem.window_right))
    words = (
        (Feature.WINDOW, f"window{left}:{right}"),
        (Feature.FIRST_TOKENS, f"first{problem.first_tokens}"),
        (Feature.CHUNK, f"chunk{problem.chunk}"),
        (Feature.PREFIX, "prefix"),
        (Feature.SOFTCAP, "softcap"),
        (Feature.ALIBI, "alibi"),
        (Feature.BIAS, f"bias-{problem.bias}"),
        (Feature.SINKS, "sinks"),
        (Feature.PACKED, f"packed{problem.packed}"),
        (Feature.LENGTHS, "lengths"),
        (Feature.PAGES, f"page{problem.page_size}"),
        (Feature.QUANTIZED_KV, f"kv-{problem.kv_dtype}-{problem.kv_scale}"),
        (Feature.LATENT, "latent"),
        (Feature.DROPOUT, "dropout"),
        (Feature.DETERMINISTIC, "deterministic"),
    )
    asked = problem.features
    return "".join(f"_{text}" for feature, text in words if feature in asked)


MAX_HEAD_DIM = 256
Extent = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
HeadDim = Annotated[int, msgspec.Meta(ge=1, le=1024)]


class Direction(enum.StrEnum):
    """Which computation of attention: the output, or the gradients of what it was made of."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Dtype(enum.StrEnum):
    """The element type of queries, keys and values; of outputs too, but for `e4m3`.

    `e4m3` is an 8-bit float of 4 exponent and 3 mantissa bits (torch's `float8_e4m3fn`), for tensors
    that were quantised with a scale for each head.
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
        """The element type of what attention of such tensors gives: 8 bits are too few for it."""
        return Dtype.BF16 if self.is_quantized else self


class Causal(enum.StrEnum):
    """Which keys a query may see.

    With the diagonal aligned top-left, query i sees keys 0..i (SDPA's `is_causal`); bottom-right,
    keys 0..i + seqlen_kv - seqlen_q (flash_attn's, so that the last query sees every key).
    """

    NONE = "none"
    TOP_LEFT = "top_left"
    BOTTOM_RIGHT = "bottom_right"


# What a problem does not ask for is left out where it is stored, so that what was stored before there was
# such a thing reads and hashes as it did. The mask and the direction were always there.
class Problem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One attention computation.

    A query's place p among the keys is its index plus `diagonal`.

    Attributes:
        dtype: Element type of q, k and v; out has `out_dtype`.
        head_dim: Width of queries and keys.
        value_head_dim: Width of values and outputs.
        heads: Query heads.
        kv_heads: Key and value heads; divides `heads`.
        batch: Sequences.
        seqlen_q: Queries of a sequence.
        seqlen_kv: Keys of a sequence.
        causal: The causal mask and its alignment.
        direction: Which computation.
        window_left: A query at p sees no key before p - window_left; None for no such bound.
        window_right: It sees no key after p + window_right.
        first_tokens: Keys at the start that stay visible however far back (Xiao et al., 2023).
        chunk: A query sees keys of its own chunk of so many alone; 0 for no chunks (Llama 4).
        prefix: Whether each sequence has a prefix that all its queries see.
        softcap: Whether scores s become cap · tanh(s / cap).
        alibi: Whether slope · distance is taken off the scores (Press et al., 2022).
        bias: What is laid over the scores.
        sinks: Whether each head has a score that takes weight and has no value (gpt-oss).
        packed: Query tokens of all sequences together where these lie packed one behind the other, and the
            lengths above are those of the longest; 0 where they do not.
        lengths: Whether keys are as many as a tensor on the device says, at most `seqlen_kv`.
        page_size: Keys of a page where keys and values lie in pages; 0 where they do not.
        kv_dtype: Element type of keys and values where it is not q's.
        kv_scale: What shares a scale there.
        latent: Whether values are the first `value_head_dim` columns of the keys (DeepSeek's MLA).
        dropout: Whether weights are dropped at random, by a seed that both passes share.
        deterministic: Whether gradients must be the same bits in every run; of no meaning forward.
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
    first_tokens: Extent = 0
    chunk: Extent = 0
    prefix: bool = False
    softcap: bool = False
    alibi: bool = False
    bias: Bias = Bias.NONE
    sinks: bool = False
    packed: Extent = 0
    lengths: bool = False
    page_size: Extent = 0
    kv_dtype: KvDtype | None = None
    kv_scale: KvScale = KvScale.TENSOR
    latent: bool = False
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
        if self.page_size and self.lengths:
            raise ProblemError("sequences in pages always bring their lengths along: leave lengths out")
        if self.kv_dtype is not None and self.dtype.is_quantized:
            raise ProblemError(f"with keys of {self.kv_dtype} leave queries in bf16, fp16 or fp32")

    @property
    def key(self) -> str:
        """One line that names the problem, unique and stable: the database's key."""
        value_dim = "" if self.value_head_dim == self.head_dim else f"v{self.value_head_dim}"
        return (
            f"{self.direction}_{self.dtype}_d{self.head_dim}{value_dim}_h{self.heads}x{self.kv_heads}"
            f"_b{self.batch}_q{self.seqlen_q}_k{self.seqlen_kv}_{self.causal}{feature_words(self)}"
        )

    @property
    def features(self) -> frozenset[Feature]:
        """What it asks for that not every family computes."""
        asked = {
            Feature.WINDOW: self.window_left is not None or self.window_right is not None,
            Feature.FIRST_TOKENS: self.first_tokens > 0,
            Feature.CHUNK: self.chunk > 0,
            Feature.PREFIX: self.prefix,
            Feature.SOFTCAP: self.softcap,
            Feature.ALIBI: self.alibi,
            Feature.BIAS: self.bias is not Bias.NONE,
            Feature.SINKS: self.sinks,
            Feature.PACKED: self.packed > 0,
            Feature.LENGTHS: self.lengths,
            Feature.PAGES: self.page_size > 0,
            Feature.QUANTIZED_KV: self.kv_dtype is not None,
            Feature.LATENT: self.latent,
            Feature.DROPOUT: self.dropout,
            Feature.DETERMINISTIC: self.deterministic,
        }
        return frozenset(feature for feature, given in asked.items() if given)

    @property
    def computation(self) -> Problem:
        """The problem without its extents: what decides, with the config, a kernel's source."""
        return msgspec.structs.replace(
            self, heads=1, kv_heads=1, batch=1, seqlen_q=1, seqlen_kv=1, packed=min(self.packed, 1)
        )

    @property
    def is_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.direction is Direction.BACKWARD

    @property
    def is_causal(self) -> bool:
        """Whether queries see no keys beyond their place."""
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
        """Where query 0 stands among the keys: the last at the last key, or the first at the first."""
        return 0 if self.causal is Causal.TOP_LEFT else self.seqlen_kv - self.seqlen_q

    @property
    def sight(self) -> Sight:
        """Which keys a query sees, of what is known without looking at the device."""
        right = 0 if self.causal is not Causal.NONE else self.window_right
        if right is not None and self.window_right is not None:
            right = min(right, self.window_right)
        return Sight(
            self.seqlen_q,
            self.seqlen_kv,
            self.diagonal,
            self.window_left,
            right,
            self.first_tokens,
            self.chunk,
        )

    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the mask keeps."""
        return visible_pairs(self.sight)

    def flops(self) -> int:
        """Floating-point operations of the products over the visible pairs."""
        return flops(self)

    def nominal_flops(self) -> int:
        """The field's convention: 4·B·H·Sq·Sk·D, 2.5 times that backward, halved when causal.

        All reported TFLOP/s use it. With a window, chunks or packed sequences only what is seen counts.
        """
        return nominal_flops(self)

    def minimal_bytes(self) -> int:
        """HBM bytes when each input is read once and each output written once."""
        return minimal_bytes(self)

    def written_bytes(self) -> int:
        """Bytes of what is written, among the `minimal_bytes`."""
        return written_bytes(self)


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
