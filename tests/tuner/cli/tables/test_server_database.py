"""Tests of commands on a PostgreSQL database: they print the same as on a file."""

import concurrent.futures
import json
from pathlib import Path
from typing import Any

from flashtune.core.record import Record
from flashtune.db.store import open_store
from tests.tuner.cli.conftest import Run


def told(run: Run, *arguments: str | Path) -> Any:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def without_moments(value: Any) -> Any:
    """The output without row numbers and times of storage."""
    if isinstance(value, dict):
        return {key: without_moments(item) for key, item in value.items() if key not in ("id", "created_at")}
    return [without_moments(item) for item in value] if isinstance(value, list) else value


def test_commands_work_alike(
    run: Run,
    stored: tuple[Record, ...],
    two_gpus: tuple[Record, ...],
    tmp_path: Path,
    postgres: str,
    shape: str,
) -> None:
    file, table = tmp_path / "flashtune.sqlite", tmp_path / "h200.json"
    assert told(run, "db", "upgrade", "--db", postgres, "--json")["before"] is None
    counts = told(run, "db", "merge", file, "--db", postgres, "--json")
    assert counts["records_added"] == len({*stored, *two_gpus})
    assert told(run, "db", "merge", postgres, "--json")["records_added"] == 0
    outputs = []
    for database in (file, postgres):
        outputs.append(
            [
                told(run, "show", "--db", database, "--json"),
                told(run, "show", "--records", "--shape", shape, "--db", database, "--json"),
                told(run, "export", "--target", "h200", "--format", "json", "--db", database),
                told(run, "db", "forget", "--target", "h200", "--yes", "--db", database, "--json"),
                told(run, "show", "--db", database, "--json"),
            ]
        )
        table.write_text(json.dumps(outputs[0][2]))
        outputs[-1].append(told(run, "import", table, "--db", database, "--json"))
        outputs[-1].append(told(run, "show", "--db", database, "--json"))
    assert without_moments(outputs[0]) == without_moments(outputs[1])


def test_processes_create_a_database_at_once(postgres: str) -> None:
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        for store in threads.map(open_store, [postgres] * 6):
            assert store.records() == []
            store.close()
