"""What the overview says that no screen test looks at: which steps are over, and the newest events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedsilo.views import overview
from fedsilo.views.lines import UNICODE, to_text
from fedsilo.views.overview import once_lines
from fedsilo.views.state import Happening
from tests.console.desk import SIZES, console
from tests.console.states import Happened, coordinator, live, release, silo


def steps(*held: Any, **changes: Any) -> str:
    return to_text(overview.round_lines(live(silo(*held, local_steps=20, **changes)), 100, UNICODE))


def test_while_a_rounds_update_is_held_all_its_steps_are_over() -> None:
    assert "step 20/20 held: approval" in steps(release(), step=0) and UNICODE.empty not in steps(release(), step=0)
    assert "step 0/20 training" in steps(step=0)
    assert "step 0/20 held: approval" in steps(release(round=1), step=0, round=2)  # of the round before
    figures = release()
    figures["leaves"]["kinds"][0]["kind"] = "metrics.eval"
    assert "step 0/20 held: approval" in steps(figures, step=0)
    assert "step 7/20 held: approval" in steps(release(), step=7)


def test_events_begin_with_the_newest_and_take_a_line_each() -> None:
    snapshot = live(silo())
    events = tuple(
        Happening(1, "2026-12-01T09:59:58.000Z", name, "long " * 60) for name in ("first", "second", "third")
    )  # fmt: skip
    lines = overview.event_lines(replace(snapshot, events=events), 60, UNICODE, most=2)
    assert [to_text([row]).split()[1] for row in lines] == ["third", "second"]
    assert all(len(to_text([row]).rstrip("\n")) <= 60 for row in lines)


async def test_the_newest_event_is_in_sight_however_much_needs_somebody() -> None:
    many = [release(id=f"r1/hospital_a/{number}") for number in range(5)]
    happened = [Happened(number, f"event{number}", {"text": "x" * 300}) for number in range(3, 9)]
    async with console() as desk:
        await desk.show(silo(*many), events=happened)
        assert "event8" in desk.text
        await desk.show(silo(), events=[])
        assert "Left this silo" in desk.text


def test_a_broken_log_of_a_coordinator_needs_somebody_everywhere() -> None:
    broken = {"size": 9, "broken": {"seq": 4, "why": "its previous is another"}}
    for audit, told in ((broken, True), ({"size": 9, "broken": None}, False)):
        needs = [need for need in overview.needs_of(live(coordinator(audit=audit)), 100.0) if need.key == "audit"]
        assert bool(needs) is told
        assert not needs or (needs[0].everywhere and "BROKEN at record 4: its previous is another" in needs[0].text)


def test_T52_a_held_adapter_needs_somebody() -> None:
    for digest, told in (("ab" * 32, True), ("", False), (None, False)):
        needs = overview.needs_of(live(silo(adapter_held=digest)), 100.0)
        assert [need.key for need in needs] == (["adapter"] if told else [])
        assert not needs or ("abababababab held" in needs[0].text and needs[0].twin == "silo adapters list")


def test_a_pause_by_the_coordinator_is_told_and_is_no_need() -> None:
    told = "run paused by the coordinator"
    paused = live(silo(run_paused=True))
    assert overview.needs_of(paused, 100.0) == [] and told in to_text(once_lines(paused, 100.0, 80, UNICODE))
    assert "PAUSED" not in to_text(overview.round_lines(paused, 80, UNICODE)), "that word is of people here"
    link = {"address": "host:1", "link": "down", "fault": "no answer"}
    lost = overview.paused_lines(live(silo(run_paused=True, coordinator=link)), 80, UNICODE)
    assert "paused by the coordinator, as it last told: it goes on" in to_text(lost)
    for other in (live(silo()), live(silo(paused=True)), live(silo(run_paused="yes")), live(coordinator())):
        assert overview.paused_lines(other, 80, UNICODE) == []


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
async def test_a_pause_by_the_coordinator_stands_on_the_overview_until_the_run_goes_on(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(silo(run_paused=True))
        assert "run paused by the coordinator" in desk.text and "nothing needs you" in desk.text
        await desk.show(silo(release(), run_paused=True))
        assert "run paused by the coordinator" in desk.text and "1 needs you" in desk.text
        await desk.show(silo(release()))
        assert "paused" not in desk.text


def test_what_was_sent_is_not_called_left_and_a_rate_has_one_unit() -> None:
    text = to_text(once_lines(live(silo()), 100.0, 120, UNICODE))
    header = next(row.split() for row in text.splitlines() if row.split()[:2] == ["silo", "state"])
    assert "sent" in header and "left" not in header
    assert "28.1" in text.split("pass@1 %")[1] and "0.281" not in text and "pass at 1" not in text
    assert "reward mean 0.413" in text


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_text_that_left_is_on_the_overview_however_many_kinds_left(size: tuple[int, int]) -> None:
    kinds = ["control.hello", "control.poll", "bandit.reward", "reward.scalar", "lora.factors", "metrics.eval"]
    left = [{"kind": kind, "messages": 3, "bytes": 4000} for kind in (*kinds, "public.responses")]
    async with console(size) as desk:
        await desk.show(silo(release(), release(id="r1/hospital_a/1"), left=left))
        assert "public.responses" in desk.text
