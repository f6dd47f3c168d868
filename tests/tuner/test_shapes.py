from __future__ import annotations

import contextlib
import json
import shlex
import string
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.errors import UsageError
from flashtune.features import PAGE_SIZES, Bias, Feature, KvDtype, KvScale
from flashtune.normal_form import normal_form
from flashtune.notices import search_command
from flashtune.problem import Causal, Direction, Dtype, Problem
from flashtune.tuner.shape_values import KEYS
from flashtune.tuner.shapes import MAX_PROBLEMS, parse_shape
from flashtune.tuner.shapes_file import read_shapes_file

bounds = st.none() | st.integers(0, 2**31 - 1)
amounts = st.just(0) | st.integers(1, 2**31 - 1)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any problem that there can be, with any features."""
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
        first_tokens=draw(amounts),
        chunk=draw(amounts),
        prefix=draw(st.booleans()),
        softcap=draw(st.booleans()),
        alibi=draw(st.booleans()),
        bias=draw(st.sampled_from(Bias)),
        sinks=draw(st.booleans()),
        packed=draw(amounts),
        lengths=page_size == 0 and draw(st.booleans()),
        page_size=page_size,
        kv_dtype=kv_dtype,
        kv_scale=draw(st.sampled_from(KvScale)) if kv_dtype else KvScale.TENSOR,
        latent=draw(st.booleans()),
        dropout=draw(st.booleans()),
        deterministic=draw(st.booleans()),
    )


@given(problems())
def test_the_command_that_the_runtime_advises_names_the_problem(problem: Problem) -> None:
    program, command, option, shape = shlex.split(search_command(problem))
    assert (program, command, option) == ("flashtune", "search", "--shape")
    assert parse_shape(shape) == (normal_form(problem),)


@given(problems())
def test_a_line_of_json_names_the_problem_that_it_was_made_of(problem: Problem) -> None:
    row = msgspec.json.decode(msgspec.json.encode(problem))
    shape = ",".join(f"{key}={str(value).lower()}" for key, value in row.items())
    assert parse_shape(shape) == (normal_form(problem),)


words = st.sampled_from([*KEYS, "1", "64", "0", "-3", "bf16", "top_left", "512..4096", "4..3", "1:0", ":"])
marks = st.sampled_from([",", "=", "|", "..", " ", "", "\n", "\x00", "٣", "1_0"])


@given(st.one_of(st.text(max_size=80), st.lists(st.one_of(words, marks), max_size=30).map("".join)))
def test_whatever_is_typed_is_problems_or_one_sentence(text: str) -> None:
    try:
        found = parse_shape(text)
    except UsageError as error:
        sentence = str(error)
        found = ()
    else:
        sentence = ""
        assert found
    assert all(isinstance(problem, Problem) for problem in found)
    assert "\n" not in sentence


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.text(string.digits + ".|", max_size=12)), max_size=8))
def test_numbers_of_every_form_are_problems_or_one_sentence(pairs: list[tuple[str, str]]) -> None:
    with contextlib.suppress(UsageError):
        assert parse_shape(",".join(f"{key}={value}" for key, value in pairs))


def test_the_documented_shape() -> None:
    (problem,) = parse_shape("heads=32,kv_heads=8,seqlen=4096,head_dim=128,dtype=bf16,causal,batch=2")
    assert problem == Problem(
        dtype=Dtype.BF16,
        head_dim=128,
        value_head_dim=128,
        heads=32,
        kv_heads=8,
        batch=2,
        seqlen_q=4096,
        seqlen_kv=4096,
        causal=Causal.BOTTOM_RIGHT,
    )


def test_bounds_that_bound_nothing_are_left_out_as_calls_leave_them_out() -> None:
    (problem,) = parse_shape("heads=4,seqlen=1024,head_dim=64,causal,window=4096")
    assert problem == parse_shape("heads=4,seqlen=1024,head_dim=64,causal")[0]


def test_what_is_left_out_has_defaults() -> None:
    (problem,) = parse_shape("heads=4,seqlen=100,head_dim=64")
    assert (problem.kv_heads, problem.batch, problem.dtype, problem.causal) == (4, 1, Dtype.BF16, Causal.NONE)


def test_ranges_double_and_lists_combine() -> None:
    found = parse_shape("heads=16,seqlen=512..4096,head_dim=64|128,dtype=bf16|fp16,causal=none|top_left")
    assert len(found) == 4 * 2 * 2 * 2
    assert sorted({problem.seqlen_q for problem in found}) == [512, 1024, 2048, 4096]
    assert {problem.causal for problem in found} == {Causal.NONE, Causal.TOP_LEFT}


def test_a_list_may_hold_ranges_and_repeats() -> None:
    found = parse_shape("heads=1,seqlen=64|128..512|512,head_dim=64")
    assert [problem.seqlen_q for problem in found] == [64, 128, 256, 512]


def test_tokens_fix_the_product_of_batch_and_length() -> None:
    found = parse_shape("heads=16,seqlen=128..16384,head_dim=128,tokens=16384")
    assert {problem.batch * problem.seqlen_q for problem in found} == {16384}


def test_lengths_may_differ() -> None:
    (problem,) = parse_shape("heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,value_head_dim=64")
    assert (problem.seqlen_q, problem.seqlen_kv, problem.value_head_dim) == (1, 8192, 64)
    (one_side,) = parse_shape("heads=8,seqlen=64,seqlen_kv=128,head_dim=128")
    assert (one_side.seqlen_q, one_side.seqlen_kv) == (64, 128)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("head=32,seqlen=1,head_dim=64", "did you mean 'heads'?"),
        ("heads=32,seqlen=1,head_dim=64,dtype=bfloat", "did you mean 'bfloat16'?"),
        ("heads=32,seqlen=1,head_dim=64,causal=topleft", "did you mean 'top_left'?"),
        ("heads=32,seqlen=1,head_dim=64,dtype=int8", "bf16, fp16, fp32"),
        ("heads=32,kv_heads=5,seqlen=1,head_dim=64", "do not divide"),
        ("heads=32,seqlen=512..1000,head_dim=64", "doubles"),
        ("heads=32,seqlen=512..256,head_dim=64", "doubles"),
        ("heads=32,seqlen=0,head_dim=64", "between 1 and"),
        ("heads=32,seqlen=-1,head_dim=64", "whole numbers"),
        ("heads=32,seqlen=1e3,head_dim=64", "whole numbers"),
        ("heads=32,seqlen=,head_dim=64", "whole numbers"),
        ("heads=32,seqlen,head_dim=64", "seqlen has no value"),
        ("heads=32,seqlen=1,head_dim=4096", "between 1 and 1,024"),
        ("heads=32,head_dim=64", "needs its lengths"),
        ("heads=32,seqlen_q=4,head_dim=64", "needs its lengths"),
        ("seqlen=32,head_dim=64", "needs heads"),
        ("heads=32,seqlen=64", "needs head_dim"),
        ("", "needs heads"),
        ("heads=32,heads=16,seqlen=1,head_dim=64", "given twice"),
        ("heads=32,seqlen=1,seqlen_q=1,seqlen_kv=1,head_dim=64", "leave one of the three out"),
        ("heads=32,seqlen=3,head_dim=64,tokens=16", "no multiple"),
        ("heads=32,seqlen=4,head_dim=64,tokens=16,batch=2", "leave one of the two out"),
        ("heads=32,seqlen=4,head_dim=64,window", "window has no value"),
        ("heads=32,seqlen=4,head_dim=64,window=:", "window has no bound"),
        ("heads=32,seqlen=4,head_dim=64,window=1:2:3", "window_right takes whole numbers"),
        ("heads=32,seqlen=4,head_dim=64,window=-1", "window_left takes whole numbers"),
        ("heads=32,seqlen=4,head_dim=64,window=8,window_left=4", "leave one of the two ways out"),
        ("heads=32,seqlen=4,head_dim=64,softcap=50", "choose one of true, false"),
        ("heads=32,seqlen=4,head_dim=64,page_size=24", "16, 32, 64, 128, 256"),
        ("heads=32,seqlen=4,head_dim=64,page_size=16,lengths", "leave lengths out"),
        ("heads=32,seqlen=4,head_dim=64,kv_dtype=int4", "did you mean 'int8'?"),
        ("heads=32,seqlen=4,head_dim=64,kv_scale=page", "add kv_dtype"),
        ("heads=32,seqlen=4,head_dim=64,dtype=e4m3,kv_dtype=int8", "leave queries in"),
        ("heads=32,seqlen=4,head_dim=64,bias=alibi", "additive"),
        ("heads=32,seqlen=4,head_dim=64,sink", "did you mean 'sinks'?"),
    ],
)
def test_mistakes_get_a_sentence_that_helps(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part.replace("?", r"\?")) as raised:
        parse_shape(text)
    assert raised.value.exit_code == 2


def test_a_shape_cannot_name_millions_of_problems() -> None:
    lengths = "|".join(str(number) for number in range(1, MAX_PROBLEMS + 2))
    with pytest.raises(UsageError, match="shorten"):
        parse_shape(f"heads=1,head_dim=64,seqlen={lengths}")
    with pytest.raises(UsageError, match="shorten"):
        parse_shape("heads=1..16777216,head_dim=1..1024,seqlen=1..1073741824,batch=1..1073741824")


def test_a_file_holds_text_json_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "shapes.txt"
    (problem,) = parse_shape("heads=2,seqlen=8,head_dim=64,causal")
    rows = [
        "# prefill",
        "",
        "heads=4,seqlen=64|128,head_dim=64  # two lengths",
        json.dumps({"heads": 8, "kv_heads": 2, "seqlen": 64, "head_dim": 32, "causal": True}),
        msgspec.json.encode(problem).decode(),
        "heads=4,seqlen=64,head_dim=64",
    ]
    file.write_text("\n".join(rows), encoding="utf-8")
    found = read_shapes_file(file)
    assert [candidate.heads for candidate in found] == [4, 4, 8, 2]
    assert found[2].causal is Causal.BOTTOM_RIGHT
    assert found[3] == problem


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"heads=4,seqlen=64,head_dim=64\nheads=x,seqlen=1,head_dim=1", "line 2"),
        (b'{"heads": 4, "seqlen": [64]}', "line 1"),
        (b'{"heads": 4', "line 1"),
        (b"{" * 5000, "line 1"),
        (b'{"heads": 4, "seqlen": 64, "head_dim": 64, "direction": "sideways"}', "direction"),
        (b"\xff\xfe", "UTF-8"),
        (b"# nothing\n", "is empty"),
        (b"#" * (1024 * 1024 + 1), "larger than"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, part: str) -> None:
    file = tmp_path / "shapes.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=part) as raised:
        read_shapes_file(file)
    assert str(file) in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_shapes_file(tmp_path / "none.txt")


def test_quantized_inputs_are_named_like_other_types() -> None:
    (problem,) = parse_shape("heads=8,seqlen=512,head_dim=128,dtype=e4m3,causal")
    assert problem.dtype is Dtype.E4M3
    assert problem.key == "forward_e4m3_d128_h8x8_b1_q512_k512_bottom_right"


def test_a_window_bounds_one_side_or_both() -> None:
    found = parse_shape("heads=1,seqlen=2048,head_dim=64,window=1023|127:1|127:0|:9|0")
    assert [(problem.window_left, problem.window_right, problem.causal) for problem in found] == [
        (1023, None, Causal.NONE),
        (127, 1, Causal.NONE),
        (127, None, Causal.BOTTOM_RIGHT),
        (None, 9, Causal.NONE),
        (0, None, Causal.NONE),
    ]


def test_every_feature_has_a_key() -> None:
    text = (
        "heads=8,kv_heads=2,seqlen_q=1,seqlen_kv=4096,head_dim=64,causal,window=1023,first_tokens=4,chunk=2048,"
        "prefix,softcap,alibi,bias=boolean,sinks,packed=65536,page_size=16,kv_dtype=e4m3,kv_scale=page,latent,"
        "dropout,backward,deterministic"
    )
    (problem,) = parse_shape(text)
    assert set(Feature) - problem.features == {Feature.LENGTHS}
    (dense,) = parse_shape("heads=8,seqlen=64,head_dim=64,lengths")
    assert dense.features == {Feature.LENGTHS}


def test_the_backward_pass_is_a_shape_of_its_own() -> None:
    shape = "heads=16,seqlen=4096,head_dim=128,causal,batch=2"
    (forward,) = parse_shape(shape)
    (backward,) = parse_shape(f"{shape},backward")
    assert backward == msgspec.structs.replace(forward, direction=Direction.BACKWARD)
    assert parse_shape(f"{shape},direction=backward") == (backward,)
    assert parse_shape(f"{shape},backward=false|true") == (forward, backward)
    assert parse_shape(f"{shape},backward,deterministic")[0].deterministic
    # The forward pass always gives the same bits.
    assert parse_shape(f"{shape},deterministic") == (forward,)
    with pytest.raises(UsageError, match="leave one of the two out"):
        parse_shape(f"{shape},backward,direction=forward")


def test_lists_of_features_combine() -> None:
    found = parse_shape(
        "heads=8,seqlen=64,head_dim=64,page_size=0|16|64,kv_dtype=none|int8,softcap=true|false"
    )
    assert len(found) == 3 * 2 * 2
    assert {problem.page_size for problem in found} == {0, 16, 64}
    one_scale = parse_shape("heads=8,seqlen=64,head_dim=64,kv_dtype=none|int8,kv_scale=head")
    assert [problem.kv_scale for problem in one_scale] == [KvScale.TENSOR, KvScale.HEAD]
