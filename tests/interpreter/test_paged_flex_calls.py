"""Calls of `attention_paged` with functions in the interpreter: results, plans, and refused arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.core.errors import ProblemError
from tests.problems.features import KEYS, QUERIES, paged, starts

HEADS = 4
SLOPES, LENGTHS = torch.rand(HEADS), torch.tensor([5, 9, 3, 30, 20])
BOTH: dict[str, Any] = {"cu_seqlens_q": starts(QUERIES), "max_seqlen_q": max(QUERIES)}


def alibi(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return s - SLOPES[h] * (q - k)


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q - k < LENGTHS[b]


def a_call(tokens: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    torch.manual_seed(0)
    shape = (tokens, HEADS, 32) if tokens else (len(KEYS), 3, HEADS, 32)
    cache = paged()
    return torch.randn(shape).to(dtype), *(tensor.to(dtype) for tensor in cache[:2]), *cache[2:]


def agrees(arguments: tuple[Any, ...], **options: Any) -> None:
    out, lse = flashtune.attention_paged(*arguments, return_lse=True, **options)
    reference = testing.reference(testing.paged_inputs(*arguments, **options))
    torch.testing.assert_close(out.double(), reference.out.exact, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), reference.lse.exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_decoding_and_prefill(causal: bool) -> None:
    options: dict[str, Any]
    for options in ({"score_mod": alibi}, {"mask_mod": window}, {"score_mod": alibi, "mask_mod": window}):
        agrees(a_call(), causal=causal, **options)
        agrees(a_call(sum(QUERIES)), causal=causal, **BOTH, **options)


def test_functions_replace_alibi_and_windows() -> None:
    arguments = a_call()
    own = flashtune.attention_paged(*arguments, alibi_slopes=SLOPES, window=(7, 0))
    by_functions = flashtune.attention_paged(
        *arguments, score_mod=alibi, mask_mod=lambda b, h, q, k: q - k < 8
    )
    torch.testing.assert_close(by_functions, own, atol=1e-5, rtol=1e-5)


def test_double_precision_is_computed_without_a_kernel() -> None:
    arguments = a_call(dtype=torch.float64)
    functions: dict[str, Any] = {"score_mod": alibi, "mask_mod": window}
    out = flashtune.attention_paged(*arguments, **functions)
    single = flashtune.attention_paged(*a_call(), **functions)
    torch.testing.assert_close(out.float(), single, atol=1e-5, rtol=1e-5)
    functions |= BOTH
    packed = flashtune.attention_paged(*a_call(sum(QUERIES), torch.float64), **functions)
    single = flashtune.attention_paged(*a_call(sum(QUERIES)), **functions)
    torch.testing.assert_close(packed.float(), single, atol=1e-5, rtol=1e-5)


def test_captured_values_of_plans_may_change() -> None:
    arguments = a_call()
    slopes = SLOPES.clone()
    functions: dict[str, Any] = {"score_mod": lambda s, b, h, q, k: s - slopes[h] * (q - k)}
    plan = flashtune.plan_paged(*arguments, **functions)
    assert "functions=" in repr(plan)
    first = plan(*arguments)
    slopes.mul_(3)
    assert not torch.allclose(plan(*arguments), first)
    assert torch.equal(plan(*arguments), flashtune.attention_paged(*arguments, **functions))


def test_functions_that_change_nothing_have_no_effect() -> None:
    problem = flashtune.explain_paged(*a_call(), score_mod=lambda s, b, h, q, k: s).problem
    assert not problem.functions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": "top_left"}, "causal='top_left' does not go with score_mod or mask_mod"),
        ({"shared_prefix": 16}, "shared_prefix does not go with score_mod or mask_mod"),
        ({"softcap": 2.0}, r"\(functions, pages, softcap\).*leave out functions"),
        ({"batch_invariant": True}, "leave out batch_invariant"),
        ({"score_mod": 3}, "score_mod"),
        ({"mask_mod": lambda b, h, q, k: k + 1}, "mask_mod"),
    ],
    ids=["top left", "shared prefix", "softcap", "batch invariant", "no function", "no bool"],
)
def test_refused_arguments(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ProblemError, match=words):
        flashtune.attention_paged(*a_call(), **{"mask_mod": window, **options})


def test_captured_tensors_have_an_element_for_each_sequence() -> None:
    with pytest.raises(ProblemError, match="pass at least 5 elements"):
        flashtune.attention_paged(*a_call(), mask_mod=lambda b, h, q, k: LENGTHS[:2][b] > k)
