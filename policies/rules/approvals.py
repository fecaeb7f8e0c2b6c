"""Approvals: in the rounds the policy names, a message waits until enough people have approved its bytes (T36).

Rounds are counted by what this party has released, not by the number in the envelope: that is the coordinator's choice.
"""

from __future__ import annotations

from fedsilo.protocol.kinds import KINDS
from policies.fields import Approvals
from policies.history import History
from policies.load import Policy
from policies.message import OFFERED, Facts
from policies.rules.base import Judgement, block_of, not_applicable, rule


def asked(block: Approvals, ordinal: int) -> bool:
    """Whether the message of the run's `ordinal`-th round with such a message waits for people; counted from 1."""
    return ordinal <= block.first_rounds or (block.then > 0 and ordinal % block.then == 0)


@rule("approvals", "APPROVAL", *(name for name, kind in KINDS.items() if kind.held))
def approvals(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Distinct people in a named role who approved exactly this payload. The coordinator approves for nobody."""
    block, path = block_of(facts, policy)
    releasing = facts["direction"] == ("ingress" if facts["kind"] == "run.plan" else "egress")
    if block is None or not releasing or facts["stage"] == OFFERED:
        return not_applicable()
    path = (*path, "approvals")
    rules: Approvals = block.approvals
    if facts["kind"] == "run.plan":
        # One plan stands for all rounds of its run.
        waits = rules.first_rounds > 0 or rules.then > 0
    else:
        waits = asked(rules, history.rounds_released + 1)
    if not waits:
        return Judgement("ok", 0, 0, path)
    people = {approval.person for approval in history.approvals if set(approval.roles) & set(rules.roles)}
    return Judgement("ok" if len(people) >= rules.persons else "hold", len(people), rules.persons, path, least=True)


RULES = (approvals,)
