"""The coordinator's tables from one database into another, row by row: between SQLite and PostgreSQL, as of one moment.

Does not stop: a reader of a database that is written meanwhile by anything but transactions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, func, insert, select, text

from coordinator.tables import Base

_ROWS = 500  # at once


@contextlib.contextmanager
def snapshot_of(address: URL) -> Iterator[Connection]:
    """A connection to PostgreSQL on which all that is read is of one moment, and nothing can be written.

    It takes none of the locks by which a coordinator is the only one, so that one may run meanwhile.
    """
    engine = create_engine(address, isolation_level="REPEATABLE READ", hide_parameters=True)
    try:
        with engine.connect() as connection:
            connection.execute(text("SET TRANSACTION READ ONLY"))
            yield connection
    finally:
        engine.dispose()


def filled(connection: Connection) -> bool:
    """Whether any table holds a row."""
    return any(connection.execute(select(table).limit(1)).first() is not None for table in Base.metadata.sorted_tables)


def copy_rows(source: Connection, target: Engine | Connection) -> None:
    """Copy all tables into a database that has none of their rows; its counters go on behind the highest number."""
    if isinstance(target, Engine):
        Base.metadata.create_all(target)
        with target.begin() as connection:
            copy_rows(source, connection)
        return
    for table in Base.metadata.sorted_tables:
        found = source.execute(select(table), execution_options={"yield_per": _ROWS})
        for rows in found.mappings().partitions():
            target.execute(insert(table), [dict(row) for row in rows])
        counter: Any = table.autoincrement_column
        if target.dialect.name == "postgresql" and counter is not None and counter.autoincrement is True:
            highest = target.scalar(select(func.max(counter)))
            if highest is not None:
                target.execute(
                    text("SELECT setval(pg_get_serial_sequence(:table, :column), :value)"),
                    {"table": table.name, "column": counter.name, "value": highest},
                )
