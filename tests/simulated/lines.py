"""Both ends of a silo's line without a network: the coordinator's service and the silo's frames in one thread, and a
line between them that is cut where the test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from certs.identity import PeerIdentity
from coordinator import blobs, server
from coordinator.blobs import BytesPayload
from coordinator.config import Limits
from coordinator.outbox import Reply
from coordinator.server import FederationService
from fedsilo.files import durable
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from policies.schema import LoraSchema
from silo.guard.channel import Uplink, assemble
from silo.guard.messages import Sink
from tests.policies.setting import SCHEMA, policy_of, policy_text
from tests.simulated.coordinator_parts import House, SimulatedSilo

# A line whose sizes are all divided by 256, so that a small payload has several chunks.
UNIT_BYTES = 4096
# float32 factors of a little more than two units
LARGE = LoraSchema(
    base_model_sha256=SCHEMA.base_model_sha256, rank=2, alpha=4.0, dtype="float32", targets="all-linear",
    tensors=(
        ("model.layers.0.self_attn.q_proj.lora_A", (2, 512)),
        ("model.layers.0.self_attn.q_proj.lora_B", (512, 2)),
    ),
)  # fmt: skip


def divide_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name in (
        (codec, "UNASKED_BYTES_MAX"), (codec, "CHUNK_BYTES_MAX"), (blobs, "CHUNK_BYTES_MAX"), (server, "PROGRESS_BYTES")
    ):  # fmt: skip
        assert getattr(place, name) == 256 * UNIT_BYTES
        monkeypatch.setattr(place, name, UNIT_BYTES)
    monkeypatch.setattr(durable, "FLUSHED_BYTES", UNIT_BYTES // 2)


class LineCut(ConnectionError):
    """What either side sees of a line that is gone."""


class Call:
    """What gRPC tells a handler of its call."""

    def __init__(self, identity: PeerIdentity) -> None:
        self.identity = identity
        self.active = True
        self.status = ""
        self._ended: list[Callable[[], object]] = []

    def is_active(self) -> bool:
        return self.active

    def add_callback(self, callback: Callable[[], object]) -> bool:
        self._ended.append(callback)
        return self.active

    def cancel(self) -> None:
        self.active = False
        for callback in self._ended:
            callback()

    def abort(self, status: Any, _details: str) -> None:
        self.status = status.name
        raise LineCut(status.name)


class Service(FederationService):
    """Who calls is known without a certificate; the real way to know has tests of its own."""

    def _peer(self, context: Any) -> PeerIdentity:
        identity: PeerIdentity = context.identity
        return identity


def service_of(house: House, **limits: Any) -> Service:
    return Service(
        house.driver, house.blobs, trust_root_pem=b"", limits=Limits(**limits), now=cast(Any, None),
        monotonic=house.clock,
    )  # fmt: skip


class LineSilo(SimulatedSilo):
    """A silo whose messages cross a line.

    Attributes:
        up_bytes, down_bytes: payload bytes that cross before the line is cut, once; -1: not even an opening.
        crossed, came: payload bytes of the last message that reached the coordinator, and of its answer.
        on_cut: what happens before the message is sent again; None: the test sees the cut.
        pace: what happens between two frames.
    """

    service: Service
    up_bytes: int | None = None
    down_bytes: int | None = None
    crossed = 0
    came = 0
    call: Call
    on_cut: Callable[[], None] | None = None
    pace: Callable[[], None] | None = None

    def deliver(self, envelope: pb.Envelope, payload: bytes) -> Any:
        self.last = (envelope, payload)
        try:
            return self.checked(self.exchange(envelope, payload))
        except LineCut:
            if self.on_cut is None:
                raise
            self.on_cut()
            return self.again()

    def again(self, **changes: Any) -> Any:
        """The last message under the next sequence number, as a gate sends what may not have arrived."""
        assert self.last is not None
        envelope, payload = self.last
        return self.deliver(
            self.envelope(envelope.kind, payload, run=envelope.run, number=envelope.round, step=envelope.step),
            changes.get("payload", payload),
        )

    def exchange(self, envelope: pb.Envelope, payload: bytes, into: Sink | None = None) -> Reply:
        self.crossed = self.came = 0
        uplink = Uplink(envelope, payload)
        self.call = call = Call(self.peer)
        answers = self.service.exchange(self._sent(uplink.frames()), cast(Any, call))
        try:
            reply = assemble(uplink.after_word(self._received(answers), lambda: None), 1 << 30, into)
        finally:
            answers.close()  # type: ignore[attr-defined]  # a generator
        return Reply(reply.envelope, BytesPayload(reply.payload))

    def _sent(self, frames: Iterator[codec.Frame]) -> Iterator[pb.Frame]:
        for frame in frames:
            if self.up_bytes is not None and self.crossed + len(frame.chunk) > self.up_bytes:
                self.up_bytes = None
                self.call.active = False
                raise LineCut("up")
            self.crossed += len(frame.chunk)
            self._pass()
            yield frame

    def _received(self, frames: Iterator[codec.Frame]) -> Iterator[pb.Frame]:
        for frame in frames:
            answers = frame.WhichOneof("part") != "admitted"
            if answers and self.down_bytes is not None and self.came + len(frame.chunk) > self.down_bytes:
                self.down_bytes = None
                self.call.active = False
                raise LineCut("down")
            self.came += len(frame.chunk)
            self._pass()
            yield frame

    def _pass(self) -> None:
        if self.pace is not None:
            self.pace()
        if not self.call.active:
            raise LineCut("by the coordinator")


def line_federation(folder: Any, *, silos: tuple[str, ...], **of_house: Any) -> tuple[House, list[LineSilo]]:
    """A coordinator of adapters large enough to be cut, and silos that have joined it."""
    house = House(folder, schema=LARGE, policy=policy_of(policy_text(schema=LARGE)), **of_house)
    service = service_of(house)
    made = [LineSilo(house, name) for name in silos]
    for silo in made:
        silo.service = service
    return house, made


def restarted(house: House, silos: list[LineSilo]) -> House:
    """The coordinator killed and started again on the same folder."""
    house.close()
    again = House(house.folder, clock=house.clock, schema=house.schema, policy=house.policy)
    service = service_of(again)
    for silo in silos:
        silo.house, silo.service = again, service
    return again
