"""Mutants of one of the loop orders."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Part, mutants_of
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
    return mutants_of(causal, (
        ("last block skipped",
         "tl.range(n_full_max, n_max, BLOCK_N)", "tl.range(n_full_max, n_max - BLOCK_N, BLOCK_N)"),
        ("first block skipped", "tl.range(0, n_full_max, BLOCK_N)", "tl.range(BLOCK_N, n_full_max, BLOCK_N)"),
        ("open blocks one too many",
         "n_full_max = full_keys // BLOCK_N", "n_full_max = tl.cdiv(full_keys, BLOCK_N)"),
        ("a tile of queries not written", EXISTS, f"{EXISTS} - BLOCK_M"),
        ("rows beyond the last written", EXISTS, "query_exists = queries >= 0"),
        ("tail of V read",
         "mask=(keys < seqlen_kv)[:, None] & (columns_32 < VALUE_HEAD_DIM)",
         "mask=(keys < seqlen_kv + 3)[:, None] & (columns_32 < VALUE_HEAD_DIM)"),
        ("heads swapped in the grid", "tl.program_id(0) // tiles", "tl.program_id(0) % (all_heads // 2 + 1)"),
        ("a tile of one head twice",
         "tile = tl.program_id(0) % tiles", "tile = tl.program_id(0) % tiles // 2 * 2"),
    ))  # fmt: skip


def of_other_loops(bench: Bench) -> tuple[Mutant, ...]:
    """Scores made one block ahead, and one loop for masked and open blocks."""
    ahead = bench.subject(Causal.NONE, loads="descriptor", overlap_qk=True)
    single_loop = bench.subject(split_masked_loop=False)
    name = bench.family
    return (
        *mutants_of(ahead, (
            ("stale scores", "s = next_s", "pass"),
            ("scores of this block again", "k_desc.load([start + BLOCK_N, 0])", "k_desc.load([start, 0])"),
            # The zeros that the copy engine reads behind the last key take part in the softmax.
            ("padding of descriptors unmasked",
             f"s = tl.where({TAIL_MASK[name].replace('start', 'n_last')}, {IN_LOGITS}", "pass"),
        )),
        *mutants_of(single_loop, (
            ("first block without mask", "[None, :] < row_end[:, None]", "[None, :] < seqlen_kv"),
            # The last block is left out where it holds a single key.
            ("one phase, last block skipped",
             "tl.range(0, n_max, BLOCK_N)", "tl.range(0, n_max - 1, BLOCK_N)"),
        )),
    )  # fmt: skip


def of_keys_outer(bench: Bench) -> tuple[Mutant, ...]:
    """A program carries the state of all rows of its head from one block of keys to the next."""
    causal = bench.subject()
    stored = "tl.store(sum_base + queries, running_sum, mask=query_exists)"
    return (
        *mutants_of(causal, (
            ("last block skipped", "tl.range(0, n_max, BLOCK_N)", "tl.range(0, n_max - BLOCK_N, BLOCK_N)"),
            ("a tile that sees these keys skipped", "tl.range(m_min,", "tl.range(m_min + BLOCK_M,"),
            ("state never made",
             'tl.full([BLOCK_M], float("-inf"), tl.float32)', "tl.full([BLOCK_M], 0.0, tl.float32)"),
            ("maximum not carried",
             "tl.store(max_base + queries, running_max,", "tl.store(max_base + queries, running_sum,", None,
             2),
            ("maximum not carried from the last block on",
             "tl.store(max_base + queries, running_max, mask=query_exists)", "pass", AFTER_A_BLOCK),
            ("state of the next head overwritten",
             stored, "tl.store(sum_base + queries, running_sum)", None, 2),
            ("a tile of queries not written", EXISTS, f"{EXISTS} - 1", None, 3),
            ("accumulator not cleared",
             "mask=query_exists[:, None] & (columns_32 < VALUE_HEAD_DIM)[None, :],",
             "mask=query_exists[:, None] & (columns_32 < VALUE_HEAD_DIM - 1)[None, :],", STATE),
        )),
        *mutants_of(causal, (
            # Rows are read again before other warps have stored them.
            ("no barrier between blocks of keys", "tl.debug_barrier()", "pass", None, 3),
        ), racy=True),
    )  # fmt: skip
