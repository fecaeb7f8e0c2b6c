"""T20, T24: what a hostile coordinator writes into the lists of round.agreed and round.result, and how much of it.

The real guard against a scripted coordinator: a list says one thing of each silo of the plan, whatever is refused costs
as little as an honest one, and no message ends the silo.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import LIST_ITEMS_MAX, RecordError
from fedsilo.audit.transcripts import check_rounds
from fedsilo.protocol import codec
from fedsilo.protocol import transcript as transcripts
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.place import Place
from fedsilo.protocol.transcript import is_signed, sign_transcript, silo_id
from silo.guard.messages import Inbound
from tests.policies import setting
from tests.world import ADAPTER, PEER_KEYS, Loop

BASE = codec.sha256_hex(ADAPTER)
TRAP = "f" * 64
GARBAGE = b"\x07" * 64
MANY = LIST_ITEMS_MAX + 1


@pytest.fixture
def loop(loop: Loop) -> Loop:
    loop.offer_plan()
    return loop


def say(loop: Loop, kind: str, body: Any, number: int = 1) -> None:
    loop.coordinator.says("control.poll", kind, body, run="run-1", round=number)
    loop.turn(2)


def denied(loop: Loop) -> list[tuple[str, list[str]]]:
    decisions = loop.bench.events("ingress.decision")
    return [(row["kind"], row["reasons"]) for row in decisions if row["decision"] == "deny"]


def waits(loop: Loop) -> None:
    """Round 1 is signed here, and waits for the others."""
    loop.show_round(1, BASE)
    loop.turn(2)


# ---- one row for each silo -------------------------------------------------------------------------------


def test_T20_a_second_signature_of_one_silo_is_not_let_in_and_the_log_still_verifies(
    loop: Loop, tmp_path: Path
) -> None:
    waits(loop)
    body = loop.signed_by("hospital_b")
    body.countersignatures.add(silo="hospital_b", transcript_sha256=loop.shown.digest, signature=GARBAGE)
    say(loop, "round.agreed", body)
    assert denied(loop) == [("round.agreed", ["ROSTER"])]
    assert loop.trainer.tasks() == [] and loop.bench.events("round.agreed") == []
    loop.open_round(2)  # the counterpart
    assert loop.trainer.tasks() == ["Evaluate"]
    loop.bench.audit.checkpoint()
    log = tmp_path / "a" / "audit"
    results = verify_logs([log])
    check_rounds(results, [log])
    assert results[0]["problems"] == [] and results[0]["verified"]


@pytest.mark.parametrize("digest", ["", TRAP, "free text", None])
def test_T20_only_signatures_that_were_verified_are_recorded(loop: Loop, digest: str | None) -> None:
    """Whatever a policy lets in: None is the digest of the very transcript."""
    waits(loop)
    body = loop.signed_by("hospital_b")
    good = body.countersignatures[0].signature
    over = loop.shown.digest if digest is None else digest
    body.countersignatures.add(silo="hospital_b", transcript_sha256=over, signature=GARBAGE)
    payload = codec.encode(body)
    item = Inbound(Place("run-1", 1, 0, "round.agreed"), 9, body, payload, codec.sha256_hex(payload), {})
    assert loop.guard._agreement.take_in(item, setting.PLAN) is not None
    (agreed,) = loop.bench.events("round.agreed")
    assert set(agreed["detail"]["signatures"]) == {"hospital_a", "hospital_b"}
    assert agreed["detail"]["signatures"]["hospital_b"] == good.hex()


# ---- a list longer than any record takes -----------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"participants": ["hospital_b"] * MANY},
        {"verdicts": [pb.SiloVerdict(silo="hospital_b", verdict="accepted")] * MANY},
        {"participants": ["hospital_b", "hospital_b"]},
        {"participants": ["hospital_e"]},
    ],
    ids=["participants", "verdicts", "twice", "a stranger"],
)
def test_T24_a_signed_result_that_repeats_a_silo_is_refused_and_the_run_goes_on(
    loop: Loop, fields: dict[str, Any]
) -> None:
    loop.open_round()
    say(loop, "round.result", loop.ended(committed=True, adapter_digest=BASE, **fields))
    ((kind, reasons),) = denied(loop)
    assert kind == "round.result" and "ROSTER" in reasons
    assert loop.bench.events("round.result") == [] and not loop.bench.gate.halted and loop.guard._failure is None
    loop.open_round(2)
    verdicts = [pb.SiloVerdict(silo=name, verdict="accepted") for name in setting.PLAN.silos]
    honest = loop.ended(committed=True, adapter_digest=BASE, participants=setting.PLAN.silos, verdicts=verdicts)
    say(loop, "round.result", honest, number=2)
    (record,) = loop.bench.events("round.result")
    assert record["detail"]["survivors"] == list(setting.PLAN.silos) and len(denied(loop)) == 1


@pytest.mark.parametrize(
    ("event", "refusal"),
    [("round.result", ("round.result", ["RECORD_REFUSED"])), ("ingress.decision", ("unknown", ["RECORD_REFUSED"]))],
)
def test_T24_what_no_record_takes_is_refused_and_never_the_end(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, event: str, refusal: tuple[str, list[str]]
) -> None:
    """Stands for a list, or a fact, that is longer than a record may be, where no rule has seen it."""
    loop.open_round()
    append = AuditLog.append

    def refuses(log: AuditLog, name: str, **fields: Any) -> int:
        if (name, fields.get("kind"), fields.get("decision", "allow")) == (event, "round.result", "allow"):
            raise RecordError("too many items")
        return append(log, name, **fields)

    body = loop.ended(committed=True, adapter_digest=BASE, participants=["hospital_b", "hospital_c"])
    with monkeypatch.context() as patched:
        patched.setattr(AuditLog, "append", refuses)
        say(loop, "round.result", body)
    assert denied(loop) == [refusal] and loop.bench.events("round.result") == []
    assert loop.guard._failure is None and not loop.bench.gate.halted
    loop.open_round(2)
    say(loop, "round.result", loop.ended(committed=True, adapter_digest=BASE), number=2)
    assert len(loop.bench.events("round.result")) == 1


# ---- what is refused is looked at, too, and costs little ---------------------------------------------------


@pytest.mark.parametrize("digests", ["one", "many"])
def test_T24_of_any_number_of_signatures_as_many_as_the_roster_are_verified(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, digests: str
) -> None:
    loop.open_round()
    verified: list[str] = []

    def counted(shown: Any, party: str, key: Any, signature: bytes, **rest: Any) -> bool:
        verified.append(party)
        return is_signed(shown, party, key, signature, **rest)

    monkeypatch.setattr(transcripts, "is_signed", counted)
    body = pb.RoundAgreed(transcript_sha256=loop.shown.digest)
    for number in range(2000):  # more bytes than a message may have
        name = setting.PLAN.silos[number % 4]
        digest = loop.shown.digest if digests == "one" else codec.sha256_hex(number.to_bytes(4, "big"))
        body.countersignatures.add(silo=name, transcript_sha256=digest, signature=GARBAGE)
    say(loop, "round.agreed", body)
    ((_, reasons),) = denied(loop)
    assert {"MESSAGE_BYTES", "ROSTER"} <= set(reasons) and not loop.bench.gate.halted
    assert 1 <= len(verified) <= len(setting.PLAN.silos)


def test_T20_evidence_among_repeated_rows_still_halts(loop: Loop) -> None:
    loop.open_round()
    body = loop.signed_by("hospital_b", transcript=replace(loop.shown, base_digest=TRAP))
    for name in ("stranger", "hospital_b", "hospital_b"):
        body.countersignatures.add(silo=name, transcript_sha256=loop.shown.digest, signature=GARBAGE)
    say(loop, "round.agreed", body)
    assert ("round.agreed", ["NOT_A_PEER", "ROSTER"]) in denied(loop)
    assert loop.bench.gate.halted and len(loop.bench.events("round.equivocation")) == 1


def test_T20_T24_what_a_silo_signed_that_is_no_digest_is_no_evidence(loop: Loop) -> None:
    """No record would take it."""
    loop.open_round()
    body = loop.signed_by("hospital_b")
    (row,) = body.countersignatures
    row.transcript_sha256 = "free text \n" * 100
    party = silo_id(setting.PLAN.federation, "hospital_b")
    said = transcripts.statement(
        federation=setting.PLAN.federation, run="run-1", round_number=1, digest=row.transcript_sha256, party=party
    )
    row.signature = PEER_KEYS["hospital_b"].sign(said)
    say(loop, "round.agreed", body)
    assert ("round.agreed", ["FIELD_NOT_ALLOWED"]) in denied(loop)
    assert not loop.bench.gate.halted and loop.guard._failure is None and not loop.bench.ledger.equivocation


# ---- what is kept of it ----------------------------------------------------------------------------------


def kept(loop: Loop) -> list[str]:
    rows = loop.bench.ledger._all("SELECT name FROM facts WHERE name LIKE 'run/%/transcript/%' ORDER BY name", ())
    return [row["name"] for row in rows]


def opening(loop: Loop, run: str, number: int) -> pb.RoundOpen:
    shown = replace(loop.shown, run=run, round=number)
    signature = sign_transcript(shown, setting.COORDINATOR, loop.coordinator.key)
    return pb.RoundOpen(base_digest=BASE, transcript=shown.canonical(), transcript_signature=signature)


def test_T24_transcripts_are_kept_of_rounds_that_the_open_run_has(loop: Loop) -> None:
    loop.open_round()
    for number in range(1, 8):
        for run, envelope in (("run-1", "run-1"), (f"run-{number + 1}", f"run-{number + 1}"), (f"r{number}", "run-1")):
            body = opening(loop, run, number)
            loop.coordinator.says("control.poll", "round.open", body, run=envelope, round=number)
            loop.turn()
    assert kept(loop) == [f"run/run-1/transcript/{number}" for number in range(1, setting.PLAN.rounds + 1)]
    assert not loop.bench.gate.halted


def test_T20_T24_the_transcripts_of_a_run_are_kept_until_the_next_has_some(loop: Loop) -> None:
    loop.open_round()
    first = loop.shown
    say(loop, "run.end", pb.RunEnd(outcome="finished", adapter_digest=BASE), number=0)
    assert kept(loop) == ["run/run-1/transcript/1"]
    later = setting.PLAN.model_copy(update={"run": "run-2"})
    loop.offer_plan(later)
    loop.open_round(plan=later)
    assert kept(loop) == ["run/run-2/transcript/1"]
    loop.shown = replace(first, base_digest=TRAP)
    loop.coordinator.says("control.poll", "round.open", opening(loop, "run-2", 1), run="run-2", round=1)
    loop.turn()
    assert loop.bench.gate.halted  # of the open run a second one is noticed as ever
