"""Decisions again, from the facts that an audit log kept: what another policy would have said. Needs no payloads.

A decision record holds all that `measure` found and the counts it was judged by, so `decide` can be asked again.
What this does not tell: what would have followed. A message is judged as it was sent (a smaller clip limit would have
scaled the delta first), each for itself, and with the counts of its own time. Screens replay from what they found then;
where their settings are others, that takes the archived text (`rescreen`), and where it is gone, nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.engine import OFFERED, Decision, History, decide
from policies.load import Policy
from policies.message import Facts
from policies.rules.base import block_of
from policies.screening import Material, asked, screen, screen_facts, settings_of

DECISIONS = ("egress.decision", "ingress.decision")
# Verdicts that no rule gave, so that no rule can give them again.
_NOT_OF_RULES = frozenset({"transform"})


@dataclass(frozen=True)
class Replayed:
    """One recorded decision and what the policy says now.

    Attributes:
        seq: of the record.
        record: as it stands in the log.
        decision: None where it cannot be asked again; `why` says why.
        clipped_first: the policy denies these factors for their length alone, and its clip limit is the smaller one:
            a guard under it would have scaled them down before it judged them.
    """

    seq: int
    record: Mapping[str, Any]
    decision: Decision | None
    why: str = ""
    clipped_first: bool = False

    @property
    def changed(self) -> bool:
        return self.decision is not None and self.decision.verdict != self.record["decision"]

    def to_json(self) -> dict[str, Any]:
        record, decision = self.record, self.decision
        return {
            "seq": self.seq,
            **{key: record.get(key) for key in ("kind", "run", "round", "step", "direction", "peer")},
            "recorded": record["decision"],
            "recorded_reasons": list(record.get("reasons", ())),
            "replayed": decision.verdict if decision else "",
            "reasons": list(decision.reasons) if decision else [],
            "not_replayed": self.why,
            "clipped_first": self.clipped_first,
        }


def replay(records: Iterable[Mapping[str, Any]], policy: Policy) -> Iterator[Replayed]:
    """Every recorded decision, judged by `policy`, in the order of the log.

    Args:
        records: of one log; what is no decision is passed over.
        policy: the one to ask.
    """
    for record in records:
        if record["event"] in DECISIONS:
            yield replayed(record, policy)


def replayed(record: Mapping[str, Any], policy: Policy) -> Replayed:
    """One decision record, judged by `policy`."""
    facts = record.get("facts", {})
    if "final" not in facts or "history" not in facts:
        return Replayed(int(record["seq"]), record, None, "refused before it was measured")
    if any(rule["rule"] in _NOT_OF_RULES for rule in record.get("rules", ())):
        return Replayed(int(record["seq"]), record, None, "its values could not be made fit, which no rule judges")
    decision = decide(dict(facts["final"]), policy, History.from_json(dict(facts["history"])))
    if screens := _screened_otherwise(facts["final"], policy):
        return Replayed(int(record["seq"]), record, None, f"{' and '.join(screens)}: this takes the archived text")
    if decision.stage == OFFERED and decision.verdict != "deny":
        # What it would have become by clipping and rounding was never made, so nobody can say that it would have left.
        return Replayed(int(record["seq"]), record, None, "was refused before its values were made fit")
    return Replayed(int(record["seq"]), record, decision, clipped_first=_clips_first(record, decision, policy))


def rescreen(policy: Policy, texts: Sequence[str], material: Material, *, kind: str = "public.responses") -> Facts:
    """Facts of archived texts as this policy's screens find them; put over recorded facts they replay with `decide`.

    What was withheld is in no archive: an archived message holds what was offered last, so a policy whose screens are
    looser cannot bring it back.

    Args:
        policy: the one to ask.
        texts: of the message, in its order.
        material: what this party's screens need of its own files.
        kind: of the message; public.donors is screened on the way in.
    """
    direction = "ingress" if kind == "public.donors" else "egress"
    block = policy.file.ingress.public_donors if kind == "public.donors" else policy.file.egress.public_responses
    return screen_facts(screen(policy.file, asked(block, kind, direction), texts, material), len(texts))


def _screened_otherwise(facts: Mapping[str, Any], policy: Policy) -> list[str]:
    """Why recorded facts do not tell what this policy's screens would have found; empty where they do."""
    kind, direction = facts["kind"], facts["direction"]
    if kind not in ("public.responses", "public.donors") or facts.get("stage") == OFFERED:
        return []
    block, _ = block_of(dict(facts), policy)
    ran, failed = facts.get("screens", {}), facts.get("screens_failed", ())
    return [
        f"screen {name} {'had other settings' if name in ran else 'did not run then'}"
        for name in asked(block, kind, direction)
        if name not in failed and ran.get(name) != settings_of(policy.file, name)
    ]


def _clips_first(record: Mapping[str, Any], decision: Decision, policy: Policy) -> bool:
    block = policy.file.egress.updates.get(str(record.get("kind")))
    return (
        record["event"] == "egress.decision"
        and block is not None
        and decision.reasons == ("DELTA_L2",)
        and float(record["facts"]["final"]["l2"]) > block.clip_l2
    )
