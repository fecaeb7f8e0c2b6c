"""T55: the answers of one party have a budget for each step and a queue of their own, with the real grading process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedsilo.grading import grade
from fedsilo.grading.answers import AnswerGrading
from fedsilo.grading.verdict import TIMEOUT, Verdict, judged
from fedsilo.grading.worker import GradingProcess

PLACE = ("run-1", 1, 2)
SLOW, FAST = ("forever", "1"), ("1", "1")
BUDGET_SECONDS = 2.0
# stands before the real verifier on the child's path, and computes on one answer as sympy may on some
COSTLY = """
import fedsilo.grading.exact as exact
from fedsilo.grading.verdict import judged

def grade(response, reference):
    while response == "forever":
        pass
    return judged(response == reference)

exact.grade = grade
"""


@pytest.fixture
def grading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AnswerGrading]:
    (tmp_path / "sitecustomize.py").write_text(COSTLY, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])]))
    with ExitStack() as stack:
        graders = [stack.enter_context(GradingProcess("exact")) for _ in range(2)]
        for grader in graders:
            grader.wait_ready()
        yield AnswerGrading(graders, lambda _: BUDGET_SECONDS)


@pytest.mark.slow
def test_T55_costly_answers_of_one_party_cost_their_budget_and_nobody_else_a_second(grading: AnswerGrading) -> None:
    taken: dict[str, tuple[float, tuple[bool | None, ...]]] = {}

    def grade_of(party: str, pairs: Sequence[tuple[str, str]]) -> None:
        begun = time.monotonic()
        verdicts = grading.grade(party, PLACE, pairs)
        taken[party] = time.monotonic() - begun, verdicts

    hostile = threading.Thread(target=grade_of, args=("hospital_b", [SLOW] * 10))
    hostile.start()
    grade_of("hospital_c", [FAST, ("1", "2"), FAST])
    assert hostile.is_alive(), "it was not waited for"
    hostile.join(60)
    assert taken["hospital_c"][1] == (True, False, True)
    assert taken["hospital_b"][1] == (None,) * 10
    assert taken["hospital_b"][0] < 5 * BUDGET_SECONDS  # ten answers alone would take a minute; the rest is a restart

    # what is over is over: another message to the same step gets none of it, but to another step its own
    begun = time.monotonic()
    assert grading.grade("hospital_b", PLACE, [SLOW, FAST]) == (None, None)
    assert time.monotonic() - begun < BUDGET_SECONDS
    assert grading.grade("hospital_b", ("run-1", 1, 4), [FAST]) == (True,)


class Counting:
    """Takes as long as the text of each answer says, as far as it may."""

    def __init__(self) -> None:
        self.now, self.batches = 0.0, 0

    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        self.batches += 1
        assert budget_seconds is not None
        until, found = self.now + budget_seconds, list[Verdict]()
        for response, _ in pairs:
            over = self.now + float(response) > until
            self.now = until if over else self.now + float(response)
            found.append(TIMEOUT if over else judged(True))
        return found


def test_T55_a_budget_is_of_party_and_step_over_all_its_messages_and_a_retry_is_not_graded_again() -> None:
    grader = Counting()
    grading = AnswerGrading([grader], lambda answers: 4.0 + answers, monotonic=lambda: grader.now)

    def graded(party: str, *texts: str, place: tuple[str, int, int] = PLACE) -> tuple[bool | None, ...]:
        return grading.grade(party, place, [(text, "") for text in texts])

    assert graded("b", "2", "9", "1") == (True, None, None)  # 7 seconds, all spent
    assert graded("b", "2", "9", "1") == (True, None, None) and grader.batches == 1
    assert graded("b", "1") == (None,)  # 5 seconds, of which it has had 7
    assert graded("c", "1", "3") == (True, True) and graded("c", "1", "1", "1") == (True, True, True)
    assert graded("b", "1", place=("run-1", 2, 2)) == (True,)
    assert graded("b") == ()


def test_T55_a_message_of_several_parties_has_the_budget_of_one_and_none_uses_up_anothers() -> None:
    grader = Counting()
    grading = AnswerGrading([grader], lambda answers: 20.0 + 2.0 * answers, monotonic=lambda: grader.now)

    def graded(place: tuple[str, int, int], **texts: Sequence[str]) -> dict[str, tuple[bool | None, ...]]:
        return grading.grade_together(place, {who: [(text, "") for text in each] for who, each in texts.items()})

    # four that take all they may: 20 s and 2 s for each answer, not 4 times 20
    assert graded(PLACE, b=["999"] * 2, c=["999"] * 2, d=["999"] * 2, e=["999"] * 2) == dict.fromkeys(
        "bcde", (None, None)
    )
    assert grader.now == 20.0 + 2.0 * 8
    # one does, and the others have the mean for each of theirs
    place = ("run-1", 1, 4)
    assert graded(place, b=["999"], c=["2", "2"], d=["1"]) == {"b": (None,), "c": (True, True), "d": (True,)}
    # what the ones before have left is the next one's, as far as its own budget goes
    place = ("run-1", 2, 2)
    assert graded(place, b=["0", "0"], c=["21"], d=["23"]) == {"b": (True, True), "c": (True,), "d": (None,)}
    # a retry is not graded again
    now = grader.now
    assert graded(place, b=["0", "0"], c=["21"]) == {"b": (True, True), "c": (True,)} and grader.now == now


def test_T55_honest_answers_are_graded_as_without_a_budget() -> None:
    answers = [
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{x^2+1}", "1+x^2"),
        (r"\boxed{7}", "8"),
        ("no answer", "7"),
        (r"\boxed{(1,2)}", "(1, 2)"),
    ]
    with GradingProcess("math") as process:
        found = AnswerGrading([process], process.budget_seconds).grade("hospital_b", PLACE, answers)
    assert found == tuple(grade("math", *each).correct for each in answers) == (True, True, False, False, True)
