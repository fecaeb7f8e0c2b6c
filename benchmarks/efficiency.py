"""What a federation keeps of the work its silos can do alone: `python -m benchmarks.efficiency --json`.

Four silos of speeds 1:1:2:3 behind lines of 50 Mbit/s and 100 ms (`shaped_link`), real guards and a real coordinator,
trainers that take their time and compute nothing (`paced_trainer`). Efficiency is GRPO steps a second that entered an
aggregate, over the sum of what the four do alone, where no step waits for anything; evaluation is no step, and no more
are the answers that are written for the next round. Idle share: of the trainers' time between the first task of a run
and its end, that in which there was no task. `step`: each silo takes as many steps a round, and waits at public ones.
`round_end`: slow ones take fewer, by the plan (`silo_steps`), and answers cross at the round's end. A round has 40
steps, the fewest that PubSwap's paper has beside 10, and every eighth is public; a step of 6 s is a short one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shaped_link import ShapedLink
from benchmarks.transport_ours import (
    LEARNING_RATE,
    LIMIT_SECONDS,
    REPOSITORY,
    ROWS,
    RUN,
    SEED,
    others_start_the_trainer,
)
from benchmarks.transport_payload import SHAPES, constant_of, write_model_folder
from fedsilo.control.client import ControlClient, Operator, sign_as
from fedsilo.demo.data import write_digit_folder
from fedsilo.demo.processes import Children
from fedsilo.demo.sites import COORDINATOR_PERSON, FEDERATION, DemoSettings, Site, Sites, make_sites, run_text
from fedsilo.protocol.errors import OperationError

SPEEDS = (1, 1, 2, 3)
PROMPTS, SAMPLES, EVALUATED = 4, 4, 4


@dataclass(frozen=True)
class Conditions:
    """One federation.

    Attributes:
        megabytes: of an update.
        slowest_step_seconds: a GRPO step of a silo of speed 1.
        local_steps: of a round.
        swap_period: every so many of them is a public one.
    """

    megabytes: float
    slowest_step_seconds: float
    local_steps: int
    swap_period: int
    rounds: int
    bits_per_second: float
    round_trip_seconds: float

    @property
    def step_seconds(self) -> tuple[float, ...]:
        return tuple(self.slowest_step_seconds / speed for speed in SPEEDS)

    @property
    def silo_steps(self) -> dict[str, int]:
        """Steps of a round in the time in which the fastest takes them all, of those that take fewer."""
        names = [f"hospital_{'abcd'[number]}" for number in range(len(SPEEDS))]
        steps = {name: self.local_steps * speed // max(SPEEDS) for name, speed in zip(names, SPEEDS, strict=True)}
        return {name: count for name, count in steps.items() if count < self.local_steps}

    @property
    def alone_steps_per_second(self) -> float:
        return sum(1.0 / seconds for seconds in self.step_seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted; the answer is JSON in any case")
    parser.add_argument("--megabytes", type=float, default=6.96, choices=list(SHAPES), help="of an update")
    parser.add_argument("--step-seconds", type=float, default=6.0, help="a GRPO step of a silo of speed 1")
    parser.add_argument("--local-steps", type=int, default=40, help="of a round")
    parser.add_argument("--swap-period", type=int, default=8, help="every so many of them is a public one")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=50.0, help="a second, of each silo's line, in each direction")
    parser.add_argument("--round-trip-seconds", type=float, default=0.1)
    given = parser.parse_args()
    conditions = Conditions(
        given.megabytes, given.step_seconds, given.local_steps, given.swap_period, given.rounds, given.mbit * 1e6,
        given.round_trip_seconds,
    )  # fmt: skip
    figures: dict[str, Any] = {}
    at_the_end = {"exchange": "round_end", "silo_steps": conditions.silo_steps}
    for name, plan in {"step": {"exchange": "step"}, "round_end": at_the_end}.items():
        with tempfile.TemporaryDirectory(prefix="fs") as folder:
            figures |= {f"{key}_{name}": value for key, value in measured(Path(folder), conditions, plan).items()}
    told = {
        "speeds": SPEEDS, "update_megabytes": given.megabytes, "step_seconds": conditions.step_seconds,
        "local_steps": given.local_steps, "rounds": given.rounds, "mbit_per_second": given.mbit,
        "round_trip_seconds": given.round_trip_seconds, "swap_period": given.swap_period,
    }  # fmt: skip
    print(json.dumps({"name": "efficiency", "figures": figures, "conditions": told}))
    return 0


@contextlib.contextmanager
def federation(out: Path, conditions: Conditions) -> Iterator[Sites]:
    """Everything started, each silo behind a line of its own. Raises OperationError: a process did not start."""
    shape = SHAPES[conditions.megabytes]
    model = write_model_folder(out / "model", shape)
    data = write_digit_folder(out / "data", SEED, silos=len(SPEEDS), rows_per_silo=ROWS)
    sites = make_sites(
        DemoSettings(
            out=out, model=model, data=data, ruleset="pubswap", seed=SEED, rank=shape.rank, alpha=2.0 * shape.rank,
            holds="", local_steps=conditions.local_steps, swap_period=conditions.swap_period, prompts_per_step=PROMPTS,
            samples_per_prompt=SAMPLES, learning_rate=LEARNING_RATE,
        )
    )  # fmt: skip
    children = Children({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)})
    with contextlib.ExitStack() as stack:
        stack.callback(children.stop)
        coordinator = children.start(
            "coordinator", ["coordinator", "start", "--config", str(sites.coordinator.config), "--json"],
            out / "logs" / "coordinator.log",
        )  # fmt: skip
        coordinator.ready()
        guards = []
        for number, (site, seconds) in enumerate(zip(sites.silos, conditions.step_seconds, strict=True)):
            line = stack.enter_context(
                ShapedLink(port_of(site), conditions.bits_per_second, conditions.round_trip_seconds)
            )
            others_start_the_trainer(site)
            dial_by(site, line.port)
            arguments = [
                "--address", f"unix:{site.folder / 'state' / 'run' / 'trainer.sock'}", "--constant",
                repr(constant_of(number)), "--step-seconds", str(seconds), "--times", str(times_of(out, site)),
            ]  # fmt: skip
            children.start(
                f"{site.name} trainer", arguments, out / "logs" / f"{site.name}-trainer.log",
                module="benchmarks.paced_trainer",
            )  # fmt: skip
            arguments = ["silo", "start", "--config", str(site.config), "--json"]
            guards.append(children.start(site.name, arguments, out / "logs" / f"{site.name}.log"))
        for guard in guards:
            guard.ready()
        yield sites
        children.raise_for_dead()


def times_of(out: Path, site: Site) -> Path:
    return out / f"{site.name}.times"


def port_of(site: Site) -> int:
    """Where its configuration says the coordinator is."""
    return int(_address_line(site).rpartition(":")[2].strip("\"'} "))


def dial_by(site: Site, port: int) -> None:
    line = _address_line(site)
    text = site.config.read_text()
    site.config.write_text(text.replace(line, line.replace(str(port_of(site)), str(port))))


def _address_line(site: Site) -> str:
    found = [line for line in site.config.read_text().splitlines() if "127.0.0.1:" in line]
    assert len(found) == 1, found
    return found[0]


def measured(out: Path, conditions: Conditions, exchange: Mapping[str, object]) -> dict[str, Any]:
    """One run: efficiency, idle share, and what they are made of."""
    with federation(out, conditions) as sites:
        begun, ended, rounds = carried_out(sites, conditions, exchange)
        tasks = {site.name: read_times(times_of(out, site), begun, ended) for site in sites.silos}
    fewer = dict(exchange.get("silo_steps", {}))
    steps = sum(fewer.get(silo, conditions.local_steps) for silos in rounds for silo in silos)
    rate = steps / (ended - begun)
    busy = [sum(end - start for _, start, end in each) for each in tasks.values()]
    return {
        "efficiency": round(rate / conditions.alone_steps_per_second, 4),
        "idle_share": round(1.0 - sum(busy) / (len(busy) * (ended - begun)), 4),
        "seconds": round(ended - begun, 2),
        "steps": steps,
    }


def carried_out(
    sites: Sites, conditions: Conditions, exchange: Mapping[str, object]
) -> tuple[float, float, list[list[str]]]:
    """Submit, wait for the end: when the first round opened, when the last was committed, and who was in each."""
    identities = sites.coordinator.folder / "id"
    name = COORDINATOR_PERSON
    person = Operator(sites.coordinator.name, identities / f"{name}.crt", identities / f"{name}.key", FEDERATION)
    plan: dict[str, object] = {
        "run": RUN, "method": "pubswap", "rounds": conditions.rounds, "local_steps": conditions.local_steps,
        "swap_period": conditions.swap_period, "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES, "seed": SEED,
        "quorum": len(sites.silos), "objective": {"kl_coefficient": 0.0},
        "optimiser": {"learning_rate": LEARNING_RATE},
        "rollout": {"temperature": 1.0, "max_prompt_tokens": 8, "max_new_tokens": 6},
        "evaluation": {"prompts": EVALUATED, "samples": 1}, **exchange,
    }  # fmt: skip
    opened, committed = 0.0, 0.0
    rounds: list[list[str]] = []
    told: list[str] = []
    with ControlClient(sites.coordinator.control_socket) as client:
        since, ended = client.snapshot().sequence, threading.Event()

        def follow() -> None:
            nonlocal opened, committed
            for event in client.watch(since):
                if event.name == "round.opened" and not opened:
                    opened = time.monotonic()
                elif event.name == "round.committed":
                    committed = time.monotonic()
                    rounds.append(event.fields["silos"])
                elif event.name in ("run.ended", "halt", "round.refused", "round.abandoned"):
                    told.append(f"{event.name} {event.fields}")
                    ended.set()
                    return

        threading.Thread(target=follow, daemon=True).start()
        client.execute(sign_as(person, "run.submit", {"text": run_text(plan), "source": "run.yaml"}))
        if not ended.wait(LIMIT_SECONDS):
            raise OperationError(f"the run has not ended within {LIMIT_SECONDS:.0f} s")
    if len(rounds) != conditions.rounds:
        raise OperationError(f"the run came to {told[0]}")
    return opened, committed, rounds


def read_times(path: Path, begun: float, ended: float) -> list[tuple[str, float, float]]:
    """Tasks between two moments, cut at them."""
    found = []
    for line in path.read_text().splitlines():
        name, start, end = line.split()
        first, last = max(float(start), begun), min(float(end), ended)
        if last > first:
            found.append((name, first, last))
    return found


if __name__ == "__main__":
    sys.exit(main())
