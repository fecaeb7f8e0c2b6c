r"""`format`: only the form counts. The reference names it: `boxed`, `number`, `choice`, `json` or `think`."""

from __future__ import annotations

import json

from fedsilo.treaty.grading import choice, numeric
from fedsilo.treaty.grading.extraction import CutOff, last_boxed, outside_thinking
from fedsilo.treaty.grading.verdict import BAD_REFERENCE, TOO_COSTLY, Verdict, judged

FORMS = ("boxed", "number", "choice", "json", "think")
JSON_CHARACTERS_MAX = 100_000


def check_reference(reference: str) -> bool:
    return reference.strip() in FORMS


def grade(response: str, reference: str) -> Verdict:
    form = reference.strip()
    if form not in FORMS:
        return BAD_REFERENCE
    if form == "json":
        return _is_json(response)
    try:
        said = outside_thinking(response)
        if form == "think":
            return judged("<think>" in response and "</think>" in response and bool(said.strip()))
        if form == "boxed":
            return judged(bool((last_boxed(said) or "").strip()))
    except CutOff:
        return judged(False)
    found = numeric.extract(response) if form == "number" else choice.extract(response)
    return judged(found is not None)


def _is_json(response: str) -> Verdict:
    if len(response) > JSON_CHARACTERS_MAX:
        return TOO_COSTLY
    try:
        json.loads(response)
    except (ValueError, RecursionError):
        return judged(False)
    return judged(True)
