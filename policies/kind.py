"""What a kind's file is made of: its blocks of a policy, how it is measured, its rules and its figures; and the facts
and rules that several kinds share (the set they name, how many, how large, on which grid, about what was asked).

What the shared rules do not stop: information in the allowed values themselves (N1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.strict_yaml import Path
from policies.counting import Bits
from policies.field_classes import digest_of
from policies.fields import Closed, MetricField
from policies.grids import on_grid
from policies.history import History
from policies.message import Context, Facts, Message
from policies.model import Policy, PolicyFile
from policies.rule import (
    Judgement,
    Rule,
    at_most,
    block_of,
    block_rule,
    equal,
    names_pinned_set,
    none_of,
    not_applicable,
    rule,
    within,
)
from policies.schema import LoraSchema
from policies.screening import screen_facts

VALUES_MAX = 256


@dataclass(frozen=True)
class Figures:
    """What the figures of a block need beside it.

    Attributes:
        kind: of the messages.
        file: the policy that has the block.
        schema: its LoRA schema; None where it is not at hand.
        steps: local steps of a round, at most.
    """

    kind: str
    file: PolicyFile
    schema: LoraSchema | None
    steps: int


def no_facts(body: Any, message: Message, context: Context) -> Facts:
    return {}


@dataclass(frozen=True)
class PolicyKind:
    """What a policy, its rules and its figures know of one kind. Its row is in `fedsilo/protocol/kinds.py`.

    Attributes:
        name: of the row.
        sent, taken: its block under egress and under ingress; None where it does not go that way.
        measure: (body, message, context) -> what its rules judge, beside the facts that every message has.
        rules: those that judge it beside the ones on every message, in the order in which they speak.
        largest: (block, figures) -> messages and payload bytes of one round, at most.
        bits: (block, figures) -> what an attacker who owns the trainer gets out in one round, at most.
        text_bytes: block -> the key that bounds its text, bytes of text in a round, and in one message.
    """

    name: str
    sent: type[Closed] | None = None
    taken: type[Closed] | None = None
    measure: Callable[[Any, Message, Context], Facts] = no_facts
    rules: tuple[Rule, ...] = ()
    largest: Callable[[Any, Figures], tuple[int, int]] | None = None
    bits: Callable[[Any, Figures], Bits] | None = None
    text_bytes: Callable[[Any], tuple[str, int, int]] | None = None


# ---- facts -----------------------------------------------------------------------------------------
# A list of values is kept as the values that occur, sorted: no rule needs more, and which of them belongs to which
# question stays out of the log.


def value_facts(values: Iterable[float]) -> Facts:
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


def row_facts(rows: Sequence[int], asked: Sequence[int] | Mapping[int, object], name: str) -> Facts:
    """Whether rows are among those asked for, each once, in the order asked."""
    place = {row: position for position, row in enumerate(asked)}
    places = [place[row] for row in rows if row in place]
    return {
        name: len(rows),
        f"{name}_not_asked": len(rows) - len(places),
        f"{name}_repeated": len(rows) - len(set(rows)),
        f"{name}_out_of_order": sum(later < earlier for earlier, later in itertools.pairwise(places)),
    }


def set_facts(header: str, context: Context) -> Facts:
    """The set that a message names, and the party's own copy."""
    return {"header_set_sha256": digest_of(header), "public_set_sha256": context.public_set_sha256}


def exemplar_counts(exemplars: Iterable[Sequence[int]]) -> Facts:
    counts = [len(rows) for rows in exemplars]
    return {"exemplars_min": min(counts, default=0), "exemplars_max": max(counts, default=0)}


def question_facts(questions: list[int], context: Context) -> Facts:
    return {
        "questions": len(questions),
        "questions_repeated": len(questions) - len(set(questions)),
        "questions_not_in_set": sum(question >= context.public_set_rows for question in questions),
    }


def text_facts(responses: list[pb.Response], context: Context) -> Facts:
    """Counts over responses in message order."""
    sizes = [len(response.text.encode()) for response in responses]
    counts, verdicts = context.token_counts, context.verdicts
    counted = counts is not None and len(counts) == len(responses)
    # A byte-level tokenizer makes at least one byte of each token, so bytes bound tokens where nobody has counted.
    tokens = list(counts) if counts is not None and counted else sizes
    graded = verdicts is not None and len(verdicts) == len(responses)
    correct = sum(bool(verdict) for verdict in verdicts) if verdicts is not None and graded else 0
    return {
        "responses": len(responses),
        "text_bytes": sum(sizes),
        "text_bytes_max": max(sizes, default=0),
        "tokens": int(sum(tokens)),
        "tokens_max": int(max(tokens, default=0)),
        "tokens_counted": counted,
        "graded": graded,
        "responses_correct": correct,
        "responses_wrong": len(responses) - correct,
        "finish_unspecified": sum(response.finish == pb.FINISH_UNSPECIFIED for response in responses),
        **screen_facts(context.screened, len(responses)),
    }


def index_facts(indices: list[int], context: Context) -> Facts:
    return {
        "prompts": len(indices),
        "prompts_repeated": len(indices) - len(set(indices)),
        "prompts_not_of_step": sum(index not in context.public_prompt_indices for index in indices),
        "prompts_out_of_order": _out_of_order(indices, context.public_prompt_indices),
        "prompts_not_in_set": sum(index >= context.public_set_rows for index in indices),
        "public_set_sha256": context.public_set_sha256,
    }


def _out_of_order(indices: list[int], order: tuple[int, ...]) -> int:
    """How often a row comes after one that the order has behind it. Rows that it has not are counted elsewhere."""
    place = {index: position for position, index in enumerate(order)}
    places = [place[index] for index in indices if index in place]
    return sum(later < earlier for earlier, later in itertools.pairwise(places))


# ---- rules -----------------------------------------------------------------------------------------


def limit_rule(name: str, reason: str, key: str, measured: Callable[[Facts, History], float | None]) -> Rule:
    """A rule that compares one number with one key of the kind's block."""

    @rule(name, reason)
    def check(facts: Facts, policy: Policy, history: History) -> Judgement:
        block, path = block_of(facts, policy)
        return (
            not_applicable() if block is None else at_most(measured(facts, history), getattr(block, key), (*path, key))
        )

    return check


def fact(name: str) -> Callable[[Facts, History], float | None]:
    return lambda facts, _: facts[name]


def off_grid(values: Iterable[float], grid: MetricField) -> int:
    return sum(not on_grid(value, grid.quantum) for value in values)


def out_of_range(values: Iterable[float], grid: MetricField) -> int:
    return sum(not grid.min <= value <= grid.max for value in values)


@rule("pinned set", "PUBLIC_SET")
def pinned_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The message names the pinned set, and so does the party's own copy (T12)."""
    return names_pinned_set(facts, policy)


@rule("one message of the kind per step", "PER_STEP")
def one_per_step(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return at_most(history.messages_in_step + 1, 1, path)


@rule("messages of the kind per round", "PER_ROUND")
def some_per_round(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None or path[0] != "egress":
        return not_applicable()
    return at_most(history.messages_in_round + 1, block.per_round, (*path, "per_round"))


@rule("finish reasons of answers", "FINISH")
def finishes(facts: Facts, policy: Policy, history: History) -> Judgement:
    _, path = block_of(facts, policy)
    return none_of(facts["finish_unspecified"], path)


@rule("only what was asked", "NOT_ASKED")
def only_asked(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Questions or exemplars that the coordinator named for this step, each once."""
    _, path = block_of(facts, policy)
    return none_of(facts["questions_not_asked"] + facts["questions_repeated"], path)


@rule("in the order asked", "QUESTION_ORDER")
def in_order_asked(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The order is the coordinator's, so that none is left to say something with (T9)."""
    _, path = block_of(facts, policy)
    return none_of(facts["questions_out_of_order"], path)


@block_rule("exemplars behind a score", "EXEMPLARS")
def exemplars_of_score(facts: Facts, block: Any, path: Path) -> Judgement:
    """Not so few that a score is about one of them, not so many that it has many values."""
    path = (*path, "exemplars")
    least = within(facts["exemplars_min"], block.exemplars, path)
    return least if least.outcome == "deny" else within(facts["exemplars_max"], block.exemplars, path)


@rule("questions are rows of the set", "PROMPT_NOT_PUBLIC")
def questions_in_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    """By row of this silo's own copy, each once: no text of a question crosses (T12)."""
    _, path = block_of(facts, policy)
    wrong = facts["questions_not_in_set"] + facts["questions_repeated"]
    return none_of(wrong + facts.get("exemplars_not_in_set", 0) + facts.get("exemplars_repeated", 0), (*path, "set"))


@rule("prompts are rows of the public set", "PROMPT_NOT_PUBLIC")
def rows_of_set(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    pin = policy.file.public_sets[block.set]
    if facts["public_set_sha256"] != pin.sha256:
        return equal(facts["public_set_sha256"], pin.sha256, ("public_sets", block.set, "sha256"))
    return none_of(facts["prompts_not_in_set"] + facts["prompts_repeated"], (*path, "set"))


@rule("donors are peers", "NOT_A_PEER")
def silos_are_peers(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Every silo named is a peer in the policy; at most one (the receiver) is named without its text."""
    unknown = strangers(facts, policy) + max(0, facts.get("origins_without_response", 0) - 1)
    return none_of(unknown, ("federation", "peers"))


def strangers(facts: Facts, policy: Policy) -> int:
    prefix = f"spiffe://{policy.file.federation.id}/silo/"
    unlisted = sum(f"{prefix}{name}" not in policy.peers for name in facts["names"])
    return int(facts["names_at_fault"]) + unlisted


PER_DAY = limit_rule(
    "scores or answers per day",
    "PER_DAY",
    "max_per_day",
    lambda facts, history: history.units_in_day + int(facts["units"]),
)
UNITS_PER_STEP = limit_rule("scores or answers per step", "PER_STEP", "max_per_step", fact("units"))
TEXT_BYTES = limit_rule("bytes of one answer", "RESPONSE_BYTES", "max_bytes_per_answer", fact("text_bytes_max"))
CANDIDATES_PER_QUESTION = limit_rule(
    "candidates per question", "CANDIDATES", "max_candidates_per_question", fact("candidates_max")
)
QUESTIONS_ASKED = limit_rule("questions asked", "QUESTIONS", "max_questions", fact("questions"))
# Those of the further methods that stand together in the order of all rules.
SHARED = (pinned_set, one_per_step, some_per_round, PER_DAY, UNITS_PER_STEP, TEXT_BYTES, finishes)
