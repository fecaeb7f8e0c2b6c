"""What people may see of a daemon's files: certificates as they are on the disk, and every setting with the line that
it comes from. Only names, places and digests; of a key or a secret only where its file is, and no file of one is
opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from certs.encoding import describe_certificate
from certs.names import parse_spiffe_id
from fedsilo.control.answers import CertificateRow, SettingRow, filled
from fedsilo.files.durable import read_regular
from fedsilo.protocol import strict_yaml
from fedsilo.protocol.errors import FedSiloError

CERTIFICATE_BYTES_MAX = 1 << 20
_SOURCE = "source"  # where a configuration was read from is no key of it


def certificate_file(whose: str, path: Path, now_seconds: float, running: str = "") -> CertificateRow:
    """Return one certificate as its file is now.

    Args:
        whose: in words.
        path: of the file; of a file that cannot be read the row has a fault, and nothing else.
        now_seconds: UTC.
        running: fingerprint of the one that the daemon uses; empty where the daemon reads the file each time.
    """
    try:
        pem = read_regular(path, bytes_max=CERTIFICATE_BYTES_MAX)
    except FedSiloError as error:
        return _unread(whose, str(path), error)
    return certificate_row(whose, pem, now_seconds, file=str(path), running=running)


def certificate_row(whose: str, pem: bytes, now_seconds: float, *, file: str = "", running: str = "") -> CertificateRow:
    """Return the row of a certificate that somebody showed. pem: it, and never a key."""
    try:
        found = describe_certificate(pem)
    except FedSiloError as error:
        return _unread(whose, file, error)
    until = datetime.strptime(found["not_after"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    names = tuple(name.partition(":")[2] for name in found["names"])
    same = ("subject", "issuer", "fingerprint", "not_before", "not_after")
    return filled(
        CertificateRow,
        **{name: found[name] for name in same},
        role="CA" if found["ca"] else _role_of(names),
        names=names,
        days_left=int((until.timestamp() - now_seconds) // 86_400),
        pinned=bool(found["ca"]),
        whose=whose,
        file=file,
        in_use=not running or running == found["fingerprint"],
    )


def _unread(whose: str, file: str, error: FedSiloError) -> CertificateRow:
    return filled(CertificateRow, whose=whose, file=file, fault=error.message, pinned=False, in_use=True)


def _role_of(names: tuple[str, ...]) -> str:
    return next((found.role for name in names if (found := parse_spiffe_id(name)) is not None), "")


def settings_of(config: BaseModel, source: Path) -> list[SettingRow]:
    """Return every key of a configuration as the daemon runs with it. A key file or a secret is named by its path.

    Args:
        config: as it was read.
        source: the file that it was read from.
    """
    try:
        lines = strict_yaml.load(read_regular(source), source.name).lines
    except FedSiloError:  # removed or rewritten since it was read
        lines = {}
    return list(_settings(config, (), lines, source.name))


def _settings(block: BaseModel, path: tuple[str, ...], lines: Mapping[Any, int], source: str) -> Iterator[SettingRow]:
    for name in type(block).model_fields:
        if not path and name == _SOURCE:
            continue
        # a value that may hold a password is shown as its block shows it
        value, here = getattr(block, f"shown_{name}", getattr(block, name)), (*path, name)
        if isinstance(value, BaseModel):
            yield from _settings(value, here, lines, source)
            continue
        origin = f"{source}:{lines[here]}" if here in lines else "default"
        yield SettingRow(key=".".join(here), value=_plain(value), origin=origin)


def _plain(value: object) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float) else str(value)
