"""A coordinator that is killed anywhere, or whose database fails a message, goes on as if nothing had happened."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from coordinator import store as db
from coordinator.runs import stored_events, stored_life
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.protocol import rounds
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError
from tests.protocol.paper_run import timeless
from tests.simulated.coordinator_parts import (
    RUN_YAML,
    SILOS,
    House,
    SimulatedSilo,
    federation,
    in_midst,
    joined,
    played,
    started_again,
    until_quiet,
)

EVERY = 7  # commits; prime to the number of silos, so that each kind of message has its turn


class KilledError(BaseException):
    """The process is gone: nothing in it may catch this and go on."""


class Killer:
    """Kills at every `every`-th commit of a house, from `first` on, once before it and once after it."""

    def __init__(self, first: int, every: int = EVERY) -> None:
        self.commits, self.first, self.kills, self.armed = 0, first, Counter[str](), True
        self.every = every

    def watch(self, house: House) -> None:
        whole = house.store.transaction

        @contextmanager
        def transaction() -> Iterator[Session]:
            self.commits += 1
            place = (self.commits - self.first) % (2 * self.every)
            with whole() as session:
                yield session
                if place == 0:
                    self.die("before")
            if place == self.every:
                self.die("after")

        house.store.transaction = transaction  # type: ignore[method-assign]

    def die(self, how: str) -> None:
        if self.armed:
            self.kills[how] += 1
            raise KilledError


class StubbornSilo(SimulatedSilo):
    """Sends what was not answered again, under a number of its own, as a guard does."""

    federation: Federation

    def deliver(self, envelope: pb.Envelope, payload: bytes) -> Any:
        while True:
            try:
                return super().deliver(envelope, payload)
            except KilledError:
                self.federation.restart()
                attempt = envelope.attempt + 1
                envelope = self.envelope(
                    envelope.kind, payload, run=envelope.run, number=envelope.round, step=envelope.step
                )
                envelope.attempt = attempt
                self.signed(envelope)


class Federation:
    def __init__(self, folder: Path, killer: Killer, plan: str = RUN_YAML, **of_house: Any) -> None:
        self.of_house = of_house
        self.house = House(folder, **of_house)
        self.killer = killer
        self.silos = [StubbornSilo(self.house, name) for name in SILOS]
        for silo in self.silos:
            silo.federation = self
        self.house.submit(plan)
        killer.watch(self.house)

    def restart(self) -> None:
        self.house.close()
        self.house = House(self.house.folder, clock=self.house.clock, **self.of_house)
        self.killer.watch(self.house)
        for silo in self.silos:
            silo.house = self.house

    def play(self) -> None:
        for silo in self.silos:
            silo.join()
        until_quiet(list(self.silos))
        self.killer.armed = False


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> db.Run:
    house, silos = joined(tmp_path_factory.mktemp("whole"))
    until_quiet(silos)
    run = house.run()
    house.close()
    assert run.state == "finished"
    return run


SELDOM = 10 * EVERY + 1  # where each start takes long
CASES = [("sqlite", 1, EVERY), ("sqlite", 4, EVERY), ("postgresql", 4, SELDOM)]


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize(("database", "first", "every"), CASES)
def test_a_coordinator_killed_again_and_again_ends_with_the_adapter_of_an_undisturbed_one(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: db.Run, database: str, first: int, every: int
) -> None:
    killer = Killer(first, every)
    url = request.getfixturevalue("postgresql_url") if database == "postgresql" else ""
    played = Federation(tmp_path, killer, database=url)
    played.play()
    house, run = played.house, played.house.run()
    assert (run.state, run.adapter_digest) == ("finished", undisturbed.adapter_digest)
    assert min(killer.kills.values()) > (5 if every == EVERY else 0) and set(killer.kills) == {"before", "after"}
    told = Counter(event for event in house.rows(lambda session: stored_events(session, "run-1"))
                   if isinstance(event, rounds.Contribution))  # fmt: skip
    kept = {(row.silo, row.kind, row.round, row.step, row.digest)
            for row in house.rows(lambda session: list(session.scalars(select(db.Upload))))}  # fmt: skip
    assert {(each.silo, each.kind, each.round, each.step, each.digest) for each in told} == kept
    assert len(told) == len(kept) == len(SILOS) * (2 * 2 + 2 + 3), (
        "two public steps and one update a round; three metrics"
    )
    house.close()
    assert [result["problems"] for result in verify_logs([tmp_path / "audit"])] == [[]]


@pytest.mark.slow
def test_after_each_message_the_stored_events_give_the_life_in_memory(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    whole, looked = house.driver.receive, []

    def receive(*arguments: Any) -> Any:
        reply = whole(*arguments)
        for run in house.driver.runs.values():
            stored = house.rows(lambda session, run=run: stored_life(session, run.plan))
            assert timeless(stored) == timeless(run.life)
            looked.append(run.life.state)
        return reply

    house.driver.receive = receive  # type: ignore[method-assign]
    for silo in silos:
        silo.join()
    until_quiet(silos)
    assert house.run().state == "finished" and set(looked) == {"waiting", "running"}


@pytest.mark.slow
def test_a_transaction_that_fails_leaves_the_run_in_memory_as_it_is_in_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody thought of, after the update was taken and told to the method."""
    house, silos = in_midst(tmp_path)
    *_, last = silos
    run, payload = house.driver.runs["run-1"], last.delta_payload(1)
    before = run.life, run._state, run.asked
    with monkeypatch.context() as patched:
        patched.setattr(house.audit, "checkpoint", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            last.say("lora.factors", payload, run="run-1", number=1)
    assert (run.life, run._state, run.asked) == before and not house.driver.halted
    assert timeless(house.rows(lambda session: stored_life(session, run.plan))) == timeless(run.life)
    # it counted against the silo's budget (T11), so the round goes on without it, and is whole for the others
    assert isinstance(last.say("lora.factors", payload, run="run-1", number=1), pb.Refusal)
    assert run.life.places[last.name] == "refused"
    house.advance(1000.0)
    first = house.round(1)
    assert (first.state, first.participants) == ("committed", db.as_json(list(SILOS[:3])))
    last.mute = set()
    until_quiet(silos)
    assert house.run().state == "finished"


def test_T29_numbers_of_a_transaction_that_failed_are_reserved_again_before_one_goes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of numbers whose reservation was undone: after a restart no answer may have one of them again."""
    house, [silo, *_] = federation(tmp_path)
    with monkeypatch.context() as patched:
        counted = db.count_message
        patched.setattr(db, "count_message", lambda *given, **named: refusing_out(counted, *given, **named))
        with pytest.raises(OperationError, match="locked"):
            silo.say("control.poll", pb.Poll())
    told = [silo.say("control.poll", pb.Poll()) for _ in range(3)]
    assert [isinstance(each, pb.Refusal) and each.code for each in told] == ["HALTED"] * 3
    house.close()
    silo.house = House(tmp_path)
    silo.say("control.poll", pb.Poll())
    numbers = [envelope.sequence for envelope, _ in silo.heard]
    assert numbers == sorted(set(numbers)) and len(numbers) == 4
    silo.house.close()


def refusing_out(counted: Any, *given: Any, **named: Any) -> None:
    """Fails once the answer has its number."""
    if named["direction"] == "out":
        raise OperationError("database is locked")
    counted(*given, **named)


@pytest.mark.parametrize("change", ["UPDATE runs SET state = 'paused'", "UPDATE rounds SET state = 'abandoned'",
                                    "DELETE FROM transitions WHERE ordinal > 3"])  # fmt: skip
def test_a_database_that_does_not_fit_itself_starts_no_coordinator(tmp_path: Path, change: str) -> None:
    house, _ = played(tmp_path, mute={0: {"lora.factors"}})
    house.close()
    again = House(tmp_path, clock=house.clock)  # the counterpart: unchanged, it starts
    assert again.driver.runs["run-1"].life.open_round == 1
    with again.store.transaction() as session:
        session.execute(text(change))
    again.close()
    with pytest.raises(OperationError, match=r"run-1 and its newest round are .* by their stored events"):
        House(tmp_path, clock=house.clock)


@pytest.mark.slow
def test_T29_what_came_last_is_acknowledged_again_after_the_run_has_ended(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    until_quiet(silos)
    assert house.run().state == "finished"
    silo = silos[0]
    [upload] = house.rows(lambda session: list(session.scalars(
        select(db.Upload).where(db.Upload.silo == silo.name, db.Upload.kind == "metrics.eval", db.Upload.round == 2)
    )))  # fmt: skip
    payload = house.blobs.get(upload.digest).read_at(0, upload.payload_bytes)
    for _ in range(2):  # by the coordinator that took it, and by one that was started since
        assert isinstance(silo.say("metrics.eval", payload, run="run-1", number=2), pb.Ack)
        house = started_again(house, silos)
    refusal = silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=2)
    assert isinstance(refusal, pb.Refusal) and refusal.code == "NO_SUCH_RUN"


def test_T50_an_update_that_names_a_step_is_refused_and_halts_nobody(tmp_path: Path) -> None:
    house, (*_, last) = in_midst(tmp_path)
    payload = last.delta_payload(1)
    refusal = last.say("lora.factors", payload, run="run-1", number=1, step=3)
    assert isinstance(refusal, pb.Refusal) and refusal.code == "INGRESS_DENIED" and not house.driver.halted
    house.advance(1000.0)
    first = house.round(1)
    assert (first.state, first.participants) == ("committed", db.as_json(list(SILOS[:3]))) and not house.driver.halted


def test_a_run_that_is_aborted_leaves_no_round_open_and_no_deadline(tmp_path: Path) -> None:
    house, _ = in_midst(tmp_path)
    run = house.driver.runs["run-1"]
    assert run.life.open_round == 1 and run.life.deadlines
    with house.driver.changing(), house.store.transaction() as session:
        run.abort(session)
        house.driver.services.forget_ended()
    first = house.round(1)
    assert first.state == "abandoned" and first.closed_at
    assert house.record()["rounds"][0]["state"] == "abandoned"
    assert not run.life.deadlines and house.driver.tick() is None
    ended = [item.run for item in house.rows(lambda session: session.scalars(select(db.OutboxItem)).all())]
    assert ended == ["run-1"] * len(SILOS), "run.end for each"
    assert house.submit(RUN_YAML.replace("run-1", "run-2"))["run"] == "run-2"  # the way is free


def book_in_memory(house: House, silo: str) -> str:
    return db.as_json(house.driver.books[silo].to_json())


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


@pytest.mark.parametrize("where", ["seal", "the end"])
def test_T11_counts_in_memory_are_those_of_the_database_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    house, (silo, *_) = in_round(tmp_path)
    silo.say("control.heartbeat", pb.Heartbeat())
    assert book_in_memory(house, silo.name) == book_in_database(house, silo.name)
    before = json.loads(book_in_database(house, silo.name))["recent"]["control"]
    with monkeypatch.context() as patched:
        if where == "seal":  # after it was counted; what is counted of it then is stored again
            patched.setattr(house.driver, where, fails_once(RuntimeError("late"), house.driver.seal))
            with pytest.raises(RuntimeError, match="late"):
                silo.say("control.heartbeat", pb.Heartbeat())
        else:
            full = OperationalError("COMMIT", {}, sqlite3.OperationalError("database or disk is full"))
            patched.setattr(db, "write_counts", fails_once(full, db.write_counts))
            with pytest.raises(OperationError, match="no space left"):
                silo.say("control.heartbeat", pb.Heartbeat())
    if where == "seal":
        assert book_in_memory(house, silo.name) == book_in_database(house, silo.name)
        after = json.loads(book_in_database(house, silo.name))["recent"]["control"]
        assert len(after) == len(before) + 1, "counted once all the same"
    else:
        assert silo.name not in house.driver.books, "read again when it is asked for"
        assert json.loads(book_in_database(house, silo.name))["recent"]["control"] == before


@pytest.mark.slow
def test_T11_T29_a_run_whose_end_was_undone_goes_on_with_its_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, silos = joined(tmp_path)
    driver, forget = house.driver, house.driver.services.forget_ended
    failed = list[str]()

    def sealed(*of: Any, **more: Any) -> Any:
        if not failed and not driver.runs:  # the message at hand has just ended the run
            failed.append("here")
            raise RuntimeError("after the end")
        return whole(*of, **more)

    whole = driver.seal
    monkeypatch.setattr(driver, "seal", sealed)
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
        patched.setattr(house.driver.services, "_adapter", fails_once(fault, None))
        with pytest.raises(OperationError, match="no space left"):
            silo.say("control.fetch", pb.Fetch(digest=house.run().base_digest))
    assert house.driver.halted and len(list(house.audit.records())) == records


@pytest.mark.slow
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
