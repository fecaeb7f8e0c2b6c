"""Messages as frames, without a connection: how one goes up, and how the one that answers it is put together.

A large payload waits for the coordinator's word and is sent from the offset that it names: what it has of the same
bytes already is not sent again. Nothing depends on that number but which of the decided bytes cross. A large answer
goes on where it was cut, behind what a `Sink` has kept of it; its digest is compared when it is whole (T29).
Does not stop: a coordinator that never says the word; the call ends when it has waited for it long enough.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, WireCode


@dataclass(frozen=True)
class Reply:
    """One message from the coordinator, complete and within its declared length, not yet verified."""

    envelope: pb.Envelope
    payload: codec.Buffer


class Sink(Protocol):
    """Where the bytes of one awaited payload are kept as they come: `silo.guard.adapters.Arriving`."""

    digest: str

    @property
    def size_bytes(self) -> int: ...
    def write(self, chunk: codec.Buffer) -> None: ...
    def restart(self) -> None: ...
    def view(self) -> memoryview: ...


class Uplink:
    """One message on its way up: a small payload follows its opening at once, a large one when the coordinator says.

    Args:
        envelope: signed.
        payload: its bytes.
    """

    def __init__(self, envelope: pb.Envelope, payload: codec.Buffer) -> None:
        self._envelope = envelope
        self._payload = payload
        self.asks = len(payload) > codec.UNASKED_BYTES_MAX
        self._told = False
        self._word: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def frames(self) -> Iterator[codec.Frame]:
        """What is sent. Waits for the word, or for the end."""
        yield codec.opening(self._envelope, self._payload)
        offset = self._word.get() if self.asks else 0
        if offset is not None:
            yield from codec.chunk_frames(self._payload, offset)

    def end(self) -> None:
        """The call is over: no word will come."""
        self._word.put(None)

    def after_word(self, answers: Iterable[codec.Frame], admitted: Callable[[], object]) -> Iterator[codec.Frame]:
        """The frames of the answer; the word, where one is due, is taken out of them.

        Args:
            answers: of the coordinator.
            admitted: called when the word has come.

        Raises:
            PeerError: a word that nobody waits for, or an offset that the payload does not have.
        """
        for frame in answers:
            if isinstance(frame, codec.Chunk) or frame.WhichOneof("part") != "admitted":
                yield frame
                continue
            if not self.asks or self._told or frame.admitted.offset > len(self._payload):
                raise PeerError(WireCode.MALFORMED, "the coordinator names an offset that nobody asked for")
            self._told = True
            admitted()
            self._word.put(frame.admitted.offset)


def assemble(frames: Iterable[codec.Frame], payload_bytes_max: int, into: Sink | None = None) -> Reply:
    """One message out of its frames.

    Args:
        frames: of the answer.
        payload_bytes_max: largest payload that is taken.
        into: see `Channel.exchange`.

    Raises:
        PeerError: no opening, a second one, more bytes than declared or allowed, or fewer, or not from where they were
            asked for.
        OperationError: the disk does not keep them.
    """
    stream: Iterator[codec.Frame] = iter(frames)
    first = next(stream, None)
    if first is None or isinstance(first, codec.Chunk) or first.WhichOneof("part") != "opening":
        raise PeerError(WireCode.MALFORMED, "the reply does not begin with an opening")
    codec.require_known(first)
    expected, offset = first.opening.payload_bytes, first.opening.offset
    if expected > payload_bytes_max:
        raise PeerError(WireCode.TOO_LARGE, f"the reply declares {expected} bytes, the limit is {payload_bytes_max}")
    if into is not None and first.opening.envelope.payload_digest.hex() != into.digest:
        into = None
    if into is not None and offset == 0:
        into.restart()
    if offset != (0 if into is None else into.size_bytes):
        raise PeerError(WireCode.MALFORMED, "the reply does not begin where it was asked to")
    parts = []
    total = offset
    for frame in stream:
        chunk = frame.chunk  # asked for once: a protobuf frame makes a copy each time
        if frame.WhichOneof("part") != "chunk" or len(chunk) > codec.CHUNK_BYTES_MAX:
            raise PeerError(WireCode.MALFORMED, "the reply has a frame that is not a chunk of at most 1 MiB")
        total += len(chunk)
        if total > expected:
            raise PeerError(WireCode.MALFORMED, "the reply is longer than it declared")
        if into is None:
            parts.append(chunk)
        else:
            into.write(chunk)
    if total != expected:
        raise PeerError(WireCode.MALFORMED, f"the reply has {total} bytes, it declared {expected}")
    return Reply(first.opening.envelope, b"".join(parts) if into is None or not total else into.view())
