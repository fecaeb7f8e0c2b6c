"""The queries of the coordinator's desk beside its runs: its log, what it took in and sent, certificates, settings and
its newest events. The same names and shapes as at a silo's desk, where a silo has the same thing.

For whoever may open the control socket; why a whole record may be read there stands in
`fedsilo.control.audit_queries`. A coordinator holds no private text, but the names of silos and how they stand are in
all of this.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select

from certs.describe import describe_certificate
from certs.roles import Roles
from coordinator import store as db
from coordinator.config import CoordinatorConfig
from coordinator.sent_view import SentView
from coordinator.witnessing import Relay
from fedsilo.audit.log import AuditLog
from fedsilo.audit.message_index import MessageIndex
from fedsilo.audit.reader import LogPages
from fedsilo.control.audit_queries import AuditView, MessageView
from fedsilo.control.desk import ControlDesk, QueryHandler
from fedsilo.control.query_arguments import Asked
from fedsilo.files.site_files import certificate_file, certificate_row, settings_of
from fedsilo.protocol.errors import NotFoundError
from policies.load import Policy

LINES_DEFAULT, LINES_MAX = 200, 1_000
LINE_CHARACTERS_MAX = 500
# Events that say of something that it failed; every other one is INFO.
_LEVELS = {
    "halt": "CRITICAL", "refused": "WARNING", "connection.refused": "WARNING", "silo.refused": "WARNING",
    "silo.error": "WARNING", "round.refused": "WARNING", "events.missed": "WARNING",
}  # fmt: skip


class Panel:
    """Args:
    audit: the coordinator's log.
    store: its database.
    desk: where it is asked; its events are the lines of `logs`.
    relay: knows which silos contradict the log.
    charter: by which messages are judged.
    silos: SPIFFE ids of the listed ones, whose cosignatures count.
    now_seconds: UTC.
    """

    def __init__(
        self,
        audit: AuditLog,
        store: db.Store,
        desk: ControlDesk,
        relay: Relay,
        *,
        charter: Policy,
        silos: tuple[str, ...],
        now_seconds: Callable[[], float],
    ) -> None:
        self._store = store
        self._desk = desk
        self._now_seconds = now_seconds
        pages = LogPages(audit.directory)
        index = MessageIndex(pages, lambda: audit.size)
        self._messages = MessageView(index, pages, lambda: charter, program="coordinator")
        self._sent = SentView(store.transaction)
        self._records = AuditView(
            audit, pages, witnesses=lambda: silos, contradicting=lambda: relay.contradicting, now_seconds=now_seconds
        )

    def queries(self) -> dict[str, QueryHandler]:
        """What may be asked, by name. Each runs in the asking thread and changes nothing."""
        return {
            "outbox": self._sent.outbox,
            "inbox": self._messages.inbox,
            "audit": self._records.page,
            "audit.status": self._records.status,
            "audit.verify": self._records.verify,
            "logs": self.logs,
        }

    @property
    def log_broken(self) -> dict[str, Any] | None:
        """{"seq", "why"} of the break that the newest verification of the log found; None where it found none."""
        return self._records.broken

    def shown_certificates(self) -> list[dict[str, Any]]:
        """The certificate that each silo showed last, with its checkpoint."""
        with self._store.transaction() as session:
            shown = {row.silo: row.pem for row in session.scalars(select(db.ShownCertificate))}
        now = self._now_seconds()
        return [certificate_row(f"the silo {silo}", pem.encode(), now) for silo, pem in sorted(shown.items())]

    def logs(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """{"lines", "left_out"}: the newest events since the start, oldest first, as lines like those of a guard's log.

        A coordinator keeps no log file: what it writes goes to its standard error, to wherever that is led.

        Args:
            arguments: {lines} (200, at most 1000), {source}: "coordinator", or "guard" where one question is put to
                daemons of both kinds.

        Raises:
            UsageError: an argument that is not one of these.
            NotFoundError: the log of a trainer.
        """
        asked = Asked(arguments, "lines", "source")
        wanted = asked.number("lines", default=LINES_DEFAULT, least=1, most=LINES_MAX) or LINES_DEFAULT
        if asked.text("source", among=("coordinator", "guard", "trainer")) == "trainer":
            raise NotFoundError("a coordinator has no trainer", hint="silo logs --trainer, at a silo")
        lines = [_line(event) for event in self._desk.events_since(0, 0.0)[-wanted:]]
        return {"lines": lines, "left_out": 0}


class Files:
    """What stands in the coordinator's own files.

    Args:
        config: as it was read at the start.
        certificate_pem: its own, in use.
        roles: its people.
        panel: knows the certificates of others.
        now_seconds: UTC.
    """

    def __init__(
        self, config: CoordinatorConfig, certificate_pem: bytes, roles: Roles, panel: Panel,
        now_seconds: Callable[[], float],
    ) -> None:  # fmt: skip
        self._config = config
        self._running = describe_certificate(certificate_pem)["fingerprint"]
        self._roles = roles
        self._panel = panel
        self._now_seconds = now_seconds

    def queries(self) -> dict[str, QueryHandler]:
        return {"certificates": self.certificates, "settings": self.settings}

    def certificates(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Its own certificates as the files are now, the authorities above them, and what each silo showed last; never
        a key. Rows as `certificate_file` makes them; what a silo showed lies in no file.

        Raises:
            UsageError: an argument; it takes none.
        """
        Asked(arguments)
        files, now = self._config.identity, self._now_seconds()
        named: list[tuple[str, Path, str]] = [
            ("this coordinator", files.certificate, self._running),
            ("the federation CA", files.federation_ca, ""),
            ("the site CA", files.site_ca, ""),
        ]
        named += [
            (f"the operator {person}", path, "")
            for person in sorted(self._roles.people)
            if (path := files.certificate.parent / f"{person}.crt").is_file()
        ]
        own = [certificate_file(whose, file, now, running) for whose, file, running in named]
        return own + self._panel.shown_certificates()

    def settings(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every key of coordinator.yaml as this process runs with it, as `settings_of` makes them.

        Raises:
            UsageError: an argument; it takes none.
        """
        Asked(arguments)
        return settings_of(self._config, self._config.source)


def _line(event: Any) -> str:
    # ASCII JSON escapes whatever could act on a terminal: also DEL, C1 controls and what turns the direction (T37)
    fields = json.dumps(json.loads(event.fields_json), separators=(",", ":"))
    return f"{event.time} {_LEVELS.get(event.name, 'INFO')} {event.name} {fields}"[:LINE_CHARACTERS_MAX]
