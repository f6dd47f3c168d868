"""The reader's questions put to a database server, through SQLAlchemy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import inspect, text

from flashtune.db.engine import make_engine, reading

Rows = list[tuple[Any, ...]]
Values = dict[str, str | int]
# Takes a table's name, a SELECT statement and its values.
Query = Callable[[str, str, Values], Rows]


def server_query(url: str) -> Query:
    """What asks a server the same SQL that a file is asked.

    Raises:
        StoreError: The URL names no database that flashtune uses, or its driver is missing.
    """
    engine = make_engine(url)

    def query(table: str, question: str, values: Values) -> Rows:
        with reading(engine, url) as connection:
            if table not in inspect(connection).get_table_names():
                return []
            return [tuple(row) for row in connection.execute(text(question.format(table=table)), values)]

    return query
