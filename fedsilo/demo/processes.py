"""The demo's child processes: started with their log files, watched, and ended in order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsilo.files.durable import holder_of
from fedsilo.protocol.errors import OperationError

STOP_SECONDS, STOP_SECONDS_EACH = 20.0, 0.5  # of all, and more for each of them: they share a machine
POLL_SECONDS = 0.05


def wait_for_end(lock: Path, seconds: float) -> None:
    """Wait until no process holds a daemon's lock file. Raises OperationError: one still does after `seconds`."""
    deadline = time.monotonic() + seconds
    while process_id := holder_of(lock):
        if time.monotonic() > deadline:
            raise OperationError(f"process {process_id} has not ended within {seconds:g} s")
        time.sleep(POLL_SECONDS)


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold interrupts back while a process exists that is not on the list of those to end. Main thread only."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {
        number: signal.signal(number, lambda caught_number, _: caught.append(caught_number)) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in caught:
        signal.raise_signal(late)


@dataclass
class Child:
    """One process. `log` holds its stderr; its stdout carries one ready line.

    `may_end`: it is part of what is shown that it ends by itself.
    """

    name: str
    process: subprocess.Popen[str]
    log: Path
    may_end: bool = False

    def ready(self) -> dict[str, Any]:
        """Wait for the one JSON envelope that says it stands. Raises OperationError: it ended, or said no."""
        assert self.process.stdout is not None  # noqa: S101  # opened as a pipe below
        line = self.process.stdout.readline()
        try:
            reply = json.loads(line)
        except ValueError:
            raise OperationError(f"{self.name} did not start: {self.last_words()}", hint=f"see {self.log}") from None
        if not reply["ok"]:
            error = reply["error"]
            raise OperationError(f"{self.name} did not start: {error['message']}", hint=error["hint"] or str(self.log))
        return dict(reply["data"])

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


@dataclass
class Children:
    """Started in order, ended in reverse. Each gets a session of its own, so that Ctrl-C reaches only the demo,
    which then ends them one after the other; they end by themselves where the demo was killed (`ends_with_parent`)."""

    environment: dict[str, str] = field(default_factory=dict)
    _children: list[Child] = field(default_factory=list)

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        log: Path,
        *,
        module: str = "fedsilo.cli",
        environment: Mapping[str, str] | None = None,
        may_end: bool = False,
    ) -> Child:
        """Start `python -m MODULE ARGUMENTS`, with further variables for this one alone."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stderr, _interrupts_deferred():
            process = subprocess.Popen(
                # -P: a folder named `coordinator` where the demo was started (an earlier demo's) is not our package
                [sys.executable, "-P", "-m", "fedsilo.cli.ends_with_parent", module, *arguments],
                stdin=subprocess.PIPE,  # nothing is written: it closes with this process
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **self.environment, **(environment or {})},
                start_new_session=True,
            )
            child = Child(name, process, log, may_end)
            self._children.append(child)
        return child

    def raise_for_dead(self) -> None:
        """Look for processes that ended. Raises OperationError: one ended by itself, with its last log line."""
        for child in self._children:
            code = child.process.poll()
            if code is not None and not child.may_end:
                raise OperationError(
                    f"{child.name} ended by itself with exit code {code}: {child.last_words()}", hint=f"see {child.log}"
                )

    def running(self, name: str) -> bool:
        return any(child.name == name and child.process.poll() is None for child in self._children)

    def count(self) -> int:
        """Living processes of ours: the children and their own children, grading workers left out."""
        parents = {child.process.pid for child in self._children if child.process.poll() is None}
        processes = set(parents)
        commands: dict[int, tuple[int, str]] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError, ValueError):
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                    commands[int(entry.name)] = (parent, (entry / "cmdline").read_text())
        grew = True
        while grew:
            grew = False
            for pid, (parent, _) in commands.items():
                if parent in processes and pid not in processes:
                    processes.add(pid)
                    grew = True
        workers = sum("silo.trainer.worker" in commands[pid][1] for pid in processes - parents if pid in commands)
        return len(parents) + min(workers, len(processes) - len(parents))

    def stop(self) -> list[str]:
        """End all politely, then not: first what was started last, all of one kind at once, so that the silos can still
        say goodbye to the coordinator. Returns the names of those that had to be killed."""
        killed: list[str] = []
        for group in (self._children[1:], self._children[:1]):
            for child in group:
                if child.process.poll() is None:
                    child.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS + len(group) * STOP_SECONDS_EACH
            for child in group:
                try:
                    child.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(child.process.pid, signal.SIGKILL)
                    child.process.wait()
                    killed.append(child.name)
                for pipe in (child.process.stdin, child.process.stdout):
                    if pipe is not None:
                        pipe.close()
        self._children.clear()
        return killed
