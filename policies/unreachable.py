"""What of a policy can never decide anything: a reader takes it for a limit, and another one always comes first. And
what makes a well-formed policy one under which nothing leaves.

Only what follows from the file itself is said. What a federation's plans happen never to reach is not looked at, and
neither are limits whose order depends on the values of a message.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from policies.load import Policy
from policies.model_screens import TextScreens
from policies.schema import LoraSchema

# In one kind's block: the first is of a part, the second of the whole, so a first above the second never binds.
PARTS = (
    ("max_bytes_per_response", "max_bytes_per_step"),
    ("max_bytes_per_step", "max_bytes_per_round"),
    ("max_bytes_per_round", "max_bytes_per_day"),
    ("max_tokens_per_step", "max_tokens_per_round"),
    ("max_responses_per_step", "max_responses_per_round"),
    ("max_bytes_per_answer", "max_bytes_per_step"),
    ("max_bytes_per_answer", "max_bytes"),
    ("max_per_step", "max_per_day"),
    ("max_tensor_l2", "max_l2"),
)
# In the block of a kind that leaves: what bounds it in `budgets` besides.
BUDGETED = (
    ("max_bytes_per_step", "message_bytes"),
    ("max_bytes", "message_bytes"),
    ("max_bytes_per_round", "round_bytes"),
)
_SIDES = ("egress", "ingress")
_SECTION = re.compile(r"^(egress|ingress):\n((?:(?:[ #].*)?\n)*)", re.MULTILINE)
_KIND = re.compile(r"^  ([a-z_]+(?:\.[a-z_]+)?):", re.MULTILINE)


def unreachable_warnings(policy: Policy, ruleset: str | None = None) -> list[str]:
    """Blocks and limits that can never bind, each with file, line and reason.

    Args:
        policy: the one to look at.
        ruleset: text of the shipped ruleset whose name it bears; None: it bears none.
    """
    return [*_unused_screens(policy), *_kinds_beyond(policy.own, ruleset), *_looser_than_others(policy)]


def _blocks(policy: Policy) -> Iterator[tuple[str, str, Any]]:
    """(side, kind, its block) for each that is there."""
    for side in _SIDES:
        blocks = getattr(policy.file, side)
        for name, field in type(blocks).model_fields.items():
            if (block := getattr(blocks, name)) is not None:
                yield side, field.alias or name, block


def _at(policy: Policy, *path: str) -> str:
    return f"{policy.source}:{policy.line_of(path)}"


def _unused_screens(policy: Policy) -> Iterator[str]:
    named = {name for _, _, block in _blocks(policy) for name in getattr(block, "screens", ())}
    for name in TextScreens.model_fields:
        if getattr(policy.file.text_screens, name) is not None and name not in named:
            yield (
                f"{_at(policy, 'text_screens', name)}: text_screens.{name} never runs: no kind names it; put {name} "
                "into the key `screens` of a kind, or take the block out"
            )


def _kinds_beyond(policy: Policy, ruleset: str | None) -> Iterator[str]:
    if ruleset is None:
        return
    kinds = {(found[1], kind) for found in _SECTION.finditer(ruleset) for kind in _KIND.findall(found[2])}
    for side, kind, _ in _blocks(policy):
        if (side, kind) not in kinds:
            used = "sends it" if side == "egress" else "takes it in"
            yield (
                f"{_at(policy, side, kind)}: {side}.{kind} is never used: no method of the ruleset "
                f"{policy.file.name} {used}; take the block out, or give the policy another name"
            )


def _looser_than_others(policy: Policy) -> Iterator[str]:
    budgets, plan = policy.file.budgets, policy.file.ingress.run_plan
    # (key, its value, what binds first, its value)
    found: list[tuple[tuple[str, ...], float, str, float]] = [
        (("budgets", "round_bytes"), budgets.round_bytes, "day_bytes", budgets.day_bytes)
    ]
    for side, kind, block in _blocks(policy):
        pairs = [(first, second, getattr(block, second, None)) for first, second in PARTS]
        if side == "egress":
            pairs += [(first, f"budgets.{second}", getattr(budgets, second)) for first, second in BUDGETED]
        if plan is not None:
            pairs.append(("max_steps", "ingress.run.plan.local_steps", plan.local_steps[1]))
        for first, second, bound in pairs:
            if (value := getattr(block, first, None)) is not None and bound is not None:
                found.append(((side, kind, first), value, second, bound))
    if responses := policy.file.egress.public_responses:
        place, made = ("egress", "public.responses"), responses.generation
        asked = responses.max_prompts_per_step * made.samples_per_prompt
        found.append(
            ((*place, "max_responses_per_step"), responses.max_responses_per_step,
             "max_prompts_per_step x generation.samples_per_prompt", asked)
        )  # fmt: skip
        tokens = responses.max_responses_per_step * made.max_new_tokens
        found.append(
            ((*place, "max_tokens_per_step"), responses.max_tokens_per_step,
             "max_responses_per_step x generation.max_new_tokens", tokens)
        )  # fmt: skip
    if adapter := policy.file.ingress.global_adapter:
        # Two adapters that are let in, one after the other, are each at most max_l2 long, so no further apart than
        # twice that (but for one that a looser policy let in before a reload).
        step = ("ingress", "global.adapter", "max_step_l2")
        found.append((step, adapter.max_step_l2, "2 x max_l2", 2 * adapter.max_l2))
    for path, value, second, bound in found:
        if value > bound:
            yield f"{_at(policy, *path)}: {path[-1]} {value:,} can never bind: {second} is {bound:,} and binds first"


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
