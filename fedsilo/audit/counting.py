"""What counts of a log without end are kept in: so many names, so many rows, so many characters, and the rest counted.

A log may be written by somebody who wants its reader to fail. Every value of a record's `detail`, `facts` or `link` may
be of any JSON type, a time may lie behind the year 9999, and there may be as many names as there are records.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

from fedsilo.audit.record import COUNT_MAX, TEXT_CHARACTERS_MAX

OTHERS: Final = "(others)"  # counted together, once there are too many names to list
REASONS_MAX = 8
DETAIL_CHARACTERS_MAX = 2000
Name = TypeVar("Name", bound=Hashable)


class Names(Generic[Name]):
    """The first so many names as they are, each further one as `others`: what is counted by them stays complete."""

    def __init__(self, most: int, others: Name) -> None:
        self._most, self._others = most, others
        self._known: set[Name] = set()

    def __call__(self, name: Name) -> Name:
        if name not in self._known:
            if len(self._known) >= self._most:
                return self._others
            self._known.add(name)
        return name


class FirstOf:
    """The first so many rows, and how many there were."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows: list[dict[str, Any]] = []
        self.total = 0

    def add(self, row: dict[str, Any]) -> None:
        self.total += 1
        if len(self.rows) < self._most:
            self.rows.append(row)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT_MAX


def count_of(value: Any) -> int:
    """A count; 0 for whatever is none."""
    return value if is_count(value) else 0


def mapping_of(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def text_of(value: Any) -> str:
    """A text as it is; of anything else the beginning of its JSON; empty where there is nothing."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value)[:TEXT_CHARACTERS_MAX]


def reasons_of(record: Mapping[str, Any]) -> list[str]:
    """A record's reasons; the first ones, and how many more there are."""
    reasons = list(record.get("reasons", ()))
    more = len(reasons) - REASONS_MAX
    return [*reasons[:REASONS_MAX], *([f"and {more} more"] if more > 0 else [])]


def brief(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a list of events tells of one: number, time, event, kind, reasons, and its detail unless that is long."""
    detail, room = {}, DETAIL_CHARACTERS_MAX
    for name, value in record.get("detail", {}).items():
        room -= len(name) + len(json.dumps(value))
        if room < 0:
            detail["(more)"] = "too long to be shown: see the record"
            break
        detail[name] = value
    return {
        "seq": record["seq"], "t": record["t"], "event": record["event"], "kind": record.get("kind", ""),
        "reasons": reasons_of(record), "detail": detail,
    }  # fmt: skip


def moment(milliseconds: float) -> str:
    """A time since 1970 as people read it; one that no calendar has, as its number of milliseconds."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{milliseconds} ms after 1970"
