"""A queue of searches on a PostgreSQL server: jobs, claims with leases, and their ends.

Times are those of the server's clock. Every write of a claimed job checks the claim's token in its own
transaction, so that a worker that lost its lease stores nothing.
"""

import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from sqlalchemy import Connection, Table, text

from flashtune.core.decoders import json_decoder
from flashtune.core.errors import StoreError, TableError, printable
from flashtune.core.notices import warn_once
from flashtune.core.problem import Problem
from flashtune.core.record import Provenance, Seconds, ShortText
from flashtune.core.target import TargetName
from flashtune.db.codec import UNDECODABLE, brief, fingerprint, raw_bytes
from flashtune.db.creation import ready_engine
from flashtune.db.limits import bounded
from flashtune.db.location import database_url, describe, sqlite_path
from flashtune.db.queue_schema import create_queue
from flashtune.db.store import Result, Store
from flashtune.db.stored_rows import StoredRecord

# Attempts of a job before it is set aside.
MAX_ATTEMPTS = 3
# Seconds for which a claim holds without a heartbeat.
LEASE_SECONDS = 60.0
MAX_REASON = 400
# A worker reads the selections of all problems at most so often.
FRESH_SECONDS = 60.0
MAX_LISTED = 1000
# Limit of the files of one compiled kernel. Real ones have about 100 KiB.
MAX_FILES_BYTES = 4 * 1024 * 1024

Row = TypeVar("Row")
State = Literal["queued", "running", "done", "failed", "cancelled"]

NOW = "clock_timestamp()"
OPEN = "state IN ('queued', 'running')"
LEASE_END = f"lease_until = {NOW} + make_interval(secs => :lease)"
FITS = "target = :target AND provenance = :provenance AND versions = :versions"
# A claim. A worker has one job: one that it has already is one of which the server's answer was lost.
CLAIM = f"""
UPDATE jobs SET state = 'running', attempts = attempts + 1, token = token + 1, worker = :name,
    build = :build, reason = '', started_at = {NOW}, {LEASE_END}
WHERE id = (
    SELECT id FROM jobs
    WHERE {FITS} AND (build IS NULL OR build = :build)
        AND (state = 'queued' OR state = 'running' AND worker = :name AND attempts < {MAX_ATTEMPTS})
    ORDER BY priority DESC, id LIMIT 1 FOR UPDATE SKIP LOCKED
)
RETURNING id, batch, token, attempts, worker, problem_key, target, {bounded("payload")} AS payload
"""
ENQUEUE = f"""
INSERT INTO jobs (batch, job_key, problem_key, target, provenance, versions, priority, payload)
VALUES (:batch, :job_key, :problem_key, :target, :provenance, :versions, :priority, :payload)
ON CONFLICT (job_key) WHERE {OPEN} DO NOTHING
"""
CLAIMED = "id = :job AND token = :token AND worker = :worker"
HELD = f"{CLAIMED} AND state = 'running'"
END = f"UPDATE jobs SET reason = :reason, lease_until = NULL, ended_at = {NOW}, "
AGAIN = f"CASE WHEN attempts >= {MAX_ATTEMPTS} THEN 'failed' ELSE 'queued' END"
# A worker that was cut off while it wrote may hold a lock.
EXPIRE = f"""
{END} state = {AGAIN} WHERE id IN (
    SELECT id FROM jobs WHERE state = 'running' AND lease_until < {NOW} FOR UPDATE SKIP LOCKED
) RETURNING id
"""
# The lock keeps other workers from a claim until the transaction ends, or until the server gives it up.
CHECK = f"""
SELECT id, set_config('idle_in_transaction_session_timeout', '{LEASE_SECONDS:g}s', true)
FROM jobs WHERE {HELD} FOR SHARE
"""
CHOSEN = "(CAST(:batch AS text) IS NULL OR batch = :batch) AND (:all_ids OR id = ANY(:ids))"
# Of equal jobs that ended, the latest one is opened again, unless one is open.
RETRY = f"""
UPDATE jobs SET state = 'queued', attempts = 0, build = NULL, worker = NULL, reason = '', ended_at = NULL
WHERE {CHOSEN} AND (state = 'queued' OR id IN (
    SELECT max(id) FROM jobs WHERE state <> 'done' AND {CHOSEN} GROUP BY job_key
    HAVING bool_and(state IN ('failed', 'cancelled'))
) AND NOT EXISTS (SELECT FROM jobs AS other WHERE other.job_key = jobs.job_key AND other.{OPEN}))
RETURNING id
"""
BATCHES = f"""
SELECT batch, target, versions, state, count(*) AS jobs,
    CAST(avg(extract(epoch FROM ended_at - started_at)) AS float) AS seconds
FROM jobs WHERE {CHOSEN} GROUP BY batch, target, versions, state ORDER BY min(id)
"""
JOBS = f"""
SELECT id, batch, problem_key, target, state, attempts, worker, reason, created_at, started_at, ended_at
FROM jobs WHERE {CHOSEN} AND (:all_states OR state = ANY(:states)) ORDER BY id DESC LIMIT {MAX_LISTED}
"""
ENDED = f"""
SELECT DISTINCT ON (problem_key) problem_key, state, reason FROM jobs
WHERE {FITS} AND problem_key = ANY(:keys) ORDER BY problem_key, id DESC
"""
SPECS = f"""
SELECT id, problem_key, target, {bounded("payload")} AS payload FROM jobs
WHERE target = :target AND versions = :versions AND {OPEN}
ORDER BY state DESC, priority DESC, id LIMIT {MAX_LISTED}
"""
TAKE_KERNEL = f"""
INSERT INTO compiled (job, kernel) SELECT id, :kernel FROM jobs WHERE id = :job AND {OPEN}
ON CONFLICT DO NOTHING RETURNING job
"""
FILES = """
SELECT kernel, digest, files FROM compiled
WHERE job = :job AND octet_length(files) <= :most AND NOT kernel = ANY(:known) LIMIT 128
"""


class LeaseLostError(StoreError):
    """A worker's job was cancelled, or another worker has it."""


class JobSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One search of the queue, as `flashtune search` takes it."""

    problem: Problem
    target: TargetName  # The exact model of the GPU.
    # Workers without a GPU take predicted jobs alone, which rehearse a fleet.
    provenance: Provenance = msgspec.field(default_factory=lambda: Provenance.MEASURED)
    effort: Literal["quick", "default", "thorough"] = "default"
    trials: Annotated[int, msgspec.Meta(ge=1)] | None = None
    seconds: Seconds | None = None
    families: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=32)] = ()
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    lse: bool = False
    retry_failed: bool = False


class Claimant(msgspec.Struct, frozen=True):
    """A worker, and the jobs that it may claim."""

    name: str  # Unique among all workers.
    target: str
    provenance: Provenance
    versions: str
    build: str


class Lease(msgspec.Struct, frozen=True):
    """A claimed job."""

    job: int
    batch: str
    token: int
    attempt: int
    worker: str
    spec: JobSpec | None  # None if the row cannot be read.
    flaw: str = ""  # Why it cannot be read.


class JobRow(msgspec.Struct, frozen=True):
    """A job in a listing."""

    id: int
    batch: str
    problem_key: str
    target: str
    state: State
    attempts: int
    worker: str | None
    reason: str
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class StateRow(msgspec.Struct, frozen=True):
    """The number of jobs of a batch in one state, and their mean duration."""

    batch: str
    target: str
    versions: str
    state: State
    jobs: int
    seconds: float | None

    @property
    def is_open(self) -> bool:
        """Whether the jobs have not ended."""
        return self.state in ("queued", "running")


class Queue(Store):
    """An open queue, and the store of its database. Safe under threads.

    Statements are tried again while the server is unavailable, as in a store.

    Attributes:
        lease_seconds: Time for which a claim holds without a heartbeat.
    """

    def __init__(self, url: str | None = None, lease_seconds: float = LEASE_SECONDS) -> None:
        """Opens the queue of a database, and creates its tables if needed.

        Raises:
            StoreError: The database is an SQLite file, or cannot be used.
        """
        address = database_url(url)
        if sqlite_path(address) is not None:
            raise StoreError(
                f"a queue needs PostgreSQL, and {describe(address)} is a file of one host: give --db "
                "postgresql+psycopg://USER@HOST/NAME, or search on this host without --enqueue"
            )
        super().__init__(ready_engine(address, keep=True), address)
        self.lease_seconds = lease_seconds
        self._write(lambda connection: create_queue(connection, address))

    def enqueue(self, specs: Iterable[JobSpec], versions: str, priority: int = 0) -> tuple[str, int]:
        """Queues searches as one batch: all or none. Returns its name and the number of new jobs.

        A problem that is queued or runs already is not queued again, also with other options.
        """
        batch, rows = secrets.token_hex(4), []
        for spec in specs:
            payload = msgspec.json.encode(spec)
            key = msgspec.json.encode((spec.problem, spec.target, spec.provenance, versions))
            values = {
                "batch": batch,
                "job_key": fingerprint(key),
                "problem_key": spec.problem.key,
                "target": spec.target,
                "provenance": spec.provenance.value,
                "versions": versions,
                "priority": priority,
                "payload": payload.decode(),
            }
            rows.append(values)
        if rows:
            self._write(lambda connection: connection.execute(text(ENQUEUE), rows))
        return batch, len(self._rows("SELECT id FROM jobs WHERE batch = :batch", batch=batch))

    def claim(self, claimant: Claimant) -> Lease | None:
        """Takes the first job that a worker may run, or None. Ends the leases of lost workers."""
        self._expire()
        rows = self._rows(CLAIM, lease=self.lease_seconds, **msgspec.structs.asdict(claimant))
        if not rows:
            return None
        (row,) = rows
        spec, flaw = None, ""
        try:
            spec = decode_spec(row.payload, row.problem_key, row.target)
        except TableError as error:
            flaw = str(error)
        return Lease(row.id, printable(row.batch), row.token, row.attempts, row.worker, spec, flaw)

    def renew(self, lease: Lease) -> bool:
        """Extends a lease. Returns whether it holds."""
        return self._held(f"UPDATE jobs SET {LEASE_END} WHERE {HELD}", lease, lease=self.lease_seconds)

    def finish(self, lease: Lease) -> bool:
        """Ends a job with success. Returns whether its worker still had it."""
        # The answer to an earlier call may have been lost.
        held = f"{CLAIMED} AND state IN ('done', 'running')"
        return self._held(f"{END} state = 'done' WHERE {held}", lease, reason="")

    def fail(self, lease: Lease, reason: str, *, final: bool = False) -> bool:
        """Queues a job for another attempt. Sets it aside after the last one, or if the reason is final."""
        state = f"CASE WHEN :final THEN 'failed' ELSE {AGAIN} END"
        return self._held(f"{END} state = {state} WHERE {HELD}", lease, reason=_brief(reason), final=final)

    def give_back(self, worker: str, reason: str) -> int:
        """Queues the job of a worker again at once. The attempt does not count."""
        again = "state = 'queued', attempts = attempts - 1, build = CASE WHEN attempts > 1 THEN build END"
        held = "state = 'running' AND worker = :worker RETURNING id"
        return len(self._rows(f"{END} {again} WHERE {held}", worker=worker, reason=_brief(reason)))

    def open_jobs(self, claimant: Claimant) -> int:
        """Returns the number of jobs that a worker may run, now or if their present workers are lost."""
        query = f"SELECT id FROM jobs WHERE {FITS} AND {OPEN}"
        return len(self._rows(query, **msgspec.structs.asdict(claimant)))

    def batches(self, batch: str | None = None) -> list[StateRow]:
        """Returns the counts of one batch or of all by state, oldest first."""
        self._expire()
        return self._decoded(self._rows(BATCHES, **_chosen(batch)), StateRow)

    def jobs(self, batch: str | None = None, states: tuple[State, ...] = ()) -> list[JobRow]:
        """Returns the jobs of one batch or of all, oldest first, at most the latest thousand."""
        values = {"states": list(states), "all_states": not states}
        return self._decoded(reversed(self._rows(JOBS, **_chosen(batch), **values)), JobRow)

    def ended(self, specs: Sequence[JobSpec], versions: str) -> dict[str, str]:
        """Returns the problems of searches for one GPU if their latest job ended, and why it failed."""
        self._expire()
        if not specs:
            return {}
        values = {"target": specs[0].target, "provenance": specs[0].provenance.value, "versions": versions}
        rows = self._rows(ENDED, keys=[spec.problem.key for spec in specs], **values)
        ended = (row for row in rows if row.state not in ("queued", "running"))
        return {row.problem_key: printable(row.reason) for row in ended}

    def cancel(self, batch: str | None, ids: tuple[int, ...] = ()) -> int:
        """Cancels queued and running jobs, and returns their number. Workers stop at their next write."""
        query = f"{END} state = 'cancelled' WHERE {CHOSEN} AND {OPEN} RETURNING id"
        return len(self._rows(query, reason="cancelled by flashtune queue cancel", **_chosen(batch, ids)))

    def retry(self, batch: str | None, ids: tuple[int, ...] = ()) -> int:
        """Queues failed and cancelled jobs again, and returns their number.

        Queued jobs are freed from the driver of their first attempt. Of equal jobs, only one is opened.
        """
        return len(self._rows(RETRY, **_chosen(batch, ids)))

    def open_specs(self, target: str, versions: str) -> list[tuple[int, JobSpec]]:
        """Returns the readable open jobs for a GPU, with their numbers, in the order of their claims."""
        found = []
        for row in self._rows(SPECS, target=target, versions=versions):
            with contextlib.suppress(TableError):
                found.append((row.id, decode_spec(row.payload, row.problem_key, row.target)))
        return found

    def take_kernel(self, job: int, kernel: str) -> bool:
        """Takes a kernel of an open job. Returns False if another worker has it, or if the job has ended."""
        return bool(self._rows(TAKE_KERNEL, job=job, kernel=kernel))

    def store_files(self, job: int, kernel: str, files: bytes) -> None:
        """Stores the files of a compiled kernel, until its job ends."""
        change = "UPDATE compiled SET files = :files, digest = :digest WHERE job = :job AND kernel = :kernel"
        digest = hashlib.sha256(files).hexdigest()
        self._rows(f"{change} RETURNING job", job=job, kernel=kernel, files=files, digest=digest)

    def new_files(self, job: int, known: set[str]) -> dict[str, bytes]:
        """Returns the files of some of a job's compiled kernels without those of known ones, by kernel."""
        rows = self._rows(FILES, job=job, known=list(known), most=MAX_FILES_BYTES)
        whole = (row for row in rows if hashlib.sha256(row.files).hexdigest() == row.digest)
        return {row.kernel: bytes(row.files) for row in whole}

    def _expire(self) -> None:
        """Ends leases without heartbeats, and deletes the files of ended jobs."""
        self._rows(f"DELETE FROM compiled USING jobs WHERE id = job AND NOT {OPEN} RETURNING id")
        self._rows(EXPIRE, reason=f"its worker sent no heartbeat for {self.lease_seconds:g} s")

    def _held(self, statement: str, claim: Lease, **values: object) -> bool:
        """Changes a job if its worker still has it, and returns whether it has."""
        return len(self._rows(f"{statement} RETURNING id", **_key(claim), **values)) == 1

    def _decoded(self, rows: Iterable[Any], kind: type[Row]) -> list[Row]:
        """Returns the rows that this flashtune can read. One warning names the reason for the others."""
        decoded = []
        json_decoder(kind)  # Threads of workers may use the type for the first time.
        for row in rows:
            try:
                decoded.append(msgspec.convert(dict(row._mapping), kind))
            except msgspec.ValidationError as error:
                where = describe(self.url)
                warn_once(f"queue {where}", f"rows of the queue of {where} were skipped: {brief(error)}")
        return decoded

    def _rows(self, statement: str, **values: object) -> list[Any]:
        return self._write(lambda connection: list(connection.execute(text(statement), values).all()))


class LeasedStore(Store):
    """The store of a worker: it writes only while the worker has its job.

    Attributes:
        lease: The present job.
    """

    def __init__(self, url: str) -> None:
        super().__init__(ready_engine(url, keep=True), url)
        self.lease: Lease | None = None
        self._chosen_rows: dict[str, list[StoredRecord]] = {}
        self._read_at = -math.inf

    def _chosen(self, table: Table, target: str | None) -> list[StoredRecord]:
        """Returns selections or fallbacks of at most a minute ago: warm starts need no later ones."""
        if time.monotonic() - self._read_at > FRESH_SECONDS:
            self._chosen_rows.clear()
            self._read_at = time.monotonic()
        name = f"{table.name} {target}"
        if name not in self._chosen_rows:
            self._chosen_rows[name] = super()._chosen(table, target)
        return self._chosen_rows[name]

    def _write(self, transaction: Callable[[Connection], Result]) -> Result:
        lease = self.lease
        if lease is None:
            raise StoreError("the worker has no job: nothing is stored")

        def checked(connection: Connection) -> Result:
            if connection.execute(text(CHECK), _key(lease)).scalar() is None:
                raise lost(lease)
            return transaction(connection)

        return super()._write(checked)


def lost(lease: Lease) -> LeaseLostError:
    """Returns the error for a job that its worker does not have any more."""
    return LeaseLostError(
        f"job {lease.job} was cancelled, or its lease ended and another worker took it: it ends"
    )


def decode_spec(payload: object, problem_key: object, target: object) -> JobSpec:
    """Returns the search of a row. It must match the row's problem and target."""
    try:
        spec = json_decoder(JobSpec).decode(raw_bytes(payload))
        matches = (spec.problem.key, spec.target) == (problem_key, target)
    except (*UNDECODABLE, ValueError) as error:
        raise TableError(f"a job cannot be read: {brief(error)}") from error
    if not matches:
        raise TableError("a job's search is of another problem or target than its row")
    return spec


def _key(lease: Lease) -> dict[str, object]:
    return {"job": lease.job, "token": lease.token, "worker": lease.worker}


def _chosen(batch: str | None, ids: tuple[int, ...] = ()) -> dict[str, object]:
    return {"batch": batch, "ids": list(ids), "all_ids": not ids}


def _brief(reason: str) -> str:
    return printable(reason)[:MAX_REASON]
