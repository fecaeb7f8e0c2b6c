"""Where the rollout servers are; without the libraries of training, since the worker reads it before it loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RolloutPlace:
    """Where the servers are, as the trainer sees it inside its sandbox.

    Attributes:
        private, public: sockets; twice the same where one server answers both.
        adapters: folder that the trainer writes and the servers read.
        timeout_seconds: how long a server may be away.
        sleep: ask for sleep while the trainer trains, where the server offers it.
    """

    private: Path
    public: Path
    adapters: Path
    timeout_seconds: float
    sleep: bool = False


def place_from(fields: Mapping[str, Any] | None) -> RolloutPlace | None:
    """Of the `configure` message. None: the embedded engine. Raises KeyError, TypeError, ValueError."""
    if fields is None:
        return None
    private, public, adapters = (Path(str(fields[name])) for name in ("private", "public", "adapters"))
    return RolloutPlace(private, public, adapters, float(fields["timeout_seconds"]), bool(fields["sleep"]))
