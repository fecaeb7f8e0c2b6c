"""Rules on scores: right or wrong by prompt, competence by question, rewards by candidate (methods 4, T9, T12, T19).

A score is about what the coordinator asked, in its order, and about nothing else. What they do not stop: a coordinator
that learns a stored answer by asking about candidates (methods 4.9); max_per_day bounds how often it may ask.
"""

from __future__ import annotations

from policies.history import History
from policies.load import Policy
from policies.message import Facts
from policies.rules.base import (
    Judgement,
    block_of,
    none_of,
    not_applicable,
    rule,
    within,
)
from policies.rules.kinds import fact, limit_rule, off_grid, out_of_range

_ASKED = ("competence.score", "competence.answers", "reward.scalar")
_ASKS = ("competence.ask", "reward.ask")


# ---- about what was asked --------------------------------------------------------------------------


@rule("only what was asked", "NOT_ASKED", *_ASKED)
def asked(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Questions or exemplars that the coordinator named for this step, each once."""
    _, path = block_of(facts, policy)
    return none_of(facts["questions_not_asked"] + facts["questions_repeated"], path)


@rule("in the order asked", "QUESTION_ORDER", *_ASKED)
def asked_order(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The order is the coordinator's, so that none is left to say something with (T9)."""
    _, path = block_of(facts, policy)
    return none_of(facts["questions_out_of_order"], path)


@rule("exemplars behind a score", "EXEMPLARS", "competence.score", "competence.ask")
def exemplars(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Not so few that a score is about one of them, not so many that it has many values."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    path = (*path, "exemplars")
    least = within(facts["exemplars_min"], block.exemplars, path)
    return least if least.outcome == "deny" else within(facts["exemplars_max"], block.exemplars, path)


@rule("matches within the exemplars", "SCORE_RANGE", "competence.score")
def matched(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A score is one of 0, 1/L, ..., 1."""
    _, path = block_of(facts, policy)
    return none_of(facts["matched_over_asked"], path)


# ---- reward.scalar ---------------------------------------------------------------------------------


@rule("a reward for each candidate", "CANDIDATES", "reward.scalar")
def candidates(facts: Facts, policy: Policy, history: History) -> Judgement:
    """As many as the coordinator sent; none where the silo abstains."""
    _, path = block_of(facts, policy)
    return none_of(facts["candidates_not_asked"] + facts["abstained_with_rewards"], path)


@rule("abstaining", "ABSTAIN", "reward.scalar")
def abstaining(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None or block.abstain == "allowed":
        return not_applicable()
    return none_of(facts["abstained"], (*path, "abstain"))


@rule("reward range", "REWARD_RANGE", "reward.scalar")
def reward_range(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return none_of(out_of_range(facts["values"], block.values) + facts["values_at_fault"], (*path, "values"))


@rule("reward grid", "REWARD_GRID", "reward.scalar")
def reward_grid(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Finite, no -0 and on the grid, so that no digits are free (T9)."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return none_of(off_grid(facts["values"], block.values) + facts["values_at_fault"], (*path, "values", "quantum"))


# ---- what the coordinator asks ---------------------------------------------------------------------


@rule("questions are rows of the set", "PROMPT_NOT_PUBLIC", *_ASKS)
def questions_in_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    """By row of this silo's own copy, each once: no text of a question crosses (T12)."""
    _, path = block_of(facts, policy)
    wrong = facts["questions_not_in_set"] + facts["questions_repeated"]
    return none_of(wrong + facts.get("exemplars_not_in_set", 0) + facts.get("exemplars_repeated", 0), (*path, "set"))


@rule("candidates differ", "CANDIDATES", "reward.ask")
def candidates_differ(facts: Facts, policy: Policy, history: History) -> Judgement:
    """One candidate twice asks twice for one reward."""
    _, path = block_of(facts, policy)
    return none_of(facts["candidates_repeated"], path)


RULES = (
    asked,
    asked_order,
    exemplars,
    matched,
    limit_rule(
        "bytes of answers per step",
        "RESPONSE_BYTES",
        "max_bytes_per_step",
        ["competence.answers"],
        fact("payload_bytes"),
    ),
    candidates,
    abstaining,
    reward_range,
    reward_grid,
    limit_rule("questions per step", "QUESTIONS", "max_questions_per_step", ["reward.scalar"], fact("questions")),
    limit_rule(
        "candidates per question",
        "CANDIDATES",
        "max_candidates_per_question",
        ["reward.scalar", "reward.ask"],
        fact("candidates_max"),
    ),
    questions_in_set,
    candidates_differ,
    limit_rule("questions asked", "QUESTIONS", "max_questions", _ASKS, fact("questions")),
    limit_rule(
        "bytes of one candidate", "RESPONSE_BYTES", "max_bytes_per_candidate", ["reward.ask"], fact("text_bytes_max")
    ),
)
