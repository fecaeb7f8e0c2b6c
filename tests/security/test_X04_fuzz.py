"""X4: whatever bytes come, a parser answers or refuses in words of ours, and takes no more memory than it was given.

Random bytes reach little of a parser, so most inputs are good ones with pieces cut out, doubled, replaced or moved.
Longer runs: FUZZ_EXAMPLES=20000 pytest tests/security/test_X04_fuzz.py
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from fedsilo.audit.checkpoint import (
    Checkpoint,
    log_key,
    open_checkpoint,
    parse_checkpoint,
    parse_note,
    parse_verifier_key,
    sign_checkpoint,
)
from fedsilo.audit.record import parse_record
from fedsilo.demo.wire_recorder import Unreadable, read_recording
from fedsilo.files.model_folder import lora_schema_of, read_fingerprints
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import decode_factors
from fedsilo.protocol.errors import FedSiloError
from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS
from fedsilo.protocol.plan import plan_from_canonical
from fedsilo.protocol.strict_yaml import load
from policies.load import load_policy, read_patterns
from silo.guard.channel import assemble
from silo.link import TRAINER_SAYS, Link
from tests.policies.own_patterns import PATTERNS
from tests.policies.setting import PLAN, SCHEMA, policy_text, responses_body, zeros
from tests.policies.test_model_folder import _folder

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
# A parser keeps a few copies of its input, and libraries have buffers of their own; a bomb would take far more.
PEAK_BYTES_MAX = 32 << 20
fuzzed = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NOTE = sign_checkpoint(Checkpoint("hospital_a/log", 7, bytes(32)), KEY)
FACTORS = codec.encode_factors(
    zeros(), base_digest="ab" * 32, schema_sha256=SCHEMA.digest, rank=2, scale=2.0, dtype="float32"
)
RESPONSES = codec.encode(responses_body((1, ("12", "13")), (4, ())))


@st.composite
def spoilt(draw: st.DrawFn, good: bytes) -> bytes:
    """Good bytes after a few edits, or any bytes at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        piece = draw(
            st.one_of(st.binary(max_size=12), st.just(bytes(data[start:end]) * 2), st.sampled_from(
                [b"", b"\xff" * 8, b"\x00" * 8, b"[" * 200, b"{" * 200, b"- " * 200, b'"', b"\n", b"9" * 40, b"1e999"]
            ))
        )  # fmt: skip
        data[start:end] = piece
    return bytes(data)


def answers_or_refuses(parse: Callable[[], Any], *refusals: type[Exception]) -> None:
    tracemalloc.start()
    try:
        parse()
    except (FedSiloError, *refusals):
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < PEAK_BYTES_MAX


@fuzzed
@given(st.data(), st.sampled_from(sorted({**OUTBOUND_KINDS, **INBOUND_KINDS})))
def test_X04_messages(data: st.DataObject, kind: str) -> None:
    payload = data.draw(spoilt(RESPONSES))
    answers_or_refuses(lambda: codec.decode({**OUTBOUND_KINDS, **INBOUND_KINDS}[kind], payload))


@fuzzed
@given(spoilt(FACTORS))
def test_X04_tensor_payloads(payload: bytes) -> None:
    answers_or_refuses(lambda: decode_factors(payload))


@fuzzed
@given(st.lists(spoilt(pb.Frame(opening=pb.Opening(payload_bytes=4)).SerializeToString()), max_size=4))
def test_X04_frames(parts: list[bytes]) -> None:
    def parse() -> None:
        assemble((pb.Frame.FromString(part) for part in parts), 1 << 20)

    answers_or_refuses(parse, DecodeError)  # which gRPC's own layer answers, before our handler is asked


@pytest.mark.slow
@fuzzed
@given(spoilt(policy_text().encode()))
def test_X04_policies(text: bytes) -> None:
    answers_or_refuses(lambda: load_policy(text, "policy.yaml"))
    answers_or_refuses(lambda: load(text, "any.yaml"))


@fuzzed
@given(spoilt(PATTERNS.encode()))
def test_X04_files_of_own_patterns(text: bytes) -> None:
    answers_or_refuses(lambda: read_patterns(text, "site.patterns.yaml"))


@fuzzed
@given(spoilt(NOTE.encode()))
def test_X04_checkpoints(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    key = log_key("hospital_a/log", KEY.public_key())
    for parse in (parse_note, parse_checkpoint, parse_verifier_key, lambda note: open_checkpoint(note, key)):
        answers_or_refuses(lambda parse=parse: parse(text))


@fuzzed
@given(spoilt(b'{"actor":"a","boot":"b","event":"start","link":{},"mono":1,"salt":"00","seq":0,"t":1,"v":1}'))
def test_X04_records(line: bytes) -> None:
    answers_or_refuses(lambda: parse_record(line))


@fuzzed
@given(spoilt(PLAN.canonical().encode()))
def test_X04_plans(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    answers_or_refuses(lambda: plan_from_canonical(text))


class Received:
    """A stream socket that has something to say and then is gone."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def recv_into(self, room: memoryview) -> int:
        part, self.data = self.data[: len(room)], self.data[len(room) :]
        room[: len(part)] = part
        return len(part)

    def sendall(self, data: bytes) -> None: ...
    def shutdown(self, how: int) -> None: ...
    def close(self) -> None: ...


HEADER = b'{"type": "done", "task": "ExportDelta", "round": 1, "metrics": {"kl": 0.1}}'


@fuzzed
@given(spoilt(len(HEADER).to_bytes(4, "big") + (3).to_bytes(8, "big") + HEADER + b"abc"))
def test_X04_what_a_trainer_says(data: bytes) -> None:
    answers_or_refuses(lambda: Link(Received(data), TRAINER_SAYS, body_bytes_max=1 << 20).receive())


@fuzzed
@given(spoilt(save({"w": np.zeros((3, 4), np.float32), "v": np.ones(2, np.float32)})))
def test_X04_model_folders(tmp_path: Path, data: bytes) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        _folder(folder)
    (folder / "model.safetensors").write_bytes(data)
    answers_or_refuses(lambda: lora_schema_of(folder, 2, 4.0, "all-linear"))
    answers_or_refuses(lambda: read_fingerprints(folder))


HTTP2 = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    b"\x00\x00\x04\x00\x01\x00\x00\x00\x01abcd"  # DATA
    b"\x00\x00\x01\x01\x04\x00\x00\x00\x01\x82"  # HEADERS, END_HEADERS
)


@fuzzed
@given(spoilt(HTTP2))
def test_X04_recordings(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "0001-hospital_a.up"
    path.write_bytes(data)
    answers_or_refuses(lambda: read_recording(path), Unreadable)


@fuzzed
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=12,
    )
)
def test_X04_canonical_json(value: Any) -> None:
    answers_or_refuses(lambda: codec.canonical_json(value), ValueError)


@pytest.mark.parametrize("good", [FACTORS, RESPONSES, NOTE.encode(), policy_text().encode(), PLAN.canonical().encode()])
def test_what_is_spoilt_here_was_good(good: bytes) -> None:
    """The counterpart: a parser that refuses everything would pass all of the above."""
    accepted = 0
    for parse in (
        lambda: decode_factors(good), lambda: codec.decode(pb.PublicResponses, good),
        lambda: parse_checkpoint(parse_note(good.decode()).text), lambda: load_policy(good, "policy.yaml"),
        lambda: plan_from_canonical(good.decode()),
    ):  # fmt: skip
        try:
            parse()
        except (FedSiloError, UnicodeDecodeError):
            continue
        accepted += 1
    assert accepted == 1
