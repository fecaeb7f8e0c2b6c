"""T41: a clock that jumps. On a real guard, gate, ledger, log and control server, whose clocks are moved by hand; what
`silo check`, `silo doctor` and the console say of it; and at a coordinator, until an approver accepts the clock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from certs.authority import create_ca
from certs.commands import sign_command
from certs.enrolment import EnrolmentKeys
from certs.roles import Roles
from coordinator.config import load_config
from coordinator.main import Coordinator, check
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.orders import check_orders
from fedsilo.audit.polls import WINDOW_SECONDS
from fedsilo.cli.coordinator import status_text as coordinator_text
from fedsilo.cli.doctor import findings
from fedsilo.cli.silo import status_text
from fedsilo.control.answers import to_json
from fedsilo.control.server import ControlServer, raise_for_reply
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.files.identity_files import load_operator
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.clocks import CERTIFICATE_TIME
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UnreachableError,
)
from fedsilo.protocol.place import Place
from fedsilo.views.overview import needs_of
from fedsilo.views.state import Snapshot, state_of
from silo.guard.checks import check_site
from silo.guard.clock_watch import ClockHalt, ClockWatch, look_offline
from silo.guard.ledger import Ledger, OutboxItem, Release
from tests.console.states import coordinator
from tests.policies import setting
from tests.simulated.coordinator_parts import SILOS
from tests.simulated.policy_site import PolicySite, text_of
from tests.simulated.test_coordinator_queries import write_coordinator
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
        certificate = SITE_CA.issue(EnrolmentKeys(key.public_key(), None), "operator", person, now=utc(at))
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
    assert loop.coordinator.sent[0][0].kind == "control.hello" and not loop.bench.judge.halted
    yield Site(loop)
    loop.close()


def jumps_for_one_turn(site: Site, seconds: float) -> None:
    site.loop.bench.clock_now += seconds
    site.loop.turn()
    site.loop.bench.clock_now -= seconds


def test_T41_one_wrong_answer_halts_with_its_cause_and_is_over_with_one_order(site: Site) -> None:
    loop = site.loop
    before = loop.bench.judge.now()
    jumps_for_one_turn(site, JUMP)
    assert (site.halt["code"], site.halt["seconds"]) == ("CLOCK_AHEAD", pytest.approx(JUMP, abs=1))
    assert "400 d" in loop.bench.judge.halted and loop.bench.events("halt")[-1]["reasons"] == ["CLOCK_AHEAD"]
    assert site.halt["message"] == loop.bench.judge.halted  # what is typed back is read beside these words
    # nothing was judged, stored or recorded by it
    assert before <= loop.bench.judge.now() <= site.now and loop.bench.ledger.latest_time <= site.now
    assert max(record["t"] for record in loop.bench.audit.records()) / 1000 <= site.now
    # right again, in this process and in another: halted until a person looks
    sent = len(loop.coordinator.sent)
    loop.turn(3)
    assert loop.bench.judge.halted and len(loop.coordinator.sent) == sent
    site.restart(site.now)
    loop.turn(2)
    assert loop.bench.judge.halt_code == "CLOCK_AHEAD" and loop.coordinator.sent == []
    site.accept(site.now)
    loop.turn(3)
    assert not loop.bench.judge.halted and site.halt is None
    assert [envelope.kind for envelope, _ in loop.coordinator.sent][:3] == [
        "control.hello", "control.checkpoint", "control.poll",
    ]  # fmt: skip
    assert loop.bench.judge.now() == pytest.approx(site.now, abs=1)
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
    book = loop.bench.judge.book
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
        assert not loop.bench.judge.halted
        assert "control.poll" in loop.coordinator.kinds()
        assert loop.bench.judge.now() == pytest.approx(site.now, abs=1) and loop.bench.audit.latest_time <= site.now
        site.order(site.signed("bob", "pause", site.now)) if loop.guard.runs.run else None
        assert loop.bench.judge.book.days.keys() == {f"{utc(NOW):%Y-%m-%d}"}
        assert sum(loop.bench.judge.book.days.values()) > 3000
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
    latest = loop.bench.judge.now()
    loop.bench.clock_now -= DAY
    loop.turn(2)
    assert not loop.bench.judge.halted and loop.bench.judge.now() >= latest  # time stands still, nothing is refilled
    # a thief that starts it again in the past, to have yesterday's budget once more
    site.restart(latest - 3 * HOUR)
    loop.turn(2)
    assert site.halt["code"] == "CLOCK_BEHIND" and "3 h" in loop.bench.judge.halted
    assert loop.coordinator.kinds() == ["control.hello", "control.checkpoint"]
    assert loop.bench.judge.now() >= latest


@pytest.mark.parametrize("seconds", [0.128, 30 * 60.0, HOUR])
def test_T41_what_time_synchronisation_does_goes_on(site: Site, seconds: float) -> None:
    site.loop.bench.clock_now += seconds
    site.loop.turn(3)
    assert not site.loop.bench.judge.halted
    told = [record["detail"] for record in site.loop.bench.events("clock.jump")]
    assert [detail["forward_milliseconds"] // 1000 for detail in told] == ([] if seconds < 60 else [int(seconds)])


@pytest.mark.parametrize("again", [False, True])
def test_T41_a_jump_after_the_clock_has_gone_back_is_told_again(site: Site, again: bool) -> None:
    for seconds in (HOUR / 2, -HOUR / 2, *([HOUR / 2] * again)):
        site.loop.bench.clock_now += seconds
        site.loop.turn(3)
    told = [record["detail"] for record in site.loop.bench.events("clock.jump")]
    forward = [detail["forward_milliseconds"] // 1000 for detail in told if "forward_milliseconds" in detail]
    assert forward == [int(HOUR / 2)] * (1 + again) and not site.loop.bench.judge.halted


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
    assert site.loop.bench.judge.now() < NOW + HOUR
    site.loop.turn(2)
    assert not site.loop.bench.judge.halted and site.loop.bench.judge.now() == pytest.approx(site.now, abs=1)
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
    assert loop.bench.judge.now() == pytest.approx(site.now, abs=25) and not loop.bench.judge.halted
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
    assert loop.bench.judge.now() <= site.now and loop.bench.ledger.latest_time <= site.now
    loop.bench.clock_now -= JUMP
    loop.turn(2)
    assert not loop.bench.judge.halted and loop.bench.judge.now() == pytest.approx(site.now, abs=1)


def test_T41_a_clock_ahead_of_the_coordinators_halts_at_the_start_and_setting_it_right_is_accepted(site: Site) -> None:
    loop = site.loop
    site.restart(site.now + 3 * HOUR)
    loop.turn(2)
    assert site.halt["code"] == "CLOCK_AHEAD" and "3 h" in loop.bench.judge.halted
    assert site.clock["difference_seconds"] == pytest.approx(3 * HOUR, abs=2) and "3 h ahead" in site.clock["told"]
    assert loop.bench.ledger.latest_time <= site.now  # three hours are no jump, and no time of it was stored
    loop.bench.clock_now -= 3 * HOUR
    site.accept(site.now)
    loop.turn(3)
    assert not loop.bench.judge.halted and loop.bench.ledger.clock_accepted == 0.0


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
        assert bool(loop.bench.judge.halted) == halts


def test_T41_after_a_suspend_the_coordinator_is_asked_first(site: Site) -> None:
    loop = site.loop
    for seconds, wrong in ((10 * HOUR, 0.0), (10 * HOUR, 2 * DAY)):
        loop.slept += seconds
        loop.coordinator_now += seconds
        loop.bench.clock_now += seconds + wrong
        loop.turn()
        assert loop.coordinator.kinds()[-2:] == ["control.hello", "control.checkpoint"]
        assert (site.halt is not None) == bool(wrong)
    assert loop.bench.ledger.latest_time <= site.now and "2 d" in loop.bench.judge.halted


def test_T41_nothing_is_said_under_a_policy_that_is_over_by_a_clock_that_nobody_vouches_for(site: Site) -> None:
    """Its last day may well be gone: until that is known, not even hello leaves; set right, all goes on."""
    loop = site.loop
    site.restart(site.now + JUMP)
    loop.turn(3)
    assert loop.coordinator.sent == [] and "policy is not valid" in loop.bench.gate.counters.last_fault
    loop.bench.clock_now -= JUMP
    loop.turn(3)
    assert "control.poll" in loop.coordinator.kinds() and not loop.bench.judge.halted


def test_T36_T41_only_an_approver_accepts_and_only_the_halt_that_was_shown(site: Site) -> None:
    jumps_for_one_turn(site, JUMP)
    for error, refused in (
        (NotAllowedError, {"person": "bob"}), (ConflictError, {"halt": ""}), (ConflictError, {"halt": "ab" * 32}),
    ):  # fmt: skip
        with pytest.raises(error):
            site.accept(site.now, **refused)
    taken = site.signed("alice", "clock.accept", site.now, halt=site.halt["digest"])
    site.order(taken)
    assert not site.loop.bench.judge.halted
    # the same order again is another halt's none, whoever kept it
    jumps_for_one_turn(site, JUMP)
    site.order(taken)  # a repeated request is answered, and does nothing
    assert site.loop.bench.judge.halted


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
    assert loop.bench.judge.halt_code == "CLOCK_AHEAD" and loop.bench.ledger.clock_halt
    site.accept(site.now)
    assert not loop.bench.judge.halted and not loop.bench.ledger.clock_halt


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
    assert not loop.bench.judge.halted and len(loop.bench.events("clock.jump")) == 1
    loop.bench.clock_now += 26 * HOUR
    loop.turn()
    assert loop.bench.judge.halt_code == "CLOCK_AHEAD"
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


NOW, HOUR, DAY = 1_800_000_000.0, 3_600.0, 86_400.0
NOW_TEXT = "2027-01-15T08:00:00Z"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    made = Ledger(tmp_path / "ledger.sqlite3")
    yield made
    made.close()


def test_T41_a_clock_that_agrees_is_no_word(ledger: Ledger) -> None:
    ledger.now(NOW - DAY)
    ledger.keep_clock_difference(-59.0, NOW - DAY)
    words, warning = look_offline(ledger, NOW)
    assert "as the coordinator's when they were compared, 2027-01-14T08:00:00Z" in words and not warning


def test_T41_a_difference_that_was_found_is_a_warning(ledger: Ledger) -> None:
    ledger.keep_clock_difference(3 * HOUR, NOW)
    words, warning = look_offline(ledger, NOW)
    assert "3 h ahead of the coordinator's" in words and "3 h ahead of the coordinator's" in warning


def test_T41_time_that_stands_still_is_a_warning_and_a_day_of_it_a_fault(ledger: Ledger) -> None:
    ledger.now(NOW)
    assert "1 h behind the latest time" in look_offline(ledger, NOW - HOUR)[1]
    with pytest.raises(OperationError) as halted:
        look_offline(ledger, NOW - 2 * DAY)
    assert halted.value.code == "CLOCK_STORED_AHEAD" and "--accept-clock" in halted.value.hint


def test_T41_a_halt_that_stands_is_a_fault(ledger: Ledger) -> None:
    halt = ClockHalt("CLOCK_AHEAD", 400 * DAY, NOW + 400 * DAY, NOW, "what it should by the monotonic clock", "ab" * 16)
    ledger.keep_clock_halt(asdict(halt))
    with pytest.raises(OperationError, match="400 d ahead") as halted:
        look_offline(ledger, NOW)
    assert halted.value.code == "CLOCK_AHEAD" and "this machine's or the coordinator's" in halted.value.hint


def test_T41_a_check_before_the_first_start_says_that_the_clock_was_compared_with_nothing(tmp_path: Path) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    results, _, _ = check_site(place.config, reach_coordinator=False)
    (row,) = [each for each in results if each["check"] == "clock"]
    assert "not compared yet: a start compares it with the coordinator's" in row["found"]


@pytest.mark.parametrize("seconds", [0.0, 3 * HOUR])
def test_T41_check_and_doctor_say_what_the_guard_found(tmp_path: Path, seconds: float) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    place.start()
    with closing(place.ledger()) as ledger:
        ledger.keep_clock_difference(seconds, place.now.timestamp())
    found = {each.check: each for each in findings("silo", place.config.source)}["clock"]
    results, look, _ = check_site(place.config, reach_coordinator=False)
    (row,) = [each for each in results if each["check"] == "clock"]
    assert row["ok"] and found.ok is (True if not seconds else None)
    assert ("3 h ahead of the coordinator's" in row["found"]) == bool(seconds)
    for told in (found.hint, "".join(look.warnings)):
        assert ("3 h ahead of the coordinator's" in told) == bool(seconds)


@pytest.mark.parametrize(
    ("clock", "says"),
    [
        ({}, ""),
        ({"ahead_seconds": 86_500, "told": "1 d ahead of the time that has passed"}, "if the clock is right by now"),
        ({"behind_seconds": 86_500, "told": "1 d behind the latest time seen"}, "if that time was wrong"),
    ],
)
def test_T41_a_coordinators_status_and_console_say_it(clock: dict[str, object], says: str) -> None:
    state = coordinator(clock=clock, silos=[])
    text, read = coordinator_text(state, NOW_TEXT), state_of(state, {})
    assert read is not None
    needs = {need.key: need for need in needs_of(Snapshot(state=read), 0.0)}
    assert ("CLOCK" in text) == ("clock" in needs) == bool(clock)
    if clock:
        assert f"{clock['told']}; {says}: coordinator accept-clock" in text
        assert needs["clock"].twin == "coordinator accept-clock" and str(clock["told"]) in needs["clock"].text


@pytest.mark.parametrize(("halted", "told"), [(False, ""), (False, "3 h ahead of the coordinator's"), (True, "")])
def test_T41_status_and_console_say_it(halted: bool, told: str) -> None:
    clock = {"halt": {"code": "CLOCK_AHEAD"} if halted else None, "told": told}
    state = {
        "kind": "silo", "silo": "hospital_a", "held": [], "clock": clock,
        "halted": "the clock showed a time" if halted else "", "coordinator": {"address": "host:1"},
    }  # fmt: skip
    text = status_text(state)
    read = state_of(state, {})
    assert read is not None
    needs = {need.key: need for need in needs_of(Snapshot(state=read), 0.0)}
    assert ("--accept-clock" in text) == halted and (told in text)
    assert ("clock" in needs) == bool(told) and ("halt" in needs) == halted
    if halted:
        assert needs["halt"].twin == "silo resume --accept-clock"
    if told:
        assert told in needs["clock"].text


DAY = 86_400.0
WEEK = 7 * DAY


@dataclass
class CoordinatorSite:
    """A real coordinator in a folder, its clock and the time that passes moved by hand; people's orders to it."""

    folder: Path
    wall: float = field(default_factory=time.time)
    running: float = 1_000.0
    given: int = 0

    def __post_init__(self) -> None:
        ca, people = self.folder / "ca", {"alice": ["approver"], "bob": ["operator"]}
        init_ca(ca, name="cardio-net", kind="federation")
        provision_site(self.folder / "main", site="main", federation_ca=ca, people=people, is_coordinator=True)
        self.checked = check(load_config(write_coordinator(self.folder / "main", SILOS)))

    def open(self) -> Coordinator:
        return Coordinator(self.checked, clock=lambda: self.wall, running=lambda: self.running)

    def order(self, coordinator: Coordinator, person: str, **arguments: Any) -> None:
        """Accept the clock, signed by one that shows what the coordinator's does."""
        identity = self.folder / "main/id"
        certificate, key = load_operator(identity / f"{person}.crt", identity / f"{person}.key")
        self.given += 1
        command = sign_command(
            site="main", name="clock.accept", arguments=arguments, request_id=f"request-{self.given:04}",
            expires=datetime.fromtimestamp(self.wall, UTC) + timedelta(minutes=2),
            operator_certificate_pem=certificate, operator_key=key, federation="cardio-net",
        )  # fmt: skip
        raise_for_reply(coordinator.control_server.execute(command))

    def told(self, coordinator: Coordinator) -> list[dict[str, Any]]:
        return [record for record in coordinator.audit.records() if "forward_milliseconds" in record.get("detail", {})]


@pytest.mark.slow
def test_T41_time_that_stands_still_goes_on_when_an_approver_accepts_the_clock(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path)
    right = site.wall
    with site.open() as coordinator, pytest.raises(NotFoundError):
        site.order(coordinator, "alice", halt="")
    site.wall += JUMP
    with site.open() as coordinator:  # nobody tells it the time, so at a start it believes its clock
        coordinator.audit.append("start")
        site.wall = right
        assert coordinator.seconds() == right + JUMP  # and nobody's certificate is good by that
    with site.open() as coordinator:
        stands = to_json(coordinator.control.state())["clock"]
        assert stands["behind_seconds"] == JUMP and "400 d behind the latest time seen" in stands["told"]
        with pytest.raises(NotAllowedError):
            site.order(coordinator, "bob", halt=stands["digest"])
        with pytest.raises(ConflictError):
            site.order(coordinator, "alice", halt="ab" * 32)
        site.wall = right + 120.0
        other = coordinator.clock()["digest"]
        site.wall = right  # set back further than was shown
        with pytest.raises(ConflictError):
            site.order(coordinator, "alice", halt=other)
        site.order(coordinator, "alice", halt=stands["digest"])
        assert coordinator.seconds() == right and not to_json(coordinator.control.state())["clock"]
        with pytest.raises(NotFoundError):
            site.order(coordinator, "alice", halt=stands["digest"])
    with site.open() as coordinator:
        assert coordinator.seconds() == right
        record = list(coordinator.audit.records())[-1]
        assert record["event"] == "clock.accept" and record["detail"]["person"] == "alice" and record["orders"]


def test_T41_a_jump_while_it_runs_is_told_and_not_followed_until_an_approver_accepts_it(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path, wall=time.time() - WEEK)
    with site.open() as coordinator:
        began = coordinator.seconds()
        site.running += 60.0
        site.wall += 60.0
        assert coordinator.seconds() == began + 60.0 and not coordinator.clock()
        site.wall += WEEK
        site.running += 10.0
        # nothing is judged, stored or signed by it
        coordinator.audit.append("run.submit")
        coordinator.audit.checkpoint()
        coordinator.look_at_clock()
        coordinator.look_at_clock()
        assert coordinator.seconds() == began + 70.0 and coordinator.audit.latest_time == pytest.approx(began + 70.0)
        stands = to_json(coordinator.control.state())["clock"]
        assert (stands["ahead_seconds"], stands["latest"]) == (pytest.approx(WEEK, abs=11), began + 70.0)
        assert "7 d ahead of the time that has passed" in stands["told"]
        (jump,) = site.told(coordinator)
        assert jump["detail"] == {"forward_milliseconds": int((WEEK - 10.0) * 1000), "followed": False}
        assert jump["t"] / 1000 == pytest.approx(began + 70.0)
        # right again: it is believed, and nothing has to be released
        site.wall -= WEEK
        assert coordinator.seconds() == began + 70.0 and not coordinator.clock()
        # the clock was wrong before, and is right after the jump: a person says so, by a clock that shows the same
        site.wall = time.time()
        stands = coordinator.clock()
        with pytest.raises(NotAllowedError):
            site.order(coordinator, "bob", halt=stands["digest"])
        site.running += 1.0
        site.wall += 1.0
        site.order(coordinator, "alice", halt=stands["digest"])
        assert coordinator.seconds() == pytest.approx(began + WEEK, abs=120) and not coordinator.clock()
        assert list(coordinator.audit.records())[-1]["event"] == "clock.accept"


def test_T41_an_acceptance_is_of_the_jump_that_was_shown_and_each_jump_is_told(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path, wall=time.time() - WEEK)
    with site.open() as coordinator:
        for _ in range(2):  # it goes back in between
            site.wall += WEEK
            coordinator.look_at_clock()
            shown = coordinator.clock()["digest"]
            site.wall += 5.0  # the clock is slewed while people look
            assert coordinator.clock()["digest"] == shown
            site.wall -= WEEK + 5.0
            coordinator.look_at_clock()
            assert not coordinator.clock()
        assert [round(each["detail"]["forward_milliseconds"] / DAY / 1000) for each in site.told(coordinator)] == [7, 7]
        site.wall += WEEK
        shown = coordinator.clock()["digest"]
        site.wall += 3_600.0
        with pytest.raises(ConflictError):
            site.order(coordinator, "alice", halt=shown)
        site.wall -= 3_600.0
        site.order(coordinator, "alice", halt=shown)
        assert not coordinator.clock()


def test_T41_small_jumps_are_recorded_and_add_up_to_one_that_is_not_followed(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path)
    with site.open() as coordinator:
        for hours in range(1, 26):
            site.wall += 3_600.0
            coordinator.look_at_clock()
            assert bool(coordinator.clock()) == (hours == 25)
        assert [each["detail"].get("followed") for each in site.told(coordinator)] == [None] * 24 + [False]


def test_T41_a_gap_before_the_start_is_recorded_and_a_restart_within_the_hour_is_none(tmp_path: Path) -> None:
    site = CoordinatorSite(tmp_path)
    for gap, told in ((0.0, 0), (1_800.0, 0), (64 * 3_600.0, 1)):  # the first start, a restart, a weekend
        site.wall += gap
        with site.open() as coordinator:
            coordinator.look_at_clock()
            assert len(site.told(coordinator)) == told and not coordinator.clock()
            coordinator.audit.append("start")
