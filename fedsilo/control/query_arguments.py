"""What somebody who may open the control socket asks with: checked before anything is done with it.

An argument that is not known, not of its type or out of range is a UsageError, and says so without quoting it: what is
quoted would be shown on an operator's terminal (threat T37). null stands for an argument that was left out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fedsilo.audit.record import COUNT_MAX
from fedsilo.protocol.errors import UsageError

TEXT_CHARACTERS_MAX = 256


class Asked:
    """The arguments of one query.

    Args:
        arguments: as they came.
        known: names that this query takes.

    Raises:
        UsageError: another name.
    """

    def __init__(self, arguments: Mapping[str, Any], *known: str) -> None:
        self._arguments = arguments
        if unknown := arguments.keys() - set(known):
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UsageError(f"{len(unknown)} of the query's arguments are not known: {takes}")

    def number(self, name: str, *, default: int | None = None, least: int = 0, most: int = COUNT_MAX) -> int | None:
        """A whole number from `least` to `most`. Raises UsageError."""
        value = self._arguments.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise UsageError(f"{name} is a whole number from {least} to {most}")
        return value

    def limit(self, *, default: int, most: int) -> int:
        """How many rows at most. Raises UsageError."""
        value = self.number("limit", default=default, least=1, most=most)
        return default if value is None else value

    def flag(self, name: str) -> bool:
        """Raises UsageError."""
        value = self._arguments.get(name)
        if value is not None and not isinstance(value, bool):
            raise UsageError(f"{name} is true or false")
        return bool(value)

    def text(self, name: str, *, among: Collection[str] = (), most: int = TEXT_CHARACTERS_MAX) -> str:
        """Printable text of at most `most` characters, empty where there is none; one of `among`, where that is given.
        Raises UsageError."""
        value = self._arguments.get(name)
        if value is None:
            return ""
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise UsageError(f"{name} is printable text of at most {most} characters")
        if value and among and value not in among:
            raise UsageError(f"{name} is one of: {', '.join(sorted(among))}")
        return value
