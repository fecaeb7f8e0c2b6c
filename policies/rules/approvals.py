"""Approvals: in the rounds the policy names, a message waits until enough people have approved its bytes (T36)."""

from __future__ import annotations

from policies.facts import OFFERED, Facts
from policies.history import History
from policies.load import Policy
from policies.model import Approvals
from policies.rules.base import Judgement, block_of, not_applicable, rule


def asked(block: Approvals, round_number: int) -> bool:
    """Whether a message of this round waits for people. A plan has round 0 and waits if any round does."""
    if round_number <= block.first_rounds:
        return block.first_rounds > 0
    return block.then > 0 and (round_number - block.first_rounds) % block.then == 0


@rule("approvals", "APPROVAL", "lora.factors", "public.responses", "run.plan")
def approvals(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Distinct people in a named role who approved exactly this payload. The coordinator approves for nobody."""
    block, path = block_of(facts, policy)
    releasing = facts["direction"] == ("ingress" if facts["kind"] == "run.plan" else "egress")
    if block is None or not releasing or facts["stage"] == OFFERED:
        return not_applicable()
    path = (*path, "approvals")
    rules: Approvals = block.approvals
    if not asked(rules, facts["round"]):
        return Judgement("ok", 0, 0, path)
    people = {approval.person for approval in history.approvals if set(approval.roles) & set(rules.roles)}
    return Judgement("ok" if len(people) >= rules.persons else "hold", len(people), rules.persons, path)


RULES = (approvals,)
