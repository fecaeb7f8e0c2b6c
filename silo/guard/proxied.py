"""The way to the coordinator through a site's HTTP proxy: CONNECT, and mutual TLS with the coordinator inside it.

Only `coordinator.proxy` in silo.yaml says so. `HTTPS_PROXY`, `NO_PROXY` and the like are not read: what the silo's one
connection passes through stands in the file that people reviewed (threat T10), and a variable that a shell, a unit or a
container brings along changes nothing. The proxy is spoken to in plain HTTP and learns what it must: the coordinator's
name and port, and its own password. All else is TLS 1.3 with the federation's certificates on both sides.

Does not stop: the proxy seeing when and how much is sent; whoever reads the line before the proxy learning its
password (Basic, RFC 7617); that is the site's own network.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Protocol

from fedsilo.files.durable import read_private
from fedsilo.protocol.errors import NotAllowedError, NotFoundError, UnreachableError
from fedsilo.protocol.text import harmless
from silo.config import CoordinatorPlace

ANSWER_BYTES_MAX = 1 << 14
CREDENTIALS_BYTES_MAX = 1024
ENVIRONMENT = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_WANTED = "a file of mode 0600 with one line USER:PASSWORD; coordinator.proxy_credentials in silo.yaml names it"


class Connection(Protocol):
    """A socket of the channel, which alone opens any."""

    def settimeout(self, seconds: float, /) -> None: ...
    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, size_bytes: int, /) -> bytes: ...


@dataclass(frozen=True)
class Proxy:
    """A site's HTTP proxy.

    Attributes:
        address: host:port.
        authorization: value of `Proxy-Authorization`; empty: none is sent. Never shown.
    """

    address: str
    authorization: str = field(default="", repr=False)

    def tunnel(self, plain: Connection, address: str, seconds: float) -> None:
        """Ask, on a connection to the proxy, for one to `address`; what is sent on it then goes there.

        Raises:
            UnreachableError: it does not make one; with its code.
        """
        lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
        lines += [f"Proxy-Authorization: {self.authorization}"] if self.authorization else []
        end = monotonic() + seconds
        answer = b""
        try:
            plain.settimeout(seconds)
            plain.sendall("\r\n".join((*lines, "", "")).encode("ascii"))
            # A byte at a time: what follows the answer is the coordinator's already.
            while not answer.endswith(b"\r\n\r\n") and len(answer) < ANSWER_BYTES_MAX:
                plain.settimeout(max(0.001, end - monotonic()))
                piece = plain.recv(1)
                if not piece:
                    raise self._fault("it closes the connection instead of an answer to CONNECT", *_NO_PROXY)
                answer += piece
        except TimeoutError:
            raise self._fault(f"no answer to CONNECT within {seconds:.0f} s", *_NO_PROXY) from None
        except OSError as error:
            raise self._fault(f"it breaks off at CONNECT: {error.strerror}", *_NO_PROXY) from None
        status = _status(answer)
        if status is None:
            raise self._fault("what it answers to CONNECT is not HTTP", *_NO_PROXY)
        if not 200 <= status < 300:
            raise self._refused(status, address)

    def _refused(self, status: int, address: str) -> UnreachableError:
        match status:
            case 407 if self.authorization:
                words = "it does not accept the user and password of coordinator.proxy_credentials"
                return self._fault(f"{words} (407)", f"ask who runs the proxy; {_WANTED}", "PROXY_LOGIN_REFUSED")
            case 407:
                return self._fault("it asks for a user and a password (407)", _WANTED, "PROXY_LOGIN_NEEDED")
            case 502 | 503 | 504:
                cause = f"it does not reach {address} ({status})"
                return self._fault(cause, "is the coordinator started? may the proxy dial it?", "PROXY_UNREACHABLE")
        hint = f"ask who runs the proxy to allow CONNECT to {address}"
        return self._fault(f"it refuses CONNECT to {address} ({status})", hint, "PROXY_REFUSED")

    def _fault(self, cause: str, hint: str, code: str) -> UnreachableError:
        return UnreachableError(f"proxy {self.address}: {cause}", hint=hint, code=code)


_NO_PROXY = ("is coordinator.proxy in silo.yaml an HTTP proxy that takes CONNECT?", "PROXY_UNUSABLE")


def proxy_of(place: CoordinatorPlace) -> Proxy | None:
    """The proxy of a site's configuration; None: the coordinator is dialled directly.

    Raises:
        NotFoundError, NotAllowedError: the file is missing, others may read it, or it holds something else.
    """
    if place.proxy is None:
        return None
    return Proxy(place.first_hop, _basic(place.proxy_credentials) if place.proxy_credentials else "")


def unread_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Return a hint on a variable that names a proxy and is not used here; empty: none. Its value may hold a
    password."""
    name_set = next((name for name in ENVIRONMENT if environment.get(name)), "")
    return f"{name_set} is set and not read here: coordinator.proxy in silo.yaml names a proxy" if name_set else ""


def _basic(path: Path) -> str:
    try:
        text = read_private(path).removesuffix(b"\n").removesuffix(b"\r")
    except NotFoundError as error:
        raise NotFoundError(error.message, hint=_WANTED) from None
    # RFC 7617 2: no colon in the user's name, no control character anywhere.
    user, colon, _ = text.partition(b":")
    if not user or not colon or len(text) > CREDENTIALS_BYTES_MAX or any(byte < 0x20 or byte == 0x7F for byte in text):
        raise NotAllowedError(f"{path} is not one line USER:PASSWORD", hint=_WANTED)
    return f"Basic {base64.b64encode(text).decode('ascii')}"


def _status(answer: bytes) -> int | None:
    """The status code of an HTTP/1 answer (RFC 9112 4); None where it is no such answer."""
    first = harmless(answer.partition(b"\r\n")[0].decode("latin-1")).split(" ")
    if not answer.endswith(b"\r\n\r\n") or len(first) < 2 or not first[0].startswith("HTTP/1."):
        return None
    return int(first[1]) if len(first[1]) == 3 and first[1].isascii() and first[1].isdecimal() else None
