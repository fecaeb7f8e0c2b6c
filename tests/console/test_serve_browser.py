"""The console in a browser over real sockets: who is refused, what is served, and that it can only look."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
import unicodedata
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, CookieJar, WSMsgType, WSServerHandshakeError
from rich.cells import cell_len
from typer.testing import CliRunner

from console.feed import Signer, unlock
from console.serving import MESSAGE_BYTES_MAX, TYPED_BYTES_MAX, ConsoleServer, Serving, serving
from fedsilo.cli.console import console_command, console_environment, program
from tests.console.commands import Site
from tests.console.states import DIGEST, POLICY_DIGEST, release, silo
from tests.console.test_safe import TOGETHER

WAIT_SECONDS = 12.0
# No console: it writes until nobody reads any more.
ENDLESS = (
    "import os\nos.write(1, b'__GANGLION__\\n')\n"
    "while True: os.write(1, b'D' + (65536).to_bytes(4, 'big') + b'x' * 65536)"
)


@contextlib.asynccontextmanager
async def served(
    command: Callable[[int], list[str]] = lambda lifeline: [sys.executable, "-c", ""], **options: Any
) -> AsyncIterator[tuple[ConsoleServer, ClientSession, list[str]]]:
    told: list[str] = []
    how = Serving("127.0.0.1", 0, "", command, console_environment(), **options)
    async with (
        serving(how, told.append) as server,
        ClientSession(cookie_jar=CookieJar(unsafe=True), base_url=server.address.origin) as browser,
    ):
        yield server, browser, told


def shows(site: Site) -> Callable[[int], list[str]]:
    return lambda lifeline: console_command(lifeline, ["--socket", str(site.socket), "--site", "hospital_a"])


async def enter(server: ConsoleServer, browser: ClientSession) -> None:
    assert (await browser.get(server.start_url)).status == 200


async def status(browser: ClientSession, path: str = "/", method: str = "GET", **headers: str) -> int:
    async with browser.request(method, path, headers=headers) as answer:
        return answer.status


async def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def consoles_of(process: int) -> list[int]:
    """Console processes that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process and b"--lifeline" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def runs(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Terminal:
    """What a terminal shows of what comes over the socket: Textual moves the cursor and writes, nothing else.

    `stray`: bytes of it that are neither text nor a sequence that Textual writes: control sequences (ECMA-48 5.4), and
    the title and the pointer's shape, both of words of the console's own.
    """

    OWN = r"\x1b\[([0-9;?$]*)([@-~])|\x1b\](?:2;(?:\(\d+\) )?[Ff]ed[Cc]onsole|22;[a-z]*)\x07|(\r?\n)"
    SEQUENCE = re.compile(rf"{OWN}|([^\x1b\r\n]+)|(.)", re.DOTALL)

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.socket, self.sent, self.stray = socket, b"", ""
        self._cells: dict[tuple[int, int], str] = {}

    @property
    def text(self) -> str:
        rows, columns = (range(1, max((place[way] for place in self._cells), default=0) + 1) for way in (0, 1))
        return "\n".join("".join(self._cells.get((row, column), " ") for column in columns) for row in rows)

    async def until(self, *words: str, without: str = "\0", keys: str = "") -> None:
        """Until all words stand there; `keys` are pressed again with every frame until then."""
        deadline = time.monotonic() + WAIT_SECONDS
        while without in self.text or not all(word in self.text for word in words):
            assert time.monotonic() < deadline, f"{words} not in:\n{self.text}"
            if keys:
                await self.press(keys)
            message = await self.socket.receive(timeout=WAIT_SECONDS)
            assert message.type in (WSMsgType.BINARY, WSMsgType.TEXT), message
            if message.type is WSMsgType.BINARY:
                self._draw(message.data)

    async def press(self, keys: str) -> None:
        await self.socket.send_json(["stdin", keys])

    def _draw(self, data: bytes) -> None:
        if data == b"\x07":  # the bell, which Textual writes by itself
            return
        self.sent += data
        row, column = 1, 1
        for parameters, final, newline, text, other in self.SEQUENCE.findall(data.decode()):
            if final == "H":
                row, column = (int(part) for part in (parameters or "1;1").split(";"))
            elif newline:
                row, column = row + 1, 1
            self.stray += other
            for character in text:
                self._cells[row, column] = character
                column += cell_len(character)


# ---- who is refused --------------------------------------------------------------------------------


async def test_nobody_comes_in_without_the_start_url_and_it_is_good_once() -> None:
    rebound, foreign = {"Host": "evil.example"}, {"Origin": "http://evil.example"}
    async with served(lambda lifeline: [sys.executable, "-c", ENDLESS]) as (server, browser, told):
        assert [await status(browser, path) for path in ("/", "/?token=x", "/textual.js", "/none")] == [403] * 4
        start = server.start_url.removeprefix(server.address.origin)
        for headers in (rebound, foreign, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Purpose": "prefetch"}):
            assert await status(browser, start, **headers) == 403  # and uses nothing up
        assert [await status(browser, start, method=method) for method in ("HEAD", "POST")] == [403, 403]
        async with browser.get(server.start_url, allow_redirects=False) as answer:
            assert answer.status == 303 and answer.headers["Location"] == "/"
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and "Domain" not in cookie
        assert [await status(browser, path) for path in ("/", "/textual.js")] == [200, 200] and told == []
        # the cookie alone does not do: a page of another name or origin has the browser send it
        assert [await status(browser, **headers) for headers in (rebound, foreign)] == [403, 403]
        async with ClientSession(base_url=server.address.origin) as thief:
            for url in (server.start_url, "/", "/?token=x"):  # a guess is no news
                assert await status(thief, url) == 403
        assert len(told) == 1 and server.start_url.partition("token=")[2] not in told[0]
        own = server.address.origin
        async with browser.ws_connect("/socket", origin=own) as socket:
            assert (await socket.receive(timeout=WAIT_SECONDS)).type is WSMsgType.BINARY
            for origin, code in (
                ("http://evil.example", 403),
                ("null", 403),
                ("http://localhost:1", 403),
                (None, 403),
                (own, 409),
            ):
                with pytest.raises(WSServerHandshakeError) as refused:
                    await browser.ws_connect("/socket", origin=origin)
                assert refused.value.status == code


# ---- what is served --------------------------------------------------------------------------------

URL = re.compile(rb"(?:https?|wss?):(?:\\?/){2}[^\s\"'<>)`]*|[\"'(]//[a-z0-9]")
LINKS = re.compile(r"""(?:src|href)=["']?([^"'\s>]+)|url\(["']?([^"')]+)""")


async def test_no_served_byte_is_an_external_url_and_nothing_else_is_there() -> None:
    async with served() as (server, browser, _):
        await enter(server, browser)
        waiting, seen = ["/"], dict[str, bytes]()
        while waiting:
            path = waiting.pop()
            async with browser.get(path) as answer:
                assert answer.status == 200 and answer.headers["X-Content-Type-Options"] == "nosniff"
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
                assert answer.headers["Server"] == "fedconsole"
                seen[path] = await answer.read()
            if not path.endswith(".js"):
                found = (first or second for first, second in LINKS.findall(seen[path].decode()))
                waiting += [link for link in found if link not in seen]
        assert set(seen) == {"/", "/textual.js", "/xterm.css", "/page.css"}
        own = server.address.socket_url.encode()
        assert {url for body in seen.values() for url in URL.findall(body)} == {own}
        for path in ("/static/", "/static", "/download/x", "/textual.js/", "/../etc/passwd", "/favicon.ico"):
            async with browser.get(path) as answer:
                assert (answer.status, await answer.text()) == (404, "Not Found\n")
                assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert await status(browser, "/?ping=https://evil.example") == 400
        assert await status(browser, "/socket", Origin=server.address.origin) == 400
        assert await status(browser, "/", method="POST") == 405
    # the same look at what the package brings finds what is meant
    style = Path(sys.modules["console.serving"].resources.files("textual_serve") / "static/css/xterm.css")  # type: ignore[attr-defined]
    assert URL.findall(style.read_bytes()) and URL.findall(b'<link href="https://fonts.googleapis.com/css">')


# ---- the session -----------------------------------------------------------------------------------


@pytest.mark.slow
async def test_T36_a_browser_looks_and_cannot_answer(site: Site) -> None:
    arguments = {"release": "r1/hospital_a/0", "digest": DIGEST, "policy_digest": POLICY_DIGEST, "revision": 1}
    async with served(shows(site)) as (server, browser, told):
        await enter(server, browser)
        async with browser.ws_connect("/socket?width=100&height=30", origin=server.address.origin) as socket:
            terminal = Terminal(socket)
            await terminal.until("r1/hospital_a/0", "READ-ONLY")
            await terminal.press("3")
            await terminal.until("lora.factors")
            await terminal.until("this console is read-only", keys="L")
            await terminal.press("\r")
            await terminal.until("7be1", without="this console is read-only")
            await terminal.until("this console is read-only", keys="A")
            for key in ("R", "\r", "A", "APPROVE\r", "1"):
                await terminal.press(key)
            # the last was read after those before it, and stands behind no dialog
            await terminal.until("public.responses", without="this console is read-only")
            assert site.approved == []
            [console] = consoles_of(os.getpid())
            assert b"key" not in Path(f"/proc/{console}/cmdline").read_bytes()
        await until(lambda: not runs(console))
        assert told == []
    # with a key and without a browser it can be answered
    Signer(site.socket).carry_out(
        unlock(*site.person("alice")).ordering("cardio-net"), "approvals.approve", arguments, "request-0001"
    )
    assert len(site.approved) == 1


@pytest.mark.slow
async def test_a_recording_is_shown_without_a_daemon(site: Site) -> None:
    recording = site.folder / "a.fedrec"
    once = ["--socket", str(site.socket), "--once", "--record", str(recording)]
    made = await asyncio.to_thread(CliRunner().invoke, program, once)
    assert made.exit_code == 0, made.output
    command = ["--replay", str(recording)]
    async with served(lambda lifeline: console_command(lifeline, command)) as (server, browser, _):
        await enter(server, browser)
        async with browser.ws_connect("/socket", origin=server.address.origin) as socket:
            await Terminal(socket).until("REPLAY", "hospital_a")


@pytest.mark.slow
async def test_T37_text_from_elsewhere_steers_no_browser(site: Site) -> None:
    hostile = TOGETHER["forwards"].replace("\ud800", "")  # which no daemon can send: it is not UTF-8
    site.desk.set_state(
        silo(release(asked_by=hostile, run=hostile), run=hostile, task=hostile, federation=hostile),
        policy_digest=POLICY_DIGEST,
    )
    async with served(shows(site)) as (server, browser, _):
        await enter(server, browser)
        async with browser.ws_connect("/socket?width=140&height=42", origin=server.address.origin) as socket:
            terminal = Terminal(socket)
            await terminal.until("r1/hospital_a/0", "]0;owned")
            # absurd sizes and a huge paste are borne; the next key is still read
            await socket.send_json(["resize", {"width": 10**9, "height": 10**9}])
            await socket.send_json(["resize", {"width": 140, "height": 42}])
            await socket.send_str(json.dumps(["stdin", "\x1b[200~" + "9" * (TYPED_BYTES_MAX + 1) + "\x1b[201~"]))
            await socket.send_str("[" * 40_000)
            await terminal.press("3")
            await terminal.until("lora.factors")
            await socket.send_str("x" * (MESSAGE_BYTES_MAX + 1))
            deadline = time.monotonic() + WAIT_SECONDS
            while (message := await socket.receive(timeout=WAIT_SECONDS)).type is WSMsgType.BINARY:
                assert time.monotonic() < deadline
            assert message.type is WSMsgType.CLOSE
    assert terminal.stray == "" and set(kinds(hostile)) & FORBIDDEN
    drawn = re.sub(Terminal.OWN, "", terminal.sent.decode())
    assert not set(kinds(drawn)) & FORBIDDEN


FORBIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}


def kinds(text: str) -> Iterable[str]:
    return (unicodedata.category(character) for character in text)


async def test_a_browser_that_takes_nothing_is_left_and_its_console_with_it() -> None:
    command = [sys.executable, "-c", ENDLESS, "--lifeline"]
    async with served(lambda lifeline: command, send_seconds=0.5) as (server, browser, _):
        await enter(server, browser)
        socket = await browser.ws_connect("/socket", origin=server.address.origin)
        connection = socket.get_extra_info("socket")
        assert connection is not None
        socket._response.connection.transport.pause_reading()  # type: ignore[union-attr]
        await until(lambda: consoles_of(os.getpid()))
        [console] = consoles_of(os.getpid())
        await until(lambda: not runs(console))
        # and the next may come
        async with await next_socket(server, browser) as another:
            assert (await another.receive(timeout=WAIT_SECONDS)).type is WSMsgType.BINARY


async def next_socket(server: ConsoleServer, browser: ClientSession) -> ClientWebSocketResponse:
    """A session, once the one before has been put away."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return await browser.ws_connect("/socket", origin=server.address.origin)
        except WSServerHandshakeError as busy:
            assert busy.status == 409 and time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def test_a_console_that_ends_by_itself_is_told_of() -> None:
    words = "import sys; sys.exit('no such thing')"
    async with served(lambda lifeline: [sys.executable, "-c", words]) as (server, browser, told):
        await enter(server, browser)
        async with browser.ws_connect("/socket", origin=server.address.origin) as socket:
            assert (await socket.receive(timeout=WAIT_SECONDS)).type is WSMsgType.CLOSE
        await until(lambda: told)
        assert told == ["the console ended with exit code 1: no such thing"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_server_that_ends_leaves_no_console_behind(site: Site, number: signal.Signals) -> None:
    url_file = site.folder / "start-url"
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "fedsilo.cli", "fedconsole", "serve", "--socket", str(site.socket),
        "--url-file", str(url_file), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert server.stdout is not None
    try:
        said = await asyncio.wait_for(server.stdout.readline(), WAIT_SECONDS)
        start_url = url_file.read_text().strip()
        assert url_file.stat().st_mode & 0o777 == 0o600 and b"token" not in said
        origin = start_url.partition("/?")[0]
        async with ClientSession(cookie_jar=CookieJar(unsafe=True), base_url=origin) as browser:
            assert (await browser.get(start_url)).status == 200
            async with browser.ws_connect("/socket", origin=origin) as socket:
                assert (await socket.receive(timeout=WAIT_SECONDS)).type is WSMsgType.BINARY
                [console] = consoles_of(server.pid)
                server.send_signal(number)
                code = await asyncio.wait_for(server.wait(), WAIT_SECONDS)
                await until(lambda: not runs(console))
        assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
        # of all that was asked for, nothing was written down
        assert b"token" not in await server.stdout.read()
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()


@pytest.mark.slow
async def test_a_fault_in_the_console_of_a_browser_leaves_a_report_and_ends_with_70(tmp_path: Path) -> None:
    script = (
        "import console.app, sys\n"
        "def run_on(*arguments, **options):\n"
        "    private = 'PRIVATE-VALUE'\n"
        "    raise LookupError(private)\n"
        "console.app.FedConsole.run_on = run_on\n"
        "from fedsilo.cli.console import session_program\n"
        "session_program(['--lifeline', sys.argv[1], '--socket', 'none.sock'])\n"
    )
    watched, held = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(watched), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        pass_fds=(watched,), env={**console_environment(), "XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    _, told = await asyncio.wait_for(process.communicate(), WAIT_SECONDS)
    os.close(watched)
    os.close(held)
    (report,) = (tmp_path / "fedsilo" / "crashes").glob("*.json")
    assert process.returncode == 70 and report.name in told.decode()
    assert "LookupError" in report.read_text() and "PRIVATE" not in told.decode() + report.read_text()


@pytest.mark.slow
async def test_a_console_ends_with_the_pipe_of_its_server_although_all_else_is_open(tmp_path: Path) -> None:
    watched, held = os.pipe()
    console = await asyncio.create_subprocess_exec(
        *console_command(watched, ["--socket", str(tmp_path / "none.sock")]), stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, pass_fds=(watched,), env=console_environment(),
    )  # fmt: skip
    os.close(watched)
    try:
        assert console.stdout is not None
        await asyncio.wait_for(console.stdout.readuntil(b"DISCONNECTED"), WAIT_SECONDS)
        assert console.returncode is None
        os.close(held)
        await asyncio.wait_for(console.stdout.read(), WAIT_SECONDS)
        assert await console.wait() == 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            console.kill()
