"""What was let out and is not known to have arrived: the same bytes, once more under a new sequence.

Its facts are judged again by the policy in force, which may be tighter than the one that let it out (T34). It was
counted against every limit then, and is not a second time.
Does not stop: a message that had arrived and was let out by a looser policy; what is sent is out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from google.protobuf.message import Message

from fedsilo.treaty.errors import DeniedError, NotFoundError, OperationError, VerificationError
from fedsilo.treaty.wire.codec import Buffer
from silo.guard.judge import Judge
from silo.guard.ledger import Ledger, OutboxItem
from silo.guard.messages import Allowed, Inbound, NotSent, Sent
from silo.guard.outcomes import Outcomes

_log = logging.getLogger("fedsilo.silo")


def in_turn(allowed: Allowed, ledger: Ledger, transmit: Callable[[Allowed], Sent]) -> Inbound:
    """Send what was just allowed, unless something that was allowed before it still waits: content leaves in the order
    in which it was allowed. With the last update the coordinator closes a round, and refuses answers that come later.

    Returns:
        what the coordinator answers.

    Raises:
        NotSent: it waits behind that in the outbox, and both go out with the next turn. Further as `transmit`.
    """
    if any(item.id < (allowed.outbox_id or 0) for item in ledger.outbox("allowed")):
        raise NotSent(f"{allowed.kind} of round {allowed.round} waits behind what was allowed before it")
    return transmit(allowed).reply


def once_more(item: OutboxItem, *, judge: Judge, ledger: Ledger, outcomes: Outcomes) -> Allowed:
    """A message of the outbox, to be transmitted again.

    Raises:
        DeniedError: the policy says no by now, or its bytes are gone, or are not those that were allowed; recorded, and
            never tried again.
        OperationError: the ledger takes nothing; the gate is halted.
    """
    payload = _payload_of(item, ledger, outcomes)
    if reasons := judge.denied_by_now(item.kind, item.decision_seq):
        outcomes.drop(item, reasons)
        raise DeniedError(f"{item.kind} waited to be sent, and this site's policy does not let it out any more")
    with judge.halting():
        attempt = ledger.count_attempt(item.id)
        sequence = ledger.next_sequence(item.run)
    place = item.kind, item.run, item.round, item.step
    return Allowed(*place, payload, item.digest, item.decision_seq, sequence, attempt, item.id)


def answered(item: OutboxItem, sequence: int, body: Message, *, ledger: Ledger, outcomes: Outcomes) -> None:
    """A message of the outbox that left under a sequence, in a file, was answered. Where its bytes are gone, that is
    recorded in place of the answer: it is not sent again either.

    Raises:
        UnreachableError: as `Outcomes.answered`.
    """
    try:
        payload = _payload_of(item, ledger, outcomes)
    except DeniedError as error:
        _log.warning("%s", error.message)
        return
    place = item.kind, item.run, item.round, item.step
    sent = Allowed(*place, payload, item.digest, item.decision_seq, sequence, item.attempts, item.id)
    outcomes.answered(sent, body)


def _payload_of(item: OutboxItem, ledger: Ledger, outcomes: Outcomes) -> Buffer:
    try:
        return ledger.payloads.read(item.digest)
    except (NotFoundError, OperationError, VerificationError) as error:
        outcomes.drop(item, [error.code])
        raise DeniedError(f"{item.kind} cannot be sent again: {error.message}", code=error.code) from error
