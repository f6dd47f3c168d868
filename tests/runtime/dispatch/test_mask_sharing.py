"""Tests of masks shared by heads, sequences or rows: classification and backend selection."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.kernel import Specialization
from flashtune.core.mask_sharing import MaskSharing, distinct_ways, narrowed, nearest_way
from flashtune.core.problem import Bias, Causal, Direction, Dtype, Problem
from flashtune.core.record import PeerTime, Record, Selection, SharedTime, VerificationStatus
from flashtune.dispatch.faster_peers import faster_peer
from flashtune.dispatch.lookup import select
from flashtune.dispatch.masked_sdpa import sharing_of, timed_ways
from flashtune.dispatch.tables import Tables
from tests.support.machine import PROBLEM, TARGET, Machine, tuned
from tests.support.records import make_record

HEADS, BATCH, HEADS_AND_ROWS, BATCH_AND_HEADS = MaskSharing
CUDNN, UNFUSED = "sdpa-cudnn", "unfused"
# Of two sequences, eight heads and 512 queries and keys.
BIASED = msgspec.structs.replace(PROBLEM, causal=Causal.NONE, bias=Bias.BOOLEAN)


# Ways of sharing


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({}, [HEADS, BATCH, HEADS_AND_ROWS, BATCH_AND_HEADS]),
        ({"batch": 1}, [HEADS, HEADS_AND_ROWS]),
        ({"seqlen_q": 1}, [HEADS, BATCH, BATCH_AND_HEADS]),
        ({"heads": 1, "kv_heads": 1}, [BATCH]),
        ({"heads": 1, "kv_heads": 1, "batch": 1}, []),
    ],
)
def test_equivalent_sharings_are_omitted(changes: dict[str, int], ways: list[MaskSharing]) -> None:
    problem = msgspec.structs.replace(BIASED, **changes)
    assert list(distinct_ways(problem)) == ways
    assert list(timed_ways(problem)) == ways


def test_only_problems_with_a_mask_in_sdpa_have_shared_mask_times() -> None:
    for changes in (
        {"bias": Bias.NONE},
        {"softcap": True},
        {"direction": Direction.BACKWARD},
        {"dtype": Dtype.E4M3},
    ):
        assert timed_ways(msgspec.structs.replace(BIASED, **changes)) == ()


@pytest.mark.parametrize(
    ("shape", "way"),
    [
        ((2, 8, 512, 512), None),
        ((8, 512, 512), BATCH),
        ((2, 1, 512, 512), HEADS),
        ((1, 8, 512, 512), BATCH),
        ((2, 1, 1, 512), HEADS_AND_ROWS),
        ((2, 8, 1, 512), HEADS_AND_ROWS),
        ((1, 1, 1, 512), HEADS_AND_ROWS),
        ((1, 1, 512, 512), BATCH_AND_HEADS),
        ((512, 512), BATCH_AND_HEADS),
        ((512,), HEADS_AND_ROWS),
    ],
)
def test_masks_are_classified_by_extents_and_by_strides(
    shape: tuple[int, ...], way: MaskSharing | None
) -> None:
    bias = torch.empty(shape, dtype=torch.bool)
    assert sharing_of(BIASED, bias) is way
    assert sharing_of(BIASED, bias.expand(2, 8, 512, 512)) is way


def test_a_dimension_of_one_element_is_not_shared() -> None:
    single = msgspec.structs.replace(BIASED, batch=1, seqlen_q=1)
    assert sharing_of(single, torch.empty(1, 8, 1, 512)) is None
    assert sharing_of(single, torch.empty(1, 512)) is HEADS
    assert nearest_way(single, BATCH_AND_HEADS.dimensions) is HEADS
    assert nearest_way(single, BATCH.dimensions) is None


@pytest.mark.parametrize("way", list(MaskSharing))
def test_narrowed_bias_is_contiguous_and_has_the_sharing(way: MaskSharing) -> None:
    small = msgspec.structs.replace(BIASED, seqlen_q=6, seqlen_kv=5)
    bias = torch.arange(2 * 8 * 6 * 5).view(2, 8, 6, 5)
    narrow = narrowed(bias, way)
    assert narrow.is_contiguous()
    assert torch.equal(narrow.flatten()[:5], torch.arange(5))
    assert sharing_of(small, narrow) is way
    assert narrow.expand_as(bias).shape == bias.shape


# The choice by times


def record_of(
    problem: Problem,
    peers: dict[str, float],
    shared: Iterable[tuple[MaskSharing, float, dict[str, float]]] = (),
) -> Record:
    """A record of a bias problem of 1 ms, and its times with shared masks."""
    record = make_record(problem, peers=peers, family="forward_masked")
    assert record.measurement is not None
    times = tuple(
        SharedTime(way, ms, tuple(PeerTime(name, peer) for name, peer in peer_times.items()))
        for way, ms, peer_times in shared
    )
    measurement = msgspec.structs.replace(record.measurement, shared=times or msgspec.UNSET)
    return msgspec.structs.replace(record, measurement=measurement)


@pytest.mark.parametrize(("peer", "expected"), [(0.9, CUDNN), (0.92, None)])
def test_shared_mask_times_decide_at_a_tuned_shape(peer: float, expected: str | None) -> None:
    shared = [(HEADS, 0.9, {CUDNN: peer}), (BATCH, 0.9, {CUDNN: 1.5})]
    record = record_of(BIASED, {CUDNN: 1.4}, shared)
    selection = Selection(record=record, standing=VerificationStatus.TIMED)
    assert faster_peer((selection,), BIASED, CUDNN, HEADS) == expected
    assert faster_peer((selection,), BIASED, CUDNN, BATCH) is None
    assert faster_peer((selection,), BIASED, CUDNN) is None
    # Of this way there are no times, and those with an unshared mask decide.
    assert faster_peer((selection,), BIASED, CUDNN, HEADS_AND_ROWS) is None
    unshared = record_of(BIASED, {CUDNN: 0.5}, [(HEADS, 0.4, {CUDNN: 0.5})])
    selection = Selection(record=unshared, standing=VerificationStatus.TIMED)
    assert faster_peer((selection,), BIASED, CUDNN, HEADS) is None
    assert faster_peer((selection,), BIASED, CUDNN, HEADS_AND_ROWS) == CUDNN
    assert faster_peer((selection,), BIASED, CUDNN) == CUDNN


def test_backend_without_a_shared_mask_time_does_not_serve_it() -> None:
    record = record_of(BIASED, {CUDNN: 0.5}, [(HEADS, 0.9, {"sdpa-efficient": 0.8})])
    selection = Selection(record=record, standing=VerificationStatus.TIMED)
    assert faster_peer((selection,), BIASED, CUDNN, HEADS) is None
    assert faster_peer((selection,), BIASED, "sdpa-efficient", HEADS) == "sdpa-efficient"


def test_unfused_attention_uses_its_time_without_sharing() -> None:
    record = record_of(BIASED, {UNFUSED: 0.5}, [(HEADS, 0.6, {}), (BATCH, 0.4, {})])
    selection = Selection(record=record, standing=VerificationStatus.TIMED)
    assert faster_peer((selection,), BIASED, None, HEADS) == UNFUSED
    assert faster_peer((selection,), BIASED, None, BATCH) is None


def test_forecasts_are_scaled_by_the_sharing_ratio_of_the_nearest_shape() -> None:
    other = msgspec.structs.replace(BIASED, seqlen_q=300, seqlen_kv=700)

    def served(
        sharing: MaskSharing | None, *shared: tuple[MaskSharing, float, dict[str, float]]
    ) -> str | None:
        record = record_of(BIASED, {CUDNN: 1.2}, shared)
        tables = Tables({BIASED.key: (record,)}, {})
        selection = select(other, TARGET, tables, Specialization(), generated=True)
        assert selection.forecast is not None
        return faster_peer((selection,), other, CUDNN, sharing)

    halved = (HEADS, 1.0, {CUDNN: 0.6})
    assert served(HEADS) is None, "without times with shared masks"
    assert served(HEADS, halved) == CUDNN
    assert served(BATCH, halved) is None
    assert served(None, halved) is None
    assert served(HEADS, (HEADS, 0.5, {CUDNN: 0.6})) is None, "the kernel gains as much"


def test_measured_and_forecast_passes_are_compared_as_forecasts() -> None:
    other = msgspec.structs.replace(BIASED, seqlen_q=300, seqlen_kv=700)

    def pair(peer: float) -> str | None:
        record = record_of(BIASED, {CUDNN: peer})
        tables = Tables({BIASED.key: (record,)}, {})
        measured, expected = (
            select(problem, TARGET, tables, Specialization(), generated=True) for problem in (BIASED, other)
        )
        assert (measured.forecast is None, expected.forecast is None) == (True, False)
        return faster_peer((measured, expected), BIASED, CUDNN)

    assert pair(1.0) is None, "equal times are no reason where one is expected"
    assert pair(0.9) == CUDNN


def test_nearest_shape_provides_times_of_equivalent_sharings() -> None:
    near = msgspec.structs.replace(BIASED, batch=1)
    record = record_of(near, {CUDNN: 1.2}, [(HEADS, 1.0, {CUDNN: 0.5})])
    tables = Tables({near.key: (record,)}, {})
    selection = select(BIASED, TARGET, tables, Specialization(), generated=True)
    assert faster_peer((selection,), BIASED, CUDNN, BATCH_AND_HEADS) == CUDNN
    assert faster_peer((selection,), BIASED, CUDNN, BATCH) is None


# Calls


@pytest.fixture
def call(machine: Machine) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors of a shape where SDPA is faster with a mask that heads share alone."""
    tuned(machine, record_of(BIASED, {CUDNN: 1.4}, [(HEADS, 0.9, {CUDNN: 0.5})]))
    torch.manual_seed(3)
    q = torch.randn(2, 8, 512, 64, dtype=torch.bfloat16)
    k = torch.randn(2, 2, 512, 64, dtype=torch.bfloat16)
    return q, k, k.flip(2)


def masks() -> dict[str, tuple[Tensor, bool]]:
    """Masks of one call, and whether SDPA is faster: an expanded one has the extents of an unshared one."""
    own, shared = torch.rand(2, 8, 512, 512) < 0.7, torch.rand(2, 1, 512, 512) < 0.7
    return {
        "own": (own, False),
        "shared": (shared, True),
        "expanded": (shared.expand(2, 8, 512, 512), True),
        "batch": (own[:1], False),
    }


@pytest.mark.slow
@pytest.mark.parametrize("reverse", [False, True])
def test_calls_and_plans_select_for_each_sharing(
    call: tuple[Tensor, Tensor, Tensor], launches: list[str], *, reverse: bool
) -> None:
    cases = masks()
    order = [*cases, *cases]
    for name in reversed(order) if reverse else order:
        mask, by_sdpa = cases[name]
        launches.clear()
        flashtune.attention(*call, attn_mask=mask)
        assert (launches == []) == by_sdpa, name
        launches.clear()
        flashtune.plan(*call, attn_mask=mask)(*call, attn_mask=mask)
        assert (launches == []) == by_sdpa, name
        told = flashtune.explain(*call, attn_mask=mask)
        assert (told.backend == "sdpa") == by_sdpa, name


def test_plan_refuses_masks_with_other_sharing(
    call: tuple[Tensor, Tensor, Tensor], launches: list[str]
) -> None:
    by_name = {name: mask for name, (mask, _) in masks().items()}
    for name, mask in by_name.items():
        plan = flashtune.plan(*call, attn_mask=mask)
        for other in by_name.keys() - {name}:
            with pytest.raises(flashtune.FlashtuneError, match="differ from the planned ones"):
                plan(*call, attn_mask=by_name[other])


@pytest.mark.slow
def test_compiled_calls_select_for_each_sharing(
    call: tuple[Tensor, Tensor, Tensor], launches: list[str]
) -> None:
    def attend(mask: Tensor) -> Any:
        return flashtune.attention(*call, attn_mask=mask)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    cases = masks()
    for name in ("own", "shared", "expanded", "own", "shared"):
        mask, by_sdpa = cases[name]
        launches.clear()
        compiled(mask)
        assert (launches == []) == by_sdpa, name


def test_reason_names_the_sharing_that_decided(machine: Machine, call: tuple[Tensor, Tensor, Tensor]) -> None:
    shared = masks()["shared"][0]
    told = flashtune.explain(*call, attn_mask=shared)
    assert told.reason == "sdpa-cudnn was measured as fast or faster with a mask shared over heads"
    assert "  with a mask shared over heads: 0.9 ms, sdpa-cudnn 0.5 ms" in str(told).splitlines()
    q, k, v = (tensor[:, :, :300] for tensor in call)
    told = flashtune.explain(q, k, v, attn_mask=shared[:, :, :300, :300])
    assert told.reason == "sdpa-cudnn is expected to be faster with a mask shared over heads"
