"""`exact`: the response is the reference, up to Unicode compatibility forms, letter case and runs of white space."""

from __future__ import annotations

import unicodedata

from fedsilo.grading.verdict import BAD_REFERENCE, NO_ANSWER, Verdict, judged


def normalise(text: str) -> str:
    """NFKC, case-folded, white space collapsed and trimmed. Applied twice it changes nothing more."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(folded.split())


def grade(response: str, reference: str) -> Verdict:
    expected = normalise(reference)
    if not expected:
        return BAD_REFERENCE
    answer = normalise(response)
    return judged(answer == expected) if answer else NO_ANSWER


def check_reference(reference: str) -> bool:
    return bool(normalise(reference))
