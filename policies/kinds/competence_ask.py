"""`competence.ask`: the coordinator asks about exemplars, by row of the silo's own copy of the set."""

from __future__ import annotations

from fedsilo.protocol._generated import federation_pb2 as pb
from policies.fields import Closed, Limit, PinnedText, Range
from policies.kind import (
    QUESTIONS_ASKED,
    Around,
    Example,
    FieldClass,
    FieldTable,
    PolicyKind,
    exemplar_counts,
    exemplars_of_score,
    pinned_set,
    question_facts,
    questions_in_set,
    set_facts,
)
from policies.message import Context, Facts, Message

_F = FieldClass

FIELDS: FieldTable = {
    "QuestionExemplars": {"question": _F.NUMBER, "exemplars": _F.NUMBER},
    "CompetenceAsk": {"exemplar_set_sha256": _F.DIGEST},
}


class CompetenceAsk(Closed):
    """Exemplars by row of this silo's own copy of the set."""

    set: PinnedText
    exemplars: Range
    max_questions: Limit


def measure(body: pb.CompetenceAsk, message: Message, context: Context) -> Facts:
    questions = [row.question for row in body.questions]
    return {
        **set_facts(body.exemplar_set_sha256, context),
        **question_facts(questions, context),
        **exemplar_counts(row.exemplars for row in body.questions),
        "exemplars_not_in_set": sum(
            row >= context.public_set_rows for each in body.questions for row in each.exemplars
        ),
        "exemplars_repeated": sum(len(row.exemplars) - len(set(row.exemplars)) for row in body.questions),
    }


def example(at: Around) -> Example:
    question = pb.QuestionExemplars(question=0, exemplars=range(at.block.exemplars[0]))
    return Example(pb.CompetenceAsk(exemplar_set_sha256=at.set_sha256, questions=[question]))


KINDS = (
    PolicyKind(
        "competence.ask",
        example,
        taken=CompetenceAsk,
        measure=measure,
        rules=(pinned_set, exemplars_of_score, questions_in_set, QUESTIONS_ASKED),
    ),
)
