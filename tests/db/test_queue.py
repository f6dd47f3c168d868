"""Contract tests of the queue on a PostgreSQL server: claims, leases, attempts, and hostile rows."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from sqlalchemy import create_engine, text

from flashtune import testing
from flashtune.core import notices
from flashtune.core.errors import StoreError
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.record import Provenance
from flashtune.db.queue import MAX_ATTEMPTS, Claimant, JobSpec, LeasedStore, LeaseLostError, Queue, State
from flashtune.db.store import open_store
from tests.db.records import make_record

TARGET = "nvidia-h100"


def a_spec(seqlen: int = 256, **changes: Any) -> JobSpec:
    problem = testing.problem(f"heads=4,seqlen={seqlen},head_dim=64,dtype=fp16")
    return JobSpec(problem=problem, target=TARGET, **changes)


def a_worker(name: str = "one", **changes: Any) -> Claimant:
    values = {"target": TARGET, "provenance": Provenance.MEASURED, "versions": "v1", "build": "driver 580"}
    return Claimant(name, **(values | changes))


@pytest.fixture
def queue(postgres: str) -> Iterator[Queue]:
    with Queue(postgres) as opened:
        yield opened


@pytest.fixture
def brief_queue(postgres: str) -> Iterator[Queue]:
    """A queue with leases that have ended when the next statement runs."""
    with Queue(postgres, lease_seconds=0.0) as opened:
        yield opened


def states(queue: Queue) -> list[State]:
    return [row.state for row in queue.jobs()]


def test_sqlite_is_refused_in_one_sentence(path: Any) -> None:
    with pytest.raises(StoreError, match="a queue needs PostgreSQL") as caught:
        Queue(str(path))
    assert not path.exists()
    assert str(caught.value).count(".") == str(path).count(".")


def test_equal_open_searches_are_queued_once(queue: Queue) -> None:
    others = [a_spec(512), a_spec(provenance=Provenance.PREDICTED)]
    batch, added = queue.enqueue([a_spec(), a_spec(seed=1), *others], "v1")
    assert added == 3
    assert queue.enqueue([a_spec()], "v1")[1] == 0
    assert queue.enqueue([a_spec()], "v2")[1] == 1
    lease = queue.claim(a_worker())
    assert lease is not None
    assert queue.enqueue([a_spec()], "v1")[1] == 0
    assert queue.finish(lease)
    assert queue.enqueue([a_spec()], "v1")[1] == 1
    assert sum(row.jobs for row in queue.batches(batch)) == 3


def test_ends_are_those_of_the_latest_jobs_of_the_same_versions(brief_queue: Queue) -> None:
    specs = [a_spec(), a_spec(512)]
    keys = [spec.problem.key for spec in specs]
    brief_queue.enqueue(specs, "v1")
    assert brief_queue.ended(specs, "v1") == brief_queue.ended([], "v1") == {}
    brief_queue.enqueue(specs, "v2")
    brief_queue.cancel(None, (3, 4))
    assert brief_queue.ended(specs, "v1") == {}
    assert set(brief_queue.ended(specs, "v2")) == {*keys}
    for _ in range(MAX_ATTEMPTS):
        assert brief_queue.claim(a_worker()) is not None
    # The lost worker's last lease ends without another worker.
    assert brief_queue.ended(specs, "v1") == {keys[0]: "its worker sent no heartbeat for 0 s"}
    brief_queue.enqueue(specs, "v1")
    assert brief_queue.ended(specs, "v1") == {}


def test_claims_are_in_the_order_of_priority_and_of_arrival(queue: Queue) -> None:
    queue.enqueue([a_spec(64), a_spec(128)], "v1")
    queue.enqueue([a_spec(256)], "v1", priority=1)
    taken = [queue.claim(a_worker(name)) for name in ("one", "two", "three", "four")]
    assert [lease and lease.spec and lease.spec.problem.seqlen_q for lease in taken] == [256, 64, 128, None]


@pytest.mark.parametrize(
    "other", [{"target": "nvidia-h200"}, {"provenance": Provenance.PREDICTED}, {"versions": "v2"}]
)
def test_worker_claims_only_jobs_of_its_gpu_and_versions(queue: Queue, other: dict[str, Any]) -> None:
    queue.enqueue([a_spec()], "v1")
    assert queue.claim(a_worker(**other)) is None
    assert queue.open_jobs(a_worker(**other)) == 0


def test_later_attempts_have_the_driver_of_the_first(queue: Queue) -> None:
    queue.enqueue([a_spec()], "v1")
    lease = queue.claim(a_worker())
    assert lease is not None
    assert queue.fail(lease, "a reason")
    other = a_worker("two", build="driver 570")
    assert (queue.claim(other), queue.open_jobs(other)) == (None, 1)
    assert queue.retry(None, ()) == 1
    assert queue.claim(other) is not None


def test_many_workers_claim_each_job_once(queue: Queue) -> None:
    queue.enqueue([a_spec(16 * number) for number in range(1, 25)], "v1")
    taken: list[int] = []

    def work(name: str) -> None:
        while (lease := queue.claim(a_worker(name))) is not None:
            taken.append(lease.job)
            assert queue.finish(lease)

    threads = [threading.Thread(target=work, args=(str(number),)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 24
    assert set(states(queue)) == {"done"}


def test_lease_without_heartbeat_goes_to_another_worker(brief_queue: Queue) -> None:
    brief_queue.enqueue([a_spec()], "v1")
    first = brief_queue.claim(a_worker())
    assert first is not None
    assert brief_queue.renew(first)
    assert not brief_queue.renew(msgspec.structs.replace(first, token=2))
    second = brief_queue.claim(a_worker("two"))
    assert second is not None
    assert (second.job, second.attempt) == (first.job, 2)
    assert not brief_queue.renew(first)
    assert not brief_queue.finish(first)
    assert not brief_queue.fail(first, "too late")
    assert brief_queue.finish(second)
    # The answer to the first call may have been lost.
    assert brief_queue.finish(second)


def test_worker_without_a_lease_stores_nothing(brief_queue: Queue) -> None:
    brief_queue.enqueue([a_spec()], "v1")
    lease = brief_queue.claim(a_worker())
    assert lease is not None
    with LeasedStore(brief_queue.url) as store:
        store.lease = lease
        kept = store.add(make_record())
        assert brief_queue.claim(a_worker("two")) is not None
        with pytest.raises(LeaseLostError, match="another worker took it"):
            store.add(make_record())
        with pytest.raises(LeaseLostError, match="another worker took it"):
            store.pin(kept)
        assert [entry.id for entry in store.records()] == [kept]
    with open_store(brief_queue.url) as store:
        assert store.selections() == []


def test_write_of_a_worker_delays_the_next_claim(brief_queue: Queue) -> None:
    """Between the check of the token and the commit, no other worker gets the job."""
    brief_queue.enqueue([a_spec()], "v1")
    lease = brief_queue.claim(a_worker())
    assert lease is not None
    with LeasedStore(brief_queue.url) as store:
        store.lease = lease
        assert store._write(lambda _: brief_queue.claim(a_worker("two"))) is None
    assert brief_queue.claim(a_worker("two")) is not None


def test_job_is_set_aside_after_its_last_attempt(queue: Queue) -> None:
    queue.enqueue([a_spec()], "v1")
    for attempt in range(1, MAX_ATTEMPTS + 1):
        lease = queue.claim(a_worker())
        assert lease is not None
        assert lease.attempt == attempt
        assert queue.fail(lease, "the reason\x1b[0m")
    assert queue.claim(a_worker()) is None
    (row,) = queue.jobs(states=("failed",))
    assert row.reason == "the reason?[0m"
    assert queue.retry(None, (row.id,)) == 1
    assert queue.claim(a_worker()) is not None


def test_job_whose_workers_are_lost_is_set_aside(brief_queue: Queue) -> None:
    brief_queue.enqueue([a_spec()], "v1")
    for attempt in range(MAX_ATTEMPTS):
        assert brief_queue.claim(a_worker(str(attempt))) is not None
    assert brief_queue.claim(a_worker("last")) is None
    assert states(brief_queue) == ["failed"]


def test_attempt_of_a_returned_job_does_not_count(queue: Queue) -> None:
    queue.enqueue([a_spec()], "v1")
    for _ in range(MAX_ATTEMPTS + 1):
        assert queue.claim(a_worker()) is not None
        assert queue.give_back("one", "stopped") == 1
    # Another driver may have it, since no attempt counts.
    lease = queue.claim(a_worker("two", build="driver 570"))
    assert lease is not None
    assert lease.attempt == 1


def test_cancelled_jobs_end_at_the_next_write(queue: Queue) -> None:
    batch, _ = queue.enqueue([a_spec(64), a_spec(128)], "v1")
    queue.enqueue([a_spec(256)], "v1")
    lease = queue.claim(a_worker())
    assert lease is not None
    assert queue.cancel(batch, ()) == 2
    assert not queue.renew(lease)
    assert states(queue) == ["cancelled", "cancelled", "queued"]
    assert queue.enqueue([a_spec(64)], "v1")[1] == 1
    # Of equal searches, only one is open.
    assert queue.retry(batch, ()) == 1


def test_retry_opens_one_of_equal_jobs(queue: Queue) -> None:
    for _ in range(2):
        queue.enqueue([a_spec()], "v1")
        assert queue.cancel(None, ()) == 1
    assert queue.retry(None, ()) == 1


@pytest.mark.parametrize(
    "change",
    [
        "payload = '{'",
        "payload = payload || ' '",
        "payload = repeat('x', 2000000)",
        "payload = replace(payload, 'fp16', 'bf16')",
        """payload = replace(payload, '"target"', '"seed":-1,"target"')""",
        """payload = replace(payload, '"target"', '"seed": 4294967296,"target"')""",
        "problem_key = 'other'",
    ],
)
def test_hostile_row_is_claimed_without_a_search(queue: Queue, change: str) -> None:
    queue.enqueue([a_spec()], "v1")
    engine = create_engine(queue.url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE jobs SET {change}"))
    engine.dispose()
    lease = queue.claim(a_worker())
    assert lease is not None
    if "||" in change:
        assert lease.spec == a_spec()
        return
    assert lease.spec is None
    assert lease.flaw
    assert queue.fail(lease, lease.flaw, final=True)
    assert states(queue) == ["failed"]


def test_row_of_a_later_version_hides_no_other(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_seen_messages", {})
    queue.enqueue([a_spec(64), a_spec(128)], "v1")
    engine = create_engine(queue.url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE jobs SET state = 'paused' WHERE id = 1"))
    engine.dispose()
    with pytest.warns(FlashtuneWarning, match="rows of the queue of .* were skipped: Invalid enum value"):
        assert [row.id for row in queue.jobs()] == [2]
    assert [(row.state, row.jobs) for row in queue.batches()] == [("queued", 1)]


def test_queue_of_another_schema_is_refused(queue: Queue) -> None:
    engine = create_engine(queue.url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE queue_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(StoreError, match="has schema '9999'"):
        Queue(queue.url)


def test_counts_have_the_mean_duration(queue: Queue) -> None:
    queue.enqueue([a_spec(64), a_spec(128), a_spec(256)], "v1")
    lease = queue.claim(a_worker())
    assert lease is not None
    time.sleep(0.1)
    queue.finish(lease)
    done, queued = queue.batches()
    assert (done.state, done.jobs, queued.state, queued.jobs) == ("done", 1, "queued", 2)
    assert done.seconds == pytest.approx(0.1, abs=0.09)
