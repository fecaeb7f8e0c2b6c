"""Control commands signed by a person of the site: reading a socket is not the right to change anything.

The signature (ECDSA P-256, SHA-256, the key of the operator's certificate) covers federation, site, name, arguments,
request id and expiry. An approval's arguments hold the digests of what was shown, so approve-then-swap does not verify
and an old approval expires (threat T36). Replays are the work of `fedsilo.control.server`: same request id, same reply.

What is signed is kept with the audit record of the order, and a log is handed to others. So what may not be in a log
(a note, a path, the digest of a text that can be guessed: threat T40) travels beside the order with a random salt, and
the order signs the digest of that.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from certs.encoding import read_one_certificate, read_root
from certs.identity import site_member
from certs.roles import Role, Roles
from fedsilo.protocol._generated import control_pb2
from fedsilo.protocol.clocks import COMMAND_TIME, in_words
from fedsilo.protocol.codec import canonical_json, command_signing_bytes, sha256_hex
from fedsilo.protocol.errors import NotAllowedError, UsageError

# A command is used at once. One that is valid for longer would lie around as a blank cheque.
COMMAND_LIFETIME_MAX = timedelta(hours=1)
ARGUMENTS_BYTES_MAX = 1 << 20

# Arguments that travel beside an order, by command: what its record in the audit log may not hold.
BESIDE: Mapping[str, frozenset[str]] = {
    "approvals.approve": frozenset({"digest"}),
    "approvals.reject": frozenset({"digest", "reason"}),
    "approvals.defer": frozenset({"digest"}),
    "run.submit": frozenset({"text", "source"}),
    "transfer.export": frozenset({"path"}),
    "transfer.import": frozenset({"path"}),
}
SEALED, SALT = "sealed", "salt"  # the argument that has the digest of what is beside, and the salt in there

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{8,64}", re.ASCII)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class VerifiedCommand:
    """A command somebody really gave. Whether the person may give it is in `roles`; the control server asks.

    `digest` identifies what is to be done and by which certificate: not the signature bytes, since ECDSA signatures of
    the same command differ each time, not the expiry, so that a request may be asked again with a later one, and not
    the salt of what travels beside it, for the same reason.

    Attributes:
        arguments: those that are signed, and those that travelled beside them.
        order: what the audit log keeps of it, so that the signature can be checked later: an item of a record's
            `orders`.
        sealed: what travelled beside it, as its digest was signed; empty where nothing did.
    """

    person: str
    certificate_fingerprint: str
    name: str
    arguments: Mapping[str, Any]
    request_id: str
    expires: datetime
    roles: frozenset[Role]
    digest: str
    order: Mapping[str, str] = field(default_factory=dict)
    sealed: bytes = b""


def sign_command(
    *,
    federation: str = "",
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
        federation: whose daemon shall obey, so a command for one is nothing to another; a site may be in several.
        site: the site whose daemon shall obey, likewise.
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
    beside = {key: value for key, value in arguments.items() if key in BESIDE.get(name, ())}
    try:
        sealed = canonical_json({**beside, SALT: secrets.token_hex(16)}) if beside else b""
        signed_ones = {key: value for key, value in arguments.items() if key not in beside}
        signed_ones |= {SEALED: sha256_hex(sealed)} if beside else {}
        arguments_json = canonical_json(signed_ones).decode("utf-8")
    except (ValueError, TypeError) as error:
        raise UsageError(f"the arguments of {name} are not JSON: {error}") from error
    expires_text = expires.astimezone(UTC).strftime(_TIME_FORMAT)
    signed = command_signing_bytes(
        site=site,
        name=name,
        arguments_json=arguments_json,
        request_id=request_id,
        expires=expires_text,
        federation=federation,
    )
    return control_pb2.Command(
        name=name,
        arguments_json=arguments_json,
        request_id=request_id,
        expires=expires_text,
        certificate_pem=operator_certificate_pem,
        signature=operator_key.sign(signed, ec.ECDSA(hashes.SHA256())),
        sealed=sealed,
        federation=federation,
    )


def verify_command(
    command: control_pb2.Command,
    *,
    federation: str = "",
    site: str,
    site_ca_pem: bytes,
    roles: Roles,
    now: datetime,
    lifetime_max: timedelta = COMMAND_LIFETIME_MAX,
) -> VerifiedCommand:
    """Check that nobody changed this command, and return who gave it.

    Args:
        command: as received.
        federation: this daemon's; empty where the command shall name none.
        site: this site.
        site_ca_pem: its CA; no other root counts, the federation's least of all (B3).
        roles: this site's people.
        now: timezone-aware; the caller never lets it run backwards (T41).
        lifetime_max: how far ahead its expiry may be; longer only for what others have to sign too (proposals).

    Raises:
        NotAllowedError: names the cause.
    """
    operator = site_member(command.certificate_pem, site_ca_pem, now, role="operator")
    if operator.site != site:
        raise NotAllowedError(f"{operator.spiffe_id} is a person of site {operator.site!r}, not of {site!r}")
    signed = _signing_bytes(command, site, command.arguments_json, command.expires)
    try:
        operator.public_key.verify(command.signature, signed, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature as error:
        raise NotAllowedError(
            f"the signature of {operator.name} does not cover this command: it was changed, made for another site "
            "than this one, or signed with another key",
            hint="give the command again",
        ) from error
    if command.federation != federation:
        for_whom = f"for federation {command.federation[:64]!r}" if command.federation else "for no federation"
        raise NotAllowedError(
            f"the command is {for_whom}, and this daemon of {site} is in {federation or 'none'!r}",
            hint="give it to that federation's daemon: its --config or --socket; with a program of this version",
        )
    expires = _read_expiry(command.expires)
    if now >= expires:
        late = in_words((now - expires).total_seconds())
        raise NotAllowedError(
            f"the command expired at {command.expires}, {late} before now by this daemon's clock, {now:{_TIME_FORMAT}}",
            hint=f"unless it waited for so long, the clock of the machine that signed it is at least {late} behind",
            code=COMMAND_TIME,
        )
    if expires - now > lifetime_max:
        ahead = (expires - now - lifetime_max).total_seconds()
        raise NotAllowedError(
            f"the command is valid until {command.expires}, more than {lifetime_max} ahead",
            hint=f"the clock of the machine that signed it is at least {in_words(ahead)} ahead of this daemon's, "
            f"{now:{_TIME_FORMAT}}; or sign with a shorter life",
            code=COMMAND_TIME,
        )
    if _REQUEST_ID.fullmatch(command.request_id) is None:
        raise NotAllowedError("the request id is not 8 to 64 letters, digits, _ and -")
    arguments = _arguments_of(command)
    certificate = read_one_certificate(command.certificate_pem, what="the operator certificate")
    what = _signing_bytes(command, site, canonical_json(arguments).decode(), expires="")
    return VerifiedCommand(
        person=operator.name,
        certificate_fingerprint=operator.fingerprint,
        name=command.name,
        arguments=arguments,
        request_id=command.request_id,
        expires=expires,
        roles=roles.of(operator.name),
        digest=sha256_hex(what + operator.fingerprint.encode("ascii")),
        order={
            "signed": base64.b64encode(signed).decode(),
            "signature": base64.b64encode(command.signature).decode(),
            "certificate": base64.b64encode(certificate.public_bytes(Encoding.DER)).decode(),
            "site_ca": read_root(site_ca_pem).fingerprint,
            **({"roles": roles.digest} if roles.digest else {}),
        },
        sealed=command.sealed,
    )


def _signing_bytes(command: control_pb2.Command, site: str, arguments_json: str, expires: str) -> bytes:
    return command_signing_bytes(
        site=site,
        name=command.name,
        arguments_json=arguments_json,
        request_id=command.request_id,
        expires=expires,
        federation=command.federation,
    )


def _read_expiry(text: str) -> datetime:
    if _TIME.fullmatch(text) is None:
        raise NotAllowedError("the expiry of the command is not YYYY-MM-DDTHH:MM:SSZ")
    try:
        return datetime.strptime(text, _TIME_FORMAT).replace(tzinfo=UTC)
    except ValueError as error:
        raise NotAllowedError("the expiry of the command is not a time") from error


def _arguments_of(command: control_pb2.Command) -> dict[str, Any]:
    """Signed arguments, and those beside them. Raises NotAllowedError: one stands where it may not, or was changed."""
    arguments, may_be = _read_arguments(command.arguments_json, "arguments"), BESIDE.get(command.name, frozenset())
    if inside := sorted(may_be & arguments.keys()):
        raise NotAllowedError(
            f"{', '.join(inside)} of {command.name} may not be in what is signed, since the audit log keeps that",
            hint="give the command with a program of this version",
        )
    digest = arguments.pop(SEALED, "")
    if not digest and not command.sealed:
        return arguments
    if digest != sha256_hex(command.sealed):
        raise NotAllowedError("what came beside the command is not what its signer signed", hint="give it again")
    beside = _read_arguments(command.sealed.decode("utf-8", "replace"), "arguments beside the command")
    if beside.keys() - may_be != {SALT}:
        raise NotAllowedError(f"beside {command.name} there is something else than {', '.join(sorted(may_be)) or 'no'}")
    del beside[SALT]
    return {**arguments, **beside}


def _read_arguments(text: str, what: str) -> dict[str, Any]:
    """Arguments in canonical form only, so that two readers cannot understand the same signature differently."""
    if len(text) > ARGUMENTS_BYTES_MAX:
        raise NotAllowedError(f"the {what} are longer than {ARGUMENTS_BYTES_MAX} bytes")
    try:
        value = json.loads(text)
        canonical = canonical_json(value).decode("utf-8")
    except (ValueError, TypeError, RecursionError) as error:
        raise NotAllowedError(f"the {what} are not JSON") from error
    if not isinstance(value, dict) or canonical != text:
        raise NotAllowedError(f"the {what} are not a canonical JSON object")
    return value
