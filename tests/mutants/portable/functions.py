"""Mutants of score and mask functions in the portable families."""

from collections.abc import Callable
from typing import Any

import torch

from flashtune.core.problem import BlockLists, Causal
from flashtune.request.functions.tracing import trace
from tests.mutants.core import Mutant, Part, Patch, Subject, mutants_of
from tests.mutants.serving_size import Size

BIAS, GATES, DOCUMENTS = torch.rand(4, 17), torch.rand(2, 9), torch.zeros(9, dtype=torch.int32)
WIDE, OFFSETS, VISIBLE = torch.rand(2, 9, 3), torch.zeros(4, dtype=torch.int64), torch.ones(2, 9) > 0
CAP, SPAN = 1.5, 9
HEAD, SEQUENCE = "scalar_0 = head", "scalar_0 = sequence"
FULL_LOOP = Part("for start in tl.range(0, n_full_max", "for start in tl.range(n_full_max")
IN_FULL = " | (start < n_listed_full)"
FULL_END = "n_full_max = n_listed_full"


def relative(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * (GATES[b, q] + 1.0) + BIAS[h, (q - k).clamp(-8, 8)]


def capped(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    changed = CAP * torch.tanh(s / CAP) - torch.exp(-abs(s)) * torch.log(2.0 + s * s)
    return torch.where(h % 2 == 0, changed, torch.maximum(s, torch.sqrt(abs(s)) * torch.sin(s)))


def rows(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + (WIDE[b, q] * WIDE[b, k]).sum() + torch.erf(s) * torch.cos(s)


def windowed(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < SPAN + OFFSETS[h]) | (DOCUMENTS[q] == DOCUMENTS[k]) & VISIBLE[b, k]


def bits(b: Any, h: Any, q: Any, k: Any) -> Any:
    near = abs((q - k) // 5) % 3 <= 1
    return (near | ((q ^ k) & 5 == 4)) & ((q >> 2) + (k << 1) < 200) & ~(k == h + 1)


def functions(size: Size) -> tuple[Mutant, ...]:
    """Returns all mutants of functions."""
    masked = *relative_biases(size), *caps(size), *sums(size), *windows(size), *of_bits(size)
    return (*masked, *positions(size), *decoded(size))


def subject(
    size: Size, score: Callable[..., Any] | None, mask: Callable[..., Any] | None, **features: object
) -> Subject:
    """Returns a kernel of functions. No block ends at its lengths."""
    lengths = {"seqlen_q": size.seqlen + 70, "seqlen_kv": size.seqlen + 90}
    if mask is not None:
        features = {"block_mask": 64, "block_lists": BlockLists.HEAD, **features}
    traced = trace(score, mask).functions
    return size.masked(causal=Causal.NONE, functions=traced, **lengths, **features)


def relative_biases(size: Size) -> tuple[Mutant, ...]:
    """Returns mutants of places and of elements of captured tensors."""
    wrapped = "tl.where(index < 0, index + size, index)"
    rows = (
        ("bias of the KV head", HEAD, "scalar_0 = kv_head"),
        ("bias of the sequence's number", HEAD, SEQUENCE),
        ("gates of the first sequence", "scalar_11 = sequence", "scalar_11 = sequence * 0"),
        ("function of the next query", "tl.minimum(queries, seqlen_q", "tl.minimum(queries + 1, seqlen_q"),
        ("function of the next key", "tl.minimum(keys, seqlen_kv", "tl.minimum(keys + 1, seqlen_kv", None, 2),
        ("distance of the wrong sign",
         "row_2[:, None] - key_3[None, :]", "key_3[None, :] - row_2[:, None]", None, 2),
        ("least distance too large", "(pair_4, (-8))", "(pair_4, (-7))", None, 2),
        ("largest distance too small", "(8, pair_6)", "(7, pair_6)", None, 2),
        ("negative index from the start", wrapped, "index"),
        ("negative index one too small", wrapped, wrapped.replace("+ size", "+ size - 1")),
        ("last element not read", f"{wrapped}, size - 1)", f"{wrapped}, size - 2)"),
        ("first element not read", "size - 1), 0)", "size - 1), 1)"),
        ("stride of the other dimension",
         "stride_0_1 = tl.load(function_ints + 3)", "stride_0_1 = tl.load(function_ints + 2)"),
        ("strides of another tensor",
         "stride_1_0 = tl.load(function_ints + 6)", "stride_1_0 = tl.load(function_ints + 2)"),
        ("size of the other dimension",
         "size_0_1 = tl.load(function_ints + 1)", "size_0_1 = tl.load(function_ints + 0)"),
        ("constant of the gate", "(1.0) + row_12", "(0.5) + row_12"),
        ("score scaled after its function", "s *= score_scale", "s = s", None, 2),
        ("no bias in the loop without a mask", "s = pair_15", "s = pair_14", FULL_LOOP),
        ("product by the wrong row", "s * row_13[:, None]", "s + row_13[:, None]", None, 2),
    )  # fmt: skip
    return mutants_of(subject(size, relative, None), rows, prefix="relative bias: ")


def caps(size: Size) -> tuple[Mutant, ...]:
    """Returns mutants of functions of the score."""
    rows = (
        ("captured number too large",
         "tl.load(function_floats + 0)", "tl.load(function_floats + 0) * 1.02"),
        ("large hyperbolic tangents", "1.0 - 2.0 /", "1.0 - 1.98 /"),
        ("small hyperbolic tangents", "x + x * square * series", "x"),
        ("power of the positive score", "= -pair_10", "= pair_10", None, 2),
        ("logarithm to base 2", "tl.log(pair_15)", "tl.log2(pair_15)", None, 2),
        ("square without its constant", "(2.0) + pair_14", "(1.0) + pair_14", None, 2),
        ("cosine for sine", "tl.sin(s)", "tl.cos(s)", None, 2),
        ("no square root", "tl.sqrt(pair_10)", "pair_10", None, 2),
        ("smaller of two scores", "tl.maximum(pair_21, s)", "tl.minimum(pair_21, s)", None, 2),
        ("branches exchanged", "pair_18, pair_22", "pair_22, pair_18", None, 2),
        ("sum for a difference", "pair_9 - pair_17", "pair_9 + pair_17", None, 2),
        ("remainder of a part", "floor_divide(scalar_0, 2) * 2", "floor_divide(scalar_0, 2)"),
        ("branch of the KV head", HEAD, "scalar_0 = kv_head"),
    )  # fmt: skip
    return mutants_of(subject(size, capped, None), rows, prefix="capped: ")


def sums(size: Size) -> tuple[Mutant, ...]:
    """Returns mutants of sums of rows of captured tensors."""
    query_row = "row_5 * stride_0_1 + place_in(1"
    key_row = "key_2 * stride_0_1 + place_in(2"
    rows_of = (
        ("another element of the query", query_row, query_row.replace("(1", "(0")),
        ("another element of the key", key_row, key_row.replace("(2", "(1"), None, 2),
        ("first key's row", key_row, key_row.replace("key_2", "key_2 * 0"), None, 2),
        ("first sequence's rows", "scalar_1 = sequence", "scalar_1 = sequence * 0"),
        ("stride of rows for elements",
         "stride_0_2 = tl.load(function_ints + 5)", "stride_0_2 = tl.load(function_ints + 4)"),
        ("term left out", "pair_7 + pair_16", "pair_16", None, 2),
        ("error function of another score", "tl.erf(s)", "tl.erf(1.2 * s)", None, 2),
        ("sine for cosine", "tl.cos(s)", "tl.sin(s)", None, 2),
    )  # fmt: skip
    return mutants_of(subject(size, rows, None), rows_of, prefix="rows: ")


def windows(size: Size) -> tuple[Mutant, ...]:
    """Returns mutants of a mask function and of the blocks in which it has an effect."""
    applied = (Patch(IN_FULL, ""), Patch(FULL_END, "n_full_max = 0"))
    rows_of = (
        ("one block too many in full", FULL_END, f"{FULL_END} + MASK_BLOCK"),
        ("mask without effect in a further block", IN_FULL, IN_FULL.replace("full)", "full + MASK_BLOCK)")),
        ("mask with effect in full blocks", applied),
        ("diagonal hidden", "key_1[None, :] <= row_4", "key_1[None, :] < row_4"),
        ("window one key too long", "pair_9 < scalar_13", "pair_9 <= scalar_13"),
        ("window without its captured number", "scalar_10 + scalar_12", "scalar_12"),
        ("window of the KV head", "scalar_11 = head", "scalar_11 = kv_head"),
        ("another captured integer", "tl.load(function_ints + 0)", "tl.load(function_ints + 1)"),
        ("other documents", "== row_5", "!= row_5"),
        ("document of the first key",
         "key_3 = tl.load(table_1 + key_1", "key_3 = tl.load(table_1 + 0 * key_1"),
        ("either condition", "key_2[None, :] & pair_6", "key_2[None, :] | pair_6"),
        ("both conditions", "pair_7 | pair_15", "pair_7 & pair_15"),
        ("hidden keys visible", "stride_0_1) != 0)", "stride_0_1) == 0)"),
        ("keys of the first sequence", SEQUENCE, "scalar_0 = sequence * 0"),
        ("function without effect", "visible &= function_mask", "visible &= function_mask | True"),
    )  # fmt: skip
    return mutants_of(subject(size, None, windowed), rows_of, prefix="window: ")


def of_bits(size: Size) -> tuple[Mutant, ...]:
    """Returns mutants of operations of integers."""
    rows_of = (
        ("or for exclusive or", "row_2[:, None] ^ key_3", "row_2[:, None] | key_3"),
        ("another bit", "5 & pair_4", "4 & pair_4"),
        ("quotient rounded to zero", "quotient - 1, quotient", "quotient, quotient"),
        ("quotient of operands of one sign", "(rest ^ b) < 0", "(rest ^ b) > 0"),
        ("another divisor", "floor_divide(pair_7, 5)", "floor_divide(pair_7, 4)"),
        ("remainder by another divisor", "floor_divide(pair_9, 3) * 3", "floor_divide(pair_9, 3) * 2"),
        ("remainder of a signed distance", "tl.abs(pair_8)", "pair_8"),
        ("bits of queries shifted less", "row_2 >> 2", "row_2 >> 1"),
        ("bits of keys not shifted", "key_3 << 1", "key_3"),
        ("hidden key alone visible", " != key_3", " == key_3"),
    )  # fmt: skip
    features = {"block_lists": BlockLists.GROUP}
    return mutants_of(subject(size, None, bits, **features), rows_of, prefix="bits: ")


def sliding(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k < 20) & (q >= k)


def scaled(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s * (GATES[b, q] + 1.0) + (h % 2)


def positions(size: Size) -> tuple[Mutant, ...]:
    """Mutants of the positions of queries in pages."""
    position = "tl.minimum(queries, seqlen_q - 1) + seqlen_kv - seqlen_q"
    traced = trace(scaled, sliding).functions
    own = size.masked(causal=Causal.NONE, functions=traced, page_size=size.page, seqlen_q=size.seqlen // 4)
    rows_of = (
        ("queries by their index", position, "tl.minimum(queries, seqlen_q - 1)"),
        ("queries one position late", position, f"{position} + 1"),
        ("queries that end before the last key", position, f"{position} - 1"),
        ("sequences as the first one", "scalar_6 = sequence", "scalar_6 = sequence * 0"),
    )
    return mutants_of(own, rows_of, prefix="positions: ")


def decoded(size: Size) -> tuple[Mutant, ...]:
    """Mutants of functions in the decoding family: of rows, of parts and of listed blocks."""
    paged = size.decoding(causal=Causal.NONE, functions=trace(scaled, sliding).functions, page_size=size.page)
    of_pages = (
        ("head of the group", "row_0 = head", "row_0 = kv_head * group_size"),
        ("queries by their index", " + seqlen_kv - seqlen_q", ""),
        (
            "maxima of parts in other units",
            "tl.exp2((part_lse - shift) * LOG2_E)",
            "tl.exp2(part_lse - shift)",
        ),
        ("parts without their sums", "weights *= tl.load", "weights *= 1.0 + 0.0 * tl.load"),
        ("function without effect", "visible &= function_mask", "visible &= function_mask | True"),
    )
    lengths = {"seqlen_kv": 4 * size.seqlen + 90, "block_mask": 64, "block_lists": BlockLists.GROUP}
    listed = size.decoding(causal=Causal.NONE, functions=trace(None, bits).functions, **lengths)
    of_lists = (
        ("list of the first head", "list_head = kv_head", "list_head = 0"),
        ("keys in their order in the list", "keys = block_start + key_offsets", "keys = start + key_offsets"),
        ("first block of the list for all", "block = next_block", "block = block"),
        ("mask with effect in full blocks", IN_FULL, ""),
        ("mask without effect in a further block", IN_FULL, IN_FULL.replace("full)", "full + MASK_BLOCK)")),
    )
    return (
        *mutants_of(paged, of_pages, prefix="functions of pages: "),
        *mutants_of(listed, of_lists, prefix="functions of lists: "),
    )
