"""Mutants of Hopper backward kernels with windows, softcap, sinks and packed sequences."""

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
from tests.mutants.core import Mutant, Part, Patch, mutants_of

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
        *mutants_of(WINDOW, (
            ("window: left side unmasked", "if m_block >= cut_min:", "if m_block < 0:"),
            ("window: one key too many", NOT_BEFORE, f"{NOT_BEFORE} + 1"),
            ("window: one key too few", NOT_BEFORE, f"{NOT_BEFORE} - 1"),
            ("window: columns of a thread confused",
             NOT_BEFORE, NOT_BEFORE.replace("queries & 6", "queries & 4")),
            ("window: cut blocks late by one", FIRST_CUT, f"{FIRST_CUT} + 1"),
            ("window: cut blocks by the last key", FIRST_CUT, FIRST_CUT.replace("n_start", "n_start + ROWS")),
            ("window: last block of queries skipped", LAST_QUERY, LAST_QUERY.removesuffix(" + BLOCK_M - 1")),
            ("window: blocks of a group's first keys",
             "(n_block + 1) * BLOCK_N, self.seqlen_kv)", "n_block * BLOCK_N + 1, self.seqlen_kv)"),
            ("window: sums of a head not left", GAP, "gap = m_min"),
            ("window: sums over blocks before alone", GAP, f"{GAP} - 1"),
        )),
        *mutants_of(SIDES, (
            ("window: right side as causal", "seqlen_kv - seqlen_q + 50", "seqlen_kv - seqlen_q"),
            ("window: left side of the causal mask", "SPAN = gl.constexpr(120)", "SPAN = gl.constexpr(70)"),
            ("window: aligned to the first key", "diagonal = seqlen_kv - seqlen_q + 50", "diagonal = 50"),
        )),
        *mutants_of(WINDOW_WIDE, (
            ("window: divided: left side unmasked", "if m_block >= cut_min:", "if m_block < 0:"),
            ("window: divided: sums of a head not left", GAP, "gap = m_min"),
        )),
        *mutants_of(WINDOW_ORDERED, (
            ("window: order: sums of a head not left",
             "gap = scheduler.head_blocks + m_max - m_min - 1", "gap = 2 * m_max - m_min - 1"),
        )),
        *mutants_of(WINDOW_ORDERED, (
            # Programs wait for keys that do not see the queries.
            ("window: order: the first block waits", "if m_block < wait_max:", "if m_block >= 0:", KEEPER),
            ("window: order: counters of a head not left",
             ordered_gap, ordered_gap.replace("scheduler.head_blocks", "m_max"), KEEPER),
        ), hangs=True),
        *mutants_of(WINDOW_ORDERED, (
            ("window: order: no wait for a turn", "if m_block < wait_max:", "if m_block < 0:", KEEPER),
        ), racy=True),
    )  # fmt: skip


def caps() -> tuple[Mutant, ...]:
    """Probabilities of capped scores, and the derivative of the cap."""
    low = "p_low = scheduler.mask(p_low, n_start, m_block, keys, queries)"
    sloped = "slope_p = scheduler.mask(slope_p, n_start, m_block, keys, queries)"
    return (
        *mutants_of(CAPPED, (
            ("cap: derivative left out", SLOPE, "p.to(DTYPE)"),
            ("cap: derivative of the sigmoid", SLOPE, SLOPE.replace("(2.0 - r)", "(1.0 - 0.5 * r)")),
            ("cap: derivative in dv", "return p.to(DTYPE), ", "return (p * r * (2.0 - r)).to(DTYPE), "),
            ("cap: half of the argument", "exponent_scale = 2.0 * LOG2_E", "exponent_scale = LOG2_E"),
            ("cap: no cap",
             "row.load(S_LAYOUT) - r * cap_log2",
             "row.load(S_LAYOUT) - cap_log2 + s * exponent_scale * cap_log2 * 0.34657359"),
            ("cap: overflow of four", "gl.minimum(s * exponent_scale, 30.0)", "s * exponent_scale"),
            ("cap: neighbours swapped",
             (Patch("mul.f32 $0, second, $5;", "mul.f32 $0, second, $4;"),
              Patch("mul.f32 $1, second, $4;", "mul.f32 $1, second, $5;"))),
            ("cap: in natural units", "cap_log2 = softcap * LOG2_E", "cap_log2 = softcap"),
            ("cap: tanh of the other sign",
             RECIPROCAL, RECIPROCAL.replace("s * exponent_scale", "-1.0 * s * exponent_scale")),
            ("cap: mask of dv alone", sloped, "pass"),
            ("cap: mask of ds alone", low, "pass"),
        )),
        *mutants_of(CAPPED_WINDOW, (
            ("cap: window of dv alone", sloped.replace("mask(", "mask_window("), "pass"),
            ("cap: window of ds alone", low.replace("mask(", "mask_window("), "pass"),
        )),
        *mutants_of(CAPPED_WIDE, (
            ("cap: divided: derivative left out", "store(slope_p)", "store(p_low)"),
            ("cap: divided: mask of ds alone",
             "slope_p = scheduler.mask(slope_p,", "slope_p = scheduler.mask(p_low,"),
        )),
    )  # fmt: skip


def sinks() -> tuple[Mutant, ...]:
    """The gradients of sinks."""
    share = "-tl.sum(tl.exp(tl.load(sinks + head) - row_lse) * row_delta)"
    return (
        *mutants_of(SUNK, (
            ("sinks: prepare: gradient of another sign", share, share.removeprefix("-")),
            ("sinks: prepare: sink of the first head", "tl.load(sinks + head)", "tl.load(sinks)"),
            ("sinks: prepare: delta of no row", share, share.removesuffix(" * row_delta)") + ")"),
            ("sinks: finish: first block alone", "end = tiles", "end = 1"),
            ("sinks: finish: of the first sequence",
             "workspace_2 + tl.program_id(0) * tiles", "workspace_2 + tl.program_id(0) % heads * tiles"),
        )),
        *mutants_of(PACKED_SUNK, (
            ("sinks: finish: next sequence too", "// 128 + sequence + 1\n", "// 128 + sequence + 2\n"),
            ("sinks: finish: blocks of the batch", "// 128 + sequence\nend", "// 128\nend"),
        )),
    )  # fmt: skip


def packed() -> tuple[Mutant, ...]:
    """Where the rows of a sequence are, and where its sums go."""
    of_q, of_k = "self.q_start + self.seqlen_q", "self.kv_start + self.seqlen_kv"
    unused = "n_block = gl.where(n_block < 0, (seqlen_kv + BLOCK_N - 1) // BLOCK_N, n_block)"
    return (
        *mutants_of(PACKED, (
            ("packed: queries of the sequence before", of_q, "self.q_start"),
            ("packed: keys of the sequence before", of_k, "self.kv_start"),
            ("packed: queries one row early", "FAR - self.seqlen_q + row", "FAR - self.seqlen_q + row - 1"),
            ("packed: keys one row late",
             "FAR - self.seqlen_kv + n_start", "FAR - self.seqlen_kv + n_start + 1"),
            ("packed: lengths of the queries for keys",
             "seqlen_kv = gl.load(cu_seqlens_kv + sequence + 1) - kv_start", "seqlen_kv = seqlen_q"),
            ("packed: diagonal of equal lengths",
             "diagonal = seqlen_kv - seqlen_q", "diagonal = seqlen_q * 0", FIND),
            ("packed: sums of the first sequence", "first_block += scheduler.m_start", "pass", CONSUMER),
            # A sequence's first block is the last one of another.
            ("packed: sums without gaps",
             "m_start = q_start // BLOCK_M + sequence", "m_start = q_start // BLOCK_M", FIND),
            ("packed: statistics of the first sequence",
             "stat_row = row + scheduler.m_start * BLOCK_M", "stat_row = row"),
            ("packed: sums of a head not left", GAP, "gap = m_min"),
            ("packed: sums of the first head",
             "return self.n_block, 0, self.kv_head", "return self.n_block, 0, self.kv_head * 0"),
            ("packed: search one sequence early", "+ middle <= n_block", "+ middle < n_block"),
            ("packed: search without gaps", "// BLOCK_N + middle <=", "// BLOCK_N <="),
            ("packed: rows before the first sequence", unused, "n_block = gl.maximum(n_block, 0)"),
            ("packed: prepare: rows of the first sequence",
             "queries = q_start + (", "queries = (", ROWS_OF_TILE),
            ("packed: prepare: rows behind a sequence",
             " & (queries < tl.load(cu_seqlens_q + sequence + 1))", "", ROWS_OF_TILE),
            ("packed: prepare: places of the batch",
             "+ (tile * 64 + tl.arange(0, 64))", "+ queries", PREPARE),
            ("packed: finish: rows behind a sequence",
             "exists = query_exists[:, None]", "exists = (queries < seqlen_q)[:, None]", FINISH),
        )),
        *mutants_of(PACKED_FULL, (
            ("packed: first block of queries alone",
             "gl.maximum((seqlen_q + BLOCK_M - 1) // BLOCK_M, 1), 1)", "1, 1)"),
            ("packed: next head's sums after the sequence",
             "address + scheduler.head_blocks.to", "address + m_max.to"),
        )),
        *mutants_of(PACKED_WINDOW, (
            ("packed: window of the first sequence",
             "n_end + SPAN - self.diagonal", "n_end + SPAN - self.diagonal - self.q_start"),
        )),
        *mutants_of(PACKED_WIDE, (
            ("packed: divided: sums of the first sequence", "place += scheduler.m_start", "pass", CONSUMER),
        )),
        *mutants_of(PACKED_ORDERED, (
            ("packed: order: sums of a head not left",
             "gap = scheduler.head_blocks + m_max - m_min - 1", "gap = 2 * m_max - m_min - 1"),
        )),
        *mutants_of(PACKED_ORDERED, (
            ("packed: order: counters of the first sequence", "place += scheduler.m_start", "pass", KEEPER),
        ), hangs=True),
        *mutants_of(PACKED_ORDERED, (
            ("packed: order: unused blocks pass turns",
             "is_used = n_block * BLOCK_N < scheduler.seqlen_kv", "is_used = n_block >= 0"),
        ), racy=True),
    )  # fmt: skip
