"""What a verifier says of one response. One bit counts; the code says why, from a closed list."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class VerdictCode(StrEnum):
    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"  # nothing in the response reads as an answer
    BAD_REFERENCE = "bad_reference"  # the reference itself cannot be read; the prompt is unusable (methods 1.2)
    TOO_COSTLY = "too_costly"  # not compared, because comparing could take too long
    ERROR = "error"  # the verifier failed on it
    TIMEOUT = "timeout"  # stopped by the deadline
    CRASHED = "crashed"  # the grading process died on it


@dataclass(frozen=True)
class Verdict:
    correct: bool
    code: VerdictCode

    def __post_init__(self) -> None:
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
