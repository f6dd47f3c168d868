"""The keys of a shape, and the values of each."""

import enum
import itertools
from collections.abc import Mapping
from typing import NamedTuple

from flashtune.core.errors import UsageError, nearest, quoted
from flashtune.core.expressions.nodes import Functions
from flashtune.core.expressions.text import parse_functions
from flashtune.core.features.records import TYPES
from flashtune.core.problem import Causal, Direction, Dtype

MAX_COUNT = 2**24
MAX_LENGTH = 2**31 - 1
MAX_WIDTH = 1024


class Bounds(NamedTuple):
    """Lower and upper bound of a key's number."""

    least: int
    most: int


class Window(NamedTuple):
    """Visible keys to either side of a query; None for no bound."""

    left: int | None
    right: int | None


NUMBERS: dict[str, Bounds] = {
    "heads": Bounds(1, MAX_COUNT),
    "kv_heads": Bounds(1, MAX_COUNT),
    "seqlen": Bounds(1, MAX_LENGTH),
    "seqlen_q": Bounds(1, MAX_LENGTH),
    "seqlen_kv": Bounds(1, MAX_LENGTH),
    "head_dim": Bounds(1, MAX_WIDTH),
    "value_head_dim": Bounds(1, MAX_WIDTH),
    "batch": Bounds(1, MAX_LENGTH),
    "tokens": Bounds(1, MAX_LENGTH),
    **{name: Bounds(0, MAX_LENGTH) for name, types in TYPES.items() if int in types},
}
DTYPES: dict[str, Dtype] = {
    **{dtype.value: dtype for dtype in Dtype},
    "bfloat16": Dtype.BF16,
    "float16": Dtype.FP16,
    "float32": Dtype.FP32,
}
# The bare name of each of these means true.
FLAGS = (*(name for name, types in TYPES.items() if bool in types), "backward")
TRUTH = {"true": True, "false": False}
WINDOW = "window"

Value = int | bool | enum.StrEnum | Window | Functions | None


def _names(types: tuple[type, ...]) -> dict[str, Value]:
    """Returns the values of an enumeration by name, with `none` for None if the field is optional."""
    kind, *others = types
    names: dict[str, Value] = {value.value: value for value in kind.__members__.values()}  # type: ignore[attr-defined]
    return names | {"none": None} if others else names


WORDS: dict[str, Mapping[str, Value]] = {
    "dtype": DTYPES,
    "causal": {
        **{causal.value: causal for causal in Causal},
        "true": Causal.BOTTOM_RIGHT,
        "false": Causal.NONE,
    },
    "direction": {direction.value: direction for direction in Direction},
    **{name: _names(types) for name, types in TYPES.items() if issubclass(types[0], enum.Enum)},
    **dict.fromkeys(FLAGS, TRUTH),
}
# Value of a key without one.
ALONE = {"causal": Causal.BOTTOM_RIGHT.value, **dict.fromkeys(FLAGS, "true")}
FUNCTIONS = "functions"
KEYS = (*NUMBERS, WINDOW, FUNCTIONS, *WORDS)


def parse_values(key: str, text: str) -> tuple[Value, ...]:
    """Returns the values of one key: items joined by `|`, each a word, a number or a range."""
    items = [item.strip() for item in text.split("|")]
    if key in WORDS:
        return tuple(_word(key, item, WORDS[key]) for item in items)
    if key == WINDOW:
        return tuple(map(_window, items))
    if key == FUNCTIONS:
        return tuple(map(parse_functions, items))
    if key not in NUMBERS:
        raise UsageError(f"a shape has no key {quoted(key)}: {nearest(key, KEYS)}")
    return tuple(itertools.chain.from_iterable(_numbers(key, item) for item in items))


def _word(key: str, item: str, words: Mapping[str, Value]) -> Value:
    if item.lower() not in words:
        raise UsageError(f"{key} cannot be {quoted(item)}: {nearest(item.lower(), words)}")
    return words[item.lower()]


def _window(item: str) -> Window:
    """Returns a window from `left`, `left:right` or `:right`: visible keys in addition to the query's own."""
    left, colon, right = (part.strip() for part in item.partition(":"))
    if not left and not right:
        raise UsageError("window has no bound: write window=1024, or window=1024:0 to bound both sides")
    return Window(
        _number("window_left", left) if left else None,
        _number("window_right", right) if colon and right else None,
    )


def _numbers(key: str, item: str) -> tuple[int, ...]:
    """Returns a number, or every doubling from the first of a range to its last."""
    first_text, dots, last_text = item.partition("..")
    first = _number(key, first_text)
    if not dots:
        return (first,)
    last = _number(key, last_text)
    doublings = (last // first).bit_length() - 1 if first else 0
    if last < first or first << doublings != last:
        raise UsageError(f"{key}={item}: a range doubles from first to last, as 512..4096 does")
    return tuple(first << step for step in range(doublings + 1))


def _number(key: str, text: str) -> int:
    text = text.strip()
    # int() would also accept signs, underscores and other alphabets' digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        forms = f"{key}=128, {key}=64|128 or {key}=64..512"
        raise UsageError(f"{key} takes whole numbers, and {quoted(text)} is none: write {forms}")
    number = int(text)
    least, most = NUMBERS[key]
    if not least <= number <= most:
        raise UsageError(f"{key}={number} is out of bounds: it must lie between {least} and {most:,}")
    return number
