"""Scores of candidate answers: `reward.ask` comes in, by row of the silo's own copy of the set, and `reward.scalar`
leaves.

What the rules do not stop: a coordinator that learns a stored answer by asking about candidates.
"""

from __future__ import annotations

import math

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies.fields import Closed, Grid, Limit, Permission, PinnedText
from policies.grids import EXACT_BITS, Bits, log2_states, lowest, of_steps, points_of
from policies.message import Context, Facts, Message, Requests
from policies.model import TextOnlyNames

_F = k.FieldClass
FIELDS: k.FieldTable = {
    "QuestionCandidates": {"question": _F.NUMBER},
    "RewardAsk": {"question_set_sha256": _F.DIGEST},
    "QuestionRewards": {"question": _F.NUMBER, "rewards": _F.NUMBER, "abstained": _F.NUMBER},
    "RewardScalar": {},
}


class RewardAsk(Closed):
    """Questions by row, and candidate answers to judge."""

    set: PinnedText
    max_questions: Limit
    max_candidates_per_question: Limit
    max_bytes_per_candidate: Limit
    screens: TextOnlyNames = ()


def _measure_of_ask(body: pb.RewardAsk, message: Message, context: Context) -> Facts:
    return {
        **k.set_facts(body.question_set_sha256, context),
        **k.question_facts([row.question for row in body.questions], context),
        **k.text_facts([candidate for row in body.questions for candidate in row.candidates], context),
        "candidates_max": max((len(row.candidates) for row in body.questions), default=0),
        "candidates_repeated": sum(
            len(row.candidates) - len({candidate.text for candidate in row.candidates}) for row in body.questions
        ),
    }


CANDIDATES_DIFFER = k.zero_rule(
    "candidates differ",
    "CANDIDATES",
    "candidates_repeated",
    why="One candidate twice asks twice for one reward.",
)
CANDIDATE_BYTES = k.limit_rule(
    "bytes of one candidate", "RESPONSE_BYTES", "max_bytes_per_candidate", k.fact("text_bytes_max")
)


def _example_of_ask(at: k.Around) -> k.Example:
    candidates = [at.answer(at.block.max_bytes_per_candidate)]
    question = pb.QuestionCandidates(question=0, candidates=candidates)
    return k.Example(pb.RewardAsk(question_set_sha256=at.set_sha256, questions=[question]))


class RewardScalar(Closed):
    """Scores of candidate answers. Whether one came from a stored answer or from a model is no field of it.

    Attributes:
        max_per_day: scores, over all questions: who may ask without end can search for a stored answer.
        abstain: whether a silo may say that it cannot judge a question.
    """

    values: Grid
    max_questions_per_step: Limit
    max_candidates_per_question: Limit
    max_per_day: Limit
    abstain: Permission
    per_round: Limit


def _measure_of_scalar(body: pb.RewardScalar, message: Message, context: Context) -> Facts:
    asked = context.asked.candidates
    rewards = [row for row in body.questions if not row.abstained]
    return {
        **k.row_facts([row.question for row in body.questions], asked, "questions"),
        **k.value_facts(value for row in body.questions for value in row.rewards),
        "candidates_max": max((len(row.rewards) for row in body.questions), default=0),
        "candidates_not_asked": sum(len(row.rewards) != asked.get(row.question, -1) for row in rewards),
        "abstained": len(body.questions) - len(rewards),
        "abstained_with_rewards": sum(row.abstained and len(row.rewards) > 0 for row in body.questions),
        "units": sum(len(row.rewards) for row in body.questions),
    }


@k.facts_rule("a reward for each candidate", "CANDIDATES", "reward.scalar")
def candidates(facts: Facts, path: Path) -> k.Judgement:
    """Judge the number of rewards: as many as the coordinator sent candidates; none where the silo abstains."""
    return k.none_of(facts["candidates_not_asked"] + facts["abstained_with_rewards"], path)


@k.block_rule("abstaining", "ABSTAIN", "reward.scalar")
def abstaining(facts: Facts, block: RewardScalar, path: Path) -> k.Judgement:
    if block.abstain == "allowed":
        return k.not_applicable()
    return k.none_of(facts["abstained"], (*path, "abstain"))


REWARD_RANGE = k.range_rule("reward range", "REWARD_RANGE")
REWARD_GRID = k.grid_rule("reward grid", "REWARD_GRID")
QUESTIONS_PER_STEP = k.limit_rule("questions per step", "QUESTIONS", "max_questions_per_step", k.fact("questions"))


def _largest_of_scalar(block: RewardScalar, at: k.Figures) -> tuple[int, int]:
    size = block.max_questions_per_step * (block.max_candidates_per_question * 8 + 24)
    return block.per_round, block.per_round * size


def _bits_of_scalar(block: RewardScalar, at: k.Figures) -> Bits:
    points = points_of(block.values)
    abstains = block.abstain == "allowed"
    questions, candidates = block.max_questions_per_step, block.max_candidates_per_question
    if (long := candidates * math.log2(max(1, points))) > EXACT_BITS:
        one = questions * long
    else:
        one = log2_states(1 + abstains + points**candidates, questions)
    because = f"{questions} questions with up to {candidates} rewards of {points} values"
    return of_steps(one, block.per_round, at.steps, because)


def _example_of_scalar(at: k.Around) -> k.Example:
    body = pb.RewardScalar(questions=[pb.QuestionRewards(question=0, rewards=[lowest(at.block.values)])])
    return k.Example(body, {"asked": Requests(step=1, candidates={0: 1})})


KINDS = (
    k.PolicyKind(
        "reward.ask",
        _example_of_ask,
        taken=RewardAsk,
        measure=_measure_of_ask,
        rules=(
            k.pinned_set,
            k.FINISHES,
            k.CANDIDATES_PER_QUESTION,
            k.questions_in_set,
            CANDIDATES_DIFFER,
            k.QUESTIONS_ASKED,
            CANDIDATE_BYTES,
        ),
    ),
    k.PolicyKind(
        "reward.scalar",
        _example_of_scalar,
        sent=RewardScalar,
        measure=_measure_of_scalar,
        rules=(
            k.one_per_step,
            k.some_per_round,
            k.PER_DAY,
            k.only_asked,
            k.IN_ORDER_ASKED,
            candidates,
            abstaining,
            REWARD_RANGE,
            REWARD_GRID,
            QUESTIONS_PER_STEP,
            k.CANDIDATES_PER_QUESTION,
        ),
        largest=_largest_of_scalar,
        bits=_bits_of_scalar,
    ),
)
