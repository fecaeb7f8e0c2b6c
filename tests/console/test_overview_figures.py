"""The overview's two figures: asked for and drawn where there is room, and never in the way of what is to be done."""

from __future__ import annotations

import pytest

from console.screens.overview import FIGURES_KEY, OverviewFigures
from fedsilo.views.curves import QUERY
from tests.console.desk import console
from tests.console.rounds import curves_at_coordinator, curves_at_silo
from tests.console.states import Happened, coordinator, release, silo


@pytest.mark.parametrize("size", [(100, 30), (140, 42)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_two_figures_stand_below_where_there_is_room(size: tuple[int, int]) -> None:
    async with console(size) as desk:
        await desk.show(coordinator(), events=[Happened(3, "run.round", {"round": 2})])
        assert desk.app.wanted[FIGURES_KEY] == (QUERY, {"names": "pass_at_1,reward_mean,kl,update_norm", "x": "round"})
        empty = desk.text
        await desk.answer(FIGURES_KEY, curves_at_coordinator(names=[], series=[], baseline=[]))
        assert desk.text == empty  # nothing to draw takes no rows
        await desk.answer(FIGURES_KEY, curves_at_coordinator())
        for said in ("pass@1 % · released · bars: 95 %", "update norm L2 · released", "round 7, n at most 500",
                     "a hospital_a 41.2", "c uni_c 1.1", "run.round"):  # fmt: skip
            assert said in desk.text, said
        assert set(empty.splitlines()[2].split()) <= set(desk.text.splitlines()[2].split())  # what needs somebody stays


async def test_a_silo_asks_for_its_own_by_step_and_nobody_where_there_is_no_room() -> None:
    async with console((140, 42)) as desk:
        await desk.show(silo(release()))
        assert desk.app.wanted[FIGURES_KEY][1]["x"] == "step"
        await desk.answer(FIGURES_KEY, curves_at_silo())
        assert "pass@1 % · local" in desk.text and "reward 0..1 · local" in desk.text
        await desk.press("0")
        assert FIGURES_KEY not in desk.app.wanted
        await desk.press("1")
        await desk.pilot.resize_terminal(80, 24)
        await desk.pilot.pause(4 / 120)
        await desk.show(desk.app.snapshot)
        assert FIGURES_KEY not in desk.app.wanted and "reward 0..1" not in desk.text
        assert not desk.app.screen.query_one(OverviewFigures).display and "Events" in desk.text


async def test_a_rate_without_its_number_is_not_drawn_here_either() -> None:
    answer = curves_at_coordinator()
    for series in answer["series"]:
        for each in series["points"]:
            each["n"] = None
    async with console((140, 42)) as desk:
        await desk.show(coordinator())
        await desk.answer(FIGURES_KEY, answer)
        shown = " ".join(desk.text.split())
        assert "is not drawn" in shown and "update norm L2" in shown
