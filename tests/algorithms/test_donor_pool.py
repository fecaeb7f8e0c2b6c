"""The donor pool of `exchange: round_end` against oracles that compute the same slowly and otherwise."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.treaty.donor_pool import DonorPool, donors_taken, drawn_donors, prompts_of_round, take_in
from fedsilo.treaty.errors import PeerError, WireCode
from fedsilo.treaty.plan import Plan
from fedsilo.treaty.randomness import generator
from fedsilo.treaty.swap import balanced_donors, public_batch, replaced_positions
from tests.simulated.paper_federation import plan_of

PLAN = plan_of(rounds=3, samples_per_prompt=8)  # public steps 2 and 4 of 4, two prompts each, nine rows
FIRST = prompts_of_round(PLAN, 2)[0]  # a prompt of step 2


def keyed(*key: str | int) -> np.random.Generator:
    """The keyed draw, written out once more: all parties must agree on it byte for byte."""
    text = json.dumps(["fedsilo", *key], separators=(",", ":"))
    return np.random.Generator(np.random.Philox(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")))


def pool_of(plan: Plan, round_number: int, counts: dict[str, int]) -> DonorPool[str]:
    """A closed pool in which each silo has `counts` correct answers to every prompt."""
    pool: DonorPool[str] = DonorPool(round_number)
    for silo, count in counts.items():
        answers = {row: [f"{silo}-{row}-{n}" for n in range(count)] for row in prompts_of_round(plan, round_number)}
        pool = take_in(pool, plan, silo, answers)
    return pool.close()


def by_hand(pool: DonorPool[str], plan: Plan, step: int, prompt: int, receiver: str) -> list[tuple[str, int, str]]:
    """The donors drawn one at a time, from a permutation of all answers that are not the receiver's own."""
    others = []
    for silo in sorted(plan.silos):
        for position in range(plan.samples_per_prompt):
            given_by_silo = pool.answers.get(silo, {}).get(prompt, ())
            if silo != receiver and position < len(given_by_silo):
                others.append((silo, position, given_by_silo[position]))
    drawn: list[tuple[str, int, str]] = []
    for place in keyed(plan.seed, "pool-donors", pool.round, step, prompt, receiver).permutation(len(others)):
        if 2 * (len(drawn) + 1) <= plan.samples_per_prompt:
            drawn.append(others[place])
    return drawn


@given(
    rows=st.integers(1, 9), batch=st.integers(1, 4), steps=st.integers(1, 9), period=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_the_prompts_of_a_round_are_those_its_steps_use(
    rows: int, batch: int, steps: int, period: int, seed: int
) -> None:
    plan = plan_of(
        rounds=4, local_steps=steps, swap_period=period, public_set_rows=rows, prompts_per_step=batch, seed=seed
    )
    batches: list[list[int]] = []  # the whole run's, dealt from one shuffled pass after the other
    pass_number = 0
    left: list[int] = []
    for _ in range(plan.rounds * (steps // period)):
        if len(left) < min(batch, rows):
            left = [int(row) for row in keyed(seed, "public-order", pass_number).permutation(rows)]
            pass_number += 1
        batches.append(left[: min(batch, rows)])
        left = left[min(batch, rows) :]
    per_round = steps // period
    for number in range(1, plan.rounds + 1):
        used: list[int] = []
        for of_step in batches[(number - 1) * per_round : number * per_round]:
            used += [row for row in of_step if row not in used]
        assert prompts_of_round(plan, number) == tuple(used)
    assert prompts_of_round(plan, plan.rounds + 1) == (), "after the last round no answers are asked for"


@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=5), samples=st.integers(1, 9), seed=st.integers(0, 2**32)
)
def test_donors_are_those_drawn_by_hand(counts: list[int], samples: int, seed: int) -> None:
    silos = tuple(f"s{number}" for number in range(len(counts)))
    plan = plan_of(silos=silos, samples_per_prompt=samples, seed=seed)
    pool = pool_of(plan, 2, {silo: min(count, samples) for silo, count in zip(silos, counts, strict=True)})
    for step, receiver in itertools.product(plan.public_steps(), silos):
        for prompt in public_batch(plan, 2, step):
            drawn = drawn_donors(pool, plan, step, prompt, receiver)
            assert list(drawn) == by_hand(pool, plan, step, prompt, receiver)
            for correct in range(samples + 1):
                taken = donors_taken(drawn, correct, samples)
                # Balanced one answer at a time: a wrong own answer gives way while fewer than half are correct
                after, left = correct, len(drawn)
                while after + 1 <= samples / 2 and left:
                    after, left = after + 1, left - 1
                assert len(taken) == after - correct and taken == drawn[: len(taken)]
                wrong = replaced_positions([1.0] * correct + [0.0] * (samples - correct), len(taken), generator(seed))
                assert len(wrong) == len(taken), "every donor finds a wrong answer to replace"
                assert all(place >= correct for place in wrong), "own correct answers survive"


@pytest.mark.parametrize(("fresh", "donors"), [((0, 4, 8, 1), (4, 0, 0, 3)), ((0, 0, 0, 0), (4, 4, 4, 4))])
def test_the_hand_made_groups_take_as_many_as_in_step_mode(fresh: tuple[int, ...], donors: tuple[int, ...]) -> None:
    """methods 2.9 with K=8: the counts are those of the fresh answers, the pool's are of the round before."""
    silos = ("s0", "s1", "s2", "s3")
    plan = plan_of(silos=silos, rounds=3)
    pool = pool_of(plan, 2, dict.fromkeys(silos, 8))
    prompt = public_batch(plan, 2, 2)[0]
    for silo, correct, expected in zip(silos, fresh, donors, strict=True):
        taken = donors_taken(drawn_donors(pool, plan, 2, prompt, silo), correct, 8)
        answers = {name: ["x"] * (correct if name == silo else 8) for name in silos}
        assert len(taken) == expected == len(balanced_donors(answers, silo, 8, generator(0)))
        assert all(origin != silo for origin, _, _ in taken)


def test_arrival_order_changes_nothing() -> None:
    counts = {"a": 2, "b": 5, "c": 1}
    drawn = {
        drawn_donors(pool_of(PLAN, 2, dict(order)), PLAN, 2, FIRST, "a")
        for order in itertools.permutations(counts.items())
    }
    assert len(drawn) == 1 and len(next(iter(drawn))) == 4


def test_each_key_part_changes_the_draw() -> None:
    plan = plan_of(rounds=3, public_set_rows=2, samples_per_prompt=8)  # each step uses both rows
    counts = {"a": 8, "b": 8, "c": 8}

    def positions(plan: Plan, round_number: int, step: int, prompt: int, receiver: str) -> list[tuple[str, int]]:
        pool = pool_of(plan, round_number, counts)
        return [(origin, place) for origin, place, _ in drawn_donors(pool, plan, step, prompt, receiver)]

    drawn = positions(plan, 2, 2, 0, "a")
    assert drawn == positions(plan, 2, 2, 0, "a")
    assert drawn != positions(plan.model_copy(update={"seed": 8}), 2, 2, 0, "a")
    assert drawn != positions(plan, 3, 2, 0, "a")
    assert drawn != positions(plan, 2, 4, 0, "a")
    assert drawn != positions(plan, 2, 2, 1, "a")
    assert drawn != positions(plan, 2, 2, 0, "b")


def test_every_answer_of_the_others_is_drawn_equally_often() -> None:
    seen: Counter[str] = Counter()
    draws = 1000
    pool = pool_of(PLAN, 2, {"a": 3, "b": 3, "c": 3})
    for seed in range(draws):
        plan = PLAN.model_copy(update={"seed": seed})
        row = public_batch(plan, 2, 2)[0]
        of_row = DonorPool(2, {silo: {row: pool.answers[silo][FIRST]} for silo in pool.answers}, closed=True)
        seen.update(answer for _, _, answer in donors_taken(drawn_donors(of_row, plan, 2, row, "a"), 2, 8))
    # Two of six: probability 1/3 each, standard deviation 15; 5 of them either way.
    assert len(seen) == 6
    assert all(abs(count - draws / 3) < 5 * np.sqrt(draws * 2 / 9) for count in seen.values())


def test_the_first_round_and_a_single_silo_have_no_donors() -> None:
    row = public_batch(PLAN, 1, 2)[0]
    first: DonorPool[str] = DonorPool[str](1).close()
    assert drawn_donors(first, PLAN, 2, row, "a") == ()
    assert donors_taken((), 0, 8) == (), "an all-wrong group without donors stays as it is"
    alone = plan_of(silos=("a",), rounds=3)
    assert drawn_donors(pool_of(alone, 2, {"a": 8}), alone, 2, FIRST, "a") == ()
    assert len(drawn_donors(pool_of(PLAN, 2, {"a": 8, "b": 1}), PLAN, 2, FIRST, "a")) == 1


def test_a_silo_that_dropped_gives_nothing_and_one_that_drops_later_still_donates() -> None:
    without_c = pool_of(PLAN, 2, {"a": 0, "b": 4})
    assert {origin for origin, _, _ in drawn_donors(without_c, PLAN, 2, FIRST, "a")} == {"b"}
    assert {origin for origin, _, _ in drawn_donors(without_c, PLAN, 2, FIRST, "c")} == {"b"}, "it may still receive"
    with_c = pool_of(PLAN, 2, {"a": 0, "b": 0, "c": 4})
    assert {origin for origin, _, _ in drawn_donors(with_c, PLAN, 2, FIRST, "a")} == {"c"}


def test_equal_texts_are_different_donors_and_none_is_taken_twice() -> None:
    pool: DonorPool[str] = DonorPool(2)
    pool = take_in(take_in(pool, PLAN, "b", {FIRST: ["7", "7"]}), PLAN, "c", {FIRST: ["7"]}).close()
    drawn = drawn_donors(pool, PLAN, 2, FIRST, "a")
    assert sorted(drawn) == [("b", 0, "7"), ("b", 1, "7"), ("c", 0, "7")]


def test_a_late_silo_is_refused_and_shifts_no_draw() -> None:
    pool: DonorPool[str] = take_in(DonorPool(2), PLAN, "b", {FIRST: ["x"] * 8})
    in_time = take_in(pool, PLAN, "c", {FIRST: ["y"]})
    assert set(in_time.answers) == {"b", "c"}
    before = drawn_donors(pool.close(), PLAN, 2, FIRST, "a")
    with pytest.raises(PeerError, match="round 2 is closed") as refused:
        take_in(pool.close(), PLAN, "c", {FIRST: ["y"]})
    assert refused.value.wire_code is WireCode.ROUND_CLOSED
    assert drawn_donors(pool.close(), PLAN, 2, FIRST, "a") == before


@pytest.mark.parametrize(
    ("silo", "answers", "code"),
    [
        ("stranger", {FIRST: ["x"]}, WireCode.NOT_A_MEMBER),
        ("b", {FIRST: ["x"]}, WireCode.SEQUENCE_REPLAYED),
        ("a", {next(row for row in range(9) if row not in prompts_of_round(PLAN, 2)): []}, WireCode.MALFORMED),
        ("a", {FIRST: ["x"] * 9}, WireCode.TOO_LARGE),
    ],
)
def test_what_a_pool_refuses(silo: str, answers: dict[int, list[str]], code: WireCode) -> None:
    pool: DonorPool[str] = take_in(DonorPool(2), PLAN, "b", {FIRST: []})
    with pytest.raises(PeerError) as refused:
        take_in(pool, PLAN, silo, answers)
    assert refused.value.wire_code is code
    assert take_in(pool, PLAN, "a", {FIRST: ["x"] * 8}).answers["a"] == {FIRST: ("x",) * 8}


def test_donors_are_drawn_of_a_closed_pool_and_for_the_steps_own_prompts() -> None:
    closed = pool_of(PLAN, 2, {"b": 4})
    assert len(drawn_donors(closed, PLAN, 2, FIRST, "a")) == 4
    with pytest.raises(ValueError, match="still open"):
        drawn_donors(DonorPool(2, closed.answers), PLAN, 2, FIRST, "a")
    with pytest.raises(ValueError, match="not one of step 4"):
        drawn_donors(closed, PLAN, 4, FIRST, "a")
