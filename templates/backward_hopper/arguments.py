"""Run-time arguments of the kernel, its prologue and its epilogue, with TMA descriptors."""

from __future__ import annotations

from flashtune.core.kernel import POINTER_ALIGNMENT, Argument, Specialization
from flashtune.core.problem import Dtype, Problem
from flashtune.templates.backward_hopper.space import ROWS, SWIZZLE, HopperBackwardConfig, width_of
from flashtune.templates.common.args.arguments import pointer_type
from flashtune.templates.common.args.backward_arguments import (
    plain_arguments,
    seed_arguments,
    stride_arguments,
)
from flashtune.templates.common.args.side import side_numbers

STATS, SUMS, TURNS = "workspace_0", "workspace_1", "workspace_2"
COUNTS = ("blocks", "kv_heads", "group_size", "seqlen_q", "seqlen_kv", "diagonal")
ROW_COUNTS = ("heads", "seqlen_q")


def kernel_arguments(problem: Problem, config: HopperBackwardConfig) -> tuple[Argument, ...]:
    """Returns descriptors of q, k, v, dout, initial values of products, dk and dv; sums, numbers, counts.

    Deterministic kernels also get counters for the order of additions, and the number of interleaved heads.
    """
    width = width_of(problem)
    boxes = {
        "q": config.block_m, "k": ROWS, "v": ROWS, "do": config.block_m, "stats": 0, "dk": ROWS, "dv": ROWS,
    }  # fmt: skip
    described = (
        _tile(name, rows, width, problem.dtype) if rows else _row(name, config.block_m)
        for name, rows in boxes.items()
    )
    return (
        *described,
        *(Argument(name, "*fp32", POINTER_ALIGNMENT) for name in _added_to(problem)),
        Argument("scale", "fp32"),
        *side_numbers(problem),
        *_integers((*COUNTS, "interleaved_heads") if problem.deterministic else COUNTS),
    )


def prepare_arguments(
    problem: Problem, config: HopperBackwardConfig, specialization: Specialization
) -> tuple[Argument, ...]:
    """Returns out, dout, lse, its gradient if there is one, workspaces, seed, numbers, strides, counts."""
    dlse = ("dlse",) if specialization.lse else ()
    tensors = ("out", "dout", "lse", *dlse, STATS, *_added_to(problem))
    return (
        *plain_arguments(problem.dtype, specialization, tensors),
        *seed_arguments(problem),
        *((Argument("scale", "fp32"),) if starts_at_lse(config, problem.softcap) else ()),
        *side_numbers(problem),
        *stride_arguments(specialization, tensors),
        *_integers(ROW_COUNTS),
    )


def finish_arguments(problem: Problem, specialization: Specialization) -> tuple[Argument, ...]:
    """Returns sums, dq, scale, strides, counts."""
    return (
        *plain_arguments(problem.dtype, specialization, (SUMS, "dq")),
        Argument("scale", "fp32"),
        *stride_arguments(specialization, ("dq",)),
        *_integers(ROW_COUNTS),
    )


def starts_at_lse(config: HopperBackwardConfig, softcap: bool) -> bool:
    """Returns whether the product of the scores starts at minus the log-sum-exp. A softcap needs plain scores."""
    return config.init_accumulators and not softcap


def _added_to(problem: Problem) -> tuple[str, ...]:
    """Returns workspaces that programs share: sums of dq and, if deterministic, counters for their order."""
    return (SUMS, TURNS) if problem.deterministic else (SUMS,)


def _tile(name: str, rows: int, width: int, dtype: Dtype) -> Argument:
    """Returns a tile of rows of one head, in shared memory with the layout of matrix instructions."""
    layout = f"NVMMASharedLayout({SWIZZLE}, {8 * dtype.itemsize}, 4)"
    return Argument(f"{name}_desc", f"tensordesc<{pointer_type(dtype)[1:]}[1, 1, {rows}, {width}],{layout}>")


def _row(name: str, columns: int) -> Argument:
    return Argument(f"{name}_desc", f"tensordesc<fp32[1, {columns}],NVMMASharedLayout(0, 32, 2)>")


def _integers(names: tuple[str, ...]) -> tuple[Argument, ...]:
    return tuple(Argument(name, "i32") for name in names)
