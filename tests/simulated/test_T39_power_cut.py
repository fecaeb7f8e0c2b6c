"""What a party writes is on the disk when the call returns, also after a power cut (T39, L4)."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsilo.audit.log import AuditLog
from fedsilo.files import durable as files
from fedsilo.files.durable import fsync_directory
from fedsilo.files.transfer_file import TransferFile
from silo.guard.ledger import Ledger
from tests.simulated.test_transfer_file import written


def test_T39_a_commit_of_the_ledger_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def remembered(*arguments: Any, **options: Any) -> sqlite3.Connection:
        made.append(connect(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(sqlite3, "connect", remembered)
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    (connection,) = made
    settings = {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")}
    assert settings == {"journal_mode": "wal", "synchronous": 2}  # 2: FULL, of "PRAGMA synchronous" in SQLite's pages
    ledger.close()


class PowerCut:
    """What the disk holds after a power cut: file contents and folder listings as they were at their last flush."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._contents: dict[int, bytes] = {}  # by inode, which a rename keeps
        self._names: dict[Path, dict[str, int]] = {}
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._flush)

    def _flush(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            self._names[path] = {each.name: each.stat().st_ino for each in path.iterdir()}
        else:
            self._contents[path.stat().st_ino] = path.read_bytes()

    def left(self, path: Path) -> bytes | None:
        """The content found under a name; None where the name, or the content, is lost."""
        return self._contents.get(self._names.get(path.parent, {}).get(path.name, -1))


def _private(path: Path, data: bytes) -> None:
    files.write_private(path, data)


def _replaced(path: Path, data: bytes) -> None:
    path.write_bytes(b"old")
    files.write_durably(path, data)


def _in_two_parts(path: Path, data: bytes) -> None:
    files.write_durably(path, data[:3], tail=data[3:])


def _ahead(path: Path, data: bytes) -> None:
    files.WrittenAhead(path.parent, data, 0o600).keep(path)


def _plain(path: Path, data: bytes) -> None:
    path.write_bytes(data)


WRITERS = (_private, _replaced, _in_two_parts, _ahead)


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.strip("_"))
def test_T39_what_was_written_is_found_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None]
) -> None:
    disk = PowerCut(monkeypatch)
    write(tmp_path / "file", b"content")
    assert disk.left(tmp_path / "file") == b"content"
    _plain(tmp_path / "other", b"content")  # the counterpart
    assert disk.left(tmp_path / "other") is None


def test_T39_what_was_removed_does_not_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = PowerCut(monkeypatch)
    for name in ("removed", "unlinked"):
        files.write_durably(tmp_path / name, b"content")
    files.remove_durably(tmp_path / "removed")
    assert disk.left(tmp_path / "removed") is None
    (tmp_path / "unlinked").unlink()  # the counterpart: its folder was not flushed
    assert disk.left(tmp_path / "unlinked") == b"content"


def test_T39_a_file_for_carrying_is_found_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = PowerCut(monkeypatch)
    path = written(tmp_path / "x.zip", b"payload")
    assert disk.left(path) == path.read_bytes()
    with TransferFile(path) as file:
        file.copy_to(tmp_path / "copy.zip")
    fsync_directory(tmp_path)  # as its caller does, after a rename
    assert disk.left(tmp_path / "copy.zip") == path.read_bytes()


def test_T39_each_record_of_the_audit_log_is_found_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = PowerCut(monkeypatch)
    key = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
    with AuditLog(tmp_path / "audit", origin="spiffe://x/silo/a", key=key, actor="spiffe://x/silo/a") as log:
        for number in range(3):
            log.append("start")
            left = disk.left(tmp_path / "audit" / "000000000000.jsonl")
            assert left is not None and left.count(b"\n") == number + 1
