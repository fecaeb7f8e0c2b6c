"""Filters around a process in a sandbox, as bytes for `kernel` to install: which files it may touch, as a Landlock
ruleset (landlock(7)), where no namespaces can be had; and which system calls it may make, as seccomp filters (classic
BPF, seccomp(2), kernel/seccomp.c).

What Landlock does not stop, up to its version 7: stat of any path (that a file exists, its size and times), chmod and
the like on files the user owns, and connecting to a unix socket by its path; the system-call filter refuses the last.

The trainer's seccomp filter is a list of refusals: it runs torch, CUDA and whatever allocator they bring, and a list of
permissions that is right for all of them does not exist. Refused are the calls that look into other processes, change
the view of the machine, or open a way out that neither namespaces nor Landlock cover: AF_VSOCK reaches the hypervisor
from every network namespace, io_uring opens sockets without the socket call. A graded program's filter is a list of
permissions: what a single-threaded Python program needs to compute (no new process or thread, no program start, no
socket, no signal to others, no change to any file). Everything else is refused with EPERM. What this does not stop:
bugs in the calls that remain; anything over a descriptor the process was given.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Iterable
from pathlib import Path

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1, 2, 4, 8
_TRUNCATE, _DEVICE_IOCTL = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_IOCTL
READ = _READ_FILE | _READ_DIRECTORY
READ_AND_EXECUTE = READ | _EXECUTE
# bits 0 to 12 since version 1; then refer (2), truncate (3), device ioctl (5)
_HANDLED_SINCE = ((1, (1 << 13) - 1), (2, 1 << 13), (3, _TRUNCATE), (5, _DEVICE_IOCTL))
_TCP_SINCE, _TCP = 4, 3
_SCOPE_SINCE, _SCOPE = 6, 3  # abstract unix sockets and signals stay inside


def ruleset(version: int) -> bytes:
    """Return `struct landlock_ruleset_attr`: what this version can refuse is refused unless a rule allows it."""
    attributes = struct.pack("=Q", every_access(version))
    if version >= _TCP_SINCE:
        attributes += struct.pack("=Q", _TCP)
    if version >= _SCOPE_SINCE:
        attributes += struct.pack("=Q", _SCOPE)
    return attributes


def rules(version: int, *allowed: tuple[int, Iterable[Path]]) -> list[tuple[str, int]]:
    """Return (path, access bits) of each allowed path. Bits that only fit a folder are left out for a file.

    Args:
        version: of Landlock.
        allowed: access bits, and the paths that get them; a path that comes twice gets both.
    """
    handled = every_access(version)
    accesses: dict[str, int] = {}
    for access, paths in allowed:
        for path in paths:
            fitting = access & handled if path.is_dir() else access & handled & _ON_FILES
            accesses[os.fspath(path)] = accesses.get(os.fspath(path), 0) | fitting
    return list(accesses.items())


def every_access(version: int) -> int:
    """Return the access bits that this version knows."""
    bits = 0
    for since, added in _HANDLED_SINCE:
        if version >= since:
            bits |= added
    return bits


_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name: (x86_64, aarch64); None where the machine has no such call. From asm/unistd_64.h and asm-generic/unistd.h.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    # another view of the machine
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    # the kernel itself
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
}
# refused besides, where nothing but this filter stands between the process and the network
_REFUSED_WITHOUT_NETWORK: dict[str, tuple[int, int]] = {
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
}
# What a program may call, in the same two columns: what Python needs to compute, import its library and end.
_PERMITTED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226),
    "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "select": (23, None), "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23),
    "pause": (34, None), "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "fcntl": (72, 25), "getcwd": (79, 17),
    "readlink": (89, None), "gettimeofday": (96, 169), "getrlimit": (97, 163), "getrusage": (98, 165),
    "sysinfo": (99, 179), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "getppid": (110, 173), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "arch_prctl": (158, None), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "sched_getaffinity": (204, 123), "getdents64": (217, 61), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "openat": (257, 56), "newfstatat": (262, 79),
    "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "set_robust_list": (273, 99), "getrandom": (318, 278), "membarrier": (324, 283), "statx": (332, 291),
    "rseq": (334, 293), "faccessat2": (439, 439),
}  # fmt: skip
_CLONE, _CLONE3, _IOCTL, _SOCKET, _SOCKETPAIR = (56, 220), (435, 435), (16, 29), (41, 198), (53, 199)
# CLONE_NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}
_NEW_NAMESPACES = 0x7E020000
# ioctls that type into a terminal: TIOCSTI, TIOCLINUX
_TERMINAL_INJECTION = (0x5412, 0x541C)
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK, _SOCK_STREAM = 1, 2, 10, 16, 1
_X32_BIT = 0x40000000

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
# offsets in struct seccomp_data; arguments are 64 bit, and the low half comes first on both machines
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse(number: int = errno.EPERM) -> bytes:
    return _step(_RETURN, _ERRNO | number)


def _for_call(number: int, body: list[bytes]) -> list[bytes]:
    """Run `body`, which must end in a return on every path, when the call is `number`."""
    return [_step(_EQUAL, number, 0, len(body)), *body]


def _begin(machine: str | None) -> tuple[int, list[bytes]]:
    """Return the column of this machine in the tables, and the steps that load the number of a call of its own.

    Raises:
        ValueError: the system-call numbers of that machine are not known here.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCHITECTURE:
        raise ValueError(f"no system-call filter for {machine}; known: {', '.join(_AUDIT_ARCHITECTURE)}")
    # Calls in another machine's numbering (32-bit, x32) would walk past every comparison that follows.
    steps = [_step(_LOAD, _ARCHITECTURE), _step(_EQUAL, _AUDIT_ARCHITECTURE[machine], 1, 0), _refuse()]
    steps += [_step(_LOAD, _NUMBER)]
    if machine == "x86_64":
        steps += [_step(_AT_LEAST, _X32_BIT, 0, 1), _refuse(errno.ENOSYS)]
    return list(_AUDIT_ARCHITECTURE).index(machine), steps


def trainer_filter(*, network_by_namespace: bool, machine: str | None = None) -> bytes:
    """Return the trainer's filter as an array of `struct sock_filter`.

    Args:
        network_by_namespace: the process lives in a network namespace of its own, so internet sockets may be made
            there; else no socket can be made at all, but pairs of connected stream sockets.
        machine: `x86_64` or `aarch64`; by default this machine.

    Raises:
        ValueError: the system-call numbers of that machine are not known here.
    """
    column, steps = _begin(machine)
    allow = _step(_RETURN, _ALLOW)
    refused = dict(_REFUSED)
    if not network_by_namespace:
        refused.update(_REFUSED_WITHOUT_NETWORK)
    for numbers in refused.values():
        if (number := numbers[column]) is not None:
            steps += _for_call(number, [_refuse()])
    # The flags of clone3 lie in memory, out of the filter's sight; on ENOSYS the C library falls back to clone.
    steps += _for_call(_CLONE3[column], [_refuse(errno.ENOSYS)])
    steps += _for_call(
        _CLONE[column], [_step(_LOAD, _ARGUMENT_0), _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _refuse(), allow]
    )
    sti, linux = _TERMINAL_INJECTION
    steps += _for_call(
        _IOCTL[column],
        [_step(_LOAD, _ARGUMENT_1), _step(_EQUAL, sti, 1, 0), _step(_EQUAL, linux, 0, 1), _refuse(), allow],
    )
    if network_by_namespace:
        families = (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK)
        tests = [_step(_EQUAL, family, len(families) - index, 0) for index, family in enumerate(families)]
        body = [_step(_LOAD, _ARGUMENT_0), *tests, _refuse(errno.EAFNOSUPPORT), allow]
        steps += _for_call(_SOCKET[column], body)
    else:
        # A datagram pair could still address other sockets by path; a stream pair cannot.
        body = [
            _step(_LOAD, _ARGUMENT_0),
            _step(_EQUAL, _AF_UNIX, 0, 3),
            _step(_LOAD, _ARGUMENT_1),
            _step(_AND, 0xF),
            _step(_EQUAL, _SOCK_STREAM, 1, 0),
            _refuse(),
            allow,
        ]
        steps += _for_call(_SOCKETPAIR[column], body)
    return b"".join([*steps, allow])


def program_filter(machine: str | None = None) -> bytes:
    """Return the filter of a graded program as an array of `struct sock_filter`.

    Raises:
        ValueError: the system-call numbers of that machine are not known here.
    """
    column, steps = _begin(machine)
    for numbers in _PERMITTED.values():
        if (number := numbers[column]) is not None:
            steps += _for_call(number, [_step(_RETURN, _ALLOW)])
    return b"".join([*steps, _refuse()])
