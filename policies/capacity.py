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

And what of a policy should make its reader stop: a great deal of text, a number of records that no plan gives, and what
makes a well-formed policy one under which nothing leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fedsilo.protocol.plan import Plan
from policies.grids import Bits, log2_choices
from policies.kind import Figures
from policies.kinds import FIGURED
from policies.model import Policy, TextScreens
from policies.schema import LoraSchema

NOT_COUNTED = "not counted in these bits: when messages are sent"
_ERROR_CODES_MAX = 32  # of control.error: a closed list that is shorter
_LOG_SIZE_BITS = 32  # a checkpoint shows how many records the site's log has; a round makes fewer than 2 to the 32

# Above these a check says how much text may leave: some 5,000 pages a round, 500,000 a day.
TEXT_ROUND_BYTES = 10_000_000
TEXT_DAY_BYTES = 1_000_000_000

Planted = tuple[float, str]  # bits in one round, the scheme

ROUND_SECONDS = float(Plan.model_fields["round_deadline_seconds"].default)  # of a plan that does not say it
PROGRESS_SECONDS = 10.0  # the guard says progress at every multiple of this, by its own clock
GUARD_MESSAGES_PER_MINUTE = 20  # control messages that the guard says itself while a trainer works, generously


def worst_case(policy: Policy, schema: LoraSchema | None = None) -> list[dict[str, Any]]:
    """The most that one round may let out, by kind: what the policy allows, whatever a plan asks for.

    Args:
        policy: the site's policy.
        schema: its LoRA schema; without it factors count as large as the largest message.

    Returns:
        [{kind, messages, payload_bytes}]. What the values can carry for whoever chooses them: `capacities`.
    """
    egress, budgets = policy.file.egress, policy.file.budgets
    rows: list[dict[str, Any]] = []
    for kind in FIGURED:
        block = egress.block(kind.name)
        if block is not None and kind.largest is not None:
            messages, size = kind.largest(block, Figures(kind.name, policy.file, schema, 0))
            rows.append({"kind": kind.name, "messages": messages, "payload_bytes": min(size, budgets.round_bytes)})
    return rows


def capacities(policy: Policy, schema: LoraSchema | None = None) -> list[Bits]:
    """Return one row for each kind that the policy lets out and whose values the trainer chooses.

    Args:
        policy: the site's.
        schema: its LoRA schema; without it the tensors are counted by the largest message.
    """
    egress, plan = policy.file.egress, policy.file.ingress.run_plan
    steps, rows = plan.local_steps[1] if plan else 0, []
    for kind in FIGURED:
        block = egress.block(kind.name)
        if block is not None and kind.bits is not None:
            bits = kind.bits(block, Figures(kind.name, policy.file, schema, steps))
            rows.append(replace(bits, kind=kind.name))
    if egress.control and rows:
        rows.append(_control(policy, sum(row["messages"] for row in worst_case(policy, schema))))
    return rows


def capacity_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return lines for people, of `Bits.to_json` rows: N1 in numbers, and what a planted scheme made of it."""
    lines = []
    for row in rows:
        lines.append(f"a hostile trainer, at most per round: {row['kind']}: {row['bits']:,.0f} bits, {row['because']}")
        if row["planted_bits"] is not None:
            lines.append(f"  a planted scheme got out {row['planted_bits']:,.0f} bits of these ({row['planted']})")
    return [*lines, NOT_COUNTED] if rows else []


def _control(policy: Policy, offers: int) -> Bits:
    """Return what a trainer says by what it makes its guard say. `offers`: messages of other kinds in one round, at
    most."""
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
        messages = min(budget, math.floor(ROUND_SECONDS / PROGRESS_SECONDS) + 1)
        bits += log2_choices(messages + tasks, tasks)  # shares of up to so many equal moments
        parts.append(f"{messages:,} moments at which progress is said, shared between the tasks")
    if "checkpoint" in kinds:
        bits += _LOG_SIZE_BITS
        parts.append(f"the size of the log, {_LOG_SIZE_BITS} bits")
    because = f"{', '.join(parts)}; for a round of {ROUND_SECONDS:g} s, a longer one has more"
    return Bits(bits, because, *progress(policy), kind="control.*")


# ---- planted schemes ----------------------------------------------------------------------------------


def progress(policy: Policy) -> Planted:
    """Return how many of the guard's fixed moments for progress each step takes, which the receiver counts (T11)."""
    plan = policy.file.ingress.run_plan
    steps = plan.local_steps[1] if plan else 0
    most = progress_messages(policy, steps)
    bits = steps * math.log2(most + 1)
    return (
        bits,
        f"T11: 0 to {most} messages on the progress of each of {steps} steps, which the trainer draws out, counted",
    )


def progress_messages(policy: Policy, steps: int) -> int:
    """Return the most progress messages on one step, so that those of all steps fit the round and the guard's own
    messages keep their room."""
    control = policy.file.egress.control
    if not steps or control is None or "progress" not in control.kinds:
        return 0
    spare = policy.file.budgets.control_messages_per_minute - GUARD_MESSAGES_PER_MINUTE
    per_minute = min(60 / PROGRESS_SECONDS, max(0, spare))
    return int(per_minute * (ROUND_SECONDS / 60) // steps)


# ---- what should make a reader stop -----------------------------------------------------------------


def text_warnings(policy: Policy) -> list[str]:
    """Return warnings for the reader of a policy: more text in a round, or in a day, than the stated thresholds."""
    egress, budgets = policy.file.egress, policy.file.budgets
    # (kind, the key that bounds its text, bytes in a round, bytes in one message)
    texts = [
        (kind.name, *kind.text_bytes(block))
        for kind in FIGURED
        if kind.text_bytes is not None and (block := egress.block(kind.name)) is not None
    ]
    responses = egress.public_responses
    if not texts:
        return []
    kind, key, _, _ = max(texts, key=lambda row: row[2])
    a_round = min(sum(size for _, _, size, _ in texts), budgets.round_bytes)
    a_day = min(budgets.day_bytes, budgets.messages_per_minute * 60 * 24 * max(size for *_, size in texts))
    day_key: tuple[str, ...] = ("budgets", "day_bytes")
    if responses and len(texts) == 1 and responses.max_bytes_per_day < a_day:
        a_day, day_key = responses.max_bytes_per_day, ("egress", kind, "max_bytes_per_day")
    advice = "if no run needs that, write the policy for a smaller plan (--max-new-tokens, --local-steps, --rounds ...)"
    return [
        f"{_at(policy, *place)}: up to {size:,} bytes of text may leave in one {span}, more than "
        f"{threshold:,}; {advice}"
        for span, size, threshold, place in (
            ("round", a_round, TEXT_ROUND_BYTES, ("egress", kind, key)),
            ("day", a_day, TEXT_DAY_BYTES, day_key),
        )
        if size > threshold
    ]


def record_warnings(policy: Policy) -> list[str]:
    """A number of records that plans of the allowed size cannot give a round: the site would refuse each of them (T7).

    The rule `plan gives enough records` counts a round's private steps times the prompts of each.
    """
    egress, run_plan = policy.file.egress, policy.file.ingress.run_plan
    if run_plan is None:
        return []
    steps, prompts, warnings = run_plan.local_steps[1], run_plan.prompts_per_step[1], []
    answers, public = egress.public_responses, 0
    if answers is not None:
        public = min(steps, answers.max_responses_per_round // (prompts * run_plan.samples_per_prompt[1]))
    for kind, block in egress.updates.items():
        place = _at(policy, "egress", kind, "min_records")
        local, each = (policy.line_of(("ingress", "run.plan", key)) for key in ("local_steps", "prompts_per_step"))
        sizes = f"local_steps {steps} at line {local}, prompts_per_step {prompts} at line {each}"
        if (most := steps * prompts) < block.min_records:
            warnings.append(
                f"{place}: min_records is {block.min_records} and no allowed plan gives a round more than {most} "
                f"records ({sizes}), so no run can start here; allow larger plans, or ask for fewer records"
            )
        elif 0 < (least := (steps - public) * prompts) < block.min_records:
            warnings.append(
                f"{place}: min_records is {block.min_records} and the largest plan ({sizes}) gives a round {least} "
                f"records where {public} of its steps are public, so no such run can start here; allow larger plans, "
                "ask for fewer records, or agree on a larger swap_period"
            )
    return warnings


# ---- under which policy nothing leaves, or a screen never runs ----------------------------------------
# Only what follows from the file itself is said. What a federation's plans happen never to reach is not looked at.

# What every run of every method says.
_SAID_IN_EVERY_RUN = ("hello", "poll", "fetch", "abstain")
_RATES = ("messages_per_minute", "control_messages_per_minute", "polls_per_minute")


def standstill_warnings(policy: Policy, schema: LoraSchema | None, now_seconds: float) -> Iterator[str]:
    """Yield why a silo with this policy would send nothing, or end no run, though the policy is well formed.

    Args:
        policy: the one in force, with the charter where there is one.
        schema: of the adapter; None: sizes of updates are not looked at.
        now_seconds: UTC.
    """
    file, budgets = policy.file, policy.file.budgets
    if now_seconds >= policy.valid_until_seconds:
        yield f"{_at(policy, 'valid')}: valid until {file.valid.until}, which is over: everything is denied"
    elif now_seconds < policy.valid_from_seconds:
        yield f"{_at(policy, 'valid')}: valid from {file.valid.from_}, which is to come: everything is denied"
    if file.mode == "shadow":
        yield f"{_at(policy, 'mode')}: mode shadow: everything is decided and recorded, and nothing is sent"
    kinds = file.egress.control.kinds if file.egress.control else ()
    if missing := [kind for kind in _SAID_IN_EVERY_RUN if kind not in kinds]:
        place = ("egress", "control") if kinds else ("egress",)
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
    return [
        f"{_at(policy, 'text_screens', name)}: text_screens.{name} never runs: no kind names it; put {name} "
        "into the key `screens` of a kind, or take the block out"
        for name in TextScreens.model_fields
        if getattr(policy.file.text_screens, name) is not None and name not in policy.file.screens_named
    ]


def _at(policy: Policy, *path: str) -> str:
    return f"{policy.source}:{policy.line_of(path)}"
