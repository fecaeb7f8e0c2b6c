"""Which database `database:` of coordinator.yaml names, and PostgreSQL under the coordinator: its connections, one
coordinator at a time, and what it refuses, by name.

SQLite by a path, or PostgreSQL, always by psycopg 3. A connection to another host is TLS with the server's certificate
and name checked, unless the URL says otherwise; of a unix socket the library takes no notice of that.

*One coordinator.* Whoever opens the database takes an advisory lock for itself, and waits a little for it: a process
that was killed leaves it when the server notices. Each connection then holds a share of a second lock, and the opener
waits until nobody else does. All connections are made at the start and none later, so each that can commit has held
its share from the beginning: no second coordinator can have written in between, whatever became of the network. A
connection that is lost is therefore not made again; the coordinator halts, and a start takes up from the database.

*Isolation.* REPEATABLE READ: a reader sees one moment, as nobody asks SQLite to. Writers follow one another under the
driver's lock, and there is one driver; if two ever met in a row, the server would refuse the second and not lose the
first. SERIALIZABLE would add to this that a query of the console may make a round fail.

*Durability.* A commit waits for the server's disk, also where the server's configuration says otherwise.

What this does not stop: a password in coordinator.yaml, which whoever may read that file can read (a password file or a
client certificate, both named in the URL, is better); a server that is told to forget (fsync off: told at the start), a
promoted replica that has not all that was acknowledged (make replication synchronous), and a second server with a copy
of the database.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from contextlib import ExitStack
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.exc import OperationalError as Failed

from fedsilo.files.durable import DiskFullError
from fedsilo.files.extras import install_hint
from fedsilo.protocol.errors import ConflictError, FedSiloError, OperationError, UsageError
from fedsilo.protocol.text import harmless

# ---- which database ----------------------------------------------------------------------------------------------

POSTGRESQL = "postgresql+psycopg"
EXAMPLES = "sqlite:////PATH or postgresql://USER@HOST/NAME"
_DRIVERS = {
    "sqlite": "sqlite", "sqlite+pysqlite": "sqlite", "postgres": POSTGRESQL, "postgresql": POSTGRESQL,
    POSTGRESQL: POSTGRESQL,
}  # fmt: skip
# What SQLAlchemy would hand to the driver's `connect`, as text, which it does not take.
_DRIVERS_OWN = frozenset({"autocommit", "conninfo", "context", "cursor_factory", "prepare_threshold", "row_factory"})
_SECRETS = ("password", "secret", "scram_")
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
# Of PostgreSQL, where the URL does not say them. The last four find a server that is gone without a word.
_DEFAULTS = {
    "connect_timeout": "10", "keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}  # fmt: skip


def database_url(text: str) -> URL:
    """The URL with what is always meant.

    Raises:
        UsageError: not a URL of SQLite or PostgreSQL, or with a parameter of the driver's own; the message holds no
            value of it.
    """
    url = _parsed(text)
    if url is None or url.drivername not in _DRIVERS:
        raise UsageError("the database's URL names neither SQLite nor PostgreSQL", hint=f"write {EXAMPLES}")
    url = url.set(drivername=_DRIVERS[url.drivername])
    if url.drivername != POSTGRESQL:
        return url
    if not url.database and "dbname" not in url.query and "service" not in url.query:
        raise UsageError("the database's URL names no database", hint=f"write {EXAMPLES}")
    if own := sorted(_DRIVERS_OWN & set(url.query)):
        raise UsageError(
            f"the database's URL names {own[0]}, which is no connection parameter of PostgreSQL",
            hint="leave it out: the coordinator sets what it needs",
        )
    # what is named twice is a list, which libpq wants as one text; several hosts are joined with their ports later
    joined = {name: (" " if name == "options" else ",").join(_all(url, name)) for name in url.query if name != "host"}
    url = url.update_query_dict(joined)
    defaults = dict(_DEFAULTS)
    if not _hosts(url) or not _hosts(url) <= _THIS_MACHINE:
        defaults["sslmode"] = "verify-full"
    return url.update_query_dict({name: value for name, value in defaults.items() if name not in url.query})


def is_secret(parameter: str) -> bool:
    """Return True if a connection parameter of libpq holds a password or a key."""
    return any(word in parameter.lower() for word in _SECRETS)


def shown_url(text: str) -> str:
    """The URL for people and logs: without a password, and with nothing but stars where it cannot be read."""
    url = _parsed(text) if text else None
    if url is None:
        return "***" if text else ""
    query = {name: "hidden" if is_secret(name) else value for name, value in url.query.items()}
    return url.set(query=query).render_as_string(hide_password=True)


def _parsed(text: str) -> URL | None:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        return None
    # an @ in a password is written %40; else its rest would pass for a host
    return None if "@" in (url.host or "") else url


def _hosts(url: URL) -> set[str]:
    told = [url.host or "", *_all(url, "host"), *_all(url, "hostaddr")]
    return {host.rpartition(":")[0] or host if host.count(":") == 1 else host
            for each in told for host in each.split(",") if host}  # fmt: skip


def _all(url: URL, name: str) -> tuple[str, ...]:
    value = url.query.get(name, ())
    return (value,) if isinstance(value, str) else value


# ---- PostgreSQL --------------------------------------------------------------------------------------------------

log = logging.getLogger("fedsilo.coordinator")

CONNECTIONS = 8
WAIT_SECONDS = 5.0  # for the locks of a coordinator that has just ended, or was killed
_CLASS = int.from_bytes(b"fsil", "big")  # of our two advisory locks, in a database that is the coordinator's own
_OPENER, _SHARES = 1, 2
# Of each session. The server lets go of the locks of a machine that is gone without a word after half a minute.
_SETTINGS = """
SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3;
SET tcp_user_timeout = 25000; SET idle_in_transaction_session_timeout = 0;
"""
_SETTINGS_14 = "SET idle_session_timeout = 0;"  # since version 14
_DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
_SERVER = "SELECT current_setting('server_encoding'), current_setting('fsync'), pg_is_in_recovery()"
_HOLDER = """
SELECT activity.application_name, coalesce(host(activity.client_addr), 'this machine')
FROM pg_locks JOIN pg_stat_activity activity USING (pid)
WHERE locktype = 'advisory' AND granted AND classid = %s AND objsubid = 2
  AND pg_locks.database = (SELECT oid FROM pg_database WHERE datname = current_database()) LIMIT 1
"""
_LOST = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03"})  # ended by the server, or by its administrator
_REFUSED = frozenset({"42501", "42P01"})  # no right, no table
LOST_HINT = "see that the database server is up, then start the coordinator again: it takes up what was acknowledged"


class DatabaseLostError(OperationError):
    """A connection to the database is gone, and with it the certainty of being the only coordinator."""

    default_code = "DATABASE_LOST"


def open_engine(url: URL, shown: str) -> Engine:
    """Be the coordinator of this database, with all connections that there will be.

    Args:
        url: as `database_url` gives it.
        shown: what messages call it, without a password.

    Raises:
        UsageError: the driver is not installed, or the database cannot be used: another encoding, a pooler between.
        ConflictError: another coordinator has it (`DATABASE_IN_USE`).
        OperationError: the server cannot be reached, refuses, or is a replica (`DATABASE_UNREACHABLE`).
    """
    require_driver()
    if "application_name" not in url.query:
        url = url.update_query_dict({"application_name": f"fedsilo {os.uname().nodename[:40]} {os.getpid()}"})
    engine = create_engine(
        url, pool_size=CONNECTIONS, max_overflow=0, isolation_level="REPEATABLE READ", hide_parameters=True
    )
    sole = _Sole(shown)
    event.listen(engine, "do_connect", sole.before)
    event.listen(engine, "connect", sole.after)
    try:
        with ExitStack() as stack:
            for _ in range(CONNECTIONS):
                stack.enter_context(engine.connect())
        sole.close()
    except DBAPIError as error:
        engine.dispose()
        raise OperationError(
            f"the database {shown} cannot be opened: {_said(error)}",
            hint="is the server up, and may this user open that database?", code="DATABASE_UNREACHABLE",
        ) from error  # fmt: skip
    except BaseException:
        engine.dispose()
        raise
    return engine


def require_driver() -> None:
    """Raises UsageError: the driver is not installed (`EXTRA_MISSING`)."""
    if importlib.util.find_spec("psycopg") is None:
        raise UsageError(
            "`database:` names PostgreSQL, and its driver is not installed",
            hint=install_hint("psycopg"), code="EXTRA_MISSING",
        )  # fmt: skip


def named(error: DBAPIError) -> FedSiloError | None:
    """What an error of the server means to a coordinator; None where it is a fault of ours."""
    state = getattr(error.orig, "sqlstate", None) or ""
    if state == "53100":
        return DiskFullError(
            "no space left at the database server", hint="free space there, then start the coordinator again"
        )
    gone = error.connection_invalidated or (not state and isinstance(error, Failed))
    if gone or state in _LOST or state.startswith("08"):
        return DatabaseLostError(f"the connection to the database is lost: {_said(error)}", hint=LOST_HINT)
    if state in ("40001", "40P01"):
        return OperationError(
            f"somebody else writes the coordinator's database: {_said(error)}", code="DATABASE_CONFLICT",
            hint="nothing but the coordinator may write there; then start it again",
        )  # fmt: skip
    # classes of the standard: resources, limits, an operator's doing, the system, and a server that only reads
    if state[:2] in ("53", "54", "57", "58", "XX") or state in ("25006", "55P03") or state in _REFUSED:
        return OperationError(f"the coordinator's database refuses: {_said(error)}", hint="the server's log says more")
    return None


class _Sole:
    """Lets the connections of one opener through, and none after them."""

    def __init__(self, shown: str) -> None:
        self.shown = shown
        self._processes: list[int] = []
        self._closed = False

    def before(self, *_: Any) -> None:
        if self._closed:
            raise DatabaseLostError("the connection to the database is lost", hint=LOST_HINT)

    def after(self, connection: Any, _record: object) -> None:
        with connection.cursor() as cursor:
            if not self._processes:
                self._look(cursor)
                self._lock(connection, cursor)
            cursor.execute("SELECT pg_advisory_lock_shared(%s, %s), pg_backend_pid()", [_CLASS, _SHARES])
            self._processes.append(cursor.fetchone()[1])
            if len(self._processes) == 1:
                cursor.execute("SELECT pg_advisory_unlock(%s, %s)", [_CLASS, _SHARES])
            cursor.execute(_SETTINGS + (_SETTINGS_14 if connection.info.server_version >= 140000 else ""))
            cursor.execute(_DURABLE)
        connection.commit()

    def close(self) -> None:
        self._closed = True
        if len(set(self._processes)) < len(self._processes):
            raise UsageError(
                f"between here and the database {self.shown} a pooler shares connections out by transaction",
                hint="name the server itself, or set the pooler to pool by session", code="DATABASE_POOLED",
            )  # fmt: skip

    def _look(self, cursor: Any) -> None:
        cursor.execute(_SERVER)
        encoding, fsync, replica = cursor.fetchone()
        if encoding != "UTF8":
            raise UsageError(
                f"the database {self.shown} keeps text as {encoding}",
                hint="make it with: createdb --template template0 --encoding UTF8 NAME", code="DATABASE_ENCODING",
            )  # fmt: skip
        if replica:
            raise OperationError(
                f"the database {self.shown} is a replica, which takes nothing", code="DATABASE_UNREACHABLE",
                hint="name the primary, or add target_session_attrs=read-write to the URL",
            )  # fmt: skip
        if fsync == "off":
            log.warning("the database server runs with fsync off: what is acknowledged may not survive a power cut")

    def _lock(self, connection: Any, cursor: Any) -> None:
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{WAIT_SECONDS * 1000:.0f}ms"])
        try:
            for lock in (_OPENER, _SHARES):
                cursor.execute("SELECT pg_advisory_lock(%s, %s)", [_CLASS, lock])
        except Exception as error:
            if getattr(error, "sqlstate", None) != "55P03":
                raise
            connection.rollback()
            cursor.execute(_HOLDER, [_CLASS])
            name, host = cursor.fetchone() or ("somebody", "an unknown place")
            holder = harmless(f"{name} at {host}", 120)
            raise ConflictError(
                f"the database {self.shown} is in use by another coordinator: {holder}",
                hint="stop that one first; of a machine that is gone the server lets go within a minute",
                code="DATABASE_IN_USE",
            ) from error


def _said(error: DBAPIError) -> str:
    """The server's or the library's own words, first line."""
    primary = getattr(getattr(error.orig, "diag", None), "message_primary", None)
    return str(primary or error.orig).strip().partition("\n")[0]
