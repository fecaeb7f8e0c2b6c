"""A daemon's state as Prometheus metrics, and the page that Prometheus scrapes, read from the daemon's control socket
at each request.

Counts, bytes, states and times: what any reader of the control socket sees. A silo's own figures of training (reward,
KL, entropy, ...) come only where they are asked for, since they tell something of its private prompts. Labels
are names of the federation's roster, message kinds, limits, runs and states, so their number is bounded by what the
operators wrote; a label's value is untrusted text all the same, so control characters in it are spelled out (T37).
Names follow the conventions of Prometheus: base units, `_total` for what only grows, `_timestamp_seconds` in Unix time.

The page is for anybody on this machine: it asks for no login. It answers only requests that name a loopback host, so
that no web page reaches it under another name (DNS rebinding). What that does not stop: other users of this machine.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedsilo import __version__
from fedsilo.cli.daemons import Daemon
from fedsilo.protocol.errors import ConflictError, NotFoundError, UnreachableError
from fedsilo.protocol.text import harmless

# ---- metrics ---------------------------------------------------------------------------------------------------------


State = Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """The answers of one daemon at one moment.

    Attributes:
        state: its snapshot's state; empty: it does not answer.
        limits: rows of the query `limits`, of a silo.
        traffic: rows of the query `traffic`, of a coordinator.
        curves: answer of the query `curves`; empty where figures of training were not asked for.
    """

    state: State
    limits: Sequence[Mapping[str, Any]] = ()
    traffic: Sequence[Mapping[str, Any]] = ()
    curves: Mapping[str, Any] = field(default_factory=dict)


def families(answers: Answers, version: str) -> Iterator[Metric]:
    """The metric families of one scrape; without a state only `fedsilo_up 0`."""
    state = answers.state
    yield _gauge("up", "1 while the daemon answers at its control socket.", 1.0 if state else 0.0)
    if not state:
        return
    party = "silo" if state.get("silo") else "coordinator"
    info = GaugeMetricFamily(
        "fedsilo_info", "Who this is; always 1.", labels=("party", "name", "federation", "version")
    )
    info.add_metric(_labels(party, state.get(party, ""), state.get("federation", ""), version), 1)
    yield info
    audit = state.get("audit") or {}
    yield _gauge("halted", "1 while nothing may leave until a person released the halt.", bool(state.get("halted")))
    yield _counter("audit_records", "Records in the audit log.", audit.get("size", 0))
    yield _gauge("audit_broken", "1 once a verification of the audit log found a break.", bool(audit.get("broken")))
    yield from _of_silo(answers) if party == "silo" else _of_coordinator(answers)
    yield from _figures(answers.curves)


def _of_silo(answers: Answers) -> Iterator[Metric]:
    state = answers.state
    left = list(state.get("left") or ())
    yield _table(
        "sent_messages", "Messages that left this site.", "kind", ((e["kind"], e["messages"]) for e in left), _C
    )
    yield _table("sent_payload_bytes", "Payload bytes that left.", "kind", ((e["kind"], e["bytes"]) for e in left), _C)
    yield _gauge("held_releases", "Releases that wait for people.", len(state.get("held") or ()))
    yield _gauge("round", "Round of the run in progress; 0 without one.", state.get("round", 0))
    yield _gauge("step", "GRPO step in the round.", state.get("step", 0))
    yield _gauge("paused", "1 while the trainer begins no further step.", bool(state.get("paused")))
    yield _table("phase", "1 for what the silo does.", "phase", [(str(state.get("phase", "")), 1)])
    link = state.get("coordinator") or {}
    yield _gauge("coordinator_link_up", "1 while the coordinator is reached.", link.get("link") == "live")
    yield from _time("coordinator_contact", "Last answer of the coordinator.", link.get("last_contact"))
    yield from _time("certificate_expiry", "Until when this site's certificate holds.", state.get("certificate_until"))
    donors = state.get("donors") or {}
    yield _counter("donors_used", "Other silos' answers trained on.", donors.get("used", 0))
    yield _counter("donors_wanted", "Other silos' answers that prompts could use.", donors.get("wanted", 0))
    names = ("kind", "limit", "window", "unit")
    used = GaugeMetricFamily("fedsilo_limit_used", "What the policy's limit counts, so far.", labels=names)
    most = GaugeMetricFamily("fedsilo_limit_max", "The policy's limit.", labels=names)
    for row in answers.limits:
        labels = _labels(*(row[name] for name in names))
        used.add_metric(labels, row["used"])
        most.add_metric(labels, row["max"])
    yield used
    yield most


def _of_coordinator(answers: Answers) -> Iterator[Metric]:
    state = answers.state
    runs, silos = list(state.get("runs") or ()), list(state.get("silos") or ())
    counts: dict[str, int] = {}
    for run in runs:
        counts[str(run["state"])] = counts.get(str(run["state"]), 0) + 1
    yield _table("runs", "Runs by state.", "state", sorted(counts.items()))
    at_work = [run for run in runs if run.get("started_at") and not run.get("ended_at")]
    yield _table("run_round", "Newest round of a run at work.", "run", ((r["run"], r["round"]) for r in at_work))
    yield _table("run_rounds", "Rounds of its plan.", "run", ((r["run"], r["rounds"]) for r in at_work))
    joined = GaugeMetricFamily("fedsilo_silo_state", "1 for the silo's state.", labels=("silo", "state"))
    for row in silos:
        joined.add_metric(_labels(row["silo"], row["state"]), 1)
    yield joined
    yield _table("silo_round", "Round that the silo last told.", "silo", ((e["silo"], e["round"]) for e in silos))
    yield _table("silo_step", "GRPO step that the silo last told.", "silo", ((e["silo"], e["step"]) for e in silos))
    for name, key, about in (
        ("silo_seen_timestamp_seconds", "last_seen", "When the silo was last seen."),
        ("silo_certificate_expiry_timestamp_seconds", "certificate_until", "Until when the silo's certificate holds."),
    ):
        told = ((row["silo"], seconds_of(row.get(key))) for row in silos)
        yield _table(name, about, "silo", ((silo, at) for silo, at in told if at is not None))
    names = ("silo", "direction", "kind")
    messages = CounterMetricFamily("fedsilo_messages", "Messages exchanged.", labels=names)
    size = CounterMetricFamily("fedsilo_payload_bytes", "Payload bytes exchanged.", labels=names)
    for row in answers.traffic:
        labels = _labels(*(row[name] for name in names))
        messages.add_metric(labels, row["messages"])
        size.add_metric(labels, row["bytes"])
    yield messages
    yield size


def _figures(curves: Mapping[str, Any]) -> Iterator[Metric]:
    newest = GaugeMetricFamily(
        "fedsilo_figure",
        "Newest value of a figure of training (docs/reference/figures.md).",
        labels=("run", "figure", "silo"),
    )
    for each in curves.get("series", ()):
        if each["points"] and _is_number(value := each["points"][-1]["value"]):
            newest.add_metric(_labels(curves["run"], each["name"], each["silo"] or ""), value)
    if newest.samples:
        yield newest


def seconds_of(text: Any) -> float | None:
    """Unix seconds of an ISO 8601 time with its zone; None for one that is empty, unreadable or without a zone."""
    if _is_number(text):
        return float(text) or None
    try:
        read = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return read.timestamp() if read.tzinfo else None


_G: type[Metric] = GaugeMetricFamily
_C: type[Metric] = CounterMetricFamily


def _labels(*values: Any) -> list[str]:
    return [harmless(value) for value in values]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fedsilo_{name}", about, value=float(value))


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(f"fedsilo_{name}", about, value=float(value))


def _time(name: str, about: str, text: Any) -> Iterator[Metric]:
    if (at := seconds_of(text)) is not None:
        yield _gauge(f"{name}_timestamp_seconds", about, at)


def _table(name: str, about: str, label: str, rows: Iterable[tuple[Any, float]], of: type[Metric] = _G) -> Metric:
    family: Any = of(f"fedsilo_{name}", about, labels=(label,))  # type: ignore[call-arg]
    for value, number in rows:
        family.add_metric(_labels(value), number)
    return family  # type: ignore[no-any-return]


# ---- the page --------------------------------------------------------------------------------------------------------


REQUEST_SECONDS_MAX = 5.0  # for a client to send its request


class Reading(Collector):
    """Reads a daemon once, when it is made.

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
        """Log nothing: whoever reaches the port would decide how long the log grows."""
