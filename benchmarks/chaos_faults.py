"""What befalls the lines of `benchmarks.chaos`: weather on the proxy, and clients that hold a line and say little."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import ssl
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from tests.loopback.cutting_proxy import CuttingProxy, Fault

if TYPE_CHECKING:
    from benchmarks.chaos_federation import Federation

FAULT_SECONDS, CALM_SECONDS = 1.0, 0.7
LOSS, DELAY_MILLISECONDS = "5%", 200


class Weather:
    """One fault of the proxy after the other, each for a second, then calm; which ones follow from a seed."""

    def __init__(self, proxy: CuttingProxy, rng: random.Random, calm_seconds: float = CALM_SECONDS) -> None:
        self._proxy, self._rng, self._calm_seconds = proxy, rng, calm_seconds
        self._until, self._calm, self.faults = 0.0, True, list[str]()

    def look(self) -> None:
        if time.monotonic() < self._until:
            return
        self._calm = not self._calm
        self._until = time.monotonic() + (self._calm_seconds if self._calm else FAULT_SECONDS)
        if self._calm:
            if self._proxy.fault is not None and self._proxy.fault.kind != "delay":
                self._proxy.heal()
            self._proxy.fault = None
            return
        kind = self._rng.choice(("cut", "halve", "stall", "throttle", "delay"))
        amount = {"throttle": 200.0, "delay": 0.1}.get(kind, 1.0)
        self._proxy.fault = Fault(
            kind, after_bytes=self._rng.choice((0, 1500, 4000, 10_000)),  # type: ignore[arg-type]
            direction=self._rng.choice(("up", "down")), amount=amount,
        )  # fmt: skip
        self.faults.append(kind)
        if self._rng.random() < 0.3:
            self._proxy.cut()

    def end(self) -> None:
        self._proxy.heal()


class Clients:
    """Lines to the coordinator that are held: half-open ones that never begin a handshake, ones that send a byte of it
    each second, and ones with a silo's certificate that shake hands and then send a byte of HTTP/2 each second."""

    EACH = 6

    def __init__(self, made: Federation) -> None:
        self._made = made
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Clients:
        for work in (self._silent, self._slow_handshake, self._slow_frames):
            for _ in range(self.EACH):
                thread = threading.Thread(target=self._again, args=(work,), daemon=True)
                thread.start()
                self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(5.0)

    def _again(self, work: object) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(OSError):
                work()  # type: ignore[operator]
            self._stopping.wait(0.2)

    def _connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._made.proxy.upstream_port), 5.0)

    def _silent(self) -> None:
        with self._connected() as line:
            self._hold(line, b"")

    def _slow_handshake(self) -> None:
        outgoing = ssl.MemoryBIO()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        half = context.wrap_bio(ssl.MemoryBIO(), outgoing)
        with contextlib.suppress(ssl.SSLWantReadError):
            half.do_handshake()
        with self._connected() as line:
            self._hold(line, outgoing.read())

    def _slow_frames(self) -> None:
        folder = self._made.site[self._made.silos[-1]].folder / "id"
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=str(folder / "federation_ca.crt"))
        context.check_hostname = False
        name = self._made.silos[-1]
        context.load_cert_chain(folder / f"{name}.crt", folder / f"{name}.key")
        context.set_alpn_protocols(["h2"])
        with self._connected() as raw, context.wrap_socket(raw) as line:
            self._hold(line, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(200))

    def _hold(self, line: socket.socket, data: bytes) -> None:
        for byte in data:
            line.sendall(bytes([byte]))
            if self._stopping.wait(1.0):
                return
        line.settimeout(1.0)
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                if not line.recv(1 << 12):
                    return


def netem_why_not() -> str:
    """Why this machine cannot lose and delay packets in a network namespace of its own, or ''."""
    if shutil.which("unshare") is None or shutil.which("tc") is None:
        return "there is no unshare or no tc"
    tried = subprocess.run(
        ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "loss", LOSS],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if tried.returncode == 0 else f"tc netem: {tried.stderr.strip().splitlines()[-1]}"
