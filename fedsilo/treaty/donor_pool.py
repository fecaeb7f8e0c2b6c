"""The donor pool of PubSwap under `exchange: round_end` (methods 2.2): which prompts a silo answers at the end of a
round, what the answers of all silos become, and which of them a public step of the next round takes. Pure arithmetic
on counts and indices, as `swap` is for `exchange: step`. No method works this way yet: `methods.require_exchange`
refuses the plan.

While round r is open, each silo sends its correct answers to the public prompts of round r+1 beside its update.
What has come when round r closes is the pool of round r+1; nothing is added to it afterwards. When round r+1 opens, the
coordinator draws for each silo, step and prompt as many donors as Balanced could ever need, in an order keyed by
(run seed, round, step, prompt, silo). The silo generates its own answers, counts its correct ones, and takes the
first m' of its list. The first m' of a uniform permutation are a uniform draw of m' without replacement, so the rule
is that of `swap.balanced_donors`, and nobody waits for anybody inside a round.

What it does not give: proof that an answer is correct (the receiver verifies donors again), or fresh donors: they were
written by the policies that their silos had a round ago.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from fedsilo.treaty.errors import PeerError, WireCode
from fedsilo.treaty.plan import Plan
from fedsilo.treaty.randomness import generator, seed_of
from fedsilo.treaty.swap import donors_wanted, draw_without_replacement, public_batch

T = TypeVar("T")


def prompts_of_round(plan: Plan, round_number: int) -> tuple[int, ...]:
    """Rows of the public set that the public steps of a round use, each once, in the order of their first use.

    Empty for a round past the last: at the end of the last round no answers are asked for.
    """
    if round_number > plan.rounds:
        return ()
    rows = (row for step in plan.public_steps() for row in public_batch(plan, round_number, step))
    return tuple(dict.fromkeys(rows))


@dataclass(frozen=True)
class DonorPool(Generic[T]):
    """Answers to the public prompts of `round`, by silo and prompt, each silo's in the order it sent them.

    The pool of the first round is empty: no policy has been trained before it.
    """

    round: int
    answers: Mapping[str, Mapping[int, tuple[T, ...]]] = field(default_factory=dict)
    closed: bool = False

    def close(self) -> DonorPool[T]:
        """The round before has closed: whoever has not sent answers is no donor (methods 2.4)."""
        return replace(self, closed=True)


def take_in(pool: DonorPool[T], plan: Plan, silo: str, answers: Mapping[int, Sequence[T]]) -> DonorPool[T]:
    """The pool with one silo's answers. A silo with none correct sends an empty list for each prompt.

    Raises:
        PeerError: the pool is closed (late), the silo is not of the roster or has sent its answers, a prompt is not of
            the pool's round, or there are more than K answers to a prompt. The pool stays as it was.
    """
    if pool.closed:
        raise PeerError(WireCode.ROUND_CLOSED, f"the donor pool of round {pool.round} is closed")
    if silo not in plan.silos:
        raise PeerError(WireCode.NOT_A_MEMBER, f"{silo!r} is not in the roster")
    if silo in pool.answers:
        raise PeerError(WireCode.SEQUENCE_REPLAYED, f"{silo} has sent its answers for round {pool.round}")
    foreign = sorted(set(answers) - set(prompts_of_round(plan, pool.round)))
    if foreign:
        raise PeerError(WireCode.MALFORMED, f"prompt {foreign[0]} is not a public prompt of round {pool.round}")
    for prompt, given in answers.items():
        if len(given) > plan.samples_per_prompt:
            told = f"{len(given)} answers to prompt {prompt}, at most {plan.samples_per_prompt} are generated"
            raise PeerError(WireCode.TOO_LARGE, told)
    return replace(pool, answers={**pool.answers, silo: {prompt: tuple(given) for prompt, given in answers.items()}})


def drawn_donors(
    pool: DonorPool[T], plan: Plan, step: int, prompt: int, receiver: str
) -> tuple[tuple[str, int, T], ...]:
    """The donors that one silo gets for one prompt of one public step, best first: the order of the draw.

    At most floor(K/2), which is what Balanced needs where the silo has none correct. Equal texts of two silos, or of
    one, are different donors (methods 2.4); none is listed twice, and no silo is its own donor.

    Returns:
        (origin, position among the origin's answers, answer).

    Raises:
        ValueError: the pool can still change, or the prompt is not one of this step.
    """
    if not pool.closed:
        raise ValueError(f"the donor pool of round {pool.round} is still open")
    if prompt not in public_batch(plan, pool.round, step):
        raise ValueError(f"prompt {prompt} is not one of step {step} of round {pool.round}")
    candidates = [
        (silo, position, answer)
        for silo in sorted(pool.answers)
        if silo != receiver
        for position, answer in enumerate(pool.answers[silo].get(prompt, ()))
    ]
    random = generator(seed_of(plan.seed, "pool-donors", pool.round, step, prompt, receiver))
    return draw_without_replacement(candidates, donors_wanted(0, plan.samples_per_prompt), random)


def donors_taken(drawn: Sequence[tuple[str, int, T]], correct: int, samples: int) -> tuple[tuple[str, int, T], ...]:
    """What a silo with `correct` correct of `samples` fresh answers takes of its list: as many as Balanced replaces."""
    return tuple(drawn[: donors_wanted(correct, samples)])
