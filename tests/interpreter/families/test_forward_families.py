"""Tests of both loop orders of the forward pass in the interpreter, against float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.core.config import Axis, AxisValue, Config, Space
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Causal, Problem
from flashtune.launch.compilation import interpreting, load_module
from flashtune.templates.family import Family
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.interpreter.families.forward_calls import (
    LAYOUTS,
    TARGET,
    Case,
    check,
    make_inputs,
    make_problem,
    reference,
    run,
)

# Those that compute plain attention in the interpreter.
FORWARD = [find_family(name) for name in ("forward_kv_outer", "forward_q_outer")]
BY_FAMILY = pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
# The interpreter takes milliseconds for every block, so blocks are few; warps mean nothing to it.
SMALL = {"block_m": (16, 32), "block_n": (16, 32), "num_warps": (4,), "num_stages": (1, 2)}

# Head dims, head dims of values, (query heads, KV heads), (queries, keys).
WIDTHS = [(8, 8), (16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160)]
WIDTHS += [(192, 192), (256, 256), (64, 40), (192, 128), (16, 96), (1, 3)]
HEADS = [(1, 1), (2, 2), (4, 2), (3, 1)]
LENGTHS = [(1, 1), (1, 37), (37, 1), (33, 33), (32, 32), (50, 20), (20, 50), (17, 16), (64, 48)]


def pick_config(space: Space, pick: random.Random) -> Config:
    """A small config of the space, with independently drawn axes."""

    def small(axis: Axis) -> AxisValue:
        values = [value for value in axis.values if value in SMALL.get(axis.name, axis.values)] or axis.values
        return pick.choice(list(values))

    return space.choose(small)


def a_config(family: Family, problem: Problem, seed: int = 0) -> Config:
    return pick_config(family.space(problem, TARGET), random.Random(seed))


def sampled_cases(family: Family, count: int) -> Iterator[Case]:
    """Cases in which every value of every dimension turns up, in shuffled company."""
    pick = random.Random(family.name)

    def dealt(values: Sequence[Any]) -> Iterator[Any]:
        while True:
            yield from pick.sample(values, len(values))

    dimensions: list[Sequence[Any]] = [WIDTHS, HEADS, LENGTHS, list(Causal), LAYOUTS]
    dimensions += [[32, 64], [True, False], [0.25, 2.0, 0.0]]
    for row in itertools.islice(zip(*map(dealt, dimensions), strict=False), count):
        widths, heads, lengths, causal, layout, index_bits, lse, scale = row
        problem = make_problem(widths, heads, lengths, causal)
        config = pick_config(family.space(problem, TARGET), pick)
        yield Case(family, problem, config, layout, index_bits, lse, scale)


@pytest.mark.tritons
def test_interpreter_is_enabled() -> None:
    assert interpreting()


SAMPLED = [case for family in FORWARD for case in sampled_cases(family, 54)]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_sampled_problems_and_configs(case: Case) -> None:
    torch.manual_seed(0)
    check(case, *make_inputs(case.problem, case.layout))


@BY_FAMILY
def test_every_axis_value_alone(family: Family) -> None:
    """The first config with each value of each axis, on a causal problem with ragged tiles."""
    torch.manual_seed(0)
    problem = make_problem((96, 40), (2, 1), (37, 50), Causal.BOTTOM_RIGHT)
    q, k, v = make_inputs(problem, "bhsd")
    space = family.space(problem, TARGET)
    first = {axis.name: SMALL.get(axis.name, axis.values)[0] for axis in space.axes}
    # Conditional axes are reached through the loads that they hang on.
    bases = [
        first,
        *(
            {**first, "loads": value}
            for axis in space.axes
            if axis.name == "loads"
            for value in axis.values[1:]
        ),
    ]
    for base, axis in itertools.product(bases, space.axes):
        for value in SMALL.get(axis.name, axis.values)[1:]:
            check(Case(family, problem, space.build({**base, axis.name: value})), q, k, v)


@pytest.mark.sampled
@BY_FAMILY
@pytest.mark.parametrize("causal", list(Causal))
def test_padding_does_not_affect_the_maximum(family: Family, causal: Causal) -> None:
    """If all logits are far below zero, an unmasked zero of the padding would have all probability."""
    torch.manual_seed(0)
    problem = make_problem((24, 24), (2, 2), (19, 21), causal)
    q, k, v = (tensor.abs() for tensor in make_inputs(problem, "bhsd"))
    for seed in range(4):
        config = a_config(family, problem, seed)
        check(Case(family, problem, config, scale=8.0), q, -k, v)


@pytest.mark.tritons
@BY_FAMILY
def test_queries_without_visible_keys(family: Family) -> None:
    torch.manual_seed(0)
    problem = make_problem((16, 16), (2, 1), (50, 18), Causal.BOTTOM_RIGHT)
    q, k, v = make_inputs(problem, "bhsd")
    out, lse = run(Case(family, problem, a_config(family, problem)), q, k, v)
    assert lse is not None
    assert torch.equal(out[:, :, :32], torch.zeros(2, 2, 32, 16))
    assert torch.equal(lse[:, :, :32], torch.full((2, 2, 32), -torch.inf))
    assert torch.isfinite(lse[:, :, 32:]).all()


@BY_FAMILY
def test_rendered_module_is_standalone(family: Family) -> None:
    """`attention` of the rendered module, with its default scale, a negative one, and nothing to do."""
    torch.manual_seed(0)
    problem = make_problem((40, 24), (4, 2), (19, 35), Causal.TOP_LEFT)
    assumed = Specialization(alignment=Alignment.EIGHT, lse=True)
    kernel = render(family, problem, a_config(family, problem), assumed)
    attention = load_module(kernel).attention
    q, k, v = make_inputs(problem, "bshd")
    for scale in (None, -0.5):
        out, lse = attention(q, k, v) if scale is None else attention(q, k, v, scale)
        expected_out, expected_lse = reference(problem, q, k, v, 40**-0.5 if scale is None else scale)
        torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=1e-5)
    out, lse = attention(q, k[:, :, :0], v[:, :, :0])
    assert torch.equal(out, torch.zeros(2, 4, 19, 24))
    assert torch.equal(lse, torch.full((2, 4, 19), -torch.inf))


@BY_FAMILY
@settings(max_examples=25)
@given(
    widths=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    heads=st.sampled_from(HEADS),
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    causal=st.sampled_from(list(Causal)),
    layout=st.sampled_from(LAYOUTS),
    seed=st.integers(0, 1000),
    scale=st.floats(0, 4),
)
def test_any_problem(
    family: Family,
    widths: tuple[int, int],
    heads: tuple[int, int],
    lengths: tuple[int, int],
    causal: Causal,
    layout: str,
    seed: int,
    scale: float,
) -> None:
    torch.manual_seed(seed)
    problem = make_problem(widths, heads, lengths, causal)
    config = a_config(family, problem, seed)
    check(Case(family, problem, config, layout, scale=scale), *make_inputs(problem, layout))
