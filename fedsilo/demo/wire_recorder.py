"""A recorder between the silos and the coordinator that sees every byte in the clear.

    silo --mTLS--> recorder (the coordinator's certificate and key) --mTLS (that silo's own)--> coordinator

It needs the private keys of both ends, which one machine holds only where somebody plays all sites: the demo and the
tests. No flag of a daemon makes one. What it writes down is read back here without gRPC, from the bytes themselves:
HTTP/2 frames (RFC 9113), headers (HPACK, RFC 7541), length-prefixed messages, our frames, envelope and payload.
What it does not see: how the bytes were timed, and anything that does not go through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from google.protobuf.message import DecodeError
from hpack import Decoder, HPACKError
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import ContinuationFrame, DataFrame, Frame, HeadersFrame

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.kinds import TENSOR_KINDS

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEADER_BYTES = 9
_READ_BYTES = 1 << 16
_START_SECONDS = 10.0


@dataclass(frozen=True)
class EndKeys:
    """Key and certificate that one party shows in its TLS handshake."""

    certificate: Path
    key: Path


class WireRecorder:
    """Listens on loopback from `start` to `stop`. One thread, one event loop for all connections.

    Args:
        folder: gets `NUMBER-SILO.up` and `.down` for each connection, the plain bytes in order.
        coordinator: the keys it ends the silos' TLS with.
        silos: by SPIFFE id, the keys it dials on with.
        trust_root: federation CA.
        upstream: where the coordinator listens, host:port.
        port: to listen on; 0 takes a free one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        coordinator: EndKeys,
        silos: Mapping[str, EndKeys],
        trust_root: Path,
        upstream: str,
        port: int = 0,
    ) -> None:
        self._folder = folder
        self._coordinator = coordinator
        self._silos = dict(silos)
        self._trust_root = trust_root
        self._upstream = upstream
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="wire-recorder", daemon=True)
        self._ready = threading.Event()
        self._failure: OSError | None = None
        self._connections = 0
        self._open: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Listen for connections. Raises OperationError: it cannot listen."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise OperationError(f"the recorder did not start within {_START_SECONDS:.0f} s")
        if self._failure is not None:
            raise OperationError(f"the recorder cannot listen on {self.address}: {self._failure.strerror}")

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            server = self._loop.run_until_complete(
                asyncio.start_server(self._serve, "127.0.0.1", self._port, ssl=self._server_context())
            )
        except OSError as error:
            self._failure = error
            self._loop.close()
            self._ready.set()
            return
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            server.close()
            for task in self._open:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._open, return_exceptions=True))
            self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end goes away."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # a handler of start_server always runs in one
        self._open.add(task)
        try:
            await self._forward(reader, writer)
        except (OSError, ssl.SSLError, asyncio.CancelledError):
            pass  # an end went away: what came so far is on disk, and the other end is closed below
        except LookupError:
            pass  # a certificate of this CA that is none of our silos': there is no key to dial on with
        finally:
            await _closed(writer)
            self._open.discard(task)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silo = _spiffe_id(writer.get_extra_info("ssl_object"))
        host, _, port = self._upstream.rpartition(":")
        onward_reader, onward_writer = await asyncio.open_connection(
            host, int(port), ssl=self._client_context(self._silos[silo]), server_hostname=host
        )
        self._connections += 1
        name = f"{self._connections:04d}-{silo.rpartition('/')[2]}"
        try:
            # either end may close first; gRPC never leaves a connection half open
            ends = [
                asyncio.ensure_future(_copy(reader, onward_writer, self._folder / f"{name}.up")),
                asyncio.ensure_future(_copy(onward_reader, writer, self._folder / f"{name}.down")),
            ]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
                await asyncio.gather(*ends, return_exceptions=True)
        finally:
            await _closed(onward_writer)

    def _server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._context(context, self._coordinator)

    def _client_context(self, keys: EndKeys) -> ssl.SSLContext:
        return self._context(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), keys)

    def _context(self, context: ssl.SSLContext, keys: EndKeys) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(self._trust_root)
        context.load_cert_chain(keys.certificate, keys.key)
        context.set_alpn_protocols(["h2"])
        return context


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: Path) -> None:
    """Everything from one end to the other, written down before it goes on."""
    with record.open("wb", buffering=0) as out:
        while data := await reader.read(_READ_BYTES):
            out.write(data)
            writer.write(data)
            await writer.drain()


async def _closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError, ssl.SSLError, asyncio.CancelledError):
        await writer.wait_closed()


def _spiffe_id(connection: ssl.SSLObject) -> str:
    der = connection.getpeercert(binary_form=True)
    assert der is not None  # noqa: S101  # the context requires a certificate
    names = x509.load_der_x509_certificate(der).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return names.value.get_values_for_type(x509.UniformResourceIdentifier)[0]


# ---- reading back ------------------------------------------------------------------------------------


class Unreadable(ValueError):
    """The bytes are not what this reader knows, so a search in them would prove nothing."""


@dataclass(frozen=True)
class WireMessage:
    """One message as it crossed. `whole`: every decoded byte of the call in that direction, the payload included."""

    envelope: pb.Envelope
    payload: bytes
    whole: bytes


@dataclass(frozen=True)
class Recording:
    """One direction of one connection.

    Attributes:
        silo: whose connection.
        upward: from the silo.
        raw: the bytes as they crossed.
        headers: names and values of all calls, decoded.
        messages: complete ones in the order of their calls.
        cut: calls that end within a message.
        rest: what belongs to no complete message, the pieces of a cut payload joined.
    """

    silo: str
    upward: bool
    raw: bytes
    headers: bytes
    messages: tuple[WireMessage, ...]
    cut: int
    rest: bytes

    def views(self) -> Iterator[tuple[bytes, bool]]:
        """Yield everything that can be read, each way it can be read, and whether it is text, not tensor values."""
        yield self.raw, False
        yield self.headers, True
        yield self.rest, True
        for message in self.messages:
            values = message.envelope.kind in TENSOR_KINDS
            yield message.whole, not values
            yield message.payload, not values
            if values:  # the header, behind its length, names the tensors
                length = int.from_bytes(message.payload[:8], "little")
                yield message.payload[: 8 + length], True


def recordings(folder: Path) -> Iterator[Recording]:
    """Yield what a recorder wrote, a connection's direction at a time. Raises Unreadable."""
    for path in sorted(folder.glob("*-*.up")) + sorted(folder.glob("*-*.down")):
        yield read_recording(path)


def read_recording(path: Path) -> Recording:
    """Read one direction of a connection. Raises Unreadable: a frame, header or message is of no known layout, or
    compressed."""
    try:
        return _read(path)
    except (DecodeError, HPACKError, HyperframeError, struct.error) as error:
        raise Unreadable(f"{path.name}: {type(error).__name__}: {error}") from error


def _read(path: Path) -> Recording:
    raw = path.read_bytes()
    upward = path.suffix == ".up"
    headers: list[bytes] = []
    streams: dict[int, bytearray] = {}
    decoder = Decoder()
    block = bytearray()
    for frame in _frames(raw.removeprefix(_PREFACE) if upward else raw):
        if isinstance(frame, DataFrame):
            streams.setdefault(frame.stream_id, bytearray()).extend(frame.data)
        elif isinstance(frame, HeadersFrame | ContinuationFrame):
            block += frame.data
            if "END_HEADERS" in frame.flags:
                headers += [b"%s: %s" % (name, value) for name, value in decoder.decode(bytes(block), raw=True)]
                block.clear()
    messages: list[WireMessage] = []
    rest = bytearray(block)
    cut = 0
    for body in streams.values():
        message, left = _message(bytes(body))
        if message is not None:
            messages.append(message)
        rest += left
        cut += message is None
    return Recording(path.stem.partition("-")[2], upward, raw, b"\n".join(headers), tuple(messages), cut, bytes(rest))


def _frames(data: bytes) -> Iterator[Frame]:
    position = 0
    while position + _FRAME_HEADER_BYTES <= len(data):
        frame, length = Frame.parse_frame_header(memoryview(data)[position : position + _FRAME_HEADER_BYTES])
        position += _FRAME_HEADER_BYTES
        if position + length > len(data):
            return  # the connection was cut here
        frame.parse_body(memoryview(data)[position : position + length])
        position += length
        yield frame


def _message(body: bytes) -> tuple[WireMessage | None, bytes]:
    """A call's message and what is left of its bytes; without a message all of them are left."""
    position = 0
    frames: list[pb.Frame] = []
    decoded = bytearray()
    while position + 5 <= len(body):
        compressed, length = struct.unpack_from(">BI", body, position)
        if compressed:
            raise Unreadable("a message on the wire is compressed")
        if position + 5 + length > len(body):
            break
        part = body[position + 5 : position + 5 + length]
        decoded += part
        frame = pb.Frame.FromString(part)
        if frame.WhichOneof("part") != "admitted":  # a number, before the answer to a large payload
            frames.append(frame)
        position += 5 + length
    payload = b"".join(frame.chunk for frame in frames if frame.WhichOneof("part") == "chunk")
    whole = bool(frames) and frames[0].WhichOneof("part") == "opening"
    if not whole or len(payload) != frames[0].opening.payload_bytes:
        # what was on its way when the call was cut: its last piece, less the five bytes before it, goes on the others
        return None, body + b"\n" + payload + body[position + 5 :]
    return WireMessage(frames[0].opening.envelope, payload, bytes(decoded)), body[position:]
