"""Settings as rows and lines: what the daemon runs with and where each value comes from, and the console's own.

Pure: the answer of the query `settings` and what this console was started with in, lines out. A key file or a secret
is named by its path; no answer holds what is in it.

Does not show what a file says that was changed since the daemon read it: a value is the one in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedsilo.control.answers import SettingRow, read_rows
from fedsilo.views.columns import Column
from fedsilo.views.lines import Line, Part, field, line, wrap

CONSOLE = "console"
THEME, ASCII_ONLY = "theme", "ascii"
DEFAULT = "default"
VALUE_CELLS = 31  # all that 80 columns have for it


@dataclass(frozen=True)
class Own:
    """A setting of this console.

    Args:
        key: its name; also how `fedconsole` calls its option, where it has one.
        value: as it is now.
        origin: flag, env NAME, here (set in this console), or default.
        says: what it does, and what `enter` does with it.
    """

    key: str
    value: str
    origin: str
    says: str


class ShownSetting(SettingRow):
    """A setting and whose it is: silo, coordinator or console."""

    of: str


def setting_id(row: ShownSetting) -> str:
    return f"{row.of} {row.key}"


def setting_rows(answer: Any, daemon: str, own: Sequence[Own]) -> list[ShownSetting]:
    """Return the daemon's first, in the order of its file, for they are what one comes for; then the console's own."""
    theirs = [ShownSetting(**vars(row), of=daemon) for row in read_rows(SettingRow, answer)]
    here = [ShownSetting(key=each.key, value=each.value, origin=each.origin, of=CONSOLE) for each in own]
    return [*theirs, *here]


def value_words(value: Any) -> str:
    """A value as a person reads it; a text that is empty and one that is not there look different."""
    if value is None:
        return "no value"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(value_words(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {value_words(item)}" for name, item in value.items()) or "none"
    return str(value) or '""'


def _value(row: ShownSetting) -> Part:
    """Return a setting's value; of a path its end, which tells one from another. `enter` shows the whole."""
    words = value_words(row.value)
    if words.startswith("/") and len(words) > VALUE_CELLS and "," not in words:
        words = f"…{words[1 - VALUE_CELLS :]}"
    return words, "dim" if row.origin == DEFAULT else ""


def _key(row: ShownSetting) -> Part:
    """The console's own keys say so also where the column `of` has no room."""
    return f"{'console: ' if row.of == CONSOLE else ''}{row.key}", ""


def _origin(row: ShownSetting) -> Part:
    return row.origin, "dim" if row.origin == DEFAULT else "accent"


COLUMNS = (
    Column("of", lambda row: (row.of, "dim"), 11, worth=1),
    Column("key", _key, 21, worth=0, grows=True),
    Column("value", _value, VALUE_CELLS, worth=0, grows=True),
    Column("origin", _origin, 18, worth=0),
)  # fmt: skip


def head_lines(rows: Sequence[ShownSetting], daemon: str, cells: int) -> list[Line]:
    """Return how many settings belong to whom, how many were set by somebody, and how to change them."""
    theirs = [row for row in rows if row.of != CONSOLE]
    if not theirs:
        return []
    own = len(rows) - len(theirs)
    chosen = sum(row.origin != DEFAULT for row in theirs)
    text = (
        f"{chosen} of the {daemon}'s {len(theirs)} settings are set; they change in its file, never here, from its "
        f"next start. The {own} of this console stand below (G)."
    )
    return wrap(text, cells, "dim")[:2]


def detail_lines(row: ShownSetting, twin: str, cells: int) -> list[Line]:
    """Return one setting of the daemon whole, and how to change it."""
    origin, key, daemon, value = row.origin, row.key, row.of, row.value
    lines = [*field("key", key, cells, "strong")]
    values = value if isinstance(value, list) and value else [value]
    for index, item in enumerate(values):
        lines += field("value" if not index else "", value_words(item), cells)
    lines += field("origin", origin, cells, "accent" if origin != DEFAULT else "dim")
    how = {
        DEFAULT: f"It stands in no file: the {daemon} has its default. Add the key to its configuration to change it.",
    }.get(origin, f"It is set there. Change it there: {origin}.")
    check = f"Then: {daemon} check, which tries it and starts nothing, and start the {daemon} again."
    return [*lines, line(""), *wrap(how, cells), *wrap(check, cells), line(""), *field("as text", twin, cells)]


def own_lines(own: Own, cells: int) -> list[Line]:
    """Return one setting of this console that `enter` cannot change."""
    return [
        *field("key", own.key, cells, "strong"), *field("value", own.value, cells),
        *field("origin", own.origin, cells), line(""), *wrap(own.says, cells),
    ]  # fmt: skip
