"""A silo without a line at the real coordinator: three silos speak to it, the fourth by files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from certs.authority import create_ca
from certs.identity import peer_identity
from coordinator import store as db
from coordinator.outbox import queue
from coordinator.transfer import Transfers
from fedsilo.files.transfer_file import CarriedMessage, Header, TransferBroken, TransferFile, TransferWriter
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UsageError,
)
from fedsilo.protocol.kinds import INBOUND_KINDS
from fedsilo.protocol.place import Place
from tests.security.people import new_keys
from tests.simulated.carried_files import carried_by_a_thief, without_its_signature, without_the_first
from tests.simulated.coordinator_parts import COORDINATOR, FEDERATION, House, SimulatedSilo, hello, until_quiet
from tests.simulated.test_round_end import ROUND_END

NOW = datetime.fromtimestamp(1_800_000_000, UTC)
CA = create_ca(FEDERATION, kind="federation", not_before=NOW - timedelta(days=1), days=30)
STRANGERS = create_ca(FEDERATION, kind="federation", not_before=NOW - timedelta(days=1), days=30)
FOURTH = "hospital_d"
WRITTEN_AT = "2027-01-15T08:00:00Z"


class CarriedSilo(SimulatedSilo):
    """Keeps what it says until a file is written, and hears what a file brings."""

    def __init__(self, house: House, name: str = FOURTH) -> None:
        super().__init__(house, name)
        _, self.key, keys = new_keys()
        self.manifest_key = self.key
        self.pem = CA.issue(keys, "silo", name, now=NOW - timedelta(minutes=1)).certificate_pem
        self.peer = peer_identity(self.pem, CA.certificate_pem, NOW, role="silo")
        self.out: list[tuple[pb.Envelope, bytes]] = []
        self.brought: dict[str, bytes] = {}
        self.answered: list[tuple[tuple[str, int], str, Any]] = []
        self.trips = 0

    def deliver(self, envelope: pb.Envelope, payload: bytes) -> Any:
        if envelope.kind == "control.fetch":
            return self.brought[codec.decode(pb.Fetch, payload).digest]
        self.out.append((envelope, payload))
        return pb.Ack()

    def release(self, path: Path, *, receiver: str = COORDINATOR, pem: bytes | None = None) -> Path:
        """Hello, what was taken in with a signature, and everything that was said."""
        said, self.out = self.out, []
        self.say("control.hello", hello(lora_schema_sha256=self.house.schema.digest))
        self.say("control.poll", self.poll_body())
        header = Header(FEDERATION, self.peer.spiffe_id, receiver, WRITTEN_AT, (pem or self.pem).decode())
        with TransferWriter(path, header, self.manifest_key) as file:
            for envelope, payload in (*self.out, *said):
                # as a guard does: under a sequence of the moment in which the file is written
                file.add(envelope if (envelope, payload) in self.out else self.again(envelope), payload)
            file.finish()
        self.out = []
        return path

    def again(self, envelope: pb.Envelope) -> pb.Envelope:
        self.sequences[envelope.run] = self.sequences.get(envelope.run, 0) + 1
        envelope.sequence = self.sequences[envelope.run]
        return self.signed(envelope)

    def take(self, path: Path) -> list[str]:
        """Act on what a file brings; its kinds, in their order. Of adapters only the newest file's are at hand."""
        self.trips += 1
        self.brought.clear()
        with TransferFile(path) as file:
            for message in file.messages:
                self.believed(file, message)
            for message in file.messages:
                self.heard_of(file, message)
            return [message.envelope.kind for message in file.messages]

    def believed(self, file: TransferFile, message: CarriedMessage) -> None:
        envelope, payload = message.envelope, file.read(message)
        self.house.key.public_key().verify(envelope.signature, codec.signing_bytes(envelope))
        assert envelope.sender == COORDINATOR and envelope.payload_digest.hex() == codec.sha256_hex(payload)
        if envelope.kind == "global.adapter":
            self.brought[message.digest] = payload

    def heard_of(self, file: TransferFile, message: CarriedMessage) -> None:
        envelope = message.envelope
        if envelope.kind == "global.adapter" or envelope.sequence <= self.acknowledged:
            return
        body = codec.decode(INBOUND_KINDS[envelope.kind], file.read(message))
        self.acknowledged = envelope.sequence
        if message.answers is not None:
            self.answered.append((message.answers, envelope.kind, body))
            return
        signature = self.countersignature
        self.react(envelope, body)
        # a silo without a line says its signature with its update
        self.countersignature = self.countersignature or signature


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path / "coordinator")
    yield made
    made.close()


@pytest.fixture
def transfers(house: House) -> Transfers:
    return Transfers(house.driver, trust_root_pem=CA.certificate_pem, now=lambda: NOW, charter_digest="c" * 64)


def on_a_trip(transfers: Transfers, silo: CarriedSilo, folder: Path) -> list[str]:
    """Out and back: what the coordinator's file held."""
    folder.mkdir(exist_ok=True)
    number = silo.trips
    transfers.export_plan(silo.name, folder / f"plan_{number}.zip")
    kinds = silo.take(folder / f"plan_{number}.zip")
    transfers.import_release(silo.release(folder / f"release_{number}.zip"))
    return kinds


def begun(house: House, transfers: Transfers, folder: Path) -> tuple[list[SimulatedSilo], CarriedSilo]:
    """A run of three rounds in which every silo has accepted the plan."""
    house.submit(ROUND_END)
    lines, fourth = [SimulatedSilo(house, name) for name in ("hospital_a", "hospital_b", "hospital_c")], None
    for silo in lines:
        silo.join()
    fourth = CarriedSilo(house)
    transfers.import_release(fourth.release(folder / "hello.zip"))
    until_quiet(lines)
    assert on_a_trip(transfers, fourth, folder / "trips") == ["control.ack", "run.plan"]
    return lines, fourth


@pytest.mark.slow
def test_a_silo_by_files_takes_part_in_every_round_with_one_trip_each(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    lines, fourth = begun(house, transfers, tmp_path)
    while house.run().state == "running":
        until_quiet(lines)  # no deadline passes: nobody waits for a signature that is on its way
        on_a_trip(transfers, fourth, tmp_path / "trips")
    assert house.run().state == "finished"
    assert fourth.trips == 1 + 3 + 1, "the plan, one for each round, and the figures of the last adapter"
    for each in house.record()["rounds"]:
        assert each["transcript"]["result"]["verdicts"] == dict.fromkeys(
            ("hospital_a", "hospital_b", "hospital_c", FOURTH), "accepted"
        )
        # its own signature came with its update, so the evidence of T20 is whole
        assert set(each["transcript"]["countersignatures"]) == {"hospital_a", "hospital_b", "hospital_c", FOURTH}
    assert {kind for _, kind, _ in fourth.answered} == {"control.ack"}


def test_what_it_gave_is_in_the_pool_of_the_next_round(house: House, transfers: Transfers, tmp_path: Path) -> None:
    lines, fourth = begun(house, transfers, tmp_path)
    until_quiet(lines)
    on_a_trip(transfers, fourth, tmp_path / "trips")
    transcript = house.rows(lambda session: session.get_one(db.RoundTranscript, ("run-1", 2)).canonical)
    assert FOURTH in transcript[transcript.index('"pool"') :]


def test_a_round_is_not_begun_for_it_before_enough_others_have_signed(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    lines, fourth = begun(house, transfers, tmp_path)
    told = transfers.export_plan(FOURTH, tmp_path / "early.zip")
    assert [row["kind"] for row in told["messages"]].count("round.agreed") == 0
    assert told["waits_for"] == ["round 1 of run run-1 is not signed by enough silos yet"]
    until_quiet(lines)
    told = transfers.export_plan(FOURTH, tmp_path / "later.zip")
    assert [row["kind"] for row in told["messages"]].count("round.agreed") == 1 and told["waits_for"] == []
    fourth.take(tmp_path / "later.zip")
    assert fourth.begun == 1


def test_a_round_whose_opening_was_taken_in_before_comes_with_its_adapter_all_the_same(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    lines, fourth = begun(house, transfers, tmp_path)
    transfers.export_plan(FOURTH, tmp_path / "early.zip")
    assert {"round.open", "global.adapter"} <= set(fourth.take(tmp_path / "early.zip"))
    transfers.import_release(fourth.release(tmp_path / "taken_in.zip"))
    until_quiet(lines)
    transfers.export_plan(FOURTH, tmp_path / "later.zip")
    assert fourth.take(tmp_path / "later.zip")[-2:] == ["round.agreed", "global.adapter"]
    assert fourth.begun == 1


def test_others_with_a_line_are_still_waited_for(house: House, transfers: Transfers, tmp_path: Path) -> None:
    lines, _ = begun(house, transfers, tmp_path)
    for silo in lines[:2]:  # as many as the quorum, and the third is silent
        silo.live()
    state = house.rows(lambda session: session.get_one(db.RoundTranscript, ("run-1", 1)).state)
    assert state == "signing"


def test_who_says_hello_over_a_line_is_waited_for_again(house: House, transfers: Transfers, tmp_path: Path) -> None:
    _, fourth = begun(house, transfers, tmp_path)
    assert house.rows(db.carried_silos) == {FOURTH}
    dialled = SimulatedSilo(house, FOURTH)
    dialled.key, dialled.peer, dialled.sequences = fourth.key, fourth.peer, fourth.sequences
    dialled.join()
    assert house.rows(db.carried_silos) == frozenset()


def test_an_old_file_does_not_say_that_its_silo_has_no_line(house: House, transfers: Transfers, tmp_path: Path) -> None:
    silo = CarriedSilo(house)
    path = silo.release(tmp_path / "old.zip")
    transfers.import_release(path)
    assert house.rows(db.carried_silos) == {FOURTH}
    dialled = SimulatedSilo(house, FOURTH)
    dialled.key, dialled.peer, dialled.sequences = silo.key, silo.peer, silo.sequences
    dialled.join()
    transfers.import_release(path)
    assert not house.rows(db.carried_silos)


def test_a_file_that_got_lost_costs_a_trip_and_nothing_else(house: House, transfers: Transfers, tmp_path: Path) -> None:
    lines, fourth = begun(house, transfers, tmp_path)
    until_quiet(lines)
    transfers.export_plan(FOURTH, tmp_path / "lost.zip")
    kinds = on_a_trip(transfers, fourth, tmp_path / "trips")
    assert {"round.open", "round.agreed", "global.adapter"} <= set(kinds)
    assert house.run().state == "running"
    # an answer stays until the silo says that it took it in
    before = len(house.rows(lambda session: session.scalars(select(db.CarriedAnswer)).all()))
    transfers.export_plan(FOURTH, tmp_path / "again.zip")
    assert len(house.rows(lambda session: session.scalars(select(db.CarriedAnswer)).all())) == before > 0


def test_of_two_files_what_was_not_taken_from_the_older_one_stays(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    """The silo takes in the first message of the newer file: that it acknowledges none behind it is what counts."""
    lines, fourth = begun(house, transfers, tmp_path)
    until_quiet(lines)
    transfers.export_plan(FOURTH, tmp_path / "older.zip")
    transfers.export_plan(FOURTH, tmp_path / "newer.zip")
    with TransferFile(tmp_path / "newer.zip") as newer:
        first = next(message for message in newer.messages if message.envelope.kind == "round.open")
        fourth.acknowledged = first.envelope.sequence
    transfers.import_release(fourth.release(tmp_path / "part.zip"))
    told = transfers.export_plan(FOURTH, tmp_path / "rest.zip")
    kinds = [row["kind"] for row in told["messages"]]
    assert "round.agreed" in kinds and "round.open" not in kinds


def kind_of(item: tuple[pb.Envelope, Any] | None) -> str:
    return item[0].kind if item is not None else ""


def test_what_was_in_a_lost_file_is_not_taken_in_with_a_later_one_that_lacks_it(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    """While its run is paused, nothing of it is written: the silo's next word is above the lost numbers."""
    lines, fourth = begun(house, transfers, tmp_path)
    until_quiet(lines)
    transfers.export_plan(FOURTH, tmp_path / "lost.zip")
    with house.driver.changing(), house.store.transaction() as session:
        house.driver.runs["run-1"].pause(session)
    transfers.import_release(fourth.release(tmp_path / "greeting.zip"))
    transfers.export_plan(FOURTH, tmp_path / "answers.zip")
    assert "round.open" not in fourth.take(tmp_path / "answers.zip")
    transfers.import_release(fourth.release(tmp_path / "taken.zip"))
    with house.driver.changing(), house.store.transaction() as session:
        house.driver.runs["run-1"].resume(session)
    transfers.export_plan(FOURTH, tmp_path / "resumed.zip")
    assert {"round.open", "round.agreed"} <= set(fourth.take(tmp_path / "resumed.zip")) and fourth.begun == 1


def test_a_plan_in_a_lost_file_is_not_accepted_by_what_comes_over_a_line(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    house.submit(ROUND_END)
    silos = [SimulatedSilo(house, name) for name in ("hospital_a", "hospital_b", "hospital_c", FOURTH)]
    with house.driver.changing(), house.store.transaction() as session:
        end = codec.encode(pb.RunEnd(outcome="finished"))
        queue(session, FOURTH, Place("run-0", 0, 0, "run.end"), end)
    for silo in silos:
        silo.join()
    transfers.export_plan(FOURTH, tmp_path / "lost.zip")
    fourth = silos[3]
    assert [kind_of(fourth.poll()), house.driver.runs["run-1"].life.standing[FOURTH]] == ["run.end", "asked"]
    assert [kind_of(fourth.poll()), house.driver.runs["run-1"].life.standing[FOURTH]] == ["run.plan", "asked"]
    fourth.poll()
    assert house.driver.runs["run-1"].life.standing[FOURTH] == "accepted"


@pytest.mark.slow
def test_T23_of_a_file_that_comes_again_and_again_nothing_stays_on_the_disk(
    house: House, transfers: Transfers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, fourth = begun(house, transfers, tmp_path)
    until_quiet(lines)
    transfers.export_plan(FOURTH, tmp_path / "plan.zip")
    fourth.take(tmp_path / "plan.zip")
    (update,) = ((envelope, payload) for envelope, payload in fourth.out if envelope.kind == "lora.factors")
    monkeypatch.setattr(codec, "UNASKED_BYTES_MAX", len(update[1]) - 1)  # so it is spooled, as a large one is
    transfers.import_release(fourth.release(tmp_path / "first.zip"))
    assert house.blobs.find(update[0].payload_digest.hex()) is not None
    for trip in range(2):  # until the answer is at home every export holds it again
        fourth.out = [update]
        told = transfers.import_release(fourth.release(tmp_path / f"again{trip}.zip"))
        assert ("lora.factors", "taken") in [(row["kind"], row["answer"]) for row in told["messages"]]
    assert not list(house.blobs.arriving.iterdir())


def test_what_a_poll_in_a_file_would_bring_over_a_line_goes_out_once_in_the_next_file(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    lines, fourth = begun(house, transfers, tmp_path)
    until_quiet(lines)
    on_a_trip(transfers, fourth, tmp_path / "trips")
    until_quiet(lines)
    transfers.export_plan(FOURTH, tmp_path / "next.zip")
    rows = house.rows(lambda session: db.traffic_table(session, "run-1"))
    out = {row["kind"]: row["messages"] for row in rows if row["silo"] == FOURTH and row["direction"] == "out"}
    assert out["round.open"] == 2 and out["run.plan"] == 1


def test_the_same_file_twice_is_taken_once(house: House, transfers: Transfers, tmp_path: Path) -> None:
    lines, fourth = begun(house, transfers, tmp_path)
    until_quiet(lines)
    transfers.export_plan(FOURTH, tmp_path / "plan.zip")
    fourth.take(tmp_path / "plan.zip")
    path = fourth.release(tmp_path / "release.zip")
    first = transfers.import_release(path)
    size = house.audit.size
    again = transfers.import_release(path)
    assert {row["answer"] for row in first["messages"]} == {"taken"}
    assert {row["answer"] for row in again["messages"]} == {"taken before"}
    assert house.audit.size == size, "nothing was judged, recorded or refused"


def test_a_refused_message_keeps_none_behind_it_from_being_taken(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    lines, fourth = begun(house, transfers, tmp_path)
    until_quiet(lines)
    fourth.say("public.responses", pb.PublicResponses(), run="run-1", number=9, step=2)
    transfers.export_plan(FOURTH, tmp_path / "plan.zip")
    fourth.take(tmp_path / "plan.zip")
    told = transfers.import_release(fourth.release(tmp_path / "release.zip"))
    codes = {(row["kind"], row["round"]): row["code"] for row in told["messages"]}
    assert codes["public.responses", 9] and not codes["lora.factors", 1]
    transfers.export_plan(FOURTH, tmp_path / "next.zip")
    fourth.take(tmp_path / "next.zip")
    refusals = [body.code for _, kind, body in fourth.answered if kind == "control.refusal"]
    assert refusals == [codes["public.responses", 9]]


def test_a_run_that_needs_answers_inside_a_round_is_refused_with_file_and_line(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    transfers.import_release(CarriedSilo(house).release(tmp_path / "hello.zip"))
    text = ROUND_END.replace("round_end", "step")
    line = text[: text.index("exchange:")].count("\n") + 1
    with pytest.raises(ConflictError, match=rf"run\.yaml:{line}: exchange: step needs .* hospital_d$") as told:
        house.submit(text)
    assert told.value.code == "BY_FILES"
    house.submit(text + "silos: [hospital_a, hospital_b, hospital_c]\n")


# ---- bad files --------------------------------------------------------------------------------------


def foreign_certificate(silo: CarriedSilo, path: Path) -> Path:
    _, _, keys = new_keys()
    return silo.release(path, pem=STRANGERS.issue(keys, "silo", FOURTH, now=NOW).certificate_pem)


def expired(silo: CarriedSilo, path: Path) -> Path:
    _, _, keys = new_keys()
    old = create_ca(FEDERATION, kind="federation", not_before=NOW - timedelta(days=1), days=30)
    return silo.release(path, pem=old.issue(keys, "silo", FOURTH, now=NOW).certificate_pem)


def for_another(silo: CarriedSilo, path: Path) -> Path:
    return silo.release(path, receiver=COORDINATOR + "2")


def flipped(silo: CarriedSilo, path: Path) -> Path:
    silo.release(path)
    data = bytearray(path.read_bytes())
    place = data.index(silo.house.schema.digest.encode())
    data[place] ^= 1
    path.write_bytes(data)
    return path


def with_one_left_out(silo: CarriedSilo, path: Path) -> Path:
    return carried_by_a_thief(silo.release(path), without_the_first)


def unsigned(silo: CarriedSilo, path: Path) -> Path:
    return carried_by_a_thief(silo.release(path), without_its_signature)


def signed_by_another(silo: CarriedSilo, path: Path) -> Path:
    """Each message is its own, and the list of them is somebody else's."""
    own, silo.manifest_key = silo.manifest_key, new_keys()[1]
    silo.release(path)
    silo.manifest_key = own
    return path


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (foreign_certificate, NotAllowedError),
        (expired, NotAllowedError),
        (for_another, UsageError),
        (flipped, TransferBroken),
        (with_one_left_out, TransferBroken),
        (unsigned, TransferBroken),
        (signed_by_another, TransferBroken),
        (lambda _, path: path, NotFoundError),
    ],
)
def test_T29_T25_a_file_that_is_not_whole_genuine_and_for_this_coordinator_changes_nothing(
    house: House, transfers: Transfers, tmp_path: Path, make: Any, error: type[FedSiloError]
) -> None:
    silo, size = CarriedSilo(house), house.audit.size
    with pytest.raises(error):
        transfers.import_release(make(silo, tmp_path / "release.zip"))
    assert house.audit.size == size and not house.rows(lambda session: session.scalars(select(db.Member)).all())
    transfers.import_release(silo.release(tmp_path / "good.zip"))
    assert [each.silo for each in house.rows(lambda session: session.scalars(select(db.Member)).all())] == [FOURTH]


def test_T29_a_message_under_another_silos_name_is_refused(house: House, transfers: Transfers, tmp_path: Path) -> None:
    silo = CarriedSilo(house)
    silo.peer = replace(silo.peer, spiffe_id=silo.peer.spiffe_id.replace(FOURTH, "hospital_a"))
    told = transfers.import_release(silo.release(tmp_path / "release.zip"))
    assert {row["code"] for row in told["messages"]} == {"SENDER_MISMATCH"}
    assert not house.rows(lambda session: session.scalars(select(db.Member)).all())


def test_a_halted_coordinator_writes_no_file_and_what_it_did_not_take_is_taken_later(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    silo = CarriedSilo(house)
    path = silo.release(tmp_path / "release.zip")
    house.driver.halt(OperationError("the disk is full", code="DISK_FULL"))
    with pytest.raises(OperationError):
        transfers.export_plan(FOURTH, tmp_path / "plan.zip")
    assert not (tmp_path / "plan.zip").exists() and not list(tmp_path.glob(".*"))
    with pytest.raises(OperationError, match="takes nothing") as caught:
        transfers.import_release(path)
    assert caught.value.code == "HALTED"
    house.driver.halted = ""
    assert {row["answer"] for row in transfers.import_release(path)["messages"]} == {"taken"}


def test_a_silo_that_is_not_listed_gets_no_file(transfers: Transfers, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no silo of that name"):
        transfers.export_plan("hospital_z", tmp_path / "plan.zip")


def test_what_the_coordinator_must_not_forget_survives_its_restart(
    house: House, transfers: Transfers, tmp_path: Path
) -> None:
    _, fourth = begun(house, transfers, tmp_path)
    house.close()
    second = House(tmp_path / "coordinator")
    try:
        after = Transfers(second.driver, trust_root_pem=CA.certificate_pem, now=lambda: NOW, charter_digest="c" * 64)
        assert second.rows(db.carried_silos) == {FOURTH}
        lines = [SimulatedSilo(second, name) for name in ("hospital_a", "hospital_b", "hospital_c")]
        for silo in lines:
            silo.sequences = {"": 1000}
            silo.join()
        after.export_plan(FOURTH, tmp_path / "plan.zip")
        assert "control.ack" in fourth.take(tmp_path / "plan.zip")
    finally:
        second.close()
