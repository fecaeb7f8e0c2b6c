"""Which files a process may touch, as a Landlock ruleset (landlock(7)); used where no namespaces can be had.

What Landlock does not stop, up to its version 7: stat of any path (that a file exists, its size and times), chmod and
the like on files the user owns, and connecting to a unix socket by its path; the system-call filter refuses the last.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_CREATE_RULESET = 444  # the same number on every machine
_VERSION_FLAG = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIRECTORY = 1, 2, 4, 8
_TRUNCATE, _DEVICE_IOCTL = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE_IOCTL
_READ = _EXECUTE | _READ_FILE | _READ_DIRECTORY
# bits 0 to 12 since version 1; then refer (2), truncate (3), device ioctl (5)
_HANDLED_SINCE = ((1, (1 << 13) - 1), (2, 1 << 13), (3, _TRUNCATE), (5, _DEVICE_IOCTL))
_TCP_SINCE, _TCP = 4, 3
_SCOPE_SINCE, _SCOPE = 6, 3  # abstract unix sockets and signals stay inside


def landlock_version() -> int:
    """The version of Landlock this kernel offers; 0 where it has none or it is switched off."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    return max(0, int(version))


def ruleset(version: int) -> bytes:
    """`struct landlock_ruleset_attr`: everything this version can refuse is refused unless a rule allows it."""
    attributes = struct.pack("=Q", _handled(version))
    if version >= _TCP_SINCE:
        attributes += struct.pack("=Q", _TCP)
    if version >= _SCOPE_SINCE:
        attributes += struct.pack("=Q", _SCOPE)
    return attributes


def rules(version: int, readable: Iterable[Path], writable: Iterable[Path]) -> list[tuple[str, int]]:
    """(path, access bits) of each allowed path. Bits that only fit a folder are left out for a file."""
    handled = _handled(version)
    allowed: dict[str, int] = {}
    for paths, access in ((readable, _READ), (writable, handled)):
        for path in paths:
            fitting = access & handled if path.is_dir() else access & handled & _ON_FILES
            allowed[os.fspath(path)] = allowed.get(os.fspath(path), 0) | fitting
    return list(allowed.items())


def _handled(version: int) -> int:
    bits = 0
    for since, added in _HANDLED_SINCE:
        if version >= since:
            bits |= added
    return bits
