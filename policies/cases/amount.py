"""Numbers of a case, written as such or by the policy's own: `3`, `limit`, `limit + 1`, `least - 1`, `1.5 x limit`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator

_FORM = re.compile(r"(?:(\d+(?:\.\d+)?) x )?(limit|least)(?: ([+-]) (\d+(?:\.\d+)?))?")


class NoLimit(ValueError):
    """A case counts from a limit that the policy does not set."""


@dataclass(frozen=True)
class Amount:
    """factor x anchor + offset; without an anchor the offset alone, exactly as it was written (-0.0 too)."""

    offset: float
    anchor: str = ""
    factor: float = 1.0

    def number(self, limit: float | None, least: float | None = None) -> float:
        """Raises NoLimit: the anchor is not set."""
        if not self.anchor:
            return self.offset
        anchor = limit if self.anchor == "limit" else least
        if anchor is None:
            raise NoLimit(f"the policy sets no {self.anchor} here")
        return self.factor * anchor + self.offset

    def whole(self, limit: float | None, least: float | None = None) -> int:
        """A share of a limit that is no whole number goes away from the limit, so that 1.5 x 3 is above it."""
        number = self.number(limit, least)
        return math.ceil(number) if self.factor > 1 else math.floor(number)


def read_amount(value: Any) -> Amount:
    """Raises ValueError: neither a number nor one of the forms."""
    if isinstance(value, Amount):
        return value
    if type(value) in (int, float) and math.isfinite(value):
        return Amount(value)
    found = _FORM.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError("must be a number, or such as: limit, limit + 1, least - 1, 1.5 x limit")
    factor, anchor, sign, offset = found.groups()
    by = _plain(offset or "0") * (-1 if sign == "-" else 1)
    return Amount(by, anchor, float(factor or 1))


def _plain(text: str) -> float:
    return float(text) if "." in text else int(text)


AmountField = Annotated[Amount, PlainValidator(read_amount)]
