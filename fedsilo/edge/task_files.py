"""Task files: JSON lines {"id", "prompt", "answer", "topic", "group"?} as every silo reads them.

A bad line (broken JSON, a field missing or of the wrong type, an id that stood before) is left out, counted and
listed. Fewer than one line in twenty may be bad; from there on the file is refused. Whether a reference answer can be
read is the verifier's to say: `refuse_bad_references` takes that verdict and applies the same limit to all of them
together. Further fields of a row (level, source, aliases) are ignored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedsilo.treaty.errors import NotFoundError, UsageError
from fedsilo.treaty.wire.codec import sha256_hex

BAD_SHARE_MAX = 0.05
LINE_BYTES_MAX = 1 << 20
_LISTED_MAX = 10
_FIELDS = ("id", "prompt", "answer", "topic")

Problem = tuple[int, str]


@dataclass(frozen=True)
class Task:
    """One question; `group` is whose it is (a patient), or empty. `line` counts from 1."""

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
    """

    path: Path
    rows: tuple[Task, ...]
    sha256: str
    lines: int
    problems: tuple[Problem, ...]

    @property
    def reasons(self) -> dict[str, int]:
        return dict(Counter(reason for _, reason in self.problems))


def read_tasks(path: Path) -> TaskFile:
    """Read a file whole.

    Raises:
        NotFoundError: no such file.
        UsageError: no usable row, or 5 % of the lines or more are bad; lists them.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"task file {path} does not exist") from error
    except OSError as error:
        raise UsageError(f"task file {path} cannot be read: {error.strerror}") from error
    rows: list[Task] = []
    problems: list[Problem] = []
    first_line_of: dict[str, int] = {}
    lines = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        lines += 1
        task = _parse(line, number)
        if isinstance(task, str):
            problems.append((number, task))
        elif task.id in first_line_of:
            problems.append((number, "duplicate id"))
        else:
            first_line_of[task.id] = number
            rows.append(task)
    return _within_limit(TaskFile(path, tuple(rows), sha256_hex(content), lines, tuple(problems)))


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


def read_usable(paths: Sequence[Path], is_readable: Callable[[str], bool]) -> tuple[TaskFile, ...]:
    """The files of one silo with what may be used of them: every id once in all of them, every answer readable.

    Args:
        paths: task files.
        is_readable: whether a reference answer can be compared with.

    Raises:
        NotFoundError: no such file.
        UsageError: 5 % or more of a file's lines are left out; lists them.
    """
    files: list[TaskFile] = []
    seen: set[str] = set()
    for path in paths:
        file = refuse_bad_references(read_tasks(path), is_readable)
        again = [(task.line, "duplicate id") for task in file.rows if task.id in seen]
        rows = tuple(task for task in file.rows if task.id not in seen)
        seen.update(task.id for task in rows)
        files.append(_within_limit(replace(file, rows=rows, problems=tuple(sorted([*file.problems, *again])))))
    return tuple(files)


def listed(problems: Sequence[Problem]) -> str:
    """The first of the bad lines, in words: numbers and reasons, never what stands there."""
    shown = "; ".join(f"line {line}: {reason}" for line, reason in problems[:_LISTED_MAX])
    return shown + (f"; and {len(problems) - _LISTED_MAX} more" if len(problems) > _LISTED_MAX else "")


def _parse(line: bytes, number: int) -> Task | str:
    """The task, or why there is none. The reason never quotes the line: it may reach a log."""
    if len(line) > LINE_BYTES_MAX:
        return "line too long"
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "broken JSON"
    if not isinstance(row, dict):
        return "not a JSON object"
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


def _is_unicode(row: Mapping[str, Any]) -> bool:
    """JSON may escape half a surrogate pair, which no tokenizer and no wire takes."""
    try:
        "".join(str(row.get(name, "")) for name in (*_FIELDS, "group")).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _within_limit(file: TaskFile) -> TaskFile:
    bad = len(file.problems)
    if bad and bad >= BAD_SHARE_MAX * file.lines:
        raise UsageError(
            f"{file.path}: {bad} of {file.lines} lines are bad, the limit is under {BAD_SHARE_MAX:.0%}: "
            f"{listed(file.problems)}",
            hint='each line is {"id","prompt","answer","topic"} and perhaps "group", all texts, ids unique',
            code="TASK_FILE_INVALID",
        )
    if not file.rows:
        raise UsageError(f"{file.path} holds no task", code="TASK_FILE_INVALID")
    return file
