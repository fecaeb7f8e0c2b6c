"""Files as a security daemon needs them: private by mode, durable at return, never through a link, one writer.

Covers threat T31 (keys are 0600 whatever the umask, never follow a link, never replace a file, leave nothing half
written) and the file half of T39 and T42 (what was written survives a power cut; a second daemon is refused; below a
minimum of free space no daemon starts). A `PartialFile` holds bytes that come over a line which may be cut at any of
them: whoever opens it again goes on where it ends. What was written is there after `kill -9` of the writer. After a
power cut it may hold something else than what came: whoever has all the bytes compares the digest, and where they
are not what it names, everything comes again.
Does not cover: a reader running as the same user or as root, disks that report a flush they did not do, a disk that
fills up between a look at its space and the next write (every write reports that itself), a user's quota.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType

from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError, OperationError, UsageError

PRIVATE_MODE = 0o600
FOLDER_MODE = 0o755  # of a folder for files that are no secret: whatever the umask, nobody else may write there
# EFBIG: a file-size limit of the process, which to whoever writes is the same as a full disk
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_LARGE_BYTES, _PAGE_BYTES = 1 << 20, 4096
FLUSHED_BYTES = 8 << 20  # of a file that grows, when `EarlyFlush` begins anew
_INPUT_BYTES_MAX = 1 << 30
_LINKS_MAX = 40  # as Linux follows them


class DiskFullError(OperationError):
    """There is no room for it, and nothing of it was written."""

    default_code = "DISK_FULL"


def disk_error(what: str, error: OSError, if_full: str = "") -> OperationError:
    """A disk's refusal, to be raised.

    Args:
        what: could not be done, and to which file.
        error: of the system.
        if_full: hint where it is space that is lacking.
    """
    message = f"{what}: {error.strerror}"
    return DiskFullError(message, hint=if_full) if error.errno in FULL else OperationError(message)


def write_private(path: Path, data: bytes) -> None:
    """Create `path` with mode 0600 and write `data` durably. The umask does not matter.

    Raises:
        ConflictError: something is there already (a link counts): keys are never replaced.
        OperationError: the disk refused; nothing is left behind.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_MODE)
    except FileExistsError as error:
        raise ConflictError(
            f"{path} exists already", hint="move the old file away first; private files are never replaced"
        ) from error
    except OSError as error:
        raise disk_error(f"cannot create {path}", error) from error
    try:
        try:
            os.fchmod(descriptor, PRIVATE_MODE)
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        fsync_directory(path.parent)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise disk_error(f"cannot write {path}", error) from error


def write_durably(path: Path, data: bytes | memoryview, mode: int = 0o644, *, tail: bytes = b"") -> None:
    """Replace `path` by `data` in one step: after a crash the old or the new content is there, never a mixture.

    tail: written behind `data`, which need not be copied to have it there.

    A link at `path` is itself replaced, not followed.

    Raises:
        OperationError: the disk refused; the old content stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        _write_new(temporary, data, mode, tail)
        temporary.replace(path)
        fsync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(f"cannot write {path}", error) from error


def _write_new(
    path: Path, data: bytes | memoryview, mode: int, tail: bytes = b"", wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Return whether all of it is on the disk: not, where it is `wanted` no more in the meantime."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        os.fchmod(descriptor, mode)
        view = memoryview(data)
        for start in range(0, len(view), FLUSHED_BYTES):
            if not wanted():
                return False
            piece = view[start : start + FLUSHED_BYTES]
            if len(view) >= _LARGE_BYTES:
                write_past_cache(descriptor, piece)
            else:
                write_all(descriptor, piece)
        write_all(descriptor, tail)
        os.fsync(descriptor)
        return True
    finally:
        os.close(descriptor)


class WrittenAhead:
    """Bytes that go to the disk, in a thread of their own, while it is still found out whether they are kept.

    Args:
        folder: where they are to be kept; until then they have a name there as `write_durably` gives, .*.tmp.
        data: nobody changes it until `keep` or `abandon` has returned.
        mode: of the file.
    """

    def __init__(self, folder: Path, data: bytes | memoryview, mode: int) -> None:
        self.data = data
        self._mode = mode
        self._temporary = folder / f".{secrets.token_hex(8)}.tmp"
        self._fault: OSError | None = None
        self._is_wanted, self._is_whole, self._has_begun = True, False, False
        self._thread = threading.Thread(target=self._write, daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread is to be had: `keep` writes it
            self._thread.start()
            self._has_begun = True

    def keep(self, path: Path) -> None:
        """Put the file in its place, as durably as `write_durably` does. Raises OperationError: the disk refused."""
        if self._has_begun:
            self._thread.join()
        else:
            self._write()
        try:
            if self._fault is not None:
                raise self._fault
            if not self._is_whole:  # whatever ended the thread, a part of it is not kept for the whole
                raise OSError(errno.EIO, "it was not written to its end")
            self._temporary.replace(path)
            fsync_directory(path.parent)
        except OSError as error:
            self.abandon()
            raise disk_error(f"cannot write {path}", error) from error

    def abandon(self) -> None:
        """Stop writing and remove what was written."""
        self._is_wanted = False
        if self._has_begun:
            self._thread.join()
        self._remove()

    def _write(self) -> None:
        try:
            self._is_whole = _write_new(self._temporary, self.data, self._mode, wanted=lambda: self._is_wanted)
        except OSError as error:
            self._fault = error
        finally:
            if not self._is_whole:  # what it holds of a full disk is needed for the record of it
                self._remove()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)


def remove_durably(path: Path) -> None:
    """Remove a file, if it is there, so that a crash does not bring it back. Raises OperationError."""
    try:
        path.unlink(missing_ok=True)
        fsync_directory(path.parent)
    except OSError as error:
        raise OperationError(f"cannot remove {path}: {error.strerror}") from error


def read_private(path: Path) -> bytes:
    """The content of a private file, read through one descriptor so that what was checked is what is read.

    Raises:
        NotFoundError: no such file.
        NotAllowedError: a link, not a plain file, owned by another user, or readable or writable by group or others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist") from error
    except OSError as error:
        raise NotAllowedError(
            f"cannot open {path}: {error.strerror}", hint="it must be a plain file, not a link"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotAllowedError(f"{path} is not a plain file")
        if status.st_uid not in (os.geteuid(), 0):
            raise NotAllowedError(f"{path} belongs to user {status.st_uid}", hint=f"chown it to user {os.geteuid()}")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise NotAllowedError(
                f"{path} has mode {stat.S_IMODE(status.st_mode):04o}; others may read or change it",
                hint=f"chmod 600 {path}",
            )
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(descriptor)


def require_authority(path: Path) -> None:
    """Check that nobody but root and this process's user can decide what a file says: the file and each folder on the
    way to it, links followed, belong to one of the two, and neither their group nor others may write them (threat T59).

    A folder with the sticky bit, such as /tmp, passes: in it nobody can move or remove what is somebody else's. What is
    not there is not judged; whoever reads it says so.
    Does not stop: root, this user, and whoever holds a right that the mode does not show.

    Raises:
        NotAllowedError: the file, or a folder on the way, with the command that mends it (`WRITABLE_BY_OTHERS`).
        OperationError: it cannot be looked at.
    """
    try:
        for place in _on_the_way(path.absolute()):
            _require_ours(path, place, place.lstat())
    except FileNotFoundError:
        return
    except OSError as error:
        raise OperationError(f"cannot look at {path}: {error.strerror}") from error


def _on_the_way(path: Path) -> Iterator[Path]:
    """Every folder and link that is gone through to come to a file, and the file itself."""
    at, left, links = Path(path.anchor), list(path.parts[1:]), 0
    yield at
    while left:
        part = left.pop(0)
        at = at.parent if part == ".." else at / part
        yield at
        if at.is_symlink():
            if (links := links + 1) > _LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            target = at.readlink()
            left = [*(target.parts[1:] if target.is_absolute() else target.parts), *left]
            at = Path(target.anchor) if target.is_absolute() else at.parent


def _require_ours(path: Path, place: Path, status: os.stat_result) -> None:
    whose = str(place) if place == path else f"{place}, on the way to {path},"
    if status.st_uid not in (os.geteuid(), 0):
        raise NotAllowedError(
            f"{whose} belongs to user {status.st_uid}, who can change what this party obeys",
            hint=f"chown it to root or to user {os.geteuid()}",
            code="WRITABLE_BY_OTHERS",
        )
    if stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
        return
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotAllowedError(
            f"{whose} has mode {stat.S_IMODE(status.st_mode):04o}: others can change what this party obeys",
            hint=f"chmod go-w {place}",
            code="WRITABLE_BY_OTHERS",
        )


def read_regular(path: Path, *, hint: str = "", bytes_max: int = _INPUT_BYTES_MAX) -> bytes:
    """The content of a file that somebody named. Links are followed; a pipe that nobody writes into is not waited for.

    Does not stop: a regular file on a network disk that hangs.

    Raises:
        NotFoundError: no such file; with the hint.
        UsageError: a folder, a pipe, a device or a socket; one that may not be read, or is larger than `bytes_max`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} does not exist", hint=hint) from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no file can have that name"
        raise UsageError(f"cannot read {path}: {why}", hint=hint) from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            what = "a folder" if stat.S_ISDIR(mode) else "a pipe, a device or a socket"
            raise UsageError(f"cannot read {path}: it is {what}, not a file", hint=hint)
        with os.fdopen(descriptor, "rb", closefd=False) as stream:
            data = stream.read(bytes_max + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=hint) from error
    finally:
        os.close(descriptor)
    if len(data) > bytes_max:
        raise UsageError(f"{path} is larger than {bytes_max} bytes", hint=hint)
    return data


@contextlib.contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Around what fills a folder: where that fails (a full disk, Ctrl-C), nothing is left that looks like a result.

    A folder that was there before stays, empty as it was; one with anything in it is not touched.
    Does not stop: a kill, or a power cut; then a part may stay.

    Raises:
        OperationError: a file cannot be copied or written.
    """
    there = folder.exists()
    stays = there and (not folder.is_dir() or any(folder.iterdir()))
    try:
        yield
    except BaseException as error:
        if not stays:
            for inner in list(folder.iterdir()) if there else [folder]:
                shutil.rmtree(inner, ignore_errors=True)
                with contextlib.suppress(OSError):
                    inner.unlink(missing_ok=True)
        if isinstance(error, OSError):
            why = _first_why(error) if isinstance(error, shutil.Error) else error.strerror or str(error)
            hint = "" if stays else "nothing was left there"
            raise OperationError(f"cannot write {folder}: {why}", hint=hint) from error
        raise


@contextlib.contextmanager
def undone_on_failure(folder: Path, files: Iterable[Path]) -> Iterator[None]:
    """Around what writes some files into a folder: where that fails, they are as they were before.

    Folders that were made for them go too, where nothing else is in them. Does not stop: a kill, or a power cut.

    Args:
        folder: that all of them are in or below.
        files: what may be written.
    """
    places = list(files)
    before = {place: (place.read_bytes(), stat.S_IMODE(place.stat().st_mode)) for place in places if place.is_file()}
    folders = {folder, *folder.parents, *(each for place in places for each in place.parents if folder in each.parents)}
    made = sorted((each for each in folders if not each.exists()), key=lambda each: len(each.parts), reverse=True)
    try:
        yield
    except BaseException:
        for place in places:
            if place not in before:
                with contextlib.suppress(OSError):
                    if place.exists():
                        place.unlink()
            elif not place.is_file() or (place.read_bytes(), stat.S_IMODE(place.stat().st_mode)) != before[place]:
                write_durably(place, *before[place])
        for each in made:
            with contextlib.suppress(OSError):
                if each.exists():
                    each.rmdir()
        raise


def _first_why(error: shutil.Error) -> str:
    """Return the first reason of copytree's list of (source, target, why), in which each why is in Python's words."""
    reason = error.args[0] if error.args else []
    if not isinstance(reason, list) or not reason:
        return "it could not be copied"
    source, _, why = reason[0]
    return f"{Path(str(source)).name}: {str(why).partition('] ')[2].partition(':')[0] or why}"


class FileLock:
    """An exclusive lock on a file, held until `release` or the end of the process. Made by `lock_exclusively`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FileLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_exclusively(path: Path) -> FileLock:
    """Take the lock file `path`, creating it if needed; the process id of the holder is written into it.

    The lock is the kernel's (flock): it vanishes with the process, so a killed daemon leaves no stale lock.

    Raises:
        ConflictError: another process holds it; the message names the process.
        OperationError: the file cannot be opened or written.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_MODE)
    except OSError as error:
        raise OperationError(f"cannot open lock file {path}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise ConflictError(
            f"{path} is held by process {holder}", hint="stop the other process; two at once would fork the state"
        ) from error
    # The process id is for the reader of an error message only: a full disk must not keep the daemon from starting.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return FileLock(path, descriptor)


def holder_of(lock: Path) -> int:
    """The process that holds a daemon's lock file; 0 if none does. The kernel lets go of it with the process, so a
    stale process id is never told.

    Raises:
        OperationError: it is held and names no process, or is not ours to look at.
    """
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise OperationError(f"cannot open lock file {lock}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: who asks keeps nobody else from asking
        return 0
    except BlockingIOError:
        process_id = int(os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or 0)
        if process_id <= 0:
            raise OperationError(f"{lock} names no process") from None
        return process_id
    finally:
        os.close(descriptor)


def make_private_directory(path: Path) -> None:
    """Create `path` (and parents) with mode 0700; one that exists must be a directory, not a link.

    Raises:
        UsageError: something else is there.
        OperationError: it cannot be created.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError as error:
        raise UsageError(f"{path} exists and is not a directory") from error
    except OSError as error:
        raise disk_error(f"cannot create {path}", error) from error
    if path.is_symlink():
        raise UsageError(f"{path} is a link; name the directory itself")


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; a disk that takes only a part is asked again and then reports why. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_past_cache(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte where the descriptor stands, as `write_all` does; whole pages go from the buffer to the disk
    without a copy in the page cache where the file system and the buffer's address allow it, which takes two thirds of
    the time, and less where memory that nobody had before is dear. Raises OSError."""
    flags, view, start = fcntl.fcntl(descriptor, fcntl.F_GETFL), memoryview(data), os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | getattr(os, "O_DIRECT", 0))
        write_all(descriptor, view[: len(view) // _PAGE_BYTES * _PAGE_BYTES])
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    write_all(descriptor, view[os.lseek(descriptor, 0, os.SEEK_CUR) - start :])


class EarlyFlush:
    """Brings a file to the disk while more is being written to it, so that little is left to wait for at its end.

    Args:
        descriptor: of the file; open until `end` or `abandon` has returned.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._running: threading.Thread | None = None
        self._fault: OSError | None = None

    def begin(self) -> None:
        """Begin to flush what is written by now; where the disk is still busy with what was before, that goes on."""
        if self._running is None or not self._running.is_alive():
            running = threading.Thread(target=self._flush, daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is to be had: `end` flushes all
                running.start()
                self._running = running

    def end(self) -> None:
        """Wait until all that was written is on the disk. Raises OSError: the disk refused, now or before."""
        self.abandon()
        if self._fault is None:
            self._flush()
        if self._fault is not None:
            raise self._fault

    def abandon(self) -> None:
        """Stop flushing, and wait until nothing is going to the disk any more."""
        if self._running is not None:
            self._running.join()

    def _flush(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:  # the kernel tells of a fault once
            self._fault = error


def leave_page_cache(descriptor: int) -> None:
    """Give back the page cache of a file that nobody here is likely to read again soon.

    The kernel would keep it for as long as there is memory that nobody uses, and that is the dearest to take: on a
    virtual machine whose host gives memory at its first touch, a page costs several times what copying into it does.
    What was given back is taken again by the next file and costs the copy alone. A hint: pages that are mapped, or
    not on the disk yet, stay. Where the system has no such call, or refuses it, all do.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def fsync_directory(path: Path) -> None:
    """Make names created, replaced or removed in `path` durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- free space ------------------------------------------------------------------------------------------------------


DISK_BYTES_MIN = 64 << 20


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the file system on which the folder lies, or will lie. Raises OperationError: it cannot
    be looked at."""
    try:
        place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        return shutil.disk_usage(place).free
    except OSError as error:
        raise OperationError(
            f"cannot look at the space of {folder}: {error.strerror}", hint="run it as the user whose files they are"
        ) from error


def require_space(folder: Path) -> str:
    """Return what is free for a state folder, in words.

    Raises:
        DiskFullError: too little to keep a record. OperationError: nothing can be written there, or as `free_bytes`.
    """
    free = free_bytes(folder)
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        purpose = "" if place == folder.absolute() else f", and {folder} must be kept in it"
        raise OperationError(
            f"{place} cannot be written by this user{purpose}",
            hint="run it as the user whose files they are, or mount the file system for writing",
        )
    if free < DISK_BYTES_MIN:
        raise DiskFullError(
            f"{folder} has {free} bytes left; {DISK_BYTES_MIN} are needed to keep a record",
            hint="free some space: what cannot be recorded is neither sent nor taken",
        )
    return f"{free} bytes free for {folder}"


# ---- files that arrive in pieces -------------------------------------------------------------------------------------


_PIECE_BYTES = 1 << 20


class PartialFile:
    """Opened where it ends, or empty.

    Args:
        path: of the file; made (0600) where it is not there.
        whole_bytes: of what is coming; a file that is longer is not the beginning of it, and is emptied.
        hashed: whether `digest` is asked for; who holds all the bytes hashes them at once.

    Raises (all methods):
        OSError: the disk refused, or a link lies there.
    """

    def __init__(self, path: Path, *, whole_bytes: int, hashed: bool = True) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o600)
        self._hash = hashlib.sha256() if hashed else None
        self._flush = EarlyFlush(self._descriptor)
        self.size_bytes = 0
        try:
            if os.fstat(self._descriptor).st_size > whole_bytes:
                os.ftruncate(self._descriptor, 0)
            if self._hash is None:
                self.size_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)
            else:
                while piece := os.read(self._descriptor, _PIECE_BYTES):
                    self._hash.update(piece)
                    self.size_bytes += len(piece)
        except OSError:
            os.close(self._descriptor)
            raise
        self.resumed_at = self.size_bytes

    def write(self, chunk: bytes | memoryview) -> None:
        view = memoryview(chunk)
        if self._hash is not None:
            self._hash.update(view)
        write_all(self._descriptor, view)
        before, self.size_bytes = self.size_bytes, self.size_bytes + len(view)
        if before // FLUSHED_BYTES != self.size_bytes // FLUSHED_BYTES:
            self._flush.begin()

    def restart(self) -> None:
        """Forget what is there: it comes again from the first byte."""
        if self.size_bytes:  # ext4 writes out at close what was cut to nothing, for whoever replaces a file so
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        self._hash = None if self._hash is None else hashlib.sha256()
        self.size_bytes = self.resumed_at = 0

    def view(self) -> memoryview:
        """Return all bytes of the file, mapped; the file may be removed then. Raises ValueError: nothing is there."""
        self._flush.begin()  # it goes to the disk while its reader looks at it
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # at once: page by page takes as long as hashing
        return memoryview(mmap.mmap(self._descriptor, self.size_bytes, flags=flags, prot=mmap.PROT_READ))

    @property
    def digest(self) -> str:
        """SHA-256 of all that is there."""
        if self._hash is None:
            raise ValueError("it was opened without a hash")
        return self._hash.hexdigest()

    def close(self) -> None:
        """Close the file, with its bytes on the disk. Closing twice is harmless."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            self._flush.end()
        finally:
            os.close(descriptor)

    def drop(self) -> None:
        """Remove it, unless it has another name by now."""
        self.path.unlink(missing_ok=True)
        if self._descriptor >= 0:
            self._flush.abandon()
            os.close(self._descriptor)
            self._descriptor = -1
