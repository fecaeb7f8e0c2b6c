"""In place of a connection: what the gate sends goes into a file that people carry, and its answer comes in another.

Only `gate.py` imports this module, as with the channel, so nothing gets into a file that was not decided on. Outside of
an export nothing is sent at all.
Does not stop: whoever carries the file from reading it. It holds what crosses a line, without the line's TLS: the
medium has to be guarded as the line would be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedsilo.files.transfer_file import Header, TransferWriter
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from silo.guard.framing import Reply, Sink
from silo.guard.messages import Carried, NotSent


class Export:
    """A file being written, for who asked for it and writes nothing into it."""

    def __init__(self, file: TransferWriter) -> None:
        self._file = file

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As `TransferWriter.messages`."""
        return self._file.messages

    def finish(self) -> str:
        """As `TransferWriter.finish`."""
        return self._file.finish()


class FileChannel:
    """A `Channel` whose answers come later."""

    def __init__(self) -> None:
        self._file: TransferWriter | None = None

    def exchange(
        self, envelope: pb.Envelope, payload: codec.Buffer, *, wait_seconds: float, reply_bytes_max: int,
        into: Sink | None = None,
    ) -> Reply:  # fmt: skip
        """Write one message.

        Raises:
            Carried: it is in the file.
            NotSent: no file is being written.
            OperationError: the disk does not take it.
        """
        if self._file is None:
            raise NotSent(f"{envelope.kind} waits for an export", hint="silo export-release")
        self._file.add(envelope, payload)
        raise Carried(f"{envelope.kind} is carried in {self._file.path.name}; its answer comes with an import")

    @contextlib.contextmanager
    def into(self, path: Path, header: Header, key: Ed25519PrivateKey) -> Iterator[Export]:
        """What is sent inside is written into a file; arguments and errors as of `TransferWriter`."""
        with TransferWriter(path, header, key) as file:
            self._file = file
            try:
                yield Export(file)
            finally:
                self._file = None

    def interrupt(self, *, for_good: bool = False) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None: ...
