"""Codes in words for a person: of a policy rule what it asks, what was measured, and the limit with the way it binds;
a reason for a no; a trainer's isolation.

A rule's own name stays in the log, the policy's messages and every command's JSON; here stands what it means. One that
is not named here is shown with its name, its measured value and its limit as the daemon gave them. Pure.

Does not show: why a rule exists, nor its line in the policy; `silo approvals show` and `silo policy show` do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fedsilo.views.state import Rule

# What each of the rules asks whose own name says it to nobody who did not write it.
_NAMES: Mapping[str, str] = {
    "measured": "the message could be measured whole",
    "kind": "kind that the policy names",
    "fields": "fields with something that they may not hold",
    "sender": "sender",
    "valid": "day, of the days that the policy is in force",
    "run": "belongs to the run that is open",
    "kind of the method": "kind that the run's method sends",
    "round": "place in the run",
    "schema": "adapter schema",
    "tensor set": "tensors missing, added or repeated",
    "tensor shapes": "tensors of another shape",
    "tensor dtype": "type of the numbers",
    "rank and scale": "rank",
    "finite values": "values that are no number",
    "canonical values": "values written in another way than the usual one",
    "base adapter": "made on top of the adapter that the round began with",
    "records of the round": "private records behind it",
    "local epochs of the round": "times that each record was used",
    "steps of the round": "training steps behind it",
    "approvals": "people's approvals",
    "plan peers": "peers in the run",
    "plan asks for enough updates": "updates that the plan asks for in each mean",
    "plan gives enough records": "private records that each update will have behind it",
}  # fmt: skip
_BRIEF: Mapping[str, str] = {
    "measured": "measured whole", "fields": "fields as allowed", "valid": "policy in force", "run": "run is open",
    "round": "place in the run",
}  # fmt: skip
# A limit that binds from below; but such a rule with limit 0 counts what must not be there at all.
_LEAST = frozenset({
    "records of the round", "approvals", "plan peers", "plan asks for enough updates", "plan gives enough records",
    "records behind the profile", "witnesses", "screen hits",
})  # fmt: skip
# Why a person said no, by the code that is written down; the silo refuses any other.
REJECT_CODES: Mapping[str, str] = {
    "CONTENT": "what is in it", "TIMING": "not at this time", "POLICY": "a rule of this site", "UNEXPECTED":
    "nobody announced it", "OTHER": "see the note",
}  # fmt: skip
_ROUND_STEP = re.compile(r"(?:round\.step )?(\d+)\.(\d+)")
_NUMBER = re.compile(r"[\d.,]+(?:[eE][+-]?\d+)?[kKMGT]?(?: (?:[KMG]i)?B)?")
_YES, _NO = "yes", "no"


def reason_text(code: str) -> str:
    """A reason code with its words; one that is not known here stays as it is."""
    return f"{code} ({REJECT_CODES[code]})" if code in REJECT_CODES else code


def isolation_text(level: str) -> str:
    """Return a trainer's isolation level; what its waiving means is said with it."""
    waived = "waived: nothing keeps its trainer from its machine's files and network"
    return waived if level == "waived" else level or "-"


def binds_from_below(name: str, limit: str) -> bool:
    """Return True if a rule's limit, as text, is the least that it allows."""
    return name in _LEAST and limit not in ("", "0")


def _is_about_people(rule: Rule) -> bool:
    """Return True for a rule that counts approvals: with `on_hit: hold` it counts who approved, not hits."""
    return rule.rule == "screen hits" and binds_from_below(rule.rule, rule.limit)


def name_of(rule: Rule) -> str:
    if _is_about_people(rule):
        return "people's approvals of answers that a screen hit"  # how many were hit, the rule's facts say
    return _NAMES.get(rule.rule, rule.rule)


def says(rule: Rule) -> str:
    """Return one rule whole, without its outcome."""
    told = _told(rule) + (f"; {rule.usual}" if rule.usual else "")
    return f"{name_of(rule)}: {told}" if told else name_of(rule)


def short(rule: Rule) -> tuple[str, str]:
    """Return a brief name for a list of many passed rules and, where there is something to compare, the measured value
    beside that of earlier releases, or beside a limit that it comes near."""
    name = _BRIEF.get(rule.rule, rule.rule)
    if rule.usual:
        return name, f"{rule.measured}, was {rule.usual.partition(' in ')[0]}"
    return name, "" if rule.measured == rule.limit or not rule.limit or not rule.is_near else _told(rule)


def _told(rule: Rule) -> str:
    measured, limit = rule.measured, rule.limit
    if rule.rule == "round" and (here := _place(measured)) and (there := _place(limit)):
        return f"{here}; open is {there}"
    if rule.rule == "plan peers" and limit == "0":
        return f"{measured or '-'} of its silos are no peers of this site; none is allowed"
    if rule.rule == "approvals" or _is_about_people(rule):
        return f"{measured or '0'} given, {limit or '-'} needed"
    if binds_from_below(rule.rule, limit):
        return f"{measured or '-'}, at least {limit}"
    if limit == _YES and measured in (_YES, _NO):
        return measured
    if not limit:
        return measured
    if limit == "0" and _NUMBER.fullmatch(measured):
        return "none" if measured == "0" else f"{measured}, none is allowed"
    if measured == limit:
        return measured
    if _NUMBER.fullmatch(measured) and _NUMBER.fullmatch(limit):
        return f"{measured} of at most {limit}"
    return f"{measured or '-'}; allowed: {limit}"


def _place(text: str) -> str:
    """`1.20` as round 1, step 20; a message of a whole round has step 0."""
    found = _ROUND_STEP.fullmatch(text)
    if found is None:
        return ""
    return f"round {found[1]}" + (f", step {found[2]}" if found[2] != "0" else "")
