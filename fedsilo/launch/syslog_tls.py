"""Audit records to a site's own log receiver: RFC 5424 messages over TLS (RFC 5425), at least once.

Syslog has no acknowledgement. So a message counts as delivered only when the receiver's end of the connection has
taken its bytes, and even then the newest RESEND_MESSAGES are kept: they are sent again on the next connection, also
after kill -9, since a receiver that dies loses what it had not read. A clean end waits for the receiver to close in
turn and keeps nothing. Each message carries the number of its record (`sequenceId` is that number plus one) and its
hash, so that a repeated one is known.

The receiver must present a certificate of the given CA for the given name; what it sends is never read as data.
What is not covered: a receiver that reads messages and drops them.
"""

from __future__ import annotations

import contextlib
import fcntl
import random
import select
import socket
import ssl
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedsilo.edge.audit_follow import Line, Place
from fedsilo.edge.audit_formats import severity_of
from fedsilo.edge.files import read_private
from fedsilo.treaty.errors import NotAllowedError, NotFoundError, UnreachableError, UsageError

PORT = 6514
RESEND_MESSAGES = 100
_FACILITY_LOG_AUDIT = 13
# OCSF severity_id -> syslog severity: informational, notice, warning, error, critical
_SEVERITY = {1: 6, 2: 5, 3: 4, 4: 3, 5: 2}
_SEQUENCE_ID_MAX = 2147483647
_NETWORK_SECONDS = 30.0
_CLOSE_SECONDS = 5.0
# TLS 1.3 tells a client that its certificate is refused only after the handshake, on the first read
_REFUSAL_SECONDS = 1.0
_BACK_OFF_SECONDS = (1.0, 60.0)


def message(line: Line, host: str, product_version: str) -> bytes:
    """One RFC 5424 message. Everything in it is ASCII, so no byte order mark is needed.

    Args:
        line: of one record.
        host: HOSTNAME, or "-".
        product_version: for the SD-ELEMENT `origin`.
    """
    event = line.event
    priority = _FACILITY_LOG_AUDIT * 8 + _SEVERITY[severity_of(event)]
    when = datetime.fromtimestamp(event["t"] / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
    number = event["seq"] % _SEQUENCE_ID_MAX + 1
    data = f'[meta sequenceId="{number}"][origin software="FedSilo" swVersion="{product_version}"]'
    return f"<{priority}>1 {when} {host} fedsilo - {event['event']} {data} {line.text}".encode("ascii")


def framed(data: bytes) -> bytes:
    """RFC 5425, 4.3: the length in front."""
    return str(len(data)).encode() + b" " + data


def host_name() -> str:
    """This host as RFC 5424 takes it: up to 255 printable ASCII characters, else "-"."""
    name = socket.gethostname()
    return name if 0 < len(name) <= 255 and all("!" <= character <= "~" for character in name) else "-"


@dataclass(frozen=True)
class Receiver:
    """Attributes:
    ca: PEM file; the receiver's certificate must be issued under it.
    server_name: that the certificate must name; by default the host.
    certificate, key: of this exporter, for a receiver that asks for one. The key is mode 0600.
    """

    host: str
    port: int
    ca: Path
    server_name: str = ""
    certificate: Path | None = None
    key: Path | None = None

    @property
    def text(self) -> str:
        return f"{self.host}:{self.port}"

    def tls(self) -> ssl.SSLContext:
        """Raises NotFoundError, NotAllowedError, UsageError: a file is missing, too open, or holds something else."""
        for path in (self.ca, self.certificate):
            if path is not None and not path.is_file():
                raise NotFoundError(f"{path} does not exist")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(cafile=self.ca)
        except ssl.SSLError as error:
            raise UsageError(f"{self.ca} holds no certificate in PEM form") from error
        if self.certificate is not None and self.key is not None:
            read_private(self.key)  # for its checks of owner and mode
            try:
                context.load_cert_chain(self.certificate, self.key)
            except ssl.SSLError as error:
                raise UsageError(f"{self.certificate} and {self.key} are not a certificate and its key") from error
        return context


def receiver_address(text: str) -> tuple[str, int]:
    """HOST, HOST:PORT or [IPV6]:PORT. Raises UsageError."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not text.startswith("[")):
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError(f"{text!r} is not HOST:PORT", hint=f"the port of syslog over TLS is {PORT}")
    return host, int(port)


class SyslogSink:
    """See the module.

    Args:
        receiver: where to.
        start: the place that the first line follows.
        pause: called with the seconds to wait before another attempt; False: give up.
        attempts_max: connections tried in a row before giving up; None: until `pause` says no.
        say: one line for people about a lost or refused connection.
        resend_messages: see the module.

    Raises:
        NotFoundError, NotAllowedError, UsageError: a file of the receiver is missing or wrong.
    """

    def __init__(
        self,
        receiver: Receiver,
        start: Place,
        product_version: str,
        *,
        pause: Callable[[float], bool],
        attempts_max: int | None = None,
        say: Callable[[str], None] = lambda _: None,
        resend_messages: int = RESEND_MESSAGES,
    ) -> None:
        self._receiver, self._context = receiver, receiver.tls()
        self._pause, self._attempts_max, self._say = pause, attempts_max, say
        self._resend_messages, self._product_version = resend_messages, product_version
        self._host = host_name()
        self._socket: ssl.SSLSocket | None = None
        self._kept: deque[tuple[Place, bytes]] = deque()  # place before it, frame; oldest first
        self._sent = 0  # how many of these this connection has been given
        self._last = start
        self._failed = False

    def deliver(self, lines: Sequence[Line]) -> None:
        """Give every line to the connection, or to the next one.

        Raises:
            NotAllowedError: receiver or exporter does not accept the other's certificate.
            UnreachableError: no connection, and `pause` or `attempts_max` says to give up.
        """
        for line in lines:
            self._kept.append((self._last, framed(message(line, self._host, self._product_version))))
            self._last = line.after
        attempts = 0
        while True:
            try:
                self._send_kept()
                return
            except OSError as error:
                self._drop()
                attempts += 1
                self._try_later(error, attempts)

    def safe(self) -> tuple[Place, int]:
        if self._socket is not None and self._sent == len(self._kept) and _is_quiet(self._socket):
            while len(self._kept) > self._resend_messages:
                self._kept.popleft()
                self._sent -= 1
        return (self._kept[0][0] if self._kept else self._last), 0

    def finish(self) -> None:
        """End the connection so that nothing needs to be repeated; connects again where it was lost before.

        Raises:
            NotAllowedError, UnreachableError: as `deliver`. What is not known to have arrived stays kept.
        """
        attempts = 0
        while not self._failed and self._kept:
            try:
                self._send_kept()
                if self._socket is not None and _farewell(self._socket):
                    self._kept.clear()
                break
            except OSError as error:
                self._drop()
                attempts += 1
                self._try_later(error, attempts)
        self._drop()

    def _send_kept(self) -> None:
        connection = self._socket
        if connection is None or not _is_alive(connection):
            self._drop()
            connection = self._socket = self._connect()
            self._sent = 0
        for _, frame in list(self._kept)[self._sent :]:
            connection.sendall(frame)
            self._sent += 1

    def _connect(self) -> ssl.SSLSocket:
        name = self._receiver.server_name or self._receiver.host
        plain = socket.create_connection((self._receiver.host, self._receiver.port), timeout=_NETWORK_SECONDS)
        try:
            connection = self._context.wrap_socket(plain, server_hostname=name)
            # RFC 5425 has the receiver say nothing; what can be read here is a refusal, or session tickets
            ready, _, _ = select.select([connection], [], [], _REFUSAL_SECONDS)
            if ready and not _is_alive(connection, raising=True):
                raise ConnectionResetError("the receiver closed the connection at once")
        except ssl.SSLCertVerificationError as error:
            self._failed = True
            plain.close()
            raise NotAllowedError(
                f"{self._receiver.text}: its certificate is refused: {error.verify_message}",
                hint="--ca is the CA of the receiver's certificate, --server-name the name that the certificate holds",
            ) from error
        except ssl.SSLError as error:
            self._failed = True
            plain.close()
            raise NotAllowedError(
                f"{self._receiver.text}: the TLS handshake failed: {error.reason or error}",
                hint="a receiver that asks for a certificate needs --certificate and --key",
            ) from error
        except OSError:
            plain.close()
            raise
        return connection

    def _try_later(self, error: OSError, attempts: int) -> None:
        self._failed = True
        cause = f"{self._receiver.text}: {error.strerror or error}"
        if self._attempts_max is not None and attempts >= self._attempts_max:
            raise UnreachableError(cause, hint="the next start goes on from here") from error
        first, longest = _BACK_OFF_SECONDS
        # spread, so that many exporters do not come back at the same moment; no secret depends on it
        seconds = min(longest, first * 2 ** min(attempts - 1, 10)) * random.uniform(0.5, 1.0)  # noqa: S311
        self._say(f"{cause}; {len(self._kept)} messages wait, next attempt in {seconds:.1f} s")
        if not self._pause(seconds):
            raise UnreachableError(f"{cause}; stopped while waiting", hint="the next start goes on from here")
        self._failed = False

    def _drop(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket, self._sent = None, 0


def _is_alive(connection: ssl.SSLSocket, *, raising: bool = False) -> bool:
    """Whether the receiver has not closed. Reads nothing but what TLS itself says, and drops anything else."""
    timeout = connection.gettimeout()
    connection.settimeout(0)
    try:
        return bool(connection.recv(1))
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return True
    except OSError:
        if raising:
            raise
        return False
    finally:
        connection.settimeout(timeout)


def _farewell(connection: ssl.SSLSocket) -> bool:
    """Close, and say whether the receiver has read everything: it then closes in turn, without resetting.

    Raises:
        OSError: it did not; what was sent may be lost.
    """
    if not _is_alive(connection):
        raise ConnectionResetError("the receiver closed the connection")
    connection.settimeout(_CLOSE_SECONDS)
    try:
        connection.unwrap()
    except TimeoutError:
        return False  # a receiver that does not close: what is kept is sent again at the next start
    except ssl.SSLEOFError:
        return True  # it closed without TLS's own goodbye; with bytes unread it would have reset the connection
    return True


def _is_quiet(connection: ssl.SSLSocket) -> bool:
    """Whether the receiver's end has taken every byte, and has not closed."""
    try:
        waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, struct.pack("i", 0))
    except OSError:
        return False
    return bool(struct.unpack("i", waiting)[0] == 0) and _is_alive(connection)
