"""PostgreSQL under the coordinator: all that is asked of any database, one coordinator at a time, and its refusals."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text

from coordinator import store
from coordinator import store as db
from coordinator.answers.queries import SentView
from coordinator.answers.rounds import curves_answer
from coordinator.backup import snapshot_of, told_to_programs
from coordinator.record import run_record
from coordinator.store import CONNECTIONS, DatabaseLostError, Store, database_url
from fedsilo.audit.segments import segments
from fedsilo.control.answers import to_json
from fedsilo.files.durable import DiskFullError
from fedsilo.protocol.errors import ConflictError, FedSiloError, OperationError, UsageError
from tests.postgres_server import PostgresServer
from tests.simulated.coordinator_parts import SHORT, House, federation, goes_on, in_midst, until_quiet
from tests.simulated.store_suite import StoreSuite, run_row

OURS = (
    "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'fedsilo %%' AND datname = %s ORDER BY backend_start"
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for nobody: for tests in which the other coordinator stays."""
    monkeypatch.setattr(store, "WAIT_SECONDS", 0.05)


class TestPostgresql(StoreSuite):
    @pytest.fixture
    def url(self, postgresql_url: str) -> str:
        return postgresql_url

    def test_a_commit_waits_for_the_disk_although_the_server_would_not(
        self, opened: Any, postgresql: PostgresServer
    ) -> None:
        with opened().transaction() as session:
            values = [session.execute(text(f"SHOW {name}")).scalar()
                      for name in ("synchronous_commit", "transaction_isolation")]  # fmt: skip
        assert values == ["on", "repeatable read"]
        assert postgresql.execute("SHOW synchronous_commit") == [("off",)]

    def test_a_reader_sees_one_moment(self, opened: Any) -> None:
        store = opened()
        with store.transaction() as reader:
            assert reader.scalars(select(db.Run.name)).all() == []
            with store.transaction() as writer:
                writer.add(run_row())
            assert reader.scalars(select(db.Run.name)).all() == []
        with store.transaction() as reader:
            assert reader.scalars(select(db.Run.name)).all() == ["run-1"]

    def test_of_two_writers_that_meet_in_a_row_the_second_is_refused_by_name(self, opened: Any) -> None:
        store = opened()
        with store.transaction() as session:
            db.set_sequence(session, "a", "", "out", 1)
        with pytest.raises(OperationError) as refused, store.transaction() as second:
            assert db.sequence_of(second, "a", "", "out") == 1
            with store.transaction() as first:
                db.set_sequence(first, "a", "", "out", 2)
            db.set_sequence(second, "a", "", "out", 3)
        assert refused.value.code == "DATABASE_CONFLICT"
        with store.transaction() as session:
            assert db.sequence_of(session, "a", "", "out") == 2

    # ---- one coordinator -------------------------------------------------------------------------------

    @pytest.mark.usefixtures("impatient")
    def test_T42_a_second_coordinator_is_refused_while_the_first_is_there(self, url: str) -> None:
        first = Store(url)
        with pytest.raises(ConflictError, match=r"another coordinator: fedsilo .* at this machine") as refused:
            Store(url)
        assert refused.value.code == "DATABASE_IN_USE" and refused.value.hint
        with first.transaction() as session:
            session.add(run_row())
        first.close()
        second = Store(url)
        with second.transaction() as session:
            assert session.scalars(select(db.Run.name)).all() == ["run-1"]
        second.close()

    @pytest.mark.usefixtures("impatient")
    @pytest.mark.parametrize("left", [1, CONNECTIONS])
    def test_T42_a_coordinator_with_one_connection_left_keeps_every_other_out(
        self, url: str, postgresql: PostgresServer, left: int
    ) -> None:
        """Its lock for the opening is gone with the first; each other one may still commit."""
        first = Store(url)
        processes = [pid for (pid,) in postgresql.execute(OURS, (database_url(url).database,))]
        assert len(processes) == CONNECTIONS
        for pid in processes[: CONNECTIONS - left]:
            end(postgresql, pid)
        with pytest.raises(ConflictError):
            Store(url)
        for pid in processes[CONNECTIONS - left :]:
            end(postgresql, pid)
        second = Store(url)
        with pytest.raises(DatabaseLostError), first.transaction() as session:
            session.add(run_row())
        with second.transaction() as session:
            assert session.scalars(select(db.Run.name)).all() == []
        for each in (first, second):
            each.close()

    # ---- refusals by name ------------------------------------------------------------------------------

    def test_a_lost_connection_is_not_made_again_and_a_start_takes_up(
        self, opened: Any, url: str, postgresql: PostgresServer
    ) -> None:
        store, undone = opened(), []
        with store.transaction() as session:
            session.add(run_row())
        with pytest.raises(DatabaseLostError) as lost, store.transaction() as session:
            store.once_undone(lambda: undone.append("undone"))
            session.add(run_row("run-2"))
            session.flush()
            end(postgresql, session.scalar(text("SELECT pg_backend_pid()")))
        assert (lost.value.code, undone) == ("DATABASE_LOST", ["undone"])
        for _ in range(2):
            with pytest.raises(DatabaseLostError, match="lost"), store.transaction() as session:
                session.scalars(select(db.Run.name)).all()
        with opened().transaction() as session:
            assert session.scalars(select(db.Run.name)).all() == ["run-1"]

    @pytest.mark.parametrize(("condition", "code"), [
        ("disk_full", "DISK_FULL"), ("admin_shutdown", "DATABASE_LOST"), ("connection_failure", "DATABASE_LOST"),
        ("serialization_failure", "DATABASE_CONFLICT"), ("out_of_memory", "FAILED"),
        ("read_only_sql_transaction", "FAILED"),
    ])  # fmt: skip
    def test_what_the_server_says_has_a_name_and_leaves_nothing(self, opened: Any, condition: str, code: str) -> None:
        """The codes are the server's own; a disk that is really full gives the first."""
        store = opened()
        with pytest.raises(OperationError) as refused, store.transaction() as session:
            session.add(run_row())
            session.flush()
            session.execute(text(f"DO $$ BEGIN RAISE {condition}; END $$"))
        assert refused.value.code == code
        assert isinstance(refused.value, DiskFullError) == (condition == "disk_full")
        with store.transaction() as session:
            assert session.scalars(select(db.Run.name)).all() == []

    def test_an_error_that_is_ours_keeps_its_own_name_and_tells_no_values(self, opened: Any) -> None:
        store = opened()
        with pytest.raises(Exception, match="value too long") as found, store.transaction() as session:
            session.add(run_row(state="x" * 17, request="SECRET"))
        assert not isinstance(found.value, FedSiloError) and "SECRET" not in str(found.value)

    # ---- opening ---------------------------------------------------------------------------------------

    def test_a_missing_driver_is_named_with_its_extra(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "psycopg", None)
        address = database_url(url)
        for use in (lambda: Store(url), lambda: told_to_programs(address), lambda: snapshot_of(address).__enter__()):
            with pytest.raises(UsageError) as refused:
                use()
            assert refused.value.code == "EXTRA_MISSING" and "fedsilo[postgres]" in refused.value.hint

    def test_a_server_that_is_not_there_is_named_without_the_password(self, tmp_path: Path) -> None:
        with pytest.raises(OperationError) as refused:
            Store(f"postgresql://fedsilo:S3CRET@/runs?host={tmp_path}")
        assert refused.value.code == "DATABASE_UNREACHABLE" and "fedsilo:***@/runs" in refused.value.message
        assert "S3CRET" not in refused.value.line

    def test_a_database_that_does_not_keep_every_character_is_refused(self, postgresql: PostgresServer) -> None:
        with (
            postgresql.database(options="TEMPLATE template0 ENCODING 'LATIN1'") as url,
            pytest.raises(UsageError, match="keeps text as LATIN1") as refused,
        ):
            Store(url)
        assert refused.value.code == "DATABASE_ENCODING"


def end(server: PostgresServer, process: int) -> None:
    """End one connection, and wait until the server has."""
    assert server.execute("SELECT pg_terminate_backend(%s, 10000)", (process,)) == [(True,)]


# ---- a whole run ---------------------------------------------------------------------------------------


def played(folder: Path, **of_house: Any) -> House:
    house, silos = federation(folder, **of_house)
    house.submit(SHORT)
    for silo in silos:
        silo.join()
    until_quiet(silos)
    assert house.run().state == "finished"
    return house


def rows_of(house: House) -> dict[str, list[Any]]:
    with house.store.transaction() as session:
        return {
            table.name: sorted(map(repr, session.execute(select(table)))) for table in db.Base.metadata.sorted_tables
        }


def answers_of(house: House) -> list[str]:
    """What people are told of it, as they are told it."""
    reading = house.store.transaction
    pages, before = [], None
    while not pages or before:
        pages.append(SentView(reading).outbox({"limit": 5, "control": True, **({"before": before} if before else {})}))
        before = pages[-1].next
    with reading() as session:
        run = session.get_one(db.Run, "run-1")
        told = [curves_answer(session, {}), run_record(session, run, charter_digest=""), db.traffic_table(session)]
    assert len(pages) > 1
    return [json.dumps(to_json(answer)) for answer in (*pages, *told)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> House:
    """On SQLite, undisturbed."""
    house = played(tmp_path_factory.mktemp("whole"))
    house.close()
    return house


def test_a_whole_run_leaves_the_same_rows_in_both_databases(whole: House, tmp_path: Path, postgresql_url: str) -> None:
    house = played(tmp_path, database=postgresql_url)
    here, there = map(rows_of, (whole, house))
    # records of the log have salts, and with them its root
    assert here.pop("log_places") and there.pop("log_places")
    assert here == there and len(here["uploads"]) > 15
    assert whole.record() == house.record()
    assert answers_of(whole) == answers_of(house)
    house.close()


@pytest.mark.slow
def test_T38_a_standby_goes_on_in_the_midst_of_a_round_and_starts_with_nothing_less(
    whole: House, tmp_path: Path, postgresql_url: str
) -> None:
    """What the two machines share: the database, the audit log up to its last record, and the payloads."""
    house, silos = in_midst(tmp_path / "first", SHORT, database=postgresql_url)
    assert house.driver.runs["run-1"].life.open_round == 1
    house.close()

    with pytest.raises(ConflictError, match="has 0 records") as refused:
        standby(house, "no log", "blobs")
    assert refused.value.code == "LOG_BEHIND"
    older = tmp_path / "older" / "audit"
    shutil.copytree(house.folder / "audit", older)
    shutil.rmtree(older / "checkpoints")
    [(_, segment)] = segments(older)
    lines = segment.read_bytes().splitlines(keepends=True)
    while json.loads(lines.pop())["event"] == "ingress.polls":
        pass  # the counts of polls, appended by a stop after the database was last used
    segment.write_bytes(b"".join(lines))
    with pytest.raises(ConflictError) as refused:
        standby(house, "older", "blobs")
    assert refused.value.code == "LOG_BEHIND"

    with pytest.raises(OperationError, match=r"payload [0-9a-f]{64} is missing"):
        standby(house, "no payloads", "audit")

    second = standby(house, "second", "audit", "blobs")
    run = goes_on(second, silos)
    assert (run.state, run.adapter_digest) == ("finished", whole.run().adapter_digest)
    second.close()


def standby(first: House, name: str, *shared: str) -> House:
    """A coordinator on another machine: another folder with what is shared, and the same database."""
    folder = first.folder.parent / name
    for each in shared:
        shutil.copytree(first.folder / each, folder / each)
    return House(folder, clock=first.clock, database=first.database)
