"""Folds readings and events of one daemon into snapshots. No Textual, no grpc, no I/O: console, `--once` and tests
read the same store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from console.reading import event_text, mapping, number, state_of, text_of, time_of, whole
from console.values import CoordinatorState, Halt, Happening, Link, SiloState, Snapshot

EVENTS_KEPT = 200
NOTHING_TOLD_YET = "the daemon answers and has told nothing of its state yet"
HALTS = "halts"  # the answer that every screen has, at a silo


class _Read(Protocol):
    """What `console.client.Snapshot` has."""

    @property
    def sequence(self) -> int: ...
    @property
    def time(self) -> str: ...
    @property
    def policy_digest(self) -> str: ...
    @property
    def state(self) -> dict[str, Any]: ...


class _Happened(Protocol):
    @property
    def sequence(self) -> int: ...
    @property
    def time(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def fields(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Answer:
    """What a question came to: a value with its time (the console's monotonic clock), a refusal, or, after a refusal of
    what was answered before, both."""

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
        self, reading: _Read, now: float, *, wall_time: float, record: Mapping[str, Any] | None = None,
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
        state = _with_screens(state_of(mapping(reading.state), mapping(record)), mapping(reading.state))
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

    def happened(self, events: Iterable[_Happened]) -> None:
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


def _with_screens(
    state: SiloState | CoordinatorState | None, told: Mapping[str, Any]
) -> SiloState | CoordinatorState | None:
    if not isinstance(state, SiloState):
        return state
    screens = mapping(told.get("screens"))
    return replace(state, halted_kinds=_texts(screens.get("halts")), screen_troubles=_texts(screens.get("troubles")))


def halts_of(snapshot: Snapshot) -> tuple[Halt, ...]:
    """Kinds that are halted at a silo: as its state names them, with what the query `halts` adds."""
    if not isinstance(snapshot.state, SiloState):
        return ()
    told = mapping(snapshot.answers.get(HALTS)).get("halts")
    rows = [mapping(row) for row in told] if isinstance(told, list) else []
    halts = {
        text_of(row.get("kind")): Halt(
            text_of(row.get("kind")),
            number(row.get("since")),
            whole(row.get("needed")),
            _texts(row.get("given")),
            text_of(row.get("digest")),
        )
        for row in rows
    }
    for kind in snapshot.state.halted_kinds:
        halts.setdefault(kind, Halt(kind))
    return tuple(halts[kind] for kind in sorted(halts))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(text_of, value)) if isinstance(value, list) else ()
