"""The time of score and mask functions in backward kernels. None of these numbers was fitted."""

from flashtune.core.expressions.derivative import derivatives
from flashtune.core.expressions.nodes import Op
from flashtune.core.problem import Problem
from flashtune.templates.common.args.function_lines import Writer

# Shares of a block's time of an operation on pairs of a query and a key.
OPERATION = 0.02
OPERATIONS = {Op.SCORE: 0.0, Op.TANH: 0.25, Op.EXP: 0.2, Op.LOG: 0.2, Op.DIVIDE: 0.1, Op.LOAD: 0.3}
# The form of values of pairs.
PAIR = 3


def share_of_functions(problem: Problem) -> float:
    """Returns the time of functions and their derivatives, as a share of a block's time without them."""
    derived = derivatives(problem.functions)
    return sum(
        OPERATIONS.get(node.op, OPERATION)
        for node, form in zip(derived.nodes, Writer(derived).forms, strict=True)
        if form == PAIR
    )
