"""Tests that problems of models match those of dispatched calls."""

import pytest
import torch

from flashtune.core.problem import Problem
from flashtune.request.call import paged_call, varlen_call
from flashtune.request.read_call import read_call
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.models import Layers, ModelAttention, model_calls
from flashtune.tuner.workloads.presets import find_model

BATCH, LENGTH = 3, 1000


def window_of(kind: Layers) -> tuple[int, int] | None:
    return (kind.window - 1, 0) if kind.window else None


def paged_problem(model: ModelAttention, kind: Layers) -> Problem:
    """The dispatched problem of a call with one new token per sequence."""
    latent = model.latent
    width = latent.width if latent else model.head_dim
    kv_heads = 1 if latent else model.kv_heads
    q = torch.empty(BATCH, model.heads, width, dtype=torch.bfloat16)
    cache = torch.empty(4, 16, kv_heads, width, dtype=torch.bfloat16)
    pages = -(-LENGTH // 16)
    call = paged_call(
        q,
        cache,
        None if latent else torch.empty(4, 16, kv_heads, model.value_head_dim, dtype=torch.bfloat16),
        torch.zeros(BATCH, pages, dtype=torch.int32),
        torch.ones(BATCH, dtype=torch.int32),
        return_lse=False,
        window=window_of(kind),
        softcap=50.0 if kind.softcap else None,
        sinks=torch.zeros(model.heads) if kind.sinks else None,
        chunk=kind.chunk,
        value_head_dim=latent.values if latent else None,
    )
    return read_call(call, needs_grad=False).problem


def packed_problem(model: ModelAttention, kind: Layers) -> Problem:
    """The dispatched problem of a call of packed prompts."""
    tokens = BATCH * LENGTH
    q = torch.empty(tokens, model.heads, model.head_dim, dtype=torch.bfloat16)
    k = torch.empty(tokens, model.kv_heads, model.head_dim, dtype=torch.bfloat16)
    v = torch.empty(tokens, model.kv_heads, model.value_head_dim, dtype=torch.bfloat16)
    starts = torch.arange(BATCH + 1, dtype=torch.int32) * LENGTH
    call = varlen_call(
        q,
        k,
        v,
        starts,
        starts,
        LENGTH,
        LENGTH,
        return_lse=False,
        causal=True,
        window=window_of(kind),
        softcap=50.0 if kind.softcap else None,
        sinks=torch.zeros(model.heads) if kind.sinks else None,
        chunk=kind.chunk,
    )
    return read_call(call, needs_grad=False).problem


LLAMAS = ("llama-3.1-8b", "llama-4-scout", "mistral-7b-v0.1")


@pytest.mark.parametrize("name", [*LLAMAS, "gemma-2-9b", "gemma-3-1b", "gpt-oss-20b", "deepseek-v3"])
def test_search_of_a_model_tunes_the_dispatched_problems(name: str) -> None:
    model = find_model(name)
    sizes = ModelSizes(Phase.DECODE, str(LENGTH), str(BATCH))
    (decoded,) = model_calls(model, sizes)
    assert [call.problem for call in decoded] == [paged_problem(model, kind) for kind in model.kinds]
    (packed,) = model_calls(model, sizes._replace(phase=Phase.PREFILL, packed=True))
    assert [call.problem for call in packed] == [packed_problem(model, kind) for kind in model.kinds]
