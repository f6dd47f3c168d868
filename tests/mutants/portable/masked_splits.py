"""Mutants of the masked family with split keys: the blocks of a part, its results, and their combination."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper_splits import combining_rows
from tests.mutants.serving_size import FIRST_TOKENS, SPLITS, Size

START = "part_start = split * blocks // splits * BLOCK_N"
END = "part_end = (split + 1) * blocks // splits * BLOCK_N"
BLOCKS = "blocks = tl.cdiv(tl.maximum(n_max, 0), BLOCK_N)"
LIFTED_BLOCKS = "blocks = tl.cdiv(tl.maximum(n_max - skipped, n_lifted), BLOCK_N)"
LIFTED = "n_lifted = tl.minimum(part_end, n_lifted) - lifted_first"
FULL_MAX = "tl.maximum(tl.minimum(n_full_max, part_end), n_part)"
PLACE = "(split.to(tl.int64) * all_heads + batch_head) * seqlen_q"
PART_LSE = "running_max + tl.log2(running_sum), mask"
SPLIT = {"num_splits": SPLITS}


def splits(size: Size) -> tuple[Mutant, ...]:
    """All of them."""
    packed = size.masked(SPLIT, packed=size.seqlen)
    return (
        *bounds(size),
        *bands(size),
        *results(size),
        *mutants_of(packed, combining_rows("def launch_plan(")),
    )


def bounds(size: Size) -> tuple[Mutant, ...]:
    """The blocks of a part, with a causal mask alone."""
    return mutants_of(size.masked(SPLIT, kv_lengths=True), (
        ("last block of a part skipped", END, f"{END} - BLOCK_N"),
        ("first block of a part skipped", START, f"{START} + BLOCK_N"),
        ("last block of the part before", START, f"{START} - tl.where(split * blocks < splits, 0, BLOCK_N)"),
        ("remaining blocks skipped", END, "part_end = part_start + blocks // splits * BLOCK_N"),
        ("parts that begin where the next one does",
         START, "part_start = tl.cdiv(split * blocks, splits) * BLOCK_N"),
        ("every part to the end", "n_max = tl.minimum(n_max, part_end)", "pass"),
        ("one part for all", START, "part_start = 0"),
        ("last partial block in no part", BLOCKS, "blocks = tl.maximum(n_max, 0) // BLOCK_N"),
        ("open blocks of all parts", FULL_MAX, "tl.maximum(n_full_max, n_part)"),
        ("open blocks before the part", FULL_MAX, "tl.minimum(n_full_max, part_end)"),
        ("parts of the tile's number",
         "split = tl.program_id(1)", "split = tl.program_id(0) % tl.num_programs(1)"),
    ))  # fmt: skip


def bands(size: Size) -> tuple[Mutant, ...]:
    """The blocks of a part of a window and the first tokens."""
    subject = size.masked(SPLIT, window_left=size.window, sink_tokens=FIRST_TOKENS)
    return mutants_of(subject, (
        ("part of the band at its start", "n_min = n_part", "pass"),
        ("open blocks of the band from its start", "n_full_min = tl.maximum(n_full_min, n_part)", "pass"),
        ("first tokens in every part", LIFTED, "pass"),
        ("first tokens in no part", LIFTED, "n_lifted = n_lifted * 0"),
        ("first tokens not counted",
         LIFTED_BLOCKS, LIFTED_BLOCKS.replace("n_lifted), B", "n_lifted) - n_lifted, B")),
        ("band after the first tokens' part", "tl.maximum(part_start, n_lifted)", "part_start"),
    ))  # fmt: skip


def results(size: Size) -> tuple[Mutant, ...]:
    """Stored outputs, statistics and sinks of a part."""
    return mutants_of(size.masked(SPLIT, sinks=True, causal=Causal.NONE), (
        ("sink in every part", "tl.where(split == 0, sink_log2,", "tl.where(split >= 0, sink_log2,"),
        ("sink in no part", "tl.where(split == 0, sink_log2,", "tl.where(split < 0, sink_log2,"),
        ("parts of all heads in one place", PLACE, "split.to(tl.int64) * all_heads * seqlen_q"),
        ("parts in one place", PLACE, "batch_head.to(tl.int64) * seqlen_q"),
        ("parts one head apart", PLACE, PLACE.replace("all_heads", "1")),
        ("outputs of parts overlap by a column",
         "part_row * VALUE_HEAD_DIM + queries", "part_row * (VALUE_HEAD_DIM - 1) + queries"),
        ("parts' lse without the sum", PART_LSE, "running_max, mask"),
        ("parts' lse in natural units", PART_LSE, "(running_max + tl.log2(running_sum)) * LN_2, mask"),
        ("parts not divided", "/ divisor[:, None]", "/ 1.0"),
    ))  # fmt: skip
