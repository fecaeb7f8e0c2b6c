"""What keeps an honest trainer from reaching out by accident: offline settings, and a Python audit hook.

Covered: libraries that phone home, look up a hub, resolve a name or start a program do so through Python, and raise
here instead (T10). Not covered: code that leaves Python (ctypes, a C extension), or that alters this module. The
sandbox around the process (namespaces, another user, a container) holds those; the guard probes them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedsilo.protocol.errors import UsageError
from silo.link import OFFLINE as OFFLINE

GRADING_MODULE = "fedsilo.grading.worker"

# Events of sys.audit that make or use a connection. Reading and writing one already open raises no event.
_NETWORK_EVENTS = frozenset(
    {
        "socket.__new__",
        "socket.bind",
        "socket.connect",
        "socket.sendto",
        "socket.sendmsg",
        "socket.getaddrinfo",
        "socket.gethostbyname",
        "socket.gethostbyaddr",
        "socket.getnameinfo",
        "urllib.Request",
    }
)
_AF_UNIX, _SOCK_STREAM = 1, 1
_PROCESS_EVENTS = frozenset({"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn"})


def set_offline(environment: MutableMapping[str, str]) -> None:
    """Fill in what is not set. Call before a Hugging Face library is imported: they read it once."""
    for name, value in OFFLINE.items():
        environment.setdefault(name, value)


def verify_offline(environment: Mapping[str, str]) -> None:
    """Raises UsageError: a variable is missing or says otherwise."""
    for name, value in OFFLINE.items():
        if environment.get(name) != value:
            raise UsageError(
                f"the trainer runs with {name}={environment.get(name)!r}; it must be {value!r}",
                hint=f"start it with {name}={value}, or leave it unset",
            )


def verify_hub_offline(modules: Mapping[str, Any]) -> None:
    """Raises UsageError: the hub library was imported before its variable was set. modules: sys.modules."""
    hub = modules.get("huggingface_hub.constants")
    if hub is not None and not hub.HF_HUB_OFFLINE:
        raise UsageError("huggingface_hub was loaded before the trainer could switch it offline")


class Refusals:
    """The audit hook. Once installed it stays; `paused` lets the guard's probes test the sandbox behind it.

    Where rollouts come from servers, unix stream sockets may be made and connected to the paths of `allow`, word for
    word. What is said there is not looked at: the guard starts these servers in sandboxes of their own.
    """

    def __init__(self) -> None:
        self._paused = False
        self._sockets: frozenset[str] = frozenset()
        self.refused = 0

    def install(self) -> None:
        sys.addaudithook(self._hook)

    def allow(self, *sockets: Path) -> None:
        """The unix sockets of rollout servers: the only addresses that may be connected to. Call before `install`."""
        self._sockets = frozenset(map(str, sockets))

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._paused:
            return
        if event in _NETWORK_EVENTS or event in _PROCESS_EVENTS:
            if self._sockets and self._leads_to_a_rollout_server(event, arguments):
                return
            self._refuse(event)
        if event == "subprocess.Popen" and not is_grading_command(arguments):
            self._refuse(event)

    def _leads_to_a_rollout_server(self, event: str, arguments: tuple[object, ...]) -> bool:
        """True for a unix stream socket that is made, and for one that is connected to a path that was allowed."""
        if event == "socket.__new__":
            return arguments[1:3] == (_AF_UNIX, _SOCK_STREAM)
        return event == "socket.connect" and arguments[1] in self._sockets

    def _refuse(self, event: str) -> None:
        self.refused += 1
        raise PermissionError(f"the trainer may not do this: {event}")


def is_grading_command(arguments: tuple[object, ...]) -> bool:
    """True for this interpreter running the grading child, the one program a trainer starts.

    Args:
        arguments: of the audit event `subprocess.Popen`: (executable, argument list, folder, environment).
    """
    command = arguments[1] if len(arguments) > 1 else None
    if not isinstance(command, list | tuple):
        return False
    words = [os.fsdecode(word) for word in command if isinstance(word, str | bytes | os.PathLike)]
    return words[:4] == [sys.executable, "-P", "-m", GRADING_MODULE]
