"""What the coordinator must not forget: runs, rounds, members, sequences, uploads, outbox, figures, events.

SQLAlchemy 2 with portable column types (`coordinator.tables`), so that PostgreSQL (`coordinator.postgres`) is another
URL. SQLite runs in WAL mode with full synchronisation: a committed transaction is on the disk, and only then is a
message acknowledged (design 5).

Where a run and its method stand is not stored: `transitions` keeps what `protocol.rounds` accepted, in order, and
folding it again gives the same life, the same state of the method and the same actions, for every method.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import bindparam, create_engine, event, insert, select, text, update
from sqlalchemy import func as sql
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker

from coordinator import postgres
from coordinator.database_url import POSTGRESQL, database_url, shown_url
from coordinator.outbox import Known
from coordinator.tables import ISOLATION as ISOLATION
from coordinator.tables import PLAN_DECLINED as PLAN_DECLINED
from coordinator.tables import SILO_ERROR as SILO_ERROR
from coordinator.tables import Base as Base
from coordinator.tables import Book as Book
from coordinator.tables import CarriedAnswer as CarriedAnswer
from coordinator.tables import CarriedSilo as CarriedSilo
from coordinator.tables import Countersigned as Countersigned
from coordinator.tables import EndedRound as EndedRound
from coordinator.tables import Event as Event
from coordinator.tables import Figure as Figure
from coordinator.tables import LogPlace as LogPlace
from coordinator.tables import Member as Member
from coordinator.tables import OutboxItem as OutboxItem
from coordinator.tables import PendingRecord as PendingRecord
from coordinator.tables import Round as Round
from coordinator.tables import RoundSignature as RoundSignature
from coordinator.tables import RoundTranscript as RoundTranscript
from coordinator.tables import Run as Run
from coordinator.tables import SequenceCounter as SequenceCounter
from coordinator.tables import ShownCertificate as ShownCertificate
from coordinator.tables import ShownCheckpoint as ShownCheckpoint
from coordinator.tables import Traffic as Traffic
from coordinator.tables import Transition as Transition
from coordinator.tables import Upload as Upload
from coordinator.tables import its as its
from coordinator.tables import table_of as table_of
from coordinator.tables import where_its as where_its
from fedsilo.files.durable import DiskFullError
from fedsilo.files.locked_file import TRY_SECONDS, LockedFile
from fedsilo.protocol.errors import OperationError, UsageError, WireCode


class Store:
    """The database.

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
            self._engine = postgres.open_engine(address, shown_url(url))
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
        """What is waited for, in words: a lock that another process holds; empty while nothing is."""
        return self.locked.waiting if self.locked is not None else ""

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """One transaction, durable when the block ends; where it fails, what `once_undone` was given is called.

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
        """Whether the database answers. Raises OperationError: it does not; what a transaction would say."""
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
    """What the database has against a statement, as an error of ours."""
    try:
        yield
    except DBAPIError as error:
        if not isinstance(error.orig, sqlite3.Error):
            found = postgres.named(error)
            if found is None:
                raise
            raise found from error
        if any(word in str(error.orig) for word in ("file is not a database", "malformed")):
            raise OperationError(
                f"the coordinator's database is damaged: {error.orig}", code="DATABASE_DAMAGED",
                hint="keep it, it is evidence, and take state_dir from a backup: docs/how-to/backup.md",
            ) from error  # fmt: skip
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
_ITS_COUNTER = where_its(SequenceCounter.silo, SequenceCounter.run, SequenceCounter.direction)
_SEQUENCE = select(SequenceCounter.value).where(_ITS_COUNTER)
_NUMBER = update(table_of(SequenceCounter)).where(_ITS_COUNTER).values(value=bindparam("value"))
_RAISE = _NUMBER.where(SequenceCounter.value < bindparam("value"))
_FIRST_NUMBER = insert(table_of(SequenceCounter))
# Both databases take it so, and SQLAlchemy has a form of it for each.
_COUNT = text(
    "INSERT INTO traffic (silo, run, round, kind, direction, messages, payload_bytes)"
    " VALUES (:silo, :run, :round, :kind, :direction, 1, :payload_bytes)"
    " ON CONFLICT (silo, run, round, kind, direction) DO UPDATE SET"
    " messages = traffic.messages + 1, payload_bytes = traffic.payload_bytes + excluded.payload_bytes"
)
_COUNTS = select(Book.counts).where(where_its(Book.silo))
_COUNT_ON = update(table_of(Book)).where(where_its(Book.silo)).values(counts=bindparam("counts"))
_FIRST_COUNTS = insert(table_of(Book))
_LOG_PLACE = update(table_of(LogPlace)).where(where_its(LogPlace.origin)).values(size=bindparam("value"))
_KEEP_TRANSITION = insert(table_of(Transition))
_KEEP_FIGURES = insert(table_of(Figure))
_KEEP_UPLOAD = insert(table_of(Upload))
_MEMBER_STATE = select(Member.state).where(where_its(Member.silo))
_IS_ROUND = select(Round.number).where(where_its(Round.run, Round.number))


def sequence_of(session: Session, silo: str, run: str, direction: str) -> int:
    return session.connection().execute(_SEQUENCE, its(silo=silo, run=run, direction=direction)).scalar() or 0


def set_sequence(session: Session, silo: str, run: str, direction: str, value: int) -> None:
    connection, key = session.connection(), {"silo": silo, "run": run, "direction": direction}
    if not connection.execute(_NUMBER, its(**key) | {"value": value}).rowcount:
        connection.execute(_FIRST_NUMBER, key | {"value": value})


def raise_sequence(session: Session, silo: str, run: str, value: int) -> None:
    """Remember the highest sequence taken from a silo in a run; a retry's older one changes nothing."""
    key = its(silo=silo, run=run, direction="in")
    raised = session.connection().execute(_RAISE, key | {"value": value}).rowcount
    if not raised and value > sequence_of(session, silo, run, "in"):
        set_sequence(session, silo, run, "in", value)  # the first one


def counts_of(session: Session, silo: str) -> str:
    """What the rules count of a silo, as JSON; empty before its first message."""
    return session.connection().execute(_COUNTS, its(silo=silo)).scalar() or ""


def set_counts(session: Session, silo: str, counts: str) -> None:
    connection = session.connection()
    if not connection.execute(_COUNT_ON, its(silo=silo) | {"counts": counts}).rowcount:
        connection.execute(_FIRST_COUNTS, {"silo": silo, "counts": counts})


def set_log_size(session: Session, origin: str, size: int) -> None:
    """That this audit log has so many records, with what the caller's transaction makes of the newest."""
    session.connection().execute(_LOG_PLACE, its(origin=origin) | {"value": size})


def is_round(session: Session, run: str, number: int) -> bool:
    """Whether a run has opened a round of that number."""
    return session.connection().execute(_IS_ROUND, its(run=run, number=number)).scalar() is not None


def rounds_committed(session: Session, run: str) -> int:
    """How many rounds of a run were committed."""
    of_run = select(sql.count()).where(Round.run == run, Round.state == "committed")
    return session.execute(of_run).scalar_one()


def count_message(
    session: Session, *, silo: str, run: str, round_number: int, kind: str, direction: str, payload_bytes: int
) -> None:
    """Counted with `write_counts`, when the transaction ends: most messages have an answer, which is counted, too."""
    key = {"silo": silo, "run": run, "round": round_number, "kind": kind, "direction": direction}
    session.info.setdefault("traffic", []).append(key | {"payload_bytes": payload_bytes})


def write_counts(session: Session) -> None:
    """What `count_message` was told in this transaction; before anybody reads it here."""
    if counted := session.info.pop("traffic", None):
        session.connection().execute(_COUNT, counted)


def carried_silos(session: Session) -> frozenset[str]:
    """Silos whose messages come in files."""
    return frozenset(session.scalars(select(CarriedSilo.silo)))


def keep_transition(session: Session, run: str, ordinal: int, event: str) -> None:
    session.connection().execute(_KEEP_TRANSITION, {"run": run, "ordinal": ordinal, "event": event})


def keep_figures(session: Session, rows: Iterable[Mapping[str, Any]]) -> None:
    """rows: values of all columns of `Figure` but `id`."""
    if kept := list(rows):
        session.connection().execute(_KEEP_FIGURES, kept)


def keep_upload(session: Session, **values: Any) -> None:
    """values: of all columns of `Upload`."""
    session.connection().execute(_KEEP_UPLOAD, values)


def has_joined(session: Session, silo: str) -> bool:
    return session.connection().execute(_MEMBER_STATE, its(silo=silo)).scalar() == "joined"


def next_ordinal(session: Session, run: str) -> int:
    newest = session.scalar(select(sql.max(Transition.ordinal)).where(Transition.run == run))
    return 1 if newest is None else newest + 1


def is_adapter(session: Session, digest: str) -> bool:
    """Whether a digest names a global adapter of some run; an upload's digest does not, so it cannot be fetched."""
    in_rounds = select(Round.run).where((Round.base_digest == digest) | (Round.adapter_digest == digest)).limit(1)
    in_runs = select(Run.name).where((Run.base_digest == digest) | (Run.adapter_digest == digest)).limit(1)
    return bool(digest) and (session.scalar(in_runs) is not None or session.scalar(in_rounds) is not None)


def traffic_table(session: Session, run: str | None = None) -> list[dict[str, Any]]:
    """Payload bytes by silo, direction and kind, summed over rounds, of one run or of everything."""
    write_counts(session)
    rows: dict[tuple[str, str, str], list[int]] = {}
    query = select(Traffic) if run is None else select(Traffic).where(Traffic.run == run)
    for row in session.scalars(query):
        total = rows.setdefault((row.silo, row.direction, row.kind), [0, 0])
        total[0] += row.messages
        total[1] += row.payload_bytes
    return [
        {"silo": silo, "direction": direction, "kind": kind, "messages": messages, "bytes": size}
        for (silo, direction, kind), (messages, size) in sorted(rows.items())
    ]


def isolation_of(session: Session, run: str) -> dict[str, list[str]]:
    """The rungs of each silo's trainer in a run, as its guard said them, in that order; more than one if it changed."""
    rungs: dict[str, list[str]] = {}
    query = select(Figure).where(Figure.run == run, Figure.name == ISOLATION).order_by(Figure.id)
    for figure in session.scalars(query):
        rungs.setdefault(figure.silo, []).append(str(json.loads(figure.fields)["rung"]))
    return dict(sorted(rungs.items()))


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
        told = codes.setdefault(figure.silo, [])
        if figure.name == SILO_ERROR:
            if (code := str(json.loads(figure.fields)["code"])) not in told:
                told.append(code)
        elif not told:
            told.append(WireCode.DECLINED.value)
    return dict(sorted(codes.items()))


def adapters_refused(session: Session, run: str, round_number: int) -> dict[str, list[str]]:
    """By silo, what it told of a round's adapter: the codes with which it does not train on it (T52)."""
    codes: dict[str, list[str]] = {}
    query = select(Figure).where(Figure.run == run, Figure.round == round_number, Figure.name == SILO_ERROR)
    for figure in session.scalars(query.order_by(Figure.id)):
        if (code := str(json.loads(figure.fields)["code"])) in ADAPTER_CODES:
            codes.setdefault(figure.silo, []).append(code)
    return codes


def as_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
