"""Values for the templates of portable backward families, and their prologue."""

from typing import Any

from flashtune.core.config import LaunchOptions
from flashtune.core.expressions.derivative import derivatives
from flashtune.core.kernel import Argument, Specialization, Step
from flashtune.core.problem import Bias, Problem
from flashtune.templates.common.args.arguments import stride_arguments
from flashtune.templates.common.args.backward_arguments import (
    plain_arguments,
    score_arguments,
    seed_arguments,
)
from flashtune.templates.common.args.portable_context import portable_values
from flashtune.templates.common.args.side import SIDE_STRIDES, side_strides, side_tensors
from flashtune.templates.common.model.sram import Chunk, head_chunks

# Elements of a tensor that a program of the prologue or epilogue holds, and its warps.
STEP_NUMBERS = 8192
STEP_WARPS = 4
MIN_ROWS = 16
# Lists of a block mask, from which the prologue makes those of blocks of keys.
BLOCK_TENSORS = ("block_counts", "block_indices", "full_counts")


def backward_values(
    problem: Problem,
    specialization: Specialization,
    chunks: tuple[tuple[Chunk, ...], tuple[Chunk, ...]],
    random_workspace: int,
    *,
    is_fused: bool,
) -> dict[str, Any]:
    """Returns the values for the templates of both families, in addition to their configs.

    `chunks` are the tiles of queries' and keys' columns, and those of values' columns. If `is_fused`, the
    kernel that loops over queries adds to dq too.
    """
    delta_chunk = head_chunks(problem.value_head_dim, False)[0]
    has_bias = problem.bias is Bias.ADDITIVE
    # With a bias, `delta` loads rows of queries too.
    widest = max(delta_chunk, *chunks[0], key=lambda chunk: chunk.width) if has_bias else delta_chunk
    values = portable_values(problem, specialization, chunks)
    derived = derivatives(problem.functions)
    # The log-sum-exp includes the sinks.
    features = values["features"] | {"sinks": False, "functions": derived}
    return values | {
        "features": features,
        "is_fused": is_fused,
        # Columns, rows and warps of the tiles of `delta`.
        "delta_chunk": delta_chunk,
        "delta_rows": rows_of_step(widest),
        "delta_warps": STEP_WARPS,
        # Index of the workspace with the random words of rows, for dropout.
        "random_workspace": random_workspace,
        "writes_dbias": bool(bias_gradient(problem, specialization)),
        # `delta` adds sinks to the sums of large scores.
        "joins_sinks": has_bias and problem.sinks,
        # The derivative of the score function is not 1.
        "has_slope": derived.slope >= 0,
        # The kernel of queries sums gradients of captured tensors, or stores their terms if deterministic.
        "writes_tables": bool(derived.elements),
        "deterministic": problem.deterministic,
        "clears_slopes": _clears_slopes(problem, is_fused),
        # Tensors have keys after the last one of a sequence.
        "has_more_keys": features["lengths"] or features["packed"],
    }


def delta_step(
    problem: Problem, specialization: Specialization, workspaces: tuple[str, ...], *, is_fused: bool
) -> Step:
    """Returns the launch of `delta`, the prologue, which writes these workspaces."""
    dlse = ("dlse",) if specialization.lse else ()
    dslopes = ("dslopes",) if _clears_slopes(problem, is_fused) else ()
    dtables = table_gradient(problem)
    tensors = ("out", "dout", "lse", *dlse, *workspaces, *dslopes, *dtables)
    counts = (
        "heads",
        "seqlen_q",
        *(("sum_pieces",) if is_fused else ()),
        *(("slope_count",) if dslopes else ()),
    )
    values, integers = score_arguments(problem, specialization)
    lists: tuple[Argument, ...] = ()
    if problem.block_mask:
        strides = {stride for name in BLOCK_TENSORS for stride in SIDE_STRIDES[name]}
        own = (stride for stride in side_strides(problem, specialization) if stride.name in strides)
        lists = *own, Argument("list_heads", "i32")
    arguments = (
        *plain_arguments(problem.dtype, specialization, tensors),
        *seed_arguments(problem),
        *(tensor for tensor in side_tensors(problem) if dtables and tensor.name == "function_ints"),
        *(tensor for tensor in side_tensors(problem) if tensor.name in BLOCK_TENSORS),
        *values,
        *stride_arguments(specialization, tensors),
        *(Argument(name, "i32") for name in counts),
        *((Argument("seqlen_kv", "i32"),) if dtables or problem.block_mask else ()),
        *lists,
        *integers,
    )
    return Step("delta", arguments, LaunchOptions(STEP_WARPS, 1))


def _clears_slopes(problem: Problem, is_fused: bool) -> bool:
    """Returns whether `delta` clears the gradients of slopes that other programs may not write."""
    return problem.alibi and (is_fused or problem.packed > 0)


def bias_gradient(problem: Problem, specialization: Specialization) -> tuple[str, ...]:
    """Returns the name of the gradient of an additive bias, if a kernel writes one."""
    return ("dbias",) if problem.bias is Bias.ADDITIVE and specialization.constant_bias is not True else ()


def table_gradient(problem: Problem) -> tuple[str, ...]:
    """Returns the name of the gradients of captured tensors, if there are any."""
    return ("dtables",) if derivatives(problem.functions).elements else ()


def rows_of_step(chunk: Chunk) -> int:
    """Returns the rows of such a tile that a program of a prologue or epilogue holds at once."""
    return max(MIN_ROWS, STEP_NUMBERS // chunk.width)
