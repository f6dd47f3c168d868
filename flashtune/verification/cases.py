"""The test cases of a check: shapes, probes and layouts that a config is verified with.

A kernel's source does not depend on lengths, head counts or batch, so one binary runs all cases. `shapes.py`
chooses the lengths and their probes.
"""

import enum
import itertools
from collections.abc import Iterable, Iterator

import msgspec

from flashtune.core.config import Config
from flashtune.core.layouts import DENSE_LAYOUTS, Layout
from flashtune.core.problem import Problem
from flashtune.templates.family import ORDERED_KEYS
from flashtune.verification.lengths import Lengths, equal_lengths, is_ragged, usual_lengths
from flashtune.verification.probes import Probe
from flashtune.verification.serving_shapes import ServingCase, even_lengths, serving_cases
from flashtune.verification.shapes import (
    MAX_BLOCKS,
    ROUNDS,
    Shape,
    Tile,
    rounds_of,
    shapes_of,
    split_shapes,
    third_tiles,
)

TENSORS = ("q", "k", "v", "out")
# Tile sizes of a config that has no such parameters.
DEFAULT_TILE = (128, 128)
# Heads, KV heads and batch of successive cases.
HEADS = ((4, 2, 1), (3, 1, 2), (2, 2, 2), (1, 1, 1), (6, 3, 1))
FEW_HEADS = ((4, 2, 1), (1, 1, 2), (2, 2, 1))
SCALES = (1.0, 0.6, 1.7)
MAIN_REPEATS = 4
# A tuned shape with more bytes of inputs and output than this is reduced in batch and heads.
MAX_MAIN_BYTES = 2**31


class Level(enum.Enum):
    """How much is checked.

    quick   A self-check before first use: a dozen small problems.
    full    For candidates of a search: the tuned shape, and every border of the tile. The candidate to be
            selected is also verified at this level with delayed warps.
    strict  An audit: ten times the probes of full, tensors beyond 2^31 elements, and delayed warps.
    """

    QUICK = "quick"
    FULL = "full"
    STRICT = "strict"


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One problem to launch a kernel on."""

    problem: Problem  # Shape, type and mask.
    probe: Probe  # The values of q, k and v.
    block: int  # Number of keys of the tile that the probe is made for.
    scale: float  # Softmax scale.
    layout: Layout = Layout.BHSD  # Order of heads and positions in memory.
    # Launches that must agree bit for bit, except gradients that may be summed in any order.
    repeats: int = 1
    # Index of the tensor of q, k, v, out that spans more than 2^31 elements, if any.
    far: int | None = None
    # Lengths of the sequences, if they differ.
    # Unset fields are not part of the encoded case, from which its seed is computed.
    lengths: Lengths | msgspec.UnsetType = msgspec.UNSET
    # Whether unused entries of the block table are page numbers that fault when they are used.
    faulty: bool | msgspec.UnsetType = msgspec.UNSET

    @property
    def label(self) -> str:
        """A short description of the case, for verdicts."""
        problem = self.problem
        lengths = f"q={problem.seqlen_q} kv={problem.seqlen_kv}"
        heads = f"heads={problem.heads}x{problem.kv_heads} batch={problem.batch}"
        far = "" if self.far is None else f" {TENSORS[self.far]} beyond 2^31"
        ragged = "" if self.lengths is msgspec.UNSET else f" queries={self.lengths.queries[:8]}"
        ragged += "" if self.lengths is msgspec.UNSET else f" keys={self.lengths.keys[:8]}"
        return f"{self.probe} {lengths} {heads} {self.layout}{far}{ragged}"


def lengths_of(case: Case) -> Lengths:
    """Returns the lengths of a case's sequences."""
    return equal_lengths(case.problem) if case.lengths is msgspec.UNSET else case.lengths


def splits_of(config: Config) -> int:
    """Returns the number of splits of a decoding kernel, at least 1, or 0 if the kernel does not decode."""
    # Such tiles have many queries, of all lengths of keys.
    has_tiles = hasattr(config, "num_consumer_groups") or hasattr(config, "split_masked_loop")
    splits: int | None = None if has_tiles else getattr(config, "num_splits", None)
    return 0 if splits is None else max(1, splits)


def tile_of(config: Config) -> tuple[int, int]:
    """Returns `block_m` and `block_n` of a config."""
    block_m, block_n = DEFAULT_TILE
    return int(getattr(config, "block_m", block_m)), int(getattr(config, "block_n", block_n))


def companions(problem: Problem, config: Config, level: Level, *, reduced: bool) -> tuple[Case, ...]:
    """Returns the small problems of a level in a fixed order.

    The config's tile and pipeline determine the lengths. An interpreter needs `reduced` heads and blocks.
    """
    block_m, block_n = tile_of(config)
    tile = Tile(block_m, block_n, 1 if reduced else min(config.num_stages, MAX_BLOCKS - 2))
    splits = splits_of(config)
    parts = 1 if splits else getattr(config, "num_splits", 1)
    if problem.batch_invariant:
        # Also of tiles of which one program combines all splits.
        parts = ORDERED_KEYS // block_n
    quick = level is Level.QUICK
    if splits or problem.features:
        problems = serving_cases(tile, splits, problem, quick=quick, reduced=reduced, parts=parts)
        return tuple(served_cases(problem, problems, block_n))
    shapes = (*shapes_of(tile, problem, quick=quick), *split_shapes(tile, parts, quick=quick))
    if reduced:
        # No other reduced problem has three tiles of queries and of keys in full attention.
        return tuple(cases_of(problem, (*shapes, third_tiles(tile)), block_n, FEW_HEADS))
    # With packed heads, one head must remain for a partly filled tile.
    pack = getattr(config, "pack_gqa", 1)
    heads = HEADS if pack == 1 else (*HEADS, (2 * pack + 1, 1, 1))
    rounds = rounds_of(tile, quick=quick)
    return (*cases_of(problem, shapes, block_n, heads), *cases_of(problem, rounds, block_n, ROUNDS))


def main_cases(problem: Problem) -> tuple[Case, ...]:
    """Returns cases of the tuned shape, with smaller batch and heads if it does not fit in memory."""
    if not (problem.batch and problem.seqlen_q and problem.seqlen_kv):
        return ()
    fitting = _thinned(problem)
    if is_ragged(problem):
        lengths = usual_lengths(fitting)
        shapes = (
            Shape(Probe.RANDOM, *_longest(lengths), MAIN_REPEATS),
            Shape(Probe.NEEDLE, *_longest(lengths)),
        )
        heads = (fitting.heads, fitting.kv_heads)
        return tuple(
            served_cases(fitting, (ServingCase(shape, heads, lengths, True) for shape in shapes), 64, (1.0,))
        )
    # The block is fixed, so that configs with different tiles share inputs and reference.
    common = {"problem": fitting, "block": 64, "scale": problem.head_dim**-0.5}
    return (
        Case(probe=Probe.RANDOM, repeats=MAIN_REPEATS, layout=Layout.BSHD, **common),
        Case(probe=Probe.NEEDLE, **common),
    )


def far_cases(problem: Problem, config: Config) -> tuple[Case, ...]:
    """Returns small problems in which one tensor at a time spans more than 2^31 elements."""
    block_m, block_n = tile_of(config)
    if is_ragged(problem) or splits_of(config):
        queries = 1 if splits_of(config) else block_m + 1
        lengths = Lengths((queries, queries), (2 * block_n + 1, 2 * block_n - 1))
        heads, layout = (16, 1) if problem.mla else (4, 2), Layout.BSHD
    else:
        lengths = Lengths((block_m + 1,) * 2, (2 * block_n + 1,) * 2)
        heads, layout = (2, 1), Layout.BHSD
    served = ServingCase(Shape(Probe.RANDOM, *_longest(lengths)), heads, lengths, is_ragged(problem))
    (case,) = served_cases(problem, (served,), block_n, (1.0,), (layout,))
    return tuple(msgspec.structs.replace(case, far=tensor) for tensor in range(len(TENSORS)))


def _thinned(problem: Problem) -> Problem:
    while problem.minimal_bytes() > MAX_MAIN_BYTES:
        if problem.batch > 1:
            packed = -(-problem.packed // 2)
            problem = msgspec.structs.replace(problem, batch=problem.batch // 2, packed=packed)
        elif problem.kv_heads > 1:
            fewer = problem.kv_heads // 2
            problem = msgspec.structs.replace(problem, kv_heads=fewer, heads=fewer * problem.group_size)
        else:
            break
    return problem


def cases_of(
    problem: Problem, shapes: Iterable[Shape], block: int, heads: tuple[tuple[int, int, int], ...]
) -> Iterator[Case]:
    """Yields cases of equal sequences. Heads, KV heads and batch cycle through `heads`."""
    turns = zip(shapes, itertools.cycle(heads), strict=False)
    equal = (
        even_lengths(problem, shape, (many, kv_heads), batch) for shape, (many, kv_heads, batch) in turns
    )
    return served_cases(problem, equal, block, layouts=DENSE_LAYOUTS)


def served_cases(
    problem: Problem,
    problems: Iterable[ServingCase],
    block: int,
    factors: tuple[float, ...] = SCALES,
    layouts: tuple[Layout, ...] = (Layout.BSHD, Layout.BHSD),
) -> Iterator[Case]:
    """Yields cases of problems. Factors of the softmax scale and layouts cycle."""
    turns = zip(itertools.cycle(factors), itertools.cycle(layouts))
    for turn, (served, (factor, layout)) in enumerate(zip(problems, turns, strict=False)):
        heads, kv_heads = served.heads
        queries, keys = _longest(served.lengths)
        if problem.page_size:
            # In every second case, block tables have one more page than the longest sequence.
            keys = (-(-keys // problem.page_size) + turn % 2) * problem.page_size
        elif problem.kv_lengths and not problem.packed:
            # In every second case, tensors have a few more keys than the longest sequence.
            keys += 5 * (turn % 2)
        yield Case(
            problem=msgspec.structs.replace(
                problem,
                heads=heads,
                kv_heads=kv_heads,
                batch=len(served.lengths.queries),
                seqlen_q=queries,
                seqlen_kv=keys,
                packed=served.lengths.total_q if problem.packed else 0,
            ),
            probe=served.shape.probe,
            block=block,
            scale=factor * problem.head_dim**-0.5,
            layout=layout,
            repeats=served.shape.repeats,
            lengths=served.lengths if served.ragged else msgspec.UNSET,
        )


def _longest(lengths: Lengths) -> tuple[int, int]:
    return max(1, *lengths.queries), max(1, *lengths.keys)
