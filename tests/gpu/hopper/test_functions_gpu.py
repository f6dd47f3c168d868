"""GPU tests of score and mask functions in `forward_hopper` and `backward_hopper`."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention, noop_mask

import flashtune
from flashtune.core.expressions.derivative import derivatives
from flashtune.core.expressions.nodes import Kind
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Dtype, Problem
from flashtune.core.target import device_target
from flashtune.request.functions.tracing import trace
from flashtune.runtime import prepare
from flashtune.templates.common.args.gluon_table_gradients import can_add_elements
from flashtune.templates.registry import find_family
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel
from tests.gpu.marks import ON_HOPPER
from tests.interpreter.test_flex_attention import CASES
from tests.problems.hopper import FAMILY
from tests.problems.random_conditions import mask_case
from tests.problems.random_functions import UNDECIDED, random_functions
from tests.support.fuzzing import fuzz_count

pytestmark = [pytest.mark.gpu, ON_HOPPER]

HEADS = 4
SEEDS = [seed for seed in range(fuzz_count(20, 500)) if seed not in UNDECIDED]
BACKWARD = find_family("backward_hopper")


def verdict_of(functions: Any, head_dim: int, block_mask: int, family: Any = FAMILY, **changes: Any) -> Any:
    problem = Problem(
        head_dim=head_dim, value_head_dim=head_dim, heads=HEADS, kv_heads=2, batch=2, seqlen_q=1000,
        seqlen_kv=1300, functions=functions, block_mask=block_mask, direction=family.direction,
        **{"dtype": Dtype.BF16, **changes},
    )  # fmt: skip
    target, device = device_target(), torch.device("cuda", 0)
    assert family.supports(problem, target) is None
    config = family.default(problem, target)
    return check_kernel(family, problem, config, Specialization(lse=True), target, device, Level.QUICK)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", CASES)
def test_kernels_pass_the_verification(name: str, head_dim: int) -> None:
    case = CASES[name]
    functions = trace(case.score, case.mask).functions
    verdict = verdict_of(functions, head_dim, 128 if functions.mask >= 0 else 0)
    assert verdict.passed, verdict


@pytest.mark.parametrize("seed", SEEDS)
def test_random_functions_pass_the_verification(seed: int) -> None:
    functions, _, _ = random_functions(seed)
    verdict = verdict_of(functions, 64, 0)
    assert verdict.passed, verdict


@pytest.mark.parametrize("seed", range(fuzz_count(20, 500)))
def test_random_masks_pass_the_verification(seed: int) -> None:
    functions = mask_case(random.Random(seed), 1000, 1300, has_extremes=False).functions
    for family, block_mask in ((FAMILY, 128), (BACKWARD, 0)):
        verdict = verdict_of(functions, 128 if seed % 2 else 64, block_mask, family)
        assert verdict.passed, (family.name, verdict)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("name", CASES)
def test_gradients_pass_the_verification(name: str, head_dim: int, dtype: Dtype) -> None:
    functions = trace(CASES[name].score, CASES[name].mask).functions
    verdict = verdict_of(functions, head_dim, 0, BACKWARD, dtype=dtype)
    assert verdict.passed, verdict


TRAINED = ("alibi", "relative bias", "relative bias from the end", "gate", "temperature", "nested", "rows")


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_captured_tensors_pass_the_verification(name: str, head_dim: int, dtype: Dtype) -> None:
    functions = trace(CASES[name].score, CASES[name].mask).functions
    trained = [place for place, table in enumerate(functions.tables) if table.dtype.kind is Kind.FLOAT]
    verdict = verdict_of(functions.with_gradients(trained), head_dim, 0, BACKWARD, dtype=dtype)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", ["softcap and window", "temperature", "causal", "alibi"])
def test_deterministic_gradients_pass_the_verification(name: str) -> None:
    functions = trace(CASES[name].score, CASES[name].mask).functions
    verdict = verdict_of(functions, 128, 0, BACKWARD, deterministic=True)
    assert verdict.passed, verdict


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_random_functions_pass_the_verification(seed: int) -> None:
    functions, _, _ = random_functions(seed)
    functions = functions.with_gradients(range(len(functions.tables)))
    family = BACKWARD if can_add_elements(derivatives(functions)) else find_family("backward_split")
    verdict = verdict_of(functions, 128 if seed % 2 else 64, 0, family)
    assert verdict.passed, verdict


def pair_bias() -> Any:
    bias = torch.randn(HEADS, 2048, 2048, dtype=torch.float16, device="cuda")
    return lambda s, b, h, q, k: s + bias[h, q, k]


def factor() -> Any:
    number = torch.ones((), dtype=torch.int32, device="cuda")
    return lambda s, b, h, q, k: s * number


MEAN_ERRORS: dict[str, Callable[[], Any]] = {
    "silu": lambda: lambda s, b, h, q, k: torch.nn.functional.silu(s),
    "pair bias": pair_bias,
    "factor": factor,
    "hidden scores": lambda: lambda s, b, h, q, k: torch.where((s <= 1) & (q >= k), s, -torch.inf),
}


@pytest.fixture
def no_fallbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises failures of kernels."""

    def fail(failure: Exception, *_: object) -> None:
        raise failure

    monkeypatch.setattr(prepare, "warn_of_failure", fail)


@pytest.mark.usefixtures("no_fallbacks")
@pytest.mark.parametrize("name", MEAN_ERRORS)
def test_mean_errors_in_fp16_are_those_of_eager_attention(name: str) -> None:
    score, shape = MEAN_ERRORS[name](), (1, HEADS, 2048, 64)
    q, k, v, dout = (torch.randn(shape, dtype=torch.float16, device="cuda") for _ in range(4))
    mask = create_block_mask(noop_mask, 1, HEADS, 2048, 2048, device="cuda")

    def results(function: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = function(*leaves, score, mask)
        return out, *torch.autograd.grad(out, leaves, dout.to(dtype))

    leaf = q.clone().requires_grad_()
    backward = flashtune.explain_flex(leaf, k, v, score, mask).backward
    assert backward is not None
    assert backward.selection is not None
    assert backward.selection.record.family == BACKWARD.name
    exact, eager = results(flex_attention, torch.float64), results(flex_attention, torch.float16)
    # The bound of torch's own tests.
    for ours, theirs, right in zip(
        results(flashtune.flex_attention, torch.float16), eager, exact, strict=True
    ):
        assert (ours - right).abs().mean() <= 1.1 * (theirs - right).abs().mean()


@pytest.mark.usefixtures("no_fallbacks")
@pytest.mark.parametrize("order", ["bshd", "sbhd", "hbsd"])
def test_outputs_have_the_strides_of_torch(order: str) -> None:
    extents = dict(zip("bhsd", (2, HEADS, 1000, 64), strict=True))
    shapes = ([extents[dim] for dim in order], *[[*extents.values()]] * 3)
    memory, k, v, dout = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    q = memory.permute([*map(order.index, "bhsd")])
    slopes = torch.rand(HEADS, device="cuda")

    def results(function: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (q, k, v)]
        out = function(*leaves, lambda s, b, h, q, k: s - slopes[h] * (q - k).abs())
        return out, *torch.autograd.grad(out, leaves, dout.to(dtype))

    ours, exact = results(flashtune.flex_attention, torch.bfloat16), results(flex_attention, torch.float64)
    assert ours[0].stride() == exact[0].stride() == q.stride()
    for result, right in zip(ours, exact, strict=True):
        torch.testing.assert_close(result.double(), right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("queries", [1024, 777])
def test_calls_use_the_kernel(queries: int) -> None:
    device = torch.device("cuda", 0)
    q, k, v = (torch.randn(2, HEADS, queries, 64, dtype=torch.bfloat16, device=device) for _ in range(3))
    slopes = torch.rand(HEADS, device=device)
    documents = torch.arange(queries, device=device) // 100

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s - slopes[h] * (q - k).abs()

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (documents[q] == documents[k])

    mask = create_block_mask(visible, None, None, queries, queries, device=device)
    selection = flashtune.explain_flex(q, k, v, score, mask).selection
    assert selection is not None
    assert selection.record.family == FAMILY.name
    for _ in range(3):
        out, lse = flashtune.flex_attention(q, k, v, score, mask, return_lse=True)
        exact, exact_lse = flex_attention(q.double(), k.double(), v.double(), score, mask, return_lse=True)
        torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse.double(), exact_lse, atol=1e-3, rtol=1e-3)
        documents.copy_(torch.arange(queries, device=device) // 130)
        mask = create_block_mask(visible, None, None, queries, queries, device=device)
