"""Hopper's backward pass in Gluon: a producer warp and two consumer groups, for sm_90 only."""

from flashtune.core.config import LaunchOptions, Space
from flashtune.core.kernel import Argument, Specialization, Step
from flashtune.core.problem import Causal, Direction, Dtype, Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.backward_hopper.arguments import (
    finish_arguments,
    kernel_arguments,
    prepare_arguments,
    starts_at_lse,
)
from flashtune.templates.backward_hopper.perf_model import HopperBackwardModel
from flashtune.templates.backward_hopper.space import (
    CONSUMER_REGISTERS,
    MULTIPROCESSORS,
    NARROW,
    PRODUCER_REGISTERS,
    ROWS,
    SWIZZLE,
    WIDE,
    WIDEST,
    HopperBackwardConfig,
    hopper_backward_space,
    interleaves,
    may_rotate,
    usual_config,
    width_of,
)
from flashtune.templates.common.args.problem_context import ProblemContext, bound, problem_fields
from flashtune.templates.common.model.sram import MIN_DOT_WIDTH
from flashtune.templates.family import Context, FamilyOf

HOPPER = 90
DTYPES = (Dtype.BF16, Dtype.FP16)
# TMA copies rows of a multiple of 16 bytes.
COLUMN_STEP = 8
# Warps of the prologue and the epilogue.
STEP_WARPS = 4
# Longer windows hide nothing, and sums of positions fit 32 bits.
FARTHEST = 2**29 - 1


class HopperBackwardContext(ProblemContext, frozen=True, kw_only=True):
    """The values for the template in addition to the config."""

    config: HopperBackwardConfig
    width: int  # Columns of a tile.
    stagger_start: bool
    deterministic: bool
    interleaves: bool  # Whether programs are numbered by blocks of keys first, over some heads.
    dlse: bool  # Whether the log-sum-exp has a gradient.
    rows: int = ROWS  # Keys of a warpgroup.
    swizzle: int = SWIZZLE
    multiprocessors: int = MULTIPROCESSORS
    consumer_registers: int = CONSUMER_REGISTERS
    producer_registers: int = PRODUCER_REGISTERS
    step_warps: int = STEP_WARPS

    @property
    def has_left(self) -> bool:
        return self.has_window_left

    @property
    def has_right(self) -> bool:
        return self.has_window_right

    @property
    def is_bounded(self) -> bool:
        """Returns whether queries see no keys beyond a position of their own."""
        return self.causal is not Causal.NONE or self.has_right

    @property
    def is_aligned_to_end(self) -> bool:
        """Returns whether the last query has the position of the last key."""
        return self.causal is not Causal.TOP_LEFT and (self.is_bounded or self.has_left)

    @property
    def is_ranged(self) -> bool:
        """Returns whether blocks of a head's queries may follow those that a block of keys needs."""
        return self.has_left or self.packed

    @property
    def is_bf16(self) -> bool:
        return self.dtype is Dtype.BF16

    @property
    def is_narrow(self) -> bool:
        return self.width == NARROW

    @property
    def divides_products(self) -> bool:
        """Returns whether warpgroups divide the products, not the keys."""
        return self.width == WIDEST

    @property
    def late_dq(self) -> bool:
        """Returns whether both warpgroups compute half of dq a step late."""
        return self.config.defer_dq and not self.config.alternate_dq

    @property
    def init_scores(self) -> bool:
        """Returns whether the product of the scores starts at minus the log-sum-exp."""
        return starts_at_lse(self.config, self.softcap)

    @property
    def init_delta(self) -> bool:
        """Returns whether the dP product starts at -delta. With dropout, dP is scaled before."""
        return self.config.init_accumulators and not self.dropout

    @property
    def pads_head_dim(self) -> bool:
        return self.head_dim != self.width

    @property
    def pads_value_head_dim(self) -> bool:
        return self.value_head_dim != self.width

    @property
    def stat_rows(self) -> int:
        """Returns the rows of a head in workspace_0."""
        return 4 if self.dropout else 2

    @property
    def half_columns(self) -> int:
        """Returns the columns of half a block of dq, which has 64 rows."""
        return max(ROWS, self.width // 2)

    @property
    def dq_columns(self) -> int:
        """Returns the columns of the part of a block of dq that a warpgroup computes."""
        return 2 * ROWS if self.config.alternate_dq else self.half_columns

    @property
    def dq_parts(self) -> int:
        """Returns the number of parts of a block of dq that are added separately."""
        return 1 if self.config.alternate_dq else 2


class BackwardHopper(HopperBackwardModel, FamilyOf[HopperBackwardConfig]):
    """The family, without state."""

    name = "backward_hopper"
    config_type = HopperBackwardConfig
    features = frozenset(
        {
            *(Feature.DETERMINISTIC, Feature.DROPOUT, Feature.WINDOW),
            *(Feature.SOFTCAP, Feature.SINKS, Feature.PACKED),
        }
    )
    direction = Direction.BACKWARD
    interpreted = False

    def supports(self, problem: Problem, target: Target) -> str | None:
        if not target.is_nvidia or target.capability != HOPPER:
            return f"backward_hopper runs on sm_90 alone, and {target.name} is {target.arch}"
        if problem.dtype not in DTYPES:
            return f"backward_hopper takes bf16 and fp16, not {problem.dtype.value}"
        dims = problem.head_dim, problem.value_head_dim
        if min(dims) < MIN_DOT_WIDTH or max(dims) > WIDEST or any(dim % COLUMN_STEP for dim in dims):
            return (
                f"backward_hopper takes head dims from {MIN_DOT_WIDTH} to {WIDEST} in steps of {COLUMN_STEP}"
            )
        if max(dims) > WIDE and problem.head_dim != problem.value_head_dim:
            return f"backward_hopper takes head dims of q and v above {WIDE} only where they are one"
        if max(dims) > WIDE and problem.dropout:
            return f"backward_hopper drops weights of head dims up to {WIDE}"
        if problem.dropout and (problem.softcap or problem.packed):
            return "backward_hopper drops weights without a softcap, of sequences that are not packed"
        return None

    def can_address(self, dtype: Dtype, specialization: Specialization) -> bool:
        return specialization.takes_descriptors(dtype)

    def space(self, problem: Problem, target: Target) -> Space:
        return hopper_backward_space(problem)

    def default(self, problem: Problem, target: Target) -> HopperBackwardConfig:
        return usual_config(problem)

    def arguments(
        self, problem: Problem, config: HopperBackwardConfig, specialization: Specialization
    ) -> tuple[Argument, ...]:
        return kernel_arguments(problem, config)

    def prologue(
        self, problem: Problem, config: HopperBackwardConfig, specialization: Specialization
    ) -> Step | None:
        arguments = prepare_arguments(problem, config, specialization)
        return Step("prepare", arguments, LaunchOptions(STEP_WARPS, 1))

    def epilogue(
        self, problem: Problem, config: HopperBackwardConfig, specialization: Specialization
    ) -> Step | None:
        return Step("finish", finish_arguments(problem, specialization), LaunchOptions(STEP_WARPS, 1))

    def context(
        self, problem: Problem, config: HopperBackwardConfig, specialization: Specialization
    ) -> Context:
        # A causal mask is the right bound.
        right = None if problem.causal is not Causal.NONE else problem.window_right
        window = {
            "window_left": bound(problem.sight.left, FARTHEST),
            "window_right": bound(right, FARTHEST),
        }
        return HopperBackwardContext(
            **problem_fields(problem) | window,
            config=config,
            width=width_of(problem),
            stagger_start=config.stagger_start and may_rotate(problem),
            deterministic=problem.deterministic,
            interleaves=interleaves(problem, config),
            dlse=specialization.lse,
        )


FAMILY = BackwardHopper()
