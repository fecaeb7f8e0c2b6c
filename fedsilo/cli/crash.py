"""The report of a fault of ours: what is needed to find it, and nothing of whose data it happened to.

It holds the command's name, versions, the types of the exceptions and where in our code each passed. It holds no
message of an exception, no value of an argument or variable and no line of source: any of these may carry private text.
Frames of libraries are counted, not named by path.

Does not stop: a type or function name that itself is telling; a person sees the whole file before passing it on.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedsilo.cli.own_names import TOP_LEVEL_NAMES

SCHEMA = "fedsilo.crash/1"
_ROOT = Path(__file__).resolve().parents[2]
_CHAIN_MAX, _FRAMES_MAX = 8, 60
_LIBRARIES = ("typer", "pydantic", "grpcio", "protobuf", "cryptography", "numpy", "textual", "torch", "transformers")


def reports_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of reports: below $XDG_STATE_HOME, else ~/.local/state (XDG Base Directory)."""
    known = os.environ if environment is None else environment
    base = known.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "fedsilo" / "crashes"


def write_report(command: str, error: BaseException) -> Path | None:
    """A new file of mode 0600 in `reports_folder`, or in the folder for temporary files; None if neither takes one."""
    text = json.dumps(report(command, error), indent=1) + "\n"
    name = f"crash-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}.json"
    folders: tuple[Callable[[], Path], ...] = (reports_folder, lambda: Path(tempfile.gettempdir()))
    for choose in folders:
        with suppress(OSError, RuntimeError):  # RuntimeError: nobody's home folder
            folder = choose()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            return folder / name
    return None


def report(command: str, error: BaseException) -> dict[str, Any]:
    """Return the report of an exception as JSON values."""
    return {
        "schema": SCHEMA,
        "command": command,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "exceptions": [
            {"type": f"{type(each).__module__}.{type(each).__qualname__}", "frames": _frames(each)}
            for each in _chain(error)
        ],
    }


def versions() -> dict[str, str]:
    """Of FedSilo, Python, the operating system and the libraries that it runs on; a missing one says so."""
    system = {"system": f"{platform.system()} {platform.release()} {platform.machine()}"}
    return versions_of() | system | versions_of(*_LIBRARIES)


def versions_of(*libraries: str) -> dict[str, str]:
    """Return the versions of FedSilo, Python and these libraries; a missing one is "not installed"."""
    from importlib import metadata

    import fedsilo

    found = {"fedsilo": fedsilo.__version__, "python": platform.python_version()}
    for name in libraries:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception, then what it came from."""
    for _ in range(_CHAIN_MAX):
        if error is None:
            return
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _frames(error: BaseException) -> list[str]:
    """`fedsilo/cli/main.py:41 function` of each frame of ours, `(3 of libraries)` where others lie between."""
    shown: list[str] = []
    foreign = 0
    for frame in traceback.extract_tb(error.__traceback__)[-_FRAMES_MAX:]:
        path = Path(frame.filename)
        ours = path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in TOP_LEVEL_NAMES
        if not ours:
            foreign += 1
            continue
        if foreign:
            shown.append(f"({foreign} of libraries)")
            foreign = 0
        shown.append(f"{path.relative_to(_ROOT)}:{frame.lineno} {frame.name}")
    return [*shown, f"({foreign} of libraries)"] if foreign else shown
