"""T23, T24, T11: no peer decides how much the coordinator writes to its disk, since a full one halts it; and what no
record takes is refused in both directions, wherever it comes, and never ends the silo (T3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, select

from coordinator import driver, witnessing
from coordinator import store as db
from coordinator.driver import CONTRIBUTIONS
from coordinator.witnessing import FOLDER, ShownSteps
from fedsilo.audit import witness as audit_witness
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.checkpoint import Checkpoint, sign_checkpoint
from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import RecordError
from fedsilo.protocol import codec, rounds
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import VerificationError
from silo.guard.loop import Wake
from silo.guard.messages import Allowed, Denied, Held
from tests.policies import setting
from tests.simulated.coordinator_parts import House, SimulatedSilo, federation
from tests.simulated.test_coordinator_ingress import in_open_round
from tests.world import ADAPTER, Bench, Loop, command

MANY = 2 * driver.REFUSALS_MAX
FULL_SECONDS = driver.REFUSALS_MAX * driver.REFILL_SECONDS


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fdatasync", lambda _descriptor: None)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[House, list[SimulatedSilo]]]:
    house, silos = in_open_round(tmp_path)
    yield house, silos
    house.close()


def refusals(house: House, silo: SimulatedSilo) -> tuple[list[str], list[dict[str, Any]]]:
    """Of one peer: reasons of the single records, and what the summaries say."""
    rows = [row for row in house.audit.records() if row["event"] == "ingress.decision"]
    refused = [row for row in rows if row["decision"] == "deny"]
    ours = [row for row in refused if row["peer"] == silo.peer.spiffe_id]
    single = [(row["reasons"] or [""])[0] for row in ours if row["reasons"] != [driver.MORE_REFUSALS]]
    return single, [row["detail"] for row in ours if row["reasons"] == [driver.MORE_REFUSALS]]


# ---- refusals --------------------------------------------------------------------------------------------


def unsigned(silo: SimulatedSilo, number: int) -> str:
    """Refused before it is anything."""
    envelope = silo.envelope("control.poll", b"")
    envelope.signature = bytes(64)
    return str(silo.deliver(envelope, b"").code)


def denied(silo: SimulatedSilo, number: int) -> str:
    """Refused by the rules: a contribution to a round that is not open."""
    return str(silo.say("metrics.eval", pb.MetricsEval(split="none"), run="run-1", number=number + 2).code)


def of_no_run(silo: SimulatedSilo, number: int) -> str:
    return str(silo.say("control.progress", pb.Progress(round=1), run=f"run-x{number}").code)


def not_joined(silo: SimulatedSilo, number: int) -> str:
    """Allowed by the rules, refused since its last hello was; never counted as taken."""
    if number == 0:
        silo.join(tokenizer_sha256="9" * 64)
    return str(silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=1).code)


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize("send", [unsigned, denied, of_no_run, not_joined])
def test_T24_refusals_of_one_peer_are_counted_beyond_a_number(
    opened: tuple[House, list[SimulatedSilo]], send: Any
) -> None:
    house, (silo, other, *_) = opened
    before, _ = refusals(house, silo)
    size = house.audit.size
    codes = {send(silo, number) for number in range(MANY)}
    assert codes & {"SIGNATURE_INVALID", "INGRESS_DENIED", "ROUND_CLOSED", "NO_SUCH_RUN", "NOT_A_MEMBER"}
    assert house.audit.size - size <= driver.REFUSALS_MAX + 2  # and a hello, and a checkpoint's close
    # another peer's refusals are recorded meanwhile: nobody spends the records of others
    assert unsigned(other, 0) == "SIGNATURE_INVALID" and refusals(house, other) == (["SIGNATURE_INVALID"], [])
    house.advance(FULL_SECONDS - 1)
    assert refusals(house, silo)[1] == []
    house.advance(1.0)
    single, summaries = refusals(house, silo)
    (summary,) = summaries
    hello_refused = int(send is not_joined)
    assert len(single) - len(before) + summary["messages"] == MANY + hello_refused
    assert sum(summary["reasons"].values()) == summary["messages"]
    # and from then on singly again
    assert unsigned(silo, 0) == "SIGNATURE_INVALID" and refusals(house, silo)[0][-1] == "SIGNATURE_INVALID"
    house.audit.checkpoint()
    assert verify_logs([house.audit.directory])[0]["verified"]


def test_T24_a_stranger_with_a_certificate_of_the_federation_is_counted_as_well(tmp_path: Path) -> None:
    house, _ = federation(tmp_path)
    strangers = [SimulatedSilo(house, f"stranger_{number}") for number in range(2)]
    for stranger in strangers:
        for _ in range(MANY):
            stranger.say("control.poll", pb.Poll())
        assert len(refusals(house, stranger)[0]) == driver.REFUSALS_MAX
    assert sum(name == "refused" for name, _ in house.published) == 2 * driver.REFUSALS_MAX
    house.driver.stop()  # what was counted is not lost
    for stranger in strangers:
        assert [each["messages"] for each in refusals(house, stranger)[1]] == [MANY - driver.REFUSALS_MAX]


def test_T24_refusals_now_and_then_are_all_recorded() -> None:
    """By hand: one each `REFILL_SECONDS` is never held; one more often is, in the end, and is told of as a number."""
    said: list[dict[str, Any]] = []
    clock = [0.0]
    bound = driver.Refusals(lambda event, **fields: said.append(fields), lambda: clock[0])
    for _ in range(3 * driver.REFUSALS_MAX):
        assert bound.may_record("one", ["A"])
        clock[0] += driver.REFILL_SECONDS
    allowed = 0
    while bound.may_record("one", ["A"]):
        allowed += 1
    assert allowed == driver.REFUSALS_MAX and not bound.may_record("one", ["B"])
    clock[0] += FULL_SECONDS
    bound.tell()
    bound.tell()
    assert [each["detail"] for each in said] == [{"messages": 2, "reasons": {"A": 1, "B": 1}}]
    assert bound.may_record("one", ["A"])


def test_T24_identities_beyond_a_number_share_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "IDENTITIES_MAX", 3)
    bound = driver.Refusals(lambda event, **fields: None, lambda: 0.0)
    allowed = sum(bound.may_record(f"peer {number}", ["A"]) for number in range(MANY))
    assert allowed == 3 + driver.REFUSALS_MAX


def test_T24_made_up_runs_and_rounds_leave_no_rows(opened: tuple[House, list[SimulatedSilo]]) -> None:
    house, (silo, *_) = opened

    def rows() -> list[int]:
        tables = (db.Traffic, db.SequenceCounter, db.Upload, db.Transition, db.Figure, db.OutboxItem)
        return [
            house.rows(lambda session, t=table: session.scalar(select(func.count()).select_from(t))) for table in tables
        ]

    def trouble(first: int) -> None:
        for number in range(first, first + 20):
            of_no_run(silo, number)
            denied(silo, number)
            silo.say("control.progress", pb.Progress(round=number), run="run-1", number=number)
            silo.say("lora.factors", silo.delta_payload(number), run="run-1", number=number)

    trouble(10)
    before = rows()
    trouble(1000)
    assert rows() == before


# ---- what fails unexpectedly counts ---------------------------------------------------------------------


def polled(tmp_path: Path, acknowledged: int, monkeypatch: pytest.MonkeyPatch | None = None) -> list[str]:
    """The verdicts on record of sixty polls, where twenty a minute are allowed."""
    house = House(tmp_path, policy=setting.edited("polls_per_minute: 1200", "polls_per_minute: 20"))
    silo = SimulatedSilo(house, "hospital_a")
    silo.join()
    if monkeypatch is not None:
        monkeypatch.setattr(house.driver.services, "_acknowledge", lambda *_: 1 // 0)
    for _ in range(60):
        if monkeypatch is None:
            silo.say("control.poll", pb.Poll(acknowledged_sequence=acknowledged))
        else:
            with contextlib.suppress(ZeroDivisionError):
                silo.say("control.poll", pb.Poll(acknowledged_sequence=acknowledged))
    house.driver.stop()
    records = [row for row in house.audit.records() if row.get("kind") == "control.poll"]
    house.close()
    allowed = sum(row["detail"]["polls"] for row in records if row["event"] == "ingress.polls")
    return ["allow"] * allowed + [row["decision"] for row in records if row.get("decision") == "deny"]


def test_T11_T23_a_number_that_no_database_holds_acknowledges_what_was_sent_and_counts(tmp_path: Path) -> None:
    honest, beyond = polled(tmp_path / "a", 0), polled(tmp_path / "b", 2**64 - 1)
    assert honest.count("allow") == beyond.count("allow") == 20
    assert honest == beyond


def test_T11_T23_an_error_that_nobody_thought_of_is_no_way_past_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert polled(tmp_path, 0, monkeypatch).count("allow") == 20


# ---- abstentions -----------------------------------------------------------------------------------------


def events_of(house: House) -> int:
    return int(house.rows(lambda session: session.scalar(select(func.count()).select_from(db.Transition))))


def abstain(silo: SimulatedSilo, number: int) -> None:
    assert isinstance(silo.say("control.abstain", pb.Abstain(round=number), run="run-1", number=number), pb.Ack)


def test_T11_an_abstention_said_again_changes_and_stores_nothing(opened: tuple[House, list[SimulatedSilo]]) -> None:
    house, silos = opened
    silo, other, *_ = silos
    before = events_of(house)
    abstain(silo, 1)
    assert events_of(house) == before + 1
    for _ in range(20):
        abstain(silo, 1)
    assert events_of(house) == before + 1
    abstain(other, 1)
    assert events_of(house) == before + 2
    house.close()
    again = House(house.folder, clock=house.clock)
    for each in silos:
        each.house = again
    abstain(silo, 1)
    assert events_of(again) == before + 2
    again.advance(1000.0)  # round 1 is over
    after = events_of(again)
    for each in silos:
        abstain(each, 1)
    assert events_of(again) == after
    abstain(silo, 2)
    assert events_of(again) == after + 1
    again.close()


def test_T11_what_one_silo_may_keep_back_of_a_round_is_bounded(opened: tuple[House, list[SimulatedSilo]]) -> None:
    house, (silo, *_) = opened
    before = events_of(house)
    for kind in sorted(CONTRIBUTIONS):
        for step in range(5):
            body = pb.Declined(kind=kind, round=1, step=step)
            assert isinstance(silo.say("control.declined", body, run="run-1", number=1, step=step), pb.Ack)
    steps = len(house.driver.runs["run-1"].plan.public_steps())
    # each kind once, and two for each public step
    assert events_of(house) - before == 2 * steps + len(CONTRIBUTIONS) <= 2 * steps + rounds.ABSTENTIONS_MAX


# ---- checkpoints and evidence ----------------------------------------------------------------------------


def test_T38_a_chain_that_nobody_countersigns_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witnessing, "CHAIN_MAX", 5)
    monkeypatch.setattr(witnessing, "KEPT_MIN", 7)
    house, (silo, other, *_) = federation(tmp_path)
    steps = ShownSteps(house.audit.directory)
    for size in range(1, 40):
        offer = pb.Checkpoint(note=f"note {size}", previous_size=size - 1)
        with house.store.transaction() as session:
            for each in (silo, other) if size <= 3 else (silo,):
                steps.keep(each.name, size, offer)
                assert witnessing._keep_step(session, steps, each.peer, offer, size)
    query = select(db.ShownCheckpoint.size).order_by(db.ShownCheckpoint.size)
    kept = {
        each.name: house.rows(
            lambda session, name=each.name: list(session.scalars(query.where(db.ShownCheckpoint.silo == name)))
        )
        for each in (silo, other)
    }
    assert kept == {silo.name: [35, 36, 37, 38, 39], other.name: [1, 2, 3]}
    files = {
        name: sorted(int(path.stem) for path in (house.folder / "audit" / FOLDER / name).iterdir()) for name in kept
    }
    assert files == {silo.name: [33, 34, *kept[silo.name]], other.name: kept[other.name]}


def test_T38_of_a_party_that_signs_any_number_of_histories_a_few_are_kept(tmp_path: Path) -> None:
    keys = {name: Ed25519PrivateKey.from_private_bytes(name.encode() * 32) for name in "wvx"}
    witness = AuditLog(
        tmp_path / "w", origin="w", key=keys["w"], actor="w", clock=lambda: 1_800_000_000.0, reserve_bytes=0
    )
    for peer in "vx":
        witness.pin_peer(peer, keys[peer].public_key())

    def show(peer: str, root: bytes) -> str:
        note = sign_checkpoint(Checkpoint(peer, 9, root), keys[peer])
        try:
            return "kept" if witness.follow(peer, [pb.LogStep(note=note)]) else ""
        except VerificationError as error:
            assert error.code == "TWO_HISTORIES"
            return error.hint

    roots = [bytes([number]) * 32 for number in range(60)]
    assert show("v", roots[0]) == show("x", roots[0]) == "kept"
    hints = [show("v", root) for root in roots[1:]]
    kept = sorted((tmp_path / "w" / "evidence").iterdir())
    assert len(kept) == audit_witness.EVIDENCE_MAX
    assert all(any(str(path) in hint for path in kept) for hint in hints[: audit_witness.EVIDENCE_MAX])
    assert "more such notes" in hints[-1] and show("v", roots[1]) == hints[0]  # the first ones stay
    assert "both notes are kept" in show("x", roots[1])  # another party's evidence is its own
    witness.close()


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
    loop.guard.turn()  # the moment for progress, of which there is one every ten seconds
    loop.clock += 5.0
    loop.events.put(Wake())
    loop.coordinator.says("control.heartbeat", "control.refusal", pb.Refusal(code="ROUND_CLOSED"))
    loop.guard.turn()
    assert loop.coordinator.sent[-1][0].kind == "control.heartbeat"


# ---- what comes in ---------------------------------------------------------------------------------------


def test_T24_an_answer_to_a_heartbeat_that_no_record_takes_is_refused(
    loop: Loop, refused: set[tuple[str, str]]
) -> None:
    loop.open_round()
    refused.add(("ingress.decision", "control.refusal"))
    heartbeat(loop)
    assert decided(loop.bench, "ingress.decision") == UNKNOWN
    assert loop.guard.failure is None and not loop.bench.judge.halted
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
    assert loop.guard.failure is None and not loop.bench.judge.halted
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
    assert loop.guard.failure is None and not loop.bench.judge.halted
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
