"""Replays decisions from the facts in an audit log: what another policy would have decided. It needs no payloads.

A decision record holds all that `measure` found and the counts it was judged by, so `decide` can be asked again.
What this does not tell: what would have followed. A message is judged as it was sent (a smaller clip limit would have
scaled the delta first), each for itself, and with the counts of its own time. Screens replay from what they found then;
where their settings are others, that takes the archived text (silo/guard/screens.py), and where it is gone, nobody
knows. What was withheld is in no archive: looser screens cannot bring it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from policies.engine import OFFERED, Decision, History, decide
from policies.kind import block_of
from policies.message import Facts
from policies.model import Policy, ScreenName
from policies.screens import TEXT_KINDS, asked, settings_of

DECISIONS = ("egress.decision", "ingress.decision")
# Verdicts that no rule gave, so that no rule can give them again.
_NOT_OF_RULES = frozenset({"transform"})


@dataclass(frozen=True)
class Replayed:
    """A recorded decision and the present policy's verdict.

    Attributes:
        seq: of the record.
        record: as it stands in the log.
        decision: None where it cannot be asked again; `why` says why.
        rescreened: its archived text was screened again.
        withheld_first: the policy denies these answers for a screen's hit alone, and says on_hit: withhold: a guard
            under it would have dropped the responses with a hit and judged the rest.
        clipped_first: the policy denies these factors for their length alone, and its clip limit is the smaller one:
            a guard under it would have scaled them down before it judged them.
    """

    seq: int
    record: Mapping[str, Any]
    decision: Decision | None
    why: str = ""
    clipped_first: bool = False
    rescreened: bool = False
    withheld_first: bool = False

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
            "rescreened": self.rescreened,
            "withheld_first": self.withheld_first,
        }


def replay(
    records: Iterable[Mapping[str, Any]], policy: Policy, rescreened: Mapping[int, Facts | str] | None = None
) -> Iterator[Replayed]:
    """Yield every recorded decision, judged by `policy`, in the order of the log.

    Args:
        records: of one log; what is no decision is passed over.
        policy: the one to ask.
        rescreened: by number of the record, what this policy's screens find in the archived text, as facts; or why
            nobody can tell.
    """
    for record in records:
        if record["event"] in DECISIONS:
            yield replayed(record, policy, None if rescreened is None else rescreened.get(record["seq"]))


def replayed(record: Mapping[str, Any], policy: Policy, found: Facts | str | None = None) -> Replayed:
    """Judge one decision record by `policy`. found: as `rescreened` of `replay`."""
    facts, seq = record.get("facts", {}), int(record["seq"])
    if "final" not in facts or "history" not in facts:
        return Replayed(seq, record, None, "refused before it was measured")
    if any(rule["rule"] in _NOT_OF_RULES for rule in record.get("rules", ())):
        return Replayed(seq, record, None, "its values could not be made fit, which no rule judges")
    again = isinstance(found, dict)
    final = {**facts["final"], **(found if isinstance(found, dict) else {})}
    decision = decide(final, policy, History.from_json(dict(facts["history"])))
    if screens := screened_otherwise(final, policy):
        words = " and ".join(
            f"screen {name} {'had other settings' if ran else 'did not run then'}" for name, ran in screens.items()
        )
        return Replayed(seq, record, None, f"{words}: {found or 'this takes the archived text'}")
    if decision.stage == OFFERED and decision.verdict != "deny":
        # What it would have become by clipping and rounding was never made, so nobody can say that it would have left.
        return Replayed(seq, record, None, "was refused before its values were made fit")
    return Replayed(
        seq,
        record,
        decision,
        clipped_first=_clips_first(record, decision, policy),
        rescreened=again,
        withheld_first=_withholds_first(record, decision, policy),
    )


def screened_otherwise(facts: Mapping[str, Any], policy: Policy) -> dict[ScreenName, bool]:
    """Screens of this policy whose results the recorded facts do not tell; whether they ran, with other settings."""
    if facts.get("stage") == OFFERED:
        return {}
    ran, failed = facts.get("screens", {}), facts.get("screens_failed", ())
    return {
        name: name in ran
        for name in screens_asked(facts, policy)
        if name not in failed and ran.get(name) != settings_of(policy.file, name)
    }


def screens_asked(facts: Mapping[str, Any], policy: Policy) -> tuple[ScreenName, ...]:
    """Screens that this policy wants run over a message with these facts."""
    if facts["kind"] not in TEXT_KINDS:
        return ()
    return asked(block_of(dict(facts), policy)[0], facts["kind"], facts["direction"])


def _withholds_first(record: Mapping[str, Any], decision: Decision, policy: Policy) -> bool:
    block = policy.file.egress.public_responses
    return (
        record["event"] == "egress.decision"
        and record.get("kind") == "public.responses"
        and block is not None
        and block.on_hit == "withhold"
        and decision.reasons == ("SCREEN_HIT",)
    )


def _clips_first(record: Mapping[str, Any], decision: Decision, policy: Policy) -> bool:
    block = policy.file.egress.updates.get(str(record.get("kind")))
    return (
        record["event"] == "egress.decision"
        and block is not None
        and decision.reasons == ("DELTA_L2",)
        and float(record["facts"]["final"]["l2"]) > block.clip_l2
    )
