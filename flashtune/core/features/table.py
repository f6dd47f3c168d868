"""The description of each feature of attention: its names, inputs and score arithmetic.

To add a feature, add its description in `FEATURES`. Its member of `Feature`, its fields of `FeatureFields`
and its inputs in `ExtraInputs` belong in `records.py`. Problem keys, shapes, requests, the unfused
computation and the float64 reference follow from these. A family computes the feature after its `features`
name it.

The module imports no torch, so that commands without a GPU start fast.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flashtune.core.features.description import (
    Changed,
    Description,
    NumberInput,
    ScoreRows,
    TensorInput,
    UsualCall,
)
from flashtune.core.features.functions import (
    changed_by_function,
    function_derivative,
    function_errors,
    usual_captures,
)
from flashtune.core.features.plain_problem import Causal
from flashtune.core.features.records import (
    DEFAULTS,
    FIELDS,
    NO_EXTRA_INPUTS,
    TABLES,
    TYPES,
    Bias,
    BlockLists,
    ExtraInputs,
    Feature,
    FeatureFields,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
# Drafts of a query in a typical tree.
TREE_WIDTH = 2
# In a typical block mask, a query block sees one in so many of the key blocks that other masks leave visible.
BLOCK_PART = 4


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


def _usual_blocks(call: Call) -> dict[str, Any]:
    """Returns lists of random key blocks, of which causality hides none completely. Sequences share them."""
    import torch

    fields = call.fields
    size = fields.block_mask
    queries, keys = -(-fields.seqlen_q // size), -(-fields.seqlen_kv // size)
    lists = fields.heads if fields.block_lists is BlockLists.HEAD else fields.kv_heads
    visible = torch.full((queries,), keys)
    if fields.causal is not Causal.NONE:
        diagonal = 0 if fields.causal is Causal.TOP_LEFT else fields.seqlen_kv - fields.seqlen_q
        last = (torch.arange(1, queries + 1) * size).clamp(max=fields.seqlen_q) - 1 + diagonal
        visible = (last // size + 1).clamp(0, keys)
    counts = -(-visible // BLOCK_PART)
    order = torch.rand(lists, queries, keys, device=call.device)
    order.masked_fill_(torch.arange(keys, device=call.device) >= visible[:, None].to(call.device), 2.0)
    width = max(1, -(-keys // BLOCK_PART))
    indices = order.argsort(-1)[..., :width]
    beyond = torch.arange(width, device=call.device) >= counts[:, None].to(call.device)
    indices = indices.masked_fill(beyond, keys).sort(-1).values.clamp_(max=max(keys - 1, 0)).int()
    counts = counts.int().to(call.device)
    return {
        "block_counts": counts.expand(fields.batch, lists, -1),
        "block_indices": indices.expand(fields.batch, -1, -1, -1),
    }


def _usual_tree(call: Call) -> dict[str, Any]:
    """Returns the mask of a binary tree: a query sees itself and its ancestors. Sequences share it."""
    import torch

    queries = call.fields.seqlen_q
    seen = torch.eye(queries, dtype=torch.bool)
    for query in range(1, queries):
        seen[query] |= seen[(query - 1) // TREE_WIDTH]
    return {"tree": seen.to(call.device).expand(call.fields.batch, -1, -1)}


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
        keys={
            "window": "`window=1023`: visible keys before the query; `window=1023:0`: before and after it; "
            "`window=:0`: after it"
        },
        is_mask=True,
        is_sparse=True,
    ),
    Feature.SINK_TOKENS: Description(
        title="First tokens that are always visible (`sink_tokens`)",
        example="sink_tokens=4",
        word="first{sink_tokens}",
        fields=("sink_tokens",),
        keys={"sink_tokens": "first keys that window and chunk never hide"},
        is_mask=True,
    ),
    Feature.CHUNK: Description(
        title="Chunks",
        example="chunk=8192",
        word="chunk{chunk}",
        fields=("chunk",),
        keys={"chunk": "a query sees only keys of its own chunk of this many"},
        is_mask=True,
        is_sparse=True,
    ),
    Feature.PREFIX: Description(
        title="Prefixes that all queries attend to",
        example="prefix",
        word="prefix",
        fields=("prefix",),
        keys={"prefix": "flag: all queries of a sequence see its prefix"},
        tensors=(TensorInput("prefix", "prefix_lengths", "int32", ("batch",)),),
        is_mask=True,
        is_positional=True,
        usual=_usual_prefix,
    ),
    Feature.BLOCK_MASK: Description(
        title="Block masks (`block_mask`)",
        example="block_mask=128",
        word="blocks{block_mask}-{block_lists}",
        fields=("block_mask",),
        keys={
            "block_mask": "queries and keys of a block, 64 or 128; a quarter of the blocks is visible",
            "block_lists": "`head`, or `group`: the query heads of one KV head share the lists of blocks",
        },
        details=("block_lists",),
        tensors=(
            TensorInput("block_counts", "block_mask.counts", "int32"),
            TensorInput("block_indices", "block_mask.indices", "int32"),
        ),
        is_mask=True,
        is_sparse=True,
        usual=_usual_blocks,
    ),
    Feature.FUNCTIONS: Description(
        title="Score and mask functions (`flex_attention`)",
        example="functions=key.query.less_equal/0/1:-1:2:",
        word="functions-{functions.digest}",
        fields=("functions",),
        keys={"functions": "expressions of a score function and a mask function, as `explain` shows them"},
        tensors=(
            TensorInput("full_counts", "block_mask.full_counts", "int32"),
            TensorInput("function_ints", "a captured int", "int32"),
            TensorInput("function_floats", "a captured float"),
            *(
                TensorInput(name, f"captured tensor {n}", None, is_strided=True, has_gradient=True)
                for n, name in enumerate(TABLES)
            ),
        ),
        is_mask=True,
        is_positional=True,
        is_sparse=True,
        change=changed_by_function,
        sizes=function_errors,
        derivative=function_derivative,
        usual=usual_captures,
    ),
    Feature.SOFTCAP: Description(
        title="Softcap on the scores",
        example="softcap",
        word="softcap",
        fields=("softcap",),
        keys={"softcap": "flag: cap the scores"},
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
        keys={"alibi": "flag: subtract a penalty for the distance"},
        tensors=(TensorInput("slopes", "alibi_slopes", is_strided=True, has_gradient=True),),
        is_positional=True,
        change=_with_slopes,
        usual=_usual_slopes,
    ),
    Feature.BIAS: Description(
        title="Biases: additive, or a boolean mask",
        example="bias=additive",
        word="bias-{bias}",
        fields=("bias",),
        keys={"bias": "`additive` or `boolean`: a bias or a mask for each query and key"},
        tensors=(TensorInput("bias", "attn_bias or attn_mask", None, has_gradient=True),),
        is_mask=True,
        change=_with_bias,
        usual=_usual_bias,
    ),
    Feature.SINKS: Description(
        title="Attention sinks",
        example="sinks",
        word="sinks",
        fields=("sinks",),
        keys={"sinks": "flag: add one score without a value for each head"},
        tensors=(TensorInput("sinks", "sinks", shape=("heads",), has_gradient=True),),
        usual=_usual_sinks,
    ),
    Feature.PACKED: Description(
        title="Packed sequences of different lengths",
        example="packed=65536",
        word="packed{packed}",
        fields=("packed",),
        keys={"packed": "tokens of all packed sequences; `seqlen` is then the longest, `batch` their number"},
        tensors=(
            TensorInput("cu_seqlens_q", "cu_seqlens_q", "int32", ("batch + 1",)),
            TensorInput("cu_seqlens_kv", "cu_seqlens_k", "int32", ("batch + 1",)),
        ),
        is_mask=True,
        is_sparse=True,
    ),
    Feature.KV_LENGTHS: Description(
        title="KV lengths in device memory",
        example="kv_lengths",
        word="lengths",
        fields=("kv_lengths",),
        keys={"kv_lengths": "flag: the number of keys is read on the device; `seqlen_kv` is its maximum"},
        tensors=(TensorInput("seqlens_kv", "kv_lengths", "int32", ("batch",)),),
        is_mask=True,
    ),
    Feature.PAGES: Description(
        title="Paged KV caches",
        example="page_size=16",
        word="page{page_size}",
        fields=("page_size",),
        keys={"page_size": "keys of a page of the cache: a power of two up to 256"},
        tensors=(TensorInput("block_table", "block_table", "int32"),),
        is_mask=True,
    ),
    Feature.TREE: Description(
        title="Masks of the newest keys, for trees of drafts (`tree_mask`)",
        example="tree",
        word="tree",
        fields=("tree",),
        keys={"tree": "flag: a mask of the newest keys of a sequence, as many as it has queries"},
        tensors=(TensorInput("tree", "tree_mask", "bool", ("batch", "queries", "queries")),),
        is_mask=True,
        usual=_usual_tree,
    ),
    Feature.QUANTIZED_KV: Description(
        title="KV caches in e4m3 or int8, with wider queries",
        example="kv_dtype=e4m3",
        word="kv-{kv_dtype}-{kv_scale}",
        fields=("kv_dtype",),
        keys={
            "kv_dtype": "element type of an 8-bit cache: `e4m3` or `int8`",
            "kv_scale": "one scale for each `tensor` (default), `head` or `page` of the cache",
        },
        details=("kv_scale",),
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
        keys={"mla": "flag: values are the first columns of the keys (DeepSeek's MLA)"},
    ),
    Feature.DROPOUT: Description(
        title="Dropout",
        example="dropout",
        word="dropout",
        fields=("dropout",),
        keys={"dropout": "flag: dropout on the attention weights"},
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
        keys={"deterministic": "flag, with `backward`: bitwise reproducible gradients"},
    ),
    Feature.BATCH_INVARIANT: Description(
        title="The same bits of a row in every batch (`batch_invariant`)",
        example="batch_invariant",
        word="invariant",
        fields=("batch_invariant",),
        keys={"batch_invariant": "flag: the bits of a row do not depend on the batch"},
    ),
}

NUMBER_INPUTS = {number.name: number for entry in FEATURES.values() for number in entry.numbers}
# The descriptions of all tensors by name. Quantised queries are no feature, but an element type.
TENSOR_INPUTS = {
    "q_scale": TensorInput("q_scale", "q_scale", is_strided=True),
    **{tensor.name: tensor for entry in FEATURES.values() for tensor in entry.tensors},
}

# The fields of a problem that are flags, with the names of the inputs that set them.
_FLAGS = {
    entry.fields[0]: [side_input.name for side_input in entry.numbers or entry.tensors]
    for entry in FEATURES.values()
    if (entry.numbers or entry.tensors) and bool in TYPES[entry.fields[0]]
}
# The values of fields in a problem without each feature.
_ABSENT = [(feature, name, DEFAULTS[name]) for feature, entry in FEATURES.items() for name in entry.fields]


def features_of(fields: FeatureFields) -> frozenset[Feature]:
    """Returns the features of a problem."""
    return frozenset(feature for feature, name, default in _ABSENT if getattr(fields, name) != default)


def flags_of(inputs: ExtraInputs) -> dict[str, Any]:
    """Returns the fields of a problem that are flags, from the presence of their features' inputs."""
    if inputs is NO_EXTRA_INPUTS:
        return dict.fromkeys(_FLAGS, False)
    return {
        field: any(getattr(inputs, name) is not None for name in names) for field, names in _FLAGS.items()
    }


def feature_words(fields: FeatureFields) -> str:
    """Returns the features of a problem as the end of its key, empty without features."""
    has = features_of(fields)
    values = {name: "" if (value := getattr(fields, name)) is None else value for name in FIELDS}
    return "".join(
        f"_{entry.word.format_map(values)}" for feature, entry in FEATURES.items() if feature in has
    )


def score_tensors(fields: FeatureFields) -> list[str]:
    """Returns the names of the tensors of the features that change a problem's scores."""
    has = features_of(fields)
    changing = (entry for feature, entry in FEATURES.items() if entry.change and feature in has)
    return [tensor.name for entry in changing for tensor in entry.tensors]


def changed_scores(scores: Tensor, rows: Rows, *, sizes: bool = False) -> Changed:
    """Returns scores, with the softmax scale, after all features of a problem.

    With `sizes`, `added` is the sum of the magnitudes of all terms.
    """
    added: Tensor | None = None
    for entry in _changes(rows.fields):
        assert entry.change is not None
        before = scores
        scores, term = entry.change(scores, rows)
        if sizes and entry.sizes is not None:
            term = entry.sizes(before, rows)
        if sizes and term is not None:
            added = term.abs() if added is None else added + term.abs()
    return Changed(scores, added)


def score_derivative(scores: Tensor, rows: Rows) -> Tensor | None:
    """Returns the derivative of `changed_scores` by the scores, or None if it is 1."""
    product: Tensor | None = None
    for entry in _changes(rows.fields):
        assert entry.change is not None
        factor = None if entry.derivative is None else entry.derivative(scores, rows)
        if factor is not None:
            product = factor if product is None else product * factor
        scores = entry.change(scores, rows).scores
    return product


def usual_inputs(
    fields: FeatureFields,
    features: Collection[Feature],
    keys: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> dict[str, Any]:
    """Returns typical inputs of some features by name; see `UsualCall`."""
    call = Call(fields, keys, dtype, device, seed)
    made = [entry.usual(call) for feature, entry in FEATURES.items() if feature in features and entry.usual]
    return {name: value for inputs in made for name, value in inputs.items()}


def _changes(fields: FeatureFields) -> Iterator[Description[FeatureFields, ExtraInputs]]:
    has = features_of(fields)
    return (entry for name, entry in FEATURES.items() if entry.change and name in has)
