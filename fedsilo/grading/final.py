"""`final`: what follows the last dash of the response is the reference, compared as by `exact`. What stands before the
dash is the work that led there, which nobody judges."""

from __future__ import annotations

from fedsilo.grading import exact
from fedsilo.grading.verdict import BAD_REFERENCE, Verdict

DASH = "-"


def grade(response: str, reference: str) -> Verdict:
    return exact.grade(response.rpartition(DASH)[2], reference) if check_reference(reference) else BAD_REFERENCE


def check_reference(reference: str) -> bool:
    return DASH not in reference and exact.check_reference(reference)
