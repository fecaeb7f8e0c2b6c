"""`choice`: one letter of several, or yes, no, maybe. The article "A" and letters in the reasoning do not count."""

from __future__ import annotations

import re
import unicodedata

from fedsilo.treaty.grading.exact import normalise
from fedsilo.treaty.grading.extraction import CutOff, after_last_cue, last_boxed, outside_thinking
from fedsilo.treaty.grading.verdict import BAD_REFERENCE, NO_ANSWER, Verdict, judged

_REFERENCE = re.compile(r"[A-Z]|yes|no|maybe", re.IGNORECASE)
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mathit)\s*\{([^{}]*)\}")
# the option's own text may follow its letter only behind a sign that ends the letter: "B. Report it", "(B) Report it"
_LETTER = re.compile(r"(?:[Oo]ption\s+|[Cc]hoice\s+)?[(\[]?\s*([A-Za-z])\s*(?:[)\].:]\s*(.*))?", re.DOTALL)
_BARE_AFTER_CUE = re.compile(r"(?:option|choice|answer)?\s*\(?([A-Z])\)?\b(.*)", re.DOTALL)
_WORD = re.compile(r"(yes|no|maybe)\b(.*)", re.IGNORECASE | re.DOTALL)
_SECOND_LETTER = re.compile(r"^\s*(?:,|/|&|;|\bor\b|\band\b)\s*\(?[A-Za-z]\b(?![a-z'])", re.IGNORECASE)
_DECORATION = "*_$`\"' \t\n"


def grade(response: str, reference: str) -> Verdict:
    if not check_reference(reference):
        return BAD_REFERENCE
    chosen = extract(response)
    return judged(chosen == normalise(reference)) if chosen is not None else NO_ANSWER


def check_reference(reference: str) -> bool:
    return _REFERENCE.fullmatch(reference.strip()) is not None


def extract(response: str) -> str | None:
    """The chosen letter or word in lower case; None when there is none, or more than one."""
    try:
        said = outside_thinking(response)
        boxed = last_boxed(said)
        cued = after_last_cue(said) if boxed is None else None
    except CutOff:
        return None
    if boxed is not None:
        return _whole(boxed)
    return _after_cue(cued) if cued is not None else _whole(said)


def _plain(text: str) -> str:
    plain = unicodedata.normalize("NFKC", text)
    return _WRAPPED.sub(r"\1", plain).replace("**", "").strip(_DECORATION)


def _whole(text: str) -> str | None:
    """Text that is nothing but the answer, or the letter, a closing sign and the option's words."""
    plain = _plain(text)
    word = _WORD.fullmatch(plain)
    if word is not None and not word.group(2).strip(" .!"):
        return word.group(1).lower()
    letter = _LETTER.fullmatch(plain)
    if letter is None or _names_another(letter.group(2) or ""):
        return None
    return letter.group(1).lower()


def _after_cue(text: str) -> str | None:
    plain = _plain(text)
    word = _WORD.match(plain)
    if word is not None:
        return None if _WORD.match(re.sub(r"^[\s,/]*(?:or|and)?\s*", "", word.group(2))) else word.group(1).lower()
    letter = _BARE_AFTER_CUE.match(plain) or _LETTER.fullmatch(plain)
    if letter is None:
        return None
    rest = letter.group(2) or ""
    if _SECOND_LETTER.match(rest) or (letter.group(1) == "A" and re.match(r"\s+[a-z]", rest)):
        return None
    return letter.group(1).lower()


def _names_another(rest: str) -> bool:
    """Whether the words behind a first letter hold a second one, as in "B, C" or "(B) (C)"."""
    return re.fullmatch(r"[\s,;/&()]*(?:(?:or|and)\s+)?\(?[A-Za-z]\)?[.)\s]*", rest) is not None and bool(rest.strip())
