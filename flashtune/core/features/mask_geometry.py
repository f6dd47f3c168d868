"""Number of visible keys of a problem's queries: closed-form sums without a loop over rows."""

from typing import NamedTuple


class MaskInfo(NamedTuple):
    """The visible keys of one head's queries.

    Query i has position p = i + `diagonal`. It sees keys from p - `left` to p + `right` of its own chunk, and
    the first `first` keys up to p + `right`.
    """

    seqlen_q: int
    seqlen_kv: int
    diagonal: int
    left: int | None
    right: int | None
    first: int
    chunk: int


def visible_pairs(sight: MaskInfo) -> int:
    """Returns the number of visible (query, key) pairs."""
    first = min(sight.first, sight.seqlen_kv)
    if sight.right is None:
        at_the_start = sight.seqlen_q * first
    else:
        at_the_start = _ramp(sight.seqlen_q, sight.diagonal + sight.right + 1, first)
    if not sight.chunk:
        behind = _seen_between(sight, sight.seqlen_q, sight.diagonal, first, sight.seqlen_kv)
    else:
        behind = _seen_in_chunks(sight, first)
    return at_the_start + behind


def distinct_keys(sight: MaskInfo) -> int:
    """Returns the number of keys that at least one query sees."""
    if not sight.seqlen_q:
        return 0
    last = sight.diagonal + sight.seqlen_q - 1
    reach = sight.seqlen_kv if sight.right is None else _clamp(last + sight.right + 1, sight.seqlen_kv)
    end = reach
    if sight.chunk:
        end = _clamp((last // sight.chunk + 1) * sight.chunk, reach)
    windowed = 0 if sight.left is None else sight.diagonal - sight.left
    chunked = sight.diagonal // sight.chunk * sight.chunk if sight.chunk else 0
    start = _clamp(max(windowed, chunked), sight.seqlen_kv)
    first = min(sight.first, reach)
    return max(0, end - start) + min(first, start) + max(0, first - max(start, end))


def _seen_in_chunks(sight: MaskInfo, first: int) -> int:
    """Returns the visible pairs in the queries' own chunks, from key `first` on."""
    size, keys = sight.chunk, sight.seqlen_kv
    if not sight.seqlen_q:
        return 0
    top, bottom = (position // size for position in (sight.diagonal, sight.diagonal + sight.seqlen_q - 1))

    def of_chunk(chunk: int) -> int:
        border = chunk * size
        position = max(border, sight.diagonal)
        rows = min(border + size, sight.diagonal + sight.seqlen_q) - position
        return _seen_between(sight, rows, position, max(first, border), min(keys, border + size))

    # Chunks with all their queries and keys have equal counts. Of the others, only these have visible pairs.
    whole = range(max(top + 1, -(-first // size)), min(bottom, keys // size))
    others = {chunk for chunk in (top, bottom, first // size, keys // size) if top <= chunk <= bottom}
    alike = len(whole) * of_chunk(whole[0]) if whole else 0
    return alike + sum(of_chunk(chunk) for chunk in others if chunk not in whole)


def _seen_between(sight: MaskInfo, rows: int, position: int, start: int, end: int) -> int:
    """Returns the visible pairs of `rows` queries from `position` on with the keys start..end - 1."""
    keys = max(0, end - start)
    ends = rows * keys if sight.right is None else _ramp(rows, position + sight.right + 1 - start, keys)
    return ends - (0 if sight.left is None else _ramp(rows, position - sight.left - start, keys))


def _ramp(rows: int, start: int, most: int) -> int:
    """Returns the sum of clamp(start + i, 0, most) over i < rows."""
    first = min(rows, max(0, -start))
    full_from = min(rows, max(first, most - start))
    ramp = full_from - first
    return ramp * (start + first) + ramp * (ramp - 1) // 2 + (rows - full_from) * most


def _clamp(value: int, most: int) -> int:
    return max(0, min(value, most))
