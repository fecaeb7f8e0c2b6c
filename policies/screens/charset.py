"""Screen for characters outside the alphabets that a policy names, and for long runs of signs (threats T16, T17, T21).
Pure.

Every character has one class: a script for letters and their marks, else digits, punctuation, math or symbols. Space,
tab and line breaks belong to all texts. What is not shown (format, control and private characters, among them the
zero-width ones and those that turn the direction of writing), surrogates and unassigned code points belong to none.

What this does not stop (N3): anything spelled in allowed characters, such as base64 or a choice between two words.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from policies.model import Alphabet

_SCRIPTS: Final[dict[str, Alphabet]] = {
    "LATIN": "latin",
    "GREEK": "greek",
    "CYRILLIC": "cyrillic",
    "ARABIC": "arabic",
    "HEBREW": "hebrew",
    "DEVANAGARI": "devanagari",
    "THAI": "thai",
    "CJK": "han",
    "HIRAGANA": "hiragana",
    "KATAKANA": "katakana",
    "HANGUL": "hangul",
    "MATHEMATICAL": "math",
    "DOUBLE-STRUCK": "math",
    "SCRIPT": "math",
    "BLACK-LETTER": "math",
    "MICRO": "greek",
    "COMBINING": "latin",
    "FEMININE": "latin",
    "MASCULINE": "latin",
    "ANGSTROM": "latin",
    "KELVIN": "latin",
    "OHM": "greek",
    "PLANCK": "math",
}
_DEGREES = "\u00b0\u2103\u2109"  # signs of a unit, which Unicode calls other symbols
_PLAIN_SPACES = " \t\n\r"


@lru_cache(maxsize=2**16)
def alphabet(character: str) -> str:
    """The class of a character; "space" for what every text may hold, "none" for what none may."""
    category = unicodedata.category(character)
    if character in _PLAIN_SPACES:
        return "space"
    if character in "0123456789" or category == "No":
        return "digits"  # superscripts and fractions too; digits of other scripts are letters of theirs
    if category[0] in "LM" or category in ("Nd", "Nl"):
        return _SCRIPTS.get(unicodedata.name(character, "").partition(" ")[0], "none")
    if character in "+<=>|~^" or category == "Sm":
        return "math" if ord(character) > 127 else "punctuation"
    if character in _DEGREES:
        return "math"
    if category[0] == "P" or category in ("Zs", "Sc") or character == "`":
        return "punctuation"
    return "symbols" if category[0] == "S" else "none"


def count_characters(allow: Iterable[Alphabet], max_run_nonword: int, text: str) -> dict[str, int]:
    """Count characters by code: "alphabet", characters outside the allowed alphabets; "run", runs of signs that are too
    long."""
    allowed = {"space", *allow}
    outside = sum(text.count(character) for character in set(text) if alphabet(character) not in allowed)
    long_runs = sum(1 for _ in _run(max_run_nonword).finditer(text))
    return {code: count for code, count in (("alphabet", outside), ("run", long_runs)) if count}


@lru_cache(maxsize=16)
def _run(longest: int) -> re.Pattern[str]:
    return re.compile(rf"[\W_]{{{longest + 1},}}")
