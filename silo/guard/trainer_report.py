"""Which parts of a trainer's reports may enter the guard's state, events and log lines: numbers under names of our own.

The trainer sees private prompts, and whatever text it may choose in a report it could fill with one (T8). The state and
the events are for whoever may open the control socket. So a name is one of a fixed list, or is counted under `OTHER`; a
value is a number, or a text of a form that leaves no room for a sentence.
Does not stop: numbers that mean something else to somebody who knows; nor a sentence in a log line that quotes the
trainer's failure, which the query `logs` leaves out and the file shows to the daemon's own user.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from typing import Any

NUMBER_MAX = 1 << 53
NAMES_MAX = 64  # of one report; a longer one is refused
PHASES = ("rollout", "grade", "update")
TEXT_CHARACTERS_MAX = 2_000
OTHER = "other"
PROMPT_SETS = ("private", "public", "held_out")
# What `fedsilo.files.task_files` says of a line that it leaves out.
REASONS = (
    "line too long", "not UTF-8", "broken JSON", "not a JSON object", "not valid Unicode", "duplicate id",
    "unparseable reference answer", "field 'group' is not a text",
    *(f"missing field {name!r}" for name in ("id", "prompt", "answer", "topic")),
    *(f"field {name!r} is not a text" for name in ("id", "prompt", "answer", "topic")),
)  # fmt: skip
_READY_NUMBERS = ("private_rows", "holdout_rows", "public_rows", "held_out_rows", "context_tokens", "threads")
_READY_TEXTS = {"split": re.compile(r"[0-9a-f]{64}"), "device": re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?")}
_PROGRAMS = ("python", "torch", "transformers")
_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}([+.]?[a-z]{1,5}\d{0,5}){0,2}")


class ValuesUnusable(ValueError):
    """The trainer's report cannot be shown."""


def number(name: str, value: Any) -> float:
    """Check a number. Raises ValuesUnusable: it is not of a size that JSON readers agree on."""
    if not isinstance(value, int | float) or not -NUMBER_MAX <= value <= NUMBER_MAX:
        raise ValuesUnusable(f"{name} is no number")
    return value


def counts(name: str, value: Any, names: Collection[str]) -> dict[str, float]:
    """Numbers by name; those under a name that is not one of `names` are one sum, under `OTHER`.

    Raises:
        ValuesUnusable: no mapping, too many names, or a value that is no number.
    """
    if not isinstance(value, Mapping) or len(value) > NAMES_MAX:
        raise ValuesUnusable(f"{name} is no short list of counts")
    by_name: dict[str, float] = {}
    for key, count in value.items():
        shown = key if key in names else OTHER
        by_name[shown] = by_name.get(shown, 0) + number(name, count)
    return by_name


def phase_in(fields: Mapping[str, Any]) -> str:
    """Return what the trainer works on, one of `PHASES`; empty for anything else that is a text. Raises ValuesUnusable:
    no text."""
    value = fields.get("phase", "")
    if not isinstance(value, str):
        raise ValuesUnusable("phase is no name")
    return value if value in PHASES else ""


def ready_facts(report: Any) -> dict[str, Any]:
    """Return the known keys of a trainer's ready message whose values have the right form; others are left out.

    Args:
        report: the fields of its `ready`.
    """
    if not isinstance(report, Mapping):
        return {}
    facts: dict[str, Any] = {
        name: report[name]
        for name in _READY_NUMBERS
        if isinstance(report.get(name), int) and not isinstance(report[name], bool) and 0 <= report[name] <= NUMBER_MAX
    }
    facts |= {
        name: report[name]
        for name, form in _READY_TEXTS.items()
        if isinstance(report.get(name), str) and form.fullmatch(report[name])
    }
    versions = report.get("versions")
    if isinstance(versions, Mapping):
        facts["versions"] = {
            name: versions[name]
            for name in _PROGRAMS
            if isinstance(versions.get(name), str) and _VERSION.fullmatch(versions[name])
        }
    with contextlib.suppress(ValuesUnusable):  # no figure is better than one that cannot be
        facts["dropped"] = counts("dropped", report.get("dropped", {}), REASONS)
    return facts
