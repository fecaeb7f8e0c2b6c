"""The version of the program that makes a line of results."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import fedsilo

PACKAGES = ("certs", "console", "coordinator", "fedsilo", "policies", "silo")
_LIBRARIES = ("torch", "transformers")
_SUFFIXES = frozenset((".py", ".yaml"))  # modules, and the rulesets that sites are set up with


def digest_of_code(root: Path) -> str:
    """Return one SHA-256 over the modules and rulesets of all packages below a folder, by name."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*")):
            if path.suffix in _SUFFIXES and path.is_file():
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


@cache
def program() -> dict[str, str]:
    """Return the digest of the running program's code, as it is when a process first asks, and the versions of the
    libraries that its training depends on; empty where one is not installed."""
    return {
        "sha256": digest_of_code(Path(fedsilo.__file__).parent.parent),
        **{name: _version(name) for name in _LIBRARIES},
    }


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""
