"""Tests of files of bundles: reproducible, mergeable, and safe to read whatever their bytes."""

import hashlib
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.bundle.bundle_file import HEAD, MAGIC, bundle_of, dump_bundle, joined, merged, open_bundle
from flashtune.bundle.cubin import machine_digest, parameter_sizes, without_debug
from flashtune.bundle.records import Entry
from flashtune.core.errors import BundleError
from tests.bundle.conftest import cubin, make_entry

Entries = list[tuple[Entry, dict[str, bytes]]]


def test_entries_and_code_are_read_back(entries: Entries, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "kernels.bundle"
    path.write_bytes(content)
    bundle = open_bundle(path)
    for entry, codes in entries:
        assert bundle.entry(entry.kernel) == entry
        assert bundle.entry_of_recipe(entry.recipes[0]) == entry
        assert bundle.code(entry.stages[0].code) == codes[entry.stages[0].code]
    assert bundle.entry("f" * 32) is bundle.entry_of_recipe("f" * 32) is None
    assert len(bundle.index.codes) == 2, "equal code is stored once"
    bundle.check_all()


def test_order_of_entries_does_not_change_the_bytes(entries: Entries, content: bytes) -> None:
    codes = {sha256: code for _, codes in entries for sha256, code in codes.items()}
    assert dump_bundle("sm_90", "1.0", [entry for entry, _ in reversed(entries)], codes) == content


def test_merge_unites_recipes_and_receipts(entries: Entries, content: bytes) -> None:
    (entry, codes), *_ = entries
    other = msgspec.structs.replace(entry, recipes=("e" * 32,), receipts=())
    changed, its_codes = make_entry(2, b"other")
    second = dump_bundle("sm_90", "1.0", [other, changed], codes | its_codes)
    found, stored = merged([bundle_of(content, "a"), bundle_of(second, "b")])
    by_kernel = {item.kernel: item for item in found}
    assert by_kernel[entry.kernel].recipes == (*entry.recipes, "e" * 32)
    assert by_kernel[entry.kernel].receipts == entry.receipts
    assert by_kernel[changed.kernel] == entries[1][0], "the first bundle's code stays"
    assert dump_bundle("sm_90", "1.0", found, stored)
    with pytest.raises(BundleError, match="merge them apart"):
        merged([bundle_of(content, "a"), bundle_of(dump_bundle("sm_80", "1.0", [entry], codes), "b")])


def test_copied_recipes_keep_their_kernels(entries: Entries) -> None:
    codes = {sha256: code for _, codes in entries for sha256, code in codes.items()}
    rivals = [msgspec.structs.replace(entry, recipes=("e" * 32,)) for entry, _ in entries]
    bundle = bundle_of(dump_bundle("sm_90", "1.0", rivals, codes), "a")
    copy = bundle_of(joined([bundle]), "b")
    assert dict(copy.index.recipes) == dict(bundle.index.recipes)
    assert [entry.kernel for entry in copy.entries()] == [*bundle.index.recipes.values()]


def test_receipt_is_bound_to_code_and_launch(entries: Entries) -> None:
    entry, _ = entries[0]
    stage = entry.stages[0]
    change: dict[str, Any]
    assert msgspec.structs.replace(entry, kernel="f" * 32).machine == entry.machine
    for change in (
        {"machine": "0" * 32},
        {"threads": 256},
        {"shared_bytes": 1},
        {"early": True},
        {"grid": (1,)},
    ):
        other = msgspec.structs.replace(stage, **change)
        assert msgspec.structs.replace(entry, stages=(other,)).machine != entry.machine


@pytest.mark.parametrize(
    ("start", "change", "message"),
    [
        (0, b"SQLITE", "is not a bundle"),
        (8, b"\x02", "format 2"),
        (12, b"\xff" * 8, "damaged"),
        (20, b"\0" * 8, "its index is incomplete or changed"),
        (60, b"\0\0\0", "its index is incomplete or changed"),
    ],
)
def test_damaged_heads_are_one_sentence(content: bytes, start: int, change: bytes, message: str) -> None:
    damaged = content[:start] + change + content[start + len(change) :]
    with pytest.raises(BundleError, match=message):
        bundle_of(damaged, "k.bundle")


@pytest.mark.parametrize("size", [0, 7, HEAD.size, HEAD.size + 10, -1])
def test_truncated_files_are_refused(content: bytes, size: int) -> None:
    with pytest.raises(BundleError):
        bundle_of(content[:size], "k.bundle")


def test_mutations_are_refused_or_without_effect(
    entries: Entries, content: bytes, fuzz_count: Callable[[int, int], int]
) -> None:
    expected = {entry.kernel: (entry, codes[entry.stages[0].code]) for entry, codes in entries}
    chance = random.Random(43)
    messages = []
    for _ in range(fuzz_count(2000, 20_000)):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 1, 3))):
            at, way = chance.randrange(len(damaged)), chance.randrange(4)
            if way == 0:
                damaged[at] ^= 1 << chance.randrange(8)
            elif way == 1:
                del damaged[at : at + chance.randint(1, 64)]
            elif way == 2:
                damaged[at:at] = chance.randbytes(chance.randint(1, 64))
            else:
                damaged[at : at + 8] = chance.choice((b"\0", b"\xff")) * len(damaged[at : at + 8])
        try:
            bundle = bundle_of(bytes(damaged), "k.bundle")
            for kernel, (entry, code) in expected.items():
                assert bundle.entry(kernel) == entry
                assert bundle.code(entry.stages[0].code) == code
        except BundleError as error:
            messages.append(str(error))
    assert len(messages) > 0.9 * fuzz_count(2000, 20_000)
    assert all(message and len(message.splitlines()) == 1 for message in messages)


def test_mutated_indexes_with_a_checksum_are_refused_or_without_effect(
    entries: Entries, content: bytes, fuzz_count: Callable[[int, int], int]
) -> None:
    expected = {entry.kernel: (entry, codes[entry.stages[0].code]) for entry, codes in entries}
    chance = random.Random(44)
    size = HEAD.unpack_from(content)[2]
    index, frames = zlib.decompress(content[HEAD.size : HEAD.size + size]), content[HEAD.size + size :]
    outcomes = set()
    for _ in range(fuzz_count(500, 5000)):
        damaged = bytearray(index)
        at = chance.randrange(len(damaged))
        damaged[at : at + 1] = chance.choice(
            (b"0", b"9", b"-", b"99999999999", b'"', b"", b"[" * 9999, b"1e9")
        )
        raw = zlib.compress(bytes(damaged))
        head = HEAD.pack(MAGIC, 1, len(raw), hashlib.sha256(raw).digest())
        try:
            bundle = bundle_of(head + raw + frames, "k.bundle")
            found = {kernel: bundle.entry(kernel) for kernel in expected}
            outcomes |= {entry in (None, expected[kernel][0]) for kernel, entry in found.items()}
            outcomes |= {bundle.code(entry.stages[0].code) == code for entry, code in expected.values()}
        except BundleError:
            outcomes.add(True)
    assert outcomes == {True}


def test_unknown_fields_and_types_are_refused(entries: Entries) -> None:
    entry, _ = entries[0]
    fields = msgspec.to_builtins(entry)
    change: dict[str, Any]
    for change in (
        {"more": 1},
        {"stages": []},
        {"kernel": "x"},
        {"plan": {**fields["plan"], "program": [["exec"]]}},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(msgspec.json.encode({**fields, **change}), type=Entry)


def test_debug_information_and_names_do_not_change_the_digest() -> None:
    digest = machine_digest(cubin("kernel", b"code", b"/home/a/kernel.py"), "kernel")
    assert digest == machine_digest(cubin("other", b"code", b"/b"), "other")
    assert digest != machine_digest(cubin("kernel", b"cod3", b"/home/a/kernel.py"), "kernel")
    stripped = without_debug(cubin("kernel", b"code", b"/home/a/kernel.py"))
    assert b"/home" not in stripped
    assert machine_digest(stripped, "kernel") == digest
    assert stripped == without_debug(cubin("kernel", b"code", b"/root/b/kernel.py"))


@pytest.mark.parametrize("code", [b"", b"\x7fELF\x02\x01", b"MZ" * 100, cubin("kernel", b"code")[:-50]])
def test_damaged_machine_code_is_refused(code: bytes) -> None:
    with pytest.raises(BundleError, match="build the bundle again"):
        parameter_sizes(code, "kernel")


def test_truncated_section_of_machine_code_is_refused() -> None:
    short = cubin("kernel", b"\x04\x17\x0c\0").replace(b".text.kernel", b".nv.info.ker")
    with pytest.raises(BundleError, match="is damaged"):
        parameter_sizes(short, "ker")
