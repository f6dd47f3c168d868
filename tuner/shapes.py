"""Shapes as text: `heads=32,kv_heads=8,seqlen=512..16384,head_dim=64|128,causal` becomes problems.

A value is one item or several joined by `|`; an item of a number is a number or a doubling range
`first..last`. Every combination of the values is one problem. `causal` alone means
`causal=bottom_right`; `seqlen` sets both lengths, `seqlen_q` and `seqlen_kv` one each; `tokens`
stands in place of `batch`, which is then tokens / seqlen_q.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Mapping

from flashtune.errors import UsageError
from flashtune.problem import Causal, Dtype, Problem

MAX_PROBLEMS = 10_000
MAX_COUNT = 2**24
MAX_LENGTH = 2**31 - 1
MAX_WIDTH = 1024

NUMBERS: dict[str, int] = {
    "heads": MAX_COUNT,
    "kv_heads": MAX_COUNT,
    "seqlen": MAX_LENGTH,
    "seqlen_q": MAX_LENGTH,
    "seqlen_kv": MAX_LENGTH,
    "head_dim": MAX_WIDTH,
    "value_head_dim": MAX_WIDTH,
    "batch": MAX_LENGTH,
    "tokens": MAX_LENGTH,
}
DTYPES: dict[str, Dtype] = {
    **{dtype.value: dtype for dtype in Dtype},
    "bfloat16": Dtype.BF16,
    "float16": Dtype.FP16,
    "float32": Dtype.FP32,
}
CAUSALS: dict[str, Causal] = {
    **{causal.value: causal for causal in Causal},
    "true": Causal.BOTTOM_RIGHT,
    "false": Causal.NONE,
}
KEYS = (*NUMBERS, "dtype", "causal")

Value = int | Dtype | Causal
Choices = Mapping[str, tuple[Value, ...]]


def parse_shape(text: str) -> tuple[Problem, ...]:
    """All problems that a shape names, in the order of its values, none twice.

    Raises:
        UsageError: An unknown key or value, a missing key, or an impossible shape.
    """
    choices: dict[str, tuple[Value, ...]] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, separator, value = (piece.strip() for piece in part.partition("="))
        if key == "causal" and not separator:
            value = Causal.BOTTOM_RIGHT.value
        elif not separator and key in KEYS:
            raise UsageError(f"{key} has no value: write {key}=...")
        if key in choices:
            raise UsageError(f"{key} is given twice: list its values with |, as in {key}=a|b")
        choices[key] = parse_values(key, value)
    return expand(choices)


def parse_values(key: str, text: str) -> tuple[Value, ...]:
    """The values of one key: items joined by `|`, each a word, a number or a range.

    Raises:
        UsageError: The key or a value is none that shapes have.
    """
    items = [item.strip() for item in text.split("|")]
    if key == "dtype":
        return tuple(_word(key, item, DTYPES) for item in items)
    if key == "causal":
        return tuple(_word(key, item, CAUSALS) for item in items)
    if key not in NUMBERS:
        raise UsageError(f"a shape has no key {quoted(key)}: {nearest(key, KEYS)}")
    return tuple(itertools.chain.from_iterable(_numbers(key, item) for item in items))


def expand(choices: Choices) -> tuple[Problem, ...]:
    """Every combination of the keys' values as problems, none twice.

    Raises:
        UsageError: A key is missing or contradicts another, or a combination is impossible.
    """
    if math.prod(len(values) for values in choices.values()) > MAX_PROBLEMS:
        raise UsageError(f"the lists and ranges name more than {MAX_PROBLEMS:,} shapes: shorten them")
    combinations = itertools.product(*choices.values())
    return tuple(dict.fromkeys(_build(dict(zip(choices, values, strict=True))) for values in combinations))


def quoted(text: str) -> str:
    """A user's words inside a sentence: one line, escaped, not too long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def nearest(word: str, known: Iterable[str]) -> str:
    """What a user may have meant, for the end of a sentence: one near name, or all of them."""
    names = tuple(known)
    near = difflib.get_close_matches(word[:100], names, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(names)}"


def _word(key: str, item: str, known: Mapping[str, Value]) -> Value:
    found = known.get(item.lower())
    if found is None:
        raise UsageError(f"{key} cannot be {quoted(item)}: {nearest(item.lower(), known)}")
    return found


def _numbers(key: str, item: str) -> tuple[int, ...]:
    """A number, or every doubling from the first of a range to its last."""
    first_text, dots, last_text = item.partition("..")
    first = _number(key, first_text)
    if not dots:
        return (first,)
    last = _number(key, last_text)
    doublings = (last // first).bit_length() - 1
    if last < first or first << doublings != last:
        raise UsageError(f"{key}={item}: a range doubles from first to last, as 512..4096 does")
    return tuple(first << step for step in range(doublings + 1))


def _number(key: str, text: str) -> int:
    text = text.strip()
    # int() would also take signs, underscores and other alphabets' digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        forms = f"{key}=128, {key}=64|128 or {key}=64..512"
        raise UsageError(f"{key} takes whole numbers, and {quoted(text)} is none: write {forms}")
    number = int(text)
    if not 1 <= number <= NUMBERS[key]:
        raise UsageError(f"{key}={number} is out of bounds: it must lie between 1 and {NUMBERS[key]:,}")
    return number


def _build(given: dict[str, Value]) -> Problem:
    """One combination of values as a problem, with the defaults of what it leaves out."""
    dtype, causal = given.get("dtype"), given.get("causal")
    numbers = {key: value for key, value in given.items() if isinstance(value, int)}
    for key in ("heads", "head_dim"):
        if key not in numbers:
            raise UsageError(f"a shape needs {key}: add {key}=...")
    seqlen_q = numbers.get("seqlen_q", numbers.get("seqlen"))
    seqlen_kv = numbers.get("seqlen_kv", numbers.get("seqlen"))
    if seqlen_q is None or seqlen_kv is None:
        raise UsageError("a shape needs its lengths: add seqlen=..., or seqlen_q=... and seqlen_kv=...")
    if {"seqlen", "seqlen_q", "seqlen_kv"} <= numbers.keys():
        raise UsageError("seqlen, seqlen_q and seqlen_kv contradict one another: leave one of the three out")
    return Problem(
        dtype=dtype if isinstance(dtype, Dtype) else Dtype.BF16,
        head_dim=numbers["head_dim"],
        value_head_dim=numbers.get("value_head_dim", numbers["head_dim"]),
        heads=numbers["heads"],
        kv_heads=numbers.get("kv_heads", numbers["heads"]),
        batch=_batch(numbers, seqlen_q),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        causal=causal if isinstance(causal, Causal) else Causal.NONE,
    )


def _batch(numbers: dict[str, int], seqlen_q: int) -> int:
    tokens = numbers.get("tokens")
    if tokens is None:
        return numbers.get("batch", 1)
    if "batch" in numbers:
        raise UsageError("tokens and batch say the same thing twice: leave one of the two out")
    if tokens % seqlen_q:
        raise UsageError(f"tokens={tokens} is no multiple of seqlen_q={seqlen_q}: batch is tokens / seqlen_q")
    return tokens // seqlen_q
