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

from fedsilo.views.columns import MARK_CELLS, Column, Row
from fedsilo.views.lines import Glyphs, Line, Part, clip, line, whole, wrap
from fedsilo.views.lines import field as named
from fedsilo.views.state import mapping, text_of
from fedsilo.views.state import whole as whole_number

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


def log_rows(answer: Any) -> list[dict[str, Any]]:
    """The lines of an answer, newest first, each with its parts and a name that stays while newer ones arrive."""
    told = mapping(answer).get("lines")
    rows: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    for raw in told if isinstance(told, list) else ():
        text = text_of(raw)
        seen[text] = seen.get(text, 0) + 1
        name = sha256(f"{seen[text]} {text}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
        found = _FORM.fullmatch(text)
        moment, level, source, said = found.groups() if found is not None else ("", "", "", text)
        rows.append({"id": name, "time": moment, "level": level, "source": source, "text": said, "line": text})
    return rows[::-1]


def row_id(row: Row) -> str:
    return text_of(row.get("id"))


def from_level(rows: Sequence[dict[str, Any]], least: str) -> list[dict[str, Any]]:
    """Rows of that level and above; a line without a level that is known stays, for it may be the one that counts."""
    first = LEVELS.index(least)
    return [row for row in rows if row["level"] not in LEVELS or LEVELS.index(row["level"]) >= first]


def _style(row: Row) -> str:
    """A line that has little to read stands back, unless it is an error; how many there are stands in the head."""
    style = _STYLES.get(text_of(row.get("level")), "")
    return "dim" if style != "bad" and LEFT_OUT in text_of(row.get("text")) else style


def _level(row: Row) -> Part:
    return text_of(row.get("level")), _style(row)


COLUMNS = (
    Column("time UTC", lambda row: (text_of(row.get("time"))[11:23], "dim"), 12, worth=0),
    Column("level", _level, 8, worth=0),
    Column("day", lambda row: (text_of(row.get("time"))[5:10], "dim"), 5, worth=3),
    Column("source", lambda row: (text_of(row.get("source")), "dim"), 12, worth=4),
    # what it needs first: day and source are the same in most lines, and `enter` has both
    Column("text", lambda row: (text_of(row.get("text")), _style(row)), 96, worth=0, grows=True),
)  # fmt: skip
TEXT = "text"


# ---- head and one line -----------------------------------------------------------------------------


def head_lines(
    answer: Any, least: str, asked: int, cells: int, *, coordinator: bool, moved: bool, wrapped: bool, why_not: str
) -> list[Line]:  # fmt: skip
    """What of the log is seen: whose, from which level on, whether it follows, what was left out.

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
    left_out = whole_number(mapping(answer).get("left_out"))
    if why_not:
        told += wrap(f"not filtered: what follows {REGEX_SIGN} {why_not}", cells, "warn")[:2]
    if left_out:
        text = f"redaction on: {left_out} line{'s' if left_out != 1 else ''} left out or cut (trainer's words)"
        told += wrap(f"{text}; hide them: /!(left", cells, "warn")[:2]
    elif not coordinator:
        told += wrap("redaction on: nothing had to be left out of these lines", cells, "dim")[:1]
    if len(mapping(answer).get("lines") or ()) >= LINES_MAX <= asked:
        older = "are not shown by its desk" if coordinator else f"silo logs --lines {10 * LINES_MAX}"
        told += wrap(f"the newest {LINES_MAX}; older ones: {older}", cells, "dim")
    return told


def cursor_lines(row: Row | None, cells: int, glyphs: Glyphs) -> list[Line]:
    """The text under the cursor whole where it fits, always in as many lines, so that the rows stay where they are."""
    if row is None:
        return []
    rows = wrap(text_of(row.get("text")), cells - MARK_CELLS)
    if len(rows) > CURSOR_ROWS:
        last = clip(rows[CURSOR_ROWS - 1], cells - 20, glyphs.more)
        rows = [*rows[: CURSOR_ROWS - 1], (*last, ("  enter: the rest", "dim"))]
    rows += [line()] * (CURSOR_ROWS - len(rows))
    return [line((f"{glyphs.cursor} " if not index else "  ", "accent"), *shown) for index, shown in enumerate(rows)]


def trainer_lines(cells: int) -> list[Line]:
    return wrap(TRAINER, cells, "dim")


def parsed(row: Row) -> dict[str, Any]:
    """A line taken apart; a text that is JSON, or ends in it, is taken apart as well."""
    told: dict[str, Any] = {name: row.get(name) for name in ("time", "level", "source", "text")}
    said = text_of(row.get("text"))
    start = said.find("{")
    if start >= 0:
        with contextlib.suppress(ValueError, RecursionError):  # else it is a text like any other
            told |= {"text": said[:start].strip(), "json": json.loads(said[start:])}
    return told


def detail_lines(row: Row, body: Sequence[Line], twin: str, cells: int) -> list[Line]:
    """One line of the log whole, then its parts as JSON.

    Args:
        row: of `log_rows`.
        body: `parsed` as lines of JSON.
        twin: the command that shows the log.
        cells: width.
    """
    level = _level(row)
    head = [line((text_of(row.get("time")), "strong"), "  ", level, "  ", (text_of(row.get("source")), "dim"))]
    return [*head, *whole(text_of(row.get("text")), cells), line(""), *named("as text", twin, cells), line(""), *body]
