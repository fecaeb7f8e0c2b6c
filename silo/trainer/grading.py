"""How the trainer asks for verdicts: a callable, so that a killable child process or a plain function may answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# (text of an answer, reference) pairs -> whether each is correct, in order.
Grader = Callable[[Sequence[tuple[str, str]]], Sequence[bool]]


def grade_distinct(grader: Grader, pairs: Sequence[tuple[str, str]]) -> list[bool]:
    """Verdict of every pair; equal pairs, common among K answers to one prompt, are graded once."""
    distinct = list(dict.fromkeys(pairs))
    verdicts = dict(zip(distinct, grader(distinct), strict=True)) if distinct else {}
    return [verdicts[pair] for pair in pairs]
