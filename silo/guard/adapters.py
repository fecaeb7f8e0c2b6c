"""Global adapters that this silo holds, by digest: one it has is not fetched again (design 4), unless it was let in
under a plan that freezes other factors (T6), or measured from another last adapter than the run has come to (T20).

Does not stop: a change of policy; what was let in under the one before stays let in.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedsilo.edge.files import make_private_directory, write_durably
from fedsilo.treaty.wire.codec import Array, decode_factors, sha256_hex

ADAPTERS_KEPT = 3


class AdapterStore:
    """Args:
    folder: holds `<digest>` files, and `known.json` with what was found out about each when it came in.
    """

    def __init__(self, folder: Path) -> None:
        make_private_directory(folder)
        self._folder = folder
        self._known_path = folder / "known.json"
        self._known: dict[str, dict[str, Any]] = (
            json.loads(self._known_path.read_text()) if self._known_path.exists() else {}
        )

    def find(self, digest: str, *, frozen_sha256: str | None = None, after: str | None = None) -> bytes | None:
        """The payload, if it is here and whole.

        Args:
            digest: of the payload.
            frozen_sha256: digest of the factors that the plan freezes, which it must have been let in for (T6); None
                where no plan asks.
            after: what it must have been measured from when it came in (`RunView.step_from`); None where any will do.
        """
        path = self._folder / digest
        if not digest.isalnum() or not path.is_file():
            return None
        if after is not None and self._known.get(digest, {}).get("after") != after:
            return None
        if frozen_sha256 is not None and self._known.get(digest, {}).get("frozen_sha256") != frozen_sha256:
            return None
        payload = path.read_bytes()
        return payload if sha256_hex(payload) == digest else None

    def tensors(self, digest: str) -> Mapping[str, Array] | None:
        """The factors by wire name, mapped from the file and not read into memory; None where it is not here and whole.

        Raises:
            PeerError: it is whole, and no tensor payload; nothing that was let in is.
        """
        if not digest.isalnum():
            return None
        try:
            with (self._folder / digest).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # gone, not to be read, or empty
            return None
        view = memoryview(mapped)
        return decode_factors(view).tensors if sha256_hex(view) == digest else None

    def keep(
        self,
        digest: str,
        payload: bytes,
        l2: float | None,
        frozen_sha256: str = "",
        after: str = "",
        in_use: Collection[str] = (),
    ) -> None:
        """Store a payload whose digest the caller has compared and that the gate let in; the oldest beyond a few go.

        Args:
            digest: of the payload.
            payload: its bytes.
            l2: norm over all factors.
            frozen_sha256: digest of the factors that the plan freezes.
            after: what it was measured from.
            in_use: digests of others that stay, however old they are: the next one is measured from the last (T20).
        """
        write_durably(self._folder / digest, payload, mode=0o600)
        self._known[digest] = {"l2": l2, "frozen_sha256": frozen_sha256, "after": after}
        needed = {digest, *in_use}
        kept = sorted(
            (path for path in self._folder.iterdir() if path.name in self._known),
            key=lambda path: (path.name in needed, path.stat().st_mtime_ns),
        )
        for path in kept[: -max(ADAPTERS_KEPT, len(needed))]:
            path.unlink()
            del self._known[path.name]
        write_durably(self._known_path, json.dumps(self._known).encode(), mode=0o600)

    def l2(self, digest: str) -> float | None:
        """L2 norm over all factors, as measured when it came in."""
        l2: float | None = self._known.get(digest, {}).get("l2")
        return l2
