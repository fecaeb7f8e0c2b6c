"""Signatures of a site's people that lie in files, each one control command under the site CA (threats T34, T36).

Files are only carried: whoever reads them verifies each signature anew, against the people of today, with a time that
never runs backwards (T41). So nothing here needs to be kept from being copied, and a file that anybody changed counts
for nothing.
Does not stop: as many people as are asked for, who agree with each other. The log then names them.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from certs.commands import VerifiedCommand, verify_command
from certs.roles import ACTIONS, Roles, may
from fedsilo.files.durable import FOLDER_MODE, write_durably
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.errors import (
    FedSiloError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UsageError,
)
from fedsilo.protocol.strict_yaml import BYTES_MAX

PROPOSALS = "proposals"  # folder beside the site's policy
PROPOSE, APPROVE = "policy.propose", "policy.approve"
HOURS_MAX = 24 * 366
# Where the policy last in force cannot be read by this version: its persons and hours are not known.
PERSONS_UNKNOWN, HOURS_UNKNOWN = 2, 24
FILE_BYTES_MAX = 6 * BYTES_MAX  # three files as JSON strings, and a certificate


@dataclass(frozen=True)
class People:
    """The people who may sign at this site, and the current time.

    Attributes:
        now: timezone-aware; never earlier than a time that was seen before.
        hours: `approvals.expiry_hours` of the policy in force.
        federation: that the site's guard is in, and that an order names. Only a proposal and its approvals may name
            none, as an earlier version signed them: their digests are of policies of one federation, and fit no other.
    """

    site: str
    site_ca_pem: bytes
    roles: Roles
    now: datetime
    hours: int
    federation: str

    def verify(self, command: control_pb2.Command, name: str, action: str) -> VerifiedCommand:
        """Raises NotAllowedError: not signed by a person of this site, expired, or by one who may not."""
        as_before = not command.federation and name in (PROPOSE, APPROVE)
        verified = verify_command(
            command,
            federation="" if as_before else self.federation,
            site=self.site,
            site_ca_pem=self.site_ca_pem,
            roles=self.roles,
            now=self.now,
            lifetime_max=timedelta(hours=min(self.hours, HOURS_MAX)),
        )
        if verified.name != name:
            raise NotAllowedError(f"{verified.person} signed {verified.name!r}, not {name!r}")
        if not may(verified.roles, action):
            raise NotAllowedError(
                f"{verified.person} may not {action} at {self.site}",
                hint=f"it takes {' or '.join(sorted(ACTIONS[action]))}",
            )
        return verified


def signed_by(
    files: Iterable[Path], check: Callable[[control_pb2.Command], VerifiedCommand]
) -> tuple[dict[str, VerifiedCommand], list[str]]:
    """Read signed approvals: what each person signed, by name, and why others do not count.

    Args:
        files: one signed command each.
        check: returns the verified command; a FedSiloError says why it does not count.
    """
    given: dict[str, VerifiedCommand] = {}
    refused: list[str] = []
    for file in files:
        try:
            command = check(read_signed(file))
            given[command.person] = command
        except FedSiloError as error:
            refused.append(f"{file.name}: {error.message}")
    return dict(sorted(given.items())), refused


def keep_signed(place: Path, signed: control_pb2.Command, beside: Mapping[str, Any] | None = None) -> Path:
    """Keep one person's signature in a file, beside the texts that it is about. Raises OperationError."""
    try:
        place.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(f"cannot create {place.parent}: {error.strerror}") from error
    packed = base64.b64encode(signed.SerializeToString(deterministic=True)).decode("ascii")
    content = {**(beside or {}), "command": packed}
    write_durably(place, json.dumps(content, indent=1).encode() + b"\n")
    return place


def read_signed(path: Path) -> control_pb2.Command:
    """Return what `keep_signed` kept of a signature alone, unverified. Raises as `read_signed_beside`."""
    return read_signed_beside(path, ())[0]


def read_signed_beside(path: Path, names: Sequence[str]) -> tuple[control_pb2.Command, dict[str, Any]]:
    """Return what `keep_signed` kept, unverified: the signed command, and what lies beside it by these names.

    Raises:
        NotFoundError, UsageError: no such file, or another.
    """
    if not path.is_file():
        raise NotFoundError(f"{path}: there is no such file", hint="fedsilo policy propose NEW.yaml")
    if path.stat().st_size > FILE_BYTES_MAX:
        raise UsageError(f"{path} has more than {FILE_BYTES_MAX} bytes")
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON") from error
    if not isinstance(value, dict) or value.keys() != {"command", *names}:
        raise UsageError(f"{path} does not hold exactly {', '.join(sorted({'command', *names}))}")
    try:
        packed = base64.b64decode(str(value.pop("command")), validate=True)
        return control_pb2.Command.FromString(packed), value
    except (binascii.Error, ValueError, DecodeError) as error:
        raise UsageError(f"{path}: command is no signed command") from error
