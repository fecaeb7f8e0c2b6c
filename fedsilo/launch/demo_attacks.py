"""`fedsilo demo --leak` and `--attack`: one party is hostile, and what a site decided on each attempt is looked up in
its own audit log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedsilo.edge.audit_segments import read_records
from fedsilo.launch.demo_sites import Site, Sites
from fedsilo.launch.demo_wire import Planted
from fedsilo.launch.hostile_attacks import ATTACKS, Attack
from fedsilo.launch.processes import Children
from fedsilo.treaty.errors import UsageError

NOT_STOPPED = (
    "Not stopped by this ruleset: a private prompt with the right answer written after it, wherever the public set's "
    "verifier reads an answer out of a longer text (math, choice, numeric) and the token limit leaves room. Only text "
    "screens may catch that, and ruleset pubswap names none."
)
_TRAINER_WAIT_SECONDS = 120
# A run in which only the beginning counts; a silo that was given something else than the others ends no round of it.
_SHORT = {
    "rounds": 1, "local_steps": 2, "quorum": 2, "evaluation": {"prompts": 16, "samples": 1},
    "round_deadline_seconds": 40.0,
}  # fmt: skip
# What one of these does, it does to a whole run.
_ALONE = frozenset({"one_record", "adapter_of_one_silo"})
# After it the silo sits the open round out.
_LEAVES_ROUND = frozenset({"round_opened_again"})
_CONTENT = frozenset({"lora.factors", "public.responses"})


@dataclass(frozen=True)
class Phase:
    """One run of the demo.

    Attributes:
        attacks: made in it.
        is_main: its figures are the demo's.
        fields: of its run.yaml, in place of the main run's.
    """

    attacks: tuple[str, ...]
    is_main: bool = True
    fields: Mapping[str, object] = field(default_factory=dict)


def phases(attacks: Sequence[Attack]) -> tuple[Phase, ...]:
    """The runs that the attacks need: one for all that a run outlives, and one for each that ends a run or a silo."""
    of_plan = [attack.name for attack in attacks if attack.kind == "run.plan" and attack.name != "plan_changed"]
    alone = [attack.name for attack in attacks if attack.outcome == "stopped" or attack.name in _ALONE]
    together = tuple(attack.name for attack in attacks if attack.name not in {*of_plan, *alone})
    after = [Phase((name,), is_main=False, fields=_SHORT) for name in alone]
    if after and not together and not of_plan:
        return (replace(after[0], is_main=True), *after[1:])
    return (*(Phase((name,), is_main=False, fields=_SHORT) for name in of_plan), Phase(together), *after)


SILOS_MIN = 3  # one update alone is no round's result, so two silos are left without the attacked one


def rounds_needed(attacks: Sequence[Attack], *, public_steps: int) -> int:
    """Of the main run, so that each of its attacks has its opportunity.

    Args:
        attacks: all.
        public_steps: of each round, after which answers come back.
    """
    from fedsilo.launch.hostile_deviations import DEVIATIONS

    names = next((phase.attacks for phase in phases(attacks) if phase.is_main), ())
    kinds = [ATTACKS[name].kind for name in names]
    if attacks and attacks[0].party == "coordinator":
        # those of rounds and adapters take a round each, after the others; one more has honest donors
        rounds = sum(DEVIATIONS[name].stage >= 2 or name in _LEAVES_ROUND for name in names)
        displacing = sum(DEVIATIONS[name].displaces for name in names)
        donors = kinds.count("public.donors") - ("donors_of_another_round" in names)
        # each message with donors can carry one of the others; in place of it, or of a round's result, comes another
        return 2 + rounds + math.ceil(donors / max(1, public_steps) + displacing / (public_steps + 1))
    answers = math.ceil(kinds.count("public.responses") / max(1, public_steps))
    evaluations = kinds.count("metrics.eval")
    # the last evaluation is where the trainer fails
    return max(1, kinds.count("lora.factors"), answers, evaluations + 1 if evaluations else 0)


def check_attacks(
    attacks: Sequence[Attack], *, rounds: int, silos: int, method: str, kinds: Iterable[str], public_steps: int
) -> None:
    """Whether a run of this shape gives every attack its opportunity and goes on without the attacker.

    Args:
        attacks: to be made.
        rounds: of the main run.
        silos: in it.
        method: its name.
        kinds: that the method sends.
        public_steps: of each round, after which answers come back.

    Raises:
        UsageError: not in such a run.
    """
    sent = {*kinds}
    for attack in attacks:
        needs = "public.responses" if attack.kind == "public.donors" else attack.kind
        if needs in _CONTENT and needs not in sent:
            raise UsageError(f"{attack.name} needs {needs}, which {method} does not send", hint="--attack NAME")
    if attacks and silos < SILOS_MIN:
        raise UsageError("a round goes on without the attacked silo only if two others are left", hint="--silos 3")
    needed = rounds_needed(attacks, public_steps=public_steps)
    if attacks and rounds < needed:
        raise UsageError(f"these attacks need {needed} rounds", hint=f"--rounds {needed}, or fewer attacks")


class Hostile:
    """The hostile party of a demo: the last silo's trainer, or the coordinator.

    Args:
        sites: not started.
        attacks: of one party.
        planted: among it the text of the failure that a hostile trainer reports at the end.
    """

    def __init__(self, sites: Sites, attacks: Sequence[Attack], planted: Planted) -> None:
        self._sites = sites
        self.attacks = tuple(attacks)
        self.phases = phases(attacks)
        self.site = sites.silos[-1]
        self.is_trainer = attacks[0].party == "trainer"
        self._crash = planted.texts(self.site.name, "exception")[0]
        self._environment = planted.environment(self.site.name)
        self._report = sites.coordinator.folder.parent / "attempts.jsonl"

    def ends_silo(self, phase: Phase) -> bool:
        """Whether the guard of the hostile trainer ends with this run."""
        return self.is_trainer and (phase.is_main or any(ATTACKS[name].outcome == "stopped" for name in phase.attacks))

    @property
    def name(self) -> str:
        return f"{self.site.name}'s trainer" if self.is_trainer else "the coordinator"

    def start_trainer(self, children: Children, logs: Path, phase: Phase) -> None:
        """Start the hostile trainer of one run; it dials the guard as soon as that wants a trainer."""
        socket = self.site.folder / "state" / "run" / "trainer.sock"
        arguments = ["--address", f"unix:{socket}", "--report", str(self._report)]
        arguments += [part for name in phase.attacks for part in ("--attack", name)]
        arguments += ["--wait-seconds", str(_TRAINER_WAIT_SECONDS)]
        if phase.is_main and not any(ATTACKS[name].outcome == "stopped" for name in phase.attacks):
            arguments += ["--crash", self._crash]
        children.start(
            f"{self.site.name} trainer",
            arguments,
            logs / f"{self.site.name}-trainer.log",
            module="fedsilo.launch.hostile_trainer",
            environment=self._environment,
            may_end=True,
        )

    def coordinator_arguments(self) -> list[str]:
        """What `python -m fedsilo.launch.hostile_coordinator` is started with."""
        arguments = ["--config", str(self._sites.coordinator.config), "--report", str(self._report)]
        arguments += [part for attack in self.attacks for part in ("--attack", attack.name)]
        arguments += [part for site in self._sites.silos for part in ("--plan-target", site.name)]
        return [*arguments, "--target", self.site.name]

    def verdicts(self) -> list[dict[str, Any]]:
        """One row per attack, as the attacked silo's log has it: {name, decision, rule, rules, kind, run, round, step,
        record, silo, must, expected, obeyed}; of a plan that was sent to every silo, the worst of their rows.

        `decision` is `not made` where the run gave it no opportunity, and `none` where the log knows nothing of it.
        `obeyed`: contributions that left because of it.
        """
        made: dict[str, list[dict[str, Any]]] = {}
        if self._report.exists():
            for row in map(json.loads, self._report.read_text().splitlines()):
                made.setdefault(row["name"], []).append(row)
        logs = {site.name: list(read_records(site.audit_log)) for site in self._sites.silos}
        return [self._verdict(attack, made.get(attack.name, []), logs) for attack in self.attacks]

    def _verdict(
        self, attack: Attack, made: Sequence[dict[str, Any]], logs: Mapping[str, list[dict[str, Any]]]
    ) -> dict[str, Any]:
        rows = [
            {"silo": self.site.name, **attempt, **found_in(logs[attempt.get("silo", self.site.name)], attack, attempt)}
            for attempt in made
        ]
        blank = {"decision": "not made", "rule": "", "rules": [], "run": "", "round": 0, "step": 0, "record": None}
        rows = rows or [{"silo": self.site.name, **blank, "obeyed": 0}]
        worst = next((row for row in rows if row["decision"] != attack.decision or row["obeyed"]), rows[0])
        return {
            **worst,
            "name": attack.name,
            "kind": attack.kind,
            "must": attack.consequence,
            "expected": attack.decision,
        }

    def reached_coordinator(self, verdicts: Sequence[dict[str, Any]]) -> list[str]:
        """Attacks of a trainer whose message was to stay, and which the coordinator's log knows as received."""
        received = {
            tuple(record.get(name) for name in ("run", "kind", "round", "step"))
            for record in read_records(self._sites.coordinator.audit_log)
            if record["event"] == "ingress.decision" and str(record["peer"]).endswith(f"/silo/{self.site.name}")
        }
        return [
            row["name"]
            for row in verdicts
            if self.is_trainer
            and ATTACKS[row["name"]].outcome == "denied"
            and (row["run"], row["kind"], row["round"], row["step"]) in received
        ]


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
    from fedsilo.launch.hostile_deviations import DEVIATIONS

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


def fault(verdicts: Sequence[dict[str, Any]], reached: Sequence[str]) -> tuple[str, str]:
    """(code, why the show does not hold); both empty when every attack was made and came to what it must."""
    attacks = [ATTACKS[row["name"]] for row in verdicts]
    let = [
        attack.name
        for attack, row in zip(attacks, verdicts, strict=True)
        if row["obeyed"] or (attack.decision != "allow" and row["decision"] in ("allow", "hold"))
    ]
    if let or reached:
        names = ", ".join(dict.fromkeys([*let, *reached]))
        return "LEAKED", f"{names} was not stopped by the guard"
    unseen = [f"{row['name']} ({row['decision']})" for row in verdicts if row["decision"] in ("not made", "none")]
    if unseen:
        return "NOT_SHOWN", f"nothing was decided on {', '.join(unseen)}"
    otherwise = [
        f"{row['name']} ({row['decision']}: {', '.join(row['rules'])})"
        for attack, row in zip(attacks, verdicts, strict=True)
        if row["decision"] != attack.decision or (attack.decision == "deny" and row["rule"] != attack.rule)
    ]
    if otherwise:
        return "NOT_SHOWN", f"not stopped by the rule made for it, or not let out as documented: {', '.join(otherwise)}"
    return "", ""


def attacked_sites(sites: Sites, attacks: Sequence[Attack]) -> list[Site]:
    """Silos whose trainer the demo starts itself, since it is hostile."""
    return [sites.silos[-1]] if attacks and attacks[0].party == "trainer" else []
