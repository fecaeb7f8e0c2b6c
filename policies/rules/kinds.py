"""Rules that several kinds of the further methods share: the set they name, how many, how large, on which grid.

What they do not stop: information in the allowed values themselves (N1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from policies.fields import MetricField
from policies.history import History
from policies.load import Policy
from policies.message import Facts
from policies.rules.base import (
    Judgement,
    Rule,
    at_most,
    block_of,
    names_pinned_set,
    none_of,
    not_applicable,
    rule,
)
from policies.rules.metrics import on_grid

_PER_STEP = ("competence.score", "competence.answers", "reward.scalar")
_PER_ROUND = (*_PER_STEP, "reft.intervention", "profile.vector", "knowledge.package")
_OF_A_SET = (
    "competence.score",
    "competence.answers",
    "knowledge.package",
    "competence.ask",
    "reward.ask",
)
_PER_DAY = ("competence.score", "competence.answers", "reward.scalar")
_ANSWERS = ("competence.answers", "knowledge.package", "reward.ask")


def limit_rule(
    name: str, reason: str, key: str, kinds: Iterable[str], measured: Callable[[Facts, History], float | None]
) -> Rule:
    """A rule that compares one number with one key of the kind's block."""

    @rule(name, reason, *kinds)
    def check(facts: Facts, policy: Policy, history: History) -> Judgement:
        block, path = block_of(facts, policy)
        return (
            not_applicable() if block is None else at_most(measured(facts, history), getattr(block, key), (*path, key))
        )

    return check


def fact(name: str) -> Callable[[Facts, History], float | None]:
    return lambda facts, _: facts[name]


def off_grid(values: Iterable[float], grid: MetricField) -> int:
    return sum(not on_grid(value, grid.quantum) for value in values)


def out_of_range(values: Iterable[float], grid: MetricField) -> int:
    return sum(not grid.min <= value <= grid.max for value in values)


@rule("pinned set", "PUBLIC_SET", *_OF_A_SET)
def pinned_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The message names the pinned set, and so does the party's own copy (T12)."""
    return names_pinned_set(facts, policy)


@rule("one message of the kind per step", "PER_STEP", *_PER_STEP)
def per_step(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return at_most(history.messages_in_step + 1, 1, path)


@rule("messages of the kind per round", "PER_ROUND", *_PER_ROUND)
def per_round(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None or path[0] != "egress":
        return not_applicable()
    return at_most(history.messages_in_round + 1, block.per_round, (*path, "per_round"))


@rule("finish reasons of answers", "FINISH", *_ANSWERS)
def finish(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return none_of(facts["finish_unspecified"], path)


RULES = (
    pinned_set,
    per_step,
    per_round,
    limit_rule(
        "scores or answers per day",
        "PER_DAY",
        "max_per_day",
        _PER_DAY,
        lambda facts, history: history.units_in_day + int(facts["units"]),
    ),
    limit_rule("scores or answers per step", "PER_STEP", "max_per_step", _PER_DAY[:2], fact("units")),
    limit_rule("bytes of one answer", "RESPONSE_BYTES", "max_bytes_per_answer", _ANSWERS[:2], fact("text_bytes_max")),
    finish,
)
