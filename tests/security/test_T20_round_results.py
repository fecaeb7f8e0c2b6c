"""T20: how a round ended is signed for itself, and a coordinator that is killed at any moment leaves one story.

Two silos that were told of two ends can prove it offline, and a silo believes no end that nobody signed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import outbox
from coordinator import store as db
from coordinator.runs import Agreements
from fedsilo.audit.log import AuditLog
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError, VerificationError
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import plan_from_canonical
from fedsilo.protocol.transcript import (
    RoundEnd,
    SignedEnd,
    end_of_record,
    sign_end,
    sign_transcript,
    transcript_from_canonical,
    two_ends,
)
from tests.policies import setting
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, SimulatedSilo, until_quiet
from tests.simulated.coordinator_parts import House as PlainHouse
from tests.world import COORDINATOR_KEY, Loop, World

BASE, OTHER = "a" * 64, "b" * 64
PARTY = "spiffe://cardio-net/coordinator/main"
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
END = RoundEnd(
    "cardio-net", "run-1", 3, "c" * 64, True, BASE, ("hospital_a",), {"hospital_a": "accepted", "hospital_b": "absent"}
)


# ---- the signed end, offline -----------------------------------------------------------------------------


def read_back(signed: SignedEnd) -> SignedEnd:
    """As it is found in a log: through the JSON of a record."""
    detail = json.loads(json.dumps(signed.to_detail()))
    return end_of_record(signed.end.federation, signed.end.run, signed.end.round, detail)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("federation", "other-net"),
        ("run", "run-2"),
        ("round", 4),
        ("transcript_sha256", "d" * 64),
        ("committed", False),
        ("aggregate", OTHER),
        ("survivors", ("hospital_a", "hospital_b")),
        ("verdicts", {"hospital_a": "accepted", "hospital_b": "left_out"}),
    ],
)
def test_T20_a_signature_under_a_result_is_under_each_of_its_fields(change: str, value: Any) -> None:
    signed = sign_end(END, PARTY, KEY)
    assert read_back(signed) == signed and signed.verifies(KEY.public_key())
    assert not replace(signed, end=replace(END, **{change: value})).verifies(KEY.public_key())
    assert not replace(signed, party="spiffe://cardio-net/coordinator/second").verifies(KEY.public_key())
    assert not signed.verifies(Ed25519PrivateKey.from_private_bytes(b"x" * 32).public_key())


def test_T20_a_result_is_signed_over_bytes_that_no_transcript_is_signed_over() -> None:
    """Computed by hand: the prefix, and RFC 8785 JSON, which sorts keys and has no spaces."""
    text = (
        '{"aggregate":"' + BASE + '","committed":true,"federation":"cardio-net","party":"' + PARTY + '","round":3,'
        '"run":"run-1","survivors":["hospital_a"],"transcript_sha256":"' + "c" * 64 + '",'
        '"verdicts":{"hospital_a":"accepted","hospital_b":"absent"}}'
    )
    message = b"fedsilo-round-result-v1\n" + text.encode()
    assert SignedEnd(END, PARTY, KEY.sign(message)).verifies(KEY.public_key())
    assert not SignedEnd(END, PARTY, KEY.sign(text.encode())).verifies(KEY.public_key())


def test_T20_two_signed_results_of_one_round_are_proof_and_nothing_less_is() -> None:
    one, keys = sign_end(END, PARTY, KEY), [KEY.public_key()]
    other = sign_end(replace(END, aggregate=OTHER, committed=False), PARTY, KEY)
    assert two_ends(read_back(one), read_back(other), keys) == ("committed", "aggregate")
    assert two_ends(one, one, keys) == ()
    assert two_ends(one, replace(other, signature=one.signature), keys) == ()  # one log's owner made it up
    assert two_ends(replace(one, signature=b""), other, keys) == ()
    assert two_ends(one, sign_end(replace(other.end, round=4), PARTY, KEY), keys) == ()
    assert two_ends(one, sign_end(other.end, PARTY + "2", KEY), keys) == ()
    assert two_ends(one, other, []) == ()
    renewed = Ed25519PrivateKey.from_private_bytes(b"r" * 32)
    later = sign_end(other.end, PARTY, renewed)
    assert two_ends(one, later, keys) == ()
    assert two_ends(one, later, [*keys, renewed.public_key()]) == ("committed", "aggregate")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("committed", 1), ("survivors", 5), ("verdicts", [1]), ("signature", "zz"), ("signature", None), ("sha256", 7),
        ("party", None), ("survivors", [1]), ("verdicts", {"hospital_a": 1}),
    ],
)  # fmt: skip
def test_T20_a_result_of_another_shape_is_named_malformed(name: str, value: Any) -> None:
    detail = sign_end(END, PARTY, KEY).to_detail()
    assert end_of_record("cardio-net", "run-1", 3, detail).end == END
    for broken in (detail | {name: value}, {key: each for key, each in detail.items() if key != name}):
        with pytest.raises(VerificationError, match="malformed"):
            end_of_record("cardio-net", "run-1", 3, broken)


# ---- at a silo -------------------------------------------------------------------------------------------


@pytest.fixture
def loop(loop: Loop) -> Loop:
    loop.offer_plan()
    return loop


def unsigned(body: pb.RoundResult, loop: Loop) -> None:
    body.result_signature = b""


def signed_for_another_end(body: pb.RoundResult, loop: Loop) -> None:
    body.adapter_digest = OTHER


def signed_by_somebody_else(body: pb.RoundResult, loop: Loop) -> None:
    end = RoundEnd.of(loop.shown, body)
    body.result_signature = sign_end(end, setting.COORDINATOR, KEY).signature


def signed_as_a_transcript(body: pb.RoundResult, loop: Loop) -> None:
    body.result_signature = sign_transcript(loop.shown, setting.COORDINATOR, COORDINATOR_KEY)


@pytest.mark.parametrize("forge", [unsigned, signed_for_another_end, signed_by_somebody_else, signed_as_a_transcript])
def test_T20_a_silo_takes_no_result_that_the_coordinator_did_not_sign(
    loop: Loop, forge: Callable[[pb.RoundResult, Loop], None]
) -> None:
    loop.open_round()
    body = loop.ended(committed=True, adapter_digest=BASE)
    honest = pb.RoundResult.FromString(body.SerializeToString())
    forge(body, loop)
    loop.coordinator.says("control.poll", "round.result", body, run="run-1", round=1)
    loop.turn()
    (refused,) = [row for row in loop.bench.events("ingress.decision") if row["kind"] == "round.result"][-1:]
    assert (refused["decision"], refused["reasons"]) == ("deny", ["RESULT_UNSIGNED"])
    assert loop.bench.events("round.result") == []
    loop.coordinator.says("control.poll", "round.result", honest, run="run-1", round=1)
    loop.turn()
    (record,) = loop.bench.events("round.result")
    found = end_of_record("cardio-net", "run-1", 1, record["detail"])
    assert found.verifies(COORDINATOR_KEY.public_key()) and found.end.aggregate == BASE


# ---- at both ends ----------------------------------------------------------------------------------------


def test_T20_both_logs_and_the_run_record_keep_the_signed_result(tmp_path: Path) -> None:
    made = World(tmp_path)
    assert made.run(rounds=2) == "finished"
    ours = [row["detail"] for row in made.records("round.result")]
    theirs = [row["detail"] for row in made.house.audit.records() if row["event"] == "round.result"]
    assert ours == theirs and len(ours) == 2
    for number, (detail, row) in enumerate(zip(ours, made.house.record()["rounds"], strict=True), start=1):
        signed = end_of_record("cardio-net", "run-1", number, detail)
        assert signed.verifies(made.house.key.public_key()) and signed.end.aggregate == row["adapter_sha256"]
        assert row["transcript"]["result"] == {**signed.end.to_json(), "signature": detail["signature"]}
    made.close()


def test_T20_the_coordinator_signs_one_end_of_a_round_only(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    until_quiet(silos)
    agreements: Agreements = house.driver.around.agreements
    with house.store.transaction() as session:
        plan = plan_from_canonical(session.get_one(db.Run, "run-1").plan)
        row = session.get_one(db.Round, ("run-1", 1))
        same = pb.RoundResult(committed=True, adapter_digest=row.adapter_digest, participants=SILOS[:3])
        body = next(body for envelope, body in silos[0].heard if envelope.kind == "round.result")
        assert agreements.result(session, plan, 1, same) == body
        with pytest.raises(OperationError, match="ends in two ways"):
            agreements.result(session, plan, 1, pb.RoundResult(committed=True, adapter_digest=OTHER))


# ---- kills -----------------------------------------------------------------------------------------------


# Three silos, one public step: what is asked is what a kill leaves at a round's two ends.
SHORT_RUN = RUN_YAML.replace("local_steps: 4", "local_steps: 2") + f"silos: [{', '.join(SILOS[:3])}]\n"


class Killed(OperationError):
    """The process ends here; what is on the disk stays."""


class House(PlainHouse):
    """With the silos around it, and what ends the reason for the kill."""

    silos: list[SimulatedSilo]
    undo: Callable[[], None]


def joined(folder: Path, undo: Callable[[], None] = lambda: None) -> tuple[House, list[SimulatedSilo]]:
    house = House(folder)
    silos: list[SimulatedSilo] = [Stubborn(house, name) for name in SILOS[:3]]
    house.undo, house.silos = undo, silos
    house.submit(SHORT_RUN)
    for silo in silos:
        silo.join(policy_sha256=codec.sha256_hex(silo.name.encode()))
    return house, silos


class Stubborn(SimulatedSilo):
    """Says again what got no answer, as a guard does, to the coordinator that was started meanwhile."""

    def deliver(self, envelope: pb.Envelope, payload: bytes) -> Any:
        try:
            return super().deliver(envelope, payload)
        except Killed:
            restart(self)
            again = pb.Envelope.FromString(envelope.SerializeToString())
            again.sequence = self.sequences[envelope.run] = self.sequences[envelope.run] + 1
            return super().deliver(self.signed(again), payload)


def restart(silo: SimulatedSilo) -> None:
    """Another process on the same folder; another silo has tightened its policy meanwhile."""
    old = silo.house
    assert isinstance(old, House)
    old.undo()
    old.close()
    house = House(old.folder, clock=old.clock)
    for each in old.silos:
        each.house = house
    other = next(each for each in old.silos if each is not silo)
    other.join(policy_sha256="a" * 64)


def one_story(house: House, silos: list[SimulatedSilo]) -> None:
    """The log says of each round what the database and the silos say, once, in its order."""
    assert house.run().state == "finished"
    rows = [row for row in house.audit.records() if row["event"].startswith("round.")]
    assert [(row["round"], row["event"]) for row in rows] == [
        (number, f"round.{what}") for number in (1, 2) for what in ("transcript", "agreed", "result")
    ]
    for number in (1, 2):
        kept = house.rows(lambda session, n=number: session.get_one(db.RoundTranscript, ("run-1", n)))
        shown = {
            transcript_from_canonical(body.transcript).digest
            for silo in silos
            for envelope, body in silo.heard
            if envelope.kind == "round.open" and envelope.round == number
        }
        assert shown == {kept.digest} == {row["detail"]["sha256"] for row in rows if row["round"] == number}
    assert house.rows(lambda session: session.query(db.PendingRecord).count()) == 0


EVENTS = ("round.transcript", "round.agreed", "round.result")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
def test_T20_T39_killed_before_a_rounds_transaction_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, number: int
) -> None:
    house, silos = joined(tmp_path, monkeypatch.undo)
    kind = {"round.transcript": "round.open"}.get(event, event)
    queue = outbox.queue

    def dies(session: Any, silo: str, place: Place, payload: bytes) -> None:
        queue(session, silo, place, payload)
        if (place.kind, place.round) == (kind, number):
            raise Killed("killed")

    monkeypatch.setattr(outbox, "queue", dies)
    until_quiet(silos)
    assert silos[0].house is not house  # it was killed
    one_story(silos[0].house, silos)
    silos[0].house.close()


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
def test_T20_T39_killed_between_the_database_and_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str, number: int, written: bool
) -> None:
    house, silos = joined(tmp_path, monkeypatch.undo)
    append = AuditLog.append

    def dies(log: AuditLog, name: str, **fields: Any) -> int:
        if (name, fields.get("round")) == (event, number):
            if written:
                append(log, name, **fields)
            raise Killed("killed")
        return append(log, name, **fields)

    monkeypatch.setattr(AuditLog, "append", dies)
    until_quiet(silos)
    assert silos[0].house is not house  # it was killed
    one_story(silos[0].house, silos)
    silos[0].house.close()
