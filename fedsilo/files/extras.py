"""The error where a library of an extra is missing: its name, and the command that installs the extra."""

from __future__ import annotations

from importlib import util

from fedsilo.protocol.errors import UsageError

EXTRA_OF = {
    "torch": "silo", "transformers": "silo", "accelerate": "silo", "hpack": "demo", "hyperframe": "demo",
    "pyarrow": "parquet", "psycopg": "postgres", "tensorboard": "science", "textual_serve": "web", "aiohttp": "web",
}  # fmt: skip


def install_hint(library: str) -> str:
    """The command that installs a library of `EXTRA_OF`, from a package index and in a clone."""
    extra = EXTRA_OF[library]
    return f"pip install 'fedsilo[{extra}]', in the clone: .venv/bin/pip install -e '.[{extra}]' -c constraints.txt"


def not_installed(error: ModuleNotFoundError) -> UsageError | None:
    """Return the error for an import that failed; None where the module belongs to no extra, or is only a part of
    one."""
    name = error.name or ""
    if name not in EXTRA_OF:
        return None
    return UsageError(f"{name} is not installed", hint=install_hint(name), code="EXTRA_MISSING")


def need(*libraries: str) -> None:
    """Look for libraries without loading them. Raises UsageError: the first that is missing, with its command."""
    for name in libraries:
        if util.find_spec(name) is None:
            raise UsageError(f"{name} is not installed", hint=install_hint(name), code="EXTRA_MISSING")
