"""What schemes for smuggling bits out get through a policy: each is run on values made from a fixed seed, and counted.

Three of them: low bits of an update (T5), figures on their grid (T9), and how often a step's progress is said (T11).
They are lower bounds beside the upper ones of policies/capacity.py: somebody may know a better scheme, and none goes
above those. The same schemes go through the real guard in tests/policies/test_capacity_planted.py. Timing is not among
them: when a message is sent carries more, and is not counted.
"""

from __future__ import annotations

import math
from decimal import Decimal

import numpy as np

from fedsilo.treaty.plan import Plan
from policies.capacity_kinds import points_of
from policies.load import Policy
from policies.model import MANTISSA_BITS, LoraFactors, MetricsEval
from policies.rules.metrics import on_grid
from policies.transform import transform_factors

Planted = tuple[float, str]  # bits in one round, the scheme

ROUND_SECONDS = float(Plan.model_fields["round_deadline_seconds"].default)  # of a plan that does not say it
PROGRESS_SECONDS = 10.0  # the guard says progress at every multiple of this, by its own clock
GUARD_MESSAGES_PER_MINUTE = 20  # control messages that the guard says itself while a trainer works, generously
_SAMPLE = 4096  # values of an update; a bit of a random payload that survives in all of them is no accident
_SIGN_BIT, _MANTISSA_WIRE_BITS = 31, 23
_LEAST_EXPONENT = -126  # of a normal float32


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
