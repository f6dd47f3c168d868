"""Mutants of Hopper kernels with score features, chunks, prefixes and lengths in a tensor."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import FIRST_BLOCK, LATER_BLOCKS, a_small_problem, subject

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
TREE = subject(a_small_problem(64, ROW, batch=3, seqlen_q=100, tree=True), lse=True)
TREE_PACKED = subject(a_small_problem(64, FULL, batch=3, packed=1200, tree=True), lse=True)
LENGTHS = subject(a_small_problem(64, FULL, batch=3, value_head_dim=128, kv_lengths=True), lse=True)

CAP = "s = cap_scores(s, cap_factor)"
ROW_TERM = "row_max -= slope * (positions + diagonal - origin).to(gl.float32)"


def features() -> tuple[Mutant, ...]:
    """All mutants of this file."""
    return (*_caps(), *_slopes(), *_sinks(), *_chunks(), *_lifted(), *_trees(), *_lengths())


def _caps() -> tuple[Mutant, ...]:
    factor = "-2.0 * LOG2_E * scale_log2"
    return mutants_of(SOFTCAP, (
        ("softcap: constant in lse", "row_max -= cap_log2", "pass"),
        ("softcap: not in first blocks", CAP, "pass", FIRST_BLOCK),
        ("softcap: not in later blocks", CAP, "pass", LATER_BLOCKS),
        ("softcap: half", "= 2.0 * cap_log2", "= cap_log2"),
        ("softcap: flat", factor, "-LOG2_E * scale_log2"),
    ))  # fmt: skip


def _slopes() -> tuple[Mutant, ...]:
    own = "values + tile.kv_head * scheduler.group_size + tile.head"
    steps = "steps = ((n_offsets & -7)"
    sequence = "this.sequence * stride_slopes_b"
    return (
        *mutants_of(ALIBI, (
            ("alibi: first head's slope", own, "values"),
            ("alibi: first sequence", "this.batch * stride_slopes_b", "0"),
            ("alibi: row term in lse", ROW_TERM, "pass"),
            ("alibi: positions of the last block",
             "origin, n_block, n_offsets", "origin, n_last, n_offsets", LATER_BLOCKS),
            ("alibi: odd columns", steps, "steps = ((n_offsets & -8)"),
        )),
        *mutants_of(ALIBI_PACKED, (
            ("alibi: packed: first sequence", sequence, "0"),
        )),
        *mutants_of(ALIBI_FULL, (
            ("alibi: sign of distances", "gl.abs(limits", "(limits"),
        )),
    )  # fmt: skip


def _sinks() -> tuple[Mutant, ...]:
    loaded = "load_of_heads(sinks, this, scheduler, 0) * LOG2_E"
    heads = "tile.head + row_offsets // GROUP_POSITIONS, scheduler"
    return (
        *mutants_of(SINKS, (
            ("sinks: not in sums", " + gl.exp2(sink_log2 - shift)", ""),
            ("sinks: outputs not rescaled", "= kept / ", "= 1.0 / "),
            ("sinks: lse of the old maximum", "row_max = largest", "pass"),
            ("sinks: natural units", loaded, loaded[: -len(" * LOG2_E")]),
        )),
        *mutants_of(HEADS, (
            ("sinks: one head for a pack", heads, "tile.head + row_offsets * 0, scheduler"),
        )),
    )  # fmt: skip


def _chunks() -> tuple[Mutant, ...]:
    start = "start = gl.maximum(position, 0) // CHUNK * CHUNK"
    open_from = "key_start(m_start + GROUP_POSITIONS - 1 + diagonal)"
    order = " + m_block // gl.maximum(chunks, 1)"
    return (
        *mutants_of(CHUNKS, (
            ("chunks: first key hidden", start, f"{start} + 1"),
            ("chunks: not masked", "if n_block < full_min", "if n_block < 0"),
            ("chunks: open for the first row", open_from, "key_start(m_start + diagonal)"),
        )),
        *mutants_of(CHUNKS_FULL, (
            ("chunks: end of the next",
             "position // CHUNK * CHUNK + CHUNK", "position // CHUNK * CHUNK + CHUNK + 1"),
        )),
        *mutants_of(SORTED, (
            ("chunks: tiles of one chunk", order, ""),
        )),
    )  # fmt: skip


def _lifted() -> tuple[Mutant, ...]:
    count = "(gl.maximum(stop, 0) + BLOCK_N - 1) // BLOCK_N"
    prefix = "gl.load(self.prefix + batch)"
    return (
        *mutants_of(FIRST, (
            ("first tokens: one fewer",
             "gl.minimum(stop, FIRST_TOKENS)", "gl.minimum(stop, FIRST_TOKENS - 1)"),
            ("first tokens: part of a block", count, "gl.maximum(stop, 0) // BLOCK_N"),
            ("first tokens: blocks of the window", "n_step - n_block_min + n_lifted", "n_step"),
        )),
        *mutants_of(PREFIX_WINDOW, (
            ("prefix: one key more", "columns < n_lifted_end", "columns <= n_lifted_end"),
        )),
        *mutants_of(PREFIX, (
            ("prefix: hidden after the diagonal", "return gl.maximum(stop, tile.prefix_end)", "return stop"),
            ("prefix: of the first sequence", prefix, "gl.load(self.prefix)"),
            ("prefix: beyond the keys",
             "full_max = gl.maximum(key_stop(this, m_start + diagonal), 0) // BLOCK_N",
             "full_max = n_last + 1"),
        )),
    )  # fmt: skip


def _trees() -> tuple[Mutant, ...]:
    last, reach = "columns < seqlen_q - first", "* BLOCK_N > newest"
    return (
        *mutants_of(TREE, (
            ("tree: of the first sequence", "this.batch.to(gl.int64) * stride_tree_b", "this.batch * 0"),
            ("tree: rows of the tile", "gl.minimum(positions, this", "gl.minimum(positions - m_start, this"),
            ("tree: a block with older keys", f"(n_block + 1) {reach}", f"n_block {reach}"),
            ("tree: the first newest key", "columns >= 0 - first", "columns > 0 - first"),
            ("tree: the last newest key", last, "columns < seqlen_q - 1 - first"),
            ("tree: one key earlier", "newest = this.seqlen_kv - this", "newest = this.seqlen_kv - 1 - this"),
        )),
        *mutants_of(TREE_PACKED, (
            ("tree: strides of short sequences", "* stride_tree_s", "* this.seqlen_q"),
        )),
    )  # fmt: skip


def _lengths() -> tuple[Mutant, ...]:
    first = "gl.load(self.seqlens_kv + batch)"
    head = "this.kv_head * scheduler.v_head_step"
    near = "this.seqlen_kv, v_head, FAR - this.seqlen_kv + key"
    far = "this.seqlen_kv + 64, v_head, FAR - this.seqlen_kv - 64 + key"
    return mutants_of(LENGTHS, (
        ("lengths: first sequence", first, "gl.load(self.seqlens_kv)"),
        ("lengths: values behind the end", near, far),
        ("lengths: values of the first head", head, "0"),
        ("lengths: tail not masked", "(n_last + 1) * BLOCK_N > this.seqlen_kv", "this.seqlen_kv < 0"),
    ))  # fmt: skip
