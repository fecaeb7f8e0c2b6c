"""Folds readings and events of one daemon into snapshots. No Textual, no grpc, no I/O: console, `--once` and tests
read the same store.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from console.reading import event_text, mapping, state_of, text_of, time_of, whole
from console.values import Happening, Link, Snapshot

EVENTS_KEPT = 200


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


class Store:
    """Folds readings and events into snapshots. Not thread-safe: one reader owns it."""

    def __init__(self) -> None:
        self._snapshot = Snapshot()
        self._events: deque[Happening] = deque(maxlen=EVENTS_KEPT)
        self._missed = 0

    def read(self, reading: _Read, now: float, *, wall_time: float, record: Mapping[str, Any] | None = None) -> None:
        """Take in the daemon's state.

        Args:
            reading: as the client returned it.
            now: monotonic seconds of this console.
            wall_time: seconds since 1970 by this machine's clock, to notice a skew.
            record: at a coordinator, the run record so far, for released figures.
        """
        server_time = time_of(reading.time)
        self._snapshot = replace(
            self._snapshot,
            link=Link("live", received_at=now),
            server_time=server_time,
            policy_digest=text_of(reading.policy_digest),
            state=state_of(mapping(reading.state), mapping(record)),
            skew_seconds=server_time - wall_time if server_time else 0.0,
        )

    def happened(self, events: Iterable[_Happened]) -> None:
        for event in events:
            if event.name == "events.missed":
                self._missed += max(whole(mapping(event.fields).get("missed")), 1)
                continue
            self._events.append(Happening(event.sequence, event.time, event.name, event_text(mapping(event.fields))))

    def lost(self, cause: str, hint: str, retry_at: float) -> None:
        """The daemon cannot be read; what was known stays, marked."""
        link = Link("disconnected", cause, hint, self._snapshot.link.received_at, retry_at)
        self._snapshot = replace(self._snapshot, link=link)

    @property
    def snapshot(self) -> Snapshot:
        return replace(self._snapshot, events=tuple(self._events), events_missed=self._missed)
