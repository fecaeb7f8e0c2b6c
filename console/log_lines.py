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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import re2

from console.drawing import Glyphs, Line, Part, clip, line, pad, wrap
from console.reading import mapping, text_of
from console.reading import whole as whole_number
from console.rows import GAP_CELLS, MARK_CELLS, Column, Filter, Item, Row, Rows, Term, choose_columns
from console.safe import Shown
from console.whole_lines import field as named
from console.whole_lines import whole

LEFT_OUT = "(left out)"  # stands in a line in place of what a trainer said
CURSOR_ROWS = 2
LINES_FIRST, LINES_STEP, LINES_MAX = 200, 200, 1_000
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
SHOWN_FROM = ("DEBUG", "WARNING", "ERROR")  # in the order of `v`
REGEX_SIGN = "~"
PATTERN_BYTES_MAX = 1 << 20  # of memory for one compiled pattern
INSTRUCTIONS_MAX = 2_000  # of one compiled pattern, as in a site's own patterns (policies/custom_patterns.py)
MATCH_SECONDS_MAX = 0.1  # of all lines at one go: a key is answered within that
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


# ---- filter ----------------------------------------------------------------------------------------


class _SlowError(Exception):
    """The pattern took too long over the lines that there are."""


@dataclass(frozen=True)
class Matching(Filter):
    """Lines in which a regular expression is found, letters of either case the same."""

    pattern: Any = None  # of `pattern_of`
    clock: Callable[[], float] = time.monotonic
    found: dict[str, bool] = field(default_factory=dict, compare=False)
    began: list[float] = field(default_factory=list, compare=False)

    def passes(self, texts: Mapping[str, str]) -> bool:
        text = texts[TEXT]
        if text not in self.found:
            if not self.began:
                self.began.append(self.clock())
            if self.clock() - self.began[0] > MATCH_SECONDS_MAX:
                raise _SlowError
            self.found[text] = self.pattern.search(text.encode("utf-8", "replace")) is not None
        return self.found[text]


def pattern_of(typed: str) -> tuple[Any, str]:
    """A regular expression in RE2's syntax, letters of either case the same; or None, and why it is not taken.

    RE2 finds it in time linear in the line, whatever it is, so no pattern makes the console stand still (CWE-1333). Its
    size when compiled is limited, for each character of a line may cost one step for each instruction. RE2 has no
    look-around and no back reference.
    """
    options = re2.Options()
    options.case_sensitive, options.never_capture, options.log_errors = False, True, False
    options.max_mem = PATTERN_BYTES_MAX
    try:
        made = re2.compile(typed, options=options)
    except re2.error as error:
        why = error.args[0] if error.args else ""
        return None, f"is no regular expression: {why.decode('utf-8', 'replace') if isinstance(why, bytes) else why}"
    except UnicodeEncodeError:
        return None, "is no regular expression: half a character stands in it"
    if made.programsize > INSTRUCTIONS_MAX:
        return None, f"is too large: {made.programsize} instructions when compiled, at most {INSTRUCTIONS_MAX}"
    return made, ""


@dataclass
class LogRows(Rows):
    """Rows of a log.

    Attributes:
        wrapped: a text goes on in further lines, and none of it is cut.
        why_not: what was typed behind `~` is not used, because.
    """

    wrapped: bool = False
    why_not: str = ""
    _drawn: list[str] = field(default_factory=list)  # the id of each line that was last drawn

    def filter(self, text: str) -> None:
        self.why_not = ""
        if not text.startswith(REGEX_SIGN):
            super().filter(text)
            return
        pattern, self.why_not = pattern_of(text[1:])
        self._filter_text = text
        terms = (Term(text),) if text[1:] else ()
        self._filter = Filter() if pattern is None else Matching(terms, pattern)
        self._settle()

    def take_newest(
        self, page: Sequence[Row], following: Any, *, total: int | None = None, reaches: int | None = None
    ) -> None:
        """As of any table; and until somebody moves it, the cursor goes with the newest line."""
        super().take_newest(page, following, total=total, reaches=reaches)
        if not self.moved and self._shown:
            self.cursor = self._shown[0].id

    def _settle(self) -> None:
        try:
            if isinstance(self._filter, Matching):
                self._filter.began.clear()
            super()._settle()
        except _SlowError:
            self.why_not, self._filter = "takes too long over these lines", Filter()
            super()._settle()

    def lines(self, cells: int, height: int, glyphs: Glyphs) -> list[Line]:
        if not self.wrapped:
            self._drawn = []
            return super().lines(cells, height, glyphs)
        header = super().lines(cells, 1, glyphs)[0]
        room = max(height - 1, 1)
        place = max(self._place(), 0)
        if not self.moved:
            self.cursor, place, self._top = self._shown[0].id, 0, 0
        first = min(self._top, place)
        blocks = [self._block(item, cells, glyphs) for item in self._shown[first : place + 1]]
        while len(blocks) > 1 and sum(map(len, blocks)) > room:
            blocks.pop(0)
            first += 1
        for item in self._shown[place + 1 :]:
            if sum(map(len, blocks)) >= room:
                break
            blocks.append(self._block(item, cells, glyphs))
        self._top = first
        self._drawn = [
            item.id for item, block in zip(self._shown[first:], blocks, strict=False) for _ in block
        ]  # fmt: skip
        return [header, *[row for block in blocks for row in block][:room]]

    def _block(self, item: Item, cells: int, glyphs: Glyphs) -> list[Line]:
        chosen = choose_columns(self.columns, cells, turn=self.turn)
        here = item.id == self.cursor
        parts: list[Part] = [(f"{glyphs.cursor} " if here else "  ", "accent")]
        before = MARK_CELLS
        by_name = dict(zip((column.name for column in self.columns), item.cells, strict=True))
        for column, width in chosen:
            if column.name != TEXT:
                text, style = by_name[column.name]
                parts += [(pad(text, width, more=glyphs.more), style), (" " * GAP_CELLS, "")]
                before += width + GAP_CELLS
        text, style = by_name[TEXT]
        rows = whole(text, max(cells - before, 8), style or ("strong" if here else "")) or [()]
        return [(*(parts if not index else [(Shown(" " * before), "")]), *row) for index, row in enumerate(rows)]

    def row_at(self, line_number: int) -> str:
        if not self._drawn:
            return super().row_at(line_number)
        return self._drawn[line_number] if 0 <= line_number < len(self._drawn) else ""


# ---- head and one line -----------------------------------------------------------------------------


def head_lines(
    answer: Any, rows: LogRows, least: str, asked_lines: int, cells: int, *, coordinator: bool
) -> list[Line]:  # fmt: skip
    """What of the log is seen: whose, from which level on, whether it follows, what was left out."""
    if answer is None:
        return []
    level = "all levels" if least == LEVELS[0] else f"{least} and above"
    way = "follows the newest" if not rows.moved else "stays here; g follows again"
    form = "whole lines" if rows.wrapped else "one line each"
    told = wrap(f"newest first · {level} (v) · {form} (w) · {way}", cells, "dim")[:2]
    left_out = whole_number(mapping(answer).get("left_out"))
    if rows.why_not:
        told += wrap(f"not filtered: what follows {REGEX_SIGN} {rows.why_not}", cells, "warn")[:2]
    if left_out:
        text = f"redaction on: {left_out} line{'s' if left_out != 1 else ''} left out or cut (trainer's words)"
        told += wrap(f"{text}; hide them: /!(left", cells, "warn")[:2]
    elif not coordinator:
        told += wrap("redaction on: nothing had to be left out of these lines", cells, "dim")[:1]
    if len(mapping(answer).get("lines") or ()) >= LINES_MAX <= asked_lines:
        older = "are not shown by its desk" if coordinator else f"silo logs --lines {10 * LINES_MAX}"
        told += wrap(f"the newest {LINES_MAX}; older ones: {older}", cells, "dim")
    return told


def cursor_lines(item: Item | None, cells: int, glyphs: Glyphs) -> list[Line]:
    """The text under the cursor whole where it fits, always in as many lines, so that the rows stay where they are."""
    if item is None:
        return []
    rows = wrap(text_of(item.row.get("text")), cells - MARK_CELLS)
    if len(rows) > CURSOR_ROWS:
        last = clip(rows[CURSOR_ROWS - 1], cells - 20, glyphs.more)
        rows = [*rows[: CURSOR_ROWS - 1], (*last, ("  enter: the rest", "dim"))]
    rows += [line()] * (CURSOR_ROWS - len(rows))
    return [line((f"{glyphs.cursor} " if not index else "  ", "accent"), *row) for index, row in enumerate(rows)]


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
