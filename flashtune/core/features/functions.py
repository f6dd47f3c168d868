"""Score and mask functions in torch: changed scores, visible pairs and typical captured values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flashtune.core.expressions.derivative import derivatives
from flashtune.core.expressions.intervals import Interval, intervals
from flashtune.core.expressions.nodes import Expressions, Functions, Kind, Op, TableDtype
from flashtune.core.features.description import Changed, ScoreRows, UsualCall
from flashtune.core.features.plain_problem import Causal
from flashtune.core.features.records import TABLES, ExtraInputs, FeatureFields

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from flashtune.core.expressions.evaluation import Values

Rows = ScoreRows[FeatureFields, ExtraInputs]
# The most elements that a typical captured tensor stores, unless its last two dimensions have more.
MAX_TYPICAL = 2**22
# Shares of typical bools that are true, and documents of a typical sequence.
TRUE_SHARE, DOCUMENTS = 0.7, 4


def changed_by_function(scores: Tensor, rows: Rows) -> Changed:
    """Returns the scores that a score function gives."""
    from flashtune.core.expressions.evaluation import evaluate

    functions = rows.fields.functions
    if functions.score < 0:
        return Changed(scores)
    changed = evaluate(functions, values_of(scores, rows), functions.score)
    # The result may depend on fewer places, and later steps write to it. Autograd may have saved it.
    is_shared = changed.shape != scores.shape or changed.requires_grad
    return Changed(changed.expand_as(scores).clone() if is_shared else changed)


def function_errors(scores: Tensor, rows: Rows) -> Tensor | None:
    """Returns bounds of the rounding errors of a score function, in roundoffs."""
    from flashtune.core.expressions.evaluation import error_terms

    functions = rows.fields.functions
    if functions.score < 0:
        return None
    return error_terms(functions, values_of(scores, rows), functions.score).expand_as(scores)


def function_derivative(scores: Tensor, rows: Rows) -> Tensor | None:
    """Returns the derivative of a score function by the score, or None if it is 1."""
    from flashtune.core.expressions.evaluation import evaluate

    derived = derivatives(rows.fields.functions)
    if derived.slope < 0:
        return None
    return evaluate(derived, values_of(scores, rows), derived.slope).expand_as(scores)


def derivative_errors(scores: Tensor, rows: Rows) -> Tensor | None:
    """Returns bounds of the rounding errors of `function_derivative`, in roundoffs, or None if it is 1."""
    from flashtune.core.expressions.evaluation import error_terms

    derived = derivatives(rows.fields.functions)
    if derived.slope < 0:
        return None
    return error_terms(derived, values_of(scores, rows), derived.slope).expand_as(scores)


def visible_by_function(
    fields: FeatureFields, inputs: ExtraInputs, batch: Tensor, head: Tensor, query: Tensor, keys: int
) -> Tensor | None:
    """Returns whether a mask function leaves pairs visible, or None without one.

    `batch`, `head` and `query` are numbers that broadcast with [..., rows, keys], in int64. Queries of paged
    sequences count from their first key. The mask function has no effect in the first blocks of each list of
    a block mask, `full_counts` of them.
    """
    import torch

    from flashtune.core.expressions.evaluation import evaluate
    from flashtune.core.features.masks import seen_blocks

    functions, size = fields.functions, fields.block_mask
    if functions.mask < 0:
        return None
    key = torch.arange(keys, device=query.device)
    values = captured_values(functions, inputs, (batch, head, query, key), None)
    visible = evaluate(functions, values, functions.mask)
    if not size or inputs.full_counts is None:
        return visible
    assert inputs.block_indices is not None
    device = query.device
    lists = inputs.full_counts.shape[1]
    at = batch[..., 0], head[..., 0] * lists // fields.heads, query[..., 0] // size
    counts, indices = inputs.full_counts.to(device)[at], inputs.block_indices.to(device)[at]
    full = seen_blocks(counts, indices, -(-keys // size))
    return visible | full.repeat_interleave(size, -1)[..., :keys]


def has_full_lists(fields: FeatureFields) -> bool:
    """Returns whether lists of a block mask name the blocks in which the mask function has no effect."""
    return fields.block_mask > 0 and fields.functions.mask >= 0


def has_positions(fields: FeatureFields) -> bool:
    """Returns whether the query of a function is its position in the sequence, as the key is.

    Lengths of paged sequences are on the device. Otherwise a query is its index in the call.
    """
    return fields.page_size > 0


def function_tensors(fields: FeatureFields) -> set[str]:
    """Returns the names of the inputs that the functions of a problem need."""
    functions = fields.functions
    needed = {
        "function_ints": functions.count(Op.INT_NUMBER) > 0 or len(functions.tables) > 0,
        "function_floats": functions.has_floats,
        "full_counts": has_full_lists(fields),
        **{name: place < len(functions.tables) for place, name in enumerate(TABLES)},
    }
    return {name for name, is_needed in needed.items() if is_needed}


def integers_of(ints: Sequence[int], tables: Sequence[Tensor]) -> list[int]:
    """Returns the elements of `function_ints`: captured ints, then sizes and strides of captured tensors."""
    numbers = list(ints)
    for table in tables:
        numbers += table.shape
        # Strides of dimensions of one element may be any numbers.
        numbers += (
            stride if size > 1 else 0 for size, stride in zip(table.shape, table.stride(), strict=True)
        )
    return numbers


def usual_captures(call: UsualCall[FeatureFields]) -> dict[str, Any]:
    """Returns typical captured values. Ints that are compared for equality are documents, others are keys."""
    import torch

    fields, functions = call.fields, call.fields.functions
    ints = [max(2, fields.seqlen_kv // (3 + place)) for place in range(functions.count(Op.INT_NUMBER))]
    floats = [2.0 + place for place in range(functions.count(Op.FLOAT_NUMBER))]
    sizes = _typical_sizes(functions, _places(fields), ints, floats)
    generator = torch.Generator().manual_seed(call.seed)
    tables = [
        # Moved first: a copy of a broadcast tensor stores all elements.
        _typical_table(functions, place, _stored(shape), max(1, fields.seqlen_kv), generator)
        .to(call.device)
        .expand(shape)
        for place, shape in enumerate(sizes)
    ]
    made: dict[str, Any] = {
        "function_ints": torch.tensor(integers_of(ints, tables), dtype=torch.int32),
        "function_floats": torch.tensor(floats, dtype=torch.float32),
        **dict(zip(TABLES, tables, strict=False)),
    }
    if has_full_lists(fields):
        # No list begins with a full block, so that all lists are possible.
        heads = fields.heads if fields.block_lists == "head" else fields.kv_heads
        shape = fields.batch, heads, -(-fields.seqlen_q // fields.block_mask)
        made["full_counts"] = torch.zeros(shape, dtype=torch.int32)
    needed = function_tensors(fields)
    return {name: tensor.to(call.device) for name, tensor in made.items() if name in needed}


def _places(fields: FeatureFields) -> dict[Op, Interval]:
    extents = {
        Op.BATCH: fields.batch,
        Op.HEAD: fields.heads,
        Op.QUERY: fields.seqlen_kv if has_positions(fields) else fields.seqlen_q,
        Op.KEY: fields.seqlen_kv,
    }
    return {op: Interval(0, max(extent, 1) - 1) for op, extent in extents.items()}


def _typical_sizes(
    functions: Functions, places: dict[Op, Interval], ints: Sequence[int], floats: Sequence[float]
) -> list[tuple[int, ...]]:
    """Returns shapes of captured tensors that hold all indices, as far as these are bounded.

    Kernels do not check indices that are places. Dimensions of other indices may have fewer elements.
    """
    bounds = intervals(functions, places, ints, floats)
    shapes = [[1] * table.dimensions for table in functions.tables]
    unbounded = int(places[Op.KEY].greatest) + 1
    # For each tensor, the dimensions of which no index is a place.
    checked = [set(range(table.dimensions)) for table in functions.tables]
    for node in functions.nodes:
        if node.op is Op.LOAD:
            shape = shapes[node.value]
            for axis, operand in enumerate(node.operands):
                least, greatest = bounds[operand]
                is_bounded = math.isfinite(least) and math.isfinite(greatest)
                needed = max(int(greatest) + 1, -int(least)) if is_bounded else unbounded
                shape[axis] = max(shape[axis], needed)
                if functions.nodes[operand].op in places:
                    checked[node.value].discard(axis)
    for shape, axes in zip(shapes, checked, strict=True):
        while math.prod(shape) > MAX_TYPICAL and any(shape[axis] > 1 for axis in axes):
            widest = max(axes, key=shape.__getitem__)
            shape[widest] = -(-shape[widest] // 2)
    return [tuple(shape) for shape in shapes]


def _stored(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that a captured tensor stores: first dimensions of large ones have one element."""
    stored = list(shape)
    for axis in range(len(shape) - 2):
        if math.prod(stored) > MAX_TYPICAL:
            stored[axis] = 1
    return tuple(stored)


def _typical_table(
    functions: Functions, place: int, shape: tuple[int, ...], keys: int, generator: torch.Generator
) -> Tensor:
    import torch

    table = functions.tables[place]
    if table.dtype.kind is Kind.FLOAT:
        # Logarithms and roots of negative numbers are NaN.
        is_positive = any(node.op in (Op.LOG, Op.SQRT) for node in functions.nodes)
        draw = torch.rand if is_positive else torch.randn
        return (draw(shape, generator=generator) + 0.5 * is_positive).to(TORCH_TABLES()[table.dtype])
    if table.dtype.kind is Kind.BOOL:
        return torch.rand(shape, generator=generator) < TRUE_SHARE
    dtype = TORCH_TABLES()[table.dtype]
    loads = {
        index for index, node in enumerate(functions.nodes) if node.op is Op.LOAD and node.value == place
    }
    compared = any(
        loads & set(node.operands) for node in functions.nodes if node.op in (Op.EQUAL, Op.NOT_EQUAL)
    )
    if not compared or not shape:
        return torch.randint(keys, shape, generator=generator).to(dtype)
    documents = torch.arange(shape[-1]) * DOCUMENTS // max(1, shape[-1])
    return documents.to(dtype).expand(shape).contiguous()


def TORCH_TABLES() -> dict[TableDtype, torch.dtype]:  # noqa: N802 - a constant that imports torch
    """Returns the element types of captured tensors in torch."""
    import torch

    return {
        TableDtype.BOOL: torch.bool,
        TableDtype.INT32: torch.int32,
        TableDtype.INT64: torch.int64,
        TableDtype.FP16: torch.float16,
        TableDtype.BF16: torch.bfloat16,
        TableDtype.FP32: torch.float32,
    }


def values_of(scores: Tensor, rows: Rows) -> Values:
    """Returns the values on which functions depend, for some rows."""
    import torch

    fields, device = rows.fields, scores.device
    made = torch.arange(max(fields.batch, 1)), torch.arange(fields.heads)
    batch, head = (
        rows.of_heads(number.expand(max(fields.batch, 1), fields.heads).to(device)).long()
        for number in (made[0][:, None], made[1])
    )
    batch = batch + rows.sequence
    query = rows.positions().long()
    if not has_positions(fields):
        query = query - (0 if fields.causal is Causal.TOP_LEFT else fields.seqlen_kv - fields.seqlen_q)
    key = torch.arange(scores.shape[-1], device=device)
    return captured_values(fields.functions, rows.inputs, (batch, head, query, key), scores)


def captured_values(
    functions: Expressions,
    inputs: ExtraInputs,
    places: tuple[Tensor, Tensor, Tensor, Tensor],
    scores: Tensor | None,
) -> Values:
    """Returns values with the captured ones of a call."""
    import torch

    from flashtune.core.expressions.evaluation import Values

    device = places[3].device
    none = torch.zeros(0, device=device)
    ints, floats = (
        none if tensor is None else tensor.to(device)
        for tensor in (inputs.function_ints, inputs.function_floats)
    )
    tables = tuple(
        tensor.to(device)
        for name in TABLES[: len(functions.tables)]
        if (tensor := getattr(inputs, name)) is not None
    )
    return Values(*places, ints, floats, tables, scores)
