"""Finds where in a response its final answer stands (policy 1 of the shared grading examples), and whether an explicit
second thought takes it back. Whatever else is said behind an answer explains it. Every scan is linear."""

from __future__ import annotations

import json
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
    """Return whether an answer is thought over ("Wait, ..."), denied ("which is wrong") or asked ("5?") behind it, or
    characters that print nothing stand beside it. `answer` is its whole line, or what a box or tags set apart."""
    answer, behind = answer[:_BEHIND_MAX], behind[:_BEHIND_MAX]
    if HIDDEN.search(f"{answer}{behind}".partition("\n")[0]):
        return True
    gap = "\n" if behind.lstrip("$ ")[:1].isalnum() else ""
    for candidate in (answer, f"{_SET_APART}{gap}{behind}") if is_set_apart else (f"{answer}{behind}",):
        lines = (" ".join(each.split()) for each in _MARKUP.sub("", candidate).split("\n"))
        text = "\n".join(each for each in lines if each)
        if re.match(r"\W*no\b", answer, re.IGNORECASE):
            text = re.sub(r"\bno\b", "", text, flags=re.IGNORECASE)  # the answer "no" is no denial
        if _AGAIN.search(text) or _DENIED.match(text):
            return True
    return False


def last_is_taken_back(text: str) -> bool:
    """Return whether the words behind the last number of a text take it back."""
    last = max((place for place, character in enumerate(text) if character.isdigit()), default=len(text))
    return taken_back(text[last:])


# ---- the final answer ------------------------------------------------------------------------------------------------


_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NESTED_BOXES_MAX = 8
_BETWEEN_MAX = 200
_EMPHASIS = r"[*_]{0,3}"
_CUE = re.compile(
    r"(?:final\s+answer|correct\s+(?:answer|option|choice)|answer|option|choice)"
    + _EMPHASIS
    + r"(?:\s+(?:is|are|would\s+be|must\s+be|equals)\b(?:,?\s+(?:therefore|thus|hence|then|so|simply|just|clearly"
    r"|indeed|definitely|now|also|still|actually|in\s+fact)\b,?)?\s*:?|\s*[:=]|[ \t]+[\u2013\u2014-](?=[ \t]))"
    r"(?:" + _EMPHASIS + r"(?=\s|$))?\s*",
    re.IGNORECASE,
)
_CUED_VALUE = re.compile(
    _CUE.pattern + r"[$*_(\[{]*(?:\\|[-+]?\.?\d|(?:yes|no|maybe)\b|(?-i:[A-J](?![\w'\u2019])|[A-Za-z]\s*=))",
    re.IGNORECASE,
)
# a heading, or a line of its own, that says no more than that the answer follows
_HEADING = re.compile(
    r"^[ \t]*(?:#{1,6}[ \t]*)?"
    + _EMPHASIS
    + r"(?:the[ \t]+)?(?:final[ \t]+|correct[ \t]+)?answer[ \t]*:?"
    + _EMPHASIS
    + r":?[ \t]*(?:\n|$)",
    re.IGNORECASE | re.MULTILINE,
)
_DISPLAYS = (
    re.compile(r"\$\$(.*?)\$\$", re.DOTALL),
    re.compile(r"\\\[(.*?)\\\]", re.DOTALL),
    re.compile(
        r"\\begin\{(?:align|aligned|equation|gather|multline|displaymath|math)\*?\}(.*?)"
        r"\\end\{(?:align|aligned|equation|gather|multline|displaymath|math)\*?\}",
        re.DOTALL,
    ),
    re.compile(r"(?:```|~~~)[^\n]*\n(.*?)\n[ \t]*(?:```|~~~)", re.DOTALL),
)
# on a line of its own, or at the beginning or the end of one: another candidate follows
_OTHERWISE = re.compile(
    r"\s*+[.,;]?\s*+\(?(?:(?:or|alternatively|otherwise|if\s+not(?:,?\s+then)?|(?:the\s+answer|it)\s+(?:could|may|might)"
    r"(?:\s+also)?\s+be)\b[,:]?\s*(?:(?:also|maybe|perhaps|possibly|else|even|rather|then|just|it|is"
    r"|could|may|might|be|equals?)\s+){0,4}(?=\$|\\[\[(]|\\begin|```|~~~|[-+]?\d|\(?[A-J]\b)|and\s+(?=\$\$|\\\[|\\begin))",
    re.IGNORECASE,
)
# an option: where the next one stands on the line below, the whole list is told
_OPTION = re.compile(
    r"[\s*(\[]{0,9}([A-Ja-j])(?:[)\].:]|[ \t.]*(?=\n|$))(?!\s*(?:is|are|was|were|would|does|cannot)\b)"
)
_DANGLING = re.compile(r"\b(?:or|and)[ \t]*:?$", re.IGNORECASE)
_CANDIDATES_MAX = 8
# between two boxes, where they are two candidates or two members of one answer
_BETWEEN_BOXES = re.compile(
    r"[\s$.,;]*+(?:\\[\])])?[\s$.,;]*+\(?(?:or|and|alternatively|otherwise|and/or)\b,?\s*+"
    r"(?:(?:also|maybe|perhaps|possibly|else|even|it|is|could|may|might|be)\s++){0,4}(?:\$|\\[\[(])?\s*+(?:[A-Za-z]\s*+=\s*+)?",
    re.IGNORECASE,
)
_ANSWER_KEYS = ("final_answer", "finalanswer", "answer", "choice", "option")
JSON_CHARACTERS_MAX = 20_000
_ANSWER_START, _ANSWER_END = "<answer>", "</answer>"
_THINKING_END = "</think>"
_THINKING_START = "<think>"


class CutOff(Exception):  # not an error of ours: the response ends inside its box or its thinking
    """The response was cut off before its answer was complete."""


class TakenBack(CutOff):
    """Error of an answer that the text behind it takes back."""


def outside_thinking(response: str) -> str:
    """Return what stands after the last `</think>`.

    Raises:
        CutOff: thinking was begun and never ended.
    """
    _, separator, after = response.rpartition(_THINKING_END)
    answer = after if separator else response
    if _THINKING_START in answer:
        raise CutOff
    return answer


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`; a box that holds nothing but a box is opened too. Boxes
    that "or" or "and" joins are given together, as `$3$ or $4$`.

    Returns:
        None when there is no box.

    Raises:
        CutOff: a box has no closing brace.
    """
    return _boxed(text)[0]


def final_boxed(text: str) -> str | None:
    """The last box, as `last_boxed`; None also where the text behind it takes it back and a cue there gives an answer.

    Raises:
        CutOff: a box has no closing brace, or is taken back.
    """
    boxed, behind = _boxed(text)
    if boxed is None or not taken_back(boxed, behind, is_set_apart=True):
        return boxed
    if _CUED_VALUE.search(behind) is None:
        raise TakenBack
    return None


def _boxed(text: str) -> tuple[str | None, str]:
    joined: list[str] = []
    end = 0
    while (box := _BOX.search(text, end)) is not None:
        start, begins = end + 1, box.start()
        end = closing_brace(text, box.end())
        between = _BETWEEN_BOXES.fullmatch(text[start:begins]) if joined and begins - start <= _BETWEEN_MAX else None
        content = _opened(text[box.end() : end])
        joined = [*joined, content] if between is not None and len(joined) < _CANDIDATES_MAX else [content]
    if len(set(joined)) > 1:
        return " or ".join(f"${each}$" for each in joined), text[end + 1 :]
    return (joined[0], text[end + 1 :]) if joined else (None, "")


def _opened(content: str) -> str:
    """The content of a box; of one that holds nothing but a box, the inner one's.

    Raises:
        CutOff: the inner one has no closing brace.
    """
    for _ in range(_NESTED_BOXES_MAX):
        inner = _BOX.match(content.strip())
        if inner is None:
            break
        stripped = content.strip()
        end = closing_brace(stripped, inner.end())
        if end != len(stripped) - 1:
            break
        content = stripped[inner.end() : end]
    return content


def closing_brace(text: str, position: int) -> int:
    """Return where the brace opened just before `position` is closed; escaped braces do not count.

    Raises:
        CutOff: nowhere.
    """
    depth = 1
    for mark in _BRACE.finditer(text, position):
        if mark.group() == "{":
            depth += 1
        elif mark.group() == "}":
            depth -= 1
            if depth == 0:
                return mark.start()
    raise CutOff


def after_last_cue(text: str) -> str | None:
    """Return what stands in the last `<answer>` tags; else the answer of a JSON object that ends the text; else what
    follows the last `####`, or the last cue such as "the answer is", up to the end of its line or of its display.

    Raises:
        CutOff: `<answer>` was opened and not closed, or the answer is taken back.
    """
    opened, closed = text.rfind(_ANSWER_START), text.rfind(_ANSWER_END)
    if opened > closed:
        raise CutOff
    is_set_apart = opened >= 0
    if is_set_apart:
        answer, behind = text[opened + len(_ANSWER_START) : closed].strip(), text[closed + len(_ANSWER_END) :]
    elif (cued := _cued(text)) is not None:
        answer, behind = cued
    else:
        return None
    if taken_back(answer, behind, is_set_apart=is_set_apart):
        raise TakenBack
    return answer


def _cued(text: str) -> tuple[str, str] | None:
    """Return what a JSON object or a cue says, and what stands behind."""
    if (answer := _json_answer(text)) is not None:
        return answer, ""
    marker = text.rfind("####")
    ends = [cue.end() for pattern in (_CUE, _HEADING) for cue in pattern.finditer(text, max(marker, 0))]
    if marker >= 0:
        start = marker + len("####")
        begun = [each for each in (_CUE.match(text[start:].lstrip(" \t#*_")), _HEADING.match(text, marker)) if each]
        if not begun:
            return _line_or_display(text[start:])
        return _line_or_display(text[max(ends, default=start) :])
    return _line_or_display(text[max(ends) :]) if ends else None


def _line_or_display(text: str) -> tuple[str, str]:
    """The first line that says something, and what stands behind; of a display that begins there all, with what follows
    it on its line.

    Other candidates on the lines below, as `$$42$$`, then "or", then `$$43$$`, are said along: it is no single answer.
    """
    stripped = text.strip()
    answer, end = _taken(stripped, 0)
    line = answer
    for _ in range(_CANDIDATES_MAX):
        if _DANGLING.search(answer):
            start = end
        elif (joined := _OTHERWISE.match(stripped, end)) is not None:
            start, answer = joined.end(), f"{answer.rstrip('.;,')} or"
        elif (
            (last := _OPTION.match(line)) and (following := _OPTION.match(stripped, end)) and _follows(last, following)
        ):
            start, answer = end, f"{answer}\n"
        else:
            break
        if start >= len(stripped):
            break
        line, end = _taken(stripped, start)
        answer = f"{answer} {line}"
    return answer.strip(), stripped[end:]


def _follows(option: re.Match[str], another: re.Match[str]) -> bool:
    """Return whether one option is the next after another: B after A."""
    return ord(another[1]) == ord(option[1]) + 1


def _taken(text: str, position: int) -> tuple[str, int]:
    """The display or line that begins at a position, white space left out, and where it ends."""
    start = len(text) - len(text[position:].lstrip())
    for pattern in _DISPLAYS:
        match = pattern.match(text, start)
        if match is not None:
            inside = match[1]
            if "\\begin" not in inside:
                inside = inside.replace("\\\\", " ").replace("&", "")
            after = text[match.end() :].split("\n", 1)[0]
            return f"${' '.join(inside.split())}$ {after}".strip(), match.end() + len(after)
    line = text[start:].split("\n", 1)[0]
    return line.strip(), start + len(line)


def _json_answer(text: str) -> str | None:
    """The answer in a JSON object that the text ends with, as it is written there."""
    plain = text.rstrip(" \t\r\n`")
    start = plain.rfind("{")
    if not plain.endswith("}") or start < 0 or len(plain) - start > JSON_CHARACTERS_MAX:
        return None
    try:
        parsed = json.loads(plain[start:], parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        return None
    by_key = {str(key).lower().replace(" ", "_"): value for key, value in parsed.items()}
    answers = [by_key[key] for key in _ANSWER_KEYS if key in by_key]
    return answers[0].strip() if answers and isinstance(answers[0], str) else None
