"""A run without a coordinator: the tables and a method's half, as `coordinator.runs` puts them together, no database.

`say` tells of one event, as often and in whatever order a test likes; what comes of it is checked at once. The checks
are those that must hold of every history whatever.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

from fedsilo.protocol import method as m
from fedsilo.protocol import rounds
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.kinds import UPDATE_KINDS
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.rounds import ROUND_OVER, Effect, Verdict
from fedsilo.protocol.swap import public_batch

BASE = "digest-0"


def body_of(event: rounds.Contribution, plan: Plan) -> Any:
    if event.kind == "public.responses":
        body = pb.PublicResponses()
        for row in public_batch(plan, event.round + 1, event.step) if plan.exchange == "round_end" else (0,):
            body.prompts.add(prompt_index=row, samples=8, responses=[pb.Response(text=event.silo)])
        return body
    return pb.Factors() if event.kind in UPDATE_KINDS else pb.MetricsEval()


@dataclass
class PaperRun:
    """Attributes: journal (what was accepted), commits, acknowledged (contributions that were not refused), told (what
    the method was told of, and how often), begun (silos that the run began with), ends (effects RECORD)."""

    plan: Plan
    now: float = 0.0
    journal: list[rounds.Event] = field(default_factory=list)
    commits: list[m.Commit] = field(default_factory=list)
    acknowledged: set[rounds.Contribution] = field(default_factory=set)
    told: Counter[m.MessageArrived] = field(default_factory=Counter)
    begun: tuple[str, ...] = ()
    ends: int = 0

    def __post_init__(self) -> None:
        self.half = METHODS[self.plan.method].coordinator
        self.state = self.half.start(self.plan, "coordinator")
        self.life = self.first_life()
        self._cause(m.StartDeadline(rounds.JOIN, self.plan.join_deadline_seconds))

    def first_life(self) -> rounds.Life:
        method = METHODS[self.plan.method]
        return rounds.first_life(self.plan, method.update_kinds(self.plan), evaluates_own=method.evaluates_own)

    def copy(self) -> PaperRun:
        other = object.__new__(PaperRun)
        other.__dict__.update(self.__dict__)
        for name in ("journal", "commits"):
            setattr(other, name, list(getattr(self, name)))
        other.acknowledged, other.told = set(self.acknowledged), Counter(self.told)
        return other

    # ---- what comes from outside ---------------------------------------------------------------------

    def say(self, event: rounds.Event) -> rounds.Outcome:
        outcome = rounds.step(self.life, event, self.now)
        if outcome.verdict is Verdict.ACCEPTED:
            pending = deque(self._taken(event, outcome))
            while pending:
                pending.extend(self._cause(pending.popleft()))
        else:
            assert outcome.life is self.life and not outcome.effects and not outcome.then
        if isinstance(event, rounds.Contribution) and outcome.verdict is not Verdict.REFUSED:
            self.acknowledged.add(replace(event, attempt=0))
        self.check()
        return outcome

    def next_deadline(self) -> bool:
        """Let time pass to the next deadline; False: there is none that runs."""
        running = self.life.due(float("inf"))
        if running:
            self.now = max(self.now, self.life.deadlines[running[0]])
            assert running[0] in self.life.due(self.now)
            self.say(m.DeadlinePassed(running[0]))
        return bool(running)

    def to_the_end(self) -> None:
        """No more messages: deadlines alone must bring the run to its end."""
        if self.life.paused_at is not None:
            self.say(rounds.RunResumed())
        for _ in range(2 + 4 * self.plan.rounds * (1 + len(self.plan.public_steps()))):
            if not self.next_deadline():
                break
        assert self.life.over, (self.life.state, self.life.deadlines)

    # ---- what follows --------------------------------------------------------------------------------

    def sent(self, action: m.Send) -> None:
        """The method sends a message; a test that has silos keeps it for them."""

    def carried_out(self, effect: Effect, event: rounds.Event) -> None:
        """An effect follows from an event."""

    def _cause(self, event: rounds.Event) -> list[rounds.Event]:
        outcome = rounds.step(self.life, event, self.now)
        assert outcome.verdict is not Verdict.REFUSED, (event, outcome.code)
        return self._taken(event, outcome) if outcome.verdict is Verdict.ACCEPTED else []

    def _taken(self, event: rounds.Event, outcome: rounds.Outcome) -> list[rounds.Event]:
        self.journal.append(event)
        self.life = outcome.life
        follow: list[rounds.Event] = []
        for effect in outcome.effects:
            if effect is Effect.TELL:
                follow += self._tell(event)
            elif effect is Effect.AGGREGATE and isinstance(event, m.Commit):
                self.commits.append(event)
                follow.append(m.Committed(event.round, {m.EVERYBODY: f"digest-{event.round}"}))
            elif effect is Effect.RECORD:
                self.ends += 1
            self.carried_out(effect, event)
        if outcome.then == "start":
            self.begun = self.life.those("accepted")
            follow.append(m.RunStarted(self.begun, BASE))
        elif outcome.then:
            follow.append(rounds.GivenUp("QUORUM_NOT_REACHED"))
        return follow

    def _tell(self, event: rounds.Event) -> list[rounds.Event]:
        self.state, actions = self.half.on_event(self.state, self._as_told(event))
        follow: list[rounds.Event] = []
        if self.plan.exchange == "round_end":
            self._check_donors(actions)
        for action in actions:
            if isinstance(action, m.Send):
                self.sent(action)
            match action:
                case m.Send(body=pb.RoundOpen(), round=number):
                    follow += self._cause(rounds.RoundOpened(number))
                case m.Send(body=pb.RoundResult() as body, round=number):
                    assert set(body.participants) <= set(self.life.places), "who takes part is of the roster"
                    follow += self._cause(rounds.RoundAbandoned(number))
                case m.StartDeadline() | m.Commit() | m.CloseRound() | m.FinishRun():
                    follow += self._cause(action)
        opened = {each.silo for each in actions if isinstance(each, m.Send) and isinstance(each.body, pb.RoundOpen)}
        assert not opened or opened == set(self.life.places), "method and tables have the same silos in a round"
        return follow

    def _as_told(self, event: Any) -> Any:
        if isinstance(event, rounds.PlanTaken):
            return m.SiloCame(event.silo)
        if not isinstance(event, rounds.Contribution):
            return event
        self.told[event] += 1
        return m.MessageArrived(
            event.silo, event.kind, event.round, event.step, body_of(event, self.plan), event.digest
        )

    # ---- what must hold ------------------------------------------------------------------------------

    def _check_donors(self, actions: tuple[m.CoordinatorAction, ...]) -> None:
        """A round opens with one donor for each prompt from each other silo whose answers and update both came in the
        round before, no others, and nothing is sent or waited for in between (one answer each, so all of them fit)."""
        sends = [action for action in actions if isinstance(action, m.Send)]
        donors = {(each.silo, each.step): each for each in sends if each.kind == "public.donors"}
        opened = {each.silo: each.round for each in sends if each.kind == "round.open"}
        assert {silo for silo, _ in donors} <= set(opened)
        assert not any(isinstance(each, m.StartDeadline) and each.name.startswith("public/") for each in actions)
        gave = {(each.round, each.step, each.silo) for each in self.told if each.kind == "public.responses"}
        updated = {(each.round, each.silo) for each in self.told if each.kind == self.life.update_kind(each.round)}
        for silo, number in opened.items():
            for step in self.plan.public_steps():
                expected = {
                    other
                    for other in self.plan.silos
                    if (number - 1, step, other) in gave and (number - 1, other) in updated
                }
                rows = list(donors[silo, step].body.prompts) if (silo, step) in donors else []
                assert len(rows) == (self.plan.prompts_per_step if expected - {silo} else 0)
                for row in rows:
                    assert {donor.origin for donor in row.donors} == expected - {silo}
                    assert all(donor.response.text == donor.origin for donor in row.donors)

    def check(self) -> None:
        life = self.life
        assert all(times == 1 for times in self.told.values()), "told twice"
        kept = {
            rounds.Contribution(silo, kind, number, step, 0, digest)
            for number, taken in life.taken.items()
            for (step, silo, kind), digest in taken.items()
        }
        assert self.acknowledged == kept == {replace(each, attempt=0) for each in self.told}, "acknowledged, then lost"
        assert not life.started or life.over or len(self.begun) >= self.plan.quorum
        for commit in self.commits:
            updates = {each.silo: each.digest for each in self.acknowledged
                       if each.round == commit.round and each.kind == life.update_kind(each.round)}  # fmt: skip
            given = [silo for silo in self.plan.silos if silo in updates]
            assert len(given) >= self.plan.quorum
            expected = m.Result(tuple(given), tuple(updates[silo] for silo in given))
            assert commit.results == (expected,), "all that was acknowledged counts, in the plan's order"
        assert len({commit.round for commit in self.commits}) == len(self.commits)
        assert self.ends == life.over
        if life.over:
            assert not life.deadlines and life.round_state in {"none", *ROUND_OVER}
            assert not {"invited", "working"} & set(life.places.values())
        if life.open_round:
            assert any(name == f"round/{life.round}" for name in life.deadlines), "nothing would end it"

    def check_replay(self) -> None:
        """The journal alone gives the same life and the same state of the method, and so does its JSON."""
        stored = [rounds.from_fields(rounds.to_fields(event)) for event in self.journal]
        assert stored == self.journal
        assert timeless(rounds.folded(self.first_life(), stored, 0.0)) == timeless(self.life)
        life, state = self.first_life(), self.half.start(self.plan, "coordinator")
        told, self.told = self.told, Counter()
        for event in stored:
            outcome = rounds.step(life, event, 0.0)
            life = outcome.life
            if Effect.TELL in outcome.effects:
                state, _ = self.half.on_event(state, self._as_told(event))
        assert state == self.state and self.told == told
        self.told = told


def timeless(life: rounds.Life) -> rounds.Life:
    """Without the moments, which count anew after a restart."""
    return replace(life, deadlines=dict.fromkeys(life.deadlines, 0.0), paused_at=None)
