"""Simulates a fleet: workers with simulated GPUs and a simulated clock, and the queue of a real server.

Searches are replayed from truth tables once. Each job then repeats the statements of a replayed search for
a problem of its own: claim, reads, records, heartbeats, selection, end. A statement takes as much of the time
of its worker as it took. Run on a machine with PostgreSQL:

    python -m benchmarks.search_replay.fleet --save benchmarks/results/fleet.json.gz
"""

import argparse
import heapq
import itertools
import operator
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.exhaustive.truth_table import TruthTable, read_tables
from benchmarks.saved import ROOT, save
from benchmarks.search_replay.replay import Replay, replay_scope
from benchmarks.search_replay.replays import JOBS, experience_without
from flashtune.core.record import Provenance, Record
from flashtune.db.queue import LEASE_SECONDS, Claimant, JobSpec, LeasedStore, Queue
from flashtune.db.store import Store, open_store
from flashtune.tuner.fleet.worker import BEATS
from flashtune.tuner.search.driver import run_search
from flashtune.tuner.search.request import SearchRequest
from flashtune.tuner.search.warm_start import known_winners
from tests.db.postgres import Server

FLEETS = (1, 64)
SECONDS_PER_HOUR = 3600.0
TICKS_PER_SECOND = 100
SEEDS = 2


class Trace(NamedTuple):
    """The writes of one replayed search, with simulated times in seconds."""

    records: tuple[tuple[float, Record], ...]
    chosen: int  # Index of the selected record.
    seconds: float


class FleetRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One simulated fleet."""

    workers: int
    jobs: int
    simulated_seconds: float
    shapes_per_hour: float
    server_cpu_seconds: float
    server_cores: float  # CPU seconds of the server per simulated second.
    statement_seconds: float  # Mean time of a worker's transaction.


class RecordingStore(Store):
    """A store that keeps the records that a search adds, with their simulated times."""

    now: Callable[[], float]
    rows: list[tuple[float, Record, int]]

    def add(self, record: Record) -> int:
        """Stores a record."""
        row = super().add(record)
        self.rows.append((self.now(), record, row))
        return row

    def add_all(self, records: list[Record]) -> list[int]:
        """Stores the records of finals."""
        return [self.add(record) for record in records]

    def pin(self, record_id: int, *arguments: object) -> bool:
        """Selects a record."""
        self.pinned = record_id
        return super().pin(record_id, *arguments)  # type: ignore[arg-type]


def traced(table: TruthTable, tables: tuple[TruthTable, ...], seed: int) -> Trace:
    """Replays one search of the default effort."""
    scope, replay = replay_scope(table), Replay(table, JOBS, seed)
    request = SearchRequest(
        problem=table.problem,
        target=scope.target,
        device=0,
        seed=seed,
        spaces=((table.family, scope.spaces[0].space),),
        experience=experience_without(table, tables),
    )
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/records.sqlite") as opened:
        store = RecordingStore(opened._engine, opened.url)
        store.rows, store.now = [], replay.clock.now
        result = run_search(request, store, equipment=replay.equipment())
        chosen = [row for _, _, row in store.rows].index(store.pinned)
        return Trace(tuple((moment, record) for moment, record, _ in store.rows), chosen, result.seconds)


def simulated(server: Server, traces: list[Trace], workers: int, jobs: int) -> FleetRow:
    """Simulates one fleet on an empty database."""
    url = server.new_database(f"fleet_{workers}")
    searches: dict[str, tuple[Trace, tuple[Record, ...]]] = {}
    for number, trace in zip(range(jobs), itertools.cycle(traces)):
        problem = trace.records[0][1].problem
        own = msgspec.structs.replace(problem, batch=problem.batch + number)
        records = tuple(msgspec.structs.replace(record, problem=own) for _, record in trace.records)
        searches[own.key] = trace, records
    target = traces[0].records[0][1].target
    spent: list[float] = []
    # Leases end by the clock of the server, and the simulation is slower.
    with Queue(url, SECONDS_PER_HOUR) as queue:
        queue.enqueue([JobSpec(problem=own[0].problem, target=target) for _, own in searches.values()], "v")
        stores = [LeasedStore(url) for _ in range(workers)]

        def work(number: int) -> Iterator[float]:
            """Runs one worker. Yields the simulated seconds until its next statement."""
            store = stores[number]
            claimant = Claimant(str(number), target, Provenance.MEASURED, "v", "b")
            while (lease := queue.claim(claimant)) is not None:
                assert lease.spec is not None
                trace, records = searches[lease.spec.problem.key]
                store.lease = lease
                queue.new_files(lease.job, set())
                store.records(lease.spec.problem, target)
                known_winners(store)
                moment, beat, rows = 0.0, 0.0, []
                # Records of one moment are those of finals, which are stored at once.
                timed = zip((then for then, _ in trace.records), records, strict=True)
                for then, group in itertools.groupby(timed, key=operator.itemgetter(0)):
                    yield max(0.0, then - moment)
                    moment, found = then, [record for _, record in group]
                    rows += store.add_all(found) if len(found) > 1 else [store.add(found[0])]
                    if moment - beat > LEASE_SECONDS / BEATS:
                        beat = moment
                        queue.renew(lease)
                        queue.new_files(lease.job, set())
                yield max(0.0, trace.seconds - moment)
                store.pin(rows[trace.chosen])
                queue.finish(lease)

        before, latest = cpu_seconds(server), 0.0
        fleet = [(0.0, number, work(number)) for number in range(workers)]
        while fleet:
            moment, number, worker = heapq.heappop(fleet)
            start = time.perf_counter()
            wait = next(worker, None)
            spent.append(time.perf_counter() - start)
            latest = max(latest, moment + spent[-1])
            if wait is not None:
                heapq.heappush(fleet, (moment + spent[-1] + wait, number, worker))
        cpu = cpu_seconds(server) - before
        assert [row.jobs for row in queue.batches() if row.state == "done"] == [jobs]
        for store in stores:
            store.close()
    return FleetRow(
        workers=workers,
        jobs=jobs,
        simulated_seconds=latest,
        shapes_per_hour=jobs / latest * SECONDS_PER_HOUR,
        server_cpu_seconds=cpu,
        server_cores=cpu / latest,
        statement_seconds=sum(spent) / len(spent),
    )


def cpu_seconds(server: Server) -> float:
    """Returns the CPU time of all processes of a server, those that ended included."""
    first = (server.folder / "data/postmaster.pid").read_text().split()[0]
    listed = subprocess.run(["pgrep", "-P", first], capture_output=True, text=True, check=False).stdout  # noqa: S607
    ticks = 0
    for process in (first, *listed.split()):
        try:
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        own, ended = map(int, fields[11:13]), map(int, fields[13:15])
        ticks += sum(own) + (sum(ended) if process == first else 0)
    return ticks / TICKS_PER_SECOND


def main() -> None:
    """Simulates a fleet and one worker, and prints both."""
    parser = argparse.ArgumentParser(description="Simulates a fleet of workers.")
    parser.add_argument("--jobs", type=int, default=8, help="jobs of each worker")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    tables = read_tables(ROOT / "tests/data/truth")
    traces = [traced(table, tables, seed) for table in tables for seed in range(SEEDS)]
    server = Server.make()
    try:
        # A single worker searches each trace once, so that both have the same mean duration.
        rows = [
            simulated(server, traces, workers, max(options.jobs * workers, len(traces))) for workers in FLEETS
        ]
    finally:
        server.remove()
    for row in rows:
        sys.stdout.write(f"{row}\n")
    sys.stdout.write(f"{rows[1].shapes_per_hour / rows[0].shapes_per_hour:.1f} times the shapes per hour\n")
    if options.save:
        save(options.save, rows)


if __name__ == "__main__":
    main()
