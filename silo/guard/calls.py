"""The coordinator's turn, over a line: hello, what is left in the outbox, then a poll or a heartbeat.

The silo polls only when it is the coordinator's turn: a long poll when nothing is to do, a short one while a release is
held, none while the trainer works (then a heartbeat every few seconds, and a poll when an answer says that something
waits).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fedsilo.audit.record import RecordError
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.errors import PeerError, WireCode
from silo.guard.conversation import Conversation, seconds_between
from silo.guard.gate import Gate
from silo.guard.ledger import Ledger
from silo.guard.messages import Inbound
from silo.guard.run import RunManager
from silo.guard.transcripts import Agreement

LONG_POLL_SECONDS = 3.0  # also how long an ending daemon may wait for the exchange in flight
SHORT_POLL_SECONDS = 1.0
HEARTBEAT_SECONDS = 5.0


class Exchange(Protocol):
    """How a silo and its coordinator come to speak: over a line, or by files (`transfer.FileExchange`)."""

    def turn(self) -> None:
        """What can be said and heard now. Raises what gate, runs and conversation do."""

    def beat(self) -> None:
        """Show that this silo is there, where nothing was said for a while. Raises what the gate does."""

    @property
    def waits(self) -> bool:
        """The next turn waits for the other side by itself, or has something to do at once."""


class Calls:
    """Args:
    gate, ledger, talk, agreement, runs: the guard's parts.
    rung: the isolation of the trainer, as it was probed.
    monotonic: seconds.
    """

    def __init__(
        self, gate: Gate, ledger: Ledger, talk: Conversation, agreement: Agreement, runs: RunManager, *,
        rung: Callable[[], str], monotonic: Callable[[], float],
    ) -> None:  # fmt: skip
        self._gate = gate
        self._ledger = ledger
        self._talk = talk
        self._agreement = agreement
        self._runs = runs
        self._rung = rung
        self._monotonic = monotonic

    @property
    def waits(self) -> bool:
        run = self._runs.run
        return run is None or not run.busy or self._talk.poll_now  # the poll itself is the wait

    def turn(self) -> None:
        if not self._talk.joined:
            self._talk.join(self._rung())
            return
        for item in self._ledger.outbox("allowed"):
            if not self._runs.retry(item):
                return
        self._runs.leaving.say_goodbye()
        if (run := self._runs.run) is not None:
            run.advance()
        if self._talk.relay():
            return  # the next round opens once enough parties have countersigned our log
        # A lost poll may not silence our signature while the trainer works.
        signs = self._agreement.waiting is not None and self._quiet_seconds >= SHORT_POLL_SECONDS
        if run is None or not run.busy or self._talk.poll_now or signs:
            self._poll(0.0 if run is not None and run.busy else self._poll_seconds())
        else:
            self.beat()

    def beat(self) -> None:
        if self._quiet_seconds >= HEARTBEAT_SECONDS:
            self._talk.say("control.heartbeat", pb.Heartbeat())

    @property
    def _quiet_seconds(self) -> int:
        return seconds_between(self._talk.last_sent, self._monotonic())

    def _poll_seconds(self) -> float:
        run = self._runs.run
        soon = self._runs.plan_held or bool(self._ledger.releases("held")) or (run is not None and run.paused)
        return SHORT_POLL_SECONDS if soon else LONG_POLL_SECONDS

    def _poll(self, wait_seconds: float) -> None:
        self._talk.poll_now = False
        body = pb.Poll(
            wait_milliseconds=int(wait_seconds * 1000), acknowledged_sequence=self._ledger.acknowledged,
            countersignature=self._agreement.countersignature,
        )  # fmt: skip
        item = self._talk.say("control.poll", body, wait_seconds=wait_seconds)
        if item.kind in {"control.ack", "control.refusal"}:
            return
        if take_in(item, self._runs, self._ledger, self._gate):
            # Something came, so more may wait; the answer to what is said while the trainer works tells as much.
            self._talk.poll_now = self._runs.run is None or not self._runs.run.busy
        else:
            self._talk.retry_at = self._monotonic() + SHORT_POLL_SECONDS


def take_in(item: Inbound, runs: RunManager, ledger: Ledger, gate: Gate) -> bool:
    """Act on an item of the coordinator's outbox and acknowledge it. False: it is a plan that waits for persons, and it
    comes again. Raises PeerError: it cannot be written down; further as `RunManager.take_in`."""
    try:
        taken = runs.take_in(item)
    except RecordError as error:
        gate.record(
            "ingress.decision", kind="unknown", decision="deny", reasons=[error.code], direction="ingress",
            peer=gate.policy.file.federation.coordinator,
        )  # fmt: skip
        raise PeerError(WireCode.MALFORMED, f"what came cannot be written down: {error.message}") from error
    if taken:
        ledger.acknowledge(item.sequence)
    else:
        runs.plan_held = True  # it comes again with every poll; do not spin on it
    return taken
