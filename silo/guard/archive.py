"""Released payloads kept at the site, and what retention does with them (policy blocks `audit` and `retention`).

    state_dir/payloads/<SHA-256 of the bytes>     0600, written before the decision to send is recorded

An auditor can so read later what really left, and text rules can be asked again. Payloads older than `payload_days` are
deleted, and so are the oldest ones when outbox and archive together would exceed `outbox_max_gb`; each deletion is
recorded first. What has not been answered yet is never deleted: without room for it nothing leaves. Reading one is a
signed command and is recorded with the person's name.
Does not stop: whoever is root, or this daemon's user, from reading the files beside the daemon.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from certs.commands import VerifiedCommand
from fedsilo.edge.audit_log import AuditLog
from fedsilo.edge.control_desk import ControlDesk
from fedsilo.edge.files import make_private_directory, remove_durably, write_durably
from fedsilo.treaty.errors import NotAllowedError, NotFoundError, OperationError, UsageError, VerificationError
from fedsilo.treaty.wire.codec import sha256_hex
from fedsilo.treaty.wire.services import OUTBOUND_KINDS, TENSOR_KINDS
from policies.load import Policy
from silo.guard.ledger import Ledger, OutboxEntry
from silo.guard.messages import parsed

FULL, UNWRITABLE = "OUTBOX_FULL", "ARCHIVE_UNWRITABLE"
SHOWN_BYTES_MAX = 1 << 20
_GB, _DAY_SECONDS, _YEAR_SECONDS = 10**9, 86_400, 365.25 * 86_400


class Archive:
    """Args:
    folder: `state_dir/payloads`.
    ledger: knows what is settled, and which payload a decision was about.
    audit: our log.
    policy: the one in force.
    now_seconds: UTC seconds that never go back.
    """

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        audit: AuditLog,
        policy: Callable[[], Policy],
        *,
        now_seconds: Callable[[], float],
    ) -> None:
        self._folder = folder
        self._ledger = ledger
        self._audit = audit
        self._policy = policy
        self._now_seconds = now_seconds
        self._tickets: dict[str, dict[str, Any]] = {}
        make_private_directory(folder)
        for leftover in folder.glob(".*.tmp"):  # of a write that a kill interrupted
            leftover.unlink()
        self._sizes = {path.name: path.stat().st_size for path in folder.iterdir()}

    # ---- keeping -----------------------------------------------------------------------------------

    def keep(self, payload: bytes) -> bool:
        """Make room for a message that is about to be sent, and archive it where the policy says so; whether it is.

        Raises:
            OperationError: there is no room in outbox and archive (`OUTBOX_FULL`), or on the disk: nothing may leave.
        """
        archive = self._policy().file.audit.payload_archive
        digest = sha256_hex(payload)
        needed = len(payload) + (len(payload) if archive and digest not in self._sizes else 0)
        self._make_room(needed)
        if archive and digest not in self._sizes:
            try:
                write_durably(self._folder / digest, payload, mode=0o600)
            except OperationError as error:
                raise OperationError(error.message, hint="is the disk full?", code=UNWRITABLE) from error
            self._sizes[digest] = len(payload)
        return archive

    def _make_room(self, needed: int) -> None:
        limit = self._policy().file.retention.outbox_max_gb * _GB
        waiting = {entry.digest: entry.payload_bytes for entry in self._ledger.outbox_entries("allowed")}
        excess = sum(waiting.values()) + sum(self._sizes.values()) + needed - limit
        if excess <= 0:
            return
        dropped: list[str] = []
        for entry in self._ledger.outbox_entries():  # oldest first
            if excess <= 0:
                break
            if entry.digest in self._sizes and entry.digest not in waiting and entry.digest not in dropped:
                dropped.append(entry.digest)
                excess -= self._sizes[entry.digest]
        if excess > 0:
            raise OperationError(
                f"outbox and archive would hold {excess} bytes more than retention.outbox_max_gb "
                f"({limit // _GB} GB) allows, and the rest has not been answered yet",
                hint="see `silo outbox`; when the coordinator has answered, or the policy allows more, start again",
                code=FULL,
            )
        self._drop(dropped, "space")

    def _drop(self, digests: Iterable[str], why: str) -> None:
        """Record, then delete."""
        known = [digest for digest in digests if digest in self._sizes]
        if not known:
            return
        freed = sum(self._sizes[digest] for digest in known)
        self._audit.append("retention.payloads", detail={"payloads": len(known), "bytes": freed, "why": why})
        for digest in known:
            remove_durably(self._folder / digest)
            del self._sizes[digest]

    # ---- retention ---------------------------------------------------------------------------------

    def expire(self) -> None:
        """Delete payloads and reduce records that are older than the policy keeps them.

        Raises:
            OperationError: not recorded, or not deleted; the next call tries again.
        """
        retention, now = self._policy().file.retention, self._now_seconds()
        entries = self._ledger.outbox_entries()
        oldest = now - retention.payload_days * _DAY_SECONDS
        wanted = {entry.digest for entry in entries if entry.at >= oldest or entry.state == "allowed"}
        self._drop(sorted(self._sizes.keys() - wanted), "age")
        self._audit.remove_old(int((now - retention.records_years * _YEAR_SECONDS) * 1000))

    # ---- reading -----------------------------------------------------------------------------------

    def register(self, desk: ControlDesk, on_loop: Callable[[Callable[[], Any]], Any]) -> None:
        """The command that asks and the query that fetches.

        They are two, since the desk remembers the answer of every command: this one's is a ticket, good for one look.
        """
        desk.register_command("payload.read", "payload.read", lambda command: on_loop(lambda: self.ask(command)))
        desk.register_query("payload", lambda arguments: on_loop(lambda: self.fetch(arguments)))

    def fetch(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What a ticket stands for, once. Raises NotAllowedError: no such ticket."""
        shown = self._tickets.pop(str(arguments.get("ticket", "")), None)
        if shown is None:
            raise NotAllowedError("there is no such ticket, or it was used", hint="reading a payload takes a command")
        return shown

    def ask(self, command: VerifiedCommand) -> dict[str, Any]:
        """A ticket for what left under a decision; recorded with who asked before it is handed out.

        Args:
            command: arguments {seq}: number of the decision, or of its outcome.

        Raises:
            UsageError: no number.
            NotFoundError: nothing left under that record, or its payload is not archived any more.
            VerificationError: the file is not what left.
        """
        seq = command.arguments.get("seq")
        if not isinstance(seq, int) or isinstance(seq, bool) or seq < 0:
            raise UsageError("which record? its number is needed")
        entry = self._entry(seq)
        if entry.digest not in self._sizes:
            raise NotFoundError(
                f"the payload of record {seq} is not archived",
                hint="the policy did not ask for it then, or retention has deleted it since",
            )
        payload = (self._folder / entry.digest).read_bytes()
        if sha256_hex(payload) != entry.digest:
            raise VerificationError(f"the archived payload of record {seq} is not what left", code="ARCHIVE_DAMAGED")
        shown = {
            "seq": entry.decision_seq, "kind": entry.kind, "run": entry.run, "round": entry.round, "step": entry.step,
            "bytes": len(payload), "sha256": entry.digest, "content": content(payload, entry.kind),
        }  # fmt: skip
        self._audit.append(
            "payload.read", kind=entry.kind, run=entry.run, round=entry.round, step=entry.step,
            detail={"person": command.person, "certificate": command.certificate_fingerprint},
            link={"decision": entry.decision_seq},
        )  # fmt: skip
        ticket = secrets.token_hex(16)
        self._tickets = {ticket: shown}  # one at a time: whoever asks again asks again
        return {"ticket": ticket}

    def _entry(self, seq: int) -> OutboxEntry:
        """Raises NotFoundError."""
        record = next(self._audit.records(seq), None)
        decision = seq
        if record is not None and record["seq"] == seq and record["event"].startswith("egress."):
            decision = record["link"].get("decision", seq)
        found = next((entry for entry in self._ledger.outbox_entries() if entry.decision_seq == decision), None)
        if found is None:
            raise NotFoundError(
                f"nothing was released under record {seq}",
                hint="`fedsilo audit tail --event egress.sent` lists what left",
            )
        return found


def content(payload: bytes, kind: str) -> Any:
    """A payload as JSON values: all of a small message, and of tensors what they are called and their shapes."""
    body, _ = parsed(kind, payload, OUTBOUND_KINDS)
    values: dict[str, Any] = json_format.MessageToDict(body, preserving_proto_field_name=True)
    if kind not in TENSOR_KINDS and len(payload) > SHOWN_BYTES_MAX:
        raise UsageError(f"the payload has {len(payload)} bytes; at most {SHOWN_BYTES_MAX} are shown")
    return values
