"""Reading what a held release would send, before it is sent: a signed command that is recorded, then a ticket.

Who may is told by the action `payload.read`, as for what has left (`archive.py`). The record with the person is written
before the ticket is handed out, and says nothing of what was read.
Does not stop: a person from approving what he did not read; and whoever is root from reading the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from certs.commands import VerifiedCommand
from fedsilo.edge.audit_log import AuditLog
from fedsilo.edge.control_desk import ControlDesk
from fedsilo.edge.task_files import Task
from fedsilo.treaty.errors import ConflictError
from silo.guard.archive import Tickets
from silo.guard.ledger import Ledger
from silo.guard.payload_view import payload_view

COMMAND = QUERY = "approvals.payload"


class HeldPayloads:
    """Args:
    ledger: has the held bytes.
    audit: our log.
    prompts: rows of this site's own copy of the public set.
    """

    def __init__(self, ledger: Ledger, audit: AuditLog, prompts: Callable[[], Sequence[Task]]) -> None:
        self._ledger = ledger
        self._audit = audit
        self._prompts = prompts
        self._tickets = Tickets()

    def register(self, desk: ControlDesk, on_loop: Callable[[Callable[[], Any]], Any]) -> None:
        desk.register_command(COMMAND, "payload.read", lambda command: on_loop(lambda: self.ask(command)))
        desk.register_query(QUERY, self.fetch)

    def fetch(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What a ticket stands for, once. Raises NotAllowedError: no such ticket."""
        return self._tickets.take(arguments)

    def ask(self, command: VerifiedCommand) -> dict[str, Any]:
        """A ticket for the bytes of a held release.

        Args:
            command: arguments {release, digest}: the bytes that the person was shown the facts of.

        Raises:
            NotFoundError: there is no such release. ConflictError: it is not held any more, or it holds other bytes.
            VerificationError: the file is not what was held (`PAYLOAD_CHANGED`). UsageError: too big to be read.
        """
        release = self._ledger.release(str(command.arguments.get("release", "")))
        if release.state != "held":
            raise ConflictError(
                f"release {release.id} is {release.state}, no longer held",
                hint="what left and was archived: fedsilo audit show RECORD --payload",
                code="NOT_HELD",
            )
        digest = str(command.arguments.get("digest", "")).removeprefix("sha256:")
        if digest != release.digest:
            raise ConflictError(f"digest of {release.id} is not what was shown", hint="look again", code="STALE_VIEW")
        payload = self._ledger.payloads.read(release.digest)
        shown = {
            "release": release.id, "kind": release.kind, "run": release.run, "round": release.round,
            "step": release.step, "bytes": len(payload), "sha256": release.digest,
            **payload_view(payload, release.kind, self._prompts()),
        }  # fmt: skip
        self._audit.append(
            "payload.read", kind=release.kind, run=release.run, round=release.round, step=release.step,
            detail={
                "person": command.person, "certificate": command.certificate_fingerprint, "release": release.id,
            },
        )  # fmt: skip
        return {"ticket": self._tickets.hand_out(shown), "audit_size": self._audit.size}
