"""How many bits an attacker who owns the trainer can get out in one round under a policy: arithmetic, no measurement.

Every value that the rules leave free counts in full, as if its owner chose it (residual N1). So each figure is an upper
bound: what the rules beyond these numbers forbid (an answer must be graded right, a delta must be short as a whole)
makes it smaller, never larger.
Not counted: when messages are sent, and what a guard that is not the attacker's fills in itself (envelopes, digests,
polls, progress).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from policies.capacity_kinds import kind_rows
from policies.grids import grid_points as grid_points
from policies.load import Policy
from policies.model import LoraFactors, MetricsEval, PublicResponses
from policies.schema import LoraSchema

_VALUE_BYTES = {"float32": 4, "bfloat16": 2}
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
    for kind, block in egress.updates.items():
        elements = schema.elements_of(kind) if schema else budgets.message_bytes // _VALUE_BYTES[block.quantise.grid]
        rows.append(_update(kind, block, elements))
    if egress.public_responses:
        rows.append(_responses(egress.public_responses))
    if egress.metrics_eval:
        rows.append(_metrics(egress.metrics_eval))
    rows += [Capacity(*row) for row in kind_rows(policy)]
    if egress.control and rows:
        steps = _steps(egress.public_responses) if egress.public_responses else 0
        # a step's answers may be offered or kept back, and a failure may be reported as one code of the list
        rows.append(
            Capacity("control.*", steps + math.log2(_ERROR_CODES_MAX), f"{steps} steps answered or not, one error code")
        )
    return rows


def _update(kind: str, block: LoraFactors, elements: int) -> Capacity:
    # an element is bound by the norm of its tensor; the norm of the whole narrows the vector, not each value
    limit = min(block.max_tensor_l2, block.max_l2)
    points = grid_points(limit, block.quantise.grid, block.randomise_low_bits)
    each = math.log2(points)
    random = f", lowest {block.randomise_low_bits} bits random" if block.randomise_low_bits else ""
    values = f"{elements} values of {each:.1f} bits ({block.quantise.grid}, at most {limit:g}{random})"
    return Capacity(kind, block.per_round * elements * each, f"{block.per_round} x {values}")


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
