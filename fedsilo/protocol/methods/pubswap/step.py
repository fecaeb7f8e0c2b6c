"""PubSwap with `exchange: step`, and its controls: at each public step silos exchange their answers, and wait for each
other until its deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.factors import Fixed
from fedsilo.protocol.method import (
    Commit,
    Committed,
    CoordinatorAction,
    CoordinatorEvent,
    DeadlinePassed,
    Fetch,
    FinishRun,
    MessageArrived,
    Note,
    Offer,
    OfferSettled,
    Result,
    RunStarted,
    Send,
    SiloAbstained,
    SiloAction,
    SiloCame,
    SiloEvent,
    SiloLeft,
    StartDeadline,
    TaskDone,
    Train,
)
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.randomness import generator, seed_of
from fedsilo.protocol.swap import balanced_donors, public_batch, random_group
from fedsilo.protocol.tasks import (
    Evaluate,
    ExportDelta,
    GeneratePublic,
    LikelihoodStep,
    LoadAdapter,
    LoadReference,
    PrivateStep,
    PublicStep,
    TrainerTask,
)

Swap = Literal["balanced", "random", "none", "key", "worked-key", "self", "likelihood", "no-public"]
# The silo waits this much longer than the coordinator, so that a reply sent at the coordinator's deadline arrives.
DONOR_GRACE_SECONDS = 30.0


def offered(row: pb.PromptResponses) -> list[pb.Response | None]:
    """A silo's answers to one prompt; None in the place of one that could not be graded in time."""
    return [response if response.text or response.finish else None for response in row.responses]


# ---- coordinator -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CoordinatorState:
    """`answers`, `uploads` and `kept_back` belong to the open round. `kept_back` lists the silos whose site keeps the
    update back and nothing else: they train on and evaluate. `came` are there for the next round, if there is one."""

    plan: Plan
    silos: tuple[str, ...] = ()
    came: frozenset[str] = frozenset()
    round: int = 0
    base_digest: str = ""
    phase: str = "waiting"  # waiting | open | committing | evaluating | done
    answers: Mapping[int, Mapping[str, pb.PublicResponses]] = field(default_factory=dict)
    absent: frozenset[tuple[int, str]] = frozenset()  # (step, silo); step 0 is the whole round
    closed_steps: frozenset[int] = frozenset()
    uploads: Mapping[str, str] = field(default_factory=dict)
    kept_back: frozenset[str] = frozenset()
    evaluated: frozenset[str] = frozenset()
    committed_rounds: int = 0


_Coordinated = tuple[CoordinatorState, tuple[CoordinatorAction, ...]]


@dataclass(frozen=True)
class Coordinator:
    """The coordinator's half. stays: what is trained and leaves no silo."""

    swap: Swap
    stays: Fixed = "none"

    def start(self, plan: Plan, party: str) -> CoordinatorState:
        return CoordinatorState(plan)

    def on_event(self, state: CoordinatorState, event: CoordinatorEvent) -> _Coordinated:
        if state.phase == "done":
            return state, ()
        match event:
            case RunStarted(silos, base_digest):
                return self._open(replace(state, silos=silos, base_digest=base_digest), 1)
            case MessageArrived(silo, "public.responses", round_number, step, body):
                if round_number != state.round or not isinstance(body, pb.PublicResponses):
                    return state, ()
                return self._take_answers(state, silo, step, body)
            case MessageArrived(silo, kind, round_number, _, _, digest) if kind == self._last_kind(
                state.plan, round_number
            ):
                if round_number != state.round or state.phase != "open":
                    return state, ()
                return self._close_round_if_complete(replace(state, uploads={**state.uploads, silo: digest}))
            case MessageArrived(silo, "metrics.eval", round_number):
                if round_number != state.plan.rounds or state.phase != "evaluating":
                    return state, ()
                return self._finish_if_evaluated(replace(state, evaluated=state.evaluated | {silo}))
            case SiloAbstained(silo, round_number, step, declined):
                if round_number != state.round:
                    return state, ()
                kept_back = state.kept_back - {silo} if step == 0 else state.kept_back
                if declined == self._last_kind(state.plan, round_number):
                    kept_back |= {silo}
                state = replace(state, absent=state.absent | {(step, silo)}, kept_back=kept_back)
                return self._close_whatever_is_complete(state)
            case SiloCame(silo):
                return replace(state, came=state.came | {silo}), ()
            case SiloLeft(silo):
                state = replace(state, silos=_without(state.silos, silo), came=state.came - {silo})
                if state.phase == "open" and len({*state.silos, *self._given(state)}) < state.plan.quorum:
                    return self._close_round(state)  # nothing that may still come makes it enough
                return self._close_whatever_is_complete(state)
            case DeadlinePassed(name):
                return self._deadline(state, name)
            case Committed(round=round_number, digest=digest):
                if round_number != state.round or state.phase != "committing":
                    return state, ()
                state = replace(state, base_digest=digest, committed_rounds=state.committed_rounds + 1)
                return self._after_round(state, committed=True)
        return state, ()

    def _last_kind(self, plan: Plan, number: int) -> str:
        """Return the kind of the message that ends a silo's part of a round."""
        return plan.lora.update_kind(number, self.stays)

    def _given(self, state: CoordinatorState) -> Mapping[str, str]:
        """Return, by silo, what counts towards the quorum of the open round: digests of updates."""
        return state.uploads

    def _open(self, state: CoordinatorState, round_number: int) -> _Coordinated:
        plan = state.plan
        steps = () if self.swap == "no-public" else plan.public_steps()
        body = pb.RoundOpen(
            base_digest=state.base_digest,
            public_steps=[
                pb.PublicStep(step=step, prompt_indices=public_batch(plan, round_number, step)) for step in steps
            ],
        )
        state = replace(
            state,
            round=round_number,
            phase="open",
            answers={},
            absent=frozenset(),
            closed_steps=frozenset(),
            uploads={},
            kept_back=frozenset(),
        )
        sends = tuple(Send(silo, "round.open", round_number, 0, body) for silo in state.silos)
        return state, (*sends, StartDeadline(f"round/{round_number}", plan.round_deadline_seconds))

    def _take_answers(self, state: CoordinatorState, silo: str, step: int, body: pb.PublicResponses) -> _Coordinated:
        actions: tuple[CoordinatorAction, ...] = ()
        of_step = state.answers.get(step, {})
        if step in state.closed_steps:
            # Late: no longer a donor, but it may still receive donors.
            donors = self._donors(state, step, silo, {**of_step, silo: body})
            note = Note("late_public_step", state.round, step, {"silo": silo})
            return state, (note, *donors)
        if not of_step:
            actions = (StartDeadline(f"public/{state.round}/{step}", state.plan.public_step_deadline_seconds),)
        state = replace(state, answers={**state.answers, step: {**of_step, silo: body}})
        state, closing = self._close_step_if_complete(state, step)
        return state, actions + closing

    def _close_step_if_complete(self, state: CoordinatorState, step: int) -> _Coordinated:
        of_step = state.answers.get(step, {})
        waiting = [
            silo
            for silo in state.silos
            if silo not in of_step and not {(step, silo), (0, silo)} & state.absent and silo not in state.uploads
        ]
        if waiting or not of_step or step in state.closed_steps:
            return state, ()
        return self._close_step(state, step)

    def _close_step(self, state: CoordinatorState, step: int) -> _Coordinated:
        of_step = state.answers.get(step, {})
        state = replace(state, closed_steps=state.closed_steps | {step})
        actions: list[CoordinatorAction] = []
        for silo in state.silos:
            if silo in of_step:
                actions.extend(self._donors(state, step, silo, of_step))
        return state, tuple(actions)

    def _donors(
        self, state: CoordinatorState, step: int, receiver: str, of_step: Mapping[str, pb.PublicResponses]
    ) -> tuple[CoordinatorAction, ...]:
        """The donors one silo gets for a step.

        `of_step` holds the receiver's own answers too. Of a late receiver they tell only what it asked for and, under
        Balanced, how many it lacks: the step's pool stays what it was when the step closed.
        """
        plan, body, own = state.plan, pb.PublicDonors(), of_step[receiver]
        pooled = state.answers.get(step, {})
        samples = {row.prompt_index: row.samples for row in own.prompts}
        donor_count = 0
        for index in public_batch(plan, state.round, step):
            if index not in samples:
                continue
            answers: dict[str, Sequence[pb.Response | None]] = {
                silo: offered(row)
                for silo, responses in of_step.items()
                # Random is one draw for all, so a late silo must not shift it with answers the others never had.
                if silo in pooled or (silo == receiver and self.swap != "random")
                for row in responses.prompts
                if row.prompt_index == index
            }
            if self.swap == "random":
                random = generator(seed_of(plan.seed, "random-group", state.round, step, index))
                group = random_group(answers, plan.samples_per_prompt, random)
            else:
                random = generator(seed_of(plan.seed, "donors", state.round, step, index, receiver))
                group = balanced_donors(answers, receiver, samples[index], random)
            row = body.prompts.add(prompt_index=index)
            for origin, position, response in group:
                # What the receiver wrote itself it already has.
                row.donors.add(origin=origin, position=position, response=None if origin == receiver else response)
                donor_count += origin != receiver
        fields = {"silo": receiver, "donors": donor_count, "answers": sum(len(row.responses) for row in own.prompts)}
        return (
            Send(receiver, "public.donors", state.round, step, body),
            Note("donors_sent", state.round, step, fields),
        )

    def _close_whatever_is_complete(self, state: CoordinatorState) -> _Coordinated:
        if state.phase == "evaluating":
            return self._finish_if_evaluated(state)
        if state.phase != "open":
            return state, ()
        actions: list[CoordinatorAction] = []
        for step in sorted(state.answers):
            state, closing = self._close_step_if_complete(state, step)
            actions.extend(closing)
        state, closing = self._close_round_if_complete(state)
        return state, (*actions, *closing)

    def _close_round_if_complete(self, state: CoordinatorState) -> _Coordinated:
        missing = [silo for silo in state.silos if silo not in state.uploads and (0, silo) not in state.absent]
        if not missing:
            return self._close_round(state)
        # An upload may have been the last thing a public step waited for.
        actions: list[CoordinatorAction] = []
        for step in sorted(state.answers):
            state, closing = self._close_step_if_complete(state, step)
            actions.extend(closing)
        return state, tuple(actions)

    def _close_round(self, state: CoordinatorState) -> _Coordinated:
        given = self._given(state)
        participants = tuple(silo for silo in state.plan.silos if silo in given)
        if len(participants) < state.plan.quorum:
            # Too few: keep the previous global state.
            note = Note("round_abandoned", state.round, 0, {"uploads": len(participants), "quorum": state.plan.quorum})
            state, actions = self._after_round(state, committed=False)
            return state, (note, *actions)
        return self._complete(state, participants)

    def _complete(self, state: CoordinatorState, participants: tuple[str, ...]) -> _Coordinated:
        """End a round to which enough silos have given something."""
        digests = tuple(state.uploads[silo] for silo in participants)
        return replace(state, phase="committing"), (Commit(state.round, (Result(participants, digests),)),)

    def _after_round(self, state: CoordinatorState, *, committed: bool, closed: bool = False) -> _Coordinated:
        participants = [silo for silo in state.plan.silos if silo in state.uploads and (committed or closed)]
        body = pb.RoundResult(committed=committed, adapter_digest=state.base_digest, participants=participants)
        results = tuple(Send(silo, "round.result", state.round, 0, body) for silo in state.silos)
        if not state.silos:
            # also where somebody has come: nobody of this round is left who could hear of its end
            state, actions = self._end(state, "failed", "NO_SILO_LEFT")
            return state, (*results, *actions)
        if state.round < state.plan.rounds:
            state = replace(state, silos=self._everybody(state), came=frozenset())
            if len(state.silos) < state.plan.silos_min:
                # who left does not come back, and who was asked and has not come is not waited for
                state, actions = self._end(state, "failed", "QUORUM_NOT_REACHED")
            else:
                state, actions = self._open(state, state.round + 1)
            return state, (*results, *actions)
        if not committed:
            # There is no new adapter to evaluate.
            state, actions = self._end_by_rounds(state)
            return state, (*results, *actions)
        deadline = StartDeadline("evaluation", state.plan.round_deadline_seconds)
        return replace(state, phase="evaluating", evaluated=frozenset()), (*results, deadline)

    def _finish_if_evaluated(self, state: CoordinatorState) -> _Coordinated:
        # Whoever abstains in the last round (step 0) sends no evaluation either, unless only its update is kept back.
        gone = {silo for step, silo in state.absent if step == 0} - state.kept_back
        if all(silo in state.evaluated or silo in gone for silo in state.silos):
            return self._end_by_rounds(state)
        return state, ()

    def _end_by_rounds(self, state: CoordinatorState) -> _Coordinated:
        if state.committed_rounds:
            return self._end(state, "finished", "")
        return self._end(state, "failed", "NO_ROUND_COMMITTED")

    def _end(self, state: CoordinatorState, outcome: str, reason: str) -> _Coordinated:
        body = pb.RunEnd(outcome=outcome, adapter_digest=state.base_digest)
        ends = tuple(Send(silo, "run.end", state.round, 0, body) for silo in self._everybody(state))
        return replace(state, phase="done"), (*ends, FinishRun(outcome, reason))

    @staticmethod
    def _everybody(state: CoordinatorState) -> tuple[str, ...]:
        return tuple(silo for silo in state.plan.silos if silo in state.silos or silo in state.came)

    def _deadline(self, state: CoordinatorState, name: str) -> _Coordinated:
        if name == f"round/{state.round}" and state.phase == "open":
            return self._close_round(state)
        if name == "evaluation" and state.phase == "evaluating":
            return self._end_by_rounds(state)
        parts = name.split("/")
        if parts[0] == "public" and state.phase == "open" and int(parts[1]) == state.round:
            step = int(parts[2])
            if step not in state.closed_steps and step in state.answers:
                return self._close_step(state, step)
        return state, ()


def _without(silos: tuple[str, ...], gone: str) -> tuple[str, ...]:
    return tuple(silo for silo in silos if silo != gone)


# ---- silo ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SiloState:
    """`waits_for` names the one event the silo's part is waiting for; messages that come meanwhile stand in `inbox`."""

    plan: Plan
    silo: str
    round: int = 0
    base_digest: str = ""
    public: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    step: int = 0
    waits_for: str = "round"  # round | task | offer | donors | result | end
    offered: tuple[str, int, int] = ("", 0, 0)  # kind, round, step of the offer waited for
    base_evaluated: bool = False
    has_reference: bool = False  # the trainer has the adapter that the KL term is against, where that is one
    inbox: tuple[MessageArrived, ...] = ()


_Step = tuple[SiloState, tuple[SiloAction, ...]]


@dataclass(frozen=True)
class Silo:
    """The silo's half. stays: what is trained and leaves no silo."""

    swap: Swap
    stays: Fixed = "none"

    def start(self, plan: Plan, party: str) -> SiloState:
        return SiloState(plan, party)

    def on_event(self, state: SiloState, event: SiloEvent) -> _Step:
        match event:
            case MessageArrived():
                return self._take(replace(state, inbox=(*state.inbox, event)))
            case TaskDone(task, body) if state.waits_for == "task":
                return self._task_done(state, task, body)
            case OfferSettled(kind, round_number, step, outcome) if state.waits_for == "offer":
                if state.offered != (kind, round_number, step):
                    return state, ()
                return self._offer_settled(state, outcome)
            case DeadlinePassed(name) if state.waits_for == "donors" and name == f"donors/{state.round}/{state.step}":
                return self._train(state, self._public_step(state, "none", pb.PublicDonors()))
        return state, ()

    def _take(self, state: SiloState) -> _Step:
        """Take the first message of the inbox that fits what the silo waits for; drop those of closed rounds."""
        state = replace(state, inbox=tuple(message for message in state.inbox if not _is_stale(message, state.round)))
        for place, message in enumerate(state.inbox):
            rest = state.inbox[:place] + state.inbox[place + 1 :]
            following = replace(state, inbox=rest)
            match message.kind:
                case "round.open" if state.waits_for in {"round", "result"} and message.round > state.round:
                    return self._open(following, message)
                case "public.donors" if (message.round, message.step) == (state.round, state.step):
                    if state.waits_for == "donors" and isinstance(message.body, pb.PublicDonors):
                        swap = "pool" if self.swap == "random" else "replace"
                        return self._train(following, self._public_step(state, swap, message.body))
                case "round.result" if message.round == state.round and state.waits_for in {
                    "result",
                    "offer",
                    "donors",
                }:
                    # Also when an offer is still held: the round is over, what was held is missed.
                    return self._result(following, message)
                case "run.end" if state.waits_for in {"round", "result"}:
                    return replace(following, waits_for="end"), ()
        return state, ()

    def _open(self, state: SiloState, message: MessageArrived) -> _Step:
        assert isinstance(message.body, pb.RoundOpen)  # noqa: S101  # the registry of kinds guarantees the type
        state = replace(
            state,
            round=message.round,
            base_digest=message.body.base_digest,
            public={row.step: tuple(row.prompt_indices) for row in message.body.public_steps},
            step=0,
        )
        if not state.base_evaluated:
            return self._train(state, Evaluate(0, ""))
        return self._load(state)

    def _load(self, state: SiloState) -> _Step:
        if state.plan.reference_sha256 and not state.has_reference:
            return self._train(state, LoadReference(state.round, state.plan.reference_sha256))
        task = LoadAdapter(state.round, state.base_digest)
        return replace(state, waits_for="task"), (Fetch(state.base_digest), Train(task))

    def _train(self, state: SiloState, task: TrainerTask) -> _Step:
        return replace(state, waits_for="task"), (Train(task),)

    def _public_step(self, state: SiloState, swap: str, donors: pb.PublicDonors) -> PublicStep:
        return PublicStep(state.round, state.step, swap, donors)

    def _next_step(self, state: SiloState) -> _Step:
        # A round that closed meanwhile needs no further steps.
        for message in state.inbox:
            if message.kind == "round.result" and message.round == state.round:
                return self._take(replace(state, waits_for="result"))
        step = state.step + 1
        if step > state.plan.steps_of(state.silo):
            return self._after_steps(replace(state, step=0))
        state = replace(state, step=step)
        if step in state.public and self.swap == "likelihood":
            return self._train(state, LikelihoodStep(state.round, step, state.public[step]))
        if step in state.public:
            return self._train(state, GeneratePublic(state.round, step, state.public[step], self._offered_of_step()))
        return self._train(state, PrivateStep(state.round, step))

    def _offered_of_step(self) -> str:
        """Return which own answers leave at a public step."""
        return {"balanced": "correct", "random": "all"}.get(self.swap, "none")

    def _after_steps(self, state: SiloState) -> _Step:
        return self._train(state, ExportDelta(state.round))

    def _task_done(self, state: SiloState, task: TrainerTask, body: object) -> _Step:
        match task:
            case Evaluate(round_number) if isinstance(body, pb.MetricsEval):
                return self._offer(replace(state, base_evaluated=True), Offer("metrics.eval", round_number, 0, body))
            case GeneratePublic(offer="none"):
                alone = self.swap if self.swap in ("key", "worked-key", "self") else "none"
                return self._train(state, self._public_step(state, alone, pb.PublicDonors()))
            case GeneratePublic(round_number, step) if isinstance(body, pb.PublicResponses):
                return self._offer(state, Offer("public.responses", round_number, step, body))
            case ExportDelta(round_number) if isinstance(body, pb.Factors):
                kind = state.plan.lora.update_kind(round_number, self.stays)
                return self._offer(state, Offer(kind, round_number, 0, body))
            case LoadReference():
                return self._load(replace(state, has_reference=True))
            case LoadAdapter() | PrivateStep() | PublicStep() | LikelihoodStep():
                return self._next_step(state)
        return state, ()

    def _offer(self, state: SiloState, offer: Offer) -> _Step:
        return replace(state, waits_for="offer", offered=(offer.kind, offer.round, offer.step)), (offer,)

    def _offer_settled(self, state: SiloState, outcome: str) -> _Step:
        match state.offered[0], outcome:
            case "public.responses", "sent":
                seconds = state.plan.public_step_deadline_seconds + DONOR_GRACE_SECONDS
                deadline = StartDeadline(f"donors/{state.round}/{state.step}", seconds)
                state, actions = self._take(replace(state, waits_for="donors"))
                return state, (deadline, *actions)
            case "public.responses", _:
                return self._train(state, self._public_step(state, "none", pb.PublicDonors()))
            case "metrics.eval", _ if state.offered[1] == 0:
                return self._load(state)
            case "metrics.eval", _:
                return self._take(replace(state, waits_for="round"))
        return self._take(replace(state, waits_for="result"))

    def _result(self, state: SiloState, message: MessageArrived) -> _Step:
        assert isinstance(message.body, pb.RoundResult)  # noqa: S101  # the registry of kinds guarantees the type
        if not message.body.committed:
            return self._take(replace(state, waits_for="round"))
        digest = message.body.adapter_digest
        return replace(state, waits_for="task"), (Fetch(digest), Train(Evaluate(state.round, digest)))


def _is_stale(message: MessageArrived, round_number: int) -> bool:
    """Return whether a silo that has opened `round_number` can no longer use a message: its round is over, or open
    already."""
    if message.kind == "round.open":
        return message.round <= round_number
    return message.kind in {"public.donors", "round.result"} and message.round < round_number
