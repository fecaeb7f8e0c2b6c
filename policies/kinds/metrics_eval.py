"""`metrics.eval`: named numbers on a declared grid, so that no digits are free to carry anything (threat T9).

Figures are of the base model (round 0), of the adapter that a round came to, or, under a method whose silos evaluate
their own state, of what this silo has trained. The last name no adapter: a digest of it would be 64 digits that the
trainer, which makes what is hashed, can steer.

What the rules do not stop: figures of something else than they say they are of, which nobody outside can measure again;
information in the choice of the grid's points (N1).
"""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from typing import Annotated, Any, Literal

import numpy as np

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.strict_yaml import Path
from policies import kind as k
from policies import lattice
from policies.fields import Closed, Limit, MetricField, Text
from policies.grids import Bits, lowest, on_grid, points_of
from policies.message import Context, Facts, Message

_F = k.FieldClass
_METRICS_MAX = 256


FIELDS: k.FieldTable = {
    "Metric": {"name": _F.NAME, "topic": _F.TOPIC, "value": _F.NUMBER},
    "MetricsEval": {"split": frozenset({"held_out"}), "adapter_digest": _F.DIGEST},
}


class MetricsEval(Closed):
    splits: Annotated[tuple[Literal["held_out"], ...], lattice.INTERSECTION]
    fields: dict[str, MetricField]
    topics: Annotated[tuple[Text, ...], lattice.INTERSECTION]
    per_round: Limit


def measure(body: pb.MetricsEval, message: Message, context: Context) -> Facts:
    metrics: list[list[Any]] = []
    at_fault = 0
    for metric in body.metrics:
        known_topic = metric.topic == "" or metric.topic in context.topics
        if k.is_name(metric.name) and known_topic and math.isfinite(metric.value) and len(metrics) < _METRICS_MAX:
            # -0.0 equals 0.0 but is another bit pattern, so it is told apart here (T9).
            negative_zero = metric.value == 0 and math.copysign(1.0, metric.value) < 0
            metrics.append([metric.name, metric.topic, metric.value, negative_zero])
        else:
            at_fault += 1
    # Neither the base model (round 0) nor a silo's own state is named by a digest. For other methods a round that came
    # to no adapter has nothing to evaluate.
    number, method = message.place.round, METHODS.get(context.plan.method) if context.plan else None
    unnamed = number == 0 or (method is not None and method.evaluates_own)
    named = number > 0 and context.evaluated_digest != ""
    return {
        "split": body.split if body.split == "held_out" else "",
        "adapter_digest_expected": (unnamed and body.adapter_digest == "")
        or (named and body.adapter_digest == context.evaluated_digest),
        "metrics": metrics,
        "metrics_at_fault": at_fault,
        "metrics_out_of_order": sum(
            (one.topic, one.name) >= (two.topic, two.name) for one, two in itertools.pairwise(body.metrics)
        ),
    }


@k.block_rule("metric split", "METRIC_SPLIT")
def split(facts: Facts, block: MetricsEval, path: Path) -> k.Judgement:
    return k.holds(facts["split"] in block.splits, (*path, "splits"), measured=facts["split"], limit=list(block.splits))


@k.facts_rule("metrics of the round's adapter", "ADAPTER_DIGEST")
def adapter(facts: Facts, path: Path) -> k.Judgement:
    """The digest is the one that the round came to, or none, so that its 64 digits carry nothing else (T9)."""
    return k.holds(facts["adapter_digest_expected"], path)


@k.block_rule("metric names and topics", "METRIC_NAME")
def names(facts: Facts, block: MetricsEval, path: Path) -> k.Judgement:
    """Names from the policy, topics from policy and held-out file both, each pair once."""
    topics = {"", *block.topics}
    pairs = [(name, topic) for name, topic, _, _ in facts["metrics"]]
    wrong = facts["metrics_at_fault"] + sum(name not in block.fields or topic not in topics for name, topic in pairs)
    return k.none_of(wrong + len(pairs) - len(set(pairs)), (*path, "fields"))


ORDER = k.zero_rule(
    "metrics in order",
    "METRIC_ORDER",
    "metrics_out_of_order",
    why="By topic, then name, so that the order says nothing (T9).",
)


@k.block_rule("metric range", "METRIC_RANGE")
def ranges(facts: Facts, block: MetricsEval, path: Path) -> k.Judgement:
    wrong = 0
    for name, _, value, _ in facts["metrics"]:
        field = block.fields.get(name)
        wrong += field is None or not field.min <= value <= field.max
    return k.none_of(wrong, (*path, "fields"))


@k.block_rule("metric grid", "METRIC_GRID")
def grid(facts: Facts, block: MetricsEval, path: Path) -> k.Judgement:
    wrong = 0
    for name, _, value, negative_zero in facts["metrics"]:
        field = block.fields.get(name)
        wrong += field is None or negative_zero is not False or not on_grid(value, field.quantum)
    return k.none_of(wrong, (*path, "fields"))


PER_ROUND = k.limit_rule("metric messages per round", "PER_ROUND", "per_round", k.next_of_round)


def largest(block: MetricsEval, at: k.Figures) -> tuple[int, int]:
    numbers = len(block.fields) * (len(block.topics) + 1)
    return block.per_round, block.per_round * (64 + 160 * numbers)


def bits(block: MetricsEval, at: k.Figures) -> Bits:
    places = len(block.topics) + 1
    # each figure of each topic is absent or one point of its grid; their order is fixed by a rule
    one = sum(places * math.log2(points_of(field) + 1) for field in block.fields.values())
    because = f"{block.per_round} x {len(block.fields)} figures for {places} topics, each on its grid"
    return Bits(block.per_round * one, because, *figures(block))


def figures(block: MetricsEval) -> tuple[float, str]:
    """Return figures that carry a payload: each figure of each topic is the multiple of its quantum that says the next
    bits of the payload (T9)."""
    draws, bits = np.random.default_rng(0), 0
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
        bits += width * (passes and round(value / field.quantum) - first == word)
    places = len(block.fields) * (len(block.topics) + 1)
    # One message is run and counted for all: no rule tells them apart, and a policy may allow 2 to the 53 of them.
    channel = f"T9: the payload in {places} figures of each message, as multiples of their quanta"
    return block.per_round * bits, channel


def example(at: k.Around) -> k.Example:
    metrics = [pb.Metric(name=name, value=lowest(grid)) for name, grid in sorted(at.block.fields.items())]
    return k.Example(pb.MetricsEval(split=at.block.splits[0], adapter_digest=k.BASE_DIGEST, metrics=metrics))


KINDS = (
    k.PolicyKind(
        "metrics.eval",
        example,
        sent=MetricsEval,
        measure=measure,
        rules=(split, adapter, names, ORDER, ranges, grid, PER_ROUND),
        largest=largest,
        bits=bits,
    ),
)
