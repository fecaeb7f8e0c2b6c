"""T20: a silo trains in a round only after enough silos have signed the very transcript that it was shown, a list says
one thing of each silo, and how a round ended is signed for itself: a coordinator killed at any moment leaves one
story.

The real guard against a scripted coordinator, and against the real one with other silos; the signed end also offline.
Each attack stands beside the honest case.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator import outbox
from coordinator import store as db
from coordinator.runs import Agreements, signatures
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import LIST_ITEMS_MAX, RecordError
from fedsilo.audit.transcripts import check_rounds
from fedsilo.protocol import codec
from fedsilo.protocol import transcript as transcripts
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, OperationError, UnreachableError, VerificationError
from fedsilo.protocol.place import Place
from fedsilo.protocol.plan import plan_from_canonical
from fedsilo.protocol.transcript import (
    KnownKey,
    RoundEnd,
    SignedEnd,
    end_of_record,
    is_signed,
    sign_end,
    sign_transcript,
    silo_id,
    transcript_from_canonical,
    two_ends,
)
from silo.guard.commands import EQUIVOCATION_KIND, Halts
from silo.guard.exchange import SHORT_POLL_SECONDS
from silo.guard.loop import Command
from silo.guard.messages import Inbound
from tests.policies import setting
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, House, SimulatedSilo, federation, until_quiet
from tests.world import (
    ADAPTER,
    COORDINATOR_KEY,
    OUR_KEY,
    PEER_KEYS,
    Loop,
    World,
    command,
    failing,
    recording,
    small_factors,
)

BASE = codec.sha256_hex(ADAPTER)
TRAP = "f" * 64
LOST = UnreachableError("the line is down")


@pytest.fixture
def loop(loop: Loop) -> Loop:
    loop.offer_plan()
    return loop


def trains(loop: Loop) -> bool:
    return bool(loop.trainer.tasks())


def denied(loop: Loop) -> list[tuple[str, list[str]]]:
    decisions = loop.bench.events("ingress.decision")
    return [(row["kind"], row["reasons"]) for row in decisions if row["decision"] == "deny"]


def abstained(loop: Loop) -> list[int]:
    return [pb.Abstain.FromString(raw).round for _, raw in loop.coordinator.bodies("control.abstain")]


def countersignatures(loop: Loop) -> list[bytes]:
    return [pb.Poll.FromString(raw).countersignature for _, raw in loop.coordinator.bodies("control.poll")]


def say_agreed(loop: Loop, body: pb.RoundAgreed, number: int = 1) -> None:
    loop.coordinator.says("control.poll", "round.agreed", body, run="run-1", round=number)
    loop.turn()


# ---- a round opens ---------------------------------------------------------------------------------------


def test_T20_nothing_is_trained_before_enough_have_signed_and_then_it_is(loop: Loop) -> None:
    shown = loop.show_round(1, BASE)
    loop.turn(3)
    assert not trains(loop) and loop.bench.judge.view.round == 1
    first, *later = countersignatures(loop)[-3:]
    assert first == b"" and later[0] == later[1]  # said with every poll while the round waits
    assert is_signed(shown, setting.SILO, OUR_KEY.public_key(), later[0])
    say_agreed(loop, loop.signed_by("hospital_b"))
    assert loop.trainer.tasks() == ["Evaluate"] and denied(loop) == []
    loop.turn()
    assert countersignatures(loop)[-1] == b""
    (transcript,), (agreed,) = loop.bench.events("round.transcript"), loop.bench.events("round.agreed")
    text = codec.canonical_json(transcript["detail"]["transcript"]).decode()
    assert transcript_from_canonical(text) == shown
    assert set(agreed["detail"]["signatures"]) == {"hospital_a", "hospital_b"}
    assert agreed["detail"]["sha256"] == codec.sha256_hex(text.encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("federation", "other-net"), ("run", "run-9"), ("round", 2), ("plan_sha256", "0" * 64), ("base_digest", TRAP),
        ("schema_sha256", "0" * 64), ("public_set_sha256", "0" * 64),
        ("policies", dict.fromkeys(setting.PLAN.silos, "0" * 64)),
    ],
)  # fmt: skip
def test_T20_a_transcript_that_names_something_else_than_this_silo_knows(loop: Loop, field: str, value: Any) -> None:
    loop.coordinator.script.clear()
    body = opening(loop, **{field: value})
    loop.coordinator.says("control.poll", "round.open", body, run="run-1", round=1)
    loop.turn()
    assert denied(loop) == [("round.open", ["TRANSCRIPT_DIFFERS"])] and abstained(loop) == [1]
    fields = [row["detail"]["fields"] for row in loop.bench.events("ingress.decision") if "fields" in row["detail"]]
    assert fields == [[field]]
    say_agreed(loop, loop.signed_by(*PEER_KEYS))
    assert not trains(loop) and not any(countersignatures(loop))
    loop.open_round(2)  # the counterpart: the next one is as it should be
    assert trains(loop)


def opening(loop: Loop, **changes: Any) -> pb.RoundOpen:
    """A round.open that names BASE, with a transcript that is signed and differs in these fields."""
    loop.show_round(1, BASE)
    loop.coordinator.script.clear()
    shown = loop.shown = replace(loop.shown, **changes)
    return pb.RoundOpen(
        base_digest=BASE,
        transcript=shown.canonical(),
        transcript_signature=sign_transcript(shown, setting.COORDINATOR, COORDINATOR_KEY),
    )


@pytest.mark.parametrize("silos", [("hospital_b", "hospital_c"), ("hospital_a", "hospital_x")])
def test_T20_a_roster_without_this_silo_or_with_a_stranger(loop: Loop, silos: tuple[str, ...]) -> None:
    body = opening(loop, silos=silos, policies=dict.fromkeys(silos, loop.policy.digest))
    loop.coordinator.says("control.poll", "round.open", body, run="run-1", round=1)
    loop.turn()
    assert denied(loop) == [("round.open", ["TRANSCRIPT_DIFFERS"])] and not trains(loop)


@pytest.mark.parametrize("signed", ["nobody", "stranger", "a silo"])
def test_T20_a_transcript_that_the_coordinator_did_not_sign(loop: Loop, signed: str) -> None:
    body = opening(loop)
    keys = {"stranger": Ed25519PrivateKey.generate(), "a silo": PEER_KEYS["hospital_b"]}
    body.transcript_signature = (
        sign_transcript(loop.shown, setting.COORDINATOR, keys[signed]) if signed in keys else b""
    )
    loop.coordinator.says("control.poll", "round.open", body, run="run-1", round=1)
    loop.turn()
    assert denied(loop) == [("round.open", ["TRANSCRIPT_UNSIGNED"])] and not trains(loop)


def test_T20_a_refused_round_is_acknowledged_only_when_the_no_was_heard(loop: Loop) -> None:
    body = opening(loop, base_digest=TRAP)
    for _ in range(2):
        loop.coordinator.says("control.poll", "round.open", body, run="run-1", round=1)
    loop.coordinator.fails_at("control.abstain", LOST)
    loop.turn()
    taken = loop.bench.ledger.acknowledged
    loop.turn()
    assert loop.bench.ledger.acknowledged > taken and abstained(loop) == [1, 1]


def test_T20_another_policy_in_force_is_told_before_the_next_round(loop: Loop) -> None:
    loop.guard._client.joined = False
    loop.turn()
    tighter = setting.policy_of(setting.policy_text().replace("min_peers: 2", "min_peers: 3"))
    loop.bench.judge.policy = tighter
    loop.show_round(1, BASE)  # made before the coordinator heard of it
    loop.turn(2)
    said = [pb.Hello.FromString(raw).policy_sha256 for _, raw in loop.coordinator.bodies("control.hello")]
    assert said == [loop.policy.digest, tighter.digest]
    assert denied(loop) == [("round.open", ["TRANSCRIPT_DIFFERS"])]  # by then it was told of the tighter one
    loop.policy = tighter
    loop.open_round(2)
    assert trains(loop)


# ---- the others' signatures ------------------------------------------------------------------------------


def of_another_round(loop: Loop) -> pb.RoundAgreed:
    body = loop.signed_by("hospital_b", transcript=replace(loop.shown, round=2))
    body.countersignatures[0].transcript_sha256 = loop.shown.digest
    return body


def under_another(loop: Loop) -> pb.RoundAgreed:
    body = loop.signed_by("hospital_b", transcript=replace(loop.shown, base_digest=TRAP))
    body.countersignatures[0].transcript_sha256 = loop.shown.digest  # passed off as under this one
    return body


def by_a_stranger(loop: Loop) -> pb.RoundAgreed:
    body = loop.signed_by("hospital_b")
    party = silo_id(setting.PLAN.federation, "hospital_b")
    body.countersignatures[0].signature = sign_transcript(loop.shown, party, Ed25519PrivateKey.generate())
    return body


def own_alone(loop: Loop) -> pb.RoundAgreed:
    body = loop.signed_by()
    signature = sign_transcript(loop.shown, setting.SILO, OUR_KEY)
    body.countersignatures.add(silo="hospital_a", transcript_sha256=loop.shown.digest, signature=signature)
    return body


@pytest.mark.parametrize("make", [of_another_round, under_another, by_a_stranger, own_alone, Loop.signed_by])
def test_T20_too_few_signatures_that_count(loop: Loop, make: Any) -> None:
    loop.show_round(1, BASE)
    loop.turn()
    say_agreed(loop, make(loop))
    assert denied(loop) == [("round.agreed", ["TOO_FEW_SIGNATURES"])] and abstained(loop) == [1]
    assert not trains(loop) and loop.bench.events("round.agreed") == []
    say_agreed(loop, loop.signed_by(*PEER_KEYS))  # too late: it has said no
    assert not trains(loop)
    loop.open_round(2)
    assert trains(loop) and loop.bench.judge.halted == ""


@pytest.mark.parametrize("agreed_on_the_shown", [False, True])
def test_T20_good_signatures_said_to_be_an_agreement_on_another_transcript(
    loop: Loop, agreed_on_the_shown: bool
) -> None:
    """The message itself names the transcript; without that check nobody would know what it said was agreed on."""
    shown = loop.show_round(1, BASE)
    loop.turn()
    body = loop.signed_by(*PEER_KEYS)
    assert body.transcript_sha256 == shown.digest
    if not agreed_on_the_shown:
        body.transcript_sha256 = replace(shown, base_digest=TRAP).digest
    say_agreed(loop, body)
    assert denied(loop) == ([] if agreed_on_the_shown else [("round.agreed", ["TRANSCRIPT_DIFFERS"])])
    assert trains(loop) is agreed_on_the_shown is bool(loop.bench.events("round.agreed"))
    assert loop.bench.judge.halted == ""  # nobody signed another one, so nothing is proved against anybody


def stricter(folder: Path, min_peers: int) -> Loop:
    """Another number of peers than the two of the example; the plan has four silos."""
    text = setting.policy_text().replace("min_peers: 2", f"min_peers: {min_peers}")
    loop = Loop(folder, setting.policy_of(text))
    loop.offer_plan()
    return loop


def test_T20_a_signed_roster_of_one_of_four_does_not_train_alone(tmp_path: Path) -> None:
    for peers, begins in ((), False), (("hospital_b",), True):
        loop = stricter(tmp_path / str(len(peers)), 1)
        silos = ("hospital_a", *peers)
        loop.show_round(1, BASE, silos=silos, policies=dict.fromkeys(silos, loop.policy.digest))
        loop.turn()
        say_agreed(loop, loop.signed_by(*peers))
        assert trains(loop) is begins
        loop.close()


@pytest.mark.parametrize(("min_peers", "begins"), [(2, True), (3, False)])
def test_T20_two_halves_can_be_shown_two_transcripts_unless_the_policy_wants_more_than_half(
    tmp_path: Path, min_peers: int, begins: bool
) -> None:
    """What the agreement does not stop below half of the plan's silos plus one."""
    for half, base, peer in (("one", BASE, "hospital_b"), ("other", TRAP, "hospital_d")):
        loop = stricter(tmp_path / half, min_peers)
        loop.show_round(1, base)
        loop.turn()
        say_agreed(loop, loop.signed_by(peer))
        assert trains(loop) is begins and bool(loop.bench.events("round.agreed")) is begins
        loop.close()


def test_T20_a_site_that_wants_more_than_the_plan_waits_for_the_slow_one(tmp_path: Path) -> None:
    loop = stricter(tmp_path / "a", 4)
    loop.show_round(1, BASE)
    loop.turn()
    for names in (("hospital_b",), ("hospital_b", "hospital_c")):
        say_agreed(loop, loop.signed_by(*names))
        loop.turn()
        assert not trains(loop) and abstained(loop) == [] and countersignatures(loop)[-1] != b""
    assert denied(loop) == [("round.agreed", ["TOO_FEW_SIGNATURES"])]  # once a round
    say_agreed(loop, loop.signed_by(*PEER_KEYS))
    assert trains(loop) and set(loop.bench.events("round.agreed")[0]["detail"]["signatures"]) == set(setting.PLAN.silos)
    loop.close()


def test_T20_a_site_that_waits_for_more_signatures_waits_until_the_round_is_over(tmp_path: Path) -> None:
    loop = stricter(tmp_path / "a", 4)
    loop.show_round(1, BASE)
    loop.turn()
    say_agreed(loop, loop.signed_by("hospital_b"))
    loop.restart()  # waits over a kill, too
    loop.turn()
    assert countersignatures(loop)[-1] != b"" and abstained(loop) == []
    loop.coordinator.says("control.poll", "round.result", loop.ended(), run="run-1", round=1)
    loop.turn(2)
    assert countersignatures(loop)[-1] == b""
    say_agreed(loop, loop.signed_by(*PEER_KEYS))
    assert not trains(loop)
    loop.open_round(2)
    assert trains(loop)
    loop.close()


def test_T20_a_lost_poll_does_not_silence_the_signature_while_the_trainer_works(loop: Loop) -> None:
    loop.open_round()
    loop.show_round(2, BASE)
    loop.turn()
    run = loop.guard.runs.run
    assert run is not None and run.busy
    loop.coordinator.fails_at("control.poll", LOST)
    loop.turn()
    sent = len(loop.coordinator.sent)
    for _ in range(3):
        loop.clock += SHORT_POLL_SECONDS
        loop.guard.turn()
    again = loop.coordinator.sent[sent:]
    assert [envelope.kind for envelope, _ in again] == ["control.poll"] * 3
    assert {pb.Poll.FromString(raw).countersignature for _, raw in again} == {countersignatures(loop)[-1]} != {b""}
    loop.clock += SHORT_POLL_SECONDS / 2
    loop.guard.turn()
    assert len(loop.coordinator.sent) == sent + 3


@pytest.mark.parametrize(
    ("trap", "rule"), [({"scale": 1e9}, "L2 of the adapter"), ({"scale": 1.0, "more": True}, "tensor set")]
)
def test_T20_a_trap_that_all_have_agreed_on_is_still_judged(loop: Loop, trap: dict[str, Any], rule: str) -> None:
    """A coordinator that tells everybody the same lie: the transcript does not see it, norm and schema may."""
    tensors = {name: values * np.float32(trap["scale"]) for name, values in small_factors().items()}
    if "more" in trap:
        tensors["notes"] = np.zeros(4, np.float32)
    adapter = codec.encode_factors(
        tensors, base_digest="", schema_sha256=setting.SCHEMA.digest, rank=2, scale=2.0, dtype="float32"
    )
    loop.open_round(adapter=adapter)
    loop.coordinator.says("control.fetch", "global.adapter", adapter, run="run-1", round=1)
    loop.base_evaluated()
    (record,) = (row for row in loop.bench.events("ingress.decision") if row["decision"] == "deny")
    assert record["kind"] == "global.adapter" and rule in [
        each["rule"] for each in record["rules"] if each["outcome"] == "deny"
    ]
    assert "LoadAdapter" not in loop.trainer.tasks() and abstained(loop) == [1]


def test_T20_signatures_that_are_not_let_in_end_the_wait_and_are_taken_in_only_when_the_no_was_heard(
    loop: Loop,
) -> None:
    loop.show_round(1, BASE)
    loop.turn()
    body = loop.signed_by("hospital_b")
    body.countersignatures.add(silo="hospital_x", transcript_sha256=loop.shown.digest, signature=bytes(64))
    taken = loop.bench.ledger.acknowledged
    loop.coordinator.fails_at("control.abstain", LOST)
    say_agreed(loop, body)
    assert loop.bench.ledger.acknowledged == taken
    say_agreed(loop, body)  # it comes again
    assert loop.bench.ledger.acknowledged > taken and abstained(loop) == [1, 1]
    assert denied(loop) == [("round.agreed", ["NOT_A_PEER", "ROSTER"])] * 2
    loop.turn()
    assert countersignatures(loop)[-1] == b"" and not trains(loop)


def test_T20_a_policy_that_lets_no_signatures_in_declines_the_plan(tmp_path: Path) -> None:
    text = setting.policy_text()
    (line,) = (line for line in text.splitlines(keepends=True) if line.startswith("  round.agreed:"))
    loop = Loop(tmp_path / "a", setting.policy_of(text.replace(line, "")))
    loop.offer_plan()
    assert denied(loop) == [("run.plan", ["PLAN_METHOD"])]
    assert loop.bench.ledger.run_state("run-1") == "declined"
    loop.close()


# ---- equivocation ----------------------------------------------------------------------------------------


def halted_for_good(loop: Loop) -> None:
    assert "EQUIVOCATION" in [code for row in loop.bench.events("halt") for code in row["reasons"]]
    assert not trains(loop)
    sent = len(loop.coordinator.sent)
    loop.turn(3)
    assert len(loop.coordinator.sent) == sent and loop.bench.judge.halted
    loop.restart()
    loop.turn(3)
    assert loop.bench.judge.halted and loop.coordinator.sent == [] and not trains(loop)


def test_T20_a_peers_signature_under_another_transcript_of_the_round_halts(loop: Loop) -> None:
    shown = loop.show_round(1, BASE)
    loop.turn()
    other = replace(shown, base_digest=TRAP)
    say_agreed(loop, loop.signed_by("hospital_b", transcript=other))
    (evidence,) = loop.bench.events("round.equivocation")
    piece = evidence["detail"]["shown"]
    assert piece["party"] == silo_id("cardio-net", "hospital_b") and piece["sha256"] == other.digest
    # each piece can be checked by whoever has the keys alone
    signature = bytes.fromhex(piece["signature"])
    assert is_signed(shown, piece["party"], PEER_KEYS["hospital_b"].public_key(), signature, digest=piece["sha256"])
    known = bytes.fromhex(evidence["detail"]["known"]["signature"])
    assert is_signed(shown, setting.COORDINATOR, COORDINATOR_KEY.public_key(), known)
    halted_for_good(loop)


@pytest.mark.parametrize("agreed_before", [False, True])
@pytest.mark.parametrize(
    "change", [{"base_digest": TRAP}, {"silos": ("hospital_a", "hospital_b")}], ids=["base", "roster"]
)
def test_T20_two_transcripts_of_one_round_by_the_coordinator_halt(
    loop: Loop, change: dict[str, Any], agreed_before: bool
) -> None:
    change = dict(change)
    if agreed_before:
        loop.open_round()
    else:
        loop.show_round(1, BASE)
        loop.turn()
    assert trains(loop) is agreed_before
    loop.trainer.told.clear()
    if "silos" in change:
        change |= {"policies": dict.fromkeys(change["silos"], loop.policy.digest)}
    first = loop.shown
    loop.show_round(1, change.pop("base_digest", BASE), **change)
    loop.turn()
    (evidence,) = loop.bench.events("round.equivocation")
    assert [evidence["detail"][side]["sha256"] for side in ("known", "shown")] == [first.digest, loop.shown.digest]
    for side in ("known", "shown"):
        piece = evidence["detail"][side]
        shown = transcript_from_canonical(codec.canonical_json(piece["transcript"]).decode())
        signature = bytes.fromhex(piece["signature"])
        assert is_signed(shown, setting.COORDINATOR, COORDINATOR_KEY.public_key(), signature)
    halted_for_good(loop)


@pytest.mark.parametrize("began", [False, True])
def test_T20_T39_a_silo_that_halted_says_nothing_at_all_after_a_restart(loop: Loop, began: bool) -> None:
    if began:
        loop.open_round()
    else:
        loop.show_round(1, BASE)
        loop.turn()
    loop.show_round(1, TRAP)
    loop.turn()
    assert loop.bench.judge.halted
    loop.restart()
    assert loop.bench.judge.halted and loop.coordinator.sent == [] and loop.trainer.told == []
    loop.events.put(Command(lambda: loop.guard.runs.run))  # an order comes before the first exchange
    loop.turn(3)
    assert loop.coordinator.sent == [] and loop.trainer.told == []
    release(loop)
    loop.turn()
    # the run is taken up where a restart takes it up, and the round goes on without this silo
    assert [message.type for message in loop.trainer.told] == ["plan"] and abstained(loop) == [1]
    loop.open_round(2)
    assert trains(loop)


def release(loop: Loop) -> None:
    halts = Halts(loop.bench.judge, loop.bench.ledger)
    (row,) = halts.rows()
    assert (row.kind, row.needed) == (EQUIVOCATION_KIND, 1)
    answer = halts.lift_halt(command("approvals.release", {"kind": row.kind, "digest": row.digest}))
    assert answer["released"] and halts.rows() == [] and not loop.bench.judge.halted
    assert loop.bench.events("release")[-1]["reasons"] == ["EQUIVOCATION"]


def by_a_peer(loop: Loop) -> None:
    say_agreed(loop, loop.signed_by("hospital_b", transcript=replace(loop.shown, base_digest=TRAP)))


def by_the_coordinator(loop: Loop) -> None:
    first = loop.shown
    loop.show_round(1, TRAP)
    loop.shown = first
    loop.turn()


def by_the_coordinator_under_rules(loop: Loop) -> None:
    first = loop.shown
    silos = ("hospital_a", "hospital_b")
    loop.show_round(1, BASE, silos=silos, policies=dict.fromkeys(silos, loop.policy.digest))
    loop.shown = first
    loop.turn()


TOLD = [by_a_peer, by_the_coordinator, by_the_coordinator_under_rules]


@pytest.mark.parametrize("tell", TOLD)
def test_T20_what_was_released_does_not_halt_again_and_its_round_is_sat_out(loop: Loop, tell: Any) -> None:
    loop.show_round(1, BASE)
    loop.turn()
    tell(loop)
    item = loop.coordinator.sequence
    assert loop.bench.judge.halted
    release(loop)
    loop.turn()
    assert not loop.bench.judge.halted and loop.coordinator.acknowledged() == item and abstained(loop) == [1]
    tell(loop)  # the same pair again
    say_agreed(loop, loop.signed_by(*PEER_KEYS))
    assert not loop.bench.judge.halted and len(loop.bench.events("round.equivocation")) == 1
    assert not any(countersignatures(loop)[-2:]) and not trains(loop)
    loop.restart()
    tell(loop)
    assert not loop.bench.judge.halted and not any(countersignatures(loop)) and not trains(loop)
    loop.open_round(2)
    assert trains(loop)


def test_T20_a_further_transcript_and_a_full_disk_halt_after_a_release_and_are_said(loop: Loop) -> None:
    loop.show_round(1, BASE)
    loop.turn()
    halts = []
    for base in (TRAP, "e" * 64):
        loop.show_round(1, base)
        loop.turn()
        halts.append(loop.bench.judge.halted)
        release(loop)
    loop.bench.judge.halted = "the disk is full"
    loop.turn(2)
    said = [fields["reason"] for name, fields in loop.desk.published if name == "halted"]
    assert said == [*halts, "the disk is full"] and all(halts)
    assert [row["reasons"] for row in loop.bench.events("halt")] == [["EQUIVOCATION"]] * 2 + [["STATE_UNWRITABLE"]]


def test_T20_T39_a_second_transcript_is_noticed_after_a_restart(loop: Loop) -> None:
    loop.open_round()
    loop.restart()  # sits the round out
    by_the_coordinator_under_rules(loop)
    assert loop.bench.judge.halted and len(loop.bench.events("round.equivocation")) == 1


@pytest.mark.parametrize("again", [False, True])
def test_T20_a_second_transcript_is_noticed_after_a_refusal_of_the_first(loop: Loop, again: bool) -> None:
    body = opening(loop, schema_sha256="0" * 64)
    refused = loop.shown
    loop.coordinator.says("control.poll", "round.open", body, run="run-1", round=1)
    loop.turn()
    assert denied(loop) == [("round.open", ["TRANSCRIPT_DIFFERS"])] and loop.bench.events("round.transcript") == []
    if again:
        loop.restart()
    loop.show_round(1, BASE)
    loop.turn()
    (evidence,) = loop.bench.events("round.equivocation")
    assert evidence["detail"]["known"]["sha256"] == refused.digest and loop.bench.judge.halted
    assert evidence["detail"]["shown"]["sha256"] == loop.shown.digest


def test_T20_a_peers_other_signature_is_noticed_after_the_round_has_begun(loop: Loop) -> None:
    loop.open_round()
    by_a_peer(loop)
    assert loop.bench.judge.halted and len(loop.bench.events("round.equivocation")) == 1


def test_T20_the_same_transcript_again_is_no_equivocation(loop: Loop) -> None:
    loop.show_round(1, BASE)
    loop.turn()
    loop.show_round(1, BASE)
    loop.turn()
    assert not loop.bench.judge.halted and len(loop.bench.events("round.transcript")) == 1


def test_T20_a_second_transcript_that_the_coordinator_did_not_sign_halts_nobody(loop: Loop) -> None:
    loop.show_round(1, BASE)
    loop.turn()
    body = opening(loop, silos=("hospital_a",), policies={"hospital_a": loop.policy.digest})
    body.transcript_signature = bytes(64)
    loop.coordinator.says("control.poll", "round.open", body, run="run-1", round=1)
    loop.turn()
    assert not loop.bench.judge.halted


def test_T20_T36_a_yes_to_one_pair_of_transcripts_is_none_to_another(loop: Loop) -> None:
    """Of the same second, under the same policy: what differs is what people were to look at."""
    loop.show_round(1, BASE)
    loop.turn()
    by_the_coordinator(loop)
    halts, ledger = Halts(loop.bench.judge, loop.bench.ledger), loop.bench.ledger
    (row,) = halts.rows()
    told = ledger.equivocation
    for piece in ("known", "shown"):
        ledger.keep_equivocation(told | {piece: told[piece] | {"sha256": "e" * 64}})
        with pytest.raises(ConflictError) as stale:
            halts.lift_halt(command("approvals.release", {"kind": row.kind, "digest": row.digest}))
        assert stale.value.code == "STALE_VIEW" and loop.bench.judge.halted
    ledger.keep_equivocation(told)
    assert halts.lift_halt(command("approvals.release", {"kind": row.kind, "digest": row.digest}))["released"]


def test_T20_T36_one_approver_of_two_releases_nothing(tmp_path: Path) -> None:
    text = setting.policy_text().replace("release_after_halt: 1", "release_after_halt: 2")
    loop = Loop(tmp_path / "a", setting.policy_of(text))
    loop.offer_plan()
    loop.show_round(1, BASE)
    loop.turn()
    say_agreed(loop, loop.signed_by("hospital_b", transcript=replace(loop.shown, base_digest=TRAP)))
    halts = Halts(loop.bench.judge, loop.bench.ledger)
    for person, released in (("alice", False), ("bob", True)):
        (row,) = halts.rows()
        order = command("approvals.release", {"kind": row.kind, "digest": row.digest}, person=person)
        assert halts.lift_halt(order)["released"] is released and bool(loop.bench.judge.halted) is not released
        polls = len(loop.coordinator.bodies("control.poll"))
        loop.turn()
        assert (len(loop.coordinator.bodies("control.poll")) > polls) is released
    loop.close()


# ---- kills in between ------------------------------------------------------------------------------------


def test_T20_T39_a_silo_that_is_killed_between_signing_and_agreement_goes_on(loop: Loop) -> None:
    loop.show_round(1, BASE)
    loop.turn(2)
    signature = countersignatures(loop)[-1]
    loop.restart()
    say_agreed(loop, loop.signed_by("hospital_b"))
    assert countersignatures(loop) == [signature] and abstained(loop) == []
    assert loop.trainer.tasks() == ["Evaluate"]


def test_T20_T39_a_round_that_was_refused_is_not_signed_again_after_a_kill(loop: Loop) -> None:
    loop.show_round(1, BASE)
    loop.turn()
    say_agreed(loop, loop.signed_by())  # too few for anybody
    assert abstained(loop) == [1]
    loop.restart()
    loop.turn(2)
    assert loop.guard._agreement.waiting is None and not any(countersignatures(loop))
    say_agreed(loop, loop.signed_by(*PEER_KEYS))
    assert not trains(loop)
    loop.open_round(2)
    assert trains(loop)


@pytest.mark.parametrize("kept", [{"opening": ""}, {"others": {TRAP: ""}}])
def test_T20_T39_a_round_without_its_opening_is_not_waited_for(loop: Loop, kept: dict[str, Any]) -> None:
    """As a kill between two writes leaves it: the view says that the round waits."""
    loop.show_round(1, BASE)
    loop.turn()
    ledger = loop.bench.ledger
    signed = ledger.transcript("run-1", 1)
    assert signed is not None and loop.bench.judge.view.agreeing
    ledger.keep_transcript("run-1", 1, signed | kept)
    loop.restart()
    assert loop.guard._agreement.waiting is None and abstained(loop) == [1] and not loop.bench.judge.view.agreeing


def test_T20_T39_a_round_that_names_another_policy_than_the_one_of_the_restart_is_not_waited_for(loop: Loop) -> None:
    loop.show_round(1, BASE)
    loop.turn()
    loop.policy = setting.policy_of(setting.policy_text().replace("min_peers: 2", "min_peers: 3"))
    loop.restart()
    loop.turn()
    assert loop.guard._agreement.waiting is None and abstained(loop) == [1] and not any(countersignatures(loop))


@pytest.mark.parametrize("same", [True, False])
def test_T20_T39_a_silo_that_is_killed_after_agreement_goes_on_under_what_was_agreed_or_not_at_all(
    loop: Loop, same: bool
) -> None:
    loop.open_round()
    if not same:
        loop.policy = setting.policy_of(setting.policy_text().replace("min_peers: 2", "min_peers: 3"))
    loop.restart()
    loop.trainer_says("planned", overlong={}, private_prompts=40)
    assert abstained(loop) == ([] if same else [1])
    assert trains(loop) == same and not any(countersignatures(loop))


@pytest.mark.parametrize("transcript", ["", TRAP])
def test_T20_a_result_of_another_transcript_is_not_evaluated(loop: Loop, transcript: str) -> None:
    loop.open_round()
    told = len(loop.trainer.told)
    body = loop.ended(committed=True, adapter_digest=TRAP, transcript_sha256=transcript)
    loop.coordinator.says("control.poll", "round.result", body, run="run-1", round=1)
    loop.turn()
    assert denied(loop) == [("round.result", ["TRANSCRIPT_DIFFERS"])] and len(loop.trainer.told) == told
    assert loop.bench.judge.view.evaluated == {} and loop.bench.events("round.result") == []
    body = loop.ended(committed=True, adapter_digest=TRAP)
    loop.coordinator.says("control.poll", "round.result", body, run="run-1", round=1)
    loop.turn()
    (record,) = loop.bench.events("round.result")
    assert record["detail"]["aggregate"] == TRAP and loop.bench.judge.view.evaluated == {1: TRAP}


# ---- the coordinator -------------------------------------------------------------------------------------


def started(folder: Path, text: str = RUN_YAML) -> tuple[House, list[SimulatedSilo]]:
    """A coordinator and silos that have taken in the plan and the first round.open, and signed nothing yet."""
    house, silos = federation(folder)
    house.submit(text)
    for silo in silos:
        silo.join(policy_sha256=codec.sha256_hex(silo.name.encode()))
    for silo in silos:
        item = silo.poll()
        assert item is not None
        silo.react(*item)
    for silo in silos:
        silo.poll_body()
        item = silo.poll()
        if item is not None:
            silo.react(*item)
    for silo in silos:
        if silo.opening is None:
            item = silo.poll()
            assert item is not None
            silo.react(*item)
    return house, silos


def heard(silo: SimulatedSilo, kind: str) -> list[Any]:
    return [body for envelope, body in silo.heard if envelope.kind == kind]


@pytest.mark.slow
def test_T20_the_coordinator_names_every_policy_and_gives_all_signatures_with_the_last(tmp_path: Path) -> None:
    house, silos = started(tmp_path)
    for silo in silos[:3]:
        assert silo.poll() is None
    until_quiet(silos)
    shown = transcript_from_canonical(heard(silos[0], "round.open")[0].transcript)
    assert shown.policies == {name: codec.sha256_hex(name.encode()) for name in SILOS}
    assert {body.transcript for silo in silos for body in heard(silo, "round.open")[:1]} == {shown.canonical()}
    for silo in silos:
        body = heard(silo, "round.agreed")[0]
        assert [row.silo for row in body.countersignatures] == list(SILOS)
        for row, other in zip(body.countersignatures, silos, strict=True):
            assert is_signed(shown, other.peer.spiffe_id, other.key.public_key(), row.signature)
    result = heard(silos[0], "round.result")[0]
    assert result.transcript_sha256 == shown.digest
    assert {row.silo: row.verdict for row in result.verdicts} == dict.fromkeys(SILOS, "accepted")
    assert house.run().state == "finished"


def test_T20_a_worthless_signature_is_not_kept_and_the_round_waits(tmp_path: Path) -> None:
    house, silos = started(tmp_path)
    *rest, last = silos
    good = last.countersignature
    last.countersignature = sign_transcript(
        replace(transcript_from_canonical(heard(last, "round.open")[0].transcript), base_digest=TRAP),
        last.peer.spiffe_id, last.key,
    )  # fmt: skip
    for silo in (*rest, last, *rest):
        silo.poll()
    assert [row.silo for row in house.rows(lambda session: signatures(session, "run-1", 1))] == [s.name for s in rest]
    assert all(heard(silo, "round.agreed") == [] for silo in silos)
    last.countersignature = good
    until_quiet([last])
    assert heard(last, "round.agreed")


@pytest.mark.slow
def test_T20_whoever_signs_late_gets_the_signatures_then(tmp_path: Path) -> None:
    house, silos = started(tmp_path)
    *rest, late = silos
    until_quiet(rest)
    assert heard(rest[0], "round.agreed") == []
    house.advance(59.0)
    until_quiet(rest)
    assert heard(rest[0], "round.agreed") == []
    house.advance(1.0)  # the join deadline of the plan
    until_quiet(rest)
    assert [row.silo for row in heard(rest[0], "round.agreed")[0].countersignatures] == list(SILOS[:3])
    until_quiet(silos)
    assert [row.silo for row in heard(late, "round.agreed")[0].countersignatures] == list(SILOS)
    first = house.rows(lambda session: session.get_one(db.Round, ("run-1", 1)))
    assert first.state == "committed" and late.name in first.participants


def test_T20_who_wants_more_signatures_gets_all_of_them_when_one_more_signs(tmp_path: Path) -> None:
    house, silos = started(tmp_path)
    *rest, late = silos
    until_quiet(rest)
    house.advance(60.0)
    for silo in rest:
        silo.mute = {"lora.factors"}  # the round stays open
    until_quiet(rest)
    until_quiet([late, *rest])
    for silo in rest:
        brought = [[row.silo for row in body.countersignatures] for body in heard(silo, "round.agreed")]
        assert brought[:2] == [list(SILOS[:3]), list(SILOS)]


def test_T20_below_the_quorum_nobody_begins_however_late_it_is(tmp_path: Path) -> None:
    house, silos = started(tmp_path, RUN_YAML.replace("quorum: 2", "quorum: 3"))
    until_quiet(silos[:2])
    house.advance(120.0)
    until_quiet(silos[:2])
    assert heard(silos[0], "round.agreed") == []
    until_quiet(silos[:3])  # the third has signed
    assert heard(silos[0], "round.agreed") == [] or len(heard(silos[0], "round.agreed")[0].countersignatures) == 3
    until_quiet(silos[:3])
    assert len(heard(silos[0], "round.agreed")[0].countersignatures) == 3


def test_T20_a_silo_that_says_no_is_not_waited_for(tmp_path: Path) -> None:
    _, silos = started(tmp_path)
    *rest, last = silos
    for silo in rest:
        silo.poll()
    last.countersignature = b""
    last.say("control.abstain", pb.Abstain(round=1), run="run-1", number=1)
    until_quiet(rest)
    assert [row.silo for row in heard(rest[0], "round.agreed")[0].countersignatures] == list(SILOS[:3])
    verdicts = {row.silo: row.verdict for row in heard(rest[0], "round.result")[0].verdicts}
    assert verdicts == {**dict.fromkeys(SILOS[:3], "accepted"), last.name: "absent"}


@pytest.mark.slow
def test_T20_T39_a_coordinator_that_is_killed_while_it_collects_goes_on(tmp_path: Path) -> None:
    house, silos = started(tmp_path)
    for silo in silos[:2]:
        silo.poll()
    house.close()
    house = House(tmp_path, clock=house.clock)
    for silo in silos:
        silo.house = house
    shown = {body.transcript for silo in silos for body in heard(silo, "round.open")}
    until_quiet(silos)
    assert len(shown) == 1 and house.run().state == "finished"
    record = house.record()["rounds"][0]["transcript"]
    assert set(record["countersignatures"]) == set(SILOS)


def test_T20_T39_the_time_to_sign_begins_anew_after_a_kill(tmp_path: Path) -> None:
    house, silos = started(tmp_path)
    *rest, _ = silos
    until_quiet(rest)
    house.advance(50.0)
    house.close()
    house = House(tmp_path, clock=house.clock)
    for silo in silos:
        silo.house = house
    house.advance(59.0)
    until_quiet(rest)
    assert heard(rest[0], "round.agreed") == []
    house.advance(1.0)
    until_quiet(rest)
    assert len(heard(rest[0], "round.agreed")[0].countersignatures) == 3


GARBAGE = b"\x07" * 64
MANY = LIST_ITEMS_MAX + 1


def say(loop: Loop, kind: str, body: Any, number: int = 1) -> None:
    loop.coordinator.says("control.poll", kind, body, run="run-1", round=number)
    loop.turn(2)


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
    assert loop.bench.events("round.result") == [] and not loop.bench.judge.halted and loop.guard.failure is None
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
    loop: Loop, event: str, refusal: tuple[str, list[str]]
) -> None:
    """Stands for a list, or a fact, that is longer than a record may be, where no rule has seen it."""
    loop.open_round()

    def its_record(_: AuditLog, name: str, **fields: Any) -> bool:
        return (name, fields.get("kind"), fields.get("decision", "allow")) == (event, "round.result", "allow")

    body = loop.ended(committed=True, adapter_digest=BASE, participants=["hospital_b", "hospital_c"])
    with failing(AuditLog, "append", RecordError("too many items"), when=its_record):
        say(loop, "round.result", body)
    assert denied(loop) == [refusal] and loop.bench.events("round.result") == []
    assert loop.guard.failure is None and not loop.bench.judge.halted
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
    assert {"MESSAGE_BYTES", "ROSTER"} <= set(reasons) and not loop.bench.judge.halted
    assert 1 <= len(verified) <= len(setting.PLAN.silos)


def test_T20_evidence_among_repeated_rows_still_halts(loop: Loop) -> None:
    loop.open_round()
    body = loop.signed_by("hospital_b", transcript=replace(loop.shown, base_digest=TRAP))
    for name in ("stranger", "hospital_b", "hospital_b"):
        body.countersignatures.add(silo=name, transcript_sha256=loop.shown.digest, signature=GARBAGE)
    say(loop, "round.agreed", body)
    assert ("round.agreed", ["NOT_A_PEER", "ROSTER"]) in denied(loop)
    assert loop.bench.judge.halted and len(loop.bench.events("round.equivocation")) == 1


def test_T20_T24_what_a_silo_signed_that_is_no_digest_is_no_evidence(loop: Loop) -> None:
    """No record would take it."""
    loop.open_round()
    body = loop.signed_by("hospital_b")
    (row,) = body.countersignatures
    row.transcript_sha256 = "free text \n" * 100
    party = silo_id(setting.PLAN.federation, "hospital_b")
    said = loop.shown.statement(party, row.transcript_sha256)
    row.signature = PEER_KEYS["hospital_b"].sign(said)
    say(loop, "round.agreed", body)
    assert ("round.agreed", ["FIELD_NOT_ALLOWED"]) in denied(loop)
    assert not loop.bench.judge.halted and loop.guard.failure is None and not loop.bench.ledger.equivocation


# ---- what is kept of it ----------------------------------------------------------------------------------


def kept(loop: Loop, *runs: str) -> list[tuple[str, int]]:
    """Rounds of these runs whose transcript is in the ledger."""
    return [(run, number) for run in runs for number in range(1, 9) if loop.bench.ledger.transcript(run, number)]


def opening_of(loop: Loop, run: str, number: int) -> pb.RoundOpen:
    shown = replace(loop.shown, run=run, round=number)
    signature = sign_transcript(shown, setting.COORDINATOR, loop.coordinator.key)
    return pb.RoundOpen(base_digest=BASE, transcript=shown.canonical(), transcript_signature=signature)


def test_T24_transcripts_are_kept_of_rounds_that_the_open_run_has(loop: Loop) -> None:
    loop.open_round()
    for number in range(1, 8):
        for run, envelope in (("run-1", "run-1"), (f"run-{number + 1}", f"run-{number + 1}"), (f"r{number}", "run-1")):
            body = opening_of(loop, run, number)
            loop.coordinator.says("control.poll", "round.open", body, run=envelope, round=number)
            loop.turn()
    others = [name for number in range(1, 8) for name in (f"run-{number + 1}", f"r{number}")]
    assert kept(loop, "run-1", *others) == [("run-1", number) for number in range(1, setting.PLAN.rounds + 1)]
    assert not loop.bench.judge.halted


def test_T20_T24_the_transcripts_of_a_run_are_kept_until_the_next_has_some(loop: Loop) -> None:
    loop.open_round()
    first = loop.shown
    say(loop, "run.end", pb.RunEnd(outcome="finished", adapter_digest=BASE), number=0)
    assert kept(loop, "run-1", "run-2") == [("run-1", 1)]
    later = setting.PLAN.model_copy(update={"run": "run-2"})
    loop.offer_plan(later)
    loop.open_round(plan=later)
    assert kept(loop, "run-1", "run-2") == [("run-2", 1)]
    loop.shown = replace(first, base_digest=TRAP)
    loop.coordinator.says("control.poll", "round.open", opening_of(loop, "run-2", 1), run="run-2", round=1)
    loop.turn()
    assert loop.bench.judge.halted  # of the open run a second one is noticed as ever


AGGREGATE, OTHER = "a" * 64, "b" * 64
PARTY = "spiffe://cardio-net/coordinator/main"
KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
END = RoundEnd(
    "cardio-net",
    "run-1",
    3,
    "c" * 64,
    True,
    AGGREGATE,
    ("hospital_a",),
    {"hospital_a": "accepted", "hospital_b": "absent"},
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
        '{"aggregate":"' + AGGREGATE + '","committed":true,"federation":"cardio-net","party":"' + PARTY + '","round":3,'
        '"run":"run-1","survivors":["hospital_a"],"transcript_sha256":"' + "c" * 64 + '",'
        '"verdicts":{"hospital_a":"accepted","hospital_b":"absent"}}'
    )
    message = b"fedsilo-round-result-v1\n" + text.encode()
    assert SignedEnd(END, PARTY, KEY.sign(message)).verifies(KEY.public_key())
    assert not SignedEnd(END, PARTY, KEY.sign(text.encode())).verifies(KEY.public_key())


def test_T20_two_signed_results_of_one_round_are_proof_and_nothing_less_is() -> None:
    one, key = sign_end(END, PARTY, KEY), KnownKey(KEY.public_key().public_bytes_raw())
    other = sign_end(replace(END, aggregate=OTHER, committed=False), PARTY, KEY)
    assert two_ends(read_back(one), read_back(other), key) == ("committed", "aggregate")
    assert two_ends(one, one, key) == ()
    assert two_ends(one, replace(other, signature=one.signature), key) == ()  # one log's owner made it up
    assert two_ends(replace(one, signature=b""), other, key) == ()
    assert two_ends(one, sign_end(replace(other.end, round=4), PARTY, KEY), key) == ()
    assert two_ends(one, sign_end(other.end, PARTY + "2", KEY), key) == ()
    assert two_ends(one, other, None) == ()
    later = sign_end(other.end, PARTY, Ed25519PrivateKey.from_private_bytes(b"r" * 32))
    assert two_ends(one, later, key) == ()


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
    body = loop.ended(committed=True, adapter_digest=AGGREGATE)
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
    assert found.verifies(COORDINATOR_KEY.public_key()) and found.end.aggregate == AGGREGATE


BOTH, CLOSED, COMMITTED = {"closed": True, "committed": True}, {"closed": True}, {"committed": True}


@pytest.mark.parametrize(
    ("method", "way", "reasons"),
    [
        ("pubswap", BOTH, ["ROUND_END"]),
        ("pubswap", CLOSED, ["RESULT_MALFORMED"]),
        ("pubswap", COMMITTED, []),
        ("pubswap", {}, []),
        ("local-only", BOTH, ["ROUND_END"]),
        ("local-only", CLOSED, []),
        ("local-only", COMMITTED, ["RESULT_MALFORMED"]),
        ("local-only", {}, []),
    ],
)
def test_T20_a_signed_end_that_no_round_of_the_method_has_is_refused(
    tmp_path: Path, method: str, way: dict[str, bool], reasons: list[str]
) -> None:
    """What is recorded can be read again: a log with an end of both kinds would not verify."""
    plan = setting.PLAN.model_copy(update={"method": method})
    with closing(Loop(tmp_path, setting.policy_of(setting.policy_text(method)))) as own:
        own.offer_plan(plan)
        own.show_round(1, BASE if method == "pubswap" else "", plan=plan, public=method == "pubswap")
        say_agreed(own, own.signed_by(*PEER_KEYS))
        say(own, "round.result", own.ended(participants=own.shown.silos, **way))
        assert [reason for _, found in denied(own) for reason in found] == reasons
        ends = [end_of_record("cardio-net", "run-1", 1, row["detail"]).end for row in own.bench.events("round.result")]
    assert [(end.committed, end.closed) for end in ends] == ([] if reasons else [("committed" in way, "closed" in way)])


# ---- at both ends ----------------------------------------------------------------------------------------


def test_T20_both_logs_and_the_run_record_keep_the_signed_result(tmp_path: Path) -> None:
    made = World(tmp_path)
    assert made.run(rounds=2) == "finished"
    for event in ("round.transcript", "round.agreed", "round.result"):
        ours = [row["detail"] for row in made.records(event)]
        theirs = [row["detail"] for row in made.house.audit.records() if row["event"] == event]
        assert [row["sha256"] for row in ours] == [row["sha256"] for row in theirs] and len(ours) == 2
    assert ours == theirs
    for number, (detail, row) in enumerate(zip(ours, made.house.record()["rounds"], strict=True), start=1):
        signed = end_of_record("cardio-net", "run-1", number, detail)
        assert signed.verifies(made.house.key.public_key()) and signed.end.aggregate == row["adapter_sha256"]
        assert row["transcript"]["result"] == {**signed.end.to_json(), "signature": detail["signature"]}
    made.close()


@pytest.mark.slow
def test_T20_the_coordinator_signs_one_end_of_a_round_only(tmp_path: Path) -> None:
    house, silos = joined(tmp_path)
    until_quiet(silos)
    agreements: Agreements = house.driver.agreements
    with house.store.transaction() as session:
        plan = plan_from_canonical(session.get_one(db.Run, "run-1").plan)
        row = session.get_one(db.Round, ("run-1", 1))
        same = pb.RoundResult(committed=True, adapter_digest=row.adapter_digest, participants=SILOS[:3])
        body = next(body for envelope, body in silos[0].heard if envelope.kind == "round.result")
        assert agreements.result(session, plan, 1, SILOS[0], same) == body
        with pytest.raises(OperationError, match="ends in two ways"):
            other = pb.RoundResult(committed=True, adapter_digest=OTHER)
            agreements.result(session, plan, 1, SILOS[0], other)


# ---- kills -----------------------------------------------------------------------------------------------


# Three silos, one public step: what is asked is what a kill leaves at a round's two ends.
SHORT_RUN = RUN_YAML.replace("local_steps: 4", "local_steps: 2") + f"silos: [{', '.join(SILOS[:3])}]\n"


class Gone(OperationError):
    """The process ends here; what is on the disk stays."""


class KilledHouse(House):
    """With the silos around it, and what ends the reason for the kill."""

    silos: list[SimulatedSilo]
    undo: Callable[[], None]


def joined(folder: Path, undo: Callable[[], None] = lambda: None) -> tuple[KilledHouse, list[SimulatedSilo]]:
    house = KilledHouse(folder)
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
        except Gone:
            restart(self)
            again = pb.Envelope.FromString(envelope.SerializeToString())
            again.sequence = self.sequences[envelope.run] = self.sequences[envelope.run] + 1
            return super().deliver(self.signed(again), payload)


def restart(silo: SimulatedSilo) -> None:
    """Another process on the same folder; another silo has tightened its policy meanwhile."""
    old = silo.house
    assert isinstance(old, KilledHouse)
    old.undo()
    old.close()
    house = KilledHouse(old.folder, clock=old.clock)
    for each in old.silos:
        each.house = house
    other = next(each for each in old.silos if each is not silo)
    other.join(policy_sha256="a" * 64)


def one_story(house: KilledHouse, silos: list[SimulatedSilo]) -> None:
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


@pytest.mark.quick(keep=1)
@pytest.mark.exhaustive(keep=3)
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
def test_T20_T39_killed_before_a_rounds_transaction_is_committed(tmp_path: Path, event: str, number: int) -> None:
    kind = {"round.transcript": "round.open"}.get(event, event)

    def its_message(_session: Any, _silo: str, place: Place, _payload: bytes) -> bool:
        return (place.kind, place.round) == (kind, number)

    killed_and_one_story(tmp_path, failing(outbox, "queue", Gone("killed"), when=its_message, after=True))


@pytest.mark.quick(keep=2)
@pytest.mark.exhaustive(keep=4)
@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("event", EVENTS)
def test_T20_T39_killed_between_the_database_and_the_log(
    tmp_path: Path, event: str, number: int, written: bool
) -> None:
    when = recording(event, round=number)
    killed_and_one_story(tmp_path, failing(AuditLog, "append", Gone("killed"), when=when, after=written))


def killed_and_one_story(folder: Path, dying: AbstractContextManager[None]) -> None:
    """Run to the end while this kills the coordinator, once."""
    with ExitStack() as stack:
        stack.enter_context(dying)
        house, silos = joined(folder, stack.close)
        until_quiet(silos)
    assert silos[0].house is not house  # it was killed
    one_story(silos[0].house, silos)
    silos[0].house.close()
