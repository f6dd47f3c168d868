"""The features of attention, each with one description: its names, inputs and score arithmetic.

To add a feature, add its member of `Feature`, its fields of `FeatureFields`, its inputs in `ExtraInputs` and
its description in `FEATURES`. Problem keys, shapes, requests, the unfused computation and the float64
reference follow from these. A family computes the feature after its `features` name it.

The module imports no torch, so that commands without a GPU start fast.
"""

from __future__ import annotations

import enum
import math
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from flashtune.core.features.description import (
    Changed,
    Description,
    NumberInput,
    ScoreRows,
    TensorInput,
    UsualCall,
)
from flashtune.core.features.plain_problem import Extent, PlainProblem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Change = Callable[[Tensor, "Rows"], Changed]
    Derivative = Callable[[Tensor, "Rows"], Tensor]


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


class FeatureFields(PlainProblem, frozen=True, kw_only=True):
    """The fields of a problem. Their order is that of stored problems.

    Attributes:
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

    @property
    def features(self) -> frozenset[Feature]:
        """The features that the problem needs and not every family supports."""
        return frozenset(feature for feature, name, default in _ABSENT if getattr(self, name) != default)


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


class FeatureOptions(TypedDict, total=False):
    """The keyword arguments of all entry points that become extra inputs; see `flashtune.attention`."""

    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    prefix_lengths: Tensor | None


Rows = ScoreRows[FeatureFields, ExtraInputs]
Call = UsualCall[FeatureFields]

# Seed of typical inputs, the same in every run.
SEED = 20
# The largest biases of which each sequence has its own, in elements.
MAX_BIAS = 2**30
# Share of visible elements in a typical boolean bias.
VISIBLE_SHARE = 0.7
# A typical prefix is a quarter of the keys.
PREFIX_PART = 4


def _capped(scores: Tensor, rows: Rows) -> Changed:
    cap = rows.inputs.softcap
    assert cap is not None
    return Changed((scores / cap).tanh() * cap)


def _cap_slope(scores: Tensor, rows: Rows) -> Tensor:
    cap = rows.inputs.softcap
    assert cap is not None
    tanh = (scores / cap).tanh()
    return 1.0 - tanh * tanh


def _with_slopes(scores: Tensor, rows: Rows) -> Changed:
    assert rows.inputs.slopes is not None
    added = rows.of_heads(rows.inputs.slopes) * rows.distances()
    return Changed(scores - added, added)


def _with_bias(scores: Tensor, rows: Rows) -> Changed:
    if rows.fields.bias is not Bias.ADDITIVE:
        return Changed(scores)
    assert rows.inputs.bias is not None
    bias = rows.of_pairs(rows.inputs.bias)
    return Changed(scores + bias, bias)


def _usual_slopes(call: Call) -> dict[str, Any]:
    """Returns the slopes of the ALiBi paper."""
    import torch

    heads = call.fields.heads
    slopes = 2.0 ** (-8.0 * (torch.arange(heads, dtype=torch.float32) + 1) / heads)
    return {"slopes": slopes.expand(call.fields.batch, -1).to(call.device)}


def _usual_bias(call: Call) -> dict[str, Any]:
    """Returns a random bias. Sequences share one if it is very large."""
    import torch

    full = (call.fields.batch, call.fields.heads, call.fields.seqlen_q, call.fields.seqlen_kv)
    own = full if math.prod(full) <= MAX_BIAS else (1, *full[1:])
    if call.fields.bias is Bias.BOOLEAN:
        bias = torch.empty(own, dtype=torch.bool, device=call.device).bernoulli_(VISIBLE_SHARE)
    else:
        bias = torch.randn(own, dtype=call.dtype, device=call.device)
    return {"bias": bias.expand(full)}


def _usual_sinks(call: Call) -> dict[str, Any]:
    import torch

    return {"sinks": torch.zeros(call.fields.heads, device=call.device)}


def _usual_prefix(call: Call) -> dict[str, Any]:
    import torch

    lengths = [count // PREFIX_PART for count in call.keys]
    return {"prefix": torch.tensor(lengths, dtype=torch.int32, device=call.device)}


def _usual_dropout(call: Call) -> dict[str, Any]:
    """Returns a usual rate and a seed. A kernel's time does not depend on the rate."""
    import torch

    return {"seed": torch.tensor([SEED], device=call.device), "dropout": 0.1}


# In the order of the words of `Problem.key`. Scores are changed in this order too.
FEATURES: Mapping[Feature, Description[FeatureFields, ExtraInputs]] = {
    Feature.WINDOW: Description(
        title="Sliding windows (left, right or both)",
        example="window=1023:0",
        word="window{window_left}:{window_right}",
        fields=("window_left", "window_right"),
        help="window=1023 (keys before a query's own that it sees) or window=1023:0 (before and after)",
        is_mask=True,
        is_sparse=True,
    ),
    Feature.SINK_TOKENS: Description(
        title="First tokens that are always visible (`sink_tokens`)",
        example="sink_tokens=4",
        word="first{sink_tokens}",
        fields=("sink_tokens",),
        is_mask=True,
    ),
    Feature.ATTENTION_CHUNK: Description(
        title="Chunks",
        example="attention_chunk=8192",
        word="chunk{attention_chunk}",
        fields=("attention_chunk",),
        is_mask=True,
        is_sparse=True,
    ),
    Feature.PREFIX: Description(
        title="Prefixes that all queries attend to",
        example="prefix",
        word="prefix",
        fields=("prefix",),
        tensors=(TensorInput("prefix", "prefix_lengths", "int32", ("batch",)),),
        is_mask=True,
        is_positional=True,
        usual=_usual_prefix,
    ),
    Feature.SOFTCAP: Description(
        title="Softcap on the scores",
        example="softcap",
        word="softcap",
        fields=("softcap",),
        # The bounds are the smallest normal float32 and the largest finite one.
        numbers=(
            NumberInput(
                "softcap",
                "softcap",
                2.0**-126,
                2.0**128 - 2.0**104,
                "a positive number, or None for no cap",
            ),
        ),
        change=_capped,
        derivative=_cap_slope,
        usual=lambda call: {"softcap": 30.0},
    ),
    Feature.ALIBI: Description(
        title="ALiBi",
        example="alibi",
        word="alibi",
        fields=("alibi",),
        tensors=(TensorInput("slopes", "alibi_slopes", is_strided=True),),
        is_positional=True,
        change=_with_slopes,
        usual=_usual_slopes,
    ),
    Feature.BIAS: Description(
        title="Biases: additive, or a boolean mask",
        example="bias=additive",
        word="bias-{bias}",
        fields=("bias",),
        help="bias=additive|boolean",
        tensors=(TensorInput("bias", "attn_bias or attn_mask", None),),
        is_mask=True,
        change=_with_bias,
        usual=_usual_bias,
    ),
    Feature.SINKS: Description(
        title="Attention sinks",
        example="sinks",
        word="sinks",
        fields=("sinks",),
        tensors=(TensorInput("sinks", "sinks", shape=("heads",)),),
        usual=_usual_sinks,
    ),
    Feature.VARLEN: Description(
        title="Packed sequences of different lengths",
        example="total_q=65536",
        word="packed{total_q}",
        fields=("total_q",),
        help="total_q=65536 (tokens of all sequences; seqlen is the longest)",
        tensors=(
            TensorInput("cu_seqlens_q", "cu_seqlens_q", "int32", ("batch + 1",)),
            TensorInput("cu_seqlens_kv", "cu_seqlens_k", "int32", ("batch + 1",)),
        ),
        is_mask=True,
        is_sparse=True,
    ),
    Feature.SEQLENS_K: Description(
        title="KV lengths in device memory",
        example="seqlens_k",
        word="lengths",
        fields=("seqlens_k",),
        tensors=(TensorInput("seqlens_kv", "seqlens_k or kv_lengths", "int32", ("batch",)),),
        is_mask=True,
    ),
    Feature.PAGES: Description(
        title="Paged KV caches",
        example="page_size=16",
        word="page{page_size}",
        fields=("page_size",),
        tensors=(TensorInput("block_table", "block_table", "int32"),),
        is_mask=True,
    ),
    Feature.QUANTIZED_KV: Description(
        title="KV caches in e4m3 or int8, with wider queries",
        example="kv_dtype=e4m3",
        word="kv-{kv_dtype}-{kv_scale}",
        fields=("kv_dtype",),
        details=("kv_scale",),
        help="kv_dtype=e4m3|int8, kv_scale=tensor|head|page",
        tensors=(
            TensorInput("k_scale", "k_scale", is_strided=True),
            TensorInput("v_scale", "v_scale", is_strided=True),
        ),
    ),
    Feature.MLA: Description(
        title="Latent keys (MLA): the values are their first columns",
        example="mla",
        word="latent",
        fields=("mla",),
    ),
    Feature.DROPOUT: Description(
        title="Dropout",
        example="dropout",
        word="dropout",
        fields=("dropout",),
        tensors=(TensorInput("seed", "seed", "int64"),),
        # The largest float32 below one.
        numbers=(
            NumberInput(
                "dropout",
                "dropout_p",
                0.0,
                1.0 - 2.0**-24,
                "a number from 0 up to, and not as much as, 1",
            ),
        ),
        usual=_usual_dropout,
    ),
    Feature.DETERMINISTIC: Description(
        title="Deterministic gradients",
        example="backward,deterministic",
        word="deterministic",
        fields=("deterministic",),
        help="deterministic (gradients with the same bits in every run)",
    ),
}

NUMBER_INPUTS = {number.name: number for one in FEATURES.values() for number in one.numbers}
# Inputs that are passed by value, after the scale. They are last in `ExtraInputs`.
NUMBERS = ExtraInputs._fields[-len(NUMBER_INPUTS) :]
TENSORS = ExtraInputs._fields[: -len(NUMBER_INPUTS)]
# The descriptions of all tensors by name. Quantised queries are no feature, but an element type.
TENSOR_INPUTS = {
    "q_scale": TensorInput("q_scale", "q_scale", is_strided=True),
    **{tensor.name: tensor for one in FEATURES.values() for tensor in one.tensors},
}
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

# The values of fields in a problem without each feature.
_ABSENT = [(feature, name, DEFAULTS[name]) for feature, one in FEATURES.items() for name in one.fields]


def flags_of(inputs: ExtraInputs) -> dict[str, Any]:
    """Returns the fields of a problem that are flags, from the presence of their features' inputs."""
    named = {
        one.fields[0]: one.numbers or one.tensors for one in FEATURES.values() if one.tensors or one.numbers
    }
    return {
        field: any(getattr(inputs, one.name) is not None for one in given)
        for field, given in named.items()
        if bool in TYPES[field]
    }


def feature_words(fields: FeatureFields) -> str:
    """Returns the features of a problem as the end of its key, empty without features."""
    has = fields.features
    values = {name: "" if (value := getattr(fields, name)) is None else value for name in FIELDS}
    return "".join(f"_{one.word.format_map(values)}" for feature, one in FEATURES.items() if feature in has)


def changed_scores(scores: Tensor, rows: Rows, *, sizes: bool = False) -> Changed:
    """Returns scores, with the softmax scale, after all features of a problem.

    With `sizes`, `added` is the sum of the magnitudes of all terms.
    """
    added: Tensor | None = None
    for change, _ in _changes(rows.fields):
        scores, term = change(scores, rows)
        if sizes and term is not None:
            added = term.abs() if added is None else added + term.abs()
    return Changed(scores, added)


def score_derivative(scores: Tensor, rows: Rows) -> Tensor | None:
    """Returns the derivative of `changed_scores` by the scores, or None if it is 1."""
    product: Tensor | None = None
    for change, derivative in _changes(rows.fields):
        if derivative is not None:
            factor = derivative(scores, rows)
            product = factor if product is None else product * factor
        scores = change(scores, rows).scores
    return product


def usual_inputs(
    fields: FeatureFields,
    features: Collection[Feature],
    keys: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Returns typical inputs of some features by name; see `UsualCall`."""
    call = Call(fields, keys, dtype, device)
    made = [one.usual(call) for feature, one in FEATURES.items() if feature in features and one.usual]
    return {name: value for inputs in made for name, value in inputs.items()}


def _changes(fields: FeatureFields) -> Iterator[tuple[Change, Derivative | None]]:
    has = fields.features
    return ((one.change, one.derivative) for name, one in FEATURES.items() if one.change and name in has)
