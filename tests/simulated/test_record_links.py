"""What a record of the audit log says about others: the program that decided, the records of the approvals that a
decision rests on, and the record that the coordinator made of the same message."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from silo.guard.messages import Allowed
from tests.policies import setting
from tests.simulated.coordinator_parts import joined
from tests.world import PROGRAM, Bench, small_factors

FIRST_ROUND = setting.policy_text(first_rounds=1)
TWO_PERSONS = FIRST_ROUND.replace("persons: 1", "persons: 2").replace("policy_change: 1", "policy_change: 2")


def test_T34_each_decision_names_the_program_that_made_it(bench: Bench) -> None:
    sent = bench.factors()
    assert isinstance(sent, Allowed)
    bench.gate.transmit(sent)
    denied = {name: values + 1 for name, values in small_factors().items()}
    assert not isinstance(bench.factors(denied), Allowed)
    decisions = [*bench.events("egress.decision"), *bench.events("ingress.decision")]
    assert {record["decision"] for record in decisions} == {"allow", "deny"}
    assert {record["direction"] for record in decisions} == {"egress", "ingress"}
    assert [record["policy"]["code"] for record in decisions] == [PROGRAM] * len(decisions)


@pytest.mark.parametrize("restart", [False, True])
def test_T36_a_decision_names_the_records_of_the_approvals_it_rests_on(tmp_path: Path, restart: bool) -> None:
    bench = Bench(tmp_path / "a", setting.policy_of(TWO_PERSONS))
    release = bench.hold(bench.factors())
    assert bench.approve(release) is None
    if restart:  # what alice said is in ledger and log, and in no memory
        bench = bench.restart()
    settled = bench.approve(release, "bob")
    assert settled is not None and settled.allowed is not None
    grants = bench.events("approval.grant")
    assert [record["detail"]["person"] for record in grants] == ["alice", "bob"]
    decision = bench.events("egress.decision")[-1]
    assert decision["decision"] == "allow"
    assert decision["link"]["approvals"] == [record["seq"] for record in grants]
    assert "approvals" not in bench.events("egress.decision")[0]["link"]  # the hold rests on none
    bench.close()


@pytest.mark.parametrize(
    ("told", "recorded"),
    [(7, 7), ((1 << 53) - 1, (1 << 53) - 1), (0, None), (1 << 53, None), ((1 << 64) - 1, None)],
)
def test_T38_the_outcome_names_the_coordinators_record_where_it_is_a_number_of_one(
    bench: Bench, told: int, recorded: int | None
) -> None:
    sent = bench.factors()
    assert isinstance(sent, Allowed)
    bench.channel.answer = ("control.ack", pb.Ack(acknowledged_sequence=1, record=told))
    bench.gate.transmit(sent)
    (acked,) = bench.events("egress.acked")
    assert acked["link"]["decision"] == sent.decision_seq and acked["link"].get("peer_event") == recorded
    assert "peer_event" not in bench.events("egress.sent")[-1]["link"]  # before the answer there was none to name
    assert bench.judge.halted == "" and bench.ledger.outbox("allowed") == []


def test_T38_the_coordinator_tells_the_number_of_its_record(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    silo = silos[0]
    for kind, body in (("control.heartbeat", pb.Heartbeat()), ("control.progress", pb.Progress())):
        run = "run-1" if kind == "control.progress" else ""
        answer = silo.say(kind, body, run=run)
        assert isinstance(answer, pb.Ack) and answer.record > 0
        (record,) = list(house.audit.records(answer.record))[:1]
        assert (record["seq"], record["event"], record["kind"]) == (answer.record, "ingress.decision", kind)
        assert record["peer"] == silo.peer.spiffe_id and record["sequence"] == silo.sequences[run]
        assert record["payload"]["sha256"] == codec.sha256_hex(codec.encode(body))
    assert list(house.audit.records())[-1]["seq"] == answer.record  # and nothing was recorded after it
