"""Real federations in which another program stands in place of one of the processes of tests/loopback/federation.py."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.demo.sites import Sites
from fedsilo.demo.wire import Witness
from tests.hostile.attacks import Attack
from tests.hostile.verdicts import phases, rounds_needed, verdicts
from tests.loopback.federation import LOCAL_STEPS, SWAP_PERIOD, Federation, federation, records

REPORT = "attempts.jsonl"
TESTS_PATH = {"PYTHONPATH": str(Path(__file__).parents[2])}  # where a child finds the hostile programs
SILOS = 3  # where one refuses a round, the other two still agree on its transcript (T20)


@dataclass(frozen=True)
class Attacked:
    """A federation that was attacked, and has ended.

    Attributes:
        rows: one an attack, as `verdicts` gives them.
        record: of the run that went on to its end.
    """

    sites: Sites
    witness: Witness
    rows: list[dict[str, Any]]
    record: dict[str, Any]

    def log_of(self, name: str) -> list[dict[str, Any]]:
        return records(next(site for site in self.sites.all() if site.name == name).audit_log)


def attacked_by_coordinator(root: Path, attacks: Sequence[Attack]) -> Attacked:
    """Have a coordinator try these on the last silo, and changed plans on all, to the end of every run they need."""

    def hostile(running: Federation) -> None:
        here, silos = running.sites.coordinator, running.sites.silos
        arguments = ["--config", str(here.config), "--report", str(root / REPORT), "--target", silos[-1].name]
        arguments += [part for attack in attacks for part in ("--attack", attack.name)]
        arguments += [part for site in silos for part in ("--plan-target", site.name)]
        running.programs = {here.name: ("tests.hostile.coordinator", arguments)}
        running.children.environment |= TESTS_PATH

    main: dict[str, Any] = {}
    with federation(root, silos=SILOS, ruleset="pubswap", before_daemons=hostile) as running:
        rounds = rounds_needed(attacks, public_steps=LOCAL_STEPS // SWAP_PERIOD)
        for number, phase in enumerate(phases(attacks), 1):
            record = running.run(f"run-{number}", **{"rounds": rounds, "quorum": 2, **phase.fields})
            main = record if phase.is_main else main
    return _ended(running, attacks, main)


def attacked_by_trainer(root: Path, attack: Attack) -> Attacked:
    """Have the last silo's trainer try one thing in a run of one round."""

    def hostile(running: Federation) -> None:
        site = running.sites.silos[-1]
        socket = site.folder / "state" / "run" / "trainer.sock"
        arguments = ["--address", f"unix:{socket}", "--report", str(root / REPORT), "--attack", attack.name]
        arguments += ["--wait-seconds", "120"]  # it dials until the guard wants a trainer
        running.children.environment |= TESTS_PATH
        running.children.start(
            f"{site.name} trainer", arguments, root / "logs" / "trainer.log", module="tests.hostile.trainer",
            environment=running.witness.planted.environment(site.name), may_end=True,
        )  # fmt: skip

    with federation(root, silos=SILOS, ruleset="pubswap", external=("hospital_c",), before_daemons=hostile) as running:
        record = running.run("run-1", rounds=1, quorum=2)
    return _ended(running, [attack], record)


def _ended(made: Federation, attacks: Sequence[Attack], record: dict[str, Any]) -> Attacked:
    attempts = [json.loads(line) for line in (made.root / REPORT).read_text().splitlines()]
    logs = {site.name: records(site.audit_log) for site in made.sites.silos}
    rows = verdicts(attacks, attempts, logs, made.sites.silos[-1].name)
    return Attacked(made.sites, made.witness, rows, record)
