"""`python -m fedsilo.cli.ends_with_parent MODULE ARGUMENT ...`: runs a module as `python -m` does, and ends it with
the process that started it.

Whoever is killed with SIGKILL can end nobody. So the parent holds one end of a pipe whose other end is the standard
input here, and the kernel closes it with the parent, however that ends. The module then gets SIGTERM, as from a parent
that ends it, and its process group SIGKILL if that was not enough. For the module itself the input is empty.

Does not stop: a parent that lives and hangs; another process to which the parent gave its end of the pipe.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

STOP_SECONDS = 20.0  # from SIGTERM to SIGKILL


def main() -> None:
    """Run the module named on the command line. Raises what it raises."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m fedsilo.cli.ends_with_parent MODULE ...")
    pipe = os.dup(0)  # not inherited by what the module starts
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_end_with, args=(pipe,), name="parent", daemon=True).start()
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def _end_with(pipe: int) -> None:
    while os.read(pipe, 1):
        continue
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main()
