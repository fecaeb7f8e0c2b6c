"""T36, T41, T28 on the control socket: who may change what, and that a signature is for one thing, once, now."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from certs.authority import create_ca
from certs.commands import VerifiedCommand, sign_command, verify_command
from certs.roles import ACTIONS, ROLES, Roles, load_roles, may, render_roles
from fedsilo.control.server import EVENTS_KEPT_MAX, ControlServer, raise_for_reply
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    HeldError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UsageError,
)
from tests.security.people import NOW, forge, new_keys

SITE_CA = create_ca("hospital_a", kind="site", not_before=NOW - timedelta(days=1), days=365)
ROLES_HERE = Roles("hospital_a", {"alice": frozenset({"approver"}), "bob": frozenset({"viewer", "operator"})})
ARGUMENTS = {"release": "r14", "payload_digest": "ab" * 32, "policy_digest": "cd" * 32}


@dataclass
class Person:
    name: str
    authority: Any = SITE_CA
    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    def __post_init__(self) -> None:
        from certs.enrolment import EnrolmentKeys

        keys = EnrolmentKeys(self.key.public_key(), None)
        self.certificate = self.authority.issue(keys, "operator", self.name, now=NOW).certificate_pem

    def signs(self, name: str = "approvals.approve", **changes: Any) -> control_pb2.Command:
        fields: dict[str, Any] = {
            "site": "hospital_a",
            "name": name,
            "arguments": ARGUMENTS,
            "request_id": "request-0001",
            "expires": NOW + timedelta(minutes=5),
            "operator_certificate_pem": self.certificate,
            "operator_key": self.key,
        }
        return sign_command(**{**fields, **changes})


ALICE, BOB, EVE = Person("alice"), Person("bob"), Person("eve")


@dataclass
class Clock:
    now: datetime = NOW

    def __call__(self) -> datetime:
        return self.now


@dataclass
class World:
    desk: ControlServer
    clock: Clock
    done: list[VerifiedCommand]


def a_world(journal: Path | None = None, clock: Clock | None = None) -> World:
    clock = clock or Clock()
    desk = ControlServer("hospital_a", SITE_CA.certificate_pem, ROLES_HERE, clock, journal=journal)
    done: list[VerifiedCommand] = []

    def approve(command: VerifiedCommand) -> dict[str, Any]:
        done.append(command)
        return {"given": len(done), "by": command.person}

    desk.register_command("approvals.approve", "release.approve", approve)
    desk.register_command("silo.pause", "silo.pause", approve)
    return World(desk, clock, done)


def refused(reply: control_pb2.CommandReply) -> FedSiloError:
    with pytest.raises(FedSiloError) as caught:
        raise_for_reply(reply)
    return caught.value


def test_T36_an_approver_approves_and_the_reply_names_the_person() -> None:
    world = a_world()
    reply = world.desk.execute(ALICE.signs())
    raise_for_reply(reply)
    assert reply.result_json == '{"given":1,"by":"alice"}'
    assert world.done[0].arguments == ARGUMENTS
    assert world.done[0].roles == {"approver"}


def changed(**fields: Any) -> Callable[[], control_pb2.Command]:
    def make() -> control_pb2.Command:
        command = ALICE.signs()
        for name, value in fields.items():
            setattr(command, name, value)
        return command

    return make


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (changed(arguments_json='{"payload_digest":"ee"}'), "does not cover this command"),
        (changed(name="silo.pause"), "does not cover this command"),
        (changed(request_id="request-0002"), "does not cover this command"),
        (changed(expires="2026-12-01T12:30:00Z"), "does not cover this command"),
        (changed(certificate_pem=BOB.certificate), "does not cover this command"),
        (changed(signature=b""), "does not cover this command"),
        (changed(certificate_pem=b""), "not a PEM certificate"),
        (lambda: ALICE.signs(site="hospital_b"), "does not cover this command"),
        (lambda: ALICE.signs(expires=NOW), "expired at 2026-12-01T12:00:00Z"),
        (lambda: ALICE.signs(expires=NOW + timedelta(hours=2)), "more than 1:00:00 ahead"),
        (BOB.signs, r"bob \(operator, viewer\) may not release.approve"),
        (EVE.signs, r"eve \(no role\) may not release.approve"),
    ],
)
def test_T36_a_changed_late_or_unauthorised_command_does_nothing(
    make: Callable[[], control_pb2.Command], cause: str
) -> None:
    world = a_world()
    error = refused(world.desk.execute(make()))
    assert isinstance(error, NotAllowedError)
    import re

    assert re.search(cause, error.message), error.message
    assert world.done == []
    # The refusal left nothing behind: the same request id still serves the honest command.
    raise_for_reply(world.desk.execute(ALICE.signs()))


def test_T36_the_refusal_says_who_could() -> None:
    error = refused(a_world().desk.execute(BOB.signs()))
    assert error.hint == "it takes approver; at this site: alice"
    raise_for_reply(a_world().desk.execute(BOB.signs("silo.pause")))


def test_T28_people_of_other_roots_are_strangers() -> None:
    same_name = create_ca("hospital_a", kind="site", not_before=NOW - timedelta(days=1), days=365)
    federation = create_ca("hospital_a", kind="federation", not_before=NOW - timedelta(days=1), days=365)
    key = ec.generate_private_key(ec.SECP256R1())
    from_federation = forge(federation, uris=["spiffe://hospital_a/operator/alice"], key=key)
    world = a_world()
    for command in (
        Person("alice", same_name).signs(),
        ALICE.signs(operator_certificate_pem=from_federation, operator_key=key),
    ):
        error = refused(world.desk.execute(command))
        assert isinstance(error, NotAllowedError)
        assert "wrong CA" in error.message
    assert world.done == []


def test_T28_a_desk_refuses_roles_of_another_site() -> None:
    with pytest.raises(UsageError, match="site 'hospital_a', this daemon serves 'hospital_b'"):
        ControlServer("hospital_b", SITE_CA.certificate_pem, ROLES_HERE, Clock())
    with pytest.raises(ValueError, match="not an action"):
        a_world().desk.register_command("x", "do.anything", lambda command: None)


def test_T36_the_same_request_again_gets_the_same_reply_and_is_done_once() -> None:
    world = a_world()
    first = world.desk.execute(ALICE.signs())
    again = world.desk.execute(ALICE.signs())  # signed anew: another signature, the same request
    assert ALICE.signs().signature != ALICE.signs().signature
    assert first == again
    assert len(world.done) == 1
    other = refused(world.desk.execute(ALICE.signs(arguments={**ARGUMENTS, "release": "r15"})))
    assert (type(other), other.code) == (ConflictError, "REQUEST_ID_REUSED")
    someone_else = refused(world.desk.execute(BOB.signs("silo.pause")))
    assert someone_else.code == "REQUEST_ID_REUSED"
    assert len(world.done) == 1


def test_T36_a_request_may_be_asked_again_with_a_later_expiry_for_an_hour(tmp_path: Path) -> None:
    world = a_world(tmp_path / "requests.jsonl")
    first = world.desk.execute(ALICE.signs())
    world.clock.now = NOW + timedelta(minutes=50)  # what was signed first has expired
    signed_anew = ALICE.signs(expires=world.clock.now + timedelta(minutes=4))
    assert world.desk.execute(signed_anew) == first
    assert len(world.done) == 1
    restarted = a_world(tmp_path / "requests.jsonl", world.clock)
    assert restarted.desk.execute(signed_anew) == first and restarted.done == []
    # after that hour it is a request like any other, and what was captured is refused for its age
    world.clock.now = NOW + timedelta(hours=2)
    assert "expired" in refused(world.desk.execute(signed_anew)).message and len(world.done) == 1
    raise_for_reply(world.desk.execute(ALICE.signs(expires=world.clock.now + timedelta(minutes=4))))
    assert len(world.done) == 2


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True], ids=["same-process", "restarted"])
def test_T36_no_signature_outlives_what_is_remembered_of_its_request(tmp_path: Path, restarts: bool) -> None:
    """Whoever captured the later signature of a request that was asked twice, or one refused, tries it every minute."""
    journal = tmp_path / "requests.jsonl"
    world = a_world(journal)
    raise_for_reply(world.desk.execute(ALICE.signs()))
    captured, times = [], 1
    for minute in (55, 100):  # as late as the entry is there, and signed for as long as may be
        world.clock.now = NOW + timedelta(minutes=minute)
        captured.append(ALICE.signs(expires=world.clock.now + timedelta(minutes=60)))
        raise_for_reply(world.desk.execute(captured[-1]))
        captured.append(ALICE.signs("silo.pause", expires=world.clock.now + timedelta(minutes=59)))
        captured.append(ALICE.signs(arguments={"release": "r15"}, expires=world.clock.now + timedelta(minutes=60)))
        for other in captured[-2:]:
            assert refused(world.desk.execute(other)).code == "REQUEST_ID_REUSED"
    for minute in range(101, 260):
        world.clock.now = NOW + timedelta(minutes=minute)
        if restarts and minute % 20 == 0:
            world = a_world(journal, world.clock)
            times = 0
        for command in captured:
            world.desk.execute(command)
        assert len(world.done) == times
    raise_for_reply(world.desk.execute(ALICE.signs(expires=world.clock.now + timedelta(minutes=4))))
    assert len(world.done) == times + 1  # the request id is free again


def test_T36_a_later_signature_that_cannot_be_remembered_is_not_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = a_world(tmp_path / "requests.jsonl")
    first = world.desk.execute(ALICE.signs())
    later = ALICE.signs(expires=NOW + timedelta(minutes=9))
    with monkeypatch.context() as patch:
        patch.setattr("fedsilo.control.server.write_all", no_space)
        assert isinstance(refused(world.desk.execute(later)), OperationError)
        assert world.desk.execute(ALICE.signs()) == first  # nothing more is to be remembered of this one
    assert world.desk.execute(later) == first and len(world.done) == 1


def no_space(descriptor: int, data: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_T36_a_captured_command_is_not_replayed_into_a_fresh_process(tmp_path: Path) -> None:
    journal = tmp_path / "requests.jsonl"
    before = a_world(journal)
    captured = ALICE.signs()
    first = before.desk.execute(captured)
    after = a_world(journal, Clock(NOW + timedelta(minutes=1)))
    assert after.desk.execute(captured) == first
    assert after.done == []
    assert journal.stat().st_mode & 0o777 == 0o600
    # Without the journal the very same replay would have been carried out: the memory is what stops it.
    without = a_world(None)
    raise_for_reply(without.desk.execute(captured))
    assert len(without.done) == 1


def test_T36_a_command_cut_off_by_a_crash_is_reported_not_repeated(tmp_path: Path) -> None:
    journal = tmp_path / "requests.jsonl"
    world = a_world(journal)

    def killed(command: VerifiedCommand) -> None:
        raise SystemExit(137)

    world.desk.register_command("killed", "silo.stop", killed)
    with pytest.raises(SystemExit):
        world.desk.execute(BOB.signs("killed"))
    with journal.open("ab") as stream:
        stream.write(b'{"id": "torn')  # and the power went while something else was written
    after = a_world(journal)
    after.desk.register_command("killed", "silo.stop", after.done.append)
    assert refused(after.desk.execute(BOB.signs("killed"))).code == "INDETERMINATE"
    assert after.done == []
    raise_for_reply(after.desk.execute(BOB.signs("killed", request_id="request-0002")))
    assert len(after.done) == 1


def test_T36_a_damaged_journal_stops_the_start(tmp_path: Path) -> None:
    journal = tmp_path / "requests.jsonl"
    journal.write_bytes(b'{"seen": "yesterday"}\n{}\n')
    with pytest.raises(ConflictError, match=r"requests.jsonl:1: damaged"):
        a_world(journal)


def test_T41_a_clock_set_back_revives_nothing(tmp_path: Path) -> None:
    journal = tmp_path / "requests.jsonl"
    world = a_world(journal)
    old = ALICE.signs()
    world.clock.now = NOW + timedelta(minutes=10)
    late = ALICE.signs(request_id="request-0002", expires=NOW + timedelta(minutes=15))
    raise_for_reply(world.desk.execute(late))
    world.clock.now = NOW
    assert "expired" in refused(world.desk.execute(old)).message
    # nor does a restart with the clock set back
    restarted = a_world(journal, Clock(NOW - timedelta(hours=1)))
    assert "expired" in refused(restarted.desk.execute(old)).message
    assert restarted.done == []


def test_T36_an_error_of_the_handler_keeps_its_type_over_the_socket() -> None:
    world = a_world()

    def stale(command: VerifiedCommand) -> None:
        raise ConflictError("changed since you looked", hint="look again", code="STALE_VIEW")

    def held(command: VerifiedCommand) -> None:
        raise HeldError("waits for a second person")

    world.desk.register_command("stale", "release.approve", stale)
    world.desk.register_command("held", "release.approve", held)
    error = refused(world.desk.execute(ALICE.signs("stale")))
    assert (type(error), error.code, error.hint, error.exit_code) == (ConflictError, "STALE_VIEW", "look again", 6)
    error = refused(world.desk.execute(ALICE.signs("held", request_id="request-0002")))
    assert (type(error), error.code, error.exit_code) == (HeldError, "HELD", 9)
    assert isinstance(refused(world.desk.execute(ALICE.signs("none", request_id="request-0003"))), NotFoundError)


def test_T36_arguments_have_one_reading_only() -> None:
    command = ALICE.signs()
    verified = verify_command(
        command, site="hospital_a", site_ca_pem=SITE_CA.certificate_pem, roles=ROLES_HERE, now=NOW
    )
    assert verified.arguments == ARGUMENTS
    from cryptography.hazmat.primitives import hashes

    from fedsilo.protocol.codec import command_signing_bytes

    for text in ('{"release":"r14","release":"r15"}', '{ "release":"r14"}', "[]", '{"x":NaN}', "[" * 50_000):
        signed = command_signing_bytes(
            site="hospital_a",
            name=command.name,
            arguments_json=text,
            request_id=command.request_id,
            expires=command.expires,
        )
        command.arguments_json = text
        command.signature = ALICE.key.sign(signed, ec.ECDSA(hashes.SHA256()))
        with pytest.raises(NotAllowedError, match="JSON"):
            verify_command(command, site="hospital_a", site_ca_pem=SITE_CA.certificate_pem, roles=ROLES_HERE, now=NOW)
    for bad in ({"request_id": "short"}, {"arguments": {"x": float("nan")}}, {"expires": NOW.replace(tzinfo=None)}):
        with pytest.raises(UsageError):
            ALICE.signs(**bad)


def test_T28_the_table_of_actions_is_the_threat_models() -> None:
    # Written out by hand from the table: rows are actions, columns the five roles in order.
    table = {
        "watch": "11111",
        "audit.read": "01011",
        "payload.read": "01010",
        "silo.pause": "00111",
        "silo.resume": "00111",
        "silo.leave": "00111",
        "silo.stop": "00111",
        "transfer.export": "00111",
        "transfer.import": "00111",
        "adapter.accept": "00010",
        "adapter.refuse": "00111",
        "adapter.rollback": "00111",
        "release.approve": "00010",
        "release.reject": "00010",
        "release.defer": "00010",
        "change.propose": "00111",
        "change.approve": "00010",
        "halt.release": "00010",
        "certificates.manage": "00001",
        **{f"run.{verb}": "00110" for verb in ("submit", "start", "pause", "resume", "abort")},
    }
    assert set(table) == set(ACTIONS)
    for action, row in table.items():
        assert "".join(str(int(may([role], action))) for role in ROLES) == row, action
    assert not may(ROLES, "unknown")
    assert not may([], "watch")


def test_T28_roles_are_read_strictly() -> None:
    text = render_roles("hospital_a", ROLES_HERE.people)
    assert load_roles(text.encode(), "roles.yaml") == ROLES_HERE
    assert load_roles(render_roles("hospital_a", {}).encode(), "r").people == {}
    for wrong, cause in (
        ("site: a\npeople: {alice: [boss]}\n", "roles.yaml:2"),
        ("site: a\npeople: {Alice: [viewer]}\n", "roles.yaml:2"),
        ("site: a\npeople: {alice: []}\n", "roles.yaml:2"),
        ("site: a\npeople: {}\nextra: 1\n", "unknown key 'extra'"),
        ("people: {}\n", "'site' is missing"),
    ):
        with pytest.raises(UsageError, match=cause):
            load_roles(wrong.encode(), "roles.yaml")


# ---- reading -------------------------------------------------------------------------------------------


def test_a_watcher_gets_every_event_once_and_is_told_what_it_missed() -> None:
    desk = a_world().desk
    desk.set_state({"round": 1}, policy_digest="ab")
    assert [desk.publish("round", {"number": number}) for number in range(3)] == [1, 2, 3]
    snapshot = desk.snapshot()
    assert (snapshot.sequence, snapshot.state_json, snapshot.policy_digest) == (3, '{"round":1}', "ab")
    assert [event.sequence for event in desk.events_since(1, 0)] == [2, 3]
    assert desk.events_since(3, 0) == []
    for number in range(EVENTS_KEPT_MAX):
        desk.publish("round", {"number": number})
    seen = desk.events_since(1, 0)
    assert (seen[0].name, seen[0].fields_json, seen[0].sequence) == ("events.missed", '{"missed":2}', 3)
    assert [event.sequence for event in seen[1:]] == list(range(4, EVENTS_KEPT_MAX + 4))
    from_before_a_restart = a_world().desk
    from_before_a_restart.publish("start", {})
    names = [event.name for event in from_before_a_restart.events_since(500, 0)]
    assert names == ["events.missed", "start"]


def test_a_waiting_reader_wakes_for_an_event_and_for_the_end() -> None:
    desk = a_world().desk
    found: list[list[str]] = []

    def watch() -> None:
        first = desk.events_since(0, 30)
        found.append([event.name for event in first])
        found.append([event.name for event in desk.events_since(first[-1].sequence, 30)])

    reader = threading.Thread(target=watch)
    reader.start()
    desk.publish("hello", {})
    while len(found) < 1 and reader.is_alive():
        reader.join(0.01)
    desk.close()
    reader.join(10)
    assert not reader.is_alive()
    assert found == [["hello"], []]
    assert desk.closed


def test_queries_answer_data_or_a_named_error() -> None:
    desk = a_world().desk
    desk.register_query("release", lambda arguments: {"id": arguments["id"]})

    def absent(arguments: Any) -> None:
        raise NotFoundError("no such release")

    desk.register_query("absent", absent)
    assert desk.query("release", '{"id": "r14"}').data_json == '{"id":"r14"}'
    for name, arguments, expected in (
        ("absent", "", NotFoundError),
        ("unknown", "{}", NotFoundError),
        ("release", "[]", UsageError),
        ("release", "{", UsageError),
    ):
        with pytest.raises(expected):
            raise_for_reply(desk.query(name, arguments))


def test_T36_two_at_once_are_carried_out_once() -> None:
    world = a_world()
    entered, go_on = threading.Event(), threading.Event()

    def slow(command: VerifiedCommand) -> int:
        entered.set()
        assert go_on.wait(10)
        world.done.append(command)
        return len(world.done)

    world.desk.register_command("slow", "silo.pause", slow)
    replies: list[control_pb2.CommandReply] = []
    threads = [threading.Thread(target=lambda: replies.append(world.desk.execute(BOB.signs("slow")))) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert entered.wait(10)
    world.desk.snapshot()  # reading does not wait for a command
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert [reply.result_json for reply in replies] == ["1", "1"]


def test_keys_of_daemons_are_not_keys_of_people() -> None:
    with pytest.raises(UsageError):
        SITE_CA.issue(new_keys()[2], "operator", "alice", now=NOW)
