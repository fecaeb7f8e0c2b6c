"""The closed message set between guard and trainer, and its framing. Both sides import this and nothing of each other.

A frame is a 4-byte big-endian header length, an 8-byte body length, a JSON header, a body of bytes. The trainer
dials the guard: a unix socket with a path (peer credentials checked), or TLS under the site CA when it runs on
another host. What the trainer sends are values to be parsed; the guard rebuilds every byte that goes further (B4).
What the framing does not stop: anything the values themselves say; that is the gate's work.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedsilo.treaty.errors import OperationError

HEADER_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 4 << 30
_LENGTHS = struct.Struct(">IQ")

# guard -> trainer. `task` names one of treaty.method.TrainerTask; its body is the adapter (tensor payload) for
# LoadAdapter and Evaluate, a PublicDonors message for PublicStep, else empty.
GUARD_SAYS = frozenset({"configure", "probe", "plan", "task", "stop"})
# trainer -> guard. `done` carries the body the task makes: PublicResponses, tensor payload (float32) or MetricsEval.
TRAINER_SAYS = frozenset({"ready", "probed", "planned", "step", "done", "failed"})


@dataclass(frozen=True)
class LinkMessage:
    type: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


class LinkClosed(OperationError):
    """The other side of the link went away."""

    default_code = "LINK_CLOSED"


class StreamSocket(Protocol):
    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


class Link:
    """One connected end.

    Args:
        connection: a stream socket, already authenticated.
        hears: the types this end accepts.
    """

    def __init__(self, connection: StreamSocket, hears: frozenset[str]) -> None:
        self._connection = connection
        self._hears = hears

    def send(self, message: LinkMessage) -> None:
        header = json.dumps({"type": message.type, **message.fields}).encode()
        try:
            self._connection.sendall(_LENGTHS.pack(len(header), len(message.body)) + header)
            if message.body:
                self._connection.sendall(message.body)
        except OSError as error:
            raise LinkClosed("the link between guard and trainer is closed") from error

    def receive(self) -> LinkMessage:
        """Raises LinkClosed: the other end is gone, or broke the framing or the message set."""
        header_bytes, body_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size))
        if header_bytes > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
            raise LinkClosed(f"a frame of {header_bytes} + {body_bytes} bytes exceeds the link's limit")
        try:
            fields = json.loads(self._read(header_bytes))
            kind = fields.pop("type")
        except (ValueError, KeyError, AttributeError) as error:
            raise LinkClosed("a frame's header is not a message") from error
        if kind not in self._hears:
            raise LinkClosed(f"message type {str(kind)[:40]!r} does not belong on this link")
        return LinkMessage(kind, fields, self._read(body_bytes))

    def close(self) -> None:
        self._connection.close()

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = self._connection.recv(min(size, 1 << 20))
            except OSError as error:
                raise LinkClosed("the link between guard and trainer is closed") from error
            if not part:
                raise LinkClosed("the link between guard and trainer is closed")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


def dial(address: str, *, tls: ssl.SSLContext | None = None, timeout_seconds: float = 30.0) -> Link:
    """The trainer's side: connect to `unix:PATH` or `tls:HOST:PORT`; `fd:NUMBER` is a socket connected beforehand.

    Raises:
        LinkClosed: nothing listens there, or the TLS handshake fails.
        ValueError: the address has another form, or TLS is asked for without a context.
    """
    scheme, _, rest = address.partition(":")
    try:
        if scheme == "unix":
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(timeout_seconds)
            connection.connect(rest)
            connection.settimeout(None)
            return Link(connection, GUARD_SAYS)
        if scheme == "fd":  # behind walls that refuse every new socket (silo.guard.isolation, rung user)
            return Link(socket.socket(fileno=int(rest)), GUARD_SAYS)
        if scheme == "tls" and tls is not None:
            host, _, port = rest.rpartition(":")
            plain = socket.create_connection((host, int(port)), timeout=timeout_seconds)
            wrapped = tls.wrap_socket(plain, server_hostname=host)
            wrapped.settimeout(None)
            return Link(wrapped, GUARD_SAYS)
    except OSError as error:
        raise LinkClosed(f"cannot reach the guard at {address}: {error.strerror or error}") from error
    raise ValueError(f"trainer address {address!r} is not unix:PATH or tls:HOST:PORT")


class Listener:
    """The guard's side: accept exactly one trainer.

    Args:
        address: `unix:PATH` or `tls:HOST:PORT`.
        tls: server context under the site CA that requires a client certificate; needed for `tls:`.
        user_ids: operating-system users whose processes may connect over the unix socket.
    """

    def __init__(self, address: str, *, user_ids: frozenset[int], tls: ssl.SSLContext | None = None) -> None:
        scheme, _, rest = address.partition(":")
        self._tls = tls
        self._user_ids = user_ids
        self.path: Path | None = None
        if scheme == "unix":
            self.path = Path(rest)
            self.path.unlink(missing_ok=True)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(rest)
            os.chmod(rest, 0o600)  # noqa: PTH101  # the bound path, as given
        elif scheme == "tls" and tls is not None:
            host, _, port = rest.rpartition(":")
            self._socket = socket.create_server((host, int(port)))
        else:
            raise ValueError(f"trainer address {address!r} is not unix:PATH or tls:HOST:PORT")
        self._socket.listen(1)

    def accept(self, timeout_seconds: float) -> Link:
        """Raises LinkClosed: nobody came in time, or the peer is not one of the allowed users."""
        self._socket.settimeout(timeout_seconds)
        try:
            connection, _ = self._socket.accept()
            connection.settimeout(None)
            if self._tls is not None:
                return Link(self._tls.wrap_socket(connection, server_side=True), TRAINER_SAYS)
        except OSError as error:
            raise LinkClosed(f"no trainer connected within {timeout_seconds:.0f} s") from error
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user_id, _ = struct.unpack("3i", credentials)
        if user_id not in self._user_ids:
            connection.close()
            raise LinkClosed(f"a process of user {user_id} tried to connect as the trainer")
        return Link(connection, TRAINER_SAYS)

    def close(self) -> None:
        self._socket.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)
