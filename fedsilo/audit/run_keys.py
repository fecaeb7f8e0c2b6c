"""Keys to check a run record's signatures with, from elsewhere than the coordinator's word (threat model 7, T20).

Does not show that a key was still its silo's when it signed: the times of a run are the coordinator's word too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from certs.encoding import read_one_certificate, read_root
from certs.identity import peer_identity
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.transcripts import Keyring
from fedsilo.files.identity_files import read_public
from fedsilo.protocol.errors import NotAllowedError
from fedsilo.protocol.transcript_checks import Keys, KnownKey


def silo_keys(record: Mapping[str, Any], logs: Sequence[Path], ca: Path | None) -> tuple[Keys, list[str]]:
    """What is known of parties' keys, by SPIFFE id, and what is wrong with where it is from.

    Args:
        record: of the run; it carries the certificates of the silos that signed.
        logs: folders of audit logs.
        ca: the federation CA, under which the certificates must be.

    Raises:
        NotFoundError: there is no such file.
        NotAllowedError: `ca` is no CA.
    """
    results = verify_logs(list(logs))
    ring = Keyring(logs, [result["verified"] for result in results])
    problems = [f"{one['path']} does not verify: {problem}" for one in results for problem in one["problems"]]
    problems += [f"{log}: {problem}" for log, told in zip(logs, ring.problems, strict=True) for problem in told]
    keys: dict[str, KnownKey] = dict(ring.known_to(None))
    if ca is None:
        return keys, problems
    trust_root = read_public(ca)
    read_root(trust_root)
    certificates = record.get("certificates", ())
    for number, pem in enumerate(certificates if isinstance(certificates, list) else ()):
        try:
            party, key = _certified(str(pem).encode(), trust_root, record)
        except (NotAllowedError, ValueError) as error:
            problems.append(f"certificate {number + 1} of the record: {error}")
            continue
        if party in keys and keys[party].raw != key:
            problems.append(f"certificate {number + 1} of the record: another key of {party} is known")
        keys.setdefault(party, KnownKey(key))
    return keys, problems


def _certified(pem: bytes, trust_root: bytes, record: Mapping[str, Any]) -> tuple[str, bytes]:
    """Whose key a silo's certificate certifies, judged at a moment of the run at which it was valid, if there is one.

    Raises:
        NotAllowedError: there is none, or it is no certificate of a silo under this CA.
        ValueError: the record has no times.
    """
    begins = read_one_certificate(pem, what="the certificate").not_valid_before_utc
    started = _moment(record.get("started_at") or record.get("submitted_at"))
    ended = _moment(record["ended_at"]) if record.get("ended_at") else datetime.max.replace(tzinfo=UTC)
    peer = peer_identity(pem, trust_root, min(max(started, begins), ended), role="silo")
    return peer.spiffe_id, peer.signing_public_key.public_bytes_raw()


def _moment(text: Any) -> datetime:
    moment = datetime.fromisoformat(str(text))
    if moment.tzinfo is None:
        raise ValueError(f"{moment} is no time with a zone")
    return moment
