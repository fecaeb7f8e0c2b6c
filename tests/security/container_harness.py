"""What a container runtime does around a process, for the tests: a sandbox that somebody else builds. Run by root, as
a script of the standard library alone: `python -I -S container_harness.py SPEC`, and it becomes the program.

SPEC is JSON: `network` (path of a network namespace; "": an empty one of its own; null: this one), `user` (a number, or
null: root with everything it may), `vsock` (whether sockets to the hypervisor can be made, as an old runtime leaves
it), `binds` ([source, target]), `argv`, `env`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import struct
import sys
from typing import NoReturn

_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18
_SET_SECCOMP, _SET_NO_NEW_PRIVILEGES, _FILTER = 22, 38, 2
_SOCKET = {"x86_64": 41, "aarch64": 198}
_AF_VSOCK = 40

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _refuse_vsock() -> None:
    steps = (
        (0x20, 0, 0, 0),  # the call's number
        (0x15, 0, 3, _SOCKET[platform.machine()]),
        (0x20, 0, 0, 16),  # its first argument
        (0x15, 0, 1, _AF_VSOCK),
        (0x06, 0, 0, 0x00050000 | errno.EAFNOSUPPORT),
        (0x06, 0, 0, 0x7FFF0000),
    )
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    buffer = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(buffer)))
    _checked(_libc.prctl(_SET_SECCOMP, ctypes.c_ulong(_FILTER), ctypes.c_ulong(ctypes.addressof(head)), 0, 0))


def main() -> NoReturn:
    spec = json.loads(sys.argv[1])
    if spec["network"] == "":
        _checked(_libc.unshare(_NEW_NETWORK))
    elif spec["network"] is not None:
        network = os.open(spec["network"], os.O_RDONLY)
        _checked(_libc.setns(network, _NEW_NETWORK))
        os.close(network)
    _checked(_libc.unshare(_NEW_MOUNTS))
    _checked(_libc.mount(None, b"/", None, ctypes.c_ulong(_PRIVATE | _RECURSIVE), None))
    for source, target in spec["binds"]:
        flags = ctypes.c_ulong(_BIND | _RECURSIVE)
        _checked(_libc.mount(os.fsencode(source), os.fsencode(target), None, flags, None))
    if spec["user"] is not None:
        os.setgroups([])
        os.setresgid(spec["user"], spec["user"], spec["user"])
        os.setresuid(spec["user"], spec["user"], spec["user"])
    _checked(_libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    if not spec["vsock"]:
        _refuse_vsock()
    os.chdir("/")
    os.execve(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606  # an argument list is the point


if __name__ == "__main__":
    main()
