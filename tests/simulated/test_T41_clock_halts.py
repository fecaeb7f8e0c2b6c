"""T41 on a real guard, gate, ledger, log and desk; its clock, the monotonic and the coordinator's are moved by hand."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from certs.authority import create_ca
from certs.commands import sign_command
from certs.enrolment import EnrolmentKeys
from certs.roles import Roles
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.orders import check_orders
from fedsilo.audit.polls import WINDOW_SECONDS
from fedsilo.control.server import ControlServer, raise_for_reply
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.clocks import CERTIFICATE_TIME
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotAllowedError, UnreachableError
from fedsilo.protocol.place import Place
from silo.guard.clock_watch import ClockWatch
from silo.guard.ledger import Ledger, OutboxItem, Release
from tests.policies import setting
from tests.world import Loop

NOW, HOUR, DAY = setting.NOW, 3_600.0, 86_400.0
JUMP = 400 * DAY


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


SITE_CA = create_ca("hospital_a", kind="site", not_before=utc(NOW - DAY), days=700)
ROLES_HERE = Roles("hospital_a", {"alice": frozenset({"approver"}), "bob": frozenset({"operator"})})


@dataclass
class Site:
    """A watched guard with a real desk, whose people sign by clocks of their own, which are right."""

    loop: Loop
    keys: dict[str, ec.EllipticCurvePrivateKey] = field(default_factory=dict)
    given: int = 0

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        watch = self.loop.bench.watch
        assert watch is not None
        self.desk = ControlServer(
            "hospital_a", SITE_CA.certificate_pem, ROLES_HERE, lambda: utc(watch.time()),
            journal=self.loop.folder / "requests.jsonl", shows=lambda: utc(watch.people_time()),
            wall=lambda: utc(watch.wall()),
        )  # fmt: skip
        self.loop.guard.register(self.desk)

    def restart(self, at: float) -> None:
        self.loop.restart(at)
        self.begin()

    def signed(self, person: str, name: str, at: float, **arguments: Any) -> control_pb2.Command:
        key = self.keys.setdefault(person, ec.generate_private_key(ec.SECP256R1()))
        certificate = SITE_CA.issue_operator(EnrolmentKeys(key.public_key(), None), person=person, now=utc(at))
        self.given += 1
        return sign_command(
            site="hospital_a", name=name, arguments=arguments, request_id=f"request-{self.given:04}",
            expires=utc(at) + timedelta(minutes=5), operator_certificate_pem=certificate.certificate_pem,
            operator_key=key,
        )  # fmt: skip

    def order(self, command: control_pb2.Command) -> None:
        """Give it, and let the loop carry it out. Raises what it is answered with."""
        replies: list[control_pb2.CommandReply] = []
        giving = threading.Thread(target=lambda: replies.append(self.desk.execute(command)))
        giving.start()
        while giving.is_alive():
            giving.join(0.02)
            if not self.loop.events.empty():
                self.loop.turn()
        raise_for_reply(replies[0])

    def accept(self, at: float, person: str = "alice", **changes: Any) -> None:
        self.order(self.signed(person, "clock.accept", at, **({"halt": self.halt["digest"]} | changes)))

    @property
    def clock(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loop.state()["clock"]
        return state

    @property
    def halt(self) -> dict[str, Any]:
        halt: dict[str, Any] = self.clock["halt"]
        return halt

    @property
    def now(self) -> float:
        return self.loop.coordinator_now


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()), watched=True, turn_seconds=20.0)
    loop.turn(2)
    assert loop.coordinator.sent[0][0].kind == "control.hello" and not loop.bench.gate.halted
    yield Site(loop)
    loop.close()


def jumps_for_one_turn(site: Site, seconds: float) -> None:
    site.loop.bench.clock_now += seconds
    site.loop.turn()
    site.loop.bench.clock_now -= seconds


def test_T41_one_wrong_answer_halts_with_its_cause_and_is_over_with_one_order(site: Site) -> None:
    loop = site.loop
    before = loop.bench.gate.now()
    jumps_for_one_turn(site, JUMP)
    assert (site.halt["code"], site.halt["seconds"]) == ("CLOCK_AHEAD", pytest.approx(JUMP, abs=1))
    assert "400 d" in loop.bench.gate.halted and loop.bench.events("halt")[-1]["reasons"] == ["CLOCK_AHEAD"]
    assert site.halt["message"] == loop.bench.gate.halted  # what is typed back is read beside these words
    # nothing was judged, stored or recorded by it
    assert before <= loop.bench.gate.now() <= site.now and loop.bench.ledger.latest_time <= site.now
    assert max(record["t"] for record in loop.bench.audit.records()) / 1000 <= site.now
    # right again, in this process and in another: halted until a person looks
    sent = len(loop.coordinator.sent)
    loop.turn(3)
    assert loop.bench.gate.halted and len(loop.coordinator.sent) == sent
    site.restart(site.now)
    loop.turn(2)
    assert loop.bench.gate.halt_code == "CLOCK_AHEAD" and loop.coordinator.sent == []
    site.accept(site.now)
    loop.turn(3)
    assert not loop.bench.gate.halted and site.halt is None
    assert [envelope.kind for envelope, _ in loop.coordinator.sent][:3] == [
        "control.hello", "control.checkpoint", "control.poll",
    ]  # fmt: skip
    assert loop.bench.gate.now() == pytest.approx(site.now, abs=1)
    # who accepted which halt verifies offline
    loop.bench.audit.checkpoint()
    results = verify_logs([loop.folder / "audit"])
    check_orders(results, [loop.folder / "audit"], [SITE_CA.certificate_pem])
    assert results[0]["problems"] == [] and results[0]["orders"]["anchored"] == 1


def test_T41_a_time_that_was_stored_before_anybody_noticed_is_released_for_good(tmp_path: Path) -> None:
    """As a site is found whose earlier version stored what a time server said: ledger, log and desk, 400 days on."""
    loop = Loop(tmp_path / "a", setting.policy_of(setting.policy_text()), watched=True, turn_seconds=20.0)
    loop.bench.ledger.now(NOW + JUMP)
    loop.bench.watch = None
    loop.bench.clock_now = NOW + JUMP
    loop.bench.audit.append("screen.hit")
    book = loop.bench.gate._judge.book
    for day in range(3):
        book.days[f"{utc(NOW + JUMP + day * DAY):%Y-%m-%d}"] = 1000
    loop.bench.ledger.keep_book(book.to_json())
    (loop.folder / "requests.jsonl").write_text(json.dumps({"seen": utc(NOW + JUMP).isoformat()}) + "\n")
    loop.restart(NOW)
    site = Site(loop)
    loop.turn(2)
    assert site.halt["code"] == "CLOCK_STORED_AHEAD" and loop.coordinator.sent == []
    digest = site.halt["digest"]
    site.accept(site.now)
    record = loop.bench.events("clock.accept")[-1]
    assert record["detail"] | {"certificate": "", "request": ""} == {
        "person": "alice", "certificate": "", "request": "", "halt": digest, "code": "CLOCK_STORED_AHEAD",
        "showed": int(NOW), "latest": int(NOW + JUMP), "off_seconds": int(JUMP),
    }  # fmt: skip
    assert len(record["orders"]) == 1  # what she signed stands with it
    for _ in range(2):
        loop.turn(3)
        assert not loop.bench.gate.halted
        assert "control.poll" in loop.coordinator.kinds()
        assert loop.bench.gate.now() == pytest.approx(site.now, abs=1) and loop.bench.audit.latest_time <= site.now
        site.order(site.signed("bob", "pause", site.now)) if loop.guard.runs.run else None
        assert loop.bench.gate._judge.book.days.keys() == {f"{utc(NOW):%Y-%m-%d}"}
        assert sum(loop.bench.gate._judge.book.days.values()) > 3000
        site.restart(site.now)
    loop.close()


def test_T41_polls_after_an_acceptance_go_under_a_window_of_the_accepted_time(site: Site) -> None:
    """Both clocks are a month ahead, and set right; the machine sleeps, and a person accepts what the clock shows."""
    loop = site.loop
    loop.coordinator_now += 30 * DAY
    site.restart(site.now)
    loop.turn(3)
    opened = loop.bench.events("egress.decision")[-1]
    assert opened["kind"] == "control.poll" and opened["detail"]["window"]["until"] > NOW + 30 * DAY
    loop.coordinator_now -= 30 * DAY
    loop.bench.clock_now -= 30 * DAY
    loop.slept += HOUR
    loop.turn()
    assert site.halt["code"] == "CLOCK_STORED_AHEAD"
    site.accept(site.now)
    loop.turn(200)  # more than an hour, in steps of 20 s
    records = list(loop.bench.audit.records())
    accepted = next(record["seq"] for record in records if record["event"] == "clock.accept")
    (closed,) = [record for record in records[opened["seq"]:accepted] if record["event"] == "egress.sent"
                 and record["kind"] == "control.poll"]  # fmt: skip
    assert closed["link"]["decision"] == opened["seq"]
    windows = [record for record in records[accepted:] if "window" in record.get("detail", {})]
    assert len(windows) > 1
    assert all(record["detail"]["window"]["until"] <= record["t"] / 1000 + WINDOW_SECONDS + 1 for record in windows)


def test_T41_a_clock_set_back_is_refused_as_ever(site: Site) -> None:
    loop = site.loop
    latest = loop.bench.gate.now()
    loop.bench.clock_now -= DAY
    loop.turn(2)
    assert not loop.bench.gate.halted and loop.bench.gate.now() >= latest  # time stands still, nothing is refilled
    # a thief that starts it again in the past, to have yesterday's budget once more
    site.restart(latest - 3 * HOUR)
    loop.turn(2)
    assert site.halt["code"] == "CLOCK_BEHIND" and "3 h" in loop.bench.gate.halted
    assert loop.coordinator.kinds() == ["control.hello", "control.checkpoint"]
    assert loop.bench.gate.now() >= latest


@pytest.mark.parametrize("seconds", [0.128, 30 * 60.0, HOUR])
def test_T41_what_time_synchronisation_does_goes_on(site: Site, seconds: float) -> None:
    site.loop.bench.clock_now += seconds
    site.loop.turn(3)
    assert not site.loop.bench.gate.halted
    told = [record["detail"] for record in site.loop.bench.events("clock.jump")]
    assert [detail["forward_milliseconds"] // 1000 for detail in told] == ([] if seconds < 60 else [int(seconds)])


@pytest.mark.parametrize("again", [False, True])
def test_T41_a_jump_after_the_clock_has_gone_back_is_told_again(site: Site, again: bool) -> None:
    for seconds in (HOUR / 2, -HOUR / 2, *([HOUR / 2] * again)):
        site.loop.bench.clock_now += seconds
        site.loop.turn(3)
    told = [record["detail"] for record in site.loop.bench.events("clock.jump")]
    forward = [detail["forward_milliseconds"] // 1000 for detail in told if "forward_milliseconds" in detail]
    assert forward == [int(HOUR / 2)] * (1 + again) and not site.loop.bench.gate.halted


class Asked(Ledger):
    """Whenever it is asked, somebody else asks what time it is."""

    watch: ClockWatch | None = None
    asked = kept_waiting = 0

    def _somebody_asks(self) -> None:
        if self.watch is not None and threading.current_thread() is threading.main_thread():
            asking = threading.Thread(target=self.watch.people_time, daemon=True)
            asking.start()
            asking.join(5)
            self.asked, self.kept_waiting = self.asked + 1, self.kept_waiting + asking.is_alive()

    @property
    def latest_time(self) -> float:
        self._somebody_asks()
        return super().latest_time

    @property
    def clock_accepted(self) -> float:
        self._somebody_asks()
        return super().clock_accepted

    def keep_clock_difference(self, seconds: float, at: float) -> None:
        self._somebody_asks()
        super().keep_clock_difference(seconds, at)


@pytest.mark.parametrize("differs", [0.0, HOUR / 2, 2 * HOUR])
def test_T41_whoever_asks_the_time_while_the_ledger_is_busy_does_not_wait_for_it(
    tmp_path: Path, differs: float
) -> None:
    slept = 0.0
    with closing(Asked(tmp_path / "ledger.sqlite3")) as ledger:
        watch = ClockWatch(ledger, asks=True, wall=lambda: NOW, monotonic=lambda: 0.0, slept=lambda: slept)
        watch.begin(NOW)
        ledger.watch = watch
        watch.compare(NOW - differs, 0.0)
        slept = HOUR
        watch.look()
        assert ledger.asked >= 3 and ledger.kept_waiting == 0
        assert (watch.fault is not None) == (differs > HOUR)


@pytest.mark.parametrize("days", [2.7, 7.0])
def test_T41_a_site_that_was_off_for_a_week_goes_on_with_its_coordinator(site: Site, days: float) -> None:
    site.loop.coordinator_now += days * DAY
    site.restart(site.now)
    # until its coordinator has signed what time it is, nothing is stored by the clock
    assert site.loop.bench.gate.now() < NOW + HOUR
    site.loop.turn(2)
    assert not site.loop.bench.gate.halted and site.loop.bench.gate.now() == pytest.approx(site.now, abs=1)
    assert site.loop.bench.events("clock.jump") == []  # somebody vouched for it


@pytest.mark.parametrize("off", [-600.0, 600.0])
def test_T41_the_difference_is_known_in_the_step_of_hello_before_anything_else_is_asked(site: Site, off: float) -> None:
    site.restart(site.now + off)
    site.loop.turn(1)
    assert site.loop.coordinator.kinds() == ["control.hello", "control.checkpoint"]
    assert site.clock["difference_seconds"] == pytest.approx(off, abs=1)  # signed times are whole seconds
    assert ("ahead of" if off > 0 else "behind") in site.clock["told"]
    # what `silo check` and `silo doctor` tell of
    assert site.loop.bench.ledger.clock_difference["seconds"] == pytest.approx(off, abs=1)


def test_T41_offline_a_gap_is_recorded_and_goes_on(site: Site) -> None:
    loop = site.loop
    loop.coordinator_now += 3 * DAY
    site.restart(site.now)
    loop.coordinator.fails_at("control.hello", UnreachableError("no route"))
    loop.turn(2)
    assert loop.bench.gate.now() == pytest.approx(site.now, abs=25) and not loop.bench.gate.halted
    (told,) = loop.bench.events("clock.jump")
    assert told["detail"]["forward_milliseconds"] == pytest.approx(3 * DAY * 1000, abs=100_000)
    loop.turn(2)
    assert "control.poll" in loop.coordinator.kinds()


def test_T41_a_coordinator_whose_certificate_is_not_valid_by_this_clock_is_not_offline(site: Site) -> None:
    """The clock is 400 days ahead at a start, so that TLS fails: nothing is stored by it, and set right it goes on."""
    loop = site.loop
    site.restart(site.now + JUMP)
    for _ in range(3):
        loop.coordinator.fails_at(
            "control.hello", UnreachableError("its certificate is refused: expired", code=CERTIFICATE_TIME)
        )
    loop.turn(3)
    assert loop.bench.gate.now() <= site.now and loop.bench.ledger.latest_time <= site.now
    loop.bench.clock_now -= JUMP
    loop.turn(2)
    assert not loop.bench.gate.halted and loop.bench.gate.now() == pytest.approx(site.now, abs=1)


def test_T41_a_clock_ahead_of_the_coordinators_halts_at_the_start_and_setting_it_right_is_accepted(site: Site) -> None:
    loop = site.loop
    site.restart(site.now + 3 * HOUR)
    loop.turn(2)
    assert site.halt["code"] == "CLOCK_AHEAD" and "3 h" in loop.bench.gate.halted
    assert site.clock["difference_seconds"] == pytest.approx(3 * HOUR, abs=2) and "3 h ahead" in site.clock["told"]
    assert loop.bench.ledger.latest_time <= site.now  # three hours are no jump, and no time of it was stored
    loop.bench.clock_now -= 3 * HOUR
    site.accept(site.now)
    loop.turn(3)
    assert not loop.bench.gate.halted and loop.bench.ledger.clock_accepted == 0.0


def test_T41_two_clocks_that_differ_go_on_where_an_approver_accepts_it(site: Site) -> None:
    """The coordinator's is the wrong one. Accepted once, also for the next start; a further difference is not."""
    loop = site.loop
    loop.coordinator_now += 3 * HOUR
    ours = loop.bench.clock_now
    site.restart(ours)
    loop.turn(2)
    assert site.halt["code"] == "CLOCK_BEHIND"
    site.accept(loop.bench.clock_now)
    loop.turn(3)
    assert "control.poll" in loop.coordinator.kinds()
    for further, halts in ((0.0, False), (2 * HOUR, True)):
        loop.coordinator_now += further
        site.restart(loop.bench.clock_now)
        loop.turn(2)
        assert bool(loop.bench.gate.halted) == halts


def test_T41_after_a_suspend_the_coordinator_is_asked_first(site: Site) -> None:
    loop = site.loop
    for seconds, wrong in ((10 * HOUR, 0.0), (10 * HOUR, 2 * DAY)):
        loop.slept += seconds
        loop.coordinator_now += seconds
        loop.bench.clock_now += seconds + wrong
        loop.turn()
        assert loop.coordinator.kinds()[-2:] == ["control.hello", "control.checkpoint"]
        assert (site.halt is not None) == bool(wrong)
    assert loop.bench.ledger.latest_time <= site.now and "2 d" in loop.bench.gate.halted


def test_T41_nothing_is_said_under_a_policy_that_is_over_by_a_clock_that_nobody_vouches_for(site: Site) -> None:
    """Its last day may well be gone: until that is known, not even hello leaves; set right, all goes on."""
    loop = site.loop
    site.restart(site.now + JUMP)
    loop.turn(3)
    assert loop.coordinator.sent == [] and "policy is not valid" in loop.bench.gate.counters.last_fault
    loop.bench.clock_now -= JUMP
    loop.turn(3)
    assert "control.poll" in loop.coordinator.kinds() and not loop.bench.gate.halted


def test_T36_T41_only_an_approver_accepts_and_only_the_halt_that_was_shown(site: Site) -> None:
    jumps_for_one_turn(site, JUMP)
    for error, refused in (
        (NotAllowedError, {"person": "bob"}), (ConflictError, {"halt": ""}), (ConflictError, {"halt": "ab" * 32}),
    ):  # fmt: skip
        with pytest.raises(error):
            site.accept(site.now, **refused)
    taken = site.signed("alice", "clock.accept", site.now, halt=site.halt["digest"])
    site.order(taken)
    assert not site.loop.bench.gate.halted
    # the same order again is another halt's none, whoever kept it
    jumps_for_one_turn(site, JUMP)
    site.order(taken)  # a repeated request is answered, and does nothing
    assert site.loop.bench.gate.halted


def test_T41_an_acceptance_that_cannot_be_recorded_is_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps_for_one_turn(site, JUMP)
    loop, append = site.loop, site.loop.bench.audit.append
    with monkeypatch.context() as patched:

        def full(event: str, **fields: Any) -> int:
            if event == "clock.accept":
                raise ConflictError("no")
            return append(event, **fields)

        patched.setattr(loop.bench.audit, "append", full)
        with pytest.raises(FedSiloError):
            site.accept(site.now)
    assert loop.bench.gate.halt_code == "CLOCK_AHEAD" and loop.bench.ledger.clock_halt
    site.accept(site.now)
    assert not loop.bench.gate.halted and not loop.bench.ledger.clock_halt


def test_T41_an_order_during_the_jump_is_judged_by_what_the_clock_should_show(site: Site) -> None:
    """Else the desk would remember the wrong time, and refuse every later order as expired."""
    site.loop.bench.clock_now += JUMP
    with pytest.raises(FedSiloError) as refused:
        site.order(site.signed("bob", "pause", site.now))
    assert refused.value.code == "NOT_FOUND"  # there is no run to pause: it was not refused for its time
    site.loop.bench.clock_now -= JUMP
    site.loop.turn()
    site.accept(site.now)
    with pytest.raises(FedSiloError) as again:
        site.order(site.signed("bob", "pause", site.now))
    assert again.value.code == "NOT_FOUND"


def test_T41_by_files_a_weekend_goes_on_and_a_jump_halts(tmp_path: Path) -> None:
    policy = setting.policy_of(setting.policy_text())
    loop = Loop(tmp_path / "a", policy, by_files=True, watched=True, turn_seconds=20.0)
    loop.turn()
    loop.coordinator_now += 64 * HOUR
    loop.restart(loop.coordinator_now)
    loop.turn()
    assert not loop.bench.gate.halted and len(loop.bench.events("clock.jump")) == 1
    loop.bench.clock_now += 26 * HOUR
    loop.turn()
    assert loop.bench.gate.halt_code == "CLOCK_AHEAD"
    loop.close()


def test_T41_what_was_asked_for_in_a_released_time_counts_from_now(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite3")
    fields: dict[str, Any] = {
        "place": Place("run-1", 1, 0, "lora.factors"), "policy_digest": "", "payload_bytes": 1,
        "recorded": {}, "facts": {}, "rules": [], "persons": 1, "expiry_outcome": "denied", "state": "held",
        "revision": 0,
    }  # fmt: skip
    for name, at in (("late", NOW + JUMP), ("early", NOW - HOUR)):
        ledger.hold(Release(id=name, digest=name * 16, requested_at=at, expires_at=at + 2 * HOUR, **fields), b"x")
        ledger.keep_until_sent(OutboxItem(0, fields["place"], name * 16, 1, 7, at, "allowed", 0, False))
    ledger.accept_clock(NOW, 0.0, {})
    late, early = ledger.release("late"), ledger.release("early")
    assert (late.requested_at, late.expires_at) == (NOW, NOW + 2 * HOUR)
    assert (early.requested_at, early.expires_at) == (NOW - HOUR, NOW + HOUR)
    assert [item.at for item in ledger.outbox()] == [NOW, NOW - HOUR]
    assert ledger.now(NOW) == NOW == ledger.latest_time
    ledger.close()
