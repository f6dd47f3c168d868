"""Receipts of siblings and of other Tritons follow kernels of the same machine code."""

import json
from pathlib import Path

import msgspec
from click.testing import CliRunner

from flashtune.core.kernel import Specialization
from flashtune.core.record import Measurement, Record
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable, dump_table
from flashtune.dispatch.versions import current_versions
from flashtune.templates.rendering import render
from scripts.restamp.__main__ import main
from tests.restamp import test_restamp as restamping
from tests.restamp.test_restamp import (
    CONFIG,
    FAMILY,
    OTHER_TRITON,
    PROBLEM,
    TARGET,
    TODAY,
    VERSIONS,
    changed,
    check_of,
    keep,
    record_of,
    renamed,
    restamped,
)

cache = restamping.cache
SIBLING = render(FAMILY, PROBLEM, CONFIG, Specialization(lse=True))


def table_of(record: Record, *receipts: Check) -> TunedTable:
    return TunedTable(target=TARGET.name, records=(record,), receipts=receipts)


def places(table: TunedTable) -> set[tuple[str, str, str]]:
    return {
        (receipt.digest, receipt.versions.triton, receipt.versions.template) for receipt in table.receipts
    }


def test_sibling_receipts_of_the_compared_compilers_are_moved(tmp_path: Path, cache: Path) -> None:
    old, other = renamed(), renamed(SIBLING)
    assert SIBLING.digest != other.digest
    for kernel in (old, other):
        keep(kernel, cache)
    receipts = check_of(other.digest, VERSIONS), check_of(other.digest, OTHER_TRITON)
    done = restamped(tmp_path / "table.json", table_of(record_of(old), *receipts))
    here = current_versions(FAMILY.name)
    assert places(done) == {
        (SIBLING.digest, here.triton, here.template),
        (other.digest, "99.0", VERSIONS.template),
    }


def test_sibling_receipts_with_other_machine_code_are_not_moved(tmp_path: Path, cache: Path) -> None:
    other = changed(("1.4426950408889634", "1.5"), kernel=SIBLING)
    keep(other, cache)
    table = table_of(record_of(TODAY), check_of(other.digest, VERSIONS))
    assert restamped(tmp_path / "table.json", table).receipts == table.receipts


def test_sibling_receipt_is_moved_only_if_equal_at_each_problem(tmp_path: Path, cache: Path) -> None:
    other = changed(("* heads * batch,)", "* heads * batch + (seqlen_q > 4096),)"), kernel=SIBLING)
    keep(other, cache)
    large = msgspec.structs.replace(PROBLEM, seqlen_q=8192, seqlen_kv=8192)
    slow = msgspec.structs.replace(record_of(TODAY), problem=large, measurement=Measurement(9.0, 9.0, 9.0, 9))
    table = table_of(record_of(TODAY), check_of(other.digest, VERSIONS))
    both = msgspec.structs.replace(table, records=(*table.records, slow))
    assert restamped(tmp_path / "both.json", both).receipts == table.receipts
    (moved,) = restamped(tmp_path / "one.json", table).receipts
    assert moved.digest == SIBLING.digest


def test_receipts_of_another_triton_are_moved_to_a_current_record(tmp_path: Path, cache: Path) -> None:
    """A second run, under the other Triton, moves the receipts that the first one left."""
    old, other = renamed(), renamed(SIBLING)
    for kernel in (old, other):
        keep(kernel, cache)
    made = msgspec.structs.replace(current_versions(FAMILY.name), triton="98.0")
    record = msgspec.structs.replace(record_of(TODAY), versions=made)
    table = table_of(record, check_of(old.digest, VERSIONS), check_of(other.digest, VERSIONS))
    done = restamped(tmp_path / "table.json", table)
    assert done.records == table.records
    here = current_versions(FAMILY.name)
    assert places(done) == {(rendered.digest, here.triton, here.template) for rendered in (TODAY, SIBLING)}


def test_command_counts_moved_receipts(tmp_path: Path, cache: Path) -> None:
    other = renamed(SIBLING)
    keep(other, cache)
    path = tmp_path / "table.json"
    path.write_bytes(dump_table(table_of(record_of(TODAY), check_of(other.digest, VERSIONS))))
    arguments = ["--table", str(path), "--json"]
    counts = [json.loads(CliRunner().invoke(main, arguments).stdout) for _ in range(2)]
    assert [(count["carried"], count["current"], count["receipts"]) for count in counts] == [
        (1, 0, 1),
        (0, 1, 0),
    ]
