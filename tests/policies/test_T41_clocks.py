"""T41: whether a clock is believed, by hand numbers and for all numbers; and counts that a released time took along."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsilo.protocol.clocks import HALTING, Judged, Verdict, apart, in_words, judge
from policies.history import HistoryBook

NOW, HOUR, DAY = 1_800_000_000.0, 3_600.0, 86_400.0


@pytest.mark.parametrize(
    ("ahead", "compared", "verdict"),
    [
        (0.0, False, Verdict.GOOD),
        (0.128, True, Verdict.GOOD),  # the largest offset that NTP slews away
        (HOUR, True, Verdict.GOOD),  # at the limit
        (HOUR + 6, True, Verdict.AHEAD),
        (HOUR + 6, False, Verdict.GOOD),  # nobody ever told the time: a day
        (DAY, False, Verdict.GOOD),
        (DAY + 6, False, Verdict.AHEAD),
        (400 * DAY, False, Verdict.AHEAD),
        (-DAY, True, Verdict.GOOD),  # set back: time stands still by the latest time that is stored
        (-400 * DAY, False, Verdict.GOOD),
    ],
)
def test_T41_while_a_process_runs_the_clock_is_held_against_the_monotonic_one(
    ahead: float, compared: bool, verdict: Verdict
) -> None:
    ran = NOW + 7.0  # by the monotonic clock
    judged = judge(ran + ahead, stored=NOW, ran=ran, compared=compared)
    assert judged.verdict == verdict
    assert judged.time == (ran if verdict == Verdict.AHEAD else ran + ahead)
    assert judged.seconds == pytest.approx(max(ahead, 0.0))


@pytest.mark.parametrize(
    ("wall", "stored", "signed", "expected"),
    [
        # right by the coordinator, whatever the gap: a weekend, a year in a cupboard
        (NOW, NOW - 64 * HOUR, NOW, Judged(Verdict.GOOD, 0.0, NOW)),
        (NOW, NOW - 400 * DAY, NOW - 1800, Judged(Verdict.GOOD, 0.0, NOW)),
        # ahead of it and behind it; nothing is stored by the wrong time
        (NOW + 3 * HOUR, NOW - DAY, NOW, Judged(Verdict.AHEAD, 3 * HOUR, NOW - DAY)),
        (NOW - 3 * HOUR, NOW - DAY, NOW, Judged(Verdict.BEHIND, 3 * HOUR, NOW - 3 * HOUR)),
        # a clock that a thief set back is behind the coordinator's; a stored time that was wrong is ahead of both
        (NOW - 2 * DAY, NOW, NOW, Judged(Verdict.BEHIND, 2 * DAY, NOW)),
        (NOW, NOW + 2 * HOUR, NOW, Judged(Verdict.STORED_AHEAD, 2 * HOUR, NOW + 2 * HOUR)),
    ],
)
def test_T41_at_a_start_the_coordinators_signed_time_decides(
    wall: float, stored: float, signed: float, expected: Judged
) -> None:
    assert judge(wall, stored=stored, signed=signed) == expected


@pytest.mark.parametrize(
    ("gap", "offline", "expected"),
    [
        (HOUR, False, Judged(Verdict.GOOD, HOUR, NOW)),  # a restart
        (64 * HOUR, False, Judged(Verdict.UNKNOWN, 64 * HOUR, NOW - 64 * HOUR)),  # it is asked first
        (64 * HOUR, True, Judged(Verdict.GOOD, 64 * HOUR, NOW)),  # nobody can be: off for a weekend, and goes on
        (-DAY, True, Judged(Verdict.GOOD, 0.0, NOW)),  # set back, as ever: the stored time stays the latest
        (-DAY - 6, True, Judged(Verdict.STORED_AHEAD, DAY + 6, NOW + DAY + 6)),
    ],
)
def test_T41_without_a_signed_time_a_gap_goes_on_and_a_day_back_does_not(
    gap: float, offline: bool, expected: Judged
) -> None:
    assert judge(NOW, stored=NOW - gap, offline=offline) == expected


def test_T41_a_site_that_never_stored_a_time_believes_its_clock() -> None:
    assert judge(NOW, stored=0.0) == Judged(Verdict.GOOD, 0.0, NOW)


TIMES = st.floats(0.0, 4e9)


@given(TIMES, TIMES, st.none() | TIMES, st.none() | TIMES, st.booleans(), st.booleans())
def test_T41_no_time_that_is_not_believed_is_judged_or_stored_by(
    wall: float, stored: float, ran: float | None, signed: float | None, compared: bool, offline: bool
) -> None:
    judged = judge(wall, stored=stored, ran=ran, signed=signed, compared=compared, offline=offline)
    if judged.verdict == Verdict.GOOD:
        assert judged.time == wall
    elif judged.verdict in (Verdict.AHEAD, Verdict.UNKNOWN):
        assert judged.time in {stored, ran, signed}  # a clock that is ahead makes nothing later
    else:
        assert judged.verdict in HALTING and judged.time >= max(wall, stored)  # and one set back nothing earlier


@given(TIMES, st.floats(0.0, 1e7), st.floats(-0.0005, 0.0005), st.booleans())
def test_T41_what_time_synchronisation_slews_never_halts(
    start: float, elapsed: float, rate: float, compared: bool
) -> None:
    """500 ppm is what adjtime(3) and ntpd slew by at most; 1e7 s of it are 83 minutes, so a day's limit without."""
    judged = judge(start + elapsed * (1 + rate), stored=start, ran=start + elapsed, compared=compared and elapsed < 7e6)
    assert judged.verdict == Verdict.GOOD


def test_differences_in_words() -> None:
    assert [in_words(each) for each in (0.2, 61.0, 3 * HOUR - 1, -400 * DAY - 3700)] == [
        "0 s", "1 min 1 s", "3 h", "400 d 1 h",
    ]  # fmt: skip
    assert (apart(120.0), apart(-120.0)) == ("2 min ahead of", "2 min behind")


def test_T41_what_was_counted_in_a_released_time_counts_today_and_makes_no_room() -> None:
    book = HistoryBook(
        days={"2027-01-15": 5, "2028-02-19": 7, "2028-02-20": 11, "2028-02-21": 1},
        units={"2028-02-19": {"reward.scalar": 3}}, screen_hits={"2027-01-15": {"metrics.eval": 1}},
        recent={"content": [NOW - 30.0, NOW + 400 * DAY]},
    )  # fmt: skip
    book.turn_back(NOW)  # 2027-01-15T08:00:00Z
    assert book.days == {"2027-01-15": 24}
    assert book.units == {"2027-01-15": {"reward.scalar": 3}} and book.screen_hits["2027-01-15"] == {"metrics.eval": 1}
    assert book.recent == {"content": [NOW - 30.0, NOW]}
    facts = {
        "run": "r", "round": 1, "step": 0, "kind": "lora.factors", "now": NOW, "payload_bytes": 100,
    }  # fmt: skip
    book.record(facts)
    assert book.view(facts).day_bytes == 124  # not dropped as the oldest of days that never were
