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

from console.drawing import bytes_text
from console.values import (
    HEX_DIGEST,
    CoordinatorState,
    Evidence,
    Figure,
    Finding,
    Leaving,
    Left,
    Member,
    Release,
    Rule,
    Run,
    SiloState,
)

NEAR_SHARE = 0.5  # of a limit: below it, the limit says nothing of what was measured


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
        waits=text_of(state.get("waits")) if state.get("waits") else "",
        clock_halted=bool(mapping(state.get("clock")).get("halt")),
        clock_told=_clock_told(state),
        paused=state.get("paused") is True,
        run_paused=state.get("run_paused") is True,
        adapter_held=text_of(state.get("adapter_held")) if state.get("adapter_held") else "",
        isolation=text_of(mapping(state.get("trainer")).get("isolation")),
        policy_name=text_of(policy.get("name")),
        policy_digest=text_of(policy.get("digest")),
        policy_files=len(_list(policy.get("made_of"))),
        held=tuple(release_of(mapping(item)) for item in _list(state.get("held"))),
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
        audit_broken=_broken(mapping(mapping(state.get("audit")).get("broken"))),
        certificate_until=time_of(text_of(state.get("certificate_until"))) or math.inf,
        dp=text_of(state.get("dp")),
        hidden=frozenset(name for name in ("phase", "halted") if name not in state)
        | frozenset({"coordinator"} if "address" not in link else ()),
    )


def _broken(found: Mapping[str, Any]) -> str:
    return f"record {whole(found.get('seq'))}: {text_of(found.get('why'))}" if found else ""


def release_of(data: Mapping[str, Any]) -> Release:
    """One release, as the state and the query `approval` tell it."""
    approvers, leaves = mapping(data.get("approvers")), mapping(data.get("leaves"))
    destination, policy = mapping(leaves.get("destination")), mapping(data.get("policy"))
    answers = [mapping(item) for item in _list(approvers.get("given"))]
    consequences = mapping(data.get("consequences"))
    privacy, _, counted = text_of(data.get("budget")).partition("; ")  # an earlier version told both as one
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
        people=tuple(map(text_of, _list(approvers.get("people")))),
        destination=text_of(destination.get("address")),
        receiver=text_of(destination.get("name")),
        certificate=text_of(destination.get("certificate")),
        kinds=tuple(
            Leaving(
                text_of(row.get("kind")), text_of(row.get("items")), number(row.get("bytes")),
                text_of(row.get("covered_by_epsilon")), text_of(row.get("says")),
            )
            for row in map(mapping, _list(leaves.get("kinds")))
        ),
        size_bytes=number(leaves.get("bytes")),
        stays=tuple(map(text_of, _list(leaves.get("stays")))),
        policy_name=text_of(policy.get("name")),
        rules=tuple(_rule(mapping(item)) for item in _list(policy.get("rules"))),
        budget=privacy,
        uses=text_of(data.get("uses")) or counted,
        unscreened=data.get("unscreened") is True,
        findings=text_of(data.get("findings")),
        difference=text_of(data.get("difference")),
        norm=value_text(data.get("norm"), narrow=True),
        noticed=tuple(_finding(mapping(item)) for item in _list(data.get("noticed"))),
        refused=tuple(
            (text_of(item.get("person")), text_of(item.get("reason")), text_of(item.get("note")))
            for item in answers if item.get("verdict") == "reject"
        ),
        deferred=tuple((name, number(until)) for name, until in mapping(data.get("deferred")).items()),
        on_approve=text_of(consequences.get("approve")),
        on_reject=text_of(consequences.get("reject")),
        shown=text_of(data.get("shown")),
        on_later=text_of(consequences.get("later")),
        hidden=frozenset(name for name in _OF_A_RELEASE if name not in data)
        | frozenset({"given"} if "given" not in approvers else ()),
    )  # fmt: skip


# What a daemon tells of every release that it holds.
_OF_A_RELEASE = ("digest", "leaves", "policy", "budget", "findings", "difference", "consequences")


def _finding(data: Mapping[str, Any]) -> Finding:
    evidence = (
        Evidence(text_of(one.get("what")), text_of(one.get("before")), text_of(one.get("now")))
        for one in map(mapping, _list(data.get("evidence")))
    )
    code, says = text_of(data.get("code")), text_of(data.get("says"))
    return Finding(text_of(data.get("id")) or f"{code} {says}", code, says, tuple(evidence))


_YEAR_10000_SECONDS = 253_402_300_800  # since 1970; a later moment has no date


def _rule(data: Mapping[str, Any]) -> Rule:
    name = text_of(data.get("rule"))
    measured, limit = (value_text(data.get(field), name, narrow=True) for field in ("measured", "limit"))
    return Rule(
        name, text_of(data.get("outcome")), measured, limit, _usual(mapping(data.get("usual")), name),
        _is_near(data.get("measured"), data.get("limit")),
    )  # fmt: skip


def _usual(data: Mapping[str, Any], rule: str) -> str:
    """Such as `0.9 to 1.4 in 3 before`."""
    if not data:
        return ""
    least, most = (value_text(data.get(field), rule, narrow=True) for field in ("least", "most"))
    return f"{least if least == most else f'{least} to {most}'} in {whole(data.get('releases'))} before"


def _is_near(measured: Any, limit: Any) -> bool:
    numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (measured, limit))
    return not numbers or not limit or number(measured) >= number(limit) * NEAR_SHARE


def value_text(value: Any, rule: str = "", *, narrow: bool = False) -> str:
    """A measured value or a limit, short: sizes in units people read, digests by their ends, moments as days.

    Args:
        value: as the daemon gave it.
        rule: whose it is; a name with "bytes" is of a size, "valid" is of moments.
        narrow: shorter still, for two values in a narrow column: 1.9M, and of more than two values only their number.
    """
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case int() | float() if rule == "valid" and 0 <= value < _YEAR_10000_SECONDS:
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d")
        case int() | float() if "bytes" in rule:
            text = bytes_text(value)
            return text.replace(" ", "").rstrip("iB") if narrow else text
        case float():
            return f"{value:.4g}"
        case list() if rule == "valid":
            return " to ".join(value_text(item, rule, narrow=narrow) for item in value)
        case list():
            if len(value) > (2 if narrow else 4):
                return f"{len(value)} listed"
            return (" " if narrow else ", ").join(value_text(item, rule, narrow=narrow) for item in value)
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
                refusal=_refusal(refusal),
                isolation=text_of(mapping(row.get("hello")).get("isolation")),
                pass_at_1=scores.get(name),
                received_bytes=sizes.get(name),
                certificate_until=time_of(text_of(row.get("certificate_until"))) or math.inf,
                clock=text_of(row.get("clock")) if row.get("clock") else "",
            )
        )
    return CoordinatorState(
        coordinator=text_of(state.get("coordinator")),
        site=text_of(state.get("site")),
        federation=text_of(state.get("federation")),
        address=text_of(state.get("address")),
        halted=text_of(state.get("halted")) if state.get("halted") else "",
        waits=text_of(state.get("waits")) if state.get("waits") else "",
        runs=tuple(
            Run(
                text_of(row.get("run")), text_of(row.get("state")), text_of(row.get("reason")),
                text_of(row.get("method")),
                whole(row.get("round")), whole(row.get("rounds")), tuple(map(text_of, _list(row.get("silos")))),
            )
            for row in map(mapping, _list(state.get("runs")))
        ),
        members=tuple(members),
        audit_broken=_broken(mapping(mapping(state.get("audit")).get("broken"))),
        clock_told=_clock_told(state),
    )  # fmt: skip


def _clock_told(state: Mapping[str, Any]) -> str:
    told = mapping(state.get("clock")).get("told")
    return text_of(told) if told else ""


def _refusal(told: Mapping[str, Any]) -> str:
    """Why a silo was refused: what was expected of it and what it said, digests by their ends."""
    shown = {key: value_text(value) for key, value in told.items()}
    if not {"field", "expected", "got"} <= shown.keys():
        return " ".join(f"{key} {value}" for key, value in shown.items() if value)
    code = f" [{shown['code']}]" if shown.get("code") else ""
    return f"its {shown['field']} is {shown['got'] or 'none'}, expected {shown['expected'] or 'none'}{code}"


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
