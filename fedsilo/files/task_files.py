"""Task files: records {"id", "prompt", "answer", "topic", "group"?} as every silo reads them.

`task_formats` says in which forms a file may come. In a silo's private files the fields may have other names
(`FieldNames`). In the public and the held-out set they may not: all silos agree on a file by its digest, and with names
of their own two of them could read other prompts from the same bytes.

A bad line (broken JSON, a field missing or of the wrong type, an id that stood before) is left out, counted and
listed. Fewer than one line in twenty may be bad; from there on the file is refused. Whether a reference answer can be
read is the verifier's to say: `refuse_bad_references` takes that verdict and applies the same limit to all of them
together. Further fields of a row (level, source, aliases) are ignored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from fedsilo.files.durable import read_regular
from fedsilo.files.task_formats import LINE_BYTES_MAX as LINE_BYTES_MAX
from fedsilo.files.task_formats import records_of, unit_of
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import NotFoundError, UsageError

BAD_SHARE_MAX = 0.05
_LISTED_MAX = 10
_FIELDS = ("id", "prompt", "answer", "topic")

Problem = tuple[int, str]


@dataclass(frozen=True)
class FieldNames:
    """What a file calls the fields of a task."""

    id: str = "id"
    prompt: str = "prompt"
    answer: str = "answer"
    topic: str = "topic"
    group: str = "group"


STANDARD = FieldNames()


@dataclass(frozen=True)
class Task:
    """One question; `group` is whose it is (a patient), or empty. `line` is its place in the file, from 1."""

    id: str
    prompt: str
    answer: str
    topic: str
    group: str = ""
    line: int = 0


@dataclass(frozen=True)
class TaskFile:
    """A file as read.

    `problems` holds (line, reason) in line order, `reasons` how often each; blank lines do not count in `lines`.
    `unit` is what a place counts: "line", or "row" of an array or of a Parquet file.
    """

    path: Path
    rows: tuple[Task, ...]
    sha256: str
    lines: int
    problems: tuple[Problem, ...]
    unit: str = "line"

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(reason for _, reason in self.problems))


def read_tasks(path: Path, fields: FieldNames = STANDARD) -> TaskFile:
    """Read a file whole.

    Args:
        path: of the file, in any form that `task_formats` knows.
        fields: what it calls the fields.

    Raises:
        NotFoundError: no such file.
        UsageError: no usable row, or 5 % of the lines or more are bad; lists them.
    """
    try:
        content = read_regular(path)
    except (NotFoundError, UsageError) as error:
        raise type(error)(f"task file: {error.message}") from error
    rows: list[Task] = []
    problems: list[Problem] = []
    first_line_of: dict[str, int] = {}
    lines = 0
    for number, record in records_of(path, content, [getattr(fields, each.name) for each in dataclass_fields(fields)]):
        lines += 1
        task = record if isinstance(record, str) else _task_of(record, number, fields)
        if isinstance(task, str):
            problems.append((number, task))
        elif task.id in first_line_of:
            problems.append((number, "duplicate id"))
        else:
            first_line_of[task.id] = number
            rows.append(task)
    file = TaskFile(path, tuple(rows), sha256_hex(content), lines, tuple(problems), unit_of(content))
    return _within_limit(file, fields)


def refuse_bad_references(file: TaskFile, is_readable: Callable[[str], bool]) -> TaskFile:
    """The file without the rows whose reference answer the verifier cannot read (methods 1.2).

    Args:
        file: as read.
        is_readable: whether an answer can be compared with.

    Raises:
        UsageError: together with the lines found bad before, 5 % or more.
    """
    bad = {task.line for task in file.rows if not is_readable(task.answer)}
    problems = sorted([*file.problems, *((line, "unparseable reference answer") for line in bad)])
    rows = tuple(task for task in file.rows if task.line not in bad)
    return _within_limit(replace(file, rows=rows, problems=tuple(problems)))


def read_usable(
    paths: Sequence[Path], is_readable: Callable[[str], bool], fields: FieldNames = STANDARD
) -> tuple[TaskFile, ...]:
    """The files of one silo with what may be used of them: every id once in all of them, every answer readable.

    Args:
        paths: task files.
        is_readable: whether a reference answer can be compared with.
        fields: what they call the fields.

    Raises:
        NotFoundError: no such file.
        UsageError: 5 % or more of a file's lines are left out; lists them.
    """
    files: list[TaskFile] = []
    seen: set[str] = set()
    for path in paths:
        file = refuse_bad_references(read_tasks(path, fields), is_readable)
        again = [(task.line, "duplicate id") for task in file.rows if task.id in seen]
        rows = tuple(task for task in file.rows if task.id not in seen)
        seen.update(task.id for task in rows)
        files.append(_within_limit(replace(file, rows=rows, problems=tuple(sorted([*file.problems, *again])))))
    return tuple(files)


def listed(problems: Sequence[Problem], unit: str = "line") -> str:
    """The first of the bad lines, in words: numbers and reasons, never what stands there."""
    shown = "; ".join(f"{unit} {line}: {reason}" for line, reason in problems[:_LISTED_MAX])
    return shown + (f"; and {len(problems) - _LISTED_MAX} more" if len(problems) > _LISTED_MAX else "")


def _task_of(record: Mapping[str, Any], number: int, fields: FieldNames) -> Task | str:
    """The task, or why there is none. The reason never quotes the record: it may reach a log."""
    row = {
        name: _text_of(value)
        for name in (*_FIELDS, "group")
        if (value := record.get(getattr(fields, name))) is not None  # a null is a missing field, as it is in Parquet
    }
    for name in _FIELDS:
        if name not in row:
            return f"missing field {name!r}"
        if not isinstance(row[name], str) or not row[name].strip():
            return f"field {name!r} is not a text"
    group = row.get("group", "")
    if not isinstance(group, str):
        return "field 'group' is not a text"
    if not _is_unicode(row):
        return "not valid Unicode"
    return Task(**{name: row[name] for name in _FIELDS}, group=group, line=number)


def _text_of(value: Any) -> Any:
    """A whole number as its decimal text, since identifiers and answers are often kept as numbers. A fraction has no
    one text, so it stays what it is, and is refused."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_unicode(row: Mapping[str, Any]) -> bool:
    """JSON may escape half a surrogate pair, which no tokenizer and no wire takes."""
    try:
        "".join(str(row.get(name, "")) for name in (*_FIELDS, "group")).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _within_limit(file: TaskFile, fields: FieldNames = STANDARD) -> TaskFile:
    bad = len(file.problems)
    if bad and bad >= BAD_SHARE_MAX * file.lines:
        told = listed(file.problems, file.unit)
        hint = (
            'each is {"id","prompt","answer","topic"} and perhaps "group", all texts or whole numbers, ids unique; '
            "other names of private files go into data.fields"
        )
        reasons = file.reasons
        if len(reasons) == 1 and bad == file.lines > 1:  # one cause, so it is told once
            told = f"each {file.unit}: {next(iter(reasons))}"
            for name in _FIELDS:
                own = getattr(fields, name)
                if own != name and f"missing field {name!r}" in reasons:
                    told = f"{told}: there is no {own!r}, as data.fields calls it"
                    hint = f"data.fields.{name}: the name that the file has for it"
        raise UsageError(
            f"{file.path}: {bad} of {file.lines} {file.unit}s are bad, the limit is under {BAD_SHARE_MAX:.0%}: {told}",
            hint=hint,
            code="TASK_FILE_INVALID",
        )
    if not file.rows:
        raise UsageError(f"{file.path} holds no task", code="TASK_FILE_INVALID")
    return file
