"""Rows of a table as a file of the person at the console: CSV, JSON or JSON lines (console design 9).

Share-safe unless the word was typed: only fields that `console.sharing` calls released, of rows that were released, and
all of those that are here in the daemon's own order, for a filter or a sorting by a local column would tell what the
column held. Its head goes by the same rule: it does not count what was not released, nor name the row under the cursor.
With everything, the file has mode 0600 and its first line says so. A file that exists is never replaced.

In CSV a text that a spreadsheet would take for a formula begins with an apostrophe, and characters that a terminal
obeys are spelt out (fedsilo/edge/csv_cells.py, threat T37); JSON escapes them by itself.

Does not stop: what times and counts tell to somebody who knows the site, and whoever copies the file on.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from console.rows import Row
from console.sharing import QUERIES, Question, released_answer
from fedsilo.edge.csv_cells import csv_text
from fedsilo.edge.files import write_all
from fedsilo.treaty.errors import ConflictError, OperationError, UsageError

SCHEMA = "fedsilo.export/1"
FORMS = ("csv", "json", "jsonl")
LOCAL_WORD = "LOCAL"
LOCAL_MARK = "holds what this site's policy did not release: for this site's people only"
SHARED_MODE, LOCAL_MODE = 0o644, 0o600
PREVIEW_ROWS = 500
_OWN_FIELD = "_"  # begins the name of what a screen adds to a row for itself


@dataclass(frozen=True)
class Sheet:
    """What a table shows, and what it was asked with.

    Attributes:
        name: of the table, such as outbox.
        shown: rows that pass the filter, in the order of the table.
        here: all rows that came, newest first.
        query: its name and arguments; the name is empty where no query gives these rows.
        rows_in: the field of the answer that has them; empty where the answer is the list.
        total: how many there are in all; None where the daemon does not tell.
        filter_text: what was typed after `/`.
        twin: the command that shows the row under the cursor, or lists the same.
        list_twin: the command that lists the same; it names no row.
        about: further facts for the file's head, such as the daemon and the time.
    """

    name: str
    shown: Sequence[Row]
    here: Sequence[Row]
    query: tuple[str, Mapping[str, Any]] = ("", {})
    rows_in: str = ""
    total: int | None = None
    filter_text: str = ""
    twin: str = ""
    list_twin: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """Rows as they are written.

    Attributes:
        rows: what of each is written.
        left_out: names of columns that are not.
        rows_left_out: so many whole rows are not; for the person at the console, never for a file that is shared.
        total: how many there are in all, where that may be told.
        why_none: why nothing of the table may be shared; empty where something may.
    """

    rows: Sequence[Mapping[str, Any]]
    left_out: tuple[str, ...] = ()
    rows_left_out: int = 0
    total: int | None = None
    why_none: str = ""


def everything(sheet: Sheet) -> Taken:
    return Taken([_told(row) for row in sheet.shown], total=sheet.total)


def released(sheet: Sheet, rows_max: int | None = None) -> Taken:
    """What of a table is released.

    Args:
        sheet: the table.
        rows_max: only so many of its rows, to show beforehand what would be left out.
    """
    rows = [_told(row) for row in sheet.here[:rows_max]]
    names = _names(rows)
    name, arguments = sheet.query
    if not isinstance(QUERIES.get(name), Question):
        return Taken([], names, len(rows), None, "nothing in this table was released by the policy")
    answer: Any = {sheet.rows_in: rows, "total": sheet.total} if sheet.rows_in else rows
    kept = released_answer(name, arguments, answer)
    if kept is None:
        what = ", ".join(sorted(set(arguments) - _arguments(name)))
        return Taken([], names, len(rows), None, f"which rows were chosen by {what}, which is not released")
    found = kept[0].get(sheet.rows_in, []) if sheet.rows_in else kept[0]
    total = kept[0].get("total") if sheet.rows_in else None
    shared = [row for row in found if row]
    left_out = tuple(each for each in names if each not in set(_names(shared)))
    why_none = "" if shared or not rows else "no row here was released"
    return Taken(shared, left_out, len(rows) - len(shared), total, why_none)


def _arguments(name: str) -> frozenset[str]:
    question = QUERIES[name]
    return question.arguments if isinstance(question, Question) else frozenset()


def _told(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(_OWN_FIELD)}


def _names(rows: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Every field, in the order in which they come first."""
    return tuple(dict.fromkeys(name for row in rows for name in row))


# ---- as text ---------------------------------------------------------------------------------------


def text_in(form: str, sheet: Sheet, taken: Taken, *, local: bool) -> str:
    """The file's content.

    Args:
        form: csv, json or jsonl.
        sheet: the table.
        taken: its rows.
        local: they hold everything; the first line says so.

    Raises:
        UsageError: another form. OperationError: a value that is no JSON.
    """
    if form not in FORMS:
        raise UsageError(f"there is no form {form!r}", hint=f"end the name in {', '.join('.' + one for one in FORMS)}")
    head: dict[str, Any] = {LOCAL_WORD: LOCAL_MARK} if local else {}
    head |= {
        "schema": SCHEMA, "table": sheet.name, "holds": LOCAL_WORD if local else "released", **sheet.about,
        "rows_written": len(taken.rows), "rows_in_all": taken.total, "rows_left_out": taken.rows_left_out > 0,
        "columns_left_out": list(taken.left_out), "filter": sheet.filter_text if local else "",
        "twin": sheet.twin if local else sheet.list_twin,
    }  # fmt: skip
    try:
        if form == "json":
            whole = json.dumps({**head, "rows": list(taken.rows)}, indent=1, allow_nan=False)
            return "{" + whole[1:].lstrip() + "\n"  # so that the mark stands in the first line
        if form == "jsonl":
            return "".join(json.dumps(row, allow_nan=False) + "\n" for row in (head, *taken.rows))
    except (ValueError, TypeError, RecursionError) as error:
        raise OperationError(f"a value in {sheet.name} cannot be written as JSON: {error}") from error
    names = _names(taken.rows)
    mark = f"# {LOCAL_WORD}: {LOCAL_MARK}\n" if local else ""
    return mark + csv_text(names, ([row.get(name) for name in names] for row in taken.rows))


# ---- the file --------------------------------------------------------------------------------------


def path_of(typed: str) -> Path:
    """The file that was typed, from the person's home or from where the console was started.

    Raises:
        UsageError: nothing, or a name that does not end in one of the forms.
    """
    if not typed.strip():
        raise UsageError("type the file to write", hint=f"its name ends in {', '.join('.' + form for form in FORMS)}")
    try:
        path = Path(typed.strip()).expanduser()
    except RuntimeError as error:  # ~NAME of nobody
        raise UsageError(f"whose folder is {typed.strip()!r}?", hint="write the path out") from error
    if form_of(path) not in FORMS:
        hint = f"end it in {', '.join('.' + form for form in FORMS)}"
        raise UsageError(f"the end of the name says the form, and {path.name!r} has none", hint=hint)
    return path.absolute()


def form_of(path: Path) -> str:
    return path.suffix.lower().removeprefix(".")


def write_export(path: Path, sheet: Sheet, *, local: bool) -> Taken:
    """Write the rows into a file that does not exist yet; mode 0600 with local data, 0644 without.

    Returns:
        What was written.

    Raises:
        UsageError: nothing of this may be shared, or another form. ConflictError: the file exists.
        OperationError: it cannot be made or written; nothing is left behind.
    """
    taken = everything(sheet) if local else released(sheet)
    if taken.why_none:
        hint = f"the word {LOCAL_WORD} writes all of it, for this site's people only"
        raise UsageError(f"{taken.why_none}: no file was written", hint=hint)
    data = text_in(form_of(path), sheet, taken, local=local).encode("utf-8", "backslashreplace")
    mode = LOCAL_MODE if local else SHARED_MODE
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    except FileExistsError as error:
        raise ConflictError(f"{path} exists already", hint="an export replaces no file; give another name") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no file can have that name"
        raise OperationError(f"cannot make {path}: {why}") from error
    try:
        try:
            if local:
                os.fchmod(descriptor, mode)
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException as error:
        with contextlib.suppress(OSError):
            path.unlink()
        if not isinstance(error, OSError):
            raise
        raise OperationError(f"cannot write {path}: {error.strerror}; nothing was left behind") from error
    return taken


def done_text(path: Path, taken: Taken, *, local: bool) -> str:
    """What is said of a file that was written."""
    rows = f"wrote {len(taken.rows):,} row{'s' if len(taken.rows) != 1 else ''} to {path}"
    if local:
        return f"{rows}, mode 0600: it {LOCAL_MARK}"
    names = f"; left out: {', '.join(taken.left_out)}" if taken.left_out else ""
    return f"{rows}{names}{_left_out_rows(taken)}"


def _left_out_rows(taken: Taken) -> str:
    count = taken.rows_left_out
    return f"; {count:,} row{'s' if count != 1 else ''} not released" if count else ""
