"""Runs between the grading process and one program: builds the walls, then becomes the program. Executed as a script
by `fedsilo/grading/code_sandbox.py`, with `python -I -S`: standard library only, and nothing of the project.

    grading process ─▶ keeper ─ dies with ─▶ first process of a pid namespace: the program      (rung namespaces)
    grading process ─▶ the program                                                              (rung landlock)

A specification comes on standard input as JSON. What cannot be built is written to the status pipe as one line, and
nothing runs; an end of file there means that the walls stand. What the walls do not stop is said in code_sandbox.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

_libc = ctypes.CDLL(None, use_errno=True)

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT, _LANDLOCK_PATH_BENEATH = 444, 445, 446, 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# rights over files that each version of Landlock knows, then those over networks (4) and other processes (6)
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
_SECCOMP_MODE_FILTER, _CAPABILITY_VERSION_3 = 2, 0x20080522
_ROOM = "/empty"


class WallError(Exception):
    """A wall cannot be built; the text names the step and the system's answer."""


def _checked(result: int, step: str) -> int:
    if result < 0:
        raise WallError(f"{step}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(step: str, number: int, *arguments: Any) -> int:
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *converted)), step)


def _prctl(step: str, option: int, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    _checked(_libc.prctl(option, *(ctypes.c_ulong(each) for each in padded)), step)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if each is None else os.fsencode(each) for each in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options) if options else None)
    _checked(result, f"mount {kind or ''} {target}".replace("  ", " "))


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:  # noqa: PTH123  # pathlib would cost half the start-up time
        file.write(text)


def _enter_namespaces() -> None:
    """New user, mount, network, pid, ipc and host-name namespaces; the network has no interface that is up."""
    uid, gid = os.geteuid(), os.getegid()
    rest = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if _libc.unshare(_CLONE_NEWUSER | rest) == 0:
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    elif uid != 0:
        raise WallError(f"unshare: {os.strerror(ctypes.get_errno())}")
    else:
        # root can have the others where user namespaces are switched off
        _checked(_libc.unshare(rest), "unshare")


def _build_tree(readable: list[str]) -> None:
    """A root of its own, read-only: an empty folder to stand in, and what Python needs to import its own library."""
    quiet = _MS_NOSUID | _MS_NODEV
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    new = "/tmp"  # noqa: S108  # a mount point that every machine has; what it holds is hidden, not used
    handles = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in readable]
    _mount("tmpfs", new, "tmpfs", quiet, "mode=0111,size=1m")
    os.mkdir(new + _ROOM, 0o555)  # noqa: PTH102
    for path, handle in handles:
        is_folder = os.path.isdir(f"/proc/self/fd/{handle}")  # noqa: PTH112
        # the folders on the way can be passed and not listed: they may be somebody's home
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts) + is_folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir("/".join([new, *parts[:depth]]), 0o711)  # noqa: PTH102
        if not is_folder:
            os.close(os.open(new + path, os.O_CREAT | os.O_WRONLY, 0o444))
        _mount(f"/proc/self/fd/{handle}", new + path, None, _MS_BIND)
        # these flags of statvfs have the values of the MS_ flags; what the machine set must stay set
        kept = os.statvfs(new + path).f_flag & (_MS_RDONLY | quiet | 8)
        _mount(None, new + path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept | quiet)
        os.close(handle)
    for path in readable:
        parts = path.strip("/").split("/")
        for depth in range(1, len(parts)):
            os.chmod("/".join([new, *parts[:depth]]), 0o111)  # noqa: PTH101, S103  # passing on, no listing
    os.chdir(new)
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise WallError(f"pivot_root: not known on {os.uname().machine}")
    _syscall("pivot_root", number, b".", b".")
    _checked(_libc.umount2(b".", _MNT_DETACH), "unmount the machine's tree")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | quiet)
    os.chdir(_ROOM)


def _restrict_files(readable: list[str]) -> None:
    """No file but those below `readable`, and no network or signal where the system's Landlock knows of them."""
    version = _syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)
    files = (1 << _FILE_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("=QQQ", files, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall("landlock_create_ruleset", _LANDLOCK_CREATE, attributes, size, 0)
    for path in readable:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)  # noqa: PTH112
        rule = struct.pack("=Qi", rights, handle)
        _syscall(f"landlock rule for {path}", _LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(handle)
    os.chdir("/")
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)
    _syscall("landlock_restrict_self", _LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _drop_capabilities() -> None:
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    _checked(_libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)), "drop capabilities")
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)


def _limit(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))


def _filter_system_calls(program: bytes) -> None:
    buffer = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    _prctl("seccomp", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(head))


def _close_others(kept: list[int]) -> None:
    previous = 2
    for descriptor in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(previous + 1, descriptor)
        previous = descriptor


def _become(spec: dict[str, Any], status: int) -> NoReturn:
    """The walls of the rung, then the program. What it does with this process afterwards is its own affair."""
    source = compile(spec["source"], "<role>", "exec")
    if spec["rung"] == "namespaces":
        _build_tree(spec["readable"])
    else:
        _restrict_files(spec["readable"])
    _drop_capabilities()
    _limit(spec["limits"])
    nothing = spec["descriptors"]["nothing"]
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    _close_others([status, *spec["descriptors"].values()])
    os.environ.clear()  # Python sets a variable of its own where the locale is "C"
    _filter_system_calls(bytes.fromhex(spec["seccomp"]))
    os.close(status)
    namespace: dict[str, Any] = {"__name__": "role"}
    exec(source, namespace)  # noqa: S102  # read by the grading process from beside this file
    namespace["main"](spec["role"], spec["program"], spec["descriptors"])
    os._exit(0)


def _keep(child: int) -> NoReturn:
    """Wait for the program; end it when asked to. Its own end is its parent's business too, so it leaves no zombie."""

    def end(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it ended by itself a moment ago
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    os.waitpid(child, 0)
    os._exit(0)


def main() -> None:
    _prctl("die with the grading process", _PR_SET_PDEATHSIG, signal.SIGKILL)
    spec = json.load(sys.stdin.buffer)
    status = spec["status"]
    if os.getppid() != spec["parent"]:
        os._exit(1)  # it died before that wish was known
    try:
        if spec["rung"] != "namespaces":
            _become(spec, status)
        _enter_namespaces()
        wake, waker = os.pipe()
        child = os.fork()
        if not child:
            os.close(waker)
            _prctl("die with the keeper", _PR_SET_PDEATHSIG, signal.SIGKILL)
            if not os.read(wake, 1):
                os._exit(1)
            _become(spec, status)
        os.close(status)
        for descriptor in spec["descriptors"].values():
            os.close(descriptor)
        os.write(waker, b"1")
        _keep(child)
    except (WallError, OSError, ValueError) as error:
        os.write(status, str(error).encode()[:2000] or b"?")
        os._exit(126)


if __name__ == "__main__":
    main()
