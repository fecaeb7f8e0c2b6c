"""Recordings of what a console read (`.fedrec`), written while it reads, and played back in place of a daemon.

A recording is JSON lines: a header, then each state that differs from the one before, each event, each answer that
differs from the last one to the same question, and each loss of the link, with the seconds since the first reading.
By default it is share-safe: it holds what `console.sharing` calls released. With local data it is marked as such and
has mode 0600. What would leave is in neither: whoever looks at a held payload is named in the audit log, and a copy of
it in a file would be a second look that nobody is named for. `Replay` is a source like a daemon's client, and nothing
above the feed knows more.

Does not cover: proof. A recording is not signed; whoever has the file may change it, and nothing can be answered in it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from console.sharing import released_answer, released_event, released_state
from fedsilo.audit.record import Record
from fedsilo.control.client import Event
from fedsilo.control.client import Snapshot as Reading
from fedsilo.files.durable import read_regular
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    NotFoundError,
    OperationError,
    UnreachableError,
    UsageError,
)
from fedsilo.views.state import mapping, number, text_of, time_of, whole

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
        """Return the text that the top of the console shows while recording, so that nobody forgets it."""
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

    def _add_answer(self, name: str, arguments: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        question, text = (name, json_text(dict(arguments))), json_text(answer)
        with self._mutex:
            if self._began is not None and self._last_answers.get(question) != text:
                self._last_answers[question] = text
                self._write({"answer": {"name": name, "arguments": dict(arguments), **answer}})

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


ANSWERED_WITHIN_SECONDS = 5.0  # as long as a console waits for an answer
SPEED_MIN, SPEED_MAX = 0.1, 1000.0
_LOOK_AGAIN_SECONDS = 0.5  # at a clock that may have been moved
_MAKES_ONE = "fedconsole --record FILE makes a recording"


# ---- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Line:
    at: float  # seconds since the first reading
    what: str  # snapshot | event | answer | lost | end
    body: Mapping[str, Any]


def _without_control(page: Any) -> Any:
    """A page of records without those of allowed control messages."""
    records = mapping(page).get("records")
    if not isinstance(records, list):
        return page
    return {**page, "records": [record for record in records if not Record(mapping(record)).is_allowed_control]}


class Replay:
    """A recording in place of a daemon: what the console would have read at the position that the clock says.

    It starts at its beginning. `pause`, `resume` and `seek` may be called from any thread. Closing ends the watchers
    only, so the same replay is what the feed connects to again. After a seek back a reading's sequence and time are
    below those of the one before; from that the console's list of events knows what has not happened yet.

    Args:
        path: of the recording. A torn last line is left out, and `torn` says so.
        speed: seconds of the recording for each second of the clock.
        clock: monotonic seconds.

    Raises:
        NotFoundError: no such file.
        UsageError: it cannot be read, as a folder or a pipe; it is no recording, or of another version; a speed out of
            range.
    """

    def __init__(self, path: Path, *, speed: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        if not SPEED_MIN <= speed <= SPEED_MAX:
            raise UsageError(f"speed {speed:g} is not between {SPEED_MIN:g} and {SPEED_MAX:g}")
        self.path = path
        self.share_safe, self._lines, self.torn = _read(path)
        self.speed = speed
        self.paused = False
        self._clock = clock
        self._moved = threading.Condition()
        self._position, self._position_at = 0.0, clock()
        self._generation = 0
        self._sought: list[float] = []  # every position that somebody went to
        self._ats = [line.at for line in self._lines]
        self._places: dict[str, list[int]] = {"snapshot": [], "lost": [], "heard": []}
        for place, line in enumerate(self._lines):
            if line.what in self._places:
                self._places[line.what].append(place)
            if line.what in ("snapshot", "event"):
                self._places["heard"].append(place)
        self._answers: dict[tuple[str, str], list[int]] = {}
        for place, line in enumerate(self._lines):
            if line.what == "answer":
                question = text_of(line.body.get("name")), json_text(mapping(line.body.get("arguments")))
                self._answers.setdefault(question, []).append(place)

    # ---- moving ----

    @property
    def duration(self) -> float:
        """Seconds from the first reading to the last line."""
        return self._ats[-1] if self._ats else 0.0

    @property
    def position(self) -> float:
        """Seconds since the first reading, at most `duration`."""
        gone = 0.0 if self.paused else (self._clock() - self._position_at) * self.speed
        return min(self._position + max(gone, 0.0), self.duration)

    def pause(self) -> None:
        self._move(self.position, paused=True)

    def resume(self) -> None:
        self._move(self.position, paused=False)

    def seek(self, seconds: float) -> None:
        """Go to a position, or to the nearer end."""
        self._sought.append(min(max(seconds, 0.0), self.duration))
        self._move(self._sought[-1], paused=self.paused)

    def _move(self, position: float, *, paused: bool) -> None:
        with self._moved:
            self._position, self._position_at, self.paused = position, self._clock(), paused
            self._moved.notify_all()

    def wall_time(self) -> float:
        """Seconds since 1970 at the position, by the recorded daemon's clock: today's clock is of no use there."""
        position = self.position
        line = self._newest("snapshot", position)
        return time_of(text_of(line.body.get("time"))) + max(position - line.at, 0.0)

    def banner(self) -> str:
        """Return the text that the top of the console shows during playback."""
        moment = datetime.fromtimestamp(self.wall_time(), UTC)
        pace = "paused" if self.paused else "at its end" if self.position >= self.duration else f"x{self.speed:g}"
        kind = "share-safe" if self.share_safe else "WITH LOCAL DATA"
        return (
            f"REPLAY {clock_text(self.position)} of {clock_text(self.duration)} {pace}, {moment:%Y-%m-%d %H:%M:%S}Z,"
            f" {kind}{', last line torn' if self.torn else ''}"
        )

    # ---- a source ----

    def snapshot(self) -> Reading:
        """Raises UnreachableError: the recorder could not read the daemon at this position."""
        position = self.position
        line = self._newest("snapshot", position)
        lost = self._newest("lost", position) if self._places["lost"] else line
        if line.at < lost.at <= position:
            back = next((self._ats[place] for place in self._places["snapshot"] if self._ats[place] > position), None)
            hint = "it stays so to its end" if back is None else f"the link is back at {clock_text(back)}"
            why = text_of(lost.body.get("message")) or "the daemon could not be read"
            raise UnreachableError(f"at this point of the recording: {why}", hint=hint)
        heard = self._newest("heard", position)
        server_time = time_of(text_of(line.body.get("time"))) + max(position - line.at, 0.0)
        return Reading(
            whole(heard.body.get("sequence")),
            f"{datetime.fromtimestamp(server_time, UTC).isoformat(timespec='milliseconds').removesuffix('+00:00')}Z",
            text_of(line.body.get("policy_digest")),
            dict(mapping(line.body.get("state"))),
        )

    def watch(self, since_sequence: int = 0) -> Iterator[Event]:
        """Events after the one with this sequence as the position passes them, until closed."""
        with self._moved:
            generation, sought = self._generation, len(self._sought)
        place = self._place_after(since_sequence)
        while True:
            position = self.position
            reached = bisect_right(self._ats, position)
            for went_to in self._sought[sought:]:
                sought += 1
                place = min(place, bisect_right(self._ats, went_to))  # after a seek back it happens again
            while place < reached:
                line, place = self._lines[place], place + 1
                if line.what == "event":
                    body = line.body
                    yield Event(
                        whole(body.get("sequence")), text_of(body.get("time")), text_of(body.get("name")),
                        dict(mapping(body.get("fields"))),
                    )  # fmt: skip
                if self._generation != generation:
                    return
            with self._moved:
                if self._generation != generation:
                    return
                gap_seconds = _LOOK_AGAIN_SECONDS
                if not self.paused and reached < len(self._ats):
                    gap_seconds = min(gap_seconds, (self._ats[reached] - position) / self.speed)
                self._moved.wait(max(gap_seconds, 0.001))

    def query(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """The newest answer at the position to the same question with the same arguments; or the first one, if it came
        so soon after that whoever had asked now would have got it.

        Raises:
            NotFoundError: there is none.
            OperationError: the daemon refused it then.
        """
        questions = [dict(arguments or {})]
        if questions[0].get("control") is False:  # a console of another version asked for all records
            questions.append({field: value for field, value in questions[0].items() if field != "control"})
        asked, question = list[int](), questions[0]
        for question in questions:
            asked = self._answers.get((name, json_text(question)), [])
            if asked:
                break
        position = self.position
        known = [place for place in asked if self._ats[place] <= position]
        if not known and asked and self._ats[asked[0]] - position <= ANSWERED_WITHIN_SECONDS:
            known = asked[:1]
        if not known:
            why, hint = self._why_not(name, arguments or {}, asked)
            raise NotFoundError(why, hint=hint, code="NOT_RECORDED")
        body = self._lines[known[-1]].body
        if "error" in body:
            error = mapping(body["error"])
            raise OperationError(text_of(error.get("message")) or "refused", code=text_of(error.get("code")))
        return body.get("data") if question is questions[0] else _without_control(body.get("data"))

    def _why_not(self, name: str, arguments: Mapping[str, Any], asked: Sequence[int]) -> tuple[str, str]:
        """Why there is no answer at this position, and what to do."""
        if asked:
            first = clock_text(self._ats[asked[0]])
            return f"not in this recording: {name}; the first answer to it comes at {first}", ""
        if name in NEVER_RECORDED:
            return f"not in this recording: {name}; what would leave is in none", "the silo's own people may look at it"
        if self.share_safe and released_answer(name, arguments, {}) is None:
            why = f"not in this recording: {name} is local, and this one is share-safe"
            return why, "this site's people record it with --include-local LOCAL"
        return f"not in this recording: {name}", "nobody looked at it while it was recorded"

    def close(self) -> None:
        with self._moved:
            self._generation += 1
            self._moved.notify_all()

    def _newest(self, what: str, position: float) -> _Line:
        """The last line of a sort up to a position; the first one where that comes later."""
        places = self._places[what]
        reached = bisect_right(places, position, key=lambda place: self._ats[place])
        return self._lines[places[max(reached - 1, 0)]]

    def _place_after(self, since_sequence: int) -> int:
        """Behind the last line up to the position that has this sequence: numbers start again when a daemon does."""
        reached = bisect_right(self._ats, self.position)
        for place in range(reached - 1, -1, -1):
            line = self._lines[place]
            if line.what in ("snapshot", "event") and whole(line.body.get("sequence")) == since_sequence:
                return place + 1
        return 0


def _read(path: Path) -> tuple[bool, list[_Line], bool]:
    """Read a recording; returns whether it is share-safe, its lines, and whether the last one was torn.

    Raises:
        NotFoundError: there is no such file.
        UsageError: it is no recording.
    """
    texts = read_regular(path, hint=_MAKES_ONE, bytes_max=RECORDING_BYTES_MAX).split(b"\n")
    torn = texts.pop() != b""
    values: list[Mapping[str, Any]] = []
    for index, text in enumerate(texts):
        try:
            values.append(_parsed(text))
        except (ValueError, RecursionError) as error:
            if values and index == len(texts) - 1:
                torn = True  # a power cut may leave the line's end without its middle
                break
            raise UsageError(f"{path}:{index + 1}: not a line of a recording", hint=_MAKES_ONE) from error
    if not values or "fedrec" not in values[0]:
        raise UsageError(f"{path}:1: not a recording", hint=_MAKES_ONE)
    if values[0]["fedrec"] != FORMAT_VERSION:
        version = str(values[0]["fedrec"])[:16]
        raise UsageError(f"{path}:1: a recording of version {version}; this console reads {FORMAT_VERSION}")
    lines = [_line(path, index + 2, value) for index, value in enumerate(values[1:])]
    for index in range(1, len(lines)):
        if lines[index].at < lines[index - 1].at:
            raise UsageError(f"{path}:{index + 2}: earlier than the line before it")
    if not any(line.what == "snapshot" for line in lines):
        raise UsageError(f"{path}: there is no reading in it", hint="the recording ended before the first one")
    return values[0].get("share_safe") is True, lines, torn


def _line(path: Path, row: int, value: Mapping[str, Any]) -> _Line:
    at = value.get("at")
    what = next((name for name in ("snapshot", "event", "answer", "lost", "end") if name in value), "")
    if not what or isinstance(at, bool) or not isinstance(at, int | float) or number(at) < 0:
        raise UsageError(f"{path}:{row}: not a line of a recording of version {FORMAT_VERSION}")
    return _Line(number(at), what, mapping(value[what]))


def _parsed(text: bytes) -> Mapping[str, Any]:
    """Raises ValueError, RecursionError: no JSON object, or a number that JSON does not have."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    value = json.loads(text, parse_constant=refuse)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value
