"""What a person is told as the record of an order is that very record, also where its effects stand behind it."""

from __future__ import annotations

from typing import Any

import pytest

from silo.guard.commands import HeldPayloads
from tests.simulated.guarded import command
from tests.simulated.test_policy_reload import TIGHTER, Running, holding, wording

__all__ = ["holding"]  # a fixture
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "approve": ("approval.grant", {}),
    "reject": ("approval.deny", {"reason_code": "CONTENT"}),
    "defer": ("release.defer", {"until_seconds": 600}),
}


@pytest.mark.parametrize("verb", ANSWERS)
def test_an_answer_to_a_release_names_its_record(holding: Running, verb: str) -> None:
    event, more = ANSWERS[verb]
    bench = holding.bench
    release, shown = holding.hold()
    if "until_seconds" in more:
        more = {"until_seconds": bench.clock_now + more["until_seconds"]}
    order = getattr(holding.loop.guard.orders, verb)
    told = order(command(f"approvals.{verb}", shown | bench.opened(release) | more))
    (record,) = bench.events(event)
    assert told["record"] == record["seq"] and record["detail"]["person"] == "alice"
    if verb == "approve":  # the decision on it and its sending stand behind it
        assert told["audit_size"] > told["record"] + 1


def test_a_look_at_held_bytes_and_a_reload_name_their_records(holding: Running) -> None:
    bench = holding.bench
    _, shown = holding.hold()
    payloads = HeldPayloads(bench.ledger, bench.audit, tuple)
    told = payloads.ask(command("approvals.payload", {name: shown[name] for name in ("release", "digest")}))
    assert told["record"] == bench.events("payload.read")[0]["seq"]
    assert payloads.fetch({"ticket": told["ticket"]})["sha256"] == shown["digest"]
    holding.place.policy_is(wording(TIGHTER, first_rounds=1))
    assert holding.reload()["record"] == bench.events("policy.load")[-1]["seq"]
