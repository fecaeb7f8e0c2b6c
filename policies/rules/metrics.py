"""Rules on metrics.eval: named numbers on a declared grid, so that no digits are free to carry anything (threat T9)."""

from __future__ import annotations

from decimal import Decimal

from policies.history import History
from policies.load import Policy
from policies.message import Facts
from policies.rules.base import Judgement, at_most, block_of, holds, none_of, not_applicable, rule

_KIND = "metrics.eval"


def on_grid(value: float, quantum: float) -> bool:
    """Whether value is exactly the double nearest to a whole multiple of the quantum as written in decimal."""
    multiple = round(value / quantum)
    return float(Decimal(multiple) * Decimal(repr(quantum))) == value


@rule("metric split", "METRIC_SPLIT", _KIND)
def split(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return holds(facts["split"] in block.splits, (*path, "splits"), measured=facts["split"], limit=list(block.splits))


@rule("metrics of the round's adapter", "ADAPTER_DIGEST", _KIND)
def adapter(facts: Facts, policy: Policy, history: History) -> Judgement:
    """The digest is the one that the round came to, so that its 64 digits carry nothing else (T9)."""
    _, path = block_of(facts, policy)
    return holds(facts["adapter_digest_expected"], path)


@rule("metric names and topics", "METRIC_NAME", _KIND)
def names(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Names from the policy, topics from policy and held-out file both, each pair once."""
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    topics = {"", *block.topics}
    pairs = [(name, topic) for name, topic, _, _ in facts["metrics"]]
    wrong = facts["metrics_at_fault"] + sum(name not in block.fields or topic not in topics for name, topic in pairs)
    return none_of(wrong + len(pairs) - len(set(pairs)), (*path, "fields"))


@rule("metrics in order", "METRIC_ORDER", _KIND)
def order(facts: Facts, policy: Policy, history: History) -> Judgement:
    """By topic, then name: the order of a list is none's to say something with (T9)."""
    _, path = block_of(facts, policy)
    return none_of(facts["metrics_out_of_order"], path)


@rule("metric range", "METRIC_RANGE", _KIND)
def ranges(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    wrong = 0
    for name, _, value, _ in facts["metrics"]:
        field = block.fields.get(name)
        wrong += field is None or not field.min <= value <= field.max
    return none_of(wrong, (*path, "fields"))


@rule("metric grid", "METRIC_GRID", _KIND)
def grid(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    wrong = 0
    for name, _, value, negative_zero in facts["metrics"]:
        field = block.fields.get(name)
        wrong += field is None or negative_zero is not False or not on_grid(value, field.quantum)
    return none_of(wrong, (*path, "fields"))


@rule("metric messages per round", "PER_ROUND", _KIND)
def per_round(facts: Facts, policy: Policy, history: History) -> Judgement:
    block, path = block_of(facts, policy)
    if block is None:
        return not_applicable()
    return at_most(history.messages_in_round + 1, block.per_round, (*path, "per_round"))


RULES = (split, adapter, names, order, ranges, grid, per_round)
