"""Orders to a daemon from the console: to a run or a silo, about a kind that is halted, and about a held release.

An order is made from what is shown and says what it is about, what it does, and how it is undone; `order_of` makes the
same one again while nothing of that has changed, and that is asked until it is signed. What ends something or lets
something leave again takes a typed word, the rest one labelled key. A release is put off, or its payload read, under
the same conditions as it is answered, and the daemon's log says who did. Pure.

Does not stop: an order that its giver's role allows. The daemon asks for the role, carries it out, and records who. Nor
somebody who puts off until it expires: that is a refusal, and the log has both.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from fedsilo.control.answers import Halt, RunRow
from fedsilo.views.approvals import came_to
from fedsilo.views.lines import duration_text
from fedsilo.views.overview import EQUIVOCATION_KIND
from fedsilo.views.state import (
    CoordinatorState,
    Release,
    SiloState,
    Snapshot,
    halts_of,
    number,
    why_not_answer,
    why_not_change,
)

GOING_ON = ("running", "paused")
CAN_END = ("waiting", *GOING_ON)


@dataclass(frozen=True)
class Order:
    """One order, as its dialog shows it.

    Args:
        action: in `console.actions`.
        command: of the control API.
        about: what it is given to, in words.
        effect: what it does.
        undone: whether and how it can be taken back.
        verb: of the button or the labelled key.
        ended: what the daemon did then, such as "paused".
        bound: arguments of the command, all that the order is bound to.
        key: in lower case, confirms it; empty where a word is typed.
        word: what is typed; empty where a key confirms, or where one of several words does.
        word_is: what the word is, without telling it; empty where a key confirms.
        given: who gave the same already, where several have to.
    """

    action: str
    command: str
    about: str
    effect: str
    undone: str
    verb: str
    ended: str
    bound: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""
    word: str = ""
    word_is: str = ""
    given: tuple[str, ...] = ()
    request_id: str = field(default_factory=lambda: secrets.token_hex(16), compare=False)

    def arguments(self) -> Mapping[str, Any]:
        return self.bound

    def why_not(self, snapshot: Snapshot, person: str, now: float) -> str:
        """Why it cannot be given now, or nothing. The daemon asks all of it again."""
        if why := why_not_change(snapshot, now):
            return why
        there = order_of(self.action, snapshot, kind=text if isinstance(text := self.bound.get("kind"), str) else "")
        if isinstance(there, str):
            return there
        if (there.command, there.bound, there.word) != (self.command, self.bound, self.word):
            return f"what was shown has changed, now: {there.verb} {there.about}; look again"
        if person in there.given:
            return f"{person} gave this already; nobody counts twice"
        return ""

    def told(self, person: str, result: Mapping[str, Any]) -> str:
        ended = self.ended
        if self.action == "release_halt" and result.get("released") is not True:
            given = result.get("given")
            count = len(given) if isinstance(given, list) else 0
            ended = f"still halted, {count} of {result.get('needed')} approved its release"
        return f"{self.about.partition(',')[0]}: {ended}, by {person}{record_text(result)}"


def record_text(result: Mapping[str, Any]) -> str:
    """Return where the daemon's audit log has the command; empty where the daemon does not say, since the log's size
    names another record as soon as anything else was written."""
    number = result.get("record")
    return "" if number is None else f", audit record {number}"


def order_of(action: str, snapshot: Snapshot, *, kind: str = "") -> Order | str:
    """The order that an action would give now, or why there is none.

    Args:
        action: pause, start, abort, stop or release_halt.
        snapshot: what is shown.
        kind: for release_halt, the halted kind.
    """
    if snapshot.state is None:
        return "nothing is known of the daemon yet"
    at_coordinator = isinstance(snapshot.state, CoordinatorState)
    make = (_AT_COORDINATOR if at_coordinator else _AT_SILO).get(action)
    if make is None:
        where = "a silo" if at_coordinator else "the coordinator"
        return f"that is for the people of {where}: this is {'a coordinator' if at_coordinator else 'a silo'}"
    return make(snapshot, kind)


# ---- at a coordinator ------------------------------------------------------------------------------


def _run(snapshot: Snapshot, states: tuple[str, ...], otherwise: str) -> RunRow | str:
    run = snapshot.state.current if isinstance(snapshot.state, CoordinatorState) else None
    if run is None:
        return "no runs yet: fedsilo run submit run.yaml makes one"
    return run if run.state in states else f"run {run.run} is {run.state}{otherwise}"


def _about(run: RunRow) -> str:
    where = f"round {run.round} of {run.rounds}" if run.round else "no round yet"
    return f"run {run.run}, {run.method}, {where}, {len(run.silos)} silos"


def _pause_run(snapshot: Snapshot, kind: str) -> Order | str:
    run = _run(snapshot, GOING_ON, ": only one that runs can be paused")
    if isinstance(run, str):
        return run
    bound = {"run": run.run}
    if run.state == "paused":
        return Order(
            "pause", "run.resume", _about(run), "messages go out to the silos again, and deadlines run on",
            "P pauses it again.", "resume", "running", bound, key="r",
        )  # fmt: skip
    return Order(
        "pause", "run.pause", _about(run),
        "silos finish what they have, nothing more goes out to them, and no deadline passes",
        "P resumes it.", "pause", "paused", bound, key="p",
    )  # fmt: skip


def _start_run(snapshot: Snapshot, kind: str) -> Order | str:
    run = _run(snapshot, ("waiting",), ": only one that waits can be started")
    if isinstance(run, str):
        return run
    if run.silos:  # its plan has gone out
        return f"run {run.run} has its silos already; it begins once they took the plan in"
    members = snapshot.state.members if isinstance(snapshot.state, CoordinatorState) else ()
    here = sorted(member.silo for member in members if member.is_here)
    return Order(
        "start", "run.start", f"run {run.run}, {run.method}, waiting for silos",
        f"it does not wait for more silos: it begins with those that are here now ({', '.join(here) or 'none'})",
        "This cannot be undone; X aborts the run.", "start", "started", {"run": run.run, "silos": here},
        key="s",
    )  # fmt: skip


def _abort_run(snapshot: Snapshot, kind: str) -> Order | str:
    run = _run(snapshot, CAN_END, ": there is nothing to abort")
    if isinstance(run, str):
        return run
    return Order(
        "abort", "run.abort", _about(run), "every silo is told that it is over; the last committed adapter stays",
        "This cannot be undone.", "abort", "aborted", {"run": run.run, "round": run.round},
        word=str(run.round), word_is="the number of its round" if run.round else "0, as it has no round yet",
    )  # fmt: skip


# ---- at a silo -------------------------------------------------------------------------------------


def _pause_silo(snapshot: Snapshot, kind: str) -> Order | str:
    state = snapshot.state
    if not isinstance(state, SiloState) or not state.run:
        return "there is no run to pause or resume at this silo"
    about = f"silo {state.silo}, run {state.run}, round {state.round} of {state.rounds}"
    if state.paused:
        return Order(
            "pause", "resume", about, "its trainer goes on with the next step", "P pauses it again.", "resume",
            "resumed", {"run": state.run}, key="r",
        )  # fmt: skip
    return Order(
        "pause", "pause", about,
        "its trainer ends the step at hand and begins no other; the round's deadlines run on without it",
        "P resumes it.", "pause", "paused", {"run": state.run}, key="p",
    )  # fmt: skip


def _stop_silo(snapshot: Snapshot, kind: str) -> Order | str:
    state = snapshot.state
    if not isinstance(state, SiloState):
        return "there is no silo here"
    where = f", run {state.run}, round {state.round} of {state.rounds}" if state.run else ", in no run"
    return Order(
        "stop", "stop", f"silo {state.silo}{where}",
        "guard and trainer end; the open round goes on without this silo, and this console has nothing to read",
        "silo start begins it again.", "stop", "stopping", {"run": state.run}, word=state.silo,
        word_is="the name of this silo",
    )  # fmt: skip


def _release_halt(snapshot: Snapshot, kind: str) -> Order | str:
    halts = {halt.kind: halt for halt in halts_of(snapshot)}
    if not halts:
        return "nothing is halted here by its screens"
    if kind not in halts:
        return f"{kind} is not halted" if kind else "put the cursor on what is halted first (n)"
    halt = halts[kind]
    if not halt.digest:
        return f"what a release of {kind} is signed over is not told yet"
    return Order(
        "release_halt", "approvals.release", f"{kind}, {_given_text(halt)}", _released_effect(halt),
        "What leaves then cannot be called back; the next hits halt it again.", "release", "may leave again",
        {"kind": kind, "digest": halt.digest}, word=kind, word_is="the name of the kind", given=halt.given,
    )  # fmt: skip


def _given_text(halt: Halt) -> str:
    return f"halted, {len(halt.given)} of {halt.needed} approved its release"


def _released_effect(halt: Halt) -> str:
    what = "this silo sends again" if halt.kind == EQUIVOCATION_KIND else f"{halt.kind} leaves again under the policy"
    left = halt.needed - len(halt.given) - 1
    return f"{what}, once {left} more approved this too" if left > 0 else f"{what} at once"


_AT_COORDINATOR: Mapping[str, Callable[[Snapshot, str], Order | str]] = {
    "pause": _pause_run, "start": _start_run, "abort": _abort_run,
}  # fmt: skip
_AT_SILO: Mapping[str, Callable[[Snapshot, str], Order | str]] = {
    "pause": _pause_silo, "stop": _stop_silo, "release_halt": _release_halt,
}  # fmt: skip


DIGEST_TYPED_CHARACTERS = 4
MINUTES: Mapping[str, int] = {"1": 10, "2": 30, "3": 120}  # by the key that chooses them
_MINUTE_SECONDS = 60.0
SECONDS_MAX = 253_402_300_799  # the last second of the year 9999, beyond which `datetime` has none


@dataclass(frozen=True)
class ReleaseOrder(Order):
    """An order about one held release, as it was shown."""

    release: Release = field(kw_only=True)

    def why_not(self, snapshot: Snapshot, person: str, now: float) -> str:
        return why_not_answer(self.release, snapshot, now, approve=False)


@dataclass(frozen=True)
class Deferral(ReleaseOrder):
    def why_not(self, snapshot: Snapshot, person: str, now: float) -> str:
        if why := super().why_not(snapshot, person, now):
            return why
        until, time = number(self.bound.get("until_seconds")), snapshot.server_now(now)
        if until <= time:
            return "that time is over; choose again"
        if until >= self.release.expires_at:
            left = duration_text(self.release.expires_at - time)
            return f"it expires before that, in {left}: choose a shorter time, or answer it"
        return ""

    def told(self, person: str, result: Mapping[str, Any]) -> str:
        until = number(result.get("deferred_until")) or number(self.bound.get("until_seconds"))
        return f"put off by {person} until {clock_text(until)}{record_text(result)}; it expires all the same"


@dataclass(frozen=True)
class PayloadReading(ReleaseOrder):
    def told(self, person: str, result: Mapping[str, Any]) -> str:
        return f"read by {person}{record_text(result)}"


@dataclass(frozen=True)
class ReleaseAnswer(ReleaseOrder):
    """A yes or a no to what the screen showed. Sending it twice uses the same request id."""

    approve: bool = field(kw_only=True)

    def why_not(self, snapshot: Snapshot, person: str, now: float) -> str:
        if self.approve and person in self.release.given:
            return f"{person} approved it already; nobody counts twice"
        return why_not_answer(self.release, snapshot, now, approve=self.approve)

    def told(self, person: str, result: Mapping[str, Any]) -> str:
        record = record_text(result)
        if not self.approve:
            return f"rejected by {person} ({self.bound['reason_code']}){record}"
        given = result.get("given")
        count = f" {len(given)} of {result.get('needed')} approvals;" if isinstance(given, list) else ""
        return f"approved by {person};{count} now {came_to(result.get('state'))}{record}"


def approval(release: Release) -> ReleaseAnswer:
    """Return a yes: bound to the exact bytes, policy and revision, and to all facts that were shown."""
    opened = [finding.id for finding in release.noticed]
    return ReleaseAnswer(
        "approve", "approvals.approve", release.id, release.consequences.approve, "This cannot be undone.", "approve",
        "approved", _shown(release) | ({"acknowledged": opened} if opened else {}) | {"shown": release.shown},
        word=release.digest[-DIGEST_TYPED_CHARACTERS:], word_is="the last 4 characters of the digest",
        release=release, approve=True,
    )  # fmt: skip


def rejection(release: Release) -> ReleaseAnswer:
    """Return a no, whose reason a person gives yet (`with_reason`)."""
    return ReleaseAnswer(
        "reject", "approvals.reject", release.id, release.consequences.reject,
        "The release cannot be brought back.", "reject", "rejected", _shown(release), word_is="a reason code",
        release=release, approve=False,
    )  # fmt: skip


def with_reason(answer: ReleaseAnswer, code: str, note: str) -> ReleaseAnswer:
    """Return a no with its reason; bound to the bytes, policy and revision that were shown, as before."""
    return replace(answer, bound={**answer.bound, "reason_code": code, "reason": note})


def deferral(release: Release, minutes: int, time: float) -> Deferral:
    """Args:
    release: as it is shown.
    minutes: from then.
    time: seconds since 1970, the daemon's clock."""
    until = float(int(time + minutes * _MINUTE_SECONDS))
    return Deferral(
        "defer", "approvals.defer", release.id,
        f"until {clock_text(until)}, in {minutes} minutes, it does not count among what needs you. Others are asked as "
        "before, and it expires when it would",
        "It can be answered at any time.", "put off", "put off", _shown(release) | {"until_seconds": until}, key="d",
        release=release,
    )  # fmt: skip


def payload_reading(release: Release, person: str) -> PayloadReading:
    return PayloadReading(
        "payload", "approvals.payload", release.id,
        f"what would leave is shown here, and the audit log says that {person} read it; nothing is answered by it",
        "The record stays.", "read", "read", {"release": release.id, "digest": release.digest}, key="r",
        release=release,
    )  # fmt: skip


def choices(release: Release, time: float) -> dict[str, int]:
    """Minutes by key, those that end before the hold does."""
    return {key: minutes for key, minutes in MINUTES.items() if time + minutes * _MINUTE_SECONDS < release.expires_at}


def clock_text(seconds: float) -> str:
    """Such as 10:30Z, of seconds since 1970; a time that no calendar has becomes the nearest that one has."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), SECONDS_MAX), UTC).strftime("%H:%MZ")


def _shown(release: Release) -> dict[str, Any]:
    return {
        "release": release.id, "digest": release.digest, "policy_digest": release.policy.digest,
        "revision": release.revision,
    }  # fmt: skip
