"""T20, T39: evidence of two transcripts, and a full disk, halt a silo wherever a kill or another fault falls."""

from __future__ import annotations

from typing import Any

import pytest

from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import RecordError
from fedsilo.audit.segments import LogFullError
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError
from silo.guard.commands import Halts
from silo.guard.ledger import Ledger
from silo.guard.messages import ExchangeInterrupted
from tests.world import ADAPTER, PEER_KEYS, Killed, Loop, command, failing, recording

BASE = codec.sha256_hex(ADAPTER)
TRAP = "f" * 64
EVIDENCE = recording("round.equivocation")


@pytest.fixture
def loop(loop: Loop) -> Loop:
    loop.offer_plan()
    loop.open_round()
    return loop


def tell_otherwise(loop: Loop) -> None:
    """A second transcript of round 1; the rounds after it begin from the first one's adapter again."""
    loop.show_round(1, TRAP)
    loop.turn(2)


def equivocations(loop: Loop) -> int:
    return len(loop.bench.events("round.equivocation"))


def release(loop: Loop) -> None:
    halts = Halts(loop.bench.judge, loop.bench.ledger)
    (row,) = halts.rows()
    halts.lift_halt(command("approvals.release", {"kind": row.kind, "digest": row.digest}))


def halted_until_released(loop: Loop) -> None:
    """Over a restart, once on record; after the release the next round is trained in, and nothing halts again."""
    for _ in range(2):
        loop.restart()
        loop.open_round(2)
        assert loop.bench.judge.halted and loop.guard._agreement.halted
        assert loop.coordinator.sent == [] and loop.trainer.tasks() == []
        loop.coordinator.script.clear()
        assert equivocations(loop) == 1
    release(loop)
    for _ in range(2):
        loop.restart()
        assert not loop.bench.judge.halted and not loop.bench.ledger.equivocation
    loop.open_round(2)
    assert loop.trainer.tasks() == ["Evaluate"]
    tell_otherwise(loop)  # the same pair is no news
    assert not loop.bench.judge.halted and equivocations(loop) == 1


# ---- evidence --------------------------------------------------------------------------------------------


def test_T20_T39_evidence_that_is_kept_halts_over_restarts(loop: Loop) -> None:
    tell_otherwise(loop)
    halted_until_released(loop)


@pytest.mark.parametrize("method", ["keep_equivocation", "keep_transcript", "acknowledge"])
@pytest.mark.parametrize("written", [False, True])
def test_T20_T39_killed_beside_a_write_of_evidence_into_the_ledger(loop: Loop, method: str, written: bool) -> None:
    with pytest.raises(Killed), failing(Ledger, method, after=written):
        tell_otherwise(loop)
    halted_until_released(loop)


@pytest.mark.parametrize("written", [False, True])
def test_T20_T39_killed_beside_the_record_of_evidence(loop: Loop, written: bool) -> None:
    with pytest.raises(Killed), failing(AuditLog, "append", when=EVIDENCE, after=written):
        tell_otherwise(loop)
    halted_until_released(loop)


def test_T20_T39_a_ledger_that_cannot_be_written_loses_no_evidence(loop: Loop) -> None:
    unwritable = OperationError("the ledger cannot be written", code="LEDGER_UNWRITABLE")
    with failing(Ledger, "keep_equivocation", unwritable):
        tell_otherwise(loop)
        assert loop.bench.judge.halted and loop.guard.failure is None and equivocations(loop) == 1
        loop.restart()  # still not to be written: the log alone holds the evidence
        loop.open_round(2)
        assert loop.bench.judge.halted and loop.coordinator.sent == [] and loop.trainer.tasks() == []
        loop.coordinator.script.clear()
    halted_until_released(loop)


@pytest.mark.parametrize("error", [RecordError("too many items"), LogFullError("no space")], ids=["refused", "full"])
def test_T20_T39_evidence_that_the_log_does_not_take_halts_over_restarts(loop: Loop, error: Exception) -> None:
    with failing(AuditLog, "append", error, when=EVIDENCE):
        tell_otherwise(loop)
        assert loop.bench.judge.halted and loop.guard.failure is None and equivocations(loop) == 0
        loop.restart()  # which the log still does not take
        assert loop.bench.judge.halted and loop.guard._agreement.halted
    halted_until_released(loop)


# ---- what follows from a refusal may fail like any other work ---------------------------------------------


def say_denied_round(loop: Loop) -> None:
    """round.open with a public step that the plan does not have."""
    body = pb.RoundOpen(base_digest=BASE, public_steps=[pb.PublicStep(step=99, prompt_indices=[1])])
    loop.coordinator.says("control.poll", "round.open", body, run="run-1", round=2)


def test_T39_a_disk_that_is_full_when_a_no_is_recorded_halts(loop: Loop) -> None:
    say_denied_round(loop)
    a_no = recording("egress.decision", kind="control.abstain")
    with failing(AuditLog, "append", LogFullError("no space"), when=a_no):
        loop.turn(2)
    assert loop.bench.judge.halted == "no space" and loop.guard.failure is None
    assert [fields["reason"] for name, fields in loop.desk.published if name == "halted"] == ["no space"]


def test_T39_an_orderly_stop_while_a_no_is_said_is_no_failure(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    say_denied_round(loop)
    loop.coordinator.fails_at("control.abstain", ExchangeInterrupted("the exchange was given up"))
    exchange = loop.coordinator.exchange

    def stops(envelope: pb.Envelope, payload: bytes, **rest: Any) -> Any:
        if envelope.kind == "control.abstain":
            loop.guard.stop()  # as a signal handler does
        return exchange(envelope, payload, **rest)

    monkeypatch.setattr(loop.coordinator, "exchange", stops)
    taken = loop.bench.ledger.acknowledged
    loop.turn(2)
    assert loop.guard.stopping and loop.guard.failure is None and not loop.bench.judge.halted
    assert loop.bench.ledger.acknowledged == taken  # the no is said when it comes again


def test_T39_an_exchange_that_is_given_up_without_a_stop_is_a_failure(loop: Loop) -> None:
    say_denied_round(loop)
    loop.coordinator.fails_at("control.abstain", ExchangeInterrupted("the exchange was given up"))
    with pytest.raises(ExchangeInterrupted):
        loop.turn(2)


def test_T20_the_counterpart_a_round_that_everybody_signed_alike_is_no_halt(loop: Loop) -> None:
    loop.show_round(2, BASE)
    loop.coordinator.says("control.poll", "round.agreed", loop.signed_by(*PEER_KEYS), run="run-1", round=2)
    loop.turn(2)
    loop.restart()
    assert not loop.bench.judge.halted and equivocations(loop) == 0
