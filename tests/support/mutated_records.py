"""Seeded mutations of a tuned table and of a database."""

import copy
import json
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from flashtune.core.record import Record
from flashtune.db.table import shipped_table

TARGET = "nvidia-h200"
RAW = "raw-json:"
# Values that no field of a record should have; text behind `RAW` is put into the file as it is.
HOSTILE: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 48, 255, 1000, 2**31, 2**63, 2**64, -(2**63), 0.5, -0.0, 1e-300, 1e300,
    "", "\n", "\x00", "\x1b[2J", "../../etc/passwd", "x" * 5000, "ok", "nvidia-h200\n", "none", "NaN",
    "${jndi:ldap://x}", "{{ 7 * 7 }}", "__import__('os').abort()", [], {}, [[]], {"a": 1},
    RAW + "NaN", RAW + "1e999", RAW + "-Infinity", RAW + "1" * 400, RAW + "[" * 2000, RAW + '"\\ud800"',
)  # fmt: skip


def base_records() -> tuple[Record, ...]:
    """Two shipped records of each family, all of different problems."""
    table = shipped_table(TARGET)
    assert table is not None
    chosen: dict[str, list[Record]] = {}
    problems = set()
    for record in table.records:
        of_family = chosen.setdefault(record.family, [])
        if len(of_family) < 2 and record.problem not in problems:
            of_family.append(record)
            problems.add(record.problem)
    return tuple(record for records in chosen.values() for record in records)


def mutated_table(raw: bytes, chance: random.Random) -> bytes:
    """A table's JSON with one to three changes of its structure, or of its bytes."""
    if chance.random() < 0.15:
        return mutated_bytes(raw, chance)
    table = json.loads(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        _mutate(table, chance)
    text = json.dumps(table)
    if RAW in text:
        for value in HOSTILE:
            if isinstance(value, str) and value.startswith(RAW):
                text = text.replace(json.dumps(value), value.removeprefix(RAW))
    return text.encode()


def mutated_bytes(raw: bytes, chance: random.Random) -> bytes:
    """Bytes that are flipped, lost, doubled, moved or not UTF-8."""
    changed = bytearray(raw)
    offset = chance.randrange(len(changed))
    span = chance.choice((1, 8, 100, 4096))
    part = bytes(changed[offset : offset + span])
    kind = chance.randrange(6)
    if kind == 0:
        changed[offset] ^= 1 << chance.randrange(8)
    elif kind == 1:
        changed[offset:offset] = bytes((chance.choice((0, 0xC0, 0xFF, 0x80)),))
    elif kind == 2:
        del changed[offset:]
    elif kind == 3:
        del changed[offset : offset + span]
    elif kind == 4:
        changed[offset:offset] = part
    else:
        other = chance.randrange(len(changed))
        changed[other : other + len(part)] = part
    return bytes(changed)


def mutated_database(path: Path, chance: random.Random) -> None:
    """Changes a database file: its bytes, its pages, its rows or its schema."""
    kind = chance.randrange(4)
    if kind == 0:
        raw = path.read_bytes()
        for _ in range(chance.choice((1, 4, 64))):
            raw = mutated_bytes(raw, chance) or b"\0"
        path.write_bytes(raw)
    elif kind == 1:
        pages = bytearray(path.read_bytes())
        # The header and the schema are on the first page.
        end = chance.choice((100, 4096, len(pages)))
        for _ in range(chance.choice((1, 10, 200))):
            pages[chance.randrange(end)] = chance.randrange(256)
        path.write_bytes(pages)
    else:
        with closing(sqlite3.connect(path)) as connection, connection:
            (_mutate_rows if kind == 2 else _mutate_schema)(connection, chance)


def _mutate(tree: Any, chance: random.Random) -> None:
    """Changes one value anywhere in a tree of JSON."""
    places = list(_places(tree))
    container, key = chance.choice(places)
    value = container[key]
    kind = chance.randrange(8)
    if kind == 0:
        del container[key]
    elif kind == 1:
        container[key] = chance.choice(HOSTILE)
    elif kind == 2:
        # The same field of another record, or any field of its name.
        alike = [other[name] for other, name in places if name == key]
        container[key] = copy.deepcopy(chance.choice(alike))
    elif kind == 3 and isinstance(container, dict):
        container[chance.choice(("extra", key + "\n", key.upper()))] = value
    elif kind == 4 and isinstance(container, list):
        container.insert(key, copy.deepcopy(value))
    elif isinstance(value, bool):
        container[key] = not value
    elif isinstance(value, int | float):
        container[key] = chance.choice(
            (value + 1, value - 1, value * 2, -value, value / 2, value * 1000, value // 2)
        )
    elif isinstance(value, str):
        container[key] = chance.choice((value + "\n", value + " ", value[:-1], value.upper(), value[::-1]))
    else:
        container[key] = chance.choice(HOSTILE)


def _places(tree: Any) -> Any:
    """Every container of a tree with each of its keys."""
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from _places(tree[key])


def _mutate_rows(connection: sqlite3.Connection, chance: random.Random) -> None:
    table, column = chance.choice(
        (
            *(("records", name) for name in ("payload", "payload", "payload", "problem_key", "target", "id")),
            *(("checks", name) for name in ("payload", "passed", "digest")),
            *(("selections", name) for name in ("record_id", "problem_key", "target", "pinned_at")),
            ("alembic_version", "version_num"),
        )
    )
    rowid, value = chance.choice(connection.execute(f"SELECT rowid, {column} FROM {table}").fetchall())
    if column == "payload" and chance.random() < 0.7:
        changed: Any = mutated_table(str(value).encode(), chance).decode(errors="replace")
    else:
        changed = chance.choice(
            (
                None,
                -1,
                2**62,
                1.5,
                "",
                "x\n",
                b"\xff\xfe",
                "'; DROP TABLE records; --",
                "9" * 3000,
                b"\0" * 2**21,
                "\0" * 2**21,
            )
        )
    connection.execute("PRAGMA foreign_keys = OFF")
    connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE rowid = ?", (changed, rowid))


def _mutate_schema(connection: sqlite3.Connection, chance: random.Random) -> None:
    table = chance.choice(("records", "selections", "fallbacks", "checks", "alembic_version"))
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
    kind = chance.randrange(6)
    if kind == 0:
        connection.execute(f"DROP TABLE {table}")
    elif kind == 1:
        connection.execute("PRAGMA legacy_alter_table = ON")
        connection.execute(f"ALTER TABLE {table} RENAME TO other")
    elif kind == 2:
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"CREATE VIEW {table} AS {endless}")
    elif kind == 3:
        connection.execute(f"CREATE TRIGGER t AFTER INSERT ON {table} BEGIN {endless}; END")
    elif kind == 4:
        connection.execute(f"DROP TABLE {table}")
        connection.execute(f"CREATE TABLE {table} (a, b, c)")
    else:
        connection.execute("PRAGMA writable_schema = ON")
        text = chance.choice(("CREATE TABLE \udcff", "garbage", "", "CREATE TABLE records(id,id)"))
        connection.execute(
            "UPDATE sqlite_master SET sql = CAST(? AS TEXT) WHERE name = ?",
            (text.encode(errors="surrogateescape"), table),
        )
