"""Where a daemon and what it starts dial, as the kernel is told: also by libraries that pass Python's hooks by.

strace follows the daemon from its first instruction, with the threads and processes that come of it. Does not see: a
program that hands its socket to a process outside, and io_uring, which the trainer's sandbox refuses.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.loopback.federation import Federation

# The variable that has a daemon traced, and the one that has it dial an address of the test's own.
TRACE, PLANT = "CONNECTS_WRITTEN_TO", "CONNECTS_PLANTED"
_DIALS = ("connect", "sendto", "sendmsg", "sendmmsg")
_BIRTHS = ("fork", "vfork", "clone", "clone3")
# `?`: not every machine has all of them
CALLS = ",".join(f"?{call}" for call in (*_DIALS, *_BIRTHS, "execve", "open", "openat"))
# What every Python runs as it starts. The daemon becomes its own tracee and keeps its process id; PLANT has it dial
# one address from a thread.
SITECUSTOMIZE = f"""
import os, socket, sys, threading
out = os.environ.pop({TRACE!r}, "")
if out:
    os.execvp("strace", ["strace", "-DDD", "-f", "--seccomp-bpf", "--pidns-translation", "-qq", "-s", "400", "-o", out,
                         "-e", "signal=none", "-e", "trace={CALLS}", *sys.orig_argv])
planted = os.environ.pop({PLANT!r}, "")
if planted:
    host, _, port = planted.rpartition(":")
    threading.Thread(target=lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect((host, int(port)))).start()
"""


def unavailable() -> str:
    """Why nothing can be traced here; empty where it can. A container may forbid it."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", os.devnull, "true"], check=False, capture_output=True, text=True)
    return f"strace may not trace here: {tried.stderr.strip()}" if tried.returncode else ""


_LINE = re.compile(r"(\d+) +(?:<\.\.\. )?(\w+)(.*)")
_INET = re.compile(r'sin_port=htons\((\d+)\), sin_addr=inet_addr\("([^"]+)"\)')
_INET6 = re.compile(r'sin6_port=htons\((\d+)\).*?inet_pton\(AF_INET6, "([^"]+)"')
_UNIX = re.compile(r'sun_path=@?("[^"]*")')
_FAMILY = re.compile(r"sa_family=(AF_\w+)")
_OPENED = re.compile(r'\("([^"]*)"|AT_FDCWD, "([^"]*)"')
_CHILD = re.compile(r"= (\d+)(?: /\* (\d+) in strace's PID NS \*/)?$")
_REFUSED = re.compile(r"= -1 (?!EINPROGRESS)[A-Z]+ ")
UNFINISHED = "<unfinished ...>"


@dataclass(frozen=True)
class Reach:
    """One destination dialled, or one file opened.

    Attributes:
        program: `guard`, `trainer`, or the words with which another process was started.
        address: HOST:PORT, the path of a unix socket or of a file, or else the address family.
        refused: the kernel said no. A datagram's destination is taken at once, a connection's while it is made.
    """

    program: str
    address: str
    refused: bool


@dataclass(frozen=True)
class Trace:
    dialled: frozenset[Reach]
    opened: frozenset[Reach]


@dataclass
class _Processes:
    """Whose thread is whose, from the calls that make them."""

    programs: dict[int, str]
    leader: dict[int, int] = field(default_factory=dict)

    def of(self, thread: int) -> int:
        return self.leader.get(thread, thread)

    def born(self, parent: int, child: int, *, thread: bool) -> None:
        if thread:
            self.leader[child] = self.of(parent)
        else:
            self.programs.setdefault(child, self.programs.get(self.of(parent), "?"))


def traced(environment: Mapping[str, str], folder: Path, *, planted: str = "") -> dict[str, str]:
    """The environment that has a daemon traced to `folder`/connects.txt, and dial `planted` (HOST:PORT) by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    more = {"PYTHONPATH": path, TRACE: str(folder / "connects.txt")}
    return {**environment, **more, **({PLANT: planted} if planted else {})}


def start_traced(federation: Federation, name: str, folder: Path, *, planted: str = "") -> Path:
    """Start a silo of a federation that way, the others as they are; the file that grows while it lives."""
    before = federation.children.environment
    federation.children.environment = traced(before, folder, planted=planted)
    try:
        federation.start(name)
    finally:
        federation.children.environment = before
    return folder / "connects.txt"


def read_trace(file: Path, guard: int) -> Trace:
    """What a trace says of every process in it.

    Args:
        file: of strace; a line that is being written is left out.
        guard: process id of the daemon that was traced.
    """
    processes, begun = _Processes({guard: "guard"}), dict[int, str]()
    dialled, opened = set[Reach](), set[Reach]()

    def take(thread: int, call: str, rest: str) -> None:
        program = processes.programs.get(processes.of(thread), "?")
        refused = bool(_REFUSED.search(rest))
        if call in _BIRTHS:
            if child := _CHILD.search(rest):
                processes.born(thread, int(child[2] or child[1]), thread="CLONE_THREAD" in rest)
        elif call == "execve" and not refused:
            processes.programs[processes.of(thread)] = _program(rest, program)
        elif call in _DIALS and (address := _destination(rest)):
            dialled.add(Reach(program, address, refused))
        elif call.startswith("open") and (path := _OPENED.search(rest)):
            opened.add(Reach(program, path[1] or path[2], refused))

    *whole, _ = file.read_text(errors="replace").split("\n")
    for line in whole:
        if (matched := _LINE.match(line)) is None:
            continue
        thread, call, rest = int(matched[1]), matched[2], begun.pop(int(matched[1]), "") + matched[3]
        if rest.endswith(UNFINISHED):
            begun[thread] = f"{call} {rest.removesuffix(UNFINISHED)}"
        else:
            take(thread, call, rest)
    for thread, text in begun.items():  # under way when the file was read
        call, _, rest = text.partition(" ")
        take(thread, call, rest)
    return Trace(frozenset(dialled), frozenset(opened))


def _program(rest: str, before: str) -> str:
    """`guard` stays the guard when strace starts it again under the same id."""
    if "silo.trainer.worker" in rest:
        return "trainer"
    words = re.search(r"\[(.*?)\]", rest)
    if '"fedsilo.cli", "silo", "start"' in rest:
        return "guard"
    return words[1] if words else before


def _destination(rest: str) -> str:
    if found := _INET.search(rest):
        return f"{found[2]}:{found[1]}"
    if found := _INET6.search(rest):
        host = found[2].removeprefix("::ffff:")
        return f"{host}:{found[1]}" if host != found[2] else f"[{host}]:{found[1]}"
    if found := _UNIX.search(rest):
        return str(json.loads(found[1]))
    family = _FAMILY.search(rest)
    return family[1] if family else ""
