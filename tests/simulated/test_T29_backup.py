"""A copy of a coordinator in the midst of a run: one restored from it goes on to the same adapter, and a copy that is
damaged, or older than what somebody has seen, is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from sqlalchemy import String, select

from coordinator import backup, witnessing
from coordinator import store as db
from coordinator.backup import DATABASE, DUMP, MANIFEST, Kept, make_backup, restore_backup, take_out, verified_backup
from coordinator.store import database_url
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.log import AuditLog
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import sha256_hex
from fedsilo.protocol.errors import ConflictError, FedSiloError, OperationError, UsageError, VerificationError
from tests.postgres_server import PostgresServer
from tests.simulated.coordinator_parts import COORDINATOR, SHORT, House, SimulatedSilo, federation, goes_on, in_midst

NOW = "2027-01-15T08:00:00Z"
SILO = "spiffe://cardio-net/silo/hospital_a"


def kept(house: House, folder: Path | None = None, database: str | None = None) -> Kept:
    folder = folder or house.folder
    url = house.database if database is None else database
    return Kept(COORDINATOR, folder, url or f"sqlite:///{folder / 'coordinator.db'}")


def restored(backup: Path, kept: Kept, key: Ed25519PublicKey, *, seen: Sequence[Path] = ()) -> dict[str, Any]:
    manifest = verified_backup(backup, key)
    restore_backup(backup, manifest, kept, key, seen=seen)
    return manifest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    house, silos = in_midst(tmp_path_factory.mktemp("whole"), SHORT)
    run = goes_on(house, silos)
    house.close()
    assert run.state == "finished"
    return run.adapter_digest


@pytest.fixture
def postgresql_urls(postgresql: PostgresServer) -> Iterator[tuple[str, str]]:
    """Of a coordinator's database and of an empty one."""
    with postgresql.database() as first, postgresql.database() as second:
        yield first, second


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_T29_a_coordinator_restored_in_the_midst_of_a_run_ends_with_the_adapter_of_an_undisturbed_one(
    request: pytest.FixtureRequest, tmp_path: Path, undisturbed: str, kind: str
) -> None:
    url, to = request.getfixturevalue("postgresql_urls") if kind == "postgresql" else ("", "")
    house, silos = in_midst(tmp_path / "first", SHORT, database=url)
    manifest = make_backup(kept(house), house.key, tmp_path / "backup", now=NOW)  # it runs meanwhile
    assert manifest["log"] == {"size": house.audit.size, "root": house.audit.root.hex()}
    house.close()
    told = restored(tmp_path / "backup", kept(house, tmp_path / "second", to), house.key.public_key())
    assert told == manifest
    second = House(tmp_path / "second", clock=house.clock, database=to)
    assert second.driver.runs["run-1"].life.open_round == 1
    run = goes_on(second, silos)
    assert (run.state, run.adapter_digest) == ("finished", undisturbed)
    # what the database numbers by itself goes on behind what was copied
    assert second.rows(lambda session: session.query(db.Figure).count()) > 0
    second.close()
    assert [result["problems"] for result in verify_logs([tmp_path / "second" / "audit"])] == [[]]


@pytest.fixture(scope="module")
def backed_up(tmp_path_factory: pytest.TempPathFactory) -> tuple[House, list[SimulatedSilo], Path]:
    """A coordinator that goes on, and a backup of it."""
    folder = tmp_path_factory.mktemp("backed_up")
    house, silos = in_midst(folder / "first", SHORT)
    make_backup(kept(house), house.key, folder / "backup", now=NOW)
    return house, silos, folder / "backup"


# ---- PostgreSQL's own programs -----------------------------------------------------------------------

LEFT_OPEN = "SELECT query FROM pg_stat_activity WHERE state = 'idle in transaction'"


@pytest.fixture
def dumped(
    postgresql_urls: tuple[str, str], postgresql: PostgresServer, tmp_path: Path
) -> Iterator[tuple[House, Path, str]]:
    """A coordinator on PostgreSQL that goes on, beside a table of somebody else; a backup of it, made without a
    transaction that outlasts its copy of the database; and the URL of an empty database."""
    url, empty = postgresql_urls
    house, _ = in_midst(tmp_path / "first", SHORT, database=url)
    postgresql.execute("CREATE TABLE of_others AS SELECT 1", database=database_url(url).database)
    left: list[Any] = []
    make_backup(kept(house), house.key, tmp_path / "backup", now=NOW,
                also=lambda out: left.extend(postgresql.execute(LEFT_OPEN)))  # fmt: skip
    assert not left
    yield house, tmp_path / "backup", empty
    house.close()


@pytest.mark.slow
def test_T42_what_a_dump_is_not_restored_over_or_into(
    dumped: tuple[House, Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house, folder, empty = dumped
    key = house.key.public_key()
    assert (folder / DUMP).is_file() and not (folder / DATABASE).exists()
    assert not any(path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")])
    with pytest.raises(UsageError, match="names SQLite"):
        restored(folder, kept(house, tmp_path / "other", f"sqlite:///{tmp_path / 'x.db'}"), key)
    with monkeypatch.context() as patched, pytest.raises(UsageError, match="another version"):
        patched.setattr(db.Run.__table__.c.state, "type", String(17))
        restored(folder, kept(house, tmp_path / "other", empty), key)
    assert not (tmp_path / "other").exists()
    flip = shutil.copytree(folder, tmp_path / "flipped")
    flipped(DUMP)(flip)
    with pytest.raises(VerificationError) as damaged:
        restored(flip, kept(house, tmp_path / "other", empty), key)
    assert damaged.value.code == "BACKUP_DAMAGED"
    restored(folder, kept(house, tmp_path / "second", empty), key)
    assert not (tmp_path / "second" / DUMP).exists()
    with pytest.raises(ConflictError) as filled:
        restored(folder, kept(house, tmp_path / "third", empty), key)
    assert filled.value.code == "EXISTS" and "not empty" in filled.value.message
    left = [path.name for name in ("other", "third") for path in (tmp_path / name).glob("*")]
    assert set(left) <= {"lock"}


@pytest.mark.slow
def test_rows_of_a_newer_version_are_refused_and_leave_nothing(
    dumped: tuple[House, Path, str], tmp_path: Path, postgresql: PostgresServer
) -> None:
    house, _, empty = dumped
    postgresql.execute("ALTER TABLE runs ADD COLUMN of_later integer", database=database_url(house.database).database)
    make_backup(kept(house), house.key, tmp_path / "newer", now=NOW)
    with pytest.raises(OperationError, match="of_later"):
        restored(tmp_path / "newer", kept(house, tmp_path / "second", empty), house.key.public_key())
    counts = "SELECT (SELECT count(*) FROM runs), (SELECT count(*) FROM members), (SELECT count(*) FROM log_places)"
    assert postgresql.execute(counts, database=database_url(empty).database) == [(0, 0, 0)]
    assert [path.name for path in (tmp_path / "second").glob("*")] == ["lock"]


@pytest.mark.quick(keep=1)
@pytest.mark.parametrize(
    ("program", "words"),
    [("", "pg_dump cannot be run"), ("echo 'pg_dump: error: server version mismatch' >&2; exit 1", "mismatch")],
    ids=["missing", "too old"],
)
def test_a_pg_dump_that_is_missing_or_too_old_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, words: str, postgresql_url: str
) -> None:
    house, _ = in_midst(tmp_path / "first", SHORT, database=postgresql_url)
    (tmp_path / "bin").mkdir()
    if program:
        (tmp_path / "bin" / "pg_dump").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bin" / "pg_dump").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(OperationError, match=words) as refused:
        make_backup(kept(house), house.key, tmp_path / "backup", now=NOW)
    assert "postgresql-client" in refused.value.hint and not (tmp_path / "backup").exists()
    house.close()


def test_T42_a_password_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pg_restore").write_text('#!/bin/sh\necho "$@" "$PGPASSWORD" > "$0.told"\n')
    (tmp_path / "pg_restore").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    url = "postgresql://fedsilo:s%40cret@/fedsilo?host=/run/x&options=-ca&options=-cb"
    backup.restore(database_url(url), Path("a.pgdump"))
    *words, password = (tmp_path / "pg_restore.told").read_text().split()
    assert password == "s@cret" and "cret" not in " ".join(words) and "host=/run/x" in words
    assert "options='-ca -cb'" in " ".join(words)
    for wrong in ("sslpassword", "scram_client_key", "oauth_client_secret", "pool_size"):
        with pytest.raises(UsageError, match=wrong) as refused:
            backup.restore(database_url(f"{url}&{wrong}=x"), Path("a.pgdump"))
        assert ("without a passphrase" in refused.value.hint) == (wrong != "pool_size")


# ---- what is refused ---------------------------------------------------------------------------------


def witness(silo: SimulatedSilo, log: AuditLog) -> Any:
    """What a guard does at its start, and between rounds."""
    answer = silo.say("control.checkpoint", log.offer(COORDINATOR))
    if isinstance(answer, pb.Checkpoint):
        log.take(answer, COORDINATOR)
    return answer


def test_T38_a_silo_that_has_seen_more_of_the_log_does_not_follow_a_coordinator_from_an_older_backup(
    backed_up: tuple[House, list[SimulatedSilo], Path], tmp_path: Path
) -> None:
    house, silos, folder = backed_up
    silo, public_key = silos[0], house.key.public_key()
    with AuditLog(tmp_path / "silo", origin=SILO, key=silo.key, actor=SILO, reserve_bytes=0) as log:
        log.pin_peer(COORDINATOR, public_key)

        for _ in range(2):  # the first coordinator goes on, and is countersigned
            assert isinstance(witness(silo, log), pb.Checkpoint)
        restored(folder, kept(house, tmp_path / "early"), public_key)
        silo.house = House(tmp_path / "early", clock=house.clock)
        # its answers have numbers that were given out before, and a guard takes none of them; this silo looks on
        silo.sequences["from coordinator"] = 0
        refused = witness(silo, log)
        assert isinstance(refused, pb.Refusal) and refused.code == "CHECKPOINT_INCONSISTENT"
        assert silo.house.driver.halted == "OWN_HISTORY_LOST"  # it will not sign a second history
        silo.house.close()
        silo.house, silo.sequences["from coordinator"] = house, 0
        assert isinstance(witness(silo, log), pb.Checkpoint) and not house.driver.halted  # the counterpart

        # and who restores may ask a silo first
        notes = list((tmp_path / "silo" / "witnessed").glob("*.note"))
        with pytest.raises(ConflictError) as behind:
            restored(folder, kept(house, tmp_path / "third"), public_key, seen=notes)
        assert behind.value.code == "LOG_BEHIND" and str(notes[0]) in behind.value.message
        assert not (tmp_path / "third").exists()
        make_backup(kept(house), house.key, tmp_path / "newer", now=NOW)
        restored(tmp_path / "newer", kept(house, tmp_path / "third"), public_key, seen=notes)


@pytest.mark.parametrize("with_steps", [True, False])
def test_T38_a_backup_has_the_steps_that_came_after_its_copy_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_steps: bool
) -> None:
    house, (silo, *_) = federation(tmp_path / "first")
    with AuditLog(tmp_path / "silo", origin=SILO, key=silo.key, actor=SILO, reserve_bytes=0) as log:
        log.pin_peer(COORDINATOR, house.key.public_key())

        def grow() -> int:
            log.append("start")
            assert isinstance(witness(silo, log), pb.Checkpoint)
            return log.size

        def between(source: Path, target: Path, _copy: Callable[[Path, Path], None] = backup._copy_log) -> None:
            sizes.append(grow())
            _copy(source, target)
            if not with_steps:
                shutil.rmtree(target / witnessing.FOLDER)

        def chain(of: House) -> list[int]:
            return of.rows(lambda session: list(session.scalars(select(db.ShownCheckpoint.size)).all()))

        sizes = [grow()]
        monkeypatch.setattr(backup, "_copy_log", between)
        make_backup(kept(house), house.key, tmp_path / "backup", now=NOW)
        assert chain(house) == sizes
        house.close()
        restored(tmp_path / "backup", kept(house, tmp_path / "second"), house.key.public_key())
        silo.house = House(tmp_path / "second", clock=house.clock)
        assert chain(silo.house) == sizes[:1]
        silo.sequences["from coordinator"] = 0
        sizes.append(grow())
        # without them who stands at the first size could not follow any more
        assert chain(silo.house) == (sizes if with_steps else sizes[2:])
        silo.house.close()


def flipped(name: str) -> Callable[[Path], None]:
    def change(backup: Path) -> None:
        path = next(path for path in sorted(backup.glob(name)) if path.is_file())
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    return change


def linked(backup: Path) -> None:
    path = next(backup.glob("blobs/*/*"))
    path.rename(backup.parent / "elsewhere")
    path.symlink_to(backup.parent / "elsewhere")


@pytest.mark.parametrize(
    "change",
    [flipped(DATABASE), flipped("audit/0*.jsonl"), flipped("blobs/*/*"), flipped(MANIFEST), linked,
     lambda backup: next(backup.glob("blobs/*/*")).unlink(),
     lambda backup: (backup / "audit" / "000000000999.jsonl").write_bytes(b"{}\n")],
    ids=["database", "log", "payload", "manifest", "link", "missing", "added"],
)  # fmt: skip
def test_a_damaged_backup_restores_nothing(
    backed_up: tuple[House, list[SimulatedSilo], Path], tmp_path: Path, change: Callable[[Path], None]
) -> None:
    house, _, folder = backed_up
    shutil.copytree(folder, tmp_path / "copy")
    change(tmp_path / "copy")
    with pytest.raises(VerificationError) as refused:
        restored(tmp_path / "copy", kept(house, tmp_path / "new"), house.key.public_key())
    assert refused.value.code == "BACKUP_DAMAGED" and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "change",
    [flipped(DATABASE), flipped("audit/0*.jsonl"), flipped("blobs/*/*"), flipped("audit/keys/*"),
     lambda backup: next(backup.glob("blobs/*/*")).unlink(), lambda backup: None],
    ids=["database", "log", "payload", "key", "missing", "nothing"],
)  # fmt: skip
def test_T42_what_is_restored_is_what_was_verified_whoever_changes_the_backup_meanwhile(
    backed_up: tuple[House, list[SimulatedSilo], Path], tmp_path: Path, change: Callable[[Path], None],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    house, _, folder = backed_up
    shutil.copytree(folder, tmp_path / "copy")
    manifest = verified_backup(tmp_path / "copy", house.key.public_key())
    change(tmp_path / "copy")
    target = kept(house, tmp_path / "new")
    if request.node.callspec.id == "nothing":
        restore_backup(tmp_path / "copy", manifest, target, house.key.public_key())
        for name in manifest["files"]:
            if name.partition("/")[0] in ("audit", "blobs", "runs"):
                assert (tmp_path / "new" / name).read_bytes() == (tmp_path / "copy" / name).read_bytes()
        assert (tmp_path / "new" / DATABASE).read_bytes() == (tmp_path / "copy" / DATABASE).read_bytes()
        return
    with pytest.raises(VerificationError) as refused:
        restore_backup(tmp_path / "copy", manifest, target, house.key.public_key())
    left = {path.name for path in (tmp_path / "new").glob("*")} if (tmp_path / "new").exists() else set()
    assert refused.value.code in ("BACKUP_DAMAGED", VerificationError.default_code) and left <= {"lock"}


@pytest.mark.parametrize("changed", [True, False])
def test_T42_a_certificate_or_configuration_that_was_exchanged_after_it_was_verified_is_not_put_in_place(
    tmp_path: Path, changed: bool
) -> None:
    backup, files = tmp_path / "backup", {}
    for name in ("files/coordinator.yaml", "files/id/roles.yaml"):
        (backup / name).parent.mkdir(parents=True, exist_ok=True)
        (backup / name).write_text(name)
        files[name] = {"sha256": sha256_hex(name.encode()), "bytes": len(name)}
    if changed:
        (backup / "files/id/roles.yaml").write_text("site: another")
        with pytest.raises(VerificationError) as refused:
            take_out(backup, files, tmp_path / "new")
        assert refused.value.code == "BACKUP_DAMAGED" and not (tmp_path / "new").exists()
    else:
        written = take_out(backup, files, tmp_path / "new")
        assert [path.read_text() for path in written] == list(files)


def test_T42_what_a_backup_is_not_restored_over_and_by_whose_key(
    backed_up: tuple[House, list[SimulatedSilo], Path], tmp_path: Path
) -> None:
    house, _, folder = backed_up
    key = house.key.public_key()

    def why(kind: type[FedSiloError], kept: Kept, key: Any = key) -> str:
        with pytest.raises(kind) as refused:
            restored(folder, kept, key)
        return refused.value.code

    assert why(VerificationError, kept(house, tmp_path / "new"), Ed25519PrivateKey.generate().public_key()) == (
        "BACKUP_DAMAGED"
    )
    assert why(UsageError, Kept("spiffe://cardio-net/coordinator/other", tmp_path / "new", "sqlite:///x")) == (
        "INVALID_INPUT"
    )
    house.audit.checkpoint()
    assert why(ConflictError, kept(house)) == "LOG_BEHIND"  # what is there is newer
    assert why(UsageError, kept(house, tmp_path / "new", "postgresql:///x")) == "INVALID_INPUT"  # before any copying
    assert not (tmp_path / "new").exists()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / DATABASE).touch()
    assert why(ConflictError, kept(house, tmp_path / "half")) == "EXISTS"
    assert not any(path.stat().st_mode & 0o077 for path in [folder, *folder.rglob("*")])


def test_what_is_damaged_is_not_backed_up(tmp_path: Path) -> None:
    house, silos = in_midst(tmp_path / "first", SHORT)
    upload = next(path for path in (tmp_path / "first" / "blobs").glob("*/*"))
    whole = upload.read_bytes()
    upload.write_bytes(whole + b"x")
    with pytest.raises(VerificationError) as refused:
        make_backup(kept(house), house.key, tmp_path / "backup", now=NOW)
    assert refused.value.code == "PAYLOAD_DAMAGED" and not (tmp_path / "backup").exists()
    upload.write_bytes(whole)
    make_backup(kept(house), house.key, tmp_path / "backup", now=NOW)
    with pytest.raises(ConflictError) as refused_again:
        make_backup(kept(house), house.key, tmp_path / "backup", now=NOW)
    assert refused_again.value.code == "EXISTS"
    run = goes_on(house, silos)
    house.close()
    assert run.state == "finished"
    # a log that was put back from an older copy
    shutil.rmtree(tmp_path / "first" / "audit")
    shutil.copytree(tmp_path / "backup" / "audit", tmp_path / "first" / "audit")
    with pytest.raises(VerificationError) as behind:
        make_backup(kept(house), house.key, tmp_path / "another", now=NOW)
    assert behind.value.code == "LOG_BEHIND"
    whole = (tmp_path / "first" / DATABASE).read_bytes()
    for good in (0, 100, 4096, len(whole) - 4096):
        (tmp_path / "first" / DATABASE).write_bytes(whole[:good].ljust(len(whole), b"\xff"))
        with pytest.raises(VerificationError, match="database is damaged"):
            make_backup(kept(house), house.key, tmp_path / "another", now=NOW)
