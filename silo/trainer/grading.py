"""How the trainer asks for verdicts: a callable, so that a killable child process or a plain function may answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from silo.trainer.scale_out import Processes


class Mark(NamedTuple):
    """What one answer got.

    Attributes:
        correct: counts, donors and pass@1 go by this.
        reward: 0 to 1; what the learner gets. Only a mixture of verifiers gives others than 0 and 1.
    """

    correct: bool
    reward: float


# (text of an answer, reference) pairs -> what each got, in order. A plain bool is a mark whose reward is 0 or 1.
Grader = Callable[[Sequence[tuple[str, str]]], Sequence[Mark | bool]]


def mark_of(said: Mark | bool) -> Mark:
    return said if isinstance(said, Mark) else Mark(bool(said), float(said))


def grade_distinct(grader: Grader, pairs: Sequence[tuple[str, str]]) -> list[Mark]:
    """Mark of every pair; equal pairs, common among K answers to one prompt, are graded once."""
    distinct = list(dict.fromkeys(pairs))
    marks = dict(zip(distinct, map(mark_of, grader(distinct)), strict=True)) if distinct else {}
    return [marks[pair] for pair in pairs]


def shared_grader(grader: Grader, group: Processes) -> Grader:
    """Each process grades every so many-th answer; all get all verdicts, and so the same ones."""

    def grade(pairs: Sequence[tuple[str, str]]) -> list[Mark]:
        mine = list(pairs)[group.rank :: group.size]
        shares = group.gather([mark_of(each) for each in group.together(lambda: grader(mine) if mine else [])])
        # JSON brings a mark back as a list
        return [Mark(*shares[place % group.size][place // group.size]) for place in range(len(pairs))]

    return grade
