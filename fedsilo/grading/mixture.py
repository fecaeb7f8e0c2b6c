"""A verifier that is a weighted mixture: `math*0.9+format*0.1`, or `{math: 0.9, format: 0.1}` in a file.

    mixture    PART or PART+PART...          part    NAME, NAME*WEIGHT, format:FORM, format:FORM*WEIGHT

Weights are positive and sum to 1. The reward is the sum of the weights of the parts that say correct, so it lies
between 0 and 1. **Correct is what the first part says**, alone: donors, counts of correct answers and everything else
that takes rewards to be 0 or 1 goes by that, and the other parts only shape what the learner gets. A `format` in a
mixture takes no word of the reference, which belongs to the first part.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsilo.grading import format as form_verifier
from fedsilo.grading.verdict import Verdict
from fedsilo.protocol.errors import UsageError

PARTS_MAX = 8
SUM_TOLERANCE = 1e-9  # 0.7 + 0.2 + 0.1 is not 1 in floats
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_PART = re.compile(rf"(?P<name>{_NAME.pattern})(?::(?P<form>[a-z]+))?(?:\*(?P<weight>\d*\.?\d+))?")


@dataclass(frozen=True)
class Part:
    """One verifier of a mixture; `form` is empty but for `format`."""

    verifier: str
    weight: float
    form: str = ""


def parse(name: str) -> tuple[Part, ...]:
    """The parts of a verifier's name; of a plain name that one, with weight 1.

    Raises:
        UsageError: the text is no mixture, or its weights are none.
    """
    texts = [text.strip() for text in name.split("+")]
    matches = [_PART.fullmatch(text) for text in texts]
    is_mixture = len(texts) > 1
    parts = []
    for text, match in zip(texts, matches, strict=True):
        if match is None or (is_mixture and match["weight"] is None):
            raise _wrong(name, f"{text!r} is not NAME*WEIGHT" if is_mixture else "no such name")
        form = match["form"] or ""
        if form and (match["name"] != "format" or form not in form_verifier.FORMS):
            raise _wrong(name, f"only format takes a form, one of {', '.join(form_verifier.FORMS)}")
        if match["name"] == "format" and is_mixture:
            form = form or form_verifier.DEFAULT_FORM
        parts.append(Part(match["name"], float(match["weight"] or 1), form))
    if len(parts) > PARTS_MAX or len({(part.verifier, part.form) for part in parts}) != len(parts):
        raise _wrong(name, f"at most {PARTS_MAX} parts, each once")
    if any(part.weight <= 0 for part in parts) or abs(math.fsum(part.weight for part in parts) - 1) > SUM_TOLERANCE:
        raise _wrong(name, "the weights must be positive and sum to 1")
    return tuple(parts)


def name_of(weights: Mapping[str, float]) -> str:
    """The name of a mixture that a file gives as a mapping, in its order: the first is the main one.

    Raises:
        UsageError: as `parse`.
    """
    name = "+".join(f"{verifier}*{weight:.12g}" for verifier, weight in weights.items())
    parse(name)
    return name


def mixed(parts: Sequence[Part], verdicts: Sequence[Verdict]) -> Verdict:
    """Combine the parts' verdicts: correct as the first says, the reward by weight."""
    if len(parts) == 1:
        return verdicts[0]
    reward = math.fsum(part.weight * verdict.reward for part, verdict in zip(parts, verdicts, strict=True))
    return Verdict(verdicts[0].correct, verdicts[0].code, min(1.0, reward))


def _wrong(name: str, why: str) -> UsageError:
    return UsageError(f"unknown verifier {name!r}: {why}", hint="as in: math*0.9+format*0.1")
