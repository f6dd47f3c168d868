"""Random points for the audit of SRAM models: shapes, configs of the families' spaces, alignments."""

import random
from collections.abc import Iterator
from typing import Any

import msgspec

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Bias, Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import power_of_two
from flashtune.templates.family import Family, unsupported_reason
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.perf_model.prediction import Loop, Tiled, backward_loops

HEAD_DIMS = (32, 40, 64, 80, 96, 112, 128, 160, 192, 256)
HEADS = 8
BATCH = 2
LENGTHS = (64, 512, 4096)
# float32 is drawn less often and with smaller tiles. Its products are unrolled, and compilation takes minutes
# beyond this many multiply-adds of a thread.
MAX_UNROLLED = 4096
DTYPES = (Dtype.BF16, Dtype.BF16, Dtype.FP16, Dtype.FP16, Dtype.FP32)
# Features. Families leave out those that they do not compute.
FEATURES: tuple[dict[str, Any], ...] = (
    {"window_left": 256},
    {"window_left": 256, "sink_tokens": 4, "sinks": True},
    {"chunk": 256},
    {"prefix": True},
    {"softcap": True},
    {"alibi": True},
    {"bias": Bias.ADDITIVE},
    {"bias": Bias.BOOLEAN},
    {"block_mask": 128},
    {"packed": 4096},
    {"kv_lengths": True},
    {"page_size": 16},
    {"page_size": 64, "packed": 4096},
    {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD},
    {"kv_dtype": KvDtype.E4M3},
    {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE, "page_size": 16},
    {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE, "page_size": 256},
)
# Features for decoding families: some queries of a sequence, whose heads share keys.
DECODED: tuple[dict[str, Any], ...] = (
    {"seqlen_q": 1},
    {"seqlen_q": 1, "kv_heads": 1},
    {"seqlen_q": 4, "kv_heads": 2},
    *(
        {
            "seqlen_q": queries,
            "heads": 64,
            "kv_heads": 1,
            "head_dim": value_head_dim + 64,
            "value_head_dim": value_head_dim,
            "mla": True,
        }
        for queries in (1, 2)
        for value_head_dim in (128, 256, 512)
    ),
)
# One of this many points has values of another head dim than its queries.
EVERY_UNLIKE = 4
# All but one of this many points are near the capacity by a plain count of tiles. The count is not a model:
# the compiler's result decides which points are in the band.
EVERY_UNSTEERED = 4
STEERED = (0.6, 2.0)


class Point(msgspec.Struct, frozen=True):
    """One config of one problem, and the specialization of its tensors."""

    problem: Problem
    candidate: Candidate
    specialization: Specialization

    @property
    def unaligned(self) -> bool:
        """Returns whether strides are only known to be multiples of less than 16 elements."""
        return self.specialization.alignment is not Alignment.SIXTEEN


def computes_anything(family: Family, target: Target) -> bool:
    """Returns whether a family supports a target. Some support one architecture only."""
    return any(
        _computes(family, msgspec.structs.replace(problem, **features), target)
        for dtype in dict.fromkeys(DTYPES)
        for problem in (_problem(family, dtype, width, width, LENGTHS[-1]) for width in HEAD_DIMS)
        for features in ({}, *FEATURES, *DECODED)
    )


def draw_points(family: Family, target: Target, seed: int) -> Iterator[Point]:
    """Returns an endless sequence of points without repetition, the same for the same seed.

    The family must support the target.
    """
    draw = random.Random(f"{seed} {family.name} {target.name}")  # noqa: S311 - no secret
    drawn: set[Point] = set()
    while True:
        steered = draw.randrange(EVERY_UNSTEERED) > 0
        point = _draw(draw, family, target)
        if point is None or point in drawn or unrolled(point, target) > MAX_UNROLLED:
            continue
        if steered and not STEERED[0] <= _plain_count(point) / target.sram_per_block <= STEERED[1]:
            continue
        drawn.add(point)
        yield point


def _draw(draw: random.Random, family: Family, target: Target) -> Point | None:
    """Returns a point, or None if the family or its space has none."""
    problem = _draw_problem(draw, family)
    takes_queries = _takes_queries(family, target)
    is_plain = _computes(family, _problem(family, DTYPES[0], 64, 64, LENGTHS[0]), target)
    choices = FEATURES if takes_queries and not is_plain else ({}, *FEATURES)
    problem = msgspec.structs.replace(problem, **draw.choice(choices))
    if not takes_queries:
        problem = msgspec.structs.replace(problem, **draw.choice(DECODED))
    assumed = Specialization(draw.choice(tuple(Alignment)), draw.choice((32, 64)), draw.random() < 0.5)
    if unsupported_reason(family, problem, target, assumed):
        return None
    space = family.space(problem, target)
    config = space.choose(lambda axis: draw.choice(axis.values))
    return Point(problem, Candidate(family.name, config), assumed) if space.contains(config) else None


def _computes(family: Family, problem: Problem, target: Target) -> bool:
    return unsupported_reason(family, problem, target, Specialization()) is None


def _takes_queries(family: Family, target: Target) -> bool:
    """Returns whether a family computes attention of more than a few queries, of any kind."""
    problem = _problem(family, DTYPES[0], 64, 64, LENGTHS[0])
    return any(
        _computes(family, msgspec.structs.replace(problem, **features), target)
        for features in ({}, *FEATURES)
    )


def _draw_problem(draw: random.Random, family: Family) -> Problem:
    head_dim = draw.choice(HEAD_DIMS)
    length = draw.choice(LENGTHS)
    dtype = draw.choice(DTYPES)
    value_head_dim = head_dim if draw.randrange(EVERY_UNLIKE) else draw.choice(HEAD_DIMS)
    causal = draw.choice(tuple(Causal))
    return _problem(family, dtype, head_dim, value_head_dim, length, causal)


def _problem(
    family: Family,
    dtype: Dtype,
    head_dim: int,
    value_head_dim: int,
    length: int,
    causal: Causal = Causal.NONE,
) -> Problem:
    return Problem(
        direction=family.direction,
        dtype=dtype,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        heads=HEADS,
        kv_heads=HEADS,
        batch=BATCH,
        seqlen_q=length,
        seqlen_kv=length,
        causal=causal,
    )


def unrolled(point: Point, target: Target) -> int:
    """Returns the multiply-adds of one thread in one product of tiles without Tensor Cores."""
    problem, config = point.problem, point.candidate.config
    if not problem.dtype.is_float32 or not target.is_nvidia or not isinstance(config, Tiled):
        return 0
    width = power_of_two(max(problem.head_dim, problem.value_head_dim))
    forward = Loop(config.block_m, config.block_n, config.num_warps, config.num_stages)
    loops = backward_loops(config) if problem.is_backward else (forward,)
    return max(loop.rows * loop.looped * width // (loop.warps * target.warp_size) for loop in loops)


def _plain_count(point: Point) -> int:
    """Returns the bytes of a tile of queries and of one tile of keys and values for each stage.

    A backward pass has two of each: queries and the output's gradient, keys and values.
    """
    problem, config = point.problem, point.candidate.config
    qk, v = power_of_two(problem.head_dim), power_of_two(problem.value_head_dim)
    if not isinstance(config, Tiled):
        return 0
    if problem.is_backward:
        rows = max(loop.rows + loop.stages * loop.looped for loop in backward_loops(config))
        return rows * (qk + v) * problem.dtype.itemsize
    if problem.mla:
        # Values are columns of the keys, and no columns are added to either.
        qk, v = problem.head_dim, 0
    streamed = config.num_stages * config.block_n * (qk + v) * problem.kv_itemsize
    return config.block_m * qk * problem.dtype.itemsize + streamed
