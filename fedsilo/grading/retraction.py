"""Whether an explicit second thought takes an answer back. Whatever else is said behind an answer explains it. Every
scan is linear."""

from __future__ import annotations

import re

# between one value and another that takes its place, as in "B. No wait, C."
SECOND_THOUGHT = (
    r"(?:(?:no|wait|actually|or|maybe|perhaps|possibly|alternatively|otherwise|rather|sorry|correction|hmm|oops|instead"
    r"|else|i\s+mean|make\s+that|the\s+answer|it|that|is|could|may|might|should|also|be)\b[\s,:.\u2014-]*){1,8}"
)
# the end of the clause that an answer stands in; a point or comma within a number is none
_END = r"(?:[.;!,](?=\s)\s?|\n|\s(?:[\u2013\u2014-]\s|\())"
_NO_OPTION = r"(?<!\b[A-J][).:] )(?<!\b[A-J]\n)"  # behind a letter stand the option's words: "B. No, it is late"
# a clause that begins so thinks the answer over again
_SURE = (
    r"hmm+|w?oops|apologies|my\s+(?:mistake|bad)|(?:scratch|strike)\s+that|on\s+(?:second\s+thoughts?|reflection)"
    r"|(?:forget|ignore|disregard)\s+(?:that|it)(?=\s*(?:[.,:;!\n\u2014]|$))|no,?\s+wait|then\s+again"
    r"|sorry(?=\s*[,.:;!\u2014-]|\s+(?:it|that|the|i)\b|\s+\d)|(?:hold|hang)\s+on(?=\s*[,.!:\u2014-])"
    r"|i\s+meant?(?=\s+\S+\s*(?:[.!]|$))|i\s+made\s+(?:a\s+mistake|an\s+error)|i\s+(?:was|am)\s+(?:wrong|mistaken)"
    r"|i\s+(?:mis(?!s\b)\w+|changed?\s+my\s+(?:mind|answer)|take\s+(?:that|it|this)\s+back)"
    r"|(?:let\s+me|i\s+(?:must|should|have\s+to))\s+(?:correct|reconsider|rethink|redo|revise)"
)
_NO = r"(?<!yes, )(?<!\?\n)no"  # neither in a list of words, nor to a question
_IT_IS = r"(?:it|that)(?:['\u2019]s|\s+(?:is|was|should|must))\b"
_UNSURE = (
    r"wait(?=\s*[,.:;!\u2026\u2014-]|\s+(?:no|it|that|actually|i|let|a\s+(?:minute|moment|second))\b)"
    rf"|(?:actually|rather)(?=,?\s+(?:(?:no|not|wait|i)\b|{_IT_IS}|\d\S*(?:\s\w+)?(?:[.;!?\n]|$)))"
    rf"|(?:correction|edit|update)(?=:)|{_NO}(?!,\s+(?:because|since)\b)(?=\s*[,:;!\u2014]|\.(?!\s+of\b)|\s+{_IT_IS})"
)
_AGAIN = re.compile(
    rf"{_END}(?:(?:but|oh|well|ah|okay|and)\b,?\s*)?(?:(?:{_SURE})\b|{_NO_OPTION}(?:{_UNSURE})"
    rf"|(?:(?:{_NO}|wait|correction|edit)\s*[,.:\u2014-]|(?:actually|rather)\b,?)\s*(?:{_IT_IS}\s+)?"
    r"(?-i:[B-HJ]|[AI](?!\s+[a-z]))(?![\w'\u2019]))",
    re.IGNORECASE,
)
_ENDING = r"(?=\s*(?:[.,;:!)\n\u2014]|-\s|$))"  # "It is wrong to refuse" denies nothing
_IS_WRONG = (
    r"(?:(?:['\u2019]s|\s+(?:is|was|seems))\s+(?:(?:\w+ly|also|just)\s+)?"
    r"(?:wrong|incorrect|false|mistaken|a\s+(?:mistake|typo)|an\s+error|not\s+(?:right|correct|true|it|the\s+answer))"
    r"|\s+(?:can(?:['\u2019]t|not)\s+be|isn['\u2019]t|doesn['\u2019]t\s+(?:look|seem))\s+(?:right|correct|true|it)"
    r"|\s+(?:doesn|won)['\u2019]t\s+work)"
)
_IT = r"(?:(?:but|so)\s+)?(?:which|it|(?:that|this|the)(?:\s+(?:answer|option|choice|result))?)"
# the answer in one clause and a "no" to it right behind, or a question
_DENIED = re.compile(
    rf"\s*(?:\S{{1,20}}{_IS_WRONG}{_ENDING}|\S{{1,20}}?:\s(?-i:wrong|incorrect){_ENDING}"
    rf"|(?:[^.;!,\n]|[.,](?=\d)){{1,80}}?{_END}(?:{_IT}{_IS_WRONG}{_ENDING}|{_NO_OPTION}"
    rf"(?:{_IT}{_IS_WRONG}\s+(?:because|since|so|but)\b|(?:wrong|incorrect){_ENDING}))"
    r"|(?:\S{1,20}|[-\d][^.;:!,?\n]{0,40})\s*\?)",
    re.IGNORECASE,
)
# characters that print nothing, or turn the direction of the text; joiners are part of some scripts
HIDDEN = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
    r"\U000e0000-\U000e007f]|(?<=[\x00-\x7f])[\u200c\u200d]"
)
_MARKUP = re.compile(r"\\[()\[\]]|[$*\"`\u201c\u201d]")
_SET_APART = "\u25a1"  # stands for an answer in a box or in tags, behind which no option's words stand
_BEHIND_MAX = 2_000


def taken_back(answer: str, behind: str = "", *, is_set_apart: bool = False) -> bool:
    """Whether an answer is thought over ("Wait, ..."), denied ("which is wrong") or asked ("5?") behind it, or
    characters that print nothing stand beside it. `answer` is its whole line, or what a box or tags set apart."""
    answer, behind = answer[:_BEHIND_MAX], behind[:_BEHIND_MAX]
    if HIDDEN.search(f"{answer}{behind}".partition("\n")[0]):
        return True
    gap = "\n" if behind.lstrip("$ ")[:1].isalnum() else ""
    for said in (answer, f"{_SET_APART}{gap}{behind}") if is_set_apart else (f"{answer}{behind}",):
        lines = (" ".join(each.split()) for each in _MARKUP.sub("", said).split("\n"))
        text = "\n".join(each for each in lines if each)
        if re.match(r"\W*no\b", answer, re.IGNORECASE):
            text = re.sub(r"\bno\b", "", text, flags=re.IGNORECASE)  # the answer "no" is no denial
        if _AGAIN.search(text) or _DENIED.match(text):
            return True
    return False


def last_is_taken_back(text: str) -> bool:
    """Whether the words behind the last number of a text take it back."""
    last = max((place for place, character in enumerate(text) if character.isdigit()), default=len(text))
    return taken_back(text[last:])
