"""Sends the reader's queries to a database server, through SQLAlchemy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import inspect, text

from flashtune.core.earlier_names import TABLES
from flashtune.db.engine import make_engine, reading

Rows = list[tuple[Any, ...]]
Values = dict[str, str | int]
# Arguments: a table's name, a SELECT statement and its values.
Query = Callable[[str, str, Values], Rows]


def server_query(url: str) -> Query:
    """Returns a function that sends a server the reader's SQL.

    Raises:
        StoreError: The URL names no supported database, or its driver is missing.
    """
    engine = make_engine(url)

    def query(table: str, question: str, values: Values) -> Rows:
        with reading(engine, url) as connection:
            tables = inspect(connection).get_table_names()
            table = table if table in tables else TABLES.get(table, table)
            if table not in tables:
                return []
            return [tuple(row) for row in connection.execute(text(question.format(table=table)), values)]

    return query
