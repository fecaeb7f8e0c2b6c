"""Every history of two silos in a run of one round: all states that any order of events leads to, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from fedsilo.protocol import method as m
from fedsilo.protocol import rounds
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.rounds import PLACE, ROUND, RUN, SILO
from tests.protocol.paper_run import PaperRun
from tests.simulated.paper_federation import plan_of

ABORT = m.FinishRun("aborted", "ABORTED")


def frozen(value: Any) -> Any:
    """A value as something that can be looked up; of a mapping, the order in which it came about does not count."""
    if isinstance(value, Plan):
        return value.quorum
    if is_dataclass(value):
        return tuple(frozen(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Mapping):
        return frozenset((key, frozen(each)) for key, each in value.items())
    return value


def place_of(run: PaperRun) -> Any:
    """Where a run stands, but for the moments of its deadlines, which the search lets pass in any order."""
    life = {each.name: frozen(getattr(run.life, each.name)) for each in fields(run.life)}
    life |= {"deadlines": frozenset(run.life.deadlines), "paused_at": run.life.paused_at is None}
    return tuple(life.values()), frozen(run.state)


def alphabet(silo: str) -> list[rounds.Event]:
    return [
        rounds.PlanTaken(silo),
        m.SiloLeft(silo),
        rounds.Signed(silo, 1),
        rounds.UpdateRefused(silo, 1),
        rounds.Contribution(silo, "lora.factors", 1, 0, 1, silo),
        m.SiloAbstained(silo, 1, 0),
        rounds.Contribution(silo, "metrics.eval", 1, 0, 1, silo),
    ]


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("quorum", [1, 2])
@pytest.mark.parametrize("method", ["fedavg-grpo", "local-only"])
def test_every_history_of_two_silos_ends_and_loses_nothing(method: str, quorum: int) -> None:
    plan = plan_of(method=method, silos=("a", "b"), rounds=1, local_steps=1, quorum=quorum)
    events = [*alphabet("a"), *alphabet("b"), rounds.RunPaused(), rounds.RunResumed(), ABORT]
    # one silo is enough to say another thing in a taken place; the other way round is the same with the names changed
    events.append(rounds.Contribution("a", "lora.factors", 1, 0, 1, "other"))
    first = PaperRun(plan)
    seen: dict[Any, PaperRun] = {place_of(first): first}
    frontier, met = [first], {"run": set[str](), "silo": set[str](), "round": set[str](), "place": set[str]()}
    while frontier:
        run = frontier.pop()
        met["run"].add(run.life.state)
        met["silo"] |= set(run.life.standing.values())
        met["round"].add(run.life.round_state)
        met["place"] |= {run.life.places.get(silo, "outside") for silo in plan.silos}
        passing = [m.DeadlinePassed(name) for name in run.life.deadlines] if run.life.paused_at is None else []
        ways_on = 0
        for event in [*events, *passing]:
            after = run.copy()
            after.say(event)  # which looks at everything that must hold
            if after.life is not run.life:
                ways_on += 1
                place = place_of(after)
                if place not in seen:
                    seen[place] = after
                    frontier.append(after)
        # nothing moves a run that is over, and something moves every other
        assert (ways_on == 0) == run.life.over, run.journal
    for run in seen.values():
        run.copy().to_the_end()
        run.check_replay()
    # a method that makes no adapter takes no updates
    not_met = {"committed", "contributed"} if method == "local-only" else {"closed"}
    assert met["run"] == set(RUN) and met["silo"] == set(SILO)
    assert met["place"] == set(PLACE) - not_met and met["round"] == set(ROUND) - {"committing"} - not_met
