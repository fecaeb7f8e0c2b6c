"""A small party for the sandbox tests: a guard's process, keys and sockets, and a child that tries to reach them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.sandbox import probes
from silo.guard.trainer_process import sandbox

PROBES_FILE = Path(probes.__file__)


def probing_program(probes: Path = PROBES_FILE) -> str:
    """The probes as Python text that finds its file by itself: the folder above our packages may not be listed inside,
    and an ordinary user's bare interpreter has none of them."""
    return f"import runpy, sys; found = runpy.run_path({str(probes)!r}, run_name='__main__')"


@dataclass(frozen=True)
class Site:
    folder: Path
    fields: dict[str, Any]

    @property
    def key(self) -> Path:
        return Path(self.fields["key_paths"][0])


@contextlib.contextmanager
def reachable_site(folder: Path) -> Iterator[Site]:
    """Everything the probes look for, present and answering: what is refused is refused by the sandbox alone."""
    key = folder / "id" / "site.key"
    key.parent.mkdir(parents=True, mode=0o700)
    key.write_text("secret")
    key.chmod(0o600)
    with contextlib.ExitStack() as stack:
        control = stack.enter_context(socket.socket(socket.AF_UNIX))
        control.bind(str(folder / "control.sock"))
        control.listen()
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        nameserver = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        nameserver.bind(("127.0.0.1", 0))

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    question, asker = nameserver.recvfrom(512)
                    if question == b"end":
                        return
                    nameserver.sendto(question, asker)

        thread = threading.Thread(target=answer)
        thread.start()
        # the process that stands for the guard: traced and looked into in its place
        guard = stack.enter_context(
            subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
        )
        try:
            yield Site(
                folder,
                {
                    "key_paths": [str(key)],
                    "identity_folder": str(key.parent),
                    "control_socket": str(folder / "control.sock"),
                    "guard_pid": guard.pid,
                    "tcp": [list(tcp.getsockname())],
                    "udp": [list(nameserver.getsockname())],
                },
            )
        finally:
            nameserver.sendto(b"end", nameserver.getsockname())
            thread.join()
            guard.kill()


def run_inside(level: str, *arguments: str, given: str = "", **options: Any) -> str:
    """Output of a Python child in the sandbox; fails loudly when the child fails."""
    options.setdefault("env", {})
    process = sandbox.launch_in_sandbox(
        [sys.executable, *arguments],
        level=level,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )
    output, _ = process.communicate(given.encode(), 60)
    assert process.returncode == 0, output.decode()
    return output.decode()


def probe(level: str, site: Site) -> dict[str, dict[str, Any]]:
    """The probes' answers."""
    result: dict[str, dict[str, Any]] = json.loads(
        run_inside(level, "-c", probing_program(), given=json.dumps(site.fields), never=[site.key])
    )
    return result


def main() -> None:
    """Probe every isolation level as the current user; print {level: results, or why not}. Run by tests."""
    report: dict[str, Any] = {}
    with reachable_site(Path(sys.argv[1])) as site:
        for level in ("namespaces", "user", "waived"):
            try:
                report[level] = probe(level, site)
            except sandbox.IsolationError as error:
                report[level] = error.message
    report["uid"] = os.getuid()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
