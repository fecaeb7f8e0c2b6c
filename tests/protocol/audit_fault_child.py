"""A process that appends to an audit log and kills itself (kill -9) at a chosen system call.

argv: folder, number of the call at which to die, how ("before" | "half" | "after").
Prints the number of each decision whose append returned: those are the promises that must survive.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.protocol.audit_parties import open_log


def main(folder: Path, fatal_call: int, how: str) -> None:
    calls = 0
    real = {name: getattr(os, name) for name in ("write", "fsync", "fdatasync", "ftruncate", "open", "posix_fallocate")}
    real_write = real["write"]

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def faulty(name: str):
        def call(*arguments, **keywords):
            nonlocal calls
            if calls == fatal_call:
                if how == "before":
                    die()
                if how == "half" and name == "write":
                    descriptor, data = arguments
                    real_write(descriptor, bytes(data)[: len(data) // 2])
                    die()
                real[name](*arguments, **keywords)
                die()
            calls += 1
            return real[name](*arguments, **keywords)

        return call

    for name in real:
        setattr(os, name, faulty(name))
    log = open_log(folder, segment_bytes_max=1500, checkpoint_records=3, reserve_bytes=4096)
    log.append("start")
    for sequence in range(3):
        routing = {"run": "r", "kind": "k", "sequence": sequence}
        decision = log.append("egress.decision", decision="allow", **routing)
        real_write(1, f"{decision}\n".encode())
        log.append("egress.sent", payload={"bytes": 1}, link={"decision": decision}, **routing)
    log.append("stop")
    log.close()
    real_write(1, b"done\n%d\n" % calls)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
