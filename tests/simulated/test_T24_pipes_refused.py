"""T24: a file that a site names may be a pipe that nobody writes into; no reader waits for it, a real file is read."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from certs.authority import create_ca
from coordinator import main
from coordinator.config import load_config as load_coordinator
from fedsilo.audit import proofs as audit_proofs
from fedsilo.cli.public import lint_set
from fedsilo.control.site_files import certificate_file, settings_of
from fedsilo.demo.data import DESCRIPTION, read_data_folder
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol.errors import FedSiloError
from silo.config import load_config as load_silo
from silo.config import place_of

WAIT_SECONDS = 20.0  # a read takes milliseconds; a reader that waits for a pipe waits for ever
UNKNOWN_KEY = b"no_such_key: 1\n"
TASK = b'{"id": "1", "prompt": "how many?", "answer": "3", "topic": "count"}\n'
CERTIFICATE = create_ca("consortium", kind="site", not_before=datetime(2026, 1, 1, tzinfo=UTC), days=30).certificate_pem


class Keys(BaseModel):
    silo: str = "a"


def an_export(records: Path) -> Any:
    (records.parent / audit_proofs.PROOFS).write_text('{"proofs": []}')
    return audit_proofs.check(records.parent)


# by name: the file's name, its content, what shows that it was read, and the reader
Reader = tuple[str, bytes, str, Callable[[Path], Any]]
READERS: dict[str, Reader] = {
    "silo.yaml": ("silo.yaml", UNKNOWN_KEY, "no_such_key", load_silo),
    "place of a key": ("silo.yaml", b"silo: a\n", "silo.yaml:1", lambda path: place_of(_of(path), "silo")),
    "settings": ("silo.yaml", b"silo: a\n", "silo.yaml:1", lambda path: settings_of(Keys(), path)),
    "coordinator.yaml": ("coordinator.yaml", UNKNOWN_KEY, "no_such_key", load_coordinator),
    "charter": ("charter.yaml", b"as it stands", "as it stands", lambda path: main._read(path, "coordinator init")),
    "tasks": ("tasks.jsonl", TASK, "how many?", read_tasks),
    "public set": ("public.jsonl", b"no task\n", "Finding(", lambda path: lint_set(path, private=(), canaries=(), n=8)),
    "data folder": (DESCRIPTION, UNKNOWN_KEY, "no_such_key", lambda path: read_data_folder(path.parent)),
    "proof": ("proof.json", b"[]", "is no proof", audit_proofs.check),
    "export": (audit_proofs.RECORDS, b"no line end", "whole line", an_export),
    "certificate": ("x.crt", CERTIFICATE, "consortium", lambda path: certificate_file("x", path, 0.0)),
}


def _of(source: Path) -> Any:
    return SimpleNamespace(source=source)


def outcome(read: Callable[[Path], Any], path: Path) -> str:
    """What it gave, or what it refused with, in a thread of its own."""
    told: list[str] = []

    def work() -> None:
        try:
            told.append(str(read(path)))
        except FedSiloError as error:
            told.append(f"{error.message} {error.hint}")

    reader = threading.Thread(target=work, daemon=True)
    reader.start()
    reader.join(WAIT_SECONDS)
    if reader.is_alive():
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # lets it go
        reader.join(WAIT_SECONDS)
        raise AssertionError("it waits for a writer")
    return told[0]


@pytest.mark.parametrize("name", READERS)
def test_T24_a_pipe_is_not_waited_for_and_a_file_is_read(name: str, tmp_path: Path) -> None:
    file, content, shows, read = READERS[name]
    path = tmp_path / file
    os.mkfifo(path)
    assert shows not in outcome(read, path)
    path.unlink()
    path.write_bytes(content)
    assert shows in outcome(read, path)


@pytest.mark.parametrize("name", ["silo.yaml", "coordinator.yaml", "charter", "tasks", "public set"])
def test_what_is_wrong_with_a_name_is_said(name: str, tmp_path: Path) -> None:
    file, _, _, read = READERS[name]
    path = tmp_path / file
    assert f"{path} does not exist" in outcome(read, path)
    os.mkfifo(path)
    assert f"cannot read {path}: it is a pipe, a device or a socket, not a file" in outcome(read, path)
    path.unlink()
    path.mkdir()
    assert f"cannot read {path}: it is a folder, not a file" in outcome(read, path)
