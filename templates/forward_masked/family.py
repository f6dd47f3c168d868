"""Portable Triton forward pass with all features, with an outer loop over queries."""

from flashtune.core.config import Space
from flashtune.core.kernel import Specialization, Step
from flashtune.core.problem import (
    Bias,
    Causal,
    Direction,
    Feature,
    KvDtype,
    KvScale,
    Problem,
)
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import PARTIALS
from flashtune.templates.common.args.feature_context import (
    CONVERTS_E4M3,
    FEATURES,
    combining_step,
    feature_arguments,
    function_trouble,
)
from flashtune.templates.common.args.portable_context import portable_values, refusal
from flashtune.templates.common.model.splits import split_values
from flashtune.templates.common.model.sram import head_chunks, widest_tile
from flashtune.templates.common.model.traffic import mean_queries
from flashtune.templates.common.pipeline import stages_of
from flashtune.templates.common.precision import float32_width, input_precisions
from flashtune.templates.family import Arguments, Context, FamilyOf
from flashtune.templates.forward_masked.perf_model import MaskedModel, split_variants
from flashtune.templates.forward_masked.space import (
    HOPPER,
    MaskedConfig,
    masked_space,
    tile_splits,
    value_chunks,
)

SMALL_SRAM = 128 * 1024
SHORT = 64
# Queries, keys, warps and stages of float32 on Hopper, by the width of the head dim.
HOPPER_TILES = {64: (128, 64, 8, 2), 128: (64, 32, 4, 1), 256: (64, 16, 4, 1)}


class ForwardMasked(MaskedModel, FamilyOf[MaskedConfig]):
    """The family, without state."""

    name = "forward_masked"
    config_type = MaskedConfig
    features = FEATURES | {Feature.BLOCK_MASK, Feature.FUNCTIONS, Feature.TREE}
    direction = Direction.FORWARD
    interpreted = True

    def supports(self, problem: Problem, target: Target) -> str | None:
        if not problem.features and tile_splits(problem, target) == (1,):
            return "forward_masked is for masks, changed scores, packed sequences, pages and split keys"
        if problem.block_mask and problem.features & {Feature.PACKED, Feature.PAGES}:
            return "forward_masked takes no block mask over packed sequences or pages"
        if reason := function_trouble(self.name, problem):
            return reason
        return refusal(self.name, problem) or self._why_not_stored(problem, target)

    def _why_not_stored(self, problem: Problem, target: Target) -> str | None:
        """Returns the reason why keys and values cannot be read as stored, None if they can."""
        if problem.kv_dtype is None:
            return None
        if problem.kv_scale is KvScale.PAGE and not problem.page_size:
            return "forward_masked takes scales of pages for keys in pages alone"
        if problem.kv_dtype is KvDtype.E4M3 and not (target.is_nvidia and target.capability >= CONVERTS_E4M3):
            return f"forward_masked reads keys of {problem.kv_dtype} from sm_{CONVERTS_E4M3} on"
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return masked_space(problem, target)

    def default(self, problem: Problem, target: Target) -> MaskedConfig:
        """Returns a tile that fits every target of the table, for untuned shapes.

        Few tiles over long keys are split, so that all SMs have work.
        """
        near = problem.window_left is not None or problem.chunk > 0
        block_m, block_n, warps, stages = self._default_tiles(problem, target)
        config = MaskedConfig(
            block_m=block_m,
            block_n=block_n,
            num_warps=warps,
            num_stages=stages_of(problem, stages),
            lpt=problem.causal is not Causal.NONE and not near,
            input_precision=input_precisions(problem, target)[-1],
        )
        spread = split_variants(problem, config, target)
        return min((config, *spread), key=lambda other: self.makespan_ms(problem, other, target))

    def _default_tiles(self, problem: Problem, target: Target) -> tuple[int, int, int, int]:
        """Returns queries, keys, warps and stages."""
        width = widest_tile(problem) * problem.dtype.itemsize
        wide = problem.dtype.is_float32
        if wide and target.capability == HOPPER:
            # A tile lies within one block of a block mask.
            return HOPPER_TILES[
                128 if problem.block_mask == SHORT and width < 512 else float32_width(problem)
            ]
        if width > 512:
            return 32, 16, 4, 1
        small = target.sram_per_block < SMALL_SRAM
        short = mean_queries(problem) <= SHORT or problem.block_mask == SHORT
        rows = 64 if wide or width > 256 or short else 128
        hopper = target.capability == HOPPER
        # A bias is a tile of its own, in registers in addition to the scores.
        narrow = wide or (small and width > 128) or problem.bias is not Bias.NONE
        return rows, 32 if narrow else 64, 8 if rows > SHORT else 4, 3 if hopper and width <= 256 else 2

    def arguments(self, problem: Problem, config: MaskedConfig, specialization: Specialization) -> Arguments:
        return feature_arguments(problem, specialization, PARTIALS if config.num_splits > 1 else ())

    def epilogue(self, problem: Problem, config: MaskedConfig, specialization: Specialization) -> Step | None:
        # Not all GPUs of the family launch a kernel before the preceding one ends.
        return combining_step(problem, specialization) if config.num_splits > 1 else None

    def context(self, problem: Problem, config: MaskedConfig, specialization: Specialization) -> Context:
        chunks = head_chunks(problem.head_dim, config.split_head_dim), value_chunks(problem, config)
        values = portable_values(problem, specialization, chunks, config.block_n)
        return values | split_values(problem, config.num_splits)


FAMILY = ForwardMasked()
