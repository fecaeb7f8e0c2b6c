"""A folder the demo can run on (`fedsilo demo --data DIR`), and how one is written and read.

DIR/demo.yaml              names every file's verifier, the tokenizer and the lengths
DIR/private/SILO.jsonl     one file per silo; its name is the silo's name
DIR/public.jsonl           the public prompts, the same for all
DIR/held_out.jsonl         what pass@1 is measured on
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedsilo.files.durable import read_regular
from fedsilo.grading.verifier_names import OwnPartsVerifier
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, UsageError
from fedsilo.protocol.strict_yaml import load, validate

PUBLIC = "public.jsonl"
HELD_OUT = "held_out.jsonl"
DESCRIPTION = "demo.yaml"
_SILO_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")

Row = Mapping[str, Any]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Closed):
    verifier: OwnPartsVerifier  # the demo's coordinator reads it too


class Lengths(_Closed):
    """Tokens a prompt and an answer may have; a longer prompt is left out and counted by the trainer."""

    max_prompt_tokens: Annotated[int, Field(ge=1)]
    max_new_tokens: Annotated[int, Field(ge=1)]


class Description(_Closed):
    """`demo.yaml`. `tokenizer` says which tiny model fits: `digits` for the demo's own set, `bytes` for any text."""

    name: str
    tokenizer: Literal["digits", "bytes"]
    lengths: Lengths
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class TaskSource:
    path: Path
    verifier: str


@dataclass(frozen=True)
class DataFolder:
    """What stands in a folder: `private` by silo name in ascending order."""

    root: Path
    description: Description
    private: dict[str, TaskSource]
    public: TaskSource
    held_out: TaskSource


def silo_names(count: int) -> tuple[str, ...]:
    """hospital_a, hospital_b, ...; from the 27th on a number."""
    return tuple(f"hospital_{chr(ord('a') + index) if index < 26 else index + 1}" for index in range(count))


def read_data_folder(root: Path) -> DataFolder:
    """Read `demo.yaml` and check that the files it names are there. The rows are not read.

    Raises:
        NotFoundError: the folder or a file in it is missing.
        UsageError: `demo.yaml` does not fit, names an unknown verifier, or leaves a private file out.
    """
    path = root / DESCRIPTION
    if not path.is_file():
        raise NotFoundError(f"{path} is missing", hint="write such a folder with `fedsilo data from-sets DIR`")
    document = load(read_regular(path), str(path))
    description = validate(Description, document)
    sources: dict[str, TaskSource] = {}
    for name, entry in description.files.items():
        line = document.line_of(("files", name))
        if name not in {PUBLIC, HELD_OUT} and not _is_private(name):
            raise UsageError(f"{path}:{line}: {name!r} is not {PUBLIC}, {HELD_OUT} or private/SILO.jsonl")
        if not (root / name).is_file():
            raise NotFoundError(
                f"{path}:{line}: {root / name} is missing",
                hint="copy the whole folder again, or write one with `fedsilo data from-sets DIR`",
            )
        sources[name] = TaskSource(root / name, entry.verifier)
    private_names = sorted(f"private/{found.name}" for found in (root / "private").glob("*.jsonl"))
    for name in (PUBLIC, HELD_OUT, *private_names):
        if name not in sources:
            raise UsageError(f"{path}: names no verifier for {name}", hint=f'add "{name}: {{verifier: exact}}"')
    if not private_names:
        raise UsageError(f"{root / 'private'} holds no SILO.jsonl")
    private = {Path(name).stem: sources[name] for name in private_names}
    return DataFolder(root, description, private, sources[PUBLIC], sources[HELD_OUT])


def write_data_folder(
    root: Path,
    *,
    name: str,
    tokenizer: Literal["digits", "bytes"],
    lengths: Lengths,
    private: Mapping[str, tuple[str, Sequence[Row]]],
    public: tuple[str, Sequence[Row]],
    held_out: tuple[str, Sequence[Row]],
) -> DataFolder:
    """Write a whole folder at once: after a failure nothing stands at `root`.

    Args:
        root: must not exist, or be empty.
        name: of the set, for people.
        tokenizer: which tiny model can read the texts.
        lengths: in that tokenizer's tokens.
        private: for each silo its verifier and its rows.
        public: verifier and rows.
        held_out: verifier and rows.

    Raises:
        ConflictError: something is at `root` already.
        OperationError: the disk refused.
        UsageError: a silo name does not fit.
    """
    for silo in private:
        if not _SILO_NAME.fullmatch(silo):
            raise UsageError(f"silo name {silo!r} does not fit: lower-case letters, digits, - and _")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConflictError(f"{root} exists and is not empty", hint="name another folder")
    parts = {f"private/{silo}.jsonl": part for silo, part in private.items()} | {PUBLIC: public, HELD_OUT: held_out}
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{root.name}.", dir=root.parent))
        try:
            (scratch / "private").mkdir()
            for file_name, (_, rows) in parts.items():
                (scratch / file_name).write_bytes(to_json_lines(rows))
            verifiers = {file_name: verifier for file_name, (verifier, _) in parts.items()}
            (scratch / DESCRIPTION).write_text(_describe(name, tokenizer, lengths, verifiers), encoding="utf-8")
            scratch.chmod(0o755)
            os.replace(scratch, root)  # noqa: PTH105  # Path.replace says the same; an empty folder may be replaced
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise OperationError(f"cannot write {root}: {error.strerror}") from error
    return read_data_folder(root)


def to_json_lines(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows).encode()


def _is_private(name: str) -> bool:
    folder, _, file_name = name.partition("/")
    return folder == "private" and file_name.endswith(".jsonl") and bool(_SILO_NAME.fullmatch(file_name[:-6]))


def _describe(name: str, tokenizer: str, lengths: Lengths, verifiers: Mapping[str, str]) -> str:
    lines = [
        "# What `fedsilo demo --data` needs to know about this folder.",
        f"name: {name}",
        "# which tiny model can read the texts: digits (24 characters) or bytes (any UTF-8)",
        f"tokenizer: {tokenizer}",
        "# a prompt above max_prompt_tokens is left out and counted; an answer is cut at max_new_tokens",
        f"lengths: {{max_prompt_tokens: {lengths.max_prompt_tokens}, max_new_tokens: {lengths.max_new_tokens}}}",
        "# how the answers of each file are checked",
        "files:",
        *(f"  {file_name}: {{verifier: {verifier}}}" for file_name, verifier in verifiers.items()),
    ]
    return "\n".join(lines) + "\n"
