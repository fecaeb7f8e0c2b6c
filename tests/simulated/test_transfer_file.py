"""Files of signed messages: written, listed by any ZIP tool, read back, and refused in every way in which they can be
damaged."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsilo.files import transfer_file
from fedsilo.files.transfer_file import Header, TransferBroken, TransferFile, TransferWriter
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError

KEY = Ed25519PrivateKey.from_private_bytes(b"k" * 32)
HEADER = Header("cardio-net", "spiffe://cardio-net/silo/a", "spiffe://cardio-net/coordinator/main", "now", "PEM")


def envelope(payload: bytes, sequence: int = 1) -> pb.Envelope:
    return pb.Envelope(
        federation="cardio-net", run="run-1", round=2, kind="lora.factors", sequence=sequence,
        payload_digest=bytes.fromhex(codec.sha256_hex(payload)), signature=b"s" * 64,
    )  # fmt: skip


def written(path: Path, *payloads: bytes) -> Path:
    with TransferWriter(path, HEADER, KEY) as file:
        for number, payload in enumerate(payloads, 1):
            pieces = (payload[at : at + 7] for at in range(0, len(payload), 7))
            file.add(envelope(payload, number), payload if number % 2 else pieces, answers=("run-1", number))
        digest = file.finish()
    assert digest == codec.sha256_hex(path.read_bytes())
    return path


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=3000), max_size=6))
def test_what_was_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, payloads: list[bytes]) -> None:
    path = written(tmp_path_factory.mktemp("f") / "x.zip", *payloads)
    with TransferFile(path) as file:
        assert file.header == HEADER
        assert [file.read(message) for message in file.messages] == payloads
        assert [bytes(file.view(message)) for message in file.messages] == payloads
        assert [message.envelope for message in file.messages] == [
            envelope(payload, number) for number, payload in enumerate(payloads, 1)
        ]
        assert [message.answers for message in file.messages] == [("run-1", n + 1) for n in range(len(payloads))]


def test_the_same_payload_is_in_it_once_and_nothing_is_compressed(tmp_path: Path) -> None:
    payload = b"adapter" * 10_000
    path = written(tmp_path / "x.zip", payload, payload, payload)
    assert len(payload) < path.stat().st_size < 1.1 * len(payload)
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "--test", str(path)], capture_output=True, text=True, check=True
    )
    assert "Done testing" in listed.stdout


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["flip", "cut", "insert"]))
def test_a_damaged_file_gives_what_was_written_or_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, how: str
) -> None:
    """A flipped bit in what nobody reads (a checksum, a date) may pass; another envelope or payload never does: the
    envelope's change is its signature's to find, so here it only has to be told apart from the one that was written."""
    draw = random.Random(seed)
    payloads = [b"first" * 40, b"second" * 50]
    path = written(tmp_path_factory.mktemp("f") / "x.zip", *payloads)
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    if how == "flip":
        data[place] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del data[place:]
    else:
        data[place:place] = bytes(draw.randrange(256) for _ in range(draw.randrange(1, 9)))
    path.write_bytes(data)
    try:
        with TransferFile(path) as file:
            read = [(message.envelope, file.read(message)) for message in file.messages]
            assert [bytes(file.view(message)) for message in file.messages] == [payload for _, payload in read]
    except TransferBroken:
        return
    for found, payload in read:
        assert codec.sha256_hex(payload) == found.payload_digest.hex()
        assert payload in payloads


def test_more_messages_than_a_file_is_read_with_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_file, "MESSAGES_MAX", 2)
    with TransferFile(written(tmp_path / "two.zip", b"a", b"b")) as file:
        assert len(file.messages) == 2
    with pytest.raises(OperationError, match="at most 2 messages"):
        written(tmp_path / "three.zip", b"a", b"b", b"c")
    assert [path.name for path in tmp_path.iterdir()] == ["two.zip"]


def test_only_the_writers_key_vouches_for_a_file(tmp_path: Path) -> None:
    with TransferFile(written(tmp_path / "x.zip", b"a")) as file:
        file.verify(KEY.public_key())
        with pytest.raises(TransferBroken, match="not signed by spiffe://cardio-net/silo/a"):
            file.verify(Ed25519PrivateKey.from_private_bytes(b"o" * 32).public_key())


def test_T29_another_payload_under_a_signed_manifest_is_found_out(tmp_path: Path) -> None:
    """Not damage, which the archive's own checksum finds: somebody packed the file anew around other bytes."""
    path = written(tmp_path / "x.zip", b"the payload that was signed", b"another")
    packed = tmp_path / "packed.zip"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(packed, "w") as new:
        for entry in old.infolist():
            content = old.read(entry)
            new.writestr(entry, content.replace(b"signed", b"forged") if "payloads/" in entry.filename else content)
    with TransferFile(packed) as file:
        file.verify(KEY.public_key())  # the manifest is the sender's
        forged, untouched = file.messages
        with pytest.raises(TransferBroken):
            file.read(forged)
        with pytest.raises(TransferBroken):
            list(file.pieces(forged))
        assert file.read(untouched) == b"another"


def archive(**entries: tuple[bytes, int]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name, (content, kind) in entries.items():
            file.writestr(name, content, compress_type=kind)
    return made.getvalue()


MANIFEST = (
    b'{"format": "fedsilo transfer 1", "federation": "f", "from": "a", "to": "b", "written_at": "", "certificate": "", '
    b'"messages": []}'
)
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "no archive"),
        (b"PK\x05\x06" + b"\0" * 18, "manifest.json is missing"),
        (archive(**{"manifest.json": (MANIFEST, DEFLATED)}), "compressed"),
        (archive(**{"manifest.json": (MANIFEST, STORED), "bomb": (b"0" * 10**6, DEFLATED)}), "compressed"),
        (archive(**{"manifest.json": (b"[]", STORED)}), "is not one"),
        (archive(**{"manifest.json": (b"[" * 100_000, STORED)}), "is not one"),
        (archive(**{"manifest.json": (MANIFEST.replace(b"transfer 1", b"transfer 2"), STORED)}), "transfer 2"),
        (archive(**{"manifest.json": (MANIFEST.replace(b"[]", b'[{"kind": "x"}]'), STORED)}), "000001 is missing"),
        (archive(**{"manifest.json": (b" " * (9 << 20) + MANIFEST, STORED)}), "too large"),
        (
            archive(
                **{"manifest.json": (MANIFEST.replace(b"[]", b"[{}]"), STORED), "messages/000001": (b"\xff", STORED)}
            ),
            "no envelope",
        ),
        (
            archive(
                **{
                    "manifest.json": (MANIFEST.replace(b"[]", b"[{}]"), STORED),
                    "messages/000001": (envelope(b"x").SerializeToString(), STORED),
                }
            ),
            "is missing",
        ),
    ],
)
def test_what_is_no_such_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "x.zip"
    path.write_bytes(content)
    with pytest.raises(TransferBroken, match=why) as told:
        TransferFile(path)
    assert str(path) in told.value.message and told.value.hint and told.value.code == "TRANSFER_BROKEN"


def test_nothing_half_written_stays_and_nothing_is_written_over(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TransferWriter(tmp_path / "x.zip", HEADER, KEY) as file:
        file.add(envelope(b"a"), b"a")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with TransferWriter(tmp_path / "x.zip", HEADER, KEY) as file:
        (tmp_path / "x.zip").write_text("came in between")
        with pytest.raises(ConflictError):
            file.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["x.zip"]
    assert (tmp_path / "x.zip").read_text() == "came in between"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperationError, match="missing"):
        TransferWriter(tmp_path / "missing" / "x.zip", HEADER, KEY)
    with pytest.raises(NotFoundError, match="missing"):
        TransferFile(tmp_path / "missing" / "x.zip")
