"""A method whose rounds end without an adapter: each silo answers the round's public prompts once, and that is all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fedsilo.protocol import method as m
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.swap import public_batch
from fedsilo.protocol.tasks import GeneratePublic

NAME = "answers-only"


@dataclass(frozen=True)
class State:
    plan: Plan
    silos: tuple[str, ...] = ()
    base: str = ""
    number: int = 0
    waits: frozenset[str] = frozenset()
    gave: frozenset[str] = frozenset()
    closed: int = 0
    over: bool = False


_Step = tuple[State, tuple[m.CoordinatorAction, ...]]


class Coordinator:
    def start(self, plan: Plan, party: str) -> State:
        return State(plan)

    def on_event(self, state: State, event: m.CoordinatorEvent) -> _Step:
        if state.over:
            return state, ()
        match event:
            case m.RunStarted(silos, base):
                return self._open(replace(state, silos=silos, base=base))
            case m.SiloCame(silo):
                return replace(
                    state, silos=tuple(each for each in state.plan.silos if each in {*state.silos, silo})
                ), ()
            case m.SiloLeft(silo):
                silos = tuple(each for each in state.silos if each != silo)
                return self._settled(replace(state, silos=silos, waits=state.waits - {silo}))
            case m.SiloAbstained(silo, number) if number == state.number:
                return self._settled(replace(state, waits=state.waits - {silo}))
            case m.MessageArrived(silo, "public.responses", number) if number == state.number:
                return self._settled(replace(state, waits=state.waits - {silo}, gave=state.gave | {silo}))
            case m.DeadlinePassed(name) if name == f"round/{state.number}":
                return self._ends(state)
        return state, ()

    def _open(self, state: State) -> _Step:
        number = state.number + 1
        step = state.plan.public_steps()[0]
        asked = pb.PublicStep(step=step, prompt_indices=public_batch(state.plan, number, step))
        body = pb.RoundOpen(base_digest=state.base, public_steps=[asked])
        state = replace(state, number=number, waits=frozenset(state.silos), gave=frozenset())
        opens = tuple(m.Send(silo, "round.open", number, 0, body) for silo in state.silos)
        return state, (*opens, m.StartDeadline(f"round/{number}", state.plan.round_deadline_seconds))

    def _settled(self, state: State) -> _Step:
        return (state, ()) if state.waits else self._ends(state)

    def _ends(self, state: State) -> _Step:
        """Closed with enough silos, else abandoned."""
        number, enough = state.number, len(state.gave) >= state.plan.quorum
        gave = [silo for silo in state.plan.silos if silo in state.gave]
        body = pb.RoundResult(adapter_digest=state.base, participants=gave if enough else [])
        ends = (
            *[m.CloseRound(number, tuple(gave))] * enough,
            *(m.Send(silo, "round.result", number, 0, body) for silo in state.silos),
        )
        state = replace(state, closed=state.closed + enough)
        if number < state.plan.rounds and len(state.silos) >= state.plan.silos_min:
            state, opens = self._open(state)
            return state, (*ends, *opens)
        outcome, reason = ("finished", "") if state.closed else ("failed", "NO_ROUND_CLOSED")
        if not state.silos:
            outcome, reason = "failed", "NO_SILO_LEFT"
        over = pb.RunEnd(outcome=outcome, adapter_digest=state.base)
        sends = tuple(m.Send(silo, "run.end", number, 0, over) for silo in state.silos)
        return replace(state, over=True), (*ends, *sends, m.FinishRun(outcome, reason))


class Silo:
    def start(self, plan: Plan, party: str) -> Plan:
        return plan

    def on_event(self, state: Plan, event: m.SiloEvent) -> tuple[Plan, tuple[m.SiloAction, ...]]:
        match event:
            case m.MessageArrived(kind="round.open", round=number, body=pb.RoundOpen(public_steps=[asked])):
                return state, (m.Train(GeneratePublic(number, asked.step, tuple(asked.prompt_indices), "correct")),)
            case m.TaskDone(GeneratePublic(number, step), pb.PublicResponses() as body):
                return state, (m.Offer("public.responses", number, step, body),)
        return state, ()


@contextmanager
def registered() -> Iterator[None]:
    METHODS[NAME] = replace(
        METHODS["pubswap"],
        name=NAME,
        kinds=frozenset({"public.responses"}),
        coordinator=Coordinator(),
        silo=Silo(),
        tasks=frozenset({GeneratePublic}),
        exchanges=frozenset({"step"}),
        swaps=False,
    )
    try:
        yield
    finally:
        del METHODS[NAME]
