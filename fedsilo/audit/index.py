"""The index of a party's audit log, in one SQLite file beside it.

    STATE/audit/                 the log: the only record of what happened
    STATE/audit-index.sqlite3    places: where every `STRIDE`-th record begins
                                 messages: each decision, with its outcome
                                 marks: what happened in a round, one for each record about it

The index follows the log: each question first takes in the records that were added, `FOLD_RECORDS` in a transaction, so
that nobody waits for a long log to be read. It belongs to a log by the hash of the last record taken in. It is made
again from the log if the file is missing, damaged, of another version or another log, ahead of its log (a backup was
restored), or names records that retention has removed since. If no file can be kept (no space, a read-only file
system), the index lives as long as the process. A message takes some 600 bytes.

Nothing is verified by it: `log.LogCheck` and `audit_verify` read the log alone. A place is used only if the record with
that number begins there; else the segment is counted from its beginning. A message that was not let in makes no mark:
its sender names any run and any round, and would displace the true ones (T23).

Does not show: a record that was damaged before it was taken in (`audit.verify` names it), nor that a record is genuine.
Does not stop: somebody who may write the state folder from changing what lists show; a record that is asked for by its
number is read from the log.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sqlite3
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedsilo.audit.reader import record_at, removed_leaf, segment_lines
from fedsilo.audit.record import COUNT_MAX, LINE_BYTES_MAX, Record, link_of
from fedsilo.audit.segments import segments
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import FedSiloError, OperationError

VERSION = 1
STRIDE = 32
FOLD_RECORDS = 8_192  # of one transaction
ASKED_RECORDS = 50_000  # taken in for one question about a round
BLOCK_LINES = 128  # read at a time, at least, while something is looked for
ROUNDS_MAX = 256  # listed, the newest
MARKS_MAX = 256  # of one round, on messages
OWN_MARKS_MAX = 64  # of one round, on the round itself
REASONS_MAX = 8  # of one mark
BUSY_SECONDS = 10.0
CACHE_KIBIBYTES = 16_384

DECISION_EVENTS = {"egress": "egress.decision", "ingress": "ingress.decision"}
OUTCOMES = ("", "sent", "acked", "indeterminate")
# Outcomes of a message that was held: empty while people are asked. `approved` has a decision of its own, and
# `repeated` is one that came again, as a plan does with each poll.
HOLD_ENDS = ("approved", "rejected", "denied", "expired", "missed", "repeated")
_NO_EVENTS = ("approval.deny", "approval.expire")  # that end a hold without a yes
_MARKED = frozenset({*DECISION_EVENTS.values(), "egress.sent", *_NO_EVENTS})
# The events that are taken in, as canonical JSON spells them.
_TAKEN_IN = re.compile(rb'"event":"(?:egress\.|ingress\.decision"|approval\.(?:deny|expire)"|round\.)')
_COUNTED = ("units", "tensors", "responses", "metrics", "donors", "prompts", "questions")  # what a message has many of
_NO_RECORD = (ValueError, LookupError, TypeError, AttributeError, OverflowError, OSError, RecursionError)
_SCHEMA = """
    CREATE TABLE head (records INTEGER NOT NULL, link TEXT NOT NULL, first INTEGER);
    INSERT INTO head VALUES (0, '', NULL);
    CREATE TABLE places (seq INTEGER PRIMARY KEY, offset INTEGER NOT NULL);
    CREATE TABLE messages (
        seq INTEGER PRIMARY KEY, direction TEXT NOT NULL, content INTEGER NOT NULL, verdict TEXT NOT NULL,
        kind TEXT NOT NULL, outcome TEXT NOT NULL, milliseconds INTEGER, boot TEXT NOT NULL, mono INTEGER NOT NULL,
        held TEXT, row TEXT NOT NULL
    );
    CREATE INDEX by_content ON messages (direction, content, seq);
    CREATE INDEX by_kind ON messages (direction, kind, seq, verdict, content);
    CREATE INDEX by_verdict ON messages (direction, verdict, seq, content);
    CREATE INDEX waiting ON messages (direction, held, seq) WHERE held IS NOT NULL;
    CREATE TABLE counts (
        direction TEXT, content INTEGER, verdict TEXT, messages INTEGER, PRIMARY KEY (direction, content, verdict)
    ) WITHOUT ROWID;
    CREATE TABLE rounds (number INTEGER PRIMARY KEY, run TEXT NOT NULL, round INTEGER NOT NULL, UNIQUE (run, round));
    CREATE TABLE marks (seq INTEGER PRIMARY KEY, run TEXT, round INTEGER, own INTEGER, mark TEXT NOT NULL);
    CREATE INDEX of_round ON marks (run, round, own, seq);
"""
_log = logging.getLogger("fedsilo.audit")
Answer = TypeVar("Answer")
Row = TypeVar("Row")


@dataclass(frozen=True)
class Page(Generic[Row]):
    """One page of rows.

    Attributes:
        rows: newest first.
        next: ask again with this as `before`; None where nothing older is left.
    """

    rows: list[Row]
    next: int | None


@dataclass(frozen=True)
class Mark:
    """One record about a round.

    Attributes:
        at: seconds since 1970.
        event: of the record.
        kind: of the message it is about.
        step: public step; 0 for none.
        verdict: of a decision: allow, deny or hold.
        reasons: codes why something did not leave; empty of every other record.
        detail: of an event of the round itself: what it names, by silo, for `round.agreed` (signatures) and
            `round.result` (verdicts).
    """

    at: float
    event: str
    kind: str
    step: int = 0
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    detail: Mapping[str, str] = field(default_factory=dict)


class LogIndex:
    """Thread-safe. Several may be open on one log; each takes in what the others have not.

    Args:
        directory: the log's folder.
        size: how many records it has by now.

    Attributes:
        lines_read: lines taken from the disk so far, which is what a question costs.
    """

    def __init__(self, directory: Path, size: Callable[[], int]) -> None:
        self.directory = directory
        self.path: Path | None = index_path(directory)  # None once it cannot be kept
        self.lines_read = 0
        self._size = size
        self._lock = threading.RLock()
        self._database: sqlite3.Connection | None = None
        self._given_up = 0  # times that the file was left

    # ---- records by their number ---------------------------------------------------------------------

    @property
    def first(self) -> int:
        """Number of the first record that retention left; 0 for a log without any."""
        return next((first for first, _ in segments(self.directory)), 0)

    def lines(self, start: int, end: int) -> list[tuple[int, bytes]]:
        """(number, line without its end) of the records from `start` up to and without `end` that are there.

        Raises:
            NotFoundError: no such log.
            VerificationError: a line is longer than any record.
            OperationError: a segment cannot be read.
        """
        return self._use(lambda database: [item[:2] for item in self._read(database, start, end)])

    def records(self, start: int, end: int) -> list[dict[str, Any]]:
        """Return the lines parsed, oldest first; for a line that is no record, what `record_at` makes of it.

        Raises:
            NotFoundError, VerificationError, OperationError: as `lines`.
        """
        return [record_at(number, line) for number, line in self.lines(start, end)]

    def back(
        self, before: int, wanted: Callable[[bytes], bool], *, limit: int, look_max: int
    ) -> Page[tuple[int, bytes]]:
        """Return the newest lines before a number that are wanted, each with its number.

        Args:
            before: the first number that is not looked at.
            wanted: of a line.
            limit: how many.
            look_max: lines looked at, at most; then `next` says where to go on.

        Raises:
            NotFoundError, VerificationError, OperationError: as `lines`.
        """
        self.catch_up()
        records: list[tuple[int, bytes]] = []
        first, at = self.first, before
        lowest = max(first, before - look_max)
        while at > lowest and len(records) < limit:
            # as much as is lacking, since mostly every line is wanted; else so much that few files are opened for it
            start = max(lowest, at - max(limit - len(records), BLOCK_LINES))
            block = [item for item in self.lines(start, at) if wanted(item[1])]
            records += reversed(block)
            at = start
        del records[limit:]
        if len(records) == limit and records:
            at = records[-1][0]
        return Page(records, at if at > first else None)

    # ---- messages ------------------------------------------------------------------------------------

    def page(
        self,
        direction: str,
        *,
        before: int | None = None,
        limit: int,
        verdict: str = "",
        kind: str = "",
        control: bool = False,
    ) -> Page[dict[str, Any]]:
        """Messages of one direction, newest first.

        Args:
            direction: egress or ingress.
            before: only records before this number.
            limit: rows at most.
            verdict: only these decisions.
            kind: only this kind.
            control: allowed control messages too.

        Raises:
            FedSiloError: the log cannot be read.
        """
        way = "INDEXED BY by_kind" if kind else "INDEXED BY by_verdict" if verdict else "INDEXED BY by_content"
        if control and not (kind or verdict):
            way = "NOT INDEXED"  # by number
        wanted = {"direction": direction, "verdict": verdict, "kind": kind, "content": None if control else 1}
        wanted = {name: value for name, value in wanted.items() if value not in ("", None)}
        conditions = " AND ".join([*(f"{name} = :{name}" for name in wanted), "seq < :before"])
        arguments = {**wanted, "before": COUNT_MAX if before is None else before, "limit": limit + 1}
        query = (
            f"SELECT seq, row, outcome, milliseconds FROM messages {way} WHERE {conditions} "  # noqa: S608 - names above
            "ORDER BY seq DESC LIMIT :limit"
        )
        fetched = self._answer(lambda database: database.execute(query, arguments).fetchall())
        read = self._rows_of([seq for seq, row, *_ in fetched[:limit] if not row])
        rows = [
            {**(json.loads(row) if row else read[seq]), "outcome": outcome, "milliseconds": milliseconds}
            for seq, row, outcome, milliseconds in fetched[:limit]
            if row or seq in read
        ]
        last = fetched[limit - 1][0] if len(fetched) >= limit else 0
        # a list with control messages goes on as long as there are records
        more = last > self.first if control and verdict in ("", "allow") else len(fetched) > limit
        return Page(rows, last if more else None)

    def _rows_of(self, numbers: list[int]) -> dict[int, dict[str, Any]]:
        """Read from the log the lines of allowed control messages that are not damaged. numbers: newest first."""
        rows_by_number: dict[int, dict[str, Any]] = {}
        while numbers:
            near = next((at for at in range(1, len(numbers)) if numbers[at - 1] - numbers[at] > STRIDE), len(numbers))
            wanted, numbers = set(numbers[:near]), numbers[near:]
            for number, line in self.lines(min(wanted), max(wanted) + 1):
                record = parsed(number, line) if number in wanted else None
                with contextlib.suppress(*_NO_RECORD):
                    rows_by_number |= {number: row_of(record)} if record else {}
        return rows_by_number

    def totals(self, direction: str, *, control: bool = False) -> dict[str, int]:
        """{"total", "held", "denied"}: messages of the whole log. Held are those that people are asked about still;
        denied those that were when they were first decided on."""
        counts, holds = self._answer(
            lambda database: (
                database.execute(
                    "SELECT verdict, messages FROM counts WHERE direction = ? AND content >= ?",
                    (direction, int(not control)),
                ).fetchall(),
                database.execute(
                    "SELECT COUNT(*) FROM messages WHERE direction = ? AND held IS NOT NULL", (direction,)
                ).fetchone()[0],
            )
        )
        denied = sum(messages for verdict, messages in counts if verdict == "deny")
        return {"total": sum(messages for _, messages in counts), "held": holds, "denied": denied}

    def outcome(self, decision: int) -> tuple[str, int | None]:
        """Return what became of one decision, and in how many milliseconds. Raises FedSiloError: the log cannot be
        read."""
        query = "SELECT outcome, milliseconds FROM messages WHERE seq = ?"
        return self._answer(lambda database: database.execute(query, (decision,)).fetchone()) or ("", None)

    # ---- rounds --------------------------------------------------------------------------------------

    def marks(self, run: str, number: int, *, messages: bool = True) -> tuple[Mark, ...]:
        """Return the events of a round, in the order of the log. Raises FedSiloError: the log cannot be read.

        messages: also the decisions on content, of rules and of people, and its sending; without, only events of the
        round itself. Of more than are kept the first count, and of the round itself the last one too: how it ended.
        """
        of_round = "SELECT seq, mark FROM marks WHERE run = ? AND round = ? AND own = ? ORDER BY seq"
        place = run, number

        def ask(database: sqlite3.Connection) -> dict[int, str]:
            found = database.execute(f"{of_round} LIMIT ?", (*place, 1, OWN_MARKS_MAX - 1)).fetchall()
            found += database.execute(f"{of_round} DESC LIMIT 1", (*place, 1)).fetchall()
            if messages:
                found += database.execute(f"{of_round} LIMIT ?", (*place, 0, MARKS_MAX)).fetchall()
            return dict(found)

        return tuple(_mark_from(text) for _, text in sorted(self._answer(ask, ASKED_RECORDS).items()))

    def rounds_of(self, run: str) -> list[int]:
        """Numbers of the newest rounds of a run, ascending. Raises FedSiloError: the log cannot be read."""
        query = (
            "SELECT round FROM (SELECT run, round FROM rounds ORDER BY number DESC LIMIT ?) "
            "WHERE run = ? AND round != 0 ORDER BY round"
        )
        return self._answer(
            lambda database: [number for (number,) in database.execute(query, (ROUNDS_MAX, run))], ASKED_RECORDS
        )

    @property
    def complete(self) -> bool:
        """Return True if the whole log was taken in; until then, what is asked of a round may be missing."""
        return self._use(_records) >= self._size()

    def _answer(self, ask: Callable[[sqlite3.Connection], Answer], records_max: int | None = None) -> Answer:
        """Take in what was added, then answer. Raises FedSiloError: the log cannot be read."""
        while True:
            self.catch_up(records_max)
            before, answer = self._given_up, self._use(ask)
            if self._given_up == before:  # else it is of an index that is still empty
                return answer

    # ---- taking records in ---------------------------------------------------------------------------

    def catch_up(self, records_max: int | None = None) -> None:
        """Take in the records that were added: all, or so many. Raises FedSiloError: the log cannot be read."""
        left = COUNT_MAX if records_max is None else records_max
        while left > 0:
            most = min(left, FOLD_RECORDS)
            count = self._use(lambda database: self._fold(database, most))  # noqa: B023 - it is asked at once
            if not count:
                return
            left -= count

    def _fold(self, database: sqlite3.Connection, records_max: int) -> int:
        """Take in the next records; return how many numbers those were."""
        first = self.first
        if database.execute("SELECT first FROM head").fetchone()[0] not in (None, first):
            self._close()
            return 1
        if (at := _records(database)) >= self._size():
            return 0
        with _transaction(database):
            begin = max(_records(database), first)  # another may have taken some in meanwhile
            end = min(begin + records_max, self._size())
            fold, last = _Fold(database), b""
            for number, last, offset in self._read(database, begin, end):
                if number % STRIDE == 0:
                    fold.places.append((number, offset))
                if _TAKEN_IN.search(last):
                    fold.take(number, last)
            fold.store()
            head = max(begin, end), link_of(last) if last else "", first
            database.execute("UPDATE head SET records = ?, link = ?, first = ?", head)
        return max(begin, end) - at

    def _read(self, database: sqlite3.Connection, start: int, end: int) -> Iterator[tuple[int, bytes, int]]:
        """(number, line, where it begins in its segment) of a range."""
        try:
            files = segments(self.directory)
            for position, (first, path) in enumerate(files):
                following = files[position + 1][0] if position + 1 < len(files) else end
                if first >= end or (following <= start and position + 1 < len(files)):
                    continue
                number, offset = self._place(database, path, first, max(start, first))
                for seq, line, after in segment_lines(path, number, offset):
                    if seq >= end:
                        break
                    self.lines_read += 1
                    if seq >= start:
                        yield seq, line, after - len(line) - 1
        except OSError as error:  # also: retention removed a segment just now
            raise OperationError(f"{self.directory}: {error.strerror}", hint="ask again") from error

    def _place(self, database: sqlite3.Connection, path: Path, first: int, seq: int) -> tuple[int, int]:
        """A record of a segment that is no later than this one, and where it begins."""
        query = "SELECT seq, offset FROM places WHERE seq BETWEEN ? AND ? ORDER BY seq DESC LIMIT 1"
        number, offset = database.execute(query, (first, seq)).fetchone() or (first, 0)
        if offset <= 0 or number == first:
            return first, 0
        with path.open("rb") as stream:
            stream.seek(offset - 1)
            if stream.read(1) == b"\n" and b'"seq":%d,' % number in stream.readline(LINE_BYTES_MAX + 1):
                return number, offset
        return first, 0  # somebody changed the file, or this line of it

    # ---- the file ------------------------------------------------------------------------------------

    def _use(self, ask: Callable[[sqlite3.Connection], Answer]) -> Answer:
        """Answer from the database. One that cannot be used is made again; the last try keeps no file.

        Raises:
            OperationError: not even that is possible.
        """
        with self._lock:
            for _ in range(3):
                try:
                    return ask(self._opened())
                except sqlite3.Error as error:
                    cause = error
                    self._give_up(error)
        raise OperationError(f"the index of {self.directory} cannot be used: {cause}", hint="ask again")

    def _opened(self) -> sqlite3.Connection:
        database = self._database
        if database is None:
            if not self._belongs(database := self._connected()):
                database.close()
                self._remove()
                database = self._connected()
            with _transaction(database):
                if not database.execute("PRAGMA user_version").fetchone()[0]:
                    for statement in _SCHEMA.split(";"):
                        database.execute(statement)
                    database.execute(f"PRAGMA user_version = {VERSION}")
        return database

    def _connected(self) -> sqlite3.Connection:
        """Connect to the file, or to a database that goes when it is closed. Raises sqlite3.Error."""
        if self.path is not None:
            try:
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            except OSError as error:
                raise sqlite3.OperationalError(error.strerror) from error
        self._database = sqlite3.connect(
            self.path or "", timeout=BUSY_SECONDS, check_same_thread=False, isolation_level=None
        )
        weakref.finalize(self, self._database.close)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute(f"PRAGMA cache_size = -{CACHE_KIBIBYTES}")
        self._database.execute("PRAGMA synchronous = NORMAL")  # a power cut may lose the newest transactions of it
        return self._database

    def _belongs(self, database: sqlite3.Connection) -> bool:
        """Return True if the index is empty, or of this version and this log as far as it goes."""
        version = database.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            return not database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if version != VERSION:
            return False
        records, link, first = database.execute("SELECT records, link, first FROM head").fetchone() or (1, "", -1)
        if records == 0:
            return True
        if records > self._size() or first != self.first:
            return False
        with contextlib.suppress(FedSiloError):  # what cannot be read is told when it is asked for
            last = list(self._read(database, records - 1, records))
            return (link_of(last[0][1]) if last else removed_leaf(self.directory, records - 1)) == link
        return False

    def _give_up(self, error: sqlite3.Error) -> None:
        """Close the file. Remove it if it is damaged; after any other fault no file is kept any more."""
        self._close()
        if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED:
            return  # somebody removed it, or made it again
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            _log.warning("%s is damaged (%s) and is made again", self.path, error)
            self._remove()
        elif self.path is not None:
            _log.warning("%s cannot be kept (%s); the index is made again at each start", self.path, error)
            self.path = None

    def _close(self) -> None:
        self._given_up += 1
        if self._database is not None:
            self._database.close()
            self._database = None

    def _remove(self) -> None:
        try:
            remove_index(self.directory)
        except OSError as error:
            _log.warning("%s cannot be removed (%s); the index is made again at each start", self.path, error.strerror)
            self.path = None


def index_path(directory: Path) -> Path:
    """Return the file of the index of a log."""
    folder = directory.absolute()
    return folder.with_name(f"{folder.name}-index.sqlite3")


def remove_index(directory: Path) -> None:
    """Remove the index of a log; the next question makes it again. Raises OSError."""
    path = index_path(directory)
    for end in ("", "-wal", "-shm"):
        path.with_name(path.name + end).unlink(missing_ok=True)


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _records(database: sqlite3.Connection) -> int:
    """Return how many records were taken in."""
    return int(database.execute("SELECT records FROM head").fetchone()[0])


class _Fold:
    """Records that one transaction takes into the index."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self.places: list[tuple[int, int]] = []
        self._database = database
        self._messages: dict[int, list[Any]] = {}  # columns of the table, not stored yet
        self._marks: list[tuple[int, str, int, int, str]] = []
        self._counts: Counter[tuple[str, int, str]] = Counter()

    def take(self, number: int, line: bytes) -> None:
        """Take in one record. A line that is none, or that says what no record can, is left out."""
        if (record := parsed(number, line)) is None:
            return
        try:
            message, mark = self._message(record), _mark_of(record)
        except _NO_RECORD:
            return
        if message is not None:
            self._messages[number] = message
            self._counts[message[1], message[2], message[3]] += 1
        if mark is not None:
            self._marks.append((number, *mark))

    def _message(self, record: Record) -> list[Any] | None:
        event = record.event
        direction, _, what = event.partition(".")
        if event in _NO_EVENTS:
            for each in DECISION_EVENTS:
                self._end_hold(each, _held_text(record), _end_of(record))
        elif event not in DECISION_EVENTS.values():
            if direction == "egress" and what in OUTCOMES:
                self._outcome(record, what)
        else:
            held, verdict, content = None, _text(record.decision), not record.is_allowed_control
            if verdict == "hold":
                held = _held_text(record)
                if direction == "ingress":  # these bytes wait once, however often they come
                    self._end_hold(direction, held, "repeated")
            elif record.link.get("approvals"):  # the second decision, after people's yes
                end = "approved" if verdict == "allow" else "denied"
                self._end_hold(direction, _held_text(record), end)
            row = json.dumps(row_of(record)) if content else ""
            boot, mono = _text(record.fields["boot"]), _count(record.fields["mono"])
            return [
                *(record.seq, direction, int(content), verdict, _text(record.kind), "", None),
                *(boot, mono, held, row),
            ]
        return None

    def _outcome(self, record: Record, what: str) -> None:
        decided = _count(record.decided_by)
        new = self._messages.get(decided)
        query = "SELECT direction, boot, mono FROM messages WHERE seq = ?"
        found = (new[1], new[7], new[8]) if new else self._database.execute(query, (decided,)).fetchone()
        if found is None or found[0] != "egress":
            return
        milliseconds = None
        if what == "sent" and found[1] == record.fields["boot"]:
            milliseconds = max(0, _count(record.fields["mono"]) - found[2])
        if new is not None:
            new[5], new[6] = what, new[6] if milliseconds is None else milliseconds
        else:
            self._database.execute(
                "UPDATE messages SET outcome = ?, milliseconds = COALESCE(?, milliseconds) WHERE seq = ?",
                (what, milliseconds, decided),
            )

    def _end_hold(self, direction: str, held: str, end: str) -> None:
        """The oldest hold of these bytes is over."""
        self.store()
        self._database.execute(
            "UPDATE messages SET outcome = ?, held = NULL WHERE seq = "
            "(SELECT MIN(seq) FROM messages WHERE direction = ? AND held = ?)",
            (end, direction, held),
        )

    def store(self) -> None:
        into = self._database.executemany
        into("INSERT OR REPLACE INTO places VALUES (?, ?)", self.places)
        into("INSERT OR REPLACE INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", self._messages.values())
        into("INSERT OR IGNORE INTO rounds (run, round) VALUES (?, ?)", (mark[1:3] for mark in self._marks))
        into("INSERT OR REPLACE INTO marks VALUES (?, ?, ?, ?, ?)", self._marks)
        into(
            "INSERT INTO counts VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET messages = messages + excluded.messages",
            ((*key, messages) for key, messages in self._counts.items()),
        )
        for each in (self.places, self._messages, self._marks, self._counts):
            each.clear()


# ---- what records say ----------------------------------------------------------------------------------


def parsed(number: int, line: bytes) -> Record | None:
    """Return the record in a line of the own log; None if it is damaged. It is not compared with its canonical bytes.

    So its fields may be of any type.
    """
    try:
        record = json.loads(line)
        good = {"seq", "event", "t", "mono", "boot"} <= record.keys() and record["seq"] == number
        if record["event"] in DECISION_EVENTS.values():
            good = good and {"kind", "decision"} <= record.keys()
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
    return Record(record) if good else None


def _text(value: Any) -> str:
    """Check a text. Raises ValueError: it is none, or cannot be stored."""
    if not isinstance(value, str) or value.encode().decode() != value:
        raise ValueError("no text")
    return value


def _count(value: Any) -> int:
    """Check a count. Raises ValueError: it is none."""
    if type(value) is not int or not 0 <= value <= COUNT_MAX:
        raise ValueError("no count")
    return value


def _held_text(record: Record) -> str:
    """Return what was held: the records of a hold, of the answers to it and of its end name the same bytes."""
    return json.dumps(record.held_bytes)


def _end_of(record: Record) -> str:
    if record.event == "approval.deny":
        return "rejected" if record.detail.get("person") else "denied"
    ends = {"EXPIRED": "expired", "POLICY_CHANGED": "denied"}
    return next((end for reason, end in ends.items() if reason in record.reasons), "missed")


def row_of(record: Record) -> dict[str, Any]:
    """Return one line of the outbox or inbox, without the outcome."""
    deciding = [rule["rule"] for rule in record.rules if rule["outcome"] in ("deny", "hold")]
    row = {
        "seq": record.seq,
        "time": utc(record.t / 1000),
        "run": record.run,
        "round": record.round,
        "step": record.step,
        "kind": record.kind,
        "items": items_of(record),
        "bytes": record.payload.get("bytes", 0),
        "verdict": record.decision,
        "rule": deciding[0] if deciding else "",
        "reasons": list(record.reasons),
        "rules": deciding,
        # Keyed with the site's key where the content could be guessed (T40), so it is not the digest of the bytes.
        "digest": record.digest,
        "digest_keyed": "sha256" not in record.payload and "hmac_sha256" in record.payload,
    }
    return row | {"peer": record.peer} if record.event == DECISION_EVENTS["ingress"] else row


def items_of(record: Record) -> int:
    """Return how many of its things a message has: tensors, answers, figures; 1 for one thing, 0 if nothing was
    measured."""
    facts = record.facts.get("final")
    if not facts:
        return 0
    for name in _COUNTED:
        value = facts.get(name)
        if isinstance(value, list):
            return len(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 1


def _mark_of(record: Record) -> tuple[str, int, int, str] | None:
    """Run, round, whether it is on the round itself, and the mark; None of a record that makes none."""
    event, kind, verdict = record.event, str(record.kind), str(record.decision)
    own = event.startswith("round.")
    if not own and (event not in _MARKED or kind.startswith("control.")):
        return None
    if event == "ingress.decision" and verdict != "allow":
        return None
    list_name = {"round.agreed": "signatures", "round.result": "verdicts"}.get(event, "")
    detail = record.detail.get(list_name, {}) if list_name else {}
    kept_in = verdict == "deny" or event in _NO_EVENTS
    mark = {
        "at": record.t / 1000,
        "event": event,
        "kind": kind,
        "step": int(record.step),
        "verdict": verdict,
        "reasons": [str(reason) for reason in record.reasons[:REASONS_MAX]] if kept_in else [],
        "detail": {str(name): str(value) if list_name == "verdicts" else "" for name, value in detail.items()},
    }
    return _text(record.run), _count(record.round), int(own), json.dumps(mark)


def _mark_from(text: str) -> Mark:
    fields = json.loads(text)
    return Mark(**{**fields, "reasons": tuple(fields["reasons"])})
