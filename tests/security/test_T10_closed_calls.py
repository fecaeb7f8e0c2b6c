"""Which system calls the trainer's filter closes: the whole list, in the kernel's numbers, by an interpreter of BPF.

The numbers come from the C headers (linux-libc-dev), not from the filter's table; the interpreter is written from
`man 2 seccomp` and the classic BPF instruction set.
"""

from __future__ import annotations

import errno
import re
import resource
import struct
from pathlib import Path

import pytest

from fedsilo.sandbox.seccomp import trainer_filter
from silo.guard.trainer_process import probing
from tests.security.sandbox_harness import run_inside

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*, linux/audit.h
CLOSED = [
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    "process_madvise",
    "kcmp",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "setns",
    "unshare",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "open_by_handle_at",
    "fanotify_init",
    "quotactl",
    "quotactl_fd",
    "swapon",
    "swapoff",
    "acct",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "add_key",
    "request_key",
    "keyctl",
    "kexec_load",
    "kexec_file_load",
    "init_module",
    "finit_module",
    "delete_module",
    "reboot",
    "sethostname",
    "setdomainname",
    "syslog",
    "settimeofday",
    "clock_settime",
    "clock_adjtime",
    "adjtimex",
]
CLOSED_X86 = ["iopl", "ioperm"]
NEWER = {"open_tree_attr": 467}  # of Linux 6.15, which the headers of a machine may not have yet
OPEN = [
    "read",
    "write",
    "openat",
    "close",
    "mmap",
    "mprotect",
    "futex",
    "clone",
    "execve",
    "exit_group",
    "getpid",
    "socketpair",
    "recvmsg",
    "sendmsg",
]
ALLOW = 0x7FFF0000
X32 = 0x40000000


def numbers(machine: str) -> dict[str, int]:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is missing: install linux-libc-dev")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text(), flags=re.MULTILINE)
    return {name: int(number) for name, number in found} | NEWER


def verdict(program: bytes, machine: str, call: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel returns for a call: `ALLOW`, or minus the error number."""
    data = struct.pack("=iIQ6Q", call & 0xFFFFFFFF if call < 2**31 else call - 2**32,
                       ARCHITECTURE[machine] if architecture is None else architecture, 0,
                       *(*arguments, 0, 0, 0, 0, 0, 0)[:6])  # fmt: skip
    accumulator, place = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, 8 * place)
        place += 1
        if code == 0x06:
            return ALLOW if value == ALLOW else -(value & 0xFFFF)
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            place += if_true if holds else if_false


machines = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
networks = pytest.mark.parametrize("network", [True, False], ids=["namespaces", "user"])


@machines
@networks
def test_T10_each_closed_call_is_refused_and_ordinary_ones_are_not(machine: str, network: bool) -> None:
    program, number = trainer_filter(network_by_namespace=network, machine=machine), numbers(machine)
    closed = [*CLOSED, *NEWER, *(CLOSED_X86 if machine == "x86_64" else [])]
    if not network:
        closed += ["socket", "connect", "bind", "listen"]
    assert {name: verdict(program, machine, number[name]) for name in closed} == dict.fromkeys(closed, -errno.EPERM)
    names = [name for name in OPEN if name != "socketpair"]
    assert {name: verdict(program, machine, number[name]) for name in names} == dict.fromkeys(names, ALLOW)


@machines
@networks
def test_T10_what_is_closed_is_what_this_list_says(machine: str, network: bool) -> None:
    """The counterpart of the list: each call that is refused whatever its arguments are is named above."""
    program, number = trainer_filter(network_by_namespace=network, machine=machine), numbers(machine)
    refused = {name for name, call in number.items() if verdict(program, machine, call, 1, 1, 1) == -errno.EPERM}
    refused -= set() if network else {"socket", "connect", "bind", "listen"}
    assert refused - {"socketpair"} <= {*CLOSED, *CLOSED_X86, *NEWER}


@machines
def test_T10_calls_in_another_numbering_are_refused(machine: str) -> None:
    program, number = trainer_filter(network_by_namespace=True, machine=machine), numbers(machine)
    for call in number.values():
        assert verdict(program, machine, call, architecture=0x40000003) == -errno.EPERM  # AUDIT_ARCH_I386
        if machine == "x86_64":
            assert verdict(program, machine, call | X32) == -errno.ENOSYS


@machines
def test_T10_arguments_decide_where_a_call_is_needed_in_part(machine: str) -> None:
    number = numbers(machine)
    sandboxed, bare = (trainer_filter(network_by_namespace=each, machine=machine) for each in (True, False))
    thread, namespaces = 0x3D0F00, (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
    assert verdict(sandboxed, machine, number["clone"], thread) == ALLOW
    for flag in namespaces:
        assert verdict(sandboxed, machine, number["clone"], thread | flag) == -errno.EPERM
    assert verdict(sandboxed, machine, number["clone3"], 1, 88) == -errno.ENOSYS
    for request, expected in ((0x5412, -errno.EPERM), (0x541C, -errno.EPERM), (0x5413, ALLOW)):
        assert verdict(sandboxed, machine, number["ioctl"], 0, request) == expected
    families = {family: verdict(sandboxed, machine, number["socket"], family, 1) for family in range(46)}
    assert {family for family, result in families.items() if result == ALLOW} == {1, 2, 10, 16}
    kinds = {kind: verdict(bare, machine, number["socketpair"], 1, kind) for kind in (1, 1 | 0o2000000, 2, 5)}
    assert kinds == {1: ALLOW, 1 | 0o2000000: ALLOW, 2: -errno.EPERM, 5: -errno.EPERM}
    assert verdict(bare, machine, number["socketpair"], 2, 1) == -errno.EPERM


@pytest.mark.parametrize("level", ["namespaces", "user", "waived"])
def test_T10_a_trainer_leaves_no_core_dump(level: str) -> None:
    if level != "waived" and (reason := probing.sandbox_trial(level)):
        pytest.skip(f"this machine cannot build it: {reason}")
    before = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (before[1], before[1]))
    try:
        inside = run_inside(level, "-c", "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))")
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, before)
    assert inside.strip() == "(0, 0)"
    assert before[1] != 0, "this machine allows no core dump to anybody: the test shows nothing"


@pytest.mark.parametrize("level", ["namespaces", "user"])
def test_T10_the_kernel_refuses_io_uring_inside(level: str) -> None:
    if reason := probing.sandbox_trial(level):
        pytest.skip(f"this machine cannot build it: {reason}")
    program = (
        "import ctypes, errno; call = ctypes.CDLL(None, use_errno=True).syscall\n"
        "print([(call(n, 0, 0), errno.errorcode[ctypes.get_errno()])[1] for n in (425, 426, 427)])"
    )
    assert run_inside(level, "-c", program).strip() == str(["EPERM"] * 3)
