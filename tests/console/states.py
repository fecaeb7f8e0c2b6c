"""States of daemons as their control API gives them, for the console's tests."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from console.feed import Store
from console.sharing import Rows, Rule
from fedsilo.views.state import Snapshot
from silo.guard.shown import STAYS

NOW = datetime(2026, 12, 1, 10, 0, 0, tzinfo=UTC).timestamp()
DIGEST = "7be144d0" + "5a" * 26 + "c09f"
SHOWN = "c3" * 32
POLICY_DIGEST = "9f2c" + "31" * 28 + "41ab"


@dataclass
class Reading:
    state: dict[str, Any]
    sequence: int = 7
    time: str = "2026-12-01T10:00:00.000Z"
    policy_digest: str = POLICY_DIGEST


@dataclass
class Happened:
    sequence: int
    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    time: str = "2026-12-01T09:59:58.000Z"


def rule(name: str, measured: Any, limit: Any, outcome: str = "ok") -> dict[str, Any]:
    return {
        "rule": name, "reason": "R", "outcome": outcome, "measured": measured, "limit": limit, "file": "p", "line": 3,
    }  # fmt: skip


RULES = [
    rule("measured", None, None), rule("kind", "lora.factors", "lora.factors"), rule("fields", 0, 0),
    rule("sender", True, True), rule("valid", True, True), rule("run", True, True), rule("round", True, True),
    rule("message bytes", 1_992_294, 8 << 20), rule("round bytes", 2_000_000, 16 << 20),
    rule("day bytes", 4_000_000, 256 << 20), rule("messages per minute", 3, 60), rule("schema", "ab" * 32, "ab" * 32),
    rule("tensor set", 0, 0), rule("tensor shapes", 0, 0), rule("tensor dtype", "float32", "float32"),
    rule("rank and scale", 16, 16), rule("finite values", 0, 0), rule("canonical values", 0, 0),
    rule("base adapter", True, True),
    rule("L2 of the delta", 0.93217, 4.0),
    rule("L2 of one tensor", 0.2141, 1.5), rule("L2 of base and delta", 7.9, 12.0), rule("factor sets per round", 0, 1),
    rule("approvals", 0, 1, "hold"),
]  # fmt: skip


def release(**changes: Any) -> dict[str, Any]:
    """A held factor release, as `Releases.view` makes it; `changes` replace top-level keys."""
    data: dict[str, Any] = {
        "id": "r1/hospital_a/0", "digest": DIGEST, "shown": SHOWN, "revision": 1, "state": "held", "run": "run-1",
        "round": 1, "step": 0,
        "held_since": NOW - 133, "expires_at": NOW + 1664, "asked_by": "round 1 of run run-1",
        "approvers": {"needed": 1, "roles": ["approver"], "given": []},
        "leaves": {
            "destination": {
                "name": "coordinator hub of cardio-net", "address": "coordinator.example:7443",
                "certificate": "31aa" * 16,
            },
            "kinds": [{
                "says": "changes to the model, trained on 18 of your 78 private records in 6 steps; the coordinator "
                "can read them and tell your main topics",
                "kind": "lora.factors", "items": "42 tensors, rank 16, float32, 124416 values", "bytes": 1_992_294,
                "covered_by_epsilon": "NO",
            }],
            "bytes": 1_992_294,
            "stays": list(STAYS),
        },
        "policy": {"name": "pubswap", "digest": POLICY_DIGEST, "counts": {}, "rules": RULES},
        "budget": "DP off", "findings": "no text screens in this ruleset",
        "difference": "first release, nothing to compare", "norm": 0.93217,
        "consequences": {
            "approve": "these bytes are sent once; sending cannot be called back",
            "later": "lora.factors of rounds 2 to 3 LEAVES UNASKED (policy.yaml:31)",
            "reject": "the coordinator is told only that this silo declined; the round goes on without it if the "
            "quorum is met",
        },
    }  # fmt: skip
    return copy.deepcopy(data | changes)


def silo(*held: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A silo in its first round, as `Status.state` makes it."""
    figure = {"source": "local", "task": "PrivateStep", "round": 1, "step": 4}
    data: dict[str, Any] = {
        "kind": "silo", "silo": "hospital_a", "role": "lead", "federation": "cardio-net", "run": "run-1",
        "last_run": {"run": "run-1", "state": "running"},
        "method": "pubswap", "rounds": 3, "local_steps": 8, "round": 1, "step": 6,
        "phase": "held: approval" if held else "training", "task": "", "paused": False, "halted": "",
        "run_paused": False,
        "trainer": {"isolation": "namespaces"}, "overlong": {},
        "policy": {"name": "pubswap", "digest": POLICY_DIGEST, "mode": "enforce"}, "held": list(held),
        "metrics": {"reward_mean": {"value": 0.4134, **figure}, "pass_at_1": {"value": 0.2812, **figure}},
        "donors": {"used": 12, "wanted": 16},
        "left": [
            {"kind": "control.hello", "messages": 1, "bytes": 612},
            {"kind": "control.poll", "messages": 41, "bytes": 410},
            {"kind": "control.checkpoint", "messages": 4, "bytes": 2900},
            {"kind": "public.responses", "messages": 4, "bytes": 48_231},
            {"kind": "metrics.eval", "messages": 1, "bytes": 214},
        ],
        "coordinator": {
            "address": "coordinator.example:7443", "id": "x", "link": "live", "fault": "", "last_contact": NOW - 1,
        },
        "audit": {"size": 71}, "certificate_until": "2026-12-08T10:00:01+00:00", "dp": "off",
    }  # fmt: skip
    return copy.deepcopy(data | changes)


def coordinator(**changes: Any) -> dict[str, Any]:
    def member(name: str, state: str, seen: str, refusal: Any = None, error: str = "") -> dict[str, Any]:
        return {
            "silo": name, "state": state, "since": "", "last_seen": seen, "round": 2, "step": 4, "error": error,
            "hello": {"isolation": "namespaces"}, "refusal": refusal,
            "certificate_until": "2026-12-06T22:00:00Z" if seen else "",
        }  # fmt: skip

    data: dict[str, Any] = {
        "party": "coordinator", "coordinator": "hub", "site": "consortium", "federation": "cardio-net",
        "address": "127.0.0.1:7443", "state_dir": "/x", "halted": "",
        "runs": [{
            "run": "run-1", "state": "running", "reason": "", "method": "pubswap", "round": 2, "rounds": 3,
            "silos": ["hospital_a", "hospital_b", "uni_c"],
        }],
        "silos": [
            member("hospital_a", "joined", "2026-12-01T09:59:59Z"),
            member("hospital_b", "joined", "2026-12-01T09:59:58Z"),
            member("uni_c", "absent", ""),
            member("clinic_e", "refused", "2026-12-01T09:50:00Z", {"field": "tokenizer", "expected": "a", "got": "b"}),
        ],
    }  # fmt: skip
    return copy.deepcopy(data | changes)


RECORD = {
    "before": {"metrics": {"hospital_a": {"pass_at_1": {"": 0.28}}}},
    "rounds": [{"metrics": {"hospital_a": {"pass_at_1": {"": 0.412}}, "hospital_b": {"pass_at_1": {"": 0.387}}}}],
    "traffic": [
        {"silo": "hospital_a", "direction": "in", "kind": "lora.factors", "messages": 1, "bytes": 2_000_000},
        {"silo": "hospital_a", "direction": "out", "kind": "run.plan", "messages": 1, "bytes": 999},
    ],
}


def live(
    state: dict[str, Any],
    *,
    at: float = 100.0,
    policy_digest: str = POLICY_DIGEST,
    events: list[Happened] | None = None,
) -> Snapshot:
    """What the console knows after one reading of `state` at monotonic time `at`."""
    store = Store()
    store.happened(events or [])
    record = RECORD if state.get("party") == "coordinator" else None
    store.read(Reading(state, policy_digest=policy_digest), at, wall_time=NOW, record=record)
    return store.snapshot


def unclassified(value: Any, rule: Rule, place: str = "") -> Iterator[str]:
    """Fields of `value` that `rule` says nothing of, as dotted places."""
    if isinstance(rule, Rows):
        entries = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
        for entry in entries:
            yield from unclassified(entry, rule.rule, f"{place}[]")
    elif isinstance(rule, Mapping) and isinstance(value, Mapping):
        for key, item in value.items():
            where = f"{place}.{key}" if place else str(key)
            if key in rule:
                yield from unclassified(item, rule[key], where)
            else:
                yield where
