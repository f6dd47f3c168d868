"""Shared code of portable backward families: unsupported problems, and values for templates."""

from typing import Any

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import MAX_HEAD_DIM, Bias, Feature, Problem
from flashtune.templates.common.args.feature_context import FeatureContext, feature_context
from flashtune.templates.common.args.portable_context import PortableContext, portable_fields
from flashtune.templates.common.model.sram import Chunk, head_chunks

# Elements of a tensor that a program of the prologue or epilogue holds, and its warps.
STEP_NUMBERS = 8192
STEP_WARPS = 4
MIN_ROWS = 16


class BackwardContext(PortableContext, frozen=True):
    """The values for the templates of both families, in addition to their configs."""

    features: FeatureContext  # Features of the problem.
    is_fused: bool  # Whether the kernel that loops over queries adds to dq too.
    has_full_loop: bool  # Whether its blocks of queries that no mask cuts have a loop of their own.
    delta_chunk: Chunk  # Columns of the tiles of `delta`.
    delta_rows: int  # Their rows.
    delta_warps: int  # Warps of `delta`.
    random_workspace: int  # Index of the workspace with the random words of rows, for dropout.
    writes_dbias: bool  # Whether the gradient of an additive bias is written.
    joins_sinks: bool  # Whether `delta` adds sinks to the sums of large scores.

    @property
    def clears_slopes(self) -> bool:
        """Whether `delta` clears the gradients of slopes that other programs may not write."""
        return self.features.alibi and (self.is_fused or self.features.packed)

    @property
    def has_more_keys(self) -> bool:
        """Whether tensors have keys after the last one of a sequence."""
        return self.features.lengths or self.features.packed


def refusal(name: str, problem: Problem) -> str | None:
    """Returns why the family of this name does not compute a problem, None if it does."""
    if max(problem.head_dim, problem.value_head_dim) > MAX_HEAD_DIM:
        return f"{name} takes head dims up to {MAX_HEAD_DIM}"
    if problem.dtype.is_quantized:
        return f"{name} takes no {problem.dtype}"
    if {Feature.PACKED, Feature.BIAS} <= problem.features:
        return f"{name} takes no bias over packed sequences"
    return None


def backward_fields(
    problem: Problem,
    specialization: Specialization,
    chunks: tuple[tuple[Chunk, ...], tuple[Chunk, ...]],
    random_workspace: int,
) -> dict[str, Any]:
    """Returns the fields of a `BackwardContext`, by name.

    `chunks` are the tiles of queries' and keys' columns, and those of values' columns. `random_workspace` is
    the index of the workspace with the random words of rows, for dropout.
    """
    delta_chunk = head_chunks(problem.value_head_dim, False)[0]
    has_bias = problem.bias is Bias.ADDITIVE
    # With a bias it loads rows of queries too.
    widest = max(delta_chunk, *chunks[0], key=lambda chunk: chunk.width) if has_bias else delta_chunk
    return portable_fields(problem, specialization, *chunks) | {
        # The log-sum-exp includes the sinks.
        "features": msgspec.structs.replace(feature_context(problem), sinks=False),
        "delta_chunk": delta_chunk,
        "delta_rows": rows_of_step(widest),
        "delta_warps": STEP_WARPS,
        "random_workspace": random_workspace,
        "writes_dbias": bool(bias_gradient(problem, specialization)),
        "joins_sinks": has_bias and problem.sinks,
    }


def bias_gradient(problem: Problem, specialization: Specialization) -> tuple[str, ...]:
    """Returns the name of the gradient of an additive bias, if a kernel writes one."""
    return ("dbias",) if problem.bias is Bias.ADDITIVE and specialization.constant_bias is not True else ()


def rows_of_step(chunk: Chunk) -> int:
    """Returns the rows of such a tile that a program of a prologue or epilogue holds at once."""
    return max(MIN_ROWS, STEP_NUMBERS // chunk.width)
