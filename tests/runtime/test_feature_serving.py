"""Tests of dispatch of calls with features, without a GPU: kernels are rendered but not compiled."""

import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import FlashtuneError, KernelError, ProblemError
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, Feature
from flashtune.dispatch import lookup
from flashtune.dispatch.nearest import nearest_record, same_computation, tuned_alike
from flashtune.recording.recorder import read_counts
from flashtune.request.call import dense_call, varlen_call
from flashtune.request.read_call import read_call
from flashtune.templates.registry import find_family
from tests.problems.features import agrees, paged, starts
from tests.support.machine import TARGET, Machine
from tests.support.records import make_record

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
