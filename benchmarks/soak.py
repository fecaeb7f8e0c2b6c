"""Many rounds of small payloads under random faults: `python -m benchmarks.soak --json [--rounds 500]`.

Runs of 100 rounds of a coordinator, two guards and their trainers (without torch) over mTLS, through a proxy that has
weather (`chaos_faults.Weather`: a second of faults, `CALM_SECONDS` without); about every `kill_every` rounds a process,
drawn at random, dies by SIGKILL and is started again. After each round memory and open descriptors of the coordinator
and the guards are read from /proc.

    memory_kib_per_round     slope of the resident memory with its 95 % interval, by process: least squares within each
                             life, its first `warm_up` rounds left out, the interval by a block bootstrap, since what
                             is measured after one round depends on the round before
    descriptors_per_round    the same of open descriptors; descriptors_max beside it
    rounds_partial           committed without one of the silos
    inconsistencies          rounds that were not committed, and what `benchmarks.chaos` looks for after each case: lost
                             or twice counted messages, logs that do not verify, processes that do not end

Not shown: a trainer with torch, whose memory is the model's; several runs at once.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chaos_faults import Weather
from benchmarks.chaos_federation import COORDINATOR, Federation, federation
from benchmarks.transport_process import resident_bytes
from fedsilo.protocol.errors import FedSiloError

RUN_ROUNDS = 100  # as one run: a policy lets a plan have so many, and twice as many
WARM_UP_ROUNDS, LIFE_ROUNDS_LEAST, BLOCK, DRAWS = 20, 20, 10, 1000
CALM_SECONDS = 6.0  # between two faults of the lines
SECONDS_PER_ROUND = 20.0  # far above what one takes: a limit that is reached means that something hangs


@dataclass
class Watch:
    """What befalls the federation, and what its processes were seen to hold.

    Attributes:
        seen: (life, round, resident KiB, descriptors), by process.
        kills: by what was killed.
    """

    made: Federation
    rng: random.Random
    kill_every: int
    weather: Weather | None
    seen: dict[str, list[tuple[int, int, float, int]]] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    round: int = 0
    _next: int = 0

    def look(self) -> None:
        if self.weather is not None:
            self.weather.look()
        number = newest_round(self.made)
        if number <= self.round:
            return
        self.round = number
        for name in self.made.site:
            if pid := self.made.pid(name):
                row = (self.made.starts[name], number, resident_bytes(pid) / 1024, descriptors(pid))
                self.seen.setdefault(name, []).append(row)
        if self.kill_every and number >= self._next:
            if self._next:
                self._kill()
            self._next = number + 1 + self.rng.randrange(2 * self.kill_every)

    def _kill(self) -> None:
        victim = self.rng.choice([COORDINATOR, *self.made.silos, "trainer"])
        if victim == "trainer":
            self.kills[victim] += self.made.kill_trainer(self.rng.choice(self.made.silos))
        else:
            self.kills[victim] += 1
            self.made.kill(victim)


def newest_round(made: Federation) -> int:
    """How many were opened, by the coordinator's database; 0 where it cannot be read now."""
    try:
        with closing(made.database()) as database:
            return int(database.execute("SELECT COUNT(*) FROM rounds").fetchone()[0])
    except sqlite3.Error:
        return 0


def descriptors(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def slope(rows: Sequence[tuple[int, int, float]]) -> list[float] | None:
    """[per round, low, high] of a value: least squares within lives; None where none lived long enough.

    Args:
        rows: (life, round, value), in order.
    """
    blocks: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
    for life in sorted({row[0] for row in rows}):
        own = [row for row in rows if row[0] == life]
        own = [row for row in own if row[1] >= own[0][1] + WARM_UP_ROUNDS]
        if len(own) < LIFE_ROUNDS_LEAST:
            continue
        x, y = (np.array([row[place] for row in own], dtype=float) for place in (1, 2))
        x, y = x - x.mean(), y - y.mean()
        blocks += [(x[at : at + BLOCK], y[at : at + BLOCK]) for at in range(0, len(x), BLOCK)]
    if not blocks:
        return None

    def fitted(chosen: Sequence[int]) -> float:
        products = sum(float(blocks[at][0] @ blocks[at][1]) for at in chosen)
        return products / max(1e-12, sum(float(blocks[at][0] @ blocks[at][0]) for at in chosen))

    rng = np.random.default_rng(0)
    draws = [fitted(rng.integers(len(blocks), size=len(blocks)).tolist()) for _ in range(DRAWS)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return [round(value, 3) for value in (fitted(range(len(blocks))), float(low), float(high))]


def bench(
    rounds: int, seed: int, kill_every: int, weather: bool, keep: Path | None, told: Callable[[str], None]
) -> dict[str, Any]:
    began, out = time.monotonic(), Path(tempfile.mkdtemp(prefix="fs"))
    rng = random.Random(seed)  # noqa: S311  # faults that can be repeated
    problems: dict[str, list[str]] = {"ended": []}
    try:
        with federation(out) as made:
            made.limit_seconds = SECONDS_PER_ROUND * RUN_ROUNDS
            watch = Watch(made, rng, kill_every, Weather(made.proxy, rng, CALM_SECONDS) if weather else None)

            def look() -> None:
                before = watch.round
                watch.look()
                if watch.round != before and watch.round % 25 == 0:
                    told(f"round {watch.round}, {time.monotonic() - began:.0f} s, kills {dict(watch.kills)}")

            for name in made.site:
                made.start(name)
            outcome = ""
            for number, first in enumerate(range(0, rounds, RUN_ROUNDS), 1):
                try:
                    outcome = made.run(f"soak-{number}", min(RUN_ROUNDS, rounds - first), look)
                except FedSiloError as error:
                    outcome = error.line
                if outcome != "finished":
                    break
            if watch.weather is not None:
                watch.weather.end()
            problems["ended"] += [] if outcome == "finished" else [f"the run is {outcome}"]
            problems["ended"] += made.notes + made.stop()
            problems |= made.problems()
            committed, partial = rounds_of(made)
            problems["rounds"] = [] if committed == rounds else [f"{committed} of {rounds} rounds were committed"]
        if keep is not None and any(problems.values()):
            shutil.copytree(out / "logs", keep / out.name)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    seen = watch.seen
    return {
        "name": "soak",
        "figures": {
            "rounds": committed, "rounds_partial": partial,
            "inconsistencies": sum(len(found) for found in problems.values()),
            "kills": sum(watch.kills.values()), "line_faults": len(watch.weather.faults) if watch.weather else 0,
            "memory_kib_per_round": {name: slope([(life, at, kib) for life, at, kib, _ in rows])
                                     for name, rows in seen.items()},
            "memory_mib_max": {name: round(max(kib for _, _, kib, _ in rows) / 1024, 1) for name, rows in seen.items()},
            "descriptors_per_round": {name: slope([(life, at, count) for life, at, _, count in rows])
                                      for name, rows in seen.items()},
            "descriptors_max": {name: max(count for *_, count in rows) for name, rows in seen.items()},
            "seconds": round(time.monotonic() - began, 1),
        },
        "conditions": {
            "seed": seed, "kill_every_rounds": kill_every, "weather": weather, "silos": 2, "warm_up": WARM_UP_ROUNDS,
            "kills": dict(watch.kills), "line_faults": dict(Counter(watch.weather.faults)) if watch.weather else {},
            "problems": {name: found[:10] for name, found in problems.items() if found},
        },
    }  # fmt: skip


def rounds_of(made: Federation) -> tuple[int, int]:
    """How many were committed, and how many of these without one of the silos."""
    with closing(made.database()) as database:
        rows = database.execute("SELECT participants FROM rounds WHERE state = 'committed'").fetchall()
    return len(rows), sum(len(json.loads(row[0])) < len(made.silos) for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-every", type=int, default=40, help="rounds, on average; 0: never")
    parser.add_argument("--calm", action="store_true", help="no faults of the lines")
    parser.add_argument("--keep", type=Path, help="folder for the logs of a run that is inconsistent")
    given = parser.parse_args(arguments)
    found = bench(given.rounds, given.seed, given.kill_every, not given.calm, given.keep,
                  lambda line: print(line, file=sys.stderr, flush=True))  # fmt: skip
    print(json.dumps(found, indent=None if given.json else 2))
    return 1 if found["figures"]["inconsistencies"] else 0


if __name__ == "__main__":
    sys.exit(main())
