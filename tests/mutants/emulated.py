"""Mutants of the Gluon families that the emulator runs on a CPU.

Most races do not show in the emulator, and it does not run inline PTX.
"""

from collections.abc import Iterable

from tests.mutants import small_errors, third_tiles
from tests.mutants.backward_hopper import (
    backward_hopper_biases,
    backward_hopper_blocks,
    backward_hopper_features,
)
from tests.mutants.catalogue import gluon_mutants
from tests.mutants.core import Mutant
from tests.mutants.forward_hopper import (
    hopper_blocks,
    hopper_features,
    hopper_invariance,
    hopper_pages,
    hopper_pairs,
    hopper_splits,
)

BACKWARD_NAMES = (
    "diagonal one key too far",
    "mask of the first group's keys",
    "divided: diagonal one key too far",
    "rows of the KV head",
    "log-sum-exps for deltas",
    "dq of the other group's keys",
    "transposed: dq of the other group's keys",
    "heads of groups in turn",
    "sums not wound back",
    "sums not moved over hidden blocks",
    "dq: halves swapped",
    "divided: sums of the block before",
    "dq of a program's last step twice",
    "order: halves: one counter for both",
    "order: turns never passed",
    "dq before the first step",
    "dq of a program's last step left out",
    "dS of another slot given back",
    "order: phases of every step",
    "dropout: keys count in their block",
    "dropout: dv of all weights",
    "dropout: gradients of dropped weights",
    "dropout: weights' gradients do not fall",
    "dropout: words swapped",
)
LATENT_NAMES = (
    "diagonal one key too far",
    "later blocks' masks missing",
    "empty rows shifted by -inf",
    "first keys forgotten in some rows",
    "keys of an empty part",
    "right half: rescaling late by a block",
    "rest left out",
    "left half of keys twice",
    "pages a block late",
    "rows behind the last key of a page",
    "small pages: third page twice",
    "small pages: rows of the first page for the second",
    "small pages: last page over the third",
    "small pages: a page that is not full not looked up",
    "lse beyond the heads",
    "parts: last blocks left out",
    "weights never given back",
)
# The emulator runs the main kernel alone, without its inline PTX.
NOT_EMULATED = ("prepare", "finish", "overflow", "swapped")


def emulated_mutants() -> tuple[Mutant, ...]:
    """All of them."""
    pages = (
        *hopper_pages.pages(),
        *hopper_pages.rows(),
        *hopper_pages.conversion(),
        *hopper_pages.page_scales(),
        *hopper_pages.conversion_waits(),
    )
    gradients = (
        *backward_hopper_features.windows(),
        *backward_hopper_features.caps(),
        *backward_hopper_features.packed(),
    )
    return (
        *hopper_features.features(),
        *hopper_pairs.pairs(),
        *hopper_blocks.blocks(),
        *hopper_blocks.early(),
        *steady(pages),
        *backward_hopper_blocks.blocks(),
        *backward_hopper_biases.biases(),
        *hopper_splits.splits(),
        *hopper_invariance.invariance(),
        *named("backward_hopper", BACKWARD_NAMES),
        *(mutant for mutant in steady(gradients) if not any(part in mutant.name for part in NOT_EMULATED)),
        *named("decode_latent_hopper", LATENT_NAMES),
        *third_tiles.gluon(),
        *small_errors.gluon(),
    )


def named(family: str, names: Iterable[str]) -> tuple[Mutant, ...]:
    """The mutants of a family with these names."""
    mutants = {mutant.id: mutant for mutant in gluon_mutants()}
    return tuple(mutants[f"{family}: {name}"] for name in names)


def steady(mutants: Iterable[Mutant]) -> tuple[Mutant, ...]:
    """Those that are wrong in every run."""
    return tuple(mutant for mutant in mutants if not mutant.racy)
