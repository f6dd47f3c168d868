"""The time and SRAM of score and mask functions. None of these numbers was fitted."""

from flashtune.core.expressions.derivative import derivatives
from flashtune.core.expressions.nodes import Op
from flashtune.core.features.functions import TORCH_TABLES
from flashtune.core.problem import Problem
from flashtune.templates.common.args.function_lines import Writer

# Shares of a block's time of an operation on pairs of a query and a key.
OPERATION = 0.02
OPERATIONS = {Op.SCORE: 0.0, Op.TANH: 0.25, Op.EXP: 0.2, Op.LOG: 0.2, Op.DIVIDE: 0.1, Op.LOAD: 0.3}
# Forms of values of keys, and of pairs of a query and a key.
KEY, PAIR = 2, 3


def share_of_functions(problem: Problem) -> float:
    """Returns the time of functions and their derivatives, as a share of a block's time without them."""
    derived = derivatives(problem.functions)
    return sum(
        OPERATIONS.get(node.op, OPERATION)
        for node, form in zip(derived.nodes, Writer(derived).forms, strict=True)
        if form == PAIR
    )


def loaded_bytes(problem: Problem, rows: int, keys: int) -> int:
    """Returns the bytes of elements of captured tensors that a block of rows of several heads and keys loads.

    Triton's software pipeline holds them in SRAM.
    """
    functions, dtypes = problem.functions, TORCH_TABLES()
    elements = {KEY: keys, PAIR: rows * keys}
    return sum(
        elements.get(form, 0) * dtypes[functions.tables[node.value].dtype].itemsize
        for node, form in zip(functions.nodes, Writer(functions, head_rows=True).forms, strict=True)
        if node.op is Op.LOAD
    )
