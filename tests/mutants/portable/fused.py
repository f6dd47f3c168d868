"""Mutants of the fused backward family: additions to dq, and pairs."""

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal
from flashtune.templates.registry import find_family
from tests.mutants.core import Mutant, Part, Patch, Subject, mutants_of
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
    """Mutants of the sums of dq, to which several programs add."""
    lower = "ds_low.to(tl.bfloat16).to(q.dtype.element_ty).T"
    return (
        *mutants_of(_subject(size), (
            ("sums not cleared", "tl.cast(piece, tl.int64) * SUM_PIECE", "0", DELTA),
            ("last sums not cleared",
             "tl.program_id(0), sum_pieces,", "tl.program_id(0), sum_pieces - 1,", DELTA),
            ("sums of the block before",
             "+ start // BLOCK_M", "+ tl.maximum(start // BLOCK_M - 1, 0)", KEYS, LOOPS),
            ("sums of a group's first head",
             ROWS_OF_HEAD, ROWS_OF_HEAD.replace("+ head", "+ kv_head * group_size"), KEYS, LOOPS),
            ("sums of the first sequence", ROWS_OF_HEAD, "head * tl.cdiv(", KEYS, LOOPS),
            ("dq of values", SHARE, SHARE.replace("k_tile", "v_tile"), KEYS, LOOPS),
            ("dq of weights", SHARE, SHARE.replace("ds_low", "p_low"), KEYS, LOOPS),
            ("dq of open blocks forgotten", SHARE, SHARE.replace("tl.dot", "0.0 * tl.dot"), OPEN),
            ("dq of masked blocks forgotten", SHARE, SHARE.replace("tl.dot", "0.0 * tl.dot"), BAND),
            ("dq: scale missing", "(dq_sum * scale)", "dq_sum", SUMS),
            ("dq: scale twice", "(dq_sum * scale)", "(dq_sum * scale * scale)", SUMS),
            ("dq: sums of a pair of blocks",
             "tl.program_id(0).to(tl.int64)", "(tl.program_id(0) // 2 * 2).to(tl.int64)", SUMS),
            ("dq: by the strides of heads",
             "queries[:, None] * stride_dqs", "queries[:, None] * stride_dqh", SUMS),
            ("dq: rows beyond the last written",
             "(queries < seqlen_q)[:, None] &", "(queries < seqlen_q + 1)[:, None] &", SUMS),
            ("dq: last block not written",
             "return (blocks,)", "return (blocks - (blocks > 1),)", Part("def epilogue_plan(", "def att")),
        )),
        *mutants_of(_subject(size, reduction="atomics"), (
            ("dq written, not added",
             (Patch("tl.atomic_add(sums_at,", "tl.store(sums_at,", KEYS, LOOPS),
              Patch(', sem="relaxed")', ")", KEYS, LOOPS))),
        )),
        *mutants_of(_subject(size, exact=True), (
            ("dq: rounded to 8 bits", SHARE, SHARE.replace("ds_low.T", lower), KEYS, LOOPS),
            ("dS: rounded to 8 bits",
             LOW_SCORES, LOW_SCORES.replace(".to(", ".to(tl.bfloat16).to("), KEYS, LOOPS),
        )),
    )  # fmt: skip


def pairs(size: Size) -> tuple[Mutant, ...]:
    """Which pairs of a query and a key count, and how much."""
    causal, full, told = _subject(size), _subject(size, Causal.NONE), _subject(size, lse=True)
    member, of_dlse = "head = kv_head * group_size + member", "row_delta -= tl.load(dlse"
    of_missing = "p = tl.where(key_exists[:, None], p, 0.0)"
    whole = "m_full_max = tl.where(key_begin + BLOCK_N <= seqlen_kv, m_full_max, 0)"
    up, down = "m_min // BLOCK_M * BLOCK_M", "tl.cdiv(m_min, BLOCK_M) * BLOCK_M"
    return (
        *mutants_of(full, (
            ("tail of keys unmasked", of_missing, "pass", KEYS),
            ("last block of keys open", whole, "pass", KEYS),
        )),
        *mutants_of(causal, (
            ("diagonal off", HIDE, "pass", KEYS),
            ("diagonal one key too far", ROW_END, ROW_END.replace("positions", "positions + 1"), KEYS),
            ("diagonal one key too short", ROW_END, ROW_END.replace("positions", "positions - 1"), KEYS),
            ("diagonal aligned to the other corner", DIAGONAL, "diagonal = 0", KEYS),
            ("queries of the diagonal's block skipped", up, down, KEYS),
            ("first head of a group for all", member, "head = kv_head * group_size", KEYS, LOOPS),
            ("keys of the first sequence", "k + sequence * stride_kb", "k", KEYS),
            ("delta left out", KEYS_DELTA, "dp", KEYS, LOOPS),
            ("natural exponentials", SCALE, "scale_log2 = scale", KEYS),
            ("dk: scale missing", "(dk_sum * scale)", "dk_sum", KEYS),
            ("dv: scaled", "dv_sum.to(", "(dv_sum * scale).to(", KEYS),
            ("dk, dv: last block not written",
             "heads * batch,)", "heads * batch - (batch > 1),)", Part("def launch_plan(", "rows =")),
            ("last rows without delta",
             "heads * batch,)", "heads * batch - (batch > 1),)", Part("def prologue_plan(", "def launch")),
        )),
        *mutants_of(told, (
            ("dlse of the other sign", of_dlse, of_dlse.replace("-=", "+="), DELTA),
        )),
    )  # fmt: skip
