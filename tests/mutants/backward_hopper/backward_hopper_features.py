"""Mutants of Hopper backward kernels with windows, softcap, sinks and packed sequences."""

from __future__ import annotations

from typing import Any

from flashtune.core.problem import Causal
from tests.mutants.backward_hopper.backward_hopper import (
    CONSUMER,
    FINISH,
    KEEPER,
    PREPARE,
    backward_problem,
    backward_subject,
)
from tests.mutants.core import Mutant, Part, mutants_of
from tests.mutants.forward_hopper.hopper import only

_WINDOW = backward_problem(128, Causal.BOTTOM_RIGHT, window_left=100)
WINDOW = backward_subject(_WINDOW)
# Both sides of a window, for queries that are fewer than the keys.
SIDES = backward_subject(backward_problem(128, window_left=70, window_right=50, seqlen_q=400))
WINDOW_WIDE = backward_subject(backward_problem(256, Causal.TOP_LEFT, window_left=100))
WINDOW_ORDERED = backward_subject(
    backward_problem(128, Causal.BOTTOM_RIGHT, window_left=100, deterministic=True)
)
CAPPED = backward_subject(backward_problem(128, Causal.BOTTOM_RIGHT, softcap=True))
CAPPED_WINDOW = backward_subject(backward_problem(128, Causal.BOTTOM_RIGHT, window_left=100, softcap=True))
CAPPED_WIDE = backward_subject(backward_problem(256, softcap=True))
SUNK = backward_subject(backward_problem(128, Causal.BOTTOM_RIGHT, sinks=True), dlse=True)
_TOKENS: dict[str, Any] = {"batch": 4, "packed": 1200}
PACKED = backward_subject(backward_problem(128, Causal.BOTTOM_RIGHT, **_TOKENS))
PACKED_FULL = backward_subject(backward_problem(64, **_TOKENS))
PACKED_WINDOW = backward_subject(backward_problem(128, Causal.BOTTOM_RIGHT, window_left=100, **_TOKENS))
PACKED_SUNK = backward_subject(backward_problem(64, Causal.BOTTOM_RIGHT, sinks=True, **_TOKENS), dlse=True)
PACKED_WIDE = backward_subject(backward_problem(256, **_TOKENS))
PACKED_ORDERED = backward_subject(backward_problem(128, deterministic=True, **_TOKENS))
FIND = Part("def find_tile(", "def write_addition(")
ROWS_OF_TILE = Part("def find_rows(", "def prepare(")

NOT_BEFORE = "(queries & -7)[None, :] <= keys[:, None] - start - (queries & 6)[None, :]"
LAST_QUERY = "gl.maximum(n_end + SPAN - self.diagonal, 0) + BLOCK_M - 1"
FIRST_CUT = "gl.maximum(n_start + SPAN - self.diagonal + 1, 0) // BLOCK_M"
GAP = "gap = scheduler.head_blocks - m_max + m_min"
RECIPROCAL = "r = reciprocals(gl.exp2(gl.minimum(s * exponent_scale, 30.0)) * 0.5 + 0.5)"
SLOPE = "(p * r * (2.0 - r)).to(DTYPE)"


def windows() -> tuple[Mutant, ...]:
    """Which queries the keys of a block meet."""
    ordered_gap = "gl.where(wraps, scheduler.head_blocks + m_max - m_min - 1, -1)"
    return (
        *mutants_of((
            ("window: left side unmasked", "Queries see all keys before their own.", WINDOW,
             only("if m_block >= cut_min:", "if m_block < 0:")),
            ("window: one key too many", "Every query sees the key before its window.", WINDOW,
             only(NOT_BEFORE, f"{NOT_BEFORE} + 1")),
            ("window: one key too few", "No query sees the first key of its window.", WINDOW,
             only(NOT_BEFORE, f"{NOT_BEFORE} - 1")),
            ("window: columns of a thread confused", "Pairs of queries have the window of others.", WINDOW,
             only(NOT_BEFORE, NOT_BEFORE.replace("queries & 6", "queries & 4"))),
            ("window: cut blocks late by one", "The first block that the window cuts is not masked.", WINDOW,
             only(FIRST_CUT, f"{FIRST_CUT} + 1")),
            ("window: cut blocks by the last key", "Blocks count as whole if they see the last key.", WINDOW,
             only(FIRST_CUT, FIRST_CUT.replace("n_start", "n_start + ROWS"))),
            ("window: last block of queries skipped", "Keys do not meet the last queries of their window.",
             WINDOW, only(LAST_QUERY, LAST_QUERY.removesuffix(" + BLOCK_M - 1"))),
            ("window: blocks of a group's first keys", "Blocks of queries end with the window of early keys.",
             WINDOW,
             only("(n_block + 1) * BLOCK_N, self.seqlen_kv)", "n_block * BLOCK_N + 1, self.seqlen_kv)")),
            ("window: sums of a head not left", "The next head's sums follow the last block in view.", WINDOW,
             only(GAP, "gap = m_min")),
            ("window: sums over blocks before alone", "The next head's blocks after the window are missed.",
             WINDOW, only(GAP, f"{GAP} - 1")),
            ("window: right side as causal", "Queries do not see the keys behind their own.", SIDES,
             only("seqlen_kv - seqlen_q + 50", "seqlen_kv - seqlen_q")),
            ("window: left side of the causal mask", "A window with two sides is too short.", SIDES,
             only("SPAN = gl.constexpr(120)", "SPAN = gl.constexpr(70)")),
            ("window: aligned to the first key", "Queries have the positions of the first keys.", SIDES,
             only("diagonal = seqlen_kv - seqlen_q + 50", "diagonal = 50")),
            ("window: divided: left side unmasked", "Where groups divide products, the window has no begin.",
             WINDOW_WIDE, only("if m_block >= cut_min:", "if m_block < 0:")),
            ("window: divided: sums of a head not left", "Sums go to other blocks of the next head.",
             WINDOW_WIDE, only(GAP, "gap = m_min")),
            ("window: order: sums of a head not left", "A head's sums begin where the last ones ended.",
             WINDOW_ORDERED,
             only("gap = scheduler.head_blocks + m_max - m_min - 1", "gap = 2 * m_max - m_min - 1")),
        )),
        *mutants_of((
            ("window: order: the first block waits", "Programs wait for keys that do not see the queries.",
             WINDOW_ORDERED, only("if m_block < wait_max:", "if m_block >= 0:", KEEPER)),
            ("window: order: counters of a head not left", "Turns of a head are those of others.",
             WINDOW_ORDERED,
             only(ordered_gap, ordered_gap.replace("scheduler.head_blocks", "m_max"), KEEPER)),
        ), hangs=True),
        *mutants_of((
            ("window: order: no wait for a turn", "Blocks of keys add to dq as they come.", WINDOW_ORDERED,
             only("if m_block < wait_max:", "if m_block < 0:", KEEPER)),
        ), racy=True),
    )  # fmt: skip


def caps() -> tuple[Mutant, ...]:
    """Probabilities of capped scores, and the derivative of the cap."""
    low = "p_low = scheduler.mask(p_low, n_start, m_block, keys, queries)"
    sloped = "slope_p = scheduler.mask(slope_p, n_start, m_block, keys, queries)"
    return mutants_of((
        ("cap: derivative left out", "Gradients are those of scores without a cap.", CAPPED,
         only(SLOPE, "p.to(DTYPE)")),
        ("cap: derivative of the sigmoid", "The slope is half of the slope at zero.", CAPPED,
         only(SLOPE, SLOPE.replace("(2.0 - r)", "(1.0 - 0.5 * r)"))),
        ("cap: derivative in dv", "Values get probabilities times the slope.", CAPPED,
         only("return p.to(DTYPE), ", "return (p * r * (2.0 - r)).to(DTYPE), ")),
        ("cap: half of the argument", "The cap bends later.", CAPPED,
         only("exponent_scale = 2.0 * LOG2_E", "exponent_scale = LOG2_E")),
        ("cap: no cap", "Scores are scaled alone.", CAPPED,
         only("row.load(S_LAYOUT) - r * cap_log2",
              "row.load(S_LAYOUT) - cap_log2 + s * exponent_scale * cap_log2 * 0.34657359")),
        ("cap: overflow of four", "A large score makes its neighbours NaN.", CAPPED,
         only("gl.minimum(s * exponent_scale, 30.0)", "s * exponent_scale")),
        ("cap: neighbours swapped", "The tangents of two queries are each other's.", CAPPED,
         (*only("mul.f32 $0, second, $5;", "mul.f32 $0, second, $4;"),
          *only("mul.f32 $1, second, $4;", "mul.f32 $1, second, $5;"))),
        ("cap: in natural units", "The cap is that of scores in units of log2.", CAPPED,
         only("cap_log2 = softcap * LOG2_E", "cap_log2 = softcap")),
        ("cap: tanh of the other sign", "Small scores have the largest weight.", CAPPED,
         only(RECIPROCAL, RECIPROCAL.replace("s * exponent_scale", "-1.0 * s * exponent_scale"))),
        ("cap: mask of dv alone", "Hidden pairs have gradients of scores.", CAPPED, only(sloped, "pass")),
        ("cap: mask of ds alone", "Hidden keys' values have gradients.", CAPPED, only(low, "pass")),
        ("cap: window of dv alone", "Pairs before the window have gradients of scores.", CAPPED_WINDOW,
         only(sloped.replace("mask(", "mask_window("), "pass")),
        ("cap: window of ds alone", "Keys before the window have gradients of values.", CAPPED_WINDOW,
         only(low.replace("mask(", "mask_window("), "pass")),
        ("cap: divided: derivative left out", "Group 1 gets probabilities without the slope.", CAPPED_WIDE,
         only("store(slope_p)", "store(p_low)")),
        ("cap: divided: mask of ds alone", "Padding has gradients of values.", CAPPED_WIDE,
         only("slope_p = scheduler.mask(slope_p,", "slope_p = scheduler.mask(p_low,")),
    ))  # fmt: skip


def sinks() -> tuple[Mutant, ...]:
    """The gradients of sinks."""
    share = "-tl.sum(tl.exp(tl.load(sinks + head) - row_lse) * row_delta)"
    return mutants_of((
        ("sinks: prepare: gradient of another sign", "Sinks grow where they should fall.", SUNK,
         only(share, share.removeprefix("-"))),
        ("sinks: prepare: sink of the first head", "Weights are those of another head's sink.", SUNK,
         only("tl.load(sinks + head)", "tl.load(sinks)")),
        ("sinks: prepare: delta of no row", "The weights of the sink are summed alone.", SUNK,
         only(share, share.removesuffix(" * row_delta)") + ")")),
        ("sinks: finish: first block alone", "Later queries have no part in the gradient.", SUNK,
         only("end = tiles", "end = 1")),
        ("sinks: finish: of the first sequence", "All sequences have the gradient of one.", SUNK,
         only("workspace_2 + tl.program_id(0) * tiles", "workspace_2 + tl.program_id(0) % heads * tiles")),
        ("sinks: finish: next sequence too", "The first block of the next sequence counts.", PACKED_SUNK,
         only("// 128 + sequence + 1\n", "// 128 + sequence + 2\n")),
        ("sinks: finish: blocks of the batch", "Sequences begin without the gaps between them.", PACKED_SUNK,
         only("// 128 + sequence\nend", "// 128\nend")),
    ))  # fmt: skip


def packed() -> tuple[Mutant, ...]:
    """Where the rows of a sequence are, and where its sums go."""
    of_q, of_k = "self.q_start + self.seqlen_q", "self.kv_start + self.seqlen_kv"
    unused = "n_block = gl.where(n_block < 0, (seqlen_kv + BLOCK_N - 1) // BLOCK_N, n_block)"
    return (
        *mutants_of((
            ("packed: queries of the sequence before", "Queries end where the sequence begins.", PACKED,
             only(of_q, "self.q_start")),
            ("packed: keys of the sequence before", "Keys end where the sequence begins.", PACKED,
             only(of_k, "self.kv_start")),
            ("packed: queries one row early", "Queries are those of the row before.", PACKED,
             only("FAR - self.seqlen_q + row", "FAR - self.seqlen_q + row - 1")),
            ("packed: keys one row late", "Keys are those of the row behind.", PACKED,
             only("FAR - self.seqlen_kv + n_start", "FAR - self.seqlen_kv + n_start + 1")),
            ("packed: lengths of the queries for keys", "Keys end with the queries of their sequence.",
             PACKED,
             only("seqlen_kv = gl.load(cu_seqlens_kv + sequence + 1) - kv_start", "seqlen_kv = seqlen_q")),
            ("packed: diagonal of equal lengths", "Queries have the positions of the first keys.", PACKED,
             only("diagonal = seqlen_kv - seqlen_q", "diagonal = seqlen_q * 0", FIND)),
            ("packed: sums of the first sequence", "All sequences add to one.", PACKED,
             only("first_block += scheduler.m_start", "pass", CONSUMER)),
            ("packed: sums without gaps", "A sequence's first block is the last one of another.", PACKED,
             (*only("m_start = q_start // BLOCK_M + sequence", "m_start = q_start // BLOCK_M", FIND),)),
            ("packed: statistics of the first sequence", "Rows have the weights of another sequence's.",
             PACKED,
             only("stat_row = row + scheduler.m_start * BLOCK_M", "stat_row = row")),
            ("packed: sums of a head not left", "The next head's sums follow the sequence's.", PACKED,
             only(GAP, "gap = m_min")),
            ("packed: sums of the first head", "All KV heads add to one.", PACKED,
             only("return self.n_block, 0, self.kv_head", "return self.n_block, 0, self.kv_head * 0")),
            ("packed: search one sequence early", "Some programs compute the end of another sequence.",
             PACKED,
             only("+ middle <= n_block", "+ middle < n_block")),
            ("packed: search without gaps", "A sequence has fewer blocks than it needs.", PACKED,
             only("// BLOCK_N + middle <=", "// BLOCK_N <=")),
            ("packed: rows before the first sequence", "Programs of no sequence compute the first one.",
             PACKED, only(unused, "n_block = gl.maximum(n_block, 0)")),
            ("packed: first block of queries alone", "All but a sequence's first queries are left out.",
             PACKED_FULL, only("gl.maximum((seqlen_q + BLOCK_M - 1) // BLOCK_M, 1), 1)", "1, 1)")),
            ("packed: next head's sums after the sequence", "Where programs start apart, heads share sums.",
             PACKED_FULL, only("address + scheduler.head_blocks.to", "address + m_max.to")),
            ("packed: window of the first sequence", "Windows are placed by the rows of the batch.",
             PACKED_WINDOW,
             only("n_end + SPAN - self.diagonal", "n_end + SPAN - self.diagonal - self.q_start")),
            ("packed: divided: sums of the first sequence", "All sequences add to one.", PACKED_WIDE,
             only("place += scheduler.m_start", "pass", CONSUMER)),
            ("packed: order: sums of a head not left", "A head's sums begin in the last one's.",
             PACKED_ORDERED,
             only("gap = scheduler.head_blocks + m_max - m_min - 1", "gap = 2 * m_max - m_min - 1")),
        )),
        *mutants_of((
            ("packed: prepare: rows of the first sequence", "Statistics are those of the first rows.", PACKED,
             only("queries = q_start + (", "queries = (", ROWS_OF_TILE)),
            ("packed: prepare: rows behind a sequence", "Padding has the weights of the next sequence.",
             PACKED,
             only(" & (queries < tl.load(cu_seqlens_q + sequence + 1))", "", ROWS_OF_TILE)),
            ("packed: prepare: places of the batch", "Statistics are not in their sequence's blocks.", PACKED,
             only("+ (tile * 64 + tl.arange(0, 64))", "+ queries", PREPARE)),
            ("packed: finish: rows behind a sequence", "Rows of dq of the next sequence are overwritten.",
             PACKED,
             only("exists = query_exists[:, None]", "exists = (queries < seqlen_q)[:, None]", FINISH)),
        )),
        *mutants_of((
            ("packed: order: counters of the first sequence", "Turns are counted for other sequences too.",
             PACKED_ORDERED, only("place += scheduler.m_start", "pass", KEEPER)),
        ), hangs=True),
        *mutants_of((
            ("packed: order: unused blocks pass turns", "A turn is passed before its program has added.",
             PACKED_ORDERED,
             only("is_used = n_block * BLOCK_N < scheduler.seqlen_kv", "is_used = n_block >= 0")),
        ), racy=True),
    )  # fmt: skip
