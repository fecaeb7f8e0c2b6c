"""What makes a well-formed policy one under which nothing leaves, and a screen of it one that never runs.

Only what follows from the file itself is said. What a federation's plans happen never to reach is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator

from policies.model import Policy, TextScreens
from policies.schema import LoraSchema

# What every run of every method says.
_SAID_IN_EVERY_RUN = ("hello", "poll", "fetch", "abstain")
_RATES = ("messages_per_minute", "control_messages_per_minute", "polls_per_minute")


def standstill_warnings(policy: Policy, schema: LoraSchema | None, now_seconds: float) -> list[str]:
    """Why a silo with this policy would send nothing, or end no run, though the policy is well formed.

    Args:
        policy: the one in force, with the charter where there is one.
        schema: of the adapter; None: sizes of updates are not looked at.
        now_seconds: UTC.
    """
    return list(_standstills(policy, schema, now_seconds))


def _standstills(policy: Policy, schema: LoraSchema | None, now_seconds: float) -> Iterator[str]:
    file, budgets = policy.file, policy.file.budgets
    if now_seconds >= policy.valid_until_seconds:
        yield f"{_at(policy, 'valid')}: valid until {file.valid.until}, which is over: everything is denied"
    elif now_seconds < policy.valid_from_seconds:
        yield f"{_at(policy, 'valid')}: valid from {file.valid.from_}, which is to come: everything is denied"
    if file.mode == "shadow":
        yield f"{_at(policy, 'mode')}: mode shadow: everything is decided and recorded, and nothing is sent"
    said = file.egress.control.kinds if file.egress.control else ()
    if missing := [kind for kind in _SAID_IN_EVERY_RUN if kind not in said]:
        place = ("egress", "control") if said else ("egress",)
        yield f"{_at(policy, *place)}: control messages {', '.join(missing)} do not leave: it takes part in nothing"
    for key in _RATES:
        if not getattr(budgets, key):
            yield f"{_at(policy, 'budgets', key)}: {key} is 0: none of these messages leaves"
    yield from _short_steps(policy)
    for kind, size in ((kind, schema.bytes_of(kind)) for kind in file.egress.updates) if schema is not None else ():
        for key in ("message_bytes", "round_bytes", "day_bytes"):
            if size > (limit := getattr(budgets, key)):
                yield f"{_at(policy, 'budgets', key)}: {kind} has {size:,} bytes, {key} is {limit:,}: none leaves"


def _short_steps(policy: Policy) -> Iterator[str]:
    """A step of the adapter (T20) that is shorter than a delta which a peer may send: honest rounds are refused.

    No mean of deltas is longer than the longest of them. How long that may be, the charter says, which binds every
    peer; a site's own limit binds its own deltas alone, and is all there is to compare with where there is no charter.
    """
    adapter, agreed = policy.file.ingress.global_adapter, policy.charter or policy
    updates = agreed.file.egress.updates.values()
    longest = max((block.max_l2 for block in updates), default=0.0)
    if adapter is not None and adapter.max_step_l2 < longest:
        who = f"the charter {agreed.source} lets" if policy.charter else "this policy lets"
        yield (
            f"{_at(policy, 'ingress', 'global.adapter', 'max_step_l2')}: max_step_l2 is {adapter.max_step_l2:g}, and "
            f"{who} deltas of {longest:g} leave (max_l2): the mean of honest deltas can be longer than this step, and "
            f"its adapter is then refused; allow at least {longest:g}"
        )


def unused_screen_warnings(policy: Policy) -> list[str]:
    """Screens that no kind names: whoever wrote them believes that texts are searched by them."""
    blocks = [
        getattr(side, name) for side in (policy.file.egress, policy.file.ingress) for name in type(side).model_fields
    ]
    named = {name for block in blocks for name in getattr(block, "screens", ())}
    return [
        f"{_at(policy, 'text_screens', name)}: text_screens.{name} never runs: no kind names it; put {name} "
        "into the key `screens` of a kind, or take the block out"
        for name in TextScreens.model_fields
        if getattr(policy.file.text_screens, name) is not None and name not in named
    ]


def _at(policy: Policy, *path: str) -> str:
    return f"{policy.source}:{policy.line_of(path)}"
