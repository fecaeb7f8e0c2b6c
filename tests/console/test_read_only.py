"""A silo's ledger read beside its daemon, or without one: complete, and with nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsilo.files.sqlite_file import read_only_address
from silo.guard.ledger import Ledger


@pytest.mark.parametrize("closed", [True, False], ids=["without its daemon", "beside its daemon"])
def test_reading_a_ledger_leaves_nothing_behind_and_misses_nothing(tmp_path: Path, closed: bool) -> None:
    path = tmp_path / "ledger.sqlite3"
    daemon = Ledger(path)
    daemon.accept_sequence("", 41)
    if closed:
        daemon.close()
    before = {each.name: each.stat().st_size for each in tmp_path.iterdir()}
    assert ("ledger.sqlite3-wal" in before) == (not closed)
    assert ("immutable" in read_only_address(path)) == closed
    reader = Ledger(path, read_only=True)
    try:
        (row,) = reader._database.execute("SELECT value FROM sequences WHERE direction='in'")
        assert row["value"] == 41  # written, and beside a daemon only in its log yet
        assert {each.name: each.stat().st_size for each in tmp_path.iterdir()} == before
    finally:
        reader.close()
        if not closed:
            daemon.close()
