"""A message whose transaction fails leaves the coordinator's memory as the database is: runs, counts, outboxes (T11,
T23, T29)."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from coordinator import store as db
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError
from tests.simulated.coordinator_parts import House, SimulatedSilo, joined, until_quiet


def book_in_memory(house: House, silo: str) -> str:
    return db.as_json(house.driver._books[silo].to_json())


def book_in_database(house: House, silo: str) -> str:
    return str(house.rows(lambda session: db.counts_of(session, silo)))


def fails_once(error: Exception, then: Any) -> Any:
    faults = [error]

    def call(*of: Any, **more: Any) -> Any:
        if faults:
            raise faults.pop()
        return then(*of, **more)

    return call


def in_round(folder: Path) -> tuple[House, list[SimulatedSilo]]:
    house, silos = joined(folder)
    for _ in range(2):
        for silo in silos:
            silo.poll()
    return house, silos


@pytest.mark.parametrize("where", ["_sealed", "the end"])
def test_T11_counts_in_memory_are_those_of_the_database_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    house, (silo, *_) = in_round(tmp_path)
    silo.say("control.heartbeat", pb.Heartbeat())
    assert book_in_memory(house, silo.name) == book_in_database(house, silo.name)
    before = json.loads(book_in_database(house, silo.name))["recent"]["control"]
    with monkeypatch.context() as patched:
        if where == "_sealed":  # after it was counted; what is counted of it then is stored again
            patched.setattr(house.driver, where, fails_once(RuntimeError("late"), house.driver._sealed))
            with pytest.raises(RuntimeError, match="late"):
                silo.say("control.heartbeat", pb.Heartbeat())
        else:
            full = OperationalError("COMMIT", {}, sqlite3.OperationalError("database or disk is full"))
            patched.setattr(db, "write_counts", fails_once(full, db.write_counts))
            with pytest.raises(OperationError, match="no space left"):
                silo.say("control.heartbeat", pb.Heartbeat())
    if where == "_sealed":
        assert book_in_memory(house, silo.name) == book_in_database(house, silo.name)
        after = json.loads(book_in_database(house, silo.name))["recent"]["control"]
        assert len(after) == len(before) + 1, "counted once all the same"
    else:
        assert silo.name not in house.driver._books, "read again when it is asked for"
        assert json.loads(book_in_database(house, silo.name))["recent"]["control"] == before


def test_T11_T29_a_run_whose_end_was_undone_goes_on_with_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, silos = joined(tmp_path)
    driver, forget = house.driver, house.driver.effects.forget_ended
    failed = list[str]()

    def sealed(*of: Any, **more: Any) -> Any:
        if not failed and not driver.runs:  # the message at hand has just ended the run
            failed.append("here")
            raise RuntimeError("after the end")
        return whole(*of, **more)

    whole = driver._sealed
    monkeypatch.setattr(driver, "_sealed", sealed)
    with pytest.raises(RuntimeError, match="after the end"):
        until_quiet(silos)
    assert list(driver.runs) == ["run-1"] and house.run().state == "running"
    for silo in silos:
        counts = json.loads(book_in_database(house, silo.name))["counts"]
        assert any(key.startswith("run-1/") for key in counts), silo.name
    forget()
    until_quiet(silos)


def test_a_database_that_fails_before_a_message_is_judged_leaves_no_record_that_it_was_let_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, (silo, *_) = in_round(tmp_path)
    records = len(list(house.audit.records()))
    fault = OperationalError("SELECT", {}, sqlite3.OperationalError("disk I/O error"))
    with monkeypatch.context() as patched:
        patched.setattr(house.driver.effects, "_adapter", fails_once(fault, None))
        with pytest.raises(OperationError, match="no space left"):
            silo.say("control.fetch", pb.Fetch(digest=house.run().base_digest))
    assert house.driver.halted and len(list(house.audit.records())) == records


def test_the_signed_record_of_a_run_has_the_message_that_ended_it(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    until_quiet(silos)
    told = {
        (row["silo"], row["direction"], row["kind"]): (row["messages"], row["bytes"])
        for row in house.record()["traffic"]
    }
    kept = house.rows(lambda session: db.traffic_table(session, "run-1"))
    counted = {(row["silo"], row["direction"], row["kind"]): (row["messages"], row["bytes"]) for row in kept}
    came = {key: value for key, value in counted.items() if key[1] == "in"}
    assert {key: value for key, value in told.items() if key[1] == "in"} == came and came
