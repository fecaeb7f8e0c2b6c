"""`fedsilo demo --leak`: one silo's trainer is hostile, and what its guard decided on each attempt is looked up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsilo.edge.audit_segments import read_records
from fedsilo.launch.demo_sites import Sites
from fedsilo.launch.demo_wire import Planted
from fedsilo.launch.leaking_trainer import ATTACKS, ROUNDS_MIN
from fedsilo.launch.processes import Children
from fedsilo.treaty.errors import NotFoundError, UsageError

NOT_STOPPED = (
    "Not stopped by this ruleset: a private prompt with the right answer written after it, wherever the public set's "
    "verifier reads an answer out of a longer text (math, choice, numeric) and the token limit leaves room. Only text "
    "screens could stop that, and there are none yet."
)
_TRAINER_WAIT_SECONDS = 120


def check_attacks(attacks: Sequence[str], rounds: int) -> None:
    """Raises NotFoundError, UsageError: no such attack, or too few rounds for all of them."""
    for name in attacks:
        if name not in ATTACKS:
            raise NotFoundError(f"no attack {name!r}", hint=f"one of {', '.join(ATTACKS)}")
    of_factors = sum(ATTACKS[name][1] == "lora.factors" for name in attacks)
    if rounds < of_factors:
        raise UsageError(
            f"these attacks need {ROUNDS_MIN} rounds: a silo has one release of factors in each",
            hint=f"--rounds {ROUNDS_MIN}, or one --attack",
        )


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
    row: dict[str, Any] = {"name": name, "decision": "not made", "rule": "", "rules": [], "kind": ATTACKS[name][1]}
    row |= {"round": 0, "step": 0, "record": None}
    if made is None:
        return row
    row |= {"decision": "none", "round": made["round"], "step": made["step"]}
    place = (made["kind"], made["round"], made["step"])
    for record in decisions:
        if (record["kind"], record["round"], record["step"]) == place:
            rules = [rule["rule"] for rule in record["rules"] if rule["outcome"] == "deny"]
            row |= {"decision": record["decision"], "rule": rules[0] if rules else "", "rules": rules}
            row["record"] = record["seq"]
            if record["decision"] != "deny":
                break  # the worst that happened to a message is what counts
    return row


def fault(verdicts: Sequence[dict[str, Any]], reached: Sequence[str]) -> str:
    """Why the show does not hold, in a sentence; empty when every attack was denied, recorded and kept in."""
    open_ones = [f"{row['name']}: {row['decision']}" for row in verdicts if row["decision"] != "deny"]
    if open_ones:
        return f"not every attack was denied: {', '.join(open_ones)}"
    return f"{', '.join(reached)} reached the coordinator" if reached else ""
