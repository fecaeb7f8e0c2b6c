"""Which files a process may touch, as a Landlock ruleset (landlock(7)); used where no namespaces can be had.

What Landlock does not stop, up to its version 7: stat of any path (that a file exists, its size and times), chmod and
the like on files the user owns, and connecting to a unix socket by its path; the system-call filter refuses the last.
"""

from __future__ import annotations

import os
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
    found: dict[str, int] = {}
    for access, paths in allowed:
        for path in paths:
            fitting = access & handled if path.is_dir() else access & handled & _ON_FILES
            found[os.fspath(path)] = found.get(os.fspath(path), 0) | fitting
    return list(found.items())


def every_access(version: int) -> int:
    """Return the access bits that this version knows."""
    bits = 0
    for since, added in _HANDLED_SINCE:
        if version >= since:
            bits |= added
    return bits
