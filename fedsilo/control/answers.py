"""What a daemon answers to queries, as frozen values: which fields a row has, of which type, and who may see them.

Clients read these from the daemon's JSON. `read` trusts no shape in it: what is missing or of another type becomes an
empty value, and what is missing is named in `absent`, for a share-safe recording leaves fields out. A field stays at
the site unless it is marked as released (console design 9). Pure.

Does not stop: a released field whose content says more than it should. Released is what the site's policy has let out
already, or what the coordinator was told in a message of its own.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

Row = TypeVar("Row", bound="Answer")
Value = TypeVar("Value")
_RELEASED = "released"
Released = Annotated[Value, _RELEASED]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Base class of what is read from JSON.

    Attributes:
        absent: fields that the source does not hold.
    """

    absent: frozenset[str] = frozenset()


def released_names(row: type[Answer]) -> dict[str, bool]:
    """Return each field's name, and whether a share-safe recording may hold it."""
    return {name: _RELEASED in marks for name, (_, marks) in _fields_of(row).items()}


def read(row: type[Row], told: Any) -> Row:
    """Return the value of a JSON object; of anything else, an empty one."""
    found = told if isinstance(told, Mapping) else {}
    known = _fields_of(row)
    values = {name: _value(kind, found.get(name)) for name, (kind, _) in known.items()}
    return row(**values, absent=frozenset(known.keys() - found.keys()))


_Fields: TypeAlias = dict[str, tuple[Any, tuple[str, ...]]]
_KNOWN: dict[type[Answer], _Fields] = {}  # hints are resolved once


def _fields_of(row: type[Answer]) -> _Fields:
    """Return the type and the marks of each field."""
    if row not in _KNOWN:
        _KNOWN[row] = _resolved(row)
    return _KNOWN[row]


def _resolved(row: type[Answer]) -> _Fields:
    hints = typing.get_type_hints(row, include_extras=True)
    del hints["absent"]
    return {
        name: (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
        for name, hint in hints.items()
    }


def _value(kind: Any, value: Any) -> Any:
    """Return the value of a type: `str`, `int`, `float`, `bool`, one of them or None, a tuple of texts, or anything."""
    if kind is Any:
        return value
    if isinstance(kind, types.UnionType):
        (wanted, _) = typing.get_args(kind)
        return _value(wanted, value) if isinstance(value, wanted | int if wanted is float else wanted) else None
    if kind is bool:
        return value is True
    if kind is str:
        return value if isinstance(value, str) else "" if value is None else str(value)
    if kind in (int, float):
        return kind(value) if isinstance(value, int | float) and math.isfinite(value) else kind(0)
    return tuple(_value(str, each) for each in value) if isinstance(value, list) else ()


@dataclass(frozen=True)
class MessageRow(Answer):
    """One decision on a message, or at a coordinator what went to one silo of one kind in one round.

    Attributes:
        seq: number of the audit record; of a count, run/round/kind/silo.
        items: tensors or answers in it.
        outcome: what became of it: sent, acked, indeterminate, how a hold ended, or nothing yet.
        rule: the first of the rules that decided.
        digest_keyed: the digest is keyed with the site's key.
        messages: how many a count is over.
        waiting: of a count, how many wait for the silo.
    """

    seq: Released[Any]
    time: Released[str]
    run: Released[str]
    kind: Released[str]
    round: Released[int]
    step: Released[int]
    items: Released[int | None]
    bytes: Released[float]
    verdict: Released[str]
    outcome: Released[str]
    peer: Released[str]
    rule: str
    reasons: tuple[str, ...]
    rules: tuple[str, ...]
    digest: str
    digest_keyed: bool
    milliseconds: Any
    messages: Released[int]
    waiting: int


@dataclass(frozen=True)
class ReleaseRow(Answer):
    """One release that is or was held.

    Attributes:
        held_since: seconds since 1970, the daemon's clock; as are all moments here.
        needed: approvals.
        answers: each with person, verdict, reason, note and moment.
    """

    id: Released[str]
    kind: Released[str]
    run: Released[str]
    round: Released[int]
    step: Released[int]
    revision: Released[int]
    state: Released[str]
    held_since: Released[float]
    expires_at: Released[float]
    needed: Released[int]
    bytes: float
    digest: str
    policy_digest: str
    given: Any
    answers: Any


@dataclass(frozen=True)
class CertificateRow(Answer):
    """One certificate that a daemon shows, or the authority above it."""

    whose: str
    role: str
    days_left: Any
    not_after: str
    subject: str
    fault: str
    not_before: str
    file: str
    fingerprint: str
    issuer: str
    names: tuple[str, ...]
    pinned: bool | None
    in_use: bool | None


@dataclass(frozen=True)
class SettingRow(Answer):
    """One setting, and where its value comes from."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class LimitRow(Answer):
    """One limit that counts over messages.

    Attributes:
        window: minute, round, match, day, run or life.
        line: where the policy says so.
    """

    limit: str
    kind: str
    used: Any
    max: Any
    unit: str
    window: str
    line: str


@dataclass(frozen=True)
class CapacityRow(Answer):
    """How many bits a hostile trainer could carry out in a round with one kind.

    Attributes:
        planted: the scheme that was tried.
        planted_bits: what it got out; None where none was tried.
    """

    kind: str
    bits: float
    because: str
    planted: str
    planted_bits: float | None


@dataclass(frozen=True)
class SpentRow(Answer):
    """One message of content that was counted against limits."""

    seq: Any
    at: str
    run: str
    round: int
    kind: str
    bytes: float
    outcome: str
