"""Task files: records {"id", "prompt", "answer", "topic", "group"?, "solution"?} as every silo reads them.

A file is JSON lines, one JSON array, or Parquet. The form follows from the content, never from a setting: Parquet
begins with `PAR1`, an array with `[`, all else is JSON lines. Nothing is unpickled or run: of a Parquet file only
columns of plain text are read, and no extension type (threat T22). In a silo's private files the fields may have other
names (`FieldNames`). In the public and the held-out set they may not: all silos agree on a file by its digest, and with
names of their own two of them could read other prompts from the same bytes. `solution`, an answer with its work, is
read of the public set alone (`PUBLIC`).

A bad line (broken JSON, a field missing or of the wrong type, an id that stood before) is left out, counted and
listed. Fewer than one line in twenty may be bad; from there on the file is refused. Whether a reference answer can be
read, and whether a solution is right, is the verifier's to say: `refuse_bad_references` takes those verdicts and
applies the same limit to all of them together. Further fields of a row (level, source, aliases) are ignored.

What this does not stop: a file that is small on disk and large in memory, beyond `UNPACKED_BYTES_MAX` as its own header
states the size. A site's own files and files with an agreed digest are read, nobody else's.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsilo.files.durable import read_regular
from fedsilo.files.extras import install_hint
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from pydantic import ConfigDict  # a third of a second to load, for a type

LINE_BYTES_MAX = 1 << 20
UNPACKED_BYTES_MAX = 4 << 30
_PARQUET_MARK = b"PAR1"
_PARQUET_ROWS_AT_ONCE = 1024
_SPACE = " \t\r\n"

# A place in the file, from 1, and what stands there: an object, or the reason why there is none.
Record = tuple[int, "dict[str, Any] | str"]


def unit_of(content: bytes) -> str:
    """Return the unit in which places are counted: "line" of JSON lines, else "row"."""
    return "row" if content.startswith(_PARQUET_MARK) or _is_array(_without_mark(content)) else "line"


def records_of(path: Path, content: bytes, columns: Sequence[str]) -> Iterator[Record]:
    """Yield every record of a file in order; blank lines are none.

    Args:
        path: for messages.
        content: of the file.
        columns: names of the fields that matter; of a Parquet file no others are read.

    Raises:
        UsageError: an array or a Parquet file that cannot be read on, with the place; Parquet without pyarrow.
    """
    if content.startswith(_PARQUET_MARK):
        return _parquet_rows(path, content, columns)
    content = _without_mark(content)
    return _array_elements(path, content) if _is_array(content) else _lines(content)


def _without_mark(content: bytes) -> bytes:
    """A text without the byte order mark that some editors and spreadsheets write before it."""
    return content.removeprefix(codecs.BOM_UTF8)


def _is_array(content: bytes) -> bool:
    # A line that begins with [ is no object, so such a file would hold no task as JSON lines; but a file of lines may
    # begin with a bad one. An array's first element is an object, or the array is empty.
    start = content[:4096].lstrip(_SPACE.encode())
    return start.startswith(b"[") and start[1:].lstrip(_SPACE.encode())[:1] in (b"{", b"]", b"")


def _lines(content: bytes) -> Iterator[Record]:
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, _object_of(line)


def _object_of(line: bytes) -> dict[str, Any] | str:
    if len(line) > LINE_BYTES_MAX:
        return "line too long"
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError:
        return "not UTF-8"
    except (ValueError, RecursionError):
        return "broken JSON"
    return _record_of(row)


class _Twice(dict[str, Any]):
    """An object in which a key stands more than once: programs differ in which of them they take."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else _Twice(fields)


def _record_of(value: Any) -> dict[str, Any] | str:
    if isinstance(value, _Twice):
        return "a field stands twice"
    return value if isinstance(value, dict) else "not a JSON object"


def _array_elements(path: Path, content: bytes) -> Iterator[Record]:
    try:
        elements = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8", code="TASK_FILE_INVALID") from error
    except (ValueError, RecursionError) as error:
        why = f": {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
        raise UsageError(
            f"{path}:{getattr(error, 'lineno', 1)}: the array is broken JSON{why}",
            hint="in an array one fault hides what follows; JSON lines lose one line each",
            code="TASK_FILE_INVALID",
        ) from error
    for row, element in enumerate(elements, start=1):
        yield row, _no_longer(_record_of(element))


def _no_longer(record: dict[str, Any] | str) -> dict[str, Any] | str:
    """The record, unless its texts are longer together than a line may be."""
    texts = [each for each in record.values() if isinstance(each, str)] if isinstance(record, dict) else []
    return "line too long" if sum(map(len, texts)) > LINE_BYTES_MAX else record


def _parquet_rows(path: Path, content: bytes, columns: Sequence[str]) -> Iterator[Record]:
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            f"{path} is a Parquet file, and pyarrow is not installed here", hint=install_hint("pyarrow")
        ) from error
    try:
        file = parquet.ParquetFile(pyarrow.BufferReader(content), arrow_extensions_enabled=False)
        unpacked_bytes = sum(file.metadata.row_group(each).total_byte_size for each in range(file.num_row_groups))
        if unpacked_bytes > UNPACKED_BYTES_MAX:
            raise UsageError(f"{path}: {unpacked_bytes} bytes when unpacked; at most {UNPACKED_BYTES_MAX} are read")
        names = file.schema_arrow.names
        present = [name for name in dict.fromkeys(columns) if name in names]
        if twice := [name for name in present if names.count(name) > 1]:
            raise UsageError(
                f"{path}: column {twice[0]!r} stands {names.count(twice[0])} times",
                hint="which of them is meant cannot be told: keep one",
                code="TASK_FILE_INVALID",
            )
        for name in present:
            _check_text_column(pyarrow, path, name, file.schema_arrow.field(name).type)
        row = 0
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS_AT_ONCE, columns=present):
            for values in batch.to_pylist():
                row += 1
                # A missing value is a missing field.
                yield row, _no_longer({name: value for name, value in values.items() if value is not None})
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path}: not a readable Parquet file: {str(error).splitlines()[0][:200]}", code="TASK_FILE_INVALID"
        ) from error


def _check_text_column(arrow: Any, path: Path, name: str, kind: Any) -> None:
    kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
    types = arrow.types
    if not any(fits(kind) for fits in (types.is_string, types.is_large_string, types.is_string_view, types.is_integer)):
        raise UsageError(
            f"{path}: column {name!r} holds {kind}, not text or whole numbers",
            hint="write it as text",
            code="TASK_FILE_INVALID",
        )


# ---- task files ------------------------------------------------------------------------------------------------------


BAD_SHARE_MAX = 0.05
_LISTED_MAX = 10
_FIELDS = ("id", "prompt", "answer", "topic")
_OPTIONAL = ("group", "solution")

Problem = tuple[int, str]


CLOSED: ConfigDict = {"extra": "forbid"}  # of dataclasses that no unknown field is read into


@dataclass(frozen=True)
class FieldNames:
    """Names of a task's fields in a file. solution: empty where none is read."""

    __pydantic_config__ = CLOSED
    id: str = "id"
    prompt: str = "prompt"
    answer: str = "answer"
    topic: str = "topic"
    group: str = "group"
    solution: str = ""


STANDARD = FieldNames()
PUBLIC = FieldNames(solution="solution")


@dataclass(frozen=True)
class Task:
    """A question; `group` is whose it is (a patient), or empty. `line` is its place in the file, from 1. `solution` is
    the answer with its work, or empty."""

    id: str
    prompt: str
    answer: str
    topic: str
    group: str = ""
    line: int = 0
    solution: str = ""


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

    @property
    def unsolved(self) -> str:
        """Place of the first row that has no solution; empty where each has one."""
        return next((f"{self.path}:{task.line}" for task in self.rows if not task.solution), "")


def read_tasks(path: Path, fields: FieldNames = STANDARD) -> TaskFile:
    """Read a file whole.

    Args:
        path: of the file, in any of the three forms.
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
    columns = [name for each in dataclass_fields(fields) if (name := getattr(fields, each.name))]
    for number, record in records_of(path, content, columns):
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


def refuse_bad_references(
    file: TaskFile, is_readable: Callable[[str], bool], is_right: Callable[[str, str], bool] = lambda *_: True
) -> TaskFile:
    """The file without the rows whose reference answer the verifier cannot read, or whose solution it does not grade
    right.

    Args:
        file: as read.
        is_readable: whether an answer can be compared with.
        is_right: whether a solution is, by its row's answer.

    Raises:
        UsageError: together with the lines found bad before, 5 % or more.
    """
    bad: dict[int, str] = {}
    for task in file.rows:
        if not is_readable(task.answer):
            bad[task.line] = "unparseable reference answer"
        elif task.solution and not is_right(task.solution, task.answer):
            bad[task.line] = "the solution is not right by the answer"
    rows = tuple(task for task in file.rows if task.line not in bad)
    return _within_limit(replace(file, rows=rows, problems=tuple(sorted([*file.problems, *bad.items()]))))


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
        for name in (*_FIELDS, *_OPTIONAL)
        # a null is a missing field, as it is in Parquet
        if (own := getattr(fields, name)) and (value := record.get(own)) is not None
    }
    for name in _FIELDS:
        if name not in row:
            return f"missing field {name!r}"
        if not isinstance(row[name], str) or not row[name].strip():
            return f"field {name!r} is not a text"
    group, solution = row.get("group", ""), row.get("solution")
    if not isinstance(group, str):
        return "field 'group' is not a text"
    if solution is not None and not (isinstance(solution, str) and solution.strip()):
        return "field 'solution' is not a text"
    if not _is_unicode(row):
        return "not valid Unicode"
    return Task(**{name: row[name] for name in _FIELDS}, group=group, line=number, solution=solution or "")


def _text_of(value: Any) -> Any:
    """A whole number as its decimal text, since identifiers and answers are often kept as numbers. A fraction has no
    one text, so it stays what it is, and is refused."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_unicode(row: Mapping[str, Any]) -> bool:
    """JSON may escape half a surrogate pair, which no tokenizer and no wire takes."""
    try:
        "".join(str(row.get(name, "")) for name in (*_FIELDS, *_OPTIONAL)).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _within_limit(file: TaskFile, fields: FieldNames = STANDARD) -> TaskFile:
    bad = len(file.problems)
    if bad and bad >= BAD_SHARE_MAX * file.lines:
        problems = listed(file.problems, file.unit)
        hint = (
            'each is {"id","prompt","answer","topic"} and perhaps "group", all texts or whole numbers, ids unique; '
            "other names of private files go into data.fields"
        )
        reasons = file.reasons
        if len(reasons) == 1 and bad == file.lines > 1:  # one cause, so it is told once
            problems = f"each {file.unit}: {next(iter(reasons))}"
            for name in _FIELDS:
                own = getattr(fields, name)
                if own != name and f"missing field {name!r}" in reasons:
                    problems = f"{problems}: there is no {own!r}, as data.fields calls it"
                    hint = f"data.fields.{name}: the name that the file has for it"
        raise UsageError(
            f"{file.path}: {bad} of {file.lines} {file.unit}s are bad, the limit is under {BAD_SHARE_MAX:.0%}: "
            f"{problems}",
            hint=hint,
            code="TASK_FILE_INVALID",
        )
    if not file.rows:
        raise UsageError(f"{file.path} holds no task", code="TASK_FILE_INVALID")
    return file
