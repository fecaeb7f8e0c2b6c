"""How many bits an attacker who owns the trainer can get out in one round under a policy: arithmetic, no measurement.

Every value that the rules leave free counts in full, as if its owner chose it (residual N1). So each figure is an upper
bound: what the rules beyond these numbers forbid (an answer must be graded right, a delta must be short as a whole)
makes it smaller, never larger.

Beside it stands what a planted scheme for smuggling bits out gets through, run here on values made from a fixed seed
and counted: low bits of an update (T5), figures on their grid (T9), and how often a step's progress is said (T11).
That is a lower bound; somebody may know a better scheme. The same ones go through the real guard in
tests/policies/test_capacity_planted.py.

Not counted: when messages are sent, and so how many polls and heartbeats fit between two others; and what a guard that
is not the attacker's fills in itself (envelopes, digests, the round and step that progress names).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np

from fedsilo.protocol.plan import Plan
from policies.capacity_kinds import kind_rows, points_of
from policies.grids import grid_points
from policies.load import Policy
from policies.model import MANTISSA_BITS, LoraFactors, MetricsEval, PublicResponses
from policies.render import worst_case
from policies.rules.metrics import on_grid
from policies.schema import LoraSchema
from policies.transform import transform_factors

NOT_COUNTED = "not counted in these bits: when messages are sent"
_VALUE_BYTES = {"float32": 4, "bfloat16": 2}
_ERROR_CODES_MAX = 32  # of control.error: a closed list that is shorter
_LOG_SIZE_BITS = 32  # a checkpoint shows how many records the site's log has; a round makes fewer than 2 to the 32
_EXACT_TASKS_MAX = 4096  # beyond these the binomial coefficient is bounded, not computed

Planted = tuple[float, str]  # bits in one round, the scheme

ROUND_SECONDS = float(Plan.model_fields["round_deadline_seconds"].default)  # of a plan that does not say it
PROGRESS_SECONDS = 10.0  # the guard says progress at every multiple of this, by its own clock
GUARD_MESSAGES_PER_MINUTE = 20  # control messages that the guard says itself while a trainer works, generously
_SAMPLE = 4096  # values of an update; a bit of a random payload that survives in all of them is no accident
_SIGN_BIT, _MANTISSA_WIRE_BITS = 31, 23
_LEAST_EXPONENT = -126  # of a normal float32


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


# ---- planted schemes ----------------------------------------------------------------------------------


def low_bits(block: LoraFactors, elements: int) -> Planted:
    """Sign and mantissa of every value hold the payload; its exponent is one that no clipping changes (T5).

    Args:
        block: the policy's, of the update.
        elements: values of one update.
    """
    pattern, exponent = _payload(block, elements)
    values = pattern.view(np.float32)
    norm = float(np.linalg.norm(values.astype(np.float64))) * math.sqrt(max(elements, 1) / _SAMPLE)
    fit, _ = transform_factors(norm, block, np.random.default_rng(1).bytes)
    left = fit(values).view(np.uint32)
    places = [place for place in (*range(_MANTISSA_WIRE_BITS), _SIGN_BIT) if _same(pattern, left, place)]
    written = [place for place in places if exponent is not None and np.any((pattern >> place) & 1)]
    bits = block.per_round * elements * len(written)
    return bits, f"T5: the payload in {len(written)} bits of each value, read back from what was transformed"


def _payload(block: LoraFactors, elements: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint32]], int | None]:
    """Patterns of values on the block's grid that are short enough as a whole, and their exponent (None: none is)."""
    limit = min(block.clip_l2, block.max_l2, block.max_tensor_l2)
    # a value is below 2 to the exponent plus 1, and random low bits shorten the limit by less than half
    most = limit / (4 * math.sqrt(max(elements, 1)))
    exponent = math.floor(math.log2(most)) if most > 0 else _LEAST_EXPONENT - 1
    if exponent < _LEAST_EXPONENT:
        return np.zeros(_SAMPLE, np.uint32), None
    draws = np.random.default_rng(0).integers(0, 1 << 32, _SAMPLE, dtype=np.uint32)
    dropped = _MANTISSA_WIRE_BITS - MANTISSA_BITS[block.quantise.grid]
    free = np.uint32((1 << _SIGN_BIT) | (((1 << _MANTISSA_WIRE_BITS) - 1) & ~((1 << dropped) - 1)))
    return (draws & free) | np.uint32((min(exponent, 0) + 127) << _MANTISSA_WIRE_BITS), exponent


def _same(
    sent: np.ndarray[tuple[int], np.dtype[np.uint32]], got: np.ndarray[tuple[int], np.dtype[np.uint32]], place: int
) -> bool:
    return not bool(np.any(((sent ^ got) >> place) & 1))


def figures(block: MetricsEval) -> Planted:
    """Each figure of each topic is the multiple of its quantum that says the next bits of the payload (T9)."""
    draws, carried = np.random.default_rng(0), 0
    for field in (field for _ in range(len(block.topics) + 1) for field in block.fields.values()):
        width = points_of(field).bit_length() - 1
        if width <= 0:
            continue
        step = Decimal(repr(field.quantum))
        word = int.from_bytes(draws.bytes(width // 8 + 1), "big") % (1 << width)
        first = math.ceil(Decimal(repr(field.min)) / step)
        value = float((first + word) * step)
        if not math.isfinite(value / field.quantum):
            continue  # a grid that is finer than numbers are
        passes = field.min <= value <= field.max and on_grid(value, field.quantum)
        carried += width * (passes and round(value / field.quantum) - first == word)
    places = len(block.fields) * (len(block.topics) + 1)
    # One message is run and counted for all: no rule tells them apart, and a policy may allow 2 to the 53 of them.
    told = f"T9: the payload in {places} figures of each message, as multiples of their quanta"
    return block.per_round * carried, told


def progress(policy: Policy) -> Planted:
    """How many of the guard's fixed moments for progress each step takes, which the receiver counts (T11)."""
    plan = policy.file.ingress.run_plan
    steps = plan.local_steps[1] if plan else 0
    most = progress_messages(policy, steps)
    bits = steps * math.log2(most + 1)
    return (
        bits,
        f"T11: 0 to {most} messages on the progress of each of {steps} steps, which the trainer draws out, counted",
    )


def progress_messages(policy: Policy, steps: int) -> int:
    """On one step, at most, so that those of all steps fit the round and the guard's own messages keep their room."""
    control = policy.file.egress.control
    if not steps or control is None or "progress" not in control.kinds:
        return 0
    spare = policy.file.budgets.control_messages_per_minute - GUARD_MESSAGES_PER_MINUTE
    per_minute = min(60 / PROGRESS_SECONDS, max(0, spare))
    return int(per_minute * (ROUND_SECONDS / 60) // steps)
