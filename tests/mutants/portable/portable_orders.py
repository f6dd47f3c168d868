"""Mutants of one of the loop orders."""

from __future__ import annotations

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Part, Patch
from tests.mutants.portable.portable import (
    IN_LOGITS,
    KEYS_OUTER,
    QUERIES_OUTER,
    TAIL_MASK,
    Bench,
    Size,
    of_any_order,
)

EXISTS = "query_exists = queries < seqlen_q"
STATE = Part("# The state of a row", "# Nothing but a barrier")
AFTER_A_BLOCK = Part("# No warp may overwrite", "# The next block of keys")


def portable_mutants(size: Size) -> tuple[Mutant, ...]:
    """Those of both families, at a size."""
    queries, keys = Bench(QUERIES_OUTER, size), Bench(KEYS_OUTER, size)
    return (
        *of_any_order(queries),
        *of_queries_outer(queries),
        *of_other_loops(queries),
        *of_any_order(keys),
        *of_keys_outer(keys),
    )


def of_queries_outer(bench: Bench) -> tuple[Mutant, ...]:
    """A program keeps a tile of queries."""
    causal = bench.subject()
    return (
        Mutant(
            "last block skipped",
            "The last block of keys that a tile of queries sees is left out.",
            causal,
            (
                Patch(
                    "tl.range(n_full_max, n_max, BLOCK_N)", "tl.range(n_full_max, n_max - BLOCK_N, BLOCK_N)"
                ),
            ),
        ),
        Mutant(
            "first block skipped",
            "The first block of keys is left out where it is seen whole.",
            causal,
            (Patch("tl.range(0, n_full_max, BLOCK_N)", "tl.range(BLOCK_N, n_full_max, BLOCK_N)"),),
        ),
        Mutant(
            "open blocks one too many",
            "A block that only some rows see whole is taken without a mask.",
            causal,
            (Patch("n_full_max = full_keys // BLOCK_N", "n_full_max = tl.cdiv(full_keys, BLOCK_N)"),),
        ),
        Mutant(
            "a tile of queries not written",
            "The last tile of queries is neither read nor written.",
            causal,
            (Patch(EXISTS, f"{EXISTS} - BLOCK_M"),),
        ),
        Mutant(
            "rows beyond the last written",
            "Rows of the last tile that do not exist are read and written.",
            causal,
            (Patch(EXISTS, "query_exists = queries >= 0"),),
        ),
        Mutant(
            "tail of V read",
            "Three rows of V behind the last key are read and weighted with zero.",
            causal,
            (
                Patch(
                    "mask=(keys < seqlen_kv)[:, None] & (columns_32 < VALUE_HEAD_DIM)",
                    "mask=(keys < seqlen_kv + 3)[:, None] & (columns_32 < VALUE_HEAD_DIM)",
                ),
            ),
        ),
        Mutant(
            "heads swapped in the grid",
            "Programs take heads in an order that skips some and repeats others.",
            causal,
            (Patch("tl.program_id(0) // tiles", "tl.program_id(0) % (all_heads // 2 + 1)"),),
        ),
        Mutant(
            "a tile of one head twice",
            "The first tile of queries is worked on where the second should be.",
            causal,
            (Patch("tile = tl.program_id(0) % tiles", "tile = tl.program_id(0) % tiles // 2 * 2"),),
        ),
    )


def of_other_loops(bench: Bench) -> tuple[Mutant, ...]:
    """Scores made one block ahead, and one loop for masked and open blocks."""
    ahead = bench.subject(Causal.NONE, loads="descriptor", overlap_qk=True)
    one_phase = bench.subject(split_masked_loop=False)
    name = bench.family
    return (
        Mutant(
            "stale scores",
            "Every block is weighted by the scores of the first.",
            ahead,
            (Patch("s = next_s", "pass"),),
        ),
        Mutant(
            "scores of this block again",
            "The scores made ahead are those of the block at hand.",
            ahead,
            (Patch("k_desc.load([start + BLOCK_N, 0])", "k_desc.load([start, 0])"),),
        ),
        Mutant(
            "padding of descriptors unmasked",
            "The zeros that the copy engine reads behind the last key take part in the softmax.",
            ahead,
            (Patch(f"s = tl.where({TAIL_MASK[name].replace('start', 'n_last')}, {IN_LOGITS}", "pass"),),
        ),
        Mutant(
            "first block without mask",
            "Blocks before the last are not masked where one loop does them all.",
            one_phase,
            (Patch("[None, :] < row_end[:, None]", "[None, :] < seqlen_kv"),),
        ),
        Mutant(
            "one phase, last block skipped",
            "The last block is left out where it holds a single key.",
            one_phase,
            (Patch("tl.range(0, n_max, BLOCK_N)", "tl.range(0, n_max - 1, BLOCK_N)"),),
        ),
    )


def of_keys_outer(bench: Bench) -> tuple[Mutant, ...]:
    """A program carries the state of all rows of its head from one block of keys to the next."""
    causal = bench.subject()
    stored = "tl.store(sum_base + queries, running_sum, mask=query_exists)"
    return (
        Mutant(
            "last block skipped",
            "The last block of keys is left out.",
            causal,
            (Patch("tl.range(0, n_max, BLOCK_N)", "tl.range(0, n_max - BLOCK_N, BLOCK_N)"),),
        ),
        Mutant(
            "a tile that sees these keys skipped",
            "The first tile of queries that sees a block of keys passes it by.",
            causal,
            (Patch("tl.range(m_min,", "tl.range(m_min + BLOCK_M,"),),
        ),
        Mutant(
            "state never made",
            "The running maximum starts at zero.",
            causal,
            (Patch('tl.full([BLOCK_M], float("-inf"), tl.float32)', "tl.full([BLOCK_M], 0.0, tl.float32)"),),
        ),
        Mutant(
            "maximum not carried",
            "The sum of weights is carried in the maximum's place.",
            causal,
            (
                Patch(
                    "tl.store(max_base + queries, running_max,",
                    "tl.store(max_base + queries, running_sum,",
                    times=2,
                ),
            ),
        ),
        Mutant(
            "maximum not carried from the last block on",
            "The change of the maximum by a block of keys is lost.",
            causal,
            (Patch("tl.store(max_base + queries, running_max, mask=query_exists)", "pass", AFTER_A_BLOCK),),
        ),
        Mutant(
            "state of the next head overwritten",
            "Sums of rows that do not exist are stored into the next head's.",
            causal,
            (Patch(stored, "tl.store(sum_base + queries, running_sum)", times=2),),
        ),
        Mutant(
            "a tile of queries not written",
            "The last query is left out everywhere.",
            causal,
            (Patch(EXISTS, f"{EXISTS} - 1", times=3),),
        ),
        Mutant(
            "accumulator not cleared",
            "Outputs start from the contents of the workspace.",
            causal,
            (
                Patch(
                    "mask=query_exists[:, None] & (columns_32 < VALUE_HEAD_DIM)[None, :],",
                    "mask=query_exists[:, None] & (columns_32 < VALUE_HEAD_DIM - 1)[None, :],",
                    STATE,
                ),
            ),
        ),
        Mutant(
            "no barrier between blocks of keys",
            "Rows are read again before other warps have stored them.",
            causal,
            (Patch("tl.debug_barrier()", "pass", times=3),),
            racy=True,
        ),
    )
