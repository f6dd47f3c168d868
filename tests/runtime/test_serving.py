"""Tests of executors and the call cache, with launches that only record their arguments."""

import math
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import FlashtuneError, KernelError, ProblemError
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Alignment, Kernel, Specialization
from flashtune.core.problem import Causal, Feature
from flashtune.dispatch import lookup
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.nearest import nearest_record, tuned_alike
from flashtune.dispatch.tables import same_computation
from flashtune.launch import workspaces
from flashtune.launch.compiler_process import CompilerProcess
from flashtune.launch.kernel_cache import kernel_of
from flashtune.recording.recorder import read_counts
from flashtune.request.call import dense_call, varlen_call
from flashtune.request.read_call import read_call
from flashtune.runtime import executors
from flashtune.runtime.call_cache import run_call, write_call
from flashtune.runtime.session import SESSION
from flashtune.templates.registry import find_family
from tests.problems.features import agrees, paged, starts
from tests.support.machine import PROBLEM, TARGET, Machine, expected, inputs, tuned
from tests.support.records import make_record


def test_bshd_layout_is_passed_as_strides(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    moved = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
    out, lse = flashtune.attention(*moved, causal=True, layout="bshd", return_lse=True)
    assert out.is_contiguous()
    torch.testing.assert_close(out.transpose(1, 2), expected(q, k, v))
    assert lse.shape == q.shape[:3]


def test_a_negative_scale_negates_the_queries(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    for scale in (-0.3, 0.3):
        out = flashtune.attention(q, k, v, causal=True, scale=scale)
        torch.testing.assert_close(out, expected(q, k, v, scale=scale))
    planned = flashtune.plan(q, k, v, causal=True, scale=-0.3)
    torch.testing.assert_close(planned(q, k, v), expected(q, k, v, scale=-0.3))


def test_a_selected_baseline_returns_no_log_sum_exp(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, family="sdpa"))
    q, k, v = inputs(PROBLEM)
    assert flashtune.explain(q, k, v, causal=True).backend == "sdpa"
    assert flashtune.explain(q, k, v, causal=True, return_lse=True).backend == "generated"


@pytest.mark.parametrize("kind", ["same", "strided", "unaligned", "wider"])
def test_outputs_are_written_to_a_tensor_of_the_caller(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    memory = torch.zeros(2 * q.numel(), dtype=q.dtype)
    out = {
        "same": memory[: q.numel()].view(q.shape),
        "strided": memory.view(*q.shape, 2)[..., 0],
        "unaligned": memory[1 : 1 + q.numel()].view(q.shape),
        "wider": torch.zeros(q.shape),
    }[kind]
    call = dense_call(q, k, v, causal=True, scale=-0.3)
    run_call(call)
    allocated: list[object] = []
    allocate = workspaces.allocator
    SESSION.forget()

    def counting(like: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
        new = allocate(like, device)
        return lambda: allocated.append(like) or new()  # type: ignore[func-returns-value]

    monkeypatch.setattr(executors, "allocator", counting)
    for _ in range(2):
        out.zero_()
        write_call(out, call)
        torch.testing.assert_close(out.to(q.dtype), expected(q, k, v, scale=-0.3))
    assert len(allocated) == (0 if kind == "same" else 2)


def test_outputs_of_baselines_are_copied(machine: Machine) -> None:
    q, k, v = (tensor.double() for tensor in inputs(PROBLEM))
    out = torch.zeros_like(q)
    write_call(out, dense_call(q, k, v, causal=True))
    torch.testing.assert_close(out, flashtune.attention(q, k, v, causal=True))
    assert not machine.launches


def test_plan_with_negative_scale_keeps_strides_of_views(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    # Negated, a view with gaps lies without: its strides are others than the call's.
    gaps = torch.stack([q, -q], 3)[:, :, :, 0]
    planned = flashtune.plan(gaps, k, v, causal=True, scale=-0.3)
    torch.testing.assert_close(planned(gaps, k, v), expected(q, k, v, scale=-0.3))


def test_executors_are_cached_by_alignment(machine: Machine, copy_ms: Callable[[float], None]) -> None:
    copy_ms(math.inf)
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    strided = torch.empty(*q.shape[:3], q.shape[3] + 3, dtype=q.dtype)[..., : q.shape[3]].copy_(q)
    for view in (q, shifted, strided):
        torch.testing.assert_close(flashtune.attention(view, k, v, causal=True), expected(q, k, v))
    alignments = [kernel.specialization.alignment for kernel in machine.kernels]
    assert alignments == [Alignment.SIXTEEN, Alignment.ANY, Alignment.ANY]
    assert len(machine.checked) == 2, "what the receipt does not cover is checked"


def test_large_strides_need_64_bit_indices() -> None:
    q = torch.empty_strided((2, 8, 512, 64), (2**31, 2**15, 64, 1), device="meta", dtype=torch.bfloat16)
    k = q[:, :2]
    bound = BoundRequest.of(dense_call(q, k, k, causal=True))
    assert bound.forward_properties == Specialization(Alignment.SIXTEEN, 64, False)


def test_fastest_backend_serves_unless_generated_is_preferred(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM, ms=1.0, peers={"sdpa-cudnn": 0.5}))
    q, k, v = inputs(PROBLEM)
    flashtune.attention(q, k, v, causal=True)
    assert machine.launches == 0
    flashtune.attention(q, k, v, causal=True, prefer="generated")
    flashtune.attention(q, k, v, causal=True, return_lse=True)
    assert machine.launches == 2
    assert flashtune.explain(q, k, v, causal=True).backend == "sdpa"


def test_unfused_attention_may_serve_short_sequences(machine: Machine) -> None:
    machine.usual = None
    tuned(machine, make_record(PROBLEM, ms=1.0, peers={"unfused": 0.5}))
    q, k, v = inputs(PROBLEM)
    assert flashtune.explain(q, k, v, causal=True).backend == "unfused"
    torch.testing.assert_close(flashtune.attention(q, k, v, causal=True), expected(q, k, v))
    assert machine.launches == 0


@pytest.mark.parametrize("axis", ["batch", "seqlen_q", "seqlen_kv"])
def test_empty_problems_never_launch(machine: Machine, axis: str) -> None:
    q, k, v = inputs(msgspec.structs.replace(PROBLEM, **{axis: 0}))
    out, lse = flashtune.attention(q, k, v, return_lse=True, prefer="generated")
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert not out.any()
    assert lse.shape == q.shape[:3]
    assert (lse == -torch.inf).all()
    assert machine.launches == 0


@pytest.mark.slow
def test_concurrent_threads_prepare_an_executor_once(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))
    q, k, v = inputs(PROBLEM)
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda: results.append(flashtune.attention(q, k, v, causal=True)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.kernels) == 1
    assert len(results) == 8
    assert all(torch.equal(result, results[0]) for result in results)


def test_explain_takes_kernels_that_another_process_rendered(machine: Machine) -> None:
    class Rendering(CompilerProcess):
        def prepared(self, *_: object) -> Kernel:
            return msgspec.structs.replace(kernel_of(record, specialization), source="other = 1")

    record = make_record(PROBLEM, ms=1.0, peers={"sdpa-cudnn": 1.2})
    tuned(machine, record)
    specialization = record.specialization
    assert specialization is not None
    machine.compile_apart(Rendering(), record, specialization, TARGET)
    q, k, v = inputs(PROBLEM)
    assert flashtune.explain(q, k, v, causal=True).kernel not in ("", record.kernel)


def test_explain_names_the_backend_without_a_launch(machine: Machine) -> None:
    record = make_record(PROBLEM, ms=1.0, peers={"sdpa-cudnn": 1.2})
    tuned(machine, record)
    q, k, v = inputs(PROBLEM)
    told = flashtune.explain(q, k, v, causal=True)
    assert (told.backend, told.standing, told.kernel) == ("generated", "timed", record.kernel)
    text = str(told)
    assert PROBLEM.key in text
    assert "sdpa-cudnn 1.2 ms" in text
    assert "flashtune search" not in text
    with_lse = flashtune.explain(q, k, v, causal=True, return_lse=True)
    assert with_lse.standing == "unproven"
    assert "flashtune search" in str(with_lse)
    near = flashtune.explain(q[:, :, :300], k, v, causal=True)
    assert near.standing == "verified"
    assert "nearest" in str(near)
    assert (machine.launches, machine.kernels, machine.checked) == (0, [], [])


HEADS = 4


@pytest.fixture
def bound(machine: Machine) -> list[Kernel]:
    """The kernels that were bound, in order. Launches write ones."""
    kernels: list[Kernel] = []

    def bind(kernel: Kernel, target: object, tensors: object, side: object, **_: object) -> Any:
        if not machine.compiles:
            raise KernelError("PTXASError: out of registers")
        kernels.append(kernel)
        assert isinstance(side, ExtraInputs)

        def launch(tensors: tuple[Tensor, ...], *rest: object) -> None:
            tensors[3].fill_(1.0)

        return launch

    machine.launch = bind
    return kernels


def packed(*lengths: int) -> tuple[Any, ...]:
    total = sum(lengths)
    q, k = torch.randn(total, HEADS, 64).half(), torch.randn(total, 2, 64).half()
    return q, k, k.clone(), starts(lengths), starts(lengths), max(lengths), max(lengths)


@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
def test_new_token_counts_reuse_the_selected_kernel(bound: list[Kernel], machine: Machine) -> None:
    for lengths in ((70, 50), (71, 50), (90, 38)):
        assert flashtune.attention_varlen(*packed(*lengths), causal=True).shape == (sum(lengths), HEADS, 64)
    assert machine.reads == 1
    assert len(machine.checked) == 1
    assert len({kernel.digest for kernel in bound}) == 1
    assert len(bound) == 3, "each number of tokens has its grid"
    flashtune.attention_varlen(*packed(70, 50), causal=True)
    assert len(bound) == 3
    flashtune.attention_varlen(*packed(100, 50), causal=True)
    assert machine.reads == 2, "another power of two"


@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
@pytest.mark.parametrize("function", [flashtune.attention_varlen, flashtune.attention_paged])
def test_later_calls_of_a_shape_prepare_nothing_and_read_no_table(
    bound: list[Kernel], machine: Machine, function: Any
) -> None:
    is_packed = function is flashtune.attention_varlen
    operands = packed(70, 50) if is_packed else (torch.randn(2, HEADS, 32), *paged((20, 9)))
    counts = []
    for _ in range(3):
        function(*operands)
        counts.append((machine.reads, len(machine.steps), len(bound)))
    assert all(counts[0])
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
@pytest.mark.parametrize("needs_grad", [False, True])
def test_float64_calls_do_not_take_the_kernel_of_an_equal_float32_call(
    needs_grad: bool, bound: list[Kernel]
) -> None:
    counts = []
    for dtype in (torch.float32, torch.float64):
        q = torch.randn(1, 2, 40, 16, dtype=dtype, requires_grad=needs_grad)
        out = flashtune.attention(q, q, q, causal=True, window=(7, 0), prefer="fastest")
        assert out.dtype is dtype
        counts.append(len(bound))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("wrong", ["right", "compiles"])
def test_failed_kernel_is_replaced_with_one_warning(
    wrong: str, bound: list[Kernel], machine: Machine
) -> None:
    setattr(machine, wrong, False)
    call = varlen_call(*packed(20, 7), return_lse=True, causal=True, window=(5, 0))
    operands = packed(20, 7)
    operands = (call.q, call.k, call.v, *operands[3:])
    with pytest.warns(flashtune.FlashtuneWarning, match="so the unfused computation serves"):
        result = flashtune.attention_varlen(*operands, return_lse=True, causal=True, window=(5, 0))
    agrees(call, result, 2e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        token = torch.randn(2, HEADS, 32)
        assert flashtune.attention_paged(token, *paged((20, 9))).shape == token.shape
    with pytest.raises(FlashtuneError):
        flashtune.attention_varlen(*operands, causal=True, window=(5, 0), prefer="generated")


def test_unsupported_problem_error_names_the_feature_to_omit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last family computes pages of latent keys only.
    names = "forward_q_outer", "forward_masked", "decode_latent_hopper"
    lesser = [find_family(name) for name in names]
    real = type(lesser[1]).features
    monkeypatch.setattr(type(lesser[1]), "features", real - {Feature.PAGES})
    monkeypatch.setattr(lookup, "families", lambda: lesser)
    token = torch.randn(2, HEADS, 32)
    for sinks in (None, torch.zeros(HEADS)):
        with pytest.raises(ProblemError, match=r"computes .*pages.* on nvidia-h200.*: leave out pages$"):
            flashtune.attention_paged(token, *paged((20, 9)), sinks=sinks)
    with pytest.raises(ProblemError, match="leave out pages"):
        flashtune.explain_paged(token, *paged((20, 9)), window=(3, 0))


def test_records_with_other_features_are_not_neighbours() -> None:
    q = torch.zeros(2, 8, 512, 64, dtype=torch.bfloat16)
    k = q[:, :2]
    plain, windowed, wider, sunk = (
        read_call(dense_call(q, k, k, causal=True, return_lse=False, **options)).problem
        for options in ({}, {"window": (99, 0)}, {"window": (199, 0)}, {"sinks": torch.zeros(8)})
    )
    replace = msgspec.structs.replace
    config = find_family("forward_masked").default(windowed, TARGET)
    masked = replace(make_record(plain), family="forward_masked", config=config, kernel=None)
    others = [replace(masked, problem=each) for each in (windowed, wider, sunk)]
    records = [make_record(plain), *others]
    for problem, record in zip((plain, windowed, wider, sunk), records, strict=True):
        assert tuned_alike(problem, records) == [record]
        assert nearest_record(problem, records) == record


def test_ragged_lengths_canonicalise_causal_mask() -> None:
    longest = read_call(varlen_call(*packed(64, 3), return_lse=False, causal=True)).problem
    assert [same.causal for same in same_computation(longest)] == [Causal.BOTTOM_RIGHT]
    single = read_call(varlen_call(*packed(1, 1), return_lse=False, causal=True)).problem
    assert {same.causal for same in same_computation(single)} == {Causal.BOTTOM_RIGHT, Causal.NONE}


def test_windows_without_effect_use_plain_kernels(machine: Machine) -> None:
    q = torch.randn(1, HEADS, 64, 64).half()
    with pytest.warns(flashtune.FlashtuneWarning, match="default config serves"):
        out = flashtune.attention(q, q, q, causal=True, window=(64, 0), prefer="generated")
    assert torch.equal(out, flashtune.attention(q, q, q, causal=True, prefer="generated"))
    assert {kernel.family for kernel in machine.kernels} <= {"forward_q_outer", "forward_hopper"}


def test_decoding_kernels_serve_few_tiles_of_queries_only(machine: Machine) -> None:
    def family(queries: int, sequences: int = 2) -> str:
        q = torch.randn(sequences, queries, HEADS, 64).half()
        operands = paged((2048, 900) * (sequences // 2), widths=(64, 64))
        pages = operands.k_cache.half(), operands.v_cache.half(), *operands[2:]
        told = flashtune.explain_paged(q, *pages)
        assert told.selection is not None
        return told.selection.record.family

    assert [family(queries) for queries in (1, 16, 17)] == ["decode_split_kv"] * 3
    assert [family(17, sequences=140), family(2000)] == ["forward_hopper"] * 2


@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
def test_packed_calls_are_recorded_as_one_problem(bound: list[Kernel], tmp_path: Path) -> None:
    with flashtune.record_calls(tmp_path / "calls.jsonl"):
        for lengths in ((70, 50), (71, 50), (71, 50)):
            flashtune.attention_varlen(*packed(*lengths), causal=True)
    [count] = read_counts(tmp_path / "calls.jsonl")
    assert count.calls == 3
    assert (count.problem.packed, count.problem.seqlen_q) == (128, 128)
