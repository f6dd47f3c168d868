"""Tests in the interpreter of functions of keys in pages and of few queries, against float64."""

from typing import Any

import pytest
import torch

from flashtune.core.kernel import Specialization
from flashtune.core.problem import BlockLists, Causal, KvDtype, KvScale
from flashtune.templates.registry import find_family
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel
from tests.interpreter.families.kernel_calls import TARGET, a_problem, check, make_call, small_config
from tests.problems.function_cases import FUNCTIONS, HEADS

DECODE = find_family("decode_split_kv")
SCALED: dict[str, Any] = {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE}
CACHES: dict[str, dict[str, Any]] = {
    "small pages": {"page_size": 1},
    "pages": {"page_size": 16},
    "packed": {"page_size": 16, "packed": 75},
    "large pages": {"page_size": 64},
    "eight bits": {"page_size": 16, "packed": 75, **SCALED},
    "eight bits of heads": {"page_size": 64, "kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.HEAD},
}


@pytest.mark.sampled(every=8)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("family", ["forward_masked", "decode_split_kv"])
def test_results(family: str, splits: int, name: str, causal: Causal, cache: str) -> None:
    torch.manual_seed(0)
    shape = {"heads": HEADS, "kv_heads": 2, "causal": causal, "functions": FUNCTIONS[name]}
    problem = a_problem(**shape, **CACHES[cache])
    found = find_family(family)
    check(found, problem, make_call(problem), small_config(found, name + cache, num_splits=splits))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("lists", BlockLists)
def test_decoded_blocks_of_lists(lists: BlockLists, name: str) -> None:
    torch.manual_seed(0)
    heads = {"heads": HEADS, "kv_heads": HEADS if lists is BlockLists.HEAD else 2, "block_lists": lists}
    for queries, block in ((1, 64), (16, 128)):
        shape = {"seqlen_q": queries, "seqlen_kv": 700, "block_mask": block, **heads}
        problem = a_problem(**shape, functions=FUNCTIONS[name])
        for splits in (1, 5):
            check(DECODE, problem, make_call(problem), small_config(DECODE, name, num_splits=splits))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("cache", ["pages", "packed"])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("family", ["forward_masked", "decode_split_kv"])
def test_kernels_pass_the_verification(family: str, name: str, cache: str) -> None:
    found, shape = find_family(family), {"heads": HEADS, "kv_heads": 2, "causal": Causal.BOTTOM_RIGHT}
    problem = a_problem(**shape, **CACHES[cache], functions=FUNCTIONS[name])
    config = small_config(found, name, num_splits=2)
    verdict = check_kernel(found, problem, config, Specialization(), TARGET, torch.device("cpu"), Level.QUICK)
    assert verdict.passed, verdict


@pytest.mark.parametrize("family", ["forward_masked", "decode_split_kv"])
@pytest.mark.parametrize(
    "features",
    [{"page_size": 0}, {"page_size": 16, "softcap": True}, {"page_size": 16, "causal": Causal.TOP_LEFT}],
    ids=str,
)
def test_other_features_are_refused(family: str, features: dict[str, Any]) -> None:
    shape = {"causal": Causal.BOTTOM_RIGHT, "functions": FUNCTIONS["window"], **features}
    reason = find_family(family).supports(a_problem(**shape), TARGET)
    assert reason is not None
    assert "takes score and mask functions with" in reason
