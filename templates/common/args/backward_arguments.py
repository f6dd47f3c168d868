"""Run-time arguments of backward kernels. Each kernel lists its tensors, in its own order."""

from flashtune.core.kernel import POINTER_ALIGNMENT, Alignment, Argument, Specialization
from flashtune.core.problem import Bias, Dtype, Problem
from flashtune.templates.common.args.arguments import pointer_type
from flashtune.templates.common.args.side import side_numbers, side_strides, side_tensors

# Letters for the strides of a launch's planned tensors.
STRIDE_LETTERS = {
    "q": "q",
    "k": "k",
    "v": "v",
    "out": "o",
    "dout": "do",
    "dq": "dq",
    "dk": "dk",
    "dv": "dv",
}
ROW_NUMBERS = ("lse", "dlse", "dslopes", "dsinks")
WORKSPACE = "workspace_"
# Counts for kernels that iterate over sequences.
COUNTS = ("heads", "group_size", "seqlen_q", "seqlen_kv")
# The log-sum-exp includes the sinks, and a workspace has the random words from the seed.
UNREAD = ("sinks", "seed")


def backward_arguments(
    problem: Problem, specialization: Specialization, tensors: tuple[str, ...]
) -> tuple[Argument, ...]:
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


def seed_arguments(problem: Problem) -> tuple[Argument, ...]:
    """Returns the prologue's arguments for dropout."""
    return tuple(tensor for tensor in side_tensors(problem) if tensor.name == "seed")


def score_arguments(
    problem: Problem, specialization: Specialization
) -> tuple[tuple[Argument, ...], tuple[Argument, ...]]:
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


def plain_arguments(
    dtype: Dtype, specialization: Specialization, tensors: tuple[str, ...]
) -> tuple[Argument, ...]:
    """Returns pointers to tensors and workspaces of these names."""
    aligned = specialization.alignment is not Alignment.ANY
    return tuple(_pointer(name, dtype, aligned) for name in tensors)


def stride_arguments(specialization: Specialization, tensors: tuple[str, ...]) -> tuple[Argument, ...]:
    """Returns strides of batches, heads and positions of the planned tensors."""
    kind = f"i{specialization.index_bits}"
    return tuple(
        Argument(f"stride_{STRIDE_LETTERS[name]}{axis}", kind, int(specialization.alignment))
        for name in tensors
        if name in STRIDE_LETTERS
        for axis in "bhs"
    )


def _pointer(name: str, dtype: Dtype, aligned: bool) -> Argument:
    if name.startswith(WORKSPACE):
        return Argument(name, "*fp32", POINTER_ALIGNMENT)
    if name in ROW_NUMBERS:
        # Lengths decide where its rows begin, so alignment cannot be used.
        return Argument(name, "*fp32")
    if name in STRIDE_LETTERS:
        return Argument(name, pointer_type(dtype), POINTER_ALIGNMENT if aligned else 1)
    return Argument(name, pointer_type(dtype))
