"""Tests of `flashtune bench` with features: each implementation computes the problem that is asked for."""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import UsageError
from flashtune.core.problem import Bias, Causal, Direction, Dtype, KvDtype, KvScale
from flashtune.request.call import Call, dense_call, paged_call, varlen_call
from flashtune.request.read_call import read_call
from flashtune.tuner.bench.admission import Admitted, admit
from flashtune.tuner.bench.backward import gradient_binders, gradient_judge
from flashtune.tuner.bench.bench import require_work, run_bench
from flashtune.tuner.bench.calls import program_call
from flashtune.tuner.bench.flash_attn_4 import COMPUTED, FLASH_ATTN_4
from flashtune.tuner.bench.flex import mask_pairs
from flashtune.tuner.bench.grids import grid_problems
from flashtune.tuner.bench.judging import output_judge
from flashtune.tuner.bench.peer_runs import FLEX, PEER_FEATURES, UNFUSED, RefusalError, bind_peer
from flashtune.tuner.bench.results import OURS
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.sdpa import BACKENDS
from tests.problems.features import expected
from tests.tuner.bench.bench_problems import (
    CACHES,
    CPU,
    DENSE,
    FEATURES,
    PACKED,
    PAGES,
    VARLEN,
    FakeFlashAttention4,
    a_problem,
    by_unfused,
)
from tests.tuner.conftest import GpuMemory

MAKERS: dict[Callable[..., Any], Callable[..., Call]] = {
    flashtune.attention: dense_call,
    flashtune.attention_varlen: varlen_call,
    flashtune.attention_paged: paged_call,
}


@pytest.mark.parametrize("name", [*DENSE, *VARLEN, *CACHES])
def test_flashtune_is_called_with_the_features_of_the_problem(name: str) -> None:
    problem = a_problem(**FEATURES[name])
    require_work(problem)
    tensors = make_tensors(problem, CPU)
    call = program_call(problem, tensors)
    made = MAKERS[call.attend](*call.inputs, **call.named, **call.options)
    read = read_call(made).problem
    assert (read.features, read.causal, read.kv_scale) == (problem.features, problem.causal, problem.kv_scale)
    assert made.options.prefer == "generated"
    out = expected(made)[0].to(torch.bfloat16)
    judge = output_judge(problem, tensors)
    assert judge(call.heads_first(out)) <= 1
    wrong = out.clone()
    wrong[(-1,) * wrong.dim()] += 1
    assert judge(call.heads_first(wrong)) > 1
    wrong[(-1,) * wrong.dim()] = math.nan
    assert judge(call.heads_first(wrong)) == math.inf


def test_calls_of_batch_invariant_problems_have_the_flag() -> None:
    problem = a_problem(batch_invariant=True)
    assert program_call(problem, make_tensors(problem, CPU)).options["batch_invariant"] is True


@pytest.fixture
def compiled(gpu_memory: GpuMemory) -> Iterator[mock.Mock]:
    """`torch.compile` without code generation, and `torch.compiler.reset`."""
    gpu_memory.free = 2**34
    eager = functools.partial(torch.compile, backend="eager")
    with (
        mock.patch.object(torch, "compile", side_effect=eager) as compiled,
        mock.patch.object(torch.compiler, "reset", wraps=torch.compiler.reset) as compiled.reset,
    ):
        yield compiled


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", [*DENSE, *VARLEN])
def test_flex_attention_computes_features_and_is_compiled_for_a_shape(name: str, compiled: mock.Mock) -> None:
    problem = msgspec.structs.replace(a_problem(**FEATURES[name]), sinks=False)
    tensors = make_tensors(problem, CPU)
    assert output_judge(problem, tensors)(bind_peer(FLEX, problem, tensors).run()) <= 1
    assert compiled.call_args_list[0].kwargs == {"dynamic": False, "fullgraph": True}
    assert compiled.reset.call_count == 1


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", [*DENSE])
def test_unfused_attention_and_sdpa_compute_features(name: str) -> None:
    problem = a_problem(**FEATURES[name])
    tensors = make_tensors(problem, CPU)
    judge = output_judge(problem, tensors)
    assert judge(bind_peer(UNFUSED, problem, tensors).run()) <= 1
    for backend in BACKENDS:
        if problem.features <= PEER_FEATURES[backend]:
            assert judge(bind_peer(backend, problem, tensors).call()) <= 1
        else:
            with pytest.raises(RefusalError):
                bind_peer(backend, problem, tensors)


@pytest.mark.parametrize("name", [*DENSE, *VARLEN])
def test_flash_attn_4_computes_features(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = a_problem(**FEATURES[name])
    tensors = make_tensors(problem, CPU)
    if not problem.features <= COMPUTED or problem.causal is Causal.TOP_LEFT:
        with pytest.raises(RefusalError):
            bind_peer(FLASH_ATTN_4, problem, tensors)
        return
    monkeypatch.setitem(sys.modules, "flash_attn.cute", FakeFlashAttention4(problem))
    judge, out = output_judge(problem, tensors), bind_peer(FLASH_ATTN_4, problem, tensors).run()
    assert isinstance(out, Tensor)
    assert judge(out) <= 1 < judge(out.flip(1)), "heads in another order are wrong"
    with pytest.raises(RefusalError, match="fp32"):
        bind_peer(FLASH_ATTN_4, msgspec.structs.replace(problem, dtype=Dtype.FP32), tensors)


GRADIENTS = (
    "window",
    "chunks",
    "prefix",
    "softcap",
    "alibi",
    "additive bias",
    "sinks",
    "packed with features",
)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_with_features_are_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry_point, call = ("attention_varlen", varlen_call) if "packed" in name else ("attention", dense_call)
    monkeypatch.setattr(flashtune, entry_point, by_unfused(call))
    problem = a_problem(**FEATURES[name], dtype=Dtype.FP32, direction=Direction.BACKWARD)
    require_work(problem)
    tensors = make_tensors(problem, CPU)
    judge = gradient_judge(problem, tensors)
    (entry,) = admit(gradient_binders(problem, tensors, "a kernel", ()), judge, lambda run: run)
    assert isinstance(entry, Admitted), entry
    gradients = entry.replay()
    assert isinstance(gradients, tuple)
    assert len(gradients) == 3 + (problem.bias is Bias.ADDITIVE)
    for index in range(len(gradients)):
        wrong = [gradient.clone() for gradient in gradients]
        wrong[index][(-1,) * 4] += 1
        assert judge(tuple(wrong)) > 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dropout": True}, "drop other probabilities"),
        ({"mla": True, "kv_heads": 1, "head_dim": 32, "value_head_dim": 16}, "add page_size=64"),
        ({**PACKED, "kv_lengths": True}, "leave kv_lengths out"),
        ({**PAGES, "bias": Bias.ADDITIVE}, "take no bias"),
        ({**PACKED, "block_mask": 64}, "take no bias and no block mask"),
        ({"dtype": Dtype.E4M3, "window_left": 8}, "take no queries in e4m3"),
        ({"kv_lengths": True, "kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE}, "add page_size=64"),
    ],
)
def test_problems_that_no_call_computes_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        require_work(a_problem(**changes))


def test_calls_have_the_lengths_of_the_grid() -> None:
    rounded = [problem for problem in grid_problems("features") if problem.page_size or problem.packed]
    assert len(rounded) >= 8
    for problem in rounded:
        lengths = problem.seqlen_q, problem.seqlen_kv, max(problem.packed, 1)
        assert [length & (length - 1) for length in lengths] == [0, 0, 0]


def test_flex_attention_refuses_masks_of_too_many_pairs() -> None:
    small = a_problem(bias=Bias.BOOLEAN)
    tensors = make_tensors(small, CPU)
    assert mask_pairs(small, tensors) == 2 * 4 * 70 * 90
    bias = tensors.side.bias
    assert bias is not None
    shared_bias = bias[:1].expand(2, -1, -1, -1)
    shared = msgspec.structs.replace(tensors, side=tensors.side._replace(bias=shared_bias))
    assert mask_pairs(small, shared) == 4 * 70 * 90
    assert mask_pairs(a_problem(causal=Causal.NONE), make_tensors(a_problem(), CPU)) == 0
    long = msgspec.structs.replace(tensors, k=tensors.k[:, :, :1].expand(-1, -1, 2**24, -1))
    with pytest.raises(RefusalError, match="too many pairs"):
        bind_peer(FLEX, small, long)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*DENSE, *VARLEN, *CACHES])
def test_features_are_timed(name: str) -> None:
    changes = FEATURES[name]
    wide = {"head_dim": 64, "value_head_dim": 64, "seqlen_q": 300, "seqlen_kv": 300}
    if "mla" in changes:
        wide |= {"head_dim": 576, "value_head_dim": 512, "heads": 16, "seqlen_q": 1}
    problem = a_problem(**(changes | wide))
    if problem.packed:
        problem = msgspec.structs.replace(problem, packed=500)
    bench = run_bench(problem, 0, rounds=3)
    assert bench.row(OURS) is not None, bench.left_out
    if problem.features <= PEER_FEATURES[FLEX]:
        assert bench.row(FLEX) is not None, bench.left_out
