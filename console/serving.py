"""The console in a browser: who may look, what a browser may say, and the web server.

The server is aiohttp: four files and one WebSocket, one browser session, one read-only console process that ends with
it. What the WebSocket carries is the terminal output of that process, drawn by the same screens as anywhere else, and
back come keys, mouse and sizes (`read_message`). Why it is not textual-serve's own server, of which only the script and
a style sheet are used: docs/decisions.

Against DNS rebinding (Host), sockets opened by other sites (Origin, RFC 6455 10.2), pages that frame or embed this one
(Content-Security-Policy, Sec-Fetch-Site), and a start URL that somebody else has read (one token, one use).

Does not stop: a program of the same account, which can read the browser's memory and the terminal, and one that opens
connections until there are none left; another web server under the same host name, to which browsers send the same
cookies whatever its port (RFC 6265 8.5); a browser extension.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import math
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from aiohttp import ClientConnectionError, WSCloseCode, WSMsgType, web

from fedsilo.files.extras import install_hint
from fedsilo.protocol.errors import OperationError, UsageError

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
    """The address by which a browser reaches this server.

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
    """Return the address by which a browser reaches the server that listens at `bind`:`port`.

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
    """Refuse a request unless its headers say that this server's own page made it or a person typed its address.

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
    """Login with one start URL, which is good once, then one cookie, until it expires. Each start makes new ones.

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
    """Return the one page. Nothing in it comes from a request or from a daemon."""
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
    """A message to the console's process other than keys: a size, or that the page gained or lost the focus."""

    fields: Mapping[str, str | int]


@dataclass(frozen=True)
class Ping:
    """Answered with the same text."""

    text: str


Said: TypeAlias = Typed | Told | Ping | None


def read_message(text: str) -> Said:
    """Parse one message of the page's script; None for anything else, which is dropped.

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
    """Return one message for the console's process. The size before it keeps keys from passing for anything else."""
    kind, payload = (b"D", said.data) if isinstance(said, Typed) else (b"M", json.dumps(dict(said.fields)).encode())
    return kind + len(payload).to_bytes(4, "big") + payload


def packet_size_bytes(header: bytes) -> int:
    """Of the payload that follows a packet's header. Raises ValueError: it is larger than any screen."""
    size_bytes = int.from_bytes(header[1:PACKET_HEADER_BYTES], "big")
    if size_bytes > PACKET_BYTES_MAX:
        raise ValueError(f"a packet of {size_bytes} bytes")
    return size_bytes


SEND_SECONDS = 20.0
HEARTBEAT_SECONDS = 15.0
START_SECONDS = 60.0
CLOSE_SECONDS = 1.0
KEEPALIVE_SECONDS = 15.0
LAST_WORDS_BYTES = 2000
PIPE_BYTES = 1 << 16


@dataclass(frozen=True)
class Serving:
    """Attributes:
    bind: IP address to listen on.
    port: 0 takes a free one.
    behind_proxy: its origin; empty without one.
    command: starts one console, given the number of a file descriptor which ends when this process does. It must be
        one that can only look.
    environment: all of that process's environment but for the size.
    send_seconds: how long a browser may take no bytes.
    heartbeat_seconds: how often it is asked whether it is still there."""

    bind: str
    port: int
    behind_proxy: str
    command: Callable[[int], Sequence[str]]
    environment: Mapping[str, str]
    send_seconds: float = SEND_SECONDS
    heartbeat_seconds: float = HEARTBEAT_SECONDS


@contextlib.asynccontextmanager
async def serving(how: Serving, tell: Callable[[str], None], door: Door | None = None) -> AsyncIterator[ConsoleServer]:
    """A server that stands, until the block is left: then no console process is left either.

    Raises:
        OperationError: the port cannot be listened on, or the browser's script is not installed.
    """
    server = ConsoleServer(how, tell, door or Door(time.monotonic()))
    runner = web.AppRunner(
        server.application(), access_log=None, logger=_quiet(), keepalive_timeout=KEEPALIVE_SECONDS,
        handler_cancellation=True, shutdown_timeout=1.0,
    )  # fmt: skip
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, how.bind, how.port).start()
        except OSError as error:
            raise OperationError(
                f"cannot listen on {how.bind} port {how.port}: {error.strerror or error}",
                hint="--port 0 takes a free one",
            ) from None
        server.address = address_of(how.bind, runner.addresses[0][1], how.behind_proxy)
        yield server
    finally:
        await server.end()
        await runner.cleanup()


def serve(how: Serving, ready: Callable[[str], None], tell: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `ready` is given the start URL once it stands.

    Raises:
        OperationError: as `serving`.
    """

    async def until_told() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        async with serving(how, tell) as server:
            ready(server.start_url)
            await ended.wait()

    asyncio.run(until_told())


class ConsoleServer:
    """Args:
    how: as it says.
    tell: a line for the operator; never a token, a cookie or what was asked for.
    door: who may come in."""

    def __init__(self, how: Serving, tell: Callable[[str], None], door: Door) -> None:
        self.address = Address("")  # known once it listens
        self._how = how
        self._tell = tell
        self._door = door
        self._session: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._assets = _assets()

    @property
    def start_url(self) -> str:
        return f"{self.address.origin}/?token={self._door.token}"

    def application(self) -> web.Application:
        application = web.Application(middlewares=[self._check])
        application.on_response_prepare.append(self._add_headers)
        application.router.add_get("/", self._page, allow_head=False)
        application.router.add_get("/socket", self._socket, allow_head=False)
        for path in self._assets:
            application.router.add_get(path, self._asset, allow_head=False)
        return application

    async def end(self) -> None:
        """End the session and wait for it. It is asked, not cancelled: a cancelled task might leave its process."""
        if self._session is not None:
            self._over.set()
            await asyncio.wait({self._session})

    # ---- each request ------------------------------------------------------------------------------

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(headers_of(self.address))

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Before anything is looked up: an unknown path is told apart from a known one only by who may come in."""
        is_socket = request.path == "/socket"
        hosts = request.headers.getall("Host", [])
        refusal = refuse_stranger(self.address, hosts, request.headers, socket=is_socket)
        entering = request.path == "/" and request.method == "GET" and list(request.query) == ["token"]
        if refusal is None and not entering:
            cookie = request.cookies.get(self.address.cookie, "")
            refusal = self._door.refuse(cookie, time.monotonic())
        if refusal is not None:
            return _refused(refusal)
        try:
            return await handler(request)
        except web.HTTPException as answer:
            # its own text may repeat the path
            return _refused(Refusal(answer.status, answer.reason))

    async def _page(self, request: web.Request) -> web.StreamResponse:
        if list(request.query) == ["token"]:
            return self._enter(request.query["token"])
        if request.query_string:
            return _refused(Refusal(400, "this page takes no options"))
        return web.Response(text=page(self.address), content_type="text/html")

    def _enter(self, token: str) -> web.StreamResponse:
        entered = self._door.enter(token, time.monotonic())
        if isinstance(entered, Refusal):
            if entered.tell:
                self._tell(entered.tell)
            return _refused(entered)
        answer = web.Response(status=303, headers={"Location": "/"})
        answer.set_cookie(
            self.address.cookie, entered, path="/", httponly=True, samesite="Strict", secure=self.address.secure
        )
        return answer

    async def _asset(self, request: web.Request) -> web.StreamResponse:
        content_type, body = self._assets[request.path]
        return web.Response(body=body, content_type=content_type, charset="utf-8")

    # ---- the session -------------------------------------------------------------------------------

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        if self._session is not None:
            return _refused(Refusal(409, "another window has the console: close that one first"))
        socket, self._over = self._new_socket(), (over := asyncio.Event())
        self._session = session = asyncio.ensure_future(self._converse(request, socket, over))
        session.add_done_callback(self._put_away)
        try:
            await asyncio.shield(session)
        finally:
            over.set()
            await asyncio.wait({session})
        return socket

    def _put_away(self, session: asyncio.Task[None]) -> None:
        """Another may begin, since the process of this one is gone."""
        self._session = None
        if not session.cancelled():
            session.exception()  # its handler has it; who went away needs none

    def _new_socket(self) -> web.WebSocketResponse:
        # no compression: a small message could become a large one
        return web.WebSocketResponse(
            heartbeat=self._how.heartbeat_seconds,
            max_msg_size=MESSAGE_BYTES_MAX,
            compress=False,
            timeout=CLOSE_SECONDS,
        )

    async def _converse(self, request: web.Request, socket: web.WebSocketResponse, over: asyncio.Event) -> None:
        """Until the browser, the process, the session or the server ends."""
        await socket.prepare(request)
        size = size_of(request.query.get("width"), request.query.get("height"))
        async with self._process(size) as process:
            ways = [
                asyncio.ensure_future(self._to_browser(process, socket)),
                asyncio.ensure_future(_to_process(socket, process)),
                asyncio.ensure_future(over.wait()),
            ]
            seconds = self._door.seconds_left(time.monotonic())
            await asyncio.wait(ways, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            for ended in await asyncio.gather(*ways, return_exceptions=True):
                if isinstance(ended, Exception) and not isinstance(ended, _ORDINARY_ENDS):
                    self._tell(f"a session ended by {type(ended).__name__}")
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await socket.close(code=WSCloseCode.GOING_AWAY)
        except _ORDINARY_ENDS:
            if request.transport is not None:
                request.transport.abort()  # else it waits for a browser that takes nothing

    @contextlib.asynccontextmanager
    async def _process(self, size: tuple[int, int]) -> AsyncIterator[asyncio.subprocess.Process]:
        """A console of its own. Killed at the end, whatever it does: it holds nothing that must be put away."""
        # This process holds one end; the kernel closes it with the process, also at kill -9 (POSIX close, pipe).
        watched, held = os.pipe()
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._how.command(watched), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE, start_new_session=True, pass_fds=(watched,),
                    env={**self._how.environment, "COLUMNS": str(size[0]), "ROWS": str(size[1])},
                )  # fmt: skip
            finally:
                os.close(watched)
            words = asyncio.ensure_future(_last_words(process))
            try:
                yield process
            finally:
                by_itself = await _own_end(process)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await _close_pipes(process)
                await process.wait()
                said = await words
                if by_itself:
                    self._tell(f"the console ended with exit code {by_itself}: {said or 'it said nothing'}")
        finally:
            os.close(held)

    async def _to_browser(self, process: asyncio.subprocess.Process, socket: web.WebSocketResponse) -> None:
        """What is drawn. Nothing is kept for a browser that is slow: the process waits with it, then both end.

        A request of the process to open a page or to hand out a file is not passed on.
        """
        assert process.stdout is not None  # noqa: S101  # opened as a pipe
        async with asyncio.timeout(START_SECONDS):
            await process.stdout.readuntil(PRELUDE)
        while True:
            header = await process.stdout.readexactly(PACKET_HEADER_BYTES)
            payload = await process.stdout.readexactly(packet_size_bytes(header))
            if header[:1] == b"D":
                async with asyncio.timeout(self._how.send_seconds):
                    await socket.send_bytes(payload)


async def _to_process(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None  # noqa: S101  # opened as a pipe
    async for message in socket:
        said = read_message(message.data) if message.type == WSMsgType.TEXT else None
        if isinstance(said, Ping):
            await socket.send_json(["pong", said.text])
        elif isinstance(said, Typed | Told):
            process.stdin.write(packet(said))
            await process.stdin.drain()


_ORDINARY_ENDS = (ClientConnectionError, ConnectionError, EOFError, TimeoutError)


async def _own_end(process: asyncio.subprocess.Process) -> int | None:
    """Exit code of a process that has closed its output; None if it still runs."""
    assert process.stdout is not None  # noqa: S101  # opened as a pipe
    if process.stdout.at_eof():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await process.wait()
    return process.returncode


async def _close_pipes(process: asyncio.subprocess.Process) -> None:
    """Of a killed process: a pipe is let go of once it was read to its end, at most what the kernel kept of it."""
    assert process.stdin is not None and process.stdout is not None  # noqa: S101  # opened as pipes
    process.stdin.close()
    while await process.stdout.read(PIPE_BYTES):
        pass


async def _last_words(process: asyncio.subprocess.Process) -> str:
    """The last line of stderr; the rest is not kept."""
    assert process.stderr is not None  # noqa: S101  # opened as a pipe
    kept = b""
    while part := await process.stderr.read(LAST_WORDS_BYTES):
        kept = (kept + part)[-LAST_WORDS_BYTES:]
    lines = kept.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""


def _refused(refusal: Refusal) -> web.Response:
    return web.Response(status=refusal.status, text=f"{refusal.text}\n")


def _assets() -> dict[str, tuple[str, bytes]]:
    """Path -> content type and bytes: whatever is served beside the page. No folder is.

    Raises:
        OperationError: textual-serve is not installed.
    """
    try:
        folder = resources.files("textual_serve") / "static"
        script, style = (folder / "js/textual.js").read_bytes(), (folder / "css/xterm.css").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise OperationError(
            "the script of textual-serve is not installed",
            hint=install_hint("textual_serve"),
        ) from None
    return {
        "/textual.js": ("text/javascript", script),
        "/xterm.css": ("text/css", without_addresses(style)),
        "/page.css": ("text/css", PAGE_STYLE.encode()),
    }


def _quiet() -> logging.Logger:
    """Return a logger for aiohttp that drops its messages, which may repeat a request and with it the token."""
    logger = logging.getLogger("console.serving")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
