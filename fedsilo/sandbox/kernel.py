"""Calls into the kernel that both bootstrap scripts build a sandbox of. Standard library only, and nothing of the
project: the scripts load this file by its path, before any package can be imported.

A step that fails raises SandboxError. Does not stop: what a process already holds, such as descriptors, maps and
threads, when it takes a step; the order of the steps is the scripts' affair.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

# sched.h
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
_CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
# sys/mount.h; the first four have the same values in statvfs and in mount_setattr
READ_ONLY, NO_SETUID, NO_DEVICES, NO_EXECUTION = 1, 2, 4, 8
_REMOUNT, _BIND, _RECURSIVE, _PRIVATE, _DETACH = 32, 4096, 16384, 1 << 18, 2
QUIET = NO_SETUID | NO_DEVICES
# fcntl.h
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
# asm/unistd.h; the newer numbers are the same on every machine
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _LANDLOCK_CREATE, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT = 442, 444, 445, 446
_LANDLOCK_VERSION_FLAG, _LANDLOCK_PATH_BENEATH = 1, 1
# linux/prctl.h, linux/securebits.h, linux/capability.h
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_SECUREBITS = 1, 22, 24, 28
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 36, 38, 47
_SECCOMP_MODE_FILTER, _CAP_AMBIENT_CLEAR_ALL, _CAPABILITY_VERSION_3 = 2, 4, 0x20080522
# noroot, no_setuid_fixup, keep_caps (off), no_cap_ambient_raise, each with its lock
_SECUREBITS = 0b11101111


class SandboxError(Exception):
    """A step of building the sandbox fails; the text names the step and the system's answer."""


def _checked(result: int, step: str) -> int:
    if result < 0:
        raise SandboxError(f"{step}: {os.strerror(ctypes.get_errno())}")
    return result


def _syscall(step: str, number: int, *arguments: Any) -> int:
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(int(_libc.syscall(ctypes.c_long(number), *converted)), step)


def _prctl(step: str, option: int, *arguments: int) -> None:
    padded = [*arguments, 0, 0, 0, 0][:4]
    _checked(_libc.prctl(option, *(ctypes.c_ulong(each) for each in padded)), step)


# ---- namespaces and what is mounted in them ----------------------------------------------------------


def enter_namespaces(host_name: str) -> None:
    """Enter new user, mount, network, pid, ipc and host-name namespaces. The user keeps its number inside.

    No interface is up in the network. The pid namespace is that of the next child.
    """
    uid, gid = os.geteuid(), os.getegid()
    rest = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    if _libc.unshare(_CLONE_NEWUSER | rest) == 0:
        write("/proc/self/uid_map", f"{uid} {uid} 1")
        write("/proc/self/setgroups", "deny")
        write("/proc/self/gid_map", f"{gid} {gid} 1")
    elif uid != 0:
        raise SandboxError(f"unshare: {os.strerror(ctypes.get_errno())}")
    else:
        # root can have the others where user namespaces are switched off
        _checked(_libc.unshare(rest), "unshare")
    name = host_name.encode()
    _libc.sethostname(name, ctypes.c_size_t(len(name)))


def write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:  # noqa: PTH123  # pathlib would cost half the start-up time
            file.write(text)
    except OSError as error:
        raise SandboxError(f"write {path}: {error.strerror}") from error


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if each is None else os.fsencode(each) for each in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options) if options else None)
    _checked(result, f"mount {kind or ''} {target}".replace("  ", " "))


def mount_privately() -> None:
    """Keep what is mounted from here on from the machine."""
    mount(None, "/", None, _RECURSIVE | _PRIVATE)


def bind(source: str, target: str, flags: int, *, recursive: bool) -> None:
    """Show a file or folder at another place as well, under these flags besides those that it has.

    Args:
        source: what is shown.
        target: where; a file or folder that exists.
        flags: READ_ONLY, NO_SETUID, NO_DEVICES and NO_EXECUTION.
        recursive: with what is mounted below it, where the kernel puts the flags on that, too.
    """
    if recursive:
        # mount_setattr (Linux 5.12) reaches what is mounted below
        mount(source, target, None, _BIND | _RECURSIVE)
        attributes = ctypes.create_string_buffer(struct.pack("=QQQQ", flags, 0, 0, 0), 32)
        size, where = ctypes.c_size_t(32), os.fsencode(target)
        if _libc.syscall(ctypes.c_long(_MOUNT_SETATTR), _AT_FDCWD, where, _AT_RECURSIVE, attributes, size) == 0:
            return
        # Older: bind again without what is mounted below, so that nothing stays writable by oversight.
        unmount(target, target)
    mount(source, target, None, _BIND)
    # what the machine set must stay set
    flags_kept = os.statvfs(target).f_flag & (READ_ONLY | NO_SETUID | NO_DEVICES | NO_EXECUTION)
    mount(None, target, None, _REMOUNT | _BIND | flags_kept | flags)


def unmount(target: str, what: str) -> None:
    _checked(_libc.umount2(os.fsencode(target), _DETACH), f"unmount {what}")


def pivot(new_root: str, put_old: str) -> None:
    """Make a mounted folder the root, and show the former root at `put_old`."""
    machine = os.uname().machine
    number = _PIVOT_ROOT.get(machine)
    if number is None:
        raise SandboxError(f"pivot_root: not known on {machine}")
    _syscall(f"pivot_root {new_root}", number, os.fsencode(new_root), os.fsencode(put_old))


def seal_root(new_root: str, what: str) -> None:
    """Make a mounted folder the root, let go of the former one (`what`), and let nobody write into the new one."""
    os.chdir(new_root)
    pivot(".", ".")
    unmount(".", what)
    os.chdir("/")
    mount(None, "/", None, _REMOUNT | _BIND | READ_ONLY | QUIET)


# ---- what a process gives up -------------------------------------------------------------------------


def forbid_new_privileges() -> None:
    _prctl("no_new_privs", _PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give up every capability, now and by a later exec, even for user 0."""
    _libc.prctl(_PR_CAP_AMBIENT, _CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    # Both need a capability themselves: an ordinary user has none, and cannot get one past no_new_privs.
    _libc.prctl(_PR_SET_SECUREBITS, ctypes.c_ulong(_SECUREBITS), 0, 0, 0)
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    _checked(_libc.capset(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0), bytes(24)), "drop capabilities")
    forbid_new_privileges()


def filter_system_calls(program: bytes) -> None:
    """Put a filter of `fedsilo.sandbox.filters` around this process and its children, for good."""
    buffer = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer)))
    _prctl("seccomp", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(head))


def landlock_version() -> int:
    """Return the version of Landlock that this kernel offers; 0 where it has none or it is switched off."""
    number, flag = ctypes.c_long(_LANDLOCK_CREATE), ctypes.c_uint32(_LANDLOCK_VERSION_FLAG)
    return max(0, int(_libc.syscall(number, None, ctypes.c_size_t(0), flag)))


def restrict_files(ruleset: bytes, rules: Iterable[tuple[str, int]]) -> None:
    """Put a ruleset of `fedsilo.sandbox.filters` around this process and its children, for good."""
    forbid_new_privileges()
    made = _syscall("landlock_create_ruleset", _LANDLOCK_CREATE, ruleset, len(ruleset), 0)
    for path, access in rules:
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError as error:
            raise SandboxError(f"open {path}: {error.strerror}") from error
        rule = struct.pack("=Qi", access, handle)
        _syscall(f"landlock rule for {path}", _LANDLOCK_ADD_RULE, made, _LANDLOCK_PATH_BENEATH, rule, 0)
        os.close(handle)
    _syscall("landlock_restrict_self", _LANDLOCK_RESTRICT, made, 0)
    os.close(made)


def close_descriptors_except(kept: Iterable[int]) -> None:
    """Close every descriptor but the standard three and `kept`."""
    previous = 2
    for descriptor in [*sorted(kept), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(previous + 1, descriptor)
        previous = descriptor


def replace_output(descriptor: int) -> None:
    """Make the standard three descriptors copies of this one."""
    for standard in (0, 1, 2):
        os.dup2(descriptor, standard)


# ---- processes ---------------------------------------------------------------------------------------


def die_with_parent(whom: str) -> None:
    """Be killed when the thread that started this process ends; a change of user clears the wish."""
    _prctl(f"die with {whom}", _PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    _prctl("adopt orphans", _PR_SET_CHILD_SUBREAPER, 1)
