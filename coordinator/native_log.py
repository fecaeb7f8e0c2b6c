"""Failed TLS handshakes as log lines of ours.

gRPC refuses a client with a wrong or expired certificate below Python: no call is made, and all it says are lines in
its own words on file descriptor 2. While `NativeLog` is open that descriptor is a pipe: what is said about a handshake
becomes one warning with the peer's address, the cause in words and a hint (the same cause at most every ten seconds,
with a count, so that a peer cannot fill the log: T24); every other line goes to the real stderr as it is. gRPC's
handshake trace (`ENVIRONMENT`) is what names the address. Whose certificate it was, gRPC does not say: the client's own
log does. A crash of the C library itself may lose its last words.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO
from urllib.parse import unquote

_log = logging.getLogger("fedsilo.coordinator")

QUIET_SECONDS = 10.0
# Read by gRPC when it loads; a verbosity of NONE or ERROR would hide the handshakes.
ENVIRONMENT = {"GRPC_VERBOSITY": "", "GRPC_TRACE": "handshaker"}
_STDERR = 2
_END = b"\0end of the native log\n"
# One message of the C library: level, date, time, thread, file, line; further lines of it have no such head.
_HEAD = re.compile(r"[IWEF]\d{4} [\d:.]+ +\d+ (?P<file>[\w./]+):\d+\] (?P<text>.*)")
_TRACES = frozenset({"handshaker.cc", "channel_trace.h", "trace.cc"})
_REST_OF_TRACE = ("=== Source Location Trace", "src/core/", " shutdown=")
_FAILED = "CallNextHandshakerLocked: error="
_PEER = re.compile(r"grpc\.internal\.endpoint_peer_address=(?P<peer>[^,}\s]{1,100})")
_LIBRARY = re.compile(r"OPENSSL_internal:(?P<code>\w+)(?:: (?P<detail>[^=]*?))?(?:: OK)?(?: *===.*)?$")
_SEE_CLIENT = "gRPC does not say whose certificate it is: the log of the silo at that address names file and issuer"


@dataclass(frozen=True)
class Fault:
    """Why a handshake failed. `about_us`: it may be this coordinator's certificate that the other side refuses."""

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
    """Why a handshake failed, from the C library's words; None if they are not about that."""
    if "Handshake read failed" in text:
        return Fault(
            "it closed the connection in the middle of the handshake; a port check, or it does not accept this "
            "coordinator's certificate",
            about_us=True,
        )
    found = _LIBRARY.search(text.strip()) if "andshake failed" in text else None
    if found is None:
        return None
    code, detail = found["code"], found["detail"] or ""
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
    return "".join(character if character.isprintable() else "?" for character in address[:100]) or "somebody"


class NativeLog:
    """Holds file descriptor 2 while it is open; use as a context, once, in a process of its own.

    Args:
        report: told the cause and the peer's address of each handshake that is logged.
        presented: this coordinator's certificate in words, for causes that may lie in it.
        monotonic: seconds.
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
        self._monotonic = monotonic
        self._said: dict[str, float] = {}
        self._quiet: dict[str, int] = {}
        self._failing = ""  # a failure of which the line with the address is still to come
        self._tracing = False
        self._traced = False

    def __enter__(self) -> NativeLog:
        self._real = os.dup(_STDERR)
        reading, self._writing = os.pipe()
        os.dup2(self._writing, _STDERR)
        # Python's own lines need no pipe: they go where they went.
        self._python = sys.stderr
        sys.stderr = io.TextIOWrapper(os.fdopen(os.dup(self._real), "wb", 0), write_through=True)
        self._handlers = _redirected(self._python, sys.stderr)
        self._thread = threading.Thread(target=self._read, args=(reading,), name="native-log", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.dup2(self._real, _STDERR)
        # Children may still hold the pipe's end, so it is not the end of the file that ends the reader.
        os.write(self._writing, _END)
        self._thread.join()
        os.close(self._writing)
        os.close(self._real)
        for handler in self._handlers:
            handler.setStream(self._python)
        sys.stderr.close()
        sys.stderr = self._python

    def _read(self, reading: int) -> None:
        with os.fdopen(reading, "rb") as lines:
            for line in lines:
                if line.endswith(_END):
                    return
                self.take(line)

    def take(self, line: bytes) -> None:
        """One line of the C library."""
        text = line.decode("utf-8", "replace").rstrip("\n")
        head = _HEAD.match(text)
        if head is None and self._tracing and (not text or text.startswith(_REST_OF_TRACE)):
            if self._failing and text.startswith(" shutdown="):
                self._failed(f"{self._failing} {text}")
            return
        self._tracing = head is not None and head["file"] in _TRACES
        self._failing = ""
        if head is not None and self._tracing:
            self._traced = True
            # Only the first line of a failure names it; the address follows two lines later.
            if head["text"].startswith(_FAILED) and not head["text"].startswith(f"{_FAILED}OK"):
                self._failing = head["text"]
            return
        if handshake_fault(text) is None:
            os.write(self._real, line)
        elif not self._traced:
            self._failed(text)  # without the trace this is all there is, and no address

    def _failed(self, text: str) -> None:
        peer = _PEER.search(text)
        fault = handshake_fault(text.partition(" shutdown=")[0])
        self._failing = ""
        if fault is None:
            return
        now = self._monotonic()
        if now - self._said.get(fault.cause, -QUIET_SECONDS) < QUIET_SECONDS:
            self._quiet[fault.cause] = self._quiet.get(fault.cause, 0) + 1
            return
        self._said[fault.cause] = now
        more = self._quiet.pop(fault.cause, 0)
        address = address_of(peer["peer"]) if peer else ""
        parts = [
            fault.cause,
            fault.hint,
            f"it was shown {self._presented}" if fault.about_us and self._presented else "",
        ]
        _log.warning(
            "refused a connection%s in the TLS handshake: %s%s",
            f" from {address}" if address else "",
            "; ".join(part for part in parts if part),
            f" (and {more} more like it before)" if more else "",
        )
        self._report(fault.cause, address)


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
