"""Mutants of the masked family: visible keys, and blocks of a tile."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.serving_size import FIRST_TOKENS, Size

START = "row_start = key_start(positions)"
ROW_END = "row_end = key_stop(positions, seqlen_kv)"
LIFTED = "tl.minimum(stop, FIRST_TOKENS)"
LIFTED_STOP = "n_lifted = tl.minimum(tl.cdiv(last_lifted, BLOCK_N) * BLOCK_N, n_min)"
FULL_MAX = "tl.maximum(key_stop(first_position, seqlen_kv), 0)"
OPEN_BEGIN = "n_full_min = tl.cdiv(key_start(last_position), BLOCK_N)"
LEFT_BLOCKS = "tl.cdiv(tl.maximum(left_keys, 0), BLOCK_N)"
RIGHT_BLOCKS = "tl.cdiv(tl.maximum(n_max - n_right_min, 0), BLOCK_N)"
TREE_BLOCKS = "tl.minimum(n_full_max, tl.maximum(seqlen_kv - seqlen_q, 0)"
PREFIX = "tl.minimum(tl.load(prefix + sequence), seqlen_kv)"
CHUNK_END = "tl.where(position < 0, 0, position // CHUNK * CHUNK + CHUNK)"


def borders(size: Size) -> tuple[Mutant, ...]:
    """All of them."""
    return (*windows(size), *blocks(size), *right_sides(size), *prefixes(size), *chunks(size), *trees(size))


def windows(size: Size) -> tuple[Mutant, ...]:
    """Mutants of the keys that rows see through a causal window, with the first tokens visible."""
    subject = size.masked(window_left=size.near, sink_tokens=FIRST_TOKENS)
    return mutants_of(subject, (
        ("window one key too far", START, START.replace("positions", "positions - 1")),
        ("window one key too short", START, START.replace("positions", "positions + 1")),
        ("window of the tile's first row",
         START, START.replace("positions", "positions * 0 + first_position")),
        ("window without a band", START, "row_start = positions * 0"),
        ("diagonal one key too far", ROW_END, ROW_END.replace("positions", "positions + 1")),
        ("diagonal one key too short", ROW_END, ROW_END.replace("positions", "positions - 1")),
        # Masks are aligned to the other corner.
        ("rows stand where their number says", "positions = queries + diagonal", "positions = queries"),
        ("first tokens one too many", LIFTED, LIFTED.replace("TOKENS", "TOKENS + 1")),
        ("first tokens one too few", LIFTED, LIFTED.replace("TOKENS", "TOKENS - 1")),
        ("first tokens beyond the diagonal",
         "lifted_stop(positions,", "lifted_stop(positions * 0 + seqlen_kv,"),
        ("first tokens hidden", "visible |= keys[None, :] < row_lifted[:, None]", "pass"),
    ))  # fmt: skip


def blocks(size: Size) -> tuple[Mutant, ...]:
    """A longer one: which blocks tiles read, and which of them without a mask."""
    subject = size.masked(window_left=size.window, sink_tokens=FIRST_TOKENS)
    return mutants_of(subject, (
        ("first block of the window skipped",
         "n_min = first_start // BLOCK_N", "n_min = tl.cdiv(first_start, BLOCK_N)"),
        ("open blocks of the first row", OPEN_BEGIN, OPEN_BEGIN.replace("last", "first")),
        ("open blocks of the last row", FULL_MAX, FULL_MAX.replace("first", "last")),
        ("open blocks one too many", FULL_MAX, FULL_MAX.replace(", 0)", " + BLOCK_N - 1, 0)")),
        ("blocks left of the open ones forgotten",
         f"left_blocks = lifted_blocks + {LEFT_BLOCKS}", "left_blocks = lifted_blocks"),
        ("blocks right of the open ones forgotten",
         f"right_blocks = left_blocks + {RIGHT_BLOCKS}", "right_blocks = left_blocks"),
        ("open blocks taken twice",
         "n_right_min = tl.maximum(n_full_min, n_full_max)", "n_right_min = n_full_min"),
        ("last block skipped", RIGHT_BLOCKS, "tl.maximum(n_max - n_right_min, 0) // BLOCK_N"),
        ("blocks of the first tokens skipped",
         LIFTED_STOP, LIFTED_STOP.replace("tl.cdiv(last_lifted, BLOCK_N)", "last_lifted // BLOCK_N")),
        ("blocks of the first tokens twice",
         LIFTED_STOP, "n_lifted = tl.cdiv(last_lifted, BLOCK_N) * BLOCK_N"),
        ("blocks of the band from the start",
         "n_min + (index - lifted_blocks) * BLOCK_N", "(index - lifted_blocks) * BLOCK_N"),
    ))  # fmt: skip


def right_sides(size: Size) -> tuple[Mutant, ...]:
    """A window on both sides, without a causal mask."""
    subject = size.masked(causal=Causal.NONE, window_left=size.near, window_right=size.block_n // 2 - 2)
    return mutants_of(subject, (
        ("right border one key too far", ROW_END, ROW_END.replace("positions", "positions + 1")),
        ("right border one key too short", ROW_END, ROW_END.replace("positions", "positions - 1")),
        ("right border beyond the keys", ROW_END, "row_end = positions + WINDOW_RIGHT + 1"),
        ("blocks up to the first row's border",
         "n_max = key_stop(last_position", "n_max = key_stop(first_position"),
    ))  # fmt: skip


def prefixes(size: Size) -> tuple[Mutant, ...]:
    """A causal mask with a prefix that all queries see, over sequences of unlike lengths."""
    subject = size.masked(prefix=True, kv_lengths=True)
    return mutants_of(subject, (
        ("prefix one key too long", PREFIX, PREFIX.replace("sequence)", "sequence) + 1")),
        ("prefix one key too short", PREFIX, PREFIX.replace("sequence)", "sequence) - 1")),
        ("prefix of the first sequence", PREFIX, PREFIX.replace(" + sequence", "")),
        # A prefix longer than its sequence shows padding.
        ("prefix beyond the keys", PREFIX, "tl.load(prefix + sequence)"),
        ("prefix without its blocks",
         "key_stop(last_position, seqlen_kv, prefix_end)", "key_stop(last_position, seqlen_kv, 0)"),
        ("prefix hides the rest", "key_stop(positions, seqlen_kv, prefix_end)", "positions * 0 + prefix_end"),
    ))  # fmt: skip


def chunks(size: Size) -> tuple[Mutant, ...]:
    """Chunks under a causal mask, and without one."""
    full = size.masked(causal=Causal.NONE, chunk=size.chunk)
    return (
        *mutants_of(size.masked(chunk=size.chunk), (
            ("chunk one query early", START, START.replace("positions", "tl.maximum(positions, 0) + 1")),
            ("chunk one query late", START, START.replace("positions", "positions - 1")),
            ("chunk without its first key", START, f"{START} + 1"),
            ("blocks of the last row's chunk",
             "first_start = key_start(first_position)", "first_start = key_start(last_position)"),
        )),
        *mutants_of(full, (
            ("chunk's end one key too far", CHUNK_END, CHUNK_END.replace("+ CHUNK)", "+ CHUNK + 1)")),
            ("chunk's end one key too short", CHUNK_END, CHUNK_END.replace("+ CHUNK)", "+ CHUNK - 1)")),
            ("queries before the first key have a chunk",
             CHUNK_END, "tl.maximum(position, 0) // CHUNK * CHUNK + CHUNK"),
        )),
    )  # fmt: skip


def trees(size: Size) -> tuple[Mutant, ...]:
    """A mask of the newest keys, over blocks that a tile sees in full without it."""
    subject = size.masked(causal=Causal.NONE, tree=True)
    return mutants_of(subject, (
        ("tree of the first sequence", "sequence.to(tl.int64) * stride_tree_b", "sequence * 0"),
        ("tree one key earlier", "newest = seqlen_kv - seqlen_q", "newest = seqlen_kv - seqlen_q - 1"),
        ("tree without its first key", "drafts >= 0", "drafts > 0"),
        ("tree without its last key", "drafts < seqlen_q)", "drafts < seqlen_q - 1)"),
        ("tree of the tile's rows", "bias_queries * stride_tree", "(queries - first_query) * stride_tree"),
        ("blocks of the tree taken as open", TREE_BLOCKS, "(n_max"),
    ))  # fmt: skip
