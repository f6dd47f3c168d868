"""Tests of record lookup: order, verification status, and selection of a baseline."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from flashtune.core.errors import ProblemError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.record import Outcome, Provenance, Record, Selection, Verdict, VerificationStatus
from flashtune.core.target import Target, find_target
from flashtune.db.eligibility import by_problem
from flashtune.dispatch.bound_request import BoundRequest
from flashtune.dispatch.decision import Backend, choose
from flashtune.dispatch.faster_peers import faster_peer
from flashtune.dispatch.lookup import select as select_for
from flashtune.dispatch.nearest import distance, is_far, nearest_record
from flashtune.dispatch.platform import table_hash
from flashtune.dispatch.tables import Tables, _may_serve, same_computation, tuned_records
from flashtune.request.call import dense_call
from flashtune.templates.registry import find_family
from tests.support.machine import PROBLEM
from tests.support.records import make_record
from tests.support.runtime import forget_all

TARGET = find_target("h200")


def tables(database: tuple[Record, ...] = (), shipped: tuple[Record, ...] = ()) -> Tables:
    return Tables(by_problem(filter(_may_serve, database)), by_problem(filter(_may_serve, shipped)))


def select(problem: Problem, target: Target, tuned: Tables, *, generated: bool) -> Selection:
    return select_for(problem, target, tuned, Specialization(), generated=generated)


def measured(record: Record) -> Selection:
    """A selection of the very shape that a record was measured at."""
    return Selection(record=record, standing=VerificationStatus.TIMED)


def resized(problem: Problem, **changes: object) -> Problem:
    return msgspec.structs.replace(problem, **changes)


def test_user_record_precedes_shipped_record() -> None:
    mine, shipped = make_record(PROBLEM, ms=2.0), make_record(PROBLEM, ms=1.0)
    selection = select(PROBLEM, TARGET, tables((mine,), (shipped,)), generated=True)
    assert (selection.record, selection.source, selection.standing) == (
        mine,
        "database",
        VerificationStatus.TIMED,
    )
    selection = select(PROBLEM, TARGET, tables(shipped=(shipped,)), generated=True)
    assert (selection.record, selection.source) == (shipped, "shipped")


def test_near_shape_is_verified_but_not_timed() -> None:
    near, far = (
        make_record(resized(PROBLEM, seqlen_q=1024, seqlen_kv=1024)),
        make_record(resized(PROBLEM, seqlen_q=8192, seqlen_kv=8192)),
    )
    selection = select(PROBLEM, TARGET, tables((far,), (near,)), generated=True)
    assert (selection.record, selection.source, selection.standing) == (
        near,
        "estimated",
        VerificationStatus.VERIFIED,
    )


@pytest.mark.parametrize(
    "change", [{"dtype": Dtype.FP16}, {"head_dim": 128}, {"value_head_dim": 32}, {"causal": Causal.NONE}]
)
def test_records_with_other_static_features_are_not_neighbours(change: dict[str, object]) -> None:
    selection = select(PROBLEM, TARGET, tables((make_record(resized(PROBLEM, **change)),)), generated=True)
    assert (selection.source, selection.standing) == ("default", VerificationStatus.UNPROVEN)
    assert selection.record.family == "forward_hopper"
    assert selection.record.kernel is None


def test_predictions_and_failures_never_serve() -> None:
    predicted = make_record(PROBLEM, provenance=Provenance.PREDICTED)
    failed = make_record(PROBLEM, outcome=Outcome.WRONG_RESULT)
    for record in (predicted, failed):
        assert select(PROBLEM, TARGET, tables((record,)), generated=True).source == "default"


VERSIONS = make_record(PROBLEM).versions


@pytest.mark.parametrize(
    "changes",
    [
        *(
            {"versions": msgspec.structs.replace(VERSIONS, **{field: "other"})}
            for field in ("triton", "template", "driver", "ptxas")
        ),
        *(
            {"verdict": Verdict(True, 0.4, 100, "", device)}
            for device in ("NVIDIA A100-SXM4-80GB", "interpreter", "NVIDIA H2000")
        ),
        {"verdict": None},
    ],
)
def test_records_of_other_versions_or_gpus_are_unverified(changes: dict[str, Any]) -> None:
    record = make_record(PROBLEM, **changes)
    assert select(PROBLEM, TARGET, tables((record,)), generated=True).standing is VerificationStatus.UNPROVEN


def test_a_receipt_covers_one_kernel() -> None:
    record = make_record(PROBLEM)
    selection = select(PROBLEM, TARGET, tables((record,)), generated=True)
    assert record.kernel is not None
    assert selection.proves(record.kernel)
    assert not selection.proves("0" * 32)


def test_masks_with_equal_diagonals_share_records() -> None:
    record = make_record(PROBLEM)
    top_left = resized(PROBLEM, causal=Causal.TOP_LEFT)
    assert select(top_left, TARGET, tables((record,)), generated=True).record is record
    lopsided = resized(top_left, seqlen_kv=600)
    selection = select(lopsided, TARGET, tables((record,)), generated=True)
    assert selection.source == "estimated"
    assert selection.forecast is not None
    assert selection.forecast.ms == pytest.approx(record.ms)
    assert (selection.record.problem, selection.record.kernel) == (lopsided, None)
    decode = resized(PROBLEM, seqlen_q=1)
    unmasked = make_record(resized(decode, causal=Causal.NONE))
    assert select(decode, TARGET, tables((unmasked,)), generated=True).record is unmasked


@pytest.mark.parametrize("seqlen_q", [1, 2, 3])
@pytest.mark.parametrize("seqlen_kv", [1, 2, 3])
@pytest.mark.parametrize("causal", list(Causal))
def test_equivalent_problems_have_equal_masks(seqlen_q: int, seqlen_kv: int, causal: Causal) -> None:
    def seen(masked: Problem) -> list[int]:
        if masked.causal is Causal.NONE:
            return [seqlen_kv] * seqlen_q
        return [max(0, min(row + masked.diagonal + 1, seqlen_kv)) for row in range(seqlen_q)]

    posed = resized(PROBLEM, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, causal=causal)
    same = same_computation(posed)
    assert same[0] == posed
    assert all(seen(other) == seen(posed) for other in same)


def test_distance_is_in_octaves_and_ties_are_broken_by_key() -> None:
    half, double = (resized(PROBLEM, seqlen_q=size, seqlen_kv=size) for size in (256, 1024))
    assert distance(PROBLEM, half) == distance(PROBLEM, double) > 0
    records = [make_record(half), make_record(double)]
    chosen = nearest_record(PROBLEM, records)
    assert chosen is not None
    assert chosen == nearest_record(PROBLEM, reversed(records))
    assert not is_far(PROBLEM, double)
    assert is_far(PROBLEM, resized(PROBLEM, seqlen_q=8192, seqlen_kv=8192))
    assert nearest_record(PROBLEM, []) is None


def test_sdpa_serves_unless_the_kernel_is_faster_beyond_noise() -> None:
    def peer(ms: float, name: str = "sdpa-cudnn", usual: str | None = "sdpa-cudnn") -> str | None:
        return faster_peer((measured(make_record(PROBLEM, ms=1.0, peers={name: ms})),), PROBLEM, usual)

    assert peer(0.9) == "sdpa-cudnn"
    assert peer(0.985) == peer(1.005) == "sdpa-cudnn"
    assert peer(1.015) is None
    assert peer(0.5, "sdpa-flash") is None, "SDPA by itself would take another backend here"
    assert peer(0.5, usual=None) is None
    assert peer(0.5, "unfused", None) == "unfused"
    assert peer(0.995, "unfused", None) is None, "scores in memory must be worth it"
    assert faster_peer((measured(make_record(PROBLEM, measurement=None)),), PROBLEM, "sdpa-cudnn") is None


def test_unfused_attention_does_not_serve_much_longer_problems() -> None:
    record = measured(make_record(PROBLEM, ms=1.0, peers={"unfused": 0.5, "sdpa-cudnn": 0.9}))
    longer = msgspec.structs.replace(PROBLEM, seqlen_q=16384, seqlen_kv=16384)
    assert faster_peer((record,), PROBLEM, "sdpa-cudnn") == "unfused"
    assert faster_peer((record,), longer, "sdpa-cudnn") == "sdpa-cudnn"
    assert faster_peer((record,), longer, None) is None


def test_selected_baseline_serves_only_eligible_calls() -> None:
    baseline = make_record(PROBLEM, family="sdpa")
    tuned = tables((baseline,))
    assert select(PROBLEM, TARGET, tuned, generated=False).record is baseline
    assert faster_peer((measured(baseline),), PROBLEM, None) == "sdpa"
    assert select(PROBLEM, TARGET, tuned, generated=True).source == "default"


def test_table_hash_covers_records_of_dispatch() -> None:
    from flashtune.db.store import open_store

    empty = table_hash("nobodys-gpu")
    assert len(empty) == 32
    with open_store() as store:
        store.pin(store.add(msgspec.structs.replace(make_record(PROBLEM), target="nobodys-gpu")))
    assert table_hash("nobodys-gpu") == empty, "a process never changes its mind"
    forget_all()
    tuned = table_hash("nobodys-gpu")
    assert tuned != empty
    assert tuned_records("nobodys-gpu").find(PROBLEM) is not None


def test_damaged_database_falls_back_to_shipped_tables(own_database: object) -> None:
    from pathlib import Path

    from flashtune.core.notices import FlashtuneWarning

    Path(str(own_database)).write_bytes(b"no database at all, but long enough to be read as one" * 40)
    with pytest.warns(FlashtuneWarning, match="dispatch uses the shipped tables alone"):
        assert tuned_records("nobodys-gpu").effective() == ()


def test_features_that_no_family_computes_are_unfused(
    monkeypatch: pytest.MonkeyPatch, interpret: Callable[[], None]
) -> None:
    for module in ("lookup", "decision"):
        monkeypatch.setattr(
            f"flashtune.dispatch.{module}.families", lambda: (find_family("forward_q_outer"),)
        )
    interpret()
    q = torch.randn(1, 2, 8, 16)
    (decision,) = choose(BoundRequest.of(dense_call(q, q, q, softcap=2.0)))
    assert (decision.backend, decision.reason) == (Backend.UNFUSED, "no kernel family computes softcap")
    with pytest.raises(ProblemError, match="leave out softcap"):
        choose(BoundRequest.of(dense_call(q, q, q, softcap=2.0, prefer="generated")))
