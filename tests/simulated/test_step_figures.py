"""Figures of a step at the silo: a few in its state, all of them in its curves, none in anything that leaves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from silo.guard.answers.curves import FILE, LINE_BYTES_MAX, NAMES_MAX
from silo.guard.answers.state import _METRICS_KEPT, _METRICS_SHOWN
from silo.guard.trainer_report import ValuesUnusable
from tests.simulated.queries import as_json
from tests.world import Loop


@pytest.fixture
def loop(loop: Loop) -> Loop:
    loop.offer_plan()
    loop.turn()
    return loop


def report(loop: Loop, metrics: dict[str, Any], step: int = 2) -> None:
    task: Any = SimpleNamespace(round=1, step=step)
    loop.guard.status.metrics({"metrics": metrics}, task, loop.bench.gate.view, {})


def test_what_a_step_says_of_its_engine_is_in_the_state_and_in_the_curves(loop: Loop) -> None:
    told = {"rollout_kl": 1e-4, "stale_previous": 0.25, "stale_detectable_steps": 3.5, "made_up": 1.0}
    report(loop, told)
    state = loop.state()
    assert state["metrics"]["stale_detectable_steps"]["value"] == 3.5
    assert "stale_previous" not in state["metrics"]  # of these there are many: the curves have them
    curves = as_json(loop.guard.queries)["curves"]({"names": "stale_previous,rollout_kl"})
    found = {series["name"]: series["points"][0]["value"] for series in curves["series"]}
    assert found == {"stale_previous": 0.25, "rollout_kl": 1e-4}
    assert "made_up" not in curves["names"]
    assert {series["unit"] for series in curves["series"]} == {"", "nats"}


def test_all_figures_of_one_task_fit_a_line(loop: Loop, tmp_path: Path) -> None:
    names = [name for name in (*_METRICS_SHOWN, *_METRICS_KEPT) if name != "donors_rejected"]
    assert len(set(names)) == len(names) < NAMES_MAX
    report(loop, dict.fromkeys(names, -math.pi / 1e5))  # as long as a number gets
    [path] = tmp_path.rglob(FILE)
    [line] = path.read_bytes().splitlines()
    assert len(line) < LINE_BYTES_MAX
    assert len(json.loads(line)["figures"]) == len(names)


@pytest.mark.parametrize("value", [float("nan"), "text", [1]])
def test_a_figure_that_is_no_number_is_refused(loop: Loop, value: Any) -> None:
    with pytest.raises(ValuesUnusable):
        report(loop, {"stale_previous": value})
    report(loop, {"stale_previous": None})  # not measured
    report(loop, {"stale_previous": 0.0})
