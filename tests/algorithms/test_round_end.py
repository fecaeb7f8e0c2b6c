"""PubSwap with `exchange: round_end`, both halves in memory: who donates to whom and when, and what is offered when."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from fedsilo.protocol import method as m
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.swap import donors_wanted, drawn_donors, public_batch
from fedsilo.protocol.tasks import AnswerAhead, PublicStep
from tests.simulated.paper_federation import PaperFederation, correct_by_name, plan_of

UPDATE = "lora.factors"
HALF = METHODS["pubswap"].silo
Deny = Callable[[str, str, int, int], str]


def plan_with(**changes: object) -> Plan:
    return plan_of(**{"exchange": "round_end", "rounds": 3, **changes})


def played(plan: Plan | None = None, seed: int = 0, **keywords: object) -> PaperFederation:
    federation = PaperFederation(
        plan or plan_with(), METHODS["pubswap"], random.Random(seed).randrange, **keywords  # type: ignore[arg-type]
    )  # fmt: skip
    federation.run()
    return federation


def public_steps(federation: PaperFederation, silo: str) -> dict[tuple[int, int], PublicStep]:
    return {(task.round, task.step): task for task in federation.trained[silo] if isinstance(task, PublicStep)}


def origins(task: PublicStep) -> set[str]:
    return {donor.origin for row in task.donors.prompts for donor in row.donors}


def test_the_donors_of_a_step_are_those_that_the_arithmetic_draws() -> None:
    federation = played()
    for silo in "abc":
        for (number, step), task in public_steps(federation, silo).items():
            if number == 1:
                assert task.swap == "none" and not task.donors.prompts, "no policy was trained before the first round"
                continue
            assert task.swap == "replace"
            assert [row.prompt_index for row in task.donors.prompts] == list(
                public_batch(federation.plan, number, step)
            )
            for row in task.donors.prompts:
                index = row.prompt_index
                pool = {name: [f"{name}:{index}:{n}" for n in range(correct_by_name(name, index))] for name in "abc"}
                expected = drawn_donors(pool, federation.plan, number, step, index, silo)
                assert [(d.origin, d.position, d.response.text) for d in row.donors] == list(expected)
                assert len(expected) == donors_wanted(0, 8) == 4 and silo not in origins(task)


def test_one_group_is_offered_a_round_and_the_update_goes_last() -> None:
    federation = played()
    answers = [("public.responses", 2), ("public.responses", 4)]
    for silo in "abc":
        assert [(kind, step) for kind, _, step in federation.offered[silo]] == [
            ("metrics.eval", 0), *answers, (UPDATE, 0),
            ("metrics.eval", 0), *answers, (UPDATE, 0),
            ("metrics.eval", 0), (UPDATE, 0),  # nobody would use answers
            ("metrics.eval", 0),
        ]  # fmt: skip
        numbers = [number for _, number, _ in federation.offered[silo]]
        assert numbers == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3], "figures of a round go with the next one's group"
    assert [each for each in federation.deadlines if "public" in each[2] or "donors" in each[2]] == []


def test_what_is_offered_together_is_offered_without_waiting_for_any_of_it() -> None:
    plan, offers = plan_with(rounds=2), list[m.Offer]()
    state = HALF.start(plan, "a")
    opening = pb.RoundOpen(
        base_digest="d",
        public_steps=[pb.PublicStep(step=step, prompt_indices=public_batch(plan, 1, step)) for step in (2, 4)],
    )
    pending: list[m.SiloEvent] = [m.MessageArrived("", "round.open", 1, 0, opening, "")]
    bodies = played(plan)
    while pending:
        state, actions = HALF.on_event(state, pending.pop(0))
        for action in actions:
            if isinstance(action, m.Train):
                pending.append(m.TaskDone(action.task, bodies._body("a", action.task)))
            elif isinstance(action, m.Offer):
                offers.append(action)
    places = [(offer.kind, offer.round, offer.step) for offer in offers]
    assert places == [("metrics.eval", 0, 0), ("public.responses", 1, 2), ("public.responses", 1, 4), (UPDATE, 1, 0)]
    # settled in any order, it waits for the round's end; until then for what is left of the group
    result = m.MessageArrived("", "round.result", 1, 0, pb.RoundResult(committed=False), "")
    for place in (places[3], places[1], places[0]):
        state, actions = HALF.on_event(state, m.OfferSettled(*place, "sent"))
        assert not actions and state.waits_for == "offer"
    state, _ = HALF.on_event(state, m.OfferSettled(*places[2], "denied"))
    assert state.waits_for == "result"
    state, _ = HALF.on_event(state, result)
    assert state.waits_for == "round"


def deny_update_of(silo: str, number: int) -> Deny:
    return lambda name, kind, round_number, step: (
        "denied" if (name, kind, round_number) == (silo, UPDATE, number) else "sent"
    )


def deny_answers_of(silo: str) -> Deny:
    return lambda name, kind, round_number, step: "denied" if (name, kind) == (silo, "public.responses") else "sent"


@pytest.mark.parametrize("seed", range(5))
def test_answers_whose_update_was_kept_back_are_no_donors(seed: int) -> None:
    federation = played(seed=seed, deny=deny_update_of("c", 1))
    assert [commit.results[0].silos for commit in federation.commits] == [("a", "b"), ("a", "b", "c"), ("a", "b", "c")]
    assert ("public.responses", 1, 2) in federation.offered["c"], "the answers came"
    for silo, second, third in (("a", {"b"}, {"b", "c"}), ("b", set(), {"c"}), ("c", {"b"}, {"b"})):
        steps = public_steps(federation, silo)
        assert [origins(steps[2, step]) for step in (2, 4)] == [second] * 2
        assert set().union(*(origins(steps[3, step]) for step in (2, 4))) == third


def test_an_update_whose_answers_were_kept_back_counts() -> None:
    federation = played(deny=deny_answers_of("c"))
    assert [commit.results[0].silos for commit in federation.commits] == [("a", "b", "c")] * 3
    for (number, _), task in public_steps(federation, "a").items():
        assert origins(task) == (set() if number == 1 else {"b"})
    assert all(not origins(task) for task in public_steps(federation, "b").values()), "a knows nothing"


def test_a_silo_that_vanished_holds_nobody_up_before_the_rounds_deadline() -> None:
    federation = played(gone=frozenset("c"))
    assert federation.outcome == m.FinishRun("finished")
    assert federation.now_seconds == pytest.approx(3 * 7200.0 + 7200.0), "each round's deadline, and the evaluation's"
    assert origins(public_steps(federation, "a")[2, 2]) == {"b"}


def test_a_round_that_is_abandoned_still_gives_donors() -> None:
    federation = played(plan_with(quorum=3), deny=deny_update_of("c", 1))
    assert [commit.round for commit in federation.commits] == [2, 3]
    assert origins(public_steps(federation, "a")[2, 2]) == {"b"}


def test_a_slow_silo_gets_donors_and_answers_for_the_steps_it_takes() -> None:
    federation = played(plan_with(silo_steps={"a": 2}))
    assert set(public_steps(federation, "a")) == {(number, 2) for number in (1, 2, 3)}
    assert set(public_steps(federation, "b")) == {(number, step) for number in (1, 2, 3) for step in (2, 4)}
    sent = Counter((note.step, note.fields["silo"]) for note in federation.notes if note.name == "donors_sent")
    assert sent == {(step, silo): 2 for step in (2, 4) for silo in "abc" if (step, silo) != (4, "a")}
    answered = [task.for_step for task in federation.trained["a"] if isinstance(task, AnswerAhead)]
    assert answered == [2, 2]
    slow = public_steps(played(plan_with(silo_steps={"b": 2})), "a")
    assert [origins(slow[2, step]) for step in (2, 4)] == [{"b", "c"}, {"c"}]


def test_a_silo_that_is_late_for_a_round_offers_its_figures_with_the_next() -> None:
    plan = plan_with(rounds=2, local_steps=2)
    answers, state = played(plan), HALF.start(plan, "a")

    def goes(event: m.SiloEvent, until: type) -> list[m.SiloAction]:
        """What it does, up to a task of that type, whose end is left open."""
        nonlocal state
        done, pending = list[m.SiloAction](), [event]
        while pending:
            state, actions = HALF.on_event(state, pending.pop(0))
            done += actions
            for action in actions:
                if isinstance(action, m.Train) and not isinstance(action.task, until):
                    pending.append(m.TaskDone(action.task, answers._body("a", action.task)))
        return done

    def opening(number: int) -> m.MessageArrived:
        steps = [pb.PublicStep(step=2, prompt_indices=public_batch(plan, number, 2))]
        return m.MessageArrived("", "round.open", number, 0, pb.RoundOpen(base_digest="d", public_steps=steps), "")

    def result(number: int) -> m.MessageArrived:
        body = pb.RoundResult(committed=True, adapter_digest=f"digest-{number}")
        return m.MessageArrived("", "round.result", number, 0, body, "")

    asked = goes(opening(1), AnswerAhead)[-1]
    assert isinstance(asked, m.Train) and isinstance(asked.task, AnswerAhead)
    assert not goes(result(1), AnswerAhead) and not goes(opening(2), AnswerAhead), "it is at work"
    done = goes(m.TaskDone(asked.task, answers._body("a", asked.task)), AnswerAhead)
    offered = [(each.kind, each.round) for each in done if isinstance(each, m.Offer)]
    assert offered == [("metrics.eval", 0), ("metrics.eval", 1), (UPDATE, 2)], "no answers to a round that is open"
