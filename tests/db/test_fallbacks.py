"""Tests of fallbacks: second records for tensors that the selection's family cannot address."""

from pathlib import Path

import msgspec
import pytest

from flashtune.core.errors import StoreError, TableError
from flashtune.core.record import Outcome, Record
from flashtune.core.target import find_target
from flashtune.db.eligibility import by_problem, is_better_selection, serves_any_tensors
from flashtune.db.forgetting import Forgettable
from flashtune.db.queries import now
from flashtune.db.store import Store, open_store
from flashtune.db.table import TunedTable, dump_table, parse_table, table_hash
from flashtune.templates.family import Family
from flashtune.tuner.search.selection import next_best
from tests.db.records import make_problem, make_record, reader_of
from tests.support.records import MakeRecord

TARGET = "nvidia-h200"


@pytest.fixture
def make_native(native: Family) -> MakeRecord:
    """Records of a family that requires aligned tensors."""

    def make(ms: float = 0.5, **changes: object) -> Record:
        record = make_record(ms, **changes)
        config = native.default(record.problem, find_target(TARGET))
        template = msgspec.structs.replace(record.versions, template="n" * 32)
        return msgspec.structs.replace(record, family=native.name, config=config, versions=template)

    return make


def serving(store: Store) -> tuple[list[Record], list[Record]]:
    """The selections and fallbacks, read by the store; the reader must agree."""
    served = [row.record for row in store.selections()], [row.record for row in store.fallbacks()]
    reader = reader_of(store.url)
    assert (list(reader.selections(TARGET)), list(reader.fallbacks(TARGET))) == served
    return served


def test_families_differ_in_the_tensors_they_can_address(make_native: MakeRecord) -> None:
    selected, portable = make_native(), make_record()
    assert not serves_any_tensors(selected)
    assert serves_any_tensors(portable)
    assert serves_any_tensors(make_record(family="sdpa", config=None, kernel=None))
    assert by_problem((portable, selected)) == {portable.problem.key: (selected, portable)}


def test_earlier_portable_selection_becomes_the_fallback(store: Store, make_native: MakeRecord) -> None:
    portable, selected, better = make_record(), make_native(), make_native(ms=0.4)
    store.pin(store.add(portable))
    assert serving(store) == ([portable], [])
    store.pin(store.add(selected))
    assert serving(store) == ([selected], [portable])
    store.pin(store.add(better))
    assert serving(store) == ([better], [portable])
    store.pin(store.add(portable))
    assert serving(store) == ([portable], []), "what serves any tensors needs nobody to stand in for it"


def test_fallback_is_set_only_where_one_is_needed(store: Store, make_native: MakeRecord) -> None:
    selected, portable, other = make_native(), make_record(), make_record(problem=make_problem(batch=7))
    assert not store.fallback(store.add(portable)), "there is no selection yet"
    store.pin(store.add(selected))
    assert not store.fallback(store.add(make_native(ms=0.6))), "it takes no more than the selection"
    assert store.fallback(store.add(portable))
    store.pin(store.add(other))
    assert not store.fallback(store.add(make_record(ms=2.0, problem=other.problem)))
    assert serving(store) == (sorted((selected, other), key=lambda r: r.problem.key), [portable])


def test_ineligible_record_cannot_be_a_fallback(store: Store, make_native: MakeRecord) -> None:
    store.pin(store.add(make_native()))
    failed = make_record(outcome=Outcome.WRONG_RESULT)
    with pytest.raises(StoreError, match="cannot be selected"):
        store.fallback(store.add(failed))
    with pytest.raises(StoreError, match="has no record 999"):
        store.fallback(999)


def test_families_with_different_templates_are_comparable(make_native: MakeRecord) -> None:
    fast, slow = make_native(0.5), make_record(1.0)
    assert is_better_selection(fast, slow)
    assert not is_better_selection(slow, fast)
    elsewhere = msgspec.structs.replace(fast.versions, triton="3.9.0")
    assert not is_better_selection(msgspec.structs.replace(fast, versions=elsewhere), slow)
    retold = msgspec.structs.replace(fast.versions, template="o" * 32)
    assert not is_better_selection(msgspec.structs.replace(make_native(0.4), versions=retold), fast)


def test_merge_keeps_the_best_selection_and_fallback(
    store: Store, tmp_path: Path, make_native: MakeRecord
) -> None:
    theirs = tmp_path / "theirs.sqlite"
    selected, portable, ours = make_native(), make_record(ms=0.9), make_record(ms=1.0)
    with open_store(str(theirs)) as other:
        other.pin(other.add(selected))
        other.fallback(other.add(portable))
    store.pin(store.add(ours))
    store.merge_from(str(theirs))
    assert serving(store) == ([selected], [portable])
    with open_store(str(theirs)) as other:
        other.pin(other.add(make_record(ms=0.8)))
    store.merge_from(str(theirs))
    assert serving(store) == ([selected], [make_record(ms=0.8)]), "a slower selection may still stand in"


def test_table_merge_adds_selection_and_fallback(store: Store, make_native: MakeRecord) -> None:
    selected, portable = make_native(), make_record()
    table = parse_table(dump_table(TunedTable(target=TARGET, records=(portable, selected))), "here")
    assert table.records == (selected, portable)
    counts = store.merge_tables(table)
    assert (counts.records_added, counts.selections_added, counts.selections_kept) == (2, 1, 0)
    assert serving(store) == ([selected], [portable])
    assert store.merge_tables(table).records_known == 2


def test_table_with_two_selections_or_two_fallbacks_is_refused(make_native: MakeRecord) -> None:
    for pair in ((make_record(1.0), make_record(2.0)), (make_native(1.0), make_native(2.0))):
        with pytest.raises(TableError, match="has a record before it"):
            dump_table(TunedTable(target=TARGET, records=pair))


def test_order_of_records_does_not_change_the_hash(make_native: MakeRecord) -> None:
    both = make_native(), make_record()
    first, other = (TunedTable(target=TARGET, records=records) for records in (both, both[::-1]))
    assert table_hash(first) == table_hash(other)
    assert dump_table(first) == dump_table(other)
    assert table_hash(first) != table_hash(TunedTable(target=TARGET, records=both[:1]))


def test_forgetting_a_fallback_selects_the_next_best_fallback(store: Store, make_native: MakeRecord) -> None:
    selected, first = make_native(), make_record(ms=0.8)
    second = make_record(ms=0.9)
    assert second.config is not None
    second = msgspec.structs.replace(second, config=msgspec.structs.replace(second.config, block_m=16))
    for record in (second, selected):
        store.pin(store.add(record))
    before = now()
    assert store.fallback(store.add(first))
    assert serving(store) == ([selected], [first])
    (taken,) = store.forget(Forgettable(since=before), next_best)
    assert taken.family == selected.family
    assert serving(store) == ([selected], [second])


def test_forgetting_a_selection_selects_its_fallback(store: Store, make_native: MakeRecord) -> None:
    selected, portable = make_native(), make_record()
    store.pin(store.add(selected))
    assert store.fallback(store.add(portable))
    store.forget(Forgettable(family=selected.family), next_best)
    assert serving(store) == ([portable], [])
    store.forget(Forgettable(family=portable.family), next_best)
    assert serving(store) == ([], [])
    assert store.records() == []
