"""Portable Triton forward pass in FlashAttention-1's loop order: an outer loop over keys."""

from __future__ import annotations

from flashtune.core.config import Axis, BlockSize, Config, LaunchOptions, RegisterCap, Space
from flashtune.core.kernel import Argument, Specialization
from flashtune.core.problem import MAX_HEAD_DIM, Direction, Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import forward_arguments
from flashtune.templates.common.args.portable_context import PortableContext, portable_fields
from flashtune.templates.common.model.makespan import portable_span
from flashtune.templates.common.model.sram import Tiles, engine_of, head_chunks, is_exact, power_of_two
from flashtune.templates.common.model.traffic import AtOnce, cycled_rows, missed
from flashtune.templates.family import BytesItem, Context, FamilyOf
from flashtune.templates.forward_kv_outer.sram import cycle_columns, cycle_items

# State of a row between blocks of keys, in global memory and in float32.
WORKSPACES = ("carried_max", "carried_sum", "carried_out")
FLOAT32_BYTES = 4


class KVOuterConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space.

    Attributes:
        block_m: Queries of a tile.
        block_n: Keys of a tile.
        split_head_dim: A head dim that is not a power of two as several tiles instead of one padded tile.
        maxnreg: Limit of registers per thread, 0 for none.
    """

    block_m: BlockSize
    block_n: BlockSize
    split_head_dim: bool = False
    maxnreg: RegisterCap = 0


class ForwardKVOuter(FamilyOf[KVOuterConfig]):
    """The family, without state."""

    name = "forward_kv_outer"
    config_type = KVOuterConfig
    features = frozenset[Feature]()
    direction = Direction.FORWARD
    interpreted = True

    def supports(self, problem: Problem, target: Target) -> str | None:
        if max(problem.head_dim, problem.value_head_dim) > MAX_HEAD_DIM:
            return f"forward_kv_outer takes head dims up to {MAX_HEAD_DIM}"
        if problem.dtype.is_quantized:
            return f"forward_kv_outer takes no {problem.dtype}"
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        odd_width = not (is_exact(problem.head_dim) and is_exact(problem.value_head_dim))
        axes = (
            Axis("block_m", (16, 32, 64, 128)),
            Axis("block_n", (16, 32, 64, 128, 256)),
            Axis("num_warps", (2, 4, 8, 16)),
            # Triton does not pipeline loops that contain a barrier: more stages change nothing.
            Axis("num_stages", (1,)),
            Axis("split_head_dim", (False, True) if odd_width else (False,)),
            Axis("maxnreg", (0,)),
        )
        return Space(KVOuterConfig, axes)

    def default(self, problem: Problem, target: Target) -> KVOuterConfig:
        """Returns a small tile that fits every target of the table."""
        row_bytes = power_of_two(max(problem.head_dim, problem.value_head_dim)) * problem.dtype.itemsize
        side = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
        if target.sram_per_block < 100 * 1000:
            side = max(16, side // 2)
        return KVOuterConfig(block_m=side, block_n=side, num_warps=4, num_stages=1)

    def arguments(
        self, problem: Problem, config: KVOuterConfig, specialization: Specialization
    ) -> tuple[Argument, ...]:
        return forward_arguments(problem.dtype, specialization, WORKSPACES)

    def options(self, config: KVOuterConfig) -> LaunchOptions:
        return LaunchOptions(config.num_warps, config.num_stages, config.maxnreg)

    def sram_items(
        self, problem: Problem, config: KVOuterConfig, target: Target, specialization: Specialization
    ) -> tuple[BytesItem, ...]:
        tiles = self._tiles(problem, config, target)
        return cycle_items(tiles) if tiles else ()

    def tensor_memory_columns(self, problem: Problem, config: KVOuterConfig, target: Target) -> int:
        tiles = self._tiles(problem, config, target)
        return cycle_columns(tiles) if tiles else 0

    def _tiles(self, problem: Problem, config: KVOuterConfig, target: Target) -> Tiles | None:
        """Returns the tiles of a program, None for unknown architectures."""
        engine = engine_of(target, problem.dtype, config.block_m, config.num_warps, ieee=True)
        return engine and Tiles(
            block_m=config.block_m,
            block_n=config.block_n,
            qk_chunks=head_chunks(problem.head_dim, config.split_head_dim),
            v_chunks=head_chunks(problem.value_head_dim, config.split_head_dim),
            itemsize=problem.dtype.itemsize,
            warps=config.num_warps,
            warp_size=target.warp_size,
            engine=engine,
        )

    def programs(self, problem: Problem, config: KVOuterConfig) -> int:
        # Programs on the same rows would race: one for each head.
        return problem.batch * problem.heads

    def makespan_ms(self, problem: Problem, config: KVOuterConfig, target: Target) -> float:
        return portable_span(problem, config.block_m, config.block_n, target)

    def hbm_items(
        self, problem: Problem, config: KVOuterConfig, target: Target | None = None
    ) -> tuple[BytesItem, ...]:
        size = problem.dtype.itemsize
        all_heads = problem.batch * problem.heads
        rows = all_heads * problem.seqlen_q
        state = (problem.value_head_dim + 2) * FLOAT32_BYTES
        # One program for each head. It iterates over all queries of its head and their state.
        programs = min(all_heads, target.sm_count) if target else all_heads
        row_bytes = problem.head_dim * size + state
        visits, often = cycled_rows(
            problem, config.block_m, config.block_n, row_bytes, AtOnce(programs, programs), target
        )
        last = rows * missed(programs * problem.seqlen_q * row_bytes, target)
        keys = all_heads * problem.seqlen_kv * (problem.head_dim + problem.value_head_dim) * size
        return (
            BytesItem("k and v read once for every query head", keys),
            BytesItem("carried max, sum and output first written", rows * state),
            BytesItem(f"q read {often}", visits * problem.head_dim * size),
            BytesItem(f"carried max, sum and output read {often}", visits * state),
            BytesItem(f"carried max, sum and output written {often}", visits * state),
            BytesItem("carried max, sum and output last read", round(last) * state),
            BytesItem("out written once", rows * problem.value_head_dim * size),
        )

    def context(self, problem: Problem, config: KVOuterConfig, specialization: Specialization) -> Context:
        qk_chunks = head_chunks(problem.head_dim, config.split_head_dim)
        v_chunks = head_chunks(problem.value_head_dim, config.split_head_dim)
        return PortableContext(**portable_fields(problem, specialization, qk_chunks, v_chunks))


FAMILY = ForwardKVOuter()
