"""Global adapters that this silo holds, by digest: one it has is not fetched again (design 4)."""

from __future__ import annotations

import json
from pathlib import Path

from fedsilo.edge.files import make_private_directory, write_durably
from fedsilo.treaty.wire.codec import sha256_hex

ADAPTERS_KEPT = 3


class AdapterStore:
    """Args:
    folder: holds `<digest>` files and `norms.json`.
    """

    def __init__(self, folder: Path) -> None:
        make_private_directory(folder)
        self._folder = folder
        self._norms_path = folder / "norms.json"
        self._norms: dict[str, float | None] = (
            json.loads(self._norms_path.read_text()) if self._norms_path.exists() else {}
        )

    def find(self, digest: str) -> bytes | None:
        """The payload, if it is here and whole."""
        path = self._folder / digest
        if not digest.isalnum() or not path.is_file():
            return None
        payload = path.read_bytes()
        return payload if sha256_hex(payload) == digest else None

    def keep(self, digest: str, payload: bytes, l2: float | None) -> None:
        """Store a payload whose digest the caller has compared; the oldest beyond a few go."""
        write_durably(self._folder / digest, payload, mode=0o600)
        self._norms[digest] = l2
        kept = sorted(
            (path for path in self._folder.iterdir() if path.name in self._norms),
            key=lambda path: path.stat().st_mtime_ns,
        )
        for path in kept[:-ADAPTERS_KEPT]:
            path.unlink()
            del self._norms[path.name]
        write_durably(self._norms_path, json.dumps(self._norms).encode(), mode=0o600)

    def l2(self, digest: str) -> float | None:
        """L2 norm over all factors, as measured when it came in."""
        return self._norms.get(digest)
