"""The library of this package's torch operators: one list makes all schemas, operands and calls."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.library import Library

from flashtune.core.features.records import NUMBERS, TABLES, TENSORS, ExtraInputs
from flashtune.request.call import Call, Options, known_if_empty
from flashtune.request.request import Result

# Inductor must preserve the program's strides, because kernels are selected by them.
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)

library = Library("flashtune", "DEF")

SCHEMA_TYPES = {str: "str", bool: "bool", int: "SymInt", int | None: "SymInt?"}
# The operands of a call and their types in schemas: q, k, v and the scale, options and extra inputs.
OPERANDS = {
    "q": "Tensor",
    "k": "Tensor",
    # An operator may neither return an input nor get the same tensor as two inputs: with MLA, v is absent.
    "v": "Tensor?",
    "scale": "float?",
    **{name: SCHEMA_TYPES[kind] for name, kind in get_type_hints(Options).items()},
    **dict.fromkeys(TENSORS, "Tensor?"),
    **dict.fromkeys(NUMBERS, "float?"),
}
# Operands that saved graphs may lack. They are last in a schema and have defaults, by name.
LATER: dict[str, Any] = {
    "block_size": 0,
    "block_counts": None,
    "block_indices": None,
    "tree": None,
    "batch_invariant": False,
    "functions": "",
    **dict.fromkeys(("full_counts", "function_ints", "function_floats", *TABLES)),
    "out_order": "",
}
ALL = (*(name for name in OPERANDS if name not in LATER), *LATER)
DEFAULTS = tuple(LATER.values())
# The values of a call in the order of schemas, and back.
_in_order: Callable[[Sequence[Any]], tuple[Any, ...]] = itemgetter(*map(tuple(OPERANDS).index, ALL))
_as_given: Callable[[Sequence[Any]], tuple[Any, ...]] = itemgetter(*map(ALL.index, OPERANDS))


def schema(names: Sequence[str] = ALL, optional: int = len(DEFAULTS)) -> str:
    """Returns the operands of a schema as text. The last `optional` ones have defaults."""
    values = {"bool": "=False", "SymInt": "=0", "str": "=''"}
    defaults = [""] * (len(names) - optional) + [
        values.get(OPERANDS[name], "=None") for name in names[len(names) - optional :]
    ]
    return ", ".join(
        f"{OPERANDS[name]} {name}{default}" for name, default in zip(names, defaults, strict=True)
    )


def operands(call: Call, names: Sequence[str] = ALL) -> tuple[Any, ...]:
    """Returns the operands of an operator for a call."""
    values = (call.q, call.k, None if call.options.latent else call.v, call.scale, *call.options, *call.side)
    if names is ALL:
        return _in_order(values)
    by_name = dict(zip(OPERANDS, values, strict=True))
    return tuple([by_name[name] for name in names])


def call_of(values: Sequence[Any], names: Sequence[str] = ALL, **others: object) -> Call:
    """Returns the call of an operator's operands. `others` are options that are not operands."""
    if names is ALL:
        # Defaults at the end are not passed.
        values = _as_given((*values, *DEFAULTS[len(DEFAULTS) - len(ALL) + len(values) :]))
    else:
        fields = (
            dict.fromkeys(OPERANDS)
            | Options._field_defaults
            | others
            | dict(zip(names, values, strict=False))
        )
        fields["kv_layout"] = fields["layout"]
        values = tuple(fields.values())
    q, k, v, scale, *rest = values
    options, side = Options(*rest[: len(Options._fields)]), ExtraInputs(*rest[len(Options._fields) :])
    return Call(q, k, k if v is None else v, scale, options, known_if_empty(side))


def contiguous(result: Result) -> Result:
    """Returns a contiguous result. SDPA's backends return various strides, but a compiler expects these."""
    if isinstance(result, Tensor):
        return result.contiguous()
    out, lse = result
    return out.contiguous(), lse.contiguous()
