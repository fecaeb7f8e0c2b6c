"""The rows that the coordinator keeps, one class for each table; `coordinator.store` keeps them.

Every database is given the same widths and kinds: SQLite takes any, PostgreSQL what a column says and no more. Text is
sorted by its characters' numbers on both, never by a server's language.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    Boolean,
    ColumnElement,
    Float,
    Index,
    Integer,
    LargeBinary,
    String,
    Table,
    Text,
    and_,
    bindparam,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeEngine

# SQLite numbers rows by itself only for a plain INTEGER key
_RowId = BigInteger().with_variant(Integer, "sqlite")
_Text = Text().with_variant(Text(collation="C"), "postgresql")


def _characters(number: int) -> TypeEngine[str]:
    """Text of at most so many characters."""
    return String(number).with_variant(String(number, collation="C"), "postgresql")


class Base(DeclarativeBase):
    pass


# What each message asks is asked in statements that are made once, past the unit of work (a third of the time).


def table_of(rows: type[Base]) -> Table:
    return cast(Table, rows.__table__)


def where_its(*columns: Any) -> ColumnElement[bool]:
    """That each column has the value that `its` gives under the column's name."""
    return and_(*(column == bindparam(f"its_{column.key}") for column in columns))


def its(**values: Any) -> dict[str, Any]:
    return {f"its_{name}": value for name, value in values.items()}


class Run(Base):
    """state: one of `fedsilo.protocol.round_tables.RUN`."""

    __tablename__ = "runs"
    name: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    ordinal: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(_characters(16))
    reason: Mapped[str] = mapped_column(_characters(64), default="")
    request: Mapped[str] = mapped_column(_Text)  # the submitted fields as JSON
    plan: Mapped[str] = mapped_column(_Text, default="")  # canonical JSON once the roster stands
    submitted_by: Mapped[str] = mapped_column(_characters(255), default="")
    submitted_at: Mapped[str] = mapped_column(_characters(32))
    started_at: Mapped[str] = mapped_column(_characters(32), default="")
    ended_at: Mapped[str] = mapped_column(_characters(32), default="")
    base_digest: Mapped[str] = mapped_column(_characters(64), default="")  # initial adapter
    adapter_digest: Mapped[str] = mapped_column(_characters(64), default="")  # newest committed one


class Round(Base):
    """state: one of `fedsilo.protocol.round_tables.ROUND`."""

    __tablename__ = "rounds"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    state: Mapped[str] = mapped_column(_characters(16))
    base_digest: Mapped[str] = mapped_column(_characters(64))
    adapter_digest: Mapped[str] = mapped_column(_characters(64), default="")
    public_steps: Mapped[str] = mapped_column(_Text, default="{}")  # {step: [prompt index]}
    participants: Mapped[str] = mapped_column(_Text, default="[]")
    opened_at: Mapped[str] = mapped_column(_characters(32))
    closed_at: Mapped[str] = mapped_column(_characters(32), default="")
    seconds: Mapped[float] = mapped_column(Float, default=0.0)

    def seconds_until(self, moment: str) -> float:
        """Since it was opened, by the clocks of both moments (ISO 8601); 0 where the clock went back in between."""
        return max(0.0, (datetime.fromisoformat(moment) - datetime.fromisoformat(self.opened_at)).total_seconds())


class RoundTranscript(Base):
    """state: signing | late (its time has passed) | agreed | over."""

    __tablename__ = "round_transcripts"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    digest: Mapped[str] = mapped_column(_characters(64))
    canonical: Mapped[str] = mapped_column(_Text)
    signature: Mapped[bytes] = mapped_column(LargeBinary)  # the coordinator's
    state: Mapped[str] = mapped_column(_characters(16))


class RoundSignature(Base):
    """A silo's signature under a round's transcript; `delivered`: round.agreed is queued for it."""

    __tablename__ = "round_signatures"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    signature: Mapped[bytes] = mapped_column(LargeBinary)
    public_key: Mapped[bytes] = mapped_column(LargeBinary)
    certificate: Mapped[str] = mapped_column(_Text)
    delivered: Mapped[bool] = mapped_column(Boolean)


class EndedRound(Base):
    """What the coordinator signed of a round's end: once, so that it never signs another."""

    __tablename__ = "ended_rounds"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    fields: Mapped[str] = mapped_column(_Text)  # RoundEnd as JSON
    signature: Mapped[bytes] = mapped_column(LargeBinary)


class PendingRecord(Base):
    """A record that belongs to the transaction it was stored with, until it is in the audit log."""

    __tablename__ = "pending_records"
    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    event: Mapped[str] = mapped_column(_characters(64))
    fields: Mapped[str] = mapped_column(_Text)


class LogPlace(Base):
    """How far the audit log had come: `size` with the newest message, `root` of its first `rooted` records."""

    __tablename__ = "log_places"
    origin: Mapped[str] = mapped_column(_characters(255), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    rooted: Mapped[int] = mapped_column(BigInteger)
    root: Mapped[str] = mapped_column(_characters(64))


class Member(Base):
    __tablename__ = "members"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    state: Mapped[str] = mapped_column(_characters(16))  # joined | refused
    hello: Mapped[str] = mapped_column(_Text)  # what it said, as JSON
    fingerprint: Mapped[str] = mapped_column(_characters(64))
    refusal: Mapped[str] = mapped_column(_Text, default="")  # {code, field, expected, got} as JSON
    since: Mapped[str] = mapped_column(_characters(32))


class SequenceCounter(Base):
    """Highest sequence taken from a silo in a run ("in"), or reserved for our replies to it ("out", run "")."""

    __tablename__ = "sequences"
    silo: Mapped[str] = mapped_column(_characters(255), primary_key=True)
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    direction: Mapped[str] = mapped_column(_characters(3), primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)


class Book(Base):
    """What the rules count per silo (`policies.history.HistoryBook` as JSON); budgets survive a restart (T11)."""

    __tablename__ = "books"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    counts: Mapped[str] = mapped_column(_Text)


class Upload(Base):
    """One accepted contribution; the key is what makes a retry recognisable (threat T29)."""

    __tablename__ = "uploads"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    step: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    kind: Mapped[str] = mapped_column(_characters(32), primary_key=True)
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    digest: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    payload_bytes: Mapped[int] = mapped_column(BigInteger)
    norm: Mapped[float] = mapped_column(Float, default=0.0)  # L2 of a delta; 0 for other kinds
    received_at: Mapped[str] = mapped_column(_characters(32))
    __table_args__ = (Index("uploads_of_silo", "silo", "digest"),)  # whether an upload was taken before


class OutboxItem(Base):
    """At least once: an item stays until a poll acknowledges a sequence under which it was delivered."""

    __tablename__ = "outbox"
    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    silo: Mapped[str] = mapped_column(_characters(64), index=True)
    run: Mapped[str] = mapped_column(_characters(64))
    round: Mapped[int] = mapped_column(BigInteger)
    step: Mapped[int] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(_characters(32))
    payload: Mapped[bytes] = mapped_column(LargeBinary)
    delivered_sequence: Mapped[int] = mapped_column(BigInteger, default=0)  # 0: never given; below: `outbox.LOST`


class CarriedSilo(Base):
    """A silo without a line: its messages come in files that people carry."""

    __tablename__ = "carried_silos"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    since: Mapped[str] = mapped_column(_characters(32))


class CarriedAnswer(Base):
    """What was answered to a message out of a file, as signed; it stays until the silo says that it took it in."""

    __tablename__ = "carried_answers"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    asked_run: Mapped[str] = mapped_column(_characters(64))
    asked_sequence: Mapped[int] = mapped_column(BigInteger)
    envelope: Mapped[bytes] = mapped_column(LargeBinary)
    payload: Mapped[bytes] = mapped_column(LargeBinary)


class Traffic(Base):
    """Complete messages per silo and kind; direction as the coordinator sees it: in | out."""

    __tablename__ = "traffic"
    silo: Mapped[str] = mapped_column(_characters(255), primary_key=True)
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    round: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    kind: Mapped[str] = mapped_column(_characters(32), primary_key=True)
    direction: Mapped[str] = mapped_column(_characters(3), primary_key=True)
    messages: Mapped[int] = mapped_column(BigInteger)
    payload_bytes: Mapped[int] = mapped_column(BigInteger)


class ShownCheckpoint(Base):
    """A checkpoint that a silo showed, with the proof from the one before: the chain that other silos follow (T38)."""

    __tablename__ = "shown_checkpoints"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    previous_size: Mapped[int] = mapped_column(BigInteger)
    note: Mapped[str] = mapped_column(_Text)
    consistency: Mapped[bytes] = mapped_column(LargeBinary)  # 32 bytes for each hash


class Countersigned(Base):
    """The newest checkpoint of a silo that another silo countersigned, with that cosignature."""

    __tablename__ = "countersigned"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)  # whose log
    witness: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    note: Mapped[str] = mapped_column(_Text)


class ShownCertificate(Base):
    """The newest certificate of each silo, for silos that have not seen its key."""

    __tablename__ = "shown_certificates"
    silo: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    pem: Mapped[str] = mapped_column(_Text)


# Names of figures.
ISOLATION = "isolation"  # behind which walls a silo's trainer is
SILO_ERROR = "silo_error"  # the code of a control.error about a run, from the closed list of what may cross
PLAN_DECLINED = "plan_declined"  # a site said no to the plan; it need not say why


class Figure(Base):
    """One line of the run record: what a silo measured, or what the method noted."""

    __tablename__ = "figures"
    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    run: Mapped[str] = mapped_column(_characters(64), index=True)
    round: Mapped[int] = mapped_column(BigInteger)
    step: Mapped[int] = mapped_column(BigInteger)
    silo: Mapped[str] = mapped_column(_characters(64))
    name: Mapped[str] = mapped_column(_characters(64))
    fields: Mapped[str] = mapped_column(_Text)


class Transition(Base):
    """An event of `fedsilo.protocol.rounds` that was accepted, as JSON."""

    __tablename__ = "transitions"
    run: Mapped[str] = mapped_column(_characters(64), primary_key=True)
    ordinal: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    event: Mapped[str] = mapped_column(_Text)


class Event(Base):
    """What happened, for people: the console's event list."""

    __tablename__ = "events"
    id: Mapped[int] = mapped_column(_RowId, primary_key=True, autoincrement=True)
    time: Mapped[str] = mapped_column(_characters(32))
    name: Mapped[str] = mapped_column(_characters(64))
    fields: Mapped[str] = mapped_column(_Text)
