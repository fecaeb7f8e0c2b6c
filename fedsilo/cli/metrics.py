"""`fedsilo metrics`: a daemon's state for Prometheus, once as text or served on loopback.

It is a reader of the control socket in a process of its own, so that neither guard nor coordinator opens a port for it
and a fault in it stops nothing.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated

import typer

from fedsilo.cli.daemons import ConfigOption, ContextOption, SocketOption, chosen_daemon
from fedsilo.cli.output import emit
from fedsilo.protocol.errors import UsageError


def metrics(
    context: ContextOption = "",
    socket: SocketOption = None,
    config: ConfigOption = None,
    listen: Annotated[
        str,
        typer.Option("--listen", metavar="ADDRESS:PORT", help="Serve /metrics on this loopback address until Ctrl-C."),
    ] = "",
    figures: Annotated[
        bool, typer.Option("--figures", help="Also newest values of training, such as reward: private at a silo.")
    ] = False,
) -> None:
    """State of a silo or the coordinator as Prometheus metrics.

    Without --listen they are printed once, in the text format, as node_exporter's textfile collector takes it.
    """
    from prometheus_client import generate_latest

    from fedsilo.cli import metrics_page

    place = loopback_of(listen) if listen else None
    daemon = chosen_daemon(context, socket, config)
    if place is not None:
        with metrics_page.serving(daemon, *place, figures=figures) as (url, wait):
            emit({"url": url}, f"{url}\nCtrl-C ends.")
            wait()
        return
    once = metrics_page.Reading(daemon, figures=figures)
    data = [
        {"name": sample.name, "labels": sample.labels, "value": sample.value}
        for family in once.collect()
        for sample in family.samples
    ]
    emit(data, lambda: generate_latest(once).decode().removesuffix("\n"))


def loopback_of(listen: str) -> tuple[str, int]:
    """Address and port of ADDRESS:PORT or [ADDRESS]:PORT. Raises UsageError: not of that form, or not loopback."""
    host, _, port = listen.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
    except ValueError as error:
        raise UsageError(f"--listen {listen!r} is no ADDRESS:PORT", hint="--listen 127.0.0.1:9464") from error
    if not 0 <= number <= 65535:
        raise UsageError(f"there is no port {number}", hint="--listen 127.0.0.1:9464")
    if not address.is_loopback:
        raise UsageError(
            f"{address} is not this machine alone, and the page asks for no login",
            hint="listen on 127.0.0.1 and put a proxy with TLS and a login before it",
        )
    return str(address), number
