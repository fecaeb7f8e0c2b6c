"""The coordinator's PostgreSQL database as a file and back, by PostgreSQL's own `pg_dump` and `pg_restore`.

The dump has the rows of our tables alone; the tables are made by the program that restores it, and `tables_digest` says
whether they are the same ones. A password goes to these programs by their environment, never on their command line.

Does not stop: whoever may read the environment of this user's processes, which is this user and root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import URL, Connection, create_engine, text

from coordinator.database_url import is_secret
from coordinator.postgres import require_driver
from coordinator.tables import Base
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import OperationError, UsageError

DUMP = "coordinator.pgdump"
_NEEDED = "install PostgreSQL's client programs (Debian: postgresql-client), of the server's version or a newer one"


@contextlib.contextmanager
def snapshot_of(address: URL) -> Iterator[Connection]:
    """A connection on which all that is read is of one moment, and nothing can be written.

    It takes none of the locks by which a coordinator is the only one, so that one may run meanwhile.
    """
    require_driver()
    engine = create_engine(address, isolation_level="REPEATABLE READ", hide_parameters=True)
    try:
        with engine.connect() as connection:
            connection.execute(text("SET TRANSACTION READ ONLY"))
            yield connection
    finally:
        engine.dispose()


def dump(address: URL, reading: Connection, target: Path) -> None:
    """Write all rows as of the moment of `reading`, of `snapshot_of`, into a new file of mode 0600.

    Raises:
        OperationError: `pg_dump` is missing, older than the server, or fails.
        UsageError: as `told_to_programs`.
    """
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    moment = reading.scalar(text("SELECT pg_export_snapshot()"))
    ours = [f"--table={table.name}" for table in Base.metadata.sorted_tables]  # with the sequences that they own
    _run("pg_dump", address, "--format=custom", f"--snapshot={moment}", f"--file={target}", *ours)


def restore(address: URL, source: Path) -> None:
    """Put the rows of a dump into tables that are there and empty: all of them, or none.

    Raises:
        OperationError: `pg_restore` is missing, or fails.
        UsageError: as `told_to_programs`.
    """
    _run("pg_restore", address, "--single-transaction", "--exit-on-error", str(source))


def tables_digest() -> str:
    """SHA-256 of the names and types of all columns of our tables."""
    columns = [f"{column} {column.type}" for table in Base.metadata.sorted_tables for column in table.columns]
    return sha256_hex("\n".join(sorted(columns)).encode())


def told_to_programs(address: URL) -> tuple[str, str]:
    """Return libpq's connection string without the password, and the password, for PostgreSQL's programs.

    Raises:
        UsageError: the URL has a secret that the environment cannot carry, or a parameter that libpq does not know; or
            the driver is not installed.
    """
    require_driver()
    import psycopg

    _, told = address.get_dialect()().create_connect_args(address)
    password = str(told.pop("password", ""))
    if secret := [name for name in told if is_secret(name)]:
        raise UsageError(
            f"pg_dump and pg_restore cannot be given the {secret[0]} of the database's URL",
            hint="a password, a `passfile`, or an `sslkey` without a passphrase can be given to them",
        )
    try:
        return psycopg.conninfo.make_conninfo(**told), password
    except psycopg.Error as error:
        raise UsageError(
            f"the database's URL: {str(error).strip()}", hint="only connection parameters of libpq can stand there"
        ) from error


def _run(program: str, address: URL, *options: str) -> None:
    where, password = told_to_programs(address)
    environment = {**os.environ, "LC_ALL": "C", **({"PGPASSWORD": password} if password else {})}
    command = [program, "--data-only", "--no-owner", "--no-privileges", "--no-password", f"--dbname={where}", *options]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", check=False,
        )  # fmt: skip
    except OSError as error:
        raise OperationError(f"{program} cannot be run: {error.strerror}", hint=_NEEDED) from error
    if done.returncode != 0:
        said = done.stderr.strip().partition("\n")[0] or f"{program} ended with {done.returncode}"
        hint = _NEEDED if "version" in done.stderr else "is the server reachable, and the database of this version?"
        raise OperationError(said, hint=hint)
