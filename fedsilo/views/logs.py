"""Lines of a daemon's log as rows: taken apart, filtered by level and text, drawn in one line each or whole.

The daemon gives only lines of its own form and leaves out of them what a trainer said; how many it left out stands in
the head. `/` takes words as every table does, and behind `~` a regular expression in RE2's syntax. Pure: the answer of
the query `logs` in, lines out.

Does not find a secret in what the daemon itself wrote: it shows what the daemon's log holds, and is shown only to whom
the control socket is open.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from fedsilo.control.answers import Answer, LogLines
from fedsilo.views.columns import MARK_CELLS, Column
from fedsilo.views.lines import Glyphs, Line, clip, line, whole, wrap
from fedsilo.views.lines import field as named

LEFT_OUT = "(left out)"  # stands in a line in place of what a trainer said
CURSOR_ROWS = 2
LINES_FIRST, LINES_STEP, LINES_MAX = 200, 200, 1_000
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
SHOWN_FROM = ("DEBUG", "WARNING", "ERROR")  # in the order of `v`
REGEX_SIGN = "~"
_FORM = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ([A-Z]+) (\S+) ?(.*)", re.DOTALL)
_STYLES = {"WARNING": "warn", "ERROR": "bad", "CRITICAL": "bad", "DEBUG": "dim"}
TRAINER = "not here: the trainer's log (may quote private text): silo logs --trainer"


# ---- rows ------------------------------------------------------------------------------------------


class LogRow(Answer):
    """One line of a log with its parts, which are empty where it has another form.

    Attributes:
        id: stays while newer lines arrive
    """

    id: str
    time: str
    level: str
    source: str
    text: str
    line: str


def log_rows(answer: LogLines) -> list[LogRow]:
    """The lines of an answer, newest first."""
    rows: list[LogRow] = []
    seen: dict[str, int] = {}
    for text in answer.lines:
        seen[text] = seen.get(text, 0) + 1
        name = sha256(f"{seen[text]} {text}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
        found = _FORM.fullmatch(text)
        moment, level, source, said = found.groups() if found is not None else ("", "", "", text)
        rows.append(LogRow(id=name, time=moment, level=level, source=source, text=said, line=text))
    return rows[::-1]


def from_level(rows: Sequence[LogRow], least: str) -> list[LogRow]:
    """Rows of that level and above; a line without a level that is known stays, for it may be the one that counts."""
    first = LEVELS.index(least)
    return [row for row in rows if row.level not in LEVELS or LEVELS.index(row.level) >= first]


def _style(row: LogRow) -> str:
    """A line that has little to read stands back, unless it is an error; how many there are stands in the head."""
    style = _STYLES.get(row.level, "")
    return "dim" if style != "bad" and LEFT_OUT in row.text else style


COLUMNS = (
    Column("time UTC", lambda row: (row.time[11:23], "dim"), 12, worth=0),
    Column("level", lambda row: (row.level, _style(row)), 8, worth=0),
    Column("day", lambda row: (row.time[5:10], "dim"), 5, worth=3),
    Column("source", lambda row: (row.source, "dim"), 12, worth=4),
    # what it needs first: day and source are the same in most lines, and `enter` has both
    Column("text", lambda row: (row.text, _style(row)), 96, worth=0, grows=True),
)
TEXT = "text"


# ---- head and one line -----------------------------------------------------------------------------


def head_lines(
    answer: LogLines | None,
    least: str,
    asked: int,
    cells: int,
    *,
    coordinator: bool,
    moved: bool,
    wrapped: bool,
    why_not: str,
) -> list[Line]:
    """Return which part of the log is shown: whose, from which level on, whether it follows, what was left out.

    Args:
        answer: of the query; None before it came.
        least: level from which on lines are shown.
        asked: how many lines were asked for.
        cells: width.
        coordinator: it is a coordinator's log.
        moved: somebody placed the cursor.
        wrapped: lines are shown whole.
        why_not: why the regular expression that was typed is not used; empty where it is.
    """
    if answer is None:
        return []
    level = "all levels" if least == LEVELS[0] else f"{least} and above"
    way = "follows the newest" if not moved else "stays here; g follows again"
    form = "whole lines" if wrapped else "one line each"
    told = wrap(f"newest first · {level} (v) · {form} (w) · {way}", cells, "dim")[:2]
    if why_not:
        told += wrap(f"not filtered: what follows {REGEX_SIGN} {why_not}", cells, "warn")[:2]
    if answer.left_out:
        lines = f"{answer.left_out} line{'s' if answer.left_out != 1 else ''} left out or cut (trainer's words)"
        told += wrap(f"redaction on: {lines}; hide them: /!(left", cells, "warn")[:2]
    elif not coordinator:
        told += wrap("redaction on: nothing had to be left out of these lines", cells, "dim")[:1]
    if len(answer.lines) >= LINES_MAX <= asked:
        older = "are not shown here" if coordinator else f"silo logs --lines {10 * LINES_MAX}"
        told += wrap(f"the newest {LINES_MAX}; older ones: {older}", cells, "dim")
    return told


def cursor_lines(row: LogRow | None, cells: int, glyphs: Glyphs) -> list[Line]:
    """The text under the cursor whole where it fits, always in as many lines, so that the rows stay where they are."""
    if row is None:
        return []
    rows = wrap(row.text, cells - MARK_CELLS)
    if len(rows) > CURSOR_ROWS:
        last = clip(rows[CURSOR_ROWS - 1], cells - 20, glyphs.more)
        rows = [*rows[: CURSOR_ROWS - 1], (*last, ("  enter: the rest", "dim"))]
    rows += [line()] * (CURSOR_ROWS - len(rows))
    return [line((f"{glyphs.cursor} " if not index else "  ", "accent"), *shown) for index, shown in enumerate(rows)]


def trainer_lines(cells: int) -> list[Line]:
    return wrap(TRAINER, cells, "dim")


def parsed(row: LogRow) -> dict[str, Any]:
    """A line taken apart; a text that is JSON, or ends in it, is taken apart as well."""
    told: dict[str, Any] = {"time": row.time, "level": row.level, "source": row.source, "text": row.text}
    start = row.text.find("{")
    if start >= 0:
        with contextlib.suppress(ValueError, RecursionError):  # else it is a text like any other
            told |= {"text": row.text[:start].strip(), "json": json.loads(row.text[start:])}
    return told


def detail_lines(row: LogRow, body: Sequence[Line], twin: str, cells: int) -> list[Line]:
    """Return one line of the log whole, then its fields as JSON."""
    head = [line((row.time, "strong"), "  ", (row.level, _style(row)), "  ", (row.source, "dim"))]
    return [*head, *whole(row.text, cells), line(""), *named("as text", twin, cells), line(""), *body]
