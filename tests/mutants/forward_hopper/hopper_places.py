"""Mutants of Hopper kernels with wrong addresses or tiles."""

from flashtune.core.problem import Causal
from tests.mutants.core import Mutant, mutants_of
from tests.mutants.forward_hopper.hopper import CAUSAL, CAUSAL_LSE, FULL, a_small_problem, subject

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
        *mutants_of(FULL, (
            ("keys of the first KV head",
             "k_descs[0], [this.batch, this.kv_head,", "k_descs[0], [this.batch, 0,"),
            ("values of the first KV head",
             "v_descs[0], [this.batch, this.kv_head,", "v_descs[0], [this.batch, 0,"),
            ("keys of the first sequence", "k_descs[0], [this.batch,", "k_descs[0], [0,"),
            # Values are those of the next tile's head, once a program has several tiles.
            ("values of the tile that comes next",
             "v_descs[0], [this.batch, this.kv_head,", "v_descs[0], [tile.batch, tile.kv_head,"),
            ("queries of a group's first head",
             "q_descs[0], [tile.batch, tile.kv_head, tile.head,",
             "q_descs[0], [tile.batch, tile.kv_head, 0,"),
            ("KV heads in turn",
             "pack % self.packs // self.packs_per_kv",
             "pack % self.packs % (self.packs // self.packs_per_kv)"),
        )),
        *mutants_of(PACKED, (
            ("heads of a pack one apart",
             "pack % self.packs % self.packs_per_kv * PACK", "pack % self.packs % self.packs_per_kv"),
            ("heads that fill no pack left out",
             "packs_per_kv = (group_size + PACK - 1) // PACK",
             "packs_per_kv = gl.maximum(group_size // PACK, 1)"),
            ("positions of a pack run on", "row_offsets % GROUP_POSITIONS", "row_offsets"),
            # Rows of a pack without a head write the next group's log-sum-exp.
            ("lse beyond a group's heads",
             "(positions < tile.seqlen_q) & (row_heads < scheduler.group_size)", "positions < tile.seqlen_q"),
        )),
    )  # fmt: skip


def tiles() -> tuple[Mutant, ...]:
    """Which tiles are worked on, and where they lie."""
    last_key = "(n_end + BLOCK_N - 1) // BLOCK_N"
    return (
        *mutants_of(FULL, (
            ("last block skipped", last_key, "n_end // BLOCK_N"),
            ("queries of the first group for all",
             "position = tile.m_block * TILE_POSITIONS + group * GROUP_POSITIONS",
             "position = tile.m_block * TILE_POSITIONS"),
            ("output of the last tile not written",
             STORED, f"if index != scheduler.total - 1:\n    {STORED}"),
            ("output written to the next tile", STORED, STORED.replace("this_m_start", "m_start")),
            ("output of the group's first head", COPY_OUT, COPY_OUT.replace("tile.head", "0")),
            # Where heads do not fill the last section, some tiles are done twice and some never.
            ("a section's width taken as whole",
             "width = gl.minimum(self.heads_per_swizzle, self.all_packs - first_pack)",
             "width = self.heads_per_swizzle"),
            ("tiles of a section one too few",
             "index // (self.heads_per_swizzle * self.m_blocks) * self.heads_per_swizzle",
             "index // gl.maximum(self.heads_per_swizzle * self.m_blocks - 1, 1) * self.heads_per_swizzle"),
        )),
        *mutants_of(CAUSAL, (
            ("blocks behind the diagonal's last skipped",
             "gl.minimum(m_start + POSITIONS + tile.seqlen_kv",
             "gl.minimum(m_start + POSITIONS - 1 + tile.seqlen_kv"),
            ("longest tile past the end",
             "m_block = self.m_blocks - 1 - m_block", "m_block = self.m_blocks - m_block"),
            ("backward rounds off by one",
             "(2 * turn + 1) * num_programs - 1 - index", "(2 * turn + 1) * num_programs - index"),
            # Tiles of a last round that has fewer of them than programs are not found.
            ("the last round runs backwards though it is not full",
             "(turn % 2 == 1) & ((turn + 1) * num_programs <= self.total)", "turn % 2 == 1"),
        )),
        *mutants_of(FULL, (
            # A program computes one tile and no more, and waits for the keys of the next.
            ("one round of tiles",
             "(gl.program_id(0), scheduler.total, num_programs):",
             "(gl.program_id(0), gl.minimum(scheduler.total, num_programs), num_programs):", None, 2),
        ), hangs=True),
    )  # fmt: skip


def columns() -> tuple[Mutant, ...]:
    """Parts of a head dim, and halves of an output."""
    again = "s = warpgroup_mma(q_tile, k_tile.permute((1, 0)), s, is_async=True)"
    return (
        *mutants_of(IN_PARTS, (
            ("second part of the head dim left out", again, "pass"),
            ("first columns of V twice",
             "v_descs[1], [this.batch, this.kv_head, key, 64]",
             "v_descs[1], [this.batch, this.kv_head, key, 0]"),
            ("second part of the output over the first",
             "m_start, 64], o_tiles[1]", "m_start, 0], o_tiles[1]"),
        )),
        *mutants_of(HALVED, (
            ("left half twice", "gl.convert_layout(right, HALF)", "gl.convert_layout(left, HALF)"),
        )),
    )  # fmt: skip


def rows_of_lse() -> tuple[Mutant, ...]:
    """Where the log-sum-exp is written."""
    return mutants_of(CAUSAL_LSE, (
        ("lse at the first group's rows",
         LSE_STORED, LSE_STORED.replace("positions", "positions - GROUP * GROUP_POSITIONS")),
        ("lse at the next tile's rows",
         LSE_STORED, LSE_STORED.replace("positions", "positions - this_m_start + m_start")),
        ("lse of another head", LSE_ROWS, LSE_ROWS.replace("row_heads", "row_heads // scheduler.group_size")),
        ("lse past the last row",
         "(positions < tile.seqlen_q) & (row_heads < scheduler.group_size)",
         "row_heads < scheduler.group_size"),
    ))  # fmt: skip
