"""Any problem is read back from a shape that names it, and any text is problems or one sentence."""

import random
import resource
import shlex
import time
from collections.abc import Callable

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.canonical import normal_form, shape_text
from flashtune.core.errors import UsageError
from flashtune.core.notices import search_command
from flashtune.core.problem import PAGE_SIZES, Bias, Causal, Direction, Dtype, KvDtype, KvScale, Problem
from flashtune.tuner.workloads.shape_values import ALONE, KEYS
from flashtune.tuner.workloads.shapes import MAX_PROBLEMS, parse_shape

bounds = st.none() | st.integers(0, 2**31 - 1)
amounts = st.just(0) | st.integers(1, 2**31 - 1)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any valid problem, with any features."""
    kv_heads = draw(st.integers(1, 64))
    dtype = draw(st.sampled_from(Dtype))
    kv_dtype = None if dtype.is_quantized else draw(st.none() | st.sampled_from(KvDtype))
    page_size = draw(st.sampled_from((0, *PAGE_SIZES)))
    return Problem(
        dtype=dtype,
        head_dim=draw(st.integers(1, 1024)),
        value_head_dim=draw(st.integers(1, 1024)),
        heads=kv_heads * draw(st.integers(1, 64)),
        kv_heads=kv_heads,
        batch=draw(st.integers(1, 2**31 - 1)),
        seqlen_q=draw(st.integers(1, 2**31 - 1)),
        seqlen_kv=draw(st.integers(1, 2**31 - 1)),
        causal=draw(st.sampled_from(Causal)),
        direction=draw(st.sampled_from(Direction)),
        window_left=draw(bounds),
        window_right=draw(bounds),
        sink_tokens=draw(amounts),
        chunk=draw(amounts),
        prefix=draw(st.booleans()),
        softcap=draw(st.booleans()),
        alibi=draw(st.booleans()),
        bias=draw(st.sampled_from(Bias)),
        sinks=draw(st.booleans()),
        packed=draw(amounts),
        kv_lengths=page_size == 0 and draw(st.booleans()),
        page_size=page_size,
        kv_dtype=kv_dtype,
        kv_scale=draw(st.sampled_from(KvScale)) if kv_dtype else KvScale.TENSOR,
        mla=draw(st.booleans()),
        dropout=draw(st.booleans()),
        deterministic=draw(st.booleans()),
    )


@given(problems())
def test_search_command_round_trips_the_problem(problem: Problem) -> None:
    program, command, option, shape = shlex.split(search_command(problem))
    assert (program, command, option) == ("flashtune", "search", "--shape")
    assert parse_shape(shape) == (normal_form(problem),)


@given(problems())
def test_json_line_round_trips_the_problem(problem: Problem) -> None:
    row = msgspec.json.decode(msgspec.json.encode(problem))
    shape = ",".join(f"{key}={str(value).lower()}" for key, value in row.items())
    assert parse_shape(shape) == (normal_form(problem),)


VALUES = (
    "0", "1", "2", "8", "16", "64", "128", "4096", "-1", "2147483647", "2147483648", "9" * 30, "9" * 5000,
    "1..1024", "1..2147483647", "1024..1", "0..8", "1..", "..8", "1...8", "1..8..64", "1|2|4", "|", "", " 7 ",
    "|".join(map(str, range(1, 200))), "1|" * 5000, "1e3", "0x10", "1_000", "\u0663", "\udc80", "\0", "nan",
    "inf", "bf16", "e4m3", "int8", "causal", "top_left", "none", "additive", "boolean", "page", "true", "5:0",
    ":", "::", "5:", ":3", "-5:-5",
)  # fmt: skip
NAMES = (*KEYS, *ALONE, "batches", "")
PIECES = ("=", ",", "|", "..", "\n", "\u00e9", "\0")
MAX_SECONDS = 5.0
MAX_BYTES = 2**30


def random_shape(seed: int) -> str:
    chance = random.Random(seed)
    parts = ["heads=8", "seqlen=512", "head_dim=64"]
    for _ in range(chance.choice((0, 1, 2, 3, 6))):
        name = chance.choice(NAMES)
        parts.append(name if chance.random() < 0.2 else f"{name}={chance.choice(VALUES)}")
    if chance.random() < 0.5:
        chance.shuffle(parts)
    if chance.random() < 0.3:
        parts.pop(chance.randrange(len(parts)))
    text = ",".join(parts)
    if chance.random() < 0.2:
        offset = chance.randrange(len(text) + 1)
        text = text[:offset] + chance.choice(PIECES) + text[offset + chance.randrange(3) :]
    return text


def parsed_or_refused(text: str) -> tuple[Problem, ...]:
    try:
        return parse_shape(text)
    except UsageError as error:
        sentence = str(error)
        assert 10 < len(sentence) <= 600, sentence[:600]
        assert "\n" not in sentence
        return ()


def test_random_shapes_are_parsed_or_refused_in_one_sentence(fuzz_count: Callable[[int, int], int]) -> None:
    count, accepted = fuzz_count(200, 2000), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(count):
        start = time.process_time()
        problems = parsed_or_refused(random_shape(seed))
        assert time.process_time() - start < MAX_SECONDS, seed
        assert len(problems) <= MAX_PROBLEMS, seed
        for problem in problems[:3]:
            assert parse_shape(shape_text(problem)) == (problem,), seed
        accepted += bool(problems)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_BYTES
    assert count / 20 < accepted < count / 2
