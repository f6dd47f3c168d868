"""Mutants of the masked family: visible keys, and blocks of a tile."""

from __future__ import annotations

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant
from tests.mutants.serving_size import FIRST_TOKENS, Size, change, mutants_of

START = "row_start = key_start(positions)"
ROW_END = "row_end = key_stop(positions, seqlen_kv)"
LIFTED = "tl.minimum(stop, FIRST_TOKENS)"
LIFTED_STOP = "n_lifted = tl.minimum(tl.cdiv(last_lifted, BLOCK_N) * BLOCK_N, n_min)"
FULL_MAX = "tl.maximum(key_stop(first_position, seqlen_kv), 0)"
OPEN_BEGIN = "n_full_min = tl.cdiv(key_start(last_position), BLOCK_N)"
LEFT_BLOCKS = "tl.cdiv(tl.maximum(left_keys, 0), BLOCK_N)"
RIGHT_BLOCKS = "tl.cdiv(tl.maximum(n_max - n_right_min, 0), BLOCK_N)"
PREFIX = "tl.minimum(tl.load(prefix + sequence), seqlen_kv)"
CHUNK_END = "tl.where(position < 0, 0, position // CHUNK * CHUNK + CHUNK)"


def borders(size: Size) -> tuple[Mutant, ...]:
    """All of them."""
    return (*windows(size), *blocks(size), *right_sides(size), *prefixes(size), *chunks(size))


def windows(size: Size) -> tuple[Mutant, ...]:
    """A causal window that leaves the first tokens visible: what rows see."""
    subject = size.masked(window_left=size.near, sink_tokens=FIRST_TOKENS)
    changes = (
        change("window one key too far", "Every query sees the key before its window.",
               START, START.replace("positions", "positions - 1")),
        change("window one key too short", "No query sees the first key of its window.",
               START, START.replace("positions", "positions + 1")),
        change("window of the tile's first row", "All rows of a tile see back as far as the first.",
               START, START.replace("positions", "positions * 0 + first_position")),
        change("window without a band", "Keys before a window are seen.", START, "row_start = positions * 0"),
        change("diagonal one key too far", "Every query sees the key after its last one.",
               ROW_END, ROW_END.replace("positions", "positions + 1")),
        change("diagonal one key too short", "No query sees its last key.",
               ROW_END, ROW_END.replace("positions", "positions - 1")),
        change("rows stand where their number says", "Masks are aligned to the other corner.",
               "positions = queries + diagonal", "positions = queries"),
        change("first tokens one too many", "The key behind the first tokens stays visible too.",
               LIFTED, LIFTED.replace("TOKENS", "TOKENS + 1")),
        change("first tokens one too few", "The last of the first tokens is hidden by windows.",
               LIFTED, LIFTED.replace("TOKENS", "TOKENS - 1")),
        change("first tokens beyond the diagonal", "The first queries see all of the first tokens.",
               "lifted_stop(positions,", "lifted_stop(positions * 0 + seqlen_kv,"),
        change("first tokens hidden", "Windows hide the start of the sequence.",
               "visible |= keys[None, :] < row_lifted[:, None]", "pass"),
    )  # fmt: skip
    return mutants_of(subject, changes)


def blocks(size: Size) -> tuple[Mutant, ...]:
    """A longer one: which blocks tiles read, and which of them without a mask."""
    subject = size.masked(window_left=size.window, sink_tokens=FIRST_TOKENS)
    changes = (
        change("first block of the window skipped",
               "A block that only some rows see is left out on the left.",
               "n_min = first_start // BLOCK_N", "n_min = tl.cdiv(first_start, BLOCK_N)"),
        change("open blocks of the first row",
               "Blocks that later rows no longer see are taken without a mask.",
               OPEN_BEGIN, OPEN_BEGIN.replace("last", "first")),
        change("open blocks of the last row", "Blocks that earlier rows do not see are taken without a mask.",
               FULL_MAX, FULL_MAX.replace("first", "last")),
        change("open blocks one too many", "A block that the first row sees in part is taken without a mask.",
               FULL_MAX, FULL_MAX.replace(", 0)", " + BLOCK_N - 1, 0)")),
        change("blocks left of the open ones forgotten",
               "Keys at a window's start that some rows see are left out.",
               f"left_blocks = lifted_blocks + {LEFT_BLOCKS}", "left_blocks = lifted_blocks"),
        change("blocks right of the open ones forgotten", "Blocks on the diagonal are left out.",
               f"right_blocks = left_blocks + {RIGHT_BLOCKS}", "right_blocks = left_blocks"),
        change("open blocks taken twice", "Blocks that all rows see come once more with a mask.",
               "n_right_min = tl.maximum(n_full_min, n_full_max)", "n_right_min = n_full_min"),
        change("last block skipped", "A last block that is not whole is left out.",
               RIGHT_BLOCKS, "tl.maximum(n_max - n_right_min, 0) // BLOCK_N"),
        change("blocks of the first tokens skipped", "First tokens that fill no block are left out.",
               LIFTED_STOP, LIFTED_STOP.replace("tl.cdiv(last_lifted, BLOCK_N)", "last_lifted // BLOCK_N")),
        change("blocks of the first tokens twice", "First tokens that are in the window count twice.",
               LIFTED_STOP, "n_lifted = tl.cdiv(last_lifted, BLOCK_N) * BLOCK_N"),
        change("blocks of the band from the start",
               "Behind the first tokens comes the sequence's start again.",
               "n_min + (index - lifted_blocks) * BLOCK_N", "(index - lifted_blocks) * BLOCK_N"),
    )  # fmt: skip
    return mutants_of(subject, changes)


def right_sides(size: Size) -> tuple[Mutant, ...]:
    """A window on both sides, without a causal mask."""
    subject = size.masked(causal=Causal.NONE, window_left=size.near, window_right=size.block_n // 2 - 2)
    changes = (
        change("right border one key too far", "Every query sees the key behind its window.",
               ROW_END, ROW_END.replace("positions", "positions + 1")),
        change("right border one key too short", "No query sees the last key of its window.",
               ROW_END, ROW_END.replace("positions", "positions - 1")),
        change("right border beyond the keys", "Padding behind the last key takes part in the softmax.",
               ROW_END, "row_end = positions + WINDOW_RIGHT + 1"),
        change("blocks up to the first row's border", "Keys that only later rows of a tile see are left out.",
               "n_max = key_stop(last_position", "n_max = key_stop(first_position"),
    )  # fmt: skip
    return mutants_of(subject, changes)


def prefixes(size: Size) -> tuple[Mutant, ...]:
    """A causal mask with a prefix that all queries see, over sequences of unlike lengths."""
    subject = size.masked(prefix=True, kv_lengths=True)
    changes = (
        change("prefix one key too long", "All queries see the key behind the prefix.",
               PREFIX, PREFIX.replace("sequence)", "sequence) + 1")),
        change("prefix one key too short", "The prefix's last key is hidden from early queries.",
               PREFIX, PREFIX.replace("sequence)", "sequence) - 1")),
        change("prefix of the first sequence", "All sequences have the prefix of one.",
               PREFIX, PREFIX.replace(" + sequence", "")),
        change("prefix beyond the keys", "A prefix longer than its sequence shows padding.",
               PREFIX, "tl.load(prefix + sequence)"),
        change("prefix without its blocks", "Blocks of a prefix behind the diagonal are not read.",
               "key_stop(last_position, seqlen_kv, prefix_end)", "key_stop(last_position, seqlen_kv, 0)"),
        change("prefix hides the rest", "Queries see the prefix alone.",
               "key_stop(positions, seqlen_kv, prefix_end)", "positions * 0 + prefix_end"),
    )  # fmt: skip
    return mutants_of(subject, changes)


def chunks(size: Size) -> tuple[Mutant, ...]:
    """Chunks under a causal mask, and without one."""
    behind = (
        change("chunk one query early", "The last query of a chunk sees the next one's keys alone.",
               START, START.replace("positions", "tl.maximum(positions, 0) + 1")),
        change("chunk one query late", "The first query of a chunk sees the chunk before.",
               START, START.replace("positions", "positions - 1")),
        change("chunk without its first key", "No query sees the first key of its chunk.",
               START, f"{START} + 1"),
        change("blocks of the last row's chunk", "Blocks of the first row's chunk are left out.",
               "first_start = key_start(first_position)", "first_start = key_start(last_position)"),
    )  # fmt: skip
    whole = (
        change("chunk's end one key too far", "Queries see the first key of the next chunk.",
               CHUNK_END, CHUNK_END.replace("+ CHUNK)", "+ CHUNK + 1)")),
        change("chunk's end one key too short", "No query sees the last key of its chunk.",
               CHUNK_END, CHUNK_END.replace("+ CHUNK)", "+ CHUNK - 1)")),
        change("queries before the first key have a chunk", "They see keys, and should see none.",
               CHUNK_END, "tl.maximum(position, 0) // CHUNK * CHUNK + CHUNK"),
    )  # fmt: skip
    full = size.masked(causal=Causal.NONE, chunk=size.chunk)
    return (*mutants_of(size.masked(chunk=size.chunk), behind), *mutants_of(full, whole))
