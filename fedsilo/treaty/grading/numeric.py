"""`numeric`: the final number, compared exactly as a fraction. No rounding, no tolerance, no library."""

from __future__ import annotations

import re
from fractions import Fraction

from fedsilo.treaty.grading.extraction import CutOff, after_last_cue, last_boxed, outside_thinking
from fedsilo.treaty.grading.verdict import BAD_REFERENCE, NO_ANSWER, Verdict, judged

CHARACTERS_MAX = 64
EXPONENT_MAX = 400
_TAIL_CHARACTERS = 2_000  # where a final number is looked for: a search over more could be quadratic
_NUMBER = re.compile(
    r"(?<!\d)(?<!\d[,.])(?<!\w_)(?<!\w_\{)[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,4})?(?:\s*/\s*\d+)?%?"
    r"(?![\d,.]*\d)(?!_[\w{\\])(?!\s*/\s*\d+_)",  # nor a digit of x_1, nor one that has its base below, as 12_7
    re.ASCII,
)
_SIGN = str.maketrans({"\u2212": "-", "\uff0d": "-", "\u2013": "-"})


def grade(response: str, reference: str) -> Verdict:
    expected = parse(reference)
    if expected is None:
        return BAD_REFERENCE
    got = extract(response)
    return judged(got == expected) if got is not None else NO_ANSWER


def check_reference(reference: str) -> bool:
    return parse(reference) is not None


def parse(text: str) -> Fraction | None:
    """A whole text as one number: integer, decimal, thousands commas, exponent, a/b, percent. None otherwise."""
    plain = text.translate(_SIGN).replace("{,}", ",").replace("\\%", "%").strip().strip("$").strip()
    if not plain or len(plain) > CHARACTERS_MAX or _NUMBER.fullmatch(plain) is None:
        return None
    percent = plain.endswith("%")
    top, _, bottom = plain.removesuffix("%").replace(",", "").partition("/")
    exponent = re.search(r"[eE]([-+]?\d+)", top)
    if exponent is not None and abs(int(exponent.group(1))) > EXPONENT_MAX:
        return None
    try:
        value = Fraction(top.strip()) / Fraction(bottom.strip() or "1")
    except (ValueError, ZeroDivisionError):
        return None
    return value / 100 if percent else value


def extract(response: str) -> Fraction | None:
    """The boxed number; else the one after `####` or a cue; else the last one of the text."""
    try:
        said = outside_thinking(response)
        boxed = last_boxed(said)
        cued = after_last_cue(said) if boxed is None else None
    except CutOff:
        return None
    if boxed is not None:
        return parse(boxed)
    numbers = last_numbers(said if cued is None else cued)
    if not numbers:
        return None
    return parse(numbers[0] if cued is not None else numbers[-1])


def last_numbers(text: str) -> list[str]:
    """The numbers written in the last part of a text, in order."""
    plain = text[-_TAIL_CHARACTERS:].translate(_SIGN)
    return [found for found in _NUMBER.findall(plain) if any(character.isdigit() for character in found)]
