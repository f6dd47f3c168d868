"""Run-time arguments of the kernel, its prologue and its epilogue, with TMA descriptors."""

from flashtune.core.kernel import POINTER_ALIGNMENT, Argument, Specialization
from flashtune.core.problem import Bias, Problem
from flashtune.templates.backward_hopper.space import (
    ROWS,
    HopperBackwardConfig,
    interleaves,
    width_of,
)
from flashtune.templates.common.args.arguments import descriptor, stride_arguments
from flashtune.templates.common.args.backward_arguments import plain_arguments, seed_arguments
from flashtune.templates.common.args.backward_portable import BLOCK_TENSORS, bias_gradient, table_gradient
from flashtune.templates.common.args.side import CAPTURED, side_numbers, side_strides, side_tensors
from flashtune.templates.family import Arguments

STATS, SUMS, TURNS = "workspace_0", "workspace_1", "workspace_2"
# The steps of each block of keys, for a block mask.
STEPS = Argument("workspace_2", "*i32", POINTER_ALIGNMENT)
COUNTS = ("blocks", "kv_heads", "group_size")
DENSE_COUNTS = ("seqlen_q", "seqlen_kv", "diagonal")
# Blocks of queries of a head, of all sequences, and the numbers of sequences and of steps of a search.
PACKED_COUNTS = ("head_blocks", "sequences", "search_steps")
OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv")
# Batches and heads of an additive bias, which is 1 where all share it.
BIAS_COUNTS = ("bias_batches", "bias_heads")
# Integers of the prologue that lists steps, after the strides of the block mask.
LISTED_COUNTS = ("seqlen_kv", "kv_heads", "search_steps")


def kernel_arguments(
    problem: Problem, config: HopperBackwardConfig, specialization: Specialization
) -> Arguments:
    """Returns descriptors of q, k, v, dout, initial values of products, dk and dv; sums, numbers, counts.

    Deterministic kernels also get counters for the order of additions. With a block mask, kernels also get
    the steps of each block of keys. Kernels that interleave heads also get the number of these.
    """
    width = width_of(problem)
    boxes = {
        "q": config.block_m, "k": ROWS, "v": ROWS, "do": config.block_m, "stats": 0, "dk": ROWS, "dv": ROWS,
    }  # fmt: skip
    described = (
        _tile(name, rows, width, problem) if rows else _row(name, config.block_m)
        for name, rows in boxes.items()
    )
    return (
        *described,
        *_bias_tiles(problem, config, specialization),
        *(Argument(name, "*fp32", POINTER_ALIGNMENT) for name in _added_to(problem)),
        *_steps(problem),
        *plain_arguments(problem.dtype, specialization, table_gradient(problem)),
        *_side(problem, (*OFFSETS, *CAPTURED)),
        Argument("scale", "fp32"),
        *side_numbers(problem),
        *_integers(_counts(problem, config)),
    )


def prepare_arguments(
    problem: Problem, config: HopperBackwardConfig, specialization: Specialization
) -> Arguments:
    """Returns out, dout, lse, its gradient if there is one, workspaces, extra inputs, strides, counts."""
    dlse = ("dlse",) if specialization.lse else ()
    tensors, tables = ("out", "dout", "lse", *dlse, STATS, *_added_to(problem)), table_gradient(problem)
    beside = "sinks", "bias", *OFFSETS[:1], *BLOCK_TENSORS, *(CAPTURED[:1] if tables else ())
    # Scores of rows with a large log-sum-exp are computed again.
    scored = ("q", "k") if problem.bias is Bias.ADDITIVE else ()
    cleared = bias_gradient(problem, specialization) if problem.is_causal else ()
    return (
        *plain_arguments(problem.dtype, specialization, tensors),
        *_steps(problem),
        *plain_arguments(problem.dtype, specialization, (*_sink_parts(problem), *tables, *scored, *cleared)),
        *_side(problem, beside),
        *seed_arguments(problem),
        *((Argument("scale", "fp32"),) if scored or starts_at_lse(problem, config) else ()),
        *side_numbers(problem),
        *stride_arguments(specialization, (*tensors, *scored)),
        *side_strides(problem, specialization),
        *_integers((*_row_counts(problem), *(LISTED_COUNTS if problem.block_mask else ()))),
        *_integers(("group_size", "seqlen_kv") if scored else ()),
    )


def finish_arguments(problem: Problem, specialization: Specialization) -> Arguments:
    """Returns sums, dq, the parts and the gradients of sinks, scale, strides, counts."""
    sinks = (*_sink_parts(problem), "dsinks") if problem.sinks else ()
    return (
        *plain_arguments(problem.dtype, specialization, (SUMS, "dq", *sinks)),
        *_side(problem, OFFSETS[:1]),
        Argument("scale", "fp32"),
        *stride_arguments(specialization, ("dq",)),
        *_integers(_row_counts(problem)),
    )


def starts_at_lse(problem: Problem, config: HopperBackwardConfig) -> bool:
    """Returns whether the product of the scores starts at minus the log-sum-exp: only of unchanged scores."""
    changes = problem.softcap or problem.functions.score >= 0 or problem.bias is Bias.ADDITIVE
    return config.init_accumulators and not changes


def _counts(problem: Problem, config: HopperBackwardConfig) -> tuple[str, ...]:
    """Returns the names of the main kernel's integers."""
    ranged = ("head_blocks",) if problem.sight.left is not None else ()
    counts = (*COUNTS, *(PACKED_COUNTS if problem.packed else (*DENSE_COUNTS, *ranged)))
    counts = (*counts, "interleaved_heads") if interleaves(problem, config) else counts
    return (*counts, *BIAS_COUNTS) if problem.bias is Bias.ADDITIVE else counts


def _row_counts(problem: Problem) -> tuple[str, ...]:
    """Returns the names of the integers of prologue and epilogue."""
    return ("heads", "seqlen_q", *(("sequences",) if problem.packed else ()))


def _side(problem: Problem, names: tuple[str, ...]) -> Arguments:
    """Returns pointers to those side tensors of the problem that have these names."""
    return tuple(tensor for tensor in side_tensors(problem) if tensor.name in names)


def _added_to(problem: Problem) -> tuple[str, ...]:
    """Returns workspaces that programs share: sums of dq and, if deterministic, counters for their order."""
    return (SUMS, TURNS) if problem.deterministic else (SUMS,)


def _steps(problem: Problem) -> Arguments:
    return (STEPS,) if problem.block_mask else ()


def _sink_parts(problem: Problem) -> tuple[str, ...]:
    """Returns the workspace with the gradient of a sink of each block of queries."""
    before = len(_added_to(problem)) + len(_steps(problem))
    return (f"workspace_{1 + before}",) if problem.sinks else ()


def _tile(name: str, rows: int, width: int, problem: Problem) -> Argument:
    """Returns a tile of rows of one head. Of packed sequences, one more dimension marks a sequence's end."""
    outer = (1, 1, 1) if problem.packed else (1, 1)
    return descriptor(f"{name}_desc", problem.dtype, (*outer, rows, width))


def _bias_tiles(problem: Problem, config: HopperBackwardConfig, specialization: Specialization) -> Arguments:
    """Returns tiles of the additive bias and of its gradient, of the keys of a group."""
    names = ("bias", *bias_gradient(problem, specialization)) if problem.bias is Bias.ADDITIVE else ()
    return tuple(descriptor(f"{name}_desc", problem.dtype, (1, 1, config.block_m, ROWS)) for name in names)


def _row(name: str, columns: int) -> Argument:
    return Argument(f"{name}_desc", f"tensordesc<fp32[1, {columns}],NVMMASharedLayout(0, 32, 2)>")


def _integers(names: tuple[str, ...]) -> Arguments:
    return tuple(Argument(name, "i32") for name in names)
