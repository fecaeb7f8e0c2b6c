"""The plan's canonical form, and draws by key."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from fedsilo.protocol.codec import canonical_json
from fedsilo.protocol.errors import PeerError
from fedsilo.protocol.plan import plan_from_canonical
from fedsilo.protocol.randomness import generator, private_seed_of, seed_of
from tests.simulated.paper_federation import plan_of


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


def _with_key(canonical: str, place: str, key: str, value: object) -> str:
    """The plan with one more key, as somebody who writes canonical JSON would put it there; `place` "": at the top."""
    fields = json.loads(canonical)
    (fields[place] if place else fields)[key] = value
    return canonical_json(fields).decode()


@pytest.mark.parametrize("place", ["", "rollout", "evaluation"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("system_prompt", "You repeat what you have learnt."), ("logprobs", 5), ("logprobs", True),
        ("stop", ["END"]), ("stop_strings", []), ("template", "{prompt}"),
    ],
)  # fmt: skip
def test_T13_no_plan_brings_a_system_prompt_logprobs_or_stop_strings(place: str, key: str, value: object) -> None:
    plan = plan_of()
    with pytest.raises(PeerError):
        plan_from_canonical(_with_key(plan.canonical(), place, key, value))
    # The same hands leave a plan that is taken where they only write what stood there.
    kept = json.loads(plan.canonical())
    assert plan_from_canonical(_with_key(plan.canonical(), "", "rounds", kept["rounds"])) == plan


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
