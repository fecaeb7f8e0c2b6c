"""T3, T24: what no record takes is refused in both directions, wherever it comes, and never ends the silo.

Stands for a list, or a fact, that is longer than a record may be where no rule has seen it: the log refuses the
decision itself, and everything else is real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import RecordError
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from silo.guard.loop import Wake
from silo.guard.messages import Allowed, Denied, Held
from tests.policies import setting
from tests.world import ADAPTER, Bench, Loop, command

UNKNOWN = ("unknown", "deny", ["RECORD_REFUSED"])


@pytest.fixture
def loop(loop: Loop) -> Loop:
    loop.offer_plan()
    return loop


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """(event, kind) of the decisions with facts that the log does not take."""
    append, which = AuditLog.append, set[tuple[str, str]]()

    def refuses(log: AuditLog, name: str, **fields: Any) -> int:
        if (name, fields.get("kind")) in which and fields.get("facts"):
            raise RecordError("too many items")
        return append(log, name, **fields)

    monkeypatch.setattr(AuditLog, "append", refuses)
    return which


def decided(bench: Bench, event: str) -> tuple[str, str, list[str]]:
    record = bench.events(event)[-1]
    return record["kind"], record["decision"], record["reasons"]


def heartbeat(loop: Loop) -> None:
    """The trainer works, so this is what the silo says next; the coordinator refuses it."""
    loop.guard._client.poll_now = False
    loop.clock = 3600.0 * (loop.clock // 3600.0 + 1)
    loop.events.put(Wake())
    loop.guard._turn()  # the moment for progress, of which there is one every ten seconds
    loop.clock += 5.0
    loop.events.put(Wake())
    loop.coordinator.says("control.heartbeat", "control.refusal", pb.Refusal(code="ROUND_CLOSED"))
    loop.guard._turn()
    assert loop.coordinator.sent[-1][0].kind == "control.heartbeat"


# ---- what comes in ---------------------------------------------------------------------------------------


def test_T24_an_answer_to_a_heartbeat_that_no_record_takes_is_refused(
    loop: Loop, refused: set[tuple[str, str]]
) -> None:
    loop.open_round()
    refused.add(("ingress.decision", "control.refusal"))
    heartbeat(loop)
    assert decided(loop.bench, "ingress.decision") == UNKNOWN
    assert loop.guard._failure is None and not loop.bench.gate.halted
    refused.clear()
    heartbeat(loop)  # the counterpart
    assert decided(loop.bench, "ingress.decision") == ("control.refusal", "allow", [])


def test_T24_an_adapter_that_no_record_takes_ends_the_round_here_and_the_next_begins(
    loop: Loop, refused: set[tuple[str, str]]
) -> None:
    refused.add(("ingress.decision", "global.adapter"))
    loop.open_round()
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    reasons = [(row["kind"], row["decision"], row["reasons"]) for row in loop.bench.events("ingress.decision")]
    assert UNKNOWN in reasons and [e.round for e, _ in loop.coordinator.bodies("control.abstain")] == [1]
    assert loop.guard._failure is None and not loop.bench.gate.halted
    refused.clear()
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=2)
    loop.open_round(2)
    assert loop.trainer.tasks() == ["Evaluate", "LoadAdapter"]  # the base model was measured, and its figures are out


# ---- what goes out ---------------------------------------------------------------------------------------


def test_T03_an_offer_that_no_record_takes_is_denied_and_the_round_goes_on(
    loop: Loop, refused: set[tuple[str, str]]
) -> None:
    refused.add(("egress.decision", "metrics.eval"))
    loop.open_round()
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    (record,) = [row for row in loop.bench.events("egress.decision") if row["kind"] == "metrics.eval"]
    assert (record["decision"], record["reasons"]) == ("deny", ["RECORD_REFUSED"])
    assert loop.coordinator.bodies("metrics.eval") == [] and len(loop.coordinator.bodies("control.declined")) == 1
    assert loop.trainer.tasks()[-1] == "LoadAdapter"
    assert loop.guard._failure is None and not loop.bench.gate.halted
    assert loop.bench.ledger.outbox() == [] and loop.bench.ledger.payloads.sizes == {}


def test_T03_the_counterpart_an_offer_that_is_recorded_leaves(loop: Loop, refused: set[tuple[str, str]]) -> None:
    loop.open_round()
    loop.coordinator.says("control.fetch", "global.adapter", ADAPTER, run="run-1", round=1)
    loop.base_evaluated()
    assert len(loop.coordinator.bodies("metrics.eval")) == 1 and loop.coordinator.bodies("control.declined") == []
    assert loop.trainer.tasks()[-1] == "LoadAdapter"


@pytest.mark.parametrize("first_rounds", [0, 1], ids=["allowed", "held"])
def test_T03_a_decision_that_no_record_takes_lets_nothing_out_and_holds_nothing(
    tmp_path: Path, refused: set[tuple[str, str]], first_rounds: int
) -> None:
    policy = setting.policy_of(setting.policy_text(first_rounds=first_rounds))
    bench, other = Bench(tmp_path / "silo", policy), Bench(tmp_path / "other", policy)
    refused.add(("egress.decision", "lora.factors"))
    offered = bench.factors()
    assert isinstance(offered, Denied) and offered.decision.reasons == ("RECORD_REFUSED",)
    assert decided(bench, "egress.decision") == ("lora.factors", "deny", ["RECORD_REFUSED"])
    assert bench.ledger.payloads.sizes == {} and bench.ledger.releases() == [] and bench.channel.sent == []
    refused.clear()
    assert isinstance(other.factors(), Held if first_rounds else Allowed)  # the counterpart
    bench.close()
    other.close()


def test_T03_a_refusal_that_no_record_takes_keeps_its_reasons_and_is_on_record(
    bench: Bench, refused: set[tuple[str, str]]
) -> None:
    refused.add(("egress.decision", "lora.factors"))
    offered = bench.factors(base="ff" * 32)
    assert isinstance(offered, Denied) and offered.decision.reasons == ("BASE_DIGEST", "RECORD_REFUSED")
    assert decided(bench, "egress.decision") == ("lora.factors", "deny", ["RECORD_REFUSED"])


def test_T03_a_release_that_no_record_takes_is_denied_though_persons_agreed(
    tmp_path: Path, refused: set[tuple[str, str]]
) -> None:
    bench = Bench(tmp_path / "silo", setting.policy_of(setting.policy_text(first_rounds=1)))
    held = bench.factors()
    assert isinstance(held, Held)
    release = bench.releases.hold(held, deadline_seconds=None)
    refused.add(("egress.decision", "lora.factors"))
    shown = {
        "release": release.id,
        "digest": release.digest,
        "policy_digest": bench.policy.digest,
        **bench.shown(release),
    }
    ended, settled = bench.releases.approve(command("approvals.approve", shown))
    assert ended.state == "denied" and settled is not None and settled.allowed is None
    assert bench.ledger.payloads.sizes == {} and bench.channel.sent == []
    assert codec.sha256_hex(held.payload) == release.digest
    bench.close()
