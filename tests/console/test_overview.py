"""Screen 1 and the bar above every screen: what needs somebody, steps that are over, newest events, two figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from console.feed import Store
from console.screens.overview import FIGURES_KEY, OverviewFigures
from fedsilo.views import overview
from fedsilo.views.curves import QUERY
from fedsilo.views.lines import UNICODE, to_text
from fedsilo.views.overview import Lock, top_bar
from fedsilo.views.state import Happening, Snapshot
from tests.console.desk import SIZES, console
from tests.console.rounds import curves_at_coordinator, curves_at_silo
from tests.console.states import NOW, Happened, Reading, coordinator, live, release, silo

HALT = {"kind": "public.responses", "since": NOW - 600, "digest": "ab" * 32, "needed": 2, "given": ["alice"]}
HALTED = silo(screens={"halts": ["public.responses"], "troubles": []})
BROKEN = {"size": 9, "broken": {"seq": 4, "why": "its previous is another"}}
TROUBLE = "policy.yaml:12: public.responses is denied while its screen overlap cannot run: no index"
DOWN = {"address": "host:1", "link": "down", "fault": "no answer"}


def halts(value: Any, state: dict[str, Any]) -> Snapshot:
    return replace(live(state), answers={"halts": value})


@pytest.mark.parametrize(
    ("snapshot", "says", "everywhere"),
    [
        (live(silo()), None, False),
        (live(silo(release())), "r1/hospital_a/0", False),
        (live(HALTED), "public.responses HALTED", False),
        (halts({"halts": [HALT]}, HALTED), "1 of 2 approved its release", False),
        (halts({"halts": [{**HALT, "kind": "equivocation"}]}, silo()), "equivocation", False),  # T18
        (halts({"halts": None}, silo()), None, False),
        (halts([], silo()), None, False),
        (halts({"halts": [3, None, {"kind": None}]}, silo()), "HALTED", False),
        (live(silo(screens={"halts": [], "troubles": [TROUBLE]})), "cannot run: no index", False),
        (live(coordinator(silos=[], audit=BROKEN)), "BROKEN at record 4: its previous is another", True),
        (live(coordinator(silos=[], audit={"size": 9, "broken": None})), None, False),
        (live(silo(adapter_held="ab" * 32)), "abababababab held", False),  # T52
        (live(silo(adapter_held="")), None, False),
        (live(silo(adapter_held=None)), None, False),
        (live(silo(run_paused=True)), None, False),
        (live(silo(certificate_until="2026-12-02T10:00:00+00:00")), "ends in 24 hours", True),
        (live(silo(certificate_until="2026-11-30T10:00:00+00:00")), "HAS ENDED", True),
        (live(silo(halted="LOG_FULL")), "LOG_FULL", True),
    ],
)
def test_what_needs_somebody(snapshot: Snapshot, says: str | None, everywhere: bool) -> None:
    needs = overview.needs_of(snapshot, 100.0)
    assert len(needs) == (says is not None), needs
    assert all((says or "") in need.text and need.everywhere is everywhere for need in needs), needs


@pytest.mark.parametrize(
    ("held", "changes", "told"),
    [
        ({}, {"step": 0}, "step 20/20 held: approval"),  # the update itself is held: all its steps are over
        (None, {"step": 0}, "step 0/20 training"),
        ({"round": 1}, {"step": 0, "round": 2}, "step 0/20 held: approval"),  # of the round before
        ({"kind": "metrics.eval"}, {"step": 0}, "step 0/20 held: approval"),
        ({}, {"step": 7}, "step 7/20 held: approval"),
    ],
)
def test_while_a_rounds_update_is_held_all_its_steps_are_over(
    held: dict[str, Any] | None, changes: dict[str, Any], told: str
) -> None:
    shown = [release(**{key: value for key, value in held.items() if key != "kind"})] if held is not None else []
    if held and "kind" in held:
        shown[0]["leaves"]["kinds"][0]["kind"] = held["kind"]
    state = live(silo(*shown, local_steps=20, **changes))
    assert told in to_text(overview.round_lines(state, 100, UNICODE))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"run_paused": True}, "run paused by the coordinator"),
        ({"run_paused": True, "coordinator": DOWN}, "paused by the coordinator, as it last told: it goes on"),
        ({}, ""),
        ({"paused": True}, ""),
        ({"run_paused": "yes"}, ""),
    ],
)
def test_a_pause_by_the_coordinator_is_told(changes: dict[str, Any], told: str) -> None:
    text = to_text(overview.paused_lines(live(silo(**changes)), 80, UNICODE))
    assert told in text and bool(told) is bool(text) and overview.paused_lines(live(coordinator()), 80, UNICODE) == []
    assert "PAUSED" not in to_text(overview.round_lines(live(silo(run_paused=True)), 80, UNICODE))  # of people here


def test_events_begin_with_the_newest_and_take_a_line_each() -> None:
    events = tuple(
        Happening(1, "2026-12-01T09:59:58.000Z", name, "long " * 60) for name in ("first", "second", "third")
    )
    lines = overview.event_lines(replace(live(silo()), events=events), 60, UNICODE, most=2)
    assert [to_text([row]).split()[1] for row in lines] == ["third", "second"]
    assert all(len(to_text([row]).rstrip("\n")) <= 60 for row in lines)


def test_what_was_sent_is_not_called_left_and_a_rate_has_one_unit() -> None:
    text = to_text(overview.once_lines(live(silo()), 100.0, 120, UNICODE))
    header = next(row.split() for row in text.splitlines() if row.split()[:2] == ["silo", "state"])
    assert "sent" in header and "left" not in header
    idle = live(silo(run="", last_run={}, rounds=0, round=0, metrics={}, left=[], phase="idle"))
    none = to_text(overview.once_lines(idle, 100.0, 120, UNICODE))
    assert "fedsilo run submit" in none and "nothing has left this silo" in none
    assert "28.1" in text.split("pass@1 %")[1] and "0.281" not in text and "reward mean 0.413" in text


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
async def test_however_much_there_is_what_matters_stays_in_sight(size: tuple[int, int]) -> None:
    kinds = ["control.hello", "control.poll", "bandit.reward", "reward.scalar", "lora.factors", "metrics.eval"]
    left = [{"kind": kind, "messages": 3, "bytes": 4000} for kind in (*kinds, "public.responses")]
    fine = coordinator()["silos"][0]
    many = [{**fine, "silo": f"silo_{index:02d}"} for index in range(49)]
    happened = [Happened(number, f"event{number}", {"text": "x" * 300}) for number in range(3, 9)]
    async with console(size) as desk:
        await desk.show(silo(release(), release(id="r1/hospital_a/1"), left=left))
        desk.shows("public.responses")
        await desk.show(silo(*(release(id=f"r1/hospital_a/{number}") for number in range(5))), events=happened)
        desk.shows("event8")
        late = {**fine, "silo": "late", "state": "refused", "refusal": {"a": "b"}}
        await desk.show(coordinator(silos=[*many, late]))
        desk.shows("late", "more: coordinator silos list", "running", "silo_00", lacks=["silo_48"])
        await desk.show(HALTED)
        await desk.press("enter")
        desk.shows("silo approvals release public.responses")
        await desk.press("Y")
        desk.shows("copied: silo approvals release public.responses")


# ---- two figures -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_two_figures_stand_below_where_there_is_room() -> None:
    without_n = curves_at_coordinator()
    for series in without_n["series"]:
        series["points"] = [{**each, "n": None} for each in series["points"]]
    async with console((140, 42)) as desk:
        await desk.show(coordinator(), events=[Happened(3, "run.round", {"round": 2})])
        assert desk.app.wanted[FIGURES_KEY] == (QUERY, {"names": "pass_at_1,reward_mean,kl,update_norm", "x": "round"})
        empty = desk.text
        await desk.answer(FIGURES_KEY, curves_at_coordinator(names=[], series=[], baseline=[]))
        assert desk.text == empty  # nothing to draw takes no rows
        await desk.answer(FIGURES_KEY, without_n)
        desk.shows("is not drawn", "update norm L2")
        await desk.show(silo(release()))
        assert desk.app.wanted[FIGURES_KEY][1]["x"] == "step"
        await desk.answer(FIGURES_KEY, curves_at_silo())
        desk.shows("pass@1 % · local", "reward 0..1 · local")
        await desk.press("0")
        assert FIGURES_KEY not in desk.app.wanted
        await desk.press("1")
        await desk.resize(80, 24)
        await desk.show(desk.app.snapshot)
        assert FIGURES_KEY not in desk.app.wanted and not desk.app.screen.query_one(OverviewFigures).display


# ---- the bar ---------------------------------------------------------------------------------------


LOCAL = "WITH LOCAL DATA"
REPLAYED = f"REPLAY 00:10 of 02:00 paused, 2026-12-01 10:00:00Z, {LOCAL}"


def bar(snapshot: Snapshot, lock: Lock | None = None, *, at: float = 100.0, cells: int = 120, told: str = "") -> str:
    shown = replace(snapshot, link=replace(snapshot.link, banner=told)) if told else snapshot
    text = to_text([top_bar(shown, lock or Lock(), at, cells, UNICODE)])
    assert len(text) <= cells
    return text


def test_the_bar_has_the_links_latency_or_the_age_and_whose_console_it_is() -> None:
    store = Store()
    store.read(Reading(silo()), 100.0, wall_time=NOW, latency_seconds=0.0421)
    assert "live 42 ms" in bar(store.snapshot) and "STALE 00:10" in bar(store.snapshot, at=110.0)
    assert "live  " in bar(live(silo()))  # nobody measured it
    assert "cardio-net · silo:hospital_a" in bar(live(silo())) and " silo:hospital_a" in bar(live(silo()), cells=64)
    long = bar(live(silo(silo="clinic-" * 9)), cells=60)
    assert long.endswith("LOCKED") and "clinic" not in long


@pytest.mark.parametrize("cells", [60, 80, 100, 140])
def test_the_bar_keeps_the_party_and_what_is_recorded_or_replayed_before_the_latency(cells: int) -> None:
    snapshot = live(silo(release()))
    snapshot = replace(snapshot, link=replace(snapshot.link, latency_seconds=0.002))
    for told, kept in (
        (f"RECORDING 00:10, {LOCAL}", "LOCAL DATA"),
        ("RECORDING 00:10, share-safe", "RECORDING"),
        ("RECORDING STOPPED: the disk has 12 MiB", "RECORDING STOPPED"),
        ("", "UNLOCKED"),
    ):
        text = bar(snapshot, Lock("bob", 899.0, banner=told), cells=cells)
        assert all(fact in text for fact in ("hospital_a", "live", "bob UNLOCKED", kept)), text
        assert ("2 ms" in text) == (cells >= 100 or not told), text
    for told in (REPLAYED, REPLAYED.replace(LOCAL, "share-safe"), "REPLAY"):
        text = bar(snapshot, Lock(read_only=True), cells=cells, told=told)
        assert all(fact in text for fact in ("REPLAY", "hospital_a", "READ-ONLY")) and "live" not in text
        assert ("LOCAL DATA" in text) == (LOCAL in told)
