"""Any problem is read back from a shape that names it, and any text is problems or one sentence."""

import shlex
import string

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.canonical import normal_form
from flashtune.core.errors import UsageError
from flashtune.core.notices import search_command
from flashtune.core.problem import PAGE_SIZES, Bias, Causal, Direction, Dtype, KvDtype, KvScale, Problem
from flashtune.tuner.workloads.shape_values import KEYS
from flashtune.tuner.workloads.shapes import parse_shape

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


words = st.sampled_from([*KEYS, "1", "64", "0", "-3", "bf16", "top_left", "512..4096", "4..3", "1:0", ":"])
marks = st.sampled_from([",", "=", "|", "..", " ", "", "\n", "\x00", "٣", "1_0"])


numbers = st.tuples(st.sampled_from(KEYS), st.text(string.digits + ".|", max_size=12)).map("=".join)


@given(
    st.one_of(
        st.text(max_size=80),
        st.lists(words | marks, max_size=30).map("".join),
        st.lists(numbers, max_size=8).map(",".join),
    )
)
def test_any_text_is_parsed_or_refused_in_one_sentence(text: str) -> None:
    try:
        parsed = parse_shape(text)
    except UsageError as error:
        sentence = str(error)
        parsed = ()
    else:
        sentence = ""
        assert parsed
    assert all(isinstance(problem, Problem) for problem in parsed)
    assert "\n" not in sentence
