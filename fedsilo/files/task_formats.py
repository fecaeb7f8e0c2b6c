"""The forms a task file may have: JSON lines, one JSON array, or Parquet. Bytes in, records out.

The form follows from the content, never from a setting: Parquet begins with `PAR1`, an array with `[`, all else is
JSON lines. Nothing is unpickled or run: of a Parquet file only columns of plain text are read, and no extension type
(threat T22). What this does not stop: a file that is small on disk and large in memory, beyond `UNPACKED_BYTES_MAX`
as its own header states the size. A site's own files and files with an agreed digest are read, nobody else's.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedsilo.files.extras import install_hint
from fedsilo.protocol.errors import UsageError

LINE_BYTES_MAX = 1 << 20
UNPACKED_BYTES_MAX = 4 << 30
_PARQUET_MARK = b"PAR1"
_PARQUET_ROWS_AT_ONCE = 1024
_SPACE = " \t\r\n"

# A place in the file, from 1, and what stands there: an object, or the reason why there is none.
Record = tuple[int, "dict[str, Any] | str"]


def unit_of(content: bytes) -> str:
    """What a place counts: "line" of JSON lines, else "row"."""
    return "row" if content.startswith(_PARQUET_MARK) or _is_array(_without_mark(content)) else "line"


def records_of(path: Path, content: bytes, columns: Sequence[str]) -> Iterator[Record]:
    """Every record of a file in order; blank lines are none.

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
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Twice(found)


def _record_of(value: Any) -> dict[str, Any] | str:
    if isinstance(value, _Twice):
        return "a field stands twice"
    return value if isinstance(value, dict) else "not a JSON object"


def _array_elements(path: Path, content: bytes) -> Iterator[Record]:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{path}:{line}: not UTF-8", code="TASK_FILE_INVALID") from error
    decoder = json.JSONDecoder(object_pairs_hook=_object)
    place = _skip(text, text.index("[") + 1)
    row = 0
    while text[place : place + 1] != "]":
        row += 1
        try:
            element, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise _broken(path, text, place, f"row {row} is broken JSON") from error
        if end - place > LINE_BYTES_MAX:
            yield row, "line too long"
        else:
            yield row, _record_of(element)
        place = _skip(text, end)
        if text[place : place + 1] == ",":
            place = _skip(text, place + 1)
        elif text[place : place + 1] != "]":
            raise _broken(path, text, place, f"after row {row} neither , nor ]")
    if _skip(text, place + 1) != len(text):
        raise _broken(path, text, _skip(text, place + 1), "something follows the array")


def _skip(text: str, place: int) -> int:
    while text[place : place + 1] and text[place] in _SPACE:
        place += 1
    return place


def _broken(path: Path, text: str, place: int, what: str) -> UsageError:
    return UsageError(
        f"{path}:{text.count(chr(10), 0, place) + 1}: {what}",
        hint="in an array one fault hides what follows; JSON lines lose one line each",
        code="TASK_FILE_INVALID",
    )


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
                found = {name: value for name, value in values.items() if value is not None}
                size = sum(len(value) for value in found.values() if isinstance(value, str))
                yield row, "line too long" if size > LINE_BYTES_MAX else found
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
