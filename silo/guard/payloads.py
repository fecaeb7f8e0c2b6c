"""The bytes of messages on this site's disk: held for a person, waiting to be sent, or archived.

    state_dir/payloads/<SHA-256 of the bytes>     0600, durable before the row that refers to it

One file serves all three, so a payload is written once however long it stays. What refers to it is in the ledger.
Does not stop: whoever is root, or this daemon's user, from reading or changing a file; each reader compares the digest.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from fedsilo.edge.files import WrittenAhead, make_private_directory, remove_durably, write_durably
from fedsilo.treaty.errors import NotFoundError, OperationError, VerificationError
from fedsilo.treaty.wire.codec import Buffer, sha256_hex

FOLDER = "payloads"  # beside the ledger
AHEAD_BYTES_MIN = 1 << 20  # what is smaller is on the disk sooner than a thread is made
UNWRITABLE, UNREADABLE = "PAYLOADS_UNWRITABLE", "PAYLOAD_UNREADABLE"


class Payloads:
    """Args:
    folder: made if it is not there.

    Raises:
        UsageError, OperationError: it is no folder, or cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._ahead: WrittenAhead | None = None
        make_private_directory(folder)
        for leftover in folder.glob(".*.tmp"):  # of a write that a kill interrupted
            leftover.unlink()
        self._sizes = {path.name: path.stat().st_size for path in folder.iterdir()}

    def __contains__(self, digest: object) -> bool:
        return digest in self._sizes

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by digest."""
        with self._lock:
            return dict(self._sizes)

    def begin(self, payload: Buffer) -> None:
        """These very bytes may be given to `write` soon: they begin to go to the disk while they are looked at.
        Whatever was begun before is dropped. `drop_begun` is to be called before anybody changes them."""
        if self._ahead is not None and self._ahead.data is payload:
            return
        self.drop_begun()
        if len(payload) >= AHEAD_BYTES_MIN:
            self._ahead = WrittenAhead(self._folder, payload, 0o600)

    def drop_begun(self) -> None:
        """What was begun and not written is no more on the disk; nothing where all was."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.abandon()

    def write(self, digest: str, payload: Buffer) -> None:
        """Durable at return. Raises OperationError: the disk refused (`PAYLOADS_UNWRITABLE`)."""
        with self._lock:
            if digest in self._sizes:
                return
            try:
                if (ahead := self._ahead) is not None and ahead.data is payload:
                    self._ahead = None
                    ahead.keep(self._folder / digest)
                else:
                    write_durably(self._folder / digest, payload, mode=0o600)
            except OperationError as error:
                raise OperationError(error.message, hint="is the disk full?", code=UNWRITABLE) from error
            self._sizes[digest] = len(payload)

    def read(self, digest: str) -> bytes:
        """The bytes.

        Raises:
            NotFoundError: it is not kept.
            VerificationError: the file holds other bytes (`PAYLOAD_CHANGED`).
            OperationError: the disk does not give it (`PAYLOAD_UNREADABLE`).
        """
        try:
            payload = (self._folder / digest).read_bytes()
        except FileNotFoundError as error:
            raise NotFoundError(f"payload {digest[:12]} is not kept here") from error
        except OSError as error:
            raise OperationError(f"cannot read payload {digest[:12]}: {error.strerror}", code=UNREADABLE) from error
        if sha256_hex(payload) != digest:
            raise VerificationError(f"payload {digest[:12]} was changed on the disk", code="PAYLOAD_CHANGED")
        return payload

    def remove(self, digests: Collection[str]) -> None:
        """Raises OperationError."""
        with self._lock:
            for digest in digests:
                if digest in self._sizes:
                    remove_durably(self._folder / digest)
                    del self._sizes[digest]
