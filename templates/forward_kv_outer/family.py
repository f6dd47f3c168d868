"""Portable Triton forward pass in FlashAttention-1's loop order: an outer loop over keys."""

from flashtune.core.config import Space
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Direction, Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import forward_arguments
from flashtune.templates.common.args.portable_context import portable_values, refusal
from flashtune.templates.common.model.sram import chunks_of, widest_tile
from flashtune.templates.family import Arguments, Context, FamilyOf
from flashtune.templates.forward_kv_outer.perf_model import KVOuterModel
from flashtune.templates.forward_kv_outer.space import KVOuterConfig, kv_outer_space

# State of a row between blocks of keys, in global memory and in float32.
WORKSPACES = ("carried_max", "carried_sum", "carried_out")


class ForwardKVOuter(KVOuterModel, FamilyOf[KVOuterConfig]):
    """The family, without state."""

    name = "forward_kv_outer"
    config_type = KVOuterConfig
    features = frozenset[Feature]()
    direction = Direction.FORWARD
    interpreted = True

    def supports(self, problem: Problem, target: Target) -> str | None:
        return refusal(self.name, problem)

    def space(self, problem: Problem, target: Target) -> Space:
        return kv_outer_space(problem)

    def default(self, problem: Problem, target: Target) -> KVOuterConfig:
        """Returns a small tile that fits every target of the table."""
        row_bytes = widest_tile(problem) * problem.dtype.itemsize
        side = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
        if target.sram_per_block < 100 * 1000:
            side = max(16, side // 2)
        return KVOuterConfig(block_m=side, block_n=side, num_warps=4, num_stages=1)

    def arguments(self, problem: Problem, config: KVOuterConfig, specialization: Specialization) -> Arguments:
        return forward_arguments(problem.dtype, specialization, WORKSPACES)

    def context(self, problem: Problem, config: KVOuterConfig, specialization: Specialization) -> Context:
        return portable_values(problem, specialization, chunks_of(problem, config.split_head_dim))


FAMILY = ForwardKVOuter()
