"""The transition tables, and the plan's canonical form."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedsilo.treaty.errors import ConflictError, PeerError
from fedsilo.treaty.plan import plan_from_canonical
from fedsilo.treaty.randomness import generator, private_seed_of, seed_of
from fedsilo.treaty.rounds import ROUND, RUN, Table, advance, is_terminal
from tests.simulated.paper_federation import plan_of


@pytest.mark.parametrize("table", [RUN, ROUND])
def test_every_state_is_reachable_and_ends_somewhere(table: Table) -> None:
    reached, frontier = set(), [next(iter(table))]
    while frontier:
        state = frontier.pop()
        if state not in reached:
            reached.add(state)
            frontier.extend(table[state].values())
    assert reached == set(table)
    assert any(is_terminal(table, state) for state in table)


@given(st.sampled_from(sorted(RUN)), st.sampled_from(["start", "pause", "resume", "finish", "fail", "abort", "nap"]))
def test_an_event_moves_by_the_table_or_is_a_conflict(state: str, event: str) -> None:
    if event in RUN[state]:
        assert advance(RUN, state, event) == RUN[state][event]
    else:
        with pytest.raises(ConflictError) as error:
            advance(RUN, state, event)
        assert state in error.value.message
    if is_terminal(RUN, state):
        assert not RUN[state]


def test_a_plan_survives_its_canonical_form() -> None:
    plan = plan_of()
    assert plan_from_canonical(plan.canonical()) == plan
    assert plan.public_steps() == (2, 4)
    assert plan_of(local_steps=3, swap_period=4).public_steps() == ()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"rounds":2', '"rounds": 2'),
        lambda text: text.replace('"rounds":2', '"rounds":0'),
        lambda text: text.replace('"rounds":2', '"rounds":2,"free_text":"hello"'),
        lambda text: json.dumps(json.loads(text)),
        lambda text: text[:-1],
    ],
)
def test_T13_a_plan_with_other_or_free_fields_is_refused(damage) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PeerError):
        plan_from_canonical(damage(plan_of().canonical()))


@pytest.mark.parametrize("changes", [{"silos": ("a", "a")}, {"quorum": 4}, {"seed": 2**53}, {"method": "No Name"}])
def test_an_inconsistent_plan_is_not_made(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        plan_of(**changes)


def test_draws_depend_on_every_part_of_their_key() -> None:
    keys = [(1, "a", 1, 2), (2, "a", 1, 2), (1, "b", 1, 2), (1, "a", 2, 2), (1, "a", 1, "2"), (1, "a", 12)]
    assert len({seed_of(*key) for key in keys}) == len(keys)
    assert generator(seed_of(1, "a")).integers(2**62) == generator(seed_of(1, "a")).integers(2**62)
    secrets = {private_seed_of(secret, 1, "a") for secret in (b"x" * 32, b"y" * 32)}
    assert len(secrets | {seed_of(1, "a")}) == 3, "who has not the site secret cannot compute a private draw"
