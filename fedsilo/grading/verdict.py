"""The verdict of a verifier on one response: correct or not, why (from a closed list), and the reward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class VerdictCode(StrEnum):
    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # nothing in the response reads as an answer
    BAD_REFERENCE = "bad_reference"  # the reference itself cannot be read; the prompt is unusable
    TOO_COSTLY = "too_costly"  # not compared, because comparing could take too long
    ERROR = "error"  # the verifier failed on it
    TIMEOUT = "timeout"  # stopped by the deadline
    CRASHED = "crashed"  # the grading process died on it


@dataclass(frozen=True)
class Verdict:
    """One verdict.

    Attributes:
        correct: of a mixture: what its first verifier says. Donors, rewards in {0, 1} and counts of correct answers
            go by this.
        code: why; of a mixture the first verifier's.
        reward: what the learner gets, 0 to 1; by default 1 for correct and 0 otherwise. Only a mixture has others.
    """

    correct: bool
    code: VerdictCode
    reward: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.reward):
            object.__setattr__(self, "reward", float(self.correct))
        if not 0 <= self.reward <= 1:
            raise ValueError(f"a reward of {self.reward} is not 0 to 1")
        if self.correct != (self.code is VerdictCode.CORRECT):
            raise ValueError(f"a verdict {self.code.value} cannot say correct={self.correct}")


CORRECT = Verdict(True, VerdictCode.CORRECT)
WRONG = Verdict(False, VerdictCode.WRONG)
NO_ANSWER = Verdict(False, VerdictCode.NO_ANSWER)
BAD_REFERENCE = Verdict(False, VerdictCode.BAD_REFERENCE)
TOO_COSTLY = Verdict(False, VerdictCode.TOO_COSTLY)
ERROR = Verdict(False, VerdictCode.ERROR)
TIMEOUT = Verdict(False, VerdictCode.TIMEOUT)
CRASHED = Verdict(False, VerdictCode.CRASHED)


def judged(correct: bool) -> Verdict:
    return CORRECT if correct else WRONG
