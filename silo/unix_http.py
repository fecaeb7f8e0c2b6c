"""HTTP/1.1 requests to a server behind a unix socket with a path: how guard and trainer talk to a rollout server.

A path cannot name another host, so nothing here can leave the machine, and no proxy setting is read. Answers are JSON
of a bounded size. What it does not stop: a server at that path that lies; who may bind the path is a matter of the
folder's mode (the guard makes it 0700).
"""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.protocol.text import harmless

ANSWER_BYTES_MAX = 256 << 20


class ServerGone(Exception):
    """No whole answer came: nobody listens, or the server ended or was silent while it was asked."""


@dataclass(frozen=True)
class Answer:
    """`value`: the JSON value of the body, the text itself where it is none."""

    status: int
    value: Any

    @property
    def fields(self) -> Mapping[str, Any]:
        """The body where it is a JSON object, else nothing."""
        return self.value if isinstance(self.value, dict) else {}

    @property
    def said(self) -> str:
        """The beginning of the body, for a message."""
        error = self.fields.get("error")
        text = error.get("message", error) if isinstance(error, dict) else self.value
        return harmless(text, 300)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Call:
    """One request on a connection of its own: sent when made, answered when asked, so that many can be under way.

    Args:
        path: of the socket.
        target: such as "/v1/completions".
        body: sent as JSON by POST; None asks by GET.
        timeout_seconds: of each wait for the server.

    Raises:
        ServerGone: it cannot be reached.
    """

    def __init__(self, path: Path, target: str, body: Any = None, *, timeout_seconds: float) -> None:
        self._connection = _UnixConnection(path, timeout_seconds)
        method = "GET" if body is None else "POST"
        text = None if body is None else json.dumps(body)
        try:
            self._connection.request(method, target, text, {"Content-Type": "application/json"})
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise ServerGone(f"{path}: {error}") from error

    def answer(self) -> Answer:
        """Wait for the answer. Raises ServerGone."""
        try:
            response = self._connection.getresponse()
            data = response.read(ANSWER_BYTES_MAX + 1)
        except (OSError, http.client.HTTPException) as error:
            raise ServerGone(f"the server ended or was silent: {error}") from error
        finally:
            self._connection.close()
        if len(data) > ANSWER_BYTES_MAX:
            raise ServerGone(f"an answer has more than {ANSWER_BYTES_MAX} bytes")
        try:
            return Answer(response.status, json.loads(data))
        except (ValueError, RecursionError):
            return Answer(response.status, data.decode("utf-8", "replace"))

    def close(self) -> None:
        """Give the request up; the server sees its client go."""
        self._connection.close()


def ask(path: Path, target: str, body: Any = None, *, timeout_seconds: float) -> Answer:
    """Send one request and return its answer. Arguments as of `Call`. Raises ServerGone."""
    return Call(path, target, body, timeout_seconds=timeout_seconds).answer()
