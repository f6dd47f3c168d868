from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flashtune
from flashtune import backward_servers, calls, recording, serving
from flashtune.call_counts import MAX_CALLS, CallCount, add_counts, merged, read_counts
from flashtune.errors import UsageError
from flashtune.kernel import Alignment, Specialization
from flashtune.notices import FlashtuneWarning
from flashtune.problem import Direction, Problem
from tests.machine import Machine, inputs, tuned
from tests.runtime.conftest import MakeRecord


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "recorded.jsonl"


@pytest.fixture(autouse=True)
def served(machine: Machine, problem: Problem, make_record: MakeRecord) -> None:
    tuned(machine, make_record(problem))


def with_length(problem: Problem, length: int) -> Problem:
    return msgspec.structs.replace(problem, seqlen_q=length, seqlen_kv=length)


def test_problems_are_written_with_how_often_they_were_called(problem: Problem, file: Path) -> None:
    short = with_length(problem, 64)
    with flashtune.record_calls(file):
        for _ in range(3):
            flashtune.attention(*inputs(problem), causal=True)
        flashtune.attention(*inputs(short), causal=True)
    flashtune.attention(*inputs(short), causal=True)
    told = {count.problem: count.calls for count in read_counts(file)}
    assert told == {problem: 3, short: 1}


def test_what_tensors_hold_is_not_written(problem: Problem, file: Path) -> None:
    with flashtune.record_calls(file):
        flashtune.attention(*inputs(problem))
    (line,) = file.read_bytes().splitlines()
    assert set(msgspec.json.decode(line)) == {"problem", "specialization", "calls"}
    assert len(line) < 500


def test_shapes_that_were_met_before_are_counted_too(problem: Problem, file: Path) -> None:
    flashtune.attention(*inputs(problem), causal=True)
    with flashtune.record_calls(file):
        flashtune.attention(*inputs(problem), causal=True)
    assert [count.calls for count in read_counts(file)] == [1]


def test_a_call_goes_straight_to_its_server_where_nothing_is_recorded(problem: Problem, file: Path) -> None:
    def serve(number: int) -> int:
        return number

    assert recording.counted(serve, problem, Specialization()) is serve
    with flashtune.record_calls(file):
        flashtune.attention(*inputs(problem), causal=True)
        assert {server.__name__ for server in calls._servers.values()} == {"serve_plain"}
        assert all(hasattr(server, "__wrapped__") for server in calls._servers.values())
    assert not calls._servers
    flashtune.attention(*inputs(problem), causal=True)
    assert not any(hasattr(server, "__wrapped__") for server in calls._servers.values())


def test_a_plan_counts_if_it_was_made_while_recording(problem: Problem, file: Path) -> None:
    tensors = inputs(problem)
    before = flashtune.plan(*tensors, causal=True)
    with flashtune.record_calls(file):
        before(*tensors)
        within = flashtune.plan(*tensors, causal=True)  # runs once
        within(*tensors)
    within(*tensors)
    assert [count.calls for count in read_counts(file)] == [2]


def test_alignment_tells_calls_apart(problem: Problem, file: Path) -> None:
    q, k, v = inputs(problem)
    odd = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    with flashtune.record_calls(file):
        flashtune.attention(q, k, v, causal=True)
        flashtune.attention(odd, k, v, causal=True)
    found = read_counts(file)
    assert {count.specialization.alignment for count in found} == {Alignment.SIXTEEN, Alignment.ANY}
    assert {count.problem for count in found} == {problem}


def test_empty_calls_are_left_out(problem: Problem, file: Path) -> None:
    q, k, v = inputs(problem)
    with flashtune.record_calls(file):
        flashtune.attention(q, k[:, :, :0], v[:, :, :0])
        flashtune.attention(q.requires_grad_(), k[:, :, :0], v[:, :, :0])
        flashtune.attention(q.double(), k.double(), v.double())
    assert not file.exists()


@pytest.mark.filterwarnings("ignore::flashtune.notices.FlashtuneWarning")
def test_calls_that_need_gradients_count_for_both_passes(problem: Problem, file: Path) -> None:
    q, k, v = inputs(problem)
    with flashtune.record_calls(file):
        for _ in range(3):
            flashtune.attention(q.requires_grad_(), k, v, causal=True)
    found = {count.problem: (count.calls, count.specialization.lse) for count in read_counts(file)}
    backward = msgspec.structs.replace(problem, direction=Direction.BACKWARD)
    assert found == {problem: (3, True), backward: (3, False)}


@pytest.mark.filterwarnings("ignore::flashtune.notices.FlashtuneWarning")
def test_both_passes_of_compiled_programs_are_recorded(
    problem: Problem, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(backward_servers, "bind_backward", lambda *_, **__: lambda *_: None)
    backward = msgspec.structs.replace(problem, direction=Direction.BACKWARD)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return flashtune.attention(*tensors, causal=True).float().square().sum()

    call = torch.compile(loss, backend="aot_eager", fullgraph=True)
    with flashtune.record_calls(file):
        for _ in range(2):
            call(*(tensor.requires_grad_() for tensor in inputs(problem))).backward()
    assert {count.problem: count.calls for count in read_counts(file)} == {problem: 2, backward: 2}


def test_calls_with_features_are_recorded_with_them(
    problem: Problem, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "bind", lambda *_, **__: lambda *_: None)
    q, k, v = inputs(problem)
    with flashtune.record_calls(file):
        for _ in range(2):
            flashtune.attention(q, k, v, causal=True, window=(8, 0), sinks=torch.zeros(problem.heads))
    (count,) = read_counts(file)
    assert count.problem == msgspec.structs.replace(problem, window_left=8, sinks=True)
    assert count.calls == 2


def test_recordings_of_one_file_add_up(problem: Problem, file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    with flashtune.record_calls(file), flashtune.record_calls(other):
        flashtune.attention(*inputs(problem), causal=True)
    with flashtune.record_calls(file):
        flashtune.attention(*inputs(problem), causal=True)
    assert [count.calls for count in read_counts(file)] == [2]
    assert [count.calls for count in read_counts(other)] == [1]


def test_who_may_read_a_file_stays_as_it_was(problem: Problem, file: Path) -> None:
    count = CallCount(problem, Specialization(), 1)
    usual = file.with_name("usual")
    usual.touch()
    add_counts(file, [count])
    assert file.stat().st_mode == usual.stat().st_mode
    file.chmod(0o640)
    add_counts(file, [count])
    assert file.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in file.parent.iterdir()} <= {"usual", file.name, f"{file.name}.lock"}


def test_an_interrupted_program_is_recorded_all_the_same(problem: Problem, file: Path) -> None:
    def program() -> None:
        flashtune.attention(*inputs(problem), causal=True)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), flashtune.record_calls(file):
        program()
    assert not recording.recording()
    assert [count.calls for count in read_counts(file)] == [1]


def test_a_process_keeps_a_bounded_number_of_problems(
    problem: Problem, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_LINES", 2)
    with flashtune.record_calls(file):
        for length in (64, 128, 192, 64):
            flashtune.attention(*inputs(with_length(problem, length)), causal=True)
    assert {count.problem.seqlen_q: count.calls for count in read_counts(file)} == {64: 2, 128: 1}


def test_a_file_of_something_else_is_not_touched(file: Path) -> None:
    file.write_text("my thesis\n", encoding="utf-8")
    with pytest.raises(UsageError, match="line 1: this is no recorded call"), flashtune.record_calls(file):
        pass
    assert file.read_text(encoding="utf-8") == "my thesis\n"
    with (
        pytest.raises(UsageError, match="no such folder"),
        flashtune.record_calls(file.parent / "none" / "x.jsonl"),
    ):
        pass


def test_the_most_called_are_kept(problem: Problem) -> None:
    counts = [CallCount(with_length(problem, length), Specialization(), length) for length in (1, 2, 3)]
    assert [count.calls for count in merged([*counts, *counts], most=2)] == [6, 4]
    most = CallCount(problem, Specialization(), MAX_CALLS)
    assert merged([most, most]) == (most,)


def test_processes_write_one_file_at_once(problem: Problem, file: Path) -> None:
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        import msgspec
        from flashtune.call_counts import CallCount, add_counts
        count = msgspec.json.decode(sys.argv[2], type=CallCount)
        for _ in range(10):
            add_counts(Path(sys.argv[1]), [count])
        """
    )
    line = msgspec.json.encode(CallCount(problem, Specialization(), 3)).decode()
    argv = [sys.executable, "-c", program, str(file), line]
    running = [subprocess.Popen(argv) for _ in range(3)]
    assert [process.wait(120) for process in running] == [0, 0, 0]
    assert [count.calls for count in read_counts(file)] == [90]
    assert sorted(path.name for path in file.parent.iterdir() if "recorded" in path.name) == [
        "recorded.jsonl",
        "recorded.jsonl.lock",
    ]


PROGRAM = """
import warnings
warnings.simplefilter("error")
from flashtune import recording
from flashtune.kernel import Specialization
from flashtune.problem import Dtype, Problem
problem = Problem(dtype=Dtype.BF16, head_dim=64, value_head_dim=64, heads=1, kv_heads=1, batch=1,
                  seqlen_q=8, seqlen_kv=8)
serve = recording.counted(abs, problem, Specialization())
print(serve(-1), serve(-2))
"""


def run_recorded(name: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, recording.VARIABLE: name}
    argv = [sys.executable, "-c", PROGRAM]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)


def test_the_environment_records_a_whole_process(file: Path) -> None:
    for _ in range(2):
        told = run_recorded(str(file))
        assert (told.returncode, told.stdout) == (0, "1 2\n"), told.stderr
    assert [count.calls for count in read_counts(file)] == [4]


def test_a_bad_file_in_the_environment_is_a_warning(file: Path) -> None:
    told = run_recorded(str(file.parent / "none" / "x.jsonl"))
    assert FlashtuneWarning.__name__ in told.stderr
    assert "no such folder" in told.stderr


lines = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
fields = st.sampled_from(["problem", "specialization", "calls", "extra"])


@given(content=st.binary(max_size=60) | st.dictionaries(fields, lines).map(msgspec.json.encode))
def test_whatever_a_file_holds_is_one_sentence(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("recorded") / "x.jsonl"
    path.write_bytes(content)
    sentence = ""
    try:
        found = read_counts(path)
    except UsageError as error:
        sentence, found = str(error), ()
    assert found == ()
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
def test_values_out_of_bounds_are_named(
    change: dict[str, object], part: str, problem: Problem, file: Path
) -> None:
    row = msgspec.to_builtins(CallCount(problem, Specialization(), 1))
    file.write_bytes(msgspec.json.encode({**row, **change}))
    with pytest.raises(UsageError, match=part):
        read_counts(file)


def test_deep_and_large_files_are_refused(file: Path, problem: Problem) -> None:
    file.write_bytes(b"[" * 100_000)
    with pytest.raises(UsageError, match="line 1"):
        read_counts(file)
    file.write_bytes(b"\n" * 5000)
    with pytest.raises(UsageError, match="more than"):
        read_counts(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_counts(file.parent / "none")
    with pytest.raises(UsageError, match="no such folder"):
        add_counts(file.parent / "none" / "x", [CallCount(problem, Specialization(), 1)])
