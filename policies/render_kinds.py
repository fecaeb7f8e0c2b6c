"""Limits of the kinds of further methods, from the size of the plan and of the model. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fedsilo.protocol.codec import DTYPE_ITEM_BYTES
from policies.model import Egress

# Largest |R R^T - I| of rows that are orthonormal but for the rounding of the wire's values: two rows of length 1 whose
# values each move by half a unit in the last place differ by at most twice that in their product (2**-8 for bfloat16).
_ORTHONORMALITY_ERROR = {"float32": 1e-4, "bfloat16": 2.0**-7}
_REFT_RANK = 8  # methods 5.7
_REFT_GROUPS = 2  # prefix and suffix
_TENSOR_HEADER_BYTES = 48
_SCORE_BYTES = 32
_SMALLEST_MESSAGE_BYTES = 65536


def kind_values(
    *,
    prompts_per_step: int,
    samples_per_prompt: int,
    local_steps: int,
    rounds: int,
    rounds_per_day: int,
    movement: float,
    step_bytes: int,
    answer_bytes: int,
    public_rows: int,
    adapter_bytes: int,
    update_bytes: int,
    hidden_shape: tuple[int, int],
    dtype: str,
) -> dict[str, Any]:
    """Placeholders of the rulesets beside those of PubSwap.

    Args:
        prompts_per_step: of the largest plan, as the next three.
        samples_per_prompt: answers or candidates.
        local_steps: of a round.
        rounds: of a run.
        rounds_per_day: that a site is ready for.
        movement: of one value in one round, at most.
        step_bytes: text of the answers to one step's prompts.
        answer_bytes: of one answer, on average.
        public_rows: of the public set, which a transfer set is.
        adapter_bytes: of a whole adapter as it comes in.
        update_bytes: of an update as it leaves.
        hidden_shape: (layers, width).
        dtype: of tensors on the wire.
    """
    layers, width = hidden_shape
    rank = min(_REFT_RANK, max(width, 1))
    numbers = 2 * rank * width + rank
    tensors = layers * _REFT_GROUPS * 3
    reft_bytes = layers * _REFT_GROUPS * numbers * DTYPE_ITEM_BYTES[dtype] + tensors * _TENSOR_HEADER_BYTES
    # W starts as a linear layer does, uniform within 1/sqrt(width): one W has norm sqrt(rank/3).
    start = math.sqrt(rank / 3)
    reft_moved = rounds * movement
    scores_bytes = prompts_per_step * (samples_per_prompt * 9 + _SCORE_BYTES)
    package_bytes = public_rows * answer_bytes
    budgets = {
        "update": (max(adapter_bytes, _SMALLEST_MESSAGE_BYTES), update_bytes),
        "package": (max(package_bytes, _SMALLEST_MESSAGE_BYTES), package_bytes),
        "scores": (max(step_bytes, _SMALLEST_MESSAGE_BYTES), 2 * local_steps * scores_bytes),
        "reft": (max(reft_bytes, _SMALLEST_MESSAGE_BYTES), reft_bytes),
        "figures": (_SMALLEST_MESSAGE_BYTES, 0),
    }
    values: dict[str, Any] = {}
    for name, (message, a_round) in budgets.items():
        round_bytes = a_round + _SMALLEST_MESSAGE_BYTES
        values |= {
            f"{name}_message_bytes": message,
            f"{name}_round_bytes": round_bytes,
            f"{name}_day_bytes": round_bytes * rounds_per_day,
        }
    scores_per_day = prompts_per_step * local_steps * rounds_per_day
    return values | {
        "package_bytes": package_bytes,
        "scores_per_day": scores_per_day,
        "rewards_per_day": scores_per_day * samples_per_prompt,
        "reft_layers": list(range(layers)),
        "reft_rank": rank,
        "reft_width": width,
        "reft_max_l2": _two_digits(math.sqrt(layers * _REFT_GROUPS) * (start + reft_moved * math.sqrt(numbers))),
        "reft_max_tensor_l2": _two_digits(2 * (start + reft_moved * math.sqrt(rank * max(width, 1)))),
        "orthonormality_error": _ORTHONORMALITY_ERROR[dtype],
    }


def kind_bytes(egress: Egress) -> Iterator[tuple[str, int, int]]:
    """(kind, messages, payload bytes) that one round may hold at most, for each of these kinds that is named.

    A protobuf number takes at most 10 bytes with its tag, a double 9, a digest 66.
    """
    if score := egress.competence_score:
        yield "competence.score", score.per_round, score.per_round * (score.max_per_step * 16 + 66)
    if answers := egress.competence_answers:
        yield "competence.answers", answers.per_round, answers.per_round * answers.max_bytes_per_step
    if scalar := egress.reward_scalar:
        size = scalar.max_questions_per_step * (scalar.max_candidates_per_question * 8 + 24)
        yield "reward.scalar", scalar.per_round, scalar.per_round * size
    if profile := egress.profile_vector:
        yield "profile.vector", profile.per_round, profile.per_round * (profile.dynamic * 8 + profile.bins * 5 + 24)
    if bandit := egress.bandit_reward:
        yield "bandit.reward", bandit.per_match, bandit.per_match * 16
    if package := egress.knowledge_package:
        yield "knowledge.package", package.per_round, package.per_round * package.max_bytes
    if reft := egress.reft_intervention:
        places = len(reft.layers) * len(reft.groups)
        values = places * (2 * reft.rank * reft.width + reft.rank)
        size = values * DTYPE_ITEM_BYTES[reft.dtype] + places * 3 * _TENSOR_HEADER_BYTES + 64
        yield "reft.intervention", reft.per_round, reft.per_round * size


def _two_digits(value: float) -> float:
    """Rounded up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1) if value > 0 else 1.0
    return float(f"{math.ceil(value / unit) * unit:.6g}")
