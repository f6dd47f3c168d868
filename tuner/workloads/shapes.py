"""Shapes as text: `heads=32,kv_heads=8,seqlen=512..16384,head_dim=64|128,causal` becomes problems.

A value is one item or several joined by `|`. An item of a number is a number or a doubling range
`first..last`. Every combination of the values is one problem.

- `causal` alone means `causal=bottom_right`.
- `seqlen` sets both lengths, `seqlen_q` and `seqlen_kv` one each.
- `tokens` replaces `batch`, which is then tokens / seqlen_q.
- `window=1023` bounds the keys before a query, `window=1023:0` also those after it.
- `backward` means `direction=backward`: the gradients.

`shape_text` of `flashtune.core.canonical` is the inverse.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from flashtune.core.canonical import normal_form
from flashtune.core.errors import UsageError
from flashtune.core.features.records import DEFAULTS
from flashtune.core.problem import Causal, Direction, Dtype, Problem
from flashtune.tuner.workloads.shape_values import ALONE, KEYS, Value, Window, parse_values

MAX_PROBLEMS = 10_000

Choices = Mapping[str, tuple[Value, ...]]
Word = TypeVar("Word", Dtype, Causal, Direction)


def parse_shape(text: str) -> tuple[Problem, ...]:
    """Returns all problems of a shape, in the order of its values, without duplicates."""
    choices: dict[str, tuple[Value, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator and key in ALONE:
            value = ALONE[key]
        elif not separator and key in KEYS:
            raise UsageError(f"{key} has no value: write {key}=...")
        if key in choices:
            raise UsageError(f"{key} is given twice: list its values with |, as in {key}=a|b")
        choices[key] = parse_values(key, value)
    return expand(choices)


def expand(choices: Choices) -> tuple[Problem, ...]:
    """Returns every combination of the keys' values as problems, without duplicates."""
    if math.prod(len(values) for values in choices.values()) > MAX_PROBLEMS:
        raise UsageError(f"the lists and ranges name more than {MAX_PROBLEMS:,} shapes: shorten them")
    combinations = itertools.product(*choices.values())
    return tuple(dict.fromkeys(_build(dict(zip(choices, values, strict=True))) for values in combinations))


def _build(values: dict[str, Value]) -> Problem:
    """Returns one combination of values as a problem, with defaults for missing keys."""
    numbers = {key: value for key, value in values.items() if type(value) is int}
    for key in ("heads", "head_dim"):
        if key not in numbers:
            raise UsageError(f"a shape needs {key}: add {key}=...")
    seqlen_q = numbers.get("seqlen_q", numbers.get("seqlen"))
    seqlen_kv = numbers.get("seqlen_kv", numbers.get("seqlen"))
    if seqlen_q is None or seqlen_kv is None:
        raise UsageError("a shape needs its lengths: add seqlen=..., or seqlen_q=... and seqlen_kv=...")
    if {"seqlen", "seqlen_q", "seqlen_kv"} <= numbers.keys():
        raise UsageError("seqlen, seqlen_q and seqlen_kv exclude each other: leave one of the three out")
    if "kv_scale" in values and "kv_dtype" not in values:
        raise UsageError("kv_scale says what shares a scale in a quantised cache: add kv_dtype=e4m3 or int8")
    if "block_lists" in values and not values.get("block_mask"):
        raise UsageError("block_lists says which heads share a block mask's lists: add block_mask=64 or 128")
    window = _window(values)
    features: dict[str, Any] = {name: values[name] for name in DEFAULTS if name in values}
    features |= {"window_left": window.left, "window_right": window.right}
    if features.get("kv_dtype") is None:
        # Without a quantised cache there is no scale to share.
        features.pop("kv_scale", None)
    problem = Problem(
        dtype=_word(values.get("dtype"), Dtype.BF16),
        head_dim=numbers["head_dim"],
        value_head_dim=numbers.get("value_head_dim", numbers["head_dim"]),
        heads=numbers["heads"],
        kv_heads=numbers.get("kv_heads", numbers["heads"]),
        batch=_batch(numbers, seqlen_q),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        causal=_word(values.get("causal"), Causal.NONE),
        direction=_direction(values),
        **features,
    )
    # Use the form that dispatch uses: a record under another form would never be found.
    return normal_form(problem)


def _word(value: Value, default: Word) -> Word:
    return value if isinstance(value, type(default)) else default


def _direction(values: dict[str, Value]) -> Direction:
    if "backward" not in values:
        return _word(values.get("direction"), Direction.FORWARD)
    if "direction" in values:
        raise UsageError("backward and direction=backward are the same: use one of them")
    return Direction.BACKWARD if values["backward"] is True else Direction.FORWARD


def _window(values: dict[str, Value]) -> Window:
    window, left, right = (values.get(key) for key in ("window", "window_left", "window_right"))
    if isinstance(window, Window):
        if left is not None or right is not None:
            raise UsageError(
                "window says what window_left and window_right do: leave one of the two ways out"
            )
        return window
    return Window(left if isinstance(left, int) else None, right if isinstance(right, int) else None)


def _batch(numbers: dict[str, int], seqlen_q: int) -> int:
    tokens = numbers.get("tokens")
    if tokens is None:
        return numbers.get("batch", 1)
    if "batch" in numbers:
        raise UsageError("tokens and batch exclude each other: use one of them")
    if tokens % seqlen_q:
        raise UsageError(
            f"tokens={tokens} is not a multiple of seqlen_q={seqlen_q}: batch is tokens / seqlen_q"
        )
    return tokens // seqlen_q
