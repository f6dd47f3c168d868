"""Operations of intervals in Triton: bounds of results from bounds of operands.

An int is a pair of int64 bounds within int32. A result that may exceed int32 has all of int32 as its bounds,
because kernels wrap. A float is a pair of float32 bounds, which are NaN if nothing is known. The value may
then be NaN. Bounds of floats are wider than their roundings, because kernels use other orders and approximate
functions. A bool is a pair of bools: whether it can be false, and whether it can be true.
"""

# Triton passes untyped arguments: bounds.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Only NaN differs from itself. Functions without a docstring return the bounds of an operation's result.
# ruff: noqa: ANN001, ANN201, PLR0124, D103

import triton
import triton.language as tl

LEAST, GREATEST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
# Parts of a float, and numbers, by which bounds are wider: of arithmetic, and of functions.
ROUNDED, TINY = tl.constexpr(2.0**-20), tl.constexpr(2.0**-100)
APPROXIMATE, SMALL = tl.constexpr(2.0**-12), tl.constexpr(2.0**-16)
# Floats between these have exact integers, and approximate reciprocals.
EXACT, NORMAL, LARGE = tl.constexpr(2.0**24), tl.constexpr(2.0**-126), tl.constexpr(2.0**126)
MAX_SHIFT = tl.constexpr(31)
# Elements of a captured tensor that are loaded together.
LOADED = tl.constexpr(8)


@triton.jit
def within(least, greatest, is_known):
    """Returns bounds of an int, or those of int32 if they are not known or exceed it."""
    fits = is_known & (least >= LEAST) & (greatest <= GREATEST)
    return tl.where(fits, least, LEAST), tl.where(fits, greatest, GREATEST)


@triton.jit
def known(least, greatest, is_known):
    """Returns bounds of a float, or NaN if they are not known or exclude no number."""
    is_bounded = is_known & (least == least) & (greatest == greatest)
    is_bounded = is_bounded & ((least > float("-inf")) | (greatest < float("inf")))
    return tl.where(is_bounded, least, float("nan")), tl.where(is_bounded, greatest, float("nan"))


@triton.jit
def wider(least, greatest, is_known, part: tl.constexpr, number: tl.constexpr):
    """Returns bounds of a float that include roundings."""
    # An infinite bound on the wrong side becomes NaN.
    below, above = tl.abs(least) * part + number, tl.abs(greatest) * part + number
    return known(least - below, greatest + above, is_known)


@triton.jit
def extremes(p, q, r, s):
    """Returns the least and the greatest of four numbers."""
    return tl.minimum(tl.minimum(p, q), tl.minimum(r, s)), tl.maximum(tl.maximum(p, q), tl.maximum(r, s))


@triton.jit
def int_add(a, b, c, d):
    return within(a + c, b + d, a <= b)


@triton.jit
def int_subtract(a, b, c, d):
    return within(a - d, b - c, a <= b)


@triton.jit
def int_negate(a, b):
    return within(-b, -a, a <= b)


@triton.jit
def int_abs(a, b):
    ends = tl.abs(a), tl.abs(b)
    return within(tl.where((a <= 0) & (b >= 0), 0, tl.minimum(*ends)), tl.maximum(*ends), a <= b)


@triton.jit
def int_multiply(a, b, c, d):
    least, greatest = extremes(a * c, a * d, b * c, b * d)
    return within(least, greatest, a <= b)


@triton.jit
def floor_divide(a, b):
    """Returns a / b, rounded to minus infinity."""
    quotient = a // b
    rest = a - quotient * b
    return tl.where((rest != 0) & ((rest ^ b) < 0), quotient - 1, quotient)


@triton.jit
def int_floor_divide(a, b, c, d):
    has_sign = (c > 0) | (d < 0)
    c, d = tl.where(has_sign, c, 1), tl.where(has_sign, d, 1)
    least, greatest = extremes(floor_divide(a, c), floor_divide(a, d), floor_divide(b, c), floor_divide(b, d))
    return within(least, greatest, has_sign)


@triton.jit
def int_remainder(a, b, c, d):
    divisor = tl.where(c > 0, c, 1)
    quotient = floor_divide(a, divisor)
    # All operands have the same quotient.
    is_one = (c == d) & (quotient == floor_divide(b, divisor))
    shift = quotient * divisor
    return within(tl.where(is_one, a - shift, 0), tl.where(is_one, b - shift, d - 1), c > 0)


@triton.jit
def int_shift_left(a, b, c, d):
    count = tl.minimum(tl.maximum(c, 0), MAX_SHIFT)
    return within(a << count, b << count, (c == d) & (count == c))


@triton.jit
def int_shift_right(a, b, c, d):
    count = tl.minimum(tl.maximum(c, 0), MAX_SHIFT)
    return within(a >> count, b >> count, (c == d) & (count == c))


@triton.jit
def ones_of(number):
    """Returns the least number of ones in binary that is not less than a number from 0 on."""
    number = number | (number >> 1)
    number = number | (number >> 2)
    number = number | (number >> 4)
    number = number | (number >> 8)
    return number | (number >> 16)


@triton.jit
def of_bits(a, b, c, d, exact, least, greatest):
    """Returns bounds of an operation of bits: exact for single operands, others for those from 0 on."""
    is_single = (a == b) & (c == d)
    least, greatest = tl.where(is_single, exact, least), tl.where(is_single, exact, greatest)
    return within(least, greatest, is_single | ((a >= 0) & (c >= 0)))


@triton.jit
def int_and(a, b, c, d):
    return of_bits(a, b, c, d, a & c, a * 0, tl.minimum(b, d))


@triton.jit
def int_or(a, b, c, d):
    return of_bits(a, b, c, d, a | c, tl.maximum(a, c), ones_of(tl.maximum(b, d)))


@triton.jit
def int_xor(a, b, c, d):
    return of_bits(a, b, c, d, a ^ c, a * 0, ones_of(tl.maximum(b, d)))


@triton.jit
def int_minimum(a, b, c, d):
    return tl.minimum(a, c), tl.minimum(b, d)


@triton.jit
def int_maximum(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def int_where(no, yes, a, b, c, d):
    least, greatest = tl.where(no & yes, tl.minimum(a, c), 0), tl.where(no & yes, tl.maximum(b, d), 0)
    is_single = (no & yes) == 0
    least, greatest = tl.where(is_single & yes, a, least), tl.where(is_single & yes, b, greatest)
    return tl.where(is_single & no, c, least), tl.where(is_single & no, d, greatest)


@triton.jit
def int_to_float(a, b):
    least, greatest = a.to(tl.float32), b.to(tl.float32)
    wide_least, wide_greatest = wider(least, greatest, a <= b, ROUNDED, TINY)
    return (
        tl.where(tl.abs(least) <= EXACT, least, wide_least),
        tl.where(tl.abs(greatest) <= EXACT, greatest, wide_greatest),
    )


@triton.jit
def bool_to_float(no, yes):
    return tl.where(no, 0.0, 1.0), tl.where(yes, 1.0, 0.0)


@triton.jit
def bool_to_int(no, yes):
    return tl.where(no, 0, 1).to(tl.int64), tl.where(yes, 1, 0).to(tl.int64)


@triton.jit
def float_to_int(a, b):
    fits = (a >= LEAST) & (b <= GREATEST)
    return within(tl.where(fits, a, 0.0).to(tl.int64), tl.where(fits, b, 0.0).to(tl.int64), fits)


@triton.jit
def float_add(a, b, c, d):
    return wider(a + c, b + d, a <= b, ROUNDED, TINY)


@triton.jit
def float_subtract(a, b, c, d):
    return wider(a - d, b - c, a <= b, ROUNDED, TINY)


@triton.jit
def float_negate(a, b):
    return -b, -a


@triton.jit
def float_abs(a, b):
    ends = tl.abs(a), tl.abs(b)
    return known(tl.where((a <= 0) & (b >= 0), 0.0, tl.minimum(*ends)), tl.maximum(*ends), a <= b)


@triton.jit
def float_multiply(a, b, c, d):
    p, q, r, s = a * c, a * d, b * c, b * d
    least, greatest = extremes(p, q, r, s)
    is_known = (p == p) & (q == q) & (r == r) & (s == s)
    return wider(least, greatest, is_known, ROUNDED, TINY)


@triton.jit
def float_divide(a, b, c, d):
    is_known = ((c >= NORMAL) & (d <= LARGE)) | ((d <= -NORMAL) & (c >= -LARGE))
    c, d = tl.where(is_known, c, 1.0), tl.where(is_known, d, 1.0)
    least, greatest = extremes(a / c, a / d, b / c, b / d)
    return wider(least, greatest, is_known & (a <= b), ROUNDED, TINY)


@triton.jit
def float_minimum(a, b, c, d):
    return known(tl.minimum(a, c), tl.minimum(b, d), (a <= b) & (c <= d))


@triton.jit
def float_maximum(a, b, c, d):
    return known(tl.maximum(a, c), tl.maximum(b, d), (a <= b) & (c <= d))


@triton.jit
def float_where(no, yes, a, b, c, d):
    least, greatest = known(tl.minimum(a, c), tl.maximum(b, d), (a <= b) & (c <= d))
    is_single = (no & yes) == 0
    least, greatest = tl.where(is_single & yes, a, least), tl.where(is_single & yes, b, greatest)
    return tl.where(is_single & no, c, least), tl.where(is_single & no, d, greatest)


@triton.jit
def float_tanh(a, b):
    least, greatest = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * a)), 1.0 - 2.0 / (1.0 + tl.exp(2.0 * b))
    return wider(least, greatest, a <= b, ROUNDED, SMALL)


@triton.jit
def float_exp(a, b):
    return wider(tl.exp(a), tl.exp(b), a <= b, APPROXIMATE, TINY)


@triton.jit
def float_log(a, b):
    return wider(tl.log(tl.maximum(a, 0.0)), tl.log(tl.maximum(b, 0.0)), a >= 0.0, APPROXIMATE, SMALL)


@triton.jit
def float_sqrt(a, b):
    least, greatest = tl.sqrt(tl.maximum(a, 0.0)), tl.sqrt(tl.maximum(b, 0.0))
    return wider(least, greatest, a >= 0.0, ROUNDED, TINY)


@triton.jit
def float_erf(a, b):
    return wider(tl.erf(a), tl.erf(b), a <= b, ROUNDED, SMALL)


@triton.jit
def float_sin(a, b):
    # Infinity has no sine.
    is_known = (a > float("-inf")) & (b < float("inf"))
    return wider(a * 0.0 - 1.0, b * 0.0 + 1.0, is_known, ROUNDED, SMALL)


@triton.jit
def less(a, b, c, d):
    return (b < c) == 0, (a >= d) == 0


@triton.jit
def less_equal(a, b, c, d):
    return (b <= c) == 0, (a > d) == 0


@triton.jit
def equal(a, b, c, d):
    return ((a == b) & (c == d) & (a == c)) == 0, ((a > d) | (c > b)) == 0


@triton.jit
def bool_equal(no, yes, other_no, other_yes):
    return (no & other_yes) | (yes & other_no), (no & other_no) | (yes & other_yes)


@triton.jit
def bool_and(no, yes, other_no, other_yes):
    return no | other_no, yes & other_yes


@triton.jit
def bool_or(no, yes, other_no, other_yes):
    return no & other_no, yes | other_yes


@triton.jit
def bool_where(no, yes, a_no, a_yes, b_no, b_yes):
    return (yes & a_no) | (no & b_no), (yes & a_yes) | (no & b_yes)


@triton.jit
def no_index(zero):
    """Returns an offset without indices, the number of elements from it on, and whether these are known."""
    return zero * 0, zero * 0 + 1, zero == zero


@triton.jit
def wide_index(at, count, is_known, a, b, size, stride):
    """Returns the next state of `no_index` with an index of several values.

    Negative indices count from the end. Others are within the dimension.
    """
    is_known = is_known & ((a >= 0) | (b < 0))
    a, b = tl.where(a < 0, a + size, a), tl.where(b < 0, b + size, b)
    a, b = tl.minimum(tl.maximum(a, 0), size - 1), tl.minimum(tl.maximum(b, 0), size - 1)
    return at + a * stride, count + b - a, is_known


@triton.jit
def single_index(at, count, is_known, a, b, size, stride):
    """Likewise with an index of one value."""
    at, more, is_known = wide_index(at, count * 0, is_known, a, b, size, stride)
    return at, count, is_known & (more == 0)


@triton.jit
def load_element(table, at, count, is_known, step, place):
    """Returns an element of a captured tensor for each block, and whether the block indexes it."""
    exists = is_known & (place < count)
    return tl.load(table + at + place * step, mask=exists, other=0), exists


@triton.jit
def int_elements(table, at, count, is_known, step, width: tl.constexpr):
    is_known = is_known & (count <= width)
    least, greatest = tl.zeros_like(at) + GREATEST, tl.zeros_like(at) + LEAST
    for start in range(0, width, LOADED):
        for place in tl.static_range(LOADED if width > 1 else 1):
            loaded, exists = load_element(table, at, count, is_known, step, start + place)
            # Elements of int64 become int32.
            number = loaded.to(tl.int32).to(tl.int64)
            least = tl.where(exists, tl.minimum(least, number), least)
            greatest = tl.where(exists, tl.maximum(greatest, number), greatest)
    return within(least, greatest, is_known)


@triton.jit
def float_elements(table, at, count, is_known, step, width: tl.constexpr):
    is_known = is_known & (count <= width)
    least = tl.full(at.shape, float("inf"), tl.float32)
    greatest = -least
    for start in range(0, width, LOADED):
        for place in tl.static_range(LOADED if width > 1 else 1):
            loaded, exists = load_element(table, at, count, is_known, step, start + place)
            number = loaded.to(tl.float32)
            is_known = is_known & ((exists == 0) | (number == number))
            least = tl.where(exists, tl.minimum(least, number), least)
            greatest = tl.where(exists, tl.maximum(greatest, number), greatest)
    return known(least, greatest, is_known)


@triton.jit
def bool_elements(table, at, count, is_known, step, width: tl.constexpr):
    is_known = is_known & (count <= width)
    no = is_known == 0
    yes = no
    for start in range(0, width, LOADED):
        for place in tl.static_range(LOADED if width > 1 else 1):
            loaded, exists = load_element(table, at, count, is_known, step, start + place)
            no, yes = no | (exists & (loaded == 0)), yes | (exists & (loaded != 0))
    return no, yes
