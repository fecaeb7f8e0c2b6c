"""Coordinators in processes of their own for the identity matrix: `python -m tests.security.coordinator_process SPECS`.

SPECS is JSON: name -> {"config": FILE}, the real coordinator, or {"certificate", "key", "root": FILES}, only its
listening end, with a certificate that the real one would refuse to start with. Each becomes one process, forked from
this one after the imports and before gRPC starts; it prints one line of JSON with its name and address, logs to stderr
behind its name, and ends when stdin does. One thing differs from `coordinator start`: the clock by which repeated lines
are held back steps a minute per line, so that every refusal is logged.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from coordinator.native_log import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # gRPC reads it when it loads

from certs.encoding import in_words
from certs.identity import Identity
from coordinator.config import Limits, load_config
from coordinator.main import Coordinator, check
from coordinator.native_log import NativeLog
from coordinator.server import FederationService, federation_server


def serve_config(name: str, path: Path, monotonic: Callable[[], float]) -> None:
    with (
        Coordinator(check(load_config(path))) as coordinator,
        coordinator.native_log(monotonic=monotonic),
        coordinator.serving() as up,
    ):
        say(name, up.address, up.control_socket)
        threading.Thread(target=lambda: (sys.stdin.read(), coordinator.request_stop())).start()
        coordinator.work()


def serve_bare(name: str, certificate: Path, key: Path, root: Path, monotonic: Callable[[], float]) -> None:
    service = FederationService(
        cast(Any, None), cast(Any, None), trust_root_pem=root.read_bytes(), limits=Limits(),
        now=lambda: datetime.now(UTC), monotonic=time.monotonic,
    )  # fmt: skip
    shown = certificate.read_bytes()
    identity = Identity("", shown, key.read_bytes(), cast(Any, None), root.read_bytes(), cast(Any, None))
    with NativeLog(presented=in_words(shown), monotonic=monotonic):
        server, port = federation_server(service, identity, "127.0.0.1:0", silos=1, limits=Limits())
        server.start()
        say(name, f"127.0.0.1:{port}", "")
        sys.stdin.read()
        server.stop(None).wait()


def say(name: str, address: str, control_socket: str) -> None:
    os.write(1, (json.dumps({"name": name, "address": address, "control_socket": control_socket}) + "\n").encode())


def serve(name: str, spec: Mapping[str, str]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=f"{name}|%(levelname)s %(message)s")
    minutes = itertools.count(0.0, 60.0)
    if "config" in spec:
        serve_config(name, Path(spec["config"]), lambda: next(minutes))
    else:
        serve_bare(name, Path(spec["certificate"]), Path(spec["key"]), Path(spec["root"]), lambda: next(minutes))


def main() -> None:
    children = []
    for name, spec in json.loads(sys.argv[1]).items():
        child = os.fork()
        if child == 0:
            serve(name, spec)
            return
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
