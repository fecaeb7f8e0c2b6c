"""The console's link to a daemon: one thread that reads and folds what it read into snapshots, and the signing of what
a person decided.

The reader asks for a snapshot a few times a second and hands on one frozen value; a second thread waits in `Watch` and
puts events in a bounded queue, so a flood of events costs memory for so many and no more: samples of figures give way
first, and what was dropped is counted on the screen. A third asks what the screen
on top wants (`Feed.want`): a slow answer makes no reading late, and a refused one is only noted. After a failure to
read it tries again with a growing, jittered pause, with a new channel each time. Its clock counts suspend, so that no
laptop that was closed for the night is unlocked in the morning. Nothing here draws, nothing that draws comes here.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from certs.encoding import describe_certificate
from certs.names import parse_spiffe_id
from fedsilo.control.client import ControlClient, Event, Operator, sign_as
from fedsilo.control.client import Snapshot as Reading
from fedsilo.control.server import EVENTS_MISSED
from fedsilo.files.identity_files import load_operator
from fedsilo.protocol.errors import FedSiloError, NotAllowedError, UnreachableError, UsageError
from fedsilo.protocol.rounds import is_over
from fedsilo.views.state import (
    Happening,
    Link,
    Question,
    Snapshot,
    event_text,
    mapping,
    state_of,
    text_of,
    time_of,
    whole,
)

# CLOCK_MONOTONIC counts suspend where there is no CLOCK_BOOTTIME (clock_gettime(2) of macOS); on Linux it does not.
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boot_seconds() -> float:
    """Seconds since the machine was started, those in suspend included; never set back."""
    return time.clock_gettime(_CLOCK)


EVENTS_KEPT = 200
NOTHING_TOLD_YET = "the daemon answers and has told nothing of its state yet"


@dataclass(frozen=True)
class Answer:
    """The answer to a question: a value with its time (the console's monotonic clock), a refusal, or both where an
    earlier value was followed by a refusal."""

    value: Any = None
    at: float | None = None
    refused: tuple[str, str] | None = None


class Store:
    """Folds readings and events into snapshots. Not thread-safe: one reader owns it."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._events: deque[Happening] = deque(maxlen=EVENTS_KEPT)
        self._missed = 0
        self._sequence = 0  # of the last reading

    def read(
        self, reading: Reading, now: float, *, wall_time: float, record: Mapping[str, Any] | None = None,
        latency_seconds: float = 0.0,
    ) -> None:  # fmt: skip
        """Take in the daemon's state. One that has just started may have none to tell yet: what was known before stays,
        as old as it is, and the link is not live.

        Args:
            reading: as the client returned it.
            now: monotonic seconds of this console.
            wall_time: seconds since 1970 by this machine's clock, to notice a skew.
            record: at a coordinator, the run record so far, for released figures.
            latency_seconds: that the reading took; 0 when nobody measured it.
        """
        server_time = time_of(reading.time)
        if reading.sequence < self._sequence and server_time < self._snapshot.server_time:
            self._step_back(reading.sequence, server_time)
        self._sequence = reading.sequence
        state = state_of(mapping(reading.state), mapping(record))
        if state is None:
            link = Link("loading", NOTHING_TOLD_YET, "", self._snapshot.link.received_at)
            self._snapshot = replace(self._snapshot, link=link)
            return
        self._snapshot = replace(
            self._snapshot,
            link=Link("live", received_at=now, latency_seconds=latency_seconds),
            server_time=server_time,
            policy_digest=text_of(reading.policy_digest),
            state=state,
            skew_seconds=server_time - wall_time if server_time else 0.0,
        )

    def happened(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.name == "events.missed":
                self._missed += max(whole(mapping(event.fields).get("missed")), 1)
                continue
            happening = Happening(event.sequence, event.time, event.name, event_text(mapping(event.fields)))
            if self._events and event.sequence <= self._events[-1].sequence and happening in self._events:
                continue  # told again after a step back
            self._events.append(happening)

    def _step_back(self, sequence: int, server_time: float) -> None:
        """A recording was moved back: what comes later in it has not happened. A daemon that starts again counts from
        the beginning, but its clock goes on."""
        kept = [event for event in self._events if event.sequence <= sequence and time_of(event.time) <= server_time]
        self._events = deque(kept, maxlen=EVENTS_KEPT)

    def answered(self, answers: Mapping[str, Answer]) -> None:
        """All there is to what is asked for now, by its key; an answer that nobody asks for any more is left out."""
        self._snapshot = replace(
            self._snapshot,
            answers={key: answer.value for key, answer in answers.items() if answer.at is not None},
            answered_at={key: answer.at for key, answer in answers.items() if answer.at is not None},
            refused={key: answer.refused for key, answer in answers.items() if answer.refused is not None},
        )

    def lost(self, cause: str, hint: str, retry_at: float) -> None:
        """The daemon cannot be read; what was known stays, marked."""
        link = Link("disconnected", cause, hint, self._snapshot.link.received_at, retry_at)
        self._snapshot = replace(self._snapshot, link=link)

    @property
    def snapshot(self) -> Snapshot:
        return replace(self._snapshot, events=tuple(self._events), events_missed=self._missed)


READ_INTERVAL_SECONDS = 0.5
READ_TIMEOUT_SECONDS = 5.0
WATCH_AGAIN_SECONDS = 5.0
SAMPLES_WAITING_MAX = 1000
EVENTS_WAITING_MAX = 4096  # other than samples; a daemon keeps no more for a reader that fell behind
# Figures that the next one of their kind makes old. A held release, a verdict or a halt is none of them.
SAMPLES = frozenset({"metric", "silo.progress", "task.done"})
SAMPLE_PREFIX = "note."
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.5, 15.0
ASK_INTERVAL_SECONDS = 1.0
REFUSED_AGAIN_SECONDS = 5.0
QUESTIONS_MAX = 8  # of one screen; each is one query a second


class Source(Protocol):
    """The source of the feed; `ControlClient` is one.

    One that is no daemon that runs may have two methods more: `wall_time`, seconds since 1970 at which its readings
    count as taken, so that no clock is said to differ; and `banner`, which stands where a daemon's link says "live".
    """

    def snapshot(self) -> Reading: ...

    def watch(self, since_sequence: int = 0) -> Iterator[Event]: ...

    def query(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any: ...

    def close(self) -> None: ...


class Feed:
    """Reads until `stop`.

    Args:
        connect: makes a new source; called again after each failure.
        deliver: takes each snapshot, in the reader's thread.
    """

    def __init__(self, connect: Callable[[], Source], deliver: Callable[[Snapshot], None]) -> None:
        self._connect = connect
        self._deliver = deliver
        self._store = Store()
        self._waiting = Waiting()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console-feed", daemon=True)
        self._record: Mapping[str, Any] = {}
        self._record_of: object = None
        self._asking = _Asking(self._wake)
        self._first = True  # no event was asked for yet

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._asking.stop()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=READ_TIMEOUT_SECONDS + 1)

    def read_now(self) -> None:
        """Do not wait for the next reading or the end of a pause."""
        self._asking.ask_again()
        self._wake.set()

    def want(self, questions: Mapping[str, Question]) -> None:
        """Ask these questions from now on, each under the screen's own key, at once and about once a second. Answers
        are in `Snapshot.answers`; answers to earlier questions are dropped.

        Raises:
            ValueError: more than `QUESTIONS_MAX`; a screen asks for pages, not for everything.
        """
        self._asking.want(questions)

    def _run(self) -> None:
        pause_seconds = PAUSE_SECONDS_MIN
        while not self._stopping.is_set():
            try:
                source = self._connect()
                try:
                    self._asking.ask_from(source)
                    for _ in self._readings(source):
                        pause_seconds = PAUSE_SECONDS_MIN
                finally:
                    self._asking.ask_from(None)
                    source.close()
                return
            except FedSiloError as error:
                cause, hint = error.message, error.hint
            except Exception as error:  # noqa: BLE001  # what a daemon says may break whatever reads it, not the link
                cause, hint = f"what the daemon says cannot be read: {_named(error)}", "is it of this version?"
            # jitter, so that several consoles do not all come back in the same moment
            wait_seconds = pause_seconds * random.uniform(0.75, 1.25)  # noqa: S311  # no secret
            self._store.lost(cause, hint, boot_seconds() + wait_seconds)
            self._deliver(self._store.snapshot)
            self._pause(wait_seconds)
            pause_seconds = min(pause_seconds * 2, PAUSE_SECONDS_MAX)

    def _readings(self, source: Source) -> Iterator[None]:
        """Read, deliver, and so on; raises what the source raises."""
        watcher: threading.Thread | None = None
        watched_at = 0.0
        while not self._stopping.is_set():
            asked_at = boot_seconds()
            reading = source.snapshot()
            latency_seconds = boot_seconds() - asked_at
            self._store.happened(self._waiting.take())
            record = self._run_record(source, reading)
            wall_time: float = getattr(source, "wall_time", time.time)()
            self._store.read(
                reading, boot_seconds(), wall_time=wall_time, record=record, latency_seconds=latency_seconds
            )
            self._store.answered(self._asking.answers())
            self._deliver(_with_banner(self._store.snapshot, source))
            yield
            if (watcher is None or not watcher.is_alive()) and boot_seconds() - watched_at > WATCH_AGAIN_SECONDS:
                watched_at = boot_seconds()
                watcher = threading.Thread(
                    target=self._watch, args=(source, reading.sequence, self._first), name="console-watch", daemon=True
                )
                self._first = False
                watcher.start()
            self._pause(READ_INTERVAL_SECONDS)

    def _watch(self, source: Source, since_sequence: int, first: bool) -> None:
        """first: with what the daemon still has of the time before. That something of it is gone is no news."""
        first = first and not hasattr(source, "banner")  # a recording has its events by itself
        try:
            for event in source.watch(0 if first else since_sequence):
                if first and event.name == EVENTS_MISSED and event.sequence <= since_sequence:
                    continue
                self._waiting.add(event, counts=event.sequence > since_sequence)
                if self._stopping.is_set():
                    return
        except Exception:  # noqa: BLE001
            return  # the reader notices a loss by itself, and says so; an event that cannot be read is watched past

    def _run_record(self, source: Source, reading: Reading) -> Mapping[str, Any]:
        """At a coordinator, the record of its current run, asked for again when its round or state changes."""
        runs = reading.state.get("runs") if reading.state.get("party") == "coordinator" else None
        if not runs:
            return {}
        going_on = [run for run in runs if not is_over(str(run.get("state")))]
        current = (going_on or runs)[-1]
        shown = (current.get("run"), current.get("round"), current.get("state"))
        if shown != self._record_of:
            try:
                self._record = source.query("run", {"run": shown[0]})
                self._record_of = shown
            except FedSiloError:
                return {}  # figures of the run are missing then, nothing else; asked again with the next reading
        return self._record

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()


class Waiting:
    """Events on their way to the store, bounded: of each class the oldest give way, and are counted.

    Samples (`SAMPLES`) have a bound of their own, so that a flood of them displaces no approval, verdict or halt; those
    are dropped only by more than `EVENTS_WAITING_MAX` of their own kind between two readings. Thread-safe.
    Does not cover: what the state says. It comes with each reading, whatever became of the events.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[Event] = deque(maxlen=SAMPLES_WAITING_MAX)
        self._others: deque[Event] = deque(maxlen=EVENTS_WAITING_MAX)
        self._dropped = 0

    def add(self, event: Event, *, counts: bool = True) -> None:
        """counts: what it pushes out is missed; of what happened before anybody looked, nothing is."""
        is_sample = event.name in SAMPLES or event.name.startswith(SAMPLE_PREFIX)
        queue = self._samples if is_sample else self._others
        with self._lock:
            self._dropped += counts and len(queue) == queue.maxlen
            queue.append(event)

    def take(self) -> Iterable[Event]:
        """All that waits, in the order in which it happened, before it how many were dropped; then nothing waits."""
        with self._lock:
            events = [*self._samples, *self._others]
            dropped, self._dropped = self._dropped, 0
            self._samples.clear()
            self._others.clear()
        events.sort(key=lambda event: event.sequence)
        if dropped:
            first = events[0]
            events.insert(0, replace(first, name=EVENTS_MISSED, fields={"missed": dropped}))
        return events


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _with_banner(snapshot: Snapshot, source: Source) -> Snapshot:
    """Add to a snapshot what kind of source it is of, where that is no running daemon."""
    banner = getattr(source, "banner", None)
    return snapshot if banner is None else replace(snapshot, link=replace(snapshot.link, banner=banner()))


class _Asking:
    """Asks questions in a thread of its own, one after the other, while there is a source."""

    def __init__(self, answered: threading.Event) -> None:
        self._answered = answered
        self._changed = threading.Condition()
        self._source: Source | None = None
        self._questions: Mapping[str, Question] = {}
        self._answers: dict[str, Answer] = {}
        self._due: dict[str, float] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None

    def want(self, questions: Mapping[str, Question]) -> None:
        if len(questions) > QUESTIONS_MAX:
            raise ValueError(f"{len(questions)} questions, at most {QUESTIONS_MAX}")
        with self._changed:
            if questions == self._questions:
                return
            same = {key for key, question in questions.items() if self._questions.get(key) == question}
            self._questions = dict(questions)
            self._answers = {key: answer for key, answer in self._answers.items() if key in same}
            self._due = {key: due for key, due in self._due.items() if key in same}
            self._changed.notify()

    def ask_from(self, source: Source | None) -> None:
        with self._changed:
            self._source = source
            if source is not None and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="console-ask", daemon=True)
                self._thread.start()
            self._due = {}
            self._changed.notify()

    def ask_again(self) -> None:
        with self._changed:
            self._due = {}
            self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def answers(self) -> Mapping[str, Answer]:
        with self._changed:
            return dict(self._answers)

    def _run(self) -> None:
        while (next_one := self._next()) is not None:
            source, key, question = next_one
            name, arguments = question
            value, refused = None, None
            try:
                value = source.query(name, arguments)
            except FedSiloError as error:
                refused = (error.code, error.line)
            except Exception as error:  # noqa: BLE001  # no JSON, or a channel that was closed meanwhile
                refused = ("UNREADABLE", f"the answer to {name} cannot be read: {_named(error)}")
            with self._changed:
                if self._questions.get(key) != question or self._source is not source:
                    continue  # nobody asks that any more
                before = self._answers.get(key, Answer())
                now = boot_seconds()
                if refused is None:
                    self._answers[key] = Answer(value, now)
                    self._due[key] = now + ASK_INTERVAL_SECONDS
                else:
                    self._answers[key] = Answer(before.value, before.at, refused)
                    self._due[key] = now + REFUSED_AGAIN_SECONDS
            if before.at is None or refused != before.refused or value != before.value:
                self._answered.set()

    def _next(self) -> tuple[Source, str, Question] | None:
        """Waits for a question that is due; None at the end."""
        with self._changed:
            while not self._stopping:
                pause: float | None = None
                if self._source is not None and self._questions:
                    key = min(self._questions, key=lambda each: self._due.get(each, 0.0))
                    pause = self._due.get(key, 0.0) - boot_seconds()
                    if pause <= 0:
                        return self._source, key, self._questions[key]
                self._changed.wait(pause)
        return None


def connect_to(socket: Path) -> Callable[[], ControlClient]:
    """A maker of clients for `Feed`, which says what is wrong with a socket before gRPC says UNAVAILABLE."""

    def connect() -> ControlClient:
        if socket.exists() and not os.access(socket, os.R_OK | os.W_OK):
            raise NotAllowedError(
                f"you may not open {socket}", hint="its group is fedsilo-operators; the site's administrator adds you"
            )
        return ControlClient(socket, timeout_seconds=READ_TIMEOUT_SECONDS)

    return connect


@dataclass(frozen=True)
class Person:
    """Who signs. The key stays in its file and is read for each signature; nothing secret lives in the console."""

    name: str
    operator: Operator

    def ordering(self, federation: str) -> Person:
        """The same person, about to sign for the daemon of a federation."""
        return replace(self, operator=replace(self.operator, federation=federation))


def unlock(certificate: Path, key: Path, now: datetime | None = None) -> Person:
    """Read the person's certificate and key once, so that what is wrong shows now and not when it matters.

    Raises:
        NotFoundError, NotAllowedError: a file is missing, readable by others, expired, or does not fit.
        UsageError: the certificate is not an operator's.
    """
    moment = now or datetime.now(UTC)
    pem, _ = load_operator(certificate, key, now=moment)
    facts = describe_certificate(pem)
    uris = [str(name).partition(":")[2] for name in facts["names"] if str(name).startswith("Uniform")]
    identity = parse_spiffe_id(uris[0]) if len(uris) == 1 else None
    if identity is None or identity.role != "operator":
        raise UsageError(f"{certificate} is not an operator's certificate", hint="fedsilo certs show tells what it is")
    if not facts["not_before"] <= f"{moment:%Y-%m-%dT%H:%M:%SZ}" < facts["not_after"]:
        raise NotAllowedError(
            f"the certificate of {identity.name} is valid {facts['not_before']} to {facts['not_after']}",
            hint="fedsilo certs renew and sign make a new one",
        )
    return Person(identity.name, Operator(identity.domain, certificate, key))


class Signer:
    """Signs and gives commands; it may wait, so it is called from a worker thread."""

    def __init__(self, socket: Path) -> None:
        self._connect = connect_to(socket)

    def carry_out(self, person: Person, name: str, arguments: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        """Send one signed command.

        Raises:
            FedSiloError: what the key files or the daemon said. UnreachableError: safe to ask again, same request id.
        """
        command = sign_as(person.operator, name, arguments, request_id=request_id)
        with self._connect() as client:
            result = client.execute(command)
        if not isinstance(result, Mapping):
            raise UnreachableError("the daemon's answer cannot be read; look at the state")
        return result
