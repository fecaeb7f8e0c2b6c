"""`fedsilo watch`: a daemon's events as plain lines, for screen readers, logs and programs. Nothing is drawn.

Nobody takes a list with holes for all that happened. Sequences count up by one at the daemon
(`fedsilo.control.server`), which says itself what it has forgotten. What is lost after that, on the way or by a reader,
shows here as a sequence that was left out. A daemon that was started anew counts from another number and says that an
unknown number, -1, is missing.
Does not notice: that a daemon lost the file in which it counts its lives, where it has told more events since than the
reader knew of.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsilo.cli.daemons import ConfigOption, ContextOption, SocketOption, chosen_daemon
from fedsilo.cli.output import (
    SCHEMA,
    OutputLostError,
    emit,
    facts_text,
    running,
    write_out,
)
from fedsilo.protocol.errors import FedSiloError, UnreachableError, UsageError
from fedsilo.protocol.text import harmless

if TYPE_CHECKING:
    from fedsilo.control.client import ControlClient, Event


# ---- gaps ------------------------------------------------------------------------------------------------------------


EVENTS_MISSED, EVENTS_A_LIFE = "events.missed", 10**9  # as in fedsilo/control/server.py, without loading gRPC


def gap_text(missed: int) -> str:
    """Return for people how many events are missing from the list."""
    return f"{'an unknown number of events is' if missed < 0 else f'{missed} events are'} missing here"


def up_to(events: Iterable[Event], newest: int) -> Iterator[Event]:
    """Yield the existing events up to the one of that sequence, without waiting for another."""
    for event in events:
        yield event
        if event.sequence >= newest:
            return


def gaps_told(events: Iterable[Event], since: int) -> Iterator[Event]:
    """The events, each once, and before one that does not follow the last an `events.missed` with the number. With
    `since` 0 the first there is comes first, whatever its number."""
    last = since
    for event in events:
        if event.name == EVENTS_MISSED:
            last = event.sequence
            yield event
            continue
        if event.sequence <= last:
            continue
        last = max(last, (event.sequence - 1) // EVENTS_A_LIFE * EVENTS_A_LIFE)  # that of its life before the first
        # a daemon keeps its newest events; one asked from the beginning says itself how many it has let go of
        if event.sequence > last + 1:
            missed = {"missed": event.sequence - last - 1}
            yield replace(event, sequence=event.sequence - 1, name=EVENTS_MISSED, fields=missed)
        last = event.sequence
        yield event


# ---- `fedsilo watch` -------------------------------------------------------------------------------------------------


def watch(
    context: ContextOption = "",
    socket: SocketOption = None,
    config: ConfigOption = None,
    once: Annotated[bool, typer.Option("--once", help="Only what has happened already; then end.")] = False,
    jsonl: Annotated[
        bool, typer.Option("--jsonl", help='One JSON object a line; the last has "terminal": true.')
    ] = False,
) -> None:
    """What happens at a silo or the coordinator, a line each, until it ends, --timeout is over or Ctrl-C is pressed.

    First one line of how things stand. Events that the daemon has forgotten, or that came faster than they were read,
    are said to be missing, with their number where it is known. With --json each is an envelope of its own, a line
    each; with --once and --json it is one envelope with all of them.
    """
    if jsonl and running().json_output:
        raise UsageError("--jsonl or --json, not both", hint="--json gives an envelope a line, --jsonl bare events")
    from fedsilo.control.client import timeout_chosen

    lines = _Lines(jsonl, at_once=once)
    seconds, begun = timeout_chosen.get(), time.monotonic()
    try:
        with chosen_daemon(context, socket, config).connect() as client:
            state = client.snapshot()
            lines.stands(state.state, state.time, state.sequence)
            for event in _events(client, state.sequence, once=once):
                lines.event(event)
    except FedSiloError as raised:
        error = raised
        if isinstance(raised, UnreachableError) and seconds is not None and time.monotonic() - begun >= seconds:
            hint = "nothing is wrong with the daemon by that; watch longer, or without an end: no --timeout"
            error = UnreachableError(f"the {seconds:g} s of --timeout are over", hint=hint, code="TIMEOUT")
        lines.end(error.code, error.message)
        if jsonl and not isinstance(raised, OutputLostError):  # told in its last line
            raise typer.Exit(error.exit_code) from raised
        raise error from raised
    except KeyboardInterrupt:
        lines.end("INTERRUPTED", "")
        raise
    lines.end("END", "")


def _events(client: ControlClient, last: int, *, once: bool) -> Iterator[Event]:
    if once and not last:
        return
    for event in gaps_told(client.watch(0), 0):
        yield event
        if once and event.sequence >= last:
            return


class _Lines:
    """Prints one line for each thing, in the chosen form."""

    def __init__(self, jsonl: bool, *, at_once: bool) -> None:
        self._jsonl, self._json = jsonl, running().json_output
        self._together: dict[str, Any] | None = {"state": None, "events": []} if at_once and self._json else None
        self._events, self._missed, self._sequence = 0, 0, 0

    def stands(self, state: dict[str, Any], time: str, sequence: int) -> None:
        from console.sharing import released_state

        party = str(state.get("party", "silo"))
        name = str(state.get("silo") or state.get("coordinator") or state.get("site", ""))
        data = {"name": "state", "time": time, "sequence": sequence, "party": party, "of": name}
        words = f"{time} {party} {name}: {_how(state)}"
        self._print(data | {"fields": released_state(state)}, words)

    def event(self, event: Event) -> None:
        data = {"name": event.name, "time": event.time, "sequence": event.sequence, "fields": event.fields}
        self._sequence = event.sequence
        if event.name == EVENTS_MISSED:
            number = int(event.fields["missed"])
            self._missed = -1 if number < 0 or self._missed < 0 else self._missed + number
            self._print(data, f"{event.time} {gap_text(number)}: read the state again")
            return
        self._events += 1
        self._print(data, f"{event.time} {event.name} {facts_text(event.fields)}".rstrip())

    def end(self, why: str, message: str) -> None:
        """The last line of --jsonl, or the one envelope. `missed` is -1 where their number is not known."""
        if self._together is not None and why == "END":
            emit({**self._together, "missed": self._missed})
        if self._jsonl:
            told = {"events": self._events, "missed": self._missed, "sequence": self._sequence}
            self._write({"terminal": True, "why": why, "message": message, **told})

    def _print(self, data: dict[str, Any], words: str) -> None:
        if self._jsonl:
            self._write({"schema": f"{SCHEMA}/stream", **data, "terminal": False})
        elif self._together is not None:
            if data["name"] == "state":
                self._together["state"] = data
            else:
                self._together["events"].append(data)
        elif self._json:
            emit(data)
        elif not running().quiet:
            write_out(harmless(words.replace("\n", " ")) + "\n")

    def _write(self, row: dict[str, Any]) -> None:
        write_out(json.dumps(row) + "\n")


def _how(state: dict[str, Any]) -> str:
    """Return the state as one sentence for people."""
    from fedsilo.protocol.rounds import silo_is_dead, silo_is_here

    if state.get("party") == "coordinator":
        silos, runs = state.get("silos", []), state.get("runs", [])
        run = f"run {runs[-1]['run']} {runs[-1]['state']}" if runs else "no runs yet"
        halted = f", HALTED: {state['halted']}" if state.get("halted") else ""
        here = sum(silo_is_here(each["state"]) for each in silos)
        dead = [f"{each['silo']} {each['state']}" for each in silos if silo_is_dead(each["state"])]
        named = f" ({', '.join(dead)})" if dead else ""
        return f"{here} of {len(silos)} silos here{named}, {run}{halted}"
    return facts_text({key: value for key, value in state.items() if isinstance(value, str | int | bool)})
