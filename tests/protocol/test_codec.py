"""Canonical bytes: what parses re-encodes to itself, and nothing else is accepted (B4, T3, T23)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct

import numpy as np
import pytest
from google.protobuf.internal import encoder
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, WireCode

SHAPES = arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=5)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TENSORS = st.dictionaries(
    st.text("abcxyz._0", min_size=1, max_size=8),
    SHAPES.flatmap(lambda s: arrays.arrays(np.float32, s, elements=FLOATS)),
)


def factors(tensors: dict[str, np.ndarray], dtype: str = "float32") -> bytes:
    return codec.encode_factors(tensors, base_digest="b", schema_sha256="s", rank=4, scale=2.0, dtype=dtype)


@pytest.mark.slow
@settings(deadline=None)
@given(TENSORS)
def test_float32_factors_survive_but_for_denormals_and_minus_zero(tensors: dict[str, np.ndarray]) -> None:
    read = codec.decode_factors(factors(tensors))
    assert read.header.rank == 4 and read.header.scale == 2.0
    assert list(read.tensors) == sorted(tensors)
    for name, array in tensors.items():
        flushed = np.array([0.0 if abs(float(x)) < 2.0**-126 else x for x in array.ravel()], np.float32)
        assert read.tensors[name].shape == array.shape
        assert read.tensors[name].tobytes() == flushed.tobytes()
    assert factors(dict(read.tensors)) == factors(tensors), "encoding is idempotent"


def bfloat16_by_hand(value: float) -> float:
    """Nearest bfloat16, ties to even, by comparing the two neighbours in exact arithmetic."""
    [bits] = struct.unpack("<I", struct.pack("<f", value))
    towards_zero, away = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    neighbours = [struct.unpack("<f", struct.pack("<I", each))[0] for each in (towards_zero, away)]
    distances = [abs(value - neighbour) for neighbour in neighbours]
    if distances[0] == distances[1]:
        return float(neighbours[(towards_zero >> 16) & 1])
    return float(neighbours[distances[1] < distances[0]])


# Near the largest bfloat16, 3.39e38, one neighbour is infinite.
@given(st.floats(-(2.0**127), 2.0**127, width=32))
def test_bfloat16_rounds_to_nearest_even(value: float) -> None:
    got = codec.from_bfloat16_bits(codec.to_bfloat16_bits(np.float32([value])))[0]
    assert got == np.float32(bfloat16_by_hand(value))


# quiet and signalling, either sign, payload in the kept half, in the lost half, in both
NAN_BITS = [sign | rest for sign in (0, 1 << 31) for rest in (
    0x7F800001, 0x7F807FFF, 0x7F808000, 0x7F80FFFF, 0x7F810000, 0x7FBFFFFF, 0x7FC00000, 0x7FC00001, 0x7FFF7FFF,
    0x7FFF8000, 0x7FFFFFFF,
)]  # fmt: skip


@pytest.mark.parametrize("bits", NAN_BITS)
def test_T50_no_nan_turns_into_a_number_in_bfloat16(bits: int) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    sent = codec.to_bfloat16_bits(value)
    [got] = codec.from_bfloat16_bits(sent)
    assert np.isnan(got)
    assert int(sent[0]) == (bits | 1 << 22) >> 16, "quiet, with the sign and the upper half of the payload"
    assert np.isnan(codec.decode_factors(factors({"t": value}, "bfloat16")).tensors["t"][0])


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x7F800000, 0x7F80),  # infinity
        (0xFF800000, 0xFF80),
        (0x7F7FFFFF, 0x7F80),  # the largest float32 lies nearer to infinity than to the largest bfloat16
        (0x7F7F7FFF, 0x7F7F),
        (0xFF7FFFFF, 0xFF80),
    ],
)
def test_values_beside_nan_round_as_numbers_do(bits: int, rounded: int) -> None:
    sent = codec.to_bfloat16_bits(np.array([bits], np.uint32).view(np.float32))
    assert int(sent[0]) == rounded


def test_two_equal_updates_have_equal_bytes_whatever_their_order() -> None:
    first = {"b": np.ones((2, 2), np.float32), "a": np.zeros(3, np.float32)}
    second = {"a": np.full(3, -0.0, np.float32), "b": np.asfortranarray(np.ones((2, 2)))}
    assert factors(first) == factors(second)


def test_tiles_of_any_size_join_to_the_tensor() -> None:
    tensor = np.arange(35, dtype=np.float32).reshape(5, 7)
    payload = factors({"t": tensor, "u": tensor * 2})
    reader = codec.FactorsReader(codec.InMemory(payload), len(payload))
    for place in reader.places:
        for size in (1, 4, 35):
            tiles = [reader.tile(place, start, min(start + size, 35)) for start in range(0, 35, size)]
            assert np.array_equal(np.concatenate(tiles), tensor.ravel() * (1 + (place.name == "u")))


def length_delimited(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + encoder._VarintBytes(len(data)) + data  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda good: good + good, "field twice"),
        (lambda good: b"\x08\x83\x00" + good[2:], "overlong varint"),
        (lambda good: good + b"\x10\x00", "default value written out"),
        (lambda good: good[::-1], "field order or garbage"),
        (lambda good: good[:-1], "cut short"),
    ],
)
def test_T03_only_the_canonical_encoding_is_accepted(damage, what) -> None:  # type: ignore[no-untyped-def]
    good = codec.encode(pb.Poll(wait_milliseconds=3, acknowledged_sequence=300))
    assert codec.decode(pb.Poll, good).acknowledged_sequence == 300
    with pytest.raises(PeerError) as error:
        codec.decode(pb.Poll, damage(good))
    assert error.value.wire_code == WireCode.MALFORMED


@pytest.mark.parametrize("deep", [False, True])
def test_T03_a_field_of_a_later_protocol_is_refused_by_a_code_of_its_own(deep: bool) -> None:
    unknown = length_delimited(15, b"canary")
    good = codec.encode(pb.PublicResponses(prompts=[pb.PromptResponses(prompt_index=3)]))
    inner = good[2:] + unknown
    bad = length_delimited(2, inner) if deep else good + unknown
    assert codec.decode(pb.PublicResponses, good).prompts[0].prompt_index == 3
    with pytest.raises(PeerError) as error:
        codec.decode(pb.PublicResponses, bad)
    assert error.value.wire_code == WireCode.UNKNOWN_FIELD


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_X04_any_bytes_are_a_message_or_the_peers_fault(data: bytes) -> None:
    for message_type in (pb.PublicResponses, pb.Checkpoint, pb.MetricsEval):
        with contextlib.suppress(PeerError):
            assert codec.encode(codec.decode(message_type, data)) == data
    with contextlib.suppress(PeerError):
        codec.decode_factors(data)


@pytest.mark.parametrize("cut", [-1, 1])
def test_T23_a_tensor_payload_of_another_length_than_declared_is_refused(cut: int) -> None:
    payload = factors({"t": np.ones(4, np.float32)})
    assert codec.decode_factors(payload).tensors["t"].sum() == 4
    damaged = payload[:cut] if cut < 0 else payload + b"\0"
    with pytest.raises(PeerError):
        codec.decode_factors(damaged)


def test_T23_a_header_that_claims_gigabytes_is_refused_before_anything_is_read() -> None:
    with pytest.raises(PeerError):
        codec.decode_factors((1 << 40).to_bytes(8, "little") + b"x")


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((0, 6), True),
        ((0,) * 8, True),
        ((0,) * 9, False),  # numpy has no array of so many sides
        ((0, 2**32 - 1, 2**32 - 1), False),  # none of these counts as an element, and no array is so large
    ],
)
def test_T23_an_empty_tensor_may_not_claim_any_shape(shape: tuple[int, ...], fits: bool) -> None:
    header = pb.Factors(dtype="float32", tensors=[pb.TensorEntry(name="a", shape=shape)])
    head = codec.encode(header)
    payload = len(head).to_bytes(8, "little") + head
    if fits:
        assert codec.decode_factors(payload).tensors["a"].shape == shape
        return
    with pytest.raises(PeerError) as refusal:
        codec.decode_factors(payload)
    assert refusal.value.wire_code is WireCode.MALFORMED


@pytest.mark.parametrize(("names", "fits"), [("ab", True), ("ba", False), ("aa", False)])
def test_T03_tensors_stand_in_the_order_of_their_names_and_each_once(names: str, fits: bool) -> None:
    """Any other order would be a message of its own: 392 tensors have 2^2800 of them."""
    body = pb.Factors(dtype="float32", rank=1, scale=1.0, tensors=[pb.TensorEntry(name=n, shape=[1]) for n in names])
    header = codec.encode(body)
    payload = len(header).to_bytes(8, "little") + header + np.ones(2, "<f4").tobytes()
    if fits:
        assert list(codec.decode_factors(payload).tensors) == ["a", "b"]
    else:
        with pytest.raises(PeerError, match="sorted and unique"):
            codec.decode_factors(payload)


def test_signing_bytes_are_canonical_json_of_every_field_but_the_signature() -> None:
    envelope = pb.Envelope(
        federation="f",
        run="r",
        round=2,
        step=3,
        attempt=1,
        kind="k",
        sender="s",
        sequence=9,
        payload_digest=b"\x01\xff",
    )
    prefix, _, body = codec.signing_bytes(envelope).partition(b"\n")
    assert prefix == b"fedsilo-envelope-v1"
    fields = {field.name for field in pb.Envelope.DESCRIPTOR.fields} - {"signature"}
    read = json.loads(body)
    assert set(read) == fields, "B8: the signature covers every field"
    assert read["payload_digest"] == "01ff" and read["sequence"] == 9
    assert body == json.dumps(read, sort_keys=True, separators=(",", ":")).encode()
    changed = pb.Envelope()
    changed.CopyFrom(envelope)
    changed.sequence = 10
    assert codec.signing_bytes(changed) != codec.signing_bytes(envelope)


def test_frames_carry_the_payload_in_chunks_of_at_most_a_mebibyte() -> None:
    payload = bytes(range(256)) * 9000
    parts = list(codec.frames(pb.Envelope(kind="k"), payload))
    assert parts[0].opening.payload_bytes == len(payload)
    chunks = [part.chunk for part in parts[1:]]
    assert max(map(len, chunks)) <= codec.CHUNK_BYTES_MAX
    assert hashlib.sha256(b"".join(chunks)).digest() == hashlib.sha256(payload).digest()


HEAD_EDGES = [0, 1, 0x7F, 0x80, 0x3FFF, 0x4000, codec.CHUNK_BYTES_MAX, 0x1FFFFF, 0x200000]


@pytest.mark.parametrize("size_bytes", HEAD_EDGES)
def test_a_chunk_crosses_as_protobuf_would_write_it(size_bytes: int) -> None:
    data = bytes(size_bytes)
    crossing = codec.frame_bytes(codec.Chunk(memoryview(data)))
    assert crossing == pb.Frame(chunk=data).SerializeToString()
    assert codec.frame_of(crossing).chunk == data


@given(
    st.one_of(
        st.binary(max_size=300),
        # near a chunk: its tag, a length of one byte or two, and bytes that are so many or not
        st.tuples(st.integers(0, 0xFF), st.binary(max_size=2), st.binary(max_size=300)).map(
            lambda drawn: b"\x12" + bytes([drawn[0]]) + drawn[1] + drawn[2]
        ),
        st.binary(max_size=300).map(lambda chunk: pb.Frame(chunk=chunk).SerializeToString() + b"\x12\x01x"),
    )
)
def test_any_bytes_are_the_frame_that_protobuf_reads(data: bytes) -> None:
    try:
        expected = pb.Frame.FromString(data)
    except DecodeError:
        with pytest.raises(DecodeError):
            codec.frame_of(data)
        return
    found = codec.frame_of(data)
    assert (found.WhichOneof("part"), found.chunk) == (expected.WhichOneof("part"), expected.chunk)
    if isinstance(found, pb.Frame):
        assert found == expected


def test_a_length_written_in_more_bytes_than_it_takes_is_read_too() -> None:
    assert codec.frame_of(b"\x12\x83\x00abc").chunk == b"abc"


@pytest.mark.parametrize("extra", [-1, 1])
def test_T03_a_payload_fills_the_room_it_is_given_to_the_last_byte(extra: int) -> None:
    tensors = {"a.lora_A": np.ones((2, 3), np.float32)}
    header, size = codec.factors_head(tensors, base_digest="", schema_sha256="", rank=2, scale=1.0, dtype="float32")
    room = memoryview(bytearray(b"S" * size))
    assert bytes(codec.joined_factors(header, size, tensors, into=room)) == bytes(
        codec.joined_factors(header, size, tensors)
    )
    with pytest.raises(ValueError, match="there is room for"):
        codec.joined_factors(header, size, tensors, into=memoryview(bytearray(size + extra)))


def test_T23_a_tensor_of_more_sides_than_an_array_has_is_refused_by_their_number() -> None:
    def read(shape: list[int]) -> codec.FactorsReader:
        header = pb.Factors(dtype="float32", tensors=[pb.TensorEntry(name="a.lora_A", shape=shape)])
        start = codec.factors_start(header)
        return codec.FactorsReader(codec.InMemory(start), len(start))

    assert read([0] * codec.TENSOR_SIDES_MAX).places[0].elements == 0
    with pytest.raises(PeerError, match="more sides"):
        read([0] * (codec.TENSOR_SIDES_MAX + 1))
    with pytest.raises(PeerError, match="shape is none"):
        read([0, 2**31, 2**31])  # empty, and larger than any array in what it claims
