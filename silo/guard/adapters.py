"""Global adapters that this silo holds, by digest: one it has is not fetched again, unless it was let in
under a plan that freezes other factors (T6), or measured from another last adapter than the run has come to (T20).

One that is on its way is kept as it comes, and goes on at that offset when the line was cut or this process killed.

Does not stop: a change of policy; what was let in under the one before stays let in. A disk that changes what it holds
while the file stays untouched is noticed at the next start.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fedsilo.files.durable import (
    PartialFile,
    disk_error,
    fsync_directory,
    leave_page_cache,
    make_private_directory,
    write_durably,
)
from fedsilo.protocol.codec import Array, Buffer, decode_factors, sha256_hex
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.factors import TURNS
from fedsilo.protocol.plan import Plan

ADAPTERS_KEPT = 3
SETTLED_NANOSECONDS = 100_000_000

_State = tuple[int, int, int, int, int]  # of a file: device, inode, bytes, and when content and inode changed (ns)


def frozen_under(plan: Plan | None) -> str:
    """Return what an adapter is stored as let in for, by which another run may find it (T6): the digest of the factors
    that the plan freezes. Where what is fixed takes turns its run is part of it: after the second round A is no longer
    what the seed draws, and another run has to judge it."""
    if plan is None:
        return ""
    return plan.lora.frozen_sha256 if len(TURNS[plan.lora.freeze]) == 1 else f"{plan.lora.frozen_sha256} {plan.run}"


class Arriving:
    """An adapter of which the coordinator sends, or has sent, a part.

    Args:
        file: what came of it.
        digest: of the whole.

    Raises (all methods):
        OperationError: the disk refused; what came is removed.
    """

    def __init__(self, file: PartialFile, digest: str) -> None:
        self._file = file
        self.digest = digest
        self.written_ns = 0

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    def write(self, chunk: Buffer) -> None:
        with self._using():
            self._file.write(chunk)

    def restart(self) -> None:
        with self._using():
            self._file.restart()

    def view(self) -> memoryview:
        """Return what has come, mapped from the file and not read into memory. The file says then that it was last
        written a while ago, so that whatever writes to it from here on changes what it says (`AdapterStore.keep`)."""
        with self._using():
            content = self._file.view()
            self.written_ns = time.time_ns() - SETTLED_NANOSECONDS
            os.utime(self._file.path, ns=(self.written_ns, self.written_ns))
            return content

    def drop(self) -> None:
        self._file.drop()

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._file.drop()
            raise _not_kept(self.digest, self._file.path.parent, error) from error


class AdapterStore:
    """Stores global adapters in a folder, each under its digest, and what was measured of them.

    Args:
        folder: holds `<digest>` files, and `known.json` with what was found out about each when it came in.
    """

    def __init__(self, folder: Path) -> None:
        make_private_directory(folder)
        self._folder = folder
        self._known_path = folder / "known.json"
        self._hashed: dict[str, _State] = {}  # files that had their digest, as they were then
        self._known: dict[str, dict[str, Any]] = (
            json.loads(self._known_path.read_text()) if self._known_path.exists() else {}
        )
        self._written_ns: dict[str, int] = {}  # as what came says, from before it was hashed

    def find(self, digest: str, *, frozen_sha256: str | None = None, after: str | None = None) -> memoryview | None:
        """The payload, if it is here and whole: mapped from the file and not read into memory.

        Args:
            digest: of the payload.
            frozen_sha256: `frozen_under` of the plan, which it must have been let in for (T6); None where no plan asks.
            after: what it must have been measured from when it came in (`RunView.step_from`); None where any will do.
        """
        if after is not None and self._known.get(digest, {}).get("after") != after:
            return None
        if frozen_sha256 is not None and self._known.get(digest, {}).get("frozen_sha256") != frozen_sha256:
            return None
        if not digest.isalnum():
            return None
        try:
            with (self._folder / digest).open("rb") as file:
                before = _state(file)
                payload = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                return payload if self._is_whole(digest, payload, before, file) else None
        except (OSError, ValueError):  # gone, not to be read, or empty
            return None

    def tensors(self, digest: str) -> Mapping[str, Array] | None:
        """The factors by wire name, mapped from the file and not read into memory; None where it is not here and whole.

        Raises:
            PeerError: it is whole, and no tensor payload; nothing that was let in is.
        """
        payload = self.find(digest)
        return None if payload is None else decode_factors(payload).tensors

    def _is_whole(self, digest: str, content: Buffer, before: _State, file: BinaryIO) -> bool:
        """Return whether this is what the digest names. A file is hashed once, and again when it was touched since.

        Args:
            digest: of the payload.
            content: of the file.
            before: its state, from before it was read.
            file: open.
        """
        if self._hashed.get(digest) == before == _state(file):
            return True
        self._hashed.pop(digest, None)
        if sha256_hex(content) != digest:
            return False
        # untouched for longer than a file system's clock takes to tick: whatever touches it later changes its state
        if before == _state(file) and max(before[-2:]) < time.time_ns() - SETTLED_NANOSECONDS:
            self._hashed[digest] = before
        return True

    @contextlib.contextmanager
    def arriving(self, digest: str, bytes_max: int) -> Iterator[Arriving]:
        """Open what has come of an adapter, to go on with; what came of any other is removed.

        Args:
            digest: of the whole.
            bytes_max: largest payload that it may be.

        Raises:
            OperationError: the disk refused.
        """
        path = self._folder / f"{digest}.partial"
        try:
            for other in self._folder.glob("*.partial"):
                if other != path:
                    other.unlink()
            file = PartialFile(path, whole_bytes=bytes_max, hashed=False)
        except OSError as error:
            raise _not_kept(digest, self._folder, error) from error
        arriving = Arriving(file, digest)
        try:
            yield arriving
        finally:
            try:
                file.close()
            except OSError:
                file.drop()
            self._written_ns = {digest: arriving.written_ns}
            if not file.size_bytes:
                file.drop()

    def keep(
        self,
        digest: str,
        payload: Buffer,
        l2: float | None,
        frozen_sha256: str = "",
        after: str = "",
        in_use: Collection[str] = (),
    ) -> None:
        """Store a payload whose digest the caller has compared and that the gate let in; the oldest beyond a few go.

        Args:
            digest: of the payload.
            payload: its bytes.
            l2: norm over all factors.
            frozen_sha256: `frozen_under` of the plan.
            after: what it was measured from.
            in_use: digests of others that stay, however old they are: the next one is measured from the last (T20).
        """
        arrived = self._folder / f"{digest}.partial"
        written_ns = self._written_ns.pop(digest, None)
        if (
            arrived.is_file() and arrived.stat().st_mtime_ns == written_ns
        ):  # as it was when the caller's digest was taken
            arrived.replace(self._folder / digest)
            fsync_directory(self._folder)
            self._hashed[digest] = _state_of((self._folder / digest).stat())
        else:
            arrived.unlink(missing_ok=True)
            write_durably(self._folder / digest, payload, mode=0o600)
        self._known[digest] = {"l2": l2, "frozen_sha256": frozen_sha256, "after": after}
        needed = {digest, *in_use}
        stored = sorted(
            (path for path in self._folder.iterdir() if path.name in self._known),
            key=lambda path: (path.name in needed, path.stat().st_mtime_ns),
        )
        for path in stored[: -max(ADAPTERS_KEPT, len(needed))]:
            path.unlink()
            del self._known[path.name]
            self._hashed.pop(path.name, None)
        write_durably(self._known_path, json.dumps(self._known).encode(), mode=0o600)
        for path in stored[-max(ADAPTERS_KEPT, len(needed)) :]:
            if path.name != digest:  # the run goes on from the newest
                with contextlib.suppress(OSError), path.open("rb") as file:
                    leave_page_cache(file.fileno())

    def has_file(self, digest: str) -> bool:
        """Return whether there is a file of that name, whole or not."""
        return digest.isalnum() and (self._folder / digest).is_file()

    def l2(self, digest: str) -> float | None:
        """L2 norm over all factors, as measured when it came in."""
        l2: float | None = self._known.get(digest, {}).get("l2")
        return l2


def _not_kept(digest: str, folder: Path, error: OSError) -> OperationError:
    hint = "free space there, then start this silo again"
    return disk_error(f"cannot keep adapter {digest[:12]} in {folder}", error, if_full=hint)


def _state(file: BinaryIO) -> _State:
    return _state_of(os.fstat(file.fileno()))


def _state_of(status: os.stat_result) -> _State:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
