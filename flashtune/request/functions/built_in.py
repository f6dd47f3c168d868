"""Functions that compute a feature of `attention`, for which kernels of the feature are faster.

A mask function is recognised if it compares the distance of the query and the key with numbers. A score
function is recognised if it is a softcap or ALiBi. Numbers are compared by their values in each call.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashtune.core.caches import keep
from flashtune.core.expressions.nodes import Node, Op, float_bits, float_of
from flashtune.core.features.plain_problem import Causal
from flashtune.core.features.table import NUMBER_INPUTS
from flashtune.request.functions.tracing import Traced

# Distances and sums of them with numbers are far from the ends of int32.
FARTHEST = 2**29
# Functions of which the first window is kept.
MAX_KEPT = 1024


class Extents(NamedTuple):
    """The extents of a call."""

    batch: int
    heads: int
    queries: int
    keys: int


class Band(NamedTuple):
    """A mask by the distance from a key to a query, `query - key`. None is no bound."""

    least: int | None = None
    most: int | None = None

    def both(self, other: "Band") -> "Band":
        """Returns the mask of the pairs that both masks show."""
        leasts, mosts = (
            [bound for bound in pair if bound is not None] for pair in zip(self, other, strict=True)
        )
        return Band(max(leasts, default=None), min(mosts, default=None))

    def within(self, extents: Extents) -> "Band":
        """Returns the mask without bounds that hide nothing."""
        least = None if self.least is None or self.least <= 1 - extents.keys else self.least
        most = None if self.most is None or self.most >= extents.queries - 1 else self.most
        return Band(least, most)


class BuiltIn(NamedTuple):
    """The features that functions compute."""

    band: Band  # The mask.
    options: dict[str, Any]  # Arguments of `attention`.

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of `Problem` that differ from one without functions."""
        left, right = self.options.get("window", (None, None))
        return {
            "causal": Causal(self.options.get("causal", Causal.NONE)),
            "window_left": left,
            "window_right": right,
            "softcap": "softcap" in self.options,
            "alibi": "alibi_slopes" in self.options,
        }


class _Linear(NamedTuple):
    """A sum of the query, the key and a number, with factors."""

    query: int = 0
    key: int = 0
    number: int = 0

    def plus(self, other: "_Linear | None", factor: int) -> "_Linear | None":
        """Returns the sum with a multiple of another one, or None if it may not fit 32 bits."""
        if other is None:
            return None
        total = _Linear(*(own + factor * term for own, term in zip(self, other, strict=True)))
        fits = abs(total.query) <= 1 and abs(total.key) <= 1 and abs(total.number) < FARTHEST
        return total if fits else None


ZERO = _Linear()
PLACES = {Op.QUERY: _Linear(query=1), Op.KEY: _Linear(key=1)}
# The factors of both operands.
SUMS = {Op.ADD: (1, 1), Op.SUBTRACT: (1, -1), Op.NEGATE: (-1,)}

_windows: dict[str, Band] = {}


def built_in(traced: Traced, extents: Extents, needs_grad: bool, *, is_call: bool = True) -> BuiltIn | None:
    """Returns the features that functions compute exactly, or None.

    `needs_grad` is whether an input requires grad. Without `is_call`, later calls do not depend on this one.
    """
    if max(extents) >= FARTHEST or 0 in extents:
        return None
    expressions = _Expressions(traced)
    functions = traced.functions
    band = Band() if functions.mask < 0 else expressions.band(functions.mask)
    if band is None:
        return None
    band = band.within(extents)
    if (band.least or 0) > 0 or (band.most or 0) < 0:
        # Each window of `attention` shows a query the key at its own position, which this mask hides.
        return None
    is_causal, is_square = band.least == 0, extents.queries == extents.keys
    # Without a causal mask from the first query on, features align the last query with the last key.
    has_positions = is_causal or is_square
    if band != Band() and not has_positions:
        return None
    options: dict[str, Any] = {}
    if is_causal:
        options["causal"] = "bottom_right" if is_square else "top_left"
    if band.most is not None or (band.least or 0) < 0:
        options["window"] = (band.most, None if is_causal or band.least is None else -band.least)
    if functions.score >= 0:
        cap = expressions.cap(functions.score)
        # The native backward pass has no ALiBi.
        slopes = (
            None
            if cap or needs_grad or not has_positions
            else expressions.slopes(functions.score, extents, is_causal=is_causal)
        )
        if cap is None and slopes is None:
            return None
        options |= {"softcap": cap} if slopes is None else {"alibi_slopes": slopes}
    if "window" in options and traced.ints and not _is_first(traced.text, band, is_call):
        return None
    return BuiltIn(band, options)


def _is_first(text: str, window: Band, is_call: bool) -> bool:
    """Returns whether a window is the first of its function.

    A window is a constant of its kernel. Other windows use the kernel of the function, which takes any.
    """
    first = _windows.get(text)
    if first is None and is_call:
        keep(_windows, text, window, MAX_KEPT)
    return first in (None, window)


class _Expressions:
    """The nodes of functions, with captured values."""

    def __init__(self, traced: Traced) -> None:
        self.nodes, self.traced = traced.functions.nodes, traced

    def band(self, place: int) -> Band | None:
        """Returns the mask of a node, or None if it is no comparison of distances."""
        node = self.nodes[place]
        if node.op is Op.AND:
            first, other = map(self.band, node.operands)
            return None if first is None or other is None else first.both(other)
        if node.op not in (Op.LESS, Op.LESS_EQUAL):
            return None
        left, right = node.operands
        margin, bound = int(node.op is Op.LESS), self.linear(right)
        if self.nodes[left].op is not Op.ABS:
            return _shown(self.linear(left), bound, margin)
        distance = self.linear(self.nodes[left].operands[0])
        first = _shown(distance, bound, margin)
        other = None if distance is None else _shown(ZERO.plus(distance, -1), bound, margin)
        return None if first is None or other is None else first.both(other)

    def linear(self, place: int) -> _Linear | None:
        """Returns an integer as a sum of the query, the key and a number, or None."""
        node = self.nodes[place]
        if node.op in PLACES:
            return PLACES[node.op]
        if node.op in (Op.INT, Op.INT_NUMBER):
            number = node.value if node.op is Op.INT else self.traced.ints[node.value]
            return ZERO.plus(_Linear(number=number), 1)
        if node.op not in SUMS:
            return None
        total: _Linear | None = ZERO
        for operand, factor in zip(node.operands, SUMS[node.op], strict=True):
            total = None if total is None else total.plus(self.linear(operand), factor)
        return total

    def cap(self, place: int) -> float | None:
        """Returns the cap of `cap * tanh(score / cap)`, or None."""
        factors = self.nodes[place].operands if self.nodes[place].op is Op.MULTIPLY else (place,)
        caps = [self.number(factor) for factor in factors]
        tanh = next((factor for factor in factors if self.nodes[factor].op is Op.TANH), None)
        if tanh is None or (len(factors) > 1 and caps == [None, None]):
            return None
        cap = 1.0 if len(factors) == 1 else next(number for number in caps if number is not None)
        inner = self.nodes[self.nodes[tanh].operands[0]]
        divided = inner.op is Op.DIVIDE and self.nodes[inner.operands[0]].op is Op.SCORE
        if inner.op is Op.SCORE:
            divisor: float | None = 1.0
        else:
            divisor = self.number(inner.operands[1]) if divided else None
        limits = NUMBER_INPUTS["softcap"]
        # The hyperbolic tangent is odd, so that a negative cap is its magnitude.
        return abs(cap) if divisor == cap and limits.least <= abs(cap) <= limits.most else None

    def slopes(self, place: int, extents: Extents, *, is_causal: bool) -> Tensor | None:
        """Returns the slopes of `score - slopes[head] * abs(query - key)`, or None.

        With a causal mask, the distance is `query - key` without a sign.
        """
        node = self.nodes[place]
        if node.op not in (Op.ADD, Op.SUBTRACT):
            return None
        terms = node.operands if self.nodes[node.operands[0]].op is Op.SCORE else node.operands[::-1]
        if self.nodes[terms[0]].op is not Op.SCORE or (node.op is Op.SUBTRACT and terms != node.operands):
            return None
        sign, term = self.signed(terms[1], 1 if node.op is Op.ADD else -1)
        if self.nodes[term].op is not Op.MULTIPLY:
            return None
        factors = []
        for operand in self.nodes[term].operands:
            sign, factor = self.signed(operand, sign)
            factors.append(factor)
        loads = [factor for factor in factors if self.nodes[factor].op is Op.LOAD]
        if len(loads) != 1:
            return None
        distance = factors[0] if factors[1] == loads[0] else factors[1]
        own = self.distance(distance, is_causal=is_causal)
        return self.table(self.nodes[loads[0]], extents) if own is not None and sign * own == -1 else None

    def distance(self, place: int, *, is_causal: bool) -> int | None:
        """Returns the sign of a node that is the distance of visible pairs, or None if it is another one."""
        if self.nodes[place].op is not Op.TO_FLOAT:
            return None
        sign, inner = self.signed(self.nodes[place].operands[0], 1)
        if self.nodes[inner].op is Op.ABS:
            linear = self.linear(self.nodes[inner].operands[0])
            return sign if linear in (_Linear(1, -1), _Linear(-1, 1)) else None
        linear = self.linear(inner)
        if not is_causal or linear not in (_Linear(1, -1), _Linear(-1, 1)):
            return None
        return sign * linear.query

    def table(self, load: Node, extents: Extents) -> Tensor | None:
        """Returns a captured tensor that has one float32 for each head, or each head of each sequence."""
        table = self.traced.tables[load.value]
        indices = tuple(self.nodes[operand].op for operand in load.operands)
        shapes: Mapping[tuple[Op, ...], tuple[int, ...]] = {
            (Op.HEAD,): (extents.heads,),
            (Op.BATCH, Op.HEAD): (extents.batch, extents.heads),
        }
        fits = table.dtype is torch.float32 and table.shape == shapes.get(indices)
        return table if fits and (table.stride(-1) == 1 or extents.heads == 1) else None

    def signed(self, place: int, sign: int) -> tuple[int, int]:
        """Returns the sign and the node of a value that may be negated."""
        node = self.nodes[place]
        return (-sign, node.operands[0]) if node.op is Op.NEGATE else (sign, place)

    def number(self, place: int) -> float | None:
        """Returns a float32 that is a number, or None."""
        node = self.nodes[place]
        if node.op is Op.FLOAT:
            return float_of(node.value)
        if node.op is Op.FLOAT_NUMBER:
            return float_of(float_bits(self.traced.floats[node.value]))
        if node.op is Op.TO_FLOAT and self.nodes[node.operands[0]].op is Op.INT_NUMBER:
            number = self.traced.ints[self.nodes[node.operands[0]].value]
            return float_of(float_bits(float(number)))
        return None


def _shown(left: _Linear | None, right: _Linear | None, margin: int) -> Band | None:
    """Returns where `left + margin <= right`, or None if this depends on more than the distance."""
    total = None if left is None else left.plus(right, -1)
    if total is None:
        return None
    number = total.number + margin
    if total[:2] == (1, -1):
        return Band(most=-number)
    if total[:2] == (-1, 1):
        return Band(least=number)
    # A comparison of numbers.
    return Band() if total[:2] == (0, 0) and number <= 0 else None
