"""Answers of a silo's model to exemplars that the coordinator chose: `competence.ask` comes in, `competence.score` (how
many it got right) or `competence.answers` (its own answers, where the coordinator keeps the labels) leaves.

A score is about what was asked, in its order, and about nothing else. What the rules do not stop: a coordinator that
learns from well chosen exemplars; `max_per_day` bounds how often it may ask.
"""

from __future__ import annotations

from fedsilo.protocol._generated import federation_pb2 as pb
from policies import kind as k
from policies.fields import Approvals, Closed, Limit, PinnedText, Range
from policies.grids import Bits, answer_bits, log2_states, of_steps, text_in_words
from policies.message import Context, Facts, Message, Requests
from policies.model import HitsPerDay, ScreenNames

_F = k.FieldClass
FIELDS: k.FieldTable = {
    "QuestionExemplars": {"question": _F.NUMBER, "exemplars": _F.NUMBER},
    "CompetenceAsk": {"exemplar_set_sha256": _F.DIGEST},
    "QuestionScore": {"question": _F.NUMBER, "matched": _F.NUMBER},
    "CompetenceScore": {"exemplar_set_sha256": _F.DIGEST},
    "ExemplarAnswer": {"exemplar": _F.NUMBER},
    "CompetenceAnswers": {"exemplar_set_sha256": _F.DIGEST},
}


class CompetenceAsk(Closed):
    """Exemplars by row of this silo's own copy of the set."""

    set: PinnedText
    exemplars: Range
    max_questions: Limit


def _measure_of_ask(body: pb.CompetenceAsk, message: Message, context: Context) -> Facts:
    questions = [row.question for row in body.questions]
    return {
        **k.set_facts(body.exemplar_set_sha256, context),
        **k.question_facts(questions, context),
        **k.exemplar_counts(row.exemplars for row in body.questions),
        "exemplars_not_in_set": sum(
            row >= context.public_set_rows for each in body.questions for row in each.exemplars
        ),
        "exemplars_repeated": sum(len(row.exemplars) - len(set(row.exemplars)) for row in body.questions),
    }


def _example_of_ask(at: k.Around) -> k.Example:
    question = pb.QuestionExemplars(question=0, exemplars=range(at.block.exemplars[0]))
    return k.Example(pb.CompetenceAsk(exemplar_set_sha256=at.set_sha256, questions=[question]))


class CompetenceScore(Closed):
    """The number of the exemplars that the coordinator chose this silo answers right.

    Attributes:
        exemplars: how many one score is about; few say much about each.
        max_per_step, max_per_day: scores.
    """

    set: PinnedText
    exemplars: Range
    max_per_step: Limit
    max_per_day: Limit
    per_round: Limit


def _measure_of_score(body: pb.CompetenceScore, message: Message, context: Context) -> Facts:
    asked = context.asked.exemplars
    return {
        **k.set_facts(body.exemplar_set_sha256, context),
        **k.row_facts([score.question for score in body.scores], asked, "questions"),
        **k.exemplar_counts(asked.get(score.question, ()) for score in body.scores),
        "matched_over_asked": sum(score.matched > len(asked.get(score.question, ())) for score in body.scores),
        "units": len(body.scores),
    }


MATCHED = k.zero_rule(
    "matches within the exemplars", "SCORE_RANGE", "matched_over_asked", why="A score is one of 0, 1/L, ..., 1."
)


def _largest_of_score(block: CompetenceScore, at: k.Figures) -> tuple[int, int]:
    return block.per_round, block.per_round * (block.max_per_step * 16 + 66)


def _bits_of_score(block: CompetenceScore, at: k.Figures) -> Bits:
    # each question is absent, or has one of 0..L; a message without any is none
    one = log2_states(block.exemplars[1] + 2, block.max_per_step, 0)
    because = f"{block.max_per_step} scores out of up to {block.exemplars[1]}"
    return of_steps(one, block.per_round, at.steps, because)


def _example_of_score(at: k.Around) -> k.Example:
    exemplars = at.block.exemplars[0]
    scores = [pb.QuestionScore(question=0, matched=exemplars)]
    return k.Example(
        pb.CompetenceScore(exemplar_set_sha256=at.set_sha256, scores=scores),
        {"asked": Requests(step=1, exemplars={0: tuple(range(exemplars))})},
    )


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


def _measure_of_answers(body: pb.CompetenceAnswers, message: Message, context: Context) -> Facts:
    return {
        **k.set_facts(body.exemplar_set_sha256, context),
        **k.row_facts([row.exemplar for row in body.answers], context.asked.exemplar_rows, "questions"),
        **k.text_facts([row.answer for row in body.answers], context),
        "units": len(body.answers),
    }


BYTES_PER_STEP = k.limit_rule(
    "bytes of answers per step", "RESPONSE_BYTES", "max_bytes_per_step", k.fact("payload_bytes")
)


def _text_bytes_of_answers(block: CompetenceAnswers) -> tuple[str, int, int]:
    return "max_bytes_per_step", block.per_round * block.max_bytes_per_step, block.max_bytes_per_step


def _largest_of_answers(block: CompetenceAnswers, at: k.Figures) -> tuple[int, int]:
    return block.per_round, block.per_round * block.max_bytes_per_step


def _bits_of_answers(block: CompetenceAnswers, at: k.Figures) -> Bits:
    sizes = block.max_per_step, block.max_bytes_per_answer, block.max_bytes_per_step
    return Bits(block.per_round * answer_bits(*sizes), f"{block.per_round} x {text_in_words(*sizes)}")


def _example_of_answers(at: k.Around) -> k.Example:
    answers = [pb.ExemplarAnswer(exemplar=0, answer=at.answer(at.block.max_bytes_per_answer))]
    return k.Example(
        pb.CompetenceAnswers(exemplar_set_sha256=at.set_sha256, answers=answers),
        {"asked": Requests(step=1, exemplars={0: (0,)})},
    )


KINDS = (
    k.PolicyKind(
        "competence.ask",
        _example_of_ask,
        taken=CompetenceAsk,
        measure=_measure_of_ask,
        rules=(k.pinned_set, k.exemplars_of_score, k.questions_in_set, k.QUESTIONS_ASKED),
    ),
    k.PolicyKind(
        "competence.score",
        _example_of_score,
        sent=CompetenceScore,
        measure=_measure_of_score,
        rules=(
            k.pinned_set,
            k.one_per_step,
            k.some_per_round,
            k.PER_DAY,
            k.UNITS_PER_STEP,
            k.only_asked,
            k.IN_ORDER_ASKED,
            k.exemplars_of_score,
            MATCHED,
        ),
        largest=_largest_of_score,
        bits=_bits_of_score,
    ),
    k.PolicyKind(
        "competence.answers",
        _example_of_answers,
        sent=CompetenceAnswers,
        measure=_measure_of_answers,
        rules=(
            k.pinned_set,
            k.one_per_step,
            k.some_per_round,
            k.PER_DAY,
            k.UNITS_PER_STEP,
            k.TEXT_BYTES,
            k.FINISHES,
            k.only_asked,
            k.IN_ORDER_ASKED,
            BYTES_PER_STEP,
        ),
        largest=_largest_of_answers,
        bits=_bits_of_answers,
        text_bytes=_text_bytes_of_answers,
    ),
)
