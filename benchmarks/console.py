"""What the console does under load: `python -m benchmarks.console --json [--seconds 60] [--only coordinator|silo]`.

    key_to_paint_p95_seconds       from writing a key to the terminal until the bytes that answer it were read there
    key_to_paint_median_seconds
    memory_growth_bytes            resident memory of the console at the end, less that after 10 seconds
    events_dropped                 that the console says it did not take in
    cpu_share                      of one core, by the console's process

`fedconsole` itself runs in a pseudo-terminal of 140 x 42, on the socket of a daemon in another process
(`benchmarks.console_desks`): a coordinator of 50 silos, then a silo whose log of 100,000 records is paged through, each
with 1,000 events a second. A key's answer is something that stands nowhere before the key: the tab that becomes bold,
the need or the record that gets the cursor.

Beside them: processor seconds of both processes and the machine's load, since on a busy machine a second is others'
work, too. What the terminal needs to draw the bytes is no part of it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import re
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.console_desks import EVENTS_PER_SECOND, IN_TROUBLE, RECORDS, SILOS, SOCKET

CELLS, ROWS = 140, 42
SECONDS = 60.0
WARM_SECONDS = 10.0  # after which memory is compared: every screen was drawn and every list is full by then
KEY_PAUSE_SECONDS = (0.12, 0.5)  # between an answer and the next key, at random: not in step with the readings
ANSWER_SECONDS_MAX = 10.0
START_SECONDS_MAX = 120.0
P95_SECONDS_MAX = 0.15
# Of a coordinator's console nothing grows: 200 events and one snapshot. Of a silo's its two tables fill while somebody
# pages down, each to 5000 rows of up to 4.4 KiB (measured), and stay there.
GROWTH_BYTES_MAX = {"coordinator": 16 << 20, "silo": 2 * 5000 * 4506}
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
CURSOR = "\u25b8"
ROOT = Path(__file__).resolve().parents[1]
PAGES = 12  # down before another screen is looked at
PAGE_DOWN = "\x1b[6~"
DROPPED_SECONDS = 1.5
AT = re.compile(rf"{CURSOR}\s+\d+")
_CONTROL = re.compile(rb"\x1b\[[0-9;?<>=]*[A-Za-z~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[()=>][0-9A-B]?")
_MOVE = re.compile(rb"\x1b\[[0-9;]*H")


def shown(data: bytes) -> str:
    """What was written to a terminal, a line for each place it was written at, without colours."""
    return _CONTROL.sub(b"", _MOVE.sub(b"\n", data)).decode("utf-8", "replace")


class Terminal:
    """A program in a pseudo-terminal: keys in, bytes out, each with its time."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, CELLS, 0, 0))
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.bytes_read = 0

    def read(self, seconds: float) -> bytes:
        """What comes within so many seconds, as soon as anything does."""
        if not select.select([self._master], [], [], max(seconds, 0.0))[0]:
            return b""
        try:
            data = os.read(self._master, 1 << 20)
        except OSError:  # the program ended
            return b""
        self.bytes_read += len(data)
        return data

    def write(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def rest(self, seconds: float) -> None:
        """Draw what comes, and look at none of it."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self.read(left)

    def press(self, key: bytes, answer: re.Pattern[str], *, raw: bool = False) -> tuple[float, str]:
        """Press a key and read until what was written answers it.

        Returns:
            seconds until then, and what answered.

        Raises:
            SystemExit: no answer in `ANSWER_SECONDS_MAX`.
        """
        begun = time.perf_counter()
        self.write(key)
        return self.until(answer, begun, ANSWER_SECONDS_MAX, raw=raw)

    def until(self, answer: re.Pattern[str], begun: float, seconds: float, *, raw: bool = False) -> tuple[float, str]:
        data = b""
        while (left := begun + seconds - time.perf_counter()) > 0:
            data += self.read(left)
            read_at = time.perf_counter()
            found = answer.search(data.decode("utf-8", "replace") if raw else shown(data))
            if found is not None:
                return read_at - begun, found[0]
        raise SystemExit(f"nothing like {answer.pattern!r} within {seconds:g} s:\n{shown(data)[-3000:]}")

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> int:
        self.write(b"\x11")  # ctrl+q
        self.rest(0.5)
        try:
            return self.process.wait(ANSWER_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            return self.process.wait()
        finally:
            os.close(self._master)


# ---- keys, and what answers them -------------------------------------------------------------------


def tab(key: str, name: str) -> re.Pattern[str]:
    """The tab of a place, in bold: it is there."""
    return re.compile(rf"\x1b\[(?:[0-9;]*;)?1(?:;[0-9;]*)?m ?{key}\W{name}")


@dataclass
class Keys:
    """One key after the other, each with the pattern of its answer."""

    terminal: Terminal
    seconds: list[float] = field(default_factory=list)

    def press(self, key: str, answer: re.Pattern[str], *, raw: bool = False) -> str:
        taken, found = self.terminal.press(key.encode(), answer, raw=raw)
        self.seconds.append(taken)
        self.terminal.rest(random.uniform(*KEY_PAUSE_SECONDS))  # noqa: S311  # no secret
        return found


def coordinator_keys(keys: Keys) -> Iterator[None]:
    """Overview, from need to need, and through the places that there are; a turn each time."""
    from console.actions import PLACES

    while True:
        for step, silo in (("j", IN_TROUBLE[1]), ("j", IN_TROUBLE[2]), ("k", IN_TROUBLE[1]), ("k", IN_TROUBLE[0])):
            keys.press(step, re.compile(f"{CURSOR}\\W+{silo} reports"))
            yield
        for place in (*PLACES[1:], PLACES[0]):
            keys.press(place.key, tab(place.key, place.title), raw=True)
            yield


def silo_keys(keys: Keys) -> Iterator[None]:
    """Page down through the log and through the outbox; a look at the overview, and on from where it was."""
    while True:
        for key, name in (("6", "Audit"), ("5", "Outbox")):
            keys.press(key, tab(key, name), raw=True)
            yield
            _, here = keys.terminal.until(AT, time.perf_counter(), ANSWER_SECONDS_MAX)
            for _ in range(PAGES):
                number = here.split()[-1]
                here = keys.press(PAGE_DOWN, re.compile(rf"{CURSOR}\s+(?!{number}\b)\d+"))
                yield
        keys.press("1", tab("1", "Overview"), raw=True)
        yield


# ---- one daemon ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """A daemon, and what is done at its console."""

    kind: str
    keys: Callable[[Keys], Iterator[None]]
    first: str  # stands on the console once it has read the daemon


WATCHED = (Watched("coordinator", coordinator_keys, "silo_07"), Watched("silo", silo_keys, "hospital_a"))


def measure(watched: Watched, folder: Path, seconds: float, per_second: int) -> dict[str, Any]:
    daemon = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.console_desks", watched.kind, str(folder), "--events", str(per_second)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        assert daemon.stdout is not None and daemon.stdin is not None
        if daemon.stdout.readline().strip() != "ready":
            raise SystemExit(f"the daemon of the {watched.kind} did not start")
        figures = _at_the_console(watched, folder / SOCKET, seconds)
        daemon.stdin.close()
        told = json.loads(daemon.stdout.readline())
    finally:
        daemon.kill()
        daemon.wait()
    figures["daemon_cpu_share"] = round(told["cpu_seconds"] / told["seconds"], 3)
    figures["events_per_second"] = round(told["published"] / told["seconds"], 1)
    return figures


def _at_the_console(watched: Watched, socket: Path, seconds: float) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    command = [sys.executable, "-m", "fedsilo.cli", "fedconsole", "--socket", str(socket)]
    terminal = Terminal(command, environment | {"TERM": "xterm-256color", "COLORTERM": "truecolor"})
    try:
        begun = time.perf_counter()
        start_seconds, _ = terminal.until(re.compile(watched.first), begun, START_SECONDS_MAX)
        terminal.rest(1.0)
        keys = Keys(terminal)
        began, cpu_before, memory_warm = time.monotonic(), terminal.cpu_seconds(), 0
        turns = watched.keys(keys)
        while (gone := time.monotonic() - began) < seconds:
            next(turns)
            if not memory_warm and gone >= min(WARM_SECONDS, seconds / 3):
                memory_warm = terminal.resident_bytes()
        cpu, memory, lasted = terminal.cpu_seconds() - cpu_before, terminal.resident_bytes(), time.monotonic() - began
        dropped = _dropped(terminal)
    finally:
        status = terminal.close()
    if status != 0:
        raise SystemExit(f"the console ended with {status}")
    return {
        "keys": len(keys.seconds),
        "key_to_paint_p95_seconds": round(statistics.quantiles(keys.seconds, n=20)[-1], 4),
        "key_to_paint_median_seconds": round(statistics.median(keys.seconds), 4),
        "key_to_paint_max_seconds": round(max(keys.seconds), 4),
        "memory_bytes": memory,
        "memory_growth_bytes": memory - memory_warm,
        "events_dropped": dropped,
        "cpu_share": round(cpu / lasted, 3),
        "start_seconds": round(start_seconds, 2),
        "painted_bytes_per_second": round(terminal.bytes_read / lasted),
    }


def _dropped(terminal: Terminal) -> int:
    """What the overview says of events that were missed."""
    terminal.write(b"7")  # from wherever it is, so that the overview is drawn whole
    terminal.rest(0.5)
    terminal.write(b"1")
    begun, data = time.perf_counter(), b""
    while time.perf_counter() - begun < DROPPED_SECONDS:
        data += terminal.read(0.2)
    found = re.findall(r"([\d,]+) events missed", shown(data))
    return int(found[-1].replace(",", "")) if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="accepted for symmetry; the output is always JSON")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at each console")
    parser.add_argument("--events", type=int, default=EVENTS_PER_SECOND, help="published a second")
    parser.add_argument("--only", choices=[watched.kind for watched in WATCHED], help="one daemon")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    parts: dict[str, dict[str, Any]] = {}
    for watched in WATCHED:
        if options.only in (None, watched.kind):
            with tempfile.TemporaryDirectory(prefix="fedc-") as name:
                parts[watched.kind] = measure(watched, Path(name), options.seconds, options.events)
    figures: dict[str, Any] = {
        name: max(part[name] for part in parts.values())
        for name in ("key_to_paint_p95_seconds", "key_to_paint_median_seconds", "memory_growth_bytes",
                     "events_dropped", "cpu_share")
    }  # fmt: skip
    limits = {"key_to_paint_p95_seconds": P95_SECONDS_MAX, "memory_growth_bytes": GROWTH_BYTES_MAX}
    kept = {
        "key_to_paint_p95_seconds": figures["key_to_paint_p95_seconds"] <= P95_SECONDS_MAX,
        "memory_growth_bytes": all(part["memory_growth_bytes"] <= GROWTH_BYTES_MAX[k] for k, part in parts.items()),
    }
    conditions = {
        "cores": os.cpu_count(), "load_average_before": round(load_before, 2), "seconds": options.seconds,
        "silos": SILOS, "audit_records": RECORDS, "events_per_second": options.events, "cells": [CELLS, ROWS],
        "parts": parts, "limits": limits, "kept": kept,
    }  # fmt: skip
    sys.stdout.write(json.dumps({"name": "console", "figures": figures, "conditions": conditions}) + "\n")
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
