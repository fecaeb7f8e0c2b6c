"""The floors of `make coverage` are of code that is there. It runs the tests; here only the counting is looked at."""

from __future__ import annotations

import json

import pytest

from tools.coverage_floor import AREAS, FLOORS, below, by_area, files_of, raised


def test_of_a_file_one_class_may_be_counted_alone() -> None:
    whole = {"summary": {"num_branches": 10, "covered_branches": 0}, "missing_branches": []}
    held_plans = {"summary": {"num_branches": 4, "covered_branches": 3}, "missing_branches": [[5, 6]]}
    every = sorted({file for area in AREAS for file in files_of(area)})
    files = {file: {**whole, "classes": {"HeldPlans": held_plans}} for file in every}
    found = by_area({"files": files})["decisions"]
    others = len(files_of("decisions")) - 1
    assert (found["branches"], found["taken"]) == (10 * others + 4, 3)
    assert found["missing"] == ["silo/guard/run.py:5->6"]


def test_each_area_has_files_and_a_floor() -> None:
    assert all(files_of(area) for area in AREAS)
    assert json.loads(FLOORS.read_text())["branches"].keys() == AREAS.keys()


def test_a_floor_is_kept_and_only_rises_and_a_file_that_no_test_loads_is_an_error() -> None:
    part = {"summary": {"num_branches": 10, "covered_branches": 7}, "missing_branches": [[3, 4]]}
    summaries = {file: {**part, "classes": {"HeldPlans": part}} for area in AREAS for file in files_of(area)}
    found = by_area({"files": summaries})
    assert {area["percent"] for area in found.values()} == {70.0}
    assert found["engine"]["missing"] == ["policies/engine.py:3->4"]
    met, missed = dict.fromkeys(AREAS, 70.0), dict.fromkeys(AREAS, 70.1)
    assert (below(found, met), len(below(found, missed))) == ([], len(AREAS))
    assert raised(found, missed) == missed and raised(found, dict.fromkeys(AREAS, 60.0)) == met
    del summaries["policies/engine.py"]
    with pytest.raises(RuntimeError, match=r"the tests never load policies/engine\.py"):
        by_area({"files": summaries})
