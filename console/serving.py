"""Who may look at the console in a browser, and what a browser may say (console design 9). Pure: no socket, no clock.

Against DNS rebinding (Host), sockets opened by other sites (Origin, RFC 6455 10.2), pages that frame or embed this one
(Content-Security-Policy, Sec-Fetch-Site), and a start URL that somebody else has read (one token, one use).

Does not stop: a program of the same account, which can read the browser's memory and the terminal; another web server
under the same host name, to which browsers send the same cookies whatever its port (RFC 6265 8.5); a browser extension.
"""

from __future__ import annotations

import ipaddress
import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from fedsilo.protocol.errors import UsageError

TOKEN_SECONDS = 10 * 60.0
SESSION_SECONDS = 8 * 3600.0
SECRET_BYTES = 32

CELLS_MIN, CELLS_MAX, CELLS_DEFAULT = 20, 400, 80
ROWS_MIN, ROWS_MAX, ROWS_DEFAULT = 5, 200, 24
# A key or a movement of the mouse is some bytes, a pasted word for a search less than a thousand.
TYPED_BYTES_MAX = 4096
MESSAGE_BYTES_MAX = 1 << 16  # a larger one ends the session

# The prelude and the packets of textual.drivers.web_driver: one letter, four bytes of size, payload.
PRELUDE = b"__GANGLION__\n"
PACKET_HEADER_BYTES = 5
PACKET_BYTES_MAX = 1 << 22


# ---- where it is -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Address:
    """What a browser calls this server.

    Attributes:
        authority: the one value of Host that is answered.
        secure: browsers come over TLS, which a proxy ends.
    """

    authority: str
    secure: bool = False

    @property
    def origin(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.authority}"

    @property
    def socket_url(self) -> str:
        return f"ws{'s' if self.secure else ''}://{self.authority}/socket"

    @property
    def cookie(self) -> str:
        """Its name. Cookies know no port (RFC 6265 8.5), so two consoles of one machine need two names."""
        return "__Host-fedconsole" if self.secure else f"fedconsole-{self.authority.rpartition(':')[2].strip(']')}"


def check_bind(bind: str, behind_proxy: str) -> None:
    """Raises UsageError: `bind` is no IP address, or one that other machines reach and there is no proxy."""
    try:
        loopback = ipaddress.ip_address(bind).is_loopback
    except ValueError:
        raise UsageError(f"--bind {bind!r} is not an IP address", hint="127.0.0.1 or ::1") from None
    if not loopback and not behind_proxy:
        raise UsageError(
            f"--bind {bind} is reached from other machines",
            hint="leave it at 127.0.0.1 and use ssh -L, or put a proxy with TLS and a login before it (--behind-proxy)",
        )


def address_of(bind: str, port: int, behind_proxy: str = "") -> Address:
    """What a browser calls the server that listens at `bind`:`port`.

    Args:
        bind: IP address.
        port: where it listens.
        behind_proxy: origin of the proxy, https://HOST or https://HOST:PORT; empty without one.

    Raises:
        UsageError: `behind_proxy` is not such an origin.
    """
    if not behind_proxy:
        host = f"[{bind}]" if ":" in bind else bind
        return Address(host if port == 80 else f"{host}:{port}")
    hint = "--behind-proxy https://console.example.org"
    try:
        parts = urlsplit(behind_proxy)
        proxy_port = parts.port
    except ValueError:
        raise UsageError(f"{behind_proxy!r} is not an origin", hint=hint) from None
    if parts.scheme != "https" or not parts.hostname:
        raise UsageError(f"{behind_proxy!r} is not an https origin", hint=hint)
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username is not None:
        raise UsageError(f"{behind_proxy!r} has more than a host and a port", hint=hint)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Address(host if proxy_port in (None, 443) else f"{host}:{proxy_port}", secure=True)


# ---- who comes in ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """`status` of HTTP, one sentence that repeats nothing of what was asked, and what the operator is told of it."""

    status: int
    text: str
    tell: str = ""


def refuse_stranger(address: Address, hosts: list[str], headers: Mapping[str, str], *, socket: bool) -> Refusal | None:
    """Whether a request was made by this server's own page or typed by a person, as its headers tell.

    Args:
        address: of this server.
        hosts: every Host header of the request.
        headers: the others, by name in lower case.
        socket: it asks for a WebSocket, for which a browser always says its Origin.
    """
    if [host.lower() for host in hosts] != [address.authority.lower()]:
        return Refusal(403, "this server is not known by that name: open the start URL as it was printed")
    origin = headers.get("origin")
    if origin != address.origin and (socket or origin is not None):
        return Refusal(403, "asked for by another page: only the console's own page may")
    # absent in browsers before 2023; "none" is an address that a person typed or a terminal opened
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return Refusal(403, "asked for by another page: type or paste the address")
    if "prefetch" in headers.get("sec-purpose", "") or "prefetch" in headers.get("purpose", ""):
        return Refusal(403, "not fetched ahead: that would use the start URL up")
    return None


class Door:
    """One start URL, good once; then one cookie, until it is too old. A new one of each with every start.

    Does not stop: whoever uses the start URL first. The person who comes second is told so.

    Args:
        now: monotonic seconds.
        token_seconds: how long the start URL is good.
        session_seconds: how long the cookie is good, from its giving.
    """

    def __init__(
        self, now: float, *, token_seconds: float = TOKEN_SECONDS, session_seconds: float = SESSION_SECONDS
    ) -> None:
        self.token = secrets.token_urlsafe(SECRET_BYTES)
        self._session = secrets.token_urlsafe(SECRET_BYTES)
        self._token_until = now + token_seconds
        self._session_seconds = session_seconds
        self._session_until: float | None = None

    @property
    def used(self) -> bool:
        return self._session_until is not None

    def enter(self, token: str, now: float) -> str | Refusal:
        """The cookie's value for the token's first user; everybody else is refused."""
        if not _same(token, self.token):
            return Refusal(403, "not the start URL of this console")
        if self.used:
            told = "the start URL was opened once more and refused. If the first time was not you, end this at once"
            return Refusal(403, "this start URL was used already. If that was not you, end fedconsole serve", told)
        if now >= self._token_until:
            return Refusal(403, "this start URL is too old: start fedconsole serve again")
        self._session_until = now + self._session_seconds
        return self._session

    def refuse(self, cookie: str, now: float) -> Refusal | None:
        if not self.used or not _same(cookie, self._session):
            return Refusal(403, "open the start URL that fedconsole serve printed; it is good once")
        if self.seconds_left(now) <= 0:
            return Refusal(403, "this session is over: start fedconsole serve again")
        return None

    def seconds_left(self, now: float) -> float:
        return max((self._session_until or now) - now, 0.0)


def _same(given: str, expected: str) -> bool:
    """In a time that does not tell how much of it was right."""
    return secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode())


# ---- what is served --------------------------------------------------------------------------------


def headers_of(address: Address) -> dict[str, str]:
    """Of every answer. Styles are inline because the terminal in the page writes its own; scripts never are.

    The sandbox lets no page open windows or leave: text that looks like a link leads nowhere.
    """
    policy = (
        "default-src 'none'", "script-src 'self'", "style-src 'self' 'unsafe-inline'",
        f"connect-src {address.socket_url}", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "sandbox allow-scripts allow-same-origin",
    )  # fmt: skip
    return {
        "Content-Security-Policy": "; ".join(policy),
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), clipboard-read=(), geolocation=(), microphone=(), usb=()",
        "Referrer-Policy": "no-referrer",
        "Server": "fedconsole",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


def page(address: Address) -> str:
    """The one page. Nothing in it comes from a request or from a daemon."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>fedconsole (read-only)</title>
<link rel="stylesheet" href="/xterm.css">
<link rel="stylesheet" href="/page.css">
<script src="/textual.js"></script>
</head>
<body>
<noscript>The console in a browser needs JavaScript; without it: fedconsole, in a terminal.</noscript>
<div id="ended" role="alert">This session has ended, or another window has it. Close that one, then reload this page.
<br>If the page is refused then, start fedconsole serve again.</div>
<div class="textual-terminal" data-session-websocket-url="{address.socket_url}" data-font-size="15"></div>
</body>
</html>
"""


PAGE_STYLE = """body { margin: 0; background: #0e1116; color: #e6e9ee; font: 15px/1.5 monospace; }
#ended { display: none; position: absolute; z-index: 20; left: 0; right: 0; top: 30%; margin: auto; max-width: 48em; \
padding: 1.5em; background: #1c232d; border: 1px solid #ffc66d; }
body.-closed #ended { display: block; }
"""


def without_addresses(style: bytes) -> bytes:
    """A style sheet whose comments name web addresses, with the names alone: no served byte is an external URL."""
    return style.replace(b"https://", b"").replace(b"http://", b"")


# ---- what a browser says ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Typed:
    """Keys and mouse, as a terminal sends them."""

    data: bytes


@dataclass(frozen=True)
class Told:
    """What the console's process is told beside keys: a size, or that the page has the focus or lost it."""

    fields: Mapping[str, str | int]


@dataclass(frozen=True)
class Ping:
    """Answered with the same text."""

    text: str


Said: TypeAlias = Typed | Told | Ping | None


def read_message(text: str) -> Said:
    """One message of the page's script; None for whatever else it is: it is dropped.

    What is pasted beyond `TYPED_BYTES_MAX` is dropped whole: half of an escape sequence would be read as keys.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, list) or not message:
        return None
    kind, value = message[0], message[1] if len(message) > 1 else None
    if kind == "stdin" and isinstance(value, str):
        data = value.encode("utf-8", "replace")
        return Typed(data) if 0 < len(data) <= TYPED_BYTES_MAX else None
    if kind == "resize" and isinstance(value, dict):
        cells, rows = size_of(value.get("width"), value.get("height"))
        return Told({"type": "resize", "width": cells, "height": rows})
    if kind in ("focus", "blur"):
        return Told({"type": kind})
    if kind == "ping" and isinstance(value, str) and len(value) <= 32:
        return Ping(value)
    return None


def size_of(cells: Any, rows: Any) -> tuple[int, int]:
    """(cells, rows) that a console can be drawn on, whatever was asked for. A cell costs memory and time to draw."""
    return (
        _between(cells, CELLS_MIN, CELLS_MAX, CELLS_DEFAULT),
        _between(rows, ROWS_MIN, ROWS_MAX, ROWS_DEFAULT),
    )


def _between(value: Any, low: int, high: int, otherwise: int) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 9:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return otherwise
    if isinstance(value, float) and math.isnan(value):
        return otherwise
    return int(min(max(value, low), high))


# ---- packets of the console's process --------------------------------------------------------------


def packet(said: Typed | Told) -> bytes:
    """One message for the console's process. The size before it keeps keys from passing for anything else."""
    kind, payload = (b"D", said.data) if isinstance(said, Typed) else (b"M", json.dumps(dict(said.fields)).encode())
    return kind + len(payload).to_bytes(4, "big") + payload


def packet_size_bytes(header: bytes) -> int:
    """Of the payload that follows a packet's header. Raises ValueError: it is larger than any screen."""
    size_bytes = int.from_bytes(header[1:PACKET_HEADER_BYTES], "big")
    if size_bytes > PACKET_BYTES_MAX:
        raise ValueError(f"a packet of {size_bytes} bytes")
    return size_bytes
