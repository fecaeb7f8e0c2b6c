"""The public steps of PubSwap (methods 2.2), as arithmetic on counts and indices. Both parties use it: the coordinator
draws prompts and donors, the silo decides which of its own answers they replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from fedsilo.protocol.plan import Plan
from fedsilo.protocol.randomness import generator, seed_of

T = TypeVar("T")


def public_batch(plan: Plan, round_number: int, step: int) -> tuple[int, ...]:
    """Rows of the public set for one public step: shuffled passes without replacement (methods 2.2).

    A batch never spans two passes; the rows left over at the end of a pass wait for the next one's shuffle.
    """
    steps = plan.public_steps()
    count = min(plan.prompts_per_step, plan.public_set_rows)
    batches_per_pass = plan.public_set_rows // count
    batch = (round_number - 1) * len(steps) + steps.index(step)
    number_of_pass, place = divmod(batch, batches_per_pass)
    order = generator(seed_of(plan.seed, "public-order", number_of_pass)).permutation(plan.public_set_rows)
    return tuple(int(row) for row in order[place * count : (place + 1) * count])


def donors_wanted(correct: int, samples: int) -> int:
    """m = max(0, floor(K/2) - c): Balanced fills up to half, never beyond, whatever the parity of K (methods 2.4)."""
    return max(0, samples // 2 - correct)


def draw_without_replacement(candidates: Sequence[T], count: int, random: np.random.Generator) -> tuple[T, ...]:
    """min(count, len(candidates)) of them, uniformly, in drawn order. No padding, nothing twice."""
    chosen = random.permutation(len(candidates))[:count]
    return tuple(candidates[index] for index in chosen)


def balanced_donors(
    correct: Mapping[str, Sequence[T | None]], receiver: str, samples: int, random: np.random.Generator
) -> tuple[tuple[str, int, T], ...]:
    """Donors of one prompt for one silo under Balanced.

    Args:
        correct: each silo's verified correct answers to the prompt, in the order it sent them; None for one that nobody
            but that silo has verified: it counts for it and is no donor.
        receiver: the silo the donors are for; it is never its own donor.
        samples: K', the number of answers the receiver generated for this prompt.
        random: keyed by (run seed, round, step, prompt, receiver).

    Returns:
        (origin, position among the origin's answers, answer), at most `donors_wanted` of them.
    """
    candidates = [
        (silo, position, answer)
        for silo in sorted(correct)
        if silo != receiver
        for position, answer in enumerate(correct[silo])
        if answer is not None
    ]
    wanted = donors_wanted(len(correct.get(receiver, ())), samples)
    return draw_without_replacement(candidates, wanted, random)


def random_group(
    answers: Mapping[str, Sequence[T | None]], samples: int, random: np.random.Generator
) -> tuple[tuple[str, int, T], ...]:
    """The one group every silo trains on under Random: K of the pooled answers (but None), without replacement.

    Returns:
        (origin, position among the origin's answers, answer).
    """
    pool = [
        (silo, position, answer)
        for silo in sorted(answers)
        for position, answer in enumerate(answers[silo])
        if answer is not None
    ]
    return draw_without_replacement(pool, samples, random)


def replaced_positions(rewards: Sequence[float], donors: int, random: np.random.Generator) -> tuple[int, ...]:
    """Which own answers give way to donors: wrong ones only, uniformly (methods 2.2). Returned in ascending order."""
    wrong = [position for position, reward in enumerate(rewards) if reward < 0.5]
    return tuple(sorted(draw_without_replacement(wrong, donors, random)))
