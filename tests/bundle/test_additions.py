"""Tests of additions to a bundle that several processes write."""

import multiprocessing
import os
import signal
from pathlib import Path

import msgspec
import pytest

from flashtune.bundle import additions
from flashtune.bundle.additions import add_entries
from flashtune.bundle.bundle_file import open_bundle
from flashtune.bundle.records import Entry
from tests.bundle.conftest import make_entry

Entries = list[tuple[Entry, dict[str, bytes]]]


def recipe(number: int) -> str:
    return f"{number + 100:032x}"


def add(path: Path, *made: tuple[Entry, dict[str, bytes]], kept: tuple[int, ...] = (1, 2, 3)) -> None:
    codes = {sha256: code for _, codes in made for sha256, code in codes.items()}
    add_entries(path, "sm_90", "1.0", [entry for entry, _ in made], codes, lambda: {*map(recipe, kept)})


def held(path: Path) -> set[str]:
    bundle = open_bundle(path, own=True)
    bundle.check_all()
    return set(bundle.index.entries)


def test_kernels_are_added_and_share_machine_code(tmp_path: Path, entries: Entries) -> None:
    path = tmp_path / "db.bundle"
    for made in entries:
        before = open_bundle(path) if path.exists() else None
        add(path, made)
        if before is not None:
            before.check_all()  # A reader keeps the old file.
    bundle = open_bundle(path)
    assert held(path) == {entry.kernel for entry, _ in entries}
    assert {number: bundle.entry_of_recipe(recipe(number)) for number in (1, 2, 3)} == {
        number: entries[number - 1][0] for number in (1, 2, 3)
    }
    assert len(bundle.index.codes) == len(bundle.index.groups) == 2


def test_new_kernel_replaces_the_old_one_of_a_recipe(tmp_path: Path, entries: Entries) -> None:
    path = tmp_path / "db.bundle"
    add(path, *entries[:2])
    faster = make_entry(9, b"faster")
    add_entries(path, "sm_90", "1.0", [faster[0]], faster[1], lambda: {recipe(9), recipe(2)})
    assert held(path) == {faster[0].kernel, entries[1][0].kernel}, "kernels of other recipes are removed"


def test_kernel_keeps_the_recipes_that_it_has(tmp_path: Path, entries: Entries) -> None:
    path = tmp_path / "db.bundle"
    entry, codes = entries[0]
    add(path, entries[0])
    add(path, (msgspec.structs.replace(entry, recipes=(recipe(2),)), codes))
    bundle = open_bundle(path)
    for number in (1, 2):
        found = bundle.entry_of_recipe(recipe(number))
        assert found is not None
        assert found.recipes == (recipe(1), recipe(2))
    # Another compiler's code for the kernel serves only the recipe that was searched.
    other = make_entry(1, b"other compiler")[1]
    (sha256,) = other
    stage = msgspec.structs.replace(entry.stages[0], code=sha256, machine="0" * 32)
    add(path, (msgspec.structs.replace(entry, stages=(stage,)), other))
    assert {*open_bundle(path).index.recipes} == {recipe(1)}


@pytest.mark.parametrize("damage", ["bytes", "writable", "large", "other"])
def test_unusable_file_is_replaced(
    tmp_path: Path, entries: Entries, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "db.bundle"
    add(path, entries[0])
    if damage == "bytes":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "writable":
        path.chmod(0o666)
    elif damage == "large":
        monkeypatch.setattr(additions, "MAX_BYTES", 10)
    else:
        add_entries(path, "sm_80", "1.0", [entries[0][0]], entries[0][1], lambda: {recipe(1)})
    add(path, entries[1])
    assert held(path) == {entries[1][0].kernel}
    assert path.stat().st_mode & 0o022 == 0


def _add_many(path: Path, first: int) -> None:
    for number in range(first, first + 5):
        add(path, make_entry(number, b"code" * number), kept=tuple(range(40)))


def test_concurrent_additions_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "db.bundle"
    processes = [
        multiprocessing.get_context("fork").Process(target=_add_many, args=(path, first))
        for first in (0, 10, 20)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert held(path) == {f"{first + number:032x}" for first in (0, 10, 20) for number in range(5)}


def test_killed_addition_leaves_the_old_file(tmp_path: Path, entries: Entries) -> None:
    path = tmp_path / "db.bundle"
    add(path, entries[0])
    before = path.read_bytes()

    process = multiprocessing.get_context("fork").Process(target=_killed_before_rename, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert path.read_bytes() == before
    add(path, entries[1])
    assert len(held(path)) == 2


def _killed_before_rename(path: Path) -> None:
    Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    add(path, make_entry(2, b"two"))
