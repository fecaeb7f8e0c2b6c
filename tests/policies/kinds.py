"""One good message of every kind under each shipped ruleset that names it, and policies that name the other kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array, decode_factors, encode, encode_factors
from fedsilo.protocol.kinds import FURTHER as FURTHER_ROWS
from fedsilo.protocol.kinds import OUTBOUND_KINDS
from fedsilo.protocol.method import Method
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.place import Place
from policies.engine import Context, Decision, History, Message, decide, measure
from policies.examples import CANARIES, CORPUS, Site, example, screened
from policies.message import Asked
from policies.model import Policy
from policies.render import RULESETS
from policies.rules import RULES
from policies.schema import LoraSchema
from tests.policies.setting import (
    BASE_DIGEST,
    COORDINATOR,
    GRADED,
    HASH,
    PLAN,
    SCHEMA,
    SILO,
    context,
    metrics_message,
    policy_of,
    policy_text,
    responses_message,
    with_changes,
)

OFFERED_KINDS = tuple(sorted(kind for kind in OUTBOUND_KINDS if not kind.startswith("control.")))
ASKED = Asked(
    step=2,
    exemplars={4: (0, 1, 2, 3, 5), 7: (9, 1, 2, 3, 5, 8)},
    candidates={4: 3, 7: 4},
    match=3,
    peer="hospital_b",
    part="give",
)
TAKES = dataclasses.replace(ASKED, part="take")
PROBE = "probe"  # a method that may send every kind
R_SCHEMA = LoraSchema(
    base_model_sha256=HASH["base"],
    rank=2,
    alpha=4.0,
    dtype="float32",
    targets="all-linear",
    tensors=tuple(sorted((*SCHEMA.tensors, ("model.layers.0.self_attn.q_proj.lora_R", (2, 2))))),
    freeze="AB",
)
B_SCHEMA = dataclasses.replace(SCHEMA, freeze="A")
SCHEMAS = {"fed-sb": R_SCHEMA, "ffa-lora": B_SCHEMA, "pubswap-strict": dataclasses.replace(B_SCHEMA, dtype="bfloat16")}
# Block of a kind that no shipped ruleset names: a person adds it where a method's option asks for it.
FURTHER = """
  competence.answers:
    set: public
    max_per_step: 6
    max_per_day: 100
    max_bytes_per_answer: 64
    max_bytes_per_step: 256
    per_round: 2
    approvals:
      first_rounds: 0
      then: 0
      persons: 1
      roles: [approver]
  control:
"""


@contextmanager
def a_method_that_sends_everything() -> Iterator[None]:
    """Kinds that no method of this version sends are judged as if one did."""
    METHODS[PROBE] = dataclasses.replace(METHODS["pubswap"], name=PROBE, kinds=frozenset(OFFERED_KINDS))
    try:
        yield
    finally:
        del METHODS[PROBE]


def probe() -> Method:
    return METHODS[PROBE]


@cache
def policy_named(name: str) -> Policy:
    """A shipped ruleset by its name; "further" is fedgrpo with the blocks that no ruleset has."""
    if name == "further":
        return policy_of(further_text())
    return policy_of(ruleset_text(name))


def ruleset_text(name: str) -> str:
    return policy_text(name, schema=SCHEMAS.get(name, SCHEMA))


def further_text() -> str:
    text = policy_text("fedgrpo")
    assert text.count("\n  control:\n") == 2
    return text.replace("\n  control:\n", FURTHER, 1)


@dataclass(frozen=True)
class Case:
    """A message, what is known where it is judged, and what was allowed before."""

    message: Message
    known: dict[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)

    def context(self) -> Context:
        changes: dict[str, Any] = {"plan": PLAN.model_copy(update={"method": PROBE}), "asked": ASKED}
        if self.message.sender == COORDINATOR:
            changes |= {"expected_sender": COORDINATOR, "asked": TAKES}
        return context(**{**changes, **self.known})

    def decided(self, policy: Policy) -> Decision:
        """With the policy's own screens over the texts, and nothing in them that these look for."""
        context = self.context()
        if context.screened is None:
            context = dataclasses.replace(context, screened=screened(self.message, policy, CORPUS, CANARIES))
        return decide(measure(self.message, context), policy, self.history)

    def but(self, **changes: Any) -> Case:
        """With other known things or another history; `message` fields by their names."""
        history = changes.pop("history", self.history)
        fields = {item.name for item in dataclasses.fields(Message)} | set(Place._fields)
        message = with_changes(self.message, **{key: changes.pop(key) for key in list(changes) if key in fields})
        return Case(message, {**self.known, **changes}, history)


def sent(kind: str, body: Any, *, step: int = 0, **known: Any) -> Case:
    return Case(Message("egress", Place("run-1", 1, step, kind), SILO, len(encode(body)), body), known)


def received(kind: str, body: Any, *, step: int = 0, **known: Any) -> Case:
    return Case(Message("ingress", Place("run-1", 1, step, kind), COORDINATOR, len(encode(body)), body), known)


# ---- tensors ---------------------------------------------------------------------------------------


def tensors_case(
    kind: str, tensors: dict[str, Array], *, sender: str = SILO, header: dict[str, Any], **known: Any
) -> Case:
    payload = encode_factors(tensors, **header)
    factors = decode_factors(payload)
    direction = "egress" if sender == SILO else "ingress"
    message = Message(direction, Place("run-1", 1, 0, kind), sender, len(payload), factors.header, factors.tensors)
    return Case(message, known)


def update(kind: str, schema: LoraSchema, fill: float = 2.0**-9) -> Case:
    tensors = {name: np.full(shape, fill, np.float32) for name, shape in schema.shapes_of(kind).items()}
    header = {
        "base_digest": BASE_DIGEST,
        "schema_sha256": schema.digest,
        "rank": schema.rank,
        "scale": schema.scale,
        "dtype": schema.dtype,
    }
    # enough records for the strictest ruleset
    return tensors_case(kind, tensors, header=header, schema=schema, records=64, epochs=1, steps=4)


REFT_HEADER = {"base_digest": "", "schema_sha256": "", "rank": 8, "scale": 1.0, "dtype": "float32"}


def reft_tensors() -> dict[str, Array]:
    tensors = {}
    for layer in (0, 1):
        for group in ("prefix", "suffix"):
            place = f"layers.{layer}.{group}"
            tensors[f"{place}.R"] = np.eye(8, 16, k=layer, dtype=np.float32)
            tensors[f"{place}.W"] = np.full((8, 16), 0.1, np.float32)  # no number of bfloat16
            tensors[f"{place}.b"] = np.full((8,), 0.25, np.float32)
    return tensors


def reft(kind: str = "reft.intervention", tensors: dict[str, Array] | None = None, **header: Any) -> Case:
    sender = SILO if kind == "reft.intervention" else COORDINATOR
    tensors = reft_tensors() if tensors is None else tensors
    return tensors_case(kind, tensors, sender=sender, header={**REFT_HEADER, **header})


# ---- numbers and texts -----------------------------------------------------------------------------


def score(*rows: tuple[int, int], sha256: str = HASH["public"], **known: Any) -> Case:
    scores = [pb.QuestionScore(question=question, matched=matched) for question, matched in rows or ((4, 5), (7, 0))]
    return sent("competence.score", pb.CompetenceScore(exemplar_set_sha256=sha256, scores=scores), step=2, **known)


def answer(text: str = "12", finish: Any = pb.FINISH_STOP) -> pb.Response:
    return pb.Response(text=text, finish=finish)


def answers(*rows: tuple[int, str], sha256: str = HASH["public"], finish: Any = pb.FINISH_STOP) -> Case:
    given = [pb.ExemplarAnswer(exemplar=row, answer=answer(text, finish)) for row, text in rows or ((0, "1"), (9, ""))]
    return sent("competence.answers", pb.CompetenceAnswers(exemplar_set_sha256=sha256, answers=given), step=2)


def rewards(*rows: tuple[int, tuple[float, ...] | None], **known: Any) -> Case:
    body = pb.RewardScalar()
    for question, values in rows or ((4, (0.0, 1.0, 1.0)), (7, None)):
        body.questions.add(question=question, rewards=values or (), abstained=values is None)
    return sent("reward.scalar", body, step=2, **known)


def profile(family: int = 7, dynamic: tuple[float, ...] = (-1.0, *(0.25,) * 11), histogram: Any = None) -> Case:
    histogram = (45, 0, 5, *(0,) * 8, 50) if histogram is None else histogram
    body = pb.ProfileVector(family=family, dynamic=dynamic, histogram=histogram)
    return sent("profile.vector", body, usable_records=10)


def worth(value: float = -0.125, match: int = 3, **known: Any) -> Case:
    return sent("bandit.reward", pb.BanditReward(match=match, value=value), **{"asked": TAKES, **known})


def package(
    *rows: tuple[int, str],
    to: str = "hospital_b",
    match: int = 3,
    sha256: str = HASH["public"],
    confidence: float | None = None,
    finish: Any = pb.FINISH_STOP,
    inbound: bool = False,
) -> Case:
    body = pb.KnowledgePackage(transfer_set_sha256=sha256, match=match, peer=to)
    for row, text in rows or ((0, "def f(): pass"), (9, "")):
        body.entries.add(prompt_index=row, answer=answer(text, finish), confidence=confidence)
    return (received if inbound else sent)("knowledge.package", body)


def competence_ask(*rows: tuple[int, tuple[int, ...]], sha256: str = HASH["public"]) -> Case:
    body = pb.CompetenceAsk(exemplar_set_sha256=sha256)
    for question, exemplars in rows or ((4, (0, 1, 2, 3, 5)), (7, (9, 8, 7, 6, 5))):
        body.questions.add(question=question, exemplars=exemplars)
    return received("competence.ask", body, step=3)


def reward_ask(*rows: tuple[int, tuple[str, ...]], sha256: str = HASH["public"], finish: Any = pb.FINISH_STOP) -> Case:
    body = pb.RewardAsk(question_set_sha256=sha256)
    for question, texts in rows or ((4, ("1", "2")), (9, ())):
        body.questions.add(question=question, candidates=[answer(text, finish) for text in texts])
    return received("reward.ask", body, step=3)


def directive(match: int = 4, peer: str = "hospital_c", part: str = "take", **known: Any) -> Case:
    return received("match.directive", pb.MatchDirective(match=match, peer=peer, part=part), **known)


# ---- what each ruleset should let through ----------------------------------------------------------


def good(kind: str, ruleset: str, *, inbound: bool = False) -> Case:
    """A message of the kind that `ruleset` lets through if it names the kind."""
    central = ruleset == "fedid-central"
    if kind in ("lora.factors", "lora.factor_a", "lora.factor_b", "lora.core_r"):
        return update(kind, SCHEMAS.get(ruleset, R_SCHEMA if kind == "lora.core_r" else SCHEMA))
    if kind == "profile.vector" and ruleset == "knexa-heuristic":
        return profile(family=0, dynamic=(0.5,))
    if kind == "knowledge.package":
        match, to = (0, "") if central else (3, "hospital_b")
        return package(to=to, match=match, confidence=0.25 if central and not inbound else None, inbound=inbound)
    cases = {
        "reft.intervention": reft,
        "reft.aggregate": lambda: reft("reft.aggregate"),
        "public.responses": lambda: Case(responses_message(), GRADED),
        "competence.score": score,
        "competence.answers": answers,
        "reward.scalar": rewards,
        "profile.vector": profile,
        "bandit.reward": worth,
        "metrics.eval": lambda: Case(metrics_message()),
        "competence.ask": competence_ask,
        "reward.ask": reward_ask,
        "match.directive": directive,
    }
    return cases[kind]() if kind in cases else from_example(kind, ruleset)


def from_example(kind: str, ruleset: str) -> Case:
    """The example of the kind's own file, in the run of these tests."""
    message, known = example(kind, Site(policy_named(ruleset), SCHEMAS.get(ruleset, SCHEMA)))
    return Case(with_changes(message, run=PLAN.run), {"asked": known.asked, "usable_records": known.usable_records})


FURTHER_INBOUND = tuple(sorted(row.name for row in FURTHER_ROWS if row.taken))
# Rules of the kinds of further methods and of no other.
FURTHER_RULES = tuple(rule for rule in RULES if rule.kinds and rule.kinds <= {row.name for row in FURTHER_ROWS})
NAMED = {name: policy_named(name) for name in RULESETS}
