"""What the reader asks for the screen on top: at once, again, and never so that it stops reading."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest

from certs.roles import Roles
from console import feed as feed_module
from console.feed import EVENTS_WAITING_MAX, QUESTIONS_MAX, SAMPLES_WAITING_MAX, Feed, Waiting
from fedsilo.control.client import Event
from fedsilo.control.server import ControlServer
from fedsilo.protocol.errors import NotAllowedError, NotFoundError, UnreachableError
from fedsilo.views.state import Snapshot
from tests.console.daemon import WAIT_SECONDS, Daemon, idle
from tests.console.states import Reading, coordinator, silo


class Reader:
    """A running feed and what it delivered."""

    def __init__(self, *daemons: Daemon) -> None:
        self.arrived: queue.Queue[Snapshot] = queue.Queue()
        self.daemons = daemons
        sources = iter(daemons)
        self.feed = Feed(lambda: next(sources, daemons[-1]), self.arrived.put)

    def until(self, holds: Callable[[Snapshot], bool]) -> Snapshot:
        """The first snapshot for which it holds. Raises AssertionError: there was none in time."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not holds(seen := self.arrived.get(timeout=WAIT_SECONDS)):
            assert time.monotonic() < deadline, seen
        return seen


@contextmanager
def reading(*daemons: Daemon) -> Iterator[Reader]:
    reader = Reader(*daemons)
    reader.feed.start()
    try:
        yield reader
    finally:
        for daemon in daemons:
            daemon.go_on.set()
            daemon.closed.set()
        reader.feed.stop()


def test_what_is_wanted_is_asked_at_once_again_and_then_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "ASK_INTERVAL_SECONDS", 0.05)
    daemon, count = idle(), iter(range(10_000))
    daemon.answers["outbox"] = lambda arguments: {"total": next(count), "before": arguments.get("before")}
    with reading(daemon) as reader:
        assert reader.until(lambda seen: seen.link.state == "live").answers == {}
        reader.feed.want({"outbox": ("outbox", {"limit": 100})})
        first = reader.until(lambda seen: "outbox" in seen.answers)
        again = reader.until(lambda seen: seen.answers["outbox"]["total"] > first.answers["outbox"]["total"])
        assert again.answered_at["outbox"] > first.answered_at["outbox"] and again.refused == {}
        reader.feed.want({"outbox": ("outbox", {"limit": 100, "before": 7})})
        other = reader.until(lambda seen: seen.answers.get("outbox", {}).get("before") == 7)
        assert set(other.answers) == {"outbox"}
        reader.feed.want({})
        assert reader.until(lambda seen: seen.answers == {}).link.state == "live"


def test_an_answer_to_another_question_is_never_shown_under_the_same_key() -> None:
    daemon = idle()
    daemon.answers["outbox"] = dict
    with reading(daemon) as reader:
        reader.feed.want({"page": ("outbox", {"before": 1})})
        reader.until(lambda seen: "page" in seen.answers)
        daemon.go_on.clear()
        reader.feed.want({"page": ("outbox", {"before": 2})})
        reader.feed.read_now()
        assert reader.until(lambda seen: "page" not in seen.answers).link.state == "live"
        daemon.go_on.set()
        assert reader.until(lambda seen: "page" in seen.answers).answers["page"] == {"before": 2}


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [(NotFoundError("there is no query budget"), "NOT_FOUND", "there is no query budget"),
     (NotAllowedError("bob may not", hint="alice may grant it"), "NOT_ALLOWED", "bob may not; alice may grant it"),
     (UnreachableError("did not answer within 5 s"), "UNREACHABLE", "did not answer within 5 s"),
     (ValueError("Expecting value"), "UNREADABLE", "the answer to budget cannot be read: ValueError: Expecting value")],
)  # fmt: skip
def test_a_refused_question_is_noted_and_the_rest_goes_on(error: Exception, code: str, text: str) -> None:
    daemon = idle()
    daemon.answers |= {"budget": error, "outbox": {"total": 3}}
    with reading(daemon) as reader:
        reader.feed.want({"limits": ("budget", {}), "outbox": ("outbox", {})})
        seen = reader.until(lambda seen: "outbox" in seen.answers and "limits" in seen.refused)
        assert seen.refused == {"limits": (code, text)} and "limits" not in seen.answers
        assert reader.until(lambda later: later.link.received_at > seen.link.received_at).link.state == "live"
        daemon.answers["budget"] = {"dp": "off"}
        reader.feed.read_now()
        assert reader.until(lambda seen: "limits" in seen.answers).refused == {}


@pytest.mark.slow
def test_a_slow_answer_makes_no_reading_late() -> None:
    daemon = idle()
    daemon.answers["audit"] = {"size": 1}
    with reading(daemon) as reader:
        daemon.go_on.clear()
        reader.feed.want({"audit": ("audit", {})})
        first = reader.until(lambda seen: bool(daemon.asked))
        later = reader.until(lambda seen: seen.link.received_at > first.link.received_at + 0.6)  # a reading after
        assert later.link.state == "live" and "audit" not in later.answers
        daemon.go_on.set()
        assert reader.until(lambda seen: "audit" in seen.answers).answers["audit"] == {"size": 1}


def test_a_run_record_that_is_refused_costs_its_figures_only() -> None:
    daemon = Daemon(coordinator())
    daemon.answers["run"] = NotFoundError("there is no run run-1")
    with reading(daemon) as reader:
        seen = reader.until(lambda seen: seen.state is not None)
        assert seen.link.state == "live" and seen.state.members[0].pass_at_1 is None  # type: ignore[union-attr]


def test_after_a_failure_the_same_is_asked_of_the_next_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PAUSE_SECONDS_MIN", 0.01)
    first, second = idle(), idle()
    first.answers["outbox"], second.answers["outbox"] = {"of": "first"}, {"of": "second"}
    with reading(first, second) as reader:
        with pytest.raises(ValueError, match="at most"):
            reader.feed.want({str(index): ("outbox", {}) for index in range(QUESTIONS_MAX + 1)})
        reader.feed.want({"outbox": ("outbox", {})})
        reader.until(lambda seen: seen.answers.get("outbox") == {"of": "first"})
        first.error = UnreachableError("it went away")
        seen = reader.until(lambda seen: seen.link.state == "disconnected")
        assert seen.answers["outbox"] == {"of": "first"}  # what was known stays, marked
        reader.until(lambda seen: seen.answers.get("outbox") == {"of": "second"})


def test_a_flood_of_samples_is_bounded_and_counted_and_displaces_nothing_else() -> None:
    waiting = Waiting()
    last = SAMPLES_WAITING_MAX + 12
    waiting.add(Event(1, "t", "release.held", {"release": "r1/hospital_a/0"}))
    for sequence in range(2, last):
        waiting.add(Event(sequence, "t", "metric" if sequence % 2 else "note.step", {}))
    waiting.add(Event(last, "t", "halted", {}))
    missed, *events = waiting.take()
    assert (missed.name, missed.fields) == ("events.missed", {"missed": 10})
    assert len(events) == SAMPLES_WAITING_MAX + 2 and [events[0].name, events[-1].name] == ["release.held", "halted"]
    assert [event.sequence for event in events] == sorted(event.sequence for event in events)
    assert waiting.take() == []
    for counts in (True, False):  # of what was before nothing counts as dropped
        for sequence in range(EVENTS_WAITING_MAX + 1):
            waiting.add(Event(sequence, "t", "release.held", {}), counts=counts)
        taken = waiting.take()
        assert [event.fields for event in taken if event.name == "events.missed"] == [{"missed": 1}] * counts
        assert len(taken) == EVENTS_WAITING_MAX + counts


class Eventful(Daemon):
    """With a real desk's events: those from before somebody watched, and those after."""

    def __init__(self, kept: int) -> None:
        super().__init__(silo())
        self.desk = ControlServer("hospital_a", b"", Roles("hospital_a", {}), lambda: datetime.now(UTC))
        self.desk._events = type(self.desk._events)(maxlen=kept)

    def snapshot(self) -> Reading:
        return Reading(self.state, sequence=self.desk.snapshot().sequence)

    def watch(self, since_sequence: int = 0) -> Iterator[Event]:
        while not self.closed.is_set():
            for event in self.desk.events_since(since_sequence, 0.05):
                since_sequence = event.sequence
                yield Event(event.sequence, event.time, event.name, json.loads(event.fields_json))


@pytest.mark.parametrize("kept", [100, 3])
def test_what_happened_before_the_console_opened_is_there_and_nothing_of_it_is_missed(kept: int) -> None:
    daemon = Eventful(kept)
    for number in range(5):
        daemon.desk.publish("message.decided", {"seq": number})
    with reading(daemon) as reader:
        shown = reader.until(lambda snapshot: len(snapshot.events) >= min(kept, 5))
        assert [event.text for event in shown.events] == [f"seq {number}" for number in range(5)][-kept:]
        assert shown.events_missed == 0
        daemon.desk.publish("message.decided", {"seq": 5})
        assert reader.until(lambda snapshot: len(snapshot.events) > min(kept, 5)).events[-1].text == "seq 5"


def test_a_daemon_that_cannot_be_read_is_said_to_be_that_and_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "PAUSE_SECONDS_MIN", 0.01)
    daemon = idle()
    whole = daemon.state
    daemon.state = ["not", "a", "state"]  # type: ignore[assignment]
    with reading(daemon) as reader:
        seen = reader.until(lambda seen: seen.link.state == "disconnected")
        assert "cannot be read: AttributeError" in seen.link.cause
        daemon.closed.clear()
        daemon.state = whole
        assert reader.until(lambda seen: seen.link.state == "live").site == "hospital_a"
