"""SRAM that Triton allocates for the tiles of an attention kernel, and tile arithmetic.

Each value is a lower bound. Triton 3.6 to 3.9 allocate differently in places. The least of them counts,
unless the difference decides. docs/sram-audit.md compares these bounds with the compiler.
"""

from __future__ import annotations

import enum
import functools

import msgspec

from flashtune.core.machine import triton_version
from flashtune.core.problem import Dtype, Problem
from flashtune.core.target import KIB, Target

# Architectures of the audit. The model claims nothing of others.
AUDITED = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
HOPPER = 90
BLACKWELL = 100
WARPGROUP = 4
# Rows of a warp group's matrix instruction; those of tensor memory have at most twice as many.
WARPGROUP_ROWS = 64
TENSOR_MEMORY_ROWS = 128
# Minimum bytes per thread of an asynchronous copy. Smaller tiles pass through registers.
ASYNC_BYTES = 4
VECTOR_BYTES = 16
# From this release on, Triton reuses more memory of tiles that are not live at once.
SHARING_RELEASE = (3, 8)
# Until this release, Triton splits tiles that AMD's units reorder until a part fits their SRAM.
UNSPLIT_RELEASE = (3, 7)
AMD_SRAM = 64 * KIB


@functools.cache
def triton_release() -> tuple[int, int]:
    """Major and minor version of the installed Triton."""
    major, minor = triton_version().split(".")[:2]
    return int(major), int(minor)


class Engine(enum.Enum):
    """Units for matrix products, which decide where operands must be.

    `WARPGROUP` is wgmma (sm_90), `TENSOR_MEMORY` tcgen05 (sm_100), `WARP` mma.sync of one warp, `MFMA` AMD's,
    and `VECTOR` ordinary float32 arithmetic.
    """

    WARPGROUP = "warpgroup"
    TENSOR_MEMORY = "tensor memory"
    WARP = "warp"
    MFMA = "mfma"
    VECTOR = "vector"


class Tiles(msgspec.Struct, frozen=True, kw_only=True):
    """The tiles, warps and units of one program. Sizes are in bytes."""

    block_m: int  # Rows of a tile of queries.
    block_n: int  # Rows of a tile of keys and values.
    qk_chunks: tuple[Chunk, ...]  # Widths of the head dim's tiles, powers of two.
    v_chunks: tuple[Chunk, ...]  # Widths of the value head dim's tiles.
    itemsize: int  # Bytes of one element.
    warps: int  # Warps of the block.
    warp_size: int  # Threads of a warp.
    engine: Engine  # Units for matrix products.

    @property
    def threads(self) -> int:
        """Threads of the block."""
        return self.warps * self.warp_size

    @property
    def q(self) -> tuple[int, ...]:
        """[block_m, width] of each chunk."""
        return tuple(self.block_m * chunk.width * self.itemsize for chunk in self.qk_chunks)

    @property
    def k(self) -> tuple[int, ...]:
        """[block_n, width] of each chunk."""
        return tuple(self.block_n * chunk.width * self.itemsize for chunk in self.qk_chunks)

    @property
    def v(self) -> tuple[int, ...]:
        """[block_n, width] of each chunk."""
        return tuple(self.block_n * chunk.width * self.itemsize for chunk in self.v_chunks)

    @property
    def weights(self) -> int:
        """[block_m, block_n], in the inputs' type."""
        return self.block_m * self.block_n * self.itemsize

    @property
    def whole(self) -> bool:
        """Whether both head dims are single tiles."""
        return len(self.qk_chunks) == len(self.v_chunks) == 1

    def spread(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tiles with an element for every thread: smaller ones are not shared."""
        return tuple(size for size in sizes if size >= self.threads * self.itemsize)

    @property
    def shared_v(self) -> tuple[int, ...]:
        """The shared tiles of `v`: with an element for every thread, and rows too short for all threads.

        Others are loaded into registers for ordinary arithmetic.
        """
        if self.engine is not Engine.VECTOR:
            return self.spread(self.v)
        reach = self.threads * VECTOR_BYTES
        return tuple(size for size in self.spread(self.v) if size // self.block_n < reach)

    def worth_a_copy(self, tile: int) -> bool:
        """Returns whether every thread has something to copy of a tile of this size."""
        return tile >= ASYNC_BYTES * self.threads

    def crossing_weights(self) -> int:
        """Size of the probabilities if warps split the output's columns and thus need those of all rows."""
        splits = self.engine is Engine.WARP and self.whole
        return self.weights if splits and self.block_m < self.v_chunks[0].width else 0


def engine_of(target: Target, dtype: Dtype, block_m: int, num_warps: int, ieee: bool) -> Engine | None:
    """Returns the units for tiles of this many rows, None if the architecture is not audited.

    `ieee` requires float32 products, which Tensor Cores do not compute.
    """
    if target.arch not in AUDITED:
        return None
    if not target.is_nvidia:
        return Engine.MFMA
    wide = dtype.is_float32
    if wide and ieee:
        return Engine.VECTOR
    if block_m >= WARPGROUP_ROWS:
        # Parts of float32 may use wgmma too. They are stored in addition, so that bounds of one warp hold.
        if target.capability == HOPPER and not wide and num_warps % WARPGROUP == 0:
            return Engine.WARPGROUP
        if target.capability == BLACKWELL and num_warps in (WARPGROUP, 2 * WARPGROUP):
            return Engine.TENSOR_MEMORY
    return Engine.WARP


def tiles_of(
    problem: Problem,
    target: Target,
    blocks: tuple[int, int],
    warps: int,
    chunks: tuple[tuple[Chunk, ...], tuple[Chunk, ...]],
    *,
    ieee: bool,
) -> Tiles | None:
    """Returns the tiles of a program, None if the architecture is not audited.

    `blocks` are the rows of tiles of queries and of keys. `chunks` are the tiles of queries' and keys'
    columns, and those of values' columns. `ieee` is as in `engine_of`.
    """
    engine = engine_of(target, problem.dtype, blocks[0], warps, ieee)
    return engine and Tiles(
        block_m=blocks[0],
        block_n=blocks[1],
        qk_chunks=chunks[0],
        v_chunks=chunks[1],
        itemsize=problem.dtype.itemsize,
        warps=warps,
        warp_size=target.warp_size,
        engine=engine,
    )


def reordered(tile: int) -> int:
    """Returns the minimum bytes of AMD's SRAM for reordering a tile among lanes."""
    return tile if tile <= AMD_SRAM or triton_release() >= UNSPLIT_RELEASE else 0


def columns_of(tiles: Tiles, width: int) -> int:
    """Returns columns of tensor memory for `block_m` rows of float32 values."""
    if tiles.engine is not Engine.TENSOR_MEMORY:
        return 0
    # 64 rows fill half of the 128 lanes, and two such tiles can share their columns.
    return width * tiles.block_m // TENSOR_MEMORY_ROWS


# tl.dot accepts no side under 16.
MIN_DOT_WIDTH = 16


class Chunk(msgspec.Struct, frozen=True):
    """Columns `start` to `start + width` of a head; `padded` if some are beyond the head dim."""

    index: int
    start: int
    width: int
    padded: bool


def head_chunks(head_dim: int, split_head_dim: bool) -> tuple[Chunk, ...]:
    """Returns a head dim as tiles whose widths are powers of two.

    Padded, 96 is one tile of 128. Decomposed, it is 64 + 32, with more instructions and no waste.
    """
    if not split_head_dim:
        width = power_of_two(head_dim)
        return (Chunk(0, 0, width, width != head_dim),)
    chunks: list[Chunk] = []
    start = 0
    while start < head_dim:
        left = head_dim - start
        width = max(MIN_DOT_WIDTH, 1 << (left.bit_length() - 1))
        chunks.append(Chunk(len(chunks), start, width, width > left))
        start += width
    return tuple(chunks)


def chunks_of(problem: Problem, split_head_dim: bool) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Returns the tiles of queries' and keys' columns, and those of values' columns."""
    return head_chunks(problem.head_dim, split_head_dim), head_chunks(problem.value_head_dim, split_head_dim)


# With 16-bit tiles of 32 columns, Triton 3.6's ptxas puts some scalars of the loop into registers from which
# wgmma reads the tile's address.
MIN_WIDTH = 64


def masked_chunks(problem: Problem, head_dim: int, split_head_dim: bool) -> tuple[Chunk, ...]:
    """Returns a head dim as tiles for kernels with masks or gradients, which have no narrow 16-bit tiles."""
    chunks = head_chunks(head_dim, split_head_dim)
    if problem.dtype.is_float32 or chunks[0].width >= MIN_WIDTH:
        return chunks
    return (Chunk(0, 0, MIN_WIDTH, padded=True),)


def backward_chunks(problem: Problem, split_head_dim: bool) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """Returns the tiles of queries' and keys' columns, and those of values' columns."""
    widths = problem.head_dim, problem.value_head_dim
    qk, v = (masked_chunks(problem, width, split_head_dim) for width in widths)
    return qk, v


def may_split(problem: Problem) -> bool:
    """Returns whether a head dim needs padding, and no tile of a split one is too narrow."""
    widths = (chunk.width for chunks in chunks_of(problem, True) for chunk in chunks)
    return not is_exact(problem) and (problem.dtype.is_float32 or min(widths) >= MIN_WIDTH)


def power_of_two(size: int) -> int:
    """Returns the least power of two that holds `size`, and at least the minimum of tl.dot."""
    return max(MIN_DOT_WIDTH, 1 << (size - 1).bit_length())


def is_exact(problem: Problem) -> bool:
    """Returns whether both head dims need no padding."""
    return all(power_of_two(width) == width for width in (problem.head_dim, problem.value_head_dim))


def widest_tile(problem: Problem) -> int:
    """Returns the columns of the wider head dim as one padded tile."""
    return power_of_two(max(problem.head_dim, problem.value_head_dim))


def columns(chunks: tuple[Chunk, ...]) -> int:
    """Returns the columns of all chunks, with padding."""
    return sum(chunk.width for chunk in chunks)
