"""The files that coordinator.yaml names, in a backup: what a second machine needs to start, and private keys only where
somebody asked for them.

    FOLDER/files/    coordinator.yaml, charter, LoRA schema, public set, certificates, roles, at their places below the
                     folder of coordinator.yaml; what lies elsewhere is left out, and named
    FOLDER/keys/     the private keys, and a coordinator.yaml whose database URL has a password

Without `keys/` nobody who gets a backup can speak as the coordinator (T42).
What this does not stop: who has the backup has all that silos sent, and the keys, where they are in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.config import CoordinatorConfig
from coordinator.database_url import shown_url
from fedsilo.files.durable import make_private_directory, read_private, read_regular, write_private
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import ConflictError, VerificationError

FILES, KEYS = "files", "keys"


def public_files(config: CoordinatorConfig) -> list[Path]:
    """All that is no secret."""
    files = config.identity
    return [
        *([config.source] if not _has_password(config) else []),
        config.charter, config.expected.lora_schema, config.public.path, files.certificate, files.federation_ca,
        files.site_ca, files.operators, files.signing_key.parent / "coordinator.pub",
    ]  # fmt: skip


def private_files(config: CoordinatorConfig) -> list[Path]:
    secret = [config.source] if _has_password(config) else []
    return [*secret, config.identity.key, config.identity.signing_key]


def put_into(out: Path, config: CoordinatorConfig, *, with_keys: bool) -> list[str]:
    """Copy them. Returns what was left out, as warnings.

    Raises:
        NotFoundError, NotAllowedError, UsageError: one cannot be read.
    """
    left_out = []
    for folder, paths in ((FILES, public_files(config)), (KEYS, private_files(config) if with_keys else [])):
        for path in paths:
            if not path.is_relative_to(config.source.parent):
                left_out.append(f"{path} is not in the backup: it lies outside of {config.source.parent}")
                continue
            data = read_private(path) if folder == KEYS and path != config.source else read_regular(path)
            target = out / folder / path.relative_to(config.source.parent)
            make_private_directory(target.parent)
            write_private(target, data)
    if _has_password(config) and not with_keys:
        left_out.append(f"{config.source} is not in the backup: its database URL has a password (--with-keys)")
    return left_out


def take_out(backup: Path, files: Mapping[str, Any], folder: Path) -> list[Path]:
    """Put the configuration and certificates of a backup into a folder: each is read once, and written where its digest
    is the one in the manifest. Returns what was written.

    Args:
        backup: the folder.
        files: of its verified manifest.
        folder: where to.

    Raises:
        ConflictError: one is there already, and is another; nothing is replaced.
        VerificationError: one is not as it was verified (`BACKUP_DAMAGED`).
    """
    found: dict[Path, bytes] = {}
    for name, told in files.items():
        part, _, place = name.partition("/")
        if part not in (FILES, KEYS):
            continue
        data = read_regular(backup / name)
        if sha256_hex(data) != told["sha256"]:
            raise VerificationError(
                f"{backup / name} was changed while the backup was being restored", code="BACKUP_DAMAGED",
                hint="who else may write there? take a copy",
            )  # fmt: skip
        if (folder / place).exists() and read_regular(folder / place) != data:
            raise ConflictError(
                f"{folder / place} is there already, and differs: nothing is replaced", code="EXISTS",
                hint="name an empty folder's coordinator.yaml with --config, or move that file away",
            )  # fmt: skip
        found[folder / place] = data
    written = []
    for path, data in found.items():
        if not path.exists():
            make_private_directory(path.parent)
            write_private(path, data)
            written.append(path)
    return written


def take_back(written: Sequence[Path], folder: Path) -> None:
    """Remove what `take_out` wrote into a folder: with it a coordinator could be started anew, under the same key and
    with a history of its own (T38)."""
    for path in written:
        path.unlink(missing_ok=True)
        for parent in path.parents:
            if parent == folder or any(parent.iterdir()):
                break
            parent.rmdir()


def _has_password(config: CoordinatorConfig) -> bool:
    return bool(config.database) and any(word in shown_url(config.database) for word in ("***", "hidden"))
