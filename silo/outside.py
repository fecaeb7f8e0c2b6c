"""How both ends of the link name and ask somebody outside the trainer's walls: the probes (`silo.trainer.walls`) and
the guard, which asks the same first (`silo.guard.isolation_controls`). Standard library only, and no I/O.
"""

from __future__ import annotations

Address = tuple[str, int]
NAME = "fedsilo-probe.invalid"  # never exists (RFC 2606)
NAME_SERVER_PORT = 53
IPV4, IPV6 = "IPv4", "IPv6"
# One question (RFC 1035, 4.1): number, flags (recursion wished), one question, no records; then name, A, Internet.
QUESTION = (
    b"\x0f\x5d\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00"
    + b"".join(bytes([len(label)]) + label.encode() for label in NAME.split("."))
    + b"\x00\x00\x01\x00\x01"
)


def name_servers(text: str) -> list[Address]:
    """Those that a resolv.conf(5) names; without those of one interface only (`fe80::1%eth0`)."""
    lines = map(str.split, text.splitlines())
    return [
        (words[1], NAME_SERVER_PORT)
        for words in lines
        if len(words) > 1 and words[0] == "nameserver" and "%" not in words[1]
    ]


def address_text(address: Address) -> str:
    """HOST:PORT, or [HOST]:PORT for IPv6."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def family_of(text: str) -> str | None:
    """IPV4 or IPV6 of what `address_text` wrote; None for any other text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        return None
    return IPV6 if host.startswith("[") else IPV4
