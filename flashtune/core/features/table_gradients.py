"""Gradients of captured tensors, from the buffer that backward kernels write.

The buffer is float32. It has the gradients of all captured tensors that have one, one after the other, which
kernels sum by atomics. If gradients must be deterministic, it has the gradient of each load instead, for each
head of a sequence in turn. That is a number for each query, or for each query and key if the index of the
load depends on the key. These are summed here, in a fixed order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashtune.core.expressions.derivative import Derivatives, Element, derivatives, is_of_rows
from flashtune.core.expressions.nodes import Kind
from flashtune.core.features.functions import Rows, captured_values, values_of
from flashtune.core.features.records import TABLES, ExtraInputs, FeatureFields

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.expressions.evaluation import Values


def gradient_numbers(fields: FeatureFields, inputs: ExtraInputs) -> int:
    """Returns the number of elements of the buffer, 0 if no captured tensor has a gradient."""
    derived = derivatives(fields.functions)
    if not derived.elements:
        return 0
    if fields.deterministic:
        return fields.batch * fields.heads * sum(_sizes(fields, derived))
    return element_count(fields, inputs)


def element_count(fields: FeatureFields, inputs: ExtraInputs) -> int:
    """Returns the number of elements of all captured tensors that have a gradient."""
    return sum(math.prod(shape) for shape in _shapes(fields, inputs).values())


def table_gradients(fields: FeatureFields, inputs: ExtraInputs, buffer: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of captured tensors, float32 of their shapes, by their names in `ExtraInputs`."""
    derived = derivatives(fields.functions)
    shapes = _shapes(fields, inputs)
    if not fields.deterministic:
        parts = buffer.split([math.prod(shape) for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    sums = {name: buffer.new_zeros(math.prod(shape)) for name, shape in shapes.items()}
    by_head = buffer.view(fields.batch, fields.heads, -1).split(_sizes(fields, derived), -1)
    for element, gradient in zip(derived.elements, by_head, strict=True):
        table = derived.nodes[element.load].value
        # The sums of one head at a time need less memory for indices.
        for batch in range(fields.batch):
            for head in range(fields.heads):
                index = _index(fields, inputs, derived, element, batch, head)
                values = gradient[batch, head].view(fields.seqlen_q, -1)
                index = index.expand(values.shape).flatten()
                sums[TABLES[table]].index_put_((index,), values.flatten(), accumulate=True)
    return {name: total.view(shapes[name]) for name, total in sums.items()}


class TableTerm(NamedTuple):
    """One load of a captured tensor, for some scores. Its tensors broadcast with the scores."""

    place: Tensor  # The places of the elements among those of all captured tensors with gradients, in int64.
    slope: Tensor  # The derivative of the changed score by the element.
    errors: Tensor  # Bounds of its rounding errors, in roundoffs.


def table_terms(scores: Tensor, rows: Rows) -> list[TableTerm]:
    """Returns the loads on which gradients of captured tensors depend."""
    from flashtune.core.expressions.evaluation import error_terms, evaluate

    derived = derivatives(rows.fields.functions)
    values = values_of(scores, rows)
    firsts, first = {}, 0
    for name, shape in _shapes(rows.fields, rows.inputs).items():
        firsts[name], first = first, first + math.prod(shape)
    return [
        TableTerm(
            firsts[TABLES[derived.nodes[element.load].value]] + _place(derived, element, values),
            evaluate(derived, values, element.slope),
            error_terms(derived, values, element.slope),
        )
        for element in derived.elements
    ]


def depends_on_floats(fields: FeatureFields) -> bool:
    """Returns whether the index of a load with a gradient depends on floats, such as the score.

    Such an index is not computed again here: another rounding may give another index.
    """
    derived = derivatives(fields.functions)
    return any(
        derived.kinds[place] is Kind.FLOAT
        for element in derived.elements
        for place in derived.needed(element.load)[:-1]
    )


def _shapes(fields: FeatureFields, inputs: ExtraInputs) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the captured tensors that have a gradient, by name."""
    return {
        name: tuple(getattr(inputs, name).shape)
        for name, table in zip(TABLES, fields.functions.tables, strict=False)
        if table.has_gradient
    }


def _sizes(fields: FeatureFields, derived: Derivatives) -> list[int]:
    """Returns the numbers of one head of a sequence for each load."""
    return [
        fields.seqlen_q * (1 if is_of_rows(derived, element) else fields.seqlen_kv)
        for element in derived.elements
    ]


def _index(
    fields: FeatureFields, inputs: ExtraInputs, derived: Derivatives, element: Element, batch: int, head: int
) -> Tensor:
    """Returns the places of the elements that a load reads: it broadcasts with [seqlen_q, seqlen_kv or 1]."""
    import torch

    device = getattr(inputs, TABLES[derived.nodes[element.load].value]).device
    sequence, number = (torch.tensor(place, device=device) for place in (batch, head))
    query, key = (torch.arange(size, device=device) for size in (fields.seqlen_q, fields.seqlen_kv))
    values = captured_values(derived, inputs, (sequence, number, query[:, None], key), None)
    return _place(derived, element, values)


def _place(derived: Derivatives, element: Element, values: Values) -> Tensor:
    """Returns the places of the elements that a load reads, as if the captured tensor were contiguous."""
    import torch

    from flashtune.core.expressions.evaluation import evaluate, wrapped

    node = derived.nodes[element.load]
    place = torch.zeros((), dtype=torch.int64, device=values.key.device)
    for operand, size in zip(node.operands, values.tables[node.value].shape, strict=True):
        place = place * size + wrapped(evaluate(derived, values, operand), size)
    return place
