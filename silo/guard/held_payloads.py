"""Reading what a held release would send, before it is sent: a signed command that is recorded, then a ticket.

Who may is told by the action `payload.read`, as for what has left (`archive.py`). The record with the person is written
before the ticket is handed out, and says nothing of what was read. The loop only checks and records: what is shown is
made in the thread that asks, since a tensor of many values takes seconds. A ticket holds no content, and is good for
nothing when the hold has ended.
Does not stop: a person from approving what he did not read; and whoever is root from reading the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from certs.commands import VerifiedCommand
from fedsilo.audit.log import AuditLog
from fedsilo.control.desk import ControlDesk
from fedsilo.files.task_files import Task
from fedsilo.protocol.errors import ConflictError
from silo.guard.archive import Tickets
from silo.guard.ledger import Ledger, Release
from silo.guard.payload_view import payload_view, require_readable

COMMAND = QUERY = "approvals.payload"


class HeldPayloads:
    """Args:
    ledger: has the held bytes.
    audit: our log.
    prompts: rows of this site's own copy of the public set.
    record: appends to the log; the gate's, so that a log that takes nothing halts it. By default the log's own.
    """

    def __init__(
        self,
        ledger: Ledger,
        audit: AuditLog,
        prompts: Callable[[], Sequence[Task]],
        *,
        record: Callable[..., int] | None = None,
    ) -> None:
        self._ledger = ledger
        self._audit = audit
        self._prompts = prompts
        self._record = record or audit.append
        self._tickets = Tickets()

    def register(self, desk: ControlDesk, on_loop: Callable[[Callable[[], Any]], Any]) -> None:
        desk.register_command(COMMAND, "payload.read", lambda command: self.ask(command, on_loop))
        desk.register_query(QUERY, self.fetch)

    def fetch(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What a ticket stands for, once.

        Raises:
            NotAllowedError: no such ticket. ConflictError: the hold has ended meanwhile.
        """
        return self._tickets.take(arguments)

    def ask(
        self, command: VerifiedCommand, on_loop: Callable[[Callable[[], Any]], Any] = lambda work: work()
    ) -> dict[str, Any]:
        """A ticket for the bytes of a held release.

        Args:
            command: arguments {release, digest}: the bytes that the person was shown the facts of.
            on_loop: runs work on the loop's thread and waits for it.

        Raises:
            NotFoundError: there is no such release. ConflictError: it is not held any more, or it holds other bytes.
            VerificationError: the file is not what was held (`PAYLOAD_CHANGED`). UsageError: too big to be read.
        """
        release: Release = on_loop(lambda: self._shown(command))
        require_readable(release.kind, release.payload_bytes)
        self._ledger.payloads.read(release.digest)
        number: int = on_loop(lambda: self._recorded(command))
        ticket = self._tickets.hand_out(lambda: self._content(release.id))
        return {"ticket": ticket, "record": number, "audit_size": self._audit.size}

    def _held(self, release_id: str) -> Release:
        """Raises NotFoundError, ConflictError."""
        release = self._ledger.release(release_id)
        if release.state != "held":
            raise ConflictError(
                f"release {release.id} is {release.state}, no longer held",
                hint="what left and was archived: fedsilo audit show RECORD --payload",
                code="NOT_HELD",
            )
        return release

    def _shown(self, command: VerifiedCommand) -> Release:
        """The release, held, if it still is what the person was shown."""
        release = self._held(str(command.arguments.get("release", "")))
        digest = str(command.arguments.get("digest", "")).removeprefix("sha256:")
        if digest != release.digest:
            raise ConflictError(f"digest of {release.id} is not what was shown", hint="look again", code="STALE_VIEW")
        return release

    def _content(self, release_id: str) -> dict[str, Any]:
        release = self._held(release_id)
        payload = self._ledger.payloads.read(release.digest)
        return {
            "release": release.id, "kind": release.kind, "run": release.run, "round": release.round,
            "step": release.step, "bytes": len(payload), "sha256": release.digest,
            **payload_view(payload, release.kind, self._prompts()),
        }  # fmt: skip

    def _recorded(self, command: VerifiedCommand) -> int:
        """Once more only what is held: it may have ended while its bytes were read."""
        release = self._shown(command)
        return self._record(
            "payload.read", kind=release.kind, run=release.run, round=release.round, step=release.step,
            detail={
                "person": command.person, "certificate": command.certificate_fingerprint, "release": release.id,
            },
        )  # fmt: skip
