"""Run-time arguments for the extra inputs of a problem."""

from collections.abc import Collection

from flashtune.core.expressions.nodes import TableDtype
from flashtune.core.features.functions import function_tensors
from flashtune.core.features.records import NUMBERS, TABLES, TENSORS
from flashtune.core.features.table import FEATURES, TENSOR_INPUTS
from flashtune.core.kernel import Argument, Specialization
from flashtune.core.problem import Bias, Feature, Problem
from flashtune.templates.common.args.arguments import pointer_type
from flashtune.templates.family import Arguments

# Captured values of score and mask functions.
CAPTURED = ("function_ints", "function_floats", *TABLES)
# Strides after those of q, k, v and out, by their extra input.
SIDE_STRIDES = {
    "slopes": ("stride_slopes_b",),
    "bias": ("stride_bias_b", "stride_bias_h", "stride_bias_s"),
    "block_table": ("stride_table",),
    "block_counts": ("stride_counts_b", "stride_counts_h"),
    "block_indices": ("stride_indices_b", "stride_indices_h", "stride_indices_q"),
    "full_counts": ("stride_full_b", "stride_full_h"),
    "k_scale": ("stride_k_scale_p", "stride_k_scale_h"),
    "v_scale": ("stride_v_scale_p", "stride_v_scale_h"),
    "tree": ("stride_tree_b", "stride_tree_s"),
}

# Pointers to captured tensors.
POINTERS = {
    TableDtype.BOOL: "*i1",
    TableDtype.INT32: "*i32",
    TableDtype.INT64: "*i64",
    TableDtype.FP16: "*fp16",
    TableDtype.BF16: "*bf16",
    TableDtype.FP32: "*fp32",
}
OF_FUNCTIONS = {tensor.name for tensor in FEATURES[Feature.FUNCTIONS].tensors}

# Tensors that may exceed 2^31 elements where q, k, v and out do not.
WIDE = ("bias", "block_indices", "tree")


def side_tensors(problem: Problem) -> Arguments:
    """Returns pointers to the side tensors, in the order of `ExtraInputs`."""
    bias = "*i1" if problem.bias is Bias.BOOLEAN else pointer_type(problem.dtype)
    kinds = {"float32": "*fp32", "int32": "*i32", "int64": "*i64", "bool": "*i1", None: bias}
    names = {tensor.name for feature in problem.features for tensor in FEATURES[feature].tensors}
    if problem.functions:
        names = (names - OF_FUNCTIONS) | function_tensors(problem)
    if problem.page_size:
        # Pages always have lengths, and offsets of queries only.
        names = (names | {"seqlens_kv"}) - {"cu_seqlens_kv"}
    tables = {
        name: POINTERS[table.dtype] for name, table in zip(TABLES, problem.functions.tables, strict=False)
    }
    return tuple(
        Argument(name, tables.get(name) or kinds[TENSOR_INPUTS[name].dtype])
        for name in TENSORS
        if name in names
    )


def side_numbers(problem: Problem) -> Arguments:
    """Returns the arguments that are passed by value after the scale."""
    names = {number.name for feature in problem.features for number in FEATURES[feature].numbers}
    return tuple(Argument(name, "fp32") for name in NUMBERS if name in names)


def side_strides(problem: Problem, specialization: Specialization) -> Arguments:
    """Returns strides of the side tensors, in their order, without assumed divisors.

    Biases and lists of blocks always have 64-bit strides: they hold a number for each pair.
    """
    narrow = f"i{specialization.index_bits}"
    return tuple(
        Argument(name, "i64" if tensor.name in WIDE else narrow)
        for tensor in side_tensors(problem)
        for name in SIDE_STRIDES.get(tensor.name, ())
    )


def side_names(parameters: Collection[str]) -> dict[str, list[str] | list[tuple[str, str]]]:
    """Returns the names that templates need of a kernel's extra inputs, from the parameters of all its steps.

    `side_names` are tensors, with those of functions in `function_inputs`. `side_numbers` are passed by
    value, and `side_strides` has each stride with the expression of the host that reads it.
    """
    tensors = [name for name in TENSORS if name in parameters]
    strides = [
        (stride, f"{tensor}.stride({axis})")
        for tensor in tensors
        for axis, stride in enumerate(SIDE_STRIDES.get(tensor, ()))
    ]
    numbers = [name for name in NUMBERS if name in parameters]
    captured = [name for name in tensors if name in CAPTURED]
    return {
        "side_names": tensors,
        "function_inputs": captured,
        "side_numbers": numbers,
        "side_strides": strides,
    }
