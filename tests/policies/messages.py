"""The good message of each kind, from the kind's own file, bent by a line.

`good(kind)` is `policies.examples.example` under a shipped ruleset that names the kind. Where that has one row, it has
two here, so that an order and a repetition can be wrong.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np
from google.protobuf.message import Message as ProtobufMessage

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Array, decode_factors, encode, encode_factors
from fedsilo.protocol.kinds import FURTHER, KINDS, OUTBOUND_KINDS
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.place import Place
from policies.engine import Context, Decision, Facts, History, Message, decide, measure
from policies.examples import CANARIES, CORPUS, Site, example, screened
from policies.message import Requests
from policies.model import Policy
from policies.render import RULESETS
from policies.schema import LoraSchema
from tests.policies.setting import HASH, SCHEMA, policy_of, policy_text, with_changes

OFFERED_KINDS = tuple(sorted(kind for kind in OUTBOUND_KINDS if not kind.startswith("control.")))
FURTHER_KINDS = frozenset(row.name for row in FURTHER)
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
B_SCHEMA = replace(SCHEMA, freeze="A")
SHIFT_SCHEMA = replace(
    SCHEMA,
    tensors=(
        *SCHEMA.tensors,
        ("model.layers.0.self_attn.q_proj.shift_A", (4, 6)),
        ("model.layers.0.self_attn.q_proj.shift_B", (4, 4)),
    ),
)
SCHEMAS = {
    "fed-sb": R_SCHEMA,
    "ffa-lora": B_SCHEMA,
    "rolora": replace(SCHEMA, freeze="alternate"),
    "fedex": SHIFT_SCHEMA,
    "flora": SHIFT_SCHEMA,
    "pubswap-strict": replace(B_SCHEMA, dtype="bfloat16"),
}
# Block of a kind that no shipped ruleset names: a person adds it where a method's option asks for it.
ANSWERS_BLOCK = """
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
    METHODS[PROBE] = replace(METHODS["pubswap"], name=PROBE, kinds=frozenset(OFFERED_KINDS))
    try:
        yield
    finally:
        del METHODS[PROBE]


@cache
def ruleset_text(name: str) -> str:
    """A shipped ruleset by its name; "further" is fedgrpo with the block that no ruleset has."""
    if name == "further":
        text = policy_text("fedgrpo")
        assert text.count("\n  control:\n") == 2
        return text.replace("\n  control:\n", ANSWERS_BLOCK, 1)
    return policy_text(name, schema=SCHEMAS.get(name, SCHEMA))


def policy_named(name: str) -> Policy:
    return policy_of(ruleset_text(name))


NAMED = {name: policy_named(name) for name in RULESETS}


@dataclass(frozen=True)
class Case:
    """A message, what is known where it is judged, what was allowed before, and the text of the policy over it."""

    message: Message
    context: Context
    text: str
    history: History = field(default_factory=History)

    @property
    def policy(self) -> Policy:
        return policy_of(self.text)

    def facts(self) -> Facts:
        """With the policy's own screens over the texts, and nothing in them that these look for."""
        context = self.context
        if context.screened is None:
            context = replace(context, screened=screened(self.message, self.policy, CORPUS, CANARIES))
        return measure(self.message, context)

    def decided(self, policy: Policy | None = None) -> Decision:
        return decide(self.facts(), policy or self.policy, self.history)

    def under(self, old: str, new: str) -> Case:
        """Under the policy with another text in the first place of this one."""
        assert old in self.text, old
        return replace(self, text=self.text.replace(old, new, 1))

    def limit(self, key: str, value: Any) -> Case:
        """Under the policy with another number at the first key of this name."""
        text, found = re.subn(
            rf"^(\s*{re.escape(key)}): \S+", rf"\g<1>: {value}", self.text, count=1, flags=re.MULTILINE
        )
        assert found, key
        return replace(self, text=text)

    def knowing(self, **changes: Any) -> Case:
        return replace(self, context=replace(self.context, **changes))

    def saying(self, body: ProtobufMessage) -> Case:
        """With another body of the same kind."""
        return replace(self, message=replace(self.message, body=body, payload_bytes=len(encode(body))))

    def but(self, **changes: Any) -> Case:
        """With other fields: of the body, else of the message or its place, of what is known, or of the history.

        What body and envelope both have, a round and a step, is changed in both.
        """
        made, ours = self, set(self.message.body.DESCRIPTOR.fields_by_name) - {"tensors"}
        said = {name: changes.pop(name) for name in list(changes) if name in ours}
        if said:
            body = type(self.message.body)()
            body.CopyFrom(self.message.body)
            for name in said:
                body.ClearField(name)
            body.MergeFrom(type(body)(**said))
            size = self.message.payload_bytes if self.message.tensors is not None else len(encode(body))
            made = replace(made, message=replace(self.message, body=body, payload_bytes=size))
        for owner in ("message", "context", "history"):
            names = {each.name for each in fields(getattr(self, owner))} - {"place"}
            names |= {*Place._fields} if owner == "message" else set()
            given = {name: changes.pop(name) for name in list(changes) if name in names}
            if owner == "message":
                given |= {name: said[name] for name in ("round", "step") if name in said}
                made = replace(made, message=with_changes(made.message, **given))
            elif given:
                made = replace(made, **{owner: dataclasses.replace(getattr(made, owner), **given)})
        assert not changes, changes
        return made

    def carrying(self, tensors: Mapping[str, Array], **header: Any) -> Case:
        """With other tensors, through the codec, and other fields of their header."""
        said = {name: header.get(name, getattr(self.message.body, name)) for name in HEADER}
        payload = encode_factors({name: np.asarray(values, np.float32) for name, values in tensors.items()}, **said)
        factors = decode_factors(payload)
        made = replace(self.message, payload_bytes=len(payload), body=factors.header, tensors=factors.tensors)
        return replace(self, message=made)


HEADER = ("base_digest", "schema_sha256", "rank", "scale", "dtype")


# ---- rows of a body ----------------------------------------------------------------------------------


def answer(text: str, finish: Any = pb.FINISH_STOP) -> pb.Response:
    return pb.Response(text=text, finish=finish)


def scores(*rows: tuple[int, int]) -> dict[str, Any]:
    return {"scores": [pb.QuestionScore(question=question, matched=matched) for question, matched in rows]}


def answers(*rows: tuple[int, str], finish: Any = pb.FINISH_STOP) -> dict[str, Any]:
    return {"answers": [pb.ExemplarAnswer(exemplar=row, answer=answer(text, finish)) for row, text in rows]}


def rewards(*rows: tuple[int, tuple[float, ...] | None]) -> dict[str, Any]:
    """None: it abstains."""
    made = [pb.QuestionRewards(question=row, rewards=values or (), abstained=values is None) for row, values in rows]
    return {"questions": made}


def exemplars(*rows: tuple[int, tuple[int, ...]]) -> dict[str, Any]:
    return {"questions": [pb.QuestionExemplars(question=question, exemplars=asked) for question, asked in rows]}


def candidates(*rows: tuple[int, tuple[str, ...]], finish: Any = pb.FINISH_STOP) -> dict[str, Any]:
    return {
        "questions": [
            pb.QuestionCandidates(question=question, candidates=[answer(text, finish) for text in texts])
            for question, texts in rows
        ]
    }


def entries(*rows: tuple[int, str], finish: Any = pb.FINISH_STOP, confidence: float | None = None) -> dict[str, Any]:
    made = [pb.PackageEntry(prompt_index=row, answer=answer(text, finish), confidence=confidence) for row, text in rows]
    return {"entries": made}


def prompts(*rows: tuple[int, tuple[str, ...]], samples: int = 4, finish: Any = pb.FINISH_STOP) -> dict[str, Any]:
    """Answers to public prompts, each of them right and of one token."""
    made = [
        pb.PromptResponses(prompt_index=row, samples=samples, responses=[answer(text, finish) for text in texts])
        for row, texts in rows
    ]
    count = sum(len(texts) for _, texts in rows)
    return {"prompts": made, "verdicts": (True,) * count, "token_counts": (1,) * count}


def donors(*rows: tuple[int, str, str | None]) -> dict[str, Any]:
    """(prompt, origin, text); without a text it is the silo's own. Each text is right."""
    body = pb.PublicDonors()
    for index in sorted({index for index, _, _ in rows}):
        entry = body.prompts.add(prompt_index=index)
        for _, origin, text in (row for row in rows if row[0] == index):
            entry.donors.add(origin=origin, response=None if text is None else answer(text))
    return {"prompts": list(body.prompts), "verdicts": (True,) * sum(text is not None for _, _, text in rows)}


def metrics(*rows: tuple[str, str, float]) -> dict[str, Any]:
    return {"metrics": [pb.Metric(name=name, topic=topic, value=value) for name, topic, value in rows]}


ASKED = Requests(
    step=1,
    exemplars={4: (0, 1, 2, 3, 5), 7: (9, 1, 2, 3, 5, 8)},
    candidates={4: 3, 7: 4},
    match=3,
    peer="hospital_b",
    part="give",
)
TAKES = replace(ASKED, part="take")
# What a good message has in place of the one row of its example; of a package, for a matched peer.
ROWS: dict[str, dict[str, Any]] = {
    "competence.score": scores((4, 5), (7, 0)),
    "competence.answers": answers((0, "1"), (9, "")),
    "competence.ask": exemplars((4, (0, 1, 2, 3, 5)), (7, (9, 8, 7, 6, 5))),
    "reward.scalar": rewards((4, (0.0, 1.0, 1.0)), (7, None)),
    "reward.ask": candidates((4, ("1", "2")), (9, ())),
    "knowledge.package": entries((0, "def f(): pass"), (9, "")),
    "bandit.reward": {"match": 3, "value": -0.125},
    "match.directive": {"match": 4, "peer": "hospital_c"},
    "profile.vector": {"histogram": (45, 0, 5, *(0,) * 8, 50)},
}


@cache
def first_ruleset(kind: str, side: str) -> str:
    """The first shipped ruleset that names a kind."""
    attribute = "control" if kind.startswith("control.") else kind.replace(".", "_")
    named = (name for name in (*RULESETS, "further") if getattr(getattr(policy_named(name).file, side), attribute))
    return next(named)


@cache
def good(kind: str, ruleset: str = "", direction: str = "") -> Case:
    """Return a message of the kind that a ruleset lets through if it names the kind: by default the first that does."""
    direction = direction or ("egress" if KINDS[kind].sent else "ingress")
    ruleset = ruleset or first_ruleset(kind, direction)
    message, context = example(kind, Site(policy_named(ruleset), SCHEMAS.get(ruleset, SCHEMA)), direction)
    case = Case(message, context, ruleset_text(ruleset))
    if kind not in FURTHER_KINDS:
        return case if context.plan is None or kind in METHODS[context.plan.method].kinds else probed(case)
    case = probed(case).knowing(asked=TAKES if direction == "ingress" or kind == "bandit.reward" else ASKED)
    rows = dict(ROWS.get(kind, {}))
    if isinstance(message.body, pb.KnowledgePackage):
        matched = bool(message.body.peer)
        rows |= {"match": ASKED.match, "peer": ASKED.peer} if matched else {}
        rows |= {} if matched or direction == "ingress" else entries((0, "def f(): pass"), (9, ""), confidence=0.25)
    return case.but(**rows)


def probed(case: Case) -> Case:
    """In a run whose method may send every kind."""
    plan = case.context.plan
    return case if plan is None else case.knowing(plan=plan.model_copy(update={"method": PROBE}))


ADAPTER = good("global.adapter", "pubswap")
# One of each family, as the shipped pubswap policy lets them through; of the last three, where a run goes on.
GOOD = (
    *(good(kind, "pubswap") for kind in ("lora.factors", "public.responses", "metrics.eval", "control.poll")),
    *(good(kind, "pubswap") for kind in ("run.plan", "public.donors", "round.agreed", "round.result", "run.end")),
    good("control.checkpoint", "pubswap").but(countersigned=[""] * 3),
    good("round.open", "pubswap").but(round=2),
    ADAPTER.but(last_adapter_first=False, last_adapter=ADAPTER.message.tensors, last_adapter_rounds=1),
)
