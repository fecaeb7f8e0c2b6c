"""The page that Prometheus scrapes, read from a daemon's control socket at each request.

It is for anybody on this machine: it asks for no login. It answers only requests that name a loopback host, so that no
web page reaches it under another name (DNS rebinding). What that does not stop: other users of this machine.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from fedsilo import __version__
from fedsilo.cli.daemons import Daemon
from fedsilo.cli.exposition import Answers, families
from fedsilo.protocol.errors import ConflictError, NotFoundError, UnreachableError

REQUEST_SECONDS_MAX = 5.0  # for a client to send its request


class Reading(Collector):
    """One reading of a daemon, made at once.

    Raises:
        UnreachableError: it does not answer. ConflictError: another answers than was named.
    """

    def __init__(self, daemon: Daemon, *, figures: bool) -> None:
        self._families = list(families(_answers(daemon, figures=figures), __version__))

    def collect(self) -> list[Metric]:
        return self._families


class Scrape(Collector):
    """A new reading each time; a daemon that does not answer is `fedsilo_up 0` and no failed scrape."""

    def __init__(self, daemon: Daemon, *, figures: bool) -> None:
        self._daemon, self._figures = daemon, figures

    def collect(self) -> Iterable[Metric]:
        try:
            return Reading(self._daemon, figures=self._figures).collect()
        except (UnreachableError, ConflictError):
            return list(families(Answers({}), __version__))


def _answers(daemon: Daemon, *, figures: bool) -> Answers:
    with daemon.connect() as client:
        state = client.snapshot().state
        is_silo = bool(state.get("silo"))
        limits = client.query("limits", {})["rows"] if is_silo else ()
        traffic = client.query("traffic", {}) if state and not is_silo else ()
        curves: dict[str, Any] = {}
        if figures and state:
            try:
                curves = client.query("curves", {})
            except NotFoundError:  # no run yet
                curves = {}
        return Answers(state, limits, traffic, curves)


@contextmanager
def serving(daemon: Daemon, host: str, port: int, *, figures: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve until the block ends; gives the page's URL and what waits for ever. Raises ConflictError: port in use."""
    server_class: type[_Server] = _Server6 if ":" in host else _Server
    try:
        server: WSGIServer = make_server(host, port, application(daemon, figures=figures), server_class, _Handler)
    except OSError as error:
        told = f"{host}:{port} cannot be listened on: {error.strerror}"
        raise ConflictError(told, hint="--listen 127.0.0.1:0 takes a free port") from error
    with server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{server.server_port}/metrics", thread.join
        finally:
            server.shutdown()


def application(daemon: Daemon, *, figures: bool) -> Callable[..., Iterable[bytes]]:
    """The WSGI application: /metrics for requests that name a loopback host, 404 and 421 for all others."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Scrape(daemon, figures=figures))
    page = make_wsgi_app(registry)

    def answer(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if not _names_loopback(environment.get("HTTP_HOST", "")):
            return _refused(start, "421 Misdirected Request")
        if environment.get("PATH_INFO") != "/metrics" or environment.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            return _refused(start, "404 Not Found")
        return page(environment, start)  # type: ignore[no-any-return]

    return answer


def _names_loopback(host: str) -> bool:
    name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _refused(start: Callable[..., Any], status: str) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{status}\n".encode()]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS_MAX

    def log_message(self, format: str, *arguments: Any) -> None:
        """Whoever reaches the port would decide how long the log grows."""
