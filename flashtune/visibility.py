"""How many keys the queries of a problem see: sums over rows without walking them."""

from __future__ import annotations

from typing import NamedTuple


class Sight(NamedTuple):
    """Which keys the queries of one head see.

    Query i stands at p = i + `diagonal` and sees keys from p - `left` to p + `right`, of its chunk alone, and
    the first keys whatever lies between, up to p + `right`.
    """

    seqlen_q: int
    seqlen_kv: int
    diagonal: int
    left: int | None
    right: int | None
    first: int
    chunk: int


def visible_pairs(sight: Sight) -> int:
    """(query, key) pairs that are seen."""
    ends = _sum_of_ends(sight, sight.seqlen_kv)
    return ends - _sum_of_starts(sight, sight.seqlen_kv) + _seen_at_the_start(sight)


def distinct_keys(sight: Sight) -> int:
    """Keys that at least one query sees."""
    if not sight.seqlen_q:
        return 0
    last = sight.diagonal + sight.seqlen_q - 1
    end = sight.seqlen_kv if sight.right is None else _clamp(last + sight.right + 1, sight.seqlen_kv)
    start = _start(sight, sight.diagonal, sight.seqlen_kv)
    return max(0, end - start) + min(sight.first, start)


def _start(sight: Sight, place: int, most: int) -> int:
    """The first key that a query at a place sees, but for the first ones."""
    windowed = 0 if sight.left is None else place - sight.left
    chunked = place // sight.chunk * sight.chunk if sight.chunk else 0
    return _clamp(max(windowed, chunked), most)


def _sum_of_ends(sight: Sight, most: int) -> int:
    if sight.right is None:
        return sight.seqlen_q * most
    return _ramp(sight.seqlen_q, sight.diagonal + sight.right + 1, most)


def _sum_of_starts(sight: Sight, most: int) -> int:
    """Keys before the first that is seen, over all rows, of the first `most` ones."""
    if not sight.chunk:
        return 0 if sight.left is None else _ramp(sight.seqlen_q, sight.diagonal - sight.left, most)
    total, row = 0, 0
    while row < sight.seqlen_q:
        place = row + sight.diagonal
        border = place // sight.chunk * sight.chunk
        rows = min(sight.seqlen_q - row, border + sight.chunk - place)
        total += rows * _clamp(border, most)
        if sight.left is not None:
            # Where the window begins later than the chunk: what it takes off beyond the chunk's border.
            total += _ramp(rows, place - sight.left, most) - _ramp(
                rows, place - sight.left, _clamp(border, most)
            )
        row += rows
    return total


def _seen_at_the_start(sight: Sight) -> int:
    """Pairs with the first keys that the window or the chunk would hide."""
    if not sight.first:
        return 0
    return _sum_of_starts(sight, min(sight.first, sight.seqlen_kv))


def _ramp(rows: int, start: int, most: int) -> int:
    """The sum of clamp(start + i, 0, most) over i < rows."""
    first = min(rows, max(0, -start))
    full_from = min(rows, max(first, most - start))
    ramp = full_from - first
    return ramp * (start + first) + ramp * (ramp - 1) // 2 + (rows - full_from) * most


def _clamp(value: int, most: int) -> int:
    return max(0, min(value, most))
