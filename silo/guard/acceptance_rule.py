"""Whether a global adapter does worse on this site's own prompts than the last accepted one (T20, T52). Pure.

Both answer the same prompts with the same random numbers. A drop counts that is larger than the site's limit and whose
95 % interval (`silo.report.benefit.difference_interval`: paired by prompt, groups as clusters) lies below zero. Where
there is no drop that happens in at most one of forty measurements; how small a drop such prompts show 4 times in 5 is
`detectable`. Too few prompts, or groups, hold the adapter as well: a gate that cannot judge does not let in.

Does not stop: a backdoor whose trigger stands in none of these prompts; a loss below the limit in each of many rounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from fedsilo.protocol.errors import OperationError
from silo.config import Acceptance
from silo.report.benefit import CONFIDENCE, POWER, difference_interval, student_quantile

Outcome = Literal["no_drop", "drop", "too_few"]
REASONS: Mapping[Outcome, str] = {"drop": "HOLDOUT_DROP", "too_few": "HOLDOUT_TOO_FEW"}
DIGITS = 6


@dataclass(frozen=True)
class Verdicts:
    """One adapter, one set. groups: [P] number of each prompt's cluster; correct: [P] right answers of `samples`."""

    groups: tuple[int, ...]
    correct: tuple[int, ...]
    samples: int

    @staticmethod
    def parse(body: bytes | memoryview, samples: int) -> Verdicts:
        """What the trainer says. Raises OperationError: it does not parse."""
        try:
            told = json.loads(bytes(body))
            groups, correct = (tuple(told[name]) for name in ("groups", "correct"))
            if len(groups) != len(correct) or any(type(each) is not int for each in (*groups, *correct)):
                raise ValueError("lists of different lengths, or of more than numbers")
            if any(not 0 <= count <= samples for count in correct) or any(not 0 <= each < 1 << 31 for each in groups):
                raise ValueError("more right answers than answers, or no number of a group")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OperationError(f"the trainer's verdicts do not parse: {error}", code="TRAINER_CONFUSED") from error
        return Verdicts(groups, correct, samples)

    def same_prompts(self, other: Verdicts) -> bool:
        """As far as this process can see: it knows no prompt."""
        return (self.groups, self.samples) == (other.groups, other.samples)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Verdicts:
        return Verdicts(tuple(value["groups"]), tuple(value["correct"]), int(value["samples"]))


def judge(before: Verdicts, after: Verdicts, limits: Acceptance) -> dict[str, Any]:
    """One set, as JSON: {"outcome", "prompts", "before", "after", "difference", "interval", "detectable"}.

    Args:
        before: the last accepted adapter.
        after: the one that comes in, on the same prompts.
        limits: the site's.
    """
    one, other = (np.array(each.correct, dtype=float) / each.samples for each in (before, after))  # [P]
    prompts = len(one)
    spread = difference_interval(other - one, np.array(after.groups)) if prompts else None
    outcome: Outcome = "no_drop"
    detectable = None
    mean = float((other - one).mean()) if prompts else 0.0
    if spread is None or prompts < limits.prompts_min:
        outcome, spread = "too_few", None
    else:
        reach = student_quantile(0.5 + CONFIDENCE / 2.0, spread.degrees) + student_quantile(POWER, spread.degrees)
        # what is found must lie beyond the limit, too
        detectable = round(min(1.0, max(limits.drop_max, reach * spread.standard_error)), DIGITS)
        if spread.high < 0 and mean < -limits.drop_max:
            outcome = "drop"
    return {
        "outcome": outcome,
        "prompts": prompts,
        "before": round(float(one.mean()), DIGITS) if prompts else 0.0,
        "after": round(float(other.mean()), DIGITS) if prompts else 0.0,
        "difference": round(mean, DIGITS),
        "interval": None if spread is None else [round(spread.low, DIGITS), round(spread.high, DIGITS)],
        "detectable": detectable,
    }


def sentence(name: str, found: Mapping[str, Any], limits: Acceptance) -> str:
    """What was found on one set, in words for the site's people."""
    where = "private holdout" if name == "private" else "held-out set"
    if found["outcome"] == "too_few":
        return (
            f"{where}: {found['prompts']} prompts are too few to say anything (acceptance.prompts_min is "
            f"{limits.prompts_min})"
        )
    low, high = found["interval"]
    shown = (
        f"{100 * found['before']:.1f} % right before, {100 * found['after']:.1f} % with it: "
        f"{100 * found['difference']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}] on {found['prompts']} prompts"
    )
    limit = f"limit -{100 * limits.drop_max:.1f}, a true drop of {100 * found['detectable']:.1f} shows 4 times in 5"
    return f"{where}: {shown}, {limit}" + ("; this is a drop" if found["outcome"] == "drop" else "")
