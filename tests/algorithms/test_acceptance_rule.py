"""When a global adapter counts as doing worse on a site's own prompts (T52): how often it is held without a drop, how
often one of the size that is said to show does, and figures by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedsilo.protocol.errors import OperationError
from silo.config import Acceptance
from silo.guard.acceptance import Verdicts, judge, sentence

LIMITS = Acceptance(samples=1, drop_max=0.0, prompts_min=30)


def verdicts(correct: object, samples: int = 1) -> Verdicts:
    right = np.asarray(correct).astype(int)
    return Verdicts(tuple(range(len(right))), tuple(right.tolist()), samples)


def held(seed: int, drop: float, prompts: int = 200, trials: int = 400) -> tuple[float, float]:
    """(share of pairs that are held, mean of `detectable`): half of the prompts stay as they are, others are drawn anew
    with a lower rate."""
    random = np.random.default_rng(seed)
    outcomes, detectable = [], []
    for _ in range(trials):
        before, again = random.random(prompts) < 0.6, random.random(prompts) < 0.5
        after = np.where(again, before, random.random(prompts) < 0.6 - 2 * drop)
        found = judge(verdicts(before), verdicts(after), LIMITS)
        outcomes.append(found.outcome == "drop")
        detectable.append(found.detectable)
    return float(np.mean(outcomes)), float(np.mean(detectable))


def test_T52_without_a_drop_at_most_one_in_forty_is_held_and_a_detectable_one_four_times_in_five() -> None:
    false, detectable = held(1, 0.0)
    # 2.5 % of 400 and three standard errors of that: 0.0234
    assert false <= 0.025 + 0.0234
    true, _ = held(2, detectable)
    # three standard errors of 0.8 in 400 are 0.06; the drop changes the spread itself a little
    assert abs(true - 0.8) < 0.1


def test_T52_a_drop_within_the_limit_is_no_drop_and_one_beyond_it_is() -> None:
    before = verdicts(np.ones(100))
    after = verdicts(np.arange(100) >= 20)  # 20 points fewer
    tight, wide = (Acceptance(drop_max=limit) for limit in (0.19, 0.2))
    found = judge(before, after, tight)
    assert (found.outcome, found.before, found.after, found.difference) == ("drop", 1.0, 0.8, -0.2)
    assert "100.0 % right before, 80.0 % with it: -20.0 points" in sentence("private", found, tight)
    assert judge(before, after, wide).outcome == "no_drop" == judge(after, before, tight).outcome


@pytest.mark.parametrize(
    ("groups", "outcome"), [(range(40), "drop"), ([0] * 40, "too_few"), ([0, *[1] * 39], "too_few")]
)
def test_T52_prompts_of_one_group_count_once(groups: list[int], outcome: str) -> None:
    """Forty prompts of one patient say nothing about others."""
    before, after = (Verdicts(tuple(groups), (right,) * 40, 1) for right in (1, 0))
    assert judge(before, after, LIMITS).outcome == outcome


def test_T52_nothing_measured_is_too_few() -> None:
    assert judge(verdicts([]), verdicts([]), LIMITS).outcome == "too_few"


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"groups": [0]}', b'{"groups": [0], "correct": [2]}', b'{"groups": [0], "correct": [-1]}',
     b'{"groups": [0, 1], "correct": [1]}', b'{"groups": ["x"], "correct": [1]}',
     b'{"groups": [0], "correct": [Infinity]}', b'{"groups": [0], "correct": [true]}',
     b'{"groups": [%d], "correct": [1]}' % 10**30, b'{"groups": 3, "correct": 3}', b"[" * 100_000],
)  # fmt: skip
def test_T52_a_trainers_verdicts_that_cannot_be_are_refused(body: bytes) -> None:
    with pytest.raises(OperationError):
        Verdicts.parse(body, 1)
    assert Verdicts.parse(b'{"groups": [0], "correct": [1]}', 1) == verdicts([1])
