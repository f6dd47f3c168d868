"""Compares shipped times with those of SDPA, of the other Hopper GPU, and of similar shapes."""

import functools
from typing import NamedTuple

import pytest

from flashtune.core.problem import Causal, Problem
from flashtune.core.record import Record, Selection, VerificationStatus
from flashtune.core.target import find_target
from flashtune.db.eligibility import by_problem
from flashtune.dispatch.faster_peers import faster_peer
from flashtune.dispatch.forecast import forecast
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.tuner.execution.sdpa import MASKED, MAX_MASK_ELEMENTS, OTHER_LAYOUTS, _mask_elements
from flashtune.tuner.workloads.models import forward_of
from flashtune.tuner.workloads.shapes import parse_shape
from tests.support.records import shipped_table_of

GPUS = ("nvidia-h100", "nvidia-h200")
LEAST_SAMPLES = 21
# The H200 has 1.43 times the bandwidth of the H100 and the same rates. Clocks differ by a few percent.
RATIOS = 0.94, 1.43
# Largest time relative to the estimate from other shapes. That of decoding may be a third too low.
MOST_OF_ESTIMATE = 1.55
SHIPPED_LOSS = 0.02


class Known(NamedTuple):
    """A record that a check does not accept, and the reason."""

    gpu: str
    shape: str
    reason: str


UNTIMED = "the search ended before the final measurement"
# Each check's exceptions. A test fails if one of them is not needed any more.
FEW_SAMPLES: tuple[Known, ...] = ()
WITHOUT_PEERS = (
    Known("nvidia-h100", "heads=32,kv_heads=8,seqlen=1024,head_dim=128,batch=16,causal", UNTIMED),
)
OTHER_RATIO: tuple[Known, ...] = ()
OVER_ESTIMATE = (
    Known(
        "nvidia-h100",
        "heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=4096,head_dim=128,causal=bottom_right,page_size=16",
        "one short sequence takes 18 us, most of it latency",
    ),
)


@functools.cache
def selections(gpu: str) -> dict[str, Record]:
    """The selected record of each problem of a shipped table."""
    table = shipped_table_of(gpu)
    return {key: records[0] for key, records in by_problem(table.records).items()}


def keys_of(exceptions: tuple[Known, ...], gpu: str) -> set[str]:
    return {problem.key for row in exceptions if row.gpu == gpu for problem in parse_shape(row.shape)}


def has_peers(problem: Problem) -> bool:
    """Whether a backend of SDPA computes a problem, if need be with a mask in memory."""
    forward = forward_of(problem)
    if forward.dtype.is_quantized or forward.features & OTHER_LAYOUTS or forward.features - MASKED:
        return False
    square = forward.causal is Causal.NONE or forward.seqlen_q == forward.seqlen_kv
    return (square and not forward.features) or _mask_elements(forward) <= MAX_MASK_ELEMENTS


def estimate(record: Record, gpu: str) -> float | None:
    """The time in ms that dispatch would expect without the record, None without similar shapes."""
    target = find_target(gpu)
    others = tuple(row for key, row in selections(gpu).items() if row.config and key != record.problem.key)

    def serves(other: Record) -> bool:
        family = find_family(other.family)
        return unsupported_reason(family, record.problem, target, record.specialization) is None

    expected = forecast(record.problem, others, target, serves)
    return expected[1].ms if expected else None


@pytest.mark.parametrize("gpu", GPUS)
def test_shipped_times_have_enough_samples(gpu: str) -> None:
    table = shipped_table_of(gpu)
    few = {
        record.problem.key
        for record in table.records
        if record.measurement is None or record.measurement.samples < LEAST_SAMPLES
    }
    assert few == keys_of(FEW_SAMPLES, gpu)


@pytest.mark.parametrize("gpu", GPUS)
def test_shipped_times_have_peers_if_sdpa_computes_the_problem(gpu: str) -> None:
    alone = {
        key
        for key, record in selections(gpu).items()
        if record.measurement and not record.measurement.peers and has_peers(record.problem)
    }
    assert alone == keys_of(WITHOUT_PEERS, gpu)


def test_times_of_both_hopper_gpus_are_in_proportion() -> None:
    h100, h200 = map(selections, GPUS)
    least, most = RATIOS
    ratios = {key: h100[key].ms / h200[key].ms for key in h100.keys() & h200.keys()}  # type: ignore[operator]
    odd = {key for key, ratio in ratios.items() if not least <= ratio <= most}
    assert odd == keys_of(OTHER_RATIO, "nvidia-h100")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_no_shipped_time_is_far_above_the_estimate_from_other_shapes(gpu: str) -> None:
    slow = {
        key
        for key, record in selections(gpu).items()
        if record.config
        and (expected := estimate(record, gpu)) is not None
        and (record.ms or 0.0) > MOST_OF_ESTIMATE * expected
    }
    assert slow == keys_of(OVER_ESTIMATE, gpu)


@pytest.mark.parametrize("gpu", GPUS)
def test_sdpa_serves_where_its_usual_backend_was_faster(gpu: str) -> None:
    lost = 0
    for record in selections(gpu).values():
        assert record.measurement is not None
        peers = {peer.name: peer.ms for peer in record.measurement.peers if peer.name.startswith("sdpa-")}
        fastest = min(peers, key=lambda name: peers[name], default=None)
        if fastest is None or peers[fastest] >= (1 - SHIPPED_LOSS) * record.measurement.ms:
            continue
        selection = Selection(record=record, standing=VerificationStatus.TIMED)
        lost += 1
        assert faster_peer((selection,), record.problem, fastest) == fastest
    assert lost
