"""Mutants of batch-invariant kernels: right results with bits that depend on other rows or on lengths."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Patch, mutants_of
from tests.mutants.forward_hopper.hopper import a_small_problem, subject

BEGINS = "n_block % SPLIT_BLOCKS == SPLIT_BLOCKS - 1"
NEW_MAX = "gl.where(grows, block_max, row_max)"
FIRST = "n_first = gl.minimum(tile.split * SPLIT_BLOCKS, n_end - 1)"
LAST = "n_last = gl.minimum((tile.split + 1) * SPLIT_BLOCKS, n_end) - 1"
FINAL = "return n_first, gl.maximum(n_first, n_last), tile.split * SPLIT_BLOCKS >= n_end"
COUNT = "splits = triton.cdiv(k.shape[2], 2048)"
PART = "part = last - first - step"
SHARED = (
    Patch(FIRST, "n_first = tile.split * n_end // splits"),
    Patch(LAST, "n_last = (tile.split + 1) * n_end // splits - 1"),
    Patch(FINAL, "return n_first, gl.maximum(n_first, n_last), n_last < n_first"),
)

PROBLEM = a_small_problem(64, Causal.BOTTOM_RIGHT, kv_lengths=True, batch_invariant=True)
FOLDED = subject(PROBLEM, num_consumer_groups=2, ping_pong=False, num_splits=1)
SPLIT = subject(PROBLEM, num_consumer_groups=1, ping_pong=False, num_splits=2, pack_gqa=2)


def invariance() -> tuple[Mutant, ...]:
    """All of them, of the main kernel."""
    return (
        *mutants_of(FOLDED, (
            ("splits from the last key on", BEGINS, "(n_last - n_block) % SPLIT_BLOCKS == 0"),
            ("splits by the batch",
             BEGINS, "n_block % (SPLIT_BLOCKS + gl.minimum(scheduler.all_packs // 8, 1)) == 0"),
            ("splits by the number of queries",
             BEGINS, "n_block % (SPLIT_BLOCKS + gl.minimum(this.seqlen_q // 128, 1)) == 0"),
            ("splits relative to later ones", 'gl.where(begins, float("-inf"), row_max)', "row_max"),
            ("maxima of the warp's rows",
             NEW_MAX, "gl.where(needs_rescale(GROUP), gl.maximum(row_max, block_max), row_max)"),
        )),
        *mutants_of(SPLIT, (
            ("split borders from the longest length", SHARED),
            ("split count from the batch", (*SHARED, Patch(COUNT, "splits = 1 + q.shape[0]", None, 2))),
            ("split length by the place in the batch", (
                Patch(FIRST, FIRST.replace("SPLIT_BLOCKS", "(SPLIT_BLOCKS + tile.batch % 2)")),
                Patch(LAST, LAST.replace("SPLIT_BLOCKS", "(SPLIT_BLOCKS + tile.batch % 2)")),
                Patch(FINAL, FINAL.replace("SPLIT_BLOCKS", "(SPLIT_BLOCKS + tile.batch % 2)")),
            )),
        )),
    )  # fmt: skip


def combining() -> tuple[Mutant, ...]:
    """Those of the kernel that combines splits."""
    return mutants_of(SPLIT, (
        ("splits combined from the first to the last", (
            Patch(PART, "part = first + step"),
            Patch("part >= 0", "part <= last", None, 2),
        )),
    ))  # fmt: skip
