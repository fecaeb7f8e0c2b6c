"""Every registered method, both halves, under any interleaving: it ends, it offers only its kinds, it never sends a
silo its own answers, it survives silos that deny, abstain or vanish. Needs no torch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from google.protobuf.message import Message
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.protocol import method as m
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import mean_delta
from fedsilo.protocol.methods import METHODS, method_named
from fedsilo.protocol.swap import public_batch
from fedsilo.protocol.tasks import GeneratePublic, LoadAdapter, PrivateStep, PublicStep
from tests.simulated.paper_federation import PaperFederation, plan_of

NAMES = sorted(METHODS)
WORKS = [(name, exchange) for name in NAMES for exchange in sorted(METHODS[name].exchanges)]
_OF_PLAN = {"rounds", "silos", "swap_period", "quorum", "exchange", "silo_steps"}


def federation(name: str, seed: int = 0, **keywords: object) -> PaperFederation:
    changes = {key: keywords.pop(key) for key in list(keywords) if key in _OF_PLAN}
    return PaperFederation(plan_of(method=name, **changes), METHODS[name], random.Random(seed).randrange, **keywords)  # type: ignore[arg-type]


@pytest.mark.quick(keep=4)
@pytest.mark.parametrize(("name", "exchange"), WORKS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_interleaving_finishes_with_the_same_training(name: str, exchange: str, seed: int) -> None:
    played, reference = (federation(name, each, exchange=exchange, rounds=3) for each in (seed, 0))
    played.run()
    reference.run()
    assert played.outcome == m.FinishRun("finished")
    numbers = [action.round for action in (played.commits if METHODS[name].averages else played.closed)]
    assert numbers == [1, 2, 3] and not (played.closed and played.commits)
    assert {commit.results[0].silos for commit in played.commits} <= {played.plan.silos}
    # Donors are drawn from keyed randomness: what a silo trains on does not depend on the order of arrival.
    assert played.trained == reference.trained
    for silo in played.plan.silos:
        assert {kind for kind, _, _ in played.offered[silo]} <= METHODS[name].kinds
        assert {type(task) for task in played.trained[silo]} <= METHODS[name].tasks


@pytest.mark.parametrize(("name", "exchange"), WORKS)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_denials_and_vanished_silos_end_the_run_within_its_deadlines(
    name: str, exchange: str, seed: int, data: st.DataObject
) -> None:
    gone = data.draw(st.frozensets(st.sampled_from("abc")))
    verdicts = data.draw(st.dictionaries(st.sampled_from("abc"), st.sampled_from(["denied", "missed"])))

    def deny(silo: str, *_: object) -> str:
        return verdicts.get(silo, "sent")

    played = federation(name, seed, exchange=exchange, gone=gone, deny=deny)
    played.run()
    assert played.outcome is not None
    uploaders = set("abc") - gone - verdicts.keys()
    assert played.outcome.outcome == ("finished" if uploaders else "failed")
    assert all(set(commit.results[0].silos) == uploaders for commit in played.commits)


def public_steps(played: PaperFederation, silo: str) -> list[PublicStep]:
    return [task for task in played.trained[silo] if isinstance(task, PublicStep)]


def test_balanced_fills_the_weak_silo_to_half_and_leaves_the_strong_alone() -> None:
    played = federation("pubswap")
    played.run()
    for silo, donors_per_prompt in (("a", 4), ("b", 0), ("c", 0)):
        for task in public_steps(played, silo):
            assert task.swap == "replace"
            assert [len(row.donors) for row in task.donors.prompts] == [donors_per_prompt] * 2
            for row in task.donors.prompts:
                for donor in row.donors:
                    assert donor.response.text == f"{donor.origin}:{row.prompt_index}:{donor.position}"
                    assert donor.origin != silo


def test_random_gives_all_silos_the_same_group_and_never_returns_own_text() -> None:
    played = federation("pubswap-random")
    played.run()
    groups = []
    for silo in "abc":
        for task in public_steps(played, silo):
            own = [donor for row in task.donors.prompts for donor in row.donors if donor.origin == silo]
            assert all(not donor.HasField("response") for donor in own)
        groups.append(
            [
                [(row.prompt_index, donor.origin, donor.position) for donor in row.donors]
                for task in public_steps(played, silo)
                for row in task.donors.prompts
            ]
        )
    assert groups[0] == groups[1] == groups[2]
    assert all(len(group) == played.plan.samples_per_prompt for group in groups[0])


def test_controls_let_no_answer_out() -> None:
    for name in ("public-no-swap", "fedavg-grpo"):
        played = federation(name)
        played.run()
        assert not any(kind == "public.responses" for offers in played.offered.values() for kind, _, _ in offers)
    swapless = federation("public-no-swap")
    swapless.run()
    assert all(task.swap == "none" and not task.donors.prompts for task in public_steps(swapless, "a"))
    plain = federation("fedavg-grpo")
    plain.run()
    assert not public_steps(plain, "a")


def test_a_silo_late_for_a_public_step_is_no_donor_but_receives_donors() -> None:
    plan = plan_of(rounds=1)
    half = METHODS["pubswap"].coordinator
    played = federation("pubswap", rounds=1)
    state, _ = half.on_event(half.start(plan, "coordinator"), m.RunStarted(plan.silos, "d"))
    bodies = {
        silo: played._body(silo, GeneratePublic(1, 2, public_batch(plan, 1, 2), "correct")) for silo in plan.silos
    }

    def arrive(state: object, silo: str) -> tuple[object, tuple[object, ...]]:
        body = bodies[silo]
        assert body is not None
        return half.on_event(state, m.MessageArrived(silo, "public.responses", 1, 2, body, ""))

    state, _ = arrive(state, "b")
    state, actions = half.on_event(state, m.DeadlinePassed("public/1/2"))
    sends = [action for action in actions if isinstance(action, m.Send)]
    assert [send.silo for send in sends] == ["b"]
    state, actions = arrive(state, "a")
    [send] = [action for action in actions if isinstance(action, m.Send)]
    origins = {donor.origin for row in send.body.prompts for donor in row.donors}  # type: ignore[attr-defined]
    assert send.silo == "a" and origins == {"b"}


@pytest.mark.parametrize("late", [("c",), ("a", "c")])
def test_a_silo_late_under_random_gets_the_group_that_all_got(late: tuple[str, ...]) -> None:
    plan = plan_of(method="pubswap-random", rounds=1)
    half = METHODS["pubswap-random"].coordinator
    played = federation("pubswap-random", rounds=1)

    def donors_by_silo(late: tuple[str, ...]) -> dict[str, list[tuple[int, str, int, bool]]]:
        got: dict[str, list[tuple[int, str, int, bool]]] = {}
        state, _ = half.on_event(half.start(plan, "coordinator"), m.RunStarted(plan.silos, "d"))
        in_time = [silo for silo in plan.silos if silo not in late]
        events: list[m.CoordinatorEvent] = []
        for silo in (*in_time, *late):
            body = played._body(silo, GeneratePublic(1, 2, public_batch(plan, 1, 2), "all"))
            assert body is not None
            events.append(m.MessageArrived(silo, "public.responses", 1, 2, body, ""))
        events.insert(len(in_time), m.DeadlinePassed("public/1/2"))
        for event in events:
            state, actions = half.on_event(state, event)
            for action in actions:
                if isinstance(action, m.Send):
                    assert isinstance(action.body, pb.PublicDonors)
                    got[action.silo] = [
                        (row.prompt_index, donor.origin, donor.position, donor.HasField("response"))
                        for row in action.body.prompts
                        for donor in row.donors
                    ]
        return got

    got = donors_by_silo(late)
    assert set(got) == set(plan.silos)
    named = {silo: [donor[:3] for donor in donors] for silo, donors in got.items()}
    assert all(donors == named["b"] for donors in named.values()), "one draw for all, whoever was late"
    assert {origin for _, origin, _ in named["b"]}.isdisjoint(late)
    assert all(with_text for silo in late for *_, with_text in got[silo]), "none of it is its own"
    # in time, all three stand in the pool
    assert {origin for _, origin, *_ in donors_by_silo(())["b"]} == set(plan.silos)


def test_a_silo_drops_what_came_for_rounds_that_are_over() -> None:
    half = METHODS["pubswap"].silo
    plan = plan_of(rounds=3)

    def arrives(kind: str, number: int, body: Message, step: int = 0) -> m.MessageArrived:
        return m.MessageArrived("", kind, number, step, body, "")

    opening = pb.RoundOpen(base_digest="d", public_steps=[pb.PublicStep(step=2, prompt_indices=[0, 1])])
    state, _ = half.on_event(half.start(plan, "a"), arrives("round.open", 1, opening))
    for late in (
        arrives("public.donors", 1, pb.PublicDonors(), 2),
        arrives("round.open", 1, opening),
        arrives("round.open", 2, opening),
        arrives("run.end", 2, pb.RunEnd(outcome="aborted")),
    ):
        state, _ = half.on_event(state, late)
    kept = [(message.kind, message.round) for message in state.inbox]
    assert kept == [("public.donors", 1), ("round.open", 2), ("run.end", 2)], "a round opens once"
    state, _ = half.on_event(replace(state, waits_for="result", inbox=state.inbox[:2]), opened_again(1))
    assert state.round == 2
    state, _ = half.on_event(state, arrives("public.donors", 2, pb.PublicDonors(), 2))
    assert [(message.kind, message.round) for message in state.inbox] == [("public.donors", 2)]


def opened_again(number: int) -> m.MessageArrived:
    return m.MessageArrived("", "round.open", number, 0, pb.RoundOpen(base_digest="d"), "")


def test_one_silo_runs_and_gets_no_donors() -> None:
    for name, exchange in WORKS:
        played = federation(name, silos=("a",), exchange=exchange)
        played.run()
        assert played.outcome == m.FinishRun("finished")
        for task in public_steps(played, "a"):
            assert all(donor.origin == "a" for row in task.donors.prompts for donor in row.donors)


def test_below_quorum_the_round_is_abandoned_and_the_base_kept() -> None:
    played = federation("pubswap", quorum=3, gone=frozenset("c"))
    played.run()
    assert played.commits == []
    assert played.outcome == m.FinishRun("failed", "NO_ROUND_COMMITTED")
    loads = [task for task in played.trained["a"] if isinstance(task, LoadAdapter)]
    assert {task.digest for task in loads} == {"digest-0"}


def test_steps_follow_the_swap_period_and_restart_each_round() -> None:
    played = federation("pubswap", swap_period=3)
    played.run()
    steps = [
        (task.round, task.step, isinstance(task, PublicStep))
        for task in played.trained["a"]
        if isinstance(task, PrivateStep | PublicStep)
    ]
    assert steps == [(r, s, s == 3) for r in (1, 2) for s in (1, 2, 3, 4)]


def test_public_batches_are_shuffled_passes_without_replacement() -> None:
    plan = plan_of(local_steps=8, rounds=1)  # 4 batches of 2 from 9 rows: one pass
    rows = [row for step in plan.public_steps() for row in public_batch(plan, 1, step)]
    assert len(set(rows)) == 8
    assert rows != sorted(rows)
    assert public_batch(plan, 1, 2) == public_batch(plan, 1, 2)


def test_mean_delta_is_fedit_and_float32_in_silo_order() -> None:
    import numpy as np

    # Scalars (A, B) = (1, 1) and (-1, -1): the mean of each factor is 0 although both products are 1.
    one = np.ones(1, np.float32)
    assert mean_delta([one, -one]) == 0
    deltas = [np.float32([1e8]), np.float32([1.0]), np.float32([-1e8])]
    slow = np.float32(np.float32(np.float32(1e8 + 1.0) + np.float32(-1e8)) / np.float32(3))
    assert mean_delta(deltas) == slow
    assert np.array_equal(mean_delta([one * 0.25]), one * 0.25)


def test_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(UsageError) as error:
        method_named("pubswop")
    assert "pubswap" in error.value.hint
