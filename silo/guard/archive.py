"""Payloads kept at the site: what retention does with them (policy blocks `audit` and `retention`), and how people read
them.

What is about to be sent is on disk before the decision to send is recorded, and stays until it is answered, or as the
policy says: an auditor can so read later what really left, and text rules can be asked again. Archived payloads older
than `payload_days` are deleted, and so are the oldest ones when all that is kept would exceed `outbox_max_gb`; each
deletion is recorded first. What waits for an answer or a person is never deleted: without room for it nothing leaves.

Reading one is a signed command and is recorded with the person's name. A person sees answers beside public prompts, and
tensors by name, shape, type, norm and histogram, never a value. The histogram counts by powers of ten with the sign, on
edges that are the same for every tensor, so that no edge is a value; the norm has three digits. Texts are given whole
and unchanged, since JSON escapes them: whoever draws them passes them through the one function that makes text safe
(T37).

Does not stop: whoever is root, or this daemon's user, from reading the files beside the daemon; a reader from telling
others what a payload says. The log has who read it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf import json_format

from certs.commands import VerifiedCommand
from fedsilo.audit import notes as audit_notes
from fedsilo.audit.log import AuditLog
from fedsilo.audit.reader import typed_records
from fedsilo.control.answers import (
    Answer,
    AnsweredPrompt,
    ArchivedPayload,
    HeldPayload,
    Histogram,
    ShownTensor,
    filled,
)
from fedsilo.control.server import ControlServer
from fedsilo.files.task_files import Task
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array, Buffer
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.errors import NotAllowedError, NotFoundError, OperationError, UsageError
from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS, TENSOR_KINDS
from policies.kinds.adapters import LoraFactors
from silo.guard.ledger import Ledger, OutboxItem, Release

if TYPE_CHECKING:
    from silo.guard.decisions import Judge

FULL = "OUTBOX_FULL"
TICKET_SECONDS = 120.0  # the console and the command line hand it in at once
_GB, _DAY_SECONDS, _YEAR_SECONDS = 10**9, 86_400, 365.25 * 86_400


class Tickets:
    """Hands out a ticket for what was asked for with a command, each good for one look within `TICKET_SECONDS`; one at
    a time: whoever asks again asks again. What is shown is made when the ticket is handed in, by the thread that hands
    it in."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._waiting: dict[str, tuple[float, Callable[[], Answer]]] = {}

    def hand_out(self, shown: Callable[[], Answer]) -> str:
        ticket = secrets.token_hex(16)
        self._waiting = {ticket: (self._monotonic() + TICKET_SECONDS, shown)}
        return ticket

    def take(self, arguments: Mapping[str, Any]) -> Answer:
        """Redeem a ticket. Raises NotAllowedError: there is no such ticket, or it was used."""
        until, shown = self._waiting.pop(str(arguments.get("ticket", "")), (0.0, None))
        if shown is None or until < self._monotonic():
            raise NotAllowedError(
                "there is no such ticket, or it was used, or its time is over", hint="reading a payload takes a command"
            )
        return shown()


class Archive:
    """Keeps payloads as long as the policy says, and shows them to people by signed command.

    Args:
        ledger: knows what is settled, which payload a decision was about, and has the bytes.
        judge: knows the policy in force and the time, and records that a payload is read.
    """

    def __init__(self, ledger: Ledger, audit: AuditLog, judge: Judge) -> None:
        self._ledger = ledger
        self._audit = audit
        self._judge = judge
        self._tickets = Tickets()

    # ---- keeping -----------------------------------------------------------------------------------

    @contextmanager
    def ahead(self, offered: Buffer, block: LoraFactors | None, dtype: str) -> Iterator[None]:
        """While an update is judged, what will most likely leave goes to the disk, which else all would wait for
        afterwards. What is not kept in the meantime is no more there at the end.

        Args:
            offered: its bytes, in memory that nobody changes until then; or none.
            block: of the policy, for updates of this kind.
            dtype: of the update.
        """
        # clipping is for a few: it is likely to leave as it came where nothing else is done to its values
        if block is None or not (block.randomise_low_bits or block.quantise.grid not in ("float32", dtype)):
            self.begin(offered)
        try:
            yield
        finally:
            self._ledger.payloads.drop_begun()

    def begin(self, payload: Buffer) -> Buffer:
        """Take these bytes, inside `ahead`, for what leaves if anything does; returns them. They do not go to the disk
        yet where room would have to be made first."""
        if sum(self._ledger.payloads.sizes.values()) + len(payload) <= self._limit():
            self._ledger.payloads.begin(payload)
        return payload

    def keep(self, payload: Buffer, digest: str) -> bool:
        """Make room for a message that is about to be sent, and write it; whether the policy wants it archived.

        Raises:
            OperationError: what is kept leaves no room for it (`OUTBOX_FULL`), or the disk does: nothing may leave.
        """
        if digest not in self._ledger.payloads:
            self._make_room(len(payload))
            self._ledger.payloads.write(digest, payload)
        return self._judge.policy.file.audit.payload_archive

    def _make_room(self, needed: int) -> None:
        limit, sizes = self._limit(), self._ledger.payloads.sizes
        excess = sum(sizes.values()) + needed - limit
        if excess <= 0:
            return
        waiting, dropped = self._waiting(), list[str]()
        for item in self._ledger.outbox():  # oldest first
            if excess <= 0:
                break
            if item.digest in sizes and item.digest not in waiting and item.digest not in dropped:
                dropped.append(item.digest)
                excess -= sizes[item.digest]
        if excess > 0:
            raise OperationError(
                f"outbox and archive would hold {excess} bytes more than retention.outbox_max_gb "
                f"({limit // _GB} GB) allows, and the rest waits for an answer or a person",
                hint="see `silo outbox`; when the coordinator has answered, or the policy allows more, start again",
                code=FULL,
            )
        self._drop(dropped, "space")

    def _limit(self) -> float:
        return self._judge.policy.file.retention.outbox_max_gb * _GB

    def _waiting(self) -> set[str]:
        """Digests of what is not answered yet, by the coordinator or by persons."""
        sent = {item.digest for item in self._ledger.outbox("allowed")}
        return sent | {release.digest for release in self._ledger.releases("held")}

    def _drop(self, digests: Iterable[str], why: str) -> None:
        """Record, then delete."""
        sizes = self._ledger.payloads.sizes
        known = [digest for digest in digests if digest in sizes]
        if not known:
            return
        freed = sum(sizes[digest] for digest in known)
        self._audit.append("retention.payloads", detail={"payloads": len(known), "bytes": freed, "why": why})
        self._ledger.drop_payloads(known, archived=True)

    # ---- retention ---------------------------------------------------------------------------------

    def expire(self) -> None:
        """Delete payloads and reduce records that are older than the policy keeps them.

        Raises:
            OperationError: not recorded, or not deleted; the next call tries again.
        """
        retention, now = self._judge.policy.file.retention, self._judge.now()
        oldest = now - retention.payload_days * _DAY_SECONDS
        wanted = self._waiting() | {item.digest for item in self._ledger.outbox() if item.at >= oldest}
        self._drop(sorted(self._ledger.payloads.sizes.keys() - wanted), "age")
        if self._audit.remove_old(int((now - retention.records_years * _YEAR_SECONDS) * 1000)):
            audit_notes.forget(self._audit.directory, typed_records(self._audit.directory))

    # ---- reading -----------------------------------------------------------------------------------

    def register(self, control_server: ControlServer, on_loop: Callable[[Callable[[], Any]], Any]) -> None:
        """The command that asks and the query that fetches.

        They are two, since the control server remembers the answer of every command: this one's is a ticket, good for
        one look.
        """
        control_server.register_command("payload.read", "payload.read", lambda command: self.ask(command, on_loop))
        control_server.register_query(
            "payload", self.fetch
        )  # in the asking thread: a query takes none of the loop's time

    def fetch(self, arguments: Mapping[str, Any]) -> Answer:
        """Return what a ticket was handed out for, once. Raises NotAllowedError: no such ticket."""
        return self._tickets.take(arguments)

    def ask(self, command: VerifiedCommand, on_loop: Callable[[Callable[[], Any]], Any]) -> dict[str, Any]:
        """A ticket for what left under a decision; recorded with who asked before it is handed out.

        Args:
            command: arguments {seq}: number of the decision, or of its outcome.
            on_loop: runs work on the loop's thread and waits for it; what is shown is made in the asking thread.

        Raises:
            UsageError: no number, or too big to be read by a person.
            NotFoundError: nothing left under that record, or its payload is not archived any more.
            VerificationError: the file is not what left (`PAYLOAD_CHANGED`).
        """
        seq = command.arguments.get("seq")
        if not isinstance(seq, int) or isinstance(seq, bool) or seq < 0:
            raise UsageError("which record? its number is needed")
        entry: OutboxItem = on_loop(lambda: self._entry(seq))
        if entry.digest not in self._ledger.payloads:
            raise NotFoundError(
                f"the payload of record {seq} is not archived",
                hint="the policy did not ask for it then, or retention has deleted it since",
            )
        require_readable(entry.kind, entry.payload_bytes)
        self._ledger.payloads.read(entry.digest)
        on_loop(
            lambda: self._judge.record(
                "payload.read",
                **entry.place._asdict(),
                detail={"person": command.person, "certificate": command.certificate_fingerprint},
                link={"decision": entry.decision_seq},
            )
        )
        return {"ticket": self._tickets.hand_out(lambda: self._content(entry))}

    def _content(self, entry: OutboxItem) -> ArchivedPayload:
        payload = self._ledger.payloads.read(entry.digest)
        return ArchivedPayload(
            seq=entry.decision_seq,
            **entry.place._asdict(),
            bytes=len(payload),
            sha256=entry.digest,
            content=content(payload, entry.kind),
        )

    def _entry(self, seq: int) -> OutboxItem:
        """Return the outbox item of a decision. Raises NotFoundError."""
        record = next(self._audit.records(seq), None)
        decision = seq
        if record is not None and record["seq"] == seq and record["event"].startswith("egress."):
            decision = record["link"].get("decision", seq)
        item = self._ledger.outbox_item(decision)
        if item is None:
            raise NotFoundError(
                f"nothing was released under record {seq}",
                hint="`fedsilo audit tail --event egress.sent` lists what left",
            )
        return item


def content(payload: bytes, kind: str) -> Any:
    """A payload as JSON values: all of a small message, and of tensors what they are called and their shapes."""
    require_readable(kind, len(payload))
    body, _ = parsed(kind, payload, OUTBOUND_KINDS)
    return json_format.MessageToDict(body, preserving_proto_field_name=True)


# ---- what a person sees of a payload -----------------------------------------------------------------------------

SHOWN_BYTES_MAX = 1 << 20
TENSORS_MAX = 512
# Of the absolute value; below the first counts as zero.
EDGES = (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)


def payload_view(release: Release, payload: bytes, prompts: Sequence[Task]) -> HeldPayload:
    """Return what a held release would send.

    Args:
        release: held.
        payload: its canonical bytes.
        prompts: rows of this site's own copy of the public set, never of the message.

    Raises:
        UsageError: too big to be read by a person.
    """
    require_readable(release.kind, len(payload))
    kinds = OUTBOUND_KINDS if release.kind in OUTBOUND_KINDS else INBOUND_KINDS
    body, tensors = parsed(release.kind, payload, kinds)
    parts: dict[str, Any]
    if tensors is not None:
        rows = tuple(tensor_row(name, values) for name, values in sorted(tensors.items())[:TENSORS_MAX])
        parts = {"tensors": rows, "tensors_total": len(tensors), "edges": EDGES}
    elif isinstance(body, pb.PublicResponses):
        parts = {"answers": tuple(_answered(prompt, prompts) for prompt in body.prompts)}
    else:
        parts = {"content": json_format.MessageToDict(body, preserving_proto_field_name=True)}
    return filled(
        HeldPayload,
        release=release.id,
        **release.place._asdict(),
        bytes=len(payload),
        sha256=release.digest,
        absent=frozenset({"tensors", "tensors_total", "edges", "answers", "content"}) - parts.keys(),
        **parts,
    )


def require_readable(kind: str, size_bytes: int) -> None:
    """Check that a person can read it. Raises UsageError: it is too big."""
    if kind not in TENSOR_KINDS and size_bytes > SHOWN_BYTES_MAX:
        raise UsageError(f"the payload has {size_bytes} bytes; at most {SHOWN_BYTES_MAX} are shown")


def _answered(prompt: pb.PromptResponses, prompts: Sequence[Task]) -> AnsweredPrompt:
    known = prompt.prompt_index < len(prompts)
    return AnsweredPrompt(
        row=prompt.prompt_index,
        prompt=prompts[prompt.prompt_index].prompt if known else None,
        answers=tuple(response.text for response in prompt.responses),
    )


def tensor_row(name: str, values: Array) -> ShownTensor:
    """Name, shape, type, norm and histogram: counts below -edge …, about zero, … above edge."""
    flat = np.ravel(values).astype(np.float64)
    size, bad = np.abs(flat), ~np.isfinite(flat)
    places = np.searchsorted(np.asarray(EDGES), size, side="right")
    counts = [np.bincount(places[side & ~bad], minlength=len(EDGES) + 1)[1:].tolist() for side in (flat < 0, flat > 0)]
    zero = int(((places == 0) & ~bad).sum())
    histogram = Histogram(tuple(counts[0]), zero, tuple(counts[1]), int(bad.sum()))
    return ShownTensor(name, tuple(values.shape), str(values.dtype), f"{np.linalg.norm(flat):.3g}", histogram)
