"""Tests of damaged rows: each is skipped, and the other rows are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.db.errors import UnreadableRecord
from flashtune.db.forgetting import Forgettable
from flashtune.db.light.self_checks import remember_check
from flashtune.db.store import open_store
from tests.db.files.hostile import TARGET, check_of, execute, merge_into, reader_of

MakeRecord = Callable[..., Record]
MakeProblem = Callable[..., Problem]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("CAST(zeroblob(2000000) AS TEXT)", "more than 1048576 bytes"),
        ("CAST(replace(CAST(payload AS BLOB), 'NVIDIA H200', x'ff') AS TEXT)", "invalid record"),
    ],
    ids=["too large", "not UTF-8"],
)
def test_damaged_row_is_skipped(
    filled: Path, make_record: MakeRecord, make_problem: MakeProblem, damage: str, reason: str
) -> None:
    lost, whole = make_record(), make_record(problem=make_problem(seqlen_kv=1024))
    with open_store(str(filled)) as store:
        store.pin(store.add(whole))
    remember_check(check_of(lost), str(filled))
    execute(
        filled, f"UPDATE records SET payload = {damage} WHERE id = 1", f"UPDATE checks SET payload = {damage}"
    )
    reader = reader_of(filled)
    with pytest.warns(UnreadableRecord, match=reason) as told:
        assert reader.selections(TARGET) == (whole,)
    assert len(told) == 1
    with pytest.warns(UnreadableRecord, match=reason):
        assert reader.selection(lost.problem.key, TARGET) is None
    assert reader.selection(whole.problem.key, TARGET) == whole
    with open_store(str(filled)) as store:
        for read in (store.selections, store.records):
            with pytest.warns(UnreadableRecord, match=f"1 rows of .* were skipped: .*{reason}") as told:
                assert [stored.record for stored in read()] == [whole]
            assert len(told) == 1
    with pytest.warns(UnreadableRecord, match=reason):
        counts = merge_into(filled.with_name("ours.sqlite"), filled)
    assert (counts.records_added, counts.selections_added, counts.checks_added) == (1, 1, 0)


def test_column_that_is_not_utf8_skips_its_row(filled: Path, make_record: MakeRecord) -> None:
    remember_check(check_of(make_record()), str(filled))
    bad = "CAST(x'ff' AS TEXT)"
    execute(
        filled,
        f"UPDATE records SET created_at = {bad}, target = {bad} WHERE id = 1",
        f"UPDATE selections SET pinned_at = {bad}",
        f"UPDATE checks SET created_at = {bad}",
    )
    with open_store(str(filled)) as store:
        groups, _ = store.preview(Forgettable())
    assert [(group.target, group.records) for group in groups] == [("?", 1)]
    with pytest.warns(UnreadableRecord, match="stored under another problem or target"):
        counts = merge_into(filled.with_name("ours.sqlite"), filled)
    assert (counts.selections_added, counts.checks_added) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["CAST(zeroblob(2000000) AS TEXT)", "CAST(x'ff' AS TEXT)"])
@pytest.mark.parametrize("table", ["selections", "fallbacks"])
@pytest.mark.parametrize("column", ["problem_key", "target"])
def test_damaged_key_skips_only_its_row(
    filled: Path, make_record: MakeRecord, make_problem: MakeProblem, table: str, column: str, damage: str
) -> None:
    whole = make_record(problem=make_problem(seqlen_kv=1024))
    with open_store(str(filled)) as store:
        store.pin(store.add(whole))
    execute(
        filled,
        "INSERT INTO fallbacks SELECT * FROM selections",
        f"UPDATE {table} SET {column} = {damage} WHERE record_id = 1",
    )
    with open_store(str(filled)) as store:
        chosen = store.selections if table == "selections" else store.fallbacks
        with pytest.warns(UnreadableRecord, match="1 rows of .* were skipped"):
            assert [stored.record for stored in chosen()] == [whole]
    with pytest.warns(UnreadableRecord, match="1 rows of .* were skipped"):
        counts = merge_into(filled.with_name("ours.sqlite"), filled)
    assert (counts.records_added, counts.selections_added) == (2, 1 if table == "selections" else 2)


def test_selection_with_oversize_target_is_skipped(
    filled: Path, make_record: MakeRecord, make_problem: MakeProblem
) -> None:
    whole = make_record(problem=make_problem(seqlen_kv=1024))
    with open_store(str(filled)) as store:
        store.pin(store.add(whole))
        execute(filled, "UPDATE selections SET target = CAST(zeroblob(2000000) AS TEXT) WHERE record_id = 1")
        with pytest.warns(UnreadableRecord, match="more than 1048576 bytes"):
            assert [stored.record for stored in store.selections(TARGET)] == [whole]


@pytest.mark.parametrize("damage", ["CAST(zeroblob(2000000) AS TEXT)", "CAST(x'ff' AS TEXT)"])
def test_self_checks_with_damaged_digest_merge_by_content(
    filled: Path, make_record: MakeRecord, damage: str
) -> None:
    remember_check(check_of(make_record()), str(filled))
    execute(filled, f"UPDATE checks SET digest = {damage}")
    ours = filled.with_name("ours.sqlite")
    assert merge_into(ours, filled).checks_added == 1
    assert reader_of(ours).check("a" * 32, TARGET, make_record().versions) is True
