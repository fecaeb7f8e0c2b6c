"""Failed TLS handshakes as log lines of ours.

gRPC refuses a client with a wrong or expired certificate below Python: no call is made, and all it says is a line in
its own words on file descriptor 2. While `NativeLog` is open that descriptor is a pipe: a line about a handshake
becomes one warning with the cause in words (the same cause at most every ten seconds, with a count, so that a peer
cannot fill the log: T24), every other line goes to the real stderr as it is. gRPC does not say whose connection it
was, and a crash of the C library itself may lose its last words.
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
from types import TracebackType
from typing import TextIO

_log = logging.getLogger("fedsilo.coordinator")

QUIET_SECONDS = 10.0
VERBOSITY = "GRPC_VERBOSITY"  # read by gRPC when it loads; NONE and ERROR would hide the handshakes
_STDERR = 2
_END = b"\0end of the native log\n"
_HANDSHAKE = re.compile(r"Handshake failed with error .*?OPENSSL_internal:(?P<code>\w+)(?:: (?P<detail>.*))?$")
_EXPIRED = "certificate has expired"
_CAUSES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "HTTP_REQUEST": "it does not speak TLS",
    "HTTPS_PROXY_REQUEST": "it does not speak TLS",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it does not speak TLS 1.3",
    # What arrives here when the other side ends the handshake with an alert.
    "BAD_PACKET_LENGTH": "it broke off; it may not accept this coordinator's certificate (its CA, or the time)",
}


def handshake_cause(line: str) -> str:
    """Why a handshake failed, in words; empty if the line is not about one."""
    found = _HANDSHAKE.search(line.strip())
    if not found:
        return ""
    code, detail = found["code"], found["detail"] or ""
    if code == "CERTIFICATE_VERIFY_FAILED":
        if detail == _EXPIRED:
            return "its certificate is expired"
        if "not yet valid" in detail:
            return "its certificate is not yet valid"
        return f"its certificate is not signed by this federation's CA (wrong CA): {detail}"
    if code.startswith(("SSLV3_ALERT", "TLSV1_ALERT")):
        return f"it does not accept this coordinator: {code.split('ALERT_', 1)[-1].lower().replace('_', ' ')}"
    return _CAUSES.get(code, code.lower().replace("_", " "))


class NativeLog:
    """Holds file descriptor 2 while it is open; use as a context, once, in a process of its own.

    Args:
        report: told the cause of each handshake that is logged.
        monotonic: seconds.
    """

    def __init__(
        self, report: Callable[[str], None] = lambda cause: None, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._monotonic = monotonic
        self._said: dict[str, float] = {}
        self._quiet: dict[str, int] = {}

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
        cause = handshake_cause(line.decode("utf-8", "replace"))
        if not cause:
            os.write(self._real, line)
            return
        now = self._monotonic()
        if now - self._said.get(cause, -QUIET_SECONDS) < QUIET_SECONDS:
            self._quiet[cause] = self._quiet.get(cause, 0) + 1
            return
        self._said[cause] = now
        more = self._quiet.pop(cause, 0)
        _log.warning(
            "refused a connection in the TLS handshake: %s%s",
            cause,
            f" (and {more} more like it before)" if more else "",
        )
        self._report(cause)


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
