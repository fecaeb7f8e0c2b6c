"""Our update against TRL's trainer on random ragged batches: the harness of `test_trl_agreement`, other answers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from silo.trainer.grpo import Answer, Group
from tests.algorithms import test_trl_agreement as trl_agreement
from tests.algorithms.test_trl_agreement import (
    ANSWERS_PER_PROMPT,
    END,
    FAR,
    TOLERANCE,
    Case,
    MakePeer,
    difference,
    make_peer,
    our_epochs,
)

pytestmark = trl_agreement.pytestmark
_ = make_peer  # the fixture
PROMPTS = 4


def random_groups(seed: int) -> list[Group]:
    """Prompts of 1 to 9 tokens, answers of 1 to 14, rewards right or wrong at random with one group without signal."""
    draws = random.Random(seed)

    def answer(reward: float) -> Answer:
        ids = [draws.randrange(3, 24) for _ in range(draws.randrange(0, 14))]
        finished = not ids or draws.random() < 0.6
        return Answer((*ids, *([END] if finished else [])), "", finished, reward)

    groups = []
    for place in range(PROMPTS):
        rewards = [float(draws.random() < 0.5) for _ in range(ANSWERS_PER_PROMPT)]
        if place == 0:
            rewards = [1.0] * ANSWERS_PER_PROMPT
        if place == 1:
            rewards = [1.0, *[0.0] * (ANSWERS_PER_PROMPT - 1)]
        prompt = tuple(draws.randrange(3, 24) for _ in range(draws.randrange(1, 10)))
        groups.append(Group(prompt, tuple(answer(reward) for reward in rewards)))
    return groups


def batch(seed: int, monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """Hands the harness other answers than its own."""
    groups = random_groups(seed)
    rows = [
        {"prompt": str(place), "verdict": answer.reward}
        for place, group in enumerate(groups)
        for answer in group.answers
    ]
    monkeypatch.setattr(trl_agreement, "GROUPS", groups)
    monkeypatch.setattr(trl_agreement, "ROWS", rows)
    return groups


CASES: dict[str, Case] = {
    "grpo": trl_agreement.CASES["grpo with KL"],
    "token mean": trl_agreement.CASES["token mean with KL"],
}


@pytest.mark.quick(keep=4)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_random_ragged_batches_agree(
    name: str, seed: int, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, case = batch(seed, monkeypatch), CASES[name]
    ours = our_epochs(groups, case.ours)
    peer = make_peer(case.theirs)
    theirs = [peer.epoch(epoch.factors) for epoch in ours]
    found = difference(ours, theirs)
    print(found)
    assert found.loss <= TOLERANCE
    assert found.gradient <= TOLERANCE


@pytest.mark.parametrize("swapped", [False, True])
def test_the_other_mean_is_far_outside_the_tolerance(
    swapped: bool, make_peer: MakePeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = batch(0, monkeypatch)
    names: list[Any] = ["grpo", "token mean"]
    ours = our_epochs(groups, CASES[names[0]].ours)
    peer = make_peer(CASES[names[int(swapped)]].theirs)
    found = difference(ours, [peer.epoch(epoch.factors) for epoch in ours])
    assert (found.gradient > FAR) is swapped
