"""Gradients of `flex_attention` in the interpreter, against torch's autograd in float64."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flashtune
from flashtune.core.errors import ProblemError
from flashtune.core.expressions.nodes import Functions, Kind
from flashtune.core.expressions.text import functions_text
from flashtune.core.features.functions import integers_of
from flashtune.core.features.records import TABLES, ExtraInputs
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Direction, Problem
from flashtune.core.target import find_target
from flashtune.request.call import dense_call
from flashtune.request.functions.tracing import trace
from flashtune.runtime.torch_ops import attend
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel, check_rendered
from flashtune.verification.gradients import head_sampling
from flashtune.verification.inputs.side_inputs import make_side
from flashtune.verification.lengths import equal_lengths
from flashtune.verification.probes import Probe
from tests.interpreter.families.kernel_calls import small_config
from tests.interpreter.test_flex_attention import (
    BATCH,
    CASES,
    HEADS,
    KEYS,
    QUERIES,
    WIDTH,
    a_problem,
    inputs,
    mask_of,
)
from tests.problems.random_functions import FLOATS, INTS, random_functions, random_tables
from tests.support.fuzzing import fuzz_count

SPLIT = find_family("backward_split")
SHARES = torch.rand(HEADS)
Score = Callable[..., Any]


def every(function: Any, first: tuple[int | None, ...]) -> Any:
    """Returns a function of numbers as one of all places."""
    for axis in (3, 2, 1, 0):
        places = tuple(0 if place == axis else None for place in range(4))
        function = torch.vmap(function, (*first, *places))
    return function


def dense(q: Tensor, k: Tensor, v: Tensor, score: Any, mask: Any) -> Tensor:
    """Returns unfused attention with the functions themselves."""
    group = q.shape[1] // k.shape[1]
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    places = [torch.arange(size) for size in scores.shape]
    if score is not None:
        scores = every(score, (0,))(scores, *places).to(scores.dtype)
    if mask is not None:
        scores = torch.where(every(mask.mask_mod, ())(*places), scores, -torch.inf)
    largest = scores.detach().amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(largest == -torch.inf, 0.0, largest))
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total) @ v


def gradients(function: Any, tensors: list[Tensor], *arguments: Any, **options: Any) -> tuple[Tensor, ...]:
    """Returns gradients of three inputs and of captured tensors. Those that have no effect are zeros."""
    out = function(*tensors[:3], *arguments, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    result: tuple[Tensor, ...] = torch.autograd.grad(
        out, tensors, dout, allow_unused=True, materialize_grads=True
    )
    return result


def trained(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    return [tensor.detach().to(dtype or tensor.dtype).requires_grad_() for tensor in tensors]


def close(own: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for gradient, other in zip(own, exact, strict=True):
        low = gradient.dtype is torch.bfloat16
        torch.testing.assert_close(
            gradient.double(),
            other,
            atol=1e-4 * max(1.0, float(other.abs().max())),
            # One rounding of the sum.
            rtol=2**-8 if low else 1e-4,
        )


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str) -> None:
    case, tensors = CASES[name], inputs(2 if name == "documents" else HEADS)
    if name == "alibi":
        tensors[0] = tensors[0].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    arguments = case.score, mask_of(case)
    exact = gradients(dense, trained(tensors, torch.float64), *arguments)
    close(gradients(flashtune.flex_attention, trained(tensors), *arguments, enable_gqa=True), exact)


def buckets(t: Tensor) -> Score:
    """Returns biases of buckets of distances. The index of a bucket is computed from a logarithm."""

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        distance = (q - k).abs()
        large = 8 + (torch.log(distance.to(torch.float32) / 8 + 1e-9) * (8 / math.log(16))).to(torch.int32)
        return s + t[h, torch.where(distance < 8, distance, large.clamp(max=15))]

    return score


def tables() -> dict[str, tuple[tuple[int, ...], Callable[[Tensor], Score]]]:
    """Returns shapes of captured tensors and functions of them."""
    return {
        "slopes": ((HEADS,), lambda t: lambda s, b, h, q, k: s + t[h] * (k - q) * 0.02),
        "relative": ((HEADS, 65), lambda t: lambda s, b, h, q, k: s + t[h, (q - k).clamp(-32, 32) + 32]),
        "gates": ((BATCH, QUERIES), lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[b, q])),
        "head gates": ((HEADS,), lambda t: lambda s, b, h, q, k: s * torch.sigmoid(t[h])),
        "of keys": ((HEADS, KEYS), lambda t: lambda s, b, h, q, k: s * t[h, k]),
        "number": ((), lambda t: lambda s, b, h, q, k: t * torch.tanh(s / t)),
        "bias": ((1, HEADS, QUERIES, KEYS), lambda t: lambda s, b, h, q, k: s + t[0, h, q, k]),
        "shared bias": ((QUERIES, KEYS), lambda t: lambda s, b, h, q, k: s + t[q, k] * t[q, 0]),
        "of the score": ((HEADS, 9), lambda t: lambda s, b, h, q, k: s + t[h, (4 * s).to(torch.int32) % 9]),
        "buckets": ((HEADS, 16), buckets),
    }


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", tables())
def test_gradients_of_captured_tensors(
    name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, function = tables()[name]
    torch.manual_seed(2)
    table = torch.rand(shape) + 0.5
    # The last mask shows nothing to some rows.
    mask = mask_of(CASES["hidden by both" if len(shape) % 2 else "nothing visible"])
    if deterministic:
        table = table.bfloat16()
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    tensors = trained([*inputs(2), table])
    own = gradients(flashtune.flex_attention, tensors, function(tensors[3]), mask, enable_gqa=True)
    assert own[3].shape == shape
    assert own[3].dtype is table.dtype
    wide = trained(tensors, torch.float64)
    close(own, gradients(dense, wide, function(wide[3]), mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(min=0),
        lambda x: x.clamp(max=0),
        lambda x: x.clamp(0, 1),
        torch.relu,
        torch.nn.functional.softplus,
    ],
)
def test_gradients_at_bounds_are_those_of_torch(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    tensors = [*trained(inputs(), dtype), torch.zeros(HEADS, requires_grad=True)]

    def score(t: Tensor) -> Score:
        return lambda s, b, h, q, k: s + function(t[h]) * k * 0.1

    own = gradients(flashtune.flex_attention, tensors, score(tensors[3]))
    wide = trained(tensors, torch.float64)
    close(own, gradients(dense, wide, score(wide[3]), None))


def test_only_a_captured_tensor_requires_grad() -> None:
    q, k, v = inputs()
    table = torch.rand(HEADS, requires_grad=True)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s * torch.exp(table)[h]

    flashtune.flex_attention(q, k, v, score).sum().backward()
    own = table.grad
    table.grad = None
    dense(q.double(), k.double(), v.double(), score, None).sum().backward()
    assert own is not None
    torch.testing.assert_close(own, table.grad, atol=1e-4, rtol=1e-4)


def test_counted_calls_have_the_same_gradients() -> None:
    """Dispatch modes see operators, which return the gradients of captured tensors as one."""
    _, function = tables()["relative"]
    tensors = trained([*inputs(), torch.rand(HEADS, 65)])
    own = gradients(flashtune.flex_attention, tensors, function(tensors[3]), None)
    with FlopCounterMode(display=False) as counter:
        again = gradients(flashtune.flex_attention, tensors, function(tensors[3]), None)
    assert counter.get_total_flops() > 0
    close(again, tuple(gradient.double() for gradient in own))


def test_second_derivatives_raise_an_error() -> None:
    q, k, v = trained(inputs())
    (first,) = torch.autograd.grad(
        flashtune.flex_attention(q, k, v, CASES["gate"].score).sum(), q, create_graph=True
    )
    with pytest.raises(ProblemError, match="differentiated twice"):
        first.sum().backward()


@pytest.mark.parametrize("seed", range(fuzz_count(12, 500)))
def test_random_functions(seed: int) -> None:
    """Both passes of random expressions differ from float64 by no more than float32 autograd does."""
    functions, ints, order = random_functions(seed, 4 + seed % 8)
    torch.manual_seed(seed)
    tensors = [torch.randn(BATCH, HEADS, length, WIDTH) for length in (35, 45, 45)]
    captured = [random_tables()[place] for place in order]

    def attention(dtype: torch.dtype, prefer: str) -> tuple[Tensor, ...]:
        q, k, v, *own = trained([*tensors, *captured])
        side: dict[str, Any] = dict(zip(TABLES, own, strict=False))
        integers = integers_of([INTS[place] for place in ints], own)
        if ints or own:
            side["function_ints"] = torch.tensor(integers or [0], dtype=torch.int32)
        if functions.has_floats:
            side["function_floats"] = torch.tensor(FLOATS)
        call = dense_call(q.to(dtype), k.to(dtype), v.to(dtype), prefer=prefer)
        options = call.options._replace(functions=functions_text(functions) if functions else "")
        out = attend(call._replace(options=options, side=ExtraInputs(**side)))
        assert isinstance(out, Tensor)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        found = torch.autograd.grad(out, (q, k, v, *own), dout, allow_unused=True, materialize_grads=True)
        return out.detach(), *found

    for own, exact in zip(
        attention(torch.float32, "generated"), attention(torch.float64, "fastest"), strict=True
    ):
        assert exact.isfinite().all()
        size = max(1.0, float(exact.abs().max()))
        torch.testing.assert_close(own.double(), exact.double(), atol=2e-4 * size, rtol=1e-3)


def backward_problem(name: str, **changes: Any) -> Problem:
    problem = a_problem(name)
    floats = [place for place, table in enumerate(problem.functions.tables) if table.dtype.kind is Kind.FLOAT]
    functions: Functions = problem.functions.with_gradients(floats)
    return msgspec.structs.replace(problem, direction=Direction.BACKWARD, functions=functions, **changes)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_kernels_pass_the_verification(name: str, deterministic: bool) -> None:
    problem = backward_problem(name, deterministic=deterministic)
    target, device = find_target("nvidia-h200"), torch.device("cpu")
    config = small_config(SPLIT, problem.key, (16, 32))
    verdict = check_kernel(SPLIT, problem, config, Specialization(lse=True), target, device, Level.QUICK)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    "score",
    [
        lambda s, b, h, q, k: s - torch.sqrt((q - k).abs().to(torch.float32)),
        lambda s, b, h, q, k: s * torch.sqrt(SHARES[h]),
        lambda s, b, h, q, k: s + 200.0,
    ],
    ids=["root of zero", "root of a tensor", "large scores"],
)
def test_a_sample_of_heads_passes_the_verification(score: Score, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_sampling, "MAX_SCORES", {"cpu": 1})
    functions = trace(score, None).functions
    changes = {"direction": Direction.BACKWARD, "batch": 4, "functions": functions}
    problem = msgspec.structs.replace(a_problem("alibi"), **changes)
    target, device = find_target("nvidia-h200"), torch.device("cpu")
    config = small_config(SPLIT, problem.key, (16, 32))
    verdict = check_kernel(SPLIT, problem, config, Specialization(lse=True), target, device, Level.QUICK)
    assert verdict.passed, verdict


def test_captured_tensors_of_a_case_depend_on_its_seed_alone() -> None:
    problem = backward_problem("alibi")

    def drawn(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        table = make_side(Probe.RANDOM, problem, equal_lengths(problem), 16, generator).table_0
        assert table is not None
        return table

    first = drawn(1)
    assert torch.equal(drawn(1), first)
    assert not torch.equal(drawn(2), first)


# A text of a kernel and another one in its place, by the name of the case.
MISTAKES = (
    ("causal", "visible &= function_mask", "visible &= function_mask | True"),
    ("causal by score", "visible = function_mask", "visible = function_mask | True"),
    ("alibi", "element_0 += tl.sum(change, 1)", "element_0 = tl.sum(change, 1)"),
    ("alibi", "gradient_0 + scalar_1", "gradient_0 + 0 * scalar_1"),
    ("alibi", "mask=numbers < table_numbers", "mask=numbers < table_numbers - 1"),
    ("relative bias", "ds * (1.0)", "ds * (1.001)"),
    ("relative bias", "scalar_1 * numbers_0_1", "scalar_1 * (numbers_0_1 - 1)"),
    ("relative bias", "mask=change != 0.0", "mask=change > 0.0"),
    ("softcap and window", "function_mask |= is_full", "function_mask |= True"),
    ("softcap and window", "ds * steepness", "ds * (steepness * 1.001)"),
    ("gate", "steepness = pair_22", "steepness = 1.0"),
    ("gate", "element_0, mask=query_exists", "element_0, mask=queries < seqlen_q - 1"),
    ("temperature", "tl.sum(element_0)", "tl.max(element_0)"),
)


@pytest.mark.parametrize(("name", "text", "wrong"), MISTAKES)
def test_wrong_kernels_are_rejected(name: str, text: str, wrong: str) -> None:
    problem = backward_problem(name)
    config = small_config(SPLIT, name, (16, 32), split_masked_loop=True)
    kernel = render(SPLIT, problem, config, Specialization())
    assert text in kernel.source, kernel.source
    patched = msgspec.structs.replace(kernel, source=kernel.source.replace(text, wrong))
    target, device = find_target("nvidia-h200"), torch.device("cpu")
    assert not check_rendered(patched, problem, config, target, device, Level.QUICK).passed
