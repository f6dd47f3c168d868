"""Tests of `flashtune search --enqueue`, `flashtune worker` and `flashtune queue`."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashtune.core import target
from flashtune.core.machine import triton_folder
from flashtune.core.record import Provenance
from flashtune.db.queue import Queue
from flashtune.tuner.execution import backend
from flashtune.tuner.execution.evaluation import Predictor
from flashtune.tuner.fleet.jobs import queue_versions
from tests.db.postgres import PASSWORD
from tests.tuner.cli.conftest import Run
from tests.tuner.search.fakes import FAMILY, FakeCompiler

SHAPES = "heads=4,seqlen=64|128,head_dim=64,dtype=fp16"
ENQUEUE = ("search", "--shape", SHAPES, "--target", "h100", "--family", FAMILY, "--trials", "6", "--enqueue")


@pytest.fixture(autouse=True)
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers set this variable unless a user did."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


@pytest.fixture
def database(run: Run, postgres: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A server's database is the default one, and workers compile nothing."""

    @contextlib.contextmanager
    def open_host(*_: Any) -> Iterator[backend.HostWorkers]:
        yield backend.HostWorkers(FakeCompiler(), {None: Predictor()})  # type: ignore[arg-type]

    monkeypatch.setattr(backend, "open_host", open_host)
    monkeypatch.setenv("FLASHTUNE_DB", postgres)
    return postgres


def enqueued(run: Run, *options: str) -> str:
    done = run(*ENQUEUE, "--predicted", "--json", *options)
    assert done.exit_code == 0, done.output
    batch: str = json.loads(done.stdout)["batch"]
    return batch


def test_worker_searches_the_queued_shapes(run: Run, database: str) -> None:
    batch = enqueued(run)
    again = run(*ENQUEUE, "--predicted")
    assert "0 shapes for nvidia-h100 are queued" in again.stdout
    work = run("worker", "--target", "h100", "--exit-when-empty", "--json")
    assert work.exit_code == 0, work.output
    lines = [json.loads(line) for line in work.stdout.splitlines()]
    assert [(line["job"], line["batch"], line["reason"]) for line in lines] == [
        (1, batch, ""),
        (2, batch, ""),
    ]
    assert all(line["result"]["is_selected"] for line in lines)
    status = run("queue", "status", "--batch", batch, "--watch", "--json")
    assert status.exit_code == 0
    (row,) = json.loads(status.stdout)
    assert (row["state"], row["jobs"]) == ("done", 2)
    assert json.loads(run("show", "--target", "h100", "--json").stdout)


@pytest.mark.parametrize("named", ["", "here"])
def test_workers_have_a_triton_cache_of_their_own(
    run: Run, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", named)
    assert run("worker", "--target", "h100", "--exit-when-empty").exit_code == 0
    assert triton_folder() == (Path(named) if named else tmp_path / "cache" / "worker-triton")


def test_failed_jobs_have_their_reason_and_can_be_queued_again(run: Run, database: str) -> None:
    batch = enqueued(run)
    with Queue(database) as queue:
        queue._rows("UPDATE jobs SET state = 'failed', reason = E'bad \\x1b[31m' WHERE id = 1 RETURNING id")
    assert run("queue", "cancel", "2").stdout == "1 jobs are cancelled\n"
    watched = run("queue", "status", "--batch", batch, "--watch")
    assert watched.exit_code == 1
    assert "1 jobs failed: flashtune queue list --state failed says why" in watched.stderr
    listed = run("queue", "list", "--state", "failed").stdout
    assert "bad ?[31m" in listed
    assert listed.count("\n") == 1
    assert run("queue", "retry", "--batch", batch, "--json").stdout == '{\n  "jobs": 2\n}\n'
    assert [row["state"] for row in json.loads(run("queue", "list", "--json").stdout)] == ["queued"] * 2


def test_measured_jobs_are_not_predicted(run: Run, database: str) -> None:
    assert run(*ENQUEUE).exit_code == 0
    work = run("worker", "--target", "h100", "--exit-when-empty")
    assert (work.exit_code, work.stdout) == (0, "")
    assert "no job for nvidia-h100 is open" in work.stderr


def test_host_with_a_gpu_can_queue_predicted_jobs(
    run: Run, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "device_target", lambda index: target.find_target("h100"))
    options = ENQUEUE[ENQUEUE.index("--family") :]
    assert run("search", "--shape", SHAPES, *options, "--predicted").exit_code == 0
    with Queue(database) as queue:
        assert {spec.provenance for _, spec in queue.open_specs("nvidia-h100", queue_versions())} == {
            Provenance.PREDICTED
        }


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("queue", "status"), 2, "the queue has no job: flashtune search --enqueue adds shapes"),
        (("queue", "status", "--batch", "x\x1b"), 2, "the queue has no job of batch x?"),
        (("queue", "retry"), 2, "name the jobs, by their numbers or by --batch"),
        ((*ENQUEUE, "--family", "other"), 2, "other"),
        (("worker", "--devices", "all"), 2, "--devices needs a GPU, and none is visible"),
    ],
)
def test_bad_input_gets_one_sentence(
    run: Run, database: str, arguments: tuple[str, ...], code: int, sentence: str
) -> None:
    done = run(*arguments)
    assert done.exit_code == code
    assert sentence in done.stderr
    assert "Traceback" not in done.output
    assert PASSWORD not in done.output


@pytest.mark.parametrize("arguments", [ENQUEUE, ("worker", "--target", "h100"), ("queue", "list")])
def test_sqlite_has_no_queue(run: Run, arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert "a queue needs PostgreSQL" in done.stderr
    assert not list(tmp_path.glob("*.sqlite*"))


def test_no_output_has_the_password(run: Run, database: str) -> None:
    shown = [run(*ENQUEUE, "--predicted", "--db", database), run("queue", "list", "--db", database)]
    shown.append(run("worker", "--target", "h100", "--exit-when-empty", "--db", database))
    wrong = database.replace(PASSWORD, f"{PASSWORD}-2").replace("127.0.0.1", "127.0.0.1:1,127.0.0.1")
    shown.append(run("queue", "list", "--db", wrong))
    assert [done.exit_code for done in shown[:3]] == [0, 0, 0]
    assert "watch with: flashtune queue status --batch" in shown[0].stdout
    assert "***" in shown[0].stdout
    assert [done.output for done in shown if PASSWORD in done.output] == []
