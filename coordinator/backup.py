"""A consistent copy of what a coordinator keeps, made while it runs or of one that has ended, and its way back.

    FOLDER/manifest.json     every file with size and SHA-256, and the log's size and root, signed by the coordinator
    FOLDER/coordinator.db    the database as of one moment; of PostgreSQL coordinator.pgdump, by its own `pg_dump`
    FOLDER/audit/            the audit log as of a moment after that one
    FOLDER/blobs/, runs/     payloads, and what ended runs left; neither is ever changed
    FOLDER/requests.jsonl    which signed orders were given, so that none is given twice (T29)
    FOLDER/files/            coordinator.yaml, charter, LoRA schema, public set, certificates, roles, at their places
                             below the folder of coordinator.yaml; what lies elsewhere is left out, and named
    FOLDER/keys/             only where somebody asks for them: the private keys, and a coordinator.yaml whose
                             database URL has a password

Without `keys/` nobody who gets a backup can speak as the coordinator (T42).

The database is copied first: nothing in it is without its record in the log, or without its payload. So a copy is what
a kill at some moment would have left, and a restored coordinator goes on from it as after a kill. A dump of PostgreSQL
has the rows of our tables alone; the program that restores it makes the tables, and `tables_digest` says whether they
are the same ones. A password goes to its programs by their environment, never on their command line.

A copy is older than what it was copied from as soon as that takes one more message. To go on from an older one would
give the federation two histories (T38): `restore` refuses one that is older than anything it is shown, and a silo that
has seen more of the log stops, whoever restored it. Only the copy of a coordinator that has ended can take over.

What this does not do: encrypt; the folder holds what silos sent, and is for its owner alone. It does not stop somebody
who has the signing key, who can sign any copy; nor whoever may read the environment of this user's processes, which is
this user and root.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import URL, Connection, create_engine, select, text
from sqlalchemy.exc import SQLAlchemyError

from coordinator.config import CoordinatorConfig
from coordinator.store import POSTGRESQL, Base, LogPlace, Run, Store, database_url, is_secret, require_driver, shown_url
from coordinator.witnessing import FOLDER as SHOWN
from fedsilo.audit.checkpoint import log_key, open_checkpoint
from fedsilo.audit.log import LoadedLog, load
from fedsilo.files.durable import (
    fsync_directory,
    lock_exclusively,
    make_private_directory,
    read_private,
    read_regular,
    removed_on_failure,
    write_durably,
    write_private,
)
from fedsilo.files.sqlite_file import read_only_address
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, UsageError, VerificationError

# ---- PostgreSQL's database ---------------------------------------------------------------------------------------

DUMP = "coordinator.pgdump"
_NEEDED = "install PostgreSQL's client programs (Debian: postgresql-client), of the server's version or a newer one"


@contextlib.contextmanager
def snapshot_of(address: URL) -> Iterator[Connection]:
    """A connection on which all that is read is of one moment, and nothing can be written.

    It takes none of the locks by which a coordinator is the only one, so that one may run meanwhile.
    """
    require_driver()
    engine = create_engine(address, isolation_level="REPEATABLE READ", hide_parameters=True)
    try:
        with engine.connect() as connection:
            connection.execute(text("SET TRANSACTION READ ONLY"))
            yield connection
    finally:
        engine.dispose()


def dump(address: URL, reading: Connection, target: Path) -> None:
    """Write all rows as of the moment of `reading`, of `snapshot_of`, into a new file of mode 0600.

    Raises:
        OperationError: `pg_dump` is missing, older than the server, or fails.
        UsageError: as `told_to_programs`.
    """
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    moment = reading.scalar(text("SELECT pg_export_snapshot()"))
    ours = [f"--table={table.name}" for table in Base.metadata.sorted_tables]  # with the sequences that they own
    _run("pg_dump", address, "--format=custom", f"--snapshot={moment}", f"--file={target}", *ours)


def restore(address: URL, source: Path) -> None:
    """Put the rows of a dump into tables that are there and empty: all of them, or none.

    Raises:
        OperationError: `pg_restore` is missing, or fails.
        UsageError: as `told_to_programs`.
    """
    _run("pg_restore", address, "--single-transaction", "--exit-on-error", str(source))


def tables_digest() -> str:
    """SHA-256 of the names and types of all columns of our tables."""
    columns = [f"{column} {column.type}" for table in Base.metadata.sorted_tables for column in table.columns]
    return sha256_hex("\n".join(sorted(columns)).encode())


def told_to_programs(address: URL) -> tuple[str, str]:
    """Return libpq's connection string without the password, and the password, for PostgreSQL's programs.

    Raises:
        UsageError: the URL has a secret that the environment cannot carry, or a parameter that libpq does not know; or
            the driver is not installed.
    """
    require_driver()
    import psycopg

    _, told = address.get_dialect()().create_connect_args(address)
    password = str(told.pop("password", ""))
    if secret := [name for name in told if is_secret(name)]:
        raise UsageError(
            f"pg_dump and pg_restore cannot be given the {secret[0]} of the database's URL",
            hint="a password, a `passfile`, or an `sslkey` without a passphrase can be given to them",
        )
    try:
        return psycopg.conninfo.make_conninfo(**told), password
    except psycopg.Error as error:
        raise UsageError(
            f"the database's URL: {str(error).strip()}", hint="only connection parameters of libpq can stand there"
        ) from error


def _run(program: str, address: URL, *options: str) -> None:
    where, password = told_to_programs(address)
    environment = {**os.environ, "LC_ALL": "C", **({"PGPASSWORD": password} if password else {})}
    command = [program, "--data-only", "--no-owner", "--no-privileges", "--no-password", f"--dbname={where}", *options]
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise OperationError(f"{program} cannot be run: {error.strerror}", hint=_NEEDED) from error
    if done.returncode != 0:
        cause = done.stderr.strip().partition("\n")[0] or f"{program} ended with {done.returncode}"
        hint = _NEEDED if "version" in done.stderr else "is the server reachable, and the database of this version?"
        raise OperationError(cause, hint=hint)


# ---- the files of the configuration ------------------------------------------------------------------------------

FILES, KEYS = "files", "keys"


def public_files(config: CoordinatorConfig) -> list[Path]:
    """Return all files that hold no secret."""
    files = config.identity
    return [
        *([config.source] if not _has_password(config) else []),
        config.charter,
        config.expected.lora_schema,
        config.public.path,
        files.certificate,
        files.federation_ca,
        files.site_ca,
        files.operators,
        files.signing_key.parent / "coordinator.pub",
    ]


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
    contents: dict[Path, bytes] = {}
    for name, row in files.items():
        part, _, place = name.partition("/")
        if part not in (FILES, KEYS):
            continue
        data = read_regular(backup / name)
        if sha256_hex(data) != row["sha256"]:
            raise _changed_meanwhile(backup / name)
        if (folder / place).exists() and read_regular(folder / place) != data:
            raise ConflictError(
                f"{folder / place} is there already, and differs: nothing is replaced",
                code="EXISTS",
                hint="name an empty folder's coordinator.yaml with --config, or move that file away",
            )
        contents[folder / place] = data
    written = []
    for path, data in contents.items():
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


# ---- the backup --------------------------------------------------------------------------------------------------

FORMAT = 1
MANIFEST, DATABASE, REQUESTS = "manifest.json", "coordinator.db", "requests.jsonl"
MANIFEST_BYTES_MAX = 256 << 20
_PREFIX = b"fedsilo-backup\n"
_BLOCK_BYTES = 1 << 20
# the log's notes and keys before its records: each note's records are then in the copy; what was countersigned before
# the steps that lead there, for the same reason
_AUDIT_FOLDERS = ("checkpoints", "witnessed", SHOWN, "keys", "quarantine")
_STATE = ("audit", "blobs", "runs", DATABASE, DUMP, REQUESTS)
_AUDIT_BEFORE = ".audit.restored"  # the log, until the database is there too


@dataclass(frozen=True)
class Kept:
    """Places where one coordinator keeps its state.

    Attributes:
        origin: of its audit log, its SPIFFE id.
        payloads: fsspec URL; empty: below `state_dir`. Payloads elsewhere are not copied.
    """

    origin: str
    state_dir: Path
    database_url: str
    payloads: str = ""


# ---- out -------------------------------------------------------------------------------------------------


def make_backup(
    kept: Kept, key: Ed25519PrivateKey, out: Path, *, now: str, also: Callable[[Path], None] = lambda out: None
) -> dict[str, Any]:
    """Copy everything into a new folder `out`. Returns the manifest.

    Args:
        kept: where the coordinator keeps its state.
        key: its signing key.
        out: empty, or not there yet.
        now: UTC, ISO 8601.
        also: puts further files into the folder, which the manifest then names too.

    Raises:
        ConflictError: `out` is not empty, or retention changed the log meanwhile (`LOG_CHANGED`: do it again).
        NotFoundError: there is no state to copy.
        VerificationError: log, database or a payload are damaged or do not fit each other: no copy of that is made.
        OperationError: the database cannot be reached, or the disk refuses.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConflictError(f"{out} is not an empty folder", hint="name a new folder", code="EXISTS")
    if not (kept.state_dir / "audit").is_dir():
        raise NotFoundError(f"there is no coordinator's state in {kept.state_dir}")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_exclusively(kept.state_dir / "lock"))
            running = False  # and none can start before the copy is whole
        except ConflictError:
            running = True
        stack.enter_context(removed_on_failure(out))
        make_private_directory(out)
        ended, place = _copy_database(kept, out)
        if (kept.state_dir / REQUESTS).is_file():
            _copy(kept.state_dir / REQUESTS, out / REQUESTS)
        _copy_log(kept.state_dir / "audit", out / "audit")
        if not kept.payloads:
            _copy_payloads(kept.state_dir / "blobs", out / "blobs")
        _copy_runs(kept.state_dir / "runs", out / "runs", ended)
        also(out)
        for path in out.rglob("*"):
            if path.is_dir():
                path.chmod(0o700)
        log = _log_of(out / "audit", kept.origin, key.public_key())
        _require_fitting(place, log, kept.origin)
        manifest = {
            "format": FORMAT,
            "origin": kept.origin,
            "made_at": now,
            "running": running,
            "payloads": kept.payloads,
            "tables": tables_digest(),
            "log": {"size": log.tree.size, "root": log.tree.root().hex()},
            "files": {name: _digest(out / name) for name in _files(out)},
        }
        document = {"manifest": manifest, "signature": key.sign(_PREFIX + canonical_json(manifest)).hex()}
        write_durably(out / MANIFEST, json.dumps(document, indent=1, sort_keys=True).encode() + b"\n", 0o600)
    return manifest


def _copy_database(kept: Kept, out: Path) -> tuple[set[str], tuple[int, int, str]]:
    """Copy the database. Returns what `_told_by` reads, as of the moment of the copy; no connection is left open."""
    address, copy = database_url(kept.database_url), out / DATABASE
    try:
        if address.drivername == POSTGRESQL:
            with snapshot_of(address) as reading:
                dump(address, reading, out / DUMP)
                return _told_by(reading, kept.origin)
        source = Path(str(address.database))
        if not source.is_file():
            raise NotFoundError(f"there is no database {source}")
        with (
            contextlib.closing(sqlite3.connect(read_only_address(source), uri=True)) as first,
            contextlib.closing(sqlite3.connect(copy)) as writing,
        ):
            first.backup(writing)  # in one step, so of one moment, whoever writes meanwhile
    except (sqlite3.Error, SQLAlchemyError) as error:
        if type(error) is sqlite3.DatabaseError:  # what cannot be reached or written is an OperationalError
            raise VerificationError(f"the coordinator's database is damaged: {error}") from error
        why = str(getattr(error, "orig", "") or error).partition("\n")[0]
        raise OperationError(f"the coordinator's database cannot be copied: {why}") from error
    copy.chmod(0o600)
    engine = create_engine(URL.create("sqlite", database=str(copy)))
    try:
        with engine.connect() as reading:
            reading.exec_driver_sql("PRAGMA journal_mode=DELETE")  # one file, without a log of its own
            result = reading.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            content = _told_by(reading, kept.origin)
    except SQLAlchemyError as error:
        result = getattr(error, "orig", error)
    finally:
        engine.dispose()
    if result != "ok":
        raise VerificationError(f"the coordinator's database is damaged: {result}")
    return content


def _told_by(database: Connection, origin: str) -> tuple[set[str], tuple[int, int, str]]:
    """Return which runs have ended, and with how much of the log the database was used: size, size of a root, and
    that."""
    place = select(LogPlace.size, LogPlace.rooted, LogPlace.root).where(LogPlace.origin == origin)
    ended = set(database.scalars(select(Run.name).where(Run.ended_at != "")))
    size, rooted, root = database.execute(place).one_or_none() or (0, 0, "")
    return ended, (size, rooted, root)


def _copy_log(source: Path, target: Path) -> None:
    for name in _AUDIT_FOLDERS:
        make_private_directory(target / name)
        for path in sorted((source / name).rglob("*")) if (source / name).is_dir() else ():
            place = target / path.relative_to(source)
            if path.is_dir():
                make_private_directory(place)
                continue
            with contextlib.suppress(FileNotFoundError):  # a note that was being written has its own name by then
                _copy(path, place)
    try:
        for path in sorted([*source.glob("*.leaves"), *source.glob("*.jsonl")]):
            _copy(path, target / path.name)
    except FileNotFoundError as error:
        raise ConflictError(
            "the audit log was shortened by retention meanwhile", hint="do it again", code="LOG_CHANGED"
        ) from error
    newest = max(target.glob("*.jsonl"), default=None)
    if newest is not None:
        data = newest.read_bytes()
        os.truncate(newest, data.rfind(b"\n") + 1)  # a line that was being written is not acknowledged yet


def _copy_payloads(source: Path, target: Path) -> None:
    make_private_directory(target)
    for path in sorted(source.glob("*/*")):
        make_private_directory(target / path.parent.name)
        if _copy(path, target / path.parent.name / path.name) != path.name:
            raise VerificationError(
                f"payload {path} is damaged: its content has another SHA-256 than its name",
                code="PAYLOAD_DAMAGED",
                hint="take that file from an older backup",
            )


def _copy_runs(source: Path, target: Path, ended: set[str]) -> None:
    make_private_directory(target)
    for name in sorted(ended):
        for path in sorted((source / name).rglob("*")) if (source / name).is_dir() else ():
            if path.is_file():
                (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                _copy(path, target / path.relative_to(source))


def _log_of(directory: Path, origin: str, key: Ed25519PublicKey) -> LoadedLog:
    log = load(directory, log_key(origin, key))
    if log.torn is not None:
        raise VerificationError(f"{directory}: its last record is damaged")
    return log


def _require_fitting(place: tuple[int, int, str], log: LoadedLog, origin: str) -> None:
    """Require that the log is the one which the database was used with, and no older one."""
    size, rooted, root = place
    if size > log.tree.size or (rooted and log.tree.root(rooted).hex() != root):
        raise VerificationError(
            f"database and audit log do not belong together: the log has {log.tree.size} records, the database was "
            f"used with {size} at least of {origin}",
            code="LOG_BEHIND",
            hint="is another copy of the log where the coordinator looked for it?",
        )


# ---- and back --------------------------------------------------------------------------------------------


def read_manifest(folder: Path, key: Ed25519PublicKey) -> dict[str, Any]:
    """The manifest, with its signature checked; the files are not.

    Raises:
        NotFoundError: no backup there.
        VerificationError: damaged, or not signed by that key (`BACKUP_DAMAGED`).
        UsageError: of another version.
    """
    document = read_regular(
        folder / MANIFEST, hint="name the folder that `coordinator backup` wrote", bytes_max=MANIFEST_BYTES_MAX
    )
    try:
        parsed = json.loads(document)
        manifest = dict(parsed["manifest"])
        key.verify(bytes.fromhex(parsed["signature"]), _PREFIX + canonical_json(manifest))
    except (InvalidSignature, ValueError, KeyError, TypeError, RecursionError) as error:
        raise VerificationError(
            f"{folder / MANIFEST} is not signed by that key",
            code="BACKUP_DAMAGED",
            hint="is it this coordinator's backup, and the whole of it?",
        ) from error
    if manifest.get("format") != FORMAT:
        raise UsageError(f"{folder} is a backup of another version: {manifest.get('format')!r}")
    return manifest


def verified_backup(folder: Path, key: Ed25519PublicKey) -> dict[str, Any]:
    """The manifest of a backup in which each file is as the manifest says, and no other is there. That log and database
    fit was seen before it was signed.

    Args:
        folder: the backup.
        key: the coordinator's public signing key, from elsewhere than the backup.

    Raises:
        NotFoundError, UsageError: as `read_manifest`.
        VerificationError: `BACKUP_DAMAGED`, and which file.
    """
    manifest = read_manifest(folder, key)
    there = set(_files(folder)) - {MANIFEST}
    for name in sorted(there ^ set(manifest["files"])):
        what = "is missing" if name not in there else "is not in its manifest"
        raise VerificationError(f"{folder}: {name} {what}", code="BACKUP_DAMAGED")
    for name, row in manifest["files"].items():
        if _digest(folder / name) != row:
            raise VerificationError(f"{folder}: {name} is damaged", hint="take another copy", code="BACKUP_DAMAGED")
    _log_in(folder, manifest, key)
    return manifest


def _log_in(folder: Path, manifest: Mapping[str, Any], key: Ed25519PublicKey) -> LoadedLog:
    """The audit log of a backup. Raises VerificationError: it is not the one in the manifest."""
    log = _log_of(folder / "audit", manifest["origin"], key)
    if {"size": log.tree.size, "root": log.tree.root().hex()} != manifest["log"]:
        raise VerificationError(f"{folder}: its audit log is not the one in its manifest", code="BACKUP_DAMAGED")
    return log


def restore_backup(
    folder: Path, manifest: Mapping[str, Any], kept: Kept, key: Ed25519PublicKey, *, seen: Sequence[Path] = ()
) -> None:
    """Fill an empty state folder, and an empty database, with what the manifest names: the digest of each file is that
    of the bytes that were copied, so that whoever changes the backup meanwhile changes nothing here. Where one differs,
    nothing is left.

    Args:
        folder: the backup.
        manifest: as `verified_backup` gave it.
        kept: where to.
        key: the coordinator's public signing key.
        seen: checkpoints of this coordinator's log that others countersigned (`audit/witnessed/*.note` at a silo).

    Raises:
        ConflictError: older than what is there, or than a checkpoint of `seen` (`LOG_BEHIND`); state is there already
            (`EXISTS`); a coordinator runs on it.
        VerificationError: a file is not as it was verified (`BACKUP_DAMAGED`).
        UsageError: the backup of another coordinator, of another kind of database, or of other tables than ours.
        OperationError: PostgreSQL does not take the rows.
    """
    if manifest["origin"] != kept.origin:
        raise UsageError(f"{folder} is a backup of {manifest['origin']}, and this is {kept.origin}")
    backed_up, files = _log_in(folder, manifest, key), manifest["files"]
    _require_right_kind(folder, manifest, kept)
    for path in seen:  # before anything is made
        _require_not_behind(path, backed_up, kept.origin, key)
    make_private_directory(kept.state_dir)
    with lock_exclusively(kept.state_dir / "lock"):
        for path in (kept.state_dir / "audit" / "checkpoints").glob("*.note"):
            _require_not_behind(path, backed_up, kept.origin, key)
        for name in _STATE:
            if (kept.state_dir / name).exists():
                raise ConflictError(
                    f"{kept.state_dir / name} is there already: nothing is replaced",
                    hint="move the old state folder away, and keep it: it is evidence",
                    code="EXISTS",
                )
        try:
            _put_state(folder, files, kept, backed_up)
        except BaseException:
            for name in (*_STATE, _AUDIT_BEFORE):
                _remove(kept.state_dir / name)
            raise


def _require_right_kind(folder: Path, manifest: Mapping[str, Any], kept: Kept) -> None:
    """Require that the database of the backup can go into the one that the configuration names."""
    address = database_url(kept.database_url)
    if address.drivername != POSTGRESQL:
        if DATABASE not in manifest["files"]:
            raise UsageError(
                f"{folder} has a dump of PostgreSQL, and `database:` names SQLite",
                hint="name an empty PostgreSQL database in coordinator.yaml",
            )
        return
    if DUMP not in manifest["files"]:
        raise UsageError(
            f"{folder} has a database of SQLite, and `database:` names PostgreSQL",
            hint="without `database:` in coordinator.yaml it is restored into SQLite. A version before this one wrote "
            "such a file of PostgreSQL too, and can put it back there",
        )
    told_to_programs(address)
    if manifest.get("tables") != tables_digest():
        raise UsageError(
            f"{folder} has the rows of another version of this program, with other tables",
            hint="restore it with the version that made it",
        )


def _put_state(folder: Path, files: Mapping[str, Any], kept: Kept, log: LoadedLog) -> None:
    _remove(kept.state_dir / _AUDIT_BEFORE)  # of a restore that was killed
    targets = {"audit": _AUDIT_BEFORE, "runs": "runs", REQUESTS: REQUESTS}
    if not kept.payloads:
        targets["blobs"] = "blobs"
    for name, row in files.items():
        part, slash, rest = name.partition("/")
        if part in targets:
            target = kept.state_dir / f"{targets[part]}{slash}{rest}"
            make_private_directory(target.parent)
            put_verified(folder / name, target, row)
    _put_database(folder, files, kept, log)
    # last: a coordinator that is started on half of this finds its log behind its database, and refuses
    (kept.state_dir / _AUDIT_BEFORE).rename(kept.state_dir / "audit")
    fsync_directory(kept.state_dir)


def put_verified(source: Path, target: Path, told: Mapping[str, Any]) -> None:
    """Copy a file of a backup. told: of it, by the manifest. Raises VerificationError: other bytes were copied."""
    try:
        copied = _copy(source, target)
    except FileNotFoundError:
        copied = ""
    if copied != told["sha256"]:
        target.unlink(missing_ok=True)
        raise _changed_meanwhile(source)


def _changed_meanwhile(path: Path) -> VerificationError:
    message = f"{path} was changed while the backup was being restored"
    return VerificationError(message, hint="who else may write there? take a copy", code="BACKUP_DAMAGED")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def _require_not_behind(path: Path, log: LoadedLog, origin: str, key: Ed25519PublicKey) -> None:
    note = open_checkpoint(read_regular(path).decode("utf-8", "replace"), log_key(origin, key))
    if note.size > log.tree.size:
        raise ConflictError(
            f"the backup's audit log has {log.tree.size} records, and {path} is a checkpoint of {note.size}: a "
            "coordinator that went on from it would have two histories",
            hint="take the newest backup; docs/how-to/backup.md says what to do without one",
            code="LOG_BEHIND",
        )
    if log.tree.root(note.size) != note.root:
        raise VerificationError(f"{path} is of another history than the backup's audit log", code="BACKUP_DAMAGED")


def _put_database(folder: Path, files: Mapping[str, Any], kept: Kept, log: LoadedLog) -> None:
    address = database_url(kept.database_url)
    if address.drivername != POSTGRESQL:
        target = Path(str(address.database))
        if target.exists():
            raise ConflictError(f"{target} is there already: nothing is replaced", code="EXISTS")
        put_verified(folder / DATABASE, target, files[DATABASE])
        return
    copied = kept.state_dir / DUMP
    put_verified(folder / DUMP, copied, files[DUMP])
    store = Store(kept.database_url)  # nobody else has it then
    try:
        with store.transaction() as session:
            place = session.scalar(select(LogPlace).where(LogPlace.origin == kept.origin))
            if place is not None and place.size > log.tree.size:
                raise ConflictError(
                    f"the backup's audit log has {log.tree.size} records, and the database there was used with "
                    f"{place.size}",
                    hint="a standby on the same database needs the log, and no backup",
                    code="LOG_BEHIND",
                )
            tables = Base.metadata.sorted_tables
            if any(session.execute(select(table).limit(1)).first() is not None for table in tables):
                raise ConflictError("the database is not empty: nothing is replaced", code="EXISTS")
        restore(address, copied)
    finally:
        store.close()
    copied.unlink()


# ---- files -----------------------------------------------------------------------------------------------


def _copy(source: Path, target: Path) -> str:
    """Copy a file durably, for its owner alone. Returns the SHA-256 of what was copied."""
    digest = hashlib.sha256()
    with source.open("rb") as reading:  # before there is anything to take away again
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as copy:
            while block := reading.read(_BLOCK_BYTES):
                digest.update(block)
                copy.write(block)
            copy.flush()
            os.fsync(descriptor)
    shutil.copystat(source, target)
    target.chmod(0o600)
    return digest.hexdigest()


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def _digest(path: Path) -> dict[str, Any]:
    if path.is_symlink():
        raise VerificationError(f"{path} is a link", code="BACKUP_DAMAGED")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256")
        return {"bytes": stream.tell(), "sha256": digest.hexdigest()}
