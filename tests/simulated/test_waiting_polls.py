"""What the coordinator keeps in memory beside its database: when a waiting poll looks again, and the next event's
number."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from coordinator import store as db
from coordinator.driver import Driver
from coordinator.outbox import queue
from fedsilo.protocol.place import Place
from tests.simulated.coordinator_parts import House, house_in_round

WAIT_SECONDS = 60.0  # far above what anything here takes


class Waiting:
    """A poll that waits in a thread of its own; `looks`: how often it asked the database."""

    def __init__(self, house: House, silo: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.found: list[bool] = []
        self._looked = threading.Event()
        has_pending = Driver._has_pending

        def counted(driver: Driver, name: str) -> bool:
            self.looks += name == silo
            self._looked.set()
            return has_pending(driver, name)

        monkeypatch.setattr(Driver, "_has_pending", counted)
        self.thread = threading.Thread(
            target=lambda: self.found.append(house.driver.wait_for_pending(silo, WAIT_SECONDS)), daemon=True
        )
        self.thread.start()
        assert self._looked.wait(WAIT_SECONDS)  # it holds the lock until it waits

    def answer(self) -> bool:
        self.thread.join(WAIT_SECONDS)
        return self.found[0]


def put(house: House, silo: str, *, fail: bool = False) -> None:
    """Something for a silo, by one transaction, and all who wait are woken."""
    with house.driver.changing():
        try:
            with house.store.transaction() as session:
                queue(session, silo, Place("run-1", 1, 0, "run.end"), b"")
                if fail:
                    raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        house.driver.changing().notify_all()


@pytest.fixture
def house(tmp_path: Path) -> Any:
    with closing(house_in_round(tmp_path)) as made:
        with made.store.transaction() as session:
            for item in session.scalars(select(db.OutboxItem)):
                session.delete(item)
        yield made


def test_a_waiting_poll_is_woken_by_what_is_for_it_and_looks_at_nothing_else(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(house, "hospital_a", monkeypatch)
    for _ in range(3):
        put(house, "hospital_b")
    with house.driver.changing():
        assert (waiting.looks, waiting.found) == (1, [])
    put(house, "hospital_a", fail=True)  # rolled back: it may look, and finds nothing
    with house.driver.changing():
        assert waiting.found == []
    put(house, "hospital_a")
    assert waiting.answer() is True


def test_what_waits_for_a_paused_run_is_found_when_it_goes_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    run = house.driver.runs["run-1"]
    with house.driver.changing(), house.store.transaction() as session:
        run.pause(session)
    put(house, "hospital_a")
    waiting = Waiting(house, "hospital_a", monkeypatch)
    put(house, "hospital_a")
    with house.driver.changing():
        assert waiting.found == []
        with house.store.transaction() as session:
            run.resume(session)
        house.driver.changing().notify_all()
    assert waiting.answer() is True


def test_an_event_that_is_rolled_back_gives_its_number_to_the_next(house: House) -> None:
    run = house.driver.runs["run-1"]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), house.driver.changing(), house.store.transaction() as session:
            run.pause(session)
            raise ZeroDivisionError
        assert run.life.state == "running"
    with house.driver.changing(), house.store.transaction() as session:
        run.pause(session)
    with house.driver.changing(), house.store.transaction() as session:
        run.resume(session)
    numbers = house.rows(lambda session: session.scalars(select(db.Transition.ordinal)).all())
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    kept = house.rows(lambda session: session.scalars(select(db.Transition.event)).all())
    assert sum("RunPaused" in text or '"pause"' in text for text in kept) == 1, kept[-3:]
