"""A problem's features for templates, and their arguments."""

from collections.abc import Collection
from typing import Any

import msgspec

from flashtune.core.config import LaunchOptions
from flashtune.core.kernel import Argument, Specialization, Step
from flashtune.core.problem import Causal, Feature, KvScale, Problem
from flashtune.templates.common.args.arguments import combine_step, forward_arguments, pointer_type
from flashtune.templates.common.args.problem_context import problem_values
from flashtune.templates.common.args.side import side_numbers, side_strides, side_tensors
from flashtune.templates.common.model.splits import COMBINE_WARPS
from flashtune.templates.family import Arguments

COUNT = 5
# Options of the launch that combines splits.
COMBINING = LaunchOptions(COMBINE_WARPS, 1)
# The first NVIDIA architecture that converts 8-bit floats with 4 exponent bits.
CONVERTS_E4M3 = 89
# The features that `common/masks.jinja` computes.
FEATURES = frozenset(
    {
        *(Feature.WINDOW, Feature.SINK_TOKENS, Feature.CHUNK, Feature.PREFIX, Feature.SOFTCAP),
        *(Feature.ALIBI, Feature.BIAS, Feature.SINKS, Feature.PACKED, Feature.KV_LENGTHS, Feature.PAGES),
        *(Feature.QUANTIZED_KV, Feature.DROPOUT),
    }
)

# Features that functions combine with: those of calls without and with pages.
WITH_FUNCTIONS = frozenset({Feature.BLOCK_MASK, Feature.FUNCTIONS})
PAGED_FUNCTIONS = frozenset({Feature.PAGES, Feature.PACKED, Feature.QUANTIZED_KV, Feature.FUNCTIONS})


def function_trouble(name: str, problem: Problem) -> str | None:
    """Returns why the family of this name does not compute the functions of a problem, None if it does."""
    if not problem.functions:
        return None
    allowed = PAGED_FUNCTIONS if problem.page_size else WITH_FUNCTIONS
    aligned = (Causal.NONE, Causal.BOTTOM_RIGHT) if problem.page_size else (Causal.NONE,)
    if problem.features <= allowed and problem.causal in aligned and not problem.dtype.is_quantized:
        return None
    return f"{name} takes score and mask functions with block masks, or with causal masks of pages, alone"


def feature_values(problem: Problem, block_n: int = 0) -> dict[str, Any]:
    """Returns the values of a problem's features for `common/masks.jinja`, for tiles of `block_n` keys."""
    values = problem_values(problem)
    quantized = problem.kv_dtype is not None
    page_scales = quantized and problem.kv_scale is KvScale.PAGE
    has_right = values["is_causal"] or values["has_window_right"]
    ends_by_row = has_right or values["has_chunk"]
    starts_by_row = values["has_window_left"] or values["has_chunk"]
    has_first_tokens = values["first_tokens"] > 0
    lifts = starts_by_row and (has_first_tokens or problem.prefix)
    return values | {
        # Keys and values are stored in 8 bits.
        "quantized": quantized,
        # Each head's part of a page has its own scales, stored in the page; else each head of a sequence.
        "page_scales": page_scales,
        "head_scales": quantized and not page_scales,
        # One page has all keys of a tile, so that its number is one scalar.
        "one_page": problem.page_size >= block_n,
        # Names of all features, for the header of a rendered file.
        "names": tuple(sorted(problem.features)),
        # The first keys are visible despite window and chunk.
        "has_first_tokens": has_first_tokens,
        # Causality or the window hides keys after a query's position.
        "has_right": has_right,
        # The end, or the start, of the visible keys differs between queries.
        "ends_by_row": ends_by_row,
        "starts_by_row": starts_by_row,
        "is_bounded": ends_by_row or starts_by_row,
        # Keys at the start of a sequence are visible before the window or chunk. Their end may differ too.
        "lifts": lifts,
        "lifts_by_row": lifts and has_right and has_first_tokens,
        # A prefix makes keys visible that would be hidden without it.
        "has_prefix": problem.prefix and (ends_by_row or starts_by_row),
        # The position of a query among the keys matters.
        "has_positions": ends_by_row or starts_by_row or problem.alibi,
        # The rows of a tile are of several heads.
        "head_rows": False,
        # Changed scores are in units of log2, instead of products of queries and keys.
        "is_changed": problem.softcap or problem.alibi or values["is_natural"],
    }


def feature_arguments(
    problem: Problem, specialization: Specialization, workspaces: tuple[str, ...]
) -> Arguments:
    """Returns the arguments of `forward_arguments`, with those of the problem's features.

    The order is q, k, v, out, lse, side tensors, workspaces, scale, numbers. Then come twelve strides, those
    of side tensors, five counts and, for varlen batches, the number of sequences.
    """
    plain = forward_arguments(problem.dtype, specialization, workspaces)
    tensors, rest = plain[:5], plain[5:]
    if problem.kv_dtype is not None:
        stored = pointer_type(problem.kv_dtype)
        tensors = tuple(
            msgspec.structs.replace(argument, type=stored) if argument.name in ("k", "v") else argument
            for argument in tensors
        )
    split = len(workspaces) + 1
    return (
        *tensors,
        *side_tensors(problem),
        *rest[:split],
        *side_numbers(problem),
        *rest[split:-COUNT],
        *side_strides(problem, specialization),
        *rest[-COUNT:],
        *((Argument("sequences", "i32"),) if problem.packed else ()),
    )


def combining_step(
    problem: Problem,
    specialization: Specialization,
    names: Collection[str] = (),
    options: LaunchOptions = COMBINING,
) -> Step:
    """Returns the launch that combines the splits. With packed sequences it needs their ends.

    Args:
        problem: The problem.
        specialization: What the kernel assumes of its tensors.
        names: Further extra inputs of the launch, if the problem has them.
        options: Options of the launch.
    """
    step = combine_step(problem.dtype, specialization, options)
    tensors = [tensor for tensor in side_tensors(problem) if tensor.name in ("cu_seqlens_q", *names)]
    pointers = [argument for argument in step.arguments if argument.type.startswith("*")]
    numbers = step.arguments[len(pointers) :]
    sequences = (Argument("sequences", "i32"),) if problem.packed else ()
    return msgspec.structs.replace(step, arguments=(*pointers, *tensors, *numbers, *sequences))
