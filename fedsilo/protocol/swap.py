"""The public steps of PubSwap, as arithmetic on counts and indices. Both parties use it: the coordinator draws prompts
and donors, the silo decides which of its own answers they replace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.randomness import generator, seed_of

T = TypeVar("T")


def public_batch(plan: Plan, round_number: int, step: int) -> tuple[int, ...]:
    """Rows of the public set for one public step: shuffled passes without replacement.

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
    """Return m = max(0, floor(K/2) - c): Balanced fills up to half, never beyond, whatever the parity of K."""
    return max(0, samples // 2 - correct)


def draw_without_replacement(candidates: Sequence[T], count: int, random: np.random.Generator) -> tuple[T, ...]:
    """Draw min(count, len(candidates)) of them, uniformly, in drawn order. No padding, nothing twice."""
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
    wanted = donors_wanted(len(correct.get(receiver, ())), samples)
    return draw_without_replacement(_pooled(correct, but=receiver), wanted, random)


def _pooled(answers: Mapping[str, Sequence[T | None]], but: str = "") -> list[tuple[str, int, T]]:
    """All answers but None and but one silo's own, as (origin, position among the origin's answers, answer)."""
    return [
        (silo, position, answer)
        for silo in sorted(answers)
        if silo != but
        for position, answer in enumerate(answers[silo])
        if answer is not None
    ]


def random_group(
    answers: Mapping[str, Sequence[T | None]], samples: int, random: np.random.Generator
) -> tuple[tuple[str, int, T], ...]:
    """The one group every silo trains on under Random: K of the pooled answers (but None), without replacement.

    Returns:
        (origin, position among the origin's answers, answer).
    """
    return draw_without_replacement(_pooled(answers), samples, random)


def replaced_positions(rewards: Sequence[float], donors: int, random: np.random.Generator) -> tuple[int, ...]:
    """Return which own answers donors replace: wrong ones only, uniformly, in ascending order."""
    wrong = [position for position, reward in enumerate(rewards) if reward < 0.5]
    return tuple(sorted(draw_without_replacement(wrong, donors, random)))


# ---- the pool of donors under `exchange: round_end` ----
#
# While round r is open, each silo sends its correct answers to the public prompts of round r+1 beside its update, one
# message for each public step. When round r closes, the answers of the silos whose update came are the pool of round
# r+1; nothing is added to it afterwards. As that round opens, the coordinator draws for each silo, step and prompt as
# many donors as Balanced could ever need, in an order keyed by (run seed, round, step, prompt, silo). The silo
# generates its own answers, counts its correct ones, and takes the first m' of its list. The first m' of a uniform
# permutation are a uniform draw of m' without replacement, so the rule is that of `balanced_donors`, and nobody waits
# for anybody inside a round.
#
# What it does not give: proof that an answer is correct (the receiver verifies donors again), or fresh donors: they
# were written by the policies that their silos had a round ago.


def rows_ahead(plan: Plan, round_number: int) -> dict[int, tuple[int, ...]]:
    """Rows of the public set that a silo answers at the end of a round, by the public step of the next that uses them.

    None at the end of the last round, where the plan exchanges at each step, and where there is nobody to answer for.
    """
    if plan.exchange != "round_end" or not 1 <= round_number < plan.rounds or len(plan.silos) == 1:
        return {}
    return {step: public_batch(plan, round_number + 1, step) for step in plan.public_steps()}


def rows_answered(plan: Plan, round_number: int, asked: Mapping[int, tuple[int, ...]]) -> Mapping[int, tuple[int, ...]]:
    """Rows of the public set that a silo's answers in an open round are about, by their step.

    Args:
        plan: of the run.
        round_number: of the open round; 0 is none.
        asked: rows of each of its public steps, as its opening said.
    """
    return rows_ahead(plan, round_number) if plan.exchange == "round_end" else asked


def drawn_donors(
    answers: Mapping[str, Sequence[T | None]], plan: Plan, round_number: int, step: int, prompt: int, receiver: str
) -> tuple[tuple[str, int, T], ...]:
    """The donors that one silo gets for one prompt of one public step, best first: the order of the draw.

    At most floor(K/2), which is what Balanced needs where the silo has none correct. Equal texts of two silos, or of
    one, are different donors; none is listed twice, and no silo is its own donor.

    Args:
        answers: of the pool to this step's prompt, by silo, each silo's in the order it sent them; None is no donor.
        plan: of the run.
        round_number: of the step.
        step: which one of the round.
        prompt: its row in the public set.
        receiver: the silo that the donors are for.

    Returns:
        (origin, position among the origin's answers, answer).
    """
    random = generator(seed_of(plan.seed, "pool-donors", round_number, step, prompt, receiver))
    return draw_without_replacement(_pooled(answers, receiver), donors_wanted(0, plan.samples_per_prompt), random)


def pool_digests(accepted: Iterable[tuple[str, str, int, str]], update_kind: str) -> dict[str, str]:
    """Return the pool that a round's messages make, as the transcript of the next round names it.

    Args:
        accepted: (silo, kind, step, digest of the payload) of each message that was accepted in the round.
        update_kind: of the round.

    Returns:
        By silo whose update and answers both came, `answers_digest` of these.
    """
    accepted = list(accepted)
    updated = {silo for silo, kind, _, _ in accepted if kind == update_kind}
    answers: dict[str, dict[int, str]] = {}
    for silo, kind, step, digest in accepted:
        if kind == "public.responses" and silo in updated:
            answers.setdefault(silo, {})[step] = digest
    return {silo: answers_digest(answers[silo]) for silo in sorted(answers)}


def answers_digest(digests: Mapping[int, str]) -> str:
    """Return one digest of a silo's answers for a round, as the round's transcript names them.

    Args:
        digests: SHA-256 of the payload of each of its messages, by public step.
    """
    return sha256_hex(canonical_json({str(step): digests[step] for step in sorted(digests)}))
