"""Memory and open files of a process that runs for months.

Commands look for garbage seldom, since they end soon (`fedsilo.cli.main`). A daemon must not: what its SQL statements
leave behind refers to itself in circles, and waits for the collector. Some hundred thousand objects of libraries, which
stay in any case, would be walked each time; so they are set apart first.

glibc keeps a heap for each of up to eight threads a core, and each keeps what its largest moment took. With few heaps
threads wait for each other a little, and a coordinator of 16 silos holds 350 MiB in place of 460. What is free
at the end of a heap is kept up to a bound of ours: glibc's own, which moves with what is freed, may have a stream of
pieces take its memory anew many times a second.

numpy's library for sums and products would have a thread for each core, which spins while it waits for its part of a
tile: what a round's drift took of two cores was twice as much, and no sooner there. Tiles here are small; one does.

Does not find: what is really kept; `python -m benchmarks.soak` shows the slope of a daemon's memory.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import MutableMapping

GARBAGE_THRESHOLDS = (1_000, 10, 10)  # about Python's own


OPEN_FILES_MAX = 65_536
HEAPS_MAX = 4
HEAP_END_BYTES_MAX = 16 << 20  # free at the end of each heap
PIECE_BYTES_MAX = 4 << 20  # in a heap; what is larger has pages of its own, which go back with it
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # mallopt(3)


def one_thread_for_sums(environment: MutableMapping[str, str]) -> None:
    """Let numpy's library use one thread, unless the environment says otherwise. Call it before numpy is loaded."""
    if not environment.keys() & {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"}:
        environment["OPENBLAS_NUM_THREADS"] = "1"


def bound_heaps() -> None:
    """Bound the heaps that this process takes from here on. Nothing happens where the C library has no such options."""
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(_M_ARENA_MAX, HEAPS_MAX)
        mallopt(_M_TRIM_THRESHOLD, HEAP_END_BYTES_MAX)
        mallopt(_M_MMAP_THRESHOLD, PIECE_BYTES_MAX)


def raise_open_files() -> int:
    """Let this process have as many files open as its hard limit says, at most `OPEN_FILES_MAX`; how many that are.

    A daemon that listens holds a file for each connection, also for such as never say anything.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def set_apart() -> None:
    """Exempt the objects that exist now from garbage collection, and collect garbage from now on. For a daemon that has
    begun."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
