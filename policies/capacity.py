"""How many bits an attacker who owns the trainer can get out in one round under a policy: arithmetic, no measurement.

Every value that the rules leave free counts in full, as if its owner chose it (residual N1). So each figure is an upper
bound: what the rules beyond these numbers forbid (an answer must be graded right, a delta must be short as a whole)
makes it smaller, never larger.
Not counted: when messages are sent, and what a guard that is not the attacker's fills in itself (envelopes, digests,
polls, progress).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from policies.load import Policy
from policies.model import LoraFactors, MetricsEval, PublicResponses
from policies.schema import LoraSchema

_SMALLEST_NORMAL = struct.unpack("<f", struct.pack("<I", 1 << 23))[0]  # 2**-126; denormals are not canonical
_LARGEST = struct.unpack("<f", struct.pack("<I", 0x7F7FFFFF))[0]
_DROPPED_BITS = {"float32": 0, "bfloat16": 16}
_ERROR_CODES_MAX = 32  # of control.error: a closed list that is shorter


@dataclass(frozen=True)
class Capacity:
    """Attributes:
    kind: of the messages.
    bits: at most, in one round.
    because: the numbers it is made of.
    """

    kind: str
    bits: float
    because: str

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "bits": round(self.bits, 1), "because": self.because}


def capacities(policy: Policy, schema: LoraSchema | None = None) -> list[Capacity]:
    """One row per kind that the policy lets out and whose values the trainer chooses.

    Args:
        policy: the site's.
        schema: its LoRA schema; without it the tensors are counted by the largest message.
    """
    egress, budgets = policy.file.egress, policy.file.budgets
    rows = []
    if egress.lora_factors:
        elements = schema.elements if schema else budgets.message_bytes // 4
        rows.append(_factors(egress.lora_factors, elements))
    if egress.public_responses:
        rows.append(_responses(egress.public_responses))
    if egress.metrics_eval:
        rows.append(_metrics(egress.metrics_eval))
    if egress.control and egress.public_responses:
        steps = _steps(egress.public_responses)
        # a step's answers may be offered or kept back, and a failure may be reported as one code of the list
        rows.append(
            Capacity("control.*", steps + math.log2(_ERROR_CODES_MAX), f"{steps} steps answered or not, one error code")
        )
    return rows


def grid_points(limit: float, grid: str) -> int:
    """Canonical values of one element with |value| <= limit: zero, and the normal numbers of the grid, both signs.

    Args:
        limit: largest magnitude.
        grid: float32 or bfloat16 (float32 whose lower half is zero).
    """
    shift = _DROPPED_BITS[grid]
    limit = min(limit, _LARGEST)
    if limit < _SMALLEST_NORMAL:
        return 1
    return 2 * ((_bits_of(limit) >> shift) - (_bits_of(_SMALLEST_NORMAL) >> shift) + 1) + 1


def _bits_of(value: float) -> int:
    """The pattern of the largest float32 that is not above `value` > 0; patterns of positive floats are in order."""
    (pattern,) = struct.unpack("<I", struct.pack("<f", value))
    (nearest,) = struct.unpack("<f", struct.pack("<I", pattern))
    return int(pattern) - int(nearest > value)


def _factors(block: LoraFactors, elements: int) -> Capacity:
    # an element is bound by the norm of its tensor; the norm of the whole narrows the vector, not each value
    limit = min(block.max_tensor_l2, block.max_l2)
    points = grid_points(limit, block.quantise.grid)
    each = math.log2(points)
    values = f"{elements} values of {each:.1f} bits ({block.quantise.grid}, at most {limit:g})"
    return Capacity("lora.factors", block.per_round * elements * each, f"{block.per_round} x {values}")


def _responses(block: PublicResponses) -> Capacity:
    steps = _steps(block)
    text_bytes = min(block.max_bytes_per_round, block.max_responses_per_round * block.max_bytes_per_response)
    # where one answer ends and the next begins, which prompts got how many, and how each finished
    frames = block.max_responses_per_round * (math.log2(block.max_bytes_per_response + 1) + 1)
    return Capacity(
        "public.responses",
        8 * text_bytes + frames,
        f"{text_bytes} bytes of text in at most {block.max_responses_per_round} answers over {steps} steps",
    )


def _metrics(block: MetricsEval) -> Capacity:
    places = len(block.topics) + 1
    # each figure of each topic is absent or one point of its grid; their order is fixed by a rule
    one = sum(
        places * math.log2(math.floor((field.max - field.min) / field.quantum + 1e-9) + 2)
        for field in block.fields.values()
    )
    return Capacity(
        "metrics.eval",
        block.per_round * one,
        f"{block.per_round} x {len(block.fields)} figures for {places} topics, each on its grid",
    )


def _steps(block: PublicResponses) -> int:
    return math.ceil(block.max_responses_per_round / max(1, block.max_responses_per_step))
