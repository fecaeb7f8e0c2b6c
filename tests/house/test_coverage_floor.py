"""The floors of `make coverage` are of code that is there. It runs the tests; here only the counting is looked at."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools import coverage_floor
from tools.coverage_floor import AREAS, FLOORS, below, by_area, files_of, raised


def report(taken: int, *, without: str = "") -> dict[str, Any]:
    """What coverage.py says where each file has ten branches and the tests take so many of them."""
    summary = {"num_branches": 10, "covered_branches": taken}
    files = {file for area in AREAS for file in files_of(area)} - {without}
    return {"files": {file: {"summary": summary} for file in files}}


@pytest.mark.parametrize("area", AREAS)
def test_an_area_has_files_and_a_floor(area: str) -> None:
    assert files_of(area)
    assert 0.0 < json.loads(FLOORS.read_text())["branches"][area] <= 100.0


def test_a_pattern_that_finds_no_file_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(coverage_floor.AREAS, "gate", ("silo/guard/gate.py", "silo/guard/moved_away.py"))
    with pytest.raises(ValueError, match=r"no file of the area gate is named silo/guard/moved_away\.py"):
        files_of("gate")


def test_branches_are_counted_over_the_files_of_an_area() -> None:
    found = by_area(report(7))["gate"]
    assert found == {"branches": 10 * len(files_of("gate")), "taken": 7 * len(files_of("gate")), "percent": 70.0}


def test_a_file_that_no_test_loads_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"the tests never load policies/engine\.py"):
        by_area(report(7, without="policies/engine.py"))


def test_a_floor_is_kept_and_only_rises() -> None:
    floors = dict.fromkeys(AREAS, 70.0)
    assert below(by_area(report(7)), floors) == []
    assert len(below(by_area(report(6)), floors)) == len(AREAS)
    assert raised(by_area(report(8)), floors) == dict.fromkeys(AREAS, 80.0)
    assert raised(by_area(report(6)), floors) == floors
