"""`competence.answers`: a silo's own answers to exemplars, where the coordinator keeps the labels."""

from __future__ import annotations

from fedsilo.protocol._generated import federation_pb2 as pb
from policies.fields import Approvals, Closed, Limit, PinnedText
from policies.grids import Bits, answer_bits, text_in_words
from policies.kind import (
    PER_DAY,
    TEXT_BYTES,
    UNITS_PER_STEP,
    Around,
    Example,
    FieldClass,
    FieldTable,
    Figures,
    PolicyKind,
    fact,
    finishes,
    in_order_asked,
    limit_rule,
    one_per_step,
    only_asked,
    pinned_set,
    row_facts,
    set_facts,
    some_per_round,
    text_facts,
)
from policies.message import Asked, Context, Facts, Message
from policies.model import HitsPerDay, ScreenNames

_F = FieldClass

FIELDS: FieldTable = {
    "ExemplarAnswer": {"exemplar": _F.NUMBER},
    "CompetenceAnswers": {"exemplar_set_sha256": _F.DIGEST},
}


class CompetenceAnswers(Closed):
    """This silo's own answers to exemplars, where the coordinator keeps the labels (`label_hidden`).

    A screen's hit refuses the message whole, and counts for the day.
    """

    set: PinnedText
    max_per_step: Limit
    max_per_day: Limit
    max_bytes_per_answer: Limit
    max_bytes_per_step: Limit
    per_round: Limit
    screens: ScreenNames = ()
    max_hits_per_day: HitsPerDay = None
    approvals: Approvals


def measure(body: pb.CompetenceAnswers, message: Message, context: Context) -> Facts:
    return {
        **set_facts(body.exemplar_set_sha256, context),
        **row_facts([row.exemplar for row in body.answers], context.asked.exemplar_rows, "questions"),
        **text_facts([row.answer for row in body.answers], context),
        "units": len(body.answers),
    }


BYTES_PER_STEP = limit_rule("bytes of answers per step", "RESPONSE_BYTES", "max_bytes_per_step", fact("payload_bytes"))


def text_bytes(block: CompetenceAnswers) -> tuple[str, int, int]:
    return "max_bytes_per_step", block.per_round * block.max_bytes_per_step, block.max_bytes_per_step


def largest(block: CompetenceAnswers, at: Figures) -> tuple[int, int]:
    return block.per_round, block.per_round * block.max_bytes_per_step


def bits(block: CompetenceAnswers, at: Figures) -> Bits:
    sizes = block.max_per_step, block.max_bytes_per_answer, block.max_bytes_per_step
    return Bits(block.per_round * answer_bits(*sizes), f"{block.per_round} x {text_in_words(*sizes)}")


def example(at: Around) -> Example:
    answers = [pb.ExemplarAnswer(exemplar=0, answer=at.answer(at.block.max_bytes_per_answer))]
    return Example(
        pb.CompetenceAnswers(exemplar_set_sha256=at.set_sha256, answers=answers),
        {"asked": Asked(step=1, exemplars={0: (0,)})},
    )


KINDS = (
    PolicyKind(
        "competence.answers",
        example,
        sent=CompetenceAnswers,
        measure=measure,
        rules=(
            pinned_set,
            one_per_step,
            some_per_round,
            PER_DAY,
            UNITS_PER_STEP,
            TEXT_BYTES,
            finishes,
            only_asked,
            in_order_asked,
            BYTES_PER_STEP,
        ),
        largest=largest,
        bits=bits,
        text_bytes=text_bytes,
    ),
)
