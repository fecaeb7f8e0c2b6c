"""Addresses outside the trainer's walls that answer the guard: what makes silence inside the walls worth something.

A network that drops packets gives a probe no answer, and so does an address where nobody is. So the guard asks first
itself, and again afterwards: whoever answered it both times and stays silent towards the trainer cannot be reached
from there. For TCP this is the federation's coordinator, for UDP and names a name server of this machine; and, for
either, what the site names in `trainer.must_not_reach`. Silence over IPv4 says nothing of IPv6, nor the other way
round: each family in which the trainer's packets went out needs a control of its own. Only for a trainer that somebody
else started; the walls that the guard builds must refuse outright.

A private address (RFC 1918, 4193, 6598) may belong to somebody else, or to nobody, where the trainer is; and a network
may well drop private addresses and let the internet pass. So for a trainer on another machine it is no control unless
the site names it.

What this does not show: that other addresses are dropped too (a network that bars just these lets the rest pass
unseen); other ports of the guard's own address; an answer that takes the trainer longer than the probe waits. Nothing
of this site is sent: a connection that is closed at once, and one question for a name that does not exist.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from silo.link import host_and_port
from silo.outside import IPV4, IPV6, QUESTION, Address, address_text, family_of, name_servers

ANSWER_WAIT_SECONDS = 2.0
_EACH_MAX = 2  # of a family
# Where systemd-resolved stands in between, resolv.conf names its loopback address, and this file those behind it.
_RESOLVER_FILES = ("/etc/resolv.conf", "/run/systemd/resolve/resolv.conf")
_CONTROL_OF = {"tcp_connect": "tcp", "udp_send": "udp", "dns_lookup": "udp"}
# RFC 1918, RFC 6598 (carriers), RFC 4193, and RFC 3879 (site-local). Not `is_private`: that knows more kinds.
_PRIVATE = tuple(
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10")
)


@dataclass(frozen=True)
class Controls:
    """Attributes:
    tcp: addresses with a listener.
    udp: name servers.
    private: private addresses that would have been controls for a trainer on this machine.
    """

    tcp: tuple[Address, ...] = ()
    udp: tuple[Address, ...] = ()
    private: tuple[Address, ...] = ()

    def as_fields(self) -> dict[str, list[list[Any]]]:
        """For the `probe` message."""
        return {"tcp": [list(each) for each in self.tcp], "udp": [list(each) for each in self.udp]}

    def as_text(self) -> dict[str, list[str]]:
        """For people."""
        return {"tcp": [*map(address_text, self.tcp)], "udp": [*map(address_text, self.udp)]}

    def and_also(self, more: Controls) -> Controls:
        tcp, udp = (*self.tcp, *more.tcp), (*self.udp, *more.udp)
        left = [each for each in self.private if each not in tcp and each not in udp]
        return Controls(tuple(dict.fromkeys(tcp)), tuple(dict.fromkeys(udp)), tuple(left))

    def prove(self, probe: str, result: Mapping[str, Any]) -> bool:
        """Whether a probe's silence is proof: in every family that it was silent in, it was so at one of these."""
        return result.get("outcome") == "silent" and not self._unproven(probe, result)

    def _unproven(self, probe: str, result: Mapping[str, Any]) -> set[str]:
        """The families in which nothing is proven; both where nothing is proven at all and no address is named."""
        told = result.get("silent")
        silent = {each for each in told if isinstance(each, str)} if isinstance(told, list) else set()
        heard = {family for each in silent if (family := family_of(each))}
        known = silent.intersection(self.as_text().get(_CONTROL_OF.get(probe, ""), []))
        proven = {family for each in known if (family := family_of(each))}
        return heard - proven if proven else heard or {IPV4, IPV6}

    def why_unproven(self, silent: Mapping[str, Mapping[str, Any]]) -> str:
        """For people: what is missing for the silence of these probes to count. silent: their results."""
        families = set().union(*(self._unproven(probe, result) for probe, result in silent.items()))
        text = f"no answer, and nothing that answers the guard was tried over {' and '.join(sorted(families))}"
        if not self.private:
            return f"{text} (is the coordinator up?)"
        private = ", ".join(map(address_text, self.private))
        return f"{text} (private addresses such as {private} count only if trainer.must_not_reach names them)"

    def still_answering(self) -> Controls:
        """Those that answer this process at this moment. Takes up to ANSWER_WAIT_SECONDS for each that does not."""
        return replace(self, tcp=tuple(filter(_accepts, self.tcp)), udp=tuple(filter(_answers, self.udp)))


NO_CONTROLS = Controls()


def candidates(host: str, port: int, *, same_machine: bool) -> Controls:
    """Where the coordinator and this machine's name servers are, as addresses that mean the same to the trainer.

    Args:
        host: of the coordinator, a name or an address.
        port: of the coordinator.
        same_machine: whether the trainer runs on this machine, so that private addresses are the same ones.
    """
    found: list[Address] = []
    with contextlib.suppress(OSError):
        for family, *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if family in (socket.AF_INET, socket.AF_INET6):
                found.append((str(place[0]), int(place[1])))
    servers: list[Address] = []
    for file in _RESOLVER_FILES:
        with contextlib.suppress(OSError):
            servers += name_servers(Path(file).read_text(encoding="utf-8", errors="replace"))
    tcp, udp = _elsewhere(found), _elsewhere(servers)
    if same_machine:
        return Controls(_few(tcp), _few(udp))
    return Controls(
        _few(each for each in tcp if not _is_private(each)),
        _few(each for each in udp if not _is_private(each)),
        _few(each for each in (*tcp, *udp) if _is_private(each)),
    )


def named(texts: Iterable[str]) -> Controls:
    """What `trainer.must_not_reach` lists: `tcp:ADDRESS:PORT`, `udp:ADDRESS:PORT` (a name server)."""
    found: dict[str, list[Address]] = {"tcp": [], "udp": []}
    for text in texts:
        kind, _, place = text.partition(":")
        host, port = host_and_port(place)
        found[kind].append((str(_plain(host)), port))
    return Controls(tuple(found["tcp"]), tuple(found["udp"]))


def _elsewhere(addresses: list[Address]) -> list[Address]:
    """Without those that are this machine's own, or of one wire."""
    kept: list[Address] = []
    for address in addresses:
        with contextlib.suppress(ValueError):
            place = _plain(address[0])
            if not (place.is_loopback or place.is_unspecified or place.is_link_local):
                kept.append((str(place), address[1]))
    return list(dict.fromkeys(kept))


def _few(addresses: Iterable[Address]) -> tuple[Address, ...]:
    """The first ones of each family."""
    by_family: dict[bool, list[Address]] = {False: [], True: []}
    for address in addresses:
        by_family[":" in address[0]].append(address)
    return (*by_family[False][:_EACH_MAX], *by_family[True][:_EACH_MAX])


def _is_private(address: Address) -> bool:
    place = _plain(address[0])
    return any(place.version == network.version and place in network for network in _PRIVATE)


def _plain(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """`::ffff:10.0.0.1` is the IPv4 address. Raises ValueError."""
    place = ipaddress.ip_address(host)
    return getattr(place, "ipv4_mapped", None) or place


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
            connection.send(QUESTION)
            connection.recv(512)
    except OSError:
        return False
    return True
