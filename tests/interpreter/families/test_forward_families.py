"""Tests of both loop orders of the forward pass in the interpreter, against float64."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from flashtune.core.config import Axis, AxisValue, Config
from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.core.problem import Causal, Problem
from flashtune.launch.compilation import interpreting
from flashtune.templates.family import Family
from flashtune.templates.registry import find_family
from tests.interpreter.families.kernel_calls import TARGET, Call, a_problem, check, run

# Those that compute plain attention in the interpreter.
FORWARD = [find_family(name) for name in ("forward_kv_outer", "forward_q_outer")]
BY_FAMILY = pytest.mark.parametrize("family", FORWARD, ids=lambda family: family.name)
LAYOUTS = ["bhsd", "bshd", "packed", "padded", "offset", "shared"]
# The interpreter takes milliseconds for every block, so blocks are few; warps mean nothing to it.
SMALL = {"block_m": (16, 32), "block_n": (16, 32), "num_warps": (4,), "num_stages": (1, 2)}

# Head dims, head dims of values, (query heads, KV heads), (queries, keys).
WIDTHS = [(8, 8), (16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (160, 160)]
WIDTHS += [(192, 192), (256, 256), (64, 40), (192, 128), (16, 96), (1, 3)]
HEADS = [(1, 1), (2, 2), (4, 2), (3, 1)]
LENGTHS = [(1, 1), (1, 37), (37, 1), (33, 33), (32, 32), (50, 20), (20, 50), (17, 16), (64, 48)]


class Case(NamedTuple):
    """One problem, one config, and the strides of the tensors."""

    family: Family
    problem: Problem
    config: Config
    layout: str = "bhsd"
    index_bits: int = 32
    lse: bool = True
    scale: float = 0.25

    def __str__(self) -> str:
        lse = "lse" if self.lse else "no_lse"
        words = (self.family.name, self.problem.key, self.layout, self.index_bits, lse)
        return "-".join(map(str, (*words, self.config.label().replace(" ", ","))))

    def check(self) -> None:
        call = make_call(self.problem, self.layout, self.scale)
        check(self.family, self.problem, call, self.config, index_bits=self.index_bits, lse=self.lse)


def make_problem(
    widths: tuple[int, int], heads: tuple[int, int], lengths: tuple[int, int], causal: Causal
) -> Problem:
    return a_problem(
        head_dim=widths[0],
        value_head_dim=widths[1],
        heads=heads[0],
        kv_heads=heads[1],
        seqlen_q=lengths[0],
        seqlen_kv=lengths[1],
        causal=causal,
    )


def make_call(problem: Problem, layout: str = "bhsd", scale: float = 0.25) -> Call:
    def normal(heads: int, seqlen: int, width: int) -> Tensor:
        """Normal numbers seen as [batch, heads, seqlen, width] through one of many memory layouts."""
        batch = problem.batch
        if layout == "bshd":
            return torch.randn(batch, seqlen, heads, width).transpose(1, 2)
        if layout == "packed":  # one of three, as a fused projection leaves them
            return torch.randn(batch, seqlen, 3, heads, width)[:, :, 1].transpose(1, 2)
        if layout == "padded":  # a stride that is no multiple of anything
            return torch.randn(batch, heads, seqlen, width + 3)[..., :width]
        if layout == "offset":  # a pointer that is on no 16-byte border
            return torch.randn(batch * heads * seqlen * width + 1)[1:].view(batch, heads, seqlen, width)
        if layout == "shared":  # one sequence for the whole batch
            return torch.randn(1, heads, seqlen, width).expand(batch, heads, seqlen, width)
        return torch.randn(batch, heads, seqlen, width)

    q = normal(problem.heads, problem.seqlen_q, problem.head_dim)
    k = normal(problem.kv_heads, problem.seqlen_kv, problem.head_dim)
    v = normal(problem.kv_heads, problem.seqlen_kv, problem.value_head_dim)
    return Call(q, k, v, NO_EXTRA_INPUTS, scale)


def a_config(family: Family, problem: Problem, pick: random.Random) -> Config:
    """A small config of the space, with independently drawn axes."""

    def small(axis: Axis) -> AxisValue:
        values = [value for value in axis.values if value in SMALL.get(axis.name, axis.values)] or axis.values
        return pick.choice(list(values))

    return family.space(problem, TARGET).choose(small)


def sampled_cases(family: Family, count: int) -> Iterator[Case]:
    """Cases in which every value of every dimension turns up, in shuffled company."""
    pick = random.Random(family.name)

    def dealt(values: Sequence[Any]) -> Iterator[Any]:
        while True:
            yield from pick.sample(values, len(values))

    dimensions: list[Sequence[Any]] = [WIDTHS, HEADS, LENGTHS, list(Causal), LAYOUTS]
    dimensions += [[32, 64], [True, False], [0.25, 2.0, 0.0]]
    for row in itertools.islice(zip(*map(dealt, dimensions), strict=False), count):
        problem = make_problem(*row[:4])
        yield Case(family, problem, a_config(family, problem, pick), *row[4:])


@pytest.mark.tritons
def test_interpreter_is_enabled() -> None:
    assert interpreting()


SAMPLED = [case for family in FORWARD for case in sampled_cases(family, 54)]


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_sampled_problems_and_configs(case: Case) -> None:
    torch.manual_seed(0)
    case.check()


@BY_FAMILY
def test_every_axis_value_alone(family: Family) -> None:
    """The first config with each value of each axis, on a causal problem with ragged tiles."""
    torch.manual_seed(0)
    problem = make_problem((96, 40), (2, 1), (37, 50), Causal.BOTTOM_RIGHT)
    call = make_call(problem)
    space = family.space(problem, TARGET)
    first = {axis.name: SMALL.get(axis.name, axis.values)[0] for axis in space.axes}
    # Conditional axes are reached through the loads that they hang on.
    loads = [value for axis in space.axes if axis.name == "loads" for value in axis.values[1:]]
    for base, axis in itertools.product([first, *({**first, "loads": value} for value in loads)], space.axes):
        for value in SMALL.get(axis.name, axis.values)[1:]:
            check(family, problem, call, space.build({**base, axis.name: value}))


@pytest.mark.sampled
@BY_FAMILY
@pytest.mark.parametrize("causal", list(Causal))
def test_padding_does_not_affect_the_maximum(family: Family, causal: Causal) -> None:
    """If all logits are far below zero, an unmasked zero of the padding would have all probability."""
    torch.manual_seed(0)
    problem = make_problem((24, 24), (2, 2), (19, 21), causal)
    call = make_call(problem, scale=8.0)
    call = call._replace(q=call.q.abs(), k=-call.k.abs())
    for seed in range(4):
        check(family, problem, call, a_config(family, problem, random.Random(seed)))


@pytest.mark.tritons
@BY_FAMILY
def test_queries_without_visible_keys(family: Family) -> None:
    torch.manual_seed(0)
    problem = make_problem((16, 16), (2, 1), (50, 18), Causal.BOTTOM_RIGHT)
    out, lse = run(family, problem, make_call(problem), a_config(family, problem, random.Random(0)))
    assert torch.equal(out[:, :, :32], torch.zeros(2, 2, 32, 16))
    assert torch.equal(lse[:, :, :32], torch.full((2, 2, 32), -torch.inf))
    assert torch.isfinite(lse[:, :, 32:]).all()
