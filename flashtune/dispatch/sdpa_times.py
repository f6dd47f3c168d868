"""Estimates the times of SDPA's backends at a shape from measured times at other shapes.

The schedule has one program per tile, as in SDPA's kernels. Measured times correct it.
"""

import functools
import math
from collections.abc import Iterable

import msgspec

from flashtune.core.problem import Bias, Direction, Dtype, Problem, score_bytes
from flashtune.core.record import PeerTime, Record
from flashtune.core.target import Target
from flashtune.dispatch.nearest import distance, regression, tuned_alike
from flashtune.templates.common.model.cost import BANDWIDTH_SHARE
from flashtune.templates.common.model.makespan import PACE, portable_span
from flashtune.templates.common.model.sram import power_of_two
from flashtune.templates.common.model.traffic import unpacked

# Prefix of the names of SDPA's backends in records.
SDPA = "sdpa-"
FLASH, EFFICIENT, MATH = "sdpa-flash", "sdpa-efficient", "sdpa-math"
# Queries and keys of a tile of SDPA's fused kernels.
TILE = 128
# The flash backend splits keys if tiles of this many queries fill less of the slots for programs, of which an
# SM has two. It takes the fewest splits with this fraction of the best use of the slots. Blocks have so many
# keys up to a head dim, and LEAST_SPLIT_KEYS above. From `num_splits_heuristic` and `set_params_splitkv` of
# aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp in PyTorch.
SPLIT_ROWS, SPLIT_BELOW, SLOTS, SPLIT_USE, MAX_SPLITS = 64, 0.8, 2, 0.85, 128
SPLIT_KEYS, LEAST_SPLIT_KEYS = ((64, 256), (128, 128)), 64
# Their tiles take this multiple of the schedule time if they have several queries. Relative to whole tiles of
# the same head dim, it was 1.02 to 1.11 at 4 shapes of an H200.
SLOW_SPLITS = 1.08

# In float32: measured time of the memory-efficient backend over the schedule time, and the columns whose time
# narrower heads take as well. Of 54 calls on an H200, half are within 20% of the estimate and all but short
# ones within 50%.
FLOAT32, FLOAT32_COLUMNS = 1.35, 96
# Time of SDPA's unfused path in float32: its launches in ms; each score and each column of a score. Bytes
# that it reads and writes for the mask of a score. Of 34 calls on an H200, 33 are within 30%.
UNFUSED_MS, SCORE_MS, COLUMN_MS, MASK_BYTES = 0.03, 1.2e-8, 1e-10, 12
# The unfused path replaces the memory-efficient backend below this fraction of its time. Calls of one head of
# keys for several of queries take 0.7 to 2 times as long there.
UNFUSED_LEAD = 0.65
# Time of a score and of its columns in both passes of float32, in ms. The memory-efficient backend skips
# hidden scores. In tf32, columns take the unfused path little time. At 41 of 43 shapes on an H200, the path
# that these select is the faster one or within 5% of it.
FUSED_COLUMN_MS, FUSED_COLUMNS, PAIR_SCORE_MS, PAIR_COLUMN_MS = 3.7e-10, 64, 2e-8, 2.1e-10
# The memory-efficient backward pass has few programs with at most so many heads of all sequences, and more
# keys than this for each query. With 108 heads, 147 queries and 4,647 keys, it took three times as long as
# the unfused path on an H100.
FEW_HEADS, MANY_KEYS = 264, 4
# Maximum bytes of scores that SDPA's unfused path may store. Those of a call with gradients are kept for its
# backward pass, and a model has many such calls. Calls with shared heads and gradients always take this path
# if their scores have at most FEW_KEPT_SCORES bytes. Measured at 10 shapes on an H200.
MAX_SCORES, MAX_KEPT_SCORES, FEW_KEPT_SCORES = 2**33, 2**29, 2**26
# Columns of heads that SDPA's backends compute together, and the time of a launch in ms.
COLUMNS, LAUNCH_MS = 64, 0.006
# A rate may be this much better than the best one that was measured.
HEADROOM = 1.05


def expected_peers(problem: Problem, records: Iterable[Record], target: Target) -> tuple[PeerTime, ...]:
    """Returns the estimated times of SDPA's backends at a shape, in ms. Empty if none was timed.

    The correction is that of the forecast of configs. No estimate is far above the best rate that the
    backend reached. `records` are tuned records of the same computation at other shapes.
    """
    # Records of one problem were timed in one run with the same baselines.
    timed = {
        record.problem.key: record for record in records if record.measurement and not _is_masked(record)
    }
    pairs: dict[str, list[tuple[float, float]]] = {}
    rates: dict[str, list[tuple[Problem, float]]] = {}
    # Sort, so that all ranks sum in the same order.
    for _, record in sorted(timed.items()):
        assert record.measurement is not None
        for peer in record.measurement.peers:
            if peer.name.startswith(SDPA):
                correction = math.log(peer.ms / _schedule_ms(record.problem, peer.name, target))
                pairs.setdefault(peer.name, []).append((correction, distance(record.problem, problem)))
                rates.setdefault(peer.name, []).append((record.problem, peer.ms))
    return tuple(
        PeerTime(
            name,
            max(
                _schedule_ms(problem, name, target) * math.exp(regression(values)),
                least_ms(problem, rates[name]),
            ),
        )
        for name, values in sorted(pairs.items())
    )


def related_peers(problem: Problem, records: Iterable[Record], target: Target) -> tuple[PeerTime, ...]:
    """Returns the estimated times of SDPA's backends from records of the nearest head dim or 16-bit type.

    Wider heads are preferred. Times of narrower ones are lower bounds.
    """
    all_records = tuple(records)
    widths = {
        (record.problem.head_dim, record.problem.value_head_dim, record.problem.dtype)
        for record in all_records
        if record.problem.dtype.itemsize == problem.dtype.itemsize and not record.problem.mla
    }

    def order(width: tuple[int, int, Dtype]) -> tuple[bool, int, bool, tuple[int, int, Dtype]]:
        return width[0] < problem.head_dim, abs(width[0] - problem.head_dim), width[2] != problem.dtype, width

    for head_dim, value_head_dim, dtype in sorted(widths, key=order):
        wide = msgspec.structs.replace(problem, dtype=dtype, head_dim=head_dim, value_head_dim=value_head_dim)
        peers = expected_peers(wide, tuned_alike(wide, all_records), target)
        if peers:
            return narrowed_peers(peers, wide, problem)
    return ()


def narrowed_peers(peers: Iterable[PeerTime], wide: Problem, problem: Problem) -> tuple[PeerTime, ...]:
    """Returns the estimated times of SDPA at narrower heads, from those at wider ones.

    SDPA's backends compute whole groups of columns. Generated kernels compute powers of two.
    """
    share = _columns(problem) / _columns(wide)
    return tuple(
        PeerTime(peer.name, min(peer.ms, LAUNCH_MS + share * (peer.ms - LAUNCH_MS))) for peer in peers
    )


def _columns(problem: Problem) -> int:
    """Returns the columns of queries and values that SDPA's backends compute."""
    return sum(math.ceil(width / COLUMNS) * COLUMNS for width in (problem.head_dim, problem.value_head_dim))


def is_padded(problem: Problem) -> bool:
    """Whether kernels compute more columns than SDPA: the next power of two."""
    kernel = sum(power_of_two(width) for width in (problem.head_dim, problem.value_head_dim))
    return kernel > _columns(problem)


def least_ms(problem: Problem, timed: Iterable[tuple[Problem, float]]) -> float:
    """Returns the time of a problem at the best rate of products that was measured at other shapes, in ms."""
    rate = max((unpacked(other).flops() / ms for other, ms in timed), default=math.inf)
    return unpacked(problem).flops() / (HEADROOM * rate) if rate else 0.0


def float32_ms(problem: Problem, target: Target) -> float:
    """Returns the estimated time of a forward pass in float32 by the memory-efficient backend, in ms."""
    wide = msgspec.structs.replace(
        problem,
        head_dim=max(problem.head_dim, FLOAT32_COLUMNS),
        value_head_dim=max(problem.value_head_dim, FLOAT32_COLUMNS),
    )
    span = portable_span(wide, SPLIT_ROWS, SPLIT_ROWS, target) - PACE.launch / 1e3
    return LAUNCH_MS + FLOAT32 * span


def unfused_leads(problem: Problem, padded_bytes: int, target: Target) -> bool:
    """Whether SDPA's unfused path is clearly faster than its memory-efficient backend, in float32.

    The problem is a forward pass with fewer heads of keys than of queries. Heads are repeated for that
    backend. One of its programs computes all keys of a tile of queries, so few tiles leave most of the GPU
    idle. The unfused path repeats heads too, and stores scores. `padded_bytes` are the bytes of a bias that
    this backend copies, because its rows are not aligned.
    """
    bandwidth = target.hbm_bandwidth * 1e6 * BANDWIDTH_SHARE
    row = problem.batch * problem.dtype.itemsize * problem.head_dim
    queries, keys, shared = (
        row * problem.heads * problem.seqlen_q,
        row * problem.heads * problem.seqlen_kv,
        row * problem.kv_heads * problem.seqlen_kv,
    )
    repeating = 2 * (keys + shared)
    fused = 2 * LAUNCH_MS + float32_ms(problem, target) + (repeating + 2 * padded_bytes) / bandwidth
    scores = score_bytes(problem) // problem.dtype.itemsize
    # Queries and keys are scaled first.
    moved = repeating + 4 * queries + 2 * (keys + shared)
    if problem.is_causal or problem.bias is not Bias.NONE:
        moved += MASK_BYTES * scores
    unfused = UNFUSED_MS + scores * (SCORE_MS + COLUMN_MS * problem.head_dim) + moved / bandwidth
    return unfused < UNFUSED_LEAD * fused


def unfused_pair_leads(problem: Problem) -> bool:
    """Whether SDPA's unfused path is as fast as its memory-efficient backend over both passes, in float32.

    The problem is a forward pass with fewer heads of keys than of queries.
    """
    if score_bytes(problem) > MAX_KEPT_SCORES:
        return False
    has_few_programs = (
        problem.batch * problem.heads <= FEW_HEADS and problem.seqlen_kv > MANY_KEYS * problem.seqlen_q
    )
    if has_few_programs or score_bytes(problem) <= FEW_KEPT_SCORES:
        return True
    seen = 0.5 if problem.is_causal else 1.0
    rows = math.ceil(problem.seqlen_q / SPLIT_ROWS) * SPLIT_ROWS / problem.seqlen_q
    fused = seen * rows * FUSED_COLUMN_MS * max(problem.head_dim, FUSED_COLUMNS)
    columns = 0 if problem.dtype is Dtype.TF32 else problem.head_dim
    return PAIR_SCORE_MS + PAIR_COLUMN_MS * columns <= fused


def _is_masked(record: Record) -> bool:
    """Whether SDPA was timed with a mask in place of `is_causal`, because lengths differ."""
    problem = record.problem
    return problem.is_causal and problem.seqlen_q != problem.seqlen_kv and not problem.features


@functools.lru_cache(maxsize=8192)
def _schedule_ms(problem: Problem, backend: str, target: Target) -> float:
    """Returns the schedule time at a shape in ms, up to a factor that is the same for all shapes."""
    forward = msgspec.structs.replace(unpacked(problem), direction=Direction.FORWARD)
    splits = 1
    if backend != EFFICIENT and not problem.is_backward:
        if problem.seqlen_q == 1 and not problem.is_causal:
            # The heads of a KV head become the rows of a tile. All backends but one then split keys.
            forward = msgspec.structs.replace(forward, heads=problem.kv_heads, seqlen_q=problem.group_size)
        if backend == FLASH or problem.seqlen_q == 1:
            splits = _splits(forward, target)
    if splits == 1:
        return portable_span(forward, TILE, TILE, target)
    slow = SLOW_SPLITS if problem.seqlen_q > 1 else 1.0
    return slow * portable_span(forward, SPLIT_ROWS, _split_keys(forward), target, splits=splits)


def _split_keys(problem: Problem) -> int:
    """Returns the keys of a block of the flash backend's kernel for splits."""
    return next((keys for width, keys in SPLIT_KEYS if problem.head_dim <= width), LEAST_SPLIT_KEYS)


def _splits(problem: Problem, target: Target) -> int:
    """Returns the number of parts into which FlashAttention-2 splits the keys of a problem."""
    tiles = problem.batch * problem.heads * math.ceil(problem.seqlen_q / SPLIT_ROWS)
    slots = SLOTS * target.sm_count
    if not tiles or tiles >= SPLIT_BELOW * slots:
        return 1
    blocks = math.ceil(problem.seqlen_kv / _split_keys(problem))
    # A number that leaves the longest part as long as one part less does is left out.
    counts = [
        count
        for count in range(1, max(1, min(MAX_SPLITS, slots, blocks)) + 1)
        if count == 1 or math.ceil(blocks / count) != math.ceil(blocks / (count - 1))
    ]
    use = {count: (tiles * count / slots) / math.ceil(tiles * count / slots) for count in counts}
    return next(count for count in counts if use[count] >= SPLIT_USE * max(use.values()))
