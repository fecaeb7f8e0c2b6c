"""Cases of our own beside the shared example file, judged by the same five rules; and that file where it is there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fedsilo.grading import check_reference, grade, prepare
from tests.algorithms.sets_folder import set_file

VECTORS = Path(__file__).parents[1] / "vectors"
SECONDS_MAX = 5.0


def cases(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


OWN = cases(VECTORS / "math_grading_own_cases.jsonl")
CATEGORIES = sorted({case["category"] for case in OWN})


def wrong(case: dict[str, Any]) -> str:
    """What is wrong with the verdict; empty where nothing is."""
    parts = case.get("response_parts", [[case.get("response"), 1]])
    began = time.monotonic()
    verdict = grade(
        "choice" if case["category"] == "choice" else "math", "".join(t * n for t, n in parts), case["gold"]
    )
    seconds = time.monotonic() - began
    if verdict.correct != case["expected_correct"]:
        return f"{case['id']} ({case['why']}): {verdict.code}"
    return f"{case['id']}: {seconds:.1f} s" if seconds > case.get("max_seconds", SECONDS_MAX) else ""


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare("math")


@pytest.mark.parametrize("category", CATEGORIES)
def test_T22_own_cases(category: str) -> None:
    assert [told for case in OWN if case["category"] == category and (told := wrong(case))] == []


def test_the_own_cases_are_many_of_both_verdicts_and_have_references_that_can_be_read() -> None:
    assert len(OWN) >= 600
    for category in set(CATEGORIES) - {"hostile"}:
        assert {case["expected_correct"] for case in OWN if case["category"] == category} == {True, False}
    assert all(check_reference("choice" if case["category"] == "choice" else "math", case["gold"]) for case in OWN)


def test_a_wrong_verdict_is_noticed() -> None:
    turned = {**OWN[0], "expected_correct": not OWN[0]["expected_correct"]}
    assert wrong(OWN[0]) == "" and wrong(turned) != ""


def test_T22_the_shared_example_file_agrees_and_the_copy_is_the_same() -> None:
    shared = set_file("math_grading_examples.jsonl")
    assert shared.read_bytes() == (VECTORS / "math_grading_examples.jsonl").read_bytes()
    assert [told for case in cases(shared) if (told := wrong(case))] == []
