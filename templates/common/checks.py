"""Values for the checks at the start of rendered wrappers; `checks.jinja` renders them."""

from flashtune.core.expressions.nodes import Op
from flashtune.core.features.functions import function_tensors
from flashtune.core.kernel import POINTER_ALIGNMENT, Specialization
from flashtune.core.problem import Problem
from flashtune.templates.common.args.feature_context import feature_values
from flashtune.templates.family import Context, Family


def check_context(family: Family, problem: Problem, specialization: Specialization) -> Context:
    """Returns the values that decide which tensors a wrapper accepts."""
    if family.interpreted:
        alignment = int(specialization.alignment)
    else:
        # Gluon kernels use TMA descriptors, whose strides are multiples of 16 bytes.
        alignment = POINTER_ALIGNMENT // problem.kv_itemsize
    dtype, functions = problem.dtype.stored, problem.functions
    ints = functions.count(Op.INT_NUMBER) + 2 * sum(table.dimensions for table in functions.tables)
    return {
        # Element types of queries, and of keys and values.
        "dtype": dtype,
        "kv_dtype": problem.kv_dtype or dtype,
        "is_fp32": dtype.is_float32,
        "quantized_queries": dtype.is_quantized,
        "head_dim": problem.head_dim,
        "value_head_dim": problem.value_head_dim,
        "features": feature_values(problem),
        # Elements of `function_ints` and `function_floats`, 0 if there is no such tensor. Sizes and strides
        # of captured tensors are behind ints. If there are none, calls pass one element.
        "int_count": max(1, ints) if "function_ints" in function_tensors(problem) else 0,
        "float_count": functions.count(Op.FLOAT_NUMBER),
        "backward": problem.is_backward,
        # There is a gradient of the log-sum-exp.
        "dlse": problem.is_backward and specialization.lse,
        # Values are the first columns of keys.
        "latent": problem.mla,
        # Divisor of strides, in elements. Above 1, addresses are multiples of 16 bytes.
        "alignment": alignment,
        "aligned": alignment > 1,
        # The kernel computes offsets in 32 bits. In direct calls, strides that fit have 32 bits, whatever the
        # specialisation.
        "offsets": family.interpreted or problem.is_backward,
        "interpreted": family.interpreted,
        # The interpreter runs a 16-bit kernel correctly on float32 tensors.
        "widens": family.interpreted and problem.dtype.itemsize == 2 and problem.kv_dtype is None,
    }
