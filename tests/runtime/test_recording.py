"""Tests of recorded calls: counts and their files, problems, limits, and recording of a whole process."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import flashtune
from flashtune.core.errors import UsageError
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.machine import RECORD_VARIABLE
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.problem import Direction, Problem
from flashtune.recording import recorder
from flashtune.recording.callers import called_by, present_caller
from flashtune.recording.recorder import (
    MAX_CALLS,
    CallCount,
    add_counts,
    counted,
    merged,
    read_counts,
    recordings_of_process,
)
from flashtune.runtime.session import SESSION
from tests.support.machine import PROBLEM, Machine, inputs, tuned
from tests.support.records import make_record


@pytest.fixture(autouse=True)
def served(machine: Machine) -> None:
    tuned(machine, make_record(PROBLEM))


def with_length(problem: Problem, length: int) -> Problem:
    return msgspec.structs.replace(problem, seqlen_q=length, seqlen_kv=length)


def test_recorded_problems_have_call_counts(file: Path) -> None:
    short = with_length(PROBLEM, 64)
    with flashtune.record_calls(file):
        for _ in range(3):
            flashtune.attention(*inputs(PROBLEM), causal=True)
        flashtune.attention(*inputs(short), causal=True)
    flashtune.attention(*inputs(short), causal=True)
    told = {count.problem: count.calls for count in read_counts(file)}
    assert told == {PROBLEM: 3, short: 1}


def test_recorded_problems_contain_no_tensor_values(file: Path) -> None:
    with flashtune.record_calls(file):
        flashtune.attention(*inputs(PROBLEM))
    (line,) = file.read_bytes().splitlines()
    assert set(msgspec.json.decode(line)) == {"problem", "specialization", "calls"}
    assert len(line) < 500


def test_cached_shapes_are_recorded(file: Path) -> None:
    flashtune.attention(*inputs(PROBLEM), causal=True)
    with flashtune.record_calls(file):
        flashtune.attention(*inputs(PROBLEM), causal=True)
    assert [count.calls for count in read_counts(file)] == [1]


def test_executors_are_not_wrapped_without_recording(file: Path) -> None:
    def serve(number: int) -> int:
        return number

    assert counted(serve, (), PROBLEM, Specialization()) is serve
    with flashtune.record_calls(file):
        flashtune.attention(*inputs(PROBLEM), causal=True)
        assert {server.__name__ for server in SESSION.executors.values()} == {"run"}
        assert all(hasattr(server, "__wrapped__") for server in SESSION.executors.values())
    assert not SESSION.executors
    flashtune.attention(*inputs(PROBLEM), causal=True)
    assert not any(hasattr(server, "__wrapped__") for server in SESSION.executors.values())


def test_plan_created_while_recording_is_counted(file: Path) -> None:
    tensors = inputs(PROBLEM)
    before = flashtune.plan(*tensors, causal=True)
    with flashtune.record_calls(file):
        before(*tensors)
        within = flashtune.plan(*tensors, causal=True)  # runs once
        within(*tensors)
    within(*tensors)
    assert [count.calls for count in read_counts(file)] == [2]


def test_calls_are_counted_by_alignment(file: Path, copy_ms: Callable[[float], None]) -> None:
    copy_ms(float("inf"))
    q, k, v = inputs(PROBLEM)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    with flashtune.record_calls(file):
        flashtune.attention(q, k, v, causal=True)
        flashtune.attention(odd, k, v, causal=True)
    counts = read_counts(file)
    assert {count.specialization.alignment for count in counts} == {Alignment.SIXTEEN, Alignment.ANY}
    assert {count.problem for count in counts} == {PROBLEM}


def test_empty_and_float64_calls_are_not_recorded(file: Path) -> None:
    q, k, v = inputs(PROBLEM)
    with flashtune.record_calls(file):
        flashtune.attention(q, k[:, :, :0], v[:, :, :0])
        flashtune.attention(q.requires_grad_(), k[:, :, :0], v[:, :, :0])
        flashtune.attention(q.double(), k.double(), v.double())
    assert not file.exists()


@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
def test_calls_that_need_gradients_are_counted_for_both_passes(file: Path) -> None:
    q, k, v = inputs(PROBLEM)
    with flashtune.record_calls(file):
        for _ in range(3):
            flashtune.attention(q.requires_grad_(), k, v, causal=True)
    counts = {count.problem: (count.calls, count.specialization.lse) for count in read_counts(file)}
    backward = msgspec.structs.replace(PROBLEM, direction=Direction.BACKWARD)
    assert counts == {PROBLEM: (3, True), backward: (3, False)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::flashtune.core.notices.FlashtuneWarning")
def test_both_passes_of_compiled_programs_are_recorded(machine: Machine, file: Path) -> None:
    torch._dynamo.reset()
    machine.launch = lambda *_, **__: lambda *_: None
    backward = msgspec.structs.replace(PROBLEM, direction=Direction.BACKWARD)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return flashtune.attention(*tensors, causal=True).float().square().sum()

    call = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with flashtune.record_calls(file):
        for _ in range(2):
            call(*(tensor.requires_grad_() for tensor in inputs(PROBLEM))).backward()
    assert {count.problem: count.calls for count in read_counts(file)} == {PROBLEM: 2, backward: 2}


def test_calls_are_recorded_with_their_features(machine: Machine, file: Path) -> None:
    machine.launch = lambda *_, **__: lambda *_: None
    q, k, v = inputs(PROBLEM)
    with flashtune.record_calls(file):
        for _ in range(2):
            flashtune.attention(q, k, v, causal=True, window=(8, 0), sinks=torch.zeros(PROBLEM.heads))
    (count,) = read_counts(file)
    assert count.problem == msgspec.structs.replace(PROBLEM, window_left=8, sinks=True)
    assert count.calls == 2


def test_recordings_to_one_file_are_summed(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    with flashtune.record_calls(file), flashtune.record_calls(other):
        flashtune.attention(*inputs(PROBLEM), causal=True)
    with flashtune.record_calls(file):
        flashtune.attention(*inputs(PROBLEM), causal=True)
    assert [count.calls for count in read_counts(file)] == [2]
    assert [count.calls for count in read_counts(other)] == [1]


def test_interrupted_program_is_recorded(file: Path) -> None:
    def program() -> None:
        flashtune.attention(*inputs(PROBLEM), causal=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), flashtune.record_calls(file):
        program()
    assert not SESSION.recordings
    assert [count.calls for count in read_counts(file)] == [1]


def test_number_of_recorded_problems_is_bounded(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_LINES", 2)
    with flashtune.record_calls(file):
        for length in (64, 128, 192, 64):
            flashtune.attention(*inputs(with_length(PROBLEM, length)), causal=True)
    assert {count.problem.seqlen_q: count.calls for count in read_counts(file)} == {64: 2, 128: 1}


def test_merge_keeps_the_problems_with_most_calls() -> None:
    counts = [CallCount(with_length(PROBLEM, length), Specialization(), length) for length in (1, 2, 3)]
    assert [count.calls for count in merged([*counts, *counts], most=2)] == [6, 4]
    most = CallCount(PROBLEM, Specialization(), MAX_CALLS)
    assert merged([most, most]) == (most,)


def test_functions_call_for_their_integration() -> None:
    seen: list[str] = []

    @called_by("inner")
    def inner() -> None:
        seen.append(present_caller())
        raise ValueError

    @called_by("outer")
    def outer() -> None:
        with pytest.raises(ValueError):  # noqa: PT011 - the error is this test's
            inner()
        seen.append(present_caller())

    outer()
    assert [*seen, present_caller()] == ["inner", "outer", ""]


PROGRAM = """
import warnings
warnings.simplefilter("error")
from flashtune.recording.recorder import counted
from flashtune.runtime.session import SESSION
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Dtype, Problem
problem = Problem(dtype=Dtype.BF16, head_dim=64, value_head_dim=64, heads=1, kv_heads=1, batch=1,
                  seqlen_q=8, seqlen_kv=8)
serve = counted(abs, SESSION.recordings, problem, Specialization())
print(serve(-1), serve(-2))
"""


@pytest.mark.slow
def test_environment_variable_records_a_process(file: Path) -> None:
    environment = {**os.environ, RECORD_VARIABLE: str(file)}
    argv = [sys.executable, "-c", PROGRAM]
    told = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stdout) == (0, "1 2\n"), told.stderr
    assert [count.calls for count in read_counts(file)] == [2]


@pytest.mark.parametrize(
    ("name", "message"),
    [("none/x.jsonl", "no such folder"), ("x" * 300, "FLASHTUNE_RECORD is too long for a path")],
)
def test_invalid_file_in_environment_variable_causes_a_warning(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RECORD_VARIABLE, name)
    with pytest.warns(FlashtuneWarning, match=message):
        assert recordings_of_process() == ()


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
