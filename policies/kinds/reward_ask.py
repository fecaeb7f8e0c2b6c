"""`reward.ask`: the coordinator asks for scores of candidate answers to questions, by row of the silo's own copy."""

from __future__ import annotations

from fedsilo.protocol._generated import federation_pb2 as pb
from policies.fields import Closed, Limit, PinnedText
from policies.history import History
from policies.kind import (
    CANDIDATES_PER_QUESTION,
    QUESTIONS_ASKED,
    Around,
    Example,
    FieldClass,
    FieldTable,
    Judgement,
    PolicyKind,
    block_of,
    fact,
    finishes,
    limit_rule,
    none_of,
    pinned_set,
    question_facts,
    questions_in_set,
    rule,
    set_facts,
    text_facts,
)
from policies.message import Context, Facts, Message
from policies.model import Policy, TextOnlyNames

_F = FieldClass

FIELDS: FieldTable = {
    "QuestionCandidates": {"question": _F.NUMBER},
    "RewardAsk": {"question_set_sha256": _F.DIGEST},
}


class RewardAsk(Closed):
    """Questions by row, and candidate answers to judge."""

    set: PinnedText
    max_questions: Limit
    max_candidates_per_question: Limit
    max_bytes_per_candidate: Limit
    screens: TextOnlyNames = ()


def measure(body: pb.RewardAsk, message: Message, context: Context) -> Facts:
    return {
        **set_facts(body.question_set_sha256, context),
        **question_facts([row.question for row in body.questions], context),
        **text_facts([candidate for row in body.questions for candidate in row.candidates], context),
        "candidates_max": max((len(row.candidates) for row in body.questions), default=0),
        "candidates_repeated": sum(
            len(row.candidates) - len({candidate.text for candidate in row.candidates}) for row in body.questions
        ),
    }


@rule("candidates differ", "CANDIDATES", "reward.ask")
def candidates_differ(facts: Facts, policy: Policy, history: History) -> Judgement:
    """One candidate twice asks twice for one reward."""
    _, path = block_of(facts, policy)
    return none_of(facts["candidates_repeated"], path)


CANDIDATE_BYTES = limit_rule(
    "bytes of one candidate", "RESPONSE_BYTES", "max_bytes_per_candidate", fact("text_bytes_max")
)


def example(at: Around) -> Example:
    candidates = [at.answer(at.block.max_bytes_per_candidate)]
    question = pb.QuestionCandidates(question=0, candidates=candidates)
    return Example(pb.RewardAsk(question_set_sha256=at.set_sha256, questions=[question]))


KINDS = (
    PolicyKind(
        "reward.ask",
        example,
        taken=RewardAsk,
        measure=measure,
        rules=(
            pinned_set,
            finishes,
            CANDIDATES_PER_QUESTION,
            questions_in_set,
            candidates_differ,
            QUESTIONS_ASKED,
            CANDIDATE_BYTES,
        ),
    ),
)
