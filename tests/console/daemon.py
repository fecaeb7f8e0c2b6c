"""A daemon in this process, as the console's reader and its recorder see one; it can be bent, held back and lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

from fedsilo.control.client import Event, Snapshot
from fedsilo.protocol.errors import FedSiloError, NotFoundError
from tests.console.states import POLICY_DIGEST, silo

WAIT_SECONDS = 20


class Daemon:
    """A source in memory.

    Args:
        state: what a reading has.
        stays: a watcher waits for more events until the daemon is closed; else it ends with those there are.

    `answers` by name: a value, a function of the arguments, or an error to raise. `go_on` and `free` hold answers and
    readings back while they are cleared.
    """

    def __init__(self, state: dict[str, Any], *, stays: bool = True) -> None:
        self.state, self.sequence, self.reads = state, 7, 0
        self.error: FedSiloError | None = None
        self.events: list[Event] = []
        self.answers: dict[str, Any] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.go_on, self.free, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.go_on.set()
        self.free.set()
        if not stays:
            self.closed.set()

    def snapshot(self) -> Snapshot:
        self.reads += 1
        self.free.wait(WAIT_SECONDS)
        if self.error:
            raise self.error
        return Snapshot(self.sequence, "2026-12-01T10:00:00.000Z", POLICY_DIGEST, self.state)

    def watch(self, since_sequence: int = 0) -> Iterator[Event]:
        while self.events:
            event = self.events.pop(0)
            self.sequence = event.sequence
            yield event
        self.closed.wait(WAIT_SECONDS)

    def query(self, name: str, arguments: Mapping[str, Any] | None = None) -> Any:
        self.asked.append((name, dict(arguments or {})))
        self.go_on.wait(WAIT_SECONDS)
        answer = self.answers.get(name, NotFoundError(f"there is no query {name!r}"))
        if isinstance(answer, Exception):
            raise answer
        return answer(arguments) if callable(answer) else answer

    def close(self) -> None:
        self.closed.set()


def idle() -> Daemon:
    """A silo's daemon in its first round."""
    return Daemon(silo())
