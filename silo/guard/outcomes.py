"""What became of a message on its way out, in the log and in the outbox: denied, sent, answered, dropped, not known.

What no record takes does not leave: it is denied, and the log says that there was something (P2). So a trainer cannot
end the guard with a message that is allowed and too long to be written down (T3, T24).
Does not stop: a record that is written and says too little; what stands in it is in `records.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from fedsilo.treaty.audit.record import COUNT_MAX, RecordError
from fedsilo.treaty.errors import UnreachableError, WireCode
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from policies.engine import Decision, Facts
from silo.guard.donor_pools import remember_taken
from silo.guard.judge import Judge
from silo.guard.ledger import Ledger, OutboxItem
from silo.guard.messages import Allowed, Denied
from silo.guard.records import overruled


class Outcomes:
    """Args:
    judge: records.
    ledger: holds the outbox.
    coordinator_id: to whom everything goes.
    """

    def __init__(self, judge: Judge, ledger: Ledger, coordinator_id: str) -> None:
        self._judge = judge
        self._ledger = ledger
        self._coordinator_id = coordinator_id

    def denied(self, facts: Facts, decision: Decision, digests: Mapping[str, Any], **recorded: Any) -> Denied:
        """A refusal with everything it rests on, as far as a record takes that.

        Args:
            facts: the decision's.
            decision: a deny.
            digests: of the payload, as they may stand in the log.
            recorded: as `Judge.record_decision`.

        Raises:
            LogFullError, OperationError: not recorded; the gate is halted.
        """
        self._ledger.payloads.drop_begun()  # or what is denied would take the room that its record needs
        try:
            self._judge.record_decision(facts, decision, digests, **recorded)
        except RecordError as error:
            return self.unrecorded(facts, decision, digests, error)
        return Denied(decision, facts)

    def unrecorded(
        self, facts: Facts, decision: Decision, digests: Mapping[str, Any], error: RecordError, *, kept: str = ""
    ) -> Denied:
        """A message whose decision no record takes is denied, whatever the rules said.

        Args:
            facts: of the message.
            decision: of the rules.
            digests: of the payload, as they may stand in the log.
            error: why it cannot be recorded.
            kept: digest of the payload, where its bytes were kept already; they go, unless something else needs them.

        Raises:
            LogFullError, OperationError: not recorded or not removed; the gate is halted.
        """
        if kept:
            with self._judge.halting():
                self._ledger.drop_payloads([kept])
        self._judge.record(
            "egress.decision", kind=facts["kind"], decision="deny", reasons=[error.code], direction="egress",
            peer=self._coordinator_id, payload=dict(digests),
        )  # fmt: skip
        return Denied(overruled(decision, error.code, type(error).__name__), facts)

    def record(
        self, event: str, allowed: Allowed, *, carried: bool = False, links: Mapping[str, int] | None = None
    ) -> None:
        """What became of an allowed message. carried: in a file, which may get lost. links: more of them, by name.

        Of a message in a window of polls it is counted, and recorded when the window ends.
        """
        if allowed.window is not None:
            if event == "egress.sent":
                allowed.window.passed(len(allowed.payload))
            return
        self._judge.record(
            event, kind=allowed.kind, run=allowed.run, round=allowed.round, step=allowed.step, attempt=allowed.attempt,
            sequence=allowed.sequence, peer=self._coordinator_id, direction="egress",
            payload=self._judge.digests(allowed.kind, allowed.payload, allowed.digest),
            link={"decision": allowed.decision_seq, **(links or {})},
            **({"detail": {"carried": True}} if carried else {}),
        )  # fmt: skip

    def settle(self, allowed: Allowed) -> None:
        """It is out, and is not sent again."""
        if allowed.outbox_id is not None:
            with self._judge.halting():
                self._ledger.settle_outbox(allowed.outbox_id, "sent")

    def answered(self, allowed: Allowed, body: Message) -> None:
        """It is out, and this was said to it.

        Raises:
            UnreachableError: the coordinator is halted or stopping and took nothing; the message stays in the outbox.
        """
        halted = isinstance(body, pb.Refusal) and body.code == WireCode.HALTED
        if halted and allowed.outbox_id is not None:
            raise UnreachableError(
                f"the coordinator is halted or stopping: it did not take {allowed.kind}, which is sent again",
                hint="its people see why: `coordinator status`",
            )
        if isinstance(body, pb.Ack) and allowed.outbox_id is not None:
            # The coordinator's word for it, which this log need not be able to hold.
            told = {"peer_event": body.record} if 0 < body.record <= COUNT_MAX else {}
            self.record("egress.acked", allowed, links=told)
        plan = self._judge.view.plan
        if isinstance(body, pb.Ack) and plan is not None and plan.exchange == "round_end":
            with self._judge.halting():
                remember_taken(self._ledger, allowed)
        self.settle(allowed)

    def drop(self, item: OutboxItem, reasons: Sequence[str]) -> None:
        """What the outbox kept is never sent; recorded first."""
        self._judge.record(
            "egress.indeterminate", kind=item.kind, run=item.run, round=item.round, step=item.step,
            reasons=list(reasons), link={"decision": item.decision_seq}, direction="egress",
        )  # fmt: skip
        with self._judge.halting():
            self._ledger.settle_outbox(item.id, "dropped")
