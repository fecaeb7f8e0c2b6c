"""A line between a silo and its coordinator as slow and as far as one says, for benchmarks on one machine.

All connections of a silo share the line's rate in each direction, first come first served; what crosses arrives half a
round trip later. No byte is lost: `tc netem` does that where a machine lets one.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from dataclasses import dataclass, field

PIECE_BYTES = 1 << 14
PIECES_UNDERWAY_MAX = 256  # 4 MiB: more than the rate times the round trip of any line that is asked for here


@dataclass
class Direction:
    """bytes_per_second of the line; `passed` counts the bytes that went in."""

    bytes_per_second: float
    passed: int = 0
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def through(self, size: int) -> float:
        """The moment at which the last of so many bytes is on the line, after all that went in before."""
        with self._lock:
            self.passed += size
            self._free_at = max(self._free_at, time.monotonic()) + size / self.bytes_per_second
            return self._free_at


class ShapedLink:
    """Listens on a loopback port while its block lasts, and carries to `upstream_port`.

    Args:
        upstream_port: of the server, on 127.0.0.1.
        bits_per_second: in each direction.
        round_trip_seconds: half of it each way.
    """

    def __init__(self, upstream_port: int, bits_per_second: float, round_trip_seconds: float) -> None:
        self._upstream_port, self._one_way_seconds = upstream_port, round_trip_seconds / 2
        self.up, self.down = Direction(bits_per_second / 8), Direction(bits_per_second / 8)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> ShapedLink:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._upstream_port))
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue
            for source, target, direction in ((near, far, self.up), (far, near, self.down)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                underway: queue.Queue[tuple[float, bytes]] = queue.Queue(PIECES_UNDERWAY_MAX)
                threading.Thread(target=self._take, args=(source, direction, underway), daemon=True).start()
                threading.Thread(target=self._give, args=(target, underway), daemon=True).start()

    def _take(self, source: socket.socket, direction: Direction, underway: queue.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                on_the_line = direction.through(len(piece))
                underway.put((on_the_line + self._one_way_seconds, piece))
                time.sleep(max(on_the_line - time.monotonic(), 0.0))  # who sends is held back, as by a line
        underway.put((time.monotonic() + self._one_way_seconds, b""))

    def _give(self, target: socket.socket, underway: queue.Queue[tuple[float, bytes]]) -> None:
        with contextlib.suppress(OSError):
            while True:
                arrives_at, piece = underway.get()
                time.sleep(max(arrives_at - time.monotonic(), 0.0))
                if not piece:
                    break
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
