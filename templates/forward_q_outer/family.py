"""FlashAttention-2's loop order in portable Triton: a tile of queries stays, K and V stream by."""

from __future__ import annotations

import enum

from flashtune.config import Axis, AxisValue, BlockSize, Config, LaunchOptions, RegisterCap, Space
from flashtune.kernel import Alignment, Argument, Specialization
from flashtune.problem import MAX_HEAD_DIM, Causal, Dtype, Problem
from flashtune.target import Target
from flashtune.templates.common.arguments import forward_arguments
from flashtune.templates.common.sram import Tiles, accumulator_columns, engine_of
from flashtune.templates.common.tiles import Chunk, columns, head_chunks, is_exact, power_of_two
from flashtune.templates.common.traffic import stays_in_cache, streamed_keys
from flashtune.templates.family import Context, TrafficItem
from flashtune.templates.forward_q_outer.sram import Stream, stream_items


class Loads(enum.StrEnum):
    """How tiles reach shared memory."""

    POINTER = "pointer"
    DESCRIPTOR = "descriptor"


class Products(enum.StrEnum):
    """How float32 tiles are multiplied: in float32, or as three products of tf32 halves."""

    IEEE = "ieee"
    TF32X3 = "tf32x3"


class QOuterConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space.

    Attributes:
        block_m: Queries of a tile.
        block_n: Keys of a tile.
        loads: Pointer loads, or TMA descriptors made on the device.
        qk_ahead: Issue the next block's scores before this block's softmax.
        two_phases: Blocks that no mask touches run in a loop of their own.
        decomposed: A head dim that is no power of two as several tiles instead of one padded.
        long_first: Start the tiles with the most keys first (causal only).
        heads_inner: Neighbouring programs work on different heads, not on different tiles.
        max_registers: Register cap, 0 for none.
        products: How float32 tiles are multiplied; of no effect on 16-bit problems.
    """

    block_m: BlockSize
    block_n: BlockSize
    loads: Loads = Loads.POINTER
    qk_ahead: bool = False
    two_phases: bool = True
    decomposed: bool = False
    long_first: bool = False
    heads_inner: bool = False
    max_registers: RegisterCap = 0
    products: Products = Products.IEEE


# Under this many queries small tiles are worth trying; up to this many keys, masking every block.
FEW_QUERIES = 128
FEW_KEYS = 512
# From this width on, issuing QK ahead can pay; up to that one, a register cap can.
WIDE_HEAD = 256
NARROW_HEAD = 64
HOPPER = 90
SMALL_SRAM = 128 * 1024
# Accumulator and scores, in registers of one thread, leave room for the rest of the 255.
REGISTERS_FOR_TILES = 240


def _can_run_ahead(chosen: dict[str, AxisValue]) -> bool:
    # Triton 3.6 miscompiles a score tile that is summed over chunks and carried by the loop: wrong
    # results and illegal accesses on an H200. Searches that test the gate force this pair.
    return chosen["loads"] is Loads.DESCRIPTOR and not chosen["decomposed"]


def _fits_registers(problem: Problem, config: Config) -> bool:
    """Whether the tiles fit the registers of their warps, and every warp has rows of its own."""
    assert isinstance(config, QOuterConfig)
    scores = config.block_n * (2 if config.qk_ahead else 1)
    values = columns(head_chunks(problem.value_head_dim, config.decomposed))
    per_thread = config.block_m * (values + scores) // (config.num_warps * 32)
    return per_thread <= REGISTERS_FOR_TILES and config.num_warps * 16 <= max(config.block_m, 64)


class QOuterContext(Context, frozen=True):
    """What the template renders from."""

    dtype: Dtype
    causal: Causal
    head_dim: int
    value_head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int
    loads: Loads
    qk_ahead: bool
    two_phases: bool
    decomposed: bool
    long_first: bool
    heads_inner: bool
    products: Products
    qk_chunks: tuple[Chunk, ...]
    v_chunks: tuple[Chunk, ...]
    widths: tuple[int, ...]
    alignment: Alignment
    index_bits: int
    lse: bool


class ForwardQOuter:
    """The family; it holds no state."""

    name = "forward_q_outer"
    config_type = QOuterConfig

    def supports(self, problem: Problem, target: Target) -> str | None:
        if max(problem.head_dim, problem.value_head_dim) > MAX_HEAD_DIM:
            return f"forward_q_outer takes head dims up to {MAX_HEAD_DIM}"
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        causal = problem.causal is not Causal.NONE
        odd_width = not (is_exact(problem.head_dim) and is_exact(problem.value_head_dim))
        widest = power_of_two(max(problem.head_dim, problem.value_head_dim))
        wide = problem.dtype is Dtype.FP32
        few_queries = problem.seqlen_q < FEW_QUERIES
        few_keys = problem.seqlen_kv <= FEW_KEYS
        # What no measurement ever chose is left out: see docs/axes.md.
        axes = (
            Axis("block_m", (16, 32, 64, 128) if wide or few_queries else (64, 128, 256)),
            Axis("block_n", (16, 32, 64) if wide else (32, 64, 128)),
            Axis("num_warps", (2, 4, 8) if wide or few_queries else (4, 8, 16)),
            Axis("num_stages", (1, 2, 3) if wide else (2, 3, 4)),
            Axis(
                "loads",
                (Loads.POINTER, Loads.DESCRIPTOR) if target.has_descriptors else (Loads.POINTER,),
                False,
            ),
            Axis("decomposed", (False, True) if odd_width else (False,)),
            Axis("qk_ahead", (False, True) if widest >= WIDE_HEAD else (False,), only_if=_can_run_ahead),
            Axis("two_phases", (True, False) if causal or few_keys else (True,), False),
            Axis("long_first", (False, True) if causal else (False,)),
            Axis("heads_inner", (False, True)),
            Axis("products", tuple(Products) if wide and target.is_nvidia else (Products.IEEE,), False),
            Axis("max_registers", (0, 128, 232) if widest <= NARROW_HEAD and target.is_nvidia else (0,)),
        )
        return Space(QOuterConfig, axes, lambda config: _fits_registers(problem, config))

    def default(self, problem: Problem, target: Target) -> Config:
        """A tile that fits every target of the table, for shapes that nobody tuned."""
        width = power_of_two(max(problem.head_dim, problem.value_head_dim)) * problem.dtype.itemsize
        long_first = problem.causal is not Causal.NONE
        if target.capability == HOPPER and problem.dtype is not Dtype.FP32:
            # The measured best of long sequences on an H200 for the head dims in question.
            return QOuterConfig(
                block_m=128,
                block_n=64,
                num_warps=4 if width == 256 else 8,
                num_stages=3 if width < 256 else 2,
                loads=Loads.POINTER if width < 256 else Loads.DESCRIPTOR,
                long_first=long_first,
            )
        if width > 512:
            return QOuterConfig(block_m=32, block_n=16, num_warps=4, num_stages=1, long_first=long_first)
        small = target.sram_per_block < SMALL_SRAM
        return QOuterConfig(
            block_m=128 if width <= 256 else 64,
            block_n=64 if width <= 128 or not small else 32,
            num_warps=4,
            num_stages=2,
            long_first=long_first,
        )

    def arguments(self, problem: Problem, specialization: Specialization) -> tuple[Argument, ...]:
        return forward_arguments(problem.dtype, specialization, ())

    def options(self, config: Config) -> LaunchOptions:
        assert isinstance(config, QOuterConfig)
        return LaunchOptions(config.num_warps, config.num_stages, config.max_registers)

    def sram_items(
        self, problem: Problem, config: Config, target: Target, specialization: Specialization
    ) -> tuple[TrafficItem, ...]:
        assert isinstance(config, QOuterConfig)
        tiles = self._tiles(problem, config, target)
        if tiles is None:
            return ()
        descriptors = config.loads is Loads.DESCRIPTOR and specialization.takes_descriptors(problem.dtype)
        stream = Stream(
            tiles=tiles,
            stages=config.num_stages,
            descriptors=descriptors,
            ahead=config.qk_ahead and descriptors,
            aligned_bytes=specialization.alignment * problem.dtype.itemsize,
            halves=problem.dtype is Dtype.FP32 and config.products is Products.TF32X3,
        )
        return stream_items(stream)

    def tensor_memory_columns(self, problem: Problem, config: Config, target: Target) -> int:
        assert isinstance(config, QOuterConfig)
        tiles = self._tiles(problem, config, target)
        return accumulator_columns(tiles, both=True) if tiles else 0

    def _tiles(self, problem: Problem, config: QOuterConfig, target: Target) -> Tiles | None:
        """The tiles of a program, or None where nothing is known of the architecture."""
        ieee = config.products is Products.IEEE
        engine = engine_of(target, problem.dtype, config.block_m, config.num_warps, ieee)
        return engine and Tiles(
            block_m=config.block_m,
            block_n=config.block_n,
            qk_chunks=head_chunks(problem.head_dim, config.decomposed),
            v_chunks=head_chunks(problem.value_head_dim, config.decomposed),
            itemsize=problem.dtype.itemsize,
            warps=config.num_warps,
            warp_size=target.warp_size,
            engine=engine,
        )

    def hbm_items(
        self, problem: Problem, config: Config, target: Target | None = None
    ) -> tuple[TrafficItem, ...]:
        assert isinstance(config, QOuterConfig)
        size = problem.dtype.itemsize
        both = (problem.head_dim + problem.value_head_dim) * size
        all_heads = problem.batch * problem.heads
        rows = all_heads * problem.seqlen_q
        streamed = all_heads * streamed_keys(problem, config.block_m, config.block_n) * both
        name = "k and v read for every tile of queries"
        if stays_in_cache(self._heads_at_once(problem, config, target) * problem.seqlen_kv * both, target):
            name = "k and v read once, then from L2"
            streamed = min(streamed, all_heads // problem.group_size * problem.seqlen_kv * both)
        return (
            TrafficItem("q read once", rows * problem.head_dim * size),
            TrafficItem(name, streamed),
            TrafficItem("out written once", rows * problem.value_head_dim * size),
        )

    def _heads_at_once(self, problem: Problem, config: QOuterConfig, target: Target | None) -> int:
        """KV heads that the programs which run at once read, one program to a multiprocessor."""
        programs = target.sm_count if target else 1
        tiles = max(1, -(-problem.seqlen_q // config.block_m))
        heads = programs if config.heads_inner else -(-programs // tiles) + 1
        return -(-min(heads, problem.batch * problem.heads) // problem.group_size)

    def context(self, problem: Problem, config: Config, specialization: Specialization) -> QOuterContext:
        assert isinstance(config, QOuterConfig)
        qk_chunks = head_chunks(problem.head_dim, config.decomposed)
        v_chunks = head_chunks(problem.value_head_dim, config.decomposed)
        descriptors = config.loads is Loads.DESCRIPTOR and specialization.takes_descriptors(problem.dtype)
        return QOuterContext(
            dtype=problem.dtype,
            causal=problem.causal,
            head_dim=problem.head_dim,
            value_head_dim=problem.value_head_dim,
            block_m=config.block_m,
            block_n=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            max_registers=config.max_registers,
            loads=Loads.DESCRIPTOR if descriptors else Loads.POINTER,
            qk_ahead=config.qk_ahead and descriptors,
            two_phases=config.two_phases,
            decomposed=config.decomposed,
            long_first=config.long_first,
            heads_inner=config.heads_inner,
            products=config.products,
            qk_chunks=qk_chunks,
            v_chunks=v_chunks,
            widths=tuple(sorted({chunk.width for chunk in (*qk_chunks, *v_chunks)})),
            alignment=specialization.alignment,
            index_bits=specialization.index_bits,
            lse=specialization.lse,
        )


FAMILY = ForwardQOuter()
