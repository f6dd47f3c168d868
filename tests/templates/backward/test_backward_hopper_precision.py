"""Tests of the rounding errors of emulated Hopper backward kernels."""

import math
from typing import Any

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.expressions.nodes import NO_FUNCTIONS, Functions
from flashtune.core.kernel import Specialization
from flashtune.request.functions.tracing import trace
from flashtune.templates.backward_hopper.arguments import starts_at_lse
from flashtune.templates.backward_hopper.space import usual_config
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification.cases import Case, lengths_of
from flashtune.verification.gradients.head_sampling import sample_pairs
from flashtune.verification.gradients.inputs import given_values
from flashtune.verification.gradients.reference import Chosen, expect_gradients
from flashtune.verification.gradients.scores import once
from flashtune.verification.inputs.prepared import generator_of
from flashtune.verification.probes import Probe
from flashtune.verification.tolerance import worst_ratio
from tests.emulator.backward import as_array, emulate_backward
from tests.emulator.hardware import Tensor
from tests.interpreter.test_flex_attention import CASES
from tests.templates.backward.test_backward_hopper_emulated import SCALE, dq_of, row_places

FAMILY = find_family("backward_hopper")
LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
SHAPE = "heads=32,kv_heads=8,seqlen_q=2048,seqlen_kv=2048,backward"


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the emulator round in conversions to 16-bit types."""

    def to(self: Tensor, dtype: object, bitcast: bool = False) -> Tensor:
        low = None if bitcast else LOW.get(str(dtype))
        return self if low is None else Tensor(torch.tensor(self.values).to(low).double().numpy())

    monkeypatch.setattr(Tensor, "to", to)


# Fp16 kernels of these problems were wrong on an H200. Each has a probe, queries and keys.
FP16 = (
    ("head_dim=256,sinks", Probe.SINK, 65, 127),
    ("head_dim=160,causal=bottom_right,sinks", Probe.SINK, 65, 127),
    ("head_dim=160,causal=bottom_right,window_left=1023", Probe.FAR_BELOW, 65, 1056),
    ("head_dim=192,softcap", Probe.RISING, 128, 256),
    ("head_dim=64,softcap", Probe.RISING, 256, 512),
    ("head_dim=64,softcap,sinks", Probe.SINK, 129, 255),
)


def worst_ratio_of(
    text: str, probe: Probe, queries: int, keys: int, seed: int, functions: Functions = NO_FUNCTIONS
) -> float:
    """Returns the largest ratio of error to tolerance of all gradients of an emulated launch."""
    problem = testing.problem(f"{SHAPE},{text}", functions=functions)
    config = usual_config(problem)
    kernel = render(FAMILY, problem, config, Specialization())
    small = msgspec.structs.replace(problem, heads=2, kv_heads=2, seqlen_q=queries, seqlen_kv=keys)
    case = Case(problem=small, probe=probe, block=config.block_m, scale=small.head_dim**-0.5)
    generator = generator_of(case, torch.device("cpu"), seed)
    inputs = given_values(case, lengths_of(case), generator, dlse=False)
    pairs = sample_pairs(small, generator)
    assert pairs.are_all(small)
    expected = expect_gradients(small, inputs, Chosen(pairs, torch.arange(queries)))
    out, lse = expected.out.reshape(inputs.dout.shape), expected.lse.reshape(inputs.dout.shape[:3])
    places = row_places(small, config.block_m, None, 0)
    softcap = inputs.side.softcap or 0.0
    first = (softcap - lse) * math.log2(math.e)
    if starts_at_lse(small, config):
        first = -lse / case.scale
    stats = torch.zeros(small.batch * small.heads, 2, places[1] * config.block_m, dtype=torch.float64)
    stats[:, 0] = -math.inf
    stats[:, 0, places[0]] = first.flatten(0, 1).double()
    stats[:, 1, places[0]] = -(out.float() * inputs.dout.float()).sum(-1).flatten(0, 1).double()
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout, stats, inputs.k, inputs.v)
    names = ("q", "k", "v", "dout", "workspace_0", "dk", "dv")
    memory = {name: tensor.double().flatten().numpy() for name, tensor in zip(names, tensors, strict=True)}
    like: list[Any] = [inputs.q, inputs.k, inputs.v, out, inputs.dout, inputs.q, inputs.k, inputs.v]
    like += [torch.empty(small.heads)] if small.sinks else []
    planned = tuple(torch.empty_like(tensor, device="meta") for tensor in like)
    rows = torch.empty(stats.flatten(0, 1).shape, device="meta")
    numbers = (softcap,) if small.softcap else ()
    captured = tuple(as_array(tensor) for tensor in inputs.side.tensors) if functions else ()
    sums = emulate_backward(kernel, planned, memory, rows, case.scale, 1, 2, captured, numbers)
    made = {"dq": dq_of(sums, small, config, places) * (case.scale / SCALE)}
    made |= {name: torch.from_numpy(memory[name]) for name in ("dk", "dv")}
    return max(
        worst_ratio(once(rows.reshape(gradient.exact.shape), small), gradient.exact, gradient.allowed).item()
        for name, rows in made.items()
        for gradient in (expected.gradients[name],)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(("text", "probe", "queries", "keys"), FP16)
def test_small_probabilities_keep_their_bits_in_fp16(
    text: str, probe: Probe, queries: int, keys: int
) -> None:
    assert max(worst_ratio_of(f"{text},dtype=fp16", probe, queries, keys, seed) for seed in range(2)) < 0.9


@pytest.mark.usefixtures("rounding")
def test_verification_finds_fp16_probabilities_that_lose_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    context = type(FAMILY).context
    monkeypatch.setattr(type(FAMILY), "context", lambda *call: {**context(*call), "low_p": False})
    for text, probe, queries, keys in (*FP16[:2], FP16[-1]):
        assert worst_ratio_of(f"{text},dtype=fp16", probe, queries, keys, 0) > 2.0


@pytest.mark.slow
@pytest.mark.usefixtures("rounding")
def test_the_tolerance_has_the_rounding_of_probabilities_in_bf16() -> None:
    text = "head_dim=160,causal=bottom_right,sinks,dtype=bf16"
    assert max(worst_ratio_of(text, Probe.FAR_BELOW, 129, 191, seed) for seed in range(3)) < 0.7


@pytest.mark.slow
@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("probe", [Probe.RISING, Probe.RANDOM])
@pytest.mark.parametrize("name", ["softcap and window", "gate", "temperature", "alibi"])
@pytest.mark.parametrize("dtype", LOW)
def test_roundings_of_functions_are_within_the_tolerance(name: str, probe: Probe, dtype: str) -> None:
    functions = trace(CASES[name].score, CASES[name].mask).functions
    for head_dim in (64, 128):
        text = f"head_dim={head_dim},dtype={dtype}"
        assert max(worst_ratio_of(text, probe, 128, 256, seed, functions) for seed in range(2)) < 0.9


@pytest.mark.usefixtures("rounding")
def test_the_tolerance_has_the_error_of_delta_times_large_derivatives() -> None:
    number = torch.ones((), dtype=torch.int32)
    functions = trace(lambda s, b, h, q, k: s * number, None).functions
    # Of this seed, the captured number is 145.
    assert worst_ratio_of("head_dim=64,dtype=fp16", Probe.STEEP, 128, 256, 9, functions) < 0.9
