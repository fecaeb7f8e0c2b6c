"""Three networks of this machine's own making, for a trainer whose packets reach its guard and nobody else.

    trainer 198.51.100.2 ── 198.51.100.1 guard 203.0.113.1 ── 203.0.113.2 coordinator, 203.0.113.3 name server
            2001:db8:1::2 ─ 2001:db8:1::1      2001:db8:2::1 ─ 2001:db8:2::2              2001:db8:2::3

The guard's network forwards nothing, so what the trainer sends further is dropped without a word, as a firewall drops
it. Needs root and `ip`, `unshare`, `nsenter`. Nothing of the machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
GUARD, TRAINER, COORDINATOR, NAME_SERVER = "198.51.100.1", "198.51.100.2", "203.0.113.2", "203.0.113.3"
COORDINATOR_6, NAME_SERVER_6 = "2001:db8:2::2", "2001:db8:2::3"
COORDINATOR_PORT = 8443
_NEW_NETWORK = 0x40000000
_TRAINER_DEFAULTS = {"-4": f"default via {GUARD}", "-6": "default via 2001:db8:1::1"}
_FORWARDING = ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding")


def why_not() -> str:
    """Why this machine cannot build the networks, or ''."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        return f"networks are made by root with {', '.join(missing) or 'ip'}"
    tried = subprocess.run(["unshare", "--net", "ip", "link", "add", "type", "veth"], capture_output=True, check=False)
    return f"no network can be made here: {tried.stderr.decode().strip()}" if tried.returncode else ""


@dataclass
class Networks:
    """Attributes:
    places: process that holds each network open, by the network's name.
    """

    places: dict[str, int] = field(default_factory=dict)

    def file(self, name: str) -> str:
        return f"/proc/{self.places[name]}/ns/net"

    def inside(self, name: str, work: Callable[[], T]) -> T:
        """Run `work` in a network, on a thread of its own: a network is a thread's. Sockets made there stay there.

        Not for what uses gRPC, which keeps the threads it starts: they would dial from that network for ever.
        """

        def enter() -> T:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path(self.file(name)).open("rb") as handle:
                if libc.setns(handle.fileno(), _NEW_NETWORK):
                    raise OSError(ctypes.get_errno(), "setns")
            return work()

        with ThreadPoolExecutor(1) as threads:
            return threads.submit(enter).result()

    def run(self, name: str, *words: str) -> str:
        """What a program prints in a network."""
        command = ["nsenter", "-t", str(self.places[name]), "-n", *words]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout

    def ip(self, name: str, *words: str) -> None:
        self.run(name, "ip", *words)

    def link(self, name: str, interface: str, other: str, other_interface: str) -> None:
        peer = ["peer", "name", other_interface, "netns", str(self.places[other])]
        self.ip(name, "link", "add", interface, "type", "veth", *peer)

    def address(self, name: str, interface: str, *addresses: str) -> None:
        for each in addresses:
            # without waiting for somebody else to claim the same IPv6 address
            self.ip(name, "address", "add", each, "dev", interface, *(["nodad"] if ":" in each else []))
        self.ip(name, "link", "set", interface, "up")

    # ---- what a test changes, and changes back ----

    @contextlib.contextmanager
    def trainer_sends_everything_to_the_guard(self, family: str = "-4") -> Iterator[None]:
        """Without it the trainer's system knows no way but to the guard. family: -4 or -6."""
        self.ip("trainer", family, "route", "add", *_TRAINER_DEFAULTS[family].split())
        try:
            yield
        finally:
            self.ip("trainer", family, "route", "del", *_TRAINER_DEFAULTS[family].split())

    @contextlib.contextmanager
    def guard_forwards(self) -> Iterator[None]:
        def write(value: str) -> None:
            subprocess.run(
                ["nsenter", "-t", str(self.places["guard"]), "-n", "sh", "-c",
                 f"for file in {' '.join(_FORWARDING)}; do echo {value} > $file; done"], check=True,
            )  # fmt: skip

        write("1")
        try:
            yield
        finally:
            write("0")

    @contextlib.contextmanager
    def guard_drops(self, destination: str) -> Iterator[None]:
        rule = ["to", destination, "iif", "g0", "blackhole"]
        self.ip("guard", "rule", "add", *rule)
        try:
            yield
        finally:
            self.ip("guard", "rule", "del", *rule)


@contextlib.contextmanager
def networks() -> Iterator[Networks]:
    made = Networks()
    with contextlib.ExitStack() as stack:
        for name in ("guard", "trainer", "outside"):
            holder = stack.enter_context(
                subprocess.Popen(
                    ["unshare", "--net", "sh", "-c", "echo; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            )
            assert holder.stdout is not None and holder.stdout.readline() == b"\n"
            made.places[name] = holder.pid
            stack.callback(holder.terminate)
            made.ip(name, "link", "set", "lo", "up")
        made.link("guard", "g0", "trainer", "t0")
        made.link("guard", "o0", "outside", "c0")
        made.address("guard", "g0", f"{GUARD}/30", "2001:db8:1::1/64")
        made.address("trainer", "t0", f"{TRAINER}/30", "2001:db8:1::2/64")
        made.address("guard", "o0", "203.0.113.1/29", "2001:db8:2::1/64")
        outside = (f"{COORDINATOR}/29", f"{NAME_SERVER}/29", f"{COORDINATOR_6}/64", f"{NAME_SERVER_6}/64")
        made.address("outside", "c0", *outside)
        made.ip("outside", "route", "add", "default", "via", "203.0.113.1")
        made.ip("outside", "-6", "route", "add", "default", "via", "2001:db8:2::1")
        # Routers say "unreachable" for an address where nobody is; a silent one is the harder case.
        made.ip("guard", "route", "add", "blackhole", "192.0.2.0/24")
        yield made


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


@contextlib.contextmanager
def coordinator_outside(made: Networks, host: str = COORDINATOR) -> Iterator[None]:
    """A listener that stands for the coordinator; the system takes connections in without anybody's help."""
    place = (host, COORDINATOR_PORT)
    listener = made.inside("outside", lambda: socket.create_server(place, family=_family(host), backlog=64))
    with listener:
        yield


@contextlib.contextmanager
def name_server_outside(made: Networks, host: str = NAME_SERVER) -> Iterator[None]:
    """Sends every question back."""

    def bound() -> socket.socket:
        server = socket.socket(_family(host), socket.SOCK_DGRAM)
        server.bind((host, 53))
        return server

    with made.inside("outside", bound) as server:

        def answer() -> None:
            while (question := server.recvfrom(512))[0] != b"end":
                server.sendto(*question)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            ending = made.inside("outside", lambda: socket.socket(_family(host), socket.SOCK_DGRAM))
            with ending:
                ending.sendto(b"end", (host, 53))
            thread.join()
