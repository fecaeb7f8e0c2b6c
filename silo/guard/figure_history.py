"""The trainer's figures of this silo, task by task, kept beside the ledger so that curves outlive a restart.

One JSON object a line, `figures.jsonl`, mode 0600. A line that a kill tore is dropped at the next start; what cannot be
read is passed over. The file holds at most `LINES_MAX` lines and is then rewritten with the newest half, in one step,
so it has some 6 MB, and 16 MB whatever the trainer reports. It is for people only: no rule reads it, and a disk that
takes nothing more costs the curve, never the run.

Does not show that a figure is true: it is what the trainer said of itself.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsilo.files.durable import write_all, write_durably
from fedsilo.protocol.errors import FedSiloError

_log = logging.getLogger("fedsilo.silo")

FILE = "figures.jsonl"
LINES_MAX = 8_192
LINE_BYTES_MAX = 2_048
NAMES_MAX = 48
MODE = 0o600


class FigureHistory:
    """Thread-safe. `path` is made with the first figure.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._tell = True  # the first failure of a disk is told, the others are not
        self._lines = 0  # of the file, whatever they hold
        self._entries = self._read()

    def add(self, *, run: str, task: str, number: int, step: int, at: float, figures: Mapping[str, Any]) -> None:
        """Keep what a finished task reported; only finite numbers count.

        Args:
            run: whose plan the task belonged to.
            task: its name.
            number: of the round.
            step: in the round; 0 for what belongs to all of it.
            at: seconds since 1970.
            figures: by name.
        """
        kept = {
            name: value for name, value in list(figures.items())[:NAMES_MAX]
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }  # fmt: skip
        entry = {"run": run, "task": task, "round": number, "step": step, "at": round(at, 3), "figures": kept}
        line = _line(entry)
        if not kept or len(line) > LINE_BYTES_MAX:
            return
        with self._lock:
            self._entries.append(entry)
            try:
                if self._lines >= LINES_MAX:
                    del self._entries[: -(LINES_MAX // 2)]
                    # counted when it is written: while that fails, nothing is appended to a file that is full
                    write_durably(self._path, b"".join(map(_line, self._entries)), MODE)
                    self._lines = len(self._entries)
                else:
                    self._append(line)
                    self._lines += 1
            except (OSError, FedSiloError) as error:
                if self._tell:
                    _log.warning("%s: the curves of this silo are not kept: %s", self._path, error)
                self._tell = False

    def of(self, run: str) -> list[dict[str, Any]]:
        """The entries of one run, oldest first."""
        with self._lock:
            return [entry for entry in self._entries if entry["run"] == run]

    def runs(self) -> list[str]:
        """Runs with figures, newest first."""
        with self._lock:
            return list(dict.fromkeys(entry["run"] for entry in reversed(self._entries)))

    def _read(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as stream:
                lines = stream.read((LINES_MAX + 1) * LINE_BYTES_MAX).split(b"\n")
                self._lines = LINES_MAX if stream.read(1) else len(lines) - 1
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.warning("%s: %s; its curves begin anew", self._path, error.strerror)
            return []
        entries = [entry for line in lines[:-1] if (entry := _entry(line)) is not None][-LINES_MAX:]
        if lines[-1]:
            self._mend(entries)
        return entries

    def _mend(self, entries: list[dict[str, Any]]) -> None:
        """A torn last line would hide the next one."""
        try:
            write_durably(self._path, b"".join(map(_line, entries)), MODE)
            self._lines = len(entries)
        except (OSError, FedSiloError) as error:
            _log.warning("%s: its torn last line stays: %s", self._path, error)

    def _append(self, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, MODE)
        try:
            before = os.fstat(descriptor).st_size
            try:
                # not flushed: a power cut may cost the last figures, and the run waits for no disk
                write_all(descriptor, line)
            except OSError:
                os.ftruncate(descriptor, before)
                raise
        finally:
            os.close(descriptor)


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode("ascii") + b"\n"


def _entry(line: bytes) -> dict[str, Any] | None:
    """One line as it was written, or nothing: whoever can write here is this site's own user, but a disk can err."""
    try:
        entry = json.loads(line)
        kept = {
            "run": str(entry["run"]), "task": str(entry["task"]), "round": int(entry["round"]),
            "step": int(entry["step"]), "at": float(entry["at"]),
            "figures": {
                str(name): value for name, value in entry["figures"].items()
                if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            },
        }  # fmt: skip
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    return kept
