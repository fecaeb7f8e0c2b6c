"""Which signed commands a daemon has seen, over restarts: begun before the work, finished after it, each durable.

One JSON object a line: {"seen"} | {"accepted"} | {"id","digest","expires","seen"} | {"id","reply"} | {"id","until"}. A
line torn by a power cut is dropped at the next start; a command begun and never finished is reported as such and not
carried out anew.
Entries go an hour after the last command under their request id has expired: the verification refuses each of them by
itself then, whoever captured it, and whoever asks again, signed anew, is given the reply until then. `seen` never goes
back (T41), but where a person accepted a clock that had been found wrong.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from certs.commands import VerifiedCommand
from fedsilo.files.durable import write_all, write_durably
from fedsilo.protocol.errors import ConflictError, OperationError

PRIVATE_MODE = 0o600
KEPT_AFTER_EXPIRY = timedelta(hours=1)


@dataclass(frozen=True)
class RememberedRequest:
    """`expires` is that of the command signed for longest. `reply` is None while, or for ever after a crash in which,
    the command is not finished.
    """

    digest: str
    expires: datetime
    reply: bytes | None = None


class RequestJournal:
    """The memory of one desk; the desk's lock guards it.

    Args:
        path: its file, or None to remember in this process only.
        now: time of the start; entries that expired an hour before are forgotten.

    Raises:
        ConflictError: the file is damaged before its last line.
        OperationError: it cannot be read or written.
    """

    def __init__(self, path: Path | None, *, now: datetime) -> None:
        self._path = path
        self._seen = now
        self._requests: dict[str, RememberedRequest] = {}
        if path is not None:
            self._load(path)
            self._forget_expired()
            self._compact(path)

    def latest(self, now: datetime) -> datetime:
        """max(seen, now): time as far as this desk is concerned."""
        self._seen = max(self._seen, now)
        return self._seen

    def accept(self, now: datetime) -> None:
        """A person accepted the clock as it is: no later time is seen any more, durably. Raises OperationError."""
        self._append({"accepted": now.isoformat()})
        self._seen = now

    def find(self, request_id: str) -> RememberedRequest | None:
        self._forget_expired()
        return self._requests.get(request_id)

    def begin(self, command: VerifiedCommand, now: datetime) -> None:
        """Remember, durably, that the work on `command` starts. Raises OperationError: then it must not start."""
        self._append(
            {
                "id": command.request_id,
                "digest": command.digest,
                "expires": command.expires.isoformat(),
                "seen": now.isoformat(),
            }
        )
        self._requests[command.request_id] = RememberedRequest(command.digest, command.expires)

    def extend(self, command: VerifiedCommand) -> None:
        """Keep the entry of a request id that is asked again for as long as the later signature counts, durably.

        Raises:
            OperationError: then the signature must not be answered either: it would outlive what is remembered.
        """
        known = self._requests[command.request_id]
        if command.expires <= known.expires:
            return
        self._append({"id": command.request_id, "until": command.expires.isoformat()})
        self._requests[command.request_id] = replace(known, expires=command.expires)

    def finish(self, request_id: str, reply: bytes) -> None:
        """Remember the reply, durably. Raises OperationError."""
        self._requests[request_id] = replace(self._requests[request_id], reply=reply)
        self._append({"id": request_id, "reply": reply.hex()})

    def _forget_expired(self) -> None:
        self._requests = {
            identifier: request
            for identifier, request in self._requests.items()
            if request.expires + KEPT_AFTER_EXPIRY > self._seen
        }

    def _load(self, path: Path) -> None:
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            raise OperationError(f"cannot read {path}: {error.strerror}") from error
        # What follows the last newline is empty, or a line that a crash tore: its command was never carried out.
        for number, line in enumerate(lines[:-1], start=1):
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConflictError(
                    f"{path}:{number}: damaged",
                    hint="move it away when no signed command of the last hour can be replayed any more",
                ) from error

    def _take(self, entry: dict[str, str]) -> None:
        if "reply" in entry:
            known = self._requests.get(entry["id"])
            if known is not None:
                self._requests[entry["id"]] = replace(known, reply=bytes.fromhex(entry["reply"]))
            return
        if "accepted" in entry:
            self._seen = datetime.fromisoformat(entry["accepted"])
            return
        if "until" in entry:
            known = self._requests[entry["id"]]
            expires = max(known.expires, datetime.fromisoformat(entry["until"]))
            self._requests[entry["id"]] = replace(known, expires=expires)
            return
        self._seen = max(self._seen, datetime.fromisoformat(entry["seen"]))
        if "id" in entry:
            self._requests[entry["id"]] = RememberedRequest(entry["digest"], datetime.fromisoformat(entry["expires"]))

    def _compact(self, path: Path) -> None:
        entries: list[dict[str, str]] = [{"seen": self._seen.isoformat()}]
        for identifier, request in self._requests.items():
            entries.append(
                {
                    "id": identifier,
                    "digest": request.digest,
                    "expires": request.expires.isoformat(),
                    "seen": self._seen.isoformat(),
                }
            )
            if request.reply is not None:
                entries.append({"id": identifier, "reply": request.reply.hex()})
        write_durably(path, b"".join(_line(entry) for entry in entries), PRIVATE_MODE)

    def _append(self, entry: dict[str, str]) -> None:
        if self._path is None:
            return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                before = os.fstat(descriptor).st_size
                try:
                    write_all(descriptor, _line(entry))
                    os.fsync(descriptor)
                except OSError:
                    # A half-written line would hide the next one from the reader.
                    os.ftruncate(descriptor, before)
                    raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OperationError(
                f"cannot write {self._path}: {error.strerror}", hint="no command is carried out until it can be"
            ) from error


def _line(entry: dict[str, str]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode("ascii") + b"\n"
