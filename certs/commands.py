"""Control commands signed by a person of the site: reading a socket is not the right to change anything (design 2).

The signature (ECDSA P-256, SHA-256, the key of the operator's certificate) covers site, name, arguments, request id
and expiry. An approval's arguments hold the digests of what was shown, so approve-then-swap does not verify and an old
approval expires (threat T36). Replays are the desk's work (`fedsilo.edge.control_desk`): same request id, same reply.
Pure: time and keys come in as arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from certs.identity import operator_identity
from certs.roles import Role, Roles
from fedsilo.treaty.errors import NotAllowedError, UsageError
from fedsilo.treaty.wire._generated import control_pb2
from fedsilo.treaty.wire.codec import canonical_json, command_signing_bytes, sha256_hex

# A command is used at once. One that is valid for longer would lie around as a blank cheque.
COMMAND_LIFETIME_MAX = timedelta(hours=1)
COMMAND_LIFETIME_DEFAULT = timedelta(minutes=5)
ARGUMENTS_BYTES_MAX = 1 << 20

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{8,64}", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class VerifiedCommand:
    """A command somebody really gave. Whether the person may give it is in `roles`; the desk asks.

    `digest` identifies what is to be done and by which certificate: not the signature bytes, since ECDSA signatures of
    the same command differ each time, and not the expiry, so that a request may be asked again with a later one.
    """

    person: str
    certificate_fingerprint: str
    name: str
    arguments: Mapping[str, Any]
    request_id: str
    expires: datetime
    roles: frozenset[Role]
    digest: str


def sign_command(
    *,
    site: str,
    name: str,
    arguments: Mapping[str, Any],
    request_id: str,
    expires: datetime,
    operator_certificate_pem: bytes,
    operator_key: ec.EllipticCurvePrivateKey,
) -> control_pb2.Command:
    """Make a command.

    Args:
        site: the site whose daemon shall obey, so a command for one is nothing to another.
        name: such as "release.approve".
        arguments: JSON-able; digests of what was shown belong here.
        request_id: 8 to 64 of letters, digits, _ and -; the same again is the same request.
        expires: timezone-aware, whole seconds count, at most an hour ahead.
        operator_certificate_pem: the person's certificate under the site CA.
        operator_key: its key.

    Raises:
        UsageError: the request id is malformed, the expiry has no zone, or the arguments are not JSON.
    """
    if _REQUEST_ID.fullmatch(request_id) is None:
        raise UsageError(f"request id {request_id!r} is not 8 to 64 letters, digits, _ and -")
    if expires.tzinfo is None:
        raise UsageError("the expiry of a command must carry its time zone")
    try:
        arguments_json = canonical_json(dict(arguments)).decode("utf-8")
    except (ValueError, TypeError) as error:
        raise UsageError(f"the arguments of {name} are not JSON: {error}") from error
    expires_text = expires.astimezone(UTC).strftime(_TIME_FORMAT)
    signed = command_signing_bytes(
        site=site, name=name, arguments_json=arguments_json, request_id=request_id, expires=expires_text
    )
    return control_pb2.Command(
        name=name,
        arguments_json=arguments_json,
        request_id=request_id,
        expires=expires_text,
        certificate_pem=operator_certificate_pem,
        signature=operator_key.sign(signed, ec.ECDSA(hashes.SHA256())),
    )


def verify_command(
    command: control_pb2.Command,
    *,
    site: str,
    site_ca_pem: bytes,
    roles: Roles,
    now: datetime,
    lifetime_max: timedelta = COMMAND_LIFETIME_MAX,
) -> VerifiedCommand:
    """Who gave this command, and that nobody changed it.

    Args:
        command: as received.
        site: this site.
        site_ca_pem: its CA; no other root counts, the federation's least of all (B3).
        roles: this site's people.
        now: timezone-aware; the caller never lets it run backwards (T41).
        lifetime_max: how far ahead its expiry may be; longer only for what others have to sign too (proposals).

    Raises:
        NotAllowedError: names the cause.
    """
    operator = operator_identity(command.certificate_pem, site_ca_pem, now)
    if operator.site != site:
        raise NotAllowedError(f"{operator.spiffe_id} is a person of site {operator.site!r}, not of {site!r}")
    signed = command_signing_bytes(
        site=site,
        name=command.name,
        arguments_json=command.arguments_json,
        request_id=command.request_id,
        expires=command.expires,
    )
    try:
        operator.public_key.verify(command.signature, signed, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise NotAllowedError(
            f"the signature of {operator.person} does not cover this command: it was changed, made for another site "
            "than this one, or signed with another key",
            hint="give the command again",
        ) from error
    expires = _read_expiry(command.expires)
    if now >= expires:
        raise NotAllowedError(
            f"the command expired at {command.expires}, now is {now:{_TIME_FORMAT}}", hint="give the command again"
        )
    if expires - now > lifetime_max:
        raise NotAllowedError(
            f"the command is valid until {command.expires}, more than {lifetime_max} ahead",
            hint="compare the clocks, and sign with a shorter life",
        )
    if _REQUEST_ID.fullmatch(command.request_id) is None:
        raise NotAllowedError("the request id is not 8 to 64 letters, digits, _ and -")
    asked = command_signing_bytes(
        site=site, name=command.name, arguments_json=command.arguments_json, request_id=command.request_id, expires=""
    )
    return VerifiedCommand(
        person=operator.person,
        certificate_fingerprint=operator.fingerprint,
        name=command.name,
        arguments=_read_arguments(command.arguments_json),
        request_id=command.request_id,
        expires=expires,
        roles=roles.of(operator.person),
        digest=sha256_hex(asked + operator.fingerprint.encode("ascii")),
    )


def _read_expiry(text: str) -> datetime:
    if _TIME.fullmatch(text) is None:
        raise NotAllowedError("the expiry of the command is not YYYY-MM-DDTHH:MM:SSZ")
    try:
        return datetime.strptime(text, _TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError as error:
        raise NotAllowedError("the expiry of the command is not a time") from error


def _read_arguments(text: str) -> dict[str, Any]:
    """Arguments in canonical form only, so that two readers cannot understand the same signature differently."""
    if len(text) > ARGUMENTS_BYTES_MAX:
        raise NotAllowedError(f"the arguments are longer than {ARGUMENTS_BYTES_MAX} bytes")
    try:
        value = json.loads(text)
        canonical = canonical_json(value).decode("utf-8")
    except (ValueError, TypeError, RecursionError) as error:
        raise NotAllowedError("the arguments of the command are not JSON") from error
    if not isinstance(value, dict) or canonical != text:
        raise NotAllowedError("the arguments of the command are not a canonical JSON object")
    return value
