"""Tests of expressions of functions: canonical form, decoding, derivatives, errors, and intervals."""

import itertools
import math
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.core.expressions.builder import Builder
from flashtune.core.expressions.derivative import derivatives
from flashtune.core.expressions.evaluation import Values, error_terms, evaluate, near_steps
from flashtune.core.expressions.intervals import Interval, intervals
from flashtune.core.expressions.nodes import (
    MAX_DEPTH,
    MAX_NODES,
    Functions,
    Node,
    Op,
    Table,
    TableDtype,
)
from flashtune.core.expressions.text import functions_text, parse_functions
from flashtune.request.functions.tracing import trace
from tests.problems.random_functions import FLOATS, INTS, PLACES, random_functions, random_tables
from tests.support.fuzzing import fuzz_count


def values(dtype: torch.dtype = torch.float64) -> Values:
    torch.manual_seed(0)
    batch, head, query, key = (torch.arange(size) for size in (2, 3, 9, 11))
    return Values(
        batch[:, None, None, None], head[:, None, None], query[:, None], key,
        torch.tensor(INTS), torch.tensor(FLOATS), tuple(random_tables()),
        torch.randn(2, 3, 9, 11, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(fuzz_count(40, 2000)))
def test_random_functions(seed: int) -> None:
    """Text and JSON give back functions; derivatives are autograd's; errors and intervals are bounds."""
    functions, ints, tables = random_functions(seed)
    assert ints in ((), (0,))
    assert parse_functions(functions_text(functions)) == functions
    assert msgspec.json.decode(msgspec.json.encode(functions), type=Functions) == functions
    own = values()
    own = own._replace(tables=tuple(own.tables[place] for place in tables))
    if functions.score >= 0:
        assert own.score is not None
        score = own.score.clone().requires_grad_()
        changed = evaluate(functions, own._replace(score=score), functions.score).expand_as(score)
        if changed.requires_grad:
            (exact,) = torch.autograd.grad(changed.sum(), score)
            derived = derivatives(functions)
            slope = torch.ones(()) if derived.slope < 0 else evaluate(derived, own, derived.slope)
            slope = slope.double().expand_as(exact)
            # At poles, the order of operations decides between NaN and infinity.
            regular = exact.isfinite() & slope.isfinite()
            # The factor of the derivative of erf is a float32.
            torch.testing.assert_close(slope[regular], exact[regular], atol=1e-6, rtol=1e-6)
        narrow = evaluate(functions, own._replace(score=own.score.float()), functions.score)
        errors = error_terms(functions, own, functions.score)
        off = (narrow - changed.detach()).abs() / 2.0**-24
        # Infinite terms have no bounds.
        assert (off <= 2 * errors + 1e-6).logical_or(~off.isfinite() | errors.isnan()).all()
    places = {op: Interval(1, 5) for op in PLACES}
    bounds = intervals(functions, places, INTS, FLOATS)
    batch, head, query, key = (torch.arange(1, 6).view(-1, *[1] * axis) for axis in range(4))
    score = torch.randn(5, 5, 5, 5, dtype=torch.float64)
    near = Values(batch, head, query, key, own.ints, own.floats, own.tables, score)
    for place, bound in enumerate(bounds):
        exact = evaluate(functions, near, place).double()
        assert ((exact >= bound.least - 1e-6) & (exact <= bound.greatest + 1e-6) | exact.isnan()).all()


@pytest.mark.parametrize("op", [Op.SHIFT_LEFT, Op.SHIFT_RIGHT])
@pytest.mark.parametrize("count", [-(2**31), -1, 32, 2**31 - 1])
def test_shifts_of_decoded_functions_may_have_any_count(op: Op, count: int) -> None:
    text = f"score.int@1.int@{count}.{op}/1/2.to_float/3.add/0/4:5:-1:"
    functions = parse_functions(text)
    assert intervals(functions, {})[3] == Interval(-math.inf, math.inf)
    assert derivatives(functions).slope == -1


@pytest.mark.parametrize(("leaf", "bound"), [("key", -math.inf), ("key.to_float/0", 0.0)])
def test_bounds_of_long_products_do_not_grow_without_limit(leaf: str, bound: float) -> None:
    first = leaf.count(".")
    squares = "".join(f".multiply/{place}/{place}" for place in range(first, first + 40))
    functions = parse_functions(f"{leaf}{squares}.less/{first + 40}/{first + 40}:-1:{first + 41}:")
    products = intervals(functions, {Op.KEY: Interval(0, 3)})
    assert products[first + 40] == Interval(bound, math.inf)


LEAF = Node(Op.QUERY)
CHAIN = (LEAF, *(Node(Op.NEGATE, (place,)) for place in range(MAX_DEPTH)))
INVALID: dict[str, Callable[[], Functions]] = {
    "operand": lambda: Functions((Node(Op.NOT, (0,)),), mask=0),
    "later operand": lambda: Functions((Node(Op.NEGATE, (1,)), LEAF), mask=0),
    "type": lambda: Functions((LEAF, Node(Op.NOT, (0,))), mask=1),
    "two types": lambda: Functions((LEAF, Node(Op.SCORE), Node(Op.LESS, (0, 1))), mask=2),
    "result": lambda: Functions((LEAF,), score=0),
    "count": lambda: Functions((LEAF, Node(Op.LESS, (0,))), mask=1),
    "score in mask": lambda: Functions((Node(Op.SCORE), Node(Op.LESS, (0, 0))), mask=1),
    "unused": lambda: Functions((LEAF, Node(Op.SCORE)), score=1),
    "depth": lambda: Functions((*CHAIN, Node(Op.LESS, (0, MAX_DEPTH))), mask=MAX_DEPTH + 1),
    "size": lambda: Functions((Node(Op.SCORE),) * (MAX_NODES + 1), score=0),
    "constant": lambda: Functions((Node(Op.INT, (), 2**31),), mask=0),
    "number": lambda: Functions((Node(Op.FLOAT_NUMBER, (), 16),), score=0),
    "table": lambda: Functions((Node(Op.LOAD, (), 0),), score=0),
    "dimensions": lambda: Functions((Node(Op.LOAD, (), 0),), score=0, tables=(Table(TableDtype.FP32, 1),)),
    "value": lambda: Functions((Node(Op.SCORE, (), 1),), score=0),
}


@pytest.mark.parametrize("flaw", INVALID)
def test_invalid_functions_are_refused(flaw: str) -> None:
    with pytest.raises(ProblemError):
        INVALID[flaw]()


@pytest.mark.parametrize(
    "text",
    ["", "key:0:0:", "os.system:0:-1:", "key.query.less_equal/0/1:-1:2:fp32", "key/0:-1:0:", "key@x:-1:-1:",
     "key.query.less_equal/0/1:-1:+2:", "key.query.less_equal/0/999:-1:2:", "score" * 9999,
     "score:0:-1:fp64x1"],
)  # fmt: skip
def test_invalid_text_is_refused(text: str) -> None:
    with pytest.raises(ProblemError):
        parse_functions(text)


@pytest.mark.parametrize(
    "raw",
    [
        b'{"nodes":[["eval",[],0]]}',
        b'{"nodes":[["score",["a"],0]],"score":0}',
        b'{"nodes":1}',
        b'{"code":""}',
    ],
)
def test_invalid_json_is_refused(raw: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(raw, type=Functions)


def test_sums_of_a_shared_term_are_bounded() -> None:
    """Terms that double with each step end in an error, not in endless time."""
    builder = Builder()
    term = builder.make(Op.QUERY)
    for _ in range(4):
        term = builder.make(Op.ADD, term, builder.make(Op.ADD, term, builder.make(Op.KEY)))
    with pytest.raises(ProblemError):  # noqa: PT012 - the number of steps until the limit is open
        for _ in range(MAX_NODES):
            term = builder.make(Op.ADD, term, term)


def test_order_of_terms_does_not_matter() -> None:
    digests = set()
    for order in itertools.permutations(range(3)):
        builder = Builder()
        terms: list[int] = [builder.make(op) for op in (Op.QUERY, Op.KEY, Op.INT_NUMBER)]
        chosen = [terms[place] for place in order]
        total = builder.make(Op.ADD, chosen[0], builder.make(Op.ADD, chosen[1], chosen[2]))
        functions, _ = builder.finish(-1, builder.make(Op.LESS, total, builder.constant(9)))
        digests.add(functions.digest)
    assert len(digests) == 1


def test_loads_wrap_and_stay_inside() -> None:
    functions = Functions((Node(Op.KEY), Node(Op.LOAD, (0,))), 1, tables=(Table(TableDtype.FP32, 1),))
    key = torch.tensor([-9, -1, 0, 2, 9])
    table: Tensor = torch.tensor([1.0, 2.0, 3.0])
    own = values()._replace(key=key, tables=(table,))
    assert evaluate(functions, own, 1).tolist() == [1.0, 3.0, 1.0, 3.0, 3.0]


@pytest.mark.parametrize(
    "activation", [torch.sigmoid, torch.nn.functional.silu, torch.nn.functional.softplus]
)
def test_derivatives_of_large_scores_are_finite(activation: Callable[[Tensor], Tensor]) -> None:
    derived = derivatives(trace(lambda s, b, h, q, k: activation(s), None).functions)
    score = torch.tensor([-1e30, -1e4, -100.0, -80.0, 0.5, 100.0, 1e30], requires_grad=True)
    (exact,) = torch.autograd.grad(activation(score).sum(), score)
    own = values(torch.float32)._replace(score=score.detach())
    torch.testing.assert_close(evaluate(derived, own, derived.slope), exact)


STEPS: dict[str, tuple[Callable[..., object], float]] = {
    "comparison": (lambda s, b, h, q, k: torch.where(s * 2 <= 1, s, 0.0), 0.5),
    "difference from 0": (lambda s, b, h, q, k: s + (s != 0), 0.0),
    "rounded limit": (lambda s, b, h, q, k: torch.where(s < q * 0.1, s, 0.0), 0.4),
    "integer": (lambda s, b, h, q, k: s + (s * 3).int(), 1.0),
}


@pytest.mark.parametrize("name", STEPS)
def test_scores_near_steps_are_found(name: str) -> None:
    function, step = STEPS[name]
    functions = trace(function, None).functions
    score = step + torch.tensor([-1e-3, -1e-7, 0.0, 1e-7, 1e-3], dtype=torch.float64)
    near = near_steps(functions, values()._replace(score=score, query=torch.tensor(4)), torch.tensor(8.0))
    assert near is not None
    assert near.tolist() == [False, True, True, True, False]


def test_comparisons_of_places_are_no_steps_of_scores() -> None:
    functions = trace(lambda s, b, h, q, k: torch.where(q * 0.1 <= k * 0.1, s, s * 2), None).functions
    assert near_steps(functions, values(), torch.tensor(8.0)) is None


def test_compared_floats_are_of_float32() -> None:
    functions = trace(None, lambda b, h, q, k: (q * 0.1 + 0.2 == k * 0.1) | (q / 3 < 0)).functions
    query, key = torch.tensor([[1], [2], [5]]), torch.tensor([3, 4, 7])
    own = values()._replace(query=query, key=key, score=None)
    exact = query * 0.1 + 0.2 == key * 0.1
    assert torch.equal(evaluate(functions, own, functions.mask), exact)
    assert not torch.equal(query.double() * 0.1 + 0.2 == key.double() * 0.1, exact)
