r"""`numeric`: the final number, compared exactly as a fraction. No rounding, no tolerance, no library.

The final answer is what a box holds, what follows the last cue, or without either the last sentence with a number. It
must have a known shape: one number (`-1,250.50`, `2 1/2`, `\frac{1}{2}`, `1.8 \times 10^6`, 40%, negative 5), in front
of it at most words that end with a verb ("Tom has 5"), `x =` or a calculation (`3*6 =`), and behind it at most a unit,
a remark in brackets and a reason. Anything else is no answer, whatever number it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import islice

from fedsilo.grading import layout
from fedsilo.grading.extraction import (
    SECOND_THOUGHT,
    CutOff,
    after_last_cue,
    final_boxed,
    last_is_taken_back,
    outside_thinking,
)
from fedsilo.grading.verdict import BAD_REFERENCE, NO_ANSWER, Verdict, judged

CHARACTERS_MAX = 64
EXPONENT_MAX = 400
TAIL_CHARACTERS = 2_000  # where a final number is looked for: a search over more could be quadratic
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,4})?(?:\s*/\s*\d+)?%?", re.ASCII)
SIGN = str.maketrans({"\u2212": "-", "\uff0d": "-", "\u2013": "-"})
_MIXED = re.compile(r"(-?)(\d+)\s*(?:\\frac\{(\d+)\}\{(\d+)\}|\s(\d+)\s*/\s*(\d+))")
_PLAIN_FRACTION = re.compile(r"(-?)\s*\\frac\{\s*(-?[\d.]+)\s*\}\{\s*(-?[\d.]+)\s*\}")
_SCIENTIFIC = re.compile(r"(-?[\d.]+)\s*(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*)\s*\{?\s*(-?\d{1,3})\s*\}?")
_REPEATING = re.compile(r"(-?)(\d{0,30})\.(\d{0,30})\\overline\s*\{(\d{1,30})\}")

# the number of an answer, in plain layout
_DIGITS = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
_VALUE = re.compile(
    r"(?P<sign>[-+]|(?:minus|negative)\s+)?(?P<number>"
    r"\d*\.\d*\\overline\s*\{\d+\}"
    r"|\d+\s+\d+/\d+"
    rf"|{_DIGITS}\s*\*\s*10\s*\^\s*(?:-?\d{{1,3}}|\{{\s*-?\d{{1,3}}\s*\}})"
    rf"|{_DIGITS}(?:[eE][-+]?\d{{1,4}})?(?:\s*/\s*\d+)?"
    r")(?P<percent>\s*(?:%|per\s?cent\b|percentage\b))?(?![\d^_\u00b2\u00b3]|[.,]\d|\s*/\s*\d)",
    re.ASCII | re.IGNORECASE,
)
_VERBS = (
    r"is|are|was|were|be|equals?|has|have|had|gets?|got|makes?|made|gives?|gave|needs?|needed|wants?|earns?|earned|pays?|paid|owes?"
    r"|owed|costs?|charges?|charged|spends?|spent|saves?|saved|sells?|sold|buys?|bought|eats?|ate|takes?|took|uses?|used|reads?"
    r"|runs?|ran|walks?|walked|drives?|drove|travels?|travell?ed|weighs?|weighed|holds?|contains?|receives?|received|collects?"
    r"|collected|produces?|produced|loses?|lost|wins?|won|scores?|scored|leaves|left|remain(?:s|ed)?|becomes?|became|totals?"
    r"|(?:comes?|came|amounts?|adds?\s+up)\s+to|finds?|found|obtain|know|yields?|means|that"
)
_LEADER = re.compile(rf"(?:\b(?:{_VERBS}|so|therefore|thus|hence|then)\b|:)[\s,:]*", re.IGNORECASE)
_LEADERS_MAX = 12
_ABOUT = re.compile(
    r"(?:\s*(?:=|\u2248|(?:about|approximately|approx\.?|roughly|around|exactly|precisely|just|only|simply|equal\s+to"
    r"|for|with|(?:an?|the)\s+(?:total|sum|average|profit|loss|balance|salary|speed|distance|value)\s+of)(?![A-Za-z])))*\s*",
    re.IGNORECASE,
)
_NAME = re.compile(r"[A-Za-z]\w{0,20}(?:\s*_\s*\{?\w{1,8}\}?)?'?(?:\s*\(\s*\w\s*\))?")
_ASSIGNED = re.compile(rf"\s*{_NAME.pattern}\s*=")
_CALCULATION = re.compile(r"[-+]?[\d(.](?:[^\u221a\\=.,:;!?]|[.,](?=\d))*")  # within one sentence
_VARIABLE = re.compile(r"(?<![A-Za-z])[A-Za-z](?![A-Za-z])")
_SHORT_WORDS = frozenset(
    ["a", "an", "of", "in", "on", "at", "to", "by", "as", "is", "it", "be", "do", "he", "we", "so", "my", "up"]
)
_SYMBOLS = frozenset("mgshLlJNWVKCFA")  # units of one letter
_WORD = re.compile(r"(?:[^\W\d_]{1,2}-)?[^\W\d_]{3,}(?:[-'\u2019/][^\W\d_]+)*['\u2019]?")
_POWER = re.compile(r"(?:\s*\^\s*(?:-?\d|\{\s*-?\d\s*\})|[\u00b2\u00b3]|(?<=[a-z])\s(?:squared|cubed)\b)(?!\d)")
_REASON = re.compile(
    r"[\s,:\u2014-]{0,3}\b(?:because|since|as|which|so|given|due\s+to|while|(?<=, )not"
    r"|and\s+(?:so|it|this|that|we|she|he|they)|and\s+\d+\s+(?:remains?|is|are|was|were)|with\s+\d+\s+(?:left|remaining))\b",
    re.IGNORECASE,
)
_REMARK = re.compile(
    r"\s*(?:of|out\s+of|from|see|because|since|as|i\.e\.|rounded|to\s+the\s+nearest|not)\b", re.IGNORECASE
)
# numbers that tell of what, or for how many: "of the 30 students", "for 16 glasses"
_OF_WHAT = re.compile(
    r"\b(?:(?:out\s+)?of\s+(?:the\s+|all\s+|his\s+|her\s+|their\s+)?\d[\d,]*(?![\d.^/])"
    r"|(?:for|in|after|within|every)\s+(?:the\s+|all\s+)?\d[\d,]*(?=\s+[A-Za-z]{3}))",
    re.IGNORECASE,
)
_AGAIN = re.compile(r"[\s,]*(?:\bor\b|\bi\.e\.,?|\bthat\s+is,?|=|\u2248)\s*", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.;!?](?=\s|$)")
# a factorial, and two values; "5 boys and girls" is one
_NOT_IN_A_BOX = re.compile(
    r"(?<!\\)!|\bor\b|\band\b(?!\s+(?!more\b|half\b|over\b|above\b|counting\b)[a-z]{3})", re.IGNORECASE
)
_DIGIT = re.compile(r"\d", re.ASCII)
_ANOTHER = re.compile(rf"(?:^|[.,;:!?(\u2014])\s*{SECOND_THOUGHT}", re.IGNORECASE)
_ANOTHER_END = re.compile(r"(?:\s*[^\W\d_]+)?\s*(?:$|[.,;!?)])")
_REFUSED = re.compile(r"(?:\b(?:not|never|cannot|nobody|none|unlikely)|n['\u2019]t)(?:\s+\w+)?\s*$", re.IGNORECASE)
_WRAPPED = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|boldsymbol|bm|mbox|underline|emph|boxed|fbox)\s*\{([^{}]*)\}"
)
_WRAPPERS_MAX = 4
_APART = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d,.]*\d)(?!\s*/)")  # thousands
_CURRENCY = re.compile(r"\b(?:USD|EUR|GBP|INR|CAD|AUD|Rs\.?|US(?=\$))\s*(?=[$\d])|[$\u20ac\u00a3\u00a5\u20b9]")
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,3}|_{1,3}|`)(?=\S)([^*_`]{1,200})(?<=\S)\1(?!\w)")
_EMPHASIS_END = re.compile(r"(?<=\S)\*{2,3}(?=[\s.,;:!?)]|$)")


def grade(response: str, reference: str) -> Verdict:
    expected = parse(reference)
    if expected is None:
        return BAD_REFERENCE
    answer = _extracted(response)
    if answer is None:
        return NO_ANSWER
    return judged(
        answer[0] == expected or (answer[1] and takes_percent(reference, expected) and answer[0] * 100 == expected)
    )


def takes_percent(reference: str, expected: Fraction) -> bool:
    """Return whether 25% may be said for a reference 25: not for a share of one, such as 1/2 or 0.5, nor for a
    percentage."""
    return abs(expected) >= 1 and "%" not in reference


def check_reference(reference: str) -> bool:
    return parse(reference) is not None


def parse(text: str) -> Fraction | None:
    """A whole text as one number: integer, decimal, thousands commas, exponent, a/b, percent. None otherwise."""
    plain = layout.plain_digits(text[: 4 * CHARACTERS_MAX]).translate(SIGN)
    plain = plain.replace("\\%", "%").strip().strip("$").strip()
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


def number(text: str) -> Fraction | None:
    """An exact number: what `numeric` reads, a fraction of two numbers, a mixed number, one with a repeating period,
    scientific notation."""
    plain = text.strip()
    while plain.startswith("{") and plain.endswith("}") and "{" not in plain[1:]:
        plain = plain[1:-1].strip()
    value = parse(plain)
    if value is not None:
        return value
    if plain.endswith("%"):
        value = number(plain[:-1])
        return None if value is None else value / 100
    if (mixed := _MIXED.fullmatch(plain)) is not None:
        sign, whole, top, bottom, plain_top, plain_bottom = mixed.groups()
        part = parse(f"{top or plain_top}/{bottom or plain_bottom}")
        return None if part is None else (Fraction(int(whole)) + part) * (-1 if sign else 1)
    if (fraction := _PLAIN_FRACTION.fullmatch(plain)) is not None:
        above, below = parse(fraction.group(2)), parse(fraction.group(3))
        if above is None or below is None or below == 0:
            return None
        return above / below * (-1 if fraction.group(1) else 1)
    if (repeating := _REPEATING.fullmatch(plain)) is not None:
        sign, whole, fixed, period = repeating.groups()
        before = Fraction(int((whole or "0") + fixed), 10 ** len(fixed))
        value = before + Fraction(int(period), 10 ** len(fixed) * (10 ** len(period) - 1))
        return -value if sign else value
    if (scientific := _SCIENTIFIC.fullmatch(plain)) is not None:
        mantissa = parse(scientific.group(1))
        return None if mantissa is None else mantissa * Fraction(10) ** int(scientific.group(2))
    return None


def extract(response: str) -> Fraction | None:
    """The number that a response gives as its answer, or None."""
    answer = _extracted(response)
    return answer[0] if answer is not None else None


def _extracted(response: str) -> tuple[Fraction, bool] | None:
    """The number, and whether it was said in percent."""
    try:
        answer_text = outside_thinking(response)
        boxed = final_boxed(answer_text)
        cued = after_last_cue(answer_text) if boxed is None else None
    except CutOff:
        return None
    if boxed is not None:
        if len(boxed) > TAIL_CHARACTERS or _NOT_IN_A_BOX.search(boxed):
            return None
        return _answer(_plain(layout.normalise(boxed)))
    if cued is not None:
        return _answer(_plain(cued[:TAIL_CHARACTERS]))
    return _last(answer_text[-TAIL_CHARACTERS:])


def _answer(text: str) -> tuple[Fraction, bool] | None:
    """The number of a text that is an answer and nothing else."""
    if (value := _shaped(text)) is not None:
        return value
    for leader in islice(_LEADER.finditer(text), _LEADERS_MAX):
        if not _are_words(text[: leader.start()]):
            return None
        if (value := _shaped(text[leader.end() :])) is not None:
            return value
    return None


def _last(text: str) -> tuple[Fraction, bool] | None:
    """The number that the last sentence with one ends with, behind a verb or a word such as "so"."""
    if last_is_taken_back(text):
        return None
    for line in reversed(text.splitlines()):
        if not _DIGIT.search(layout.plain_digits(line)):
            continue
        plain = _plain(line)
        starts = [0, *(end.end() for end in _SENTENCE_END.finditer(plain) if end[0] != ";")]
        sentence = next((plain[start:].strip() for start in reversed(starts) if _DIGIT.search(plain, start)), plain)
        for leader in reversed([*_LEADER.finditer(sentence)][-_LEADERS_MAX:]):
            value = _shaped(sentence[leader.end() :])
            if value is not None:
                return None if _REFUSED.search(sentence, 0, leader.start()) else value
        return _shaped(sentence)
    return None


def _shaped(text: str) -> tuple[Fraction, bool] | None:
    """The number of `x = 3*6 = 18 apples, since ...`."""
    begun = _ABOUT.match(text)
    start, sides = begun.end() if begun else 0, []
    while (sign := re.compile(r"=|\u2248").search(text, start)) is not None:
        side = text[start : sign.start()].strip()
        if _VALUE.match(side) and not _is_side(side):
            break
        if side and not _is_side(side):
            return None
        sides.append(side)
        start = sign.end()
    about = _ABOUT.match(text, start)
    match = _VALUE.match(text, about.end() if about else start)
    value = _value_of(match) if match is not None else None
    if match is None or value is None:
        return None
    others = [other for other in (number(side) for side in sides) if other is not None]
    if any(other != value[0] for other in others) or not _ends(text[match.end() :], value[0]):
        return None
    return value


def _value_of(match: re.Match[str]) -> tuple[Fraction, bool] | None:
    value = number(match["number"])
    if value is None:
        return None
    value = -value if (match["sign"] or "+") != "+" else value
    return (value / 100, True) if match["percent"] else (value, False)


def _is_side(text: str) -> bool:
    """Return what may stand before an equals sign: a name, a number, a calculation or words."""
    return _NAME.fullmatch(text) is not None or number(text) is not None or _is_calculation(text) or _are_words(text)


def _is_calculation(text: str) -> bool:
    """Numbers and signs, perhaps with units between them, and no variable."""
    plain = re.sub(r"(?<=\d)\s*x\s*(?=\d)", "*", text)
    has_sign = _CALCULATION.fullmatch(plain) is not None and re.search(r"[-+*/^]", plain[1:]) is not None
    return has_sign and not _VARIABLE.search(plain) and not layout.CHANGING.search(plain)


def _ends(rest: str, value: Fraction) -> bool:
    """Return whether what stands behind a number leaves it what it is."""
    end = _SENTENCE_END.search(rest)
    later = rest[end.end() :] if end is not None else ""
    sentence = rest[: end.start()] if end is not None else rest
    if _offers_another(later, value, is_begun=False):
        return False
    if (again := _AGAIN.match(sentence)) is not None:
        match = _VALUE.match(sentence, again.end())
        shaped = _value_of(match) if match is not None else None
        return match is not None and shaped is not None and shaped[0] == value and _ends(sentence[match.end() :], value)
    sentence = _OF_WHAT.sub("", sentence)
    stop = re.compile(r"[,(:\u2014]|\s-\s").search(sentence)
    reason = _REASON.search(sentence)
    first = min((each.start() for each in (stop, reason) if each is not None), default=len(sentence))
    if not _is_unit(sentence[:first]):
        return False
    if reason is not None and reason.start() == first:
        return not _offers_another(sentence[first:], value, is_begun=True)
    if stop is not None and stop[0] == "(":
        remark, closed, behind = sentence[stop.end() :].partition(")")
        return bool(closed) and _is_remark(remark, value) and _ends(behind, value)
    return stop is None or (stop[0] != ":" and _are_words(sentence[stop.end() :])) or not sentence[stop.end() :].strip()


def _offers_another(text: str, value: Fraction, is_begun: bool) -> bool:
    """Return whether a reason or a later sentence gives another number: "No wait, 6". A bare one at its beginning does
    too."""
    ends: Iterator[int] = (match.end() for match in _ANOTHER.finditer(text))
    for position in [*ends] if is_begun else [0, *ends]:
        named = _ASSIGNED.match(text, position)
        about = _ABOUT.match(text, named.end() if named else position)
        match = _VALUE.match(text, about.end() if about else position)
        shaped = _value_of(match) if match is not None else None
        if match is not None and shaped is not None and shaped[0] != value and _ANOTHER_END.match(text, match.end()):
            return True
    return False


def _is_unit(text: str) -> bool:
    """Words behind a number, of which the first may be a unit's sign and touch it: 5cm, 5 m/s, 5 eggs per day."""
    plain = _POWER.sub("", text)
    sign = re.match(r"\s*(?:\u00b0\s*[CF]?(?![A-Za-z])|([^\W\d_]+(?:/[^\W\d_]+)*)\.?(?![^\s]))", plain)
    if re.match(r"K|k\b", plain):
        return False  # 5K is 5000, or five kelvin
    if sign is not None and (sign[1] is None or all(_is_sign(each) for each in sign[1].split("/"))):
        plain = plain[sign.end() :]
    elif plain != text:
        return False  # only a unit has a power
    elif plain[:1].isalpha() and not _WORD.match(plain):
        return False
    return _are_words(plain)


def _is_sign(text: str) -> bool:
    return text in _SYMBOLS if len(text) == 1 else text.lower() in layout.UNIT_NAMES


def _are_words(text: str) -> bool:
    """Plain words, none of which makes another number."""
    if layout.CHANGING.search(text):
        return False
    words = (word.strip("'\"\u2018\u2019\u201c\u201d.,:") for word in text.split())
    return all(not word or word.lower() in _SHORT_WORDS or _WORD.fullmatch(word) or _is_sign(word) for word in words)


def _is_remark(text: str, value: Fraction) -> bool:
    """Return what may stand in brackets behind a number: the same again, a part of what, a reason, a calculation, a
    unit."""
    if (shaped := _shaped(text)) is not None:
        return shaped[0] == value
    words = re.split(r"[\s-]+", text.strip().lower())
    small, tens = layout.SMALL_NUMBERS, layout.TENS
    if all(word in small or word in tens for word in words):
        return sum(small.index(word) if word in small else 10 * tens.index(word) + 20 for word in words) == value
    if _REMARK.match(text):
        return not _offers_another(text, value, is_begun=True)
    return _is_calculation(text.lstrip("= ")) or _are_words(text)


def _plain(text: str) -> str:
    """A line with LaTeX's and Markdown's signs written plainly."""
    plain = " ".join(layout.plain_digits(text).translate(SIGN).split())
    plain = re.sub(r"(?<=\d)\s*(?:\\[,;: ]|~|\u00a0|\u202f)\s*(?=\d{3}(?!\d))", "", plain)
    plain = _APART.sub(lambda run: run[0].replace(" ", ""), plain)
    plain = re.sub(r"(?<=\d)(?=\\[dtc]?frac)", " ", plain)  # a mixed number
    plain = re.sub(r"\\[dtc]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}", r"\1/\2", plain)
    plain = re.sub(r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\1/\2", plain)
    plain = re.sub(r"\\[()\[\]]|\\(?=[$%])", "", plain)
    for _ in range(_WRAPPERS_MAX):
        opened = _WRAPPED.sub(r" \1 ", plain)
        if opened == plain:
            break
        plain = opened
    plain = re.sub(r"\\[,;:! ]|~|\\q?quad(?![a-z])|\\displaystyle(?![a-z])", " ", plain)
    plain = re.sub(r"\\(?:times|cdot)(?![a-z])|[\u00d7\u00b7]", "*", plain)
    plain = re.sub(r"\\div(?![a-z])|\u00f7", "/", plain)
    plain = re.sub(r"\\(?:approx|simeq|sim)(?![a-z])", "\u2248", plain)
    plain = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-z])", "\u00b0", plain)
    plain = layout.scaled(plain)
    plain = _CURRENCY.sub("", plain)
    for _ in range(2):
        plain = _EMPHASIS.sub(r"\2", plain)
    plain = _EMPHASIS_END.sub("", plain)
    return " ".join(re.sub('[`"\u201c\u201d]', "", plain).split()).strip("*_ ")
