"""Tests of commands on several GPUs, without one."""

import contextlib
import json
import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from click.testing import Result

from flashtune.core.target import find_target
from flashtune.tuner.execution import processes
from flashtune.tuner.search.executors import local
from flashtune.tuner.search.progress import Display
from flashtune.tuner.search.request import Progress
from tests.tuner.search.fakes import FAMILY, FakeCompiler, FakeMeasurer, by_tile

Run = Callable[..., Result]
SHAPES = [f"heads={heads},seqlen=256,head_dim=64,dtype=fp16" for heads in (4, 8, 16)]
SEARCH = f"search --shape {' --shape '.join(SHAPES)} --family {FAMILY} --trials 4".split()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of this machine's GPUs: at first two of one model."""
    names = ["h200", "h200"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("flashtune.core.target.device_target", lambda index: find_target(names[index]))
    return names


@pytest.mark.parametrize("command", ["search", "bench", "warm"])
@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        ("2", "--devices is 2: write all, or numbers below 2 such as 0,1"),
        ("0,x", "write all, or numbers below 2"),
        ("", "write all, or numbers below 2"),
        ("all", "the GPUs are nvidia-h200 and nvidia-h100: name GPUs of one model by --devices"),
    ],
)
def test_other_devices_are_refused_in_one_sentence(
    run: Run, gpus: list[str], command: str, devices: str, reason: str
) -> None:
    gpus[1] = "h100"
    result = run(command, "--shape", SHAPES[0], "--devices", devices)
    assert result.exit_code == 2
    assert reason in result.stderr


def test_dry_run_divides_the_time_among_gpus(run: Run, gpus: list[str]) -> None:
    command = (*SEARCH[:-2], "--seconds", "30", "--dry-run", "--devices")
    assert run(*command, "0").stdout.endswith(" in about 90 s in all\n")
    assert run(*command, "all").stdout.endswith(" in about 45 s in all on 2 GPUs\n")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--device 0", "--ray and --device exclude each other"),
        ("--devices all", "--ray and --devices exclude each other"),
        ("--target h100 --dry-run", "--ray and --dry-run exclude each other"),
        ("--target h100 --enqueue", "--ray and --enqueue exclude each other"),
        ("--repeat 2", "--ray and --repeat exclude each other"),
        ("--db postgresql://me:secret@host/a", "Ray shows the command lines of its programs"),
        ("--db postgresql://me@host/a?password=secret", "Ray shows the command lines of its programs"),
    ],
)
def test_options_that_exclude_ray_are_refused(run: Run, gpus: list[str], options: str, reason: str) -> None:
    result = run(*SEARCH, "--ray", "auto", *options.split())
    assert result.exit_code == 2
    assert reason in result.stderr
    assert "secret" not in result.output


@pytest.fixture
def searched(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches use fakes of both GPUs."""
    made = {gpu: FakeMeasurer(by_tile) for gpu in range(2)}
    monkeypatch.setattr(processes, "start_server", lambda: None)
    host = contextlib.nullcontext(SimpleNamespace(compiler=FakeCompiler(), measurers=made))
    monkeypatch.setattr(local, "open_host", lambda devices, jobs: host)


@pytest.mark.slow
@pytest.mark.usefixtures("searched")
def test_results_of_a_search_on_two_gpus_are_in_the_order_of_the_shapes(run: Run) -> None:
    result = run(*SEARCH, "--devices", "all", "--json", "--verbose")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["problem"]["heads"] for row in rows] == [4, 8, 16]
    assert "on 2 GPUs" in result.stderr
    assert re.search(r"\[1/3\] GPU [01]: forward_\S+: starting", result.stderr)
    for gpu in (0, 1):
        assert f"GPU {gpu}: ok: {FAMILY}" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("searched")
def test_interrupted_search_on_two_gpus_prints_each_best_and_one_command(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()

    def show(display: Display, progress: Progress) -> None:
        seen.add(progress.problem.key)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Display, "show", show)
    result = run(*SEARCH, "--devices", "0,1")
    assert result.exit_code == 130
    for key in seen:
        assert re.search(f"{key}: (best so far|nothing right)", result.stderr)
    assert result.stderr.count("resume with: flashtune search") == 1
    assert "--devices 0,1" in result.stderr
