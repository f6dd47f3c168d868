"""Files of shapes: text, JSON and comments, and the line or file that a refusal names."""

import json
from pathlib import Path

import msgspec
import pytest

from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.tuner.workloads.shapes_file import read_shapes_file


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
