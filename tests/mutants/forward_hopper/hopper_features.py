"""Mutants of Hopper kernels with score features, chunks, prefixes and lengths in a tensor."""

from __future__ import annotations

from flashtune.core.problem import Causal
from tests.mutants.core import Change, Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import FIRST_BLOCK, LATER_BLOCKS, a_small_problem, only, subject

ROW, FULL = Causal.BOTTOM_RIGHT, Causal.NONE
SOFTCAP = subject(a_small_problem(64, ROW, softcap=True), lse=True)
ALIBI = subject(a_small_problem(64, ROW, batch=2, alibi=True), lse=True)
ALIBI_FULL = subject(a_small_problem(64, FULL, alibi=True), lse=True)
ALIBI_PACKED = subject(a_small_problem(64, ROW, batch=3, alibi=True, packed=1200), lse=True)
SINKS = subject(a_small_problem(64, ROW, sinks=True), lse=True)
HEADS = subject(
    a_small_problem(64, ROW, sinks=True, window_left=100),
    lse=True,
    pack_gqa=4,
    num_consumer_groups=2,
    rows_per_group=64,
)
CHUNKS = subject(a_small_problem(64, ROW, chunk=100), lse=True)
CHUNKS_FULL = subject(a_small_problem(64, FULL, chunk=100), lse=True)
SORTED = subject(
    a_small_problem(64, ROW, chunk=128),
    lse=True,
    num_consumer_groups=1,
    rows_per_group=64,
    ping_pong=False,
    order="lpt",
)
FIRST = subject(a_small_problem(64, ROW, sink_tokens=70, window_left=100), lse=True, block_n=64)
PREFIX = subject(a_small_problem(64, ROW, batch=3, prefix=True), lse=True)
PREFIX_WINDOW = subject(a_small_problem(64, ROW, batch=3, prefix=True, window_left=50), lse=True, block_n=64)
LENGTHS = subject(a_small_problem(64, FULL, batch=3, value_head_dim=128, kv_lengths=True), lse=True)

CAP = "s = cap_scores(s, cap_factor)"
ROW_TERM = "row_max -= slope * (positions + diagonal - origin).to(gl.float32)"


def features() -> tuple[Mutant, ...]:
    """All mutants of this file."""
    return mutants_of((*_caps(), *_slopes(), *_sinks(), *_chunks(), *_lifted(), *_lengths()))


def _caps() -> tuple[Change, ...]:
    factor = "-2.0 * LOG2_E * scale_log2"
    return (
        (
            "softcap: constant in lse",
            "The log-sum-exp has the cap.",
            SOFTCAP,
            only("row_max -= cap_log2", "pass"),
        ),
        ("softcap: not in first blocks", "Some scores have no cap.", SOFTCAP, only(CAP, "pass", FIRST_BLOCK)),
        (
            "softcap: not in later blocks",
            "Some scores have no cap.",
            SOFTCAP,
            only(CAP, "pass", LATER_BLOCKS),
        ),
        ("softcap: half", "Scores are halved.", SOFTCAP, only("= 2.0 * cap_log2", "= cap_log2")),
        (
            "softcap: flat",
            "Scores have tanh(x / 2) for tanh(x).",
            SOFTCAP,
            only(factor, "-LOG2_E * scale_log2"),
        ),
    )


def _slopes() -> tuple[Change, ...]:
    own = "values + tile.kv_head * scheduler.group_size + tile.head"
    steps = "steps = ((n_offsets & -7)"
    sequence = "this.sequence * stride_slopes_b"
    return (
        ("alibi: first head's slope", "All heads have one slope.", ALIBI, only(own, "values")),
        ("alibi: first sequence", "As in sequence 0.", ALIBI, only("this.batch * stride_slopes_b", "0")),
        ("alibi: packed: first sequence", "As in sequence 0.", ALIBI_PACKED, only(sequence, "0")),
        ("alibi: row term in lse", "The log-sum-exp has a term of the row.", ALIBI, only(ROW_TERM, "pass")),
        ("alibi: sign of distances", "Later keys gain.", ALIBI_FULL, only("gl.abs(limits", "(limits")),
        (
            "alibi: positions of the last block",
            "All blocks have the positions of the last one.",
            ALIBI,
            only("origin, n_block, n_offsets", "origin, n_last, n_offsets", LATER_BLOCKS),
        ),
        (
            "alibi: odd columns",
            "Two keys have one position.",
            ALIBI,
            only(steps, "steps = ((n_offsets & -8)"),
        ),
    )


def _sinks() -> tuple[Change, ...]:
    loaded = "load_of_heads(sinks, this, scheduler, 0) * LOG2_E"
    heads = "tile.head + row_offsets // GROUP_POSITIONS, scheduler"
    return (
        ("sinks: not in sums", "No sink.", SINKS, only(" + gl.exp2(sink_log2 - shift)", "")),
        (
            "sinks: outputs not rescaled",
            "Outputs keep the old maximum.",
            SINKS,
            only("= kept / ", "= 1.0 / "),
        ),
        (
            "sinks: lse of the old maximum",
            "The log-sum-exp is too small.",
            SINKS,
            only("row_max = largest", "pass"),
        ),
        ("sinks: natural units", "Sinks are too small.", SINKS, only(loaded, loaded[: -len(" * LOG2_E")])),
        (
            "sinks: one head for a pack",
            "All rows of a tile have the sink of its first head.",
            HEADS,
            only(heads, "tile.head + row_offsets * 0, scheduler"),
        ),
    )


def _chunks() -> tuple[Change, ...]:
    start = "start = gl.maximum(position, 0) // CHUNK * CHUNK"
    open_from = "key_start(m_start + GROUP_POSITIONS - 1 + diagonal)"
    order = " + m_block // gl.maximum(chunks, 1)"
    return (
        ("chunks: first key hidden", "Chunks start a key late.", CHUNKS, only(start, f"{start} + 1")),
        (
            "chunks: not masked",
            "Keys of the chunk before.",
            CHUNKS,
            only("if n_block < full_min", "if n_block < 0"),
        ),
        (
            "chunks: open for the first row",
            "Too few masks.",
            CHUNKS,
            only(open_from, "key_start(m_start + diagonal)"),
        ),
        (
            "chunks: end of the next",
            "A query sees a key of the next chunk.",
            CHUNKS_FULL,
            only("position // CHUNK * CHUNK + CHUNK", "position // CHUNK * CHUNK + CHUNK + 1"),
        ),
        ("chunks: tiles of one chunk", "Some tiles are missing.", SORTED, only(order, "")),
    )


def _lifted() -> tuple[Change, ...]:
    count = "(gl.maximum(stop, 0) + BLOCK_N - 1) // BLOCK_N"
    prefix = "gl.load(self.prefix + batch)"
    return (
        (
            "first tokens: one fewer",
            "One is hidden.",
            FIRST,
            only("gl.minimum(stop, FIRST_TOKENS)", "gl.minimum(stop, FIRST_TOKENS - 1)"),
        ),
        (
            "first tokens: part of a block",
            "The last block is left out.",
            FIRST,
            only(count, "gl.maximum(stop, 0) // BLOCK_N"),
        ),
        (
            "first tokens: blocks of the window",
            "The window's blocks come twice.",
            FIRST,
            only("n_step - n_block_min + n_lifted", "n_step"),
        ),
        (
            "prefix: one key more",
            "A key is visible.",
            PREFIX_WINDOW,
            only("columns < n_lifted_end", "columns <= n_lifted_end"),
        ),
        (
            "prefix: hidden after the diagonal",
            "No prefix.",
            PREFIX,
            only("return gl.maximum(stop, tile.prefix_end)", "return stop"),
        ),
        ("prefix: of the first sequence", "As in sequence 0.", PREFIX, only(prefix, "gl.load(self.prefix)")),
        (
            "prefix: beyond the keys",
            "Keys that do not exist.",
            PREFIX,
            only(
                "full_max = gl.maximum(key_stop(this, m_start + diagonal), 0) // BLOCK_N",
                "full_max = n_last + 1",
            ),
        ),
    )


def _lengths() -> tuple[Change, ...]:
    first = "gl.load(self.seqlens_kv + batch)"
    head = "this.kv_head * scheduler.v_head_step"
    near = "this.seqlen_kv, v_head, FAR - this.seqlen_kv + key"
    far = "this.seqlen_kv + 64, v_head, FAR - this.seqlen_kv - 64 + key"
    return (
        ("lengths: first sequence", "As in sequence 0.", LENGTHS, only(first, "gl.load(self.seqlens_kv)")),
        ("lengths: values behind the end", "Values behind the last key are NaN.", LENGTHS, only(near, far)),
        (
            "lengths: values of the first head",
            "All heads have the values of the first.",
            LENGTHS,
            only(head, "0"),
        ),
        (
            "lengths: tail not masked",
            "Zeros take part.",
            LENGTHS,
            only("(n_last + 1) * BLOCK_N > this.seqlen_kv", "this.seqlen_kv < 0"),
        ),
    )
