"""What the coordinator refuses, each beside the message that differs only in being right."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import select

from coordinator import store as db
from fedsilo.audit.log import AuditLog
from fedsilo.files.durable import DiskFullError
from fedsilo.grading import Verdict
from fedsilo.grading.answers import AnswerGrading
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from policies.replay import replay
from tests.policies.setting import SCHEMA
from tests.simulated.coordinator_parts import (
    COORDINATOR,
    SHORT,
    SILOS,
    House,
    PlainGrader,
    SimulatedSilo,
    federation,
    joined,
    once,
    played,
    started_again,
    step_asked_for,
    until_quiet,
)
from tests.world import failing


def code_of(body: Any) -> str:
    return body.code if isinstance(body, pb.Refusal) else "ok"


@once
def in_open_round(folder: Path) -> tuple[House, list[SimulatedSilo]]:
    """Round 1 stands open: everything came but factors, which nobody has sent."""
    return played(folder, mute={place: {"lora.factors"} for place in range(len(SILOS))})


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ("base_model_sha256", "BASE_MODEL_MISMATCH"),
        ("tokenizer_sha256", "TOKENIZER_MISMATCH"),
        ("template_sha256", "TEMPLATE_MISMATCH"),
        ("lora_schema_sha256", "SCHEMA_MISMATCH"),
        ("public_set_sha256", "PUBLIC_SET_MISMATCH"),
        ("held_out_sha256", "HELD_OUT_MISMATCH"),
    ],
)
def test_a_silo_that_differs_is_refused_at_join_with_both_values(tmp_path: Path, field: str, code: str) -> None:
    house, (silo, *_) = federation(tmp_path)
    refusal = silo.join(**{field: "9" * 64})
    assert (refusal.code, refusal.field, refusal.got) == (code, field, "9" * 64)
    assert len(refusal.expected) == 64 and refusal.expected != refusal.got
    member = house.rows(lambda session: session.get_one(db.Member, "hospital_a"))
    assert member.state == "refused" and code in member.refusal
    assert code_of(silo.join()) == "ok"
    assert house.rows(lambda session: session.get_one(db.Member, "hospital_a")).state == "joined"


@pytest.mark.parametrize(
    ("changes", "code", "expected", "got"),
    [
        ({"load": "bf16"}, "LOAD_MISMATCH", "fp32", "bf16"),
        ({"protocol_min": 3, "protocol_max": 4}, "PROTOCOL_RANGE", "2", "3-4"),
    ],
)
def test_another_load_or_protocol_is_refused(
    tmp_path: Path, changes: dict[str, Any], code: str, expected: str, got: str
) -> None:
    _, (silo, *_) = federation(tmp_path)
    refusal = silo.join(**changes)
    assert (refusal.code, refusal.expected, refusal.got) == (code, expected, got)


def test_T28_only_listed_silos_are_heard(tmp_path: Path) -> None:
    house, _ = federation(tmp_path)
    stranger = SimulatedSilo(house, "hospital_a2")
    assert code_of(stranger.join()) == "NOT_A_MEMBER"
    elsewhere = SimulatedSilo(house, "hospital_a", federation="other-net")
    assert code_of(elsewhere.join()) == "NOT_A_MEMBER"


def test_T29_a_message_of_another_federation_or_sender_is_refused(tmp_path: Path) -> None:
    _, (first, second, *_) = federation(tmp_path)
    payload = codec.encode(pb.Heartbeat())
    for field, value in (("federation", "other-net"), ("sender", second.peer.spiffe_id)):
        envelope = first.envelope("control.heartbeat", payload)
        setattr(envelope, field, value)
        assert code_of(first.deliver(first.signed(envelope), payload)) == "SENDER_MISMATCH"
    assert code_of(first.say("control.heartbeat", pb.Heartbeat())) == "ok"


def test_T29_a_wrong_signature_or_payload_is_refused(tmp_path: Path) -> None:
    _, (silo, *_) = federation(tmp_path)
    payload = codec.encode(pb.Progress())
    envelope = silo.envelope("control.progress", payload)
    envelope.round = 3
    assert code_of(silo.deliver(envelope, payload)) == "SIGNATURE_INVALID"
    other = silo.envelope("control.progress", payload)
    other.signature = Ed25519PrivateKey.generate().sign(codec.signing_bytes(other))
    assert code_of(silo.deliver(other, payload)) == "SIGNATURE_INVALID"
    swapped = silo.envelope("control.progress", payload)
    assert code_of(silo.deliver(swapped, codec.encode(pb.Progress(round=1, step=2)))) == "DIGEST_MISMATCH"
    assert code_of(silo.say("control.progress", pb.Progress())) == "ok"


def test_T03_padding_and_unknown_kinds_are_refused(tmp_path: Path) -> None:
    _, (silo, *_) = federation(tmp_path)
    padded = codec.encode(pb.Progress(round=1)) + b"\xfa\x7f\x03abc"
    assert code_of(silo.say("control.progress", padded)) == "UNKNOWN_FIELD"
    assert code_of(silo.say("control.gossip", pb.Heartbeat())) == "UNKNOWN_KIND"


@pytest.mark.parametrize(
    ("field", "code"),
    [
        ("run", "MALFORMED"),
        ("kind", "UNKNOWN_KIND"),
        ("sender", "SENDER_MISMATCH"),
        ("federation", "SENDER_MISMATCH"),
    ],
)
@pytest.mark.parametrize("listed", [True, False])
def test_T24_a_nul_in_an_envelope_is_refused_and_on_record(tmp_path: Path, field: str, code: str, listed: bool) -> None:
    house, (silo, *_) = federation(tmp_path)
    sending = silo if listed else SimulatedSilo(house, "hospital_a2")
    payload = codec.encode(pb.Heartbeat())
    envelope = sending.envelope("control.heartbeat", payload)
    setattr(envelope, field, getattr(envelope, field) + "\0")
    size = house.audit.size
    expected = code if listed or code == "SENDER_MISMATCH" else "NOT_A_MEMBER"
    assert code_of(sending.deliver(sending.signed(envelope), payload)) == expected
    [record] = house.audit.records(size)
    assert (record["event"], record["decision"], record["reasons"]) == ("ingress.decision", "deny", [expected])
    assert record["peer"] == sending.peer.spiffe_id and not house.driver.halted
    # the counterparts: without it, in no run, and in a run of which nobody knows
    assert code_of(silo.say("control.heartbeat", pb.Heartbeat())) == "ok"
    assert code_of(silo.say("control.heartbeat", pb.Heartbeat(), run="run\x01")) == "NO_SUCH_RUN"


def test_T29_a_replayed_sequence_is_refused_also_after_a_restart(tmp_path: Path) -> None:
    house, (silo, *_) = federation(tmp_path)
    silo.say("control.heartbeat", pb.Heartbeat())
    assert silo.last is not None
    captured = silo.last
    assert code_of(silo.deliver(*captured)) == "SEQUENCE_REPLAYED"
    house.close()
    silo.house = house = House(tmp_path, clock=house.clock)
    assert code_of(silo.deliver(*captured)) == "SEQUENCE_REPLAYED"
    assert code_of(silo.say("control.heartbeat", pb.Heartbeat())) == "ok"


def test_T29_a_retry_of_the_same_bytes_is_acknowledged_and_counted_once(tmp_path: Path) -> None:
    house, (silo, *_) = in_open_round(tmp_path)
    payload = silo.delta_payload(1)
    assert code_of(silo.say("lora.factors", payload, run="run-1", number=1)) == "ok"
    assert silo.last is not None
    assert code_of(silo.deliver(*silo.last)) == "ok"
    assert code_of(silo.say("lora.factors", payload, run="run-1", number=1)) == "ok"
    other = silo.delta_payload(1, tensors={name: values * 2 for name, values in silo.delta(1).items()})
    assert code_of(silo.say("lora.factors", other, run="run-1", number=1)) == "INGRESS_DENIED"
    uploads = house.rows(
        lambda session: session.scalars(select(db.Upload).where(db.Upload.kind == "lora.factors")).all()
    )
    assert [upload.digest for upload in uploads] == [codec.sha256_hex(payload)]


def test_T50_bad_factors_are_refused_by_the_same_rules_as_at_the_silo(tmp_path: Path) -> None:
    _, (silo, *_) = in_open_round(tmp_path)
    good = silo.delta(1)
    name = next(iter(good))
    wrong: list[dict[str, Any]] = [
        {"tensors": {**good, name: np.full_like(good[name], np.nan)}},
        {"tensors": {**good, name: good[name] * np.float32(1e9)}},
        {"tensors": {key: value for key, value in good.items() if key != name}},
        {"base_digest": "1" * 64},
        {"rank": SCHEMA.rank + 1},
    ]
    for changes in wrong:
        reply = silo.say("lora.factors", silo.delta_payload(1, **changes), run="run-1", number=1)
        assert code_of(reply) == "INGRESS_DENIED", changes.keys()
    assert code_of(silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=1)) == "ok"


def test_T23_more_bytes_than_the_schema_makes_are_refused_before_they_are_read(tmp_path: Path) -> None:
    _, (silo, *_) = in_open_round(tmp_path)
    extra = {**silo.delta(1), "zz": np.zeros(64, np.float32)}
    assert code_of(silo.say("lora.factors", silo.delta_payload(1, tensors=extra), run="run-1", number=1)) == "TOO_LARGE"


def test_T21_a_wrong_answer_never_becomes_a_donor(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    bad = silos[1]
    honest = bad.answers
    bad.answers = lambda indices: _with_a_wrong_one(honest(indices))  # type: ignore[method-assign]
    house.submit(SHORT)
    for silo in silos:
        silo.join()
    until_quiet(silos)
    # nothing of hospital_b was pooled; its first step closes without it when the deadline passes
    denied = [
        row for row in house.audit.records() if row.get("kind") == "public.responses" and row["decision"] == "deny"
    ]
    assert denied and all(row["peer"] == bad.peer.spiffe_id and "NOT_VERIFIED" in row["reasons"] for row in denied)
    house.advance(100.0)
    until_quiet(silos)
    for silo in silos:
        for envelope, body in silo.heard:
            if envelope.kind == "public.donors":
                assert all(donor.origin != "hospital_b" for row in body.prompts for donor in row.donors)


class CountingGrader(PlainGrader):
    def __init__(self) -> None:
        self.batches: list[int] = []

    def grade_many(self, pairs: Any, budget_seconds: float | None = None) -> list[Verdict]:
        self.batches.append(len(pairs))
        return super().grade_many(pairs)


def before_the_first_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[House, SimulatedSilo, CountingGrader]:
    """Round 1 stands open, step 2 has been asked for, and hospital_c has not answered yet."""
    house, silos = step_asked_for(folder)
    grader = CountingGrader()
    monkeypatch.setattr(house.driver.dependencies.ingress, "grading", AnswerGrading([grader], lambda _: 60.0))
    return house, silos[2], grader


def asked_for(house: House, step: int = 2) -> tuple[int, ...]:
    row = house.round(1)
    return tuple(json.loads(row.public_steps)[str(step)])


def test_T23_nothing_is_graded_that_fails_a_cheap_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house, silo, grader = before_the_first_answers(tmp_path, monkeypatch)
    good = silo.answers(asked_for(house))
    answers = sum(len(row.responses) for row in good.prompts)

    too_many = silo.answers(asked_for(house))
    for _ in range(3 * 4 + 1 - answers):  # one more than prompts_per_step x samples_per_prompt
        too_many.prompts[0].responses.add(text="x", finish=pb.FINISH_STOP)
    limits = house.policy.file.egress.public_responses
    assert limits is not None
    too_long = silo.answers(asked_for(house))
    too_long.prompts[0].responses[0].text = "x" * limits.max_bytes_per_step
    places = [(too_many, 1, 2), (too_long, 1, 2), (good, 2, 2), (good, 1, 3), (good, 1, 0)]
    for body, number, step in places:
        reply = silo.say("public.responses", body, run="run-1", number=number, step=step)
        assert code_of(reply) in {"INGRESS_DENIED", "ROUND_CLOSED"}
    assert code_of(silo.say("public.responses", good, run="run-2", number=1, step=2)) == "NO_SUCH_RUN"
    assert grader.batches == []

    assert code_of(silo.say("public.responses", good, run="run-1", number=1, step=2)) == "ok"
    assert grader.batches == [answers]


def test_T29_a_replay_or_retry_of_public_answers_is_not_graded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, silo, grader = before_the_first_answers(tmp_path, monkeypatch)
    good = silo.answers(asked_for(house))
    assert code_of(silo.say("public.responses", good, run="run-1", number=1, step=2)) == "ok"
    assert silo.last is not None
    assert code_of(silo.deliver(*silo.last)) == "ok"  # the acknowledgement was lost
    envelope, _ = silo.last
    other = codec.encode(silo.answers(asked_for(house, 4)))
    envelope.step, envelope.payload_digest = 4, bytes.fromhex(codec.sha256_hex(other))
    assert code_of(silo.deliver(silo.signed(envelope), other)) == "SEQUENCE_REPLAYED"
    assert len(grader.batches) == 1
    envelope.sequence += 1
    assert code_of(silo.deliver(silo.signed(envelope), other)) == "ok"
    assert len(grader.batches) == 2


def test_the_lock_is_free_while_answers_are_graded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house, silo, grader = before_the_first_answers(tmp_path, monkeypatch)
    taken: list[bool] = []

    def try_the_lock() -> None:
        lock = house.driver.changing()
        taken.append(lock.acquire(timeout=5))
        lock.release()

    def grade(pairs: Any, budget_seconds: float | None = None) -> list[Verdict]:
        other = threading.Thread(target=try_the_lock)
        other.start()
        other.join()
        return PlainGrader.grade_many(grader, pairs)

    monkeypatch.setattr(grader, "grade_many", grade)
    reply = silo.say("public.responses", silo.answers(asked_for(house)), run="run-1", number=1, step=2)
    assert code_of(reply) == "ok" and taken == [True]


def test_T28_a_silo_whose_last_hello_was_refused_contributes_nothing(tmp_path: Path) -> None:
    house, (silo, *_) = in_open_round(tmp_path)
    payload = silo.delta_payload(1)
    assert code_of(silo.join(base_model_sha256="9" * 64)) == "BASE_MODEL_MISMATCH"
    assert code_of(silo.say("lora.factors", payload, run="run-1", number=1)) == "NOT_A_MEMBER"
    kept = house.rows(lambda session: session.scalars(select(db.Upload).where(db.Upload.kind == "lora.factors")).all())
    assert kept == [] and not house.blobs.find(codec.sha256_hex(payload))
    assert code_of(silo.join()) == "ok"
    assert code_of(silo.say("lora.factors", payload, run="run-1", number=1)) == "ok"
    told = decisions(house, "hospital_a", "control.hello", "lora.factors")
    assert told == [
        ("control.hello", "allow", [], True), ("control.hello", "deny", ["BASE_MODEL_MISMATCH"], False),
        ("lora.factors", "deny", ["NOT_A_MEMBER"], False), ("control.hello", "allow", [], True),
        ("lora.factors", "allow", [], True),
    ]  # fmt: skip


def decisions(house: House, silo: str, *kinds: str) -> list[tuple[str, str, list[str], bool]]:
    """What the log says became of a silo's messages, and whether with facts; and that no policy says otherwise."""
    records = [
        record for record in house.audit.records()
        if record["event"] == "ingress.decision" and record["peer"].endswith(f"/{silo}") and record["kind"] in kinds
    ]  # fmt: skip
    assert not any(each.changed for each in replay(records, house.policy))
    return [(each["kind"], each["decision"], each["reasons"], bool(each.get("facts"))) for each in records]


def test_T28_what_is_refused_though_the_rules_allow_it_is_not_on_record_as_let_in(tmp_path: Path) -> None:
    house, (silo, *_) = in_open_round(tmp_path)
    base = house.run().base_digest
    for digest, code in (("9" * 64, "NOT_FOUND"), (base, "ok")):
        assert code_of(silo.say("control.fetch", pb.Fetch(digest=digest))) == code
    counted = house.rows(lambda session: db.counts_of(session, "hospital_a"))
    assert code_of(silo.say("control.fetch", pb.Fetch(digest="9" * 64))) == "NOT_FOUND"
    assert house.rows(lambda session: db.counts_of(session, "hospital_a")) != counted  # its rate holds for these too
    assert decisions(house, "hospital_a", "control.fetch")[-3:] == [
        ("control.fetch", "deny", ["NOT_FOUND"], False), ("control.fetch", "allow", [], True),
        ("control.fetch", "deny", ["NOT_FOUND"], False),
    ]  # fmt: skip


def _with_a_wrong_one(body: pb.PublicResponses) -> pb.PublicResponses:
    body.prompts[0].responses[0].text = "wrong"
    return body


def test_T11_T28_an_error_that_nobody_thought_of_is_on_record_and_counted(tmp_path: Path) -> None:
    house, (silo, *_) = in_open_round(tmp_path)
    before = decisions(house, "hospital_a", "control.fetch")
    counted = house.rows(lambda session: db.counts_of(session, "hospital_a"))
    fault = ValueError("nobody thought of it")  # before anything is done for it
    with failing(house.driver.services, "_adapter", fault), pytest.raises(ValueError, match="nobody thought"):
        silo.say("control.fetch", pb.Fetch(digest=house.run().base_digest))
    assert decisions(house, "hospital_a", "control.fetch") == [*before, ("control.fetch", "allow", [], True)]
    assert house.rows(lambda session: db.counts_of(session, "hospital_a")) != counted
    assert not isinstance(silo.say("control.fetch", pb.Fetch(digest=house.run().base_digest)), pb.Refusal)


def test_an_upload_of_another_silo_cannot_be_fetched(tmp_path: Path) -> None:
    house, (first, second, *_) = in_open_round(tmp_path)
    payload = first.delta_payload(1)
    first.say("lora.factors", payload, run="run-1", number=1)
    assert code_of(second.say("control.fetch", pb.Fetch(digest=codec.sha256_hex(payload)))) == "NOT_FOUND"
    base = house.run().base_digest
    assert isinstance(second.say("control.fetch", pb.Fetch(digest=base)), bytes)


def test_an_item_stays_until_it_is_acknowledged(tmp_path: Path) -> None:
    _, silos = joined(tmp_path)
    silo = silos[0]
    first = silo.say("control.poll", pb.Poll())
    again = silo.say("control.poll", pb.Poll())
    assert isinstance(first, pb.RunPlan) and first == again
    newest = silo.heard[-1][0].sequence
    assert isinstance(silo.say("control.poll", pb.Poll(acknowledged_sequence=newest)), pb.Ack)


def test_T39_a_full_disk_halts_clearly_and_acknowledges_nothing(tmp_path: Path) -> None:
    house, (silo, *_) = in_open_round(tmp_path)

    with failing(house.blobs, "keep", DiskFullError("no space left")), pytest.raises(DiskFullError):
        silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=1)
    assert house.driver.halted == "DISK_FULL"
    assert ("halt", {"code": "DISK_FULL", "message": "no space left"}) in house.published
    assert code_of(silo.say("control.heartbeat", pb.Heartbeat())) == "HALTED"
    # with space again, a fresh start takes the same upload: nothing of the first try was kept
    started_again(house, [silo])
    assert code_of(silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=1)) == "ok"


def test_T38_checkpoints_are_countersigned_both_ways_and_a_shortened_log_is_not(tmp_path: Path) -> None:
    house, (silo, *_) = federation(tmp_path / "house")

    def log_of(name: str) -> AuditLog:
        origin = silo.peer.spiffe_id
        return AuditLog(tmp_path / name, origin=origin, key=silo.key, actor=origin, reserve_bytes=0)

    with log_of("log") as log:
        log.trust_peer(COORDINATOR, house.key.public_key())
        for _ in range(3):
            log.append("start")
            reply = silo.say("control.checkpoint", log.offer(COORDINATOR))
            assert isinstance(reply, pb.Checkpoint)
            assert log.take(reply, COORDINATOR) is not None
        assert log.offer(COORDINATOR).previous_size == log.size
    with log_of("forked") as forked:
        forked.append("start")
        note = forked.checkpoint()
        assert code_of(silo.say("control.checkpoint", pb.Checkpoint(note=note))) == "CHECKPOINT_INCONSISTENT"
    assert decisions(house, "hospital_a", "control.checkpoint") == [
        *[("control.checkpoint", "allow", [], True)] * 3,
        ("control.checkpoint", "deny", ["CHECKPOINT_INCONSISTENT"], False),
    ]
