"""What the console makes of the control API's JSON, and when an answer is off."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from console.feed import Store
from fedsilo.views.lines import NOT_YET_KNOWN, duration_text
from fedsilo.views.state import CoordinatorState, SiloState, Snapshot, halts_of, refusal_text, until_of, why_not_answer
from tests.console.states import DIGEST, NOW, POLICY_DIGEST, Happened, Reading, coordinator, live, release, rule, silo


def test_a_held_release_has_every_fact() -> None:
    (held,) = live(silo(release())).held
    assert (held.digest, held.policy.digest, held.revision) == (DIGEST, POLICY_DIGEST, 1)
    assert held.leaves.bytes == 1_992_294 and held.leaves.kinds[0].covered_by_epsilon == "NO"
    by_name = {each.rule: each for each in held.rules}
    assert (by_name["message bytes"].measured, by_name["message bytes"].limit) == ("1.9M", "8.0M")
    assert held.count("ok") == 23 and held.count("hold") == 1


@pytest.mark.parametrize(
    "junk", [{}, {"silo": None}, {"silo": 3, "held": [7, None, {"id": []}], "metrics": [], "left": 1}]
)
def test_a_malformed_state_is_shown_as_far_as_it_goes(junk: dict[str, object]) -> None:
    snapshot = live(junk)
    assert all(not held.answerable for held in snapshot.held)
    assert snapshot.state is None or isinstance(snapshot.state, SiloState)


HELD = live(silo(release()))


def test_a_daemon_that_has_just_started_is_not_live_and_takes_nothing_away() -> None:
    store = Store()
    store.read(Reading(silo(release()), policy_digest=POLICY_DIGEST), 100.0, wall_time=NOW)
    store.read(Reading({}, policy_digest=""), 103.0, wall_time=NOW + 3)
    shown = store.snapshot
    assert shown.link.state == "loading" and shown.link.cause and len(shown.held) == 1
    assert shown.server_now(104.0) == pytest.approx(NOW + 4) and shown.age_seconds(104.0) == 4.0
    assert shown.link.cause in why_not_answer(shown.held[0], shown, 104.0, approve=True)
    store.read(Reading(silo(release()), policy_digest=POLICY_DIGEST), 105.0, wall_time=NOW)
    assert store.snapshot.link.state == "live"


@pytest.mark.parametrize("missing", ["held_since", "expires_at"])
def test_a_moment_that_is_not_told_is_not_counted_from_1970(missing: str) -> None:
    (held,) = live(silo(release(**{missing: None}))).held
    known = {"held_since": held.held_seconds(NOW), "expires_at": held.left_seconds(NOW)}
    assert math.isnan(known.pop(missing)) and all(0 < seconds < 3600 for seconds in known.values())
    assert math.isnan(held.held_seconds(0.0)) and math.isnan(held.left_seconds(0.0))
    assert duration_text(math.nan) == duration_text(math.inf) == NOT_YET_KNOWN and duration_text(0.0) == "00:00"
    assert live(silo(release(expires_at=math.inf))).held[0].expires_at == 0.0  # what is no number is none
    lost = Store()
    lost.lost("nothing listens there", "is it started?", 5.0)
    assert lost.snapshot.state is None and lost.snapshot.link.cause == "nothing listens there"


def test_events_are_kept_in_order_and_the_missed_are_counted() -> None:
    events = [Happened(index, f"e{index}") for index in range(300)]
    snapshot = live(silo(), events=[*events, Happened(301, "events.missed", {"missed": 4})])
    assert [event.sequence for event in snapshot.events] == list(range(100, 300)) and snapshot.events_missed == 4


def at(minute: int, sequence: int) -> Reading:
    return Reading(silo(), sequence, f"2026-12-01T10:{minute:02d}:00.000Z")


def event(minute: int, sequence: int) -> Happened:
    return Happened(sequence, f"e{sequence}", time=f"2026-12-01T10:{minute:02d}:00.000Z")


@pytest.mark.parametrize(
    ("second", "then", "kept"),
    [
        ((3, 3), [(3, 3), (4, 4)], [1, 2, 3, 4]),  # a recording that is moved back forgets what comes later in it
        ((7, 0), [(8, 1)], [*range(1, 7), 1]),  # a daemon that starts again keeps its events
    ],
)
def test_events_are_kept_until_a_recording_is_moved_back(
    second: tuple[int, int], then: list[tuple[int, int]], kept: list[int]
) -> None:
    store = Store()
    store.happened([event(minute, minute) for minute in range(1, 7)])
    store.read(at(6, 6), 1.0, wall_time=0.0)
    store.read(at(*second), 2.0, wall_time=0.0)
    store.happened([event(*each) for each in then])
    assert [each.sequence for each in store.snapshot.events] == kept


def test_a_halt_has_what_its_release_is_signed_over() -> None:
    told = {"halts": {"halts": [{"kind": "public.responses", "digest": "ab" * 32}]}}
    halts = halts_of(replace(live(silo(screens={"halts": ["other"]})), answers=told))
    assert [(halt.kind, halt.digest) for halt in halts] == [("other", ""), ("public.responses", "ab" * 32)]


def test_a_coordinator_tells_why_a_silo_is_refused_and_until_when_its_certificate_is() -> None:
    state = live(coordinator()).state
    assert isinstance(state, CoordinatorState)
    members = {member.silo: member for member in state.members}
    assert refusal_text(members["clinic_e"].refusal or {}) == "its tokenizer is b, expected a"
    assert until_of(members["uni_c"].certificate_until) == math.inf
    assert (until_of(members["hospital_a"].certificate_until) - NOW) / 86400 == 5.5
    scores = {name: (member.pass_at_1, member.received_bytes) for name, member in members.items()}
    assert scores["hospital_a"] == (0.412, 2_000_000) and scores["uni_c"] == (None, None)  # released figures only


DENIED = {"name": "p", "digest": POLICY_DIGEST, "rules": [rule("L2 of the delta", 9.0, 4.0, "deny")]}

SHORT = live(silo(release(expires_at=release()["held_since"] + 134)))  # one second left


@pytest.mark.parametrize(
    ("shown", "snapshot", "at", "approve", "why"),
    [
        (HELD, HELD, 100.0, True, ""),
        (HELD, live(silo(release(digest="0" * 64))), 100.0, True, "payload changed"),
        (HELD, live(silo(release(revision=2))), 100.0, True, "judged again"),
        (HELD, live(silo(release()), policy_digest="1" * 64), 100.0, True, "policy changed"),
        (HELD, live(silo()), 100.0, True, "no longer held"),
        (HELD, HELD, 104.0, True, "stale"),
        (HELD, Snapshot(), 100.0, True, "disconnected"),
        (live(silo(release(policy=DENIED))), None, 100.0, True, "denies"),
        (live(silo(release(policy=DENIED))), None, 100.0, False, ""),
        (SHORT, None, 100.5, True, ""),
        (SHORT, None, 101.5, True, "expired"),  # T41: by the daemon's clock
        (live(silo(release(expires_at=None))), None, 100.0, True, NOT_YET_KNOWN),
    ],
)
def test_T36_an_answer_is_off_once_what_it_is_about_changed(
    shown: Snapshot, snapshot: Snapshot | None, at: float, approve: bool, why: str
) -> None:
    told = why_not_answer(shown.held[0], snapshot or shown, at, approve=approve)
    assert why in told and bool(why) is bool(told)
