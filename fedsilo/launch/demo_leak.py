"""`fedsilo demo --leak`: one silo's trainer is hostile, and what its guard decided on each attempt is looked up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedsilo.edge.audit_segments import read_records
from fedsilo.launch.demo_sites import Sites
from fedsilo.launch.demo_wire import Planted
from fedsilo.launch.leaking_trainer import ATTACKS
from fedsilo.launch.processes import Children
from fedsilo.treaty.errors import UsageError

NOT_STOPPED = (
    "Not stopped by this ruleset: a private prompt with the right answer written after it, wherever the public set's "
    "verifier reads an answer out of a longer text (math, choice, numeric) and the token limit leaves room. Only text "
    "screens could stop that, and there are none yet."
)
_TRAINER_WAIT_SECONDS = 120


def check_attacks(attacks: Sequence[str], *, rounds: int, silos: int, method: str, kinds: Iterable[str]) -> None:
    """Whether a run of this shape gives every attack its opportunity and goes on without the attacker.

    Args:
        attacks: names.
        rounds: of the run.
        silos: in it.
        method: its name.
        kinds: that the method sends.

    Raises:
        UsageError: no such attack, or not in such a run.
    """
    for name in attacks:
        if name not in ATTACKS:
            raise UsageError(f"there is no attack {name!r}", hint=f"one of {', '.join(ATTACKS)}")
        if ATTACKS[name].kind not in {*kinds, "metrics.eval"}:
            raise UsageError(f"{name} needs {ATTACKS[name].kind}, which {method} does not send", hint="--attack NAME")
    if attacks and silos < 2:
        raise UsageError("a round goes on without the attacker only if there is another silo", hint="--silos 2")
    # a release of factors for each that speaks through one; and the last evaluation is where the trainer fails
    needed = max(sum(ATTACKS[name].kind == "lora.factors" for name in attacks), 2 * ("off_grid_number" in attacks))
    if rounds < needed:
        raise UsageError(f"these attacks need {needed} rounds", hint=f"--rounds {needed}, or one --attack")


class Leak:
    """The hostile trainer of the last silo.

    Args:
        sites: not started; the silo's `trainer.launch` is external.
        attacks: names out of ATTACKS.
        planted: among it the text of the failure that it reports at the end.
    """

    def __init__(self, sites: Sites, attacks: Sequence[str], planted: Planted) -> None:
        self._sites = sites
        self.attacks = tuple(attacks)
        self.site = sites.silos[-1]
        self._crash = planted.texts(self.site.name, "exception")[0]
        self._environment = planted.environment(self.site.name)
        self._report = self.site.folder / "attempts.jsonl"

    def start(self, children: Children, logs: Path) -> None:
        """Start it; it dials the guard as soon as that wants a trainer."""
        socket = self.site.folder / "state" / "run" / "trainer.sock"
        arguments = ["--address", f"unix:{socket}", "--report", str(self._report), "--crash", self._crash]
        arguments += [part for name in self.attacks for part in ("--attack", name)]
        arguments += ["--wait-seconds", str(_TRAINER_WAIT_SECONDS)]
        children.start(
            f"{self.site.name} trainer",
            arguments,
            logs / f"{self.site.name}-trainer.log",
            module="fedsilo.launch.leaking_trainer",
            environment=self._environment,
            may_end=True,
        )

    def verdicts(self) -> list[dict[str, Any]]:
        """One row per attack: {name, decision, rule, rules, kind, round, step, record}, as the guard's log has them.

        `decision` is `not made` where the run gave it no opportunity, and `none` where the log knows nothing of it.
        """
        made = {}
        if self._report.exists():
            made = {row["name"]: row for row in map(json.loads, self._report.read_text().splitlines())}
        decisions = [record for record in read_records(self.site.audit_log) if record["event"] == "egress.decision"]
        return [_verdict(name, made.get(name), decisions) for name in self.attacks]

    def reached_coordinator(self, verdicts: Sequence[dict[str, Any]]) -> list[str]:
        """Attacks whose message the coordinator's log knows as received from that silo."""
        received = {
            (record["kind"], record["round"], record["step"])
            for record in read_records(self._sites.coordinator.audit_log)
            if record["event"] == "ingress.decision" and str(record["peer"]).endswith(f"/silo/{self.site.name}")
        }
        return [row["name"] for row in verdicts if (row["kind"], row["round"], row["step"]) in received]


def _verdict(name: str, made: dict[str, Any] | None, decisions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": name, "decision": "not made", "rule": "", "rules": [], "kind": ATTACKS[name].kind}
    row |= {"round": 0, "step": 0, "record": None}
    if made is None:
        return row
    row |= {"decision": "none", "round": made["round"], "step": made["step"]}
    place = (made["kind"], made["round"], made["step"])
    for record in decisions:
        if (record["kind"], record["round"], record["step"]) == place:
            rules = [rule["rule"] for rule in record["rules"] if rule["outcome"] == "deny"]
            made_for_it = ATTACKS[name].rule
            rule = made_for_it if made_for_it in rules else (rules[0] if rules else "")
            row |= {"decision": record["decision"], "rule": rule, "rules": rules}
            row["record"] = record["seq"]
            if record["decision"] != "deny":
                break  # the worst that happened to a message is what counts
    return row


def fault(verdicts: Sequence[dict[str, Any]], reached: Sequence[str]) -> tuple[str, str]:
    """(code, why the show does not hold); both empty when every attack was made, denied by its rule and kept in."""
    let_out = [row["name"] for row in verdicts if row["decision"] not in ("deny", "not made", "none")]
    if let_out or reached:
        return "LEAKED", f"{', '.join(dict.fromkeys([*let_out, *reached]))} was not stopped by the guard"
    unseen = [f"{row['name']} ({row['decision']})" for row in verdicts if row["decision"] != "deny"]
    if unseen:
        return "NOT_SHOWN", f"nothing was decided on {', '.join(unseen)}"
    by_chance = [
        f"{row['name']} ({', '.join(row['rules'])})" for row in verdicts if row["rule"] != ATTACKS[row["name"]].rule
    ]
    return ("NOT_SHOWN", f"denied, but not by the rule made for it: {', '.join(by_chance)}") if by_chance else ("", "")
