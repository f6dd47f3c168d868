import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from flashtune.core.config import Config
from flashtune.core.errors import TableError
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.record import (
    Measurement,
    Outcome,
    PeerTime,
    Provenance,
    Record,
    Resources,
    SharedTime,
    Verdict,
    Versions,
)
from flashtune.core.target import TARGETS, Target
from flashtune.db import codec
from flashtune.db.codec import decode_record, encode_record
from flashtune.templates.registry import families
from tests.db.records import make_problem, make_record

HEADS: dict[str, Any] = {"sharing": "heads", "ms": 1.0}
NO_CONFIG = "config is none of family forward_q_outer"
TEXT = st.text(max_size=400)
NATURAL = st.integers(0, 2**31 - 1)
TIME = st.floats(0, 1e12)
MILLISECONDS = st.floats(1e-6, 1e12)


def edited(record: Record, part: str, **changes: Any) -> bytes:
    """The record's JSON with fields of one of its parts replaced, or its own fields if `part` is empty."""
    fields = msgspec.json.decode(encode_record(record))
    (fields[part] if part else fields).update(changes)
    return msgspec.json.encode(fields)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    kv_heads = draw(st.integers(1, 2**10))
    return Problem(
        dtype=draw(st.sampled_from(Dtype)),
        head_dim=draw(st.integers(1, 256)),
        value_head_dim=draw(st.integers(1, 256)),
        heads=kv_heads * draw(st.integers(1, 2**10)),
        kv_heads=kv_heads,
        batch=draw(st.integers(1, 2**31 - 1)),
        seqlen_q=draw(st.integers(1, 2**31 - 1)),
        seqlen_kv=draw(st.integers(1, 2**31 - 1)),
        causal=draw(st.sampled_from(Causal)),
    )


@st.composite
def candidates(draw: st.DrawFn, problem: Problem, target: Target) -> tuple[str, Config | None]:
    """A family and a config of its space, or a baseline."""
    able = [family for family in families() if family.supports(problem, target) is None]
    family = draw(st.sampled_from([*able, None]))
    if family is None:
        return draw(st.sampled_from(sorted(codec.BASELINES))), None
    space = family.space(problem, target)
    values = {axis.name: draw(st.sampled_from(axis.values)) for axis in space.axes}
    return family.name, space.build(values)


@st.composite
def verdicts(draw: st.DrawFn) -> Verdict:
    """A verdict that does not contradict itself."""
    if draw(st.booleans()):
        return Verdict(True, draw(st.floats(0, 1)), draw(st.integers(1, 2**31 - 1)), "", draw(TEXT))
    ratio = st.floats(allow_nan=False, allow_infinity=False)
    return Verdict(False, draw(ratio), draw(NATURAL), draw(TEXT), draw(TEXT))


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    """A measurement with its percentiles in order."""
    p20, ms, p80 = sorted(draw(st.tuples(MILLISECONDS, MILLISECONDS, MILLISECONDS)))
    peers = st.lists(st.builds(PeerTime, TEXT, MILLISECONDS), max_size=3).map(tuple)
    shared = st.lists(
        st.builds(SharedTime, st.sampled_from(MaskSharing), MILLISECONDS, peers),
        unique_by=lambda time: time.sharing,
    ).map(tuple)
    samples, throttled = draw(st.integers(1, 2**31 - 1)), draw(st.booleans())
    return Measurement(ms, p20, p80, samples, throttled, draw(peers), draw(st.just(msgspec.UNSET) | shared))


@st.composite
def records(draw: st.DrawFn) -> Record:
    problem = draw(problems())
    target = draw(st.sampled_from(TARGETS))
    family, config = draw(candidates(problem, target))
    return Record(
        problem=problem,
        target=target.name,
        family=family,
        config=config,
        specialization=draw(
            st.builds(Specialization, st.sampled_from(Alignment), st.sampled_from([32, 64]), st.booleans())
        ),
        kernel=draw(st.none() | st.text("0123456789abcdef", min_size=32, max_size=32)),
        outcome=draw(st.sampled_from(Outcome)),
        provenance=draw(st.sampled_from(Provenance)),
        versions=draw(st.builds(Versions, TEXT, TEXT, TEXT, TEXT, TEXT, TEXT)),
        resources=draw(
            st.none()
            | st.builds(
                Resources,
                *(NATURAL, NATURAL, NATURAL, NATURAL, st.booleans(), TIME),
                st.just(msgspec.UNSET) | NATURAL,
            )
        ),
        verdict=draw(st.none() | verdicts()),
        measurement=draw(st.none() | measurements()),
        message=draw(TEXT),
    )


@pytest.mark.slow
@given(records())
@settings(max_examples=80)
def test_record_round_trips(record: Record) -> None:
    raw = encode_record(record)
    decoded = decode_record(raw)
    assert decoded == record
    assert type(decoded) is Record
    assert type(decoded.config) is type(record.config)
    assert encode_record(decoded) == raw


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_random_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(TableError):
        decode_record(raw)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=80)
def test_replaced_field_is_refused_or_has_its_type(data: st.DataObject) -> None:
    fields = msgspec.json.decode(encode_record(make_record()))
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=5,
        )
    )
    try:
        decoded = decode_record(msgspec.json.encode(fields))
    except TableError:
        return
    assert decode_record(encode_record(decoded)) == decoded


def test_a_kernel_that_returned_nan_can_be_stored() -> None:
    for ratio in (math.nan, math.inf):
        verdict = Verdict(passed=False, worst_ratio=ratio, checks=1, failed="tail", device="NVIDIA H200")
        decoded = decode_record(encode_record(make_record(outcome=Outcome.WRONG_RESULT, verdict=verdict)))
        assert decoded.verdict is not None
        assert decoded.verdict.worst_ratio > 1e300


@pytest.mark.parametrize(
    "changes",
    [
        {"message": "x" * 401},
        {"kernel": "no digest"},
        {"target": "\ud800"},
        {"resources": Resources(sram_bytes=1, compile_seconds=math.nan)},
        {"family": "unfused"},
        {"family": "no_such_family"},
        {"config": None},
        {"config": Config(num_warps=4, num_stages=2)},
    ],
)
def test_record_that_cannot_be_decoded_is_not_stored(changes: dict[str, Any]) -> None:
    with pytest.raises(TableError):
        encode_record(make_record(**changes))


def test_measurement_without_shared_masks_omits_the_field() -> None:
    fields = msgspec.json.decode(encode_record(make_record()))
    assert set(fields["measurement"]) == {"ms", "p20", "p80", "samples", "throttled", "peers"}


def test_times_of_shared_masks_are_read() -> None:
    decoded = decode_record(edited(make_record(), "measurement", shared=[HEADS]))
    assert decoded.measurement is not None
    assert decoded.measurement.shared == (SharedTime(MaskSharing.HEADS, 1.0),)


def test_a_million_fields_are_refused_quickly() -> None:
    many = b",".join(b'"f%d":0' % number for number in range(1_000_000))
    raw = encode_record(make_record()).replace(b'"config":{', b'"config":{' + many + b",")
    with pytest.raises(TableError, match="bytes is too large for a record"):
        decode_record(raw)


def test_deep_nesting_is_refused() -> None:
    raw = encode_record(make_record()).replace(b'"message":""', b'"message":' + b"[" * 100_000)
    with pytest.raises(TableError):
        decode_record(raw)


def test_errors_do_not_repeat_hostile_text() -> None:
    with pytest.raises(TableError) as caught:
        decode_record(edited(make_record(), "config", **{"f" * 50_000: 1}))
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("part", "changes", "reason"),
    [
        ("verdict", {"worst_ratio": 1e300}, "a pass with 1e"),
        ("verdict", {"worst_ratio": 1.0000001}, "a pass with 1 of"),
        ("verdict", {"worst_ratio": -0.5}, "a pass with -0.5"),
        ("verdict", {"failed": "needle"}, "a pass and names a failed check"),
        ("verdict", {"checks": 0}, "a pass with 0 checks"),
        ("verdict", {"checks": -1}, ">= 0"),
        ("measurement", {"samples": 0}, "measured with 0 samples"),
        ("measurement", {"ms": 0.0, "p20": 0.0}, "> 0"),
        ("measurement", {"ms": -1.0, "p20": -1.0}, "> 0"),
        ("measurement", {"p20": 1.5}, "is not between percentiles"),
        ("measurement", {"p80": 0.5}, "is not between percentiles"),
        ("measurement", {"peers": [{"name": "sdpa-cudnn", "ms": 0.0}]}, "> 0"),
        ("config", {"num_warps": 3}, "num_warps"),
        ("config", {"block_m": 48}, "block_m"),
        ("problem", {"seqlen_q": 0}, "is empty"),
        ("problem", {"seqlen_kv": 0}, "is empty"),
        ("problem", {"batch": 0}, "is empty"),
        ("resources", {"compile_seconds": -1.0}, ">= 0"),
        ("resources", {"registers": 2**40}, "<= 2"),
        ("problem", {"kv_heads": 3}, "do not divide"),
        ("", {"kernel": "a" * 32 + "\n"}, "regex"),
        ("", {"target": "nvidia-h200\n"}, "regex"),
        ("config", {"block_m": "__import__('os').system('true')"}, NO_CONFIG),
        ("config", {"block_m": -64}, NO_CONFIG),
        ("config", {"block_m": 64.5}, NO_CONFIG),
        ("config", {"block_m": 10**30}, NO_CONFIG),
        ("config", {"block_m": True}, NO_CONFIG),
        ("config", {"num_warps": 0}, NO_CONFIG),
        ("config", {"surprise": 1}, NO_CONFIG),
        ("", {"family": "decode_split_kv"}, "config is none of family decode_split_kv"),
        ("measurement", {"shared": [{"sharing": "heads", "ms": 0.0}]}, "> 0"),
        ("measurement", {"shared": [{"sharing": "heads", "ms": -1.0}]}, "> 0"),
        ("measurement", {"shared": [HEADS | {"peers": [{"name": "sdpa-cudnn", "ms": 0.0}]}]}, "> 0"),
        ("measurement", {"shared": [{"sharing": "keys", "ms": 1.0}]}, "keys"),
        ("measurement", {"shared": [{"sharing": "heads"}]}, "ms"),
        ("measurement", {"shared": [HEADS | {"p20": 1.0}]}, "p20"),
        ("measurement", {"shared": [HEADS, HEADS]}, "two times for one way"),
        ("measurement", {"shared": None}, "got `null`"),
    ],
)
def test_malformed_or_contradictory_record_is_refused(
    part: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TableError, match=reason):
        decode_record(edited(make_record(), part, **changes))


def test_failed_verdict_accepts_any_numbers() -> None:
    verdict = Verdict(passed=False, worst_ratio=1e300, checks=0, failed="needle", device="NVIDIA H200")
    record = make_record(outcome=Outcome.WRONG_RESULT, verdict=verdict)
    assert decode_record(encode_record(record)) == record


def test_non_finite_time_is_refused() -> None:
    with pytest.raises(TableError, match="median of nan ms"):
        Measurement(ms=math.nan, p20=1.0, p80=1.0, samples=1)


def test_a_prediction_has_no_samples() -> None:
    predicted = make_record(
        provenance=Provenance.PREDICTED, verdict=None, measurement=Measurement(1.0, 1.0, 1.0, 0)
    )
    assert decode_record(encode_record(predicted)) == predicted


def test_every_size_of_every_space_can_be_stored() -> None:
    for family in families():
        problem = make_problem(direction=family.direction)
        for target in TARGETS:
            for axis in family.space(problem, target).axes:
                config = family.default(problem, target)
                for value in axis.values:
                    raw = msgspec.json.encode(msgspec.structs.replace(config, **{axis.name: value}))
                    assert getattr(msgspec.json.decode(raw, type=family.config_type), axis.name) == value
