"""What came of attacks: the runs that they need, and what each attacked site's own audit log says of each attempt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.deviations import DEVIATIONS

# A run in which only the beginning counts; a silo that was given something else than the others ends no round of it.
_SHORT = {
    "rounds": 1, "local_steps": 2, "quorum": 2, "evaluation": {"prompts": 16, "samples": 1},
    "round_deadline_seconds": 40.0,
}  # fmt: skip
# What one of these does, it does to a whole run.
_ALONE = frozenset({"adapter_of_one_silo"})
# After it the silo sits the open round out.
_LEAVES_ROUND = frozenset({"round_opened_again"})
_CONTENT = frozenset({"lora.factors", "public.responses"})


@dataclass(frozen=True)
class Phase:
    """One run of a federation that is attacked.

    Attributes:
        attacks: made in it.
        is_main: one that goes on to its end, in which most are made.
        fields: of its run.yaml, in place of the main run's.
    """

    attacks: tuple[str, ...]
    is_main: bool = True
    fields: Mapping[str, object] = field(default_factory=dict)


def phases(attacks: Sequence[Attack]) -> tuple[Phase, ...]:
    """The runs that a coordinator's attacks need: one for each changed plan, one for all that a run outlives, and one
    for each that takes a run of its own."""
    of_plan = [attack.name for attack in attacks if attack.kind == "run.plan" and attack.name != "plan_changed"]
    alone = [attack.name for attack in attacks if attack.name in _ALONE]
    together = tuple(attack.name for attack in attacks if attack.name not in {*of_plan, *alone})
    before, after = ([Phase((name,), is_main=False, fields=_SHORT) for name in names] for names in (of_plan, alone))
    return (*before, Phase(together), *after)


def rounds_needed(attacks: Sequence[Attack], *, public_steps: int) -> int:
    """Rounds of the main run in which each of a coordinator's attacks has its opportunity.

    Args:
        attacks: all.
        public_steps: of each round, after which answers come back.
    """
    names = next(phase.attacks for phase in phases(attacks) if phase.is_main)
    # those of rounds and adapters take a round each, after the others; one more has honest donors
    rounds = sum(DEVIATIONS[name].stage >= 2 or name in _LEAVES_ROUND for name in names)
    displacing = sum(DEVIATIONS[name].displaces for name in names)
    donors = sum(ATTACKS[name].kind == "public.donors" for name in names) - ("donors_of_another_round" in names)
    # each message with donors can carry one of the others; in place of it, or of a round's result, comes another
    return 2 + rounds + math.ceil(donors / max(1, public_steps) + displacing / (public_steps + 1))


def verdicts(
    attacks: Sequence[Attack],
    made: Sequence[Mapping[str, Any]],
    logs: Mapping[str, Sequence[dict[str, Any]]],
    silo: str,
) -> list[dict[str, Any]]:
    """One row per attack, as the attacked silo's log has it: {name, decision, rule, rules, kind, run, round, step,
    record, silo, obeyed}; of a plan that was sent to every silo, the worst of their rows.

    Args:
        attacks: that were to be made.
        made: attempts as the hostile party reported them.
        logs: records, by silo.
        silo: that is attacked where an attempt names none.

    `decision` is `not made` where the run gave it no opportunity, and `none` where the log knows nothing of it.
    `obeyed`: contributions that left because of it.
    """
    found = []
    for attack in attacks:
        rows = [
            {"silo": silo, **attempt, **found_in(logs[attempt.get("silo", silo)], attack, attempt)}
            for attempt in made
            if attempt["name"] == attack.name
        ]
        blank = {"decision": "not made", "rule": "", "rules": [], "run": "", "round": 0, "step": 0, "record": None}
        rows = rows or [{"silo": silo, **blank, "obeyed": 0}]
        worst = next((row for row in rows if row["decision"] != attack.decision or row["obeyed"]), rows[0])
        found.append({**worst, "name": attack.name, "kind": attack.kind})
    return found


def found_in(records: Sequence[dict[str, Any]], attack: Attack, attempt: Mapping[str, Any]) -> dict[str, Any]:
    """What a silo's log says of one attempt: {decision, rule, rules, record, obeyed}.

    Args:
        records: of the log.
        attack: that was made.
        attempt: as the hostile party reported it.
    """
    row: dict[str, Any] = {"decision": "none", "rule": "", "rules": [], "record": None, "obeyed": 0}
    for record in records:
        if record["event"] != ("egress.decision" if attack.party == "trainer" else "ingress.decision"):
            continue
        if not _is_about(record, attack, attempt):
            continue
        rules = [rule["rule"] for rule in record.get("rules", ()) if rule["outcome"] == "deny"] or record["reasons"]
        rule = attack.rule if attack.rule in rules or not rules else rules[0]
        row |= {"decision": _decision_of(record, attack), "rule": rule, "rules": rules, "record": record["seq"]}
        if record["decision"] != "deny":
            break  # the worst that happened to a message is what counts
    if attack.party == "coordinator" and attack.outcome == "denied":
        row["obeyed"] = _obeyed(records, attack, attempt)
    return row


def _is_about(record: Mapping[str, Any], attack: Attack, attempt: Mapping[str, Any]) -> bool:
    if attack.outcome in ("refused", "stopped"):
        # what was not believed, or is no message, is on record by its reason alone
        kind = "unknown" if attack.party == "trainer" else attempt["kind"]
        return (record.get("kind"), record.get("reasons")) == (kind, [attack.rule])
    if attack.party == "coordinator":
        return (record.get("kind"), record.get("sequence")) == (attempt["kind"], attempt["sequence"])
    place = tuple(record.get(name) for name in ("run", "kind", "round", "step"))
    return bool(place == (attempt["run"], attack.kind, attempt["round"], attempt["step"]))


def _decision_of(record: Mapping[str, Any], attack: Attack) -> str:
    if record["decision"] == "deny":
        return "stop" if attack.outcome == "stopped" else "deny"
    transform = record.get("facts", {}).get("transform", {})
    if transform.get("donors_dropped"):
        return "drop"
    if attack.outcome == "clipped" and transform.get("clipped"):
        return "clip"
    return str(record["decision"])


def _obeyed(records: Sequence[dict[str, Any]], attack: Attack, attempt: Mapping[str, Any]) -> int:
    """Contributions that left for a run or round that was refused. Where a refused message stood beside a good round,
    that round's own contributions are none."""
    stage = DEVIATIONS[attack.name].stage
    if stage == 1:
        return 0
    return sum(
        record["event"] == "egress.sent"
        and record["kind"] in _CONTENT
        and record.get("run") == attempt["run"]
        and (stage == 0 or record.get("round") == attempt["round"])
        for record in records
    )
