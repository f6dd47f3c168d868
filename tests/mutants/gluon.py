"""Mutants of the Gluon families other than the forward pass."""

from __future__ import annotations

from tests.mutants.backward_hopper import (
    backward_hopper_features,
    backward_hopper_figures,
    backward_hopper_masks,
    backward_hopper_places,
    backward_hopper_turns,
    backward_hopper_waits,
)
from tests.mutants.core import Mutant
from tests.mutants.latent_decode import latent_keys, latent_places, latent_waits


def gluon_mutants() -> tuple[Mutant, ...]:
    """Those of Hopper's backward pass and of latent keys."""
    return (
        *backward_hopper_masks.masks(),
        *backward_hopper_masks.forgotten(),
        *backward_hopper_features.windows(),
        *backward_hopper_features.caps(),
        *backward_hopper_features.packed(),
        *backward_hopper_features.sinks(),
        *backward_hopper_figures.statistics(),
        *backward_hopper_figures.products(),
        *backward_hopper_figures.dropping(),
        *backward_hopper_places.heads(),
        *backward_hopper_places.written(),
        *backward_hopper_places.sums(),
        *backward_hopper_waits.waits(),
        *backward_hopper_waits.releases(),
        *backward_hopper_waits.endless(),
        *backward_hopper_turns.groups(),
        *backward_hopper_turns.order(),
        *latent_keys.masks(),
        *latent_keys.softmax(),
        *latent_places.columns(),
        *latent_places.keys(),
        *latent_places.parts(),
        *latent_waits.waits(),
        *latent_waits.releases(),
        *latent_waits.endless(),
    )
