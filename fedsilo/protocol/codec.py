"""Canonical bytes of everything that crosses the wire, and how they are read back.

Every payload is rebuilt from parsed values (threat model B4): `decode` accepts only bytes that re-encode to
themselves, so padding, unknown fields, duplicate keys and non-canonical encodings carry nothing (T3).
What this does not stop: information in the values themselves (N1).

A tensor payload is one protobuf `Factors` header behind its 8-byte little-endian length, then each tensor's
little-endian bytes, contiguous, in header order (names sorted). A receiver can therefore read any tensor's
tile by offset without holding the payload in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import rfc8785
from google.protobuf.message import DecodeError, Message

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, WireCode

CHUNK_BYTES_MAX = 1 << 20
UNASKED_BYTES_MAX = 1 << 20  # a larger payload is sent when the receiver says so, and from where it says
SMALL_PAYLOAD_BYTES_MAX = 16 << 20
FACTORS_HEADER_BYTES_MAX = 4 << 20
TENSOR_SIDES_MAX = 8
TENSOR_ELEMENTS_MAX = 1 << 40
_LENGTH_PREFIX_BYTES = 8
_PAGE_BYTES = 4096
_CHUNK_HEAD_BYTES_MAX = 4  # of pieces below 2 MiB; gRPC takes no larger message

MessageT = TypeVar("MessageT", bound=Message)
Array = np.ndarray[Any, np.dtype[Any]]
Buffer = bytes | memoryview  # payload bytes

# The wire's dtypes. bfloat16 travels as the upper half of a float32, since numpy has no bfloat16.
DTYPE_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
TILE_ELEMENTS = 1 << 16  # 256 KiB of float32
SMALLEST_NORMAL_BITS = np.uint32(0x00800000)  # of a float32; below it are 0 and denormals


def sha256_hex(data: bytes | bytearray | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the SHA-256 of the pieces joined."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def canonical_json(value: Any) -> bytes:
    """RFC 8785 bytes of a JSON value. Raises ValueError for what JSON cannot carry (NaN, integers above 2**53)."""
    return rfc8785.dumps(value)


def encode(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)


def decode(message_type: type[MessageT], payload: Buffer) -> MessageT:
    """Parse canonical bytes.

    Raises:
        PeerError: too large, not parseable, with a field that this protocol does not have (`UNKNOWN_FIELD`), or not the
            canonical encoding of what it parses to.
    """
    if len(payload) > SMALL_PAYLOAD_BYTES_MAX:
        raise PeerError(WireCode.TOO_LARGE, f"payload of {len(payload)} bytes exceeds {SMALL_PAYLOAD_BYTES_MAX}")
    message, payload = message_type(), bytes(payload)
    try:
        message.ParseFromString(payload)
        require_known(message)
        canonical = encode(message)
    except (DecodeError, RecursionError, UnicodeError, ValueError) as error:
        raise PeerError(WireCode.MALFORMED, f"{message_type.__name__} does not parse") from error
    if canonical != payload:
        raise PeerError(WireCode.MALFORMED, f"{message_type.__name__} is not in canonical form")
    return message


def require_known(message: Message) -> None:
    """Refuse unknown fields: of a later protocol they may mean something that is lost here, and of none they could say
    something unseen (T3).

    Raises:
        PeerError: there is a field, at any depth, that this protocol does not have; it is gone from the message then.
    """
    size_bytes = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size_bytes:
        raise PeerError(
            WireCode.UNKNOWN_FIELD,
            f"{type(message).__name__} has a field that this protocol does not have",
            hint="the other side is newer, or says what it may not; use one version of FedSilo on both sides",
        )


def signing_bytes(envelope: pb.Envelope) -> bytes:
    """Return the bytes that an envelope's Ed25519 signature covers: a domain prefix and canonical JSON of all other
    fields (B7, B8)."""
    return b"fedsilo-envelope-v1\n" + canonical_json(
        {
            "federation": envelope.federation,
            "run": envelope.run,
            "round": envelope.round,
            "step": envelope.step,
            "attempt": envelope.attempt,
            "kind": envelope.kind,
            "sender": envelope.sender,
            "sequence": envelope.sequence,
            "payload_digest": envelope.payload_digest.hex(),
        }
    )


def command_signing_bytes(
    *, site: str, name: str, arguments_json: str, request_id: str, expires: str, federation: str = ""
) -> bytes:
    """Return the bytes that an operator's signature on a control command covers. An earlier version named no
    federation."""
    command = {"site": site, "name": name, "arguments": arguments_json, "request_id": request_id, "expires": expires}
    if not federation:
        return b"fedsilo-command-v1\n" + canonical_json(command)
    return b"fedsilo-command-v2\n" + canonical_json({"federation": federation, **command})


# ---- tensors ---------------------------------------------------------------------------------------


def to_bfloat16_bits(values: Array) -> Array:
    """Round float32 to bfloat16, nearest even, as uint16 bits. Beyond the largest value is infinity; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    # rounding would carry a NaN's payload into exponent and sign, and make it infinity or zero
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded = np.where(is_nan, bits | np.uint32(0x00400000), rounded)
    return (rounded >> np.uint32(16)).astype("<u2")


def from_bfloat16_bits(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class Factors:
    """A parsed tensor payload: header, float32 arrays by name (bfloat16 is widened on reading), and the bytes behind
    them."""

    header: pb.Factors
    tensors: Mapping[str, Array]
    payload: Buffer


def encode_factors(
    tensors: Mapping[str, Array],
    *,
    base_digest: str,
    schema_sha256: str,
    rank: int,
    scale: float,
    dtype: str,
    fit: Callable[[Array], Array] | None = None,
) -> bytes:
    """Canonical bytes of named float32 arrays; -0 and denormals become +0 (T4), names are sorted.

    `fit` is applied once to each value, a flat tile at a time, before it is written.

    Raises:
        ValueError: unknown dtype.
    """
    if dtype not in DTYPE_ITEM_BYTES:
        raise ValueError(f"wire dtype {dtype!r} is not one of {sorted(DTYPE_ITEM_BYTES)}")
    header, payload_bytes = factors_head(
        tensors, base_digest=base_digest, schema_sha256=schema_sha256, rank=rank, scale=scale, dtype=dtype
    )
    return bytes(joined_factors(header, payload_bytes, tensors, fit))


def joined_factors(
    header: pb.Factors,
    payload_bytes: int,
    tensors: Mapping[str, Array],
    fit: Callable[[Array], Array] | None = None,
    into: memoryview | None = None,
) -> memoryview:
    """The payload of a header from `factors_head`, read-only: written into one buffer of its final size, so it is held
    once. numpy asks the kernel for huge pages, which takes half the time of `bytes`; the payload starts on a page, so
    that a disk can take it from there.

    Args:
        header: from `factors_head`.
        payload_bytes: from `factors_head`.
        tensors: float32 arrays by name.
        fit: as `encode_factors`.
        into: so many bytes, in place of a buffer of its own.

    Raises:
        ValueError: the tensors are not what the header says.
    """
    if into is None:
        room = np.empty(payload_bytes + _PAGE_BYTES, np.uint8)
        start = -room.__array_interface__["data"][0] % _PAGE_BYTES
        into = room[start : start + payload_bytes].data
    payload, end = np.frombuffer(into, np.uint8), 0
    if len(payload) != payload_bytes:
        raise ValueError(f"the header says {payload_bytes} bytes, there is room for {len(payload)}")
    for piece in factors_pieces(header, tensors, fit):
        begin, end = end, end + memoryview(piece).nbytes
        payload[begin:end] = np.frombuffer(piece, np.uint8)
    if end != payload_bytes:
        raise ValueError(f"the header says {payload_bytes} bytes, the tensors have {end}")
    payload.flags.writeable = False
    return payload.data


def factors_head(
    tensors: Mapping[str, Array], *, base_digest: str, schema_sha256: str, rank: int, scale: float, dtype: str
) -> tuple[pb.Factors, int]:
    """Header of a tensor payload, and the bytes that the whole of it will have."""
    header = pb.Factors(base_digest=base_digest, schema_sha256=schema_sha256, rank=rank, scale=scale, dtype=dtype)
    for name in sorted(tensors):
        header.tensors.append(pb.TensorEntry(name=name, shape=np.shape(tensors[name])))
    elements = sum(int(np.size(values)) for values in tensors.values())
    return header, _LENGTH_PREFIX_BYTES + header.ByteSize() + elements * DTYPE_ITEM_BYTES[dtype]


def factors_start(header: pb.Factors) -> bytes:
    """Return the bytes of a tensor payload before its values."""
    head = encode(header)
    return len(head).to_bytes(_LENGTH_PREFIX_BYTES, "little") + head


def factors_pieces(
    header: pb.Factors, tensors: Mapping[str, Array], fit: Callable[[Array], Array] | None = None
) -> Iterator[bytes | memoryview]:
    """The payload's bytes from front to back, as `encode_factors` joins them; for who only hashes them."""
    yield factors_start(header)
    for entry in header.tensors:
        for tile in tiles(tensors[entry.name]):
            values = canonical_values(tile if fit is None else fit(tile))
            yield (to_bfloat16_bits(values) if header.dtype == "bfloat16" else values.astype("<f4", copy=False)).data


def tiles(values: Array) -> Iterator[Array]:
    """An array in row-major order, in flat pieces that stay in the processor's cache."""
    flat = np.ascontiguousarray(values).reshape(-1)
    for start in range(0, flat.size, TILE_ELEMENTS):
        yield flat[start : start + TILE_ELEMENTS]


def canonical_values(values: Array) -> Array:
    """Return the values as float32 with +0 for -0 and denormals: the same numbers to anyone, and no bits to spare (T4).

    Returns:
        the values themselves where they are so already, which most tiles are; else a copy.
    """
    contiguous = np.ascontiguousarray(values, dtype=np.float32)
    if contiguous.size and (contiguous.view(np.uint32) & np.uint32(0x7FFFFFFF)).min() >= SMALLEST_NORMAL_BITS:
        return contiguous
    result = np.array(contiguous)
    bits = result.view(np.uint32)
    bits[(bits & np.uint32(0x7F800000)) == 0] = 0
    return result


class RandomAccess(Protocol):
    """Bytes that a tile reader reads from: memory in a test, a spooled file in the coordinator."""

    def read_at(self, offset: int, length: int) -> bytes | memoryview: ...


@dataclass(frozen=True)
class InMemory:
    """A payload in memory; of a view nothing is copied."""

    data: Buffer

    def read_at(self, offset: int, length: int) -> Buffer:
        return self.data[offset : offset + length]


@dataclass(frozen=True)
class TensorPlace:
    name: str
    shape: tuple[int, ...]
    offset: int
    elements: int


class FactorsReader:
    """Reads one tensor payload tile by tile.

    Args:
        source: random access to the payload.
        payload_bytes: its whole length.

    Raises:
        PeerError: header malformed, names not sorted and unique, or the length differs from what the header says.
    """

    def __init__(self, source: RandomAccess, payload_bytes: int) -> None:
        self._source = source
        head_length = int.from_bytes(source.read_at(0, _LENGTH_PREFIX_BYTES), "little")
        if head_length > min(FACTORS_HEADER_BYTES_MAX, max(payload_bytes - _LENGTH_PREFIX_BYTES, 0)):
            raise PeerError(WireCode.MALFORMED, "tensor header is longer than allowed")
        self.header = decode(pb.Factors, source.read_at(_LENGTH_PREFIX_BYTES, head_length))
        if self.header.dtype not in DTYPE_ITEM_BYTES:
            raise PeerError(WireCode.MALFORMED, "tensor payload has an unknown dtype")
        self._item_bytes = DTYPE_ITEM_BYTES[self.header.dtype]
        offset = _LENGTH_PREFIX_BYTES + head_length
        places: list[TensorPlace] = []
        before = ""
        for entry in self.header.tensors:
            name = entry.name
            if places and name <= before:
                raise PeerError(WireCode.MALFORMED, "tensor names are not sorted and unique")
            # Asked before anything is made of it: an empty tensor may claim any sides, and no array has them all.
            if len(entry.shape) > TENSOR_SIDES_MAX:
                raise PeerError(WireCode.MALFORMED, "a tensor has more sides than an array can have")
            shape = tuple(entry.shape)
            elements = math.prod(shape)
            if (elements or math.prod(max(1, side) for side in shape)) > TENSOR_ELEMENTS_MAX:
                raise PeerError(WireCode.MALFORMED, "a tensor's shape is none that an array can have")
            places.append(TensorPlace(name, shape, offset, elements))
            offset += elements * self._item_bytes
            before = name
        if offset != payload_bytes:
            raise PeerError(WireCode.MALFORMED, f"tensor payload has {payload_bytes} bytes, its header says {offset}")
        self.places = tuple(places)

    def tile(self, place: TensorPlace, start: int, stop: int) -> Array:
        """Elements [start, stop) of a tensor in row-major order, float32, shape [stop - start]. Tensors lie one behind
        the other, so that `stop` may be in a later one."""
        raw = self._source.read_at(place.offset + start * self._item_bytes, (stop - start) * self._item_bytes)
        if self.header.dtype == "bfloat16":
            return from_bfloat16_bits(np.frombuffer(raw, dtype="<u2"))
        return np.frombuffer(raw, dtype="<f4")

    def tensors(self) -> Iterator[tuple[str, Array]]:
        for place in self.places:
            yield place.name, self.tile(place, 0, place.elements).reshape(place.shape)


def decode_factors(payload: Buffer) -> Factors:
    """Decode a whole tensor payload in memory; float32 arrays are read-only views of it. Raises PeerError as the reader
    does."""
    reader = FactorsReader(InMemory(memoryview(payload)), len(payload))
    return Factors(reader.header, dict(reader.tensors()), payload)


# ---- frames ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """A frame that holds a piece of a payload, without a copy of it. On the wire it is `pb.Frame(chunk=...)`, which
    copies a piece three times into new memory: nine tenths of the time that sending one took."""

    chunk: Buffer

    def WhichOneof(self, _: str, /) -> str:  # noqa: N802  # protobuf's name
        return "chunk"


Frame = pb.Frame | Chunk


def frame_bytes(frame: Frame) -> bytes:
    """Return a frame as it crosses the wire."""
    if isinstance(frame, Chunk):
        return b"".join((_chunk_head(len(frame.chunk)), frame.chunk))
    return frame.SerializeToString()


def frame_of(data: bytes) -> Frame:
    """Read a frame as `frame_bytes` writes it. Raises protobuf's DecodeError: no frame."""
    for head_bytes in range(2, _CHUNK_HEAD_BYTES_MAX + 1):
        head = _chunk_head(max(len(data) - head_bytes, 0))
        if len(head) == head_bytes and data.startswith(head):
            return Chunk(memoryview(data)[head_bytes:])
    return pb.Frame.FromString(data)  # anything else, and a piece that another writer encodes in another way


def _chunk_head(chunk_bytes: int) -> bytes:
    """Return what protobuf writes before the bytes of field 2: tag and length, seven bits a byte."""
    head = bytearray(b"\x12")
    while chunk_bytes > 0x7F:
        head.append(chunk_bytes & 0x7F | 0x80)
        chunk_bytes >>= 7
    head.append(chunk_bytes)
    return bytes(head)


def frames(envelope: pb.Envelope, payload: Buffer) -> Iterator[Frame]:
    """One message as frames: opening first, then chunks of at most 1 MiB."""
    yield opening(envelope, payload)
    yield from chunk_frames(payload, 0)


def opening(envelope: pb.Envelope, payload: Buffer) -> pb.Frame:
    return pb.Frame(opening=pb.Opening(envelope=envelope, payload_bytes=len(payload)))


def chunk_frames(payload: Buffer, offset: int) -> Iterator[Chunk]:
    view = memoryview(payload)
    for start in range(offset, len(payload), CHUNK_BYTES_MAX):
        yield Chunk(view[start : start + CHUNK_BYTES_MAX])
