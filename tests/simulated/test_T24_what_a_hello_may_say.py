"""What a hello may say: versions of the protocol that both speak, and no more than fits into a transcript."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from sqlalchemy import select

from coordinator import store as db
from coordinator.config import load_config
from coordinator.main import Coordinator, check
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError, PeerError
from fedsilo.protocol.services import PROTOCOL_VERSION
from tests.coordinator_folder import write_coordinator
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, Clock, House, federation, hello, until_quiet
from tests.world import Loop


@pytest.mark.quick(keep=2)
@pytest.mark.parametrize("least", [0, 1, 5, 65, 2**32 - 1])
def test_T24_a_hello_that_fits_into_no_transcript_is_refused_and_the_others_go_on(tmp_path: Path, least: int) -> None:
    house, silos = federation(tmp_path)
    house.submit()
    for silo in silos:
        silo.join()
        silo.mute = {"lora.factors"}
    until_quiet(silos)
    refusal = silos[3].join(min_updates=least)
    assert (refusal.code, refusal.field, refusal.expected) == ("MALFORMED", "min_updates", "2-4")
    for silo in silos[:3]:
        silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=1)
        silo.mute = set()
    while house.driver.runs and not house.driver.halted:  # steps and rounds end without the fourth, by their deadlines
        until_quiet(silos[:3])
        house.advance(110.0)
    assert (house.driver.halted, house.run().state) == ("", "finished")
    assert [row["state"] for row in house.record()["rounds"]] == ["committed", "committed"]
    house.close()
    House(tmp_path, clock=house.clock).close()


@pytest.mark.parametrize("least", [2, 3, 4])
def test_T24_a_hello_within_the_number_of_silos_is_taken(tmp_path: Path, least: int) -> None:
    _, silos = federation(tmp_path)
    assert isinstance(silos[0].join(min_updates=least), pb.Ack)


@pytest.mark.parametrize(("kept", "signed"), [("x", False), ("ab" * 32, True)])
def test_T24_a_transcript_that_nobody_could_read_is_not_signed(tmp_path: Path, kept: str, signed: bool) -> None:
    """What is in the database is changed by hand, as no hello could change it."""
    house, silos = federation(tmp_path)
    for silo in silos:
        silo.join()
    with house.store.transaction() as session:
        member = session.get_one(db.Member, "hospital_b")
        member.hello = member.hello.replace('"policy_sha256":""', f'"policy_sha256":"{kept}"')
        assert kept in member.hello
    house.submit()
    if signed:
        until_quiet(silos)
    else:
        with pytest.raises(OperationError, match="no party could read its transcript"):
            until_quiet(silos)
    assert house.driver.halted == ("" if signed else "TRANSCRIPT")
    assert bool(house.rows(lambda session: session.scalars(select(db.RoundTranscript)).all())) is signed


def test_T24_a_coordinator_that_cannot_read_its_own_transcript_halts_and_its_process_goes_on(tmp_path: Path) -> None:
    """The row is damaged by hand; the deadline for signing then reads it in the thread that lets deadlines pass."""
    init_ca(tmp_path / "ca", name="cardio-net", kind="federation")
    provision_site(
        tmp_path / "main", site="main", federation_ca=tmp_path / "ca", people={"alice": ["operator"]},
        is_coordinator=True,
    )  # fmt: skip
    checked = check(load_config(write_coordinator(tmp_path / "main", SILOS)))
    house, silos = federation(
        tmp_path / "main" / "state",
        clock=Clock(time.time()),
        key=checked.identity.signing_key,
        policy=checked.charter,
    )
    house.submit(RUN_YAML.replace("round_deadline_seconds: 1000.0", "round_deadline_seconds: 1.0"))
    for silo in silos:
        silo.join()
    for silo in silos:
        silo.poll()  # the plan
        silo.acknowledged = silo.heard[-1][0].sequence
    for silo in silos:
        silo.poll()  # round.open, which none of them signs
    with house.store.transaction() as session:
        session.get_one(db.RoundTranscript, ("run-1", 1)).canonical = "{}"
    house.close()
    with Coordinator(checked) as coordinator, coordinator.serving():
        working = threading.Thread(target=coordinator.work, daemon=True)
        working.start()
        driver = coordinator.driver
        with driver.changing():
            assert driver.changing().wait_for(lambda: driver.halted, 20)
        assert driver.halted == "MALFORMED" and working.is_alive()
        coordinator.request_stop()
        working.join(20)
        assert not working.is_alive()


# What a coordinator of protocol 1 kept of a hello; it knew neither min_updates nor a second version.
KEPT_BY_VERSION_1 = frozenset({"min_updates", "protocol_min", "protocol_max"})


def hello_of_version_1() -> Any:
    """The message that protocol 1 calls Hello: without field 15."""
    described = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(described)
    described.name, described.package = "version_1.proto", "version_1"
    (kept,) = (message for message in described.message_type if message.name == "Hello")
    del described.message_type[:], described.service[:], described.enum_type[:]
    fields = [field for field in kept.field if field.number < 15]
    del kept.field[:]
    kept.field.extend(fields)
    described.message_type.append(kept)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(described)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("version_1.Hello"))


@pytest.mark.parametrize(
    ("low", "high", "got"),
    [(1, 1, "1"), (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 1, str(PROTOCOL_VERSION + 1)), (0, 1, "0-1")],
    ids=["an older silo", "a newer one", "a range"],
)
def test_a_silo_of_another_version_is_refused_with_both_versions(tmp_path: Path, low: int, high: int, got: str) -> None:
    _, (silo, *_) = federation(tmp_path)
    refusal = silo.join(protocol_min=low, protocol_max=high)
    assert (refusal.code, refusal.field) == ("PROTOCOL_RANGE", "protocol")
    assert (refusal.expected, refusal.got) == (str(PROTOCOL_VERSION), got)
    assert isinstance(silo.join(protocol_min=1, protocol_max=PROTOCOL_VERSION), pb.Ack)


def test_the_bytes_of_an_older_silo_are_refused_for_their_version(tmp_path: Path) -> None:
    _, (silo, *_) = federation(tmp_path)
    older = hello_of_version_1()()
    for field, value in hello(protocol_min=1, protocol_max=1).ListFields():
        if field.number < 15:
            setattr(older, field.name, value)
    refusal = silo.say("control.hello", codec.encode(older))
    assert (refusal.code, refusal.got) == ("PROTOCOL_RANGE", "1")


def test_an_older_coordinator_reads_no_hello_of_today(loop: Loop) -> None:
    """It answers before it looks at the version, so the hint of this side is what names it."""
    today = codec.encode(hello())
    with pytest.raises(PeerError) as refused:
        codec.decode(hello_of_version_1(), today)
    assert codec.decode(pb.Hello, today).protocol_min == PROTOCOL_VERSION
    line = loop.guard._client.refused(pb.Refusal(code=refused.value.code)).line
    assert f"this FedSilo speaks protocol {PROTOCOL_VERSION}" in line and "update the coordinator" in line


def test_a_silo_that_is_refused_for_its_version_is_told_what_to_do(loop: Loop) -> None:
    newer, said = str(PROTOCOL_VERSION + 1), str(PROTOCOL_VERSION)
    line = loop.guard._client.refused(
        pb.Refusal(code="PROTOCOL_RANGE", field="protocol", expected=newer, got=said)
    ).line
    assert f"it expects {newer}, here it is {said}" in line and "update the older one" in line


@pytest.mark.parametrize("updated", [False, True])
def test_silos_that_joined_before_the_coordinator_was_updated_take_part_when_they_are_updated(
    tmp_path: Path, updated: bool
) -> None:
    """The coordinator is updated in the middle of a round, and three of its silos with it."""
    house, silos = federation(tmp_path)
    house.submit()
    for silo in silos:
        silo.join()
        silo.mute = {"lora.factors"}
    until_quiet(silos)
    with house.store.transaction() as session:
        for name in {silo.name for silo in silos}:
            member = session.get_one(db.Member, name)
            said = json.loads(member.hello)
            member.hello = db.as_json({key: said[key] for key in said.keys() - KEPT_BY_VERSION_1})
    house.close()
    again = House(tmp_path, clock=house.clock)
    for silo in silos:
        silo.house = again
    for silo in silos if updated else silos[1:]:
        silo.join()
    for silo in silos:
        silo.live()
    given: dict[str, str] = {}
    for silo in silos:
        reply = silo.say("lora.factors", silo.delta_payload(1), run="run-1", number=1)
        given[silo.name] = "" if isinstance(reply, pb.Ack) else reply.code
    words = again.rows(again.driver.standings)
    assert words["hospital_a"] == ("joined" if updated else "refused")
    assert given == {silo.name: "" for silo in silos} | ({} if updated else {"hospital_a": "NOT_A_MEMBER"})
    if not updated:
        refusal = json.loads(again.rows(lambda session: session.get_one(db.Member, "hospital_a")).refusal)
        assert (refusal["code"], refusal["expected"], refusal["got"]) == ("PROTOCOL_RANGE", str(PROTOCOL_VERSION), "1")
    again.close()


def test_a_silo_that_is_of_this_version_is_joined_after_a_restart(tmp_path: Path) -> None:
    house, silos = federation(tmp_path)
    silos[0].join()
    house.close()
    again = House(tmp_path, clock=house.clock)
    assert again.rows(lambda session: db.has_joined(session, "hospital_a"))
    again.close()
