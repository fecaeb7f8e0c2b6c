"""Facts of the kinds that methods beside PubSwap send and take in (methods 7.1, 7.3): numbers, counts, digests.

A list of values is kept as the values that occur, sorted: no rule needs more, and which of them belongs to which
question stays out of the log.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from google.protobuf.message import Message as ProtobufMessage

from fedsilo.protocol._generated import federation_pb2 as pb
from policies.catalogue import digest_of, names_of
from policies.facts_text import text_facts
from policies.message import Context, Facts, Message

VALUES_MAX = 256


def kind_facts(message: Message, context: Context) -> Facts:
    """Facts of one of these kinds; nothing for any other."""
    measure = _MEASURES.get(type(message.body))
    return {} if measure is None else measure(message.body, message, context)


def _values(values: Iterable[float]) -> Facts:
    """The values that occur, and how many are none that could be judged."""
    found: set[float] = set()
    at_fault = 0
    for value in values:
        if _is_plain(value) and (value in found or len(found) < VALUES_MAX):
            found.add(value)
        else:
            at_fault += 1
    return {"values": sorted(found), "values_at_fault": at_fault}


def _is_plain(value: float) -> bool:
    """Finite, and not -0.0, which equals 0.0 but is another bit pattern (T9)."""
    return math.isfinite(value) and not (value == 0 and math.copysign(1.0, value) < 0)


def _rows(rows: Sequence[int], asked: Sequence[int] | Mapping[int, object], name: str) -> Facts:
    """Whether rows are among those asked for, each once, in the order asked."""
    place = {row: position for position, row in enumerate(asked)}
    places = [place[row] for row in rows if row in place]
    return {
        name: len(rows),
        f"{name}_not_asked": len(rows) - len(places),
        f"{name}_repeated": len(rows) - len(set(rows)),
        f"{name}_out_of_order": sum(later < earlier for earlier, later in itertools.pairwise(places)),
    }


def _answers(responses: list[pb.Response], context: Context) -> Facts:
    return text_facts(responses, context)


def _sets(header: str, context: Context) -> Facts:
    """The set that a message names, and the party's own copy."""
    return {"header_set_sha256": digest_of(header), "public_set_sha256": context.public_set_sha256}


def _exemplar_counts(exemplars: Iterable[Sequence[int]]) -> Facts:
    counts = [len(rows) for rows in exemplars]
    return {"exemplars_min": min(counts, default=0), "exemplars_max": max(counts, default=0)}


# ---- a silo sends ----------------------------------------------------------------------------------


def _competence_score(body: pb.CompetenceScore, message: Message, context: Context) -> Facts:
    asked = context.asked.exemplars
    return {
        **_sets(body.exemplar_set_sha256, context),
        **_rows([score.question for score in body.scores], asked, "questions"),
        **_exemplar_counts(asked.get(score.question, ()) for score in body.scores),
        "matched_over_asked": sum(score.matched > len(asked.get(score.question, ())) for score in body.scores),
        "units": len(body.scores),
    }


def _competence_answers(body: pb.CompetenceAnswers, message: Message, context: Context) -> Facts:
    return {
        **_sets(body.exemplar_set_sha256, context),
        **_rows([row.exemplar for row in body.answers], context.asked.exemplar_rows, "questions"),
        **_answers([row.answer for row in body.answers], context),
        "units": len(body.answers),
    }


def _reward_scalar(body: pb.RewardScalar, message: Message, context: Context) -> Facts:
    asked = context.asked.candidates
    rewards = [row for row in body.questions if not row.abstained]
    return {
        **_rows([row.question for row in body.questions], asked, "questions"),
        **_values(value for row in body.questions for value in row.rewards),
        "candidates_max": max((len(row.rewards) for row in body.questions), default=0),
        "candidates_not_asked": sum(len(row.rewards) != asked.get(row.question, -1) for row in rewards),
        "abstained": len(body.questions) - len(rewards),
        "abstained_with_rewards": sum(row.abstained and len(row.rewards) > 0 for row in body.questions),
        "units": sum(len(row.rewards) for row in body.questions),
    }


def _profile_vector(body: pb.ProfileVector, message: Message, context: Context) -> Facts:
    return {
        **_values(body.dynamic),
        "family": body.family,
        "dynamic": len(body.dynamic),
        "bins": len(body.histogram),
        "parts": sum(body.histogram),
        "usable_records": context.usable_records,
    }


def _bandit_reward(body: pb.BanditReward, message: Message, context: Context) -> Facts:
    asked = context.asked
    return {
        **_values([body.value]),
        "match": body.match,
        "match_is_open": asked.match > 0 and body.match == asked.match,
        "part": asked.part,
    }


def _knowledge_package(body: pb.KnowledgePackage, message: Message, context: Context) -> Facts:
    asked, rows = context.asked, [entry.prompt_index for entry in body.entries]
    names, at_fault = names_of([body.peer] if body.peer else [])
    confidences = [entry.confidence for entry in body.entries if entry.HasField("confidence")]
    return {
        **_sets(body.transfer_set_sha256, context),
        **_answers([entry.answer for entry in body.entries], context),
        **_values(confidences),
        "confidences": len(confidences),
        "match": body.match,
        "match_is_open": asked.match > 0 and body.match == asked.match,
        "part": asked.part,
        "peer_is_matched": bool(asked.peer) and body.peer == asked.peer,
        "names": names,
        "names_at_fault": at_fault,
        "prompts": len(rows),
        "prompts_repeated": len(rows) - len(set(rows)),
        "prompts_out_of_order": sum(later < earlier for earlier, later in itertools.pairwise(rows)),
        "prompts_not_in_set": sum(row >= context.public_set_rows for row in rows),
    }


# ---- a silo takes in -------------------------------------------------------------------------------


def _competence_ask(body: pb.CompetenceAsk, message: Message, context: Context) -> Facts:
    questions = [row.question for row in body.questions]
    return {
        **_sets(body.exemplar_set_sha256, context),
        **_questions_in_set(questions, context),
        **_exemplar_counts(row.exemplars for row in body.questions),
        "exemplars_not_in_set": sum(
            row >= context.public_set_rows for each in body.questions for row in each.exemplars
        ),
        "exemplars_repeated": sum(len(row.exemplars) - len(set(row.exemplars)) for row in body.questions),
    }


def _reward_ask(body: pb.RewardAsk, message: Message, context: Context) -> Facts:
    return {
        **_sets(body.question_set_sha256, context),
        **_questions_in_set([row.question for row in body.questions], context),
        **_answers([candidate for row in body.questions for candidate in row.candidates], context),
        "candidates_max": max((len(row.candidates) for row in body.questions), default=0),
        "candidates_repeated": sum(
            len(row.candidates) - len({candidate.text for candidate in row.candidates}) for row in body.questions
        ),
    }


def _questions_in_set(questions: list[int], context: Context) -> Facts:
    return {
        "questions": len(questions),
        "questions_repeated": len(questions) - len(set(questions)),
        "questions_not_in_set": sum(question >= context.public_set_rows for question in questions),
    }


def _match_directive(body: pb.MatchDirective, message: Message, context: Context) -> Facts:
    asked, plan = context.asked, context.plan
    names, at_fault = names_of([body.peer])
    return {
        "match": body.match,
        "match_is_fresh": body.match > asked.match,
        "match_repeated": asked.after(body) == asked,
        "part": body.part if body.part in ("give", "take") else "",
        "peer_in_plan": plan is not None and body.peer in plan.silos,
        "names": names,
        "names_at_fault": at_fault,
    }


_MEASURES: dict[type[ProtobufMessage], Callable[..., Facts]] = {
    pb.CompetenceScore: _competence_score,
    pb.CompetenceAnswers: _competence_answers,
    pb.RewardScalar: _reward_scalar,
    pb.ProfileVector: _profile_vector,
    pb.BanditReward: _bandit_reward,
    pb.KnowledgePackage: _knowledge_package,
    pb.CompetenceAsk: _competence_ask,
    pb.RewardAsk: _reward_ask,
    pb.MatchDirective: _match_directive,
}
