"""PubSwap-Balanced with `exchange: round_end`: no silo waits for another inside a round (docs/explain/round-end.md).

    silo          figures of the adapter that the round starts from; its steps as with `exchange: step`, on own answers
                  and donors; then, with the policy it has trained, answers to the next round's public prompts; then
                  figures, answers and update are offered together
    coordinator   when the round closes, the answers of the silos whose update came are the pool of the next round;
                  the donors drawn from it go out behind that round's opening

An update and its answers are one group. The quorum counts updates. Answers without an update are no donors: their silo
was slow, or its site said no to what the answers come from. An update without answers counts as any other: a site may
let factors out and no text, and a step that lacks one silo's answers has the others'. A round that is abandoned since
too few updates came still gives donors: the texts are as correct as before. The first round has none, and the last
round's end asks for none. A silo that takes fewer steps by the plan answers for those that it takes, so that nobody
waits for its answers instead.

A silo has its donors before it begins: they are queued behind the round's opening, which a silo takes up only when
`round.agreed` has come behind them.

What it does not give: donors of the policy that its silo has when they are used; they are a round old.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.method import (
    CoordinatorAction,
    Fetch,
    MessageArrived,
    Note,
    Offer,
    OfferSettled,
    Send,
    SiloAction,
    SiloEvent,
)
from fedsilo.protocol.methods.pubswap import step as by_step
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.swap import drawn_donors, public_batch, rows_ahead
from fedsilo.protocol.tasks import AnswerAhead, Evaluate, ExportDelta, GeneratePublic, TrainerTask

CoordinatorState = by_step.CoordinatorState
_Actions = tuple[CoordinatorAction, ...]


class Coordinator(by_step.Coordinator):
    """The coordinator's half; `CoordinatorState.answers` holds the answers of the open round, for the public steps of
    the next."""

    def _open(self, state: CoordinatorState, round_number: int) -> tuple[CoordinatorState, _Actions]:
        donors = self._donors_of_round(state, round_number)
        state, actions = super()._open(state, round_number)
        return state, (*actions, *donors)

    def _take_answers(
        self, state: CoordinatorState, silo: str, step: int, body: pb.PublicResponses
    ) -> tuple[CoordinatorState, _Actions]:
        of_step = state.answers.get(step, {})
        if state.phase != "open" or step not in rows_ahead(state.plan, state.round):
            return state, ()
        return replace(state, answers={**state.answers, step: {**of_step, silo: body}}), ()

    def _close_step_if_complete(self, state: CoordinatorState, step: int) -> tuple[CoordinatorState, _Actions]:
        return state, ()  # no step waits for answers

    def _donors_of_round(self, state: CoordinatorState, round_number: int) -> _Actions:
        """Return what goes out behind the opening of a round: for each silo and public step that it takes, its
        donors."""
        pool = {
            step: {silo: body for silo, body in of_step.items() if silo in state.uploads}
            for step, of_step in state.answers.items()
        }
        actions: list[CoordinatorAction] = []
        for step in state.plan.public_steps():
            for silo in state.silos:
                if pool.get(step) and step <= state.plan.steps_of(silo):
                    actions.extend(_donors(state.plan, round_number, step, silo, pool[step]))
        return tuple(actions)


def _donors(
    plan: Plan, round_number: int, step: int, receiver: str, of_step: Mapping[str, pb.PublicResponses]
) -> _Actions:
    body, count = pb.PublicDonors(), 0
    for index in public_batch(plan, round_number, step):
        answers: dict[str, Sequence[pb.Response | None]] = {
            silo: by_step.offered(row)
            for silo, responses in of_step.items()
            for row in responses.prompts
            if row.prompt_index == index
        }
        row = body.prompts.add(prompt_index=index)
        for origin, position, response in drawn_donors(answers, plan, round_number, step, index, receiver):
            row.donors.add(origin=origin, position=position, response=response)
            count += 1
    if not count:
        return ()  # the step goes on with own answers, as it does where nothing comes
    own = of_step.get(receiver, pb.PublicResponses())
    fields = {"silo": receiver, "donors": count, "answers": sum(len(row.responses) for row in own.prompts)}
    return Send(receiver, "public.donors", round_number, step, body), Note("donors_sent", round_number, step, fields)


@dataclass(frozen=True)
class SiloState(by_step.SiloState):
    """State of the silo's half.

    Attributes:
        due: evaluations before the round's first step.
        group: what is to be offered together at the end of the round, in this order.
        awaited: what has been offered of it and is not settled yet, as (kind, round, step).
        committed: whether the last round whose end was heard came to an adapter.
    """

    due: tuple[Evaluate, ...] = ()
    group: tuple[Offer, ...] = ()
    awaited: frozenset[tuple[str, int, int]] = frozenset()
    committed: bool = False


_Step = tuple[by_step.SiloState, tuple[SiloAction, ...]]


class Silo(by_step.Silo):
    def start(self, plan: Plan, party: str) -> SiloState:
        return SiloState(plan, party)

    def on_event(self, state: by_step.SiloState, event: SiloEvent) -> _Step:
        assert isinstance(state, SiloState)  # noqa: S101  # of `start`
        match event:
            case OfferSettled(kind, round_number, step):
                return self._settled(state, (kind, round_number, step))
        return super().on_event(state, event)

    def _open(self, state: by_step.SiloState, message: MessageArrived) -> _Step:
        assert isinstance(state, SiloState) and isinstance(message.body, pb.RoundOpen)  # noqa: S101
        before, base_digest = message.round - 1, message.body.base_digest
        due = () if state.base_evaluated else (Evaluate(0, ""),)
        if before and (state.committed or not state.round):  # 0: a restart, which knows nothing of the round before
            due = (*due, Evaluate(before, base_digest))
        # What was not offered of a round that closed meanwhile: figures may be late, answers and an update may not.
        figures = tuple(offer for offer in state.group if offer.kind == "metrics.eval")
        state = replace(
            state,
            round=message.round,
            base_digest=base_digest,
            public={row.step: tuple(row.prompt_indices) for row in message.body.public_steps},
            step=0,
            due=due,
            group=figures,
            awaited=frozenset(),
            committed=False,
        )
        return self._evaluate_or_load(state)

    def _evaluate_or_load(self, state: SiloState) -> _Step:
        if not state.due:
            return self._load(state)
        task, *due = state.due
        state, actions = self._train(replace(state, due=tuple(due)), task)  # type: ignore[assignment]
        return state, (Fetch(task.digest), *actions) if task.digest else actions

    def _offered_of_step(self) -> str:
        return "none"

    def _after_steps(self, state: by_step.SiloState) -> _Step:
        """Answers to the next round's prompts, then the update, unless the round has closed meanwhile."""
        assert isinstance(state, SiloState)  # noqa: S101
        if any(message.kind == "round.result" and message.round == state.round for message in state.inbox):
            return self._take(replace(state, waits_for="result"))
        answered = {(offer.round, offer.step) for offer in state.group if offer.kind == "public.responses"}
        for step, rows in rows_ahead(state.plan, state.round).items():
            if (state.round, step) not in answered and step <= state.plan.steps_of(state.silo):
                return self._train(state, AnswerAhead(state.round, step, rows))
        return self._train(state, ExportDelta(state.round))

    def _task_done(self, state: by_step.SiloState, task: TrainerTask, body: object) -> _Step:
        assert isinstance(state, SiloState)  # noqa: S101
        match task:
            case Evaluate(round_number) if isinstance(body, pb.MetricsEval):
                state = _with(state, Offer("metrics.eval", round_number, 0, body))
                if round_number == state.plan.rounds:
                    return self._offer_all(state)  # there is no other round whose group it could go with
                return self._evaluate_or_load(replace(state, base_evaluated=True))
            case GeneratePublic():
                return self._step_on_pool(state)
            case AnswerAhead(round_number, step) if isinstance(body, pb.PublicResponses):
                return self._after_steps(_with(state, Offer("public.responses", round_number, step, body)))
            case ExportDelta(round_number) if isinstance(body, pb.Factors):
                return self._offer_all(
                    _with(state, Offer(state.plan.lora.update_kind(round_number), round_number, 0, body))
                )
        return super()._task_done(state, task, body)

    def _result(self, state: by_step.SiloState, message: MessageArrived) -> _Step:
        assert isinstance(state, SiloState) and isinstance(message.body, pb.RoundResult)  # noqa: S101
        if message.body.committed and message.round == state.plan.rounds:
            return super()._result(state, message)
        return self._take(replace(state, committed=message.body.committed, waits_for="round"))

    def _step_on_pool(self, state: SiloState) -> _Step:
        """The step with the donors that came behind the round's opening; nothing is waited for."""
        place = (state.round, state.step)
        for message in state.inbox:
            if isinstance(message.body, pb.PublicDonors) and (message.round, message.step) == place:
                rest = tuple(other for other in state.inbox if other is not message)
                return self._train(replace(state, inbox=rest), self._public_step(state, "replace", message.body))
        return self._train(state, self._public_step(state, "none", pb.PublicDonors()))

    def _offer_all(self, state: SiloState) -> _Step:
        """The update goes last: when it is there, all that belongs to it is there, or was kept back."""
        awaited = frozenset((offer.kind, offer.round, offer.step) for offer in state.group)
        return replace(state, waits_for="offer", group=(), awaited=awaited), state.group

    def _settled(self, state: SiloState, place: tuple[str, int, int]) -> _Step:
        left = state.awaited - {place}
        if left == state.awaited or left or state.waits_for != "offer":
            return replace(state, awaited=left), ()
        waits_for = "round" if place[:2] == ("metrics.eval", state.plan.rounds) else "result"
        return self._take(replace(state, awaited=left, waits_for=waits_for))


def _with(state: SiloState, offer: Offer) -> SiloState:
    return replace(state, group=(*state.group, offer))
