"""Records as the tests of databases and tables need them."""

import functools
from pathlib import Path
from typing import Any

import msgspec

from flashtune import testing
from flashtune.core.record import Record, Resources, Versions
from flashtune.db.light.reader import Reader, open_reader
from tests.support import records
from tests.support.records import DIGEST, VERSIONS

# A small problem, with fields replaced.
make_problem = functools.partial(
    testing.problem, "heads=8,kv_heads=4,seqlen=512,head_dim=64,dtype=bf16,batch=2"
)
RESOURCES = Resources(sram_bytes=49152, registers=168, compile_seconds=1.5)


def make_record(ms: float = 1.0, **changes: Any) -> Record:
    """Returns a measured and verified record with the default config, and replaces its other fields."""
    problem = changes.pop("problem", make_problem())
    record = records.make_record(problem, ms, kernel=DIGEST, versions=VERSIONS, resources=RESOURCES)
    return msgspec.structs.replace(record, **changes)


def reader_of(database: Path | str) -> Reader:
    """Returns the reader of a database that exists."""
    reader = open_reader(str(database))
    assert reader is not None
    return reader


def passed_check(reader: Reader, digest: str, target: str, versions: Versions) -> bool | None:
    """Returns whether a kernel passed the self-check that a database has of it; None without one."""
    check = reader.remembered(digest, target, versions)
    return None if check is None else check.verdict.passed
