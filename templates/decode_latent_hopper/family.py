"""Attention over latent keys (DeepSeek's MLA) in Gluon, for few queries on sm_90 only."""

from flashtune.core.config import LaunchOptions, Space
from flashtune.core.kernel import POINTER_ALIGNMENT, Argument, Specialization, Step
from flashtune.core.problem import Direction, Dtype, Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.common.args.arguments import PARTIALS, combine_step, descriptor
from flashtune.templates.common.args.problem_context import problem_values
from flashtune.templates.common.args.side import side_tensors
from flashtune.templates.common.model.sram import power_of_two
from flashtune.templates.decode_latent_hopper.perf_model import LatentModel
from flashtune.templates.decode_latent_hopper.space import (
    BLOCK_N,
    COMBINE_WARPS,
    GROUP_WARPS,
    ROWS,
    LatentConfig,
    combined_columns,
    copied_keys,
    latent_space,
    split_tile,
    worker_registers,
)
from flashtune.templates.family import Arguments, Context, FamilyOf

HOPPER = 90
DTYPES = (Dtype.BF16, Dtype.FP16)
SMALLEST_PAGE = 16
MIN_VALUES, MAX_VALUES = 128, 512
MIN_REST, MAX_REST = 16, 64


class DecodeLatentHopper(LatentModel, FamilyOf[LatentConfig]):
    """The family, without state."""

    name = "decode_latent_hopper"
    config_type = LatentConfig
    features = frozenset({Feature.MLA, Feature.KV_LENGTHS, Feature.PAGES})
    direction = Direction.FORWARD
    interpreted = False

    def supports(self, problem: Problem, target: Target) -> str | None:
        if not target.is_nvidia or target.capability != HOPPER:
            return f"decode_latent_hopper runs on sm_90 alone, and {target.name} is {target.arch}"
        if not problem.mla:
            return "decode_latent_hopper takes values that are columns of the keys alone"
        if problem.dtype not in DTYPES:
            return f"decode_latent_hopper takes bf16 and fp16, not {problem.dtype}"
        if problem.kv_heads != 1:
            return "decode_latent_hopper takes one KV head"
        if 0 < problem.page_size < SMALLEST_PAGE:
            return f"decode_latent_hopper takes pages of {SMALLEST_PAGE} keys or more"
        values, rest = problem.value_head_dim, problem.head_dim - problem.value_head_dim
        if power_of_two(values) != values or not MIN_VALUES <= values <= MAX_VALUES:
            return (
                f"decode_latent_hopper takes value head dims from {MIN_VALUES} to {MAX_VALUES} "
                "that are powers of two"
            )
        if not MIN_REST <= rest <= MAX_REST or power_of_two(rest) != rest:
            return (
                "decode_latent_hopper takes keys that are wider than their values by "
                f"{MIN_REST}, 32 or {MAX_REST} columns"
            )
        return None

    def can_address(self, dtype: Dtype, specialization: Specialization) -> bool:
        return specialization.takes_descriptors(dtype)

    def space(self, problem: Problem, target: Target) -> Space:
        return latent_space(problem, target)

    def default(self, problem: Problem, target: Target) -> LatentConfig:
        """Returns a config with enough splits to use all SMs."""
        plain = LatentConfig(num_warps=GROUP_WARPS, num_stages=2, overlap_pv=True)
        spread = self.schedule_variants(problem, plain, target)
        return min(spread, key=lambda config: (self.makespan_ms(problem, config, target), config.num_splits))

    def arguments(self, problem: Problem, config: LatentConfig, specialization: Specialization) -> Arguments:
        """Returns descriptors of q, k, and out if not split; lse, side tensors, partial results, numbers."""
        half, rest = problem.value_head_dim // 2, problem.head_dim - problem.value_head_dim
        queries, keys = (1, ROWS // config.queries, config.queries), (1, 1, 1, copied_keys(problem))
        many = config.num_splits > 1
        counts = ("heads", "all_heads", "seqlen_q", "seqlen_kv")
        return (
            descriptor("q_desc", problem.dtype, (*queries, half)),
            descriptor("q_rest_desc", problem.dtype, (*queries, rest)),
            descriptor("k_desc", problem.dtype, (*keys, half)),
            descriptor("k_rest_desc", problem.dtype, (*keys, rest)),
            *(() if many else (descriptor("o_desc", problem.dtype, (*queries, half)),)),
            # A kernel without a log-sum-exp gets `out` in its place and never accesses it.
            Argument("lse", "*fp32", POINTER_ALIGNMENT if specialization.lse else 1),
            *side_tensors(problem),
            *(Argument(name, "*fp32", POINTER_ALIGNMENT) for name in PARTIALS if many),
            Argument("scale", "fp32"),
            *(Argument(name, "i32") for name in counts),
            *((Argument("stride_table", f"i{specialization.index_bits}"),) if problem.page_size else ()),
            *((Argument("splits", "i32"),) if many else ()),
        )

    def epilogue(self, problem: Problem, config: LatentConfig, specialization: Specialization) -> Step | None:
        if config.num_splits == 1:
            return None
        return combine_step(problem.dtype, specialization, LaunchOptions(COMBINE_WARPS, 1))

    def context(self, problem: Problem, config: LatentConfig, specialization: Specialization) -> Context:
        return problem_values(problem) | {
            "half": problem.value_head_dim // 2,
            "rest": problem.head_dim - problem.value_head_dim,
            "split_tile": split_tile(config),
            "combined": combined_columns(problem, config),
            "combine_warps": COMBINE_WARPS,
            "registers": worker_registers(problem),
            "copied_keys": copied_keys(problem),
            # A block of keys is several pages, or one.
            "has_small_pages": copied_keys(problem) < BLOCK_N,
            "page_is_block": problem.page_size == BLOCK_N,
            "is_split": config.num_splits > 1,
            "lse": specialization.lse,
        }


FAMILY = DecodeLatentHopper()
