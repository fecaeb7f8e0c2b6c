"""A large upload over a line as sites have it: `python -m benchmarks.networks [--full] [--json]`.

Through a site's own HTTP proxy, over mutual TLS, at a given speed, and each connection is ended when it is so old.

    networks_seconds        from the first byte to the acknowledgement
    networks_line_seconds   what the bytes alone take at that speed
    networks_connections    that it took
    networks_bytes_ratio    bytes that crossed upwards, over the payload's

By default a hundredth of the whole: 16.6 MB at 20 Mbit/s, each connection 6 s old at most. `--full`: 1.66 GB (a 70B
model at rank 32) and 10 minutes, which takes over 11 minutes. It must arrive once, whole.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import UnreachableError
from policies.schema import LoraSchema
from silo.guard.proxied import Proxy
from tests.loopback import test_T23_T24_cut_lines as cut_lines
from tests.loopback.connect_proxy import ConnectProxy
from tests.loopback.test_networks import dial

FULL_BYTES, FULL_AGE_SECONDS, MEGABITS = 1.66e9, 600.0, 20.0
PIECE_BYTES = 1 << 14


class SlowProxy(ConnectProxy):
    """As `ConnectProxy`, at so many bytes a second upwards, and with the small buffers of a slow line."""

    bytes_per_second = 0.0

    def far_end(self, near: socket.socket) -> socket.socket | None:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        return super().far_end(near)

    def _through(self, piece: bytes, crossed: int, direction: str) -> Iterator[bytes]:
        for start in range(0, len(piece), PIECE_BYTES):
            part = piece[start : start + PIECE_BYTES]
            if direction == "up":
                time.sleep(len(part) / self.bytes_per_second)
            yield part


def measured(payload_bytes: float, age_seconds: float, megabits: float) -> dict[str, float]:
    """Figures by name. Raises AssertionError: it did not arrive once."""
    width = int(payload_bytes / 4 / 2 / 2)  # two factors of rank 2 in float32
    names = [name for name, _ in cut_lines.LARGE.tensors]
    cut_lines.LARGE = LoraSchema(
        base_model_sha256=cut_lines.LARGE.base_model_sha256, rank=2, alpha=4.0, dtype="float32", targets="all-linear",
        tensors=((names[0], (2, width)), (names[1], (width, 2))),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="fn-") as folder:
        place = cut_lines.Place(Path(folder))
        with place.proxy, SlowProxy(place.proxy.upstream_port) as proxy:
            proxy.bytes_per_second, proxy.age_seconds = megabits * 1e6 / 8, age_seconds
            dial(place, proxy, proxy=Proxy(f"127.0.0.1:{proxy.port}"))
            allowed = place.allowed()
            started, connections = time.perf_counter(), 1
            try:
                reply = place.bench.gate.transmit(allowed)
            except UnreachableError:
                reply = None
            while reply is None:
                [item] = place.bench.ledger.outbox("allowed")
                connections += 1
                try:
                    reply = place.bench.gate.retry(item)
                except UnreachableError:
                    continue
            seconds = time.perf_counter() - started
            assert isinstance(reply.body, pb.Ack)
            assert len(place.bench.events("egress.acked")) == 1
            crossed = proxy.passed["up"]
            place.close()
    size = len(allowed.payload)
    return {
        "networks_payload_bytes": size,
        "networks_seconds": round(seconds, 2),
        "networks_line_seconds": round(size * 8 / megabits / 1e6, 2),
        "networks_connections": connections,
        "networks_bytes_ratio": round(crossed / size, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="1.66 GB and connections of 10 minutes")
    parser.add_argument("--megabits", type=float, default=MEGABITS, help="of the line, a second")
    parser.add_argument("--json", action="store_true", help="figures as one JSON object")
    options = parser.parse_args()
    scale = 1.0 if options.full else 0.01
    found = measured(FULL_BYTES * scale, FULL_AGE_SECONDS * scale, options.megabits)
    print(json.dumps(found) if options.json else "\n".join(f"{name:28} {value}" for name, value in found.items()))


if __name__ == "__main__":
    sys.exit(main())
