"""This silo's own certificate in its audit log: in use, replaced by another, soon to expire (threat model 5).

What the log holds already is read from the log itself, so a start that changes nothing adds nothing, and no other file
can disagree. A certificate that was renewed on the disk counts from the next start on, as everywhere in the guard.

Does not stop: a key that somebody copied; only its certificate is compared. The guard looks once an hour, so one of
less than three hours may expire without a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from certs.encoding import read_one_certificate, warn_before
from certs.identity import Identity
from fedsilo.audit.record import parse_record
from fedsilo.audit.segments import read_lines

_log = logging.getLogger("fedsilo.silo")

_MARK = b'"event":"key.'  # as canonical JSON spells it; so only few lines of a long log are parsed


class OwnCertificate:
    """Args:
    identity: in use from this start on.
    log: folder of this silo's audit log.

    Raises:
        FedSiloError: the log cannot be read.
    """

    def __init__(self, identity: Identity, log: Path) -> None:
        self._detail = {
            "identity": identity.spiffe_id,
            "fingerprint": identity.peer.fingerprint,
            "signing_key": identity.signing_key.public_key().public_bytes_raw().hex(),
            "not_after": f"{identity.not_after.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
        }
        certificate = read_one_certificate(identity.certificate_pem, what="this silo's certificate")
        self._warn_at = identity.not_after - warn_before(certificate)
        self._last: dict[str, Any] | None = None  # what the newest record of a certificate says of it
        self._warned = False
        for record in (parse_record(line) for _, line in read_lines(log) if _MARK in line):
            if record["event"] in ("key.enrol", "key.renew"):
                self._last = record["detail"]
            elif record["event"] == "key.expire_warn":
                self._warned |= record["detail"].get("fingerprint") == self._detail["fingerprint"]

    def look(self, record: Callable[..., int], now_seconds: float) -> None:
        """Record what the log does not say yet.

        Args:
            record: appends to the audit log.
            now_seconds: UTC.

        Raises:
            OperationError: it cannot be recorded.
        """
        if self._last != self._detail:
            record("key.enrol" if self._last is None else "key.renew", detail=self._detail)
            self._last = self._detail
        if not self._warned and datetime.fromtimestamp(now_seconds, UTC) > self._warn_at:
            until = self._detail["not_after"]
            record("key.expire_warn", detail=self._detail)
            self._warned = True
            _log.warning("this silo's certificate expires at %s; renew it (fedsilo certs renew)", until)
