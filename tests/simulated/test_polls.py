"""Polls: when a waiting one looks again, and that a coordinator that refuses is asked less and less often (case N2)."""

from __future__ import annotations

import itertools
import random
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator import store as db
from coordinator.driver import Driver
from coordinator.outbox import queue
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.place import Place
from silo.guard.coordinator_client import BACKOFF_SECONDS
from silo.guard.loop import Wake
from tests.policies import setting
from tests.simulated.coordinator_parts import House, house_in_round
from tests.world import Loop

WAIT_SECONDS = 60.0  # far above what anything here takes


class Waiting:
    """A poll that waits in a thread of its own; `looks`: how often it asked the database."""

    def __init__(self, house: House, silo: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.looks = 0
        self.found: list[bool] = []
        self._looked = threading.Event()
        is_pending = Driver._is_pending

        def counted(driver: Driver, session: Session, name: str) -> bool:
            self.looks += name == silo
            self._looked.set()
            return is_pending(driver, session, name)

        monkeypatch.setattr(Driver, "_is_pending", counted)
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


REFUSALS = 400  # more than any test here asks for


def refuses(loop: Loop, *kinds: str, code: str) -> None:
    for kind in kinds:
        for _ in range(REFUSALS):
            loop.coordinator.says(kind, "control.refusal", pb.Refusal(code=code))


def for_seconds(loop: Loop, seconds: float, step: float = 0.05) -> list[float]:
    """Let the guard turn without a pause in between; when it said something."""
    said, end = [], loop.clock + seconds
    while loop.clock < end:
        before = len(loop.coordinator.sent)
        loop.events.put(Wake())
        loop.guard.turn()
        said += [loop.clock] * (len(loop.coordinator.sent) - before)
        loop.clock += step
    return said


def fault(loop: Loop) -> tuple[str, str]:
    shown = loop.state()["coordinator"]
    return shown["link"], shown["fault"]


@pytest.mark.parametrize("code", ["HALTED", "INGRESS_DENIED"])
def test_refused_polls_come_seldom_and_the_status_names_who_refuses(loop: Loop, code: str) -> None:
    refuses(loop, "control.poll", code=code)
    size = loop.bench.audit.size
    said = for_seconds(loop, 120.0)
    # 0.5, 1, 2, 4 and 8 s, then 15 s each; with the largest jitter downwards that is 5 + 104.5 / 10.5 more, and one
    assert 5 <= len(said) <= 17
    assert loop.bench.audit.size - size < 100
    link, text = fault(loop)
    assert link == "down" and "the coordinator" in text and "policy" not in text
    assert not loop.bench.judge.halted


def test_an_answer_that_is_not_let_in_backs_off_too_though_the_complaint_is_heard(loop: Loop) -> None:
    refuses(loop, "control.poll", code="no code of ours")
    said = for_seconds(loop, 120.0)
    assert len(loop.coordinator.bodies("control.error")) >= 5 and len(said) <= 2 * 17


def test_a_yes_ends_the_back_off(loop: Loop) -> None:
    for _ in range(6):
        loop.coordinator.says("control.poll", "control.refusal", pb.Refusal(code="HALTED"))
    while loop.coordinator.script["control.poll"]:
        for_seconds(loop, 1.0)
    assert fault(loop)[0] == "down"
    while fault(loop)[1]:
        for_seconds(loop, 0.05)
    loop.coordinator.says("control.poll", "control.refusal", pb.Refusal(code="HALTED"))
    (asked,) = for_seconds(loop, 0.05)
    assert 0.7 * BACKOFF_SECONDS[0] <= loop.guard._client.retry_at - asked <= 1.3 * BACKOFF_SECONDS[0]


def test_whatever_is_refused_backs_off_and_not_twice_for_one_trouble(loop: Loop) -> None:
    refuses(loop, "control.poll", "control.heartbeat", "control.checkpoint", "control.abstain", code="HALTED")
    loop.guard._client.checkpoints_wait = True
    said = for_seconds(loop, 120.0)
    assert 5 <= len(said) <= 17
    refused_at = loop.guard._client.retry_at
    loop.guard._client.abstain("run-1", 1, heard=False)  # as a person's no would, meanwhile
    assert loop.guard._client.retry_at == refused_at


@pytest.mark.slow
def test_two_silos_do_not_come_again_at_the_same_time(tmp_path: Path) -> None:
    random.seed(7)
    waits = []
    for name in ("a", "b"):
        loop = Loop(tmp_path / name, setting.policy_of(setting.policy_text()))
        refuses(loop, "control.poll", code="HALTED")
        waits.append([round(later - sooner, 2) for sooner, later in _pairs(for_seconds(loop, 60.0, step=0.01))])
        loop.close()
    assert waits[0] != waits[1]


def _pairs(times: list[float]) -> list[tuple[float, float]]:
    return list(itertools.pairwise(times))


@pytest.mark.slow
def test_a_hello_to_a_halted_coordinator_is_said_again_and_ends_nothing(loop: Loop) -> None:
    loop.guard._client.joined = False
    for _ in range(3):
        loop.coordinator.says("control.hello", "control.refusal", pb.Refusal(code="HALTED"))
    said = for_seconds(loop, 30.0)
    assert len(loop.coordinator.bodies("control.hello")) == 4 and said
    assert loop.guard.failure is None and loop.guard._client.joined


def test_a_hello_that_is_refused_for_good_is_the_end(loop: Loop) -> None:
    loop.guard._client.joined = False
    loop.coordinator.says("control.hello", "control.refusal", pb.Refusal(code="NOT_A_MEMBER"))
    loop.turn()
    assert loop.guard.failure is not None and loop.guard.failure.code == "NOT_A_MEMBER"
