"""Who may look at the console in a browser and what a browser may say: the rules, without a socket."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from console import serving
from console.serving import Address, Door, Ping, Refusal, Told, Typed
from fedsilo.cli import console as cli_serve
from fedsilo.protocol.errors import UsageError

HERE = Address("127.0.0.1:8123")
THERE = Address("console.example.org", secure=True)


# ---- where it listens ------------------------------------------------------------------------------


OTHER = ("0.0.0.0", "::", "192.168.1.5", "::ffff:10.0.0.1", "localhost", "example.org", "")  # noqa: S104


@pytest.mark.parametrize(
    ("bind", "proxy", "taken"),
    [
        *((bind, "", True) for bind in ("127.0.0.1", "::1", "127.9.8.7")),
        (OTHER[0], "p", True),
        *((bind, "", False) for bind in OTHER),
    ],
)
def test_loopback_is_listened_on_and_more_only_behind_a_proxy(bind: str, proxy: str, taken: bool) -> None:
    if taken:
        serving.check_bind(bind, proxy)
        return
    with pytest.raises(UsageError):
        serving.check_bind(bind, proxy)


@pytest.mark.parametrize(
    ("bind", "port", "proxy", "origin", "socket"),
    [
        ("127.0.0.1", 8123, "", "http://127.0.0.1:8123", "ws://127.0.0.1:8123/socket"),
        ("127.0.0.1", 80, "", "http://127.0.0.1", "ws://127.0.0.1/socket"),
        ("::1", 8123, "", "http://[::1]:8123", "ws://[::1]:8123/socket"),
        ("127.0.0.1", 8123, "https://c.example", "https://c.example", "wss://c.example/socket"),
        ("127.0.0.1", 8123, "https://c.example:443/", "https://c.example", "wss://c.example/socket"),
        ("127.0.0.1", 8123, "https://c.example:8443", "https://c.example:8443", "wss://c.example:8443/socket"),
    ],
)
def test_a_server_has_one_name(bind: str, port: int, proxy: str, origin: str, socket: str) -> None:
    address = serving.address_of(bind, port, proxy)
    assert (address.origin, address.socket_url) == (origin, socket)


@pytest.mark.parametrize(
    "proxy", ["http://c.example", "c.example", "https://", "https://c.example/path", "https://me@c.example",
              "https://c.example?x=1", "https://c.example:port"],
)  # fmt: skip
def test_a_proxy_without_tls_or_with_more_than_a_name_is_refused(proxy: str) -> None:
    with pytest.raises(UsageError):
        serving.address_of("127.0.0.1", 8123, proxy)


# ---- who comes in ----------------------------------------------------------------------------------


OWN = [HERE.authority]


def test_the_start_url_is_good_once_and_the_cookie_until_it_is_old() -> None:
    door = Door(100.0)
    assert door.refuse("", 100.0) is not None and door.refuse(door.token, 100.0) is not None
    wrong = door.enter("x" + door.token[1:] if door.token[0] != "x" else "y" + door.token[1:], 100.0)
    assert isinstance(wrong, Refusal) and not door.used
    cookie = door.enter(door.token, 101.0)
    assert isinstance(cookie, str) and cookie != door.token and door.refuse(cookie, 102.0) is None
    assert isinstance(door.enter(door.token, 102.0), Refusal)
    assert door.refuse(cookie + "x", 102.0) is not None and door.refuse("\ud800", 102.0) is not None
    for seconds, refused in ((serving.SESSION_SECONDS - 1, False), (serving.SESSION_SECONDS, True)):
        assert (door.refuse(cookie, 101.0 + seconds) is not None) is refused
    for seconds, kind in ((serving.TOKEN_SECONDS, Refusal), (serving.TOKEN_SECONDS - 1, str)):
        unopened = Door(100.0)
        assert isinstance(unopened.enter(unopened.token, 100.0 + seconds), kind)
    doors = [Door(0.0) for _ in range(8)]
    secrets = [each.token for each in doors] + [str(each.enter(each.token, 0.0)) for each in doors]
    assert len(set(secrets)) == 16 and all(len(secret) >= 43 for secret in secrets)  # 256 bits in base64
    assert Address("127.0.0.1:8123").cookie != Address("127.0.0.1:8124").cookie
    assert THERE.cookie.startswith("__Host-")  # RFC 6265bis 4.1.3.2: only over TLS, and of this host alone


# ---- what is served --------------------------------------------------------------------------------


@pytest.mark.parametrize("address", [HERE, THERE])
def test_scripts_are_the_servers_own_and_nothing_frames_the_page(address: Address) -> None:
    headers = serving.headers_of(address)
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["connect-src"] == address.socket_url
    # without these the page's script could open windows and ask questions (a click on text that looks like a link)
    assert not {"allow-popups", "allow-modals", "allow-top-navigation"} & set(policy["sandbox"].split())
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    text = serving.page(address)
    assert "<script>" not in text and "style=" not in text and "onload" not in text


# ---- what a browser says ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('["stdin", "q"]', Typed(b"q")),
        ('["stdin", "\\u00fc"]', Typed("ü".encode())),
        ('["stdin", "\\ud800"]', Typed(b"?")),
        ('["resize", {"width": 100, "height": 30}]', Told({"type": "resize", "width": 100, "height": 30})),
        ('["resize", {"width": 1e9, "height": -3}]', Told({"type": "resize", "width": 400, "height": 5})),
        ('["resize", {"width": true, "height": null}]', Told({"type": "resize", "width": 80, "height": 24})),
        ('["resize", {"width": NaN, "height": Infinity}]', Told({"type": "resize", "width": 80, "height": 200})),
        (f'["resize", {{"width": {10**4000}}}]', Told({"type": "resize", "width": 400, "height": 24})),
        ('["focus"]', Told({"type": "focus"})),
        ('["blur", {"type": "quit"}]', Told({"type": "blur"})),
        ('["ping", "1"]', Ping("1")),
    ],
)  # fmt: skip
def test_what_the_page_says_is_understood_within_bounds(text: str, said: serving.Said) -> None:
    assert serving.read_message(text) == said


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", "[1]", '["stdin"]', '["stdin", 5]', '["stdin", ""]', '["quit"]', '["exit", 1]',
     '["deliver_chunk_request", {"key": "x", "size": 1}]', '["resize", 5]', json.dumps(["ping", "p" * 33]),
     json.dumps(["stdin", "x" * (serving.TYPED_BYTES_MAX + 1)]), "[" * 60_000, "9" * 60_000],
)  # fmt: skip
def test_whatever_else_it_says_is_dropped(text: str) -> None:
    assert serving.read_message(text) is None
    assert serving.read_message(json.dumps(["stdin", "x" * serving.TYPED_BYTES_MAX])) is not None


@pytest.mark.parametrize(
    ("cells", "size"),
    [("100", 100), ("0", 20), ("999999999", 400), ("9" * 5000, 80), ("-5", 80), (None, 80), ("\u0661", 80)],
)
def test_a_size_of_the_address_is_bounded_too(cells: Any, size: int) -> None:
    assert serving.size_of(cells, "30") == (size, 30)


def test_keys_cannot_pass_for_an_order_to_the_process() -> None:
    order = serving.packet(Told({"type": "quit"}))
    typed = serving.packet(Typed(order))
    assert order[:1] == b"M" and typed[:1] == b"D"
    assert serving.packet_size_bytes(typed) == len(order) == len(typed) - serving.PACKET_HEADER_BYTES
    with pytest.raises(ValueError, match="bytes"):
        serving.packet_size_bytes(b"D\xff\xff\xff\xff")
    assert not math.isinf(serving.packet_size_bytes(b"D\x00\x00\x00\x00"))


# ---- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("serve", "--socket", "x", "--bind", OTHER[0]), "is reached from other machines"),
        (("serve",), "say what is shown"),
        (("serve", "--socket", "x", "--replay", "y"), "say what is shown"),
        (("serve", "--socket", "x", "--theme", "pink"), "there is no theme"),
        (("--read-only", "serve", "--socket", "x"), "options go after serve"),
        (("serve", "--socket", "x", "--quiet"), "--quiet would not"),
        (("serve", "--socket", "x"), "--url-file"),  # its start URL is not printed into a log
        (("--socket", "nowhere.sock"), "silo approvals"),
    ],
)
def test_the_command_says_what_it_does_not_do(words: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(cli_serve.program, [*words])
    assert result.exit_code == 2 and says in result.stderr and "token" not in result.stderr


def test_a_console_process_has_no_option_for_a_key_and_is_given_no_more_than_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEXTUAL_LOG", "log")
    monkeypatch.setenv("OPERATOR_SECRET", "1")
    environment = cli_serve.console_environment()
    assert environment["TEXTUAL_DRIVER"].endswith("WebDriver")
    assert not {"TEXTUAL_LOG", "OPERATOR_SECRET"} & environment.keys()
    shown = CliRunner().invoke(cli_serve.session_program, ["--help"], env={"COLUMNS": "200"}).stdout
    assert "--socket" in shown and "key" not in shown.lower() and "certificate" not in shown.lower()
    given = CliRunner().invoke(cli_serve.session_program, ["--lifeline", "0", "--operator-key", "k"])
    assert given.exit_code == 2


@pytest.mark.parametrize(
    ("hosts", "headers", "socket", "answered"),
    [
        ([], {}, False, False),
        (["evil.example:8123"], {}, False, False),
        (["localhost:8123"], {}, False, False),
        (["127.0.0.1:8124"], {}, False, False),
        (["127.0.0.1"], {}, False, False),
        ([*OWN, "evil.example"], {}, False, False),
        (OWN, {"origin": "http://evil.example"}, False, False),
        (OWN, {"origin": "null"}, False, False),
        (OWN, {}, True, False),
        (OWN, {"origin": "https://127.0.0.1:8123"}, True, False),
        (OWN, {"origin": "http://127.0.0.1:8124"}, True, False),
        (OWN, {"origin": HERE.origin, "sec-fetch-site": "same-site"}, True, False),
        (OWN, {"sec-fetch-site": "cross-site"}, False, False),
        (OWN, {"sec-purpose": "prefetch;prerender"}, False, False),
        (OWN, {}, False, True),
        ([HERE.authority.upper()], {"sec-fetch-site": "none"}, False, True),
        (OWN, {"origin": HERE.origin, "sec-fetch-site": "same-origin"}, True, True),
        (OWN, {"origin": HERE.origin}, True, True),
    ],
)
def test_a_request_of_another_page_or_name_is_refused_and_its_own_is_answered(
    hosts: list[str], headers: dict[str, str], socket: bool, answered: bool
) -> None:
    refusal = serving.refuse_stranger(HERE, hosts, headers, socket=socket)
    assert (refusal is None) is answered
    if refusal is not None:
        assert refusal.status == 403 and not any(value in refusal.text for value in [*hosts, *headers.values()])
