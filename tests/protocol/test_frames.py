"""What the frames of a message may hold beside what this protocol has: nothing, in either direction (T3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError
from silo.guard.channel import assemble
from tests.simulated.lines import Call, LineSilo, line_federation

LATER = b"\xfa\x01\x06canary"  # field 31, of six bytes


def with_field(message: Any, where: str) -> pb.Frame:
    """A frame with an opening of an envelope, and a field of a later protocol in one of the three."""
    envelope = message.envelope.SerializeToString() + (LATER if where == "envelope" else b"")
    opening = b"\x0a" + bytes([len(envelope) & 127 | 128, len(envelope) >> 7]) + envelope
    opening += b"\x10" + bytes([message.payload_bytes]) + (LATER if where == "opening" else b"")
    frame = b"\x0a" + bytes([len(opening) & 127 | 128, len(opening) >> 7]) + opening
    return pb.Frame.FromString(frame + (LATER if where == "frame" else b""))


def poll(silo: LineSilo) -> tuple[pb.Opening, bytes]:
    payload = codec.encode(pb.Poll(wait_milliseconds=1))
    envelope = silo.envelope("control.poll", payload)
    return pb.Opening(envelope=envelope, payload_bytes=len(payload)), payload


@pytest.mark.parametrize("where", ["nowhere", "frame", "opening", "envelope"])
def test_T03_a_field_of_a_later_protocol_in_a_frame_is_refused_by_both_ends(tmp_path: Path, where: str) -> None:
    house, (silo,) = line_federation(tmp_path, silos=("hospital_a",))
    opening, payload = poll(silo)
    sent = iter([with_field(opening, where), pb.Frame(chunk=payload)])
    reply = assemble(silo.service.exchange(sent, cast(Any, Call(silo.peer))), 1 << 20)
    kind = "control.ack" if where == "nowhere" else "control.refusal"
    assert reply.envelope.kind == kind
    answered = reply.payload
    house.close()
    if where == "nowhere":
        assert assemble([with_field(opening, where), pb.Frame(chunk=payload)], 1 << 20).payload == payload
        return
    assert codec.decode(pb.Refusal, answered).code == "UNKNOWN_FIELD"
    with pytest.raises(PeerError) as error:
        assemble([with_field(opening, where), pb.Frame(chunk=payload)], 1 << 20)
    assert error.value.code == "UNKNOWN_FIELD"
