"""Tests of the margins of untimed configs, and of ties between winners."""

import itertools

import msgspec
import pytest

from flashtune.core.problem import Causal
from flashtune.core.record import Record
from flashtune.db.table import shipped_table
from flashtune.dispatch import forecast as forecasts
from flashtune.dispatch.forecast import forecast
from flashtune.dispatch.nearest import DECODING_FAMILY
from flashtune.templates.registry import find_family
from tests.support.untuned import TARGET, anyone, shape


@pytest.fixture(scope="module")
def records() -> tuple[Record, ...]:
    table = shipped_table(TARGET.name)
    assert table is not None
    return table.records


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim": 256, "value_head_dim": 256, "heads": 8, "kv_heads": 4, "window_left": 1023},
        {"heads": 32, "kv_heads": 8, "seqlen_q": 1, "seqlen_kv": 5000},
        {"direction": "backward"},
    ],
    ids=["window", "decode", "backward"],
)
def test_unmeasured_configs_have_larger_margins(
    changes: dict[str, object], records: tuple[Record, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    other, plain = shape(batch=3, **changes), shape(batch=3)
    estimates = {problem: forecast(problem, records, TARGET, anyone) for problem in (other, plain)}
    monkeypatch.setattr(forecasts, "NEIGHBOUR_MARGIN", -0.9)
    again = {problem: forecast(problem, records, TARGET, anyone) for problem in estimates}
    assert estimates[other] is not None
    assert again[other] == estimates[other]
    assert again[plain] != estimates[plain]


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("masks", list(itertools.permutations((Causal.NONE, Causal.BOTTOM_RIGHT))), ids=str)
def test_winners_of_equivalent_masks_are_considered(
    masks: tuple[Causal, ...], causal: Causal, records: tuple[Record, ...]
) -> None:
    tuned = shape(heads=32, kv_heads=8, batch=4, seqlen_q=1, seqlen_kv=8192)
    config = find_family(DECODING_FAMILY).default(tuned, TARGET)
    won = msgspec.structs.replace(records[0], family=DECODING_FAMILY, config=config)
    named = (msgspec.structs.replace(tuned, causal=mask) for mask in masks)
    both = [msgspec.structs.replace(won, problem=problem) for problem in named]
    asked = msgspec.structs.replace(tuned, seqlen_kv=9000, causal=causal)
    estimate = forecast(asked, both, TARGET, anyone)
    assert estimate is not None
    assert estimate[1].nearest.problem.causal is causal
