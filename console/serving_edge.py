"""The web server of the console: aiohttp, one browser session, one read-only console process that ends with it.

It serves four files and one WebSocket. What the WebSocket carries is the terminal output of a console process, drawn by
the same screens as anywhere else, and back come keys, mouse and sizes (`console.serving.read_message`). Why it is not
textual-serve's own server, of which only the script and a style sheet are used: docs/decisions.

Does not stop: another program of this machine that opens connections until there are none left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from aiohttp import ClientConnectionError, WSCloseCode, WSMsgType, web

from console.serving import (
    MESSAGE_BYTES_MAX,
    PACKET_HEADER_BYTES,
    PAGE_STYLE,
    PRELUDE,
    Address,
    Door,
    Ping,
    Refusal,
    Told,
    Typed,
    address_of,
    headers_of,
    packet,
    packet_size_bytes,
    page,
    read_message,
    refuse_stranger,
    size_of,
    without_addresses,
)
from fedsilo.files.extras import install_hint
from fedsilo.protocol.errors import OperationError

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
    heartbeat_seconds: how often it is asked whether it is still there.
    """

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
    door: who may come in.
    """

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
    """For aiohttp: its messages may repeat a request, and with it the token."""
    logger = logging.getLogger("console.serving_edge")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    return logger
