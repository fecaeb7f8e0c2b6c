"""Bits in the kinds of further methods, counted: how many messages of a kind the rules let a trainer choose between.

Where the rules leave nothing else free the count is exact (small grids are enumerated in tests/policies); for text and
tensors it is an upper bound, as in policies/capacity.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from policies.fields import MetricField
from policies.grids import grid_points
from policies.load import Policy
from policies.model_kinds import CompetenceAnswers, KnowledgePackage, ReftIntervention

Row = tuple[str, float, str]  # kind, bits in one round, the numbers it is made of


def kind_rows(policy: Policy) -> Iterator[Row]:
    """One row for each of these kinds that the policy names."""
    egress, plan = policy.file.egress, policy.file.ingress.run_plan
    steps = plan.local_steps[1] if plan else 0
    if rewards := egress.public_rewards:
        # each prompt is absent, or has 0 to K rewards
        states = 2 ** ((rewards.samples_per_prompt + 1) * rewards.max_prompts_per_step)
        because = f"{rewards.max_prompts_per_step} prompts with up to {rewards.samples_per_prompt} rewards"
        yield _of_steps("public.rewards", states, rewards.per_round, steps, because)
    if score := egress.competence_score:
        # each question is absent, or has one of 0..L; a message without any is none
        states = (score.exemplars[1] + 2) ** score.max_per_step - 1
        because = f"{score.max_per_step} scores out of up to {score.exemplars[1]}"
        yield _of_steps("competence.score", states, score.per_round, steps, because)
    if answers := egress.competence_answers:
        yield "competence.answers", answers.per_round * _answer_bits(answers), f"{answers.per_round} x {_text(answers)}"
    if scalar := egress.reward_scalar:
        points = points_of(scalar.values)
        abstains = scalar.abstain == "allowed"
        one = 1 + abstains + points**scalar.max_candidates_per_question
        because = (
            f"{scalar.max_questions_per_step} questions with up to {scalar.max_candidates_per_question} rewards "
            f"of {points} values"
        )
        yield _of_steps("reward.scalar", one**scalar.max_questions_per_step, scalar.per_round, steps, because)
    if profile := egress.profile_vector:
        points = points_of(profile.values)
        histograms = math.comb(profile.parts + profile.bins - 1, profile.bins - 1) if profile.bins else 1
        because = f"{profile.families} families, {profile.dynamic} figures of {points} values, {histograms} histograms"
        yield _of_round(
            "profile.vector", profile.families * points**profile.dynamic * histograms, profile.per_round, because
        )
    if bandit := egress.bandit_reward:
        points = _multiples(-bandit.max_abs, bandit.max_abs, bandit.quantum)
        kind, bits, _ = _of_round("bandit.reward", points, bandit.per_match, "")
        yield kind, bits, f"for each match {bandit.per_match} x one of {points} values"
    if package := egress.knowledge_package:
        yield "knowledge.package", package.per_round * _package_bits(package), f"{package.per_round} x {_text(package)}"
    if reft := egress.reft_intervention:
        yield _reft(reft)
    if drift := egress.diag_drift:
        states = math.prod(points_of(grid) + 1 for grid in drift.fields.values())
        yield _of_round("diag.drift", states, drift.per_round, f"{len(drift.fields)} figures, each on its grid")
    if count := egress.count_examples:
        points = points_of(count.values)
        yield _of_round("count.examples", points, count.per_round, f"one of {points} numbers")


def points_of(grid: MetricField) -> int:
    """Multiples of the quantum from min to max."""
    return _multiples(grid.min, grid.max, grid.quantum)


def _multiples(low: float, high: float, quantum: float) -> int:
    """As decimals, the way a policy spells them; never less than 0."""
    step = Fraction(repr(float(quantum)))
    first, last = math.ceil(Fraction(repr(float(low))) / step), math.floor(Fraction(repr(float(high))) / step)
    return max(0, last - first + 1)


def _of_round(kind: str, states: int, messages: int, because: str) -> Row:
    """At most `messages` at one place, each in one of `states`: none, one, two, ..."""
    return kind, messages * math.log2(states + 1), f"{messages} x {because}"


def _of_steps(kind: str, states: int, messages: int, steps: int, because: str) -> Row:
    """At most one message a step and `messages` a round. Which steps go without, where there are more, counts too."""
    sent = min(messages, steps)
    chosen = sum(math.comb(steps, count) for count in range(sent + 1)) if steps > messages else 1
    return kind, sent * math.log2(states + 1) + math.log2(chosen), f"{sent} x {because}"


def _text(block: CompetenceAnswers | KnowledgePackage) -> str:
    entries, size = _entries(block)
    return f"{size} bytes of text in at most {entries} answers"


def _entries(block: CompetenceAnswers | KnowledgePackage) -> tuple[int, int]:
    """(answers in a message, bytes of text in it)"""
    if isinstance(block, KnowledgePackage):
        entries, size = block.max_entries, block.max_bytes
    else:
        entries, size = block.max_per_step, block.max_bytes_per_step
    return entries, min(size, entries * block.max_bytes_per_answer)


def _answer_bits(block: CompetenceAnswers | KnowledgePackage) -> float:
    entries, size = _entries(block)
    # which are absent, where one ends and the next begins, and how each finished
    return 8 * size + entries * math.log2((block.max_bytes_per_answer + 1) * 2 + 1)


def _package_bits(block: KnowledgePackage) -> float:
    confidences = 1 + (points_of(block.confidence) if block.confidence else 0)
    return _answer_bits(block) + block.max_entries * math.log2(confidences)


def _reft(block: ReftIntervention) -> Row:
    places = len(block.layers) * len(block.groups)
    free = places * (block.rank * block.width + block.rank)  # W and b
    rotations = places * block.rank * block.width
    free_bits = math.log2(grid_points(min(block.max_tensor_l2, block.max_l2), block.dtype))
    # a row of R has length 1 within the tolerance, so none of its values is larger
    row_bits = math.log2(grid_points(math.sqrt(1 + block.max_orthonormality_error), block.dtype))
    because = f"{free} values of {free_bits:.1f} bits and {rotations} of {row_bits:.1f} ({block.dtype})"
    return (
        "reft.intervention",
        block.per_round * (free * free_bits + rotations * row_bits),
        f"{block.per_round} x {because}",
    )
