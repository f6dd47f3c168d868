import sqlite3
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from flashtune.core.errors import StoreError, TableError
from flashtune.core.record import Outcome, Provenance, Record, Verdict
from flashtune.db.codec import Check
from flashtune.db.errors import UnreadableRecord
from flashtune.db.location import sqlite_path
from flashtune.db.store import MergeCounts, Store, open_store
from flashtune.db.table import TunedTable
from tests.db.records import make_problem, make_record, passed_check, reader_of
from tests.support.records import VERSIONS, shipped_table_of


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return tmp_path / "other.sqlite"


def fill(path: Path, *records: Record, pinned: Record | None = None) -> None:
    """A database of these records."""
    with open_store(str(path)) as store:
        for record in records:
            store.add(record)
        if pinned is not None:
            store.pin(store.add(pinned))


def test_equal_records_are_merged_into_one(store: Store, other: Path) -> None:
    shared, ours, theirs = make_record(ms=1.0), make_record(ms=2.0), make_record(ms=3.0)
    failed = make_record(outcome=Outcome.INFEASIBLE, kernel=None, measurement=None, verdict=None)
    store.add(shared)
    store.add(ours)
    fill(other, shared, theirs, failed)
    counts = store.merge_from(str(other))
    assert counts == MergeCounts(2, 1, 0, 0, 0, 0)
    assert [stored.record for stored in store.records()] == [shared, ours, theirs, failed]
    assert store.merge_from(str(other)) == MergeCounts(0, 3, 0, 0, 0, 0)


def test_merged_record_keeps_its_timestamp(store: Store, other: Path) -> None:
    fill(other, make_record())
    with open_store(str(other)) as source:
        age = source.records()[0].created_at
    store.merge_from(str(other))
    assert store.records()[0].created_at == age


def test_missing_selections_are_added(store: Store, other: Path) -> None:
    ours, theirs = make_record(), make_record(problem=make_problem(seqlen_kv=1024))
    store.pin(store.add(ours))
    fill(other, pinned=theirs)
    counts = store.merge_from(str(other))
    assert (counts.selections_added, counts.selections_replaced, counts.selections_kept) == (1, 0, 0)
    assert {stored.record.problem.key for stored in store.selections()} == {
        ours.problem.key,
        theirs.problem.key,
    }


def selected(ms: float, triton: str = VERSIONS.triton, *, predicted: bool = False) -> Record:
    versions = msgspec.structs.replace(VERSIONS, triton=triton)
    provenance = Provenance.PREDICTED if predicted else Provenance.MEASURED
    return make_record(ms, versions=versions, provenance=provenance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs", "replaced"),
    [
        (selected(2.0), selected(1.0), True),
        (selected(1.0), selected(2.0), False),
        (selected(2.0), selected(1.0, "3.9.0"), False),
        (selected(1.0, predicted=True), selected(2.0, "3.9.0"), True),
        (selected(2.0), selected(1.0, predicted=True), False),
        (selected(2.0, predicted=True), selected(1.0, predicted=True), False),
    ],
)
def test_the_faster_measured_selection_wins(
    store: Store, other: Path, ours: Record, theirs: Record, replaced: bool
) -> None:
    store.pin(store.add(ours))
    fill(other, pinned=theirs)
    counts = store.merge_from(str(other))
    assert [stored.record for stored in store.selections()] == [theirs if replaced else ours]
    assert (counts.selections_replaced, counts.selections_kept) == (int(replaced), int(not replaced))
    assert len(store.records()) == 2


def test_existing_checks_are_not_replaced(store: Store, other: Path) -> None:
    def check(digest: str, passed: bool) -> Check:
        verdict = Verdict(passed=passed, worst_ratio=1.0, checks=1, failed="", device="NVIDIA H200")
        versions = make_record().versions
        return Check(digest=digest * 32, target="nvidia-h200", versions=versions, verdict=verdict)

    store.remember_check(check("a", passed=False))
    with open_store(str(other)) as source:
        source.remember_check(check("a", passed=True))
        source.remember_check(check("b", passed=True))
    assert store.merge_from(str(other)).checks_added == 1
    reader = reader_of(store.url)
    answers = [passed_check(reader, digest * 32, "nvidia-h200", make_record().versions) for digest in "ab"]
    assert answers == [False, True]


def test_merge_with_itself_changes_nothing(store: Store) -> None:
    store.pin(store.add(make_record()))
    assert store.merge_from(store.url) == MergeCounts(0, 1, 0, 0, 1, 0)


def test_merge_does_not_create_a_missing_source(store: Store, other: Path) -> None:
    with pytest.raises(StoreError, match="there is no database"):
        store.merge_from(str(other))
    assert not other.exists()


def test_merge_accepts_tables(store: Store) -> None:
    ours, slower = make_record(ms=1.0), make_record(ms=2.0)
    new = make_record(problem=make_problem(batch=9))
    store.pin(store.add(ours))
    table = TunedTable(target="nvidia-h200", records=(slower, new))
    assert store.merge_tables(table) == MergeCounts(2, 0, 1, 0, 1, 0)
    assert {stored.record for stored in store.selections()} == {ours, new}
    assert store.merge_tables(table) == MergeCounts(0, 2, 0, 0, 2, 0)


@pytest.mark.slow
def test_merge_of_tables_equals_merge_of_databases(store: Store, other: Path, tmp_path: Path) -> None:
    shipped = shipped_table_of("nvidia-h200")
    # Half of the problems are there already: as they are, faster, or slower.
    whole = shipped.records[:120]
    before = tuple(_changed(record, number) for number, record in enumerate(whole[::2]))
    third = tmp_path / "third.sqlite"
    with open_store(str(other)) as source, open_store(str(third)) as second:
        source.merge_tables(TunedTable(target=shipped.target, records=whole))
        for filled in (store, second):
            filled.merge_tables(TunedTable(target=shipped.target, records=before))
        counts = store.merge_tables(TunedTable(target=shipped.target, records=whole))
        assert counts == second.merge_from(str(other))
        assert min(counts.selections_added, counts.selections_replaced, counts.selections_kept) > 0
        for chosen in (Store.selections, Store.fallbacks):
            assert [row.record for row in chosen(store)] == [row.record for row in chosen(second)]


def _changed(record: Record, number: int) -> Record:
    assert record.measurement is not None
    factor = (1.0, 0.5, 2.0)[number % 3]
    measurement = msgspec.structs.replace(
        record.measurement,
        ms=record.measurement.ms * factor,
        p20=record.measurement.p20 * factor,
        p80=record.measurement.p80 * factor,
    )
    return msgspec.structs.replace(record, measurement=measurement)


@pytest.mark.slow
def test_large_table_is_merged_in_few_statements(store: Store) -> None:
    records = tuple(make_record(problem=make_problem(batch=batch)) for batch in range(1, 1201))
    table = TunedTable(target="nvidia-h200", records=records)
    statements: list[str] = []
    told: list[int] = []

    def count(connection: object, cursor: object, statement: str, *rest: object) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", count)
    try:
        assert store.merge_tables(table, progress=told.append).selections_added == 1200
        assert store.merge_tables(table).selections_kept == 1200
    finally:
        event.remove(Engine, "before_cursor_execute", count)
    assert len(statements) < 60
    assert sum(told) == 1200
    assert len(told) == 3


def test_table_replaces_an_unreadable_selection(store: Store) -> None:
    store.pin(store.add(make_record(ms=2.0)))
    if sqlite_path(store.url) is None:
        pytest.skip("damages a file")
    with sqlite3.connect(store.url.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE records SET payload = '{}'")
    with pytest.warns(UnreadableRecord):
        counts = store.merge_tables(TunedTable(target="nvidia-h200", records=(make_record(ms=1.0),)))
    assert counts.selections_added == 1
    assert [row.record.ms for row in store.selections()] == [1.0]


def test_table_with_ineligible_records_is_refused(store: Store) -> None:
    failed = TunedTable(target="nvidia-h200", records=(make_record(outcome=Outcome.TIMEOUT),))
    with pytest.raises(TableError, match="the table of nvidia-h200, record 1 cannot be used"):
        store.merge_tables(failed)
    assert store.records() == []


def test_merge_of_tables_is_atomic(store: Store) -> None:
    good = TunedTable(target="nvidia-h200", records=(make_record(),))
    bad = TunedTable(target="nvidia-a100", records=(make_record(target="nvidia-a100", message="x" * 1000),))
    with pytest.raises(TableError):
        store.merge_tables(good, bad)
    assert store.records() == []
