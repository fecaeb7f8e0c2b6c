"""A TCP proxy that does to a connection what networks do: cut it, tear a piece in half, stop, slow down, delay.

It sees TLS records and understands nothing of them. Each fault befalls the bytes of one direction of one connection,
from so many bytes on, so that a handshake may pass and what is sent through it may not.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

_PIECE_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets


@dataclass(frozen=True)
class Fault:
    """What happens to a connection.

    Attributes:
        kind: cut (reset), halve (half of a piece crosses, then a reset), stall (nothing crosses and nothing closes),
            throttle (so many bytes a second), delay (each piece waits so long).
        after_bytes: of this direction, that cross unharmed.
        direction: up is towards the server.
        amount: bytes per second, or seconds.
        connections: as many of them, then it is over; None: all.
    """

    kind: Literal["cut", "halve", "stall", "throttle", "delay"]
    after_bytes: int = 0
    direction: Literal["up", "down"] = "up"
    amount: float = 1.0
    connections: int | None = None


@dataclass
class _Line:
    """One connection through the proxy."""

    ends: tuple[socket.socket, socket.socket]
    born: float = field(default_factory=monotonic)
    heard: float = field(default_factory=monotonic)


class CuttingProxy:
    """Listens on a loopback port while its block lasts.

    Args:
        upstream_port: of the server, on 127.0.0.1; may be set anew when that has moved.

    Attributes:
        fault: of connections, from their next piece on; None: all is well.
        idle_seconds: a connection on which nothing crossed for so long is reset; None: never.
        age_seconds: one that is as old is reset; None: never.
        age_bytes: one over which so many have gone up ends too, without a reset; None: never.
        ended: how many each of these has reset.
        passed: bytes that crossed, by direction, since last set.
        struck: set when a fault has cut, halved or stalled a connection, or begun to slow one down.
    """

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.fault: Fault | None = None
        self.idle_seconds: float | None = None
        self.age_seconds: float | None = None
        self.age_bytes: int | None = None
        self.ended = {"idle": 0, "age": 0}
        self.passed = {"up": 0, "down": 0}
        self.struck = threading.Event()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._open: set[socket.socket] = set()
        self._lines: list[_Line] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._watching = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> CuttingProxy:
        self._accepting.start()
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._accepting.join()
        self._watching.join()

    def cut(self) -> None:
        """Reset every connection that stands."""
        with self._lock:
            standing, self._open = self._open, set()
        for connection in standing:
            _reset(connection)

    def heal(self) -> None:
        """From now on all is well, and what was slowed down or stands still is cut."""
        self.fault = None
        self.struck.clear()
        self.cut()
        self.passed = {"up": 0, "down": 0}

    @property
    def oldest_seconds(self) -> float:
        """Age of the oldest connection that stands; 0 without one."""
        with self._lock:
            return max((monotonic() - line.born for line in self._lines), default=0.0)

    def wait(self, until: Callable[[], bool], seconds: float = 60.0) -> None:
        """Until that holds. Raises AssertionError: it does not within the time."""
        end = monotonic() + seconds
        while not until():
            assert monotonic() < end, "the proxy waited in vain"
            self._stopping.wait(0.01)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near: socket.socket) -> None:
        with self._lock:
            self._open.add(near)
        far = None
        with contextlib.suppress(OSError):
            far = self.far_end(near)
        if far is None or self._stopping.is_set():
            _reset(near)
            with self._lock:
                self._open.discard(near)
            return
        line = _Line((near, far))
        with self._lock:
            self._open.add(far)
            self._lines.append(line)
        for source, target, direction in ((near, far, "up"), (far, near, "down")):
            threading.Thread(target=self._carry, args=(line, source, target, direction), daemon=True).start()

    def far_end(self, near: socket.socket) -> socket.socket | None:
        """The connection that `near` goes on with; None: it is refused."""
        return socket.create_connection(("127.0.0.1", self.upstream_port))

    def _watch(self) -> None:
        """Resets what has been silent too long, and what is too old."""
        while not self._stopping.wait(0.01):
            now = monotonic()
            with self._lock:
                self._lines = [line for line in self._lines if set(line.ends) <= self._open]
                late = [(line, why) for line in self._lines if (why := self._over(line, now))]
                for line, why in late:
                    self.ended[why] += 1
                    self._lines.remove(line)
            for line, _ in late:
                for end in line.ends:
                    _reset(end)

    def _over(self, line: _Line, now: float) -> str:
        if self.idle_seconds is not None and now - line.heard >= self.idle_seconds:
            return "idle"
        return "age" if self.age_seconds is not None and now - line.born >= self.age_seconds else ""

    def _carry(self, line: _Line, source: socket.socket, target: socket.socket, direction: str) -> None:
        crossed = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE_BYTES):
                line.heard = monotonic()
                if direction == "up" and self.age_bytes is not None and crossed + len(piece) > self.age_bytes:
                    with self._lock:
                        self.ended["age"] += 1
                    # what crossed arrives; the server then ends its side, and with that both are gone
                    target.sendall(piece[: self.age_bytes - crossed])
                    target.shutdown(socket.SHUT_WR)
                    return
                for part in self._through(piece, crossed, direction):
                    target.sendall(part)
                    crossed += len(part)
                    with self._lock:
                        self.passed[direction] += len(part)
        for connection in (source, target):
            _reset(connection)
            with self._lock:
                self._open.discard(connection)

    def _through(self, piece: bytes, crossed: int, direction: str) -> Iterator[bytes]:
        """What of a piece crosses, and when. Raises OSError: no more does."""
        fault = self.fault
        if fault is None or fault.direction != direction or crossed + len(piece) <= fault.after_bytes:
            yield piece
            return
        if fault.connections is not None:
            left = fault.connections - 1
            self.fault = (
                None if left == 0 else Fault(fault.kind, fault.after_bytes, fault.direction, fault.amount, left)
            )
        self.struck.set()
        whole = max(0, fault.after_bytes - crossed)
        yield piece[:whole]
        rest = piece[whole:]
        match fault.kind:
            case "cut":
                raise OSError("cut")
            case "halve":
                yield rest[: len(rest) // 2]
                raise OSError("halved")
            case "stall":
                self._stopping.wait()
                raise OSError("stalled")
            case "throttle":
                for byte in rest:
                    self._stopping.wait(1.0 / fault.amount)
                    yield bytes([byte])
            case "delay":
                self._stopping.wait(fault.amount)
                yield rest


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with contextlib.suppress(OSError):  # wakes whoever reads from it
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
