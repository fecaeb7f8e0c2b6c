"""Rounds of a real federation under faults, against the same rounds undisturbed: `python -m benchmarks.chaos --json`.

A coordinator, two guards and their trainers (without torch: `chaos_trainer`) as processes of their own over mTLS, all
silo lines through a proxy. An undisturbed run is traced first: each call that makes something durable is a place, and
before it and after it are two fault points of each daemon. A case is a run of its own, from empty folders, with the
faults of one family:

    kill      kill -9 of a daemon at one fault point after the other, each time by `chaos_tracer`, and a start again
    trainer   kill -9 of a trainer, before a task or after its answer
    disk      from one call on, calls that need room fail with ENOSPC, for a while
    clock     a daemon's clock jumps, forth or back
    network   the proxy cuts, halves, stalls, delays or throttles what crosses, again and again
    clients   half-open, silent and 1 byte/s clients beside the silos, as many as the coordinator lets in (T23, T24)
    netem     all of it in a network namespace with 5 % loss and 200 ms delay (where the kernel has netem)

The whole of `kill` takes hours: `--part 3/8` plays the third of eight parts of its cases; together they are the whole.
Points that a case did not come by are aimed at again, in cases of fewer; `fault_points_missed` were never met.

After each: the run finished (`ended`) and all processes end when asked; no acknowledged message is `lost`, none counts
`twice`; all audit logs verify, alone and against each other (`audit`); the final `adapter` equals the undisturbed one.

Not shown: a power cut (unsynced writes stay), faults in a trainer with torch, PostgreSQL; a clock set back to before
the certificates are valid, where nothing is taken until it is right.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.chaos_faults import Clients, Weather, netem_why_not
from benchmarks.chaos_federation import COORDINATOR, Federation, federation
from benchmarks.chaos_tracer import why_not
from fedsilo.protocol.errors import FedSiloError

RUN, ROUNDS = "run-1", 2
FAMILIES = ("kill", "trainer", "disk", "clock", "network", "clients", "netem")
KILLS_MOST = 12  # of one case: each costs a start
PASSES_MOST = 6  # over what is left: after a kill a run takes another way, and may not come by the case's next points
CASES_OF_OTHERS = 6  # a family other than `kill`, where nobody asks for more
INVARIANTS = ("ended", "lost", "twice", "audit", "adapter")
VICTIMS = (COORDINATOR, "hospital_a")  # the silos are alike

Point = tuple[str, str, int, str]  # process, label, occurrence, how


@dataclass
class Case:
    """Attributes:
    family: one of FAMILIES.
    orders: of `chaos_tracer`, by process, one for each life.
    trainer: messages at which a trainer dies, by silo.
    weather: seed of what the proxy does; None: nothing.
    clients: whether there are clients that hold their line.
    exchange: of answers, as the plan says.
    """

    family: str
    orders: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    trainer: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    weather: int | None = None
    clients: bool = False
    exchange: str = "step"


@dataclass
class Result:
    """problems: by invariant. struck: what befell it. seen: each process's calls, in order where it was traced."""

    case: Case
    digest: str
    problems: dict[str, list[str]]
    struck: list[dict[str, Any]]
    calls: dict[str, list[tuple[str, int]]]
    seconds: float


def play(case: Case, expected: str, *, traced: bool = False, keep: Path | None = None) -> Result:
    """One case in a folder of its own, which is kept where an invariant does not hold and `keep` names a place."""
    began, out = time.monotonic(), Path(tempfile.mkdtemp(prefix="fs"))
    calls: dict[str, list[tuple[str, int]]] = {}
    struck: list[dict[str, Any]] = []
    digest, problems = "", {name: list[str]() for name in INVARIANTS}
    try:
        with federation(out) as made:
            try:
                digest = _played(made, case, traced, problems, struck)
            except FedSiloError as error:
                problems["ended"].append(error.line)
                made.stop()
            for name, life in made.lives.items():
                struck += [{"process": name, **one} for one in life.struck]
                if made.report(name).exists():
                    rows = [json.loads(line) for line in made.report(name).read_text().splitlines()]
                    calls[name] = [
                        (row["label"], row["occurrence"]) for row in rows if "label" in row and "struck" not in row
                    ]
            struck += made.trainer_deaths()
            for name, found in made.problems().items():
                problems[name] += found
        if expected and digest != expected:
            problems["adapter"].append(f"{digest[:12] or 'none'}, undisturbed {expected[:12]}")
        if keep is not None and any(problems.values()):
            shutil.copytree(out, keep / f"{case.family}-{out.name}", symlinks=True, ignore=_sockets)
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return Result(case, digest, problems, struck, calls, time.monotonic() - began)


def _sockets(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if not (Path(folder, name).is_file() or Path(folder, name).is_dir())}


def _played(
    made: Federation, case: Case, traced: bool, problems: dict[str, list[str]], struck: list[dict[str, Any]]
) -> str:
    """See the run through; the digest of its adapter."""
    for name, orders in case.orders.items():
        made.lives[name].orders = list(orders)
    for life in made.lives.values():
        life.traced = traced
    for silo, deaths in case.trainer.items():
        made.let_trainer_die(silo, deaths)
    weather = None
    if case.weather is not None:
        weather = Weather(made.proxy, random.Random(case.weather))  # noqa: S311  # faults that can be repeated
        made.limit_seconds *= 3  # a silo whose tries all fall into faults waits up to 15 s before the next one
    with Clients(made) if case.clients else nullcontext():
        for name in made.site:
            made.start(name)
        outcome = made.run(RUN, ROUNDS, weather.look if weather else made.wake_halted, exchange=case.exchange)
        if weather:
            weather.end()
            struck += [{"process": "lines", "struck": kind} for kind in weather.faults]
        if case.clients:
            struck += [{"process": "lines", "struck": "held line"}] * (3 * Clients.EACH)
    if outcome != "finished":
        problems["ended"].append(f"the run is {outcome}")
    problems["ended"] += made.notes
    problems["ended"] += made.stop()
    return made.adapter(RUN) if outcome == "finished" else ""


# ---- which cases -------------------------------------------------------------------------------------


def points_of(calls: dict[str, list[tuple[str, int]]]) -> list[Point]:
    """Every fault point that an undisturbed run has, in the order of its calls."""
    return [
        (name, label, occurrence, how)
        for name in VICTIMS for label, occurrence in calls[name] for how in ("before", "after")
    ]  # fmt: skip


def kill_case(points: Sequence[Point], process: str) -> Case:
    orders = [{"kill": {"label": label, "occurrence": number, "how": how}} for _, label, number, how in points]
    return Case("kill", {process: orders})


def kill_cases(points: Sequence[Point], victims: Sequence[str], rng: random.Random) -> list[Case]:
    """All points, at most KILLS_MOST in one case, spread over the run."""
    cases = []
    for process in victims:
        own = [point for point in points if point[0] == process]
        stride = max(1, -(-len(own) // KILLS_MOST)) | 1  # odd, so that a case has kills before and after a call
        cases += [kill_case(own[first::stride], process) for first in range(min(stride, len(own)))]
    rng.shuffle(cases)
    return cases


def deaths(rng: random.Random) -> list[int]:
    """At which messages a trainer dies: never three times without a finished task between, since a guard leaves the run
    then (`supervisor.RESTARTS_MAX`). A trainer that is started again hears its configuration, the plan and the task."""
    while True:
        drawn = sorted(rng.sample(range(3, 24), 4))
        if all(third - first > 8 for first, third in zip(drawn, drawn[2:], strict=False)):
            return drawn


def other_case(family: str, points: Sequence[Point], rng: random.Random) -> Case:
    """One case of a family other than `kill`."""
    process, label, number, _ = rng.choice([point for point in points if "socket" not in point[1]])
    place = {"label": label, "occurrence": number}
    match family:
        case "trainer":
            return Case(family, trainer={
                silo: [(number, rng.choice(("before", "after"))) for number in deaths(rng)]
                for silo in ("hospital_a", "hospital_b")
            })  # fmt: skip
        case "disk":
            return Case(family, {process: [{"full": {**place, "calls": rng.choice((1, 3, 10, 40))}}]})
        case "clock":
            return Case(family, {process: [{"clock": {**place, "seconds": rng.choice((-2, 5, 600, 3600))}}]})
        case "network":
            return Case(family, weather=rng.randrange(1 << 30))
        case "clients":
            return Case(family, clients=True)
    return Case(family)


# ---- the whole ---------------------------------------------------------------------------------------


def bench(
    families: Sequence[str],
    victims: Sequence[str],
    seed: int,
    cases: int | None,
    keep: Path | None,
    told: Callable[[str], None],
    exchange: str = "step",
    part: tuple[int, int] = (1, 1),
) -> dict[str, Any]:
    rng = random.Random(seed)  # noqa: S311  # faults that can be repeated
    began, cpu = time.monotonic(), _cpu_seconds()
    if reason := why_not():
        raise SystemExit(reason)
    whole = play(Case("none", exchange=exchange), "", traced=True, keep=keep)
    if any(whole.problems.values()):
        raise SystemExit(f"the undisturbed run does not hold: {whole.problems}")
    points = points_of(whole.calls)
    told(f"{len(points)} fault points; undisturbed {whole.digest[:12]} in {whole.seconds:.1f} s")
    unavailable = {}
    results: list[Result] = []
    aimed: list[Point] = []
    for family in families:
        if family == "netem":
            if reason := netem_why_not():
                unavailable[family] = reason
                continue
            todo = [Case("netem")]
        elif family == "kill":
            todo = kill_cases(points, victims, rng)[part[0] - 1 :: part[1]][:cases]
        else:
            todo = [other_case(family, points, rng) for _ in range(CASES_OF_OTHERS if cases is None else cases)]
        aimed += [point for case in todo for point in aimed_at(case)]
        for _ in range(PASSES_MOST if family == "kill" and cases is None else 1):
            for case in todo:
                result = play(replace(case, exchange=exchange), whole.digest, keep=keep)
                results.append(result)
                found = json.dumps(_wrong(result)) if _wrong(result) else "holds"
                told(f"{case.family}: {len(result.struck)} faults, {result.seconds:.1f} s, {found}")
            covered = covered_by(results)
            todo = kill_cases([point for point in aimed if point not in covered], victims, rng)
    covered = covered_by(results) & set(points)
    failures = Counter(name for result in results for name, found in result.problems.items() if found)
    return {
        "name": "chaos",
        "figures": {
            "cases": len(results),
            "cases_failed": sum(any(result.problems.values()) for result in results),
            **{f"failures_{name}": failures[name] for name in INVARIANTS},
            "faults": sum(len(result.struck) for result in results),
            "fault_points_covered": len(covered), "fault_points_enumerated": len(points),
            "fault_points_missed": len(set(aimed) - covered),
            "seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(_cpu_seconds() - cpu, 1),
        },
        "conditions": {
            "seed": seed, "part": list(part), "families": list(families), "rounds": ROUNDS, "exchange": exchange,
            "silos": 2, "not_available": unavailable,
            "cases_by_family": dict(Counter(result.case.family for result in results)),
            "missed": sorted(set(aimed) - covered)[:20],
            "faults_by_kind": dict(Counter(str(one["struck"]) for result in results for one in result.struck)),
            "failed": [
                {"family": result.case.family, "problems": _wrong(result), "struck": result.struck}
                for result in results if _wrong(result)
            ][:20],
        },
    }  # fmt: skip


def _wrong(result: Result) -> dict[str, list[str]]:
    return {name: found for name, found in result.problems.items() if found}


def aimed_at(case: Case) -> list[Point]:
    """Where the processes of a case are to be killed."""
    kills = [(name, order["kill"]) for name, orders in case.orders.items() for order in orders if "kill" in order]
    return [(name, kill["label"], kill["occurrence"], kill["how"]) for name, kill in kills]


def covered_by(results: Sequence[Result]) -> set[Point]:
    return {
        (one["process"], one["label"], one["occurrence"], one["how"])
        for result in results for one in result.struck if one["struck"] == "kill"
    }  # fmt: skip


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N, such as 3/8")
    return int(number), int(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, help="of each family; all of kill, and 6 of the others, where not given")
    parser.add_argument("--only", action="append", choices=FAMILIES, help="a family; may be given several times")
    parser.add_argument(
        "--victim", action="append", choices=VICTIMS, help="of kill: a process; several times for several"
    )
    parser.add_argument("--exchange", choices=("step", "round_end"), default="step", help="of answers")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="of the cases of kill")
    parser.add_argument("--keep", type=Path, help="folder for what failed cases leave")
    given = parser.parse_args(arguments)
    found = bench(given.only or FAMILIES, given.victim or VICTIMS, given.seed, given.cases, given.keep,
                  lambda line: print(line, file=sys.stderr, flush=True), given.exchange, given.part)  # fmt: skip
    print(json.dumps(found, indent=None if given.json else 2))
    return 1 if found["figures"]["cases_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
