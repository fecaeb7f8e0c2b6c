"""Memory of a process that stands for months.

Commands look for garbage seldom, since they end soon (`fedsilo.launch.cli`). A daemon must not: what its SQL statements
leave behind refers to itself in circles, and waits for the collector. Some hundred thousand objects of libraries, which
stay in any case, would be walked each time; so they are set apart first.

glibc keeps a heap for each of up to eight threads a core, and each keeps what its largest moment took. With few heaps
threads wait for each other a little, and a coordinator of 16 silos holds 350 MiB in place of 460.

Does not find: what is really kept; `python -m benchmarks.soak` shows the slope of a daemon's memory.
"""

from __future__ import annotations

import ctypes
import gc

GARBAGE_THRESHOLDS = (1_000, 10, 10)  # about Python's own


HEAPS_MAX = 4
_M_ARENA_MAX = -8  # mallopt(3)


def few_heaps() -> None:
    """For what this process takes from here on. Nothing happens where the C library has no such option."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, HEAPS_MAX)


def set_apart() -> None:
    """What this process holds now stays as long as it does, and garbage is looked for from now on. For a daemon that
    has begun."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
