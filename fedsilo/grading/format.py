r"""`format`: only the form counts, not what is said in it.

    tags     `<think>...</think>` and then `<answer>...</answer>`, each once, and nothing else
    think    thinking that ends, once, and something behind it
             a response may begin inside its thinking, where the prompt's template has opened `<think>` already
    boxed    a box that is not empty           number, choice    one can be read
    json     the whole response is JSON

The reference may name a form; any other reference, such as the answer itself, stands for `tags`. As a part of a
mixture (`math*0.9+format*0.1`, `format:boxed`) the form stands in the name.
"""

from __future__ import annotations

import json
import re

from fedsilo.grading import choice, numeric
from fedsilo.grading.extraction import CutOff, last_boxed, outside_thinking
from fedsilo.grading.verdict import BAD_REFERENCE, TOO_COSTLY, Verdict, judged

FORMS = ("tags", "think", "boxed", "number", "choice", "json")
DEFAULT_FORM = FORMS[0]
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
JSON_CHARACTERS_MAX = 100_000


def check_reference(reference: str) -> bool:
    return bool(reference.strip())


def grade(response: str, reference: str) -> Verdict:
    if not check_reference(reference):
        return BAD_REFERENCE
    form = reference.strip() if reference.strip() in FORMS else DEFAULT_FORM
    if form == "tags":
        return judged(_is_tagged(response))
    if form == "json":
        return _is_json(response)
    try:
        answer = outside_thinking(response)
        if form == "think":
            return judged(_thinking_ends(response) and bool(answer.strip()))
        if form == "boxed":
            return judged(bool((last_boxed(answer) or "").strip()))
    except CutOff:
        return judged(False)
    extracted = numeric.extract(response) if form == "number" else choice.extract(response)
    return judged(extracted is not None)


def _thinking_ends(response: str) -> bool:
    """Return whether there is one end of thinking, with something before it, and no start but at the very beginning."""
    before, end, after = response.partition("</think>")
    thought = before.strip().removeprefix("<think>")
    return bool(end) and bool(thought.strip()) and not any(tag in thought + after for tag in _TAGS[:2])


def _is_tagged(response: str) -> bool:
    whole = response.strip()
    if not _thinking_ends(whole) or any(whole.count(tag) != 1 for tag in _TAGS[1:]):
        return False
    end, opened, closed = (whole.index(tag) for tag in _TAGS[1:])
    if not end < opened < closed or closed + len(_TAGS[3]) != len(whole):
        return False
    between = whole[end + len(_TAGS[1]) : opened]
    return not between.strip() and bool(re.search(r"\S", whole[opened + len(_TAGS[2]) : closed]))


def _is_json(response: str) -> Verdict:
    if len(response) > JSON_CHARACTERS_MAX:
        return TOO_COSTLY
    try:
        json.loads(response)
    except (ValueError, RecursionError):
        return judged(False)
    return judged(True)
