"""Addresses outside the trainer's walls that answer the guard: what makes silence inside the walls worth something.

A network that drops packets gives a probe no answer, and so does an address where nobody is. So the guard asks first
itself, and again afterwards: whoever answered it both times and stays silent towards the trainer cannot be reached
from there. For TCP this is the federation's coordinator, for UDP and names a name server of this machine. Only for a
trainer that somebody else started; the walls that the guard builds must refuse outright.

What this does not show: that other addresses are dropped too (a network that bars just these two lets the rest pass
unseen); other ports of the guard's own address; an answer that takes the trainer longer than the probe waits. Nothing
of this site is sent: a connection that is closed at once, and one question for a name that does not exist.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Address = tuple[str, int]
ANSWER_WAIT_SECONDS = 2.0
_EACH_MAX = 2
# Where systemd-resolved stands in between, resolv.conf names its loopback address, and this file those behind it.
_RESOLVER_FILES = ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")
# One question (RFC 1035, 4.1): the address of fedsilo-probe.invalid, a name that never exists (RFC 2606).
_QUESTION = b"\x0f\x5d\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x0dfedsilo-probe\x07invalid\x00\x00\x01\x00\x01"
_CONTROL_OF = {"tcp_connect": "tcp", "udp_send": "udp", "dns_lookup": "udp"}


@dataclass(frozen=True)
class Controls:
    """Attributes:
    tcp: addresses with a listener.
    udp: name servers.
    """

    tcp: tuple[Address, ...] = ()
    udp: tuple[Address, ...] = ()

    def as_fields(self) -> dict[str, list[list[Any]]]:
        """For the `probe` message."""
        return {"tcp": [list(each) for each in self.tcp], "udp": [list(each) for each in self.udp]}

    def as_text(self) -> dict[str, list[str]]:
        """For people."""
        return {
            "tcp": [f"{host}:{port}" for host, port in self.tcp],
            "udp": [f"{host}:{port}" for host, port in self.udp],
        }

    def prove(self, probe: str, result: Mapping[str, Any]) -> bool:
        """Whether a probe's silence is proof: it was silent at one of these."""
        silent = result.get("silent")
        known = self.as_text().get(_CONTROL_OF.get(probe, ""), [])
        return result.get("outcome") == "silent" and isinstance(silent, list) and any(each in silent for each in known)

    def still_answering(self) -> Controls:
        """Those that answer this process at this moment. Takes up to ANSWER_WAIT_SECONDS for each that does not."""
        return Controls(tuple(filter(_accepts, self.tcp)), tuple(filter(_answers, self.udp)))


NO_CONTROLS = Controls()


def candidates(host: str, port: int) -> Controls:
    """Where the coordinator and this machine's name servers are, as addresses that mean the same on another machine.

    Args:
        host: of the coordinator, a name or an address.
        port: of the coordinator.
    """
    found: list[Address] = []
    with contextlib.suppress(OSError):
        for family, *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if family in (socket.AF_INET, socket.AF_INET6):
                found.append((str(place[0]), int(place[1])))
    servers = [address for file in _RESOLVER_FILES for address in _name_servers(Path(file))]
    return Controls(*(_elsewhere(each) for each in (found, servers)))


def _name_servers(file: Path) -> list[Address]:
    """Those that a resolv.conf(5) names."""
    try:
        lines = [line.split() for line in file.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return []
    return [(words[1], 53) for words in lines if len(words) > 1 and words[0] == "nameserver"]


def _elsewhere(addresses: list[Address]) -> tuple[Address, ...]:
    kept: list[Address] = []
    for address in dict.fromkeys(addresses):
        with contextlib.suppress(ValueError):
            place = ipaddress.ip_address(address[0])
            if not (place.is_loopback or place.is_unspecified or place.is_link_local):
                kept.append(address)
    return tuple(kept[:_EACH_MAX])


def _accepts(address: Address) -> bool:
    try:
        socket.create_connection(address, ANSWER_WAIT_SECONDS).close()
    except OSError:
        return False
    return True


def _answers(address: Address) -> bool:
    try:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as connection:
            connection.settimeout(ANSWER_WAIT_SECONDS)
            connection.connect(address)
            connection.send(_QUESTION)
            connection.recv(512)
    except OSError:
        return False
    return True
