"""Tests of plans with features on a GPU: graphs, binaries, compiled programs and selection."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.runtime.session import SESSION
from tests.gpu.feature_calls import (
    GENERATED,
    HEADS,
    KEYS,
    QUERIES,
    TOLERANCE,
    WIDTH,
    cache_of,
    check_varlen,
    close,
    normal,
    packed,
)
from tests.gpu.marks import SERVED
from tests.problems.features import starts

pytestmark = SERVED


def test_new_token_counts_do_not_compile() -> None:
    flashtune.attention_varlen(*packed(), causal=True, prefer="generated")
    compiled = len(SESSION.loader.binaries._binaries)
    for fewer in range(1, 20):
        check_varlen(*packed((QUERIES[0] - fewer, *QUERIES[1:])), causal=True)
    assert len(SESSION.loader.binaries._binaries) <= compiled + 1, "one more, that writes the log-sum-exp"


def test_plan_is_replayed_with_other_lengths_and_pages() -> None:
    cache, other = cache_of(), cache_of((40, 300, 16, 0, 700))
    token = normal(len(KEYS), HEADS, WIDTH)
    k, v = torch.cat([cache[0], other[0]]), torch.cat([cache[1], other[1]])
    table, lengths = cache.block_table.clone(), cache.seqlens_k.clone()
    plan = flashtune.plan_paged(token, k, v, table, lengths, **GENERATED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = plan(token, k, v, table, lengths)
    moved = torch.where(other.block_table < 0, other.block_table, other.block_table + len(cache[0]))
    turns = (moved, other.seqlens_k), (cache.block_table, cache.seqlens_k), (moved, other.seqlens_k // 2)
    for pages, counts in turns:
        table.copy_(pages)
        lengths.copy_(counts)
        token.copy_(torch.randn_like(token))
        graph.replay()
        close(testing.paged_inputs(token, k, v, table, lengths), result)


def test_packed_plan_is_replayed_with_other_lengths() -> None:
    q, k, v, begins, ends, *longest = packed()
    plan = flashtune.plan_varlen(q, k, v, begins, ends, *longest, causal=True, window=(100, 0), **GENERATED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = plan(q, k, v, begins, ends)
    for queries, keys in ((QUERIES[::-1], KEYS[::-1]), (QUERIES, KEYS)):
        begins.copy_(starts(queries))
        ends.copy_(starts(keys))
        graph.replay()
        options: dict[str, Any] = {"causal": True, "window": (100, 0)}
        close(testing.varlen_inputs(q, k, v, begins, ends, *longest, **options), result)


def test_a_shared_prefix_in_a_graph() -> None:
    k, v, table, lengths = cache_of((700, 600, 555))
    table[1:, :32] = table[0, :32]
    token = normal(3, HEADS, WIDTH)
    plan = flashtune.plan_paged(token, k, v, table, lengths, shared_prefix=512, **GENERATED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = plan(token, k, v, table, lengths)
    lengths.sub_(20)
    graph.replay()
    close(testing.paged_inputs(token, k, v, table, lengths), result)


def test_compile_traces_one_operator() -> None:
    torch._dynamo.reset()
    token, cache = normal(len(KEYS), HEADS, WIDTH), cache_of()

    def model(token: Tensor, *cache: Tensor) -> Tensor:
        return flashtune.attention_paged(token * 2, *cache, prefer="generated") + 1

    eager = model(token, *cache)
    inductor: Callable[..., Tensor] = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(inductor(token, *cache), eager, atol=TOLERANCE, rtol=TOLERANCE)
