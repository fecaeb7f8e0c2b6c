"""Rules on what goes from silo to silo, and on what a matchmaker may know (methods 3, threats T9, T15, T21, T48).

What they do not stop: private text that the model repeats in an answer (N2), where no text screen is named.
"""

from __future__ import annotations

from policies.history import History
from policies.load import Policy
from policies.message import Facts
from policies.model_kinds import KnowledgePackage, PackageIn
from policies.rules.base import (
    Judgement,
    at_least,
    at_most,
    block_of,
    equal,
    holds,
    none_of,
    not_applicable,
    rule,
    side_of,
)
from policies.rules.kinds import fact, limit_rule, off_grid, out_of_range
from policies.rules.metrics import on_grid

# ---- profile.vector --------------------------------------------------------------------------------


@rule("profile shape", "PROFILE_SHAPE", "profile.vector")
def profile_shape(facts: Facts, policy: Policy, history: History) -> Judgement:
    """As many figures and bins as the policy says, and a family among its number."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    for key in ("dynamic", "bins"):
        if facts[key] != getattr(block, key):
            return equal(facts[key], getattr(block, key), (*path, key))
    return at_most(facts["family"], block.families - 1, (*path, "families"))


@rule("profile range", "PROFILE_RANGE", "profile.vector")
def profile_range(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return none_of(out_of_range(facts["values"], block.values) + facts["values_at_fault"], (*path, "values"))


@rule("profile grid", "PROFILE_GRID", "profile.vector")
def profile_grid(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return none_of(off_grid(facts["values"], block.values) + facts["values_at_fault"], (*path, "values", "quantum"))


@rule("histogram adds up", "HISTOGRAM", "profile.vector")
def histogram(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Whole parts of one whole: no bin says how many records there are."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return equal(facts["parts"], block.parts if block.bins else 0, (*path, "parts"))


@rule("records behind the profile", "MIN_RECORDS", "profile.vector")
def profile_records(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Only the site knows how many it has, and the number does not cross the wire."""
    block, path = block_of(facts, policy)
    if block is None or facts["direction"] != "egress":
        return not_applicable()
    return at_least(facts["usable_records"], block.min_records, (*path, "min_records"))


# ---- a match ---------------------------------------------------------------------------------------


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


@rule("reward of the open match", "MATCH", "bandit.reward")
def reward_match(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The taker of the last match reports on it, and on no other."""
    _, path = block_of(facts, policy)
    return holds(facts["match_is_open"] is True and facts["part"] == "take", path)


@rule("worth of a match", "REWARD_RANGE", "bandit.reward")
def reward_bound(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Finite and bounded, which also bounds what one lie is worth (methods 3.6)."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    wrong = sum(not abs(value) <= block.max_abs for value in facts["values"]) + facts["values_at_fault"]
    return none_of(wrong, (*path, "max_abs"))


@rule("worth on the grid", "REWARD_GRID", "bandit.reward")
def reward_on_grid(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    wrong = sum(not on_grid(value, block.quantum) for value in facts["values"]) + facts["values_at_fault"]
    return none_of(wrong, (*path, "quantum"))


# ---- knowledge.package -----------------------------------------------------------------------------


def _with_a_peer(block: KnowledgePackage | PackageIn) -> tuple[bool, str, str]:
    """(whether a peer is at the other end, the key that says so, the part that this silo has in the match)."""
    if isinstance(block, PackageIn):
        return block.origin == "peer", "origin", "take"
    return block.receiver == "peer", "receiver", "give"


@rule("package of the open match", "MATCH", "knowledge.package")
def package_match(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The last match, in the part this silo has in it; none where the coordinator is at the other end."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    matched, key, part = _with_a_peer(block)
    if not matched:
        return equal(facts["match"], 0, (*path, key))
    return holds(facts["match_is_open"] is True and facts["part"] == part, (*path, key), measured=facts["match"])


@rule("package to or from the matched peer", "NOT_A_PEER", "knowledge.package")
def package_peer(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The matched peer and no other; nobody is named where the coordinator is at the other end."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    matched, key, _ = _with_a_peer(block)
    if not matched:
        return none_of(len(facts["names"]) + facts["names_at_fault"], (*path, key))
    return holds(facts["peer_is_matched"], (*path, key))


@rule("package prompts", "PROMPT_NOT_PUBLIC", "knowledge.package")
def package_prompts(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Rows of the transfer set, each once."""
    _, path = block_of(facts, policy)
    return none_of(facts["prompts_not_in_set"] + facts["prompts_repeated"], (*path, "set"))


@rule("package in order", "PROMPT_ORDER", "knowledge.package")
def package_order(facts: Facts, policy: Policy, history: History) -> Judgement:
    """By row, so that the order says nothing (T9)."""
    _, path = block_of(facts, policy)
    return none_of(facts["prompts_out_of_order"], path)


@rule("package confidence", "CONFIDENCE", "knowledge.package")
def confidence(facts: Facts, policy: Policy, history: History) -> Judgement:
    """In range and on the grid; none at all where the policy has no grid for it."""
    block, path = block_of(facts, policy)
    if block is None or side_of(facts, policy) == "ingress":
        return not_applicable()
    path = (*path, "confidence")
    if block.confidence is None:
        return none_of(facts["confidences"], path)
    wrong = out_of_range(facts["values"], block.confidence) + off_grid(facts["values"], block.confidence)
    return none_of(wrong + facts["values_at_fault"], path)


RULES = (
    profile_shape,
    profile_range,
    profile_grid,
    histogram,
    profile_records,
    match_forward,
    match_peer,
    reward_match,
    reward_bound,
    reward_on_grid,
    limit_rule(
        "rewards per match",
        "PER_MATCH",
        "per_match",
        ["bandit.reward"],
        lambda facts, history: history.messages_in_match + 1,
    ),
    package_match,
    package_peer,
    package_prompts,
    package_order,
    limit_rule("entries of a package", "ENTRIES", "max_entries", ["knowledge.package"], fact("prompts")),
    limit_rule("bytes of a package", "RESPONSE_BYTES", "max_bytes", ["knowledge.package"], fact("payload_bytes")),
    confidence,
)
