"""From the control API's JSON to the console's frozen values.

The JSON comes from our own daemon, but much in it came from further away, so nothing here trusts its shape: what is
missing or of another type becomes an empty value, and a release whose digests cannot be read can be looked at but not
answered. Texts stay as they came; `console.drawing` makes them safe, and commands carry them back unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from console.values import HEX_DIGEST, CoordinatorState, Figure, Leaving, Left, Member, Release, Rule, Run, SiloState


def state_of(state: Mapping[str, Any], record: Mapping[str, Any]) -> SiloState | CoordinatorState | None:
    if state.get("party") == "coordinator":
        return _coordinator(state, record)
    return _silo(state) if "silo" in state else None


def _silo(state: Mapping[str, Any]) -> SiloState:
    policy, link = mapping(state.get("policy")), mapping(state.get("coordinator"))
    donors, last_run = mapping(state.get("donors")), mapping(state.get("last_run"))
    figures = []
    for name, item in mapping(state.get("metrics")).items():
        fields = mapping(item)
        value = fields.get("value")
        if isinstance(value, int | float) and not isinstance(value, bool):
            figures.append(Figure(name, float(value), text_of(fields.get("source")), whole(fields.get("round"))))
    return SiloState(
        silo=text_of(state.get("silo")),
        role=text_of(state.get("role")),
        federation=text_of(state.get("federation")),
        run=text_of(state.get("run")),
        last_run=text_of(last_run.get("run")),
        last_run_state=text_of(last_run.get("state")),
        method=text_of(state.get("method")),
        rounds=whole(state.get("rounds")),
        local_steps=whole(state.get("local_steps")),
        round=whole(state.get("round")),
        step=whole(state.get("step")),
        phase=text_of(state.get("phase")),
        halted=text_of(state.get("halted")) if state.get("halted") else "",
        paused=state.get("paused") is True,
        isolation=text_of(mapping(state.get("trainer")).get("isolation")),
        policy_name=text_of(policy.get("name")),
        policy_digest=text_of(policy.get("digest")),
        policy_files=len(_list(policy.get("made_of"))),
        held=tuple(_release(mapping(item)) for item in _list(state.get("held"))),
        figures=tuple(figures),
        left=tuple(
            Left(text_of(row.get("kind")), whole(row.get("messages")), number(row.get("bytes")))
            for row in map(mapping, _list(state.get("left")))
        ),
        donors_used=whole(donors.get("used")),
        donors_wanted=whole(donors.get("wanted")),
        coordinator=text_of(link.get("address")),
        coordinator_link=text_of(link.get("link")),
        coordinator_fault=text_of(link.get("fault")),
        audit_records=whole(mapping(state.get("audit")).get("size")),
        certificate_until=time_of(text_of(state.get("certificate_until"))) or math.inf,
        dp=text_of(state.get("dp")),
    )


def _release(data: Mapping[str, Any]) -> Release:
    approvers, leaves = mapping(data.get("approvers")), mapping(data.get("leaves"))
    destination, policy = mapping(leaves.get("destination")), mapping(data.get("policy"))
    answers = [mapping(item) for item in _list(approvers.get("given"))]
    consequences = mapping(data.get("consequences"))
    return Release(
        id=text_of(data.get("id")),
        digest=text_of(data.get("digest")),
        policy_digest=text_of(policy.get("digest")),
        revision=whole(data.get("revision")),
        state=text_of(data.get("state")),
        held_since=number(data.get("held_since")),
        expires_at=number(data.get("expires_at")),
        asked_by=text_of(data.get("asked_by")),
        run=text_of(data.get("run")),
        round=whole(data.get("round")),
        needed=whole(approvers.get("needed")),
        roles=tuple(map(text_of, _list(approvers.get("roles")))),
        given=tuple(text_of(item.get("person")) for item in answers if item.get("verdict") == "approve"),
        destination=text_of(destination.get("address")),
        certificate=text_of(destination.get("certificate")),
        kinds=tuple(
            Leaving(
                text_of(row.get("kind")), text_of(row.get("items")), number(row.get("bytes")),
                text_of(row.get("covered_by_epsilon")),
            )
            for row in map(mapping, _list(leaves.get("kinds")))
        ),
        size_bytes=number(leaves.get("bytes")),
        stays=tuple(map(text_of, _list(leaves.get("stays")))),
        policy_name=text_of(policy.get("name")),
        rules=tuple(_rule(mapping(item)) for item in _list(policy.get("rules"))),
        budget=text_of(data.get("budget")),
        findings=text_of(data.get("findings")),
        difference=text_of(data.get("difference")),
        norm=_value(data.get("norm"), ""),
        on_approve=text_of(consequences.get("approve")),
        on_reject=text_of(consequences.get("reject")),
    )  # fmt: skip


_YEAR_10000_SECONDS = 253_402_300_800  # since 1970; a later moment has no date


def _rule(data: Mapping[str, Any]) -> Rule:
    name = text_of(data.get("rule"))
    return Rule(name, text_of(data.get("outcome")), _value(data.get("measured"), name), _value(data.get("limit"), name))


def _value(value: Any, rule: str) -> str:
    """A measured value or a limit, short; sizes of rules about bytes in units people read."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int() | float() if rule == "valid" and 0 <= value < _YEAR_10000_SECONDS:
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d")
        case list() if rule == "valid":
            return " to ".join(_value(item, rule) for item in value)
        case int() | float() if "bytes" in rule:
            return (
                f"{value / (1 << 20):.1f}M"
                if value >= 1 << 20
                else f"{value / 1024:.1f}K"
                if value >= 1024
                else f"{value:.0f}"
            )
        case float():
            return f"{value:.4g}"
        case list():
            return f"{len(value)} listed" if len(value) > 2 else " ".join(str(item) for item in value)
        case str() if HEX_DIGEST.fullmatch(value):
            return f"{value[:4]}…{value[-4:]}"
    return str(value)


def _coordinator(state: Mapping[str, Any], record: Mapping[str, Any]) -> CoordinatorState:
    scores, sizes = _released(record)
    members = []
    for row in map(mapping, _list(state.get("silos"))):
        name = text_of(row.get("silo"))
        refusal = mapping(row.get("refusal"))
        members.append(
            Member(
                silo=name,
                state=text_of(row.get("state")),
                last_seen=time_of(text_of(row.get("last_seen"))),
                round=whole(row.get("round")),
                step=whole(row.get("step")),
                error=text_of(row.get("error")),
                refusal=" ".join(f"{key} {value}" for key, value in refusal.items()),
                isolation=text_of(mapping(row.get("hello")).get("isolation")),
                pass_at_1=scores.get(name),
                received_bytes=sizes.get(name),
            )
        )
    return CoordinatorState(
        coordinator=text_of(state.get("coordinator")),
        site=text_of(state.get("site")),
        federation=text_of(state.get("federation")),
        address=text_of(state.get("address")),
        halted=text_of(state.get("halted")) if state.get("halted") else "",
        runs=tuple(
            Run(
                text_of(row.get("run")), text_of(row.get("state")), text_of(row.get("reason")),
                text_of(row.get("method")),
                whole(row.get("round")), whole(row.get("rounds")), tuple(map(text_of, _list(row.get("silos")))),
            )
            for row in map(mapping, _list(state.get("runs")))
        ),
        members=tuple(members),
    )  # fmt: skip


def _released(record: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Newest released pass@1, and bytes received, by silo."""
    scores: dict[str, float] = {}
    for figures in map(mapping, [record.get("before"), *_list(record.get("rounds"))]):
        for silo, names in mapping(figures.get("metrics")).items():
            value = mapping(mapping(names).get("pass_at_1")).get("")
            if isinstance(value, int | float):
                scores[silo] = float(value)
    sizes: dict[str, float] = {}
    for row in map(mapping, _list(record.get("traffic"))):
        if row.get("direction") == "in":
            silo = text_of(row.get("silo"))
            sizes[silo] = sizes.get(silo, 0.0) + number(row.get("bytes"))
    return scores, sizes


def event_text(fields: Mapping[str, Any]) -> str:
    shown = [f"{name} {value}" for name, value in fields.items() if isinstance(value, str | int | float)]
    return " ".join(text for text in shown if text)


def mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def whole(value: Any) -> int:
    return int(number(value))


def time_of(text: str) -> float:
    """Seconds since 1970 of an ISO 8601 time; 0 when it is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0
