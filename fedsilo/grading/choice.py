"""`choice`: one letter of several, or yes, no, maybe. The article "A" and letters in the reasoning do not count.

The answer is the letter alone, the letter with a sign (`.`, `)`, `:`, a dash) and the option's own words, or, behind a
cue, the letter and a reason. Another letter beside it makes it several, which is no choice: any standing alone where
there is no sign, one with a sign of its own (`C)`) in an option's words, and one that takes the first back ("No, C").
"""

from __future__ import annotations

import re
import unicodedata

from fedsilo.grading.exact import normalise
from fedsilo.grading.extraction import SECOND_THOUGHT, CutOff, after_last_cue, final_boxed, outside_thinking, taken_back
from fedsilo.grading.verdict import BAD_REFERENCE, NO_ANSWER, Verdict, judged

CHARACTERS_MAX = 2_000
_REFERENCE = re.compile(r"[A-Z]|yes|no|maybe", re.IGNORECASE)
_WRAPPED = re.compile(
    r"\\(?:text|textrm|textsf|texttt|mathrm|mathbf|mathsf|textbf|textit|mathit|underline|uline|emph|mbox|boxed|fbox"
    r"|boldsymbol|bm|operatorname)\s*\{([^{}]*)\}"
)
_WRAPPERS_MAX = 6
_FRAMED = re.compile(r"\\(?:fbox|boxed)\s+(?=[A-Za-z](?![A-Za-z]))")
_STRUCK = re.compile(r"~~[^~\n]{1,200}~~|\\(?:cancel|sout|st)\s*\{[^{}]*\}|<(del|s|strike)>[^<]{0,200}</\1>")
_SPACES = re.compile(r"\\(?:[,;:! ]|quad|qquad)|~")
_MARKS = re.compile(
    '\\\\[()\\[\\]]|\\*\\*|[$`"\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb\u2039\u203a\u300c-\u300f]'
)
_QUOTED = re.compile(r"(?<!\w)'([A-Za-z]{1,5})'(?!\w)")
_DECORATION = "*_' \t\n"
# the sign behind a letter that ends it: what follows are the option's own words
_LETTER = re.compile(
    r"(?:(?:option|choice|answer|letter)\s+)?(?P<open>[(\[{<]\s*)?(?P<letter>[A-Za-z])(?![A-Za-z0-9'\u2019_^])"
    r"\s*(?P<close>[)\]}>.:]|(?<=\s)[-\u2013\u2014=](?=\s)|(?=\())?(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_WORD = re.compile(r"(yes|no|maybe)\b(.*)", re.IGNORECASE | re.DOTALL)
# the words of an option that is about others: "D. Both A and B", "E) A, B and C only"
_ABOUT_OTHERS = re.compile(
    r"\s*(?:(?i:both|either|neither)\s+)?\(?[A-Z]\)?(?:\s*,\s*\(?[A-Z]\)?)*\s*,?\s*(?:(?i:and|or|nor|but\s+not)|&)\s*\(?[A-Z]\)?"
    r"(?:\s+only)?(?=[\s.!*]*$|\.\s)"
)
_REASON = re.compile(
    r"\b(?:because|since|(?<!well )as(?!\s+well)|not|while|whereas|unlike|instead\s+of|rather\s+than|given|due|which|"
    r"eliminat\w+|exclud\w+|wrong|incorrect)\b",
    re.IGNORECASE,
)
_BESIDE = re.compile(
    r"(?<![\w'\u2019\u00b0])(?P<letter>[B-HJ]|A(?!\s+[a-z])|A(?=\s+(?:and|or|is|are|if|unless|but)\b))(?![\w'\u2019])"
)
_BESIDE_SMALL = re.compile(r"(?<![\w'\u2019\u00b0])(?P<letter>[A-HJa-hj])(?![\w'\u2019])(?!(?<=[Aa])\s+[a-z])")
# an option's own words may end with a letter that belongs to the word before it: "Hepatitis B. It is", "(group A)"
_MARKED = re.compile(
    r"(?P<named>(?i:\b(?:vitamins?|hepatitis|influenza|types?|groups?|class|grades?|stages?|factors?|categor(?:y|ies)|options?"
    r"|choices?|answers?|schedule|protein|immunoglobulin|degrees)\s+))?"
    r"(?<![\w'\u2019\u00b0(\[{^*/-])(?P<open>[(\[{<]\s*)?(?P<letter>[A-HJa-hj])(?![\w'\u2019])"
    r"(?P<sign>\s*[)\]}>](?!\s*(?:is|are|was|were|would|does|do|cannot)\b)|\s*[.:](?=\s+\S)|\s+[-\u2013\u2014](?=\s))"
)
_TAKEN_BACK = re.compile(
    rf"(?:^|(?<!\w)\(|[.,;:!?)\n\u2014\u2013-])\s*(?P<thought>(?i:{SECOND_THOUGHT}))?[(\[]?(?P<letter>[A-HJ])"
    r"\s*(?:$|[(,;!?)\n]|\.(?!\s*[a-z]))"
)
_ASKED = re.compile(r"\b(?:could|might|may|is|would|what\s+about|why\s+not)\b[^.;!?\n]{0,80}\?\s*no\b,?", re.IGNORECASE)
_WORD_AGAIN = re.compile(
    rf"(?:^|[.,;:!?(\n\u2014\u2013/|-])\s*(?:{SECOND_THOUGHT})?(?P<word>yes|no|maybe)\s*(?:$|[.,;:!?)\n])",
    re.IGNORECASE,
)
_WORD_BESIDE = re.compile(r"\b(?P<word>yes|maybe|no(?!\s+[a-z]))\b", re.IGNORECASE)
_CLAUSE_END = re.compile(r"[.;!?](?=\s|$)|\n")
SEVERAL = ""  # a text that names more than one


def grade(response: str, reference: str) -> Verdict:
    if not check_reference(reference):
        return BAD_REFERENCE
    chosen = extract(response)
    return judged(chosen == normalise(reference)) if chosen is not None else NO_ANSWER


def check_reference(reference: str) -> bool:
    return _REFERENCE.fullmatch(reference.strip()) is not None


def extract(response: str) -> str | None:
    """The chosen letter or word in lower case; None when there is none, or more than one.

    A box that holds a value and no choice is part of the reasoning: then the cue says which.
    """
    try:
        answer_text = outside_thinking(response)
        boxed = final_boxed(answer_text)
        chosen = _whole(boxed) if boxed is not None else None
        if chosen is None:
            cued = after_last_cue(answer_text)
            if cued is not None:
                chosen = _after_cue(cued)
            elif boxed is None and not taken_back(answer_text):
                chosen = _whole(answer_text)
    except CutOff:
        return None
    return chosen or None


def _plain(text: str) -> str:
    """Without layout: wrappers, quotation marks, stars, and what is struck out."""
    plain = _STRUCK.sub("", unicodedata.normalize("NFKC", text[:CHARACTERS_MAX]))
    plain = _QUOTED.sub(r"\1", _FRAMED.sub("", _MARKS.sub("", plain)))
    for _ in range(_WRAPPERS_MAX):
        opened = _WRAPPED.sub(r"\1", plain)
        if opened == plain:
            break
        plain = opened
    return _SPACES.sub(" ", plain).strip(_DECORATION)


def _whole(text: str) -> str | None:
    """Text that is nothing but the answer, or the letter, a sign that ends it and the option's words."""
    if len(text) > CHARACTERS_MAX:
        return None
    plain = _plain(text)
    word = _WORD.fullmatch(plain)
    if word is not None:
        rest = word.group(2).strip(" .!*")
        return word.group(1).lower() if not rest else SEVERAL if _is_another_word(word) else None
    letter = _LETTER.fullmatch(plain)
    if letter is None:
        return None
    if _names_another(letter):
        return SEVERAL
    is_ended = letter["close"] is not None and (letter["close"] != "=" or letter["letter"].isupper())
    return letter["letter"].lower() if is_ended or not letter["rest"].strip(" .!*") else None


def _after_cue(text: str) -> str | None:
    plain = _plain(text)
    word = _WORD.match(plain)
    if word is not None:
        return SEVERAL if _is_another_word(word) else word.group(1).lower()
    letter = _LETTER.match(plain)
    if letter is None:
        return None
    if _names_another(letter):
        return SEVERAL
    rest = letter["rest"]
    is_marked = letter["close"] is not None and letter["close"] not in {"", "="}
    is_article = letter["letter"] == "A" and not is_marked and letter["open"] is None and re.match(r"\s*[a-z]", rest)
    if is_article and not _REASON.match(re.sub(r"\s*(?:and|but)?\s*", "", rest, count=1)):
        return None
    if letter["letter"].islower() and not is_marked and rest.strip(" .!*"):
        return None
    return letter["letter"].lower()


def _names_another(letter: re.Match[str]) -> bool:
    """Return whether another letter stands behind the first: "B, C", "(B) (C)", "B unless C", "B) x C) y", "B. No,
    C."."""
    first, rest = letter["letter"].upper(), letter["rest"]
    about = _ABOUT_OTHERS.match(rest) if letter["close"] is not None else None
    if about is not None and first not in re.findall(r"\b[A-Z]\b", about[0]):
        rest = rest[about.end() :]
    rest = _ASKED.sub("", rest)
    reason = _REASON.search(rest)
    claim = rest[: reason.start()] if reason is not None else rest
    others: list[re.Match[str]] = []
    if letter["close"] is None:
        beside = _BESIDE_SMALL if letter["letter"].islower() else _BESIDE
        others += beside.finditer(_CLAUSE_END.split(claim, maxsplit=1)[0])
    others += (
        found for found in _MARKED.finditer(rest if letter["close"] else claim) if _is_option(letter, found, rest)
    )
    for found in _TAKEN_BACK.finditer(rest):
        if found["thought"] or (found.start() < len(claim) and not _is_open(rest[: found.start()])):
            others.append(found)
    return any(found["letter"].upper() != first for found in others)


def _is_option(letter: re.Match[str], match: re.Match[str], rest: str) -> bool:
    """Return whether a marked letter in what stands behind the first begins another option."""
    if match["named"] or (match["letter"].islower() and letter["letter"].isupper()):
        return False
    is_closing = match["open"] is None and match["sign"].strip() in {")", "]", "}", ">"}
    if is_closing and (match["sign"].strip() == ">" or _is_open(rest[: match.start()])):
        return False
    # "D. E. coli"
    return bool(rest[: match.start()].strip()) or re.match(r"\.\s*[a-z]", rest[match.start("sign") :]) is None


def _is_open(text: str) -> bool:
    """Return whether a bracket is open at the end of a text: the letter behind it closes it, as in "P(A, B)"."""
    return any(text.count(opening) > text.count(closing) for opening, closing in ("()", "[]", "{}"))


def _is_another_word(word: re.Match[str]) -> bool:
    """Return whether another of yes, no, maybe stands behind the first; "yes, no doubt" says yes."""
    first, rest = word.group(1).lower(), word.group(2)
    sentence = _CLAUSE_END.split(rest, maxsplit=1)[0]
    reason = _REASON.search(sentence)
    beside = _WORD_BESIDE.finditer(sentence[: reason.start()] if reason is not None else sentence)
    return any(found["word"].lower() != first for found in [*beside, *_WORD_AGAIN.finditer(rest)])
