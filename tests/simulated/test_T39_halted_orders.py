"""T39: orders to a party that is halted, or that halts by them: what is done, and what the person is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.segments import LogFullError
from fedsilo.protocol.errors import OperationError
from tests.simulated.coordinator_parts import RUN_YAML, House, house_in_round
from tests.simulated.guard_loop import Loop
from tests.simulated.test_orders_recorded import Orders, new_desk, orders_at, orders_in


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[House, Orders]]:
    with closing(house_in_round(tmp_path)) as house:
        yield house, orders_at(house)


def refuse(event: str, **fields: Any) -> int:
    raise OperationError("the disk is full", code="STATE_UNWRITABLE")


def told(give: Orders, name: str, request: str, **arguments: Any) -> OperationError:
    with pytest.raises(OperationError) as caught:
        give(name, request_id=request, **arguments)
    return caught.value


def test_T39_a_halted_coordinator_takes_no_order_but_abort(
    running: tuple[House, Orders], monkeypatch: pytest.MonkeyPatch
) -> None:
    house, give = running
    another = RUN_YAML.replace("run-1", "run-2")
    with monkeypatch.context() as failing:
        failing.setattr(house.audit, "append", refuse)
        paused = told(give, "run.pause", "request-1", run="run-1")
        assert paused.message.startswith("run.pause of run 'run-1' is done, but not in the audit log yet: the disk")
        assert (house.run().state, house.driver.halted) == ("paused", "STATE_UNWRITABLE")
    size = house.audit.size
    # although the log would take records again: what is halted stays so until it is started again
    for number, (name, arguments) in enumerate(
        [("run.resume", {"run": "run-1"}), ("run.submit", {"text": another}), ("run.start", {"run": "run-1"})]
    ):
        error = told(give, name, f"refused-{number}", **arguments)
        assert error.code == "HALTED" and "run.abort" in error.message
    assert house.run().state == "paused" and house.submissions.waiting == {} and house.audit.size == size
    with monkeypatch.context() as failing:
        failing.setattr(house.audit, "append", refuse)
        error = told(give, "run.abort", "request-2", run="run-1")
    assert (error.code, house.run().state) == ("STATE_UNWRITABLE", "aborted")
    assert "run.abort of run 'run-1' is done" in error.message and "do not give it again" in error.hint
    house.driver.pending.take_up()  # as the next start does
    assert [each[1] for each in orders_in(house.audit.records())] == ["run.pause", "run.abort"]


def test_T39_the_counterpart_the_same_orders_while_it_is_not_halted(running: tuple[House, Orders]) -> None:
    house, give = running
    for number, (name, arguments, state) in enumerate(
        [("run.pause", {"run": "run-1"}, "paused"), ("run.resume", {"run": "run-1"}, "running")]
    ):
        give(name, request_id=f"request-{number}", **arguments)
        assert house.run().state == state
    give("run.abort", request_id="request-7", run="run-1")
    assert give("run.submit", request_id="request-8", text=RUN_YAML.replace("run-1", "run-2"))["run"] == "run-2"


def test_T39_of_an_order_that_the_database_refuses_nobody_is_told_that_it_is_done(
    running: tuple[House, Orders], monkeypatch: pytest.MonkeyPatch
) -> None:
    house, give = running
    with monkeypatch.context() as failing:
        failing.setattr(house.driver.pending, "record", refuse_record)
        assert told(give, "run.abort", "request-1", run="run-1").message == "the database is full"
    assert house.run().state == "running" and house.driver.halted
    assert give("run.abort", request_id="request-2", run="run-1")["state"] == "aborted"


def refuse_record(*args: Any, **fields: Any) -> None:
    raise OperationError("the database is full")


# ---- a silo ------------------------------------------------------------------------------------------


def test_T39_a_silo_is_stopped_although_its_log_takes_nothing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopping lets less out, so it needs no record; resuming lets more out, so it does."""
    stopped: list[bool] = []
    orders = dataclasses.replace(loop.guard.orders, on_loop=lambda work: work(), stop=lambda: stopped.append(True))
    desk = new_desk()
    orders.register(desk)
    give = Orders(desk)
    loop.offer_plan()
    loop.turn()
    monkeypatch.setattr(loop.bench.audit, "append", full)
    assert "no space" in told(give, "resume", "request-1").message
    done = give("stop", request_id="request-2")
    assert stopped == [True] and done == {"stopping": True, "by": "alice"}
    monkeypatch.undo()


def full(event: str, **fields: Any) -> int:
    raise LogFullError("no space left for the audit log")
