"""`--dry-run`: a command runs until it would change anything, and ends there.

What changes something is met at two places. `would_sign` stands where a person's command is signed. Everything that
Python itself does to files, processes and sockets is met by an audit hook (PEP 578): opening a file for writing,
making, renaming or removing one, changing its mode, opening a database for writing, starting or signalling a process,
sending. So a command that is added later cannot forget its dry run. All that comes before the first change has really
been done: options and files are read and judged.

Does not see: what comes after the first change, and what a native library does by itself (gRPC's calls to the daemon
on this machine, which only read; SQLite's empty -shm and -wal beside a ledger that it reads).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Audit event -> what people are told; the first argument of each names what is changed.
_CHANGES = {
    "os.mkdir": "make the folder", "os.rename": "rename", "os.remove": "remove", "os.rmdir": "remove the folder",
    "os.chmod": "change the mode of", "os.chown": "change the owner of", "os.link": "link", "os.symlink": "link to",
    "os.truncate": "write", "os.utime": "change the time of", "os.setxattr": "change", "os.removexattr": "change",
    "subprocess.Popen": "start", "os.posix_spawn": "start", "os.system": "start", "os.exec": "start",
    "os.fork": "start a process", "os.forkpty": "start a process", "os.kill": "signal process",
    "os.killpg": "signal process group", "socket.connect": "connect to", "socket.bind": "listen at",
    "socket.sendto": "send to", "socket.sendmsg": "send to", "sqlite3.connect": "write",
}  # fmt: skip
_ADDRESS_SECOND = {"socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"}
_TARGET_SECOND = {"os.symlink"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_DEVICES = ("/dev/null", "/dev/tty", "/dev/pts/", "/dev/stdout", "/dev/stderr", "/proc/self/fd/")


@dataclass(frozen=True)
class Signing:
    """A command that would have been signed and sent."""

    site: str
    certificate: Path
    key: Path
    name: str
    arguments: Mapping[str, Any]


class WouldChangeError(BaseException):
    """Raised in place of the first change. No `except Exception` may take it for a failure of its own."""


@dataclass
class DryRun:
    """Result of a dry run.

    Attributes:
        what: the first change in words, such as "make the folder"; empty while nothing was to be changed.
        target: what it would have been done to.
        signing: the command, where the first change is a person's command to a daemon.
    """

    what: str = ""
    target: str = ""
    signing: Signing | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def stop(self, what: str, target: str, signing: Signing | None = None) -> None:
        """Keep the first; every one ends what asked for it. Raises WouldChangeError."""
        with self._lock:
            if not self.what:
                self.what, self.target, self.signing = what, target, signing
        raise WouldChangeError(f"dry run: would {what} {target}")


_active: DryRun | None = None
_hooked = False


@contextmanager
def dry_run() -> Iterator[DryRun]:
    """Within, nothing of this process is changed; for the whole process, so one at a time.

    The context takes WouldChangeError; what would have been changed first stands in what it yields.
    """
    global _active, _hooked  # noqa: PLW0603  # an audit hook belongs to the process and cannot be taken away
    if not _hooked:
        sys.addaudithook(_on_audit_event)
        _hooked = True
    compiled_kept = not sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # compiled modules are no change that anybody asked for
    run = _active = DryRun()
    try:
        yield run
    except WouldChangeError:
        pass
    finally:
        _active = None
        sys.dont_write_bytecode = not compiled_kept


def would_sign(signing: Signing) -> None:
    """To be called before a command is signed. Raises WouldChangeError: within a dry run."""
    if _active is not None:
        _active.stop("sign and send", signing.name, signing)


def _on_audit_event(event: str, arguments: tuple[Any, ...]) -> None:
    run = _active
    if run is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int) or not flags & _WRITES:
            return
        shown = os.fsdecode(path)
        if not shown.startswith(_DEVICES):
            run.stop("write", shown)
        return
    what = _CHANGES.get(event)
    if what is None or _is_harmless(event, arguments):
        return
    target: Any = arguments[0] if arguments else ""
    if event in _ADDRESS_SECOND or event in _TARGET_SECOND:
        target = arguments[1]
    run.stop(what, _shown(target))


def _is_harmless(event: str, arguments: tuple[Any, ...]) -> bool:
    if event == "sqlite3.connect":
        return any(word in str(arguments[0]) for word in ("mode=ro", "immutable=1", ":memory:"))
    if event == "os.mkdir":
        path, _, folder = arguments  # relative to an open folder, unless that is -1
        return folder == -1 and Path(os.fsdecode(path)).is_dir()  # fails, and leaves what is there
    return event in ("os.kill", "os.killpg") and arguments[1] == 0  # asks only whether it lives


def _shown(target: Any) -> str:
    if isinstance(target, bytes | os.PathLike):
        return os.fsdecode(target)
    if isinstance(target, tuple):
        return ":".join(str(part) for part in target[:2])
    return str(target)
