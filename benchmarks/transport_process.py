"""What a process and its children cost, read from /proc: for `benchmarks.transport`, the same for every side."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
LOOK_SECONDS = 0.05
MIB = 1 << 20


def tree(process: int) -> list[int]:
    """A process and all below it that live at this moment."""
    found = [process]
    for each in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def start_of(process: int) -> str:
    """The tick in which it started, which tells it from another one of its number; empty once it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def cpu_seconds(process: int) -> float:
    """Of a process and all below it, those among them that have ended and were waited for."""
    ticks = 0
    for each in tree(process):
        with contextlib.suppress(OSError):
            values = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(int(value) for value in values[11:15])  # utime, stime, cutime, cstime: proc(5)
    return ticks / TICKS_PER_SECOND


def resident_bytes(process: int, *, peak: bool = False) -> int:
    """Of one process, at this moment or at most since `forget_peaks`; 0 once it has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:" if peak else "VmRSS:"):
                return int(line.split()[1]) << 10
    return 0


def resident_tree_bytes(process: int) -> int:
    return sum(resident_bytes(each) for each in tree(process))


def forget_peaks(process: int) -> None:
    """Let the kernel's memory of the peak begin anew (proc(5), clear_refs)."""
    for each in tree(process):
        with contextlib.suppress(OSError):
            Path(f"/proc/{each}/clear_refs").write_text("5")


@dataclass
class Watched:
    """CPU time and peak memory of a server from `__enter__` to `__exit__`.

    Attributes:
        process: the server.
        base_bytes: resident when it began.
        peak_bytes: of the whole tree, by looks every LOOK_SECONDS, and of the first process alone by the kernel's own
            count: whichever is more.
        cpu_seconds: of the whole tree.
    """

    process: int
    base_bytes: int = 0
    peak_bytes: int = 0
    cpu_seconds: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watched:
        forget_peaks(self.process)
        self.base_bytes = self.peak_bytes = resident_tree_bytes(self.process)
        self._cpu_before = cpu_seconds(self.process)
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._looking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._looking.join()
        self.cpu_seconds = cpu_seconds(self.process) - self._cpu_before
        others = sum(resident_bytes(each) for each in tree(self.process)[1:])
        self.peak_bytes = max(self.peak_bytes, resident_bytes(self.process, peak=True) + others)

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self.peak_bytes = max(self.peak_bytes, resident_tree_bytes(self.process))
