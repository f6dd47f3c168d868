"""Run-time arguments of backward kernels. Each kernel lists its tensors, in its own order."""

from flashtune.core.kernel import POINTER_ALIGNMENT, Argument, Specialization
from flashtune.core.problem import Bias, Dtype, Problem
from flashtune.templates.common.args.arguments import (
    STRIDE_LETTERS,
    pointer_type,
    stride_arguments,
    tensor_argument,
)
from flashtune.templates.common.args.side import side_numbers, side_strides, side_tensors
from flashtune.templates.family import Arguments

ROW_NUMBERS = ("lse", "dlse", "dslopes", "dsinks", "dtables")
WORKSPACE = "workspace_"
# Counts for kernels that iterate over sequences.
COUNTS = ("heads", "group_size", "seqlen_q", "seqlen_kv")
# The log-sum-exp includes the sinks, and a workspace has the random words from the seed.
UNREAD = ("sinks", "seed")


def backward_arguments(
    problem: Problem, specialization: Specialization, tensors: tuple[str, ...]
) -> Arguments:
    """Returns the arguments of a main kernel: tensors, side tensors, scale, numbers, strides, counts.

    The problem supplies type and features. The names of tensors and workspaces are in order.
    """
    return (
        *plain_arguments(problem.dtype, specialization, tensors),
        *(tensor for tensor in side_tensors(problem) if tensor.name not in UNREAD),
        Argument("scale", "fp32"),
        *side_numbers(problem),
        *stride_arguments(specialization, tensors),
        *side_strides(problem, specialization),
        *(Argument(name, "i32") for name in COUNTS),
        *((Argument("sequences", "i32"),) if problem.packed else ()),
    )


def seed_arguments(problem: Problem) -> Arguments:
    """Returns the prologue's arguments for dropout."""
    return tuple(tensor for tensor in side_tensors(problem) if tensor.name == "seed")


def score_arguments(problem: Problem, specialization: Specialization) -> tuple[Arguments, Arguments]:
    """Returns the prologue's arguments for scores, which it computes with a bias: values, and integers."""
    if problem.bias is not Bias.ADDITIVE:
        return (), ()
    tensors = ("q", "k")
    values = (
        *plain_arguments(problem.dtype, specialization, tensors),
        *(tensor for tensor in side_tensors(problem) if tensor.name != "seed"),
        Argument("scale", "fp32"),
        *side_numbers(problem),
    )
    integers = (
        *stride_arguments(specialization, tensors),
        *side_strides(problem, specialization),
        *(Argument(name, "i32") for name in ("group_size", "seqlen_kv")),
    )
    return values, integers


def plain_arguments(dtype: Dtype, specialization: Specialization, tensors: tuple[str, ...]) -> Arguments:
    """Returns pointers to tensors and workspaces of these names."""
    return tuple(_pointer(name, dtype, specialization) for name in tensors)


def _pointer(name: str, dtype: Dtype, specialization: Specialization) -> Argument:
    if name.startswith(WORKSPACE):
        return Argument(name, "*fp32", POINTER_ALIGNMENT)
    if name in ROW_NUMBERS:
        # Lengths decide where its rows begin, so alignment cannot be used.
        return Argument(name, "*fp32")
    if name in STRIDE_LETTERS:
        return tensor_argument(name, dtype, specialization)
    return Argument(name, pointer_type(dtype))
