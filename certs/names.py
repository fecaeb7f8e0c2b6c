"""SPIFFE names, the one way people, silos and coordinators are called.

    spiffe://<federation>/coordinator/<name>     spiffe://<federation>/silo/<site>     (federation CA)
    spiffe://<site>/operator/<person>    spiffe://<site>/guard/<name>    spiffe://<site>/trainer/<name>    (site CA)

The last two are the ends of the link between a guard and a trainer on another host; they mean nothing elsewhere.

Names are compared whole, never by prefix (threat T28: `silo/a` is not `silo/a2`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from fedsilo.protocol.errors import UsageError

PartyRole = Literal["silo", "coordinator"]
LinkRole = Literal["guard", "trainer"]
SiteRole = Literal["operator", "guard", "trainer"]
PeerRole = Literal["silo", "coordinator", "operator", "guard", "trainer"]
AuthorityKind = Literal["federation", "site"]

_NAME = "[a-z][a-z0-9_-]{0,62}"
_NAME_PATTERN = re.compile(_NAME, re.ASCII)
_ROLE_AND_NAME = f"(?P<role>silo|coordinator|operator|guard|trainer)/(?P<name>{_NAME})"
_ID_PATTERN = re.compile(f"spiffe://(?P<domain>{_NAME})/{_ROLE_AND_NAME}", re.ASCII)
_SHORT_PATTERN = re.compile(_ROLE_AND_NAME, re.ASCII)

# Which root may vouch for which role: a federation's root can never make a hospital's approver (B3).
AUTHORITY_OF_ROLE: dict[PeerRole, AuthorityKind] = {
    "silo": "federation",
    "coordinator": "federation",
    "operator": "site",
    "guard": "site",
    "trainer": "site",
}


@dataclass(frozen=True)
class SpiffeId:
    """`domain` is the federation for silos and coordinators, the site for operators and the ends of its link."""

    domain: str
    role: PeerRole
    name: str

    def __str__(self) -> str:
        return f"spiffe://{self.domain}/{self.role}/{self.name}"


def parse_spiffe_id(text: str) -> SpiffeId | None:
    """The parts of an identity, or None when it is not exactly one of the forms above."""
    match = _ID_PATTERN.fullmatch(text)
    return None if match is None else SpiffeId(match["domain"], cast(PeerRole, match["role"]), match["name"])


def parse_short_id(text: str, *, domain: str) -> SpiffeId:
    """Read what a person types, `silo/hospital_a`, under a given trust domain.

    Raises:
        UsageError: not `ROLE/NAME` with one of the five roles.
    """
    match = _SHORT_PATTERN.fullmatch(text)
    if match is None:
        raise UsageError(
            f"{text!r} is not an identity",
            hint="write silo/NAME, coordinator/NAME, operator/NAME, guard/NAME or trainer/NAME; names are lower-case "
            "letters, digits, _ and -",
        )
    return SpiffeId(checked_name(domain), cast(PeerRole, match["role"]), match["name"])


def checked_name(name: str) -> str:
    """`name` itself. Raises UsageError unless it is lower-case letters, digits, _ and -, starting with a letter."""
    if _NAME_PATTERN.fullmatch(name) is None:
        raise UsageError(f"{name!r} is not a name", hint="1 to 63 of a-z, 0-9, _ and -, starting with a letter")
    return name


def coordinator_dns_name(federation: str) -> str:
    """The DNS name that only coordinators of `federation` carry (threat T30).

    A silo that dials may ask TLS for this name instead of the address it dialled: a member's certificate never has it.
    DNS allows no underscore; two federations never share a root, so the replacement confuses nobody.
    """
    return f"coordinator.{checked_name(federation).replace('_', '-').strip('-')}.fedsilo.internal"
