"""Portable fused backward pass: loops over keys for dk and dv, and adds to dq in float32."""

import math

from flashtune.core.config import LaunchOptions, Space
from flashtune.core.kernel import Argument, Specialization, Step
from flashtune.core.problem import Direction, Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.backward_fused.perf_model import FusedModel
from flashtune.templates.backward_fused.space import (
    FusedConfig,
    Reduction,
    can_copy,
    can_turn,
    fused_space,
    usual_config,
)
from flashtune.templates.common.args.arguments import stride_arguments
from flashtune.templates.common.args.backward_arguments import backward_arguments, plain_arguments
from flashtune.templates.common.args.backward_portable import (
    STEP_WARPS,
    backward_values,
    bias_gradient,
    delta_step,
    rows_of_step,
)
from flashtune.templates.common.args.feature_context import FEATURES
from flashtune.templates.common.args.portable_context import refusal
from flashtune.templates.common.model.sram import backward_chunks, head_chunks
from flashtune.templates.family import Arguments, Context, FamilyOf

# Maximum number of elements that a program of the prologue clears at once.
CLEARED = 4096
SUMS = "workspace_2"
# Index of the workspace with the random words of rows, for dropout.
RANDOM_WORKSPACE = 3


class BackwardFused(FusedModel, FamilyOf[FusedConfig]):
    """The family, without state."""

    name = "backward_fused"
    config_type = FusedConfig
    features = FEATURES - {Feature.PAGES, Feature.QUANTIZED_KV}
    direction = Direction.BACKWARD
    interpreted = True

    def supports(self, problem: Problem, target: Target) -> str | None:
        return refusal(self.name, problem)

    def space(self, problem: Problem, target: Target) -> Space:
        return fused_space(problem, target)

    def default(self, problem: Problem, target: Target) -> FusedConfig:
        """Returns tiles that fit every target of the table, for untuned shapes."""
        return usual_config(problem, target)

    def arguments(self, problem: Problem, config: FusedConfig, specialization: Specialization) -> Arguments:
        dbias = bias_gradient(problem, specialization)
        dslopes = ("dslopes",) if problem.alibi else ()
        read = ("q", "k", "v", "dout", "workspace_0", "workspace_1", SUMS, *_random(problem))
        return backward_arguments(problem, specialization, (*read, "dk", "dv", *dbias, *dslopes))

    def prologue(self, problem: Problem, config: FusedConfig, specialization: Specialization) -> Step | None:
        workspaces = ("workspace_0", "workspace_1", SUMS, *_random(problem))
        return delta_step(problem, specialization, workspaces, is_fused=True)

    def epilogue(self, problem: Problem, config: FusedConfig, specialization: Specialization) -> Step | None:
        packed = problem.packed > 0
        arguments = (
            *plain_arguments(problem.dtype, specialization, (SUMS, "dq")),
            *((Argument("cu_seqlens_q", "*i32"),) if packed else ()),
            Argument("scale", "fp32"),
            *stride_arguments(specialization, ("dq",)),
            *(Argument(name, "i32") for name in ("heads", "seqlen_q", *(("sequences",) if packed else ()))),
        )
        return Step("convert_sums", arguments, LaunchOptions(STEP_WARPS, 1))

    def context(self, problem: Problem, config: FusedConfig, specialization: Specialization) -> Context:
        sum_chunk = head_chunks(problem.head_dim, False)[0]
        chunks = backward_chunks(problem, config.split_head_dim)
        reduction = config.reduction if can_copy(problem) else Reduction.ATOMICS
        values = backward_values(problem, specialization, chunks, RANDOM_WORKSPACE, is_fused=True)
        return values | {
            "has_full_loop": config.split_masked_loop,
            "reduction": reduction,
            # The copy engine adds to dq.
            "copies": reduction is Reduction.COPY_ENGINE,
            "transpose_dq": config.transpose_dq and can_turn(problem, specialization.alignment),
            "sum_chunk": sum_chunk,
            "sum_rows": min(config.block_m, rows_of_step(sum_chunk)),
            "sum_piece": math.gcd(CLEARED, config.block_m * problem.head_dim),
        }


def _random(problem: Problem) -> tuple[str, ...]:
    """Returns the workspace that dropout adds."""
    return (f"workspace_{RANDOM_WORKSPACE}",) if problem.dropout else ()


FAMILY = BackwardFused()
