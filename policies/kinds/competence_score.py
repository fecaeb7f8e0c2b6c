"""`competence.score`: how many of the exemplars that the coordinator chose a silo answers right.

A score is about what was asked, in its order, and about nothing else. What the rules do not stop: a coordinator that
learns from well chosen exemplars; `max_per_day` bounds how often it may ask (methods 4.9).
"""

from __future__ import annotations

from fedsilo.protocol._generated import federation_pb2 as pb
from policies.fields import Closed, Limit, PinnedText, Range
from policies.grids import Bits, log2_states, of_steps
from policies.history import History
from policies.kind import (
    PER_DAY,
    UNITS_PER_STEP,
    Around,
    Example,
    FieldClass,
    FieldTable,
    Figures,
    Judgement,
    PolicyKind,
    block_of,
    exemplar_counts,
    exemplars_of_score,
    in_order_asked,
    none_of,
    one_per_step,
    only_asked,
    pinned_set,
    row_facts,
    rule,
    set_facts,
    some_per_round,
)
from policies.message import Asked, Context, Facts, Message
from policies.model import Policy

_F = FieldClass

FIELDS: FieldTable = {
    "QuestionScore": {"question": _F.NUMBER, "matched": _F.NUMBER},
    "CompetenceScore": {"exemplar_set_sha256": _F.DIGEST},
}


class CompetenceScore(Closed):
    """How many of the exemplars that the coordinator chose this silo answers right.

    Attributes:
        exemplars: how many one score is about; few say much about each (methods 4.9).
        max_per_step, max_per_day: scores.
    """

    set: PinnedText
    exemplars: Range
    max_per_step: Limit
    max_per_day: Limit
    per_round: Limit


def measure(body: pb.CompetenceScore, message: Message, context: Context) -> Facts:
    asked = context.asked.exemplars
    return {
        **set_facts(body.exemplar_set_sha256, context),
        **row_facts([score.question for score in body.scores], asked, "questions"),
        **exemplar_counts(asked.get(score.question, ()) for score in body.scores),
        "matched_over_asked": sum(score.matched > len(asked.get(score.question, ())) for score in body.scores),
        "units": len(body.scores),
    }


@rule("matches within the exemplars", "SCORE_RANGE", "competence.score")
def matched(facts: Facts, policy: Policy, history: History) -> Judgement:
    """A score is one of 0, 1/L, ..., 1."""
    _, path = block_of(facts, policy)
    return none_of(facts["matched_over_asked"], path)


def largest(block: CompetenceScore, at: Figures) -> tuple[int, int]:
    return block.per_round, block.per_round * (block.max_per_step * 16 + 66)


def bits(block: CompetenceScore, at: Figures) -> Bits:
    # each question is absent, or has one of 0..L; a message without any is none
    one = log2_states(block.exemplars[1] + 2, block.max_per_step, 0)
    because = f"{block.max_per_step} scores out of up to {block.exemplars[1]}"
    return of_steps(one, block.per_round, at.steps, because)


def example(at: Around) -> Example:
    exemplars = at.block.exemplars[0]
    scores = [pb.QuestionScore(question=0, matched=exemplars)]
    return Example(
        pb.CompetenceScore(exemplar_set_sha256=at.set_sha256, scores=scores),
        {"asked": Asked(step=1, exemplars={0: tuple(range(exemplars))})},
    )


KINDS = (
    PolicyKind(
        "competence.score",
        example,
        sent=CompetenceScore,
        measure=measure,
        rules=(
            pinned_set,
            one_per_step,
            some_per_round,
            PER_DAY,
            UNITS_PER_STEP,
            only_asked,
            in_order_asked,
            exemplars_of_score,
            matched,
        ),
        largest=largest,
        bits=bits,
    ),
)
