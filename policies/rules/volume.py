"""Budgets: bytes of a message, a round and a day, and messages a minute (threat T11).

Bytes are payload bytes. Round, day and minute budgets bind what silos send; what the coordinator sends a silo is an
answer to the silo's own request, so there only the size of a message is limited.
"""

from __future__ import annotations

from policies.history import History, bucket_of
from policies.load import Policy
from policies.message import Facts
from policies.rules.base import Judgement, at_most, not_applicable, rule, side_of


@rule("message bytes", "MESSAGE_BYTES")
def message_bytes(facts: Facts, policy: Policy, history: History) -> Judgement:
    key = "control_message_bytes" if facts["kind"].startswith("control.") else "message_bytes"
    return at_most(facts["payload_bytes"], getattr(policy.file.budgets, key), ("budgets", key))


@rule("round bytes", "ROUND_BYTES")
def round_bytes(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Bytes of one round of one run. Control messages and those of round 0 draw on the day's budget only."""
    if side_of(facts, policy) == "ingress" or facts["round"] == 0 or facts["kind"].startswith("control."):
        return not_applicable()
    total = history.round_bytes + facts["payload_bytes"]
    return at_most(total, policy.file.budgets.round_bytes, ("budgets", "round_bytes"))


@rule("day bytes", "DAY_BYTES")
def day_bytes(facts: Facts, policy: Policy, history: History) -> Judgement:
    if side_of(facts, policy) == "ingress":
        return not_applicable()
    total = history.day_bytes + facts["payload_bytes"]
    return at_most(total, policy.file.budgets.day_bytes, ("budgets", "day_bytes"))


_RATE_KEYS = {
    "poll": "polls_per_minute",
    "control": "control_messages_per_minute",
    "content": "messages_per_minute",
}


@rule("messages per minute", "MESSAGE_RATE")
def rate(facts: Facts, policy: Policy, history: History) -> Judgement:
    """Polls, other control messages and everything else have a bucket each."""
    if side_of(facts, policy) == "ingress":
        return not_applicable()
    key = _RATE_KEYS[bucket_of(facts["kind"])]
    return at_most(history.messages_in_minute + 1, getattr(policy.file.budgets, key), ("budgets", key))


RULES = (message_bytes, round_bytes, day_bytes, rate)
