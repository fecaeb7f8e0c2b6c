"""The partner with whom a silo exchanges knowledge: `match.directive` comes in, and `bandit.reward`, what a match was
worth to its taker, leaves."""

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
    names_of,
    none_of,
    rule,
    value_facts,
)
from policies.message import Context, Facts, Message, Requests
from policies.model import Policy

_F = FieldClass

FIELDS: FieldTable = {
    "MatchDirective": {"match": _F.NUMBER, "peer": _F.NAME, "part": frozenset({"give", "take"})},
    "BanditReward": {"match": _F.NUMBER, "value": _F.NUMBER},
}


class MatchDirective(Closed):
    """The partner to exchange knowledge with: a peer of the policy and of the plan."""


def _measure_of_directive(body: pb.MatchDirective, message: Message, context: Context) -> Facts:
    asked, plan = context.asked, context.plan
    names, at_fault = names_of([body.peer])
    return {
        "match": body.match,
        "match_is_fresh": body.match > asked.match,
        "match_repeated": asked.after(body) == asked,
        "part": body.part if body.part in ("give", "take") else "",
        "peer_in_plan": plan is not None and body.peer in plan.silos,
        "names": names,
        "names_at_fault": at_fault,
    }


@rule("match goes forward", "MATCH", "match.directive")
def match_forward(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A match is made once, and says who gives. The same directive again is its redelivery and changes nothing."""
    _, path = block_of(facts, policy)
    forward = facts["match_is_fresh"] is True or facts["match_repeated"] is True
    return holds(forward and facts["part"] != "", path, measured=facts["match"])


@rule("match is with a peer", "NOT_A_PEER", "match.directive")
def match_peer(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A silo of the plan that the policy lists, by the certificate it is enrolled with (T48)."""
    path = ("federation", "peers")
    if facts["peer_in_plan"] is not True:
        return holds(False, path)
    prefix = f"spiffe://{policy.file.federation.id}/silo/"
    return none_of(sum(prefix + name not in policy.peers for name in facts["names"]), path)


def _example_of_directive(at: Around) -> Example:
    return Example(pb.MatchDirective(match=1, peer=at.plan.silos[-1], part="take"))


class BanditReward(Closed):
    """The worth of a match to the silo that took it."""

    max_abs: NormLimit
    quantum: Quantum
    per_match: Limit


def _measure_of_worth(body: pb.BanditReward, message: Message, context: Context) -> Facts:
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
    """Finite and bounded, which also bounds what one lie is worth."""
    wrong = sum(not abs(value) <= block.max_abs for value in facts["values"]) + facts["values_at_fault"]
    return none_of(wrong, (*path, "max_abs"))


@block_rule("worth on the grid", "REWARD_GRID", "bandit.reward")
def reward_on_grid(facts: Facts, block: BanditReward, path: Path) -> Judgement:
    wrong = sum(not on_grid(value, block.quantum) for value in facts["values"]) + facts["values_at_fault"]
    return none_of(wrong, (*path, "quantum"))


PER_MATCH = limit_rule(
    "rewards per match", "PER_MATCH", "per_match", lambda facts, history: history.messages_in_match + 1
)


def _largest_of_worth(block: BanditReward, at: Figures) -> tuple[int, int]:
    return block.per_match, block.per_match * 16


def _bits_of_worth(block: BanditReward, at: Figures) -> Bits:
    points = multiples(-block.max_abs, block.max_abs, block.quantum)
    return Bits(block.per_match * math.log2(points + 1), f"for each match {block.per_match} x one of {points} values")


def _example_of_worth(at: Around) -> Example:
    taken = Requests(match=1, peer=at.plan.silos[-1], part="take")
    return Example(pb.BanditReward(match=1, value=0.0), {"asked": taken})


KINDS = (
    PolicyKind(
        "match.directive",
        _example_of_directive,
        taken=MatchDirective,
        measure=_measure_of_directive,
        rules=(match_forward, match_peer),
    ),
    PolicyKind(
        "bandit.reward",
        _example_of_worth,
        sent=BanditReward,
        measure=_measure_of_worth,
        rules=(reward_match, reward_bound, reward_on_grid, PER_MATCH),
        largest=_largest_of_worth,
        bits=_bits_of_worth,
    ),
)
