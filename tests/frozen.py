"""One of our commands under a clock that stands still: `python -m tests.frozen SECONDS silo start --config silo.yaml`.

What a daemon answers then depends on its files alone: no deadline passes, nothing expires, nothing is tried again, and
no certificate is too old. Children of the daemon, such as the trainer, have the machine's clock.
"""

from __future__ import annotations

import datetime
import queue  # noqa: F401  # it and threading take the real clock, so that their time limits pass, before it is replaced
import runpy
import sys
import threading  # noqa: F401  # as queue
import time
from typing import Any

_REAL = datetime.datetime


class _OfEither(type(_REAL)):  # type: ignore[misc]
    """Lets a date and time pass for a frozen one, whoever made it."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _REAL)


def freeze(seconds: float) -> None:
    """Stop the clocks of this process, for modules that are imported afterwards. seconds: UTC, shown from now on."""

    class Frozen(_REAL, metaclass=_OfEither):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return _REAL.fromtimestamp(seconds, tz)

    clocks: dict[str, Any] = {
        "time": lambda: seconds,
        "time_ns": lambda: int(seconds * 10**9),
        "monotonic": lambda: 1_000_000.0,
    }
    for name, clock in clocks.items():
        setattr(time, name, clock)
    datetime.datetime = Frozen  # type: ignore[misc]


if __name__ == "__main__":
    freeze(float(sys.argv.pop(1)))
    runpy.run_module("fedsilo.cli", run_name="__main__", alter_sys=True)
