"""A release in the words of somebody who does not know what a tensor is: what it is made of, who can read it, and what
of its figures is unusual beside the site's own earlier ones.

Does not show: what is in it. A figure that is usual says nothing of what a model has learnt by heart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedsilo.protocol.services import TENSOR_KINDS
from silo.guard.release_findings import COUNTED

EARLIER_MAX = 8  # releases of a kind that a figure is set beside
_READS = "the coordinator can read {}"
_NO_USUAL = frozenset({"approvals", "messages per minute", "screen hits", *COUNTED})  # they grow with what was sent


def says(kind: str, facts: Mapping[str, Any], private_records: int) -> str:
    """What leaves, and who can read it, in one sentence.

    Args:
        kind: of the message.
        facts: that the gate measured.
        private_records: that the trainer has in all; 0 where nobody kept that.
    """
    if kind == "run.plan":
        return "with a yes nothing leaves yet: this silo takes part in the run, and is asked again as its policy says"
    if kind in TENSOR_KINDS:
        made_of = f"changes to the model{_trained_on(facts, private_records)}"
        return f"{made_of}; {_READS.format('them')} and tell your main topics"  # N7; `silo report case-mix` measures it
    if "responses" in facts:
        answers = _many(facts["responses"], "answer")
        what = f"{answers} that this silo's model wrote to {_many(facts.get('prompts'), 'public prompt')}"
        return f"{what}; the coordinator and the other silos can read them"
    if "metrics" in facts:
        return f"{_many(len(facts['metrics']), 'figure')} measured here; {_READS.format('them')}"
    return f"one message; {_READS.format('it')}"


def _trained_on(facts: Mapping[str, Any], private_records: int) -> str:
    records, steps, epochs = facts.get("records"), facts.get("steps"), facts.get("epochs") or 0
    if not isinstance(records, int):
        return ""
    of = f"{records} of your {private_records}" if private_records else f"{records} of your"
    used = f", some used {epochs} times" if epochs > 1 else ""
    return f", trained on {of} private records in {_many(steps, 'step')}{used}"


def _many(number: Any, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def party_of(spiffe_id: str) -> str:
    """Who an id is, in words: `coordinator main of cardio-net`; the id itself where it is no such id."""
    scheme, _, rest = spiffe_id.partition("://")
    federation, _, place = rest.partition("/")
    role, _, name = place.partition("/")
    return f"{role} {name} of {federation}" if scheme == "spiffe" and name else spiffe_id


def with_usual(rules: Iterable[Mapping[str, Any]], earlier: Sequence[Sequence[Mapping[str, Any]]]) -> list[Any]:
    """Rules, those that measure a size with `usual`: {least, most, releases} of the same rule over earlier releases.

    Args:
        rules: as judged.
        earlier: of each earlier release of the kind that left, its rules.
    """
    told: list[Any] = []
    for rule in rules:
        name = rule["rule"]
        found = [each["measured"] for one in earlier for each in one if each["rule"] == name and _is_size(each)]
        usual = {"least": min(found), "most": max(found), "releases": len(found)} if found else None
        told.append({**rule, "usual": usual} if _is_size(rule) else rule)
    return told


def _is_size(rule: Mapping[str, Any]) -> bool:
    pair = rule.get("measured"), rule.get("limit")
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in pair)
    return numbers and rule["rule"] not in _NO_USUAL and pair[1] != 0
