"""A PostgreSQL server of Debian's packages, for as long as the tests of one process run.

It listens on a unix socket in a short folder of its own, never on a port. What it has is thrown away, so nothing is
flushed to a disk: what a power cut leaves no test asks.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT_SECONDS = 60.0
PACKAGED = Path("/usr/lib/postgresql")
SUPERUSER = "fedsilo"
# Against durability, and so that a commit is durable only for whoever asks for it.
_SETTINGS = ("listen_addresses=", "fsync=off", "full_page_writes=off", "synchronous_commit=off", "autovacuum=off",
             "shared_buffers=16MB", "max_connections=60", "max_wal_size=128MB", "wal_level=minimal",
             "max_wal_senders=0")  # fmt: skip


def programs() -> Path | None:
    """The folder with `initdb` and `postgres`; None where they are not installed."""
    found = sorted(PACKAGED.glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    return found[-1].parent if found and (found[-1].parent / "initdb").exists() else None


class PostgresServer:
    """Use as a context.

    Attributes:
        folder: with the socket.
    """

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        memory = Path("/dev/shm")  # noqa: S108  # a folder of ours is made in it
        self.folder = Path(tempfile.mkdtemp(prefix="fs-pg-", dir=memory if os.access(memory, os.W_OK) else None))
        self._numbers = itertools.count(1)
        # the server refuses to run as root
        self._person: dict[str, Any] = {}
        if os.geteuid() == 0:
            names = [name for name in ("postgres", "nobody") if _is_user(name)]
            user = pwd.getpwnam(names[0])
            os.chown(self.folder, user.pw_uid, user.pw_gid)
            self._person = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    def __enter__(self) -> PostgresServer:
        data = self.folder / "data"
        subprocess.run(
            [self._binaries / "initdb", "-D", data, "-U", SUPERUSER, "--auth=trust", "--no-sync", "--encoding=UTF8",
             "--locale=C", "--no-instructions"],
            stdout=subprocess.DEVNULL, cwd=self.folder, check=True, timeout=LIMIT_SECONDS, **self._person,
        )  # fmt: skip
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        command = [self._binaries / "postgres", "-D", data, "-k", self.folder, *settings]
        if mortal := shutil.which("setpriv"):  # tests that are killed leave no server
            command = [mortal, "--pdeathsig", "INT", "--", *command]
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder, **self._person)
        limit = time.monotonic() + LIMIT_SECONDS
        while True:
            try:
                self.execute("SELECT 1")
            except Exception:  # not there yet, or still starting
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(0.02)
                if self._process.returncode is not None or time.monotonic() > limit:
                    self._end()
                    raise
            else:
                return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def url(self, name: str) -> str:
        """Of a database on this server, as an operator writes it."""
        return f"postgresql://{SUPERUSER}@/{name}?host={self.folder}"

    @contextlib.contextmanager
    def database(self, *, options: str = "") -> Iterator[str]:
        """The URL of an empty database, which is gone afterwards."""
        name = f"t{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} {options}")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def execute(self, statement: str, values: tuple[Any, ...] = (), *, database: str = "postgres") -> list[Any]:
        """As the superuser, past everything that is tested."""
        import psycopg

        with psycopg.connect(host=str(self.folder), user=SUPERUSER, dbname=database, autocommit=True) as connection:
            cursor = connection.execute(statement, values)
            return cursor.fetchall() if cursor.description else []

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)  # at once: there is nothing to keep
            self._process.wait(LIMIT_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
