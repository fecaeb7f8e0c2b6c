"""The verifier `code`: runs a model's program and its test in a sandbox each, and says whether the test passed.

    grading process ─▶ solution    defines the program's names, answers calls over a pipe
                    └▶ examiner    runs the test program; it alone can say "passed", over a pipe of its own

The solution never holds the test, the verdict's pipe or the examiner's memory, so leaving early, printing, changing
built-ins, signals and exit handlers earn nothing: the examiner waits for an answer and gets none (code_roles.py).

Each process stands behind: a system-call filter that permits what a single-threaded Python program needs to compute
(no new process or thread, no program start, no socket, no signal to others, no change to any file); limits on memory,
processor time, descriptors and written bytes; no capability; standard streams at /dev/null; a deadline. Beside that,

    namespaces   user, mount, network, pid, ipc and host name of its own; its root holds an empty read-only folder and
                 Python's own library, nothing else of the machine
    landlock     where namespaces are refused, as inside a trainer's own sandbox: no file but Python's own library

Where neither can be built nothing is run, and the verifier refuses to start (T22).

What this does not stop: a program that knows the expected answers, or guesses them from the arguments it is given;
bugs of the kernel in the permitted calls; reading Python's standard library and the shared libraries beside it; timing
and the load of this machine; a test program that is itself hostile (it runs in the same sandbox, but its word is the
verdict) or asks too little (docs/how-to/verifiers.md has the kinds). What it costs: threads, subprocesses, files, numpy
and other installed packages are not there for a solution; a value that is no plain data stays with the solution, and no
two such values are equal.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Protocol

from fedsilo.files.durable import write_all
from fedsilo.grading import code
from fedsilo.grading.verdict import BAD_REFERENCE, CORRECT, ERROR, NO_ANSWER, TIMEOUT, WRONG, Verdict
from fedsilo.protocol.errors import UsageError
from fedsilo.sandbox import filters, kernel
from fedsilo.sandbox.filters import program_filter

LEVELS = ("namespaces", "landlock")
DEADLINE_SECONDS = 4.0
SELF_TEST_SECONDS = 10.0
PROGRAM_CHARACTERS_MAX = 200_000
MEMORY_BYTES_MAX = 512 << 20
_LIMITS = {
    "RLIMIT_AS": MEMORY_BYTES_MAX,
    "RLIMIT_NOFILE": 32,
    "RLIMIT_FSIZE": 0,
    "RLIMIT_CORE": 0,
    "RLIMIT_MSGQUEUE": 0,
}
_HERE = Path(__file__).parent
_BOOTSTRAP = Path(kernel.__file__).with_name("code_bootstrap.py")
_LIBRARIES_MAX = 16


class _Process(Protocol):
    """The parts of subprocess.Popen that are used."""

    pid: int

    def poll(self) -> int | None: ...
    def send_signal(self, sig: int) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


# (arguments, descriptor of standard input, descriptors to hand on) -> the process; grading/worker.py alone starts any
Start = Callable[[Sequence[str], int, Sequence[int]], _Process]


def readable_paths() -> list[str]:
    """Return what Python needs to import its own library: that library, and the folders of the shared libraries it
    loads."""
    library = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    found = set(library)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.partition("/")[1] + line.partition("/")[2]
            if ".so" in path and "site-packages" not in path and "dist-packages" not in path:
                found.add(str(Path(path).parent))
    # the system's own library folders, and none that a person's folder or an installed package brought in
    readable = [path for path in found if path in library or path.startswith(("/lib", "/usr/lib"))]
    paths = sorted(path for path in readable if not any(path.startswith(f"{other}/") for other in readable))[
        :_LIBRARIES_MAX
    ]
    return [*paths, *(each for each in ("/etc/ld.so.cache",) if Path(each).is_file())]


class CodeSandbox:
    """Grades programs; one at a time.

    Args:
        start: starts a process.
        deadline_seconds: for one program and its test together.

    Raises:
        UsageError: no isolation level works on this machine; nothing was run.
    """

    def __init__(
        self, start: Start, *, deadline_seconds: float = DEADLINE_SECONDS, levels: Sequence[str] = LEVELS
    ) -> None:
        self._start = start
        self._deadline_seconds = SELF_TEST_SECONDS
        try:
            self._filter = program_filter().hex()
        except ValueError as error:
            raise UsageError(f"no sandbox for programs here: {error}", code="NO_SANDBOX") from error
        version = kernel.landlock_version()
        self._ruleset = filters.ruleset(version).hex()
        self._roles = (_HERE / "code_roles.py").read_text(encoding="utf-8")
        self._readable = readable_paths()
        self._rules = filters.rules(version, (filters.READ, map(Path, self._readable)))
        refused = []
        for level in levels:
            self.level = level
            good, why = self._run("def answer():\n    return 41 + 1\n", "assert answer() == 42\n")
            bad, _ = self._run("def answer():\n    return 41 + 1\n", "assert answer() == 43\n")
            if good is CORRECT and bad is WRONG:
                break
            refused.append(f"{level}: {why or good.code.value}")
        else:
            raise UsageError(
                f"the verifier 'code' runs programs and no sandbox can be built here ({'; '.join(refused)})",
                hint="it needs Linux with user namespaces or Landlock, and seccomp; or use exact, choice or math",
                code="NO_SANDBOX",
            )
        self._deadline_seconds = deadline_seconds

    def grade(self, response: str, reference: str) -> Verdict:
        """Return whether the program in a response passes the test program, without an error and within the
        deadline."""
        if not code.check_reference(reference):
            return BAD_REFERENCE
        program = code.extract(response)
        if program is None or len(program) > PROGRAM_CHARACTERS_MAX:
            return NO_ANSWER
        return self._run(program, reference)[0]

    def _run(self, program: str, test: str) -> tuple[Verdict, str]:
        """The verdict, and what kept the sandbox from being built."""
        tested = code.subject(test)
        if tested is None:
            return BAD_REFERENCE, ""
        task = json.dumps({"test": test, "names": tested.names, "modules": tested.modules})
        processes: list[_Process] = []
        with ExitStack() as stack:
            try:
                to_solution, to_examiner, verdict, status = (_pipe(stack) for _ in range(4))
                nothing = stack.enter_context(FileIO(os.devnull, "r+"))
                solution = {"read": to_solution[0], "write": to_examiner[1], "nothing": nothing}
                examiner = {"read": to_examiner[0], "write": to_solution[1], "verdict": verdict[1], "nothing": nothing}
                for role, text, files in (("solution", program, solution), ("examiner", task, examiner)):
                    held = {name: file.fileno() for name, file in files.items()}
                    processes.append(self._begin(role, text, held, status[1].fileno()))
                for file in (*to_solution, *to_examiner, verdict[1], status[1], nothing):
                    file.close()
                return self._wait(verdict[0].fileno(), status[0].fileno())
            except OSError as error:
                return ERROR, str(error)
            finally:
                self._end(processes)

    def _begin(self, role: str, program: str, held: dict[str, int], status: int) -> _Process:
        seconds = int(self._deadline_seconds) + 1
        spec = {
            "level": self.level,
            "role": role,
            "program": program,
            "source": self._roles,
            "descriptors": held,
            "status": status,
            "seccomp": self._filter,
            "readable": self._readable,
            "landlock": self._ruleset,
            "rules": self._rules,
            "parent": os.getpid(),
            "limits": _LIMITS | {"RLIMIT_CPU": seconds},
        }
        # a file without a name: a pipe would block where the specification is larger than the pipe
        with FileIO(os.memfd_create("specification", os.MFD_CLOEXEC), "r+") as text:
            # surrogates that a tokenizer left stay escaped, so that the program fails on them and not this
            write_all(text.fileno(), json.dumps(spec).encode())
            text.seek(0)
            arguments = [sys.executable, "-I", "-S", "-B", str(_BOOTSTRAP)]
            return self._start(arguments, text.fileno(), [*held.values(), status])

    def _wait(self, verdict: int, status: int) -> tuple[Verdict, str]:
        until = time.monotonic() + self._deadline_seconds
        waiting = select.poll()
        waiting.register(verdict, select.POLLIN | select.POLLHUP)
        waiting.register(status, select.POLLIN | select.POLLHUP)
        while (left := until - time.monotonic()) > 0:
            for descriptor, _ in waiting.poll(left * 1000):
                if descriptor == verdict:
                    verdict_byte = os.read(verdict, 1)
                    return (CORRECT if verdict_byte == b"1" else WRONG), ""
                why = os.read(status, 4096)
                if why:
                    return ERROR, why.decode("utf-8", "replace")
                waiting.unregister(status)  # both sandboxes stand
        return TIMEOUT, ""

    def _end(self, processes: list[_Process]) -> None:
        """A keeper is asked, so that it takes its child with it; a program is not."""
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if self.level == "namespaces" else signal.SIGKILL)
        for process in processes:
            try:
                process.wait(1.0)
            except Exception:  # noqa: BLE001  # subprocess.TimeoutExpired, which may not be imported here
                process.send_signal(signal.SIGKILL)
                process.wait()


def _pipe(stack: ExitStack) -> tuple[FileIO, FileIO]:
    """A pipe whose ends are closed with the stack, where they are not before: what is read, what is written."""
    read, write = os.pipe()
    return stack.enter_context(FileIO(read, "r")), stack.enter_context(FileIO(write, "w"))
