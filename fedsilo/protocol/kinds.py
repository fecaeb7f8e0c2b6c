"""The registry of message kinds: one row for each, and what follows from the rows.

A kind is this row, its protobuf message in `federation.proto`, and its file in `policies/kinds`, which has its block of
a policy, its facts, its rules, its figures and a good example. Whatever lists kinds elsewhere reads the rows.

Three kinds of an earlier version are gone (`policies/model.py`); their names and their protobuf numbers are not
used again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import Message

from fedsilo.protocol._generated import federation_pb2 as pb

# Where in a run a message belongs, each with the rule on round and step that follows from it (policies/rules.py):
# the whole run; the open round; the open public step; a step that the message itself names; the step that was asked
# about; any round until now; the same, or the base model, which is round 0.
Place = Literal["", "run", "round", "open step", "named step", "asked step", "past round", "past round or base"]
Tensors = Literal["", "update", "adapter", "intervention"]


@dataclass(frozen=True)
class Kind:
    """One kind of message.

    Attributes:
        name: on the wire, in policies and in logs.
        message: of its payload; of a kind with tensors, their header, and the tensors' bytes follow.
        words: what it is for, for a reader who does not know the protocol.
        sent, taken: whether a silo sends it, and whether it takes it in.
        place: where in a run it belongs; empty: outside runs, or nowhere in particular.
        tensors: a difference to the adapter that all silos share, such an adapter, or a whole intervention.
        factors: which factors of a LoRA schema its tensors are.
        text: whether it carries text that a model or a person wrote, which text screens read.
        asked_by: the kind that the coordinator must be able to send for this one to be of any use.
        held: whether a policy may say that people approve it first.
        units: what `max_per_day` of its block counts.
        per_day: the fact that is added up over a day.
        per_round: facts that are added up over a round.
        file: its module in `policies/kinds`; by default named as the kind.
    """

    name: str
    message: type[Message]
    words: str
    sent: bool = False
    taken: bool = False
    place: Place = ""
    tensors: Tensors = ""
    factors: tuple[str, ...] = ()
    text: bool = False
    asked_by: str = ""
    held: bool = False
    units: str = ""
    per_day: str = "units"
    per_round: tuple[str, ...] = ()
    file: str = ""

    @property
    def attribute(self) -> str:
        """Name of its block in the models of a policy, where a dot cannot stand."""
        return self.name.replace(".", "_")

    @property
    def module(self) -> str:
        return self.file or self.attribute

    @property
    def is_control(self) -> bool:
        return self.name.startswith("control.")


def _update(name: str, words: str, *factors: str) -> Kind:
    """Row of an adapter update: what a round's training changed, as differences to what the round started from."""
    return Kind(
        name, pb.Factors, words, sent=True, place="round", tensors="update", factors=factors, held=True, file="adapters"
    )


def _control(name: str, message: type[Message], words: str, *, sent: bool = True, taken: bool = False) -> Kind:
    return Kind(f"control.{name}", message, words, sent=sent, taken=taken, file="control")


# fmt: off
_SENT = (
    _update("lora.factors", "what a round of training changed in the adapter: weights of a model", "lora_A", "lora_B"),
    _update("lora.factor_a", "what a round changed in one half (A) of the adapter's weights", "lora_A"),
    _update("lora.factor_b", "what a round changed in one half (B) of the adapter's weights", "lora_B"),
    _update("lora.core_r", "what a round changed in the small inner matrix (R) of the adapter's weights", "lora_R"),
    Kind("public.responses", pb.PublicResponses, "answers that the site's model wrote to public prompts",
         sent=True, place="open step", text=True, held=True, per_day="text_bytes",
         per_round=("responses", "tokens", "text_bytes")),
    Kind("metrics.eval", pb.MetricsEval, "scores of the model on the held-out set, on a grid that the policy declares",
         sent=True, place="past round or base"),
)
# Kinds of the methods beside PubSwap.
FURTHER = (
    Kind("reft.intervention", pb.Factors, "a site's own learnt interventions: weights of a model",
         sent=True, place="round", tensors="intervention", asked_by="reft.aggregate", held=True, file="interventions"),
    Kind("reft.aggregate", pb.Factors, "interventions for this site, made from those of several",
         taken=True, place="round", tensors="intervention", file="interventions"),
    Kind("competence.score", pb.CompetenceScore, "how many exemplars the model got right",
         sent=True, place="asked step", asked_by="competence.ask", units="scores", file="competence"),
    Kind("competence.answers", pb.CompetenceAnswers, "answers that the model wrote to exemplars",
         sent=True, place="asked step", text=True, asked_by="competence.ask", held=True, units="answers",
         file="competence"),
    Kind("reward.scalar", pb.RewardScalar, "grades that the site gave to candidate answers",
         sent=True, place="asked step", asked_by="reward.ask", units="scores", file="reward"),
    Kind("competence.ask", pb.CompetenceAsk, "the coordinator asks how well the model does on exemplars",
         taken=True, place="named step", file="competence"),
    Kind("reward.ask", pb.RewardAsk, "the coordinator asks for grades of candidate answers",
         taken=True, place="named step", text=True, file="reward"),
    Kind("profile.vector", pb.ProfileVector,
         "numbers that describe the site's model and data, on a grid that the policy declares",
         sent=True, place="round", held=True),
    Kind("match.directive", pb.MatchDirective, "which sites exchange something in this round",
         taken=True, place="round", file="match"),
    Kind("bandit.reward", pb.BanditReward, "one number: how useful an exchange between two sites was",
         sent=True, place="past round", asked_by="match.directive", file="match"),
    Kind("knowledge.package", pb.KnowledgePackage, "answers to a public set, with confidences, for another site",
         sent=True, taken=True, place="round", text=True, held=True),
)
# Kinds that came after policies were signed. A policy that names none of them keeps its digest.
# A new one is added here.
NEWER: tuple[Kind, ...] = ()
# What the coordinator says in every run, and what it hands on.
_TAKEN = (
    Kind("run.plan", pb.RunPlan, "the coordinator proposes a run: method, sizes, who takes part",
         taken=True, held=True),
    Kind("round.open", pb.RoundOpen,
         "the coordinator opens a round: its public prompts, and what all sign before they train",
         taken=True, place="run", file="rounds"),
    Kind("global.adapter", pb.Factors, "the federation's adapter, from which a round starts",
         taken=True, tensors="adapter", factors=("lora_A", "lora_B", "lora_R", "shift_A", "shift_B"),
         file="adapters"),
    Kind("public.donors", pb.PublicDonors, "answers to public prompts by other sites' models",
         taken=True, place="open step", text=True),
    Kind("round.agreed", pb.RoundAgreed, "all signatures under the round's transcript: training may begin",
         taken=True, place="round", file="rounds"),
    Kind("round.result", pb.RoundResult, "whose updates entered the round's result, signed by the coordinator",
         taken=True, place="run", file="rounds"),
    Kind("run.end", pb.RunEnd, "the run is over", taken=True, file="rounds"),
)
_CONTROL = (
    _control("hello", pb.Hello,
             "the silo introduces itself: versions, digests of its files, how its trainer is isolated"),
    _control("poll", pb.Poll, "the silo asks whether there is work"),
    _control("fetch", pb.Fetch, "the silo asks for an adapter by its digest"),
    _control("heartbeat", pb.Heartbeat, "the silo says that it is alive"),
    _control("progress", pb.Progress, "the silo says how far it is in a round"),
    _control("declined", pb.Declined, "the silo says that its gate did not let something pass, and not why"),
    _control("abstain", pb.Abstain, "the silo takes no part in a round or a step"),
    _control("error", pb.ErrorReport, "the silo reports an error as a code"),
    _control("checkpoint", pb.Checkpoint, "signed states of audit logs, which the parties countersign for each other",
             taken=True),
    _control("ack", pb.Ack, "the coordinator says that a message arrived", sent=False, taken=True),
    _control("refusal", pb.Refusal, "the coordinator says that it refused a message, as a code",
             sent=False, taken=True),
)
# fmt: on

KINDS = {kind.name: kind for kind in (*_SENT, *FURTHER, *NEWER, *_TAKEN, *_CONTROL)}
MESSAGES = {name: kind.message for name, kind in KINDS.items()}
OUTBOUND_KINDS = {name: kind.message for name, kind in KINDS.items() if kind.sent}
INBOUND_KINDS = {name: kind.message for name, kind in KINDS.items() if kind.taken}
# What a method may offer.
OFFERED_KINDS = tuple(sorted(name for name, kind in KINDS.items() if kind.sent and not kind.is_control))


def with_tensors(*which: Tensors) -> frozenset[str]:
    """Return the names of the kinds that carry such tensors."""
    return frozenset(name for name, kind in KINDS.items() if kind.tensors in which)


# Differences to the adapter that the round started from.
UPDATE_KINDS = with_tensors("update")
# Whole interventions, not differences: there is no adapter that all silos share.
REFT_KINDS = with_tensors("intervention")
FACTOR_KINDS = with_tensors("update", "adapter")
TENSOR_KINDS = FACTOR_KINDS | REFT_KINDS
# Kinds with a text of a silo's own. A hit of a screen refuses the message, but for responses, which may be withheld.
TEXT_KINDS_OUT = tuple(name for name, kind in KINDS.items() if kind.text and kind.sent)
# And with a text of somebody else.
TEXT_KINDS_IN = tuple(name for name, kind in KINDS.items() if kind.text and kind.taken)


def of_place(*places: Place) -> tuple[str, ...]:
    """Return the names of the kinds that belong to such a place."""
    return tuple(name for name, kind in KINDS.items() if kind.place in places)
