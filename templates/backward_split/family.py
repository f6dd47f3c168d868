"""Portable split backward pass: one kernel loops over keys for dk and dv, one over queries for dq."""

from flashtune.core.config import LaunchOptions, Space
from flashtune.core.features.table_gradients import depends_on_floats
from flashtune.core.kernel import Specialization, Step
from flashtune.core.problem import Bias, Causal, Direction, Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.backward_split.perf_model import SplitModel
from flashtune.templates.backward_split.space import SplitConfig, default_tiles, split_space
from flashtune.templates.common.args.backward_arguments import (
    backward_arguments,
)
from flashtune.templates.common.args.backward_portable import (
    backward_values,
    bias_gradient,
    delta_step,
    table_gradient,
)
from flashtune.templates.common.args.feature_context import FEATURES
from flashtune.templates.common.args.portable_context import refusal
from flashtune.templates.common.model.sram import backward_chunks, widest_tile
from flashtune.templates.common.pipeline import stages_of
from flashtune.templates.common.precision import input_precisions
from flashtune.templates.family import Arguments, Context, FamilyOf

# Features that hide keys from only some queries of a block.
MASKS = frozenset({Feature.WINDOW, Feature.CHUNK})
# Features with which functions combine.
WITH_FUNCTIONS = frozenset({Feature.BLOCK_MASK, Feature.FUNCTIONS, Feature.DETERMINISTIC})
# The largest side of a tile, and the sides and warps of tiles that a block mask makes smaller.
MAX_SIDE = 128
SMALL_SIDE = 32
SMALL_WARPS = 4


class BackwardSplit(SplitModel, FamilyOf[SplitConfig]):
    """The family, without state."""

    name = "backward_split"
    config_type = SplitConfig
    features = (FEATURES - {Feature.PAGES, Feature.QUANTIZED_KV}) | {
        Feature.BLOCK_MASK,
        Feature.FUNCTIONS,
        Feature.DETERMINISTIC,
    }
    direction = Direction.BACKWARD
    interpreted = True

    def supports(self, problem: Problem, target: Target) -> str | None:
        if problem.block_mask and (problem.alibi or problem.bias is Bias.ADDITIVE):
            return "backward_split takes no ALiBi and no additive bias with a block mask"
        if problem.block_mask and problem.packed:
            return "backward_split takes no block mask over packed sequences"
        if problem.functions and (problem.features - WITH_FUNCTIONS or problem.is_causal):
            return "backward_split takes score and mask functions with block masks alone"
        if problem.deterministic and depends_on_floats(problem):
            return "backward_split takes no deterministic gradient of a captured tensor indexed by floats"
        return refusal(self.name, problem)

    def space(self, problem: Problem, target: Target) -> Space:
        return split_space(problem, target)

    def default(self, problem: Problem, target: Target) -> SplitConfig:
        """Returns tiles that fit every target of the table, for untuned shapes."""
        width = widest_tile(problem) * problem.dtype.itemsize
        masked = bool(problem.features & MASKS) or problem.causal is not Causal.NONE
        tiles = default_tiles(width, problem, target)
        block_m, block_n, num_warps, num_stages, dq_block_m, dq_block_n, dq_warps, dq_stages = tiles
        # A tile lies within one block of a block mask. A loop with a branch needs more registers.
        largest = problem.block_mask or MAX_SIDE
        return SplitConfig(
            block_m=min(block_m, SMALL_SIDE) if problem.block_mask else block_m,
            block_n=min(block_n, largest),
            num_warps=num_warps if block_n <= largest else SMALL_WARPS,
            num_stages=stages_of(problem, num_stages),
            dq_block_m=min(dq_block_m, largest),
            dq_block_n=min(dq_block_n, largest),
            dq_warps=dq_warps if dq_block_m <= largest else SMALL_WARPS,
            dq_stages=stages_of(problem, dq_stages),
            # If only the last block is masked, one loop is as fast and needs fewer registers.
            split_masked_loop=masked and width <= 256,
            lpt=problem.causal is not Causal.NONE,
            input_precision=input_precisions(problem, target)[-1],
        )

    def arguments(self, problem: Problem, config: SplitConfig, specialization: Specialization) -> Arguments:
        return backward_arguments(problem, specialization, (*_read(problem), "dk", "dv"))

    def prologue(self, problem: Problem, config: SplitConfig, specialization: Specialization) -> Step | None:
        workspaces = ("workspace_0", "workspace_1", *_lists(problem), *_random(problem))
        return delta_step(problem, specialization, workspaces, is_fused=False)

    def epilogue(self, problem: Problem, config: SplitConfig, specialization: Specialization) -> Step | None:
        options = LaunchOptions(config.dq_warps, config.dq_stages, config.maxnreg)
        dbias = bias_gradient(problem, specialization)
        dslopes = ("dslopes",) if problem.alibi else ()
        tensors = (*_read(problem), "dq", *dbias, *dslopes, *table_gradient(problem))
        return Step("gradient_of_queries", backward_arguments(problem, specialization, tensors), options)

    def context(self, problem: Problem, config: SplitConfig, specialization: Specialization) -> Context:
        chunks = backward_chunks(problem, config.split_head_dim)
        values = backward_values(problem, specialization, chunks, _random_workspace(problem), is_fused=False)
        # The slopes' gradients are summed over all blocks of a head at once: they are in one loop then.
        return values | {"has_full_loop": config.split_masked_loop and not problem.alibi}


def _read(problem: Problem) -> tuple[str, ...]:
    """Returns tensors of both kernels, with delta, log-sum-exps and the sums for slopes' gradients."""
    slopes = ("workspace_2",) if problem.alibi else ()
    return ("q", "k", "v", "dout", "workspace_0", "workspace_1", *slopes, *_lists(problem), *_random(problem))


def _lists(problem: Problem) -> tuple[str, ...]:
    """Returns the workspace with the lists of queries that see each block of keys. ALiBi excludes them."""
    return ("workspace_2",) if problem.block_mask else ()


def _random(problem: Problem) -> tuple[str, ...]:
    """Returns the workspace that dropout adds."""
    return (f"workspace_{_random_workspace(problem)}",) if problem.dropout else ()


def _random_workspace(problem: Problem) -> int:
    """Returns the index of the workspace with the random words of rows, for dropout: the last."""
    return 3 if problem.alibi or problem.block_mask else 2


FAMILY = BackwardSplit()
