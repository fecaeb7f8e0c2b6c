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

# A policy may allow numbers up to 2 to the 53: what is beyond these is bounded, not computed.
_EXACT_BITS = 512
_EXACT_COUNT = 4096
_EXACT_SUM = 64


def kind_rows(policy: Policy) -> Iterator[Row]:
    """One row for each of these kinds that the policy names."""
    egress, plan = policy.file.egress, policy.file.ingress.run_plan
    steps = plan.local_steps[1] if plan else 0
    if score := egress.competence_score:
        # each question is absent, or has one of 0..L; a message without any is none
        bits = _log2_states(score.exemplars[1] + 2, score.max_per_step, 0)
        because = f"{score.max_per_step} scores out of up to {score.exemplars[1]}"
        yield _of_steps("competence.score", bits, score.per_round, steps, because)
    if answers := egress.competence_answers:
        yield "competence.answers", answers.per_round * _answer_bits(answers), f"{answers.per_round} x {_text(answers)}"
    if scalar := egress.reward_scalar:
        points = points_of(scalar.values)
        abstains = scalar.abstain == "allowed"
        questions, candidates = scalar.max_questions_per_step, scalar.max_candidates_per_question
        if (long := candidates * math.log2(max(1, points))) > _EXACT_BITS:
            bits = questions * long
        else:
            bits = _log2_states(1 + abstains + points**candidates, questions)
        because = f"{questions} questions with up to {candidates} rewards of {points} values"
        yield _of_steps("reward.scalar", bits, scalar.per_round, steps, because)
    if profile := egress.profile_vector:
        points = points_of(profile.values)
        shares = _log2_choices(profile.parts + profile.bins - 1, profile.bins - 1) if profile.bins else 0.0
        histograms = f"{round(2**shares)}" if shares < 53 else f"2^{shares:.1f}"
        because = f"{profile.families} families, {profile.dynamic} figures of {points} values, {histograms} histograms"
        bits = math.log2(profile.families) + profile.dynamic * math.log2(max(1, points)) + shares
        bits = bits if bits > _EXACT_BITS else math.log2(2**bits + 1)  # or no message
        yield "profile.vector", profile.per_round * bits, f"{profile.per_round} x {because}"
    if bandit := egress.bandit_reward:
        points = _multiples(-bandit.max_abs, bandit.max_abs, bandit.quantum)
        kind, bits, _ = _of_round("bandit.reward", points, bandit.per_match, "")
        yield kind, bits, f"for each match {bandit.per_match} x one of {points} values"
    if package := egress.knowledge_package:
        yield "knowledge.package", package.per_round * _package_bits(package), f"{package.per_round} x {_text(package)}"
    if reft := egress.reft_intervention:
        yield _reft(reft)


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


def _of_steps(kind: str, bits: float, messages: int, steps: int, because: str) -> Row:
    """At most one message a step and `messages` a round. Which steps go without, where there are more, counts too.

    `bits`: in what one step says, or does not.
    """
    sent = min(messages, steps)
    chosen = 0.0
    if steps > messages:
        if steps <= _EXACT_COUNT or sent <= _EXACT_SUM:
            chosen = math.log2(sum(math.comb(steps, count) for count in range(sent + 1)))
        else:
            # the bound holds for the sum as well, up to half of the steps
            chosen = _entropy_bits(steps, sent) if 2 * sent <= steps else float(steps)
    return kind, sent * bits + chosen, f"{sent} x {because}"


def _log2_states(base: int, power: int, more: int = 1) -> float:
    """log2 of base to the power, and of so many more states; these are lost in a float where the power is long."""
    bits = power * math.log2(max(1, base))
    return bits if bits > _EXACT_BITS else math.log2(base**power + more)


def _log2_choices(of: int, chosen: int) -> float:
    """log2 of the binomial coefficient; of a bound above it, where both numbers are long."""
    few = min(chosen, of - chosen)
    return math.log2(math.comb(of, few)) if few <= _EXACT_COUNT else _entropy_bits(of, few)


def _entropy_bits(of: int, chosen: int) -> float:
    """The entropy of their ratio times `of`: no binomial coefficient has more bits. 0 < chosen < of."""
    rest = of - chosen
    return chosen * math.log2(of / chosen) + rest * math.log2(of / rest)


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
