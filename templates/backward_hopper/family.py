"""Hopper's backward pass in Gluon: a producer warp and two consumer groups, for sm_90 only."""

from flashtune.core.config import LaunchOptions, Space
from flashtune.core.expressions.derivative import derivatives
from flashtune.core.expressions.nodes import Op
from flashtune.core.kernel import Specialization, Step
from flashtune.core.problem import Bias, Causal, Direction, Dtype, Feature, Problem
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
    WIDE,
    WIDEST,
    HopperBackwardConfig,
    has_own_steps,
    hopper_backward_space,
    interleaves,
    may_rotate,
    query_parts,
    usual_config,
    width_of,
)
from flashtune.templates.common.args.arguments import WIDEST_SWIZZLE
from flashtune.templates.common.args.backward_portable import bias_gradient
from flashtune.templates.common.args.gluon_table_gradients import can_add_elements, keeps_products
from flashtune.templates.common.args.problem_context import bound, problem_values
from flashtune.templates.common.model.sram import MIN_DOT_WIDTH
from flashtune.templates.family import Arguments, Context, FamilyOf

HOPPER = 90
DTYPES = (Dtype.BF16, Dtype.FP16)
# TMA copies rows of a multiple of 16 bytes.
COLUMN_STEP = 8
# Warps of the prologue and the epilogue.
STEP_WARPS = 4
# Probabilities in fp16 that ds comes from are times 2 to this power, so that those above 2^-26 keep all bits.
# Larger powers leave less room for the error of a log-sum-exp.
P_EXPONENT = 12
# Features with which block masks do not combine.
EXCLUDED_WITH_BLOCK_MASK = frozenset({Feature.DETERMINISTIC, Feature.WINDOW, Feature.PACKED})
# Lower bits of a step of a block mask. The others number the blocks of queries of a group of heads.
FLAG_BITS = 6
MAX_STEPS = 2 ** (31 - FLAG_BITS)
# Steps of a block mask that a program of the prologue lists at once.
LISTED_AT_ONCE = 256
# Gradients of captured tensors that a program clears at once.
TABLE_PIECE = 1024
# Longer windows hide nothing, and sums of positions fit 32 bits.
FARTHEST = 2**29 - 1
# Features with which functions combine.
WITH_FUNCTIONS = frozenset({Feature.FUNCTIONS, Feature.DETERMINISTIC, Feature.BLOCK_MASK})


class BackwardHopper(HopperBackwardModel, FamilyOf[HopperBackwardConfig]):
    """The family, without state."""

    name = "backward_hopper"
    config_type = HopperBackwardConfig
    features = frozenset(
        {
            *(Feature.DETERMINISTIC, Feature.DROPOUT, Feature.WINDOW),
            *(Feature.SOFTCAP, Feature.SINKS, Feature.PACKED, Feature.BLOCK_MASK, Feature.FUNCTIONS),
            Feature.BIAS,
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
        if problem.block_mask and problem.features & EXCLUDED_WITH_BLOCK_MASK:
            return "backward_hopper takes block masks without windows, packing and fixed order"
        if problem.block_mask and problem.group_size * problem.seqlen_q // ROWS >= MAX_STEPS:
            return f"backward_hopper takes up to {MAX_STEPS} blocks of queries of a group with a block mask"
        if problem.functions and (problem.features - WITH_FUNCTIONS or problem.is_causal):
            return "backward_hopper takes score and mask functions without other features"
        if problem.functions and max(dims) > WIDE:
            return f"backward_hopper takes score and mask functions at head dims up to {WIDE}"
        if problem.deterministic and derivatives(problem.functions).elements:
            return "backward_hopper takes no deterministic gradient of a captured tensor"
        if not can_add_elements(derivatives(problem.functions)):
            return "backward_hopper takes no gradient of a captured tensor of which scores select elements"
        return None if problem.bias is Bias.NONE else _bias_trouble(problem)

    def can_address(self, dtype: Dtype, specialization: Specialization) -> bool:
        return specialization.takes_descriptors(dtype) and specialization.copies_bias is not False

    def space(self, problem: Problem, target: Target) -> Space:
        return hopper_backward_space(problem)

    def default(self, problem: Problem, target: Target) -> HopperBackwardConfig:
        return usual_config(problem)

    def arguments(
        self, problem: Problem, config: HopperBackwardConfig, specialization: Specialization
    ) -> Arguments:
        return kernel_arguments(problem, config, specialization)

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
        values = problem_values(
            problem,
            window_left=bound(problem.sight.left, FARTHEST),
            window_right=bound(right, FARTHEST),
        )
        width = width_of(problem)
        is_bounded = values["is_causal"] or values["has_window_right"]
        half_columns = max(ROWS, width // 2)
        own_steps = has_own_steps(problem)
        all_dq = own_steps or config.alternate_dq
        derived = derivatives(problem.functions)
        return values | {
            # Columns of a tile, and keys of a warpgroup.
            "width": width,
            "rows": ROWS,
            "swizzle": WIDEST_SWIZZLE,
            "multiprocessors": MULTIPROCESSORS,
            "consumer_registers": CONSUMER_REGISTERS,
            "producer_registers": PRODUCER_REGISTERS,
            "step_warps": STEP_WARPS,
            "is_bf16": problem.dtype is Dtype.BF16,
            # ds comes from probabilities in fp16, which has a small range.
            "low_p": problem.dtype is Dtype.FP16 and (width == WIDEST or problem.softcap),
            "p_exponent": P_EXPONENT,
            # Functions with their derivatives. That of the changed score by the score may be 1.
            "functions": derived,
            "has_slope": problem.softcap or keeps_products(derived),
            # Gradients of scores are stored as those of the bias.
            "writes_dbias": bool(bias_gradient(problem, specialization)),
            # Parts of a block of queries of which functions are computed in turn.
            "function_parts": 2 if derived.elements or (width == NARROW and keeps_products(derived)) else 1,
            # Programs add to gradients of captured tensors.
            "table_piece": TABLE_PIECE,
            "writes_tables": bool(derived.elements),
            "reads_head": any(node.op is Op.HEAD for node in derived.nodes)
            or bool(bias_gradient(problem, specialization)),
            "has_tanh": any(node.op is Op.TANH for node in derived.nodes),
            "is_narrow": width == NARROW,
            # Warpgroups divide the products, not the keys.
            "divides_products": width == WIDEST,
            "pads_head_dim": problem.head_dim != width,
            "pads_value_head_dim": problem.value_head_dim != width,
            "deterministic": problem.deterministic,
            # The log-sum-exp has a gradient.
            "dlse": specialization.lse,
            "stagger_start": config.stagger_start and may_rotate(problem),
            # Programs are numbered by blocks of keys first, over some heads.
            "interleaves": interleaves(problem, config),
            "has_left": values["has_window_left"],
            "has_right": values["has_window_right"],
            # Queries see no keys beyond a position of their own.
            "is_bounded": is_bounded,
            # The last query has the position of the last key.
            "is_aligned_to_end": not values["is_top_left"] and (is_bounded or values["has_window_left"]),
            # Blocks of a head's queries may follow those that a block of keys needs.
            "is_ranged": values["has_window_left"] or values["packed"],
            # Both warpgroups compute half of dq a step late.
            "late_dq": config.defer_dq and not all_dq,
            # The product of the scores starts at minus the log-sum-exp, and the dP product at -delta. With
            # dropout, dP is scaled before.
            "init_scores": starts_at_lse(problem, config),
            "init_delta": config.init_accumulators and not problem.dropout,
            # Rows of a head in workspace_0.
            "stat_rows": 4 if problem.dropout else 3 if values["has_bias"] else 2,
            # Groups process different blocks of queries, and each adds all dq of its keys.
            "own_steps": own_steps,
            "alternate_dq": all_dq,
            # The keys of a list of steps, and the blocks of the mask in a block of queries.
            "listed_keys": ROWS if own_steps else config.block_n,
            "query_parts": query_parts(problem, config),
            "has_parts": query_parts(problem, config) > 1,
            "flag_bits": FLAG_BITS,
            "listed_at_once": LISTED_AT_ONCE,
            # Columns of half a block of dq, which has 64 rows, and of the part that a warpgroup computes.
            "half_columns": half_columns,
            "dq_columns": (config.block_m if width == NARROW else width) if all_dq else half_columns,
            # Parts of a block of dq that are added separately.
            "dq_parts": 1 if all_dq else 2,
        }


def _bias_trouble(problem: Problem) -> str | None:
    """Returns why kernels do not compute the bias of a problem, or None."""
    if problem.features != {Feature.BIAS} or problem.bias is Bias.BOOLEAN:
        return "backward_hopper takes an additive bias without other features"
    if max(problem.head_dim, problem.value_head_dim) > WIDE:
        return f"backward_hopper takes a bias at head dims up to {WIDE}"
    # TMA stores rows of its gradient.
    is_stored = problem.seqlen_kv % COLUMN_STEP == 0
    return None if is_stored else f"backward_hopper takes a bias of numbers of keys in steps of {COLUMN_STEP}"


FAMILY = BackwardHopper()
