"""Signed messages in a file that people carry, where a silo has no line to the coordinator: a ZIP archive, nothing
compressed in it, so that whoever carries it can list what it holds with any tool.

    manifest.json         who wrote it for whom and when, and the messages in their order, readable
    manifest.sig          its signature, by the writer's message-signing key
    messages/000001       the envelope as it crosses a line: protobuf, signed
    payloads/SHA-256      the bytes that envelopes name, each once

What counts is in the envelopes: each message is judged by its own signature, sequence and digest, as if it had come
over a line. The manifest is for people, for the order, and for which message an answer belongs to; it is signed, so
that nobody who carries the file takes a message out of it, puts another in, or gives an answer to another message.
Does not stop: whoever carries the file from losing it, or from bringing an older one. What was not answered is written
again into the next file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import secrets
import shutil
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from google.protobuf.message import DecodeError

from fedsilo.files.durable import FULL, disk_error, fsync_directory
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, PeerError, VerificationError

FORMAT = "fedsilo transfer 1"
MESSAGES_MAX = 4096
_MANIFEST, _SIGNATURE = "manifest.json", "manifest.sig"
_SIGNED_PREFIX = b"fedsilo-transfer-v1\n"
_SIGNATURE_BYTES = 64
_MANIFEST_BYTES_MAX = 8 << 20
_ENVELOPE_BYTES_MAX = 64 << 10
_COPIED_BYTES = codec.CHUNK_BYTES_MAX
_LOCAL_HEADER = struct.Struct("<26xHH")
_MADE = (1980, 1, 1, 0, 0, 0)  # of every entry: the manifest says when


class TransferBroken(VerificationError):
    """The file is not what one of the two programs wrote. Nothing of it was taken."""

    default_code = "TRANSFER_BROKEN"


@dataclass(frozen=True)
class Header:
    """The head of a transfer file.

    Attributes:
        federation: its name.
        sender, receiver: SPIFFE ids.
        written_at: UTC, ISO 8601.
        certificate_pem: of a silo that sends, for its message-signing key; the coordinator's is pinned at each silo.
    """

    federation: str
    sender: str
    receiver: str
    written_at: str
    certificate_pem: str = ""


@dataclass(frozen=True)
class CarriedMessage:
    """One message of a file.

    Attributes:
        envelope: signed.
        payload_bytes: size of its payload.
        answers: run and sequence of the message that this one answers; None: it answers none.
    """

    envelope: pb.Envelope
    payload_bytes: int
    answers: tuple[str, int] | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of the payload, in hex."""
        return self.envelope.payload_digest.hex()


class TransferWriter:
    """A file being written. It has its name once it is whole; left by an error, nothing of it stays.

    Args:
        path: of the file; nothing may be there.
        header: who writes it for whom.
        key: the writer's, for messages.

    Raises (also `add` and `finish`):
        ConflictError: there is something of that name.
        OperationError: the disk refuses, or more messages than a file may hold are added.
    """

    def __init__(self, path: Path, header: Header, key: Ed25519PrivateKey) -> None:
        self.path = path
        self._header = header
        self._key = key
        self._rows: list[dict[str, Any]] = []
        self._payloads: set[str] = set()
        self._partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        if path.exists():
            raise ConflictError(f"{path} is there already", hint="name another file")
        with self._writing():
            self._stream: IO[bytes] = self._partial.open("xb")
            os.fchmod(self._stream.fileno(), 0o640)
            self._archive = zipfile.ZipFile(self._stream, "w", zipfile.ZIP_STORED)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages added so far, as the manifest lists them."""
        return [dict(row) for row in self._rows]

    def add(
        self, envelope: pb.Envelope, payload: codec.Buffer | Iterable[bytes], *, answers: tuple[str, int] | None = None
    ) -> None:
        """Add one message after those before it.

        Args:
            envelope: signed.
            payload: its bytes, whole or in pieces.
            answers: as `CarriedMessage`.
        """
        number, digest = len(self._rows) + 1, envelope.payload_digest.hex()
        if number > MESSAGES_MAX:
            raise OperationError(f"{self.path}: a file holds at most {MESSAGES_MAX} messages, and more wait")
        pieces = (payload,) if isinstance(payload, bytes | bytearray | memoryview) else payload
        with self._writing():
            self._archive.writestr(_entry(f"messages/{number:06d}"), envelope.SerializeToString(deterministic=True))
            if digest not in self._payloads:
                self._payloads.add(digest)
                with self._archive.open(_entry(f"payloads/{digest}"), "w", force_zip64=True) as stream:
                    for piece in pieces:
                        stream.write(piece)
            size_bytes = self._archive.getinfo(f"payloads/{digest}").file_size
        self._rows.append(_row(CarriedMessage(envelope, size_bytes, answers)))

    def finish(self) -> str:
        """Make it durable and give it its name. Returns its SHA-256."""
        header = self._header
        manifest = {
            "format": FORMAT,
            "federation": header.federation,
            "from": header.sender,
            "to": header.receiver,
            "written_at": header.written_at,
            "certificate": header.certificate_pem,
            "messages": self._rows,
        }
        text = json.dumps(manifest, indent=1).encode()
        with self._writing():
            self._archive.writestr(_entry(_MANIFEST), text)
            self._archive.writestr(_entry(_SIGNATURE), self._key.sign(_SIGNED_PREFIX + text))
            self._archive.close()
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            with self._partial.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            os.link(self._partial, self.path)  # fails where something has come to lie there
            self._partial.unlink()
            fsync_directory(self.path.parent)
        return digest

    def drop(self) -> None:
        """Remove the unfinished file."""
        with contextlib.suppress(OSError, ValueError):
            self._archive.close()
        with contextlib.suppress(OSError):
            self._stream.close()
        self._partial.unlink(missing_ok=True)

    def __enter__(self) -> TransferWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError as error:
            self._partial.unlink(missing_ok=True)
            raise ConflictError(f"{self.path} is there already", hint="name another file") from error
        except OSError as error:
            self._partial.unlink(missing_ok=True)
            if error.errno in FULL:
                raise disk_error(f"cannot write {self.path}", error, if_full="free space there") from error
            hint = "the daemon writes it: name a folder that its user may write to"
            raise OperationError(f"cannot write {self.path}: {error.strerror or error}", hint=hint) from error


class TransferFile:
    """A file that was carried here, open for reading.

    Args:
        path: of the file.
        copy_of: what people call it, where this is a copy.

    Raises:
        NotFoundError: there is none, or it may not be read.
        TransferBroken: it is no such file, or it is not whole.
    """

    def __init__(self, path: Path, *, copy_of: Path | None = None) -> None:
        self.path = copy_of or path
        try:
            # a pipe would keep the daemon waiting for whoever writes into it
            self._stream = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 (closed by close)
        except OSError as error:
            hint = "the daemon reads it: its user must be able to"
            raise NotFoundError(f"cannot read {path}: {error.strerror}", hint=hint) from error
        if not stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):
            self._stream.close()
            raise self._broken("it is no regular file")
        try:
            self._archive = zipfile.ZipFile(self._stream)
            self._sizes = self._listed()
            self.header, self.messages = self._read_manifest()
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, OSError) as error:
            self._stream.close()
            raise self._broken("it is no archive, or not a whole one") from error
        except BaseException:
            self._stream.close()
            raise

    def close(self) -> None:
        self._archive.close()
        self._stream.close()

    def __enter__(self) -> TransferFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def verify(self, key: Ed25519PublicKey) -> None:
        """That the manifest is the sender's. key: of the sender, for messages. Raises TransferBroken: it is not."""
        try:
            signature = self._small(_SIGNATURE, _SIGNATURE_BYTES)
            key.verify(signature, _SIGNED_PREFIX + self._small(_MANIFEST, _MANIFEST_BYTES_MAX))
        except InvalidSignature as error:
            raise self._broken(f"its {_MANIFEST} is not signed by {self.header.sender[:128]}") from error
        except (zipfile.BadZipFile, EOFError, RuntimeError, OSError) as error:
            raise self._broken("it cannot be read any more") from error

    @property
    def digest(self) -> str:
        """SHA-256 of the whole file. Raises TransferBroken: it cannot be read any more."""
        try:
            self._stream.seek(0)
            return hashlib.file_digest(self._stream, "sha256").hexdigest()
        except OSError as error:
            raise self._broken("it cannot be read any more") from error

    def copy_to(self, target: Path) -> None:
        """Copy the file durably to another path.

        Raises:
            OperationError: it cannot be read any more, or a disk takes no more; nothing stays at `target`.
        """
        try:
            self._stream.seek(0)
            with target.open("wb") as stream:
                shutil.copyfileobj(self._stream, stream, _COPIED_BYTES)
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            target.unlink(missing_ok=True)
            hint = "nothing of it was taken"
            raise OperationError(f"cannot copy {self.path} to {target}: {error.strerror}", hint=hint) from error

    def pieces(self, message: CarriedMessage) -> Iterator[bytes]:
        """A payload's bytes, one MiB at a time.

        Raises:
            TransferBroken: they are not those that the envelope names; known with the last piece.
        """
        hashed = hashlib.sha256()
        try:
            with self._archive.open(f"payloads/{message.digest}") as stream:
                while piece := stream.read(_COPIED_BYTES):
                    hashed.update(piece)
                    yield piece
        except (zipfile.BadZipFile, EOFError, RuntimeError, OSError) as error:
            raise self._broken(f"the payload of {message.envelope.kind} cannot be read") from error
        if hashed.hexdigest() != message.digest:
            raise self._broken(f"the payload of {message.envelope.kind} is not the one that its envelope names")

    def read(self, message: CarriedMessage) -> bytes:
        """A payload as a whole. Raises TransferBroken: as `pieces`."""
        return b"".join(self.pieces(message))

    def view(self, message: CarriedMessage) -> memoryview:
        """A payload mapped from the file and not read into memory. Its digest is compared by whoever takes it.

        Raises:
            TransferBroken: the archive says that it lies where the file has ended.
        """
        entry = self._archive.getinfo(f"payloads/{message.digest}")
        mapped = memoryview(mmap.mmap(self._stream.fileno(), 0, access=mmap.ACCESS_READ))
        # APPNOTE 4.3.7: the local header, in which name and extra field have lengths of their own; then the bytes
        begin = entry.header_offset + _LOCAL_HEADER.size
        if len(mapped) < begin:
            raise self._broken("an entry lies behind its end")
        begin += sum(_LOCAL_HEADER.unpack(mapped[entry.header_offset : begin]))
        if len(mapped) < begin + message.payload_bytes:
            raise self._broken("an entry lies behind its end")
        return mapped[begin : begin + message.payload_bytes]

    def _listed(self) -> dict[str, int]:
        """Sizes by name. Nothing is compressed, so no entry is larger than the file (T23)."""
        entries = self._archive.infolist()
        sizes = {entry.filename: entry.file_size for entry in entries}
        plain = all(
            entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size for entry in entries
        )
        if len(sizes) != len(entries) or not plain or sum(sizes.values()) > os.fstat(self._stream.fileno()).st_size:
            raise self._broken("its entries are compressed, doubled or larger than it is")
        if len(entries) > 2 * MESSAGES_MAX + 2:
            raise self._broken(f"it holds more than {MESSAGES_MAX} messages")
        return sizes

    def _read_manifest(self) -> tuple[Header, tuple[CarriedMessage, ...]]:
        try:
            manifest = json.loads(self._small(_MANIFEST, _MANIFEST_BYTES_MAX))
            if manifest["format"] != FORMAT:
                raise self._broken(f"it says that it is {str(manifest['format'])[:40]!r}, not {FORMAT!r}")
            header = Header(
                *(_text(manifest[name]) for name in ("federation", "from", "to", "written_at", "certificate"))
            )
            rows = manifest["messages"]
            messages = tuple(self._message(number, row) for number, row in enumerate(rows, 1))
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise self._broken(f"its {_MANIFEST} is not one") from error
        return header, messages

    def _message(self, number: int, row: Any) -> CarriedMessage:
        envelope = pb.Envelope()
        try:
            envelope.ParseFromString(self._small(f"messages/{number:06d}", _ENVELOPE_BYTES_MAX))
            codec.require_known(envelope)
        except (DecodeError, PeerError) as error:
            raise self._broken(f"message {number} has no envelope that is known here") from error
        answers = row.get("answers")
        answered = None if answers is None else (_text(answers["run"]), int(answers["sequence"]))
        name = f"payloads/{envelope.payload_digest.hex()}"
        if name not in self._sizes:
            raise self._broken(f"the payload of message {number} ({envelope.kind[:64]!r}) is missing")
        message = CarriedMessage(envelope, self._sizes[name], answered)
        if row != _row(message):
            raise self._broken(f"message {number} is not the one that its {_MANIFEST} lists")
        return message

    def _small(self, name: str, bytes_max: int) -> bytes:
        size_bytes = self._sizes.get(name)
        if size_bytes is None or size_bytes > bytes_max:
            raise self._broken(f"its {name} is missing" if size_bytes is None else f"its {name} is too large")
        return self._archive.read(name)

    def _broken(self, why: str) -> TransferBroken:
        return TransferBroken(
            f"{self.path}: {why}; nothing of it was taken", hint="copy it once more from where it was written"
        )


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _row(message: CarriedMessage) -> dict[str, Any]:
    """A message as the manifest lists it."""
    envelope = message.envelope
    row: dict[str, Any] = {
        "kind": envelope.kind,
        "run": envelope.run,
        "round": envelope.round,
        "step": envelope.step,
        "attempt": envelope.attempt,
        "sequence": envelope.sequence,
        "bytes": message.payload_bytes,
        "sha256": message.digest,
    }
    if message.answers is not None:
        row["answers"] = {"run": message.answers[0], "sequence": message.answers[1]}
    return row


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _MADE)
    entry.external_attr = 0o640 << 16
    return entry
