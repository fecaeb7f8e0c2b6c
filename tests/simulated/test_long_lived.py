"""What a daemon leaves behind in circles does not pile up, as it may in a command that ends soon."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsilo.files import long_lived

_COUNTS = """
import gc, sys, weakref
from fedsilo.files import long_lived

class Circle:
    def __init__(self):
        self.itself = self

def most_alive():
    alive, most = set(), 0
    for number in range(20_000):
        circle = Circle()
        alive.add(number)
        weakref.finalize(circle, alive.discard, number).atexit = False
        most = max(most, len(alive))
    return most

gc.set_threshold(100_000)  # as a command does
seldom = most_alive()
gc.collect()
stays = [[] for _ in range(50_000)]
long_lived.set_apart()
apart = gc.get_freeze_count()
print(seldom, apart >= len(stays), most_alive(), len(stays))
"""


def test_garbage_of_a_daemon_is_found_soon_and_what_it_began_with_is_not_walked() -> None:
    done = subprocess.run([sys.executable, "-c", _COUNTS], check=True, capture_output=True, text=True, timeout=60)
    seldom, apart, soon, _ = done.stdout.split()
    assert int(seldom) > 10_000, "the counterpart: a command lets it lie"
    assert apart == "True"
    assert int(soon) < 2 * 1_000  # the threshold, and as many that were made while it was looked


_HEAPS = """
import ctypes, re, sys, threading
from fedsilo.files import long_lived

if sys.argv[1] == "few":
    long_lived.bound_heaps()
together = threading.Barrier(16)

def take():
    together.wait()
    kept.append([bytearray(50_000) for _ in range(20)])
    together.wait()

kept = []
threads = [threading.Thread(target=take) for _ in range(16)]
for thread in threads: thread.start()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
told = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, told)
libc.fclose(told)
print(len(re.findall("<heap nr=", open(sys.argv[2]).read())))
"""


def test_few_heaps_are_as_few_with_many_threads(tmp_path: Path) -> None:
    def heaps(how: str) -> int:
        command = [sys.executable, "-c", _HEAPS, how, str(tmp_path / how)]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)

    if not hasattr(ctypes.CDLL(None), "mallopt"):
        assert heaps("few") >= 1
        return
    assert heaps("few") <= long_lived.HEAPS_MAX < heaps("many")


_STREAM = """
import sys
from fedsilo.files import long_lived

if sys.argv[1] == "kept":
    long_lived.bound_heaps()

def faults():
    return int(open("/proc/self/stat").read().rpartition(")")[2].split()[7])

def stream():
    for _ in range(100):
        pieces = [b"x" * (1 << 19) for _ in range(8)]  # as of a message; 4 MiB

stream()
before = faults()
stream()
print(faults() - before)
"""


def test_a_stream_of_pieces_takes_its_memory_once() -> None:
    """Page faults of the second hundred of messages, each of 1,024 pages."""

    def faults(how: str) -> int:
        command = [sys.executable, "-c", _STREAM, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)

    if not hasattr(ctypes.CDLL(None), "mallopt"):
        return
    assert faults("kept") < 1_024 < faults("by itself")


_THREADS = """
import os
from fedsilo.files import long_lived

if os.environ.pop("ASKED"):
    long_lived.one_thread_for_sums(os.environ)
import numpy
print(len(os.listdir("/proc/self/task")))
"""


def threads_with_numpy(*, asked: bool, **environment: str) -> int:
    own = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", _THREADS], check=True, capture_output=True, text=True, timeout=60,
        env=own | {"ASKED": "yes" if asked else ""} | environment,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="with one core numpy has one thread in any case")
def test_sums_have_one_thread_unless_people_say_otherwise() -> None:
    assert threads_with_numpy(asked=True) == 1 < threads_with_numpy(asked=False)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        assert threads_with_numpy(asked=True, **{name: "2"}) == 2


def test_no_start_of_a_daemon_has_loaded_numpy_when_it_asks_for_one_thread() -> None:
    asks = "import sys, fedsilo.cli.coordinator, fedsilo.cli.silo, coordinator.native_log\n"
    asks += "import fedsilo.files.long_lived, fedsilo.cli.main\nprint('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asks], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False"
