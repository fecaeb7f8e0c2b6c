"""The queries of the coordinator's control server beside its runs: its log, what it took in and sent, certificates,
settings and its newest events. Names and shapes are those of a silo's, where a silo has the same thing.

For whoever may open the control socket; why a whole record may be read there is said in
`fedsilo.control.audit_queries`. A coordinator holds no private text, but the names of silos and how they stand are in
all of this.

Nobody judges what a coordinator sends: each silo does, at its own ingress. So the log has no decision on it, and
`outbox` counts rows of the database: one for each run, round, kind and receiver. A payload is told by its size and
digest only. With 180,000 rows (three runs of 200 rounds with 50 silos) a page took 0.3 s on two busy cores.

Does not show: that a silo took something in, beyond its acknowledgement; its own inbox does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, func, literal, select, tuple_
from sqlalchemy.orm import Session

from certs.encoding import describe_certificate
from certs.roles import Roles
from coordinator import store as db
from coordinator.config import CoordinatorConfig
from coordinator.witnessing import Relay
from fedsilo.audit.index import LogIndex
from fedsilo.audit.log import AuditLog
from fedsilo.control import answers
from fedsilo.control.audit_queries import AuditView, MessageView
from fedsilo.control.server import ControlServer, QueryArguments, QueryHandler
from fedsilo.control.site_files import certificate_file, certificate_row, settings_of
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import NotFoundError, UsageError
from policies.model import Policy

LINES_DEFAULT, LINES_MAX = 200, 1_000
LINE_CHARACTERS_MAX = 500
# Events that say of something that it failed; every other one is INFO.
_LEVELS = {
    "halt": "CRITICAL", "refused": "WARNING", "connection.refused": "WARNING", "silo.refused": "WARNING",
    "silo.error": "WARNING", "round.refused": "WARNING", "events.missed": "WARNING",
}  # fmt: skip


class Panel:
    """Answers queries about the audit log, witnesses and log lines.

    Args:
        store: its database.
        control_server: where it is asked; its events are the lines of `logs`.
        relay: knows which silos contradict the log.
        charter: by which messages are judged.
        silos: SPIFFE ids of the listed ones, whose cosignatures count.
    """

    def __init__(
        self,
        audit: AuditLog,
        store: db.Store,
        control_server: ControlServer,
        relay: Relay,
        *,
        charter: Policy,
        silos: tuple[str, ...],
        now_seconds: Callable[[], float],
    ) -> None:
        self._store = store
        self._control_server = control_server
        self._now_seconds = now_seconds
        index = LogIndex(audit.directory, lambda: audit.size)
        self._messages = MessageView(index, lambda: charter, program="coordinator")
        self._sent = SentView(store.transaction)
        self._records = AuditView(
            audit,
            index,
            witnesses=lambda: silos,
            contradicting=lambda: relay.contradicting,
            now_seconds=now_seconds,
            named=True,
        )

    def queries(self) -> dict[str, QueryHandler]:
        """Return each query by its name. Each runs in the asking thread and changes nothing."""
        return {
            "outbox": self._sent.outbox,
            "inbox": self._messages.inbox,
            "audit": self._records.page,
            "audit.status": self._records.status,
            "audit.verify": self._records.verify,
            "logs": self.logs,
        }

    @property
    def log_broken(self) -> answers.Broken | None:
        """The break that the newest verification of the log found; None where it found none."""
        return self._records.broken

    def shown_certificates(self) -> list[answers.CertificateRow]:
        """The certificate that each silo showed last, with its checkpoint."""
        with self._store.transaction() as session:
            shown = {row.silo: row.pem for row in session.scalars(select(db.ShownCertificate))}
        now = self._now_seconds()
        return [certificate_row(f"the silo {silo}", pem.encode(), now) for silo, pem in sorted(shown.items())]

    def logs(self, arguments: Mapping[str, Any]) -> answers.LogLines:
        """The newest events since the start, oldest first, as lines like those of a guard's log.

        A coordinator keeps no log file: what it writes goes to its standard error, to wherever that is led.

        Args:
            arguments: {lines} (200, at most 1000), {source}: "coordinator", or "guard" where one question is put to
                daemons of both kinds.

        Raises:
            UsageError: an argument that is not one of these.
            NotFoundError: the log of a trainer.
        """
        query = QueryArguments(arguments, "lines", "source")
        wanted = query.number("lines", default=LINES_DEFAULT, least=1, most=LINES_MAX) or LINES_DEFAULT
        if query.text("source", among=("coordinator", "guard", "trainer")) == "trainer":
            raise NotFoundError("a coordinator has no trainer", hint="silo logs --trainer, at a silo")
        events = self._control_server.events_since(0, 0.0)[-wanted:]
        return answers.LogLines(lines=tuple(map(_line, events)), left_out=0)


class Files:
    """Answers queries about the coordinator's own files.

    Args:
        config: as it was read at the start.
        certificate_pem: its own, in use.
        roles: its people.
        panel: knows the certificates of others.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        certificate_pem: bytes,
        roles: Roles,
        panel: Panel,
        now_seconds: Callable[[], float],
    ) -> None:
        self._config = config
        self._running = describe_certificate(certificate_pem)["fingerprint"]
        self._roles = roles
        self._panel = panel
        self._now_seconds = now_seconds

    def queries(self) -> dict[str, QueryHandler]:
        return {"certificates": self.certificates, "settings": self.settings}

    def certificates(self, arguments: Mapping[str, Any]) -> list[answers.CertificateRow]:
        """Its own certificates as the files are now, the authorities above them, and what each silo showed last; never
        a key. What a silo showed lies in no file.

        Raises:
            UsageError: an argument; it takes none.
        """
        QueryArguments(arguments)
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

    def settings(self, arguments: Mapping[str, Any]) -> list[answers.SettingRow]:
        """Every key of coordinator.yaml as this process runs with it, as `settings_of` makes them.

        Raises:
            UsageError: an argument; it takes none.
        """
        QueryArguments(arguments)
        return settings_of(self._config, self._config.source)


def _line(event: Any) -> str:
    # ASCII JSON escapes whatever could act on a terminal: also DEL, C1 controls and what turns the direction (T37)
    fields = json.dumps(json.loads(event.fields_json), separators=(",", ":"))
    return f"{event.time} {_LEVELS.get(event.name, 'INFO')} {event.name} {fields}"[:LINE_CHARACTERS_MAX]


# ---- what was sent -----------------------------------------------------------------------------------------------

ROWS_DEFAULT, ROWS_MAX = 100, 500
NAME_CHARACTERS_MAX = 512  # run, round, kind and the receiver's name, which for a stranger is a SPIFFE id
WAITING_SHOWN = 20
_CONTROL, _ADAPTER = "control.", "global.adapter"  # kinds of replies: to any message, and to a fetch
_OUTSIDE = -1  # in place of a run's ordinal, where a message belongs to none

Reading = Callable[[], AbstractContextManager[Session]]
_Place: TypeAlias = tuple[int, int, str, str, str]


class SentView:
    """Answers the query `outbox`.

    Args:
        reading: opens a transaction; nothing is written in it.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def outbox(self, arguments: Mapping[str, Any]) -> answers.MessagePage | answers.SentInFull:
        """Return what was sent, newest round first; in a round by kind and receiver.

        Args:
            arguments: {seq} for one row with what waits of it; else {before}, {limit} (100, at most 500), {kind},
                {run}, {silo}, {waiting: true} for what no silo has acknowledged, and {control: true} to include
                acknowledgements, refusals and the like. `seq`, which names a row for good, and `before` are texts
                such as run-1/2/round.open/hospital_a.

        `messages` and `bytes` of a row were sent, `waiting` were not acknowledged yet. `outcome` is "acked" where the
        silo has acknowledged all, "sent" where some may be on its way, or where it was a reply, which nobody
        acknowledges, and empty where nothing was sent yet. `total` counts all rows, whatever was asked for.

        Raises:
            UsageError: an argument that is not one of these.
            NotFoundError: no such row.
        """
        query = QueryArguments(arguments, "seq", "before", "limit", "control", "kind", "run", "silo", "waiting")
        name = query.text("seq", most=NAME_CHARACTERS_MAX)
        if name:
            if sum(value is not None for value in arguments.values()) > 1:
                raise UsageError("seq stands alone: it names one row")
            return self._one(name)
        before = query.text("before", most=NAME_CHARACTERS_MAX)
        limit = query.limit(default=ROWS_DEFAULT, most=ROWS_MAX)
        control, only_waiting = query.flag("control"), query.flag("waiting")
        wanted = {name: query.text(name) for name in ("run", "kind", "silo")}
        with self._reading() as session:
            waits = _waits(session, control=control)
            unsent = [_Row(key, _ordinal(session, key.run)) for key in waits if _sent(session, key) is None]
            total, messages = _totals(session, control=control)
            behind = _place_named(session, before) if before else None
            if only_waiting:
                sent = [row for key in waits if (row := _sent(session, key)) is not None]
            else:
                sent = _page(session, wanted, behind, limit + 1, control=control)
        rows = [row for row in (*sent, *unsent) if row.passes(wanted) and (behind is None or row.place > behind)]
        page = sorted(rows, key=lambda row: row.place)[: limit + 1]
        shown = tuple(row.answer(waits.get(row.key, 0)) for row in page[:limit])
        return answers.filled(
            answers.MessagePage,
            messages=shown,
            total=total + len(unsent),
            sent=messages,
            waiting=sum(waits.values()),
            next=shown[-1].seq if len(page) > limit else None,
            absent=frozenset({"held", "denied"}),
        )

    def _one(self, name: str) -> answers.SentInFull:
        with self._reading() as session:
            key = _named(name)
            items = select(db.OutboxItem).where(*_is(db.OutboxItem, key)).order_by(db.OutboxItem.id)
            count = session.scalar(select(func.count()).select_from(db.OutboxItem).where(*_is(db.OutboxItem, key))) or 0
            row = _sent(session, key) or _Row(key, _ordinal(session, key.run))
            if not row.messages and not count:
                raise NotFoundError("nothing of that was sent, and nothing waits", hint="coordinator outbox list")
            waiting = tuple(
                answers.WaitingItem(
                    step=item.step,
                    bytes=len(item.payload),
                    sha256=sha256_hex(item.payload),
                    delivered=item.delivered_sequence != 0,
                )
                for item in session.scalars(items.limit(WAITING_SHOWN))
            )
        return answers.SentInFull(message=row.answer(count), waiting=waiting)


# ---- rows ------------------------------------------------------------------------------------------


class _Key(NamedTuple):
    run: str
    round: int
    kind: str
    silo: str

    def __str__(self) -> str:
        return f"{self.run}/{self.round}/{self.kind}/{self.silo}"


@dataclass(frozen=True)
class _Row:
    key: _Key
    ordinal: int  # of its run
    messages: int = 0
    size_bytes: int = 0

    @property
    def place(self) -> _Place:
        """A later run and round come first; in a round, kinds and names in their order."""
        return (-self.ordinal, -self.key.round, self.key.run, self.key.kind, self.key.silo)

    def passes(self, wanted: Mapping[str, str]) -> bool:
        return all(value in ("", getattr(self.key, name)) for name, value in wanted.items())

    def answer(self, waiting: int) -> answers.SentRow:
        key = self.key
        is_reply = key.kind == _ADAPTER or key.kind.startswith(_CONTROL)
        outcome = "" if not self.messages else "sent" if waiting or is_reply else "acked"
        sent = {"messages": self.messages, "bytes": self.size_bytes, "waiting": waiting, "outcome": outcome}
        return answers.read(answers.SentRow, {"seq": str(key), "peer": key.silo, **key._asdict(), **sent})


_OF_CONTROL = db.Traffic.kind.like(f"{_CONTROL}%")
_ORDINAL = func.coalesce(db.Run.ordinal, _OUTSIDE)
_ROWS = (
    select(
        db.Traffic.run, db.Traffic.round, db.Traffic.kind, db.Traffic.silo, _ORDINAL, db.Traffic.messages,
        db.Traffic.payload_bytes,
    ).select_from(db.Traffic).outerjoin(db.Run, db.Run.name == db.Traffic.run).where(db.Traffic.direction == "out")
)  # fmt: skip


def _row(columns: Any) -> _Row:
    return _Row(_Key(*columns[:4]), *columns[4:])


def _is(rows: type[db.OutboxItem | db.Traffic], key: _Key) -> list[ColumnElement[bool]]:
    return [getattr(rows, name) == value for name, value in key._asdict().items()]


def _sent(session: Session, key: _Key) -> _Row | None:
    row = session.execute(_ROWS.where(*_is(db.Traffic, key))).first()
    return None if row is None else _row(row)


def _ordinal(session: Session, run: str) -> int:
    row = session.get(db.Run, run) if run else None
    return _OUTSIDE if row is None else row.ordinal


def _totals(session: Session, *, control: bool) -> tuple[int, int]:
    """Rows and messages of all that was sent."""
    counts = select(func.count(), func.sum(db.Traffic.messages)).where(db.Traffic.direction == "out")
    rows, messages = session.execute(counts if control else counts.where(~_OF_CONTROL)).one()
    return rows, int(messages or 0)  # PostgreSQL's sum of whole numbers is a decimal one


def _waits(session: Session, *, control: bool) -> dict[_Key, int]:
    """Return how many items wait, of each row. As many as silos have not acknowledged, so they fit into memory."""
    columns = (db.OutboxItem.run, db.OutboxItem.round, db.OutboxItem.kind, db.OutboxItem.silo)
    rows = session.execute(select(*columns, func.count()).group_by(*columns))
    waits = {_Key(*row[:4]): int(row[4]) for row in rows}
    return {key: count for key, count in waits.items() if control or not key.kind.startswith(_CONTROL)}


def _page(
    session: Session, wanted: Mapping[str, str], behind: _Place | None, limit: int, *, control: bool
) -> list[_Row]:
    """The first rows that were sent, in the order of `_Row.place`."""
    row = db.Traffic
    query = _ROWS if control else _ROWS.where(~_OF_CONTROL)
    query = query.where(*(getattr(row, name) == value for name, value in wanted.items() if value))
    if behind is not None:
        query = query.where(tuple_(-_ORDINAL, -row.round, row.run, row.kind, row.silo) > tuple_(*map(literal, behind)))
    query = query.order_by(_ORDINAL.desc(), row.round.desc(), row.run, row.kind, row.silo).limit(limit)
    return [_row(found) for found in session.execute(query)]


def _named(name: str) -> _Key:
    """Parse the name of a row. Raises UsageError: it is none."""
    run, _, rest = name.partition("/")
    number, _, rest = rest.partition("/")
    kind, slash, silo = rest.partition("/")
    if not slash or not (number.isascii() and number.isdecimal() and len(number) < 16):
        raise UsageError("a row is named by run, round, kind and receiver: run-1/2/round.open/hospital_a")
    return _Key(run, int(number), kind, silo)


def _place_named(session: Session, name: str) -> _Place:
    """The place of a row by its name, whether or not there is such a row. Raises UsageError."""
    key = _named(name)
    return _Row(key, _ordinal(session, key.run)).place
