"""Real federations with one hostile party: the processes of tests/loopback/federation.py, and in place of one of them
another program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.launch.demo_sites import Site, Sites
from fedsilo.launch.demo_wire import Witness
from tests.hostile.attacks import Attack
from tests.hostile.verdicts import phases, rounds_needed, verdicts
from tests.loopback.federation import LOCAL_STEPS, SWAP_PERIOD, Federation, federation, records

ROOT = Path(__file__).resolve().parents[2]
TESTS_PATH = {"PYTHONPATH": str(ROOT)}  # where a child finds the hostile programs
SILOS = 3  # where one refuses a round, the other two still agree on its transcript (T20)
TRAINER_WAIT_SECONDS = 120


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

    @property
    def site(self) -> Site:
        """The silo that was attacked, or whose trainer was hostile."""
        return self.sites.silos[-1]

    def log_of(self, name: str) -> list[dict[str, Any]]:
        return records(next(site for site in self.sites.all() if site.name == name).audit_log)


def attacked_by_coordinator(root: Path, attacks: Sequence[Attack]) -> Attacked:
    """Have a coordinator try these on the last silo, and changed plans on all, to the end of every run they need."""
    report = root / "attempts.jsonl"

    def hostile(running: Federation) -> None:
        here, silos = running.sites.coordinator, running.sites.silos
        arguments = ["--config", str(here.config), "--report", str(report), "--target", silos[-1].name]
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
    return _ended(running, attacks, report, main)


def attacked_by_trainer(root: Path, attack: Attack) -> Attacked:
    """Have the last silo's trainer try one thing in a run of one round."""
    report = root / "attempts.jsonl"

    def hostile(running: Federation) -> None:
        site = running.sites.silos[-1]
        socket = site.folder / "state" / "run" / "trainer.sock"
        arguments = ["--address", f"unix:{socket}", "--report", str(report), "--attack", attack.name]
        # it dials until the guard wants a trainer
        arguments += ["--wait-seconds", str(TRAINER_WAIT_SECONDS)]
        running.children.environment |= TESTS_PATH
        running.children.start(
            f"{site.name} trainer", arguments, root / "logs" / "trainer.log", module="tests.hostile.trainer",
            environment=running.witness.planted.environment(site.name), may_end=True,
        )  # fmt: skip

    with federation(root, silos=SILOS, ruleset="pubswap", external=("hospital_c",), before_daemons=hostile) as running:
        record = running.run("run-1", rounds=1, quorum=2)
    return _ended(running, [attack], report, record)


def _ended(made: Federation, attacks: Sequence[Attack], report: Path, record: dict[str, Any]) -> Attacked:
    attempts = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    logs = {site.name: records(site.audit_log) for site in made.sites.silos}
    rows = verdicts(attacks, attempts, logs, made.sites.silos[-1].name)
    return Attacked(made.sites, made.witness, rows, record)
