import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.errors import UsageError
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import find_target
from flashtune.recording.recorder import CallCount, add_counts
from flashtune.tuner.analysis.explain import roofline
from flashtune.tuner.analysis.recorded import WeightedProblem, read_weighted, summary, weigh
from flashtune.tuner.cli import main
from flashtune.tuner.cli.commands import search
from flashtune.tuner.search.request import SearchRequest
from flashtune.tuner.workloads.models import backward_of
from flashtune.tuner.workloads.shapes import parse_shape

H200 = find_target("h200")
ALIGNED, UNALIGNED = Specialization(), Specialization(Alignment.ANY)


def shape(seqlen: int, **changes: object) -> Problem:
    (problem,) = parse_shape(f"heads=8,seqlen={seqlen},head_dim=64,causal")
    return msgspec.structs.replace(problem, **changes)


def test_calls_are_ordered_by_total_time() -> None:
    short, long = shape(64), shape(8192)
    rare = weigh((CallCount(short, ALIGNED, 100), CallCount(long, ALIGNED, 2)), H200)
    assert [weighted.problem for weighted in rare] == [long, short]
    often = weigh((CallCount(short, ALIGNED, 10**7), CallCount(long, ALIGNED, 2)), H200)
    assert [weighted.problem for weighted in often] == [short, long]
    assert often[1] == WeightedProblem(long, 2, 2 * roofline(long, H200).bound_ms)


def test_calls_of_a_problem_are_merged_over_specializations() -> None:
    (weighted,) = weigh((CallCount(shape(64), ALIGNED, 2), CallCount(shape(64), UNALIGNED, 3)), H200)
    assert weighted.calls == 5


def test_features_are_weighted() -> None:
    decode = shape(64, seqlen_q=1, seqlen_kv=4096, page_size=16)
    windowed = shape(4096, window_left=127)
    weighed = weigh(tuple(CallCount(p, ALIGNED, 1) for p in (decode, windowed)), H200)
    assert all(weighted.least_ms > 0 for weighted in weighed)
    with pytest.raises(UsageError, match="chunks"):
        weigh((CallCount(shape(2**31 - 1, chunk=1), ALIGNED, 1),), H200)


def test_summary_contains_the_covered_share() -> None:
    weighed = (WeightedProblem(shape(64), 1, 9.0), WeightedProblem(shape(128), 1, 1.0))
    assert summary(weighed, 1).startswith("1 of 2 recorded problems are searched, 90% of the time")
    assert summary(weighed, 20).startswith("2 of 2 recorded problems are searched, 100% of the time")


def test_file_without_calls_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="holds no recorded calls"):
        read_weighted(path, H200)


extents = st.integers(0, 2**31 - 1) | st.integers(0, 4096)


@given(seqlen_q=extents, seqlen_kv=extents, batch=extents, chunk=extents, left=st.none() | extents)
def test_any_recorded_problem_is_weighted_or_refused_in_one_sentence(
    seqlen_q: int, seqlen_kv: int, batch: int, chunk: int, left: int | None
) -> None:
    posed = shape(1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, batch=batch, chunk=chunk, window_left=left)
    try:
        (weighted,) = weigh((CallCount(posed, ALIGNED, 1),), H200)
    except UsageError as error:
        assert "chunks" in str(error)  # noqa: PT017
        return
    assert weighted.least_ms >= 0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recorded.jsonl"
    add_counts(path, [CallCount(shape(length), ALIGNED, 1) for length in (64, 1024, 8192)])
    return path


def test_command_searches_the_first_problems(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = shape(512)
    assert search._with_recorded((named,), file, 2, H200) == (named, shape(8192), shape(1024))
    assert "2 of 3 recorded problems" in capsys.readouterr().err
    assert len(search._with_recorded((), file, None, H200)) == 3


def test_unsupported_problems_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "calls.jsonl"
    wide = shape(512, head_dim=512, value_head_dim=512)
    add_counts(path, (CallCount(problem=wide, specialization=ALIGNED, calls=9),))
    with pytest.raises(UsageError, match="no kernel family computes any problem"):
        search._with_recorded((), path, None, H200)
    add_counts(path, (CallCount(problem=shape(512), specialization=ALIGNED, calls=1),))
    assert search._with_recorded((), path, None, H200) == (shape(512),)
    assert "1 recorded problems are left out" in capsys.readouterr().err


def test_training_searches_both_passes_of_recorded_calls(file: Path, tmp_path: Path) -> None:
    options = f"--target h200 --db {tmp_path}/own.sqlite --json --dry-run --from {file} --top 2".split()

    def searched(*more: str) -> list[str]:
        done = CliRunner().invoke(main, ["search", *options, *more])
        assert done.exit_code == 0, done.output
        return [row["problem"] for row in json.loads(done.stdout)]

    longest, middle = shape(8192), shape(1024)
    assert searched() == [longest.key, middle.key]
    both = (longest, backward_of(longest), middle, backward_of(middle))
    assert searched("--phase", "training") == [problem.key for problem in both]


def test_training_searches_forward_kernels_with_log_sum_exps(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SearchRequest] = []

    def noted(requests: tuple[SearchRequest, ...], *_: object, **options: object) -> list[object]:
        seen.extend(requests)
        return []

    monkeypatch.setattr(search, "_search", noted)
    options = f"--target h200 --db {tmp_path}/own.sqlite --json --from {file} --top 1 --phase training"
    done = CliRunner().invoke(main, ["search", *options.split()])
    assert done.exit_code == 0, done.output
    assert [(request.problem.is_backward, request.lse) for request in seen] == [(False, True), (True, False)]
