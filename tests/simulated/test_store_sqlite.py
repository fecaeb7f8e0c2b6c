"""SQLite under the coordinator: all that is asked of any database, and its own settings."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import String, func, select, text

from coordinator import store as db
from fedsilo.files.durable import DiskFullError
from fedsilo.protocol.errors import OperationError
from tests.simulated.coordinator_parts import joined, until_quiet
from tests.simulated.store_suite import StoreSuite, run_row


class TestSqlite(StoreSuite):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path / 'coordinator.db'}"

    def test_a_commit_is_on_the_disk(self, opened: Any) -> None:
        with opened().transaction() as session:
            values = {
                name: session.execute(text(f"PRAGMA {name}")).scalar() for name in ("journal_mode", "synchronous")
            }
        assert values == {"journal_mode": "wal", "synchronous": 2}  # 2: FULL

    def test_a_full_disk_has_a_name_and_leaves_nothing(self, opened: Any, tmp_path: Path) -> None:
        store = opened()
        with store.transaction() as session:
            session.add(run_row())
        with pytest.raises(DiskFullError), store.transaction() as session:
            pages = session.execute(text("PRAGMA page_count")).scalar()
            session.execute(text(f"PRAGMA max_page_count = {pages}"))
            session.add(run_row("run-2", request="x" * 1_000_000))
        with sqlite3.connect(tmp_path / "coordinator.db") as plain:
            assert plain.execute("SELECT name FROM runs").fetchall() == [("run-1",)]

    def test_whether_it_answers_is_asked_of_its_file(self, opened: Any, tmp_path: Path) -> None:
        store = opened()
        store.ask()
        store.close()  # what a connection has read it may answer from
        for leftover in tmp_path.glob("coordinator.db-*"):
            leftover.unlink()
        path = tmp_path / "coordinator.db"
        path.write_bytes(b"\xff" * path.stat().st_size)
        with pytest.raises(OperationError) as told:
            store.ask()
        assert told.value.code == "DATABASE_DAMAGED"


def test_what_a_whole_run_writes_fits_the_width_of_its_columns(tmp_path: Path) -> None:
    """SQLite takes any width; PostgreSQL refuses what is wider than the column says."""
    house, silos = joined(tmp_path)
    until_quiet(silos)
    assert house.run().state == "finished"
    widths: dict[str, tuple[int, int]] = {}
    with house.store.transaction() as session:
        for table in db.Base.metadata.sorted_tables:
            for column in table.columns:
                if isinstance(column.type, String) and column.type.length:
                    widest = session.scalar(select(func.max(func.length(column)))) or 0
                    widths[str(column)] = widest, column.type.length
    assert {name: each for name, each in widths.items() if each[0] > each[1]} == {}
    assert widths["rounds.base_digest"] == (64, 64)  # the counterpart: it is the rows that were measured
