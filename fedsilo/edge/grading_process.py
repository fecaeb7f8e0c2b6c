"""Grading in a child process that can be killed: a verifier that hangs, crashes or eats memory costs one item.

The child stays alive across batches and grades one item after the other; it answers with one byte an item, so the
parent knows on which item it hangs. An item past its deadline, or that kills the child, scores 0 and is counted; the
child is started again for the rest (methods 1.2). The child gets an almost empty environment, limits on memory and
core files, and no descriptor but its pipes. What this does not stop: a verifier that writes files or opens sockets;
none here does, and the one that would run programs (`code`) is refused.

    request   4-byte little-endian length, JSON [[response, reference], ...]
    reply     one byte when ready, then one byte an item: the index of its VerdictCode
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from fedsilo.treaty import grading
from fedsilo.treaty.errors import OperationError, UsageError
from fedsilo.treaty.grading.verdict import CRASHED, ERROR, TIMEOUT, Verdict, VerdictCode

DEADLINE_SECONDS = 5.0
START_TIMEOUT_SECONDS = 120.0
CLOSE_TIMEOUT_SECONDS = 2.0
MEMORY_BYTES_MAX = 4 << 30
_LENGTH = struct.Struct("<I")
_CODES = tuple(VerdictCode)
_READY = 255
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "TMPDIR")


@dataclass
class GradingCounts:
    """What happened so far."""

    graded: int = 0
    errors: int = 0
    timeouts: int = 0
    crashes: int = 0


class GradingProcess:
    """One child for one verifier; safe to use from several threads, one batch at a time.

    Args:
        verifier: a name of `treaty.grading.VERIFIERS`, not one that runs programs.
        deadline_seconds: what one item may take.
        memory_bytes_max: address space of the child.

    Raises:
        UsageError: unknown verifier, or one that runs programs.
    """

    def __init__(
        self, verifier: str, *, deadline_seconds: float = DEADLINE_SECONDS, memory_bytes_max: int = MEMORY_BYTES_MAX
    ) -> None:
        if grading.require_verifier(verifier).executes:
            raise UsageError(
                f"the verifier {verifier!r} runs a program and there is no sandbox for it here",
                code="VERIFIER_EXECUTES",
            )
        self.verifier = verifier
        self.counts = GradingCounts()
        self._deadline_seconds = deadline_seconds
        self._memory_bytes_max = memory_bytes_max
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False

    @property
    def process_id(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Start the child now rather than with the first batch; returns without waiting for it."""
        with self._lock:
            self._start()

    def grade_many(self, pairs: Sequence[tuple[str, str]]) -> list[Verdict]:
        """Grade (response, reference) pairs; one verdict each, in order.

        Raises:
            OperationError: the child cannot be started at all.
        """
        with self._lock:
            verdicts: list[Verdict] = []
            while len(verdicts) < len(pairs):
                self._grade_until_stopped(pairs, verdicts)
            self.counts.graded += len(pairs)
            self.counts.errors += sum(verdict.code is VerdictCode.ERROR for verdict in verdicts)
            return verdicts

    def grade(self, response: str, reference: str) -> Verdict:
        return self.grade_many([(response, reference)])[0]

    def close(self) -> None:
        """End the child: politely, then by force. The object may be used again; it then starts another."""
        with self._lock:
            self._stop(politely=True)

    def __enter__(self) -> GradingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _grade_until_stopped(self, pairs: Sequence[tuple[str, str]], verdicts: list[Verdict]) -> None:
        """Add verdicts until all are there or the child is gone; then the item it was at is judged as well."""
        child = self._wait_ready()
        request = json.dumps(pairs[len(verdicts) :]).encode("utf-8")
        try:
            _write_all(child, _LENGTH.pack(len(request)) + request)
            while len(verdicts) < len(pairs):
                reply = self._read(child, self._deadline_seconds)
                if reply is None:
                    self.counts.timeouts += 1
                    verdicts.append(TIMEOUT)
                    self._stop(politely=False)
                    return
                if not reply:
                    break
                verdicts.extend(Verdict(code is VerdictCode.CORRECT, code) for code in map(_CODES.__getitem__, reply))
        except (OSError, IndexError):
            pass  # the pipe broke, or the child spoke nonsense: it is gone for us either way
        if len(verdicts) < len(pairs):
            self.counts.crashes += 1
            verdicts.append(CRASHED)
            self._stop(politely=False)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is not None:
            return self._child
        arguments = [self.verifier, str(self._deadline_seconds), str(self._memory_bytes_max)]
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        try:
            self._child = subprocess.Popen(
                # -P, or `-m` looks in the working directory first and would run a folder `fedsilo` that stands there
                [sys.executable, "-P", "-m", "fedsilo.edge.grading_process", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the parent, which then closes the pipe
            )
        except OSError as error:
            raise OperationError(f"cannot start a grading process: {error.strerror}") from error
        self._ready = False
        return self._child

    def _wait_ready(self) -> subprocess.Popen[bytes]:
        child = self._start()
        if not self._ready:
            try:
                said = self._read(child, START_TIMEOUT_SECONDS)
            except OSError:
                said = b""
            if said != bytes([_READY]):
                status = child.poll()
                self._stop(politely=False)
                raise OperationError(
                    f"the grading process for {self.verifier!r} did not start (exit status {status})",
                    hint=f"try: {sys.executable} -P -m fedsilo.edge.grading_process {self.verifier} < /dev/null",
                )
            self._ready = True
        return child

    @staticmethod
    def _read(child: subprocess.Popen[bytes], timeout_seconds: float) -> bytes | None:
        """What the child said; empty when it is gone, None when it said nothing in time."""
        assert child.stdout is not None  # noqa: S101  # opened as a pipe in _start
        waiting = select.poll()
        waiting.register(child.stdout.fileno(), select.POLLIN | select.POLLHUP)
        if not waiting.poll(timeout_seconds * 1000):
            return None
        return os.read(child.stdout.fileno(), 1 << 16)

    def _stop(self, *, politely: bool) -> None:
        child, self._child, self._ready = self._child, None, False
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if politely:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(CLOSE_TIMEOUT_SECONDS)
        if child.poll() is None:
            child.kill()
        child.wait()


def _write_all(child: subprocess.Popen[bytes], data: bytes) -> None:
    assert child.stdin is not None  # noqa: S101  # opened as a pipe in _start
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(child.stdin.fileno(), rest) :]


# --- the child ---------------------------------------------------------------------------------------------------


def serve(verifier: str, deadline_seconds: float, memory_bytes_max: int) -> None:
    """The child's whole life: grade what comes on standard input until it is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes_max, memory_bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # whatever a library prints must not mix with the replies
    replies = os.dup(1)
    os.dup2(2, 1)
    grading.prepare(verifier)
    os.write(replies, bytes([_READY]))
    while (head := _read_exactly(_LENGTH.size)) is not None:
        request = _read_exactly(_LENGTH.unpack(head)[0])
        if request is None:
            return
        for response, reference in json.loads(request):
            # when the parent is killed nobody is left to stop a hanging item, so the alarm ends this process
            signal.setitimer(signal.ITIMER_REAL, 2 * deadline_seconds + 1)
            try:
                verdict = grading.grade(verifier, response, reference)
            except (MemoryError, RecursionError):
                verdict = ERROR
            os.write(replies, bytes([_CODES.index(verdict.code)]))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _read_exactly(size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


if __name__ == "__main__":
    serve(
        sys.argv[1],
        float(sys.argv[2]) if len(sys.argv) > 2 else DEADLINE_SECONDS,
        int(sys.argv[3]) if len(sys.argv) > 3 else MEMORY_BYTES_MAX,
    )
