"""Tests of the masked family in the interpreter with keys that are split among programs, against float64."""

from typing import Any

import pytest
import torch

from flashtune.core.errors import KernelError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Causal, KvDtype, KvScale
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.interpreter.families.kernel_calls import a_problem, check, make_call, run, small_config, standalone
from tests.problems.function_cases import FUNCTIONS

MASKED = find_family("forward_masked")
SCALED = {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.PAGE}
FEATURES: list[dict[str, Any]] = [
    {"softcap": True, "sinks": True},
    {"window_left": 50},
    {"window_left": 65, "window_right": 40},
    {"window_left": 40, "sink_tokens": 35, "kv_lengths": True, "batch": 3, "sinks": True},
    {"window_left": 33, "sink_tokens": 4, "prefix": True, "kv_lengths": True, "batch": 4},
    {"chunk": 48, "prefix": True, "sink_tokens": 70},
    {"prefix": True, "alibi": True},
    {"packed": 75},
    {"packed": 75, "page_size": 16, "window_left": 20},
    {"page_size": 1, "sinks": True},
    {"page_size": 64, "window_left": 30, "sink_tokens": 20},
    {"packed": 75, "page_size": 16, **SCALED},
]
DENSE_FUNCTIONS = "relative bias", "window by scores", "sequences"


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("features", FEATURES, ids="-".join)
@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("split_masked_loop", [True, False])
# Some tiles have fewer blocks than splits.
@pytest.mark.parametrize("splits", [2, 5, 13])
def test_features(splits: int, split_masked_loop: bool, causal: Causal, features: dict[str, Any]) -> None:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"num_splits": splits, "split_masked_loop": split_masked_loop}
    lengths = [(35, 53)] if "packed" in features or "page_size" in features else [(35, 151), (70, 33)]
    for queries, keys in lengths:
        problem = a_problem(seqlen_q=queries, seqlen_kv=keys, **features, causal=causal)
        check(MASKED, problem, make_call(problem), small_config(MASKED, f"{splits}", (16, 16), **fields))


@pytest.mark.parametrize("name", DENSE_FUNCTIONS)
def test_functions_of_dense_calls(name: str) -> None:
    torch.manual_seed(0)
    shape = {"heads": 4, "kv_heads": 2, "seqlen_q": 35, "seqlen_kv": 151, "functions": FUNCTIONS[name]}
    problem = a_problem(**shape)
    for splits in (2, 5):
        check(MASKED, problem, make_call(problem), small_config(MASKED, name, (16, 16), num_splits=splits))


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
def test_dense_calls_without_features_and_without_a_log_sum_exp(causal: Causal) -> None:
    torch.manual_seed(0)
    problem = a_problem(seqlen_q=20, seqlen_kv=1100, batch=1, causal=causal)
    call, config = make_call(problem), small_config(MASKED, "", (16, 64), num_splits=4)
    check(MASKED, problem, call, config)
    standalone(MASKED, problem, call, config)
    out, _ = run(MASKED, problem, call, config, lse=False)
    assert torch.equal(out, run(MASKED, problem, call, config)[0])


@pytest.mark.parametrize(
    "features", [{"dropout": True}, {"bias": Bias.ADDITIVE}, {"block_mask": 64}], ids=str
)
def test_other_features_are_refused(features: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match="set num_splits to 1"):
        render(MASKED, a_problem(**features), small_config(MASKED, "", num_splits=2), Specialization())
