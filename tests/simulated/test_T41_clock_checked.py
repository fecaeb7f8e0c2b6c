"""T41: what `silo check`, `silo doctor` and the console say of a clock, from what the guard found out about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from fedsilo.cli.coordinator import status_text as coordinator_text
from fedsilo.cli.doctor import findings
from fedsilo.cli.silo import status_text
from fedsilo.protocol.errors import OperationError
from fedsilo.views.overview import needs_of
from fedsilo.views.state import Snapshot, state_of
from silo.guard.checks import check_site
from silo.guard.clock_watch import ClockHalt, look_offline
from silo.guard.ledger import Ledger
from tests.console.states import coordinator
from tests.simulated.policy_site import PolicySite, text_of

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
