"""The guard's durable state: sequence counters, what was allowed out, what was let in, held releases, approvals, the
policy in force, the run it takes part in. It is one SQLite file in `state_dir`, and every write is flushed before it
returns. The audit log says what happened; the ledger is what the next decision is made from.

    state_dir/ledger.sqlite3                      one lock, one transaction for each write
    state_dir/payloads/<SHA-256 of the bytes>     0600, the bytes of a message: durable before the row that refers to it

Time only moves forward here: `now` is the latest time ever seen, so a clock set back revives nothing (threat T41). Only
an approver who accepts the clock, after it was found wrong, sets it to an earlier one (`accept_clock`).

The audit log names the head of what was written, so that an older copy of the file is noticed at the start
(`ledger_check.py`, T42):

    head = HMAC-SHA-256(the ledger's own secret; number of the group, head before, counters, halts and budgets)

A group is all that was written between two records of the log. The ledger commits first, in the transaction itself, and
the next record names the head. So a ledger is as the log says, or one group ahead of it where a kill came in between;
one that is behind is an older copy. The ledger keeps the head that the log names last beside its own. The secret keeps
whoever reads the log from guessing at counts (T40).

A message is counted, then recorded, then put into the outbox, and only then sent. Killed in between, it never left and
never will; offered again, it must not be denied for a limit that it took up itself. So the counts as they were before
are kept beside the new ones until it lies in the outbox, or the next message is counted; an opened ledger takes such a
count back. Nothing that left is ever taken back: such a message is sent out of the outbox alone, and what is not
(control.*) is counted for good at once.

Where another process has locked the file, whoever reads or writes waits until it lets go; a disk that refuses is told
at once.

Does not stop: older copies of ledger and log together, which the log's witnesses show; the daemon's user and root, who
may read the secret, write a group of their own choice, and change a payload: each reader compares its digest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from fedsilo.audit.record import COUNT_MAX
from fedsilo.control.answers import JudgedRule, LedgerRun, read_rows, to_json
from fedsilo.files.durable import WrittenAhead, make_private_directory, remove_durably, write_durably
from fedsilo.files.sqlite_file import TRY_SECONDS, LockedFile, read_only_address
from fedsilo.protocol.codec import Buffer, sha256_hex
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, VerificationError
from fedsilo.protocol.place import Place, Placed
from policies.engine import HistoryBook
from policies.kinds import policy_file
from policies.model import PolicyFile, without_gone

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS sequences (direction TEXT, run TEXT, value INTEGER NOT NULL, PRIMARY KEY (direction, run));
CREATE TABLE IF NOT EXISTS outbox (
  id INTEGER PRIMARY KEY, run TEXT NOT NULL, round INTEGER NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL,
  digest TEXT NOT NULL, payload_bytes INTEGER NOT NULL, decision_seq INTEGER NOT NULL, at REAL NOT NULL,
  state TEXT NOT NULL, attempts INTEGER NOT NULL, archived INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS releases (
  id TEXT PRIMARY KEY, run TEXT NOT NULL, round INTEGER NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL,
  digest TEXT NOT NULL, policy_digest TEXT NOT NULL, payload_bytes INTEGER NOT NULL, recorded TEXT NOT NULL,
  facts TEXT NOT NULL, rules TEXT NOT NULL, persons INTEGER NOT NULL, requested_at REAL NOT NULL,
  expires_at REAL NOT NULL, expiry_outcome TEXT NOT NULL, state TEXT NOT NULL, revision INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS approvals (
  release_id TEXT, person TEXT, fingerprint TEXT NOT NULL, digest TEXT NOT NULL, verdict TEXT NOT NULL,
  reason TEXT NOT NULL, at REAL NOT NULL, acknowledged TEXT NOT NULL DEFAULT '[]', record INTEGER NOT NULL DEFAULT -1,
  reason_code TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (release_id, person));
CREATE TABLE IF NOT EXISTS policy_changes (proposal TEXT PRIMARY KEY, digest TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, plan TEXT NOT NULL, state TEXT NOT NULL, view TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS outbox_place ON outbox (kind, run, round, step);
CREATE INDEX IF NOT EXISTS releases_state ON releases (state, kind, digest, run);
"""
# Of tables that an earlier version of this program made.
_ADDED = {
    "approvals": {
        "acknowledged": "TEXT NOT NULL DEFAULT '[]'",
        "record": "INTEGER NOT NULL DEFAULT -1",
        "reason_code": "TEXT NOT NULL DEFAULT ''",
    }
}
_HEAD = "head"  # the fact that keeps it
_NO_HEAD = "0" * 64
# Counters by their sums, since a site has two for each run it ever took part in.
_COVERED = """
SELECT name, value FROM facts WHERE name IN
  ('acknowledged', 'clock_accepted', 'clock_halt', 'equivocation', 'history_before', 'history_book', 'latest_time',
   'policy_in_force')
UNION ALL SELECT 'sequences/' || direction, COUNT(*) || ' ' || SUM(value) FROM sequences GROUP BY direction
ORDER BY name"""
_REFERRED = (
    "SELECT digest FROM outbox WHERE state='allowed' OR archived UNION SELECT digest FROM releases WHERE state='held'"
)
_PLACE = "run=? AND round=? AND step=? AND kind=?"
_OUTBOX = {"allowed": "waits", "sent": "sent"}
_RELEASES = {"held": "waits", "missed": "missed"}
_JSON_OF_RELEASE = ("recorded", "facts", "rules")  # columns

LEFT = "left"  # state of a run that this silo left for good
FOLDER = "payloads"  # beside the ledger
AHEAD_BYTES_MIN = 1 << 20  # what is smaller is on the disk sooner than a thread is made
UNWRITABLE, UNREADABLE = "PAYLOADS_UNWRITABLE", "PAYLOAD_UNREADABLE"


# ---- rows --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutboxItem(Placed):
    """One content message that the gate allowed. Its bytes are kept until the coordinator has answered it."""

    id: int
    place: Place
    digest: str
    payload_bytes: int
    decision_seq: int  # of the audit record
    at: float  # seconds since 1970
    state: str  # allowed | sent | dropped (why: `Outcomes.drop`)
    attempts: int
    archived: bool  # its bytes stay when it is settled, until retention takes them


@dataclass(frozen=True)
class Release(Placed):
    """A held message. The payload of this digest is what persons are asked about; after their yes those very bytes are
    sent, if the gate allows them again."""

    id: str
    place: Place
    digest: str
    policy_digest: str
    payload_bytes: int
    recorded: Mapping[str, Any]  # size and digest as they may stand in the audit log (T40)
    facts: Mapping[str, Any]
    rules: tuple[JudgedRule, ...]
    persons: int
    requested_at: float
    expires_at: float
    expiry_outcome: str  # missed: the step's deadline comes first; denied: the policy's expiry does
    state: str  # held | approved | rejected | expired | missed | denied
    revision: int


@dataclass(frozen=True)
class Approval:
    release_id: str
    person: str
    fingerprint: str
    digest: str
    verdict: str  # approve | reject
    reason: str
    at: float
    acknowledged: tuple[str, ...] = ()  # ids of the findings that there were, each opened by the person
    record: int = -1  # of the audit log, where the yes stands; below zero: in none, and it counts nothing
    reason_code: str = ""  # of a no


@dataclass(frozen=True)
class PolicyInForce:
    """Policy that decided last at this site.

    Attributes:
        digest: of the effective policy.
        content: the same as JSON, defaults filled in; two of them compare field by field.
        logged: digest that the audit log's newest record named when this was put in force. The log says either the one
            or the other; that it says a third shows a ledger restored from an older copy (T42).
    """

    digest: str
    content: dict[str, Any]
    logged: str

    @property
    def file(self) -> PolicyFile | None:
        """The content as this version reads it; None where another version's words do not fit."""
        try:
            return policy_file(without_gone(self.content))
        except ValidationError:
            return None


@dataclass(frozen=True)
class FarEnd:
    """Where releases go, and since which one without a break.

    Attributes:
        destination: address, certificate and its not_after.
        release, run, round: of the first one that went there.
        at: when that was held, UTC seconds since 1970.
    """

    destination: Mapping[str, str]
    release: str
    run: str
    round: int
    at: float


class Head(NamedTuple):
    """The head of one group of the ledger, as a record of the log names it."""

    groups: int
    head: str

    @classmethod
    def named(cls, field: Mapping[str, Any]) -> Head:
        return cls(int(field["groups"]), str(field["head"]))


@dataclass(frozen=True)
class Heads:
    """Heads of the ledger's chain, for the comparison with the audit log.

    Attributes:
        newest: of what the ledger holds.
        before: the head that this one was made from.
        logged: those that the log may name in its place: the one it named last, and more where a kill came, or a record
            failed, before that was known.
    """

    newest: Head
    before: str
    logged: tuple[Head, ...]

    def agree_with(self, named: Head) -> bool:
        """Return whether the ledger is as the log says, or ahead of it by what the log need not have named."""
        return named == self.newest or named in self.logged


@dataclass
class Recount:
    """Counts and outcomes that follow from the log alone.

    Attributes:
        book: counts of all that was allowed out, and what screens found and halted.
        sent: run -> highest sequence of a message that went out.
        received, taken: highest sequence of a message that was let in; of one that is an item of the coordinator's
            outbox, which comes again until it is acknowledged.
        runs: names that are spent.
        open: the run that was last taken part in, if no end of it is on record.
        proposals: of policies, each used.
        releases: "round/silo" -> how many numbers of held releases are used up.
        decided_by: digest of the policy that decided last; empty where no record says it.
        restored: digests of what approvers accepted before.
        waiting: id of a held release -> what is recorded of it, where no end of it is on record.
    """

    book: HistoryBook = field(default_factory=HistoryBook)
    sent: dict[str, int] = field(default_factory=dict)
    received: int = 0
    taken: int = 0
    runs: set[str] = field(default_factory=set)
    open: str = ""
    proposals: set[str] = field(default_factory=set)
    releases: dict[str, int] = field(default_factory=dict)
    decided_by: str = ""
    restored: set[str] = field(default_factory=set)
    waiting: dict[str, dict[str, Any]] = field(default_factory=dict)


# ---- payloads ----------------------------------------------------------------------------------------


class Payloads:
    """The bytes of messages: held for a person, waiting to be sent, or archived. One file serves all three, so a
    payload is written once, however long it stays.

    Args:
        folder: made if it is not there.

    Raises:
        UsageError, OperationError: it is no folder, or cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ahead: WrittenAhead | None = None
        make_private_directory(folder)
        for leftover in folder.glob(".*.tmp"):  # of a write that a kill interrupted
            leftover.unlink()
        self._sizes = {path.name: path.stat().st_size for path in folder.iterdir()}

    def __contains__(self, digest: object) -> bool:
        return digest in self._sizes

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by digest."""
        with self._lock:
            return dict(self._sizes)

    def begin(self, payload: Buffer) -> None:
        """Start writing these bytes to the disk while they are examined; `write` then only has to finish.

        What was begun before is dropped. Call `drop_begun` before anybody changes the bytes.
        """
        if self._ahead is not None and self._ahead.data is payload:
            return
        self.drop_begun()
        if len(payload) >= AHEAD_BYTES_MIN:
            self._ahead = WrittenAhead(self._folder, payload, 0o600)

    def drop_begun(self) -> None:
        """Remove from the disk what was begun and not written."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.abandon()

    def write(self, digest: str, payload: Buffer) -> None:
        """Durable at return. Raises OperationError: the disk refused (`PAYLOADS_UNWRITABLE`)."""
        with self._lock:
            if digest in self._sizes:
                return
            try:
                if (ahead := self._ahead) is not None and ahead.data is payload:
                    self._ahead = None
                    ahead.keep(self._folder / digest)
                else:
                    write_durably(self._folder / digest, payload, mode=0o600)
            except OperationError as error:
                raise OperationError(error.message, hint="is the disk full?", code=UNWRITABLE) from error
            self._sizes[digest] = len(payload)

    def read(self, digest: str) -> bytes:
        """The bytes.

        Raises:
            NotFoundError: it is not kept.
            VerificationError: the file holds other bytes (`PAYLOAD_CHANGED`).
            OperationError: the disk does not give it (`PAYLOAD_UNREADABLE`).
        """
        try:
            payload = (self._folder / digest).read_bytes()
        except FileNotFoundError as error:
            raise NotFoundError(f"payload {digest[:12]} is not kept here") from error
        except OSError as error:
            raise OperationError(f"cannot read payload {digest[:12]}: {error.strerror}", code=UNREADABLE) from error
        if sha256_hex(payload) != digest:
            raise VerificationError(f"payload {digest[:12]} was changed on the disk", code="PAYLOAD_CHANGED")
        return payload

    def remove(self, digests: Collection[str]) -> None:
        """Remove payloads. Raises OperationError."""
        with self._lock:
            for digest in digests:
                if digest in self._sizes:
                    remove_durably(self._folder / digest)
                    del self._sizes[digest]


# ---- the ledger --------------------------------------------------------------------------------------


class Ledger:
    """The ledger of one silo. Thread-safe: the control socket reads while the daemon writes.

    Args:
        read_only: for a process beside the daemon; the file must be there, and every write is an OperationError.
        give_up: asked while the file is locked: whether to wait no longer, since this process is to end.

    Attributes:
        payloads: bytes of messages, beside the file; none for a reader.
    """

    payloads: Payloads

    def __init__(self, path: Path, *, read_only: bool = False, give_up: Callable[[], bool] = lambda: False) -> None:
        self._lock = threading.RLock()
        self.locked = LockedFile(path)
        self.locked.give_up = give_up
        self._named: Head | None = None  # which head the log is known to name last
        self._group_open = False  # something was written that the log does not name
        self._read_only = read_only
        try:
            place = read_only_address(path) if read_only else path
            self._database = sqlite3.connect(
                place, uri=read_only, check_same_thread=read_only, isolation_level=None, timeout=TRY_SECONDS
            )
            self._database.row_factory = sqlite3.Row
            # what is no database is found out here
            self.locked.until_free(lambda: self._database.execute("PRAGMA schema_version"))
            if read_only:
                return
            path.chmod(0o600)
            self.locked.until_free(self._make_tables)
            self.locked.until_free(self._make_finding_key)
            self._take_back_count()
        except sqlite3.Error as error:
            raise OperationError(f"cannot open {path}: {error}", hint="keep it, it is evidence") from error
        self.payloads = Payloads(path.parent / FOLDER)
        # Written just before a kill: without a row that refers to them they never left and never will.
        self.drop_payloads(self.payloads.sizes)

    def _make_tables(self) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(_SCHEMA)
        _add_missing_columns(self._database)

    def _make_finding_key(self) -> None:
        """Make the secret when the ledger is opened, so that showing a release writes nothing."""
        made = secrets.token_hex(32)
        self._database.execute("INSERT OR IGNORE INTO facts VALUES ('finding_key', ?)", (made,))

    def close(self) -> None:
        with self._lock:
            self._database.close()

    # ---- heads, which the log names ----------------------------------------------------------------

    @property
    def heads(self) -> Heads | None:
        """The heads; None for a ledger of a version that kept none, until it is written for the first time."""
        return _heads_of(self._fact(_HEAD))

    def is_unchanged(self) -> bool:
        """Return True if counters, halts and budgets are those that the head was made of, or if there is no head."""
        with self._lock:
            heads = self.heads
            return heads is None or self._head(self._database, heads.newest.groups, heads.before) == heads.newest.head

    def agree(self, named: Head | None) -> None:
        """Take note that the log names this head last (None: no head), and that it was compared with the ledger."""
        with self._lock:
            heads = self.heads
            self._named = named
            self._group_open = heads is not None and named != heads.newest

    @contextmanager
    def naming(self) -> Iterator[dict[str, Any] | None]:
        """Hold the ledger while one record is written; yields its field `ledger`, or None if the log names the newest
        head already.

        A record that fails may be on the disk all the same, if only its flush failed. So what the ledger writes next
        is another group, and the log may name either.
        """
        with self._lock:
            heads = self.heads
            if heads is None or heads.newest == self._named:
                yield None
                return
            self._group_open = False
            yield heads.newest._asdict()
            self._named = heads.newest

    def finding_key(self) -> bytes:
        """The secret that heads and ids of findings are made with. It never changes; empty for a reader of a ledger
        that has not made it yet."""
        return bytes.fromhex(self._fact("finding_key") or "")

    def raise_to(self, named: Head, found: Recount, policy: PolicyInForce | None) -> dict[str, int]:
        """Raise everything to what the log shows (`ledger_check.recounted`), in one transaction: the next group after
        the one that the log names.

        Args:
            named: head that the log names last.
            found: what the log says.
            policy: the policy that the log names last, if it is not this ledger's.

        Returns:
            How many holds ended, messages were dropped, and runs were left.
        """
        with self._writing() as database:
            self._follow(database, named)
            row = database.execute("SELECT value FROM facts WHERE name='history_book'").fetchone()
            book = HistoryBook() if row is None else HistoryBook.from_json(json.loads(row["value"]))
            book.raise_to(found.book)
            facts = {"history_book": json.dumps(book.to_json())}
            facts["acknowledged"] = str(max(int(self._fact("acknowledged") or 0), found.taken))
            if policy is not None:
                facts["policy_in_force"] = json.dumps(asdict(policy))
            facts |= {f"releases/{stem}": str(count) for stem, count in found.releases.items()}
            database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts.items())
            counters = [("out", run, value) for run, value in found.sent.items()] + [("in", "", found.received)]
            database.executemany(
                "INSERT INTO sequences VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET value=MAX(value, excluded.value)",
                counters,
            )
            names = [(run, LEFT if run == found.open else "ended") for run in found.runs]
            database.executemany("INSERT OR IGNORE INTO runs VALUES (?, '', ?, '{}')", names)
            still = "CASE WHEN run=? THEN ? ELSE 'ended' END"
            running = f"UPDATE runs SET state={still} WHERE state='running'"  # noqa: S608  # constant text
            left = database.execute(running, (found.open, LEFT)).rowcount
            database.executemany(
                "INSERT OR IGNORE INTO policy_changes VALUES (?, ?)",
                [(one, found.decided_by) for one in found.proposals],
            )
            held = database.execute("UPDATE releases SET state='expired', revision=revision+1 WHERE state='held'")
            dropped = database.execute("UPDATE outbox SET state='dropped' WHERE state='allowed'")
            database.execute("DELETE FROM facts WHERE name GLOB 'run/*/again/*' OR name='history_before'")
            return {"holds_ended": held.rowcount, "dropped": dropped.rowcount, "runs_left": left}

    # ---- time, sequences ---------------------------------------------------------------------------

    def now(self, clock_now: float) -> float:
        """The later of the clock and the latest time seen before; remembered to the second."""
        seen = self.latest_time
        if clock_now > seen + 1.0:
            self._set_fact("latest_time", repr(clock_now))
        return max(clock_now, seen)

    @property
    def clock_halt(self) -> dict[str, Any]:
        """The halt for the clock, while nobody has accepted the clock as it is; else empty."""
        return self._object("clock_halt")

    def keep_clock_halt(self, halt: Mapping[str, Any]) -> None:
        self._set_fact("clock_halt", json.dumps(halt))

    @property
    def clock_difference(self) -> dict[str, float]:
        """{seconds, at}: by how much the clock was ahead of the coordinator's, and when; empty before they compared."""
        return self._object("clock_difference")

    def keep_clock_difference(self, seconds: float, at: float) -> None:
        self._set_fact("clock_difference", json.dumps({"seconds": seconds, "at": at}))

    @property
    def clock_accepted(self) -> float:
        """Seconds between this clock and the coordinator's that an approver accepted."""
        return float(self._fact("clock_accepted") or 0.0)

    def accept_clock(self, now: float, difference: float, book: Mapping[str, Any]) -> None:
        """An approver accepted the clock: its halt ends, and nothing is compared with a later time than this any more.

        What was asked for at a later time counts as asked for now: a hold keeps its length, and expires.

        Args:
            now: what the clock shows.
            difference: to the coordinator's, as `clock_accepted`.
            book: the history, as of now.
        """
        with self._writing() as database:
            database.execute("DELETE FROM facts WHERE name='clock_halt'")
            facts = (("latest_time", repr(now)), ("clock_accepted", repr(difference)))
            database.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts)
            database.execute(
                "UPDATE releases SET expires_at=expires_at-requested_at+?, requested_at=?, revision=revision+1 "
                "WHERE state='held' AND requested_at>?",
                (now, now, now),
            )
            database.execute("UPDATE outbox SET at=? WHERE at>?", (now, now))
            _count_for_good(database, json.dumps(book))

    def next_sequence(self, run: str) -> int:
        """The next outgoing sequence of a run, durable before it is returned: no number is ever used twice."""
        with self._writing() as database:
            return _advance(database, run)

    def accept_sequence(self, run: str, sequence: int, *, carried: bool = False) -> None:
        """Raises ConflictError: not above the last accepted one; of a file, that was taken in for good (threat T29)."""
        with self._writing() as database:
            row = database.execute("SELECT value FROM sequences WHERE direction='in' AND run=?", (run,)).fetchone()
            last = row["value"] if row else 0
            if sequence <= (self.acknowledged if carried else last):
                raise ConflictError(f"sequence {sequence} of run {run!r} was seen already (last {last})")
            database.execute("INSERT OR REPLACE INTO sequences VALUES ('in', ?, ?)", (run, max(last, sequence)))

    @property
    def acknowledged(self) -> int:
        """Highest sequence of a coordinator's item (plan, round, donors, result, end) that is taken in for good."""
        return int(self._fact("acknowledged") or 0)

    def acknowledge(self, sequence: int) -> None:
        if sequence > self.acknowledged:
            self._set_fact("acknowledged", str(sequence))

    # ---- out ---------------------------------------------------------------------------------------

    @property
    def book(self) -> dict[str, Any] | None:
        """The policy engine's history, as it persists itself; None before the first message."""
        text = self._fact("history_book")
        return None if text is None else dict(json.loads(text))

    def allow(self, book: Mapping[str, Any], run: str, *, kept: bool = False) -> int:
        """Count a message against every limit and give it its sequence, in one write, before it is sent (L3).
        kept: it is sent out of the outbox alone."""
        with self._writing() as database:
            (_count_until_kept if kept else _count_for_good)(database, json.dumps(book))
            return _advance(database, run)

    def keep_book(self, book: Mapping[str, Any]) -> None:
        """Replace the history, where counts of runs that are over were dropped."""
        with self._writing() as database:
            _count_for_good(database, json.dumps(book))

    def keep_until_sent(self, item: OutboxItem) -> int:
        """Remember an allowed content message, so that a lost connection or a restart can retry it."""
        with self._writing() as database:
            cursor = database.execute(
                "INSERT INTO outbox (run, round, step, kind, digest, payload_bytes, decision_seq, at, state, attempts, "
                "archived) VALUES (?,?,?,?,?,?,?,?,'allowed',0,?)",
                (
                    *item.place, item.digest, item.payload_bytes, item.decision_seq, item.at, item.archived,
                ),
            )  # fmt: skip
            _count_for_good(database)
            return int(cursor.lastrowid or 0)

    def settle_outbox(self, item_id: int, state: str) -> None:
        """Settle what was answered, or is not wanted any more: its bytes go, unless they are archived."""
        with self._writing() as database:
            database.execute("UPDATE outbox SET state=? WHERE id=?", (state, item_id))
            row = database.execute("SELECT digest FROM outbox WHERE id=?", (item_id,)).fetchone()
        if row:
            self.drop_payloads([row["digest"]])

    def drop_payloads(self, digests: Iterable[str], *, archived: bool = False) -> None:
        """Delete payloads that nothing refers to: no message that waits to be sent, no hold, no archive.

        Args:
            digests: of the payloads.
            archived: the archive gives them up too.
        """
        digests = list(digests)
        if archived:
            with self._writing() as database:
                database.executemany("UPDATE outbox SET archived=0 WHERE digest=?", [(digest,) for digest in digests])
        wanted = {row["digest"] for row in self._all(_REFERRED, ())}
        self.payloads.remove([digest for digest in digests if digest not in wanted])

    def count_attempt(self, item_id: int) -> int:
        with self._writing() as database:
            attempts = "UPDATE outbox SET attempts=attempts+1 WHERE id=? RETURNING attempts"
            return int(database.execute(attempts, (item_id,)).fetchone()["attempts"])

    def outbox(self, state: str = "") -> list[OutboxItem]:
        """Content messages that were allowed, in this state or in any, oldest first."""
        rows = self._all("SELECT * FROM outbox WHERE ?='' OR state=? ORDER BY id", (state, state))
        return [_outbox_item_of(row) for row in rows]

    def outbox_item(self, decision_seq: int) -> OutboxItem | None:
        """Return the message that left under a decision."""
        row = self._one("SELECT * FROM outbox WHERE decision_seq=? ORDER BY id LIMIT 1", (decision_seq,))
        return None if row is None else _outbox_item_of(row)

    def outbox_before(
        self, release: Release, limit: int, *, same_place: bool = False, approved: bool = False
    ) -> list[OutboxItem]:
        """The newest `limit` messages of a release's kind that left before it, oldest first; all that left, while it is
        held.

        Args:
            release: held, or over.
            limit: at most so many.
            same_place: of its run, round and step only.
            approved: only those that persons let go.
        """
        held, where, arguments = release.state == "held", "", tuple[Any, ...]()
        if same_place:
            where, arguments = " AND run=? AND round=? AND step=?", (release.run, release.round, release.step)
        if approved:
            where += " AND (run, digest) IN (SELECT run, digest FROM releases WHERE state='approved' AND kind=?)"
            arguments = (*arguments, release.kind)
        rows = self._all(
            f"SELECT * FROM outbox WHERE kind=?{where} AND (? OR (digest<>? AND at<=?)) "  # noqa: S608  # constant text
            "ORDER BY id DESC LIMIT ?",
            (release.kind, *arguments, held, release.digest, release.requested_at, limit),
        )
        return [_outbox_item_of(row) for row in reversed(rows)]

    def outbox_page(self, before: int | None, limit: int) -> tuple[list[OutboxItem], int]:
        """The newest `limit` of them below the id `before`, newest first, and how many there are in all."""
        rows = self._all("SELECT * FROM outbox WHERE id<? ORDER BY id DESC LIMIT ?", (_below(before), limit))
        total = self._all("SELECT COUNT(*) AS total FROM outbox", ())[0]["total"]
        return [_outbox_item_of(row) for row in rows], int(total)

    # ---- held releases -----------------------------------------------------------------------------

    def hold(self, release: Release, payload: Buffer) -> None:
        self.payloads.write(release.digest, payload)
        texts = {name: json.dumps(to_json(getattr(release, name))) for name in _JSON_OF_RELEASE}
        row = {name: value for name, value in vars(release).items() if name != "place"}
        row |= texts | release.place._asdict()
        with self._writing() as database:
            database.execute(
                f"INSERT INTO releases ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})",  # noqa: S608
                tuple(row.values()),
            )

    def release(self, release_id: str) -> Release:
        """Return one release. Raises NotFoundError."""
        row = self._one("SELECT * FROM releases WHERE id=?", (release_id,))
        if row is None:
            raise NotFoundError(f"there is no release {release_id!r}", hint="silo approvals list shows them")
        return _release_of(row)

    def releases_before(self, release: Release, limit: int) -> list[Release]:
        """The newest `limit` of a release's kind that were held before it and are over, newest first."""
        rows = self._all(
            "SELECT * FROM releases WHERE kind=? AND state<>'held' AND rowid<(SELECT rowid FROM releases WHERE id=?) "
            "ORDER BY rowid DESC LIMIT ?",
            (release.kind, release.id, limit),
        )
        return [_release_of(row) for row in rows]

    def rejected_before(self, release: Release, limit: int) -> list[Release]:
        """The newest `limit` releases of these very bytes that persons rejected before, newest first."""
        rows = self._all(
            "SELECT * FROM releases WHERE kind=? AND digest=? AND state='rejected' "
            "AND rowid<(SELECT rowid FROM releases WHERE id=?) ORDER BY rowid DESC LIMIT ?",
            (release.kind, release.digest, release.id, limit),
        )
        return [_release_of(row) for row in rows]

    def releases(self, state: str = "") -> list[Release]:
        """Releases in this state, or in any, oldest first."""
        where, arguments = ("WHERE state=?", (state,)) if state else ("", ())
        rows = self._all(f"SELECT * FROM releases {where} ORDER BY requested_at", arguments)  # noqa: S608
        return [_release_of(row) for row in rows]

    def approved_release(self, item: OutboxItem) -> Release | None:
        """The newest one that persons let go as this message."""
        row = self._one(
            "SELECT * FROM releases WHERE state='approved' AND kind=? AND digest=? AND run=? "
            "ORDER BY rowid DESC LIMIT 1",
            (item.kind, item.digest, item.run),
        )
        return None if row is None else _release_of(row)

    def release_page(
        self, *, state: str, kind: str, before: int | None, limit: int
    ) -> tuple[list[tuple[int, Release]], int]:
        """The newest `limit` releases below the number `before`, newest first, each with its number; and how many such
        there are in all. An empty state or kind stands for any."""
        chosen = (state, state, kind, kind)
        where = "WHERE (?='' OR state=?) AND (?='' OR kind=?)"
        rows = self._all(
            f"SELECT rowid AS number, * FROM releases {where} AND rowid<? ORDER BY rowid DESC LIMIT ?",  # noqa: S608
            (*chosen, _below(before), limit),
        )
        total = self._all(f"SELECT COUNT(*) AS total FROM releases {where}", chosen)[0]["total"]  # noqa: S608
        return [(int(row["number"]), _release_of(row)) for row in rows], int(total)

    def defer(self, release_id: str, person: str, until: float) -> None:
        """This person is not asked for it until then; nothing else changes. until: seconds since 1970."""
        self._set_fact(f"deferred/{release_id}", json.dumps({**self.deferred(release_id), person: until}))

    def deferred(self, release_id: str) -> dict[str, float]:
        """Person -> until when (seconds since 1970)."""
        return self._object(f"deferred/{release_id}")

    def keep_of_release(self, release_id: str, kept: Mapping[str, Any]) -> None:
        """Store what is shown of a release beside its facts: base, destination, places of hits; no text."""
        self._set_fact(f"release/{release_id}", json.dumps(kept))

    def kept_of_release(self, release_id: str) -> dict[str, Any]:
        return self._object(f"release/{release_id}")

    def found_since(
        self, release_id: str, facts: Mapping[str, Any], rules: tuple[JudgedRule, ...], kept: Mapping[str, Any]
    ) -> None:
        """Its screens find something else by now: facts, verdicts and places of a held release; its approvals are
        void."""
        with self._writing() as database:
            database.execute(
                "UPDATE releases SET facts=?, rules=?, revision=revision+1 WHERE id=? AND state='held'",
                (json.dumps(facts), json.dumps(to_json(rules)), release_id),
            )
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (f"release/{release_id}", json.dumps(kept)))
            database.execute("DELETE FROM approvals WHERE release_id=?", (release_id,))

    @property
    def far_end(self) -> FarEnd | None:
        """Where releases go; None before the first one left."""
        text = self._fact("far_end")
        return None if text is None else FarEnd(**json.loads(text))

    def keep_far_end(self, far_end: FarEnd) -> None:
        self._set_fact("far_end", json.dumps(asdict(far_end)))

    def keep_policy_of_sent(self, kind: str, policy: PolicyInForce) -> None:
        """Store the policy under which the newest release of a kind left."""
        self._set_fact(f"sent_by/{kind}", json.dumps(asdict(policy)))

    def policy_of_sent(self, kind: str) -> PolicyInForce | None:
        text = self._fact(f"sent_by/{kind}")
        return None if text is None else PolicyInForce(**json.loads(text))

    def free_release_id(self, stem: str) -> str:
        """`stem/n` with the first number that was never used, such as r1/hospital_a/0."""
        rows = self._all("SELECT 1 FROM releases WHERE substr(id, 1, ?)=?", (len(stem) + 1, stem + "/"))
        return f"{stem}/{max(len(rows), int(self._fact(f'releases/{stem}') or 0))}"

    def settle_release(self, release_id: str, state: str, *, was: str = "held") -> Release:
        """End a hold, once; what persons approved may yet be denied.

        Raises:
            ConflictError: it is not held any more, so an approval is used a single time (threat T36).
        """
        with self._writing() as database:
            cursor = database.execute(
                "UPDATE releases SET state=?, revision=revision+1 WHERE id=? AND state=?", (state, release_id, was)
            )
            if cursor.rowcount != 1:
                raise ConflictError(f"release {release_id!r} is no longer {was}")
        return self.release(release_id)

    def replace_judgement(
        self, release_id: str, policy_digest: str, rules: tuple[JudgedRule, ...], *, persons: int, expires_at: float
    ) -> None:
        """Put a held release under a changed policy: store that policy's digest, verdicts, number of persons and end,
        and void the approvals given so far."""
        with self._writing() as database:
            database.execute(
                "UPDATE releases SET policy_digest=?, rules=?, persons=?, expires_at=?, revision=revision+1 "
                "WHERE id=? AND state='held'",
                (policy_digest, json.dumps(to_json(rules)), persons, expires_at, release_id),
            )
            database.execute("DELETE FROM approvals WHERE release_id=?", (release_id,))

    def approve(self, approval: Approval, *, again: bool = False) -> None:
        """Keep one person's answer.

        Args:
            approval: the answer.
            again: it takes the place of one that this person gave.

        Raises:
            ConflictError: this person has given an answer already; nobody counts twice.
        """
        values = asdict(approval) | {"acknowledged": json.dumps(approval.acknowledged)}
        try:
            with self._writing() as database:
                database.execute(
                    f"INSERT {'OR REPLACE ' if again else ''}INTO approvals ({', '.join(values)}) "  # noqa: S608
                    f"VALUES ({', '.join('?' * len(values))})",
                    tuple(values.values()),
                )
        except sqlite3.IntegrityError as error:
            raise ConflictError(f"{approval.person} has answered for {approval.release_id!r} already") from error

    def forget_approvals(self, release_id: str, person: str | None = None) -> None:
        """They have had their effect, or have none. person: of this one alone."""
        with self._writing() as database:
            database.execute(
                "DELETE FROM approvals WHERE release_id=? AND (? IS NULL OR person=?)", (release_id, person, person)
            )

    def approvals(self, release_id: str) -> list[Approval]:
        rows = self._all("SELECT * FROM approvals WHERE release_id=? ORDER BY at", (release_id,))
        return [_approval_of(row) for row in rows]

    # ---- the policy in force -------------------------------------------------------------------------

    @property
    def policy_in_force(self) -> PolicyInForce | None:
        """The policy that decided last, so that a looser one is noticed; None before the first start."""
        text = self._fact("policy_in_force")
        return None if text is None else PolicyInForce(**json.loads(text))

    def put_in_force(self, policy: PolicyInForce, *, proposal: str = "") -> None:
        """Remember what decides from here on, and the proposal that it took, whose approvals are spent by that.

        Raises:
            ConflictError: the proposal was used before (threat T36).
        """
        try:
            with self._writing() as database:
                if proposal:
                    database.execute("INSERT INTO policy_changes VALUES (?, ?)", (proposal, policy.digest))
                database.execute(
                    "INSERT OR REPLACE INTO facts VALUES ('policy_in_force', ?)", (json.dumps(asdict(policy)),)
                )
        except sqlite3.IntegrityError as error:
            raise ConflictError(f"proposal {proposal} was used already", hint="propose it again") from error

    def was_used(self, proposal: str) -> bool:
        return self._one("SELECT 1 FROM policy_changes WHERE proposal=?", (proposal,)) is not None

    @property
    def latest_time(self) -> float:
        """The latest UTC second ever seen here; 0 before the first."""
        return float(self._fact("latest_time") or 0.0)

    # ---- runs --------------------------------------------------------------------------------------

    def start_run(self, run: str, plan: str) -> None:
        with self._writing() as database:
            database.execute("INSERT OR IGNORE INTO runs VALUES (?, ?, 'running', '{}')", (run, plan))

    def decline_run(self, run: str) -> None:
        """A plan that was said no to: its name is spent, so that the no stands however often the plan comes."""
        with self._writing() as database:
            database.execute("INSERT OR IGNORE INTO runs VALUES (?, '', 'declined', '{}')", (run,))

    def save_view(self, run: str, view: Mapping[str, Any]) -> None:
        """Store where the run stands, as the rules see it, so that a release held over a restart is judged alike."""
        with self._writing() as database:
            database.execute("UPDATE runs SET view=? WHERE run=?", (json.dumps(view), run))

    def end_run(self, run: str, state: str) -> None:
        with self._writing() as database:
            database.execute("UPDATE runs SET state=? WHERE run=?", (state, run))

    def open_run(self) -> tuple[str, str, dict[str, Any]] | None:
        """(run, canonical plan, view) of the run that had not ended."""
        row = self._one("SELECT * FROM runs WHERE state='running' ORDER BY rowid DESC LIMIT 1", ())
        return None if row is None else (row["run"], row["plan"], json.loads(row["view"]))

    def run_state(self, run: str) -> str:
        """running | declined | left | the outcome it ended with; empty for a name that was never used here."""
        row = self._one("SELECT state FROM runs WHERE run=?", (run,))
        return "" if row is None else str(row["state"])

    def plan_of(self, run: str) -> str:
        """Canonical plan of a run that was taken part in; empty for any other."""
        row = self._one("SELECT plan FROM runs WHERE run=?", (run,))
        return "" if row is None else str(row["plan"])

    def remember_of_run(self, run: str, name: str, value: str) -> None:
        """Keep a value of a run: split | trained_with | start_adapter | final_adapter | plan_sequence | goodbye |
        answers/N."""
        known = self.remembered_of_run(run, name)
        if value not in known:
            self._set_fact(f"run/{run}/{name}", json.dumps([*known, value]))

    def remembered_of_run(self, run: str, name: str) -> list[str]:
        return [str(value) for value in json.loads(self._fact(f"run/{run}/{name}") or "[]")]

    def keep_paused(self, run: str, paused: bool) -> None:
        """Persons paused a run here, or let it go on: a restart does not."""
        self._set_fact(f"run/{run}/paused", str(int(paused)))

    def is_paused(self, run: str) -> bool:
        return self._fact(f"run/{run}/paused") == "1"

    def last_run(self) -> tuple[str, str]:
        """(run, state) of the newest run, however it stands; empty texts before the first."""
        row = self._one("SELECT run, state FROM runs ORDER BY rowid DESC LIMIT 1", ())
        return ("", "") if row is None else (str(row["run"]), str(row["state"]))

    def runs(self) -> tuple[LedgerRun, ...]:
        rows = self._all("SELECT run, state, view FROM runs", ())
        return tuple(
            LedgerRun(run=row["run"], state=row["state"], round=json.loads(row["view"]).get("round", 0)) for row in rows
        )

    def keep_transcript(self, run: str, round_number: int, kept: Mapping[str, Any]) -> None:
        """A round's first transcript, how far it is agreed on, and which others were met (threat T20). With it go those
        of the runs before, so that they do not add up (T24)."""
        name, rest = f"run/{run}/transcript/{round_number}", ("run/*/transcript/*", f"run/{run}/*")
        with self._writing() as database:
            database.execute("DELETE FROM facts WHERE name GLOB ? AND name NOT GLOB ?", rest)
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(kept)))

    def transcript(self, run: str, round_number: int) -> dict[str, Any] | None:
        text = self._fact(f"run/{run}/transcript/{round_number}")
        return None if text is None else dict(json.loads(text))

    @property
    def equivocation(self) -> dict[str, Any]:
        """Both sides of a round that was told in two ways, while nobody has released the halt; else empty."""
        return self._object("equivocation")

    def keep_equivocation(self, evidence: Mapping[str, Any]) -> None:
        """Empty evidence ends the halt."""
        self._set_fact("equivocation", json.dumps(evidence))

    # ---- the open round, which a guard that was killed goes on in -----------------------------------

    def keep_of_round(self, run: str, kept: dict[str, Any], *, opens: bool = False) -> None:
        """Keep a message of a round, durably, before the method hears of it.

        Args:
            run: its run.
            kept: {kind, round, step, digest, payload: hex}.
            opens: the message begins a round, so what was kept of other rounds goes.
        """
        name = f"run/{run}/again/{kept['kind']}/{kept['step']}/{kept['digest']}"
        with self._writing() as database:
            if opens:
                others = "name GLOB 'run/*/again/*' AND json_extract(value, '$.round')<>?"
                database.execute(f"DELETE FROM facts WHERE {others}", (kept["round"],))  # noqa: S608  # constant text
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, json.dumps(kept)))

    def kept_of_round(self, run: str, round_number: int) -> list[dict[str, Any]]:
        """Messages of a round, in the order in which they came; empty if the round goes on without this silo. Donors of
        a round may come before it has begun (`exchange: round_end`)."""
        rows = self._all("SELECT value FROM facts WHERE name GLOB ? ORDER BY rowid", (f"run/{run}/again/*",))
        messages = [dict(json.loads(row["value"])) for row in rows]
        return [one for one in messages if one["round"] == round_number]

    def forget_round(self) -> None:
        """Forget the open round: it goes on without this silo, also after a restart."""
        with self._writing() as database:
            database.execute("DELETE FROM facts WHERE name GLOB 'run/*/again/*'")

    def became_of(self, place: Place) -> str:
        """Return what became of an offer: sent, denied, missed, or waits if it is held or lies in the outbox. Empty
        without a trace: an offer that a rule denied leaves one in the audit log only."""
        for table, meanings in (("outbox", _OUTBOX), ("releases", _RELEASES)):
            query = f"SELECT state FROM {table} WHERE {_PLACE} ORDER BY rowid DESC LIMIT 1"  # noqa: S608  # constant text
            if (row := self._one(query, place)) is not None:
                return meanings.get(row["state"], "denied")
        return ""

    # ---- SQL ---------------------------------------------------------------------------------------

    def _take_back_count(self) -> None:
        """Take back the count of a message that a kill kept out of the outbox. Called when the ledger is opened."""
        if (before := self._fact("history_before")) is None:
            return
        with self._writing() as database:
            _count_for_good(database, before)
            if not before:
                database.execute("DELETE FROM facts WHERE name='history_book'")

    def _follow(self, database: sqlite3.Connection, named: Head) -> None:
        """Make this transaction's group follow the head that the log names, whichever head this ledger held."""
        fact = {"groups": named.groups, "head": named.head, "before": _NO_HEAD, "logged": []}
        database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_HEAD, json.dumps(fact)))
        self._named, self._group_open = named, False

    def _advance_head(self, database: sqlite3.Connection) -> None:
        row = database.execute("SELECT value FROM facts WHERE name=?", (_HEAD,)).fetchone()
        heads = _heads_of(None if row is None else row["value"])
        before, groups, logged = _NO_HEAD, 1, tuple[Head, ...]()
        if heads is not None:
            before, groups, logged = heads.newest.head, heads.newest.groups, heads.logged
            if not self._group_open:
                groups += 1
                logged = (heads.newest,) if heads.newest == self._named else (*logged, heads.newest)
        head = self._head(database, groups, before)
        fact = {"groups": groups, "head": head, "before": before, "logged": logged}
        database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (_HEAD, json.dumps(fact)))

    def _head(self, database: sqlite3.Connection, groups: int, before: str) -> str:
        covered = [list(row) for row in database.execute(_COVERED)]
        content = json.dumps(["fedsilo ledger", groups, before, covered], separators=(",", ":"))
        return hmac.new(self.finding_key(), content.encode(), hashlib.sha256).hexdigest()

    def _fact(self, name: str) -> str | None:
        row = self._one("SELECT value FROM facts WHERE name=?", (name,))
        return None if row is None else str(row["value"])

    def _object(self, name: str) -> dict[str, Any]:
        """Return a fact that is a JSON object; empty where it is not stored."""
        return dict(json.loads(self._fact(name) or "{}"))

    def _set_fact(self, name: str, value: str) -> None:
        with self._writing() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Open one transaction, flushed at the end. Raises OperationError: the disk refused (then nothing was sent)."""
        with self._begun():
            try:
                yield self._database
                self._advance_head(self._database)
                self.locked.until_free(lambda: self._database.execute("COMMIT"))
            except sqlite3.IntegrityError:
                self._roll_back()
                raise
            except sqlite3.Error as error:
                self._roll_back()
                raise _unwritable(error) from error
            except BaseException:
                self._roll_back()
                raise
            self._group_open = True

    @contextmanager
    def _begun(self) -> Iterator[None]:
        """A transaction is open and nobody else reads. While the file is locked others may read what is there."""

        def begin() -> None:
            self._lock.acquire()
            try:
                self._database.execute("BEGIN IMMEDIATE")
            except BaseException:
                self._lock.release()
                raise

        try:
            self.locked.until_free(begin)
        except sqlite3.Error as error:
            raise _unwritable(error) from error
        try:
            yield
        finally:
            self._lock.release()

    def _roll_back(self) -> None:
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def _one(self, query: str, arguments: tuple[Any, ...]) -> sqlite3.Row | None:
        return next(iter(self._all(query, arguments)), None)

    def _all(self, query: str, arguments: tuple[Any, ...]) -> list[sqlite3.Row]:
        def read() -> list[sqlite3.Row]:
            with self._lock:
                return list(self._database.execute(query, arguments).fetchall())

        return self.locked.until_free(read)


def _unwritable(error: sqlite3.Error) -> OperationError:
    return OperationError(f"the ledger cannot be written: {error}", hint="is the disk full?", code="LEDGER_UNWRITABLE")


def _heads_of(text: str | None) -> Heads | None:
    if text is None:
        return None
    fact = json.loads(text)
    newest = Head(int(fact["groups"]), str(fact["head"]))
    return Heads(newest, str(fact["before"]), tuple(Head(int(n), str(head)) for n, head in fact["logged"]))


def _add_missing_columns(database: sqlite3.Connection) -> None:
    for table, columns in _ADDED.items():
        known = {row["name"] for row in database.execute(f"PRAGMA table_info({table})")}
        for name in columns.keys() - known:
            database.execute(f"ALTER TABLE {table} ADD COLUMN {name} {columns[name]}")


def _outbox_item_of(row: sqlite3.Row) -> OutboxItem:
    values = dict(row)
    return OutboxItem(place=_place_of(values), **values | {"archived": bool(row["archived"])})


def _release_of(row: sqlite3.Row) -> Release:
    values = {name: row[name] for name in row.keys() if name != "number"}  # noqa: SIM118  # a row is no mapping
    place = _place_of(values)
    values |= {name: json.loads(values[name]) for name in _JSON_OF_RELEASE}
    return Release(place=place, **values | {"rules": read_rows(JudgedRule, values["rules"])})


def _place_of(values: dict[str, Any]) -> Place:
    """Take the place out of a row's values."""
    return Place(**{name: values.pop(name) for name in Place._fields})


def _approval_of(row: sqlite3.Row) -> Approval:
    """A reader may meet a table that nobody has added columns to."""
    values = dict(row)
    return Approval(**values | {"acknowledged": tuple(json.loads(values.get("acknowledged", "[]")))})


def _advance(database: sqlite3.Connection, run: str) -> int:
    row = database.execute("SELECT value FROM sequences WHERE direction='out' AND run=?", (run,)).fetchone()
    value = (int(row["value"]) if row else 0) + 1
    database.execute("INSERT OR REPLACE INTO sequences VALUES ('out', ?, ?)", (run, value))
    return value


def _below(before: int | None) -> int:
    return COUNT_MAX if before is None else before


def _count_until_kept(database: sqlite3.Connection, book: str) -> None:
    """Replace the history, and keep the one before until `_count_for_good`; an empty text where there was none."""
    before = "SELECT 'history_before', COALESCE((SELECT value FROM facts WHERE name='history_book'), '')"
    database.execute(f"INSERT OR REPLACE INTO facts {before}")  # constant text
    database.execute("INSERT OR REPLACE INTO facts VALUES ('history_book', ?)", (book,))


def _count_for_good(database: sqlite3.Connection, book: str = "") -> None:
    """Make final what was counted. book: the history from now on, if it changes."""
    database.execute("DELETE FROM facts WHERE name='history_before'")
    if book:
        database.execute("INSERT OR REPLACE INTO facts VALUES ('history_book', ?)", (book,))
