"""Grading in a child process that can be killed: a verifier that hangs, crashes or eats memory costs one item.

The child stays alive across batches and grades one item after the other; it answers with one byte an item, so the
parent knows on which item it hangs. An item past its deadline, or that kills the child, scores 0 and is counted; the
child is started again for the rest. What it says that is no verdict is taken for a crash. The child gets an almost
empty environment, limits on memory and core files, and no descriptor but its pipes. `code` runs programs: it is refused
unless the caller says that it may, and the child then runs each in a sandbox (code_sandbox.py) or does not start.
Verifiers that a site brought itself are loaded in the child alone. What this does not stop: a verifier that writes
files or opens sockets; none of ours does.

    request   4-byte little-endian length, JSON [[response, reference], ...]
    reply     READY, or REFUSED and one line why; then nine bytes an item: the index of its VerdictCode, and its
              reward as a little-endian float64
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from fedsilo.files.durable import write_all
from fedsilo.grading import RESPONSE_CHARACTERS_MAX, VERIFIERS, check_reference, mixture
from fedsilo.grading.own_verifiers import Grade, find_verifier, load_grade
from fedsilo.grading.verdict import CRASHED, ERROR, TIMEOUT, TOO_COSTLY, Verdict, VerdictCode
from fedsilo.protocol.errors import FedSiloError, OperationError, UsageError
from fedsilo.protocol.text import harmless

DEADLINE_SECONDS = 5.0
CODE_DEADLINE_SECONDS = 20.0  # a correct program may compute for seconds, and machines are busy
CODE_MARGIN_SECONDS = 0.5  # by which the sandbox's own deadline comes first: the child then need not be started again
ANSWER_SECONDS_MEAN = 0.25  # of a batch with a budget; most answers take a hundredth of that
PROGRAM_SECONDS_MEAN = 2.0  # most programs take a tenth of that
START_TIMEOUT_SECONDS = 120.0
CLOSE_TIMEOUT_SECONDS = 2.0
CLOSE_LOOK_SECONDS = 0.05  # how often a child that grades is ended, since another may be started meanwhile
MEMORY_BYTES_MAX = 4 << 30
REFUSAL_CHARACTERS_MAX = 2000
REPORT_BYTES_MAX = 2000
_LENGTH = struct.Struct("<I")
_CODES = tuple(VerdictCode)
_READY, _REFUSED = 255, 254
_REPLY = struct.Struct("<Bd")
# (arguments, environment) -> the child, with pipes at its standard input and output
Launch = Callable[[Sequence[str], Mapping[str, str]], subprocess.Popen[bytes]]
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "VIRTUAL_ENV", "TMPDIR")


@dataclass
class GradingCounts:
    """Counts of what happened so far."""

    graded: int = 0
    errors: int = 0
    timeouts: int = 0
    crashes: int = 0


class GradingProcess:
    """A child process for one verifier; safe to use from several threads, one batch at a time.

    Args:
        verifier: a name of `grading.VERIFIERS`, of an own verifier, or a mixture.
        deadline_seconds: what one item may take; None: DEADLINE_SECONDS, or CODE_DEADLINE_SECONDS.
        memory_bytes_max: address space of the child.
        runs_programs: a verifier that runs programs is taken; a coordinator never says so.
        launch: starts the child; by default it is a plain process.
        reports: keep why a verifier of a package gave no verdict, for `take_report`. Such a text may quote responses
            and answers, so that it is for the verifier's author at a terminal, and for no silo.

    Raises:
        UsageError: unknown verifier, or one that runs programs.
    """

    def __init__(
        self,
        verifier: str,
        *,
        deadline_seconds: float | None = None,
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        runs_programs: bool = False,
        launch: Launch | None = None,
        reports: bool = False,
    ) -> None:
        own = find_verifier(verifier)
        if own.executes and not runs_programs:
            raise UsageError(
                f"the verifier {verifier!r} runs a program; outside of a silo there is no sandbox for it",
                code="VERIFIER_EXECUTES",
            )
        if deadline_seconds is None:
            deadline_seconds = CODE_DEADLINE_SECONDS if own.executes else DEADLINE_SECONDS
        self.verifier = verifier
        self.origin = own.origin
        self.counts = GradingCounts()
        self._deadline_seconds = deadline_seconds
        self._memory_bytes_max = memory_bytes_max
        # memory, not a pipe: the child never waits for its reader, and what it wrote before it died is there
        self._reports = os.fdopen(os.memfd_create("reports"), "r+b", buffering=0) if reports else None
        self._launch = launch or functools.partial(_plain_child, reports=self._reports)
        self._seconds_mean = PROGRAM_SECONDS_MEAN if own.executes else ANSWER_SECONDS_MEAN
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._ready = False

    @property
    def process_id(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def start(self) -> None:
        """Start the child now rather than with the first batch; returns without waiting for it."""
        with self._lock:
            self._start()

    def wait_ready(self) -> None:
        """Start the child, if none runs, and wait until it can grade.

        Raises:
            OperationError: it does not start. UsageError: it says why it cannot, such as for want of a sandbox.
        """
        with self._lock:
            self._wait_ready()

    def budget_seconds(self, answers: int) -> float:
        """Return what so many answers of somebody else may take: one at its own deadline, and the mean for each."""
        return self._deadline_seconds + self._seconds_mean * answers

    def grade_many(self, pairs: Sequence[tuple[str, str]], budget_seconds: float | None = None) -> list[Verdict]:
        """Grade (response, reference) pairs; one verdict each, in order.

        Args:
            pairs: to be graded.
            budget_seconds: what they may take together, once the child can grade; what is left then scores 0, as if
                each had taken too long. None: as long as they take.

        Raises:
            OperationError: the child cannot be started at all.
        """
        with self._lock:
            verdicts: list[Verdict] = []
            until = math.inf
            if budget_seconds is not None:
                self._wait_ready()
                until = time.monotonic() + budget_seconds
            while len(verdicts) < len(pairs):
                if time.monotonic() >= until or self._closing.is_set():
                    verdicts += [TIMEOUT] * (len(pairs) - len(verdicts))
                    break
                self._grade_until_stopped(pairs, verdicts, until)
            self.counts.graded += len(pairs)
            self.counts.errors += sum(verdict.code is VerdictCode.ERROR for verdict in verdicts)
            self.counts.timeouts += sum(verdict.code is VerdictCode.TIMEOUT for verdict in verdicts)
            return verdicts

    def grade(self, response: str, reference: str) -> Verdict:
        return self.grade_many([(response, reference)])[0]

    def close(self) -> None:
        """End the child: politely, then by force, and at once where it is grading: what is left then scores 0, as if it
        had taken too long. The object may be used again; it then starts another child."""
        self._closing.set()
        while not self._lock.acquire(timeout=CLOSE_LOOK_SECONDS):
            if (child := self._child) is not None:
                child.kill()
        try:
            self._stop(politely=True)
        finally:
            self._closing.clear()
            self._lock.release()

    def take_report(self) -> str:
        """Why a verifier of a package gave no verdict, since this was last asked; the last one, empty for none."""
        if self._reports is None:
            return ""
        with self._lock:
            self._reports.seek(max(0, os.fstat(self._reports.fileno()).st_size - REPORT_BYTES_MAX))
            report = self._reports.read()
            self._reports.seek(0)  # for the child too, which shares the place
            self._reports.truncate()
        return report.decode("utf-8", "replace").strip().rpartition("\n")[2]

    def __enter__(self) -> GradingProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _grade_until_stopped(
        self, pairs: Sequence[tuple[str, str]], verdicts: list[Verdict], until: float = math.inf
    ) -> None:
        """Add verdicts until all are there or the child is gone; then the item it was at is judged as well."""
        child = self._wait_ready()
        output = b""
        request = json.dumps(pairs[len(verdicts) :]).encode("utf-8")
        try:
            assert child.stdin is not None  # noqa: S101  # opened as a pipe in _start
            write_all(child.stdin.fileno(), _LENGTH.pack(len(request)) + request)
            while len(verdicts) < len(pairs):
                reply = self._read(child, min(self._deadline_seconds, max(0.0, until - time.monotonic())))
                if reply is None:
                    verdicts.append(TIMEOUT)
                    self._stop(politely=False)
                    return
                if not reply:
                    break
                output += reply
                while len(output) >= _REPLY.size:
                    index, reward = _REPLY.unpack_from(output)
                    output = output[_REPLY.size :]
                    verdicts.append(Verdict(_CODES[index] is VerdictCode.CORRECT, _CODES[index], reward))
        except (OSError, IndexError, ValueError):
            pass  # the pipe broke, or the child spoke nonsense: it is gone for us either way
        else:
            if len(verdicts) == len(pairs) and not output:
                return
        self.counts.crashes += 1
        verdicts[len(pairs) - 1 :] = [CRASHED]  # of the item it was at, or of the last one if it said too much
        self._stop(politely=False)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._child is not None:
            return self._child
        arguments = [self.verifier, str(self._deadline_seconds), str(self._memory_bytes_max)]
        arguments += ["reports"] if self._reports is not None else []
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        try:
            # -P, or `-m` looks in the working directory first and would run a folder `fedsilo` that stands there
            self._child = self._launch([sys.executable, "-P", "-m", "fedsilo.grading.worker", *arguments], environment)
        except OSError as error:
            raise OperationError(f"cannot start a grading process: {error.strerror}") from error
        self._ready = False
        return self._child

    def _wait_ready(self) -> subprocess.Popen[bytes]:
        child = self._start()
        if not self._ready:
            try:
                first_line = self._read(child, START_TIMEOUT_SECONDS)
            except OSError:
                first_line = b""
            if first_line != bytes([_READY]):
                status = child.poll()
                self._stop(politely=False)
                if first_line and first_line[0] == _REFUSED:
                    with contextlib.suppress(ValueError, TypeError):  # it may have been cut off
                        code, message, hint = (
                            str(each)[:REFUSAL_CHARACTERS_MAX] for each in json.loads(first_line[1:])
                        )
                        raise UsageError(message, hint=hint, code=code)
                raise OperationError(
                    f"the grading process for {self.verifier!r} did not start (exit status {status})",
                    hint=f"try: {sys.executable} -P -m fedsilo.grading.worker {self.verifier} < /dev/null",
                )
            self._ready = True
        return child

    @staticmethod
    def _read(child: subprocess.Popen[bytes], timeout_seconds: float) -> bytes | None:
        """Return what the child said; empty when it is gone, None when it said nothing in time."""
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


def _plain_child(
    arguments: Sequence[str], environment: Mapping[str, str], reports: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        arguments,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if reports is None else reports,
        env=environment,
        bufsize=0,
        start_new_session=True,  # Ctrl-C is for the parent, which then closes the pipe
    )


# --- the child ---------------------------------------------------------------------------------------------------


def serve(verifier: str, deadline_seconds: float, memory_bytes_max: int, *, reports: bool = False) -> None:
    """The child's whole life: grade what comes on standard input until it is closed. Reports go to standard error."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = memory_bytes_max if hard == resource.RLIM_INFINITY else min(memory_bytes_max, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # whatever a library prints must not mix with the replies
    replies = os.dup(1)
    errors = os.dup(2)
    if reports:  # a child in a sandbox never gets here, so it needs no /dev/null
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)

    def tell(report: str) -> None:
        if reports:
            os.write(errors, harmless(report).encode("utf-8", "replace")[: REPORT_BYTES_MAX - 1] + b"\n")

    try:
        # only a parent that may run programs starts a child for such a verifier
        grade = load_grade(verifier, _sandbox(deadline_seconds) if find_verifier(verifier).executes else None, tell)
    except FedSiloError as error:
        os.write(replies, bytes([_REFUSED]) + json.dumps([error.code, error.message, error.hint]).encode())
        return
    os.write(replies, bytes([_READY]))
    while (head := _read_exactly(_LENGTH.size)) is not None:
        request = _read_exactly(_LENGTH.unpack(head)[0])
        if request is None:
            return
        for response, reference in json.loads(request):
            # when the parent is killed nobody is left to stop a hanging item, so the alarm ends this process
            signal.setitimer(signal.ITIMER_REAL, 2 * deadline_seconds + 1)
            try:
                verdict = grade(response, reference) if len(response) <= RESPONSE_CHARACTERS_MAX else TOO_COSTLY
            except (MemoryError, RecursionError) as error:
                tell(type(error).__name__)
                verdict = ERROR
            os.write(replies, _REPLY.pack(_CODES.index(verdict.code), verdict.reward))
        signal.setitimer(signal.ITIMER_REAL, 0)


def _sandbox(deadline_seconds: float) -> Grade:
    """Build the sandbox for programs. Raises UsageError: none can be built here."""
    from fedsilo.grading.code_sandbox import CodeSandbox

    def start(arguments: Sequence[str], standard_input: int, handed_on: Sequence[int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            arguments,
            stdin=standard_input,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=tuple(handed_on),
            env={},
        )

    return CodeSandbox(start, deadline_seconds=max(CODE_MARGIN_SECONDS, deadline_seconds - CODE_MARGIN_SECONDS)).grade


def _read_exactly(size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# ---- reference answers -----------------------------------------------------------------------------------------------


Check = Callable[[str], bool]


def our_parts_check(verifier: str) -> Check:
    """Asks FedSilo's own parts of a verifier alone; starts no process. Says yes for what only a package can say.

    Raises:
        UsageError: the name is none.
    """
    ours = [part for part in mixture.parse(verifier) if part.verifier in VERIFIERS]
    return lambda answer: all(check_reference(part.verifier, part.form or answer) for part in ours)


@contextmanager
def full_check(verifier: str) -> Iterator[Check]:
    """Asks every part. An own verifier that fails or hangs on a reference has not said that it is a bad one.

    Raises:
        UsageError: unknown, or not what a verifier must be. OperationError: no process can be started.
    """
    ours = our_parts_check(verifier)
    with ExitStack() as stack:
        brought = [
            stack.enter_context(GradingProcess(part.verifier))
            for part in mixture.parse(verifier)
            if part.verifier not in VERIFIERS
        ]
        for process in brought:
            process.wait_ready()

        def check(answer: str) -> bool:
            return ours(answer) and all(
                process.grade("", answer).code is not VerdictCode.BAD_REFERENCE for process in brought
            )

        yield check


if __name__ == "__main__":
    serve(
        sys.argv[1],
        float(sys.argv[2]) if len(sys.argv) > 2 else DEADLINE_SECONDS,
        int(sys.argv[3]) if len(sys.argv) > 3 else MEMORY_BYTES_MAX,
        reports=sys.argv[4:] == ["reports"],
    )
