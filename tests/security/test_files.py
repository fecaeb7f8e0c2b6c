"""T31: private files are private whatever the umask, never follow a link, never replace, leave nothing half written."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsilo.demo.processes import wait_for_end
from fedsilo.files.durable import (
    holder_of,
    leave_page_cache,
    lock_exclusively,
    make_private_directory,
    read_private,
    undone_on_failure,
    write_durably,
    write_private,
)
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError, OperationError, UsageError


@pytest.fixture
def open_umask() -> Iterator[None]:
    previous = os.umask(0)
    yield
    os.umask(previous)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes half of what it is given, once, and then nothing."""
    real, taken = os.write, []

    def write(descriptor: int, data: bytes) -> int:
        if taken:
            raise OSError(28, "No space left on device")
        taken.append(descriptor)
        return real(descriptor, bytes(data)[: len(data) // 2])

    monkeypatch.setattr(os, "write", write)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_T31_mode_is_0600_under_any_umask(tmp_path: Path, open_umask: None) -> None:
    write_private(tmp_path / "key", b"secret")
    make_private_directory(tmp_path / "a" / "b")
    assert mode_of(tmp_path / "key") == 0o600 and mode_of(tmp_path / "a" / "b") == 0o700
    assert read_private(tmp_path / "key") == b"secret"
    os.umask(0o777)
    write_private(tmp_path / "other", b"secret")
    write_durably(tmp_path / "public", b"text")
    assert mode_of(tmp_path / "other") == 0o600 and mode_of(tmp_path / "public") == 0o644


def test_T31_a_private_file_is_never_replaced_and_a_link_never_followed(tmp_path: Path) -> None:
    write_private(tmp_path / "key", b"first")
    with pytest.raises(ConflictError, match="exists already"):
        write_private(tmp_path / "key", b"second")
    assert read_private(tmp_path / "key") == b"first"
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(ConflictError):
        write_private(tmp_path / "link", b"secret")
    assert not (tmp_path / "target").exists()
    (tmp_path / "key link").symlink_to(tmp_path / "key")
    with pytest.raises(NotAllowedError, match="link"):
        try:
            read_private(tmp_path / "key link")
        except NotAllowedError as error:
            raise NotAllowedError(error.hint) from error
    (tmp_path / "folder link").symlink_to(tmp_path)
    with pytest.raises(UsageError):
        make_private_directory(tmp_path / "folder link")


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660, 0o601])
def test_T31_looser_modes_are_refused(tmp_path: Path, mode: int) -> None:
    write_private(tmp_path / "key", b"secret")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(NotAllowedError, match=f"{mode:04o}"):
        read_private(tmp_path / "key")
    for accepted in (0o600, 0o400):
        (tmp_path / "key").chmod(accepted)
        assert read_private(tmp_path / "key") == b"secret"


def test_T31_only_plain_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(NotAllowedError, match="not a plain file"):
            read_private(path)
    with pytest.raises(NotFoundError):
        read_private(tmp_path / "absent")


def test_T31_a_disk_that_fills_midway_leaves_nothing(tmp_path: Path, full_disk: None) -> None:
    with pytest.raises(OperationError, match="No space"):
        write_private(tmp_path / "key", b"secret")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_replacement_keeps_the_old_content(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path = tmp_path / "state"
    write_durably(path, b"old")
    write_durably(path, b"older is gone")
    assert path.read_bytes() == b"older is gone"
    request.getfixturevalue("full_disk")
    with pytest.raises(OperationError, match="No space"):
        write_durably(path, b"new and longer")
    assert [item.name for item in tmp_path.iterdir()] == ["state"] and path.read_bytes() == b"older is gone"


def test_a_durable_write_replaces_a_link_instead_of_its_target(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"untouched")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_durably(tmp_path / "link", b"new")
    assert (tmp_path / "target").read_bytes() == b"untouched"
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_bytes() == b"new"


def test_T42_a_lock_is_held_once_and_released(tmp_path: Path) -> None:
    with (
        lock_exclusively(tmp_path / "lock"),
        pytest.raises(ConflictError, match=f"held by process {os.getpid()}"),
    ):
        lock_exclusively(tmp_path / "lock")
    lock = lock_exclusively(tmp_path / "lock")
    lock.release()
    lock.release()
    lock_exclusively(tmp_path / "lock").release()


def test_T42_a_killed_holder_leaves_no_lock(tmp_path: Path) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        lock_exclusively(tmp_path / "lock")
        os.write(told, b"x")
        os.read(os.pipe()[0], 1)  # for ever
    assert os.read(ready, 1) == b"x"
    with pytest.raises(ConflictError, match=f"process {child}"):
        lock_exclusively(tmp_path / "lock")
    os.kill(child, 9)
    os.waitpid(child, 0)
    lock_exclusively(tmp_path / "lock").release()


def test_who_waits_for_the_end_of_a_daemon_waits_for_its_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder_of(path) == 0
    wait_for_end(path, 0.0)
    with lock_exclusively(path):
        assert holder_of(path) == os.getpid()
        with pytest.raises(OperationError, match=f"process {os.getpid()} has not ended within 0 s"):
            wait_for_end(path, 0.0)
        (tmp_path / "lock").write_text("")
        with pytest.raises(OperationError, match="names no process"):
            holder_of(path)
    assert holder_of(path) == 0
    wait_for_end(path, 0.0)


@pytest.mark.parametrize("extra_bytes", [0, 1, 4095, 4096, 5000])
@pytest.mark.parametrize("offset", [0, 1, 512])
def test_a_large_file_is_the_same_from_any_address_and_of_any_length(
    tmp_path: Path, extra_bytes: int, offset: int
) -> None:
    room = mmap.mmap(-1, (1 << 20) + 3 * 4096)  # starts on a page
    room[:] = random.Random(extra_bytes).randbytes(len(room))
    data = memoryview(room)[offset : offset + (1 << 20) + extra_bytes]
    write_durably(tmp_path / "large", data, mode=0o600)
    assert (tmp_path / "large").read_bytes() == bytes(data)
    assert [path.name for path in tmp_path.iterdir()] == ["large"]


def test_a_large_file_goes_past_the_page_cache_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    def short(descriptor: int, data: memoryview) -> int:
        sizes.append(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        return write(descriptor, data[: 1 << 19])  # a disk may take less than it is given

    write = os.write
    monkeypatch.setattr(os, "write", short)
    room = mmap.mmap(-1, (1 << 20) + 4096)
    data = memoryview(room)[: (1 << 20) + 7]
    write_durably(tmp_path / "large", data, mode=0o600)
    assert (tmp_path / "large").read_bytes() == bytes(data)
    assert sizes[-1] == 0 and len(sizes) == 3 and len(set(sizes[:-1])) == 1


def test_a_large_file_that_the_disk_refuses_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OperationError):
        write_durably(tmp_path / "large", bytes(1 << 20))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", [True, False])
def test_a_file_that_is_put_back_has_its_mode_again(tmp_path: Path, fails: bool) -> None:
    secret = tmp_path / "coordinator.yaml"
    secret.write_bytes(b"a database's password")
    secret.chmod(0o600)
    with contextlib.suppress(UsageError), undone_on_failure(tmp_path, [secret]):
        write_durably(secret, b"new", 0o644)
        if fails:
            raise UsageError("refused")
    assert secret.read_bytes() == (b"a database's password" if fails else b"new")
    assert stat.S_IMODE(secret.stat().st_mode) == (0o600 if fails else 0o644)


def in_memory(path: Path) -> bool:
    """Whether the page cache holds the first byte: `preadv2(2)` says so and waits for no disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            pytest.skip(f"the file system of {path} does not tell what is in memory")
        raise
    finally:
        os.close(descriptor)


def test_what_is_read_for_the_last_time_leaves_memory_and_not_the_disk() -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # the suite's own folder may have no disk behind it
        path = Path(folder) / "file"
        path.write_bytes(b"x" * (1 << 20))
        with path.open("rb") as file:
            os.fsync(file.fileno())
            assert in_memory(path)
            left = False
            for _ in range(100):  # the kernel takes it as advice: a page that it is at work on stays
                leave_page_cache(file.fileno())
                left = left or not in_memory(path)
        assert left
        assert path.read_bytes() == b"x" * (1 << 20)
        assert in_memory(path)


def test_what_is_not_on_the_disk_yet_is_not_lost_by_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb", buffering=0) as file:
        file.write(b"x" * (1 << 20))
        leave_page_cache(file.fileno())
    assert path.read_bytes() == b"x" * (1 << 20)


def test_a_system_that_refuses_to_give_memory_back_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    with (tmp_path / "file").open("wb") as file:
        leave_page_cache(file.fileno())
