"""Mutants of Hopper kernels with wrong addresses or tiles."""

from __future__ import annotations

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, Patch
from tests.mutants.forward_hopper.hopper import CAUSAL, CAUSAL_LSE, FULL, a_small_problem, only, subject

COPY_OUT = "o_descs[0], [tile.batch, tile.kv_head, tile.head, m_start, 0], o_tiles[0].index(GROUP)"
PACKED = subject(
    a_small_problem(causal=Causal.BOTTOM_RIGHT, seqlen_q=16, heads=6), pack_gqa=4, lse=True, head_swizzle=0
)
HALVED = subject(a_small_problem(256), split_epilogue=True, defer_pv_wait=False)
IN_PARTS = subject(a_small_problem(96), split_head_dim=True, defer_pv_wait=False)
STORED = "store_output(GROUP, o_tiles, o_descs, this, this_m_start, factor, accumulator)"
LSE_STORED = "store_lse(lse, row_lse, this, scheduler, positions, row_offsets)"
LSE_ROWS = "(first_head + row_heads).to(gl.int64) * tile.seqlen_q + positions"


def heads() -> tuple[Mutant, ...]:
    """Which head's tensors meet which."""
    return (
        Mutant(
            "keys of the first KV head",
            "All query heads meet the keys of one KV head.",
            FULL,
            only("k_descs[0], [this.batch, this.kv_head,", "k_descs[0], [this.batch, 0,"),
        ),
        Mutant(
            "values of the first KV head",
            "All query heads meet the values of one KV head.",
            FULL,
            only("v_descs[0], [this.batch, this.kv_head,", "v_descs[0], [this.batch, 0,"),
        ),
        Mutant(
            "keys of the first sequence",
            "All sequences meet the keys of one.",
            FULL,
            only("k_descs[0], [this.batch,", "k_descs[0], [0,"),
        ),
        Mutant(
            "values of the tile that comes next",
            "Values are those of the next tile's head, once a program has several tiles.",
            FULL,
            only(
                "v_descs[0], [this.batch, this.kv_head,",
                "v_descs[0], [tile.batch, tile.kv_head,",
            ),
        ),
        Mutant(
            "queries of a group's first head",
            "The query heads of a KV head are one.",
            FULL,
            only(
                "q_descs[0], [tile.batch, tile.kv_head, tile.head,",
                "q_descs[0], [tile.batch, tile.kv_head, 0,",
            ),
        ),
        Mutant(
            "KV heads in turn",
            "Query heads take the KV heads in turn, not in groups.",
            FULL,
            only(
                "pack % self.packs // self.packs_per_kv",
                "pack % self.packs % (self.packs // self.packs_per_kv)",
            ),
        ),
        Mutant(
            "heads of a pack one apart",
            "Packs of heads overlap.",
            PACKED,
            only("pack % self.packs % self.packs_per_kv * PACK", "pack % self.packs % self.packs_per_kv"),
        ),
        Mutant(
            "heads that fill no pack left out",
            "Heads of a group after its whole packs are not computed.",
            PACKED,
            only(
                "packs_per_kv = (group_size + PACK - 1) // PACK",
                "packs_per_kv = gl.maximum(group_size // PACK, 1)",
            ),
        ),
        Mutant(
            "positions of a pack run on",
            "Rows of a pack's later heads are masked as if they were later positions.",
            PACKED,
            only("row_offsets % GROUP_POSITIONS", "row_offsets"),
        ),
        Mutant(
            "lse beyond a group's heads",
            "Rows of a pack without a head write the next group's log-sum-exp.",
            PACKED,
            only(
                "(positions < tile.seqlen_q) & (row_heads < scheduler.group_size)",
                "positions < tile.seqlen_q",
            ),
        ),
    )


def tiles() -> tuple[Mutant, ...]:
    """Which tiles are worked on, and where they lie."""
    last_key = "(n_end + BLOCK_N - 1) // BLOCK_N"
    return (
        Mutant(
            "last block skipped",
            "A last block of keys that is not whole is left out.",
            FULL,
            only(last_key, "n_end // BLOCK_N"),
        ),
        Mutant(
            "blocks behind the diagonal's last skipped",
            "The last key of a tile's last row does not count.",
            CAUSAL,
            only(
                "gl.minimum(m_start + POSITIONS + tile.seqlen_kv",
                "gl.minimum(m_start + POSITIONS - 1 + tile.seqlen_kv",
            ),
        ),
        Mutant(
            "queries of the first group for all",
            "Every group computes the tile's first rows.",
            FULL,
            only(
                "position = tile.m_block * TILE_POSITIONS + group * GROUP_POSITIONS",
                "position = tile.m_block * TILE_POSITIONS",
            ),
        ),
        Mutant(
            "output of the last tile not written",
            "The last tile of a launch is computed and not stored.",
            FULL,
            only(STORED, f"if index != scheduler.total - 1:\n    {STORED}"),
        ),
        Mutant(
            "output written to the next tile",
            "Outputs go where the program's next tile lies.",
            FULL,
            only(STORED, STORED.replace("this_m_start", "m_start")),
        ),
        Mutant(
            "output of the group's first head",
            "Outputs of all query heads of a KV head are written to one.",
            FULL,
            only(COPY_OUT, COPY_OUT.replace("tile.head", "0")),
        ),
        Mutant(
            "a section's width taken as whole",
            "Where heads do not fill the last section, some tiles are done twice and some never.",
            FULL,
            only(
                "width = gl.minimum(self.heads_per_swizzle, self.all_packs - first_pack)",
                "width = self.heads_per_swizzle",
            ),
        ),
        Mutant(
            "tiles of a section one too few",
            "Sections overlap by a tile.",
            FULL,
            only(
                "index // (self.heads_per_swizzle * self.m_blocks) * self.heads_per_swizzle",
                "index // gl.maximum(self.heads_per_swizzle * self.m_blocks - 1, 1) * self.heads_per_swizzle",
            ),
        ),
        Mutant(
            "longest tile past the end",
            "Counting down from the last tile starts one too late.",
            CAUSAL,
            only("m_block = self.m_blocks - 1 - m_block", "m_block = self.m_blocks - m_block"),
        ),
        Mutant(
            "backward rounds off by one",
            "Rounds that run backwards take a tile of the next round and leave out one.",
            CAUSAL,
            only("(2 * turn + 1) * num_programs - 1 - index", "(2 * turn + 1) * num_programs - index"),
        ),
        Mutant(
            "the last round runs backwards though it is not full",
            "Tiles of a last round that has fewer of them than programs are not found.",
            CAUSAL,
            only("(turn % 2 == 1) & ((turn + 1) * num_programs <= self.total)", "turn % 2 == 1"),
        ),
        Mutant(
            "one round of tiles",
            "A program computes one tile and no more, and waits for the keys of the next.",
            FULL,
            only(
                "(gl.program_id(0), scheduler.total, num_programs):",
                "(gl.program_id(0), gl.minimum(scheduler.total, num_programs), num_programs):",
                times=2,
            ),
            hangs=True,
        ),
    )


def columns() -> tuple[Mutant, ...]:
    """Parts of a head dim, and halves of an output."""
    again = "s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), s, is_async=True)"
    return (
        Mutant(
            "second part of the head dim left out",
            "Scores are those of the first 64 columns.",
            IN_PARTS,
            only(again, "pass"),
        ),
        Mutant(
            "first columns of V twice",
            "The second part of V holds columns of the first.",
            IN_PARTS,
            only(
                "v_descs[1], [this.batch, this.kv_head, key, 64]",
                "v_descs[1], [this.batch, this.kv_head, key, 0]",
            ),
        ),
        Mutant(
            "second part of the output over the first",
            "Both parts of the output are written to the first columns.",
            IN_PARTS,
            only("m_start, 64], o_tiles[1]", "m_start, 0], o_tiles[1]"),
        ),
        Mutant(
            "left half twice",
            "The right half of the output is the left one.",
            HALVED,
            only("gl.convert_layout(right, HALF)", "gl.convert_layout(left, HALF)"),
        ),
    )


def rows_of_lse() -> tuple[Mutant, ...]:
    """Where the log-sum-exp is written."""
    return (
        Mutant(
            "lse at the first group's rows",
            "All groups write their log-sum-exp to the tile's first rows.",
            CAUSAL_LSE,
            only(LSE_STORED, LSE_STORED.replace("positions", "positions - GROUP * GROUP_POSITIONS")),
        ),
        Mutant(
            "lse at the next tile's rows",
            "The log-sum-exp goes where the program's next tile lies.",
            CAUSAL_LSE,
            only(LSE_STORED, LSE_STORED.replace("positions", "positions - this_m_start + m_start")),
        ),
        Mutant(
            "lse of another head",
            "The log-sum-exp of all query heads of a KV head is written to one.",
            CAUSAL_LSE,
            only(LSE_ROWS, LSE_ROWS.replace("row_heads", "row_heads // scheduler.group_size")),
        ),
        Mutant(
            "lse past the last row",
            "Rows of the last tile that do not exist have a log-sum-exp too.",
            CAUSAL_LSE,
            (
                Patch(
                    "(positions < tile.seqlen_q) & (row_heads < scheduler.group_size)",
                    "row_heads < scheduler.group_size",
                ),
            ),
        ),
    )
