"""A federation speaks one version of the protocol: the coordinator refuses a silo of another one at hello, and each
side says which version it has and what to do. A run with both would end in transcripts that half of it cannot read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from coordinator import store as db
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError
from fedsilo.protocol.services import PROTOCOL_VERSION
from tests.simulated.coordinator_parts import House, federation, hello, until_quiet
from tests.world import Loop

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
