"""Recordings of what a console read (`.fedrec`), written while it reads. `console.replay` plays them back.

A recording is JSON lines: a header, then each state that differs from the one before, each event, each answer that
differs from the last one to the same question, and each loss of the link, with the seconds since the first reading.
By default it is share-safe: it holds what `console.sharing` calls released. With local data it is marked as such and
has mode 0600. What would leave is in neither: whoever looks at a held payload is named in the audit log, and a copy of
it in a file would be a second look that nobody is named for.

Does not cover: proof. A recording is not signed; whoever has the file may change it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from console.client import Event
from console.client import Snapshot as Reading
from console.reading import mapping, text_of
from console.sharing import released_answer, released_event, released_state
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    OperationError,
    UnreachableError,
)

if TYPE_CHECKING:
    from console.feed import Source

FORMAT_VERSION = 1
RECORDING_BYTES_MAX = 512 << 20  # written or read; a day of a busy silo is some tens of MiB
LOCAL_WORD = "LOCAL"  # what a person types to have local data in a file
NEVER_RECORDED = frozenset({"approvals.payload", "payload"})  # queries; their answers hold a payload itself
_LOST = ("", "")  # in place of the last state while the daemon cannot be read


class RecordingFile:
    """A recording being written; one for all links that a console makes while it is open. Thread-safe.

    Trouble with the disk ends the recording and nothing else: `trouble` says so, and the console goes on.

    Args:
        path: a file that does not exist yet.
        include_local: hold local data too.
        clock: monotonic seconds.

    Raises:
        ConflictError: the file exists. OperationError: it cannot be made.
    """

    def __init__(self, path: Path, *, include_local: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self.include_local = include_local
        self.trouble = ""
        self._clock = clock
        self._began: float | None = None  # by `clock`, of the first reading
        self._size_bytes = 0
        self._last_state: tuple[str, str] | None = None
        self._last_answers: dict[tuple[str, str], str] = {}
        self._mutex = threading.Lock()
        self._stream: IO[bytes] | None = _created(path, 0o600 if include_local else 0o644)

    def snapshot(self, reading: Reading) -> None:
        """Keep a state, if it is not the one that was kept last."""
        state = reading.state if self.include_local else released_state(reading.state)
        text = json_text(state)
        with self._mutex:
            if self._stream is None or self._last_state == (text, reading.policy_digest):
                return
            if self._began is None:
                self._begin(reading)
            self._last_state = text, reading.policy_digest
            self._write({
                "snapshot": {
                    "sequence": reading.sequence, "time": reading.time, "policy_digest": reading.policy_digest,
                    "state": state,
                }
            })  # fmt: skip

    def event(self, event: Event) -> None:
        fields = dict(event.fields) if self.include_local else released_event(event.name, event.fields)
        if fields is not None:
            told = {"sequence": event.sequence, "time": event.time, "name": event.name, "fields": fields}
            self._add({"event": told})

    def answer(self, name: str, arguments: Mapping[str, Any], answer: Any) -> None:
        """Keep an answer, if it is not the one to the same question that was kept last; of `NEVER_RECORDED` none."""
        if name in NEVER_RECORDED:
            return
        kept = (answer,) if self.include_local else released_answer(name, arguments, answer)
        if kept is not None:
            self._add_answer(name, arguments, {"data": kept[0]})

    def refused(self, name: str, arguments: Mapping[str, Any], error: FedSiloError) -> None:
        """Keep that a question was refused; why, only with local data."""
        if name in NEVER_RECORDED:
            return  # its arguments name a ticket
        told = {"code": error.code, "message": error.message if self.include_local else ""}
        if self.include_local or released_answer(name, arguments, {}) is not None:
            self._add_answer(name, arguments, {"error": told})

    def lost(self, error: FedSiloError) -> None:
        """The daemon could not be read."""
        with self._mutex:
            if self._last_state not in (None, _LOST):
                self._last_state = _LOST  # so that the next state is kept, the same or not
                self._write({"lost": {"message": error.message if self.include_local else ""}})

    def close(self) -> None:
        """A file in which nothing was ever written is taken away again."""
        with self._mutex:
            if self._stream is None:
                return
            if self._began is not None:
                self._write({"end": True})
            self._end(self.trouble)
            if self._began is None:
                self.path.unlink(missing_ok=True)

    def banner(self) -> str:
        """For the top of the console, so that nobody forgets it."""
        if self.trouble:
            return f"RECORDING STOPPED: {self.trouble}"
        seconds = 0.0 if self._began is None else self._clock() - self._began
        return f"RECORDING {clock_text(seconds)}, {'WITH LOCAL DATA' if self.include_local else 'share-safe'}"

    def _begin(self, reading: Reading) -> None:
        self._began = self._clock()
        state = mapping(reading.state)
        header = {
            "fedrec": FORMAT_VERSION,
            "federation": text_of(state.get("federation")),
            "site": text_of(state.get("silo") or state.get("site")),
            "party": "coordinator" if state.get("party") == "coordinator" else "silo",
            "share_safe": not self.include_local,
            "began": reading.time,
        }
        if self.include_local:
            header["warning"] = "holds data that policy did not release: for people of this site only"
        self._put(header)

    def _add(self, body: Mapping[str, Any]) -> None:
        with self._mutex:
            if self._began is not None:
                self._write(body)

    def _add_answer(self, name: str, arguments: Mapping[str, Any], told: Mapping[str, Any]) -> None:
        question, text = (name, json_text(dict(arguments))), json_text(told)
        with self._mutex:
            if self._began is not None and self._last_answers.get(question) != text:
                self._last_answers[question] = text
                self._write({"answer": {"name": name, "arguments": dict(arguments), **told}})

    def _write(self, body: Mapping[str, Any]) -> None:
        began = self._clock() if self._began is None else self._began
        self._put({"at": round(self._clock() - began, 3), **body})

    def _put(self, value: Mapping[str, Any]) -> None:
        if self._stream is None:
            return
        data = json_text(value).encode() + b"\n"
        self._size_bytes += len(data)
        if self._size_bytes > RECORDING_BYTES_MAX:
            self._end(f"{self.path} has {RECORDING_BYTES_MAX >> 20} MiB")
            return
        try:
            self._stream.write(data)
            self._stream.flush()
        except OSError as error:
            self._end(f"{self.path}: {error.strerror}")

    def _end(self, trouble: str) -> None:
        stream, self._stream = self._stream, None
        self.trouble = trouble
        try:
            if stream is not None:
                stream.close()
        except OSError as error:
            self.trouble = trouble or f"{self.path}: {error.strerror}"


def _created(path: Path, mode: int) -> IO[bytes]:
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, mode)
    except FileExistsError as error:
        raise ConflictError(f"{path} exists already", hint="a recording replaces no file; give another name") from error
    except OSError as error:
        raise OperationError(f"cannot make the recording {path}: {error.strerror}") from error
    return os.fdopen(descriptor, "wb")


class Recorder:
    """A source that writes down what another source says, and says the same.

    Args:
        source: such as a daemon's client; closed with this one.
        file: stays open: the next link writes on.
    """

    def __init__(self, source: Source, file: RecordingFile) -> None:
        self._source = source
        self._file = file

    def snapshot(self) -> Reading:
        try:
            reading = self._source.snapshot()
        except FedSiloError as error:
            self._file.lost(error)
            raise
        self._file.snapshot(reading)
        return reading

    def watch(self, since_sequence: int = 0) -> Iterator[Event]:
        for event in self._source.watch(since_sequence):
            self._file.event(event)
            yield event

    def query(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        try:
            answer = self._source.query(name, arguments)
        except UnreachableError:
            raise  # no answer at all; the next snapshot tells that the daemon is gone
        except FedSiloError as error:
            self._file.refused(name, arguments or {}, error)
            raise
        self._file.answer(name, arguments or {}, answer)
        return answer

    def close(self) -> None:
        self._source.close()


def json_text(value: Any) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"), sort_keys=True)


def clock_text(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any: 02:13, 1:02:13."""
    minutes, rest = divmod(int(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
