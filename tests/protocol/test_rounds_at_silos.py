"""The table of a silo's round against the coordinator's: whatever these say, lose, repeat and forget, each silo comes
to know how each round ended, works on none that it knows is over, and hears of the next."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsilo.protocol import method as m
from fedsilo.protocol import rounds
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.round_tables import ROUND_OVER, Effect, Verdict
from fedsilo.protocol.rounds import AtSilo, SiloRound, message_at_silo, silo_step
from tests.protocol.paper_run import PaperRun
from tests.protocol.test_rounds import UPDATE, WORKS, plan_with


class Item(NamedTuple):
    kind: str
    round: int = 0
    step: int = 0
    digest: str = ""
    committed: bool = False


@dataclass
class Coordinator(PaperRun):
    """A run with what waits for each silo, in order, and how each round ended."""

    outbox: dict[str, list[Item]] = field(default_factory=lambda: defaultdict(list))
    given: set[str] = field(default_factory=set)  # silos that were given the plan
    agreed: set[tuple[int, str]] = field(default_factory=set)
    outcomes: dict[int, str] = field(default_factory=dict)

    def sent(self, action: m.Send) -> None:
        if isinstance(action.body, pb.RoundOpen) and f"{rounds.AGREEMENT}{action.round}" not in self.life.deadlines:
            self._cause(m.StartDeadline(f"{rounds.AGREEMENT}{action.round}", 1.0))
        committed = isinstance(action.body, pb.RoundResult) and action.body.committed
        digest = f"{action.kind}{action.round}{action.step}"
        self.outbox[action.silo].append(Item(action.kind, action.round, action.step, digest, committed))

    def carried_out(self, effect: Effect, event: rounds.Event) -> None:
        life = self.life
        match effect, event:
            case Effect.WITHDRAW, rounds.PlanDeclined(silo) | m.SiloLeft(silo):
                self.outbox[silo].clear()
            case Effect.AGREE, _ if number := life.open_round:
                waited_for = set(life.places) - life.signed - life.absent()
                late = isinstance(event, m.DeadlinePassed) or any(place[0] == number for place in self.agreed)
                if len(life.signed) >= max(2, life.quorum) and (late or not waited_for):
                    for silo in life.signed - life.absent():
                        if any((number, each) not in self.agreed for each in life.signed):
                            digest = f"{number}{sorted(life.signed)}"
                            self.outbox[silo].append(Item("round.agreed", number, digest=digest))
                    self.agreed |= {(number, silo) for silo in life.signed}
            case Effect.CLOSE, m.Committed(number):
                self.outcomes[number] = "committed"
            case Effect.CLOSE, rounds.RoundAbandoned(number):
                self.outcomes[number] = "abandoned"
            case Effect.SEND_AWAY | Effect.DISMISS, _:
                for silo in [each for each in life.silos if life.standing[each] != "out"]:
                    if effect is Effect.SEND_AWAY or life.standing[silo] == "asked":
                        self.outbox[silo][:] = [Item("run.end")] if silo in self.given else []
                if effect is Effect.SEND_AWAY and life.round:
                    self.outcomes.setdefault(life.round, "abandoned")


@dataclass
class Silo:
    """What a silo knows: its part in the run, its newest round, and how each round ended that it heard of."""

    name: str
    run: str = "asked"
    at: SiloRound = field(default_factory=SiloRound)
    ends: dict[int, str] = field(default_factory=dict)

    def moves(self, event: AtSilo) -> tuple[Effect, ...]:
        before, outcome = self.at, silo_step(self.at, event)
        assert outcome.verdict is not Verdict.REFUSED, (before, event)
        self.at = outcome.life
        if Effect.TELL in outcome.effects and event.name != "run over":
            assert event.round > before.round or before.state != "left", "the method hears of a round that was left"
        if before.state == "working" and self.at.state in ("left", "signed") and event.name != "open":
            assert Effect.DROP in outcome.effects, "work on a round that goes on without this silo"
        if Effect.NOTE_END in outcome.effects:
            self.ends[event.round] = "committed" if event.name == "commit" else "abandoned"
        if Effect.END in outcome.effects:
            self.run = "over"
        return outcome.effects


NAMES, ROUNDS = "abc", 4


class Federation:
    """Args:
    late: the silo that takes the plan in after the others, if one does.
    declines: it says no to the plan.
    """

    def __init__(self, works: dict[str, str], quorum: int, late: str, declines: bool) -> None:
        self.declines = late if declines else ""
        self.run = Coordinator(plan_with(NAMES, **works, rounds=ROUNDS, quorum=quorum))
        self.silos = {name: Silo(name) for name in NAMES}
        for name in NAMES:
            self.run.outbox[name].append(Item("run.plan"))
            if name != late:
                self.hears(name, fits=True, acknowledged=True)

    # ---- messages ------------------------------------------------------------------------------------

    def hears(self, name: str, fits: bool, acknowledged: bool) -> None:
        """A silo takes in what waits for it; not acknowledged, it comes again."""
        silo, waiting = self.silos[name], self.run.outbox[name]
        if not waiting or self.run.life.paused_at is not None:
            return
        item = waiting[0]
        self.run.given.add(name)
        if item.kind == "run.plan":
            self._hears_plan(silo)
        elif silo.run == "running":
            self._hears(silo, item, fits)
        if acknowledged and waiting and waiting[0] is item:
            waiting.pop(0)
            if item.kind == "run.plan":
                self.run.say(rounds.PlanTaken(name))

    def _hears_plan(self, silo: Silo) -> None:
        if silo.run == "asked":
            silo.run = "over" if silo.name == self.declines else "running"
        if silo.run == "over":
            self.run.say(rounds.PlanDeclined(silo.name))

    def _hears(self, silo: Silo, item: Item, fits: bool) -> None:
        event = message_at_silo(*item[:4], committed=item.committed)
        if silo_step(silo.at, event).verdict is Verdict.ACCEPTED and not fits and event.name in ("open", "agree"):
            self.run.say(m.SiloAbstained(silo.name, item.round, 0))
            event = AtSilo("refuse", item.round)
        silo.moves(event)

    def polls(self, name: str) -> None:
        silo = self.silos[name]
        if silo.run == "running" and silo.at.state == "signed":
            self.run.say(rounds.Signed(name, silo.at.round))

    def sends(self, name: str, kind: str) -> None:
        """What is refused came too late: a silo that works was in the round, and says nothing twice in two ways."""
        silo = self.silos[name]
        if silo.run != "running" or silo.at.state not in (("committed",) if kind == "metrics.eval" else ("working",)):
            return
        step = 2 if kind == "public.responses" else 0
        outcome = self.run.say(rounds.Contribution(name, kind, silo.at.round, step, 1, f"{name}{silo.at.round}{kind}"))
        if outcome.verdict is Verdict.REFUSED:
            assert silo.at.round < self.run.life.round or not self.run.life.open_round, outcome.code

    # ---- troubles ------------------------------------------------------------------------------------

    def is_killed(self, name: str, keeps: bool, said: bool) -> None:
        """It starts again, and has forgotten what it heard but for the newest round (not `keeps`: that too)."""
        silo = self.silos[name]
        number, state, heard = silo.at.round, silo.at.state, silo.at.heard
        if silo.run != "running" or not number:
            return
        silo.at = SiloRound()
        if keeps and state == "signed":
            silo.moves(AtSilo("wait on", number))
        elif keeps and state != "left":
            silo.at = SiloRound(heard=frozenset(mark for mark in heard if mark[1] == number))
            silo.moves(AtSilo("go on", number))
            if state in ROUND_OVER:
                silo.moves(AtSilo("commit" if state == "committed" else "abandon", number))
        else:
            self._leaves_round(silo, number, said)

    def stands_aside(self, name: str, said: bool) -> None:
        if (silo := self.silos[name]).run == "running" and silo.at.round:
            self._leaves_round(silo, silo.at.round, said)

    def _leaves_round(self, silo: Silo, number: int, said: bool) -> None:
        silo.moves(AtSilo("leave", number))
        if said:
            self.run.say(m.SiloAbstained(silo.name, number, 0))

    def leaves(self, name: str) -> None:
        if self.silos[name].run == "running":
            self.silos[name].run = "over"
            self.run.say(m.SiloLeft(name))

    # ---- what must hold ------------------------------------------------------------------------------

    def both_tables_agree(self) -> None:
        life = self.run.life
        for name, silo in self.silos.items():
            assert silo.ends.items() <= self.run.outcomes.items()
            if silo.at.state in ROUND_OVER and silo.run == "running":
                assert self.run.outcomes[silo.at.round] == silo.at.state
            if silo.run == "running" and not self.run.outbox[name]:
                assert not life.over, "nothing tells it that the run is over"
                if life.open_round and name in life.places:
                    assert silo.at.round == life.round, "nothing tells it of the round"
                    assert silo.at.state != "signed" or (life.round, name) not in self.run.agreed
                if silo.at.state in ("signed", "working"):
                    assert silo.at.round == life.open_round, "it works on a round that is over"

    def ends(self) -> None:
        """From here on nobody fails: the run ends by what the silos do, and each of them knows."""
        self.run.say(rounds.RunResumed())
        for _ in range(16 * ROUNDS):
            for deed in HONEST:
                for name in NAMES:
                    self.does(deed, name)
            if not any(self.run.outbox.values()):
                self.run.next_deadline()
        assert self.run.life.over and not any(silo.run == "running" for silo in self.silos.values())

    def does(self, deed: str, name: str, fits: bool = True, kept: bool = True) -> None:
        match deed:
            case "hears":
                self.hears(name, fits, kept)
            case "polls":
                self.polls(name)
            case "is killed":
                self.is_killed(name, kept, fits)
            case "stands aside":
                self.stands_aside(name, fits)
            case "leaves":
                self.leaves(name)
            case "the coordinator is killed":
                self.run.check_replay()
            case "time passes":
                self.run.next_deadline()
            case "pause" | "resume":
                self.run.say(rounds.RunPaused() if deed == "pause" else rounds.RunResumed())
            case "abort":
                self.run.say(m.FinishRun("aborted", "ABORTED"))
            case kind:
                self.sends(name, kind)
        self.both_tables_agree()


HONEST = ["hears", "hears", "polls", "hears", "hears", "public.responses", "hears", UPDATE, "metrics.eval"]
TROUBLE = ["is killed", "is killed", "stands aside", "the coordinator is killed", "resume"]
TROUBLE += ["stands aside", "pause", "leaves", "time passes", "abort"]
mostly = st.sampled_from([True, True, True, True, False])
of_whom = st.sampled_from([*NAMES, NAMES, NAMES])
deeds = st.tuples(st.sampled_from([*HONEST * 8, *TROUBLE]), of_whom, mostly, mostly)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.sampled_from(WORKS), st.sampled_from([2, 2, 2, 3]), st.sampled_from(["", "", "", "c"]), st.booleans(),
    st.lists(deeds, min_size=40, max_size=120),
)  # fmt: skip
def test_silos_and_coordinator_agree_on_each_round_whatever_is_lost_repeated_or_forgotten(
    works: dict[str, str], quorum: int, late: str, declines: bool, history: list[tuple[str, str, bool, bool]]
) -> None:
    federation = Federation(works, quorum, late, declines)
    for deed, names, fits, kept in history:
        for name in names:
            federation.does(deed, name, fits, kept)
    federation.ends()
