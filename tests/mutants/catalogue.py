"""All mutants: those for a GPU, and those for the interpreter."""

from flashtune.core.target import Target
from flashtune.templates.registry import find_family
from tests.mutants import serving_size as serving
from tests.mutants import small_errors, third_tiles
from tests.mutants.backward_hopper import (
    backward_hopper_biases,
    backward_hopper_blocks,
    backward_hopper_features,
    backward_hopper_figures,
    backward_hopper_functions,
    backward_hopper_masks,
    backward_hopper_places,
    backward_hopper_turns,
    backward_hopper_waits,
)
from tests.mutants.core import Mutant
from tests.mutants.forward_hopper import (
    hopper_blocks,
    hopper_eight_bits,
    hopper_features,
    hopper_invariance,
    hopper_masks,
    hopper_pages,
    hopper_pairs,
    hopper_places,
    hopper_rings,
    hopper_softmax,
    hopper_splits,
    hopper_waits,
)
from tests.mutants.latent_decode import latent_keys, latent_places, latent_waits
from tests.mutants.portable import (
    backward_figures,
    backward_pairs,
    block_lists,
    decode_caches,
    decode_scores,
    decode_splits,
    dropping,
    functions,
    fused,
    masked_borders,
    masked_places,
    masked_scores,
    masked_splits,
)
from tests.mutants.portable import backward_size as backward
from tests.mutants.portable.portable import INTERPRETED, USUAL
from tests.mutants.portable.portable_orders import portable_mutants


def interpreted_mutants() -> tuple[Mutant, ...]:
    """Returns mutants without races that change results on a CPU too, small enough for the interpreter."""
    forward = (mutant for mutant in portable_mutants(INTERPRETED) if not mutant.racy)
    return (
        *forward,
        *backward_mutants(backward.INTERPRETED),
        *fused.sums(backward.INTERPRETED),
        *fused.pairs(backward.INTERPRETED),
        *dropping.forward(backward.INTERPRETED),
        *serving_mutants(serving.INTERPRETED),
        *third_tiles.plain(INTERPRETED),
        *third_tiles.serving(serving.INTERPRETED),
        *third_tiles.gradients(backward.INTERPRETED),
        *small_errors.forward(),
        *small_errors.backward(),
    )


def runs_on(mutant: Mutant, target: Target) -> bool:
    """Returns whether a GPU can run the mutant's family."""
    return find_family(mutant.subject.family).supports(mutant.subject.problem, target) is None


def gpu_mutants() -> tuple[Mutant, ...]:
    """Returns every mutant of every family, at sizes that are searched."""
    return (
        *portable_mutants(USUAL),
        *hopper_mutants(),
        *backward_mutants(backward.USUAL),
        *fused.sums(backward.USUAL),
        *fused.pairs(backward.USUAL),
        *dropping.forward(backward.USUAL),
        *gluon_mutants(),
        *serving_mutants(serving.USUAL),
        *serving_mutants_of_a_gpu(serving.USUAL),
        *third_tiles.plain(USUAL),
        *third_tiles.serving(serving.USUAL),
        *third_tiles.gradients(backward.USUAL),
        *third_tiles.gluon(),
    )


def backward_mutants(size: backward.Size) -> tuple[Mutant, ...]:
    """Returns mutants of the split backward family, in kernels of a size."""
    return (
        *backward_pairs.masks(size),
        *backward_pairs.blocks(size),
        *backward_pairs.forgotten(size),
        *block_lists.gradient_lists(size),
        *backward_figures.figures(size),
        *backward_figures.roundings(size),
        *backward_figures.places(size),
        *backward_figures.written(size),
        *dropping.backward(size),
    )


def hopper_mutants() -> tuple[Mutant, ...]:
    """Returns mutants of the Hopper family. Names of 8-bit ones begin with `e4m3`."""
    eight_bits = (
        *hopper_eight_bits.factors(),
        *hopper_eight_bits.weights(),
        *hopper_eight_bits.transposition(),
    )
    return (
        *hopper_masks.masks(),
        *hopper_masks.forgotten(),
        *hopper_softmax.rescaling(),
        *hopper_softmax.scales(),
        *hopper_places.heads(),
        *hopper_places.tiles(),
        *hopper_places.columns(),
        *hopper_places.rows_of_lse(),
        *hopper_waits.waits(),
        *hopper_waits.releases(),
        *hopper_rings.rings(),
        *hopper_features.features(),
        *hopper_pages.pages(),
        *hopper_pages.rows(),
        *hopper_pairs.pairs(),
        *hopper_pairs.listings(),
        *hopper_blocks.blocks(),
        *hopper_blocks.early(),
        *hopper_blocks.block_listings(),
        *hopper_pages.conversion(),
        *hopper_pages.page_scales(),
        *hopper_pages.conversion_waits(),
        *hopper_splits.splits(),
        *hopper_splits.combining(),
        *hopper_splits.waits(),
        *hopper_invariance.invariance(),
        *hopper_invariance.combining(),
        *(mutant._replace(name=f"e4m3: {mutant.name}") for mutant in eight_bits),
    )


def gluon_mutants() -> tuple[Mutant, ...]:
    """Returns mutants of Hopper's backward pass and of latent keys."""
    return (
        *backward_hopper_masks.masks(),
        *backward_hopper_masks.forgotten(),
        *backward_hopper_features.windows(),
        *backward_hopper_features.caps(),
        *backward_hopper_features.packed(),
        *backward_hopper_features.sinks(),
        *backward_hopper_blocks.blocks(),
        *backward_hopper_blocks.listings(),
        *backward_hopper_biases.biases(),
        *backward_hopper_biases.bias_steps(),
        *backward_hopper_functions.functions(),
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


def serving_mutants(size: serving.Size) -> tuple[Mutant, ...]:
    """Returns mutants that change results anywhere, at a size."""
    return (
        *masked_borders.borders(size),
        *block_lists.lists(size),
        *masked_scores.scores(size),
        *masked_places.places(size),
        *masked_splits.splits(size),
        *functions.functions(size),
        *decode_splits.parts(size),
        *decode_scores.rows(size),
        *decode_caches.caches(size),
    )


def serving_mutants_of_a_gpu(size: serving.Size) -> tuple[Mutant, ...]:
    """Returns mutants of instructions that only a GPU has, of a race, and of long lists."""
    return (*decode_scores.bytes_of(size), *decode_scores.early(size), *block_lists.long_lists(size))
