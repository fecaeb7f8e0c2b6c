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

from fedsilo.protocol import swap
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.randomness import generator
from fedsilo.protocol.swap import answers_digest, donors_wanted, drawn_donors, public_batch, rows_ahead
from tests.simulated.paper_federation import plan_of

PLAN = plan_of(exchange="round_end", rounds=3, samples_per_prompt=8)  # public steps 2 and 4 of 4, two prompts of nine
FIRST = public_batch(PLAN, 2, 2)[0]


def keyed(*key: str | int) -> np.random.Generator:
    """The keyed draw, written out once more: all parties must agree on it byte for byte."""
    text = json.dumps(["fedsilo", *key], separators=(",", ":"))
    return np.random.Generator(np.random.Philox(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big")))


def pool_of(prompt: int, counts: dict[str, int]) -> dict[str, list[str]]:
    """Each silo has `counts` correct answers to the prompt."""
    return {silo: [f"{silo}-{prompt}-{n}" for n in range(count)] for silo, count in counts.items()}


def by_hand(
    pool: dict[str, list[str]], plan: Plan, number: int, step: int, prompt: int, receiver: str
) -> list[tuple[str, int, str]]:
    """The donors drawn one at a time, from a permutation of all answers that are not the receiver's own."""
    others = []
    for silo in sorted(plan.silos):
        for position in range(plan.samples_per_prompt):
            given_by_silo = pool.get(silo, [])
            if silo != receiver and position < len(given_by_silo):
                others.append((silo, position, given_by_silo[position]))
    drawn: list[tuple[str, int, str]] = []
    for place in keyed(plan.seed, "pool-donors", number, step, prompt, receiver).permutation(len(others)):
        if 2 * (len(drawn) + 1) <= plan.samples_per_prompt:
            drawn.append(others[place])
    return drawn


@pytest.mark.slow
@given(
    rows=st.integers(1, 9), batch=st.integers(1, 4), steps=st.integers(1, 9), period=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_what_is_answered_at_the_end_of_a_round_is_what_the_next_ones_steps_use(
    rows: int, batch: int, steps: int, period: int, seed: int
) -> None:
    plan = plan_of(
        exchange="round_end", rounds=4, local_steps=steps, swap_period=period, public_set_rows=rows,
        prompts_per_step=batch, seed=seed,
    )  # fmt: skip
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
    for number in range(1, plan.rounds):
        of_next = batches[number * per_round : (number + 1) * per_round]
        assert list(rows_ahead(plan, number)) == [period * (place + 1) for place in range(per_round)]
        assert [list(rows) for rows in rows_ahead(plan, number).values()] == of_next


def test_nothing_is_answered_ahead_where_nobody_would_use_it() -> None:
    assert rows_ahead(PLAN, 1) and rows_ahead(PLAN, 2)
    assert rows_ahead(PLAN, 3) == rows_ahead(PLAN, 0) == {}, "after the last round there is no other"
    assert rows_ahead(PLAN.model_copy(update={"exchange": "step"}), 1) == {}
    assert rows_ahead(PLAN.model_copy(update={"silos": ("a",)}), 1) == {}


def test_the_digest_of_a_silos_answers_tells_steps_and_payloads_apart() -> None:
    known = hashlib.sha256(b'{"2":"aa","4":"bb"}').hexdigest()
    assert answers_digest({4: "bb", 2: "aa"}) == known
    assert known not in (answers_digest({2: "bb", 4: "aa"}), answers_digest({2: "aa"}), answers_digest({}))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=5), samples=st.integers(1, 9), seed=st.integers(0, 2**32)
)
def test_donors_are_those_drawn_by_hand(counts: list[int], samples: int, seed: int) -> None:
    silos = tuple(f"s{number}" for number in range(len(counts)))
    plan = plan_of(silos=silos, samples_per_prompt=samples, seed=seed)
    held = {silo: min(count, samples) for silo, count in zip(silos, counts, strict=True)}
    for step, receiver in itertools.product(plan.public_steps(), silos):
        for prompt in public_batch(plan, 2, step):
            pool = pool_of(prompt, held)
            drawn = drawn_donors(pool, plan, 2, step, prompt, receiver)
            assert list(drawn) == by_hand(pool, plan, 2, step, prompt, receiver)
            for correct in range(samples + 1):
                taken = drawn[: donors_wanted(correct, samples)]
                # Balanced one answer at a time: a wrong own answer gives way while fewer than half are correct
                after, left = correct, len(drawn)
                while after + 1 <= samples / 2 and left:
                    after, left = after + 1, left - 1
                assert len(taken) == after - correct and taken == drawn[: len(taken)]
                wrong = swap.replaced_positions(
                    [1.0] * correct + [0.0] * (samples - correct), len(taken), generator(seed)
                )
                assert len(wrong) == len(taken), "every donor finds a wrong answer to replace"
                assert all(place >= correct for place in wrong), "own correct answers survive"


@pytest.mark.parametrize(("fresh", "donors"), [((0, 4, 8, 1), (4, 0, 0, 3)), ((0, 0, 0, 0), (4, 4, 4, 4))])
def test_the_hand_made_groups_take_as_many_as_in_step_mode(fresh: tuple[int, ...], donors: tuple[int, ...]) -> None:
    """With K=8: the counts are those of the fresh answers, the pool's are of the round before."""
    silos = ("s0", "s1", "s2", "s3")
    plan = plan_of(silos=silos, rounds=3)
    prompt = public_batch(plan, 2, 2)[0]
    pool = pool_of(prompt, dict.fromkeys(silos, 8))
    for silo, correct, expected in zip(silos, fresh, donors, strict=True):
        taken = drawn_donors(pool, plan, 2, 2, prompt, silo)[: donors_wanted(correct, 8)]
        answers = {name: ["x"] * (correct if name == silo else 8) for name in silos}
        assert len(taken) == expected == len(swap.balanced_donors(answers, silo, 8, generator(0)))
        assert all(origin != silo for origin, _, _ in taken)


def test_arrival_order_changes_nothing() -> None:
    counts = {"a": 2, "b": 5, "c": 1}
    drawn = {
        drawn_donors(pool_of(FIRST, dict(order)), PLAN, 2, 2, FIRST, "a")
        for order in itertools.permutations(counts.items())
    }
    assert len(drawn) == 1 and len(next(iter(drawn))) == 4


def test_each_key_part_changes_the_draw() -> None:
    plan = plan_of(rounds=3, public_set_rows=2, samples_per_prompt=8)  # each step uses both rows

    def positions(plan: Plan, round_number: int, step: int, prompt: int, receiver: str) -> list[tuple[str, int]]:
        pool = pool_of(prompt, {"a": 8, "b": 8, "c": 8})
        return [(origin, place) for origin, place, _ in drawn_donors(pool, plan, round_number, step, prompt, receiver)]

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
    pool = pool_of(FIRST, {"a": 3, "b": 3, "c": 3})
    for seed in range(draws):
        plan = PLAN.model_copy(update={"seed": seed})
        seen.update(answer for _, _, answer in drawn_donors(pool, plan, 2, 2, FIRST, "a")[: donors_wanted(2, 8)])
    # Two of six: probability 1/3 each, standard deviation 15; 5 of them either way.
    assert len(seen) == 6
    assert all(abs(count - draws / 3) < 5 * np.sqrt(draws * 2 / 9) for count in seen.values())


def test_an_empty_pool_and_a_single_silo_give_no_donors() -> None:
    assert drawn_donors({}, PLAN, 1, 2, FIRST, "a") == ()
    assert drawn_donors(pool_of(FIRST, {"a": 8}), PLAN, 2, 2, FIRST, "a") == ()
    assert len(drawn_donors(pool_of(FIRST, {"a": 8, "b": 1}), PLAN, 2, 2, FIRST, "a")) == 1
    drawn = drawn_donors({"b": ["7", "7"], "c": ["7"]}, PLAN, 2, 2, FIRST, "a")
    assert sorted(drawn) == [("b", 0, "7"), ("b", 1, "7"), ("c", 0, "7")], "equal texts are different donors"
