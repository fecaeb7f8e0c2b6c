"""What a daemon left on disk, in place of the daemon: its audit log, and what its own readers make of the rest.

Nothing is written, no lock is taken, and nothing can be answered. The state is read once, when it is opened; it is the
one of the last record, and `banner` says of when. What the folder does not hold is named in words (`missing`) and told
as events. `audit.verify` runs the verification that auditors run, in a thread of its own.

Does not show: whether a daemon works on the folder at this moment, and a log that was replaced as a whole together with
its key, which only other parties' logs show (`fedsilo audit verify` with all of them).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from certs.names import SpiffeId, parse_spiffe_id
from console.client import Event
from console.client import Snapshot as Reading
from console.reading import mapping, number, text_of
from fedsilo.edge.audit_follow import log_key_of
from fedsilo.edge.audit_loading import read_note
from fedsilo.edge.audit_pages import LOOK_RECORDS, LogPages, line_filter, record_at
from fedsilo.edge.audit_segments import read_lines
from fedsilo.edge.audit_verify import verify_logs
from fedsilo.treaty.audit.checkpoint import VerifierKey, cosigned_at, parse_verifier_key
from fedsilo.treaty.audit.poll_window import messages_of
from fedsilo.treaty.errors import FedSiloError, NotFoundError, UsageError

AUDIT = "audit"  # the log's folder below a state folder
EVENTS_SHOWN = 50
ROWS_DEFAULT, ROWS_MAX = 100, 200
# Of each witness, until the log was verified: nobody may take that for "it countersigned nothing".
NOT_LOOKED_AT = "not looked at: v verifies"
# The events that are looked into; as canonical JSON spells them, so that few lines of a long log are parsed.
_MARKS = tuple(
    f'"event":"{name}'.encode()
    for name in (
        "egress.sent",
        "ingress.decision",
        "key.",
        "halt",
        "release",
        "start",
        "clock.accept",
    )
)

_TOLD = ("kind", "run", "round", "decision")  # of a record, as an event

Query = Callable[[Mapping[str, Any]], Any]


@dataclass
class LogFacts:
    """What one pass over a log tells.

    Attributes:
        owner: whose log it is.
        size: records in it.
        last_time: of its newest record, in seconds since 1970; 0 for an empty log.
        last_contact: when a message last went out or came in.
        sent: payloads that left, by kind: (messages, bytes).
        certificate_until: as the log names its owner's newest certificate; empty where it names none.
        halted: codes of a halt that no later start or release ended.
    """

    directory: Path
    owner: SpiffeId
    size: int = 0
    last_time: float = 0.0
    last_contact: float = 0.0
    sent: dict[str, tuple[int, int]] = field(default_factory=dict)
    certificate_until: str = ""
    halted: str = ""
    newest: deque[tuple[int, bytes]] = field(default_factory=lambda: deque(maxlen=EVENTS_SHOWN))

    def take(self, line: bytes) -> None:
        try:
            record = mapping(json.loads(line))
        except (ValueError, RecursionError):
            return  # damaged: `audit.verify` names it
        event, time = text_of(record.get("event")), number(record.get("t")) / 1000
        if event == "egress.sent":
            messages, size = self.sent.get(text_of(record.get("kind")), (0, 0))
            more = int(number(mapping(record.get("payload")).get("bytes")))
            self.sent[text_of(record.get("kind"))] = messages + messages_of(record), size + more
        if event in ("egress.sent", "ingress.decision"):
            self.last_contact = max(self.last_contact, time)
        elif event.startswith("key."):
            self.certificate_until = text_of(mapping(record.get("detail")).get("not_after")) or self.certificate_until
        elif event == "halt":
            codes = record.get("reasons")
            self.halted = ", ".join(map(text_of, codes)) if isinstance(codes, list) and codes else "halted"
        elif event in ("release", "start", "clock.accept"):
            self.halted = ""


@dataclass(frozen=True)
class FolderView:
    """What a party's own readers make of its state folder.

    Attributes:
        state: as its daemon shows it.
        policy_digest: in force at last; empty where nobody says.
        as_of: seconds since 1970 of the newest thing in it.
        missing: what the folder does not hold, a sentence each.
        queries: further ones that it can answer.
    """

    state: Mapping[str, Any]
    policy_digest: str
    as_of: float
    missing: tuple[str, ...]
    queries: Mapping[str, Query] = field(default_factory=dict)


def log_of(folder: Path) -> Path:
    """The audit log of a state folder. Raises NotFoundError: there is none."""
    log = folder / AUDIT
    if not (log / "keys" / "log.vkey").is_file():
        hint = "name the folder that state_dir in the configuration names"
        if folder.is_dir() and any(folder.glob("*/audit/keys/log.vkey")):
            hint = f"did you mean one of {folder}/*/?"
        raise NotFoundError(f"{folder} is no state folder: it holds no audit log", hint=hint)
    return log


def read_log(directory: Path) -> LogFacts:
    """One pass over a log, unverified.

    Raises:
        NotFoundError: no such log. VerificationError: a segment is missing, or the key is damaged.
        UsageError: it is the log of neither a silo nor a coordinator.
    """
    _, origin = log_key_of(directory)
    owner = parse_spiffe_id(origin)
    if owner is None or owner.role not in ("silo", "coordinator"):
        raise UsageError(f"{directory} is the log of neither a silo nor a coordinator")
    facts = LogFacts(directory, owner)
    for seq, line in read_lines(directory):
        facts.size = seq + 1
        facts.newest.append((seq, line))
        if any(mark in line for mark in _MARKS):
            facts.take(line)
    if facts.newest:
        facts.last_time = number(record_at(*facts.newest[-1]).get("t")) / 1000
    return facts


def log_only(facts: LogFacts) -> FolderView:
    """What the audit log alone tells, of either party."""
    name, federation = facts.owner.name, facts.owner.domain
    missing = "everything but the audit log: runs, members and figures are not read from this folder"
    if facts.owner.role == "coordinator":
        state: dict[str, Any] = {
            "party": "coordinator", "coordinator": name, "site": "", "federation": federation, "address": "",
            "halted": facts.halted, "waits": "", "runs": [], "silos": [],
        }  # fmt: skip
    else:
        state = silo_state(facts)
    return FolderView(state, "", facts.last_time, (missing,))


def silo_state(facts: LogFacts) -> dict[str, Any]:
    """A silo's state as far as its audit log tells it."""
    return {
        "kind": "silo", "silo": facts.owner.name, "federation": facts.owner.domain, "phase": "offline",
        "halted": facts.halted, "waits": "", "held": [], "metrics": {}, "dp": "off",
        "left": [
            {"kind": kind, "messages": messages, "bytes": size}
            for kind, (messages, size) in sorted(facts.sent.items())
        ],
        "coordinator": {"link": "not asked", "last_contact": facts.last_contact},
        "audit": {"size": facts.size, "broken": None},
        "certificate_until": facts.certificate_until,
    }  # fmt: skip


class Offline:
    """A state folder as a source; what it shows does not change.

    Args:
        folder: a daemon's state folder.
        read: makes the view from the folder and its log; by default the log alone speaks.

    Raises:
        NotFoundError, VerificationError, UsageError, OperationError: it cannot be read; the message says why.
    """

    def __init__(self, folder: Path, read: Callable[[LogFacts], FolderView] = log_only) -> None:
        self._log = log_of(folder)
        self._facts = read_log(self._log)
        self._pages = LogPages(self._log)
        self.view = read(self._facts)
        self._closed = threading.Event()
        self._verifying = threading.Lock()
        self._verified: Mapping[str, Any] | None = None
        self._verified_at = ""
        self._signers: tuple[list[str], dict[str, int]] | None = None
        self._thread: threading.Thread | None = None

    def banner(self) -> str:
        """For the top of the console."""
        return f"OFFLINE, as of {_moment(self.view.as_of)}: what the folder holds; no daemon was asked"

    def wall_time(self) -> float:
        """Seconds since 1970 that ages count from: the folder stands still, at a whole second."""
        return float(int(self.view.as_of))

    # ---- a source ----

    def snapshot(self) -> Reading:
        sequence = max(self._facts.size - len(self._facts.newest), 0)
        state = dict(self.view.state)
        if "audit" in state:
            state["audit"] = {**state["audit"], "broken": self._broken()}
        return Reading(sequence, _moment(self.view.as_of), self.view.policy_digest, state)

    def watch(self, since_sequence: int = 0) -> Iterator[Event]:
        """The newest records of the log as events, then what is missing, then nothing until closed."""
        closed = self._closed
        for seq, line in list(self._facts.newest):
            if seq + 1 > since_sequence:
                record = record_at(seq, line)
                fields: dict[str, Any] = {name: record[name] for name in _TOLD if name in record}
                yield Event(seq + 1, _moment(number(record.get("t")) / 1000), text_of(record.get("event")), fields)
        if since_sequence <= self._facts.size:
            now = _moment(self.view.as_of)
            for place, sentence in enumerate(self.view.missing, self._facts.size + 1):
                yield Event(place, now, "not on disk", {"": sentence})
        closed.wait()

    def query(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """Raises NotFoundError: only a running daemon answers that. UsageError: an argument of another type."""
        own: Mapping[str, Query] = {
            "audit": self._page, "audit.status": lambda _: self._status(), "audit.verify": lambda _: self._verify(),
        }  # fmt: skip
        answer = own.get(name) or self.view.queries.get(name)
        if answer is None:
            raise NotFoundError(
                f"not kept in the state folder: {name}", hint="only the running daemon answers it", code="NOT_ON_DISK"
            )
        return answer(arguments or {})

    def verify_now(self, seconds: float) -> bool:
        """Verify the log before it is shown, for who sees it once only. Returns whether that ended in time."""
        self._verify()
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
        return self._verified is not None

    def close(self) -> None:
        """Ends the watchers; it can be read on."""
        closed, self._closed = self._closed, threading.Event()
        closed.set()

    # ---- the audit log ----

    def _page(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Whole records, newest first, as a guard's query `audit` gives them."""
        size = self._facts.size
        before, limit = arguments.get("before"), arguments.get("limit")
        if not all(value is None or (isinstance(value, int) and value >= 0) for value in (before, limit)):
            raise UsageError("before and limit are whole numbers")
        event, text = text_of(arguments.get("event")), text_of(arguments.get("text"))
        wanted = line_filter(event, text, control=arguments.get("control") is not False)
        start = size if before is None else min(before, size)
        rows = min(limit or ROWS_DEFAULT, ROWS_MAX)
        back = self._pages.back(start, wanted, limit=rows, look_max=LOOK_RECORDS)
        return {"records": [record_at(*item) for item in back.lines], "size": size, "next": back.next}

    def _verify(self) -> dict[str, Any]:
        with self._verifying:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._verify_now, name="audit-verify", daemon=True)
                self._thread.start()
        return self._status()

    def _verify_now(self) -> None:
        try:
            (result,) = verify_logs([self._log])
        except (FedSiloError, OSError) as error:
            result = {"verified": False, "problems": [str(error)], "suspects": [0], "size": 0, "cosigned": {}}
        self._verified, self._verified_at = result, _moment(datetime.now(UTC).timestamp())

    def _status(self) -> dict[str, Any]:
        """As a guard's query `audit.status`. What each witness countersigned is known once the log was verified; until
        then the checkpoint names those whose signature under it is sound, whatever the records are."""
        result, running = self._verified, self._thread is not None and self._thread.is_alive()
        shown: dict[str, Any] = {
            "size": self._facts.size, "verified_to": None, "verified_at": None, "verifying": running,
            "looked_at": 0, "of": self._facts.size, "broken": None, "checkpoint": None,
        }  # fmt: skip
        if result is None:
            if self._signers is None:
                self._signers = _signers(self._log)
            known, signed = self._signers
            at_coordinator = self._facts.owner.role == "coordinator"
            witnesses = {"witnesses": dict.fromkeys(known, NOT_LOOKED_AT)}
            words = witnesses if at_coordinator else {"coordinator": NOT_LOOKED_AT}
            return shown | {"checkpoint": self._checkpoint(signed)} | words
        suspect = (result["suspects"] or [0])[0]
        shown["broken"] = self._broken()
        cosigned: Mapping[str, int] = result["cosigned"]
        seen = any((party := parse_spiffe_id(name)) and party.role == "coordinator" for name in cosigned)
        word = "matches" if result["verified"] else "differs"
        told = shown | {
            "verified_to": result["size"] if result["verified"] else suspect, "verified_at": self._verified_at,
            "looked_at": result["size"], "checkpoint": self._checkpoint(cosigned),
        }  # fmt: skip
        if self._facts.owner.role == "coordinator":
            return told | {"witnesses": dict.fromkeys(sorted(cosigned), word)}
        return told | {"coordinator": word if seen else "not seen"}

    def _broken(self) -> dict[str, Any] | None:
        """The break that the verification found; None where it found none, or none was."""
        result = self._verified
        if result is None or result["verified"]:
            return None
        return {"seq": (result["suspects"] or [0])[0], "why": "; ".join(result["problems"])}

    def _checkpoint(self, cosigned: Mapping[str, int]) -> dict[str, Any]:
        """The newest checkpoint that somebody countersigned, else the newest."""
        sizes = [int(path.stem) for path in (self._log / "checkpoints").glob("*.note") if path.stem.isdecimal()]
        size = max(cosigned.values(), default=max(sizes, default=0))
        found = self._pages.records(size - 1, size) if size else []
        time = _moment(number(found[0].get("t")) / 1000) if found else ""
        return {"size": size, "time": time, "cosigned_by": sorted(name for name, to in cosigned.items() if to == size)}


def _signers(log: Path) -> tuple[list[str], dict[str, int]]:
    """(whose keys are in the folder, who of them signed under the newest checkpoint that anybody countersigned, with
    its size). No record is looked at."""
    keys: list[VerifierKey] = []
    for path in (log / "keys").glob("*.vkey"):
        with contextlib.suppress(FedSiloError, OSError):  # damaged: `audit.verify` names it
            if path.name != "log.vkey":
                keys += [parse_verifier_key(text) for text in read_note(path).splitlines()[1:]]
    known, found = sorted({key.name for key in keys}), dict[str, int]()
    paths = [path for path in (log / "checkpoints").glob("*.note") if path.stem.isdecimal()]
    for path in sorted(paths, reverse=True) if keys else ():
        with contextlib.suppress(FedSiloError, OSError):
            note = read_note(path)
            for key in keys:
                if cosigned_at(note, key) is not None:
                    found[key.name] = int(path.stem)
        if found:
            break
    return known, found


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%SZ}"
