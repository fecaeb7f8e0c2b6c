"""`fedsilo demo --leak` and `--attack`: the last silo's trainer is hostile, and what its guard decided on each attempt
is looked up in the guard's own audit log.

What the four attacks do not show: anything hidden inside allowed values (N1), or an attack that nobody thought of.
Others are made by the tests (`tests/hostile`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.audit.reader import read_records
from fedsilo.demo.processes import Children
from fedsilo.demo.sites import Sites
from fedsilo.demo.wire import Planted
from fedsilo.protocol.errors import UsageError

NOT_STOPPED = (
    "Not stopped by this ruleset: a private prompt with the right answer written after it, wherever the public set's "
    "verifier reads an answer out of a longer text (math, choice, numeric) and the token limit leaves room. Only text "
    "screens may catch that, and ruleset pubswap names none."
)
SILOS_MIN = 3  # one update alone is no round's result, so two silos are left without the attacked one
_TRAINER_WAIT_SECONDS = 120


@dataclass(frozen=True)
class Attack:
    """One attempt of a trainer to get private data out.

    Attributes:
        kind: of the message it speaks through.
        rule: that denies it, so that nothing of the message leaves.
    """

    name: str
    kind: str
    rule: str


LEAK = {
    attack.name: attack
    for attack in (
        Attack("prompt_as_response", "public.responses", "answers graded again"),
        Attack("prompt_in_tensor_name", "lora.factors", "tensor set"),
        Attack("extra_tensor", "lora.factors", "tensor set"),
        Attack("off_grid_number", "metrics.eval", "metric grid"),
    )
}


def named(names: Iterable[str]) -> tuple[Attack, ...]:
    """The attacks that were asked for, each once, in the order of the list. Raises UsageError: there is no such one."""
    wanted = set(names)
    if unknown := sorted(wanted - LEAK.keys()):
        raise UsageError(f"there is no attack {unknown[0]!r}", hint=f"one of {', '.join(LEAK)}")
    return tuple(attack for attack in LEAK.values() if attack.name in wanted)


def rounds_needed(attacks: Sequence[Attack], *, public_steps: int) -> int:
    """Return how many rounds give each attack its opportunity.

    Args:
        attacks: all.
        public_steps: of each round, after which answers come back.
    """
    kinds = [attack.kind for attack in attacks]
    answers = math.ceil(kinds.count("public.responses") / max(1, public_steps))
    evaluations = kinds.count("metrics.eval")
    # the last evaluation is where the trainer fails
    return max(1, kinds.count("lora.factors"), answers, evaluations + 1 if evaluations else 0)


def check_attacks(
    attacks: Sequence[Attack], *, rounds: int, silos: int, method: str, kinds: Iterable[str], public_steps: int
) -> None:
    """Check that a run of this shape gives every attack its opportunity and goes on without the attacker.

    Args:
        attacks: to be made.
        rounds: of the run.
        silos: in it.
        method: its name.
        kinds: that the method sends.
        public_steps: of each round, after which answers come back.

    Raises:
        UsageError: not in such a run.
    """
    sent = {*kinds}
    for attack in attacks:
        if attack.kind == "public.responses" and attack.kind not in sent:
            raise UsageError(f"{attack.name} needs {attack.kind}, which {method} does not send", hint="--attack NAME")
    if attacks and silos < SILOS_MIN:
        raise UsageError("a round goes on without the attacked silo only if two others are left", hint="--silos 3")
    needed = rounds_needed(attacks, public_steps=public_steps)
    if attacks and rounds < needed:
        raise UsageError(f"these attacks need {needed} rounds", hint=f"--rounds {needed}, or fewer attacks")


class Hostile:
    """The last silo's trainer, which is hostile.

    Args:
        sites: not started.
        attacks: what it tries.
        planted: among it the text of the failure that it reports at the end.
    """

    def __init__(self, sites: Sites, attacks: Sequence[Attack], planted: Planted) -> None:
        self._sites = sites
        self.attacks = tuple(attacks)
        self.site = sites.silos[-1]
        self._crash = planted.texts(self.site.name, "exception")[0]
        self._environment = planted.environment(self.site.name)
        self._report = sites.coordinator.folder.parent / "attempts.jsonl"

    def start_trainer(self, children: Children, logs: Path) -> None:
        """Start the hostile trainer; it dials the guard as soon as that wants a trainer."""
        socket = self.site.folder / "state" / "run" / "trainer.sock"
        arguments = ["--address", f"unix:{socket}", "--report", str(self._report), "--crash", self._crash]
        arguments += [part for attack in self.attacks for part in ("--attack", attack.name)]
        children.start(
            f"{self.site.name} trainer",
            [*arguments, "--wait-seconds", str(_TRAINER_WAIT_SECONDS)],
            logs / f"{self.site.name}-trainer.log",
            module="fedsilo.demo.hostile_trainer",
            environment=self._environment,
            may_end=True,
        )

    def verdicts(self) -> list[dict[str, Any]]:
        """One row per attack, as the silo's log has it: {name, kind, run, round, step, decision, rule, rules, record}.

        `decision` is `not made` where the run gave it no opportunity, and `none` where the log knows nothing of it.
        """
        made: dict[str, dict[str, Any]] = {}
        if self._report.exists():
            made = {row["name"]: row for row in map(json.loads, self._report.read_text().splitlines())}
        records = list(read_records(self.site.audit_log))
        return [self._verdict(attack, made.get(attack.name), records) for attack in self.attacks]

    def _verdict(
        self, attack: Attack, attempt: Mapping[str, Any] | None, records: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        row: dict[str, Any] = {
            "silo": self.site.name, "name": attack.name, "kind": attack.kind, "run": "", "round": 0, "step": 0,
            "decision": "not made", "rule": "", "rules": [], "record": None,
        }  # fmt: skip
        return row if attempt is None else {**row, **attempt, **found_in(records, attack, attempt)}

    def reached_coordinator(self, verdicts: Sequence[dict[str, Any]]) -> list[str]:
        """Attacks whose message the coordinator's log knows as received."""
        received = {
            tuple(record.get(name) for name in ("run", "kind", "round", "step"))
            for record in read_records(self._sites.coordinator.audit_log)
            if record["event"] == "ingress.decision" and str(record["peer"]).endswith(f"/silo/{self.site.name}")
        }
        return [row["name"] for row in verdicts if (row["run"], row["kind"], row["round"], row["step"]) in received]


def found_in(records: Sequence[dict[str, Any]], attack: Attack, attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a silo's log says of one attempt: {decision, rule, rules, record}.

    Args:
        records: of the log.
        attack: that was made.
        attempt: as the hostile trainer reported it.
    """
    row: dict[str, Any] = {"decision": "none", "rule": "", "rules": [], "record": None}
    place = (attempt["run"], attack.kind, attempt["round"], attempt["step"])
    for record in records:
        if record["event"] != "egress.decision":
            continue
        if tuple(record.get(name) for name in ("run", "kind", "round", "step")) != place:
            continue
        rules = [rule["rule"] for rule in record.get("rules", ()) if rule["outcome"] == "deny"] or record["reasons"]
        rule = attack.rule if attack.rule in rules or not rules else rules[0]
        row = {"decision": record["decision"], "rule": rule, "rules": rules, "record": record["seq"]}
        if record["decision"] != "deny":
            break  # the worst that happened to a message is what counts
    return row


def fault(verdicts: Sequence[dict[str, Any]], reached: Sequence[str]) -> tuple[str, str]:
    """(code, why the show does not hold); both empty when every attack was made and denied by the rule made for it."""
    let = [row["name"] for row in verdicts if row["decision"] in ("allow", "hold")]
    if let or reached:
        names = ", ".join(dict.fromkeys([*let, *reached]))
        return "LEAKED", f"{names} was not stopped by the guard"
    unseen = [f"{row['name']} ({row['decision']})" for row in verdicts if row["decision"] in ("not made", "none")]
    if unseen:
        return "NOT_SHOWN", f"nothing was decided on {', '.join(unseen)}"
    otherwise = [
        f"{row['name']} ({row['decision']}: {', '.join(row['rules'])})"
        for row in verdicts
        if (row["decision"], row["rule"]) != ("deny", LEAK[row["name"]].rule)
    ]
    if otherwise:
        return "NOT_SHOWN", f"not stopped by the rule made for it: {', '.join(otherwise)}"
    return "", ""
