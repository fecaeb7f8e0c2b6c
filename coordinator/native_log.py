"""Failed TLS handshakes as log lines of ours.

gRPC refuses a client with a wrong or expired certificate below Python: no call is made, and all it says are messages in
its own words on file descriptor 2. While `NativeLog` is open that descriptor is a pipe: what is said about a handshake
becomes one warning with the peer's address, the cause in words and a hint (the same cause from the same host at most
every ten seconds, then a count, so that a peer cannot fill the log: T24); all else goes to the real stderr as it is.
Cause and address are in one message of gRPC's handshake trace (`ENVIRONMENT`); what the TLS library says of the same
failure is logged, without an address, only where there is no trace. Whose certificate it was, gRPC does not say: the
client's own log does.

A line that the real stderr does not take (a full disk, a closed terminal) is lost; what comes after it is not. A crash
of the C library itself may lose its last words.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import selectors
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO
from urllib.parse import unquote

from fedsilo.files.durable import write_all
from fedsilo.files.logs import QuietLog
from fedsilo.protocol.text import harmless

_log = logging.getLogger("fedsilo.coordinator")

COUNT_SECONDS = 0.5  # between two looks whether a count is due
READ_BYTES_MAX = 1 << 16  # a message is written at once, and is shorter
# Read by gRPC when it loads; a verbosity of NONE or ERROR would hide the handshakes.
ENVIRONMENT = {"GRPC_VERBOSITY": "", "GRPC_TRACE": "handshaker"}
_STDERR = 2
_END = b"\0end of the native log\n"
# One message of the C library: level, date, time, thread, file, line; further lines of it have no such head.
_HEAD = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ (?P<file>[\w./]+):\d+\] (?P<text>.*)")
_NEXT_MESSAGE = re.compile(r"^(?=[IWEF]\d{4} [\d:.]+ +\d+ [\w./]+:\d+\] )", re.MULTILINE)
_LIBRARY_FILE = "ssl_transport_security.cc"
_TRACES = frozenset({"handshaker.cc", "channel_trace.h", "trace.cc"})
_REST_OF_TRACE = ("=== Source Location Trace", "src/core/", " shutdown=")
_FAILED = "CallNextHandshakerLocked: error="
_PEER = re.compile(r"grpc\.internal\.endpoint_peer_address=(?P<peer>[^,}\s]{1,100})")
_LIBRARY = re.compile(r"OPENSSL_internal:(?P<code>\w+)(?:: (?P<detail>[^=]*?))?(?:: OK)?(?: *===.*)?$")
_SEE_CLIENT = "gRPC does not say whose certificate it is: the log of the silo at that address names file and issuer"


@dataclass(frozen=True)
class Fault:
    """Cause of a failed handshake. `about_us`: it may be this coordinator's certificate that the other side refuses."""

    cause: str
    hint: str = ""
    about_us: bool = False


_CAUSES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": Fault("it shows no certificate", "silos dial with the certificate in id/"),
    "HTTP_REQUEST": Fault("it does not speak TLS", "is that a silo? there is no plaintext mode"),
    "HTTPS_PROXY_REQUEST": Fault("it does not speak TLS", "silos dial this port directly, without a proxy"),
    "WRONG_VERSION_NUMBER": Fault("it does not speak TLS", "is that a silo? there is no plaintext mode"),
    "UNSUPPORTED_PROTOCOL": Fault("it does not speak TLS 1.3", "update what dials there"),
    # What arrives here when the other side ends the handshake with an alert.
    "BAD_PACKET_LENGTH": Fault(
        "it broke off; it may not accept this coordinator's certificate (its CA, role, name or time)", about_us=True
    ),
}
_VERIFICATION = {
    "certificate has expired": Fault("its certificate is expired", f"its people renew it; {_SEE_CLIENT}"),
    "certificate is not yet valid": Fault(
        "its certificate is not yet valid", f"compare the clocks of both machines; {_SEE_CLIENT}"
    ),
    "unsupported certificate purpose": Fault(
        "its certificate is for another role (no clientAuth, such as a coordinator's)",
        f"silos dial with a silo's certificate; {_SEE_CLIENT}",
    ),
}


def handshake_fault(text: str) -> Fault | None:
    """Return why a handshake failed, from the C library's words; None if they are not about that."""
    if "Handshake read failed" in text:
        return Fault(
            "it closed the connection in the middle of the handshake; a port check, or it does not accept this "
            "coordinator's certificate",
            about_us=True,
        )
    match = _LIBRARY.search(text.strip()) if "andshake failed" in text else None
    if match is None:
        return None
    code, detail = match["code"], match["detail"] or ""
    if code == "CERTIFICATE_VERIFY_FAILED":
        other = Fault(
            f"its certificate is not signed by this federation's CA (wrong CA): {detail}",
            f"another federation's silo, or an operator's certificate? {_SEE_CLIENT}",
        )
        return _VERIFICATION.get(detail, other)
    if code.startswith(("SSLV3_ALERT", "TLSV1_ALERT")):
        alert = code.split("ALERT_", 1)[-1].lower().replace("_", " ")
        return Fault(f"it does not accept this coordinator: {alert}", about_us=True)
    return _CAUSES.get(code, Fault(code.lower().replace("_", " ")))


def address_of(peer: str) -> str:
    """gRPC's `ipv4:127.0.0.1:5000` or `ipv6:%5B::1%5D:5000` as people write it; foreign text made safe."""
    address = unquote(peer).removeprefix("ipv4:").removeprefix("ipv6:")
    return harmless(address, 100) or "somebody"


def host_of(address: str) -> str:
    """The host of `host:port`; `host` where there is no port."""
    host, separator, port = address.rpartition(":")
    return host if separator and port.isdecimal() else address


class NativeLog:
    """Holds file descriptor 2 while it is open; use as a context, once, in a process of its own.

    Args:
        report: told the cause and the peer's address of each handshake that is logged.
        presented: this coordinator's certificate in words, for causes that may lie in it.
        monotonic: seconds, by which repeated lines are held back.
    """

    def __init__(
        self,
        report: Callable[[str, str], None] = lambda cause, peer: None,
        *,
        presented: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._presented = presented
        self._real = _STDERR
        self._quiet = QuietLog(_log, monotonic=monotonic)
        self._traced = False  # there is a trace

    def __enter__(self) -> NativeLog:
        self._real = os.dup(_STDERR)
        self._reading, self._writing = os.pipe()
        os.dup2(self._writing, _STDERR)
        # Python's own lines need no pipe: they go where they went.
        self._python = sys.stderr
        sys.stderr = os.fdopen(
            os.dup(self._real), "w", buffering=1, encoding=self._python.encoding, errors="backslashreplace"
        )
        self._handlers = _redirected(self._python, sys.stderr)
        self._thread = threading.Thread(target=self._read, name="native-log", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.dup2(self._real, _STDERR)
            # Children may still hold the pipe's end, so it is not the end of the file that ends the reader.
            with contextlib.suppress(OSError):
                write_all(self._writing, _END)
            self._thread.join()
        finally:
            for handler in self._handlers:
                handler.setStream(self._python)
            ours, sys.stderr = sys.stderr, self._python
            with contextlib.suppress(OSError):  # what it still holds has nowhere to go
                ours.close()
            for descriptor in (self._writing, self._real):
                os.close(descriptor)

    def _read(self) -> None:
        with os.fdopen(self._reading, "rb", 0) as pipe, selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            held, ended = b"", False
            while not ended:
                if not ready.select(COUNT_SECONDS if self._quiet.holding else None):
                    self._quiet.flush()
                    continue
                data = pipe.read(READ_BYTES_MAX)
                text, end, _ = (held + data).partition(_END)
                ended = bool(end) or not data
                whole = len(text) if ended or len(text) > READ_BYTES_MAX else text.rfind(b"\n") + 1
                self.take(text[:whole])
                held = text[whole:]
            self._quiet.flush(everything=True)

    def take(self, data: bytes) -> None:
        """Log or pass on whole messages of the C library."""
        for message in _NEXT_MESSAGE.split(data.decode("utf-8", "surrogateescape")):
            with _PerLine():
                self._take(message)

    def _take(self, message: str) -> None:
        head = _HEAD.match(message)
        if head is None:
            self._write(message)
            return
        fault, library = handshake_fault(head["text"]), head["file"] == _LIBRARY_FILE
        if head["file"] in _TRACES:
            self._traced = True
            if fault is not None and head["text"].startswith(_FAILED):
                self._tell(fault, message)
            _, *rest = message.splitlines(keepends=True)
            foreign = itertools.dropwhile(lambda line: not line.strip() or line.startswith(_REST_OF_TRACE), rest)
            self._write("".join(foreign))
        elif fault is not None and library:
            if not self._traced:
                self._tell(fault)
        else:
            self._write(message)

    def _tell(self, fault: Fault, trace: str = "") -> None:
        peer = _PEER.search(trace)
        address = address_of(peer["peer"]) if peer else ""
        host = host_of(address)
        refused = "refused {} in the TLS handshake: {}"
        shown = f"it was shown {self._presented}" if fault.about_us and self._presented else ""
        line = refused.format(
            f"a connection from {address}" if address else "a connection",
            "; ".join(part for part in (fault.cause, fault.hint, shown) if part),
        )
        about = refused.format(f"connections from {host}" if host else "connections", fault.cause)
        if self._quiet.say(f"{fault.cause} {host}", about, line):
            with _PerLine():
                self._report(fault.cause, address)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            write_all(self._real, text.encode("utf-8", "surrogateescape"))


class _PerLine:
    """A line that cannot be dealt with costs that line, never those after it."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        _log.error("a line about a handshake was not dealt with: %s", type(error).__name__)
        return True


def _redirected(old: TextIO, new: TextIO) -> list[logging.StreamHandler[TextIO]]:
    """Handlers of the root logger that wrote to `old` write to `new`; returns them."""
    handlers = [
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is old
    ]
    for handler in handlers:
        handler.setStream(new)
    return handlers
