"""Whether the words behind an answer take it back, for every verifier that looks for one. Every scan is linear."""

from __future__ import annotations

import re
from fractions import Fraction

# the end of the clause that an answer stands in; a point or comma within a number is none
_END = r"(?:[.;!,](?=\s)\s?|\n|\s(?:[\u2013\u2014-]\s|\())"
_OPTION_LETTER = r"(?-i:[B-HJ]|[AI](?!\s+[a-z]))(?![\w'\u2019])"
# a clause that begins so thinks the answer over again
_SURE = (
    r"hmm+|w?oops|apologies|my\s+(?:mistake|bad)|(?:scratch|strike|forget|ignore|disregard)\s+(?:that|this|it)"
    r"|on\s+(?:second\s+thoughts?|reflection)|sorry(?=\s*[,.:;!\u2014-]|\s+(?:it|that|the|i)\b|\s+\d)"
    r"|(?:hold|hang)\s+on(?=\s*[,.!:\u2014-])|i\s+meant?(?=\s+\S+\s*(?:[.!]|$))"
    r"|i\s+(?:was\s+wrong|(?:was|am)\s+mistaken|mis\w+|changed\s+my\s+mind|take\s+(?:that|it|this)\s+back)"
    r"|i\s+made\s+(?:a\s+mistake|an\s+error)"
    r"|(?:let\s+me|i\s+(?:must|should|have\s+to))\s+(?:correct|fix|reconsider|rethink|redo)"
)
# these do not right behind a letter, where they are an option's words: "B. No, because it is late"
_UNSURE = (
    r"wait(?=\s*[,.:;!\u2026\u2014-]|\s+(?:no|it|that|actually|i|let|a\s+(?:minute|moment|second))\b)"
    r"|(?:actually|then\s+again|correction)(?=\s*[,:]|\s+(?:it|that|this|no|not|the)\b|\s+(?:\$|\d|[A-J]\b))"
    r"|no(?=\s*[,:;!\u2014]|\.(?!\s+of\b)|\s+(?:wait|it|that)\b)"
)
_AGAIN = re.compile(
    rf"{_END}(?:(?:but|oh|well|ah|okay|and)\b,?\s*)?(?:(?:{_SURE})\b|no,?\s+wait\b"
    r"|(?:no\b\s*[,.:\u2014-]|actually\b,?|rather\b,?)\s*(?:(?:it|that)(?:\s+is|['\u2019]s)\s+)?"
    rf"(?:[$\d]|{_OPTION_LETTER})|(?<!\b[A-J][).:] )(?<!\b[A-J]\n)(?:{_UNSURE}))",
    re.IGNORECASE,
)
_WRONG = (
    r"(?:(?:['\u2019]s|\s+(?:is|was|seems))\s+(?:(?:\w+ly|also|just)\s+)?"
    r"(?:wrong|incorrect|false|mistaken|impossible|a\s+(?:mistake|typo)|an\s+error|not\s+(?:right|correct|true|it|the\s+answer))"
    r"|\s+(?:can(?:['\u2019]t|not)\s+be|isn['\u2019]t)\s+(?:right|correct|true|it)|\s+(?:doesn|won)['\u2019]t\s+work)\b"
)
# the answer in one clause and a "no" to it right behind, or a question
_DENIED = re.compile(
    rf"\s*(?:\S{{1,20}}{_WRONG}|(?:[^.;!,\n]|[.,](?=\d)){{1,80}}?{_END}(?:but\s+)?(?:which|that|this|it){_WRONG}"
    r"|(?:\S{1,20}|[-\d][^.;:!,?\n]{0,40})\s*\?)",
    re.IGNORECASE,
)
# a later clause of nothing but such words and a value gives the answer anew, and takes it back if the value is another;
# one with words of the matter ("The price was 10") explains
_SAYING = (
    r"(?:i|it|that|this|my|me|we|the|is|be|are|['\u2019](?:s|d|ll|m)|so|or|but|then|now|also|rather|instead|else|should"
    r"|could|would|may|might|must|will|can|think|guess|believe|say|go|make|mean|change|let|hold|hang|on|to|with|maybe"
    r"|perhaps|alternatively|otherwise|sorry|edit|update|revise[ds]?|fix|well|oh|right|correct|true|real|better|final|best"
    r"|in\s+fact|(?!approx|rough|near)\w{3,}ly|answer|result|solution|value|number|one|option|choice|letter)(?!\w)"
    r"[\s,:.\u2014-]*"
)
_VALUE = rf"-?\d(?:[.,/]?\d)*+|\\[dt]?frac[\d{{}}]+|{_OPTION_LETTER}"
_ANEW = re.compile(
    r"(?:[.!;](?=\s)\s?|\n|\s[\u2013\u2014-]\s)(?!(?:is|could|should|would|might|may|can)\b[^.;!\n]{0,80}\?)"
    rf"(?:(?:{_SAYING}){{1,10}}+|(?P<denied>not\s+))\(?(?P<value>{_VALUE})(?=\s*(?:\w+\s*)?(?:[.,;!?)\n]|$))",
    re.IGNORECASE,
)
# characters that print nothing, or turn the direction of the text; joiners are part of some scripts
HIDDEN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
    r"\U000e0000-\U000e007f]|(?<=[\x00-\x7f])[\u200c\u200d]"
)
_FRACTION = re.compile(r"\\[dt]?frac(?:\{(\d+)\}\{(\d+)\}|(\d)(\d))")
_MARKUP = re.compile(r"\\[()\[\]]|[$*\"`\u201c\u201d]")
_BEHIND_MAX = 2_000


def taken_back(answer: str, behind: str) -> bool:
    """Whether words take an answer back: it is thought over ("Wait, ..."), denied ("which is wrong"), asked ("5?") or
    given anew ("The right value is 6"). Characters that cannot be seen beside it do too.

    Args:
        answer: the answer, with what else stands on its line.
        behind: the text that follows.
    """
    line, later = answer[:_BEHIND_MAX], behind[:_BEHIND_MAX]
    gap = "\n" if later.lstrip("$ ")[:1].isalnum() else ""
    said = f"{line}{gap}{later}"
    if HIDDEN.search(said.partition("\n")[0]):
        return True
    lines = (" ".join(each.split()) for each in _MARKUP.sub("", said).split("\n"))
    text = "\n".join(each for each in lines if each)
    if re.match(r"no\b", text, re.IGNORECASE):
        text = re.sub(r"\bno\b", "", text, flags=re.IGNORECASE)  # the answer "no" is no denial
    if _AGAIN.search(text) or _DENIED.match(text):
        return True
    first = text[: found.start()] if (found := re.search(_END, text)) is not None else text
    held = {_value(each[0]) for each in re.finditer(rf"(?<![\w.])(?:{_VALUE})", first)}
    for anew in _ANEW.finditer(text):
        value = _value(anew["value"])
        if any(type(each) is type(value) for each in held) and (value in held) == bool(anew["denied"]):
            return True
    return False


def _value(text: str) -> Fraction | str:
    """The number that is written, or the letter."""
    digits = _FRACTION.fullmatch(text)
    plain = f"{digits[1] or digits[3]}/{digits[2] or digits[4]}" if digits is not None else text.replace(",", "")
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return text


def last_is_taken_back(text: str) -> bool:
    """Whether the words behind the last number of a text take it back."""
    last = max((place for place, character in enumerate(text) if character.isdigit()), default=len(text))
    return taken_back(text[last:], "")
