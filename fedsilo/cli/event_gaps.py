"""A stream of events whose gaps are said: nobody takes a list with holes for all that happened.

Sequences count up by one at the daemon (`fedsilo.control.server`), which says itself what it has forgotten. What is
lost after that, on the way or by a reader, shows here as a sequence that was left out. A daemon that was started anew
counts from another number and says that an unknown number, -1, is missing.
Does not notice: that a daemon lost the file in which it counts its lives, where it has told more events since than the
reader knew of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsilo.control.client import Event

EVENTS_MISSED, EVENTS_A_LIFE = "events.missed", 10**9  # as in fedsilo/control/server.py, without loading gRPC


def gap_text(missed: int) -> str:
    """For people: so many events are not in the list."""
    return f"{'an unknown number of events is' if missed < 0 else f'{missed} events are'} missing here"


def up_to(events: Iterable[Event], newest: int) -> Iterator[Event]:
    """What there is already: the events to the one of that sequence, without waiting for another."""
    for event in events:
        yield event
        if event.sequence >= newest:
            return


def gaps_told(events: Iterable[Event], since: int) -> Iterator[Event]:
    """The events, each once, and before one that does not follow the last an `events.missed` with the number.

    Args:
        events: as the daemon sends them.
        since: sequence of the last event that is known; 0: the first there is comes first, whatever its number.
    """
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
