"""Gluon functions that divide places of a block, and that make words of them.

A word has a bit for each of the up to 32 places of a block that a thread has in a row.
"""

from collections.abc import Mapping

# Functions of a kernel that calls them.
CALLED: Mapping[str, str] = {
    "places_from": '''
@gluon.jit
def places_from(first):
    """Returns words of the places from a distance on. Those of a thread are 0, 1, 8, 9, 16, and so on."""
    first = gl.maximum(gl.minimum(first, 122), 0)
    return (gl.zeros_like(first) - 1 << ((first >> 2) & 30)) << gl.minimum(first & 7, 2)
''',
    "places_with": '''
@gluon.jit
def places_with(least, greatest, start, thread_places, divisor, reciprocal, WIDTH: gl.constexpr):
    """Returns words of the places of which the remainder is within an interval."""
    factor, size, near = reciprocal
    # With a negative divisor, the remainder of x is that of x - 1 by its size, less the size, plus 1.
    turns = (divisor < 0).to(gl.int32)
    # The size of the least int32 is that of the next one: remainders below 0 are greater by 1.
    is_least = divisor == -2147483648
    least = gl.where(is_least & (least < 0), least + 1, least)
    greatest = gl.where(is_least & (greatest < -1), greatest + 1, greatest)
    added = turns * (size - 1)
    first = start - turns
    rest = first - floor_divide(first, size) * size
    least = gl.maximum(least + added, 0)
    greatest = gl.minimum(gl.minimum(greatest, 2147483647 - added) + added, size - 1)
    words = gl.zeros_like(least + thread_places)
    if near > 16:
        periods = (gl.maximum(rest - (size - near), 0) + WIDTH - 1) * factor >> 20
        for period in range(0, periods + 1):
            # Sums that are larger than a block's width may be too large for an int32.
            step = period * size
            end = gl.minimum(greatest - rest, WIDTH - step) + step - thread_places
            words = words | (
                places_from(gl.minimum(least - rest, WIDTH - step) + step - thread_places)
                & (places_from(end + 1) ^ -1)
            )
    else:
        # Bits repeat after eight times the size, which is two bits for each of the divisor's remainders.
        columns = gl.minimum(2 * near, 32)
        for column in range(0, columns):
            place = rest + (column >> 1) * 8 + (column & 1) + thread_places
            remainder = place - (place * factor >> 20) * size
            words = words | (((least <= remainder) & (remainder <= greatest)).to(gl.int32) << column)
        while columns < 32:
            words = words | (words << columns)
            columns = 2 * columns
    return words
''',
    "places_between": '''
@gluon.jit
def places_between(least, greatest, divisor):
    """Returns the first place of which the quotient is within an interval, and that after the last."""
    # Larger divisors have the same quotients.
    divisor = gl.maximum(gl.minimum(divisor, 1073741824), -1073741824)
    farthest = 1073741823 // gl.maximum(gl.abs(divisor), 1) + 1
    start = gl.maximum(gl.minimum(least, farthest), -farthest) * divisor
    end = (gl.maximum(gl.minimum(greatest, farthest - 1), -farthest - 1) + 1) * divisor
    first, after = gl.where(divisor > 0, start, end + 1), gl.where(divisor > 0, end, start + 1)
    return gl.maximum(gl.minimum(first, 1073741824), 0), gl.maximum(gl.minimum(after, 1073741824), 0)
''',
    "reciprocal_of": '''
@gluon.jit
def reciprocal_of(divisor, WIDTH: gl.constexpr):
    """Returns 2**20 / size, rounded up, for a size of at most WIDTH, and the divisor's size and this one."""
    # The negative of the least int32 is no int32.
    size = gl.maximum(gl.abs(gl.maximum(divisor, -2147483647)), 1)
    near = gl.minimum(size, WIDTH)
    return 1048576 // near + 1, size, near
''',
    "divide_places": '''
@gluon.jit
def divide_places(start, thread_offsets, steps, divisor, reciprocal):
    """Returns start + thread_offsets + steps, divided by a divisor and rounded to minus infinity.

    The offsets of a block, up to its width, are divided by a product, which is exact for their size.
    """
    factor, size, near = reciprocal
    # With a negative divisor, x / divisor is -1 - (x - 1) / size.
    turns = (divisor < 0).to(gl.int32)
    first = start - turns
    quotient = floor_divide(first, size)
    # A block's offsets pass at most one multiple of a size above its width: that of the width does as well.
    rest = gl.maximum(first - quotient * size - (size - near), 0) + thread_offsets
    return (quotient ^ -turns) + ((rest + steps) * factor >> 20) * (1 - 2 * turns)
''',
}
