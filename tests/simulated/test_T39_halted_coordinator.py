"""A coordinator that is halted or stopping takes nothing: what was sent to it is sent again, and not lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UnreachableError
from fedsilo.protocol.place import Place
from silo.guard.messages import Allowed
from tests.simulated.coordinator_parts import House, joined, until_quiet
from tests.simulated.test_coordinator_ingress import code_of
from tests.world import Bench


@pytest.mark.parametrize("code", ["HALTED", "ROUND_CLOSED"])
def test_T39_what_a_halted_coordinator_did_not_take_stays_in_the_outbox(bench: Bench, code: str) -> None:
    offered = bench.responses()
    assert isinstance(offered, Allowed)
    bench.channel.answer = ("control.refusal", pb.Refusal(code=code))
    if code != "HALTED":  # the counterpart: a refusal that says something about the message is the end of it
        assert isinstance(bench.gate.transmit(offered).reply.body, pb.Refusal)
        assert bench.ledger.outbox("allowed") == []
        return
    counted = bench.ledger.book
    with pytest.raises(UnreachableError, match=r"halted or stopping.*public\.responses"):
        bench.gate.transmit(offered)
    [item] = bench.ledger.outbox("allowed")
    assert isinstance(bench.gate.retry(item).reply.body, pb.Ack)
    assert bench.ledger.outbox("allowed") == [] and bench.ledger.book == counted
    assert [len(bench.events(f"egress.{name}")) for name in ("decision", "sent", "acked")] == [1, 2, 1]


def test_T39_a_poll_that_a_halted_coordinator_refuses_is_answered_and_waits_for_nothing(bench: Bench) -> None:
    bench.channel.answer = ("control.refusal", pb.Refusal(code="HALTED"))
    offered = bench.gate.offer(Place("", 0, 0, "control.heartbeat"), pb.Heartbeat())
    assert isinstance(offered, Allowed)
    assert isinstance(bench.gate.transmit(offered).reply.body, pb.Refusal)


@pytest.mark.parametrize("why", ["halted", "stopping"])
def test_T39_a_coordinator_that_halted_takes_the_same_upload_after_a_restart(tmp_path: Path, why: str) -> None:
    house, silos = joined(tmp_path)
    for silo in silos:
        silo.mute = {"lora.factors"}
    until_quiet(silos)
    payload = silos[0].delta_payload(1)
    setattr(house.driver, why, "DISK_FULL" if why == "halted" else True)
    assert code_of(silos[0].say("lora.factors", payload, run="run-1", number=1)) == "HALTED"
    house.close()
    again = House(tmp_path, clock=house.clock)
    silos[0].house = again
    assert isinstance(silos[0].say("lora.factors", payload, run="run-1", number=1), pb.Ack)
    again.close()
