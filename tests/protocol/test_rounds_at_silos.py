"""The table of a silo's round against the coordinator's: whatever these say, lose, repeat and forget, each silo comes
to know how each round ended, works on none that it knows is over, and hears of the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsilo.protocol import method as m
from fedsilo.protocol import rounds
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.rounds import AT_SILO, ROUND_OVER, AtSilo, Effect, SiloRound, Verdict, message_at_silo, silo_step
from tests.protocol import closing
from tests.protocol.paper_run import PaperRun
from tests.protocol.test_rounds import UPDATE, WORKS, plan_with


class Item(NamedTuple):
    kind: str
    round: int = 0
    step: int = 0
    digest: str = ""
    ended: str = ""


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
        digest, ended = f"{action.kind}{action.round}{action.step}", ""
        if isinstance(body := action.body, pb.RoundResult):
            ended = "commit" if body.committed else {"closed": "close"}.get(self.life.round_state, "abandon")
        self.outbox[action.silo].append(Item(action.kind, action.round, action.step, digest, ended))

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
            case Effect.CLOSE, m.CloseRound(number):
                self.outcomes[number] = "closed"
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
    """What a silo knows: its part in the run, its newest round, how each round ended that it heard of, and the rounds
    that it left."""

    name: str
    run: str = "asked"
    at: SiloRound = field(default_factory=SiloRound)
    ends: dict[int, str] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)

    def moves(self, event: AtSilo) -> None:
        before, outcome = self.at, silo_step(self.at, event)
        assert outcome.verdict is not Verdict.REFUSED, (before, event)
        self.at = outcome.life
        if Effect.TELL in outcome.effects and event.name != "run over":
            assert event.round not in self.left, "the method hears of a round that was left"
        if before.state == "working" and self.at.state in ("left", "signed") and event.name != "open":
            assert Effect.DROP in outcome.effects, "work on a round that goes on without this silo"
        if self.at.state == "left":
            self.left.add(self.at.round)
        if Effect.NOTE_END in outcome.effects:
            self.ends[event.round] = {event: state for state, event in ENDS.items()}[event.name]
        if Effect.END in outcome.effects:
            self.run = "over"


NAMES, ROUNDS = "abc", 4
Deed = str | rounds.RunPaused | rounds.RunResumed | m.FinishRun


class Federation:
    """Args:
    late: the silo that takes the plan in after the others, if one does.
    declines: it says no to the plan.
    """

    def __init__(self, works: dict[str, str], quorum: int, late: str, declines: bool) -> None:
        self.declines = late if declines else ""
        self.run = Coordinator(plan_with(NAMES, **works, rounds=ROUNDS, quorum=quorum))
        self.silos = {name: Silo(name) for name in NAMES}
        self.newest: dict[str, Item] = {}  # donors or result that each silo took in last, and may hear once more
        for name in NAMES:
            self.run.outbox[name].append(Item("run.plan"))
            if name != late:
                self.does("hears", name)

    def does(self, deed: Deed, name: str, fits: bool = True, kept: bool = True) -> None:
        silo = self.silos[name]
        running, at = silo.run == "running", silo.at
        match deed:
            case "hears":
                self.hears(name, fits, kept)
            case "polls" if running and at.state == "signed":
                self.run.say(rounds.Signed(name, at.round))
            case "hears once more" if name in self.newest:
                again = self.newest[name]
                self.run.outbox[name].insert(0, again._replace(digest=f"{again.digest} again"))
            case "is killed" if running and at.round:
                self.is_killed(silo, kept, fits)
            case "stands aside" if running and at.round:
                self.leaves_round(silo, at.round, fits)
            case "leaves" if running:
                silo.run = "over"
                self.run.say(m.SiloLeft(name))
            case "time passes":
                self.run.next_deadline()
            case rounds.RunPaused() | rounds.RunResumed() | m.FinishRun() as order:
                self.run.say(order)
            case "public.responses" | "lora.factors" if running and at.state == "working":
                self.sends(silo, deed, 2 if deed == "public.responses" else 0)
            case "metrics.eval" if running and at.state == "committed":
                self.sends(silo, deed, 0)
        self.check()

    def hears(self, name: str, fits: bool, acknowledged: bool) -> None:
        """A silo takes in what waits for it; not acknowledged, it comes again."""
        silo, waiting = self.silos[name], self.run.outbox[name]
        if not waiting or self.run.life.paused_at is not None:
            return
        item = waiting[0]
        if item.kind == "run.plan":
            self.run.given.add(name)
            silo.run = "running" if silo.run != "over" and name != self.declines else "over"
            if silo.run == "over":
                self.run.say(rounds.PlanDeclined(name))
        elif silo.run == "running":
            event = message_at_silo(*item[:4], ended=item.ended)
            if event.name in ("open", "agree") and not fits and silo_step(silo.at, event).verdict is Verdict.ACCEPTED:
                self.run.say(m.SiloAbstained(name, item.round, 0))
                event = AtSilo("refuse", item.round)
            silo.moves(event)
        if acknowledged and waiting and waiting[0] is item:
            waiting.pop(0)
            if item.kind == "run.plan":
                self.run.say(rounds.PlanTaken(name))
            elif item.kind in ("public.donors", "round.result"):
                self.newest[name] = item

    def sends(self, silo: Silo, kind: str, step: int) -> None:
        """What is refused came too late: a silo that works was in the round, and says nothing twice in two ways."""
        number = silo.at.round
        outcome = self.run.say(rounds.Contribution(silo.name, kind, number, step, 1, f"{silo.name}{number}{kind}"))
        if outcome.verdict is Verdict.REFUSED:
            assert number < self.run.life.round or not self.run.life.open_round, outcome.code

    def is_killed(self, silo: Silo, keeps: bool, said: bool) -> None:
        """It starts again, and has forgotten what it heard but for the newest round (not `keeps`: that too)."""
        before, silo.at = silo.at, SiloRound()
        if keeps and before.state == "signed":
            silo.moves(AtSilo("wait on", before.round))
        elif keeps and before.state != "left":
            silo.at = SiloRound(heard=frozenset(mark for mark in before.heard if mark[1] == before.round))
            silo.moves(AtSilo("go on", before.round))
            if before.state in ROUND_OVER:
                silo.moves(AtSilo(ENDS[before.state], before.round))
        else:
            self.leaves_round(silo, before.round, said)

    def leaves_round(self, silo: Silo, number: int, said: bool) -> None:
        silo.moves(AtSilo("leave", number))
        if said:
            self.run.say(m.SiloAbstained(silo.name, number, 0))

    def check(self) -> None:
        """A silo that is in the run, and took everything in, knows where the run stands."""
        life = self.run.life
        for name, silo in self.silos.items():
            at = silo.at
            assert silo.ends.items() <= self.run.outcomes.items()
            if silo.run != "running":
                continue
            assert at.state not in ROUND_OVER or self.run.outcomes[at.round] == at.state
            if not self.run.outbox[name]:
                assert not life.over, "nothing tells it that the run is over"
                assert at.state not in ("signed", "working") or at.round == life.open_round, (
                    "it works on one that is over"
                )
                if life.open_round and name in life.places:
                    assert at.round == life.round, "nothing tells it of the round"
                    assert at.state != "signed" or (life.round, name) not in self.run.agreed

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
        self.run.check_replay()


ENDS = {"committed": "commit", "closed": "close", "abandoned": "abandon"}
HONEST = ["hears", "hears", "polls", "hears", "hears", "public.responses", "hears", UPDATE, "metrics.eval"]
TROUBLE = [*["hears once more", "is killed", "stands aside"] * 2, "leaves", "time passes"]
ORDERS = [rounds.RunPaused(), rounds.RunResumed(), rounds.RunResumed(), m.FinishRun("aborted", "ABORTED")]
mostly = st.sampled_from([True, True, True, True, False])
of_whom = st.sampled_from([*NAMES, NAMES, NAMES])
deeds = st.tuples(st.sampled_from([*HONEST * 8, *TROUBLE, *ORDERS]), of_whom, mostly, mostly)


def test_a_silo_works_on_no_round_but_one_that_it_signed() -> None:
    begins = {(state, event) for state, row in AT_SILO.items() for event, cell in row.items() if cell.next == "working"}
    assert begins == {("signed", "agree"), ("none", "go on")}


def test_the_method_hears_nothing_of_a_round_that_was_left_however_it_ended() -> None:
    for last in (SiloRound(1, "left"), SiloRound(1, "working")):
        kinds = ("round.open", "public.donors", "round.agreed", "round.result")
        heard = [message_at_silo(kind, 1, 0, digest, ended="commit") for digest in ("a", "b") for kind in kinds]
        at, effects = last, []
        for event in (message_at_silo("round.result", 1, 0, "end", ended="commit"), *heard):
            outcome = silo_step(at, event)
            at, effects = outcome.life, [*effects, outcome.effects]
            assert last.state == "working" or outcome.verdict is not Verdict.REFUSED, "nobody refuses what it ignores"
        assert any(Effect.TELL in each for each in effects) is (last.state == "working")
        assert all(Effect.NOTE_END in effects[i] for i in (0, 4, 8)), "how it ended is known all the same"


@pytest.mark.parametrize("works", WORKS)
def test_silos_that_do_not_fail_finish_the_run_with_each_update_of_each_round(works: dict[str, str]) -> None:
    federation = Federation(works, quorum=3, late="", declines=False)
    federation.ends()
    assert federation.run.life.state == "finished"
    assert [commit.results[0].silos for commit in federation.run.commits] == [tuple(NAMES)] * ROUNDS


@pytest.fixture(scope="module", autouse=True)
def closing_method() -> Iterator[None]:
    with closing.registered():
        yield


def test_rounds_without_an_adapter_are_closed_at_all_silos() -> None:
    federation = Federation({"method": closing.NAME}, quorum=3, late="", declines=False)
    federation.ends()
    assert federation.run.life.state == "finished" and not federation.run.commits
    closed = dict.fromkeys(range(1, ROUNDS + 1), "closed")
    assert federation.run.outcomes == closed
    assert all(silo.ends == closed for silo in federation.silos.values())


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.sampled_from([*WORKS, {"method": closing.NAME}]),
    st.sampled_from([2, 2, 2, 3]), st.sampled_from(["", "", "", "c"]), st.booleans(),
    st.lists(deeds, min_size=40, max_size=120),
)  # fmt: skip
def test_silos_and_coordinator_agree_on_each_round_whatever_is_lost_repeated_or_forgotten(
    works: dict[str, str], quorum: int, late: str, declines: bool, history: list[tuple[Deed, str, bool, bool]]
) -> None:
    federation = Federation(works, quorum, late, declines)
    for deed, names, fits, kept in history:
        for name in names:
            federation.does(deed, name, fits, kept)
    federation.ends()
