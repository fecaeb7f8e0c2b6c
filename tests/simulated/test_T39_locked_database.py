"""T39, case L2: another process holds a lock on a party's database for longer than SQLite waits. Nothing halts, its
status names the cause, and all goes on by itself; a disk that is full still halts, with its own words."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.control.answers import to_json
from fedsilo.files import sqlite_file
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError
from silo.guard import main
from silo.guard.ledger import Ledger
from silo.guard.ledger_check import open_ledger
from tests.simulated.coordinator_parts import joined
from tests.simulated.policy_site import PolicySite, text_of
from tests.simulated.test_coordinator_ingress import code_of
from tests.simulated.test_silo_standing import control_of
from tests.world import OUR_KEY, Loop

HOLD = """
import sqlite3, sys
held = sqlite3.connect(sys.argv[1], isolation_level=None)
held.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.readline()
held.execute("ROLLBACK")
"""


@contextmanager
def locked(database: Path) -> Iterator[Callable[[], None]]:
    """A process of its own holds the lock until what is yielded is called."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(database)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"

        def let_go() -> None:
            assert holder.stdin is not None
            holder.stdin.write("\n")
            holder.stdin.flush()
            holder.wait(20)

        try:
            yield let_go
        finally:
            holder.kill()


def until(reached: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 30
    while not (found := reached()):
        assert time.monotonic() < deadline, "it was waited for in vain"
        threading.Event().wait(0.02)
    return found


def beyond(seconds: float) -> None:
    """The lock is held for longer than that."""
    threading.Event().wait(seconds)


@contextmanager
def doing(work: Callable[[], Any]) -> Iterator[list[Any]]:
    """What `work` came to, on a thread of its own, once it is done."""
    came: list[Any] = []

    def do() -> None:
        try:
            came.append(work())
        except OperationError as error:
            came.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    try:
        yield came
    finally:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.slow
def test_T39_a_locked_ledger_is_waited_for_and_named_and_the_silo_goes_on_by_itself(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "TRY_SECONDS", 0.05)
    loop.offer_plan()
    ledger, polls = loop.bench.ledger, len(loop.coordinator.bodies("control.poll"))
    database = loop.folder / "ledger.sqlite3"
    with locked(database) as let_go, doing(loop.turn) as came:
        told = until(lambda: ledger.locked.waiting)
        assert str(database) in told and "locked by another process" in told and "space" not in told
        loop.desk.before_snapshot()
        assert loop.desk.states[-1]["waits"] == told and loop.desk.states[-1]["halted"] == ""
        assert ledger.releases("held") == [], "whoever looks does not wait"
        beyond(1.0)  # many of its tries
        assert len(loop.coordinator.bodies("control.poll")) == polls and came == [], "nothing left that is not counted"
        let_go()
    assert came == [None] and loop.bench.judge.halted == "" and loop.bench.events("halt") == []
    assert len(loop.coordinator.bodies("control.poll")) == polls + 1
    assert ledger.locked.waiting == ""
    loop.turn()
    assert loop.desk.states[-1]["waits"] == ""


@pytest.mark.slow
def test_T39_a_silo_that_is_stopped_waits_for_no_lock(loop: Loop) -> None:
    with locked(loop.folder / "ledger.sqlite3") as let_go, doing(loop.turn):
        until(lambda: loop.bench.ledger.locked.waiting)
        loop.guard.stop()
        until(lambda: not loop.bench.ledger.locked.waiting)
        let_go()
    assert loop.guard.failure is not None and loop.guard.failure.code == "DATABASE_LOCKED"
    assert "space" in loop.guard.failure.hint and loop.bench.judge.halted == ""


def test_T39_a_ledger_is_opened_once_it_is_free(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    with closing(sqlite3.connect(path)) as old:  # not in WAL mode yet, so that who holds it keeps readers out as well
        old.execute("CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
        old.commit()
    with locked(path) as let_go, doing(lambda: Ledger(path).close()) as came:
        threading.Event().wait(0.5)
        assert came == []
        let_go()
    assert came == [None]


@pytest.mark.parametrize("stopped", [False, True])
def test_T39_a_ledger_that_was_there_is_waited_for_at_a_start_until_it_is_free_or_the_silo_is_stopped(
    tmp_path: Path, stopped: bool
) -> None:
    path, asked = tmp_path / "ledger.sqlite3", threading.Event()
    Ledger(path).close()

    def give_up() -> bool:
        asked.set()
        return stopped

    with locked(path) as let_go, doing(lambda: Ledger(path, give_up=give_up).close()) as came:
        assert asked.wait(30)
        if stopped:
            until(lambda: came)
        else:
            assert came == []
        let_go()
    assert [getattr(each, "code", None) for each in came] == (["DATABASE_LOCKED"] if stopped else [None])


def test_T39_a_stop_while_a_silo_that_starts_waits_for_its_ledger_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    place.ledger().close()
    site = place.site()
    site.identity.signing_key = OUR_KEY

    def stopped_meanwhile(site: Any, log: Any, wall: float, give_up: Callable[[], bool]) -> Ledger:
        def asked() -> bool:
            assert not give_up()
            signal.raise_signal(signal.SIGTERM)
            return give_up()

        return open_ledger(site, log, wall, asked)

    monkeypatch.setattr(main, "open_ledger", stopped_meanwhile)
    with (
        locked(place.folder / "state" / "ledger.sqlite3"),
        pytest.raises(OperationError) as ended,
        ExitStack() as stack,
    ):
        main._serve_locked(site, stack, lambda _: None)
    assert ended.value.code == "DATABASE_LOCKED"


def test_T39_a_full_disk_still_halts_at_once_with_its_own_words(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    before = loop.bench.ledger._database

    def execute(query: str, *arguments: Any) -> Any:
        if query.startswith("BEGIN"):
            raise full
        return before.execute(query, *arguments)

    monkeypatch.setattr(loop.bench.ledger, "_database", SimpleNamespace(execute=execute, in_transaction=False))
    begun = time.monotonic()
    loop.turn()
    assert time.monotonic() - begun < 5 and loop.bench.judge.halt_code == "LEDGER_UNWRITABLE"
    assert "disk is full" in loop.bench.judge.halted and loop.bench.ledger.locked.waiting == ""
    monkeypatch.setattr(loop.bench.ledger, "_database", before)


@pytest.mark.slow
def test_T39_a_locked_database_of_the_coordinator_is_waited_for_and_halts_nobody(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    with closing(house):
        control = control_of(house)
        with (
            locked(tmp_path / "coordinator.db") as let_go,
            doing(lambda: silos[1].say("control.heartbeat", pb.Heartbeat())) as came,
        ):
            told = until(lambda: house.store.waiting)
            assert str(tmp_path / "coordinator.db") in told and "locked by another process" in told
            beyond(6 * sqlite_file.TRY_SECONDS)  # many of its tries
            state = to_json(control.state())  # whoever looks does not wait
            assert state["waits"] == told and state["halted"] == "" and came == []
            let_go()
        assert code_of(came[0]) == "ok" and house.driver.halted == "" and house.store.waiting == ""
        assert code_of(silos[2].say("control.heartbeat", pb.Heartbeat())) == "ok"


@pytest.mark.slow
def test_T39_a_coordinator_that_is_stopped_waits_for_no_lock(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    with closing(house):
        stopped = threading.Event()
        assert house.store.locked is not None
        house.store.locked.give_up = stopped.is_set
        with (
            locked(tmp_path / "coordinator.db") as let_go,
            doing(lambda: silos[1].say("control.heartbeat", pb.Heartbeat())) as came,
        ):
            until(lambda: house.store.waiting)
            stopped.set()
            until(lambda: came)
            let_go()
        assert isinstance(came[0], OperationError) and came[0].code == house.driver.halted == "DATABASE_LOCKED"
