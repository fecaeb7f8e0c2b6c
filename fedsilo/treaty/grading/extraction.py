"""Where in a response its final answer stands (policy 1 of the shared grading examples). Every scan is linear."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_NESTED_BOXES_MAX = 8
_CUE = re.compile(
    r"(?:final\s+answer|correct\s+(?:answer|option|choice)|answer|option|choice)"
    r"(?:\s+(?:is|are|would\s+be|must\s+be|equals)\b\s*:?|\s*[:=])\s*",
    re.IGNORECASE,
)
_ANSWER_START, _ANSWER_END = "<answer>", "</answer>"
_THINKING_END = "</think>"
_THINKING_START = "<think>"


class CutOff(Exception):  # not an error of ours: the response ends inside its box or its thinking
    """The response was cut off before its answer was complete."""


def outside_thinking(response: str) -> str:
    """What stands after the last `</think>`.

    Raises:
        CutOff: thinking was begun and never ended.
    """
    _, separator, after = response.rpartition(_THINKING_END)
    said = after if separator else response
    if _THINKING_START in said:
        raise CutOff
    return said


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`; a box that holds nothing but a box is opened too.

    Returns:
        None when there is no box.

    Raises:
        CutOff: a box has no closing brace.
    """
    content: str | None = None
    start = 0
    while (found := _BOX.search(text, start)) is not None:
        start = closing_brace(text, found.end())
        content = text[found.end() : start]
    for _ in range(_NESTED_BOXES_MAX):
        inner = _BOX.match(content.strip()) if content is not None else None
        if content is None or inner is None:
            break
        stripped = content.strip()
        end = closing_brace(stripped, inner.end())
        if end != len(stripped) - 1:
            break
        content = stripped[inner.end() : end]
    return content


def closing_brace(text: str, position: int) -> int:
    """Where the brace opened just before `position` is closed; escaped braces do not count.

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
    """What stands in the last `<answer>` tags; else what follows the last `####`, or the last cue such as "the answer
    is", up to the end of its line.

    Raises:
        CutOff: `<answer>` was opened and not closed.
    """
    opened, closed = text.rfind(_ANSWER_START), text.rfind(_ANSWER_END)
    if opened > closed:
        raise CutOff
    if opened >= 0:
        return text[opened + len(_ANSWER_START) : closed].strip()
    _, separator, after = text.rpartition("####")
    if not separator:
        ends = [cue.end() for cue in _CUE.finditer(text)]
        if not ends:
            return None
        after = text[ends[-1] :]
    lines = after.strip().splitlines()
    return lines[0].strip() if lines else ""
