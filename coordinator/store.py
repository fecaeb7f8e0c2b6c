"""The coordinator's durable state: runs, rounds, members, sequences, uploads, outbox, figures, events.

SQLAlchemy 2 with portable column types: SQLite by a path, or PostgreSQL by a URL, always by psycopg 3. SQLite runs in
WAL mode with full synchronisation: a committed transaction is on the disk, and only then is a message acknowledged.

Where a run and its method stand is not stored: `transitions` keeps what `protocol.rounds` accepted, in order, and
folding it again gives the same life, the same state of the method and the same actions, for every method.

The rows are one class for each table. Every database is given the same widths and kinds: SQLite takes any, PostgreSQL
what a column says and no more. Text is sorted by its characters' numbers on both, never by a server's language.

*PostgreSQL.* A connection to another host is TLS with the server's certificate and name checked, unless the URL says
otherwise; of a unix socket the library takes no notice of that.

One coordinator: whoever opens the database takes an advisory lock for itself, and waits a little for it: a process that
was killed leaves it when the server notices. Each connection then holds a share of a second lock, and the opener waits
until nobody else does. All connections are made at the start and none later, so each that can commit has held its share
from the beginning: no second coordinator can have written in between, whatever became of the network. A connection that
is lost is therefore not made again; the coordinator halts, and a start takes up from the database.

Isolation: REPEATABLE READ: a reader sees one moment, as nobody asks SQLite to. Writers follow one another under the
driver's lock, and there is one driver; if two ever met in a row, the server would refuse the second and not lose the
first. SERIALIZABLE would add to this that a query of the console may make a round fail.

Durability: a commit waits for the server's disk, also where the server's configuration says otherwise.

What this does not stop: a password in coordinator.yaml, which whoever may read that file can read (a password file or a
client certificate, both named in the URL, is better); a server that is told to forget (fsync off: told at the start), a
promoted replica that has not all that was acknowledged (make replication synchronous), and a second server with a copy
of the database.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from sqlalchemy import (
    URL,
    BigInteger,
    Boolean,
    ColumnElement,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    TextClause,
    and_,
    bindparam,
    create_engine,
    event,
    insert,
    make_url,
    select,
    text,
    update,
)
from sqlalchemy import func as sql
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.exc import OperationalError as Failed
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.types import TypeEngine

from fedsilo.files.durable import DiskFullError
from fedsilo.files.extras import install_hint
from fedsilo.files.sqlite_file import TRY_SECONDS, LockedFile
from fedsilo.protocol.errors import ConflictError, FedSiloError, OperationError, UsageError, WireCode
from fedsilo.protocol.rounds import ROUND_DONE
from fedsilo.protocol.text import harmless

# ---- which database ----------------------------------------------------------------------------------------------

POSTGRESQL = "postgresql+psycopg"
EXAMPLES = "sqlite:////PATH or postgresql://USER@HOST/NAME"
_DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgres": POSTGRESQL,
    "postgresql": POSTGRESQL,
    POSTGRESQL: POSTGRESQL,
}
# What SQLAlchemy would hand to the driver's `connect`, as text, which it does not take.
_DRIVERS_OWN = frozenset({"autocommit", "conninfo", "context", "cursor_factory", "prepare_threshold", "row_factory"})
_SECRETS = ("password", "secret", "scram_")
_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})
# Of PostgreSQL, where the URL does not say them. The last four find a server that is gone without a word.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}


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
    hosts = [url.host or "", *_all(url, "host"), *_all(url, "hostaddr")]
    return {
        host.rpartition(":")[0] or host if host.count(":") == 1 else host
        for each in hosts
        for host in each.split(",")
        if host
    }


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
            hint="is the server up, and may this user open that database?",
            code="DATABASE_UNREACHABLE",
        ) from error
    except BaseException:
        engine.dispose()
        raise
    return engine


def require_driver() -> None:
    """Check that the database's driver is installed. Raises UsageError: it is not (`EXTRA_MISSING`)."""
    if importlib.util.find_spec("psycopg") is None:
        raise UsageError(
            "`database:` names PostgreSQL, and its driver is not installed",
            hint=install_hint("psycopg"),
            code="EXTRA_MISSING",
        )


def named(error: DBAPIError) -> FedSiloError | None:
    """Return the error that a coordinator raises for one of the server; None where it is a fault of ours."""
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
            f"somebody else writes the coordinator's database: {_said(error)}",
            code="DATABASE_CONFLICT",
            hint="nothing but the coordinator may write there; then start it again",
        )
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
                hint="name the server itself, or set the pooler to pool by session",
                code="DATABASE_POOLED",
            )

    def _look(self, cursor: Any) -> None:
        cursor.execute(_SERVER)
        encoding, fsync, replica = cursor.fetchone()
        if encoding != "UTF8":
            raise UsageError(
                f"the database {self.shown} keeps text as {encoding}",
                hint="make it with: createdb --template template0 --encoding UTF8 NAME",
                code="DATABASE_ENCODING",
            )
        if replica:
            raise OperationError(
                f"the database {self.shown} is a replica, which takes nothing",
                code="DATABASE_UNREACHABLE",
                hint="name the primary, or add target_session_attrs=read-write to the URL",
            )
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


# ---- tables ------------------------------------------------------------------------------------------------------

# SQLite numbers rows by itself only for a plain INTEGER key
_RowId = BigInteger().with_variant(Integer, "sqlite")
_Text = Text().with_variant(Text(collation="C"), "postgresql")


def _characters(number: int) -> TypeEngine[str]:
    """Text of at most so many characters."""
    return String(number).with_variant(String(number, collation="C"), "postgresql")


class Base(DeclarativeBase):
    pass


# What each message asks is asked in statements that are made once, past the unit of work (a third of the time).


def table_of(rows: type[Base]) -> Table:
    return cast(Table, rows.__table__)


def where_its(*columns: Any) -> ColumnElement[bool]:
    """Return the condition that each column has the value that `its` gives under the column's name."""
    return and_(*(column == bindparam(f"its_{column.key}") for column in columns))


def its(**values: Any) -> dict[str, Any]:
    return {f"its_{name}": value for name, value in values.items()}


def upsert(rows: type[Base], changed: str) -> TextClause:
    """Return the statement that stores a row, given by all its columns, or changes the one of its key. Both databases
    take it in these words, for which SQLAlchemy has a form for each."""
    table = table_of(rows)
    names, key = table.columns.keys(), ", ".join(table.primary_key.columns.keys())
    places = f"({', '.join(names)}) VALUES ({', '.join(f':{name}' for name in names)})"
    return text(f"INSERT INTO {table.name} {places} ON CONFLICT ({key}) DO UPDATE SET {changed}")


class Run(Base):
    """state: one of `fedsilo.protocol.rounds.RUN`."""

    __tablename__ = "runs"
    name: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    ordinal: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(_characters(16))
    reason: Mapped[str] = mapped_column(_characters(64), default="")
    request: Mapped[str] = mapped_column(_Text)  # the submitted fields as JSON
    plan: Mapped[str] = mapped_column(_Text, default="")  # canonical JSON once the roster stands
    submitted_by: Mapped[str] = mapped_column(_characters(255), default="")
    submitted_at: Mapped[str] = mapped_column(_characters(32))
    started_at: Mapped[str] = mapped_column(_characters(32), default="")
    ended_at: Mapped[str] = mapped_column(_characters(32), default="")
    base_digest: Mapped[str] = mapped_column(_characters(64), default="")  # initial adapter
    adapter_digest: Mapped[str] = mapped_column(_characters(64), default="")  # newest committed one


class Round(Base):
    """state: one of `fedsilo.protocol.rounds.ROUND`."""

    __tablename__ = "rounds"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    state: Mapped[str] = mapped_column(_characters(16))
    base_digest: Mapped[str] = mapped_column(_characters(64))
    adapter_digest: Mapped[str] = mapped_column(_characters(64), default="")
    public_steps: Mapped[str] = mapped_column(_Text, default="{}")  # {step: [prompt index]}
    participants: Mapped[str] = mapped_column(_Text, default="[]")
    opened_at: Mapped[str] = mapped_column(_characters(32))
    closed_at: Mapped[str] = mapped_column(_characters(32), default="")
    seconds: Mapped[float] = mapped_column(Float, default=0.0)

    def seconds_until(self, moment: str) -> float:
        """Since it was opened, by the clocks of both moments (ISO 8601); 0 where the clock went back in between."""
        return max(0.0, (datetime.fromisoformat(moment) - datetime.fromisoformat(self.opened_at)).total_seconds())


class RoundResult(Base):
    """The result of a committed round for one silo, where each has its own; `participants`: whose updates are in it."""

    __tablename__ = "round_results"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    receiver: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    digest: Mapped[str] = mapped_column(_characters(64), index=True)
    participants: Mapped[str] = mapped_column(_Text)


class ServerState(Base):
    """State of the plan's server optimiser, beside the adapter of a committed round."""

    __tablename__ = "server_states"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    digest: Mapped[str] = mapped_column(_characters(64))


class RoundTranscript(Base):
    """state: signing | late (its time has passed) | agreed | over."""

    __tablename__ = "round_transcripts"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    digest: Mapped[str] = mapped_column(_characters(64))
    canonical: Mapped[str] = mapped_column(_Text)
    signature: Mapped[bytes] = mapped_column(LargeBinary)  # the coordinator's
    state: Mapped[str] = mapped_column(_characters(16))


class RoundSignature(Base):
    """A silo's signature under a round's transcript; `delivered`: round.agreed is queued for it."""

    __tablename__ = "round_signatures"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    signature: Mapped[bytes] = mapped_column(LargeBinary)
    public_key: Mapped[bytes] = mapped_column(LargeBinary)
    certificate: Mapped[str] = mapped_column(_Text)
    delivered: Mapped[bool] = mapped_column(Boolean)


class EndedRound(Base):
    """The end of a round, as the coordinator signed it: once, so that it never signs another."""

    __tablename__ = "ended_rounds"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    fields: Mapped[str] = mapped_column(_Text)  # RoundEnd as JSON
    signature: Mapped[bytes] = mapped_column(LargeBinary)


class PendingRecord(Base):
    """A record that belongs to the transaction it was stored with, until it is in the audit log."""

    __tablename__ = "pending_records"
    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    event: Mapped[str] = mapped_column(_characters(64))
    fields: Mapped[str] = mapped_column(_Text)


class LogPlace(Base):
    """Place that the audit log had reached: `size` with the newest message, `root` of its first `rooted` records."""

    __tablename__ = "log_places"
    origin: Mapped[str] = mapped_column(_characters(255), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    rooted: Mapped[int] = mapped_column(BigInteger)
    root: Mapped[str] = mapped_column(_characters(64))


class Member(Base):
    __tablename__ = "members"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    state: Mapped[str] = mapped_column(_characters(16))  # joined | refused
    hello: Mapped[str] = mapped_column(_Text)  # what it said, as JSON
    fingerprint: Mapped[str] = mapped_column(_characters(64))
    refusal: Mapped[str] = mapped_column(_Text, default="")  # {code, field, expected, got} as JSON
    since: Mapped[str] = mapped_column(_characters(32))


class SequenceCounter(Base):
    """Highest sequence taken from a silo in a run ("in"), or reserved for our replies to it ("out", run "")."""

    __tablename__ = "sequences"
    silo: Mapped[str] = mapped_column(_characters(255), primary_key=True)
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    direction: Mapped[str] = mapped_column(_characters(3), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)


class Book(Base):
    """Counts of the rules per silo (`policies.history.HistoryBook` as JSON); budgets survive a restart (T11)."""

    __tablename__ = "books"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    counts: Mapped[str] = mapped_column(_Text)


class Upload(Base):
    """One accepted contribution; its key makes a retry recognisable (threat T29)."""

    __tablename__ = "uploads"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    kind: Mapped[str] = mapped_column(_characters(32), primary_key=True)
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    digest: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    payload_bytes: Mapped[int] = mapped_column(BigInteger)
    norm: Mapped[float] = mapped_column(Float, default=0.0)  # L2 of a delta; 0 for other kinds
    received_at: Mapped[str] = mapped_column(_characters(32))
    __table_args__ = (Index("uploads_of_silo", "silo", "digest"),)  # whether an upload was taken before


class OutboxItem(Base):
    """A message that waits for a silo, delivered at least once: it stays until a poll acknowledges a sequence under
    which it was delivered."""

    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    silo: Mapped[str] = mapped_column(_characters(64), index=True)
    run: Mapped[str] = mapped_column(_characters(64))
    round: Mapped[int] = mapped_column(BigInteger)
    step: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(_characters(32))
    payload: Mapped[bytes] = mapped_column(LargeBinary)
    delivered_sequence: Mapped[int] = mapped_column(BigInteger, default=0)  # 0: never given; below: `outbox.LOST`


class CarriedSilo(Base):
    """A silo without a line: its messages come in files that people carry."""

    __tablename__ = "carried_silos"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    since: Mapped[str] = mapped_column(_characters(32))


class CarriedAnswer(Base):
    """A signed answer to a message out of a file; it stays until the silo says that it took it in."""

    __tablename__ = "carried_answers"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    asked_run: Mapped[str] = mapped_column(_characters(64))
    asked_sequence: Mapped[int] = mapped_column(BigInteger)
    envelope: Mapped[bytes] = mapped_column(LargeBinary)
    payload: Mapped[bytes] = mapped_column(LargeBinary)


class Traffic(Base):
    """Complete messages per silo and kind; direction as the coordinator sees it: in | out."""

    __tablename__ = "traffic"
    silo: Mapped[str] = mapped_column(_characters(255), primary_key=True)
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    kind: Mapped[str] = mapped_column(_characters(32), primary_key=True)
    direction: Mapped[str] = mapped_column(_characters(3), primary_key=True)
    messages: Mapped[int] = mapped_column(BigInteger)
    payload_bytes: Mapped[int] = mapped_column(BigInteger)


class ShownCheckpoint(Base):
    """A checkpoint that a silo showed, with the proof from the one before: the chain that other silos follow (T38)."""

    __tablename__ = "shown_checkpoints"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    previous_size: Mapped[int] = mapped_column(BigInteger)
    note: Mapped[str] = mapped_column(_Text)
    consistency: Mapped[bytes] = mapped_column(LargeBinary)  # 32 bytes for each hash


class Countersigned(Base):
    """The newest checkpoint of a silo that another silo countersigned, with that cosignature."""

    __tablename__ = "countersigned"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)  # whose log
    witness: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    note: Mapped[str] = mapped_column(_Text)


class ShownCertificate(Base):
    """The newest certificate of each silo, for silos that have not seen its key."""

    __tablename__ = "shown_certificates"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    pem: Mapped[str] = mapped_column(_Text)


# Names of figures.
ISOLATION = "isolation"  # behind which walls a silo's trainer is
SILO_ERROR = "silo_error"  # the code of a control.error about a run, from the closed list of what may cross
PLAN_DECLINED = "plan_declined"  # a site said no to the plan; it need not say why


class Figure(Base):
    """One line of the run record: a silo's measurement, or a note of the method."""

    __tablename__ = "figures"
    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(_characters(64), index=True)
    round: Mapped[int] = mapped_column(BigInteger)
    step: Mapped[int] = mapped_column(BigInteger)
    silo: Mapped[str] = mapped_column(_characters(64))
    name: Mapped[str] = mapped_column(_characters(64))
    fields: Mapped[str] = mapped_column(_Text)


class Transition(Base):
    """An event of `fedsilo.protocol.rounds` that was accepted, as JSON."""

    __tablename__ = "transitions"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    ordinal: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    event: Mapped[str] = mapped_column(_Text)


class Event(Base):
    """An event for people, in the console's list."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    time: Mapped[str] = mapped_column(_characters(32))
    name: Mapped[str] = mapped_column(_characters(64))
    fields: Mapped[str] = mapped_column(_Text)


# ---- the store ---------------------------------------------------------------------------------------------------


@dataclass
class Known:
    """State of the outboxes that is known without asking the database, which nobody else changes.

    Attributes:
        queued: how often something was put into a silo's by this process, by silo.
        empty: silos in whose outbox nothing was, with that number at the time.
    """

    queued: Counter[str] = field(default_factory=Counter)
    empty: dict[str, int] = field(default_factory=dict)

    def is_empty(self, silo: str) -> bool:
        return self.empty.get(silo) == self.queued[silo]

    def note_empty(self, silo: str) -> None:
        self.empty[silo] = self.queued[silo]

    def undone(self) -> None:
        """A transaction failed: what it took out may be there."""
        self.empty.clear()


class Store:
    """The coordinator's database.

    Args:
        url: SQLAlchemy URL, such as `sqlite:////var/lib/fedsilo/coordinator.db` or `postgresql://fedsilo@db/fedsilo`.

    Raises:
        UsageError: another URL, or the driver is not installed.
        ConflictError: another coordinator has the database (PostgreSQL; of a SQLite file, its folder's lock says so).
        OperationError: it cannot be opened.

    Attributes:
        outboxes: what is known of them without asking.
    """

    def __init__(self, url: str) -> None:
        address = database_url(url)
        self.locked: LockedFile | None = None
        if address.drivername == POSTGRESQL:
            self._engine = open_engine(address, shown_url(url))
        else:
            self._engine = create_engine(address, hide_parameters=True)
            event.listen(self._engine, "connect", _use_wal)
            self.locked = LockedFile(Path(address.database or ""))
            self._wait_for_locks(self.locked)
        event.listen(self._engine, "before_cursor_execute", _refuse_nul)
        try:
            with named_errors():
                Base.metadata.create_all(self._engine)
        except BaseException:
            self._engine.dispose()
            raise
        self.outboxes = Known()
        self._sessions = sessionmaker(self._engine, expire_on_commit=False, info={"outboxes": self.outboxes})
        event.listen(self._sessions, "loaded_as_persistent", _hold)
        event.listen(self._sessions, "pending_to_persistent", _hold)
        self._thread = threading.local()

    def _wait_for_locks(self, locked: LockedFile) -> None:
        """A statement that finds the file locked by another process is tried again, in its transaction as it is."""

        def execute(cursor: sqlite3.Cursor, statement: str, parameters: Any, _context: object) -> bool:
            locked.until_free(lambda: cursor.execute(statement, parameters))
            return True

        def execute_many(cursor: sqlite3.Cursor, statement: str, parameters: Any, _context: object) -> bool:
            # its first row takes the lock for all, so a try that fails has done nothing
            locked.until_free(lambda: cursor.executemany(statement, parameters))
            return True

        event.listen(self._engine, "do_execute", execute)
        event.listen(self._engine, "do_executemany", execute_many)

    @property
    def waiting(self) -> str:
        """Return in words what the store waits for: a lock that another process holds; empty while nothing is."""
        return self.locked.waiting if self.locked is not None else ""

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Open one transaction, durable when the block ends; where it fails, the callbacks of `once_undone` are called.

        Raises:
            DiskFullError: no space; nothing of the block is kept.
            OperationError: the database refuses for another reason.
        """
        around = getattr(self._thread, "afterwards", None), getattr(self._thread, "undo", None)
        afterwards: list[Callable[[], None]] = []
        undo: list[Callable[[], object]] = []
        self._thread.afterwards, self._thread.undo = afterwards, undo
        try:
            with named_errors(), self._sessions.begin() as session:
                yield session
                write_counts(session)
        except BaseException:
            self.outboxes.undone()
            for call in reversed(undo):
                call()
            raise
        finally:
            self._thread.afterwards, self._thread.undo = around
        for call in afterwards:
            call()

    def once_committed(self, call: Callable[[], None]) -> None:
        """Call when this thread's transaction is durable: who is told of a change can then read it. Without one, now;
        never where the transaction fails."""
        afterwards = getattr(self._thread, "afterwards", None)
        if afterwards is None:
            call()
        else:
            afterwards.append(call)

    def once_undone(self, call: Callable[[], object]) -> None:
        """Call if this thread's transaction fails, the last one first: memory is then what the database is. Without a
        transaction there is nothing that could fail."""
        if (undo := getattr(self._thread, "undo", None)) is not None:
            undo.append(call)

    def ask(self) -> None:
        """Return whether the database answers. Raises OperationError: it does not; what a transaction would say."""
        with self.transaction() as session:
            session.connection().execute(_ANYTHING)

    def close(self) -> None:
        self._engine.dispose()


def _hold(session: Session, row: object) -> None:
    """A session forgets rows that nobody refers to, and would ask for them again."""
    session.info.setdefault("held", []).append(row)


def _use_wal(connection: sqlite3.Connection, _record: object) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute(f"PRAGMA busy_timeout={int(TRY_SECONDS * 1000)}")


def _refuse_nul(_connection: object, _cursor: object, _statement: str, parameters: Any, *_: object) -> None:
    """PostgreSQL keeps no NUL in a text, and SQLite would: neither is asked to."""
    for row in parameters if isinstance(parameters, list) else (parameters,):
        for value in row.values() if isinstance(row, dict) else row:
            if isinstance(value, str) and "\0" in value:
                raise UsageError("a text for the coordinator's database holds a NUL character", code="NUL_IN_TEXT")


@contextmanager
def named_errors() -> Iterator[None]:
    """Raise what the database has against a statement as an error of ours."""
    try:
        yield
    except DBAPIError as error:
        if not isinstance(error.orig, sqlite3.Error):
            named_error = named(error)
            if named_error is None:
                raise
            raise named_error from error
        if any(word in str(error.orig) for word in ("file is not a database", "malformed")):
            raise OperationError(
                f"the coordinator's database is damaged: {error.orig}",
                code="DATABASE_DAMAGED",
                hint="keep it, it is evidence, and take state_dir from a backup: docs/how-to/backup.md",
            ) from error
        if not isinstance(error, OperationalError):
            raise
        if "disk is full" in str(error.orig) or "disk I/O" in str(error.orig):
            raise DiskFullError(
                "no space left for the coordinator's database", hint="free space in state_dir, then start again"
            ) from error
        raise OperationError(f"the coordinator's database refuses: {error.orig}") from error
    except PoolTimeout as error:
        raise OperationError(
            "no connection to the coordinator's database became free in time; all are in use",
            hint="is the database slow, or a lock held in it? nothing was changed",
        ) from error


# ---- queries that more than one caller needs --------------------------------------------------------


_ANYTHING = select(LogPlace.size).limit(1)  # of a table, or SQLite would not look at its file
_SEQUENCE = select(SequenceCounter.value).where(
    where_its(SequenceCounter.silo, SequenceCounter.run, SequenceCounter.direction)
)
_SET_SEQUENCE = upsert(SequenceCounter, "value = excluded.value")
_RAISE = upsert(SequenceCounter, "value = excluded.value WHERE sequences.value < excluded.value")
_COUNT = upsert(
    Traffic, "messages = traffic.messages + 1, payload_bytes = traffic.payload_bytes + excluded.payload_bytes"
)
_COUNTS = select(Book.counts).where(where_its(Book.silo))
_SET_COUNTS = upsert(Book, "counts = excluded.counts")
_LOG_PLACE = update(table_of(LogPlace)).where(where_its(LogPlace.origin)).values(size=bindparam("value"))
_KEEP_TRANSITION = insert(table_of(Transition))
_KEEP_FIGURES = insert(table_of(Figure))
_KEEP_UPLOAD = insert(table_of(Upload))
_MEMBER_STATE = select(Member.state).where(where_its(Member.silo))
_IS_ROUND = select(Round.number).where(where_its(Round.run, Round.number))


def sequence_of(session: Session, silo: str, run: str, direction: str) -> int:
    return session.connection().execute(_SEQUENCE, its(silo=silo, run=run, direction=direction)).scalar() or 0


def set_sequence(session: Session, silo: str, run: str, direction: str, value: int) -> None:
    row = {"silo": silo, "run": run, "direction": direction, "value": value}
    session.connection().execute(_SET_SEQUENCE, row)


def raise_sequence(session: Session, silo: str, run: str, value: int) -> None:
    """Remember the highest sequence taken from a silo in a run; a retry's older one changes nothing."""
    session.connection().execute(_RAISE, {"silo": silo, "run": run, "direction": "in", "value": value})


def counts_of(session: Session, silo: str) -> str:
    """Return what the rules count of a silo, as JSON; empty before its first message."""
    return session.connection().execute(_COUNTS, its(silo=silo)).scalar() or ""


def set_counts(session: Session, silo: str, counts: str) -> None:
    session.connection().execute(_SET_COUNTS, {"silo": silo, "counts": counts})


def set_log_size(session: Session, origin: str, size: int) -> None:
    """Store that this audit log has so many records, with what the caller's transaction makes of the newest."""
    session.connection().execute(_LOG_PLACE, its(origin=origin) | {"value": size})


def is_round(session: Session, run: str, number: int) -> bool:
    """Return whether a run has opened a round of that number."""
    return session.connection().execute(_IS_ROUND, its(run=run, number=number)).scalar() is not None


def rounds_done(session: Session, run: str) -> int:
    """Return how many rounds of a run were committed, or closed where its method makes no adapter."""
    of_run = select(sql.count()).where(Round.run == run, Round.state.in_(ROUND_DONE))
    return session.execute(of_run).scalar_one()


def count_message(
    session: Session, *, silo: str, run: str, round_number: int, kind: str, direction: str, payload_bytes: int
) -> None:
    """Counted with `write_counts`, when the transaction ends: most messages have an answer, which is counted, too."""
    key = {"silo": silo, "run": run, "round": round_number, "kind": kind, "direction": direction}
    session.info.setdefault("traffic", []).append(key | {"messages": 1, "payload_bytes": payload_bytes})


def write_counts(session: Session) -> None:
    """Write what `count_message` counted in this transaction, before anybody reads it here."""
    if counted := session.info.pop("traffic", None):
        session.connection().execute(_COUNT, counted)


def carried_silos(session: Session) -> frozenset[str]:
    """Silos whose messages come in files."""
    return frozenset(session.scalars(select(CarriedSilo.silo)))


def keep_transition(session: Session, run: str, ordinal: int, event: str) -> None:
    session.connection().execute(_KEEP_TRANSITION, {"run": run, "ordinal": ordinal, "event": event})


def keep_figures(session: Session, rows: Iterable[Mapping[str, Any]]) -> None:
    """rows: values of all columns of `Figure` but `id`."""
    if figures := list(rows):
        session.connection().execute(_KEEP_FIGURES, figures)


def keep_upload(session: Session, **values: Any) -> None:
    """values: of all columns of `Upload`."""
    session.connection().execute(_KEEP_UPLOAD, values)


def has_joined(session: Session, silo: str) -> bool:
    return session.connection().execute(_MEMBER_STATE, its(silo=silo)).scalar() == "joined"


def next_ordinal(session: Session, run: str) -> int:
    newest = session.scalar(select(sql.max(Transition.ordinal)).where(Transition.run == run))
    return 1 if newest is None else newest + 1


def results_of(session: Session, run: str, number: int) -> dict[str, RoundResult]:
    """Return a round's results by their receivers; nothing where all silos have the same."""
    query = select(RoundResult).where(RoundResult.run == run, RoundResult.round == number)
    return {row.receiver: row for row in session.scalars(query.order_by(RoundResult.receiver))}


def server_state_of(session: Session, run: str, before: int) -> str:
    """Return the digest of what the last committed round before this one left beside its adapter; empty where none."""
    query = select(ServerState.digest).where(ServerState.run == run, ServerState.round < before)
    return session.scalar(query.order_by(ServerState.round.desc()).limit(1)) or ""


def may_fetch(session: Session, silo: str, digest: str) -> bool:
    """Return whether a digest names an adapter of some run for all, or a result for this silo; an upload's digest, and
    that of a result for another, does not, so it cannot be fetched."""
    of_silo = select(RoundResult.run).where(RoundResult.digest == digest, RoundResult.receiver == silo).limit(1)
    in_rounds = select(Round.run).where((Round.base_digest == digest) | (Round.adapter_digest == digest)).limit(1)
    in_runs = select(Run.name).where((Run.base_digest == digest) | (Run.adapter_digest == digest)).limit(1)
    return bool(digest) and any(session.scalar(query) is not None for query in (in_runs, in_rounds, of_silo))


def traffic_table(session: Session, run: str | None = None, number: int | None = None) -> list[dict[str, Any]]:
    """Payload bytes by silo, direction and kind: of one round of a run, or summed over a run or over everything."""
    write_counts(session)
    names = (Traffic.silo, Traffic.direction, Traffic.kind)
    query = select(*names, sql.sum(Traffic.messages), sql.sum(Traffic.payload_bytes)).group_by(*names).order_by(*names)
    if run is not None:
        query = query.where(Traffic.run == run)
    if number is not None:
        query = query.where(Traffic.round == number)
    return [  # PostgreSQL's sums of whole numbers are decimal ones
        {"silo": silo, "direction": direction, "kind": kind, "messages": int(messages), "bytes": int(size)}
        for silo, direction, kind, messages, size in session.execute(query)
    ]


def isolation_of(session: Session, run: str) -> dict[str, list[str]]:
    """The isolation levels of each silo's trainer in a run, in the order in which its guard told them."""
    levels: dict[str, list[str]] = {}
    query = select(Figure).where(Figure.run == run, Figure.name == ISOLATION).order_by(Figure.id)
    for figure in session.scalars(query):
        levels.setdefault(figure.silo, []).append(str(json.loads(figure.fields)["rung"]))
    return dict(sorted(levels.items()))


ADAPTER_CODES = frozenset({WireCode.ADAPTER_HELD.value, WireCode.ADAPTER_REFUSED.value})


def note_error(session: Session, *, run: str, round_number: int, silo: str, code: str) -> None:
    """Keep the code of a silo's control.error about a run, each code once, and what it says of a round's adapter once
    a round: a silo cannot fill the record with them."""
    known = adapters_refused(session, run, round_number) if code in ADAPTER_CODES else errors_of(session, run)
    if code in known.get(silo, ()):
        return
    fields = as_json({"silo": silo, "code": code})
    session.add(Figure(run=run, round=round_number, step=0, silo=silo, name=SILO_ERROR, fields=fields))
    session.flush()


def errors_of(session: Session, run: str) -> dict[str, list[str]]:
    """By silo, the codes it told of a run, in that order; DECLINED alone where it left the plan without a code."""
    codes: dict[str, list[str]] = {}
    names = (SILO_ERROR, PLAN_DECLINED)
    query = select(Figure).where(Figure.run == run, Figure.name.in_(names)).order_by(Figure.id)
    for figure in session.scalars(query):
        silo_codes = codes.setdefault(figure.silo, [])
        if figure.name == SILO_ERROR:
            if (code := str(json.loads(figure.fields)["code"])) not in silo_codes:
                silo_codes.append(code)
        elif not silo_codes:
            silo_codes.append(WireCode.DECLINED.value)
    return dict(sorted(codes.items()))


def adapters_refused(session: Session, run: str, round_number: int) -> dict[str, list[str]]:
    """Return by silo the codes with which it refused to train on a round's adapter (T52)."""
    codes: dict[str, list[str]] = {}
    query = select(Figure).where(Figure.run == run, Figure.round == round_number, Figure.name == SILO_ERROR)
    for figure in session.scalars(query.order_by(Figure.id)):
        if (code := str(json.loads(figure.fields)["code"])) in ADAPTER_CODES:
            codes.setdefault(figure.silo, []).append(code)
    return codes


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
