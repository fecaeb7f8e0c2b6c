"""The partner with whom a silo exchanges knowledge: `match.directive` comes in, and `bandit.reward`, what a match was
worth to its taker, leaves."""

from __future__ import annotations

import math

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies.fields import Closed, Limit, NormLimit, Quantum
from policies.grids import Bits, multiples, on_grid
from policies.history import History
from policies.message import Context, Facts, Message, Requests
from policies.model import Policy

_F = k.FieldClass
FIELDS: k.FieldTable = {
    "MatchDirective": {"match": _F.NUMBER, "peer": _F.NAME, "part": frozenset({"give", "take"})},
    "BanditReward": {"match": _F.NUMBER, "value": _F.NUMBER},
}


class MatchDirective(Closed):
    """The partner to exchange knowledge with: a peer of the policy and of the plan."""


def _measure_of_directive(body: pb.MatchDirective, message: Message, context: Context) -> Facts:
    asked, plan = context.asked, context.plan
    names, at_fault = k.names_of([body.peer])
    return {
        "match": body.match,
        "match_is_fresh": body.match > asked.match,
        "match_repeated": asked.after(body) == asked,
        "part": body.part if body.part in ("give", "take") else "",
        "peer_in_plan": plan is not None and body.peer in plan.silos,
        "names": names,
        "names_at_fault": at_fault,
    }


@k.facts_rule("match goes forward", "MATCH", "match.directive")
def match_forward(facts: Facts, path: Path) -> k.Judgement:
    """A match is made once, and says who gives. The same directive again is its redelivery and changes nothing."""
    forward = facts["match_is_fresh"] is True or facts["match_repeated"] is True
    return k.holds(forward and facts["part"] != "", path, measured=facts["match"])


@k.rule("match is with a peer", "NOT_A_PEER", "match.directive")
def match_peer(facts: Facts, policy: Policy, history: History) -> k.Judgement:
    """A silo of the plan that the policy lists, by the certificate it is enrolled with (T48)."""
    path = ("federation", "peers")
    if facts["peer_in_plan"] is not True:
        return k.holds(False, path)
    return k.none_of(k.strangers(facts, policy), path)


def _example_of_directive(at: k.Around) -> k.Example:
    return k.Example(pb.MatchDirective(match=1, peer=at.plan.silos[-1], part="take"))


class BanditReward(Closed):
    """The worth of a match to the silo that took it."""

    max_abs: NormLimit
    quantum: Quantum
    per_match: Limit


def _measure_of_worth(body: pb.BanditReward, message: Message, context: Context) -> Facts:
    asked = context.asked
    return {
        **k.value_facts([body.value]),
        "match": body.match,
        "match_is_open": asked.match > 0 and body.match == asked.match,
        "part": asked.part,
    }


@k.facts_rule("reward of the open match", "MATCH", "bandit.reward")
def reward_match(facts: Facts, path: Path) -> k.Judgement:
    """The taker of the last match reports on it, and on no other."""
    return k.holds(facts["match_is_open"] is True and facts["part"] == "take", path)


@k.block_rule("worth of a match", "REWARD_RANGE", "bandit.reward")
def reward_bound(facts: Facts, block: BanditReward, path: Path) -> k.Judgement:
    """Finite and bounded, which also bounds what one lie is worth."""
    wrong = sum(not abs(value) <= block.max_abs for value in facts["values"]) + facts["values_at_fault"]
    return k.none_of(wrong, (*path, "max_abs"))


@k.block_rule("worth on the grid", "REWARD_GRID", "bandit.reward")
def reward_on_grid(facts: Facts, block: BanditReward, path: Path) -> k.Judgement:
    wrong = sum(not on_grid(value, block.quantum) for value in facts["values"]) + facts["values_at_fault"]
    return k.none_of(wrong, (*path, "quantum"))


PER_MATCH = k.limit_rule(
    "rewards per match", "PER_MATCH", "per_match", lambda facts, history: history.messages_in_match + 1
)


def _largest_of_worth(block: BanditReward, at: k.Figures) -> tuple[int, int]:
    return block.per_match, block.per_match * 16


def _bits_of_worth(block: BanditReward, at: k.Figures) -> Bits:
    points = multiples(-block.max_abs, block.max_abs, block.quantum)
    return Bits(block.per_match * math.log2(points + 1), f"for each match {block.per_match} x one of {points} values")


def _example_of_worth(at: k.Around) -> k.Example:
    taken = Requests(match=1, peer=at.plan.silos[-1], part="take")
    return k.Example(pb.BanditReward(match=1, value=0.0), {"asked": taken})


KINDS = (
    k.PolicyKind(
        "match.directive",
        _example_of_directive,
        taken=MatchDirective,
        measure=_measure_of_directive,
        rules=(match_forward, match_peer),
    ),
    k.PolicyKind(
        "bandit.reward",
        _example_of_worth,
        sent=BanditReward,
        measure=_measure_of_worth,
        rules=(reward_match, reward_bound, reward_on_grid, PER_MATCH),
        largest=_largest_of_worth,
        bits=_bits_of_worth,
    ),
)
