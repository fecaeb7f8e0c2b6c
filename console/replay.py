"""A recording in place of a daemon: `Replay` is a source like a daemon's client, and nothing above the feed knows more.

Does not cover: proof. A recording is not signed; what is shown of it proves nothing, and nothing can be answered in it.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from console.client import Event
from console.client import Snapshot as Reading
from console.reading import mapping, number, text_of, time_of, whole
from console.recording import FORMAT_VERSION, NEVER_RECORDED, RECORDING_BYTES_MAX, clock_text, json_text
from console.sharing import released_answer
from fedsilo.audit.reader import is_allowed_control
from fedsilo.files.durable import read_regular
from fedsilo.protocol.errors import NotFoundError, OperationError, UnreachableError, UsageError

ANSWERED_WITHIN_SECONDS = 5.0  # as long as a console waits for an answer
SPEED_MIN, SPEED_MAX = 0.1, 1000.0
_LOOK_AGAIN_SECONDS = 0.5  # at a clock that may have been moved
_MAKES_ONE = "fedconsole --record FILE makes a recording"


@dataclass(frozen=True)
class Header:
    """Attributes:
    share_safe: it holds released fields only.
    began: UTC time of the first reading, by the clock of the console that recorded.
    """

    federation: str
    site: str
    party: str
    share_safe: bool
    began: str


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
    return {**page, "records": [record for record in records if not is_allowed_control(mapping(record))]}


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
        self.header, self._lines, self.torn = _read(path)
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
        """For the top of the console."""
        moment = datetime.fromtimestamp(self.wall_time(), UTC)
        pace = "paused" if self.paused else "at its end" if self.position >= self.duration else f"x{self.speed:g}"
        kind = "share-safe" if self.header.share_safe else "WITH LOCAL DATA"
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
        if self.header.share_safe and released_answer(name, arguments, {}) is None:
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


def _read(path: Path) -> tuple[Header, list[_Line], bool]:
    """Header, lines, and whether the last one was torn. Raises NotFoundError, UsageError."""
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
    first = values[0]
    header = Header(
        federation=text_of(first.get("federation")),
        site=text_of(first.get("site")),
        party=text_of(first.get("party")),
        share_safe=first.get("share_safe") is True,
        began=text_of(first.get("began")),
    )
    return header, lines, torn


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
