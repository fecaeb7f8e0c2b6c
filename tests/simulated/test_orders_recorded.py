"""Orders of persons to a coordinator and to a silo: what they do, that the log names who gave them, and refusals."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from certs.authority import create_ca
from certs.commands import sign_command
from certs.roles import Roles
from coordinator.control import Control
from fedsilo.audit.segments import LogFullError
from fedsilo.cli import run as cli_run
from fedsilo.control.answers import to_json
from fedsilo.control.server import ControlServer, raise_for_reply
from fedsilo.control.socket_server import ControlSocket
from fedsilo.files.durable import write_private
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotAllowedError, NotFoundError, OperationError
from silo.guard.commands import HeldPayloads
from tests.security.people import new_keys
from tests.simulated.coordinator_parts import RUN_YAML, House, federation, house_in_round
from tests.simulated.test_policy_in_force import TIGHTER, Running, holding, wording
from tests.world import Loop, at_once, command

NOW = datetime.now(UTC)
CA = create_ca("consortium", kind="site", not_before=NOW - timedelta(days=1), days=30)
ROLES = Roles("consortium", {"alice": frozenset({"operator"}), "bob": frozenset({"viewer"})})
KEYS = {name: new_keys(signing=False) for name in ROLES.people}
PEOPLE = {name: CA.issue(keys[2], "operator", name, now=NOW).certificate_pem for name, keys in KEYS.items()}
NOBODY: Any = None  # a party's configuration, for what these handlers do not read


@dataclass
class Orders:
    desk: ControlServer

    def __call__(self, name: str, person: str = "alice", request_id: str = "request-1", **arguments: Any) -> Any:
        reply = self.desk.execute(
            sign_command(
                site="consortium", name=name, arguments=arguments, request_id=request_id,
                expires=datetime.now(UTC) + timedelta(minutes=4), operator_certificate_pem=PEOPLE[person],
                operator_key=KEYS[person][0],
            )
        )  # fmt: skip
        raise_for_reply(reply)
        return json.loads(reply.result_json)


def new_desk() -> ControlServer:
    return ControlServer("consortium", CA.certificate_pem, ROLES, lambda: datetime.now(UTC))


def orders_at(house: House) -> Orders:
    desk = new_desk()
    Control(desk, house.driver, house.submissions, NOBODY, NOBODY, house.policy.digest)
    return Orders(desk)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[House, Orders]]:
    with closing(house_in_round(tmp_path)) as house:
        yield house, orders_at(house)


def orders_in(records: Any) -> list[tuple[int, str, str, str]]:
    return [
        (record["seq"], record["event"], record.get("run", ""), record["detail"]["person"])
        for record in records
        if record["event"].startswith(("run.", "silo."))
    ]


def test_a_coordinators_orders_are_done_and_recorded_with_their_number(running: tuple[House, Orders]) -> None:
    house, give = running
    paused = give("run.pause", run="run-1")
    assert (paused["state"], house.run().state) == ("paused", "paused")
    assert give("run.resume", request_id="request-2", run="run-1")["state"] == "running"
    again = give("run.pause", request_id="request-3", run="run-1")
    aborted = give("run.abort", request_id="request-4", run="run-1", round=1)
    assert aborted["state"] == house.run().state == "aborted"
    told = orders_in(house.audit.records())
    assert [each[1:] for each in told] == [
        (event, "run-1", "alice") for event in ("run.pause", "run.resume", "run.pause", "run.abort")
    ]
    assert [told[0][0], told[2][0], told[3][0]] == [paused["record"], again["record"], aborted["record"]]
    kept = [record for record in house.audit.records() if record["event"].startswith("run.")]
    assert [len(record["orders"]) for record in kept] == [1, 1, 1, 1]


def test_a_waiting_run_is_submitted_started_and_aborted_by_persons(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    give = orders_at(house)
    text = "run: run-1\nmethod: pubswap\nrounds: 2\nlocal_steps: 4\nswap_period: 2\nprompts_per_step: 3\n" + (
        "samples_per_prompt: 4\nseed: 7\nrollout: {max_new_tokens: 32}\nquorum: 2\njoin_deadline_seconds: 60.0\n"
        "public_step_deadline_seconds: 100.0\nround_deadline_seconds: 1000.0\n"
    )
    give("run.submit", text=text)
    with pytest.raises(ConflictError, match="the quorum is 2"):
        give("run.start", request_id="request-2", run="run-1")
    for silo in silos[:2]:
        silo.join()
    shown = ["hospital_a"]  # what was on the screen when hospital_b had not joined
    with pytest.raises(ConflictError) as stale:
        give("run.start", request_id="request-2b", run="run-1", silos=shown)
    assert stale.value.code == "STALE_VIEW" and house.submissions.waiting
    shown.append("hospital_b")
    assert give("run.start", request_id="request-3", run="run-1", silos=shown)["silos"] == shown
    assert [each[1] for each in orders_in(house.audit.records())] == ["run.submit", "run.start"]
    give("run.abort", request_id="request-4", run="run-1")
    give("run.submit", request_id="request-5", text=text.replace("run-1", "run-2"))
    assert give("run.abort", request_id="request-6", run="run-2", round=0)["state"] == "aborted"
    assert [each[1:3] for each in orders_in(house.audit.records())][2:] == [
        ("run.abort", "run-1"), ("run.submit", "run-2"), ("run.abort", "run-2"),
    ]  # fmt: skip


def test_refused_orders_change_and_record_nothing(running: tuple[House, Orders]) -> None:
    house, give = running
    refusals: list[tuple[type[FedSiloError], str, dict[str, Any]]] = [
        (NotAllowedError, "run.pause", {"run": "run-1", "person": "bob"}),
        (NotFoundError, "run.pause", {"run": "run-7"}),
        (NotFoundError, "run.start", {"run": "run-1"}),
        (ConflictError, "run.abort", {"run": "run-1", "round": 2}),  # the person typed the number of another round
    ]
    for index, (kind, name, arguments) in enumerate(refusals):
        with pytest.raises(kind):
            give(name, request_id=f"refused-{index}", **arguments)
    assert house.run().state == "running" and orders_in(house.audit.records()) == []
    give("run.abort", run="run-1", round=1)
    assert house.run().state == "aborted"


def test_the_same_request_again_does_it_once(running: tuple[House, Orders]) -> None:
    house, give = running
    first = give("run.pause", run="run-1")
    assert give("run.pause", run="run-1") == first
    with pytest.raises(ConflictError) as reused:
        give("run.abort", run="run-1")
    assert reused.value.code == "REQUEST_ID_REUSED"
    assert len(orders_in(house.audit.records())) == 1 and house.run().state == "paused"


def test_the_command_line_repeats_an_order_without_doing_it_twice_and_aborts_what_is_named_twice(
    running: tuple[House, Orders], tmp_path: Path
) -> None:
    house, give = running
    (tmp_path / "alice.crt").write_bytes(PEOPLE["alice"])
    pem = KEYS["alice"][0].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(tmp_path / "alice.key", pem)
    give.desk.before_snapshot = lambda: None  # this house has no configuration that a state could be made of
    give.desk.set_state({"site": "consortium", "federation": ""})

    def ask(*words: str) -> tuple[int, Any]:
        proof = ["--as", str(tmp_path / "alice.crt"), "--socket", str(tmp_path / "c.sock"), "--json"]
        done = CliRunner().invoke(cli_run.app, [*words, *proof])
        return done.exit_code, json.loads(done.stdout)

    with closing(ControlSocket(give.desk, tmp_path / "c.sock", "no-such-group", log=logging.getLogger()).start()):
        paused = ask("pause", "run-1", "--request-id", "pause-00001")
        assert paused[0] == 0 and ask("resume", "run-1", "--request-id", "resume-00001")[0] == 0
        assert ask("pause", "run-1", "--request-id", "pause-00001") == paused and house.run().state == "running"
        for words in ([], ["--confirm", "run-2"]):
            code, refused = ask("abort", "run-1", *words)
            assert code == 2 and refused["error"]["code"] == "INVALID_INPUT" and house.run().state == "running"
        code, refused = ask("abort", "run-1", "--confirm", "run-1", "--round", "7")
        assert (code, refused["error"]["code"], house.run().state) == (6, "STALE_VIEW", "running")
        words = ["abort", "run-1", "--confirm", "run-1", "--round", "1", "--request-id", "abort-00001"]
        code, aborted = ask(*words)
        assert (code, aborted["data"]["state"], house.run().state) == (0, "aborted", "aborted")
        assert ask(*words) == (code, aborted)
    told = [each[1] for each in orders_in(house.audit.records())]
    assert told == ["run.pause", "run.resume", "run.abort"]


def test_T39_an_order_that_cannot_be_recorded_halts_the_coordinator(
    running: tuple[House, Orders], monkeypatch: pytest.MonkeyPatch
) -> None:
    house, give = running

    def refuse(event: str, **fields: Any) -> int:
        raise OperationError("the disk failed")

    with monkeypatch.context() as failing:
        failing.setattr(house.audit, "append", refuse)
        with pytest.raises(OperationError):
            give("run.pause", run="run-1")
    assert house.driver.halted
    house.driver.pending.take_up()  # as the next start does: what the database has, the log gets
    assert [each[1] for each in orders_in(house.audit.records())] == ["run.pause"]


def test_a_silos_orders_are_done_and_recorded(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []
    orders = dataclasses.replace(
        loop.guard.orders, on_loop=lambda work: work(), stop=lambda: stopped.append(True)
    )  # fmt: skip
    desk = new_desk()
    orders.register(desk)
    give = Orders(desk)
    with pytest.raises(NotFoundError):
        give("pause")
    loop.offer_plan()
    loop.turn()
    run = loop.guard.runs.run
    assert run is not None
    for verb in ("pause", "resume", "stop"):  # each from a screen that showed another run, or none
        for other in ("run-0", ""):
            with pytest.raises(ConflictError) as stale:
                give(verb, request_id=f"{verb}-of-{other}", run=other)
            assert stale.value.code == "STALE_VIEW" and not run.paused and stopped == []
    paused = give("pause", request_id="request-2", run=run.plan.run)
    assert paused["paused"] and run.paused
    assert not give("resume", request_id="request-3")["paused"] and not run.paused
    with pytest.raises(NotAllowedError):
        give("stop", "bob", request_id="request-4")
    assert stopped == []
    with monkeypatch.context() as failing:
        failing.setattr(orders.judge, "halted", "DISK")
        assert "record" not in give("pause", request_id="request-5") and run.paused  # less leaves: no record is needed
        with pytest.raises(OperationError):
            give("resume", request_id="request-6")
        assert run.paused
    assert give("stop", request_id="request-7", run=run.plan.run)["by"] == "alice" and stopped == [True]
    told = orders_in(loop.bench.audit.records())
    assert [each[1] for each in told] == ["silo.pause", "silo.resume", "silo.stop"]
    assert told[0] == (paused["record"], "silo.pause", run.plan.run, "alice")
    kept = [record for record in loop.bench.audit.records() if record["event"].startswith("silo.")]
    assert [len(record["orders"]) for record in kept] == [1, 1, 1]


# ---- a party that is halted, or that halts by an order (T39) --------------------------------------------


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


# ---- the record of an order that a person is told ------------------------------------------------------

__all__ = ["holding"]  # a fixture
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "approve": ("approval.grant", {}),
    "reject": ("approval.deny", {"reason_code": "CONTENT"}),
    "defer": ("release.defer", {"until_seconds": 600}),
}


@pytest.mark.parametrize("verb", ANSWERS)
def test_an_answer_to_a_release_names_its_record(holding: Running, verb: str) -> None:
    event, more = ANSWERS[verb]
    bench = holding.bench
    release = holding.hold()
    if "until_seconds" in more:
        more = {"until_seconds": bench.clock_now + more["until_seconds"]}
    order = getattr(holding.loop.guard.orders, verb)
    told = order(bench.answer(release, verb, **more))
    (record,) = bench.events(event)
    assert told["record"] == record["seq"] and record["detail"]["person"] == "alice"
    if verb == "approve":  # the decision on it and its sending stand behind it
        assert told["audit_size"] > told["record"] + 1


def test_a_look_at_held_bytes_and_a_reload_name_their_records(holding: Running) -> None:
    bench = holding.bench
    release = holding.hold()
    payloads = HeldPayloads(bench.ledger, bench.audit, tuple, record=bench.judge.record)
    told = payloads.ask(command("approvals.payload", {"release": release.id, "digest": release.digest}), at_once)
    assert told["record"] == bench.events("payload.read")[0]["seq"]
    assert to_json(payloads.fetch({"ticket": told["ticket"]}))["sha256"] == release.digest
    holding.place.policy_is(wording(TIGHTER, first_rounds=1))
    assert holding.reload()["record"] == bench.events("policy.load")[-1]["seq"]
