"""`bandit.reward`: what a match was worth to its taker."""

from __future__ import annotations

import math

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.strict_yaml import Path
from policies.fields import Closed, Limit, NormLimit, Quantum
from policies.grids import Bits, multiples, on_grid
from policies.history import History
from policies.kind import (
    Around,
    Example,
    FieldClass,
    FieldTable,
    Figures,
    Judgement,
    PolicyKind,
    block_of,
    block_rule,
    holds,
    limit_rule,
    none_of,
    rule,
    value_facts,
)
from policies.message import Asked, Context, Facts, Message
from policies.model import Policy

_F = FieldClass

FIELDS: FieldTable = {
    "BanditReward": {"match": _F.NUMBER, "value": _F.NUMBER},
}


class BanditReward(Closed):
    """What a match was worth to its taker."""

    max_abs: NormLimit
    quantum: Quantum
    per_match: Limit


def measure(body: pb.BanditReward, message: Message, context: Context) -> Facts:
    asked = context.asked
    return {
        **value_facts([body.value]),
        "match": body.match,
        "match_is_open": asked.match > 0 and body.match == asked.match,
        "part": asked.part,
    }


@rule("reward of the open match", "MATCH", "bandit.reward")
def reward_match(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The taker of the last match reports on it, and on no other."""
    _, path = block_of(facts, policy)
    return holds(facts["match_is_open"] is True and facts["part"] == "take", path)


@block_rule("worth of a match", "REWARD_RANGE", "bandit.reward")
def reward_bound(facts: Facts, block: BanditReward, path: Path) -> Judgement:
    """Finite and bounded, which also bounds what one lie is worth (methods 3.6)."""
    wrong = sum(not abs(value) <= block.max_abs for value in facts["values"]) + facts["values_at_fault"]
    return none_of(wrong, (*path, "max_abs"))


@block_rule("worth on the grid", "REWARD_GRID", "bandit.reward")
def reward_on_grid(facts: Facts, block: BanditReward, path: Path) -> Judgement:
    wrong = sum(not on_grid(value, block.quantum) for value in facts["values"]) + facts["values_at_fault"]
    return none_of(wrong, (*path, "quantum"))


PER_MATCH = limit_rule(
    "rewards per match", "PER_MATCH", "per_match", lambda facts, history: history.messages_in_match + 1
)


def largest(block: BanditReward, at: Figures) -> tuple[int, int]:
    return block.per_match, block.per_match * 16


def bits(block: BanditReward, at: Figures) -> Bits:
    points = multiples(-block.max_abs, block.max_abs, block.quantum)
    return Bits(block.per_match * math.log2(points + 1), f"for each match {block.per_match} x one of {points} values")


def example(at: Around) -> Example:
    taken = Asked(match=1, peer=at.plan.silos[-1], part="take")
    return Example(pb.BanditReward(match=1, value=0.0), {"asked": taken})


KINDS = (
    PolicyKind(
        "bandit.reward",
        example,
        sent=BanditReward,
        measure=measure,
        rules=(reward_match, reward_bound, reward_on_grid, PER_MATCH),
        largest=largest,
        bits=bits,
    ),
)
