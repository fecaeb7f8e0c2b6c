"""The console's link to a daemon: one thread that reads, and the signing of what a person decided.

The reader asks for a snapshot a few times a second and hands on one frozen value; a second thread waits in `Watch` and
puts events in a bounded queue, so a flood of events costs memory for so many and no more. After a failure it tries
again with a growing, jittered pause, with a new channel each time. Nothing here draws, nothing that draws comes here.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from certs.describe import describe_certificate
from certs.names import parse_spiffe_id
from console.client import ControlClient, Event, Operator, sign_as
from console.client import Snapshot as Reading
from console.store import Store
from console.values import Snapshot
from fedsilo.edge.identity_files import load_operator
from fedsilo.treaty.errors import FedSiloError, NotAllowedError, UnreachableError, UsageError

READ_INTERVAL_SECONDS = 0.5
READ_TIMEOUT_SECONDS = 5.0
WATCH_AGAIN_SECONDS = 5.0
EVENTS_WAITING_MAX = 1000
PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.5, 15.0


class Source(Protocol):
    """What the feed reads from; `ControlClient` is one."""

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
        self._waiting: deque[Event] = deque(maxlen=EVENTS_WAITING_MAX)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="console-feed", daemon=True)
        self._record: Mapping[str, Any] = {}
        self._record_of: object = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=READ_TIMEOUT_SECONDS + 1)

    def read_now(self) -> None:
        """Do not wait for the next reading or the end of a pause."""
        self._wake.set()

    def _run(self) -> None:
        pause_seconds = PAUSE_SECONDS_MIN
        while not self._stopping.is_set():
            try:
                source = self._connect()
                try:
                    for _ in self._readings(source):
                        pause_seconds = PAUSE_SECONDS_MIN
                finally:
                    source.close()
            except FedSiloError as error:
                # jitter, so that several consoles do not all come back in the same moment
                wait_seconds = pause_seconds * random.uniform(0.75, 1.25)  # noqa: S311  # no secret
                self._store.lost(error.message, error.hint, time.monotonic() + wait_seconds)
                self._deliver(self._store.snapshot)
                self._pause(wait_seconds)
                pause_seconds = min(pause_seconds * 2, PAUSE_SECONDS_MAX)

    def _readings(self, source: Source) -> Iterator[None]:
        """Read, deliver, and so on; raises what the source raises."""
        watcher: threading.Thread | None = None
        watched_at = 0.0
        while not self._stopping.is_set():
            reading = source.snapshot()
            while self._waiting:
                self._store.happened([self._waiting.popleft()])
            record = self._run_record(source, reading)
            self._store.read(reading, time.monotonic(), wall_time=time.time(), record=record)
            self._deliver(self._store.snapshot)
            yield
            if (watcher is None or not watcher.is_alive()) and time.monotonic() - watched_at > WATCH_AGAIN_SECONDS:
                watched_at = time.monotonic()
                watcher = threading.Thread(
                    target=self._watch, args=(source, reading.sequence), name="console-watch", daemon=True
                )
                watcher.start()
            self._pause(READ_INTERVAL_SECONDS)

    def _watch(self, source: Source, since_sequence: int) -> None:
        try:
            for event in source.watch(since_sequence):
                self._waiting.append(event)
                if self._stopping.is_set():
                    return
        except FedSiloError:
            return  # the reader notices the same by itself, and says so

    def _run_record(self, source: Source, reading: Reading) -> Mapping[str, Any]:
        """At a coordinator, the newest run's record, asked for again when its round or state changes."""
        runs = reading.state.get("runs") if reading.state.get("party") == "coordinator" else None
        if not runs:
            return {}
        newest = (runs[-1].get("run"), runs[-1].get("round"), runs[-1].get("state"))
        if newest != self._record_of:
            self._record = source.query("run", {"run": newest[0]})
            self._record_of = newest
        return self._record

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()


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


class Hand:
    """Signs and gives commands; it may wait, so it is called from a worker thread."""

    def __init__(self, socket: Path) -> None:
        self._connect = connect_to(socket)

    def carry_out(self, person: Person, name: str, arguments: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
        """One signed command.

        Raises:
            FedSiloError: what the key files or the daemon said. UnreachableError: safe to ask again, same request id.
        """
        command = sign_as(person.operator, name, arguments, request_id=request_id)
        with self._connect() as client:
            result = client.execute(command)
        if not isinstance(result, Mapping):
            raise UnreachableError("the daemon's answer cannot be read; look at the state")
        return result
