"""Tests that evidence moves to kernels of equal machine code, and to no others."""

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from flashtune.bundle.bundle_file import dump_bundle
from flashtune.core.record import Record, Verdict
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable, load_table
from flashtune.templates.registry import template_hash
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.table_receipts import sibling
from scripts.restamp import Code, main, restamped
from tests.bundle.conftest import make_entry
from tests.support.records import make_record, write_table

VERDICT = Verdict(True, 0.4, 12, "", "NVIDIA H200", probes=("random",))
OLD, OLD_SIBLING = "a" * 32, "b" * 32


@pytest.fixture
def record() -> Record:
    """A record of an earlier template, which rendered another source."""
    record = make_record()
    versions = msgspec.structs.replace(record.versions, template="0" * 32)
    return msgspec.structs.replace(record, kernel=OLD, versions=versions, verdict=VERDICT)


def table_of(record: Record, *receipts: str) -> TunedTable:
    checks = (
        Check(digest=digest, target=record.target, versions=record.versions, verdict=VERDICT)
        for digest in receipts
    )
    return TunedTable(target=record.target, records=(record,), receipts=tuple(checks))


def sibling_digest(record: Record) -> str:
    return digest_of(msgspec.structs.replace(record, specialization=sibling(record)))


def test_evidence_moves_to_equal_machine_code(record: Record) -> None:
    own, other = (Code(digest, record.versions.compilers) for digest in ("own", "other"))
    done, counts = restamped(
        table_of(record, OLD_SIBLING, "c" * 32),
        {OLD: own, OLD_SIBLING: other},
        {digest_of(record): own, sibling_digest(record): other},
    )
    (moved,), (receipt,) = done.records, done.receipts
    assert counts == {"moved": 1}
    assert (moved.kernel, moved.measurement) == (digest_of(record), record.measurement)
    assert receipt.digest == sibling_digest(record)
    assert moved.versions.template == receipt.versions.template == template_hash(record.family)
    assert restamped(done, {}, {}) == (done, {"current": 1})


@pytest.mark.parametrize("kind", ["machine code", "compiler", "absent"])
def test_other_machine_code_keeps_no_evidence(record: Record, kind: str) -> None:
    code = Code("own", ("99.0", "13.0") if kind == "compiler" else record.versions.compilers)
    after = Code("changed", code.compilers) if kind == "machine code" else code
    before = {} if kind == "absent" else {OLD: code}
    done, counts = restamped(table_of(record, OLD), before, {digest_of(record): after})
    assert (done.records, done.receipts, counts) == ((record,), (), {"changed": 1})


def test_bundles_of_both_sources_are_compared(record: Record, tmp_path: Path) -> None:
    versions = msgspec.structs.replace(record.versions, triton="3.7.1", ptxas="12.8")
    record = msgspec.structs.replace(record, versions=versions)
    path = write_table(tmp_path / "table.json", record)
    for name, digest in {"before": OLD, "after": digest_of(record)}.items():
        entry, codes = make_entry(1, b"same" * 9)
        content = dump_bundle("sm_90", "1.0", [msgspec.structs.replace(entry, kernel=digest)], codes)
        (tmp_path / name).write_bytes(content)
    options = [f"--{name}={tmp_path / name}" for name in ("before", "after")]
    done = CliRunner().invoke(main, [f"--table={path}", *options])
    assert done.exit_code == 0, done.output
    assert "1 records 0 were current and 1 were moved" in done.output
    assert load_table(path).records[0].kernel == digest_of(record)
