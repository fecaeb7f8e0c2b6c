"""Cases from bug reports about other graders, a file for each kind, and more of the same kinds of our own. A row of the
tier `debatable` is decided in docs/how-to/verifiers.md."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from fedsilo.grading import check_reference, grade, prepare

SECONDS_MAX = 5.0
CASES = Path(__file__).parents[1] / "vectors" / "grading_cases"
FILES = sorted(path.stem for path in CASES.glob("*.jsonl") if not path.stem.startswith("K"))  # programs: in the sandbox


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (CASES / f"{name}.jsonl").read_text("utf-8").splitlines() if line]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> None:
    prepare("math")


@pytest.mark.parametrize("name", FILES)
def test_T56_reported_cases(name: str) -> None:
    found = rows(name)
    assert found and all(check_reference(row["verifier"], row["gold"]) for row in found)
    told = {row["id"]: grade(row["verifier"], row["response"], row["gold"]).correct for row in found}
    assert told == {row["id"]: row["expected_correct"] for row in found}


@pytest.mark.parametrize(
    "repeated",
    [
        "  ",
        "\\ ",
        "1 ",
        "3 or ",
        "million ",
        "{,}",
        "-",
        "|",
        "(of a",
        "is ",
        "so ",
        "5=",
        "B) ",
        ". it is ",
        "\n",
        "probably, ",
        "which ",
    ],
)
def test_T22_repetition_in_an_answer_takes_no_time(repeated: str) -> None:
    for verifier, gold in (("numeric", "5"), ("math", "5"), ("choice", "B")):
        for text in (
            f"\\boxed{{5 {repeated * (900 // len(repeated))}x}}",
            f"The answer is 5 {repeated * 900}",
            f"\\boxed{{5}}{repeated * 2000}",
        ):
            began = time.monotonic()
            grade(verifier, text, gold)
            assert time.monotonic() - began < SECONDS_MAX


def test_each_kind_of_our_own_has_both_verdicts() -> None:
    for name in FILES:
        if name.startswith("own_"):
            assert {row["expected_correct"] for row in rows(name)} == {True, False}, name
