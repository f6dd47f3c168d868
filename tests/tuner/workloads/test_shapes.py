"""Shapes as users write them: ranges, lists, features, defaults, and mistakes that get a sentence."""

import json
from pathlib import Path

import msgspec
import pytest

from flashtune.core.errors import UsageError
from flashtune.core.features.table import FEATURES
from flashtune.core.problem import Causal, Direction, Dtype, Feature, KvScale, Problem
from flashtune.tuner.workloads.shapes import MAX_PROBLEMS, parse_shape
from flashtune.tuner.workloads.shapes_file import read_shapes_file


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


def test_bounds_without_effect_are_removed_as_in_calls() -> None:
    (problem,) = parse_shape("heads=4,seqlen=1024,head_dim=64,causal,window=4096")
    assert problem == parse_shape("heads=4,seqlen=1024,head_dim=64,causal")[0]


def test_omitted_keys_have_defaults() -> None:
    (problem,) = parse_shape("heads=4,seqlen=100,head_dim=64")
    assert (problem.kv_heads, problem.batch, problem.dtype, problem.causal) == (4, 1, Dtype.BF16, Causal.NONE)


def test_ranges_double_and_lists_are_combined() -> None:
    problems = parse_shape("heads=16,seqlen=512..4096,head_dim=64|128,dtype=bf16|fp16,causal=none|top_left")
    assert len(problems) == 4 * 2 * 2 * 2
    assert sorted({problem.seqlen_q for problem in problems}) == [512, 1024, 2048, 4096]
    assert {problem.causal for problem in problems} == {Causal.NONE, Causal.TOP_LEFT}


def test_list_may_contain_ranges_and_duplicates() -> None:
    problems = parse_shape("heads=1,seqlen=64|128..512|512,head_dim=64")
    assert [problem.seqlen_q for problem in problems] == [64, 128, 256, 512]


def test_tokens_fix_the_product_of_batch_and_length() -> None:
    problems = parse_shape("heads=16,seqlen=128..16384,head_dim=128,tokens=16384")
    assert {problem.batch * problem.seqlen_q for problem in problems} == {16384}


def test_lengths_of_queries_and_keys_may_differ() -> None:
    (problem,) = parse_shape("heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128,value_head_dim=64")
    assert (problem.seqlen_q, problem.seqlen_kv, problem.value_head_dim) == (1, 8192, 64)
    (one_side,) = parse_shape("heads=8,seqlen=64,seqlen_kv=128,head_dim=128")
    assert (one_side.seqlen_q, one_side.seqlen_kv) == (64, 128)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("head=32,seqlen=1,head_dim=64", "did you mean 'heads' or 'head_dim'?"),
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
        ("heads=32,seqlen=3,head_dim=64,tokens=16", "not a multiple"),
        ("heads=32,seqlen=4,head_dim=64,tokens=16,batch=2", "use one of them"),
        ("heads=32,seqlen=4,head_dim=64,window", "window has no value"),
        ("heads=32,seqlen=4,head_dim=64,window=:", "window has no bound"),
        ("heads=32,seqlen=4,head_dim=64,window=1:2:3", "window_right takes whole numbers"),
        ("heads=32,seqlen=4,head_dim=64,window=-1", "window_left takes whole numbers"),
        ("heads=32,seqlen=4,head_dim=64,window=8,window_left=4", "leave one of the two ways out"),
        ("heads=32,seqlen=4,head_dim=64,softcap=50", "choose one of true, false"),
        ("heads=32,seqlen=4,head_dim=64,page_size=24", "16, 32, 64, 128, 256"),
        ("heads=32,seqlen=4,head_dim=64,page_size=16,kv_lengths", "leave kv_lengths out"),
        ("heads=32,seqlen=4,head_dim=64,kv_dtype=int4", "did you mean 'int8'?"),
        ("heads=32,seqlen=4,head_dim=64,kv_scale=page", "add kv_dtype"),
        ("heads=32,seqlen=4,head_dim=64,dtype=e4m3,kv_dtype=int8", "leave queries in"),
        ("heads=32,seqlen=4,head_dim=64,bias=alibi", "additive"),
        ("heads=32,seqlen=4,head_dim=64,sink", "did you mean 'sink_tokens' or 'sinks'?"),
    ],
)
def test_invalid_shapes_raise_one_helpful_sentence(text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part.replace("?", r"\?")) as raised:
        parse_shape(text)
    assert raised.value.exit_code == 2


def test_shape_of_millions_of_problems_is_refused() -> None:
    lengths = "|".join(str(number) for number in range(1, MAX_PROBLEMS + 2))
    with pytest.raises(UsageError, match="shorten"):
        parse_shape(f"heads=1,head_dim=64,seqlen={lengths}")
    with pytest.raises(UsageError, match="shorten"):
        parse_shape("heads=1..16777216,head_dim=1..1024,seqlen=1..1073741824,batch=1..1073741824")


def test_a_window_bounds_one_side_or_both() -> None:
    problems = parse_shape("heads=1,seqlen=2048,head_dim=64,window=1023|127:1|127:0|:9|0")
    assert [(problem.window_left, problem.window_right, problem.causal) for problem in problems] == [
        (1023, None, Causal.NONE),
        (127, 1, Causal.NONE),
        (127, None, Causal.BOTTOM_RIGHT),
        (None, 9, Causal.NONE),
        (0, None, Causal.NONE),
    ]


def test_features_combine_in_a_shape() -> None:
    # Paged caches always have lengths.
    paged = [row.example for feature, row in FEATURES.items() if feature is not Feature.KV_LENGTHS]
    (problem,) = parse_shape(f"heads=8,kv_heads=2,seqlen_q=2,seqlen_kv=9000,head_dim=64,{','.join(paged)}")
    assert set(Feature) - problem.features == {Feature.KV_LENGTHS}


def test_backward_pass_is_a_separate_shape() -> None:
    shape = "heads=16,seqlen=4096,head_dim=128,causal,batch=2"
    (forward,) = parse_shape(shape)
    (backward,) = parse_shape(f"{shape},backward")
    assert backward == msgspec.structs.replace(forward, direction=Direction.BACKWARD)
    assert parse_shape(f"{shape},direction=backward") == (backward,)
    assert parse_shape(f"{shape},backward=false|true") == (forward, backward)
    assert parse_shape(f"{shape},backward,deterministic")[0].deterministic
    # The forward pass always gives the same bits.
    assert parse_shape(f"{shape},deterministic") == (forward,)
    with pytest.raises(UsageError, match="use one of them"):
        parse_shape(f"{shape},backward,direction=forward")


def test_lists_of_features_are_combined() -> None:
    problems = parse_shape(
        "heads=8,seqlen=64,head_dim=64,page_size=0|16|64,kv_dtype=none|int8,softcap=true|false"
    )
    assert len(problems) == 3 * 2 * 2
    assert {problem.page_size for problem in problems} == {0, 16, 64}
    one_scale = parse_shape("heads=8,seqlen=64,head_dim=64,kv_dtype=none|int8,kv_scale=head")
    assert [problem.kv_scale for problem in one_scale] == [KvScale.TENSOR, KvScale.HEAD]


def test_file_may_contain_text_json_and_comments(tmp_path: Path) -> None:
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
    problems = read_shapes_file(file)
    assert [candidate.heads for candidate in problems] == [4, 4, 8, 2]
    assert problems[2].causal is Causal.BOTTOM_RIGHT
    assert problems[3] == problem


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
def test_invalid_file_is_named(tmp_path: Path, content: bytes, part: str) -> None:
    file = tmp_path / "shapes.txt"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=part) as raised:
        read_shapes_file(file)
    assert str(file) in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_shapes_file(tmp_path / "none.txt")
