"""What a yes to a held release leaves to the policy: which later rounds of its run leave without anybody being asked.

Counted as the rule counts: by the rounds that this site released, as if every later round released one. Nobody is
promised that there will be so many.
Does not stop: an approver who reads it and says yes all the same, and a policy that is changed after the yes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from policies.fields import Approvals
from policies.model import Policy, PolicyFile
from policies.rules import asked
from silo.guard.ledger import Release

Later = dict[str, Any]


def later_rounds(
    release: Release, policy: Policy | None, file: PolicyFile, *, released: int, plan: str
) -> Iterator[Later]:
    """For each kind that the yes is about: {kind, asked, unasked, file, line, says}.

    Args:
        release: held. Of a plan it is every kind that the policy asks people about, or never asks.
        policy: in force, with the lines of its file; None beside a daemon, where only the release's own line is known.
        file: the same policy.
        released: other rounds of the run in which a message of this kind was allowed.
        plan: canonical, of the run; empty where it is not known, and then no round is named: `asked` and `unasked` are
            None.
    """
    if release.kind == "run.plan":
        for name, field in type(file.egress).model_fields.items():
            block = getattr(getattr(file.egress, name), "approvals", None)
            kind = field.alias or name
            if isinstance(block, Approvals):
                place = (policy.source, policy.line_of(("egress", kind, "approvals"))) if policy else ("", 0)
                yield _told(kind, block, place, None)
        return
    block = getattr(getattr(file.egress, release.kind.replace(".", "_"), None), "approvals", None)
    if isinstance(block, Approvals):
        rule = next((one for one in release.rules if one["rule"] == "approvals"), {})
        place = rule.get("file", ""), rule.get("line", 0)
        rounds = json.loads(plan).get("rounds") if plan else None
        later = range(release.round + 1, rounds + 1) if isinstance(rounds, int) else None
        # this release is the (released + 1)-th, so the round after it brings the (released + 2)-th
        named = None if later is None else {each: released + 2 + index for index, each in enumerate(later)}
        yield _told(release.kind, block, place, named)


def _told(kind: str, block: Approvals, place: tuple[Any, Any], rounds: Mapping[int, int] | None) -> Later:
    """rounds: ordinal of each later round's release, by the round's number; None where they are not known."""
    known = rounds is not None
    unasked = [number for number, ordinal in (rounds or {}).items() if not asked(block, ordinal)]
    again = [number for number, ordinal in (rounds or {}).items() if asked(block, ordinal)]
    where = f" ({Path(str(place[0])).name}:{place[1]})" if place[0] else ""
    if not known:
        says = f"{kind} {_rhythm(block)}{where}"
    elif not unasked:
        says = f"{kind} of {_numbers(again)} is asked again{where}" if again else "this is the run's last round"
    else:
        then = f"; {_numbers(again)} is asked again" if again else ""
        says = f"{kind} of {_numbers(unasked)} LEAVES UNASKED{where}{then}"
    return {
        "kind": kind, "asked": again if known else None, "unasked": unasked if known else None,
        "file": str(place[0]), "line": place[1], "says": says,
    }  # fmt: skip


def _rhythm(block: Approvals) -> str:
    """Of a run whose rounds are not known: what the policy asks for, in words."""
    first, then = block.first_rounds, block.then
    if then == 1:
        return "is asked in each round"
    regular = f"in every {then}th one" if then else ""
    if not first:
        return f"is asked {regular} and LEAVES UNASKED in all others" if then else "LEAVES UNASKED in each round"
    early = "in the first round" if first == 1 else f"in the first {first} rounds"
    return f"is asked {early}{f' and {regular}' if regular else ''}, and LEAVES UNASKED in all others"


def _numbers(rounds: Sequence[int]) -> str:
    """Such as "rounds 2 to 4, 6"."""
    spans: list[list[int]] = []
    for number in rounds:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans[:8])
    more = f" and {sum(high - low + 1 for low, high in spans[8:])} more" if len(spans) > 8 else ""
    return f"round{'s' if len(rounds) > 1 else ''} {shown}{more}"
