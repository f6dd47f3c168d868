"""Mutants of the fused backward family: additions to dq, and pairs."""

from __future__ import annotations

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal
from flashtune.templates.registry import find_family
from tests.mutants.core import Mutant, Part, Patch, Subject
from tests.mutants.portable.backward_size import (
    DIAGONAL,
    HIDE,
    KEYS_DELTA,
    LOOPS,
    LOW_SCORES,
    ROW_END,
    SCALE,
    Size,
)

FAMILY = "backward_fused"
DELTA = Part("def delta(", f"def {FAMILY}(")
KEYS = Part(f"def {FAMILY}(", "def convert_sums(")
SUMS = Part("def convert_sums(", "def prologue_plan(")
OPEN, BAND = Part("full_blocks = ", "m_right_min = "), Part("m_right_min = ", "dk_tile = (")
SHARE = "dq_tile = tl.dot(ds_low.T, k_tile"
ROWS_OF_HEAD = "(sequence * heads + head) * tl.cdiv("


def _subject(
    size: Size,
    causal: Causal = Causal.BOTTOM_RIGHT,
    *,
    lse: bool = False,
    exact: bool = False,
    reduction: str = "copy_engine",
) -> Subject:
    """The kernel of the same problem as the split family's mutants are of."""
    tiles = {"block_m": size.block_m, "block_n": size.block_n, "num_warps": 4, "num_stages": 2}
    config = msgspec.convert({**tiles, "reduction": reduction}, find_family(FAMILY).config_type)
    problem = size.subject(causal, exact=exact).problem
    return Subject(FAMILY, problem, config, Specialization(lse=lse))


def sums(size: Size) -> tuple[Mutant, ...]:
    """What becomes of dq between the programs that share it."""
    changes = (
        ("sums not cleared", "Earlier contents of memory are added to dq.",
         Patch("tl.cast(piece, tl.int64) * SUM_PIECE", "0", DELTA)),
        ("last sums not cleared", "Earlier contents of memory are added to the last rows of dq.",
         Patch("tl.program_id(0), sum_pieces,", "tl.program_id(0), sum_pieces - 1,", DELTA)),
        ("sums of the block before", "A block's share goes to other queries.",
         Patch("+ start // BLOCK_M", "+ tl.maximum(start // BLOCK_M - 1, 0)", KEYS, LOOPS)),
        ("sums of a group's first head", "All heads of a group add to one.",
         Patch(ROWS_OF_HEAD, ROWS_OF_HEAD.replace("+ head", "+ kv_head * group_size"), KEYS, LOOPS)),
        ("sums of the first sequence", "All sequences add to one.",
         Patch(ROWS_OF_HEAD, "head * tl.cdiv(", KEYS, LOOPS)),
        ("dq of values", "The gradients of scores meet values in place of keys.",
         Patch(SHARE, SHARE.replace("k_tile", "v_tile"), KEYS, LOOPS)),
        ("dq of weights", "Keys are weighed by weights in place of the gradients of scores.",
         Patch(SHARE, SHARE.replace("ds_low", "p_low"), KEYS, LOOPS)),
        ("dq of open blocks forgotten", "Blocks without a mask add nothing to dq.",
         Patch(SHARE, SHARE.replace("tl.dot", "0.0 * tl.dot"), OPEN)),
        ("dq of masked blocks forgotten", "Blocks with a mask add nothing to dq.",
         Patch(SHARE, SHARE.replace("tl.dot", "0.0 * tl.dot"), BAND)),
        ("dq: scale missing", "The gradient of queries is not scaled.",
         Patch("(dq_sum * scale)", "dq_sum", SUMS)),
        ("dq: scale twice", "The gradient of queries is scaled twice.",
         Patch("(dq_sum * scale)", "(dq_sum * scale * scale)", SUMS)),
        ("dq: sums of a pair of blocks", "Every other block gets the sums of the one before.",
         Patch("tl.program_id(0).to(tl.int64)", "(tl.program_id(0) // 2 * 2).to(tl.int64)", SUMS)),
        ("dq: by the strides of heads", "Rows of dq are written where heads would lie.",
         Patch("queries[:, None] * stride_dqs", "queries[:, None] * stride_dqh", SUMS)),
        ("dq: rows beyond the last written", "Rows of the last block that do not exist are written.",
         Patch("(queries < seqlen_q)[:, None] &", "(queries < seqlen_q + 1)[:, None] &", SUMS)),
        ("dq: last block not written", "The last block of queries has no gradient.",
         Patch("return (blocks,)", "return (blocks - (blocks > 1),)", Part("def epilogue_plan(", "def att"))),
    )  # fmt: skip
    stored = (
        Patch("tl.atomic_add(sums_at,", "tl.store(sums_at,", KEYS, LOOPS),
        Patch(', sem="relaxed")', ")", KEYS, LOOPS),
    )
    atomics, exact = _subject(size, reduction="atomics"), _subject(size, exact=True)
    lower = "ds_low.to(tl.bfloat16).to(q.dtype.element_ty).T"
    return (
        *(Mutant(name, breaks, _subject(size), (patch,)) for name, breaks, patch in changes),
        Mutant("dq written, not added", "Of all blocks of keys one is left in dq.", atomics, stored),
        Mutant(
            "dq: rounded to 8 bits",
            "Of a float32 kernel dS passes through bfloat16 before it makes dq.",
            exact,
            (Patch(SHARE, SHARE.replace("ds_low.T", lower), KEYS, LOOPS),),
        ),
        Mutant(
            "dS: rounded to 8 bits",
            "Of a float32 kernel dS passes through bfloat16.",
            exact,
            (Patch(LOW_SCORES, LOW_SCORES.replace(".to(", ".to(tl.bfloat16).to("), KEYS, LOOPS),),
        ),
    )


def pairs(size: Size) -> tuple[Mutant, ...]:
    """Which pairs of a query and a key count, and how much."""
    causal, full, told = _subject(size), _subject(size, Causal.NONE), _subject(size, lse=True)
    member, of_dlse = "head = kv_head * group_size + member", "row_delta -= tl.load(dlse"
    of_missing = "p = tl.where(key_exists[:, None], p, 0.0)"
    whole = "m_full_max = tl.where(key_begin + BLOCK_N <= seqlen_kv, m_full_max, 0)"
    up, down = "m_min // BLOCK_M * BLOCK_M", "tl.cdiv(m_min, BLOCK_M) * BLOCK_M"
    changes = (
        ("tail of keys unmasked", "A weight of padding overflows where scores are far below zero.",
         full, Patch(of_missing, "pass", KEYS)),
        ("last block of keys open", "Queries that see whole blocks are given padding with them.",
         full, Patch(whole, "pass", KEYS)),
        ("diagonal off", "No block is masked.", causal, Patch(HIDE, "pass", KEYS)),
        ("diagonal one key too far", "Every query sees the key after its last one.",
         causal, Patch(ROW_END, ROW_END.replace("positions", "positions + 1"), KEYS)),
        ("diagonal one key too short", "No query sees its last key.",
         causal, Patch(ROW_END, ROW_END.replace("positions", "positions - 1"), KEYS)),
        ("diagonal aligned to the other corner", "The mask starts where it should end.",
         causal, Patch(DIAGONAL, "diagonal = 0", KEYS)),
        ("queries of the diagonal's block skipped", "Keys do not meet the queries that see them first.",
         causal, Patch(up, down, KEYS)),
        ("first head of a group for all", "All heads of a group are its first.",
         causal, Patch(member, "head = kv_head * group_size", KEYS, LOOPS)),
        ("keys of the first sequence", "All sequences meet the keys of one.",
         causal, Patch("k + sequence * stride_kb", "k", KEYS)),
        ("delta left out", "There dS is P times dP.", causal, Patch(KEYS_DELTA, "dp", KEYS, LOOPS)),
        ("natural exponentials", "Powers of two are taken of scores in natural units.",
         causal, Patch(SCALE, "scale_log2 = scale", KEYS)),
        ("dk: scale missing", "The gradient of keys is not scaled.",
         causal, Patch("(dk_sum * scale)", "dk_sum", KEYS)),
        ("dv: scaled", "The gradient of values is scaled.",
         causal, Patch("dv_sum.to(", "(dv_sum * scale).to(", KEYS)),
        ("dlse of the other sign", "The gradient of the log-sum-exp is added to delta.",
         told, Patch(of_dlse, of_dlse.replace("-=", "+="), DELTA)),
        ("dk, dv: last block not written", "The last block of keys has no gradients.", causal,
         Patch("heads * batch,)", "heads * batch - (batch > 1),)", Part("def launch_plan(", "rows ="))),
        ("last rows without delta", "The last rows have no delta.", causal,
         Patch("heads * batch,)", "heads * batch - (batch > 1),)", Part("def prologue_plan(", "def launch"))),
    )  # fmt: skip
    return tuple(Mutant(name, breaks, subject, (patch,)) for name, breaks, subject, patch in changes)
