"""A process that exports a log to a file, one record a batch, and kills itself (kill -9) at a chosen system call.

argv: folder of the log, file, number of the call at which to die, how ("before" | "half" | "after").
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from fedsilo.audit.export import Export


def main(log: Path, out: Path, fatal_call: int, how: str) -> None:
    calls = 0
    real = {name: getattr(os, name) for name in ("write", "fsync", "fdatasync", "ftruncate", "open", "replace")}

    def faulty(name: str):
        def call(*arguments, **keywords):
            nonlocal calls
            calls += 1
            if calls == fatal_call:
                if how == "after":
                    real[name](*arguments, **keywords)
                elif how == "half" and name == "write":
                    real["write"](arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real[name](*arguments, **keywords)

        return call

    for name in real:
        setattr(os, name, faulty(name))
    export_all(log, out)


def export_all(log: Path, out: Path, batch_records: int = 1) -> int:
    """What `fedsilo audit export --to` does, without its command line."""
    position_path = out.with_name(f"{out.name}.position")
    work = Export(log, out, position_path, target="jsonl", product_version="0.1.0", batch_records=batch_records)
    work.run()
    return work.records


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
