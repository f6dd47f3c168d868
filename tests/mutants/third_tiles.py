"""Mutants that are wrong only from a third tile on.

Each family has three: one is wrong from the third tile of queries on, and one from the third tile of keys on.
The last is wrong where both are third tiles. All compute full attention, whose checks have the fewest
problems.
"""

import re
from typing import NamedTuple

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal
from tests.mutants import serving_size
from tests.mutants.backward_hopper import backward_hopper
from tests.mutants.core import Mutant, Part, Patch, Subject
from tests.mutants.forward_hopper import hopper
from tests.mutants.latent_decode import latent
from tests.mutants.portable import backward_size, fused
from tests.mutants.portable import portable as forward

LOW_WEIGHTS = "p_low = p.to({}.dtype.element_ty)"
LOW_SCORES = "ds_low = ds.to(q.dtype.element_ty)"
GLUON_WEIGHTS = "exponentials.to(gl.bfloat16)"
HOPPER_LOOP = "for _ in range(n_last - 1, n_block_min - 1, -1):"


class Place(NamedTuple):
    """Weights in a rendered file, and what says that a tile is one of the first two."""

    old: str  # The text that rounds them, once or several times.
    queries: str  # True for the first two tiles of queries.
    keys: str  # True for the first two tiles of keys.
    part: Part | None = None  # Where to look.
    times: int = 1  # How often the text occurs.
    library: str = "tl"  # `tl` or `gl`.
    kind: str = "weights"  # The wrong quantity, in a word.

    def halved(self, spared: str) -> Patch:
        """Half of the weights, but where a condition holds."""
        factor = f"{self.library}.where({spared}, 1.0, 0.5)"
        halved = re.sub(r"(\w+)\.to\(", rf"(\1 * {factor}).to(", self.old, count=1)
        return Patch(self.old, halved, self.part, self.times)


def of_kernel(
    subject: Subject, *places: tuple[Place, ...], before: tuple[Patch, ...] = ()
) -> tuple[Mutant, ...]:
    """The mutants of a kernel at each of its places, which may be several texts."""
    mutants = []
    for texts in places:
        kind = texts[0].kind
        third = (
            (f"{kind} halved from the third tile of queries on", [text.queries for text in texts]),
            (f"{kind} halved from the third tile of keys on", [text.keys for text in texts]),
            (f"{kind} halved where both tiles are third",
             [f"({text.queries}) | ({text.keys})" for text in texts]),
        )  # fmt: skip
        for name, spared in third:
            halves = (text.halved(condition) for text, condition in zip(texts, spared, strict=True))
            mutants.append(Mutant(name, subject, (*before, *halves)))
    return tuple(mutants)


def plain(size: forward.Size) -> tuple[Mutant, ...]:
    """Those of both portable orders of loops."""
    old = LOW_WEIGHTS.format("v")
    queries = forward.Bench(forward.QUERIES_OUTER, size)
    keys = forward.Bench(forward.KEYS_OUTER, size)
    return (
        *of_kernel(queries.subject(Causal.NONE), (Place(old, "tile < 2", "start < 2 * BLOCK_N", times=2),)),
        *of_kernel(
            keys.subject(Causal.NONE), (Place(old, "first_query < 2 * BLOCK_M", "start < 2 * BLOCK_N"),)
        ),
    )


def serving(size: serving_size.Size) -> tuple[Mutant, ...]:
    """Those of masks and of decoding, where tiles of queries are tiles of rows."""
    old = LOW_WEIGHTS.format("q")
    masked = size.masked(causal=Causal.NONE, alibi=True)
    decoding = size.decoding(causal=Causal.NONE)
    return (
        *of_kernel(masked, (Place(old, "tile < 2", "start < 2 * BLOCK_N", times=2),)),
        *of_kernel(decoding, (Place(old, "tile < 2", "start < 2 * BLOCK_N"),)),
    )


def gradients(size: backward_size.Size) -> tuple[Mutant, ...]:
    """Those of both portable backward families: of all gradients that a kernel makes."""
    old = LOW_WEIGHTS.format("q")
    in_keys = Place(old, "start < 2 * BLOCK_M", "tile < 2", backward_size.KEYS, 2)
    in_queries = Place(
        LOW_SCORES, "tile < 2", "start < 2 * BLOCK_N", backward_size.QUERIES, 2, kind="gradients of scores"
    )
    return (
        *of_kernel(size.subject(Causal.NONE), (in_keys,), (in_queries,)),
        *of_kernel(fused._subject(size, Causal.NONE), (in_keys._replace(part=fused.KEYS),)),
    )


def gluon() -> tuple[Mutant, ...]:
    """Those of the families in Gluon."""
    first = "this_m_start < 2 * TILE_POSITIONS"
    forward_places = (
        Place("p.to(ELEMENT)", first, "n_last < 2", hopper.FIRST_BLOCK, library="gl"),
        Place("p.to(ELEMENT)", first, "this_block < 2", hopper.LATER_BLOCKS, library="gl"),
    )
    # Blocks of keys are counted down.
    named = Patch(HOPPER_LOOP, HOPPER_LOOP.replace("_", "this_block", 1))
    rows = "position < 2 * POSITIONS"
    latent_places = (
        Place(GLUON_WEIGHTS, rows, "end - 1 < 2", latent.FIRST_BLOCK, library="gl"),
        Place(GLUON_WEIGHTS, rows, "block < 2", latent.LATER_BLOCKS, library="gl"),
    )
    kept = Place(
        "p_low = p.to(DTYPE)",
        "m_block < 2",
        "n_block < 2",
        backward_hopper.STEPS,
        library="gl",
    )
    return (
        *of_kernel(
            hopper.FULL._replace(specialization=Specialization(lse=True)), forward_places, before=(named,)
        ),
        *of_kernel(latent.FULL, latent_places),
        *of_kernel(backward_hopper.FULL, (kept,)),
    )
