"""The coordinator on SQLite, and the addresses of databases that it takes."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import String, func, select, text

from coordinator import store as db
from coordinator.config import load_config
from coordinator.store import database_url, shown_url
from fedsilo.control.site_files import settings_of
from fedsilo.files.durable import DiskFullError
from fedsilo.protocol.errors import OperationError, UsageError
from tests.coordinator_folder import write_coordinator
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


@pytest.mark.slow
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


SECRET = "S3CRET"


@pytest.mark.parametrize(("text", "shown"), [
    (f"postgresql://fedsilo:{SECRET}@db.example.org:5432/runs", "postgresql://fedsilo:***@db.example.org:5432/runs"),
    (f"postgresql://db/runs?user=f&password={SECRET}", "postgresql://db/runs?password=hidden&user=f"),
    (f"postgresql://db/runs?pass%77ord={SECRET}", "postgresql://db/runs?password=hidden"),
    (f"postgresql://db/runs?sslpassword={SECRET}&sslkey=k", "postgresql://db/runs?sslkey=k&sslpassword=hidden"),
    (f"postgresql://db/runs?scram_client_key={SECRET}", "postgresql://db/runs?scram_client_key=hidden"),
    (f"postgresql://f:a@{SECRET}@db/runs", "***"),  # written wrong: nobody knows where the password ends
    (f"postgresql://f:{SECRET}@db:port/runs", "***"),
    (f"f:{SECRET}@db", "***"),
    ("postgresql://fedsilo@/runs?host=/run/postgresql", "postgresql://fedsilo@/runs?host=%2Frun%2Fpostgresql"),
    ("sqlite:////var/lib/fedsilo/coordinator.db", "sqlite:////var/lib/fedsilo/coordinator.db"),
    ("", ""),
])  # fmt: skip
def test_a_url_is_shown_without_a_password(text: str, shown: str) -> None:
    assert shown_url(text) == shown


@pytest.mark.parametrize("text", [
    "postgresql://fedsilo@db/runs", "postgres://fedsilo@db/runs", "postgresql+psycopg://fedsilo@db/runs",
])  # fmt: skip
def test_every_spelling_is_dialled_by_the_one_driver(text: str) -> None:
    assert database_url(text).drivername == "postgresql+psycopg"


@pytest.mark.parametrize(("text", "mode"), [
    ("postgresql://db.example.org/runs", "verify-full"),
    ("postgresql://localhost,db.example.org/runs", "verify-full"),
    ("postgresql:///runs?host=localhost&host=db.example.org", "verify-full"),
    ("postgresql:///runs?hostaddr=10.0.0.7", "verify-full"),
    ("postgresql:///runs", "verify-full"),  # wherever the library then goes
    ("postgresql://127.0.0.1:5432/runs", None), ("postgresql://[::1]/runs", None),
    ("postgresql://localhost/runs", None),
    ("postgresql://db.example.org/runs?sslmode=require", "require"),  # somebody's own word
])  # fmt: skip
def test_another_host_is_dialled_by_tls_with_its_name_checked(text: str, mode: str | None) -> None:
    assert database_url(text).query.get("sslmode") == mode


@pytest.mark.parametrize("text", [
    f"mysql://fedsilo:{SECRET}@db/runs", f"postgresql+psycopg2://f:{SECRET}@db/runs", f"{SECRET}",
    f"postgresql://f:{SECRET}@db", f"postgresql://f:a@{SECRET}@db/runs",
    f"postgresql://f:{SECRET}@db/runs?prepare_threshold=0", f"postgresql://db/runs?autocommit={SECRET}",
])  # fmt: skip
def test_any_other_url_is_refused_with_its_line_and_without_its_text(tmp_path: Path, text: str) -> None:
    path = write_coordinator(tmp_path, ["hospital_a"])
    good = path.read_text()
    path.write_text(f"{good}database: postgresql://fedsilo:{SECRET}@db/runs\n")
    load_config(path)
    path.write_text(f"{good}database: {json.dumps(text)}\n")
    with pytest.raises(UsageError) as refused:
        load_config(path)
    line = good.count("\n") + 1
    assert refused.value.message.startswith(f"{path}:{line}: database: the database's URL names")
    assert SECRET not in refused.value.line


def test_no_setting_shows_the_password(tmp_path: Path) -> None:
    path = write_coordinator(tmp_path, ["hospital_a"])
    path.write_text(f"{path.read_text()}database: postgresql://fedsilo:{SECRET}@db/runs\n")
    config = load_config(path)
    assert SECRET in config.database_url  # the counterpart: it is there, for the one who dials
    rows = {row.key: row.value for row in settings_of(config, path)}
    assert rows["database"] == "postgresql://fedsilo:***@db/runs" and rows["payloads"] == ""
    assert SECRET not in repr(config) + json.dumps(rows)
