"""What becomes of a file on its way."""

from __future__ import annotations

import itertools
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def carried_by_a_thief(path: Path, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> Path:
    """The same file, its entries changed by who has no key. change: of the manifest and the other entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(entries.pop("manifest.json"))
    change(manifest, entries)
    entries["manifest.json"] = json.dumps(manifest, indent=1).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return path


def without_the_first(manifest: dict[str, Any], entries: dict[str, bytes]) -> None:
    """A change that leaves the first message out."""
    del manifest["messages"][0]
    numbers = sorted(name for name in entries if name.startswith("messages/"))
    for number, following in itertools.pairwise(numbers):
        entries[number] = entries[following]
    del entries[numbers[-1]]


def without_its_signature(_: dict[str, Any], entries: dict[str, bytes]) -> None:
    """A change that leaves nobody to vouch for the manifest."""
    del entries["manifest.sig"]
