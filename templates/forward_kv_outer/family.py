"""Portable Triton forward pass in FlashAttention-1's loop order: an outer loop over keys."""

from flashtune.core.config import Space
from flashtune.core.kernel import Argument, Specialization
from flashtune.core.problem import MAX_HEAD_DIM, Direction, Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import forward_arguments
from flashtune.templates.common.args.portable_context import PortableContext, portable_fields
from flashtune.templates.common.model.sram import head_chunks, power_of_two
from flashtune.templates.family import Context, FamilyOf
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
        if max(problem.head_dim, problem.value_head_dim) > MAX_HEAD_DIM:
            return f"forward_kv_outer takes head dims up to {MAX_HEAD_DIM}"
        if problem.dtype.is_quantized:
            return f"forward_kv_outer takes no {problem.dtype}"
        return None

    def space(self, problem: Problem, target: Target) -> Space:
        return kv_outer_space(problem)

    def default(self, problem: Problem, target: Target) -> KVOuterConfig:
        """Returns a small tile that fits every target of the table."""
        row_bytes = power_of_two(max(problem.head_dim, problem.value_head_dim)) * problem.dtype.itemsize
        side = 64 if row_bytes <= 256 else 32 if row_bytes <= 512 else 16
        if target.sram_per_block < 100 * 1000:
            side = max(16, side // 2)
        return KVOuterConfig(block_m=side, block_n=side, num_warps=4, num_stages=1)

    def arguments(
        self, problem: Problem, config: KVOuterConfig, specialization: Specialization
    ) -> tuple[Argument, ...]:
        return forward_arguments(problem.dtype, specialization, WORKSPACES)

    def context(self, problem: Problem, config: KVOuterConfig, specialization: Specialization) -> Context:
        qk_chunks = head_chunks(problem.head_dim, config.split_head_dim)
        v_chunks = head_chunks(problem.value_head_dim, config.split_head_dim)
        return PortableContext(**portable_fields(problem, specialization, qk_chunks, v_chunks))


FAMILY = ForwardKVOuter()
