"""The closed message set between guard and trainer, and its framing. Both sides import this and nothing of each other.

A frame is a 4-byte big-endian header length, an 8-byte body length, a JSON header, a body of bytes. The trainer
dials the guard: a unix socket with a path (peer credentials checked), or TLS under the site CA when it runs on
another host (`silo.link_tls`). The guard listens only while it waits for a trainer, and speaks first: a probe, or why
it refuses. What the trainer sends are values to be parsed: what goes further the guard rebuilds, or has found to be
what it would make of them (B4).
What the framing does not stop: anything the values themselves say; that is the gate's work.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pwd
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedsilo.protocol.errors import OperationError, UsageError
from silo.reusable_buffer import ReusableBuffer

HEADER_BYTES_MAX = 1 << 20
BODY_BYTES_MAX = 4 << 30  # of what a trainer takes from its guard; the guard sets a bound of its own
HEADER_DEPTH_MAX = 16
LARGE_BODY_BYTES = 1 << 20
_RECEIVED_BYTES = 1 << 20  # at a time
_LENGTHS = struct.Struct(">IQ")
_NAME = "body_digest"  # in the header, of a body that is kept; without a body: of the one that is meant

# A peer that proves nothing must not keep the next one waiting for long.
HANDSHAKE_TIMEOUT_SECONDS = 10.0
_PEER_CREDENTIALS = struct.Struct("3i")  # process, user, group: struct ucred

# The trainer's environment, whoever starts it: no hub, no telemetry (threat T10).
OFFLINE: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
}

# guard -> trainer. `task` names a `protocol.tasks.TrainerTask`, which says itself what its fields and its body are
# (`fields`, `body`, `read`). `again` is a task whose body the other end keeps by that name; a type of its own, so that
# an end which keeps none does not take it for a task without a body. `refused` {message} comes first or never.
_AGAIN = "again"
GUARD_SAYS = frozenset({"configure", "probe", "plan", "task", _AGAIN, "stop", "refused"})
# trainer -> guard. `done` carries what the task gives (`TrainerTask.gives`; of pb.Factors the float32 payload).
TRAINER_SAYS = frozenset({"ready", "probed", "planned", "step", "done", "failed"})


@dataclass(frozen=True)
class LinkMessage:
    """`body_digest`: SHA-256 that names a guard's body, so that the trainer's end, which keeps the last large one that
    has a name, is not sent it once more; empty where it has none."""

    type: str
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes | memoryview = b""
    body_digest: str = field(default="", compare=False)


class LinkClosed(OperationError):
    """The other side of the link went away."""

    default_code = "LINK_CLOSED"


class LinkBroken(LinkClosed):
    """The other side is there, and what it says is no message of this link."""

    default_code = "LINK_BROKEN"


class LinkRefused(LinkClosed):
    """One side did not accept the other as what it must be; the message says why."""

    default_code = "LINK_REFUSED"


class StreamSocket(Protocol):
    def sendall(self, data: bytes | memoryview, /) -> None: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def close(self) -> None: ...


class LinkSecurity(Protocol):
    """Turns a TCP connection into an authenticated one: `silo.link_tls.LinkTls`, or nothing for unix sockets."""

    def secure(self, connection: socket.socket, timeout_seconds: float) -> StreamSocket:
        """Raises LinkRefused: the handshake failed, or the peer is not who it must be; the connection is closed."""
        ...


class MessageLink(Protocol):
    """The interface of a link that a trainer needs."""

    def send(self, message: LinkMessage) -> None: ...
    def receive(self) -> LinkMessage: ...


class Link:
    """One connected end.

    Args:
        connection: a stream socket, already authenticated.
        hears: the types this end accepts; whoever hears a guard keeps the last large body that has a name.
        body_bytes_max: the longest body this end takes.
    """

    def __init__(
        self, connection: StreamSocket, hears: frozenset[str], *, body_bytes_max: int = BODY_BYTES_MAX
    ) -> None:
        self._connection = connection
        self._hears = hears
        self._body_bytes_max = body_bytes_max
        self._sent = ""  # name of the body that the other end keeps
        self._kept: tuple[str, bytes | memoryview] = ("", b"")
        self._buffer = ReusableBuffer()  # of the last large body

    def send(self, message: LinkMessage) -> None:
        fields, body = {"type": message.type, **message.fields}, message.body
        if message.body_digest and len(body) >= LARGE_BODY_BYTES:
            fields[_NAME] = message.body_digest
            if message.body_digest == self._sent:
                fields["type"], body = _AGAIN, b""
        header = json.dumps(fields).encode()
        try:
            self._connection.sendall(_LENGTHS.pack(len(header), len(body)) + header)
            if body:
                self._connection.sendall(body)
        except OSError as error:
            raise LinkClosed("the link between guard and trainer is closed") from error
        self._sent = str(fields.get(_NAME, self._sent))

    def receive(self) -> LinkMessage:
        """Receive one message. Numbers that JSON does not have (NaN, infinities) come as None.

        Raises:
            LinkClosed: the other end is gone.
            LinkBroken: it broke the framing or the message set.
        """
        header_bytes, body_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size))
        if header_bytes > HEADER_BYTES_MAX or body_bytes > self._body_bytes_max:
            raise LinkBroken(f"a frame of {header_bytes} + {body_bytes} bytes exceeds the link's limit")
        fields = _header(self._read(header_bytes))
        kind = fields.pop("type", None)
        if not isinstance(kind, str) or kind not in self._hears:
            raise LinkBroken(f"message type {str(kind)[:40]!r} does not belong on this link")
        name = str(fields.pop(_NAME, "")) if _AGAIN in self._hears else ""
        if kind == _AGAIN:
            if not name or body_bytes or name != self._kept[0]:
                raise LinkBroken("a message leaves out a body that this end does not have")
            return LinkMessage("task", fields, self._kept[1], name)
        if not name:
            return LinkMessage(kind, fields, self._read_body(body_bytes))
        self._kept = "", b""  # not held while another comes
        self._kept = name, self._read_body(body_bytes)
        return LinkMessage(kind, fields, self._kept[1], name)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # wakes a reader that waits in another thread
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self, size_bytes: int) -> bytearray:
        buffer = bytearray(size_bytes)
        self._fill(memoryview(buffer))
        return buffer

    def _read_body(self, size_bytes: int) -> bytes | memoryview:
        """A large body lies in pages of its own, held once; they take up what has come, of it or the last one, not what
        is told."""
        if size_bytes < LARGE_BODY_BYTES:
            return bytes(self._read(size_bytes))
        buffer = self._buffer.take(size_bytes)
        self._fill(buffer)
        return buffer.toreadonly()

    def _fill(self, buffer: memoryview) -> None:
        while buffer:
            try:
                came = self._connection.recv_into(buffer[:_RECEIVED_BYTES])
            except OSError as error:
                raise LinkClosed("the link between guard and trainer is closed") from error
            if not came:
                raise LinkClosed("the link between guard and trainer is closed")
            buffer = buffer[came:]


def _header(data: bytearray) -> dict[str, Any]:
    """A header's fields, as plain as JSON allows: no deep nesting, no text that is not Unicode. Raises LinkBroken."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=lambda name: None, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # an escape may name half a character
    except (ValueError, RecursionError) as error:
        raise LinkBroken("a frame's header is not a message") from error
    if not isinstance(value, dict) or _deeper_than(value, HEADER_DEPTH_MAX):
        raise LinkBroken("a frame's header is not a message")
    return value


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _deeper_than(value: object, levels: int) -> bool:
    layer = [value]
    for _ in range(levels):
        layer = [
            item
            for each in layer
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, dict | list) for each in layer)


def dial(address: str, *, tls: LinkSecurity | None = None, timeout_seconds: float = 30.0) -> Link:
    """The trainer's side: connect to `unix:PATH` or `tls:HOST:PORT`; `fd:NUMBER` is a socket connected beforehand.

    In TLS 1.3 the guard judges the trainer's certificate after this returns; a refusal comes with the first `receive`.

    Raises:
        LinkClosed: nothing listens there.
        LinkRefused: the guard does not prove that it is the guard of this site.
        ValueError: the address has another form, or TLS is asked for without its files.
    """
    scheme, _, rest = address.partition(":")
    try:
        if scheme == "unix":
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(timeout_seconds)
            connection.connect(rest)
            connection.settimeout(None)
            return Link(connection, GUARD_SAYS)
        if scheme == "fd":  # a sandbox of level user refuses every new socket (silo.guard.trainer_process)
            return Link(socket.socket(fileno=int(rest)), GUARD_SAYS)
        if scheme == "tls" and tls is not None:
            plain = socket.create_connection(host_and_port(rest), timeout=timeout_seconds)
            return Link(tls.secure(plain, timeout_seconds), GUARD_SAYS)
    except OSError as error:
        raise LinkClosed(f"cannot reach the guard at {address}: {error.strerror or error}") from error
    raise ValueError(f"trainer address {address!r} is not unix:PATH or tls:HOST:PORT")


class Listener:
    """The guard's side: accept exactly one trainer. Close it as soon as that one is there.

    Args:
        address: `unix:PATH` or `tls:HOST:PORT`.
        tls: under the site CA; needed for `tls:`.
        user_ids: operating-system users whose processes may connect over the unix socket.

    Raises:
        OperationError: the address cannot be listened on, such as a port in use.
        ValueError: the address has another form, or TLS is asked for without its files.
    """

    def __init__(self, address: str, *, user_ids: frozenset[int], tls: LinkSecurity | None = None) -> None:
        scheme, _, rest = address.partition(":")
        self._tls = tls
        self._user_ids = user_ids
        self.path: Path | None = None
        self._inode: tuple[int, int] | None = None
        try:
            if scheme == "unix":
                self.path = Path(rest)
                self.path.unlink(missing_ok=True)
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.bind(rest)
                self._inode = _inode_at(self.path)
                # Another user may connect only past its mode; who really does, the kernel tells after accept.
                os.chmod(rest, 0o600 if user_ids <= {os.getuid()} else 0o666)  # noqa: PTH101  # as given
            elif scheme == "tls" and tls is not None:
                host, port = host_and_port(rest)
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._socket = socket.create_server((host, port), family=family)
            else:
                raise ValueError(f"trainer address {address!r} is not unix:PATH or tls:HOST:PORT")
        except OSError as error:
            raise OperationError(
                f"cannot listen on trainer.address {address}: {error.strerror or error}",
                hint="another process has it, or the name is not one of this machine's; see `ss -lntp`",
                code="TRAINER_ADDRESS",
            ) from error
        self._socket.listen(1)

    @property
    def port(self) -> int:
        """Return the port of a `tls:` address; the assigned one where it asked for port 0."""
        return int(self._socket.getsockname()[1])

    def accept(self, timeout_seconds: float, *, body_bytes_max: int = BODY_BYTES_MAX) -> Link:
        """Wait for one trainer.

        Args:
            timeout_seconds: how long.
            body_bytes_max: the longest body it may send.

        Raises:
            LinkRefused: somebody connected who is not the trainer; names who and why. Ask again.
            LinkClosed: nobody came in time.
        """
        self._socket.settimeout(timeout_seconds)
        try:
            connection, peer = self._socket.accept()
        except OSError as error:
            raise LinkClosed(f"no trainer connected within {timeout_seconds:.0f} s") from error
        if self._tls is None:
            connection.settimeout(None)
            self._check_user(connection)
            return Link(connection, TRAINER_SAYS, body_bytes_max=body_bytes_max)
        try:
            stream = self._tls.secure(connection, HANDSHAKE_TIMEOUT_SECONDS)
            return Link(stream, TRAINER_SAYS, body_bytes_max=body_bytes_max)
        except LinkRefused as error:
            raise LinkRefused(f"refused a trainer from {peer[0]}: {error.message}", hint=error.hint) from error

    def _check_user(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        process_id, user_id, _ = _PEER_CREDENTIALS.unpack(credentials)
        if user_id not in self._user_ids:
            allowed = " or ".join(map(user_name, sorted(self._user_ids)))
            cause = f"it runs as user {user_name(user_id)}, {allowed} is needed"
            say_refused(connection, cause)
            connection.close()
            raise LinkRefused(
                f"refused process {process_id} as the trainer: {cause}",
                hint="start it as that user, or name another one: trainer.user",
            )

    def close(self) -> None:
        """Stop listening, and remove the socket's file, unless another one lies in its place by now."""
        # While the socket is open its inode is in use, so that no other file can have the same one.
        if self.path is not None and self._inode is not None and _inode_at(self.path) == self._inode:
            self.path.unlink(missing_ok=True)
        self._inode = None
        self._socket.close()


def _inode_at(path: Path) -> tuple[int, int] | None:
    """(device, inode) of what lies there; None where nothing does."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def say_refused(connection: StreamSocket, cause: str) -> None:
    """Tell the other end of a guard's connection why it is not taken, as far as it still listens."""
    with contextlib.suppress(LinkClosed):
        Link(connection, TRAINER_SAYS).send(LinkMessage("refused", {"message": cause}))


def host_and_port(text: str) -> tuple[str, int]:
    """`HOST:PORT` or `[IPV6]:PORT` in parts. Raises UsageError for a port that is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{text!r} is not HOST:PORT", hint="a port is a number from 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def user_name(user_id: int) -> str:
    try:
        return f"{pwd.getpwuid(user_id).pw_name} ({user_id})"
    except KeyError:
        return str(user_id)
