"""Runs a program under ptrace and, at one of its calls that make something durable, does to it what machines do.

    python -m benchmarks.chaos_tracer ORDER.json -m MODULE ARGUMENT ...

The program is the product's own, unchanged: a seccomp filter hands its calls to this process before the kernel carries
them out (seccomp(2), SECCOMP_RET_TRACE). Each of fsync, fdatasync, rename, link, unlink and ftruncate is written to the
order's `report`, one JSON line each, with a label: the call, and its file below `root` without digests and numbers. At
the call that the order names (read again at SIGUSR1, for `kill`), the program dies by SIGKILL, before the call or
after it; or, from it on, calls that need room on the disk fail with ENOSPC; or its clock jumps. For the clock the
program does not see the vDSO, so that each reading of the real-time clock is a call, too.

Linux on x86-64. Does not show: what a machine does that loses power, where writes that were not synced are gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import signal
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TRACEME, CONT, GETREGS, SETREGS, SYSCALL, SETOPTIONS = 0, 7, 12, 13, 24, 0x4200
EVENT_FORK, EVENT_VFORK, EVENT_CLONE, EVENT_EXEC, EVENT_SECCOMP = 1, 2, 3, 4, 7
OPTIONS = 0x01 | 0x02 | 0x04 | 0x08 | 0x10 | 0x80 | 0x100000  # sysgood, the events above, and die with this process
WAIT_ALL = 0x40000000  # __WALL: threads, too
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER_MODE, PR_GET_SECCOMP = 22, 38, 2, 21
RET_TRACE, RET_ALLOW, ARCH_X86_64 = 0x7FF00000, 0x7FFF0000, 0xC000003E
AT_SYSINFO_EHDR, AT_IGNORE, AT_NULL = 33, 1, 0
# Numbers of x86-64.
DURABLE = {74: "fsync", 75: "fdatasync", 82: "rename", 264: "rename", 316: "rename", 86: "link", 265: "link",
           87: "unlink", 263: "unlink", 77: "ftruncate"}  # fmt: skip
ROOM = {1: "write", 18: "write", 20: "write", 296: "write", 74: "fsync", 75: "fdatasync", 285: "fallocate"}
CLOCK_GETTIME, REALTIME, GETTIMEOFDAY, TIME = 228, 0, 96, 201
REGISTERS = ("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi",
             "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs")  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


class Registers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in REGISTERS]  # as ctypes wants it


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def ptrace(request: int, thread: int, data: Any = 0) -> None:
    """Raises OSError: the thread is gone, or this is not allowed."""
    if libc.ptrace(request, thread, 0, data) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def install_filter(numbers: set[int], *, clock: bool) -> None:
    """Of this thread and all that it will start: these calls are handed to the tracer."""
    LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF: load a word, jump if equal, return
    rows = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCH_X86_64), (RETURN, 0, 0, RET_ALLOW), (LOAD, 0, 0, 0)]
    for number in sorted(numbers):
        rows += [(EQUAL, 0, 1, number), (RETURN, 0, 0, RET_TRACE)]
    if clock:
        for number in (GETTIMEOFDAY, TIME):
            rows += [(EQUAL, 0, 1, number), (RETURN, 0, 0, RET_TRACE)]
        rows += [(EQUAL, 0, 3, CLOCK_GETTIME), (LOAD, 0, 0, 16), (EQUAL, 0, 1, REALTIME), (RETURN, 0, 0, RET_TRACE)]
    rows += [(RETURN, 0, 0, RET_ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *row) for row in rows))
    program = Program(len(rows), ctypes.cast(code, ctypes.c_void_p))
    if os.geteuid() != 0:
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, FILTER_MODE, ctypes.addressof(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no seccomp filter can be installed")


class Tracer:
    """One program.

    Args:
        order: {root, report, seen: {label: count}} and at most one of
            kill: {label, occurrence, how: before | after}, counted over all lives by `seen`;
            full: {label, occurrence, calls}: so many calls that need room fail from there on;
            clock: {label, occurrence, seconds}: from there on the clock is so much ahead.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._root = str(order["root"]).rstrip("/") + "/"
        self._seen = Counter[str](order.get("seen", {}))
        self._kill, self._full, self._clock = (order.get(name) or {} for name in ("kill", "full", "clock"))
        self._failing = 0
        self._ahead = 0.0
        self._report = os.open(order["report"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._groups: dict[int, int] = {}
        self._main = 0
        self._at_exit: dict[int, Any] = {}  # what to do when a thread's call ends

    # ---- starting ------------------------------------------------------------------------------------

    def run(self, command: list[str], path: Path) -> int:
        """The program's exit status; 128 and the signal where one ended it."""
        numbers = set(DURABLE) | (set(ROOM) if self._full else set())
        child = os.fork()
        if child == 0:
            try:
                ptrace(TRACEME, 0)
                os.kill(os.getpid(), signal.SIGSTOP)
                install_filter(numbers, clock=bool(self._clock))
                os.execv(command[0], command)  # noqa: S606  # no shell is wanted
            finally:
                os._exit(127)
        self._main = child
        os.waitpid(child, WAIT_ALL)
        ptrace(SETOPTIONS, child, OPTIONS)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _: self._forward(number))
        ptrace(CONT, child)
        signal.signal(signal.SIGUSR1, lambda *_: self._reload(path))
        return self._follow()

    def _reload(self, path: Path) -> None:
        kill = json.loads(path.read_text(encoding="utf-8")).get("kill") or {}
        if kill.get("from_now"):
            kill["occurrence"] += self._seen[kill["label"]]
        self._kill = kill

    def _forward(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._main, number)

    def _follow(self) -> int:
        while True:
            try:
                thread, status = os.waitpid(-1, WAIT_ALL)
            except ChildProcessError:
                return 1
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                self._groups.pop(thread, None)
                if thread == self._main:
                    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
                continue
            with contextlib.suppress(ProcessLookupError):
                self._stopped(thread, status)

    def _stopped(self, thread: int, status: int) -> None:
        number, event = os.WSTOPSIG(status), status >> 16
        if number == signal.SIGTRAP | 0x80:
            if (work := self._at_exit.pop(thread, None)) is not None:
                work()
            ptrace(CONT, thread)
        elif number == signal.SIGTRAP and event == EVENT_SECCOMP:
            self._called(thread)
        elif number == signal.SIGTRAP and event:
            if event == EVENT_EXEC and self._clock:
                hide_vdso(thread)
            ptrace(CONT, thread)
        else:
            # A new thread's first stop is not a signal of its own.
            first = number == signal.SIGSTOP and thread not in self._groups
            self._group(thread)
            ptrace(CONT, thread, 0 if first else number)

    def _group(self, thread: int) -> int:
        if thread not in self._groups:
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{thread}/status").read_text()
                self._groups[thread] = int(re.search(r"Tgid:\s+(\d+)", text).group(1))  # type: ignore[union-attr]
        return self._groups.get(thread, 0)

    # ---- calls ---------------------------------------------------------------------------------------

    def _called(self, thread: int) -> None:
        registers = Registers()
        ptrace(GETREGS, thread, ctypes.byref(registers))
        number = registers.orig_rax
        if number in (CLOCK_GETTIME, GETTIMEOFDAY, TIME):
            self._told_the_time(thread, number, registers)
            return
        if self._group(thread) != self._main:
            ptrace(CONT, thread)
            return
        after = None
        if number in DURABLE and (path := self._path(thread, number, registers)).startswith(self._root):
            label = f"{DURABLE[number]} {normal(path[len(self._root) :])}"
            self._seen[label] += 1
            os.write(self._report, json.dumps({"label": label, "occurrence": self._seen[label]}).encode() + b"\n")
            after = self._strike(label)
        if self._failing and number in ROOM and self._is_ours(thread, registers):
            self._failing -= 1
            registers.orig_rax, registers.rax = 2**64 - 1, 2**64 - errno.ENOSPC
            ptrace(SETREGS, thread, ctypes.byref(registers))
        if after is None:
            ptrace(CONT, thread)
        else:
            self._at_exit[thread] = after
            ptrace(SYSCALL, thread)

    def _strike(self, label: str) -> Any:
        """What has to be done when this call has ended, if it is the one that the order names."""
        here = (label, self._seen[label])
        if self._kill and here == (self._kill["label"], self._kill["occurrence"]):
            os.write(self._report, json.dumps({"struck": "kill", **self._kill}).encode() + b"\n")
            if self._kill["how"] == "after":
                return lambda: os.kill(self._main, signal.SIGKILL)
            os.kill(self._main, signal.SIGKILL)
        if self._full and here == (self._full["label"], self._full["occurrence"]):
            self._failing = int(self._full["calls"])
            os.write(self._report, json.dumps({"struck": "full", **self._full}).encode() + b"\n")
        if self._clock and here == (self._clock["label"], self._clock["occurrence"]):
            self._ahead = float(self._clock["seconds"])
            os.write(self._report, json.dumps({"struck": "clock", **self._clock}).encode() + b"\n")
        return None

    def _is_ours(self, thread: int, registers: Registers) -> bool:
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/{thread}/fd/{int(registers.rdi)}").readlink()).startswith(self._root)
        return False

    def _path(self, thread: int, number: int, registers: Registers) -> str:
        """The file that a call is about; of a rename, the new name."""
        with contextlib.suppress(OSError):
            if number in (74, 75, 77):
                return str(Path(f"/proc/{thread}/fd/{int(registers.rdi)}").readlink())
            places = {82: ("rsi", ""), 86: ("rsi", ""), 87: ("rdi", ""), 263: ("rsi", "rdi"), 264: ("r10", "rdx"),
                      316: ("r10", "rdx"), 265: ("r10", "rdx")}  # fmt: skip
            place, folder = places[number]
            text = text_at(thread, getattr(registers, place))
            if text.startswith("/"):
                return text
            at = ctypes.c_int(getattr(registers, folder) & 0xFFFFFFFF).value if folder else -100
            base = f"/proc/{thread}/cwd" if at == -100 else f"/proc/{thread}/fd/{at}"
            return str(Path(base).readlink() / text)
        return ""

    def _told_the_time(self, thread: int, number: int, registers: Registers) -> None:
        ahead = self._ahead
        place = registers.rsi if number == CLOCK_GETTIME else registers.rdi
        if not ahead or not (place or number == TIME):
            ptrace(CONT, thread)
            return

        def move() -> None:
            if number == TIME:
                told = Registers()
                ptrace(GETREGS, thread, ctypes.byref(told))
                told.rax = int(told.rax + ahead)
                ptrace(SETREGS, thread, ctypes.byref(told))
            if place:
                with open(f"/proc/{thread}/mem", "r+b", buffering=0) as memory:  # noqa: PTH123
                    memory.seek(place)
                    (seconds,) = struct.unpack("<q", memory.read(8))
                    memory.seek(place)
                    memory.write(struct.pack("<q", int(seconds + ahead)))

        self._at_exit[thread] = move
        ptrace(SYSCALL, thread)


def normal(path: str) -> str:
    """Without what differs from run to run: digests, numbers, random names."""
    path = re.sub(r"[0-9a-f]{12,}", "*", path)
    path = re.sub(r"(?<=-)[0-9a-f]{8}(?=[-.])", "*", path)  # of a key
    path = re.sub(r"(?<=/)[0-9a-f]{2}(?=/|$)", "*", path)
    path = re.sub(r"(?<=/)\.tmp\w+$", ".tmp*", path)
    return re.sub(r"\d+", "#", path)


def text_at(thread: int, place: int) -> str:
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:  # noqa: PTH123  # not of a length that is known
        memory.seek(place)
        return memory.read(4096).split(b"\0", 1)[0].decode(errors="replace")


def hide_vdso(thread: int) -> None:
    """At the exec's end: glibc then asks the kernel for the time by calls, which can be seen."""
    registers = Registers()
    ptrace(GETREGS, thread, ctypes.byref(registers))
    with open(f"/proc/{thread}/mem", "r+b", buffering=0) as memory:  # noqa: PTH123

        def word(place: int) -> int:
            memory.seek(place)
            return int(struct.unpack("<Q", memory.read(8))[0])

        place = registers.rsp + 8 * (word(registers.rsp) + 2)  # argc, argv, NULL
        while word(place):
            place += 8  # environment
        place += 8
        while (kind := word(place)) != AT_NULL:
            if kind == AT_SYSINFO_EHDR:
                memory.seek(place)
                memory.write(struct.pack("<Q", AT_IGNORE))
            place += 16


def why_not() -> str:
    """Why programs cannot be traced here, or ''."""
    machine = os.uname()
    if (machine.sysname, machine.machine) != ("Linux", "x86_64"):
        return f"programs are traced on Linux on x86-64, and this is {machine.sysname} on {machine.machine}"
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            ptrace(TRACEME, 0)
            install_filter(set(DURABLE), clock=False)
            os._exit(0)
        os._exit(1)
    return "" if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 else "ptrace or seccomp is not allowed here"


def main(arguments: list[str]) -> int:
    path = Path(arguments[0])
    order = json.loads(path.read_text(encoding="utf-8"))
    return Tracer(order).run([sys.executable, "-P", *arguments[1:]], path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
