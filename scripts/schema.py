"""Writes the tables of `db/schema.py` as SQL for SQLite: `python -m scripts.schema > db/schema.sql`."""

import sys

from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from flashtune.db.schema import METADATA


def schema() -> str:
    """Returns the statements that create all tables and indexes."""
    statements: list[CreateTable | CreateIndex] = []
    for table in METADATA.sorted_tables:
        statements.append(CreateTable(table))
        statements += [CreateIndex(index) for index in table.indexes]
    texts = [str(statement.compile(dialect=sqlite.dialect())).strip() for statement in statements]
    # SQLAlchemy ends lines with a space.
    ordered = sorted(texts, key=lambda text: (text.startswith("CREATE INDEX"), text))
    return "".join(f"{text};\n" for text in ordered).replace(" \n", "\n").replace("\t", "    ")


if __name__ == "__main__":
    sys.stdout.write(schema())
