"""The tables of a run: whole, and right for whatever comes in whatever order. `paper_run` says what must hold."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsilo.protocol import method as m
from fedsilo.protocol import rounds
from fedsilo.protocol.errors import ConflictError, WireCode
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.rounds import CONFLICT, OVER, PLACE, ROUND, RUN, SILO, TABLES, Table, Verdict, advance, gather
from tests.protocol.paper_run import PaperRun
from tests.simulated.paper_federation import plan_of

ROUNDS = 2
UPDATE = "lora.factors"


def plan_with(silos: Iterable[str], **changes: object) -> Plan:
    return plan_of(**{"silos": tuple(silos), "rounds": ROUNDS, "local_steps": 2, "swap_period": 2, **changes})


# ---- the tables themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLES)
def test_each_pair_of_state_and_event_is_decided(name: str) -> None:
    table = TABLES[name]
    codes = {CONFLICT, *WireCode}
    [events] = {frozenset(row) for row in table.values()}
    assert events
    for row in table.values():
        for cell in row.values():
            assert not cell.next or cell.next in table
            assert (cell.verdict is Verdict.REFUSED) == (cell.code in codes) == bool(cell.code)
            assert cell.verdict is Verdict.ACCEPTED or not (cell.next or cell.effects)


def moves(table: Table, state: str) -> set[str]:
    return {cell.next for cell in table[state].values() if cell.next}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reached_from_the_first(name: str) -> None:
    table = TABLES[name]
    reached, frontier = set(), [next(iter(table))]
    while frontier:
        state = frontier.pop()
        if state not in reached:
            reached.add(state)
            frontier.extend(moves(table, state))
    assert reached == set(table)


def test_what_has_ended_stays_ended() -> None:
    assert {state for state in RUN if not moves(RUN, state)} == OVER
    assert all(not cell.effects for state in OVER for cell in RUN[state].values())
    assert not moves(SILO, "out") and not moves(PLACE, "late") and not moves(PLACE, "contributed")
    assert all(moves(ROUND, state) == {"open"} for state in rounds.ROUND_OVER), "only the next round"
    # from wherever a run stands, people and the coordinator itself can end it
    assert all(RUN[state][event].next in OVER for state in set(RUN) - OVER for event in ("abort", "give up"))


@pytest.mark.parametrize("state", RUN)
@pytest.mark.parametrize("event", ["start", "pause", "resume", "finish", "fail", "abort"])
def test_an_order_moves_by_the_table_or_is_a_conflict(state: str, event: str) -> None:
    if RUN[state][event].next:
        assert advance(RUN, state, event) == RUN[state][event].next
        return
    with pytest.raises(ConflictError) as error:
        advance(RUN, state, event)
    assert state in error.value.message
    assert ("it has ended" in error.value.hint) == (state in OVER)
    assert not {"give up", "finish", "fail"} & set(error.value.hint.removeprefix("possible now: ").split(", "))


@given(st.integers(0, 4), st.integers(0, 4), st.integers(1, 4), st.booleans())
def test_a_run_starts_with_the_quorum_and_never_below(ready: int, others: int, quorum: int, passed: bool) -> None:
    verdict = gather(ready=ready, of=ready + others, quorum=quorum, deadline_passed=passed)
    assert (verdict == "start") == (ready >= quorum and (passed or not others))
    assert (verdict == "") == (bool(others) and not passed and ready + others >= quorum)


# ---- any history ---------------------------------------------------------------------------------------


def messages(silos: str) -> st.SearchStrategy[rounds.Event]:
    """Whatever a silo may say, in its time or not."""
    silo = st.sampled_from([*silos, "stranger"])
    number, step, digest = st.integers(0, ROUNDS + 1), st.sampled_from([0, 2]), st.sampled_from("xy")
    attempt = st.integers(1, 2)
    update = st.builds(rounds.Contribution, silo, st.just(UPDATE), number, step, attempt, digest)
    answer = st.builds(rounds.Contribution, silo, st.just("public.responses"), number, st.just(2), attempt, digest)
    evaluation = st.builds(rounds.Contribution, silo, st.just("metrics.eval"), number, step, attempt, digest)
    abstention = st.builds(m.SiloAbstained, silo, number, step, st.sampled_from(["", UPDATE]))
    in_round = [st.builds(kind, silo, number) for kind in (rounds.Signed, rounds.UpdateRefused)]
    in_round.append(st.builds(rounds.Progressed, silo, number, st.integers(0, 5)))
    plan = st.builds(rounds.PlanTaken, silo)
    goes = st.one_of(st.builds(m.SiloLeft, silo), st.builds(rounds.PlanDeclined, silo))
    return st.one_of(plan, plan, update, update, update, answer, evaluation, abstention, *in_round, goes)


OWN_SILOS = ("a", "b", "c")


def own_round(*, quorum: int, taken: str = "abc") -> PaperRun:
    """A run of local-only whose first round is open: to those who took the plan, also where others may still do so."""
    run = PaperRun(plan_of(method="local-only", silos=OWN_SILOS, rounds=2, quorum=quorum))
    for silo in taken:
        run.say(rounds.PlanTaken(silo))
    if set(taken) != set(OWN_SILOS):
        assert run.next_deadline()
    assert run.life.open_round == 1 and set(run.life.places) == set(taken)
    return run


def figures(silo: str, *, sent: bool = True) -> rounds.Event:
    """The end of a silo's part of the first round: its figures, or its site's no to them."""
    return rounds.Contribution(silo, FIGURES, 1, 0, 1, silo) if sent else m.SiloAbstained(silo, 1, 0, FIGURES)


FIGURES = "metrics.eval"


@pytest.mark.parametrize("sent", [True, False])
def test_T20_a_silo_that_took_the_plan_in_an_open_round_ends_no_part_of_it(sent: bool) -> None:
    """Beside its counterpart: in the next round, which opens to it, it does."""
    run = own_round(quorum=2, taken="ab")
    run.say(rounds.PlanTaken("c"))
    run.say(figures("c", sent=sent))
    run.say(figures("a"))
    assert run.life.open_round == 1, "two are not enough where one of them is not of the round"
    run.say(figures("b"))
    assert run.life.open_round == 2 and set(run.life.places) == set(OWN_SILOS)


@pytest.mark.parametrize("sent", [True, False])
def test_who_ended_its_part_counts_for_the_quorum_after_it_has_left(sent: bool) -> None:
    run = own_round(quorum=2)
    run.say(figures("a", sent=sent))
    run.say(m.SiloLeft("a"))
    run.say(m.SiloLeft("c"))
    assert run.life.open_round == 1, "with b there are two"
    run.say(figures("b"))
    assert any(isinstance(event, m.CloseRound) for event in run.journal)


def test_without_who_left_before_its_part_ended_the_round_is_abandoned_at_once() -> None:
    run = own_round(quorum=2)
    run.say(m.SiloLeft("a"))
    run.say(m.SiloLeft("c"))
    assert not run.life.open_round and not any(isinstance(event, m.CloseRound) for event in run.journal)


WORKS = [{"method": "pubswap"}, {"method": "pubswap", "exchange": "round_end"}, {"method": "fedavg-grpo"}]
ORDERS: list[rounds.Event | str] = [rounds.RunPaused(), rounds.RunResumed(), m.FinishRun("aborted", "ABORTED"), "time"]


@st.composite
def histories(draw: st.DrawFn) -> tuple[Plan, list[rounds.Event | str]]:
    """Honest beginnings now and then, since few random histories would get past the join."""
    silos = "abcd"[: draw(st.integers(1, 4))]
    works = draw(st.sampled_from(WORKS))
    plan = plan_with(silos, **works, quorum=draw(st.integers(1, len(silos))))
    start: list[rounds.Event | str] = [rounds.PlanTaken(silo) for silo in silos] if draw(st.booleans()) else []
    time = st.just("time")
    said = draw(st.lists(st.one_of(messages(silos), messages(silos), messages(silos), time), max_size=40))
    orders = draw(st.lists(st.tuples(st.integers(0, 60), st.sampled_from(ORDERS)), max_size=3))
    for place, order in orders:
        said.insert(place, order)
    # retries, late: whatever was said may come again, anywhere behind
    for place, again in draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)):
        said.insert(max(place, again), said[again % len(said)] if said else "time")
    return plan, [*start, *said]


@settings(max_examples=160, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(histories())
def test_any_history_keeps_what_it_acknowledged_and_ends_by_its_deadlines(
    history: tuple[Plan, list[rounds.Event | str]],
) -> None:
    plan, said = history
    run = PaperRun(plan)
    for event in said:
        if isinstance(event, str):
            run.next_deadline()
        else:
            run.say(event)
    run.check_replay()
    run.to_the_end()
    run.check_replay()
    # whatever was acknowledged is acknowledged again, as a retry, and changes nothing
    before = run.life
    for message in run.acknowledged:
        assert run.say(message).verdict is Verdict.IGNORED
    assert run.life is before


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(3, 4), st.booleans())
def test_whatever_comes_of_updates_and_answers_only_both_make_a_donor(
    data: st.DataObject, count: int, leaves: bool
) -> None:
    """Each silo gives its update, its answers, both or neither, in any order; `PaperRun` looks at who donates."""
    silos = "abcd"[:count]
    run = PaperRun(plan_with(silos, exchange="round_end", quorum=1))
    for silo in silos:
        run.say(rounds.PlanTaken(silo))
    kinds = {"public.responses": 2, UPDATE: 0}
    said = [rounds.Contribution(silo, kind, 1, step, 1, silo) for silo in silos for kind, step in kinds.items()]
    for event in data.draw(st.permutations(data.draw(st.lists(st.sampled_from(said), unique=True)))):
        run.say(event)
    if leaves and run.life.open_round == 1:
        run.say(m.SiloLeft("a"))
    while run.life.open_round == 1:
        run.next_deadline()
    assert run.life.open_round == 2
    run.to_the_end()
    run.check_replay()


# ---- by hand -------------------------------------------------------------------------------------------


def opened(silos: str = "ab", **changes: object) -> PaperRun:
    run = PaperRun(plan_with(silos, **changes))
    for silo in silos:
        run.say(rounds.PlanTaken(silo))
    assert run.life.open_round == 1
    return run


def update(silo: str, digest: str, number: int = 1, attempt: int = 1) -> rounds.Contribution:
    return rounds.Contribution(silo, UPDATE, number, 0, attempt, digest)


def test_another_digest_in_a_taken_place_is_refused_and_the_same_one_is_a_retry() -> None:
    run = opened()
    assert run.say(update("a", "x")).verdict is Verdict.ACCEPTED
    assert run.say(update("a", "x", attempt=2)).verdict is Verdict.IGNORED
    other = run.say(update("a", "y"))
    assert (other.verdict, other.code) == (Verdict.REFUSED, WireCode.INGRESS_DENIED)
    run.say(update("b", "z"))
    assert run.commits[0].results[0].upload_digests == ("x", "z")
    late = run.say(update("a", "y"))
    assert (late.verdict, late.code) == (Verdict.REFUSED, WireCode.ROUND_CLOSED)


def test_a_method_commits_nothing_below_the_quorum_and_nothing_that_was_not_taken() -> None:
    run = opened(quorum=2)
    run.say(update("a", "x"))
    for silos, digests in ((("a",), ("x",)), (("a", "b"), ("x", "y")), (("a", "a"), ("x", "x"))):
        assert rounds.step(run.life, m.Commit(1, (m.Result(silos, digests),)), 0.0).code == CONFLICT
    run.say(m.SiloAbstained("b", 1, 0))
    assert run.life.round == 2 and not run.commits and ROUND["open"]["abandon"].next == "abandoned"
    assert run.life.round_state == "open" and rounds.step(run.life, m.CloseRound(1, ("a", "b")), 0.0).code == CONFLICT
    # the counterpart: the same update, and one more, is committed
    other = opened(quorum=2)
    other.say(update("a", "x"))
    other.say(update("b", "y"))
    assert other.commits == [m.Commit(1, (m.Result(("a", "b"), ("x", "y")),))]


def test_a_round_that_its_method_closes_is_over_and_is_not_abandoned_any_more() -> None:
    run = opened(quorum=2)
    closed = rounds.step(run.life, m.CloseRound(1, ("a", "b")), 0.0)
    assert closed.verdict is Verdict.ACCEPTED and closed.life.round_state == "closed"
    assert not closed.life.deadlines.keys() & {"round/1", f"{rounds.AGREEMENT}1"}
    late = rounds.step(closed.life, update("a", "x"), 0.0)
    assert (late.verdict, late.code) == (Verdict.REFUSED, WireCode.ROUND_CLOSED)
    assert rounds.step(closed.life, rounds.RoundAbandoned(1), 0.0).verdict is Verdict.IGNORED
    assert rounds.step(closed.life, m.CloseRound(1, ("a", "b")), 0.0).code == CONFLICT, "once"
    assert rounds.step(closed.life, rounds.RoundOpened(2), 0.0).life.round == 2
    ended = rounds.step(closed.life, m.FinishRun("finished"), 0.0).life
    assert (ended.state, ended.round_state) == ("finished", "closed")
    # the counterpart: without it the end of the run abandons the round
    assert rounds.step(run.life, m.FinishRun("finished"), 0.0).life.round_state == "abandoned"


@pytest.mark.parametrize(("silos", "goes_on"), [("ab", False), ("abc", True)])
def test_with_one_silo_of_several_left_no_round_begins_whatever_the_quorum(silos: str, goes_on: bool) -> None:
    """Its own signature alone is no agreement, so it would take no part in any round that is still to come."""
    run = opened(silos, quorum=1)
    run.say(update("a", "x"))
    run.say(m.SiloLeft(silos[-1]))
    run.say(update("b", "y"))
    assert len(run.commits) == 1
    assert (run.life.state, run.life.open_round) == (("running", 2) if goes_on else ("failed", 0))


@pytest.mark.parametrize(("silos", "state"), [("ab", "failed"), ("abc", "running")])
def test_one_silo_alone_of_several_planned_does_not_begin_a_run(silos: str, state: str) -> None:
    run = PaperRun(plan_with(silos, quorum=1))
    for silo in silos[:-1]:
        run.say(rounds.PlanTaken(silo))
    run.say(rounds.PlanDeclined(silos[-1]))
    assert run.life.state == state


@pytest.mark.parametrize("kind", [UPDATE, "metrics.eval"])
def test_what_belongs_to_a_whole_round_has_one_place_in_it(kind: str) -> None:
    """Else a silo had as many places as there are steps, and a commit would not find what the method was told of."""
    run = opened("ab", quorum=1)
    number = 1 if kind == UPDATE else 0
    for step in (1, 2):
        outcome = run.say(rounds.Contribution("a", kind, number, step, 1, "x"))
        assert (outcome.verdict, outcome.code) == (Verdict.REFUSED, WireCode.INGRESS_DENIED)
    assert run.say(rounds.Contribution("a", kind, number, 0, 1, "x")).verdict is Verdict.ACCEPTED
    run.say(m.SiloAbstained("b", 1, 0))
    assert [commit.results[0].upload_digests for commit in run.commits] == ([("x",)] if kind == UPDATE else [])


def test_while_paused_time_stands_still_and_what_comes_is_taken() -> None:
    run = opened()
    run.now = 100.0
    left = run.life.deadlines["round/1"] - run.now
    run.say(rounds.RunPaused())
    run.now = 1e9
    assert run.life.due(run.now) == [] and not run.next_deadline()
    assert run.say(update("a", "x")).verdict is Verdict.ACCEPTED
    run.say(rounds.RunResumed())
    assert run.life.deadlines["round/1"] - run.now == pytest.approx(left)  # one addition and one difference of floats
    assert run.life.due(run.now) == [] and run.life.due(run.now + left + 1) == ["round/1"]


def stepping(run: PaperRun, silo: str, step: int) -> Verdict:
    return run.say(rounds.Progressed(silo, 1, step)).verdict


def test_the_deadline_of_a_round_counts_from_the_newest_step_of_a_silo_that_is_awaited() -> None:
    run = opened("ab", quorum=1, local_steps=3)
    span = run.life.deadlines["round/1"] - run.now
    for step in (1, 2, 3):
        run.now += 0.9 * span
        assert not run.life.due(run.now)
        assert stepping(run, "a", step) is Verdict.ACCEPTED
        assert run.life.deadlines["round/1"] == run.now + span
    # one that stands still, says a step again, says one that no plan has or has given its update extends nothing
    run.now += 0.9 * span
    assert [stepping(run, "a", step) for step in (3, 2, 4)] == [Verdict.IGNORED] * 3
    run.say(update("b", "x"))
    assert stepping(run, "b", 1) is Verdict.IGNORED
    run.now += 0.2 * span
    assert run.life.due(run.now) == ["round/1"]


def test_an_answer_is_a_step_and_a_pause_is_none() -> None:
    run = opened("ab", quorum=1, local_steps=4)
    span = run.life.deadlines["round/1"] - run.now
    run.now += 0.5 * span
    run.say(rounds.Contribution("a", "public.responses", 1, 2, 1, "x"))
    assert run.life.deadlines["round/1"] == run.now + span
    run.say(rounds.RunPaused())
    paused_at = run.now
    run.now += 10 * span
    assert stepping(run, "a", 3) is Verdict.ACCEPTED
    assert run.life.deadlines["round/1"] == paused_at + span
    run.say(rounds.RunResumed())
    assert run.life.deadlines["round/1"] == pytest.approx(run.now + span)  # one difference and one sum of floats


def test_the_last_message_ends_a_run_also_while_it_is_paused() -> None:
    run = opened(method="fedavg-grpo")
    for number in (1, 2):
        run.say(update("a", f"a{number}", number))
        run.say(update("b", f"b{number}", number))
    run.say(rounds.RunPaused())
    for silo in "ab":
        assert run.life.state == "paused"
        run.say(rounds.Contribution(silo, "metrics.eval", 2, 0, 1, silo))
    assert run.life.state == "finished"


def test_a_silos_place_says_why_its_update_is_missing() -> None:
    run = opened("abcd", quorum=1)
    assert set(run.life.places.values()) == {"invited"}
    run.say(rounds.Signed("a", 1))
    run.say(rounds.UpdateRefused("b", 1))
    run.say(m.SiloAbstained("c", 1, 0))
    assert run.life.places == {"a": "working", "b": "refused", "c": "left", "d": "invited"}
    run.say(update("d", "d"))
    places = {**run.life.places}
    run.say(update("b", "b"))  # the one that was put right counts
    assert places["d"] == "contributed" and run.life.places["b"] == "contributed"
    ended = rounds.step(run.life, m.FinishRun("aborted", "ABORTED"), 0.0).life
    assert ended.places == {"a": "late", "b": "contributed", "c": "left", "d": "contributed"}
    assert ended.round_state == "abandoned"


def test_an_abstention_said_again_is_ignored_and_their_number_has_an_end() -> None:
    run = opened("abc")
    assert run.say(m.SiloAbstained("a", 1, 2)).verdict is Verdict.ACCEPTED
    assert run.say(m.SiloAbstained("a", 1, 2)).verdict is Verdict.IGNORED
    verdicts = [run.say(m.SiloAbstained("a", 1, step)).verdict for step in range(3, 60)]
    assert verdicts.count(Verdict.ACCEPTED) == run.life.abstentions_max - 1
    assert run.say(m.SiloAbstained("b", 1, 2)).verdict is Verdict.ACCEPTED, "another silo's word is its own"


def test_a_journal_that_holds_what_was_never_accepted_is_refused() -> None:
    run = opened()
    assert rounds.folded(run.first_life(), run.journal, 0.0).open_round == 1
    with pytest.raises(ConflictError, match="the journal does not fit"):
        rounds.folded(run.first_life(), [*run.journal, rounds.PlanTaken("a")], 0.0)
    with pytest.raises(KeyError):
        rounds.from_fields(json.loads('{"event": "Nothing"}'))
