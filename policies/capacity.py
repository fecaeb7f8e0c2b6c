"""How many bits an attacker who owns the trainer can get out in one round under a policy: arithmetic, no measurement.

Every value that the rules leave free counts in full, as if its owner chose it (residual N1). So each figure is an upper
bound: what the rules beyond these numbers forbid (an answer must be graded right, a delta must be short as a whole)
makes it smaller, never larger. Beside it stands what a planted scheme carried through (policies/planted.py), where one
was run for the kind.
Not counted: when messages are sent, and so how many polls and heartbeats fit between two others; and what a guard that
is not the attacker's fills in itself (envelopes, digests, the round and step that progress names).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from policies.capacity_kinds import kind_rows, points_of
from policies.grids import grid_points as grid_points
from policies.load import Policy
from policies.model import LoraFactors, MetricsEval, PublicResponses
from policies.planted import PROGRESS_SECONDS, ROUND_SECONDS, Planted, figures, low_bits, progress
from policies.render import worst_case
from policies.schema import LoraSchema

NOT_COUNTED = "not counted in these bits: when messages are sent"
_VALUE_BYTES = {"float32": 4, "bfloat16": 2}
_ERROR_CODES_MAX = 32  # of control.error: a closed list that is shorter
_LOG_SIZE_BITS = 32  # a checkpoint shows how many records the site's log has; a round makes fewer than 2 to the 32
_EXACT_TASKS_MAX = 4096  # beyond these the binomial coefficient is bounded, not computed


@dataclass(frozen=True)
class Capacity:
    """Attributes:
    kind: of the messages.
    bits: at most, in one round.
    because: the numbers it is made of.
    planted_bits: what a planted scheme got through in one round; None where none was run for the kind.
    planted: that scheme.
    """

    kind: str
    bits: float
    because: str
    planted_bits: float | None = None
    planted: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "bits": round(self.bits, 1),
            "because": self.because,
            "planted_bits": None if self.planted_bits is None else round(self.planted_bits, 1),
            "planted": self.planted,
        }


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
        rows.append(_update(kind, block, elements, low_bits(block, elements)))
    if egress.public_responses:
        rows.append(_responses(egress.public_responses))
    if egress.metrics_eval:
        rows.append(_metrics(egress.metrics_eval, figures(egress.metrics_eval)))
    rows += [Capacity(*row) for row in kind_rows(policy)]
    if egress.control and rows:
        rows.append(_control(policy, sum(row["messages"] for row in worst_case(policy, schema))))
    return rows


def capacity_lines(rows: list[dict[str, Any]]) -> list[str]:
    """For people, of `Capacity.to_json` rows: N1 in numbers, and what a planted scheme made of it."""
    lines = []
    for row in rows:
        lines.append(f"a hostile trainer, at most per round: {row['kind']}: {row['bits']:,.0f} bits, {row['because']}")
        if row["planted_bits"] is not None:
            lines.append(f"  a planted scheme got out {row['planted_bits']:,.0f} bits of these ({row['planted']})")
    return [*lines, NOT_COUNTED] if rows else []


def _control(policy: Policy, offers: int) -> Capacity:
    """What a trainer says by what it makes its guard say. `offers`: messages of other kinds in one round, at most."""
    control, plan = policy.file.egress.control, policy.file.ingress.run_plan
    kinds = frozenset(control.kinds if control else ())
    # loading, evaluating (base and result) and exporting, and in a step generating and training
    tasks = 2 * (plan.local_steps[1] if plan else 0) + 4
    # what is offered leaves, is declined, or waits for people and is abstained from; or nothing is offered
    outcomes = 2 + ("declined" in kinds) + ("abstain" in kinds)
    bits = offers * math.log2(outcomes)
    # whether and at which task the trainer fails ends what it says in the round
    bits += math.log2(tasks + 1)
    parts = [f"offers: {offers} with {outcomes} outcomes each", f"an end at one of {tasks} tasks"]
    if "error" in kinds:
        bits += math.log2(_ERROR_CODES_MAX)
        parts.append("one error code")
    if "progress" in kinds:
        # a bucket of a minute begins and ends inside the round, and so does the guard's schedule
        budget = policy.file.budgets.control_messages_per_minute * (math.floor(ROUND_SECONDS / 60) + 1)
        said = min(budget, math.floor(ROUND_SECONDS / PROGRESS_SECONDS) + 1)
        bits += _log2_shares(said, tasks)
        parts.append(f"{said:,} moments at which progress is said, shared between the tasks")
    if "checkpoint" in kinds:
        bits += _LOG_SIZE_BITS
        parts.append(f"the size of the log, {_LOG_SIZE_BITS} bits")
    because = f"{', '.join(parts)}; for a round of {ROUND_SECONDS:g} s, a longer one has more"
    return Capacity("control.*", bits, because, *progress(policy))


def _log2_shares(most: int, places: int) -> float:
    """Bits in how up to `most` equal things fall on places: the binomial coefficient of their sum over `places`."""
    if places <= _EXACT_TASKS_MAX or most <= _EXACT_TASKS_MAX:
        return math.log2(math.comb(most + places, min(most, places)))
    # it is at most 2 to the entropy of their ratio times their sum
    both = most + places
    return most * math.log2(both / most) + places * math.log2(both / places)


def _update(kind: str, block: LoraFactors, elements: int, planted: Planted) -> Capacity:
    # an element is bound by the norm of its tensor; the norm of the whole narrows the vector, not each value
    limit = min(block.max_tensor_l2, block.max_l2)
    points = grid_points(limit, block.quantise.grid, block.randomise_low_bits)
    each = math.log2(points)
    random = f", lowest {block.randomise_low_bits} bits random" if block.randomise_low_bits else ""
    values = f"{elements} values of {each:.1f} bits ({block.quantise.grid}, at most {limit:g}{random})"
    return Capacity(kind, block.per_round * elements * each, f"{block.per_round} x {values}", *planted)


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


def _metrics(block: MetricsEval, planted: Planted) -> Capacity:
    places = len(block.topics) + 1
    # each figure of each topic is absent or one point of its grid; their order is fixed by a rule
    one = sum(places * math.log2(points_of(field) + 1) for field in block.fields.values())
    return Capacity(
        "metrics.eval",
        block.per_round * one,
        f"{block.per_round} x {len(block.fields)} figures for {places} topics, each on its grid",
        *planted,
    )


def _steps(block: PublicResponses) -> int:
    return math.ceil(block.max_responses_per_round / max(1, block.max_responses_per_step))
