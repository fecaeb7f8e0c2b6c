"""What a case needs of a policy, as one comparison: `approvals.first_rounds >= 1`, `a x b > c`.

A policy with other limits is no worse for that: the case is then reported as not for this policy, with the reason.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from pydantic import BaseModel

from fedsilo.protocol.strict_yaml import Path
from policies.cases.format import Case
from policies.cases.site import Site, kinds_of, sender_of
from policies.kind import block_of

_PRODUCT = r"[a-z0-9_.]+(?: x [a-z0-9_.]+)*"
_FORM = re.compile(rf"({_PRODUCT}) (>=|>) ({_PRODUCT})")
_HINT = (
    "such as: approvals.first_rounds >= 1, or: a x b > c; of keys of the kind's block, or of the policy, such as "
    "federation.peers, which counts them"
)


@dataclass(frozen=True)
class NotFor:
    """A case that this policy cannot show, and why."""

    case: Case
    name: str
    why: str

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "file": self.case.source, "line": self.case.line, "why": self.why}


def not_for(cases: Iterable[Case], site: Site) -> Iterator[NotFor]:
    """Raises UsageError: a need that is no comparison, or names a key that there is none of."""
    for case in cases:
        for kind in kinds_of(case, site.policy):
            if why := unmet(case, kind, site):
                yield NotFor(case, case.name if case.message.kind == kind else f"{case.name}: {kind}", why)


def unmet(case: Case, kind: str, site: Site) -> str:
    """The first need of a case that the site's policy does not meet, in words; empty: it meets all.

    Raises:
        UsageError: as `not_for`.
    """
    for index, need in enumerate(case.needs):
        found, path = _FORM.fullmatch(need), ("needs", index)
        if found is None:
            raise case.mistake(path, f"{need!r} is no comparison of limits", _HINT)
        sides: list[float] = []
        for names in (found[1].split(" x "), found[3].split(" x ")):
            values = [_value(case, path, name, kind, site) for name in names]
            if None in values:
                return f"it needs {need}, and the policy does not set {names[values.index(None)]}"
            sides.append(prod(value for value in values if value is not None))
        if not (sides[0] > sides[1] or (sides[0] == sides[1] and found[2] == ">=")):
            return f"it needs {need}, and here that is {sides[0]:g} against {sides[1]:g}"
    return ""


def _value(case: Case, path: Path, name: str, kind: str, site: Site) -> float | None:
    """A number, or what stands under a key; of a range its upper end, of another list its length; None: not set."""
    if re.fullmatch(r"\d+(\.\d+)?", name):
        return float(name)
    block, _ = block_of({"kind": kind, "sender": sender_of(case, kind, site)}, site.policy)
    value: Any = next((each for each in (block, site.policy.file) if each is not None and _key(each, name)), None)
    if value is None and block is None:
        return None
    value, rest = value or site.policy.file, name
    while rest:
        key = _key(value, rest)
        if not key:
            known = sorted({*_labels(value), *(_labels(block) if rest == name else ())})
            close = difflib.get_close_matches(rest, known, n=1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise case.mistake(path, f"there is no limit {name!r}{meant}", _HINT)
        value, rest = getattr(value, _labels(value)[key]), rest[len(key) + 1 :]
        if value is None:
            return None
    if isinstance(value, list | tuple):
        ranged = len(value) == 2 and all(isinstance(each, int | float) for each in value)
        return float(value[1] if ranged else len(value))
    if not isinstance(value, int | float):
        raise case.mistake(path, f"{name!r} is no number", _HINT)
    return value


def _key(value: Any, name: str) -> str:
    """The key of a block that a dotted name begins with; a kind is one key with a dot in it."""
    return next((label for label in _labels(value) if f"{name}.".startswith(f"{label}.")), "")


def _labels(value: Any) -> dict[str, str]:
    """Each key of a block as it is written, and the attribute that has it."""
    if not isinstance(value, BaseModel):
        return {}
    return {field.alias or attribute: attribute for attribute, field in type(value).model_fields.items()}
