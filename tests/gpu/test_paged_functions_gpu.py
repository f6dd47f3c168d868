"""GPU tests of score and mask functions of keys in pages, of few queries and of split keys."""

from typing import Any

import pytest
import torch

import flashtune
from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.problem import BlockLists, Causal, KvDtype, KvScale, Problem
from flashtune.core.target import device_target
from flashtune.templates.registry import find_family
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel
from tests.gpu.marks import SERVED
from tests.problems.features import paged
from tests.problems.function_cases import FUNCTIONS, HEADS

pytestmark = SERVED

FAMILIES = "forward_hopper", "forward_masked", "decode_split_kv"
PAGED: dict[str, dict[str, Any]] = {
    "decoding": {"seqlen_q": 1, "page_size": 16},
    "small pages": {"seqlen_q": 4, "page_size": 1},
    "prefill": {"seqlen_q": 200, "page_size": 64, "packed": 500, "causal": Causal.BOTTOM_RIGHT},
    "int8": {"seqlen_q": 3, "page_size": 16, "kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE},
}
LISTED: dict[str, Any] = {"block_mask": 128, "block_lists": BlockLists.GROUP}


def check(family: str, problem: Problem) -> None:
    found, target = find_family(family), device_target()
    if reason := found.supports(problem, target):
        pytest.skip(reason)
    config = found.default(problem, target)
    device, specialization = torch.device("cuda", 0), Specialization(lse=True)
    verdict = check_kernel(found, problem, config, specialization, target, device, Level.QUICK)
    assert verdict.passed, verdict


def a_problem(name: str, **fields: Any) -> Problem:
    shape = f"heads={HEADS},kv_heads=2,seqlen_kv=4096,head_dim=128,batch=3"
    return testing.problem(f"{shape},seqlen_q=1", functions=FUNCTIONS[name], **fields)


@pytest.mark.parametrize("cache", PAGED)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_of_pages_pass_the_verification(family: str, name: str, cache: str) -> None:
    check(family, a_problem(name, **PAGED[cache]))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("queries", [1, 16])
def test_decoding_kernels_pass_the_verification(queries: int, name: str) -> None:
    lists = LISTED if FUNCTIONS[name].mask >= 0 else {}
    check("decode_split_kv", a_problem(name, seqlen_q=queries, **lists))


@pytest.mark.parametrize("name", ["alibi", "relative bias", "window by scores"])
@pytest.mark.parametrize("family", ["forward_hopper", "forward_masked"])
def test_kernels_that_split_keys_pass_the_verification(family: str, name: str) -> None:
    problem = a_problem(name, seqlen_q=100)
    target = device_target()
    if find_family(family).supports(problem, target) is None:
        assert getattr(find_family(family).default(problem, target), "num_splits", 1) > 1
    check(family, problem)


@pytest.mark.parametrize("queries", [1, 3])
def test_a_graph_is_replayed_with_other_lengths_and_captured_values(queries: int) -> None:
    torch.manual_seed(0)
    cache = paged((40, 300, 0, 129), page_size=16, widths=(64, 64))
    k, v = (tensor.nan_to_num().to("cuda", torch.bfloat16) for tensor in cache[:2])
    table, lengths = cache.block_table.clamp(min=0).cuda(), cache.seqlens_k.cuda()
    q = torch.randn(4, queries, HEADS, 64, device="cuda", dtype=torch.bfloat16)
    slopes, width = torch.rand(HEADS, device="cuda"), torch.tensor([30], device="cuda")
    functions: dict[str, Any] = {
        "score_mod": lambda s, b, h, q, k: s - slopes[h] * (q - k),
        "mask_mod": lambda b, h, q, k: q - k < width[0],
    }
    plan = flashtune.plan_paged(q, k, v, table, lengths, return_lse=True, **functions)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = plan(q, k, v, table, lengths)
    for keys, size in (((40, 300, 0, 129), 30), ((1, 17, 40, 128), 9)):
        lengths.copy_(torch.tensor(keys))
        width.fill_(size)
        slopes.copy_(torch.rand(HEADS))
        graph.replay()
        inputs = testing.paged_inputs(q, k, v, table, lengths, **functions)
        reference = testing.reference(inputs)
        testing.close(out, reference.out)
        testing.close(lse, reference.lse)


def test_few_queries_over_long_keys_split_them() -> None:
    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, 65_536, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + torch.where(k % 2 == 0, 1.0, 0.0)

    selection = flashtune.explain_flex(q, k, v, score, enable_gqa=True).selection
    assert selection is not None
    assert selection.record.family == "decode_split_kv"
    assert getattr(selection.record.config, "num_splits", 1) > 1
    out = flashtune.flex_attention(q, k, v, score, enable_gqa=True)
    scores = (q.double().view(8, 4, 128) @ k[0].double().mT) * 128**-0.5
    exact = torch.softmax(scores + (torch.arange(65_536, device="cuda") % 2 == 0), -1) @ v[0].double()
    torch.testing.assert_close(out.double().view(8, 4, 128), exact, atol=2e-3, rtol=2e-2)
