"""Each silo keeps what it trains: no update leaves and none comes in. A silo begins with factors that it draws from the
plan's seed itself, the same at all silos of one model, and goes on with its own from round to round.

    local-only      private steps only; nothing leaves but figures
    responses-only  PubSwap-Balanced's public steps: verified answers cross, factors never

A silo's part of a round ends with the figures of its own state on the common held-out set, or with its site's no to
them. The coordinator closes a round when each silo's part has ended, or at the deadline; below the quorum it is
abandoned, and what silos trained in it stays trained.

What it does not give: one model for all; and, of responses-only, privacy of what the answers say (N2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.method import (
    CloseRound,
    CoordinatorAction,
    CoordinatorEvent,
    MessageArrived,
    Offer,
    RunStarted,
    SiloAction,
)
from fedsilo.protocol.methods.pubswap import step as by_step
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import EvaluateOwn, LoadOwn, TrainerTask

_FIGURES = "metrics.eval"


class Coordinator(by_step.Coordinator):
    """The coordinator's half; `CoordinatorState.uploads` holds the figures that end a silo's part."""

    def on_event(
        self, state: by_step.CoordinatorState, event: CoordinatorEvent
    ) -> tuple[by_step.CoordinatorState, tuple[CoordinatorAction, ...]]:
        if isinstance(event, RunStarted):
            event = RunStarted(event.silos, "")  # no round begins with an adapter of the coordinator's
        elif isinstance(event, MessageArrived) and event.silo not in state.silos:
            return state, ()  # it took the plan after the round had opened, so it has no part in it
        return super().on_event(state, event)

    def _last_kind(self, plan: Plan, number: int) -> str:
        return _FIGURES

    def _given(self, state: by_step.CoordinatorState) -> Mapping[str, str]:
        """Return, by silo, the digest of the figures that ended its part; empty where its site keeps them back."""
        return {**dict.fromkeys(state.kept_back, ""), **state.uploads}

    def _complete(
        self, state: by_step.CoordinatorState, participants: tuple[str, ...]
    ) -> tuple[by_step.CoordinatorState, tuple[CoordinatorAction, ...]]:
        number = state.round
        state = replace(state, uploads=self._given(state), committed_rounds=state.committed_rounds + 1)
        state, actions = self._after_round(state, committed=False, closed=True)
        return state, (CloseRound(number, participants), *actions)


_Step = tuple[by_step.SiloState, tuple[SiloAction, ...]]


class Silo(by_step.Silo):
    def _load(self, state: by_step.SiloState) -> _Step:
        return self._train(state, LoadOwn(state.round))

    def _after_steps(self, state: by_step.SiloState) -> _Step:
        return self._train(state, EvaluateOwn(state.round))

    def _task_done(self, state: by_step.SiloState, task: TrainerTask, body: object) -> _Step:
        match task:
            case LoadOwn():
                return self._next_step(state)
            case EvaluateOwn(round_number) if isinstance(body, pb.MetricsEval):
                return self._offer(state, Offer(_FIGURES, round_number, 0, body))
        return super()._task_done(state, task, body)

    def _offer_settled(self, state: by_step.SiloState, outcome: str) -> _Step:
        if state.offered[0] == _FIGURES and state.offered[1]:
            return self._take(replace(state, waits_for="result"))
        return super()._offer_settled(state, outcome)
