"""`match.directive`: with whom a silo exchanges knowledge."""

from __future__ import annotations

from fedsilo.protocol._generated import federation_pb2 as pb
from policies.fields import Closed
from policies.history import History
from policies.kind import (
    Around,
    Example,
    FieldClass,
    FieldTable,
    Judgement,
    PolicyKind,
    block_of,
    holds,
    names_of,
    none_of,
    rule,
)
from policies.message import Context, Facts, Message
from policies.model import Policy

_F = FieldClass

FIELDS: FieldTable = {
    "MatchDirective": {"match": _F.NUMBER, "peer": _F.NAME, "part": frozenset({"give", "take"})},
}


class MatchDirective(Closed):
    """With whom to exchange knowledge: a peer of the policy and of the plan."""


def measure(body: pb.MatchDirective, message: Message, context: Context) -> Facts:
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


def example(at: Around) -> Example:
    return Example(pb.MatchDirective(match=1, peer=at.plan.silos[-1], part="take"))


KINDS = (
    PolicyKind("match.directive", example, taken=MatchDirective, measure=measure, rules=(match_forward, match_peer)),
)
