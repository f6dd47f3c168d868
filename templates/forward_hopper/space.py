"""The search space of the Hopper family."""

import enum
from typing import Annotated

import msgspec

from flashtune.core.config import Axis, BlockSize, Config, Space
from flashtune.core.features.functions import has_full_lists
from flashtune.core.problem import Bias, BlockLists, Dtype, KvDtype, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.splits import Splits, count_tiles
from flashtune.templates.common.model.sram import columns, head_chunks, is_exact
from flashtune.templates.family import ORDERED_KEYS, NumericOrder
from flashtune.templates.forward_hopper.splits import max_split_tiles, split_counts, split_parts

Count = Annotated[int, msgspec.Meta(ge=1, le=64)]
WeightTiles = Annotated[int, msgspec.Meta(ge=0, le=2)]
Section = Annotated[int, msgspec.Meta(ge=0, le=2**16)]

GROUP_WARPS = 4
GROUP_THREADS = 128
# Rows of one matrix instruction of a group.
GROUP_ROWS = 64
# Registers of a thread: those of the SM, shared by the groups and the producer's four warps.
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
PRODUCER_REGISTERS = 24
# The same if a block has more than FEW_COPIES copies of pages. The producer keeps the numbers of the pages.
FEW_COPIES = 2
REGISTERS_OF_SMALL_PAGES = {1: (240, 56), 2: (232, 40), 3: (160, 32)}
# TMA writes groups of 8 rows, in which shared memory is swizzled. Threads of the producer copy the rows of
# smaller pages. The registers are then these.
SMALLEST_COPY = 8
REGISTERS_OF_ROWS = {1: (240, 96), 2: (224, 64), 3: (160, 32)}
# Those of a producer that reads lists of blocks.
LISTED_REGISTERS = 32
# Those if another group converts keys and values in 8 bits, and the registers of that group. Three groups
# have too few.
REGISTERS_WITH_CONVERTER = {1: (240, 40), 2: (208, 40)}
CONVERTER_REGISTERS = 56
CONVERTED_HEAD_DIMS = (64, 128)
# Registers of the loop without tiles: addresses, sums, maxima, and scheduling by the compiler.
SPARE_REGISTERS = 24
# Additional registers for dropout: random words of rows, and products of twice their width.
DROPPING_REGISTERS = 16
MAX_ROWS = 256
# Up to this width, tiles leave registers for a third group.
NARROW = 64
# Values of more columns leave few registers.
WIDE = 128
# Outputs this wide have halves as wide as TMA's widest rows.
MIN_HALVED = 128
# Columns that one product of 8-bit tiles sums over.
QUANTIZED_DEPTH = 32
PACKS = (1, 2, 4, 8, 16)
# From this length on, groups of heads gain nothing if tiles differ.
LONG = 4096
# From this length on, tiles of three groups waste few rows at a sequence's end.
MANY_QUERIES = 2048
# From this many keys for each query on, tiles of a prompt's chunk differ little. With small pages in 8 bits,
# linear order was then the fastest on an H200.
SIMILAR_TILES = 4
# Below this many queries, a tile has space for several heads.
FEW_QUERIES = 128


class Order(enum.StrEnum):
    """The order of tiles of queries.

    LPT starts with the tiles that see the most keys (longest processing time first). SERPENTINE also reverses
    every second round of programs, so that a program with a long tile gets a short one.
    """

    LINEAR = "linear"
    LPT = "lpt"
    SERPENTINE = "serpentine"


class HopperConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space. `num_stages` tiles of K and as many of V are in flight."""

    num_consumer_groups: Count  # Consumer groups of four warps.
    rows_per_group: BlockSize  # Queries of one group's tile.
    block_n: BlockSize  # Keys of a block.
    q_stages: Count = 1  # Tiles of queries in flight for each group.
    # Outputs are stored through shared memory in two halves, with the space of one.
    split_epilogue: bool = False
    ping_pong: bool = False  # Groups alternate in issuing products.
    defer_pv_wait: bool = False  # The wait for PV is after the exponentials, not before.
    conditional_rescale: bool = True  # Rescale the accumulator only if a maximum grew by much.
    # Tiles of 8-bit probabilities of each group in shared memory. Of 2, one is written during the product of
    # the other. 0 leaves probabilities in registers.
    p_stages: WeightTiles = 0
    # A head dim that is not a power of two as several tiles instead of one padded tile.
    split_head_dim: bool = False
    # Query heads of one KV head that share a tile. If they do not divide the group, a tile has unused rows.
    pack_gqa: Count = 1
    bias_stages: Count = 1  # Tiles of an additive bias in flight for each group.
    head_swizzle: Section = 0  # Heads (packs of heads) that are processed together; 0 for all.
    order: Order = Order.LINEAR  # Order of tiles.
    # The fewest programs with the same number of rounds, not one for each SM.
    balanced_grid: bool = False
    # A program takes the next tile when it has copied the keys of the last one. Tiles of block masks have
    # different lengths that only the device knows.
    dynamic_schedule: bool = False
    # Parts of the keys of each tile, for several programs. A second kernel combines them.
    num_splits: Splits = 1

    @property
    def block_m(self) -> int:
        """Queries of a tile, of all groups together."""
        return self.num_consumer_groups * self.rows_per_group


def hopper_space(problem: Problem, target: Target) -> Space:
    """Returns the search space; benchmarks/results/hopper.md names the excluded configs."""
    differ = tiles_differ(problem)
    order = numeric_order(problem) if problem.batch_invariant else None
    axes = (
        Axis("num_warps", (GROUP_WARPS,)),
        Axis("num_consumer_groups", tuple(REGISTERS_WITH_CONVERTER) if problem.kv_dtype else (1, 2, 3)),
        Axis("rows_per_group", (64, 128)),
        Axis("block_n", (order.block_n,) if order else (64, 128)),
        Axis("num_stages", (2, 3, 4)),
        Axis("q_stages", (1, 2)),
        Axis("split_epilogue", (False, True)),
        Axis("ping_pong", (False, True), only_if=lambda chosen: chosen["num_consumer_groups"] != 1),
        Axis("defer_pv_wait", (False, True)),
        Axis("conditional_rescale", (True,) if order else (True, False), False),
        # Three groups have few registers, and are faster with probabilities in shared memory.
        Axis(
            "p_stages",
            (0, 1, 2) if problem.dtype.is_quantized else (0,),
            only_if=lambda chosen: chosen["num_consumer_groups"] == 3,
        ),
        Axis("split_head_dim", _split_head_dims(problem), False),
        Axis("pack_gqa", _packs(problem)),
        Axis("bias_stages", (1, 2) if problem.bias is Bias.ADDITIVE else (1,)),
        Axis("head_swizzle", _sections(problem), False),
        Axis("order", tuple(Order) if differ else (Order.LINEAR,), False),
        Axis("balanced_grid", (False, True)),
        Axis("dynamic_schedule", (False, True) if problem.block_mask else (False,), False),
        Axis("num_splits", split_counts(problem, _packs(problem), target)),
    )
    return Space(HopperConfig, axes, lambda config: _is_possible(problem, config, target))


def numeric_order(problem: Problem, config: HopperConfig | None = None) -> NumericOrder:
    """Returns the order of a config's arithmetic, by default that of all batch-invariant kernels.

    Rows of any number of queries, keys and sequences have it, so it follows from the head dims alone.
    """
    if config is not None:
        # Other axes schedule the same arithmetic.
        block_n, split_head_dim = config.block_n, config.split_head_dim
        return NumericOrder(ORDERED_KEYS, block_n, config.conditional_rescale, split_head_dim)
    block_n = GROUP_ROWS if _widest(problem) > WIDE else 2 * GROUP_ROWS
    return NumericOrder(ORDERED_KEYS, block_n, True, not is_exact(problem))


def _split_head_dims(problem: Problem) -> tuple[bool, ...]:
    if is_exact(problem):
        return (False,)
    return (True,) if problem.batch_invariant else (True, False)


def tiles_differ(problem: Problem) -> bool:
    """Returns whether tiles of a head may see different numbers of keys, so that their order matters."""
    return problem.sight.right is not None or has_lists(problem)


def shares_rows(problem: Problem) -> bool:
    """Returns whether a mask of keys alone, as of padded sequences, has one list for all tiles of queries."""
    sight = problem.sight
    by_position = sight.left is not None or sight.right is not None or problem.chunk > 0
    return problem.bias is Bias.BOOLEAN and not by_position


def has_lists(problem: Problem) -> bool:
    """Returns whether a prologue lists the blocks of each tile."""
    return problem.bias is not Bias.NONE or problem.block_mask > 0


def has_combined_sinks(problem: Problem, config: HopperConfig) -> bool:
    """Returns whether the kernel that combines splits adds sinks, and not the main one."""
    return problem.sinks and problem.batch_invariant and config.num_splits > 1


def skips_splits(problem: Problem, config: HopperConfig) -> bool:
    """Returns whether lengths on the device say which splits of a row exist."""
    is_ragged = (problem.kv_lengths or problem.page_size > 0) and not problem.packed
    return is_ragged and problem.batch_invariant and config.num_splits > 1


def _is_local(problem: Problem) -> bool:
    """Returns whether queries see only keys near them."""
    return problem.window_left is not None or problem.chunk > 0


def _is_narrow(problem: Problem) -> bool:
    """Returns whether windows are so short that tiles of several heads hide fewer keys."""
    left, right = problem.sight.left, problem.sight.right
    return left is not None and right is not None and left + right < MAX_ROWS


def _sections(problem: Problem) -> tuple[int, ...]:
    if problem.packed:
        return (0, 4)
    if _is_local(problem) or has_lists(problem):
        return (0, 1, 2, 4, 8)
    return (0, 4, 8) if tiles_differ(problem) else (1, 4)


def _packs(problem: Problem) -> tuple[int, ...]:
    """Returns numbers of packed heads, which fill tiles if one head has few queries or sees few keys.

    Quantised heads have their own scales, and descriptors of varlen batches have no dimension left.
    """
    if problem.functions:
        return (1,)
    if problem.block_mask:
        # Heads with the same lists share tiles, which then have queries of one block of the mask.
        shared = problem.block_lists is BlockLists.GROUP
        return tuple(pack for pack in PACKS if pack < 2 * problem.group_size) if shared else (1,)
    many = problem.seqlen_q >= FEW_QUERIES and not _is_narrow(problem)
    if problem.packed or many or problem.dtype.is_quantized or problem.bias is not Bias.NONE:
        return (1,)
    return tuple(pack for pack in PACKS if pack < 2 * problem.group_size)


def _is_possible(problem: Problem, config: Config, target: Target) -> bool:
    """Returns whether registers and SRAM suffice for a config, and its values are consistent."""
    assert isinstance(config, HopperConfig)
    return (
        config.block_m <= MAX_ROWS
        and _products_fit(problem, config.split_head_dim)
        and (not config.split_epilogue or _can_be_halved(problem, config.split_head_dim))
        and _registers_fit(problem, config)
        and (not problem.block_mask or _blocks_divide(problem, config))
        and (config.num_splits == 1 or _splits_fit(problem, config, target))
    )


def _splits_fit(problem: Problem, config: HopperConfig, target: Target) -> bool:
    """Returns whether there are not too many splits of tiles, which have no outputs in shared memory."""
    tiles = count_tiles(problem, config.block_m, config.pack_gqa)
    most = max_split_tiles(problem, target)
    return tiles * split_parts(problem, config.num_splits) <= most and not config.split_epilogue


def _blocks_divide(problem: Problem, config: HopperConfig) -> bool:
    """Returns whether a group's queries are in one block of a block mask, and a block of keys is in one.

    Groups with lists of their own finish a tile at different times, and would wait for the next tile's index.
    """
    size, rows = problem.block_mask, config.rows_per_group // config.pack_gqa
    has_one = has_one_list(problem, config)
    can_be_dynamic = has_one and config.order is not Order.SERPENTINE
    if has_full_lists(problem) and not has_one:
        # Lists that do not ascend cannot be merged.
        return False
    return size % config.block_n == 0 and size % rows == 0 and (can_be_dynamic or not config.dynamic_schedule)


def has_one_list(problem: Problem, config: HopperConfig) -> bool:
    """Returns whether all queries of a tile are in one block of a block mask, so that groups share a list."""
    return problem.block_mask > 0 and problem.block_mask % (config.block_m // config.pack_gqa) == 0


def _products_fit(problem: Problem, split_head_dim: bool) -> bool:
    narrowest = min(chunk.width for chunk in head_chunks(problem.head_dim, split_head_dim))
    return not problem.dtype.is_quantized or narrowest >= QUANTIZED_DEPTH


def _can_be_halved(problem: Problem, split_head_dim: bool) -> bool:
    """Returns whether outputs are one tile, and wide enough."""
    chunks = head_chunks(problem.value_head_dim, split_head_dim)
    return len(chunks) == 1 and chunks[0].width >= MIN_HALVED


def _registers_fit(problem: Problem, config: HopperConfig) -> bool:
    """Returns whether scores, probabilities and accumulators of a group fit its threads' registers."""
    scores = config.rows_per_group * config.block_n // GROUP_THREADS
    weights = 0 if config.p_stages else scores * problem.dtype.itemsize // 4
    width = columns(head_chunks(problem.value_head_dim, config.split_head_dim))
    accumulators = config.rows_per_group * width // GROUP_THREADS
    if problem.bias is Bias.ADDITIVE:
        # The bias in registers, before it is added.
        weights += scores * problem.dtype.itemsize // 4
    elif problem.bias is Bias.BOOLEAN:
        # A bit for each score.
        weights += scores // 32
    spare = SPARE_REGISTERS + (DROPPING_REGISTERS if problem.dropout else 0)
    return scores + weights + accumulators + spare <= role_registers(problem, config)[0]


def _is_full(problem: Problem, pack: int, groups: int) -> bool:
    """Returns whether a tile of so many packed heads has few rows without a query."""
    if _is_narrow(problem):
        return problem.group_size % pack == 0
    return pack * problem.seqlen_q <= groups * GROUP_ROWS


def usual_config(problem: Problem) -> HopperConfig:
    """Returns the best config of most lengths on an H200."""
    tiles = _default_tiles_of_blocks(problem) if problem.block_mask else _default_tiles(problem)
    is_halved = problem.kv_dtype is not None or _widest(problem) > WIDE
    if problem.batch_invariant:
        tiles = msgspec.structs.replace(tiles, block_n=numeric_order(problem).block_n)
    return msgspec.structs.replace(
        tiles,
        split_epilogue=is_halved and _can_be_halved(problem, True),
        split_head_dim=not is_exact(problem) and _products_fit(problem, True),
        head_swizzle=_usual_swizzle(problem),
        order=_usual_order(problem),
        balanced_grid=not problem.block_mask and not _is_in_one_order(problem),
        dynamic_schedule=has_one_list(problem, tiles),
    )


def _tiles(
    groups: int,
    keys: int,
    q_stages: int,
    *,
    rows: int = GROUP_ROWS,
    stages: int = 2,
    ping_pong: bool = True,
    defer_pv_wait: bool = True,
    p_stages: int = 0,
) -> HopperConfig:
    return HopperConfig(
        num_warps=GROUP_WARPS,
        num_stages=stages,
        num_consumer_groups=groups,
        rows_per_group=rows,
        block_n=keys,
        q_stages=q_stages,
        ping_pong=ping_pong,
        defer_pv_wait=defer_pv_wait,
        p_stages=p_stages,
    )


# Default tiles and stages, by `_kind` of the problem and `_width` of the head dims.
USUAL_TILES = {
    ("plain", "narrow"): _tiles(3, 128, 2, defer_pv_wait=False),
    ("plain", "middle"): _tiles(2, 128, 2),
    ("plain", "wide"): _tiles(2, 64, 1, ping_pong=False),
    # Three groups do not have the registers for dropout, softcap or a converter with so many keys at a time.
    ("crowded", "narrow"): _tiles(2, 128, 2, defer_pv_wait=False),
    ("crowded", "middle"): _tiles(2, 128, 2),
    ("crowded", "wide"): _tiles(2, 64, 1, ping_pong=False),
    # With three groups of fewer keys, the exponentials of softcaps overlap with more products.
    ("capped", "narrow"): _tiles(3, 64, 2, defer_pv_wait=False),
    ("capped", "middle"): _tiles(3, 64, 1, ping_pong=False, defer_pv_wait=False),
    # Tiles of the bias take registers, and the shared memory of a group or of queries.
    ("biased", "narrow"): _tiles(2, 128, 2, defer_pv_wait=False),
    ("biased", "middle"): _tiles(2, 128, 1),
    ("biased", "wide"): _tiles(1, 64, 1, ping_pong=False),
    # 8-bit probabilities of three groups do not fit registers, but fit shared memory.
    ("8-bit, masked", "middle"): _tiles(3, 128, 2, p_stages=1),
    ("8-bit", "middle"): _tiles(3, 128, 2, defer_pv_wait=False, p_stages=2),
    # Few keys are seen of a tile, so that its fixed cost matters: it has more rows.
    ("packed heads", "narrow"): _tiles(2, 64, 2, rows=2 * GROUP_ROWS, stages=3, defer_pv_wait=False),
}


def _default_tiles(problem: Problem) -> HopperConfig:
    """Returns the default tiles and stages without a block mask."""
    width, kind = _width(problem), _kind(problem)
    # Heads that share a tile fill two groups, also if the scores are capped.
    groups = USUAL_TILES["crowded" if kind == "capped" else kind, width].num_consumer_groups
    pack = max(pack for pack in _packs(problem) if pack == 1 or _is_full(problem, pack, groups))
    # Their blocks have 64 keys, and those of batch-invariant kernels have 128.
    is_free = not (problem.dropout or problem.batch_invariant)
    if pack > 1 and _is_narrow(problem) and width == "narrow" and is_free:
        kind = "packed heads"
    tiles = USUAL_TILES[kind, width]
    return msgspec.structs.replace(
        tiles,
        block_n=64 if _is_narrow(problem) else tiles.block_n,
        q_stages=1 if problem.kv_dtype else tiles.q_stages,
        pack_gqa=pack,
    )


def _width(problem: Problem) -> str:
    """Returns the column of `USUAL_TILES`."""
    if _widest(problem) > WIDE:
        return "wide"
    return "narrow" if _widest(problem) <= NARROW and problem.dtype is not Dtype.E4M3 else "middle"


def _kind(problem: Problem) -> str:
    """Returns the row of `USUAL_TILES`, before heads share a tile."""
    if problem.dtype.is_quantized and NARROW < _widest(problem) <= WIDE and problem.seqlen_q >= MANY_QUERIES:
        return "8-bit, masked" if tiles_differ(problem) else "8-bit"
    is_plain = not (problem.dropout or problem.kv_dtype or problem.packed or _is_local(problem))
    is_plain = is_plain and not problem.batch_invariant
    if problem.softcap and is_plain and _is_in_one_order(problem) and _width(problem) != "wide":
        return "capped"
    if problem.bias is Bias.ADDITIVE:
        return "biased"
    is_crowded = problem.dropout or problem.softcap or problem.kv_dtype or problem.functions
    return "crowded" if is_crowded else "plain"


def _default_tiles_of_blocks(problem: Problem) -> HopperConfig:
    """Returns the default tiles and stages with a block mask."""
    width = _widest(problem)
    small = problem.block_mask <= GROUP_ROWS
    # With two heads in a tile, or one group, all its queries are in one small block.
    pack = 2 if small and problem.group_size % 2 == 0 and len(_packs(problem)) > 1 else 1
    groups = 1 if small and pack == 1 else 2
    tall = _is_narrow(problem) and width <= NARROW and pack > 1 and not problem.dropout
    return HopperConfig(
        num_warps=GROUP_WARPS,
        num_stages=4 if groups == 1 and width <= WIDE else 2,
        num_consumer_groups=groups,
        rows_per_group=2 * GROUP_ROWS if tall else GROUP_ROWS,
        block_n=64 if width > WIDE or small or _is_narrow(problem) else 128,
        q_stages=1 if width > WIDE else 2,
        ping_pong=width <= WIDE and groups > 1,
        defer_pv_wait=True,
        pack_gqa=pack,
    )


def _widest(problem: Problem) -> int:
    """Returns the columns of the widest tile, if head dims are split."""
    return columns(head_chunks(max(problem.head_dim, problem.value_head_dim), True))


def _is_in_one_order(problem: Problem) -> bool:
    """Returns whether the tiles of all heads are in one order.

    Then tiles of varlen batches that end in the same round differ least.
    """
    long = tiles_differ(problem) and (problem.seqlen_kv > LONG or _is_local(problem))
    return (problem.packed > 0 or long) and not has_lists(problem)


def _has_chunks_alone(problem: Problem) -> bool:
    """Returns whether tiles of one chunk follow each other, so that they share keys and values in L2."""
    others = problem.window_left is not None or problem.packed or has_lists(problem)
    return problem.chunk > 0 and not others


def _usual_swizzle(problem: Problem) -> int:
    """Returns the default number of heads that are processed together; 0 for all.

    Tiles of equal length need no other heads to balance programs. Those of one head share keys, so that the
    fewest bytes pass from the L2 to the multiprocessors, which takes the least power. Tiles of block masks
    share few keys, so that fewer heads are better.
    """
    if _is_in_one_order(problem) and not _has_chunks_alone(problem):
        return 0
    if not problem.block_mask and problem.group_size == 1 and not tiles_differ(problem):
        return 1
    if not problem.block_mask or problem.group_size > 1 or problem.sight.right is not None:
        return 4
    return 1 if problem.seqlen_kv > LONG else 2


def _usual_order(problem: Problem) -> Order:
    """Returns the default order of tiles."""
    if problem.block_mask:
        return Order.LPT if problem.sight.right is not None else Order.LINEAR
    small_pages = problem.kv_dtype is not None and problem.page_size < GROUP_ROWS
    similar = small_pages and problem.seqlen_kv >= SIMILAR_TILES * problem.seqlen_q
    if similar or _has_chunks_alone(problem) or not tiles_differ(problem):
        return Order.LINEAR
    return Order.LPT if problem.packed or problem.window_left is not None else Order.SERPENTINE


def copied_keys(problem: Problem, config: HopperConfig) -> int:
    """Returns the keys of one copy: a block, or a page if that is smaller."""
    return min(problem.page_size or config.block_n, config.block_n)


def gathers(problem: Problem) -> bool:
    """Returns whether pages are so small that threads copy each row."""
    return 0 < problem.page_size < SMALLEST_COPY


def raw_stages(config: HopperConfig) -> int:
    """Returns the tiles of keys and values in 8 bits in flight: one more if outputs are stored in halves."""
    return 3 if config.split_epilogue else 2


def stored_dtype(problem: Problem) -> KvDtype | Dtype:
    """Returns the type of keys and values in memory."""
    return problem.kv_dtype or problem.dtype


def role_registers(problem: Problem, config: HopperConfig) -> tuple[int, int]:
    """Returns registers of a thread of a consumer group, and of the producer."""
    groups = config.num_consumer_groups
    if problem.kv_dtype:
        return REGISTERS_WITH_CONVERTER[groups]
    if problem.block_mask:
        # The producer spills a few addresses, so that wide groups need not.
        wide = columns(head_chunks(problem.value_head_dim, config.split_head_dim)) > WIDE
        registers = CONSUMER_REGISTERS[groups], PRODUCER_REGISTERS
        return registers if wide else REGISTERS_OF_SMALL_PAGES[groups]
    if problem.bias is not Bias.NONE:
        return CONSUMER_REGISTERS[groups], LISTED_REGISTERS
    if gathers(problem):
        return REGISTERS_OF_ROWS[groups]
    if config.block_n > FEW_COPIES * copied_keys(problem, config):
        return REGISTERS_OF_SMALL_PAGES[groups]
    return CONSUMER_REGISTERS[groups], PRODUCER_REGISTERS


def padded(problem: Problem, config: HopperConfig) -> HopperConfig:
    """Returns a config with one tile for a head, stored in halves if possible: it needs less SRAM."""
    return msgspec.structs.replace(
        config, split_head_dim=False, split_epilogue=_can_be_halved(problem, False)
    )
