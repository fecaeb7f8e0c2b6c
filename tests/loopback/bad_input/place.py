"""One federation on disk with something wrong in it, and the real commands and daemons run against it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LIMIT_SECONDS = 120.0  # a limit that is reached means that something hangs
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ROOT = Path(__file__).parents[3]
HASH = r"[0-9a-f]{64}"


@dataclass(frozen=True)
class Done:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one line that says what was wrong; nothing may look like a traceback."""
        assert "Traceback" not in self.stderr + self.stdout
        (line,) = [line for line in self.stderr.splitlines() if line.startswith("error: ")]
        assert re.search(r" \[[A-Z_0-9]+\]$", line)
        return line

    @property
    def hint(self) -> str:
        return next((line for line in self.stderr.splitlines() if line.startswith("hint: ")), "")


def command(*arguments: object) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", "fedsilo.cli", *map(str, arguments)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr)


@dataclass
class Daemon:
    """A daemon in the foreground of its own process; what it says on stderr is read line by line."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)

    def ready(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "ready" in line, self.ended().stderr
        return line

    def until(self, words: str) -> str:
        """The next line on stderr that holds the words."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} was not said: {''.join(self.said)}")

    def ended(self) -> Done:
        stdout, stderr = self.process.communicate(timeout=LIMIT_SECONDS)
        return Done(self.process.returncode, stdout, "".join(self.said) + stderr)


@contextlib.contextmanager
def daemon(*arguments: object) -> Iterator[Daemon]:
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsilo.cli", *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    watchdog = threading.Timer(LIMIT_SECONDS, process.kill)
    watchdog.start()
    try:
        yield Daemon(process)
    finally:
        watchdog.cancel()
        process.terminate()
        process.communicate()


@dataclass(frozen=True)
class Place:
    """One federation on disk: two silos, a coordinator, a model, data. The path is short: sockets lie below it."""

    root: Path
    port: int

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def config(self) -> Path:
        return self.root / "hospital_a" / "silo.yaml"

    @property
    def policy(self) -> Path:
        return self.root / "hospital_a" / "policy.yaml"

    @property
    def coordinator(self) -> Path:
        return self.root / "coordinator" / "coordinator.yaml"

    @property
    def private(self) -> Path:
        return self.root / "data" / "private" / "hospital_a.jsonl"

    @property
    def state(self) -> Path:
        return self.root / "hospital_a" / "state"

    def start(self) -> Done:
        return command("silo", "start", "--config", self.config)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert len(re.findall(old, text, re.M)) == 1, f"{old} in {path}"
    path.write_text(re.sub(old, new, text, flags=re.M))
