"""What the guard must remember across a kill: sequence counters, what was allowed out, what was let in, held releases,
approvals, the policy in force, the run it takes part in. One SQLite file in `state_dir`, every write flushed before it
returns; the bytes of messages lie beside it, one file each (`payloads.py`). The audit log says what happened; the
ledger is what the next decision is made from.

Time only moves forward here: `now` is the latest time ever seen, so a clock set back revives nothing (threat T41). Only
an approver who accepts the clock, after it was found wrong, sets it to an earlier one (`accept_clock`).
An older copy of the file is noticed at the start, since the log names the newest head (`ledger_check.py`, T42).
Does not stop: older copies of ledger and log together. The log's witnesses show that.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedsilo.edge.locked_file import TRY_SECONDS
from fedsilo.edge.read_only import read_only_address
from fedsilo.treaty.audit.record import COUNT_MAX
from fedsilo.treaty.errors import ConflictError, NotFoundError, OperationError
from fedsilo.treaty.wire.codec import Buffer
from silo.guard.ledger_recount import RecountLedger
from silo.guard.ledger_rounds import count_for_good, count_until_kept
from silo.guard.ledger_rows import (
    SCHEMA,
    Approval,
    OutboxItem,
    PolicyInForce,
    Release,
    add_missing_columns,
    approval_of,
    outbox_item_of,
    release_of,
)
from silo.guard.payloads import FOLDER, Payloads

__all__ = ["Approval", "Ledger", "OutboxItem", "PolicyInForce", "Release"]

_REFERRED = (
    "SELECT digest FROM outbox WHERE state='allowed' OR archived UNION SELECT digest FROM releases WHERE state='held'"
)


class Ledger(RecountLedger):
    """Thread-safe: the control socket reads while the daemon writes.

    Args:
        path: the SQLite file; its folder exists.
        read_only: for a process beside the daemon; the file must be there, and every write is an OperationError.
        give_up: asked while the file is locked: whether to wait no longer, since this process is to end.

    Attributes:
        payloads: bytes of messages, beside the file; none for a reader.
    """

    payloads: Payloads

    def __init__(self, path: Path, *, read_only: bool = False, give_up: Callable[[], bool] = lambda: False) -> None:
        super().__init__(path)
        self.locked.give_up = give_up
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
            self.take_back_count()
        except sqlite3.Error as error:
            raise OperationError(f"cannot open {path}: {error}", hint="keep it, it is evidence") from error
        self.payloads = Payloads(path.parent / FOLDER)
        # Written just before a kill: without a row that refers to them they never left and never will.
        self.drop_payloads(self.payloads.sizes)

    def _make_tables(self) -> None:
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(SCHEMA)
        add_missing_columns(self._database)

    def close(self) -> None:
        with self._lock:
            self._database.close()

    # ---- time, sequences ---------------------------------------------------------------------------

    def now(self, clock_now: float) -> float:
        """The later of the clock and the latest time seen before; remembered to the second."""
        seen = self.latest_time
        if clock_now > seen + 1.0:
            self._set_fact("latest_time", repr(clock_now))
        return max(clock_now, seen)

    @property
    def clock_halt(self) -> dict[str, Any]:
        """Why the clock was not believed, while nobody has accepted it as it is; else empty."""
        return dict(json.loads(self._fact("clock_halt") or "{}"))

    def keep_clock_halt(self, halt: Mapping[str, Any]) -> None:
        self._set_fact("clock_halt", json.dumps(halt))

    @property
    def clock_difference(self) -> dict[str, float]:
        """{seconds, at}: by how much the clock was ahead of the coordinator's, and when; empty before they compared."""
        return dict(json.loads(self._fact("clock_difference") or "{}"))

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
            count_for_good(database, json.dumps(book))

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
            (count_until_kept if kept else count_for_good)(database, json.dumps(book))
            return _advance(database, run)

    def keep_book(self, book: Mapping[str, Any]) -> None:
        """Replace the history, where counts of runs that are over were dropped."""
        with self._writing() as database:
            count_for_good(database, json.dumps(book))

    def keep_until_sent(self, item: OutboxItem) -> int:
        """Remember an allowed content message, so that a lost connection or a restart can retry it."""
        with self._writing() as database:
            cursor = database.execute(
                "INSERT INTO outbox (run, round, step, kind, digest, payload_bytes, decision_seq, at, state, attempts, "
                "archived) VALUES (?,?,?,?,?,?,?,?,'allowed',0,?)",
                (
                    item.run, item.round, item.step, item.kind, item.digest, item.payload_bytes, item.decision_seq,
                    item.at, item.archived,
                ),
            )  # fmt: skip
            count_for_good(database)
            return int(cursor.lastrowid or 0)

    def settle_outbox(self, item_id: int, state: str) -> None:
        """It was answered, or is not wanted any more: its bytes go, unless they are archived."""
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

    def outbox(self, state: str | None = None) -> list[OutboxItem]:
        """Content messages that were allowed, oldest first."""
        where, arguments = ("", ()) if state is None else (" WHERE state=?", (state,))
        rows = self._all(f"SELECT * FROM outbox{where} ORDER BY id", arguments)  # noqa: S608  # constant text
        return [outbox_item_of(row) for row in rows]

    def outbox_item(self, decision_seq: int) -> OutboxItem | None:
        """What left under a decision."""
        row = self._one("SELECT * FROM outbox WHERE decision_seq=? ORDER BY id LIMIT 1", (decision_seq,))
        return None if row is None else outbox_item_of(row)

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
        return [outbox_item_of(row) for row in reversed(rows)]

    def outbox_page(self, before: int | None, limit: int) -> tuple[list[OutboxItem], int]:
        """The newest `limit` of them below the id `before`, newest first, and how many there are in all."""
        rows = self._all("SELECT * FROM outbox WHERE id<? ORDER BY id DESC LIMIT ?", (_below(before), limit))
        total = self._all("SELECT COUNT(*) AS total FROM outbox", ())[0]["total"]
        return [outbox_item_of(row) for row in rows], int(total)

    # ---- held releases -----------------------------------------------------------------------------

    def hold(self, release: Release, payload: Buffer) -> None:
        self.payloads.write(release.digest, payload)
        with self._writing() as database:
            database.execute(
                "INSERT INTO releases VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    release.id, release.run, release.round, release.step, release.kind, release.digest,
                    release.policy_digest, release.payload_bytes, json.dumps(release.recorded),
                    json.dumps(release.facts), json.dumps(release.rules), release.persons, release.requested_at,
                    release.expires_at, release.expiry_outcome, release.state, release.revision,
                ),
            )  # fmt: skip

    def release(self, release_id: str) -> Release:
        """Raises NotFoundError."""
        row = self._one("SELECT * FROM releases WHERE id=?", (release_id,))
        if row is None:
            raise NotFoundError(f"there is no release {release_id!r}", hint="silo approvals list shows them")
        return release_of(row)

    def releases_before(self, release: Release, limit: int) -> list[Release]:
        """The newest `limit` of a release's kind that were held before it and are over, newest first."""
        rows = self._all(
            "SELECT * FROM releases WHERE kind=? AND state<>'held' AND rowid<(SELECT rowid FROM releases WHERE id=?) "
            "ORDER BY rowid DESC LIMIT ?",
            (release.kind, release.id, limit),
        )
        return [release_of(row) for row in rows]

    def rejected_before(self, release: Release, limit: int) -> list[Release]:
        """The newest `limit` releases of these very bytes that persons rejected before, newest first."""
        rows = self._all(
            "SELECT * FROM releases WHERE kind=? AND digest=? AND state='rejected' "
            "AND rowid<(SELECT rowid FROM releases WHERE id=?) ORDER BY rowid DESC LIMIT ?",
            (release.kind, release.digest, release.id, limit),
        )
        return [release_of(row) for row in rows]

    def releases(self, state: str | None = None) -> list[Release]:
        if state is None:
            return [release_of(row) for row in self._all("SELECT * FROM releases ORDER BY requested_at", ())]
        rows = self._all("SELECT * FROM releases WHERE state=? ORDER BY requested_at", (state,))
        return [release_of(row) for row in rows]

    def approved_release(self, item: OutboxItem) -> Release | None:
        """The newest one that persons let go as this message."""
        row = self._one(
            "SELECT * FROM releases WHERE state='approved' AND kind=? AND digest=? AND run=? "
            "ORDER BY rowid DESC LIMIT 1",
            (item.kind, item.digest, item.run),
        )
        return None if row is None else release_of(row)

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
        return [(int(row["number"]), release_of(row)) for row in rows], int(total)

    def defer(self, release_id: str, person: str, until: float) -> None:
        """This person is not asked for it until then; nothing else changes. until: seconds since 1970."""
        self._set_fact(f"deferred/{release_id}", json.dumps({**self.deferred(release_id), person: until}))

    def deferred(self, release_id: str) -> dict[str, float]:
        """Person -> until when (seconds since 1970)."""
        return dict(json.loads(self._fact(f"deferred/{release_id}") or "{}"))

    def _make_finding_key(self) -> None:
        """When it is opened, so that showing a release writes nothing."""
        made = secrets.token_hex(32)
        self._database.execute("INSERT OR IGNORE INTO facts VALUES ('finding_key', ?)", (made,))

    def keep_of_release(self, release_id: str, kept: Mapping[str, Any]) -> None:
        """What is shown of a release beside its facts: base, destination, places of hits; no text."""
        self._set_fact(f"release/{release_id}", json.dumps(kept))

    def kept_of_release(self, release_id: str) -> dict[str, Any]:
        return dict(json.loads(self._fact(f"release/{release_id}") or "{}"))

    def found_since(
        self, release_id: str, facts: Mapping[str, Any], rules: list[dict[str, Any]], kept: Mapping[str, Any]
    ) -> None:
        """Its screens find something else by now: facts, verdicts and places of a held release; its approvals are
        void."""
        with self._writing() as database:
            database.execute(
                "UPDATE releases SET facts=?, rules=?, revision=revision+1 WHERE id=? AND state='held'",
                (json.dumps(facts), json.dumps(rules), release_id),
            )
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (f"release/{release_id}", json.dumps(kept)))
            database.execute("DELETE FROM approvals WHERE release_id=?", (release_id,))

    @property
    def far_end(self) -> dict[str, Any]:
        """Where releases go, and since which one without a break: {destination, release, run, round, at}."""
        return dict(json.loads(self._fact("far_end") or "{}"))

    def keep_far_end(self, told: Mapping[str, Any]) -> None:
        self._set_fact("far_end", json.dumps(told))

    def keep_policy_of_sent(self, kind: str, policy: PolicyInForce) -> None:
        """By which policy the newest release of a kind left."""
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

    def judge_again(
        self, release_id: str, policy_digest: str, rules: list[dict[str, Any]], *, persons: int, expires_at: float
    ) -> None:
        """A held release under a changed policy: its digest, verdicts, persons and end; approvals so far are void."""
        with self._writing() as database:
            database.execute(
                "UPDATE releases SET policy_digest=?, rules=?, persons=?, expires_at=?, revision=revision+1 "
                "WHERE id=? AND state='held'",
                (policy_digest, json.dumps(rules), persons, expires_at, release_id),
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
        return [approval_of(row) for row in rows]

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
        """Where the run stands, as the gate's rules see it, so that a release held over a restart is judged alike."""
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
        """Keep a value of a run: split | trained_with | start_adapter | final_adapter | plan_sequence | answers/N."""
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

    def runs(self) -> list[dict[str, Any]]:
        rows = self._all("SELECT run, state, view FROM runs", ())
        return [
            {"run": row["run"], "state": row["state"], "round": json.loads(row["view"]).get("round", 0)} for row in rows
        ]

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
        return dict(json.loads(self._fact("equivocation") or "{}"))

    def keep_equivocation(self, evidence: Mapping[str, Any]) -> None:
        """Empty evidence ends the halt."""
        self._set_fact("equivocation", json.dumps(evidence))


def _advance(database: sqlite3.Connection, run: str) -> int:
    row = database.execute("SELECT value FROM sequences WHERE direction='out' AND run=?", (run,)).fetchone()
    value = (int(row["value"]) if row else 0) + 1
    database.execute("INSERT OR REPLACE INTO sequences VALUES ('out', ?, ?)", (run, value))
    return value


def _below(before: int | None) -> int:
    return COUNT_MAX if before is None else before
