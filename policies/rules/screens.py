"""Rules on what text screens found in the texts of a message (threats T14 to T18, T21).

A screen's hit is counted, never quoted: a fact is a code of a closed list and a number. What they do not stop: private
text in words that no screen knows (N3), and a trainer that lies about the corpus its overlap index is made of (N1).
"""

from __future__ import annotations

from fedsilo.protocol.kinds import TEXT_KINDS_OUT
from policies import screening
from policies.history import History
from policies.load import Policy
from policies.message import OFFERED, Facts
from policies.rules.base import Judgement, Outcome, at_most, block_of, holds, none_of, not_applicable, rule


@rule("screens ran", "SCREEN_FAILED", *screening.TEXT_KINDS)
def screens_ran(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Each screen that the policy names ran over every text, with the settings that stand in this very policy."""
    block, path = block_of(facts, policy)
    names = screening.asked(block, facts["kind"], facts["direction"])
    if not names or facts["stage"] == OFFERED:
        return not_applicable()
    settings = {name: screening.settings_of(policy.file, name) for name in names}
    lacking = sum(not digest or facts["screens"].get(name) != digest for name, digest in settings.items())
    return none_of(lacking, (*path, "screens"))


@rule("screen hits", "SCREEN_HIT", *screening.TEXT_KINDS)
def screen_hits(facts: Facts, policy: Policy, history: History) -> Judgement:
    """No hit in what goes out or is let in, or, with on_hit hold, persons who have approved exactly these bytes.

    Only responses can be held: of them a hit can be one of many, and a person can look at it.
    """
    block, path = block_of(facts, policy)
    if not screening.asked(block, facts["kind"], facts["direction"]) or facts["stage"] == OFFERED:
        return not_applicable()
    hits = facts["responses_hit"]
    if facts["direction"] == "ingress" or getattr(block, "on_hit", "withhold") == "withhold":
        return none_of(hits, (*path, "screens"))
    if hits == 0:
        return Judgement("ok", 0, 0, (*path, "on_hit"))
    asked = block.approvals
    people = {approval.person for approval in history.approvals if set(approval.roles) & set(asked.roles)}
    outcome: Outcome = "ok" if len(people) >= asked.persons else "hold"
    return Judgement(outcome, len(people), asked.persons, (*path, "on_hit"), least=True)


@rule("screen hits per day", "SCREEN_HALT", *TEXT_KINDS_OUT)
def hits_per_day(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Beyond the day's hits the kind is halted, so that nobody asks the screens about the private corpus (T18)."""
    block, path = block_of(facts, policy)
    if facts["direction"] != "egress" or not screening.asked(block, facts["kind"], facts["direction"]):
        return not_applicable()
    path = (*path, "max_hits_per_day")
    if history.screen_halted is not False:
        return holds(False, path, measured="halted", limit="released by persons")
    return at_most(history.screen_hits_in_day, block.max_hits_per_day, path)


RULES = (screens_ran, screen_hits, hits_per_day)
