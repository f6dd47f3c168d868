"""Tests of files of recorded calls: permissions, concurrent writes and validation."""

import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import flashtune
from flashtune.core.errors import UsageError
from flashtune.core.kernel import Specialization
from flashtune.recording.recorder import CallCount, add_counts, read_counts
from tests.support.machine import PROBLEM


def test_file_permissions_are_preserved(file: Path) -> None:
    count = CallCount(PROBLEM, Specialization(), 1)
    other = file.with_name("usual")
    other.touch()
    add_counts(file, [count])
    assert file.stat().st_mode == other.stat().st_mode
    file.chmod(0o640)
    add_counts(file, [count])
    assert file.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in file.parent.iterdir()} <= {"usual", file.name, f"{file.name}.lock"}


def test_file_of_another_format_is_not_changed(file: Path) -> None:
    file.write_text("my thesis\n", encoding="utf-8")
    with pytest.raises(UsageError, match="line 1: not a recorded call"), flashtune.record_calls(file):
        pass
    assert file.read_text(encoding="utf-8") == "my thesis\n"
    with (
        pytest.raises(UsageError, match="no such folder"),
        flashtune.record_calls(file.parent / "none" / "x.jsonl"),
    ):
        pass


def test_concurrent_processes_write_one_file(file: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        import msgspec
        from flashtune.recording.recorder import CallCount, add_counts
        count = msgspec.json.decode(sys.argv[2], type=CallCount)
        for _ in range(10):
            add_counts(Path(sys.argv[1]), [count])
        """
    )
    line = msgspec.json.encode(CallCount(PROBLEM, Specialization(), 3)).decode()
    argv = [sys.executable, "-c", program, str(file), line]
    running = [subprocess.Popen(argv) for _ in range(3)]
    assert [process.wait(600) for process in running] == [0, 0, 0]
    assert [count.calls for count in read_counts(file)] == [90]
    assert sorted(path.name for path in file.parent.iterdir() if "recorded" in path.name) == [
        "recorded.jsonl",
        "recorded.jsonl.lock",
    ]


lines = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from(["problem", "specialization", "calls", "extra"])


@example(content=b'{"problem": {"\\n": 1}}')
@given(content=st.binary(max_size=60) | st.dictionaries(fields, lines).map(msgspec.json.encode))
def test_malformed_files_raise_one_sentence(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("recorded") / "x.jsonl"
    path.write_bytes(content)
    sentence = ""
    try:
        counts = read_counts(path)
    except UsageError as error:
        sentence, counts = str(error), ()
    assert counts == ()
    assert len(sentence) < 1000
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"calls": 0}, "calls"),
        ({"calls": 2**60}, "calls"),
        ({"calls": True}, "calls"),
        ({"more": 1}, "more"),
        ({"specialization": {"index_bits": 16}}, "index_bits"),
        ({"problem": {}}, "dtype"),
    ],
)
def test_values_out_of_bounds_are_reported(change: dict[str, object], part: str, file: Path) -> None:
    row = msgspec.to_builtins(CallCount(PROBLEM, Specialization(), 1))
    file.write_bytes(msgspec.json.encode({**row, **change}))
    with pytest.raises(UsageError, match=part):
        read_counts(file)


def test_deep_and_large_files_are_refused(file: Path) -> None:
    file.write_bytes(b"[" * 100_000)
    with pytest.raises(UsageError, match="line 1"):
        read_counts(file)
    file.write_bytes(b"\n" * 5000)
    with pytest.raises(UsageError, match="more than"):
        read_counts(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_counts(file.parent / "none")
    with pytest.raises(UsageError, match="no such folder"):
        add_counts(file.parent / "none" / "x", [CallCount(PROBLEM, Specialization(), 1)])
