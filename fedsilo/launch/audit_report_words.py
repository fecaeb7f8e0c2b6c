"""The audit report in plain words: what each kind of message is for and may hold, and what reviewers' rules ask for.

What a kind may hold follows from the field catalogue by which the gate decides, so it cannot say less than is allowed
to pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fedsilo.treaty.wire.services import TENSOR_KINDS
from policies.catalogue import KINDS, FieldClass, field_class

_CONTROL: Final = {
    "control.hello": "the silo introduces itself: versions, digests of its files, how its trainer is walled off",
    "control.poll": "the silo asks whether there is work",
    "control.fetch": "the silo asks for an adapter by its digest",
    "control.heartbeat": "the silo says that it is alive",
    "control.progress": "the silo says how far it is in a round",
    "control.declined": "the silo says that its gate did not let something pass, and not why",
    "control.abstain": "the silo takes no part in a round or a step",
    "control.error": "the silo reports an error as a code",
    "control.checkpoint": "signed states of audit logs, which the parties countersign for each other",
    "control.ack": "the coordinator says that a message arrived",
    "control.refusal": "the coordinator says that it refused a message, as a code",
}
_MODEL: Final = {
    "lora.factors": "what a round of training changed in the adapter: weights of a model",
    "lora.factor_a": "what a round changed in one half (A) of the adapter's weights",
    "lora.factor_b": "what a round changed in one half (B) of the adapter's weights",
    "lora.core_r": "what a round changed in the small inner matrix (R) of the adapter's weights",
    "reft.intervention": "a site's own learnt interventions: weights of a model",
    "reft.aggregate": "interventions for this site, made from those of several",
    "global.adapter": "the federation's adapter, from which a round starts",
}
_ANSWERS: Final = {
    "public.responses": "answers that the site's model wrote to public prompts",
    "public.donors": "answers to public prompts by other sites' models",
    "competence.ask": "the coordinator asks how well the model does on exemplars",
    "competence.score": "how many exemplars the model got right",
    "competence.answers": "answers that the model wrote to exemplars",
    "reward.ask": "the coordinator asks for grades of candidate answers",
    "reward.scalar": "grades that the site gave to candidate answers",
    "knowledge.package": "answers to a public set, with confidences, for another site",
}
_RUN: Final = {
    "run.plan": "the coordinator proposes a run: method, sizes, who takes part",
    "round.open": "the coordinator opens a round: its public prompts, and what all sign before they train",
    "round.agreed": "all signatures under the round's transcript: training may begin",
    "round.result": "whose updates entered the round's result, signed by the coordinator",
    "run.end": "the run is over",
    "match.directive": "which sites exchange something in this round",
    "metrics.eval": "scores of the model on the held-out set, on a grid that the policy declares",
    "profile.vector": "numbers that describe the site's model and data, on a grid that the policy declares",
    "bandit.reward": "one number: how useful an exchange between two sites was",
}
KIND_WORDS: Final[dict[str, str]] = _CONTROL | _MODEL | _ANSWERS | _RUN

_HELD: Final = {
    FieldClass.TEXT: "free text",
    FieldClass.SHORT: "a short text",
    FieldClass.NUMBER: "numbers",
    FieldClass.SHAPE: "numbers",
    FieldClass.PLAN: "a plan",
    FieldClass.TRANSCRIPT: "a transcript",
    FieldClass.CERTIFICATE: "certificates",
    FieldClass.DIGEST: "digests and signatures",
    FieldClass.HASH: "digests and signatures",
    FieldClass.NOTE: "digests and signatures",
    FieldClass.SIGNATURE: "digests and signatures",
}  # the rest are names and codes of closed lists


def words_of(kind: str) -> str:
    """What a kind is for and may hold, for somebody who does not know the protocol."""
    if kind not in KINDS:
        return "no kind of this protocol"
    return f"{KIND_WORDS[kind]}; may hold {', '.join(held_by(kind))}"


def held_by(kind: str) -> list[str]:
    """What fields of these kinds there are in a message, in words, the most telling first."""
    found = {_HELD.get(each, "names and codes") for each in _classes(KINDS[kind].DESCRIPTOR)}
    order = [*dict.fromkeys(_HELD.values()), "names and codes"]
    return [*(["weights"] if kind in TENSOR_KINDS else []), *(word for word in order if word in found)] or ["nothing"]


def _classes(message: Any) -> Iterator[FieldClass]:
    for field in message.fields:
        if field.message_type is not None:
            yield from _classes(field.message_type)
        elif found := field_class(message.name, field.name):
            yield found


# Rule, what it is about, parts of the report that a reviewer may look at for it (threat_model 10).
ORIENTATION: Final = (
    ("HIPAA, 45 CFR 164.312(b)", "audit controls", "What left; Denied; Verification and witnesses"),
    (
        "HIPAA, 45 CFR 164.316(b)(2)",
        "documentation kept for 6 years",
        "Archived payloads and retention; Policy versions",
    ),
    (
        "GDPR, Art. 5(2)",
        "being able to show compliance",
        "Policy versions; Who approved what; Verification and witnesses",
    ),
    ("GDPR, Art. 30", "records of processing", "Data inventory; What left; What came in"),
    ("GDPR, Art. 32", "security of processing", "Denied; Halts and other incidents; Identities, certificates, keys"),
    ("GDPR, Art. 35", "impact assessment", "The most that could leave in one round; What this report cannot rule out"),
    ("EDPB, Opinion 28/2024", "personal data in AI models", "Data inventory; Differential privacy; Test evidence"),
    ("EU AI Act, Art. 12 and 19", "logs, kept for at least six months", "Verification and witnesses; Retention"),
    ("EU AI Act, Art. 14 and 26", "human oversight; duties of deployers", "Who approved what; Halts; Log review"),
    ("EU AI Act, Art. 15", "accuracy, robustness, cybersecurity", "Denied; Test evidence; Verification and witnesses"),
    ("NIST AI RMF", "govern, map, measure, manage", "The whole report"),
    ("NIST SP 800-226", "judging claims of differential privacy", "Differential privacy: none is claimed"),
)
ORIENTATION_NOTE: Final = (
    "Orientation only, not legal advice: where a reviewer may look, not a statement that a rule applies or is met. "
    "From when a duty holds differs by case, and dates of the EU AI Act were to be moved by the Digital Omnibus of "
    "2026. Ask your counsel."
)
