"""What was let out and is not known to have arrived: the same bytes, once more under a new sequence.

Its facts are judged again by the policy in force, which may be tighter than the one that let it out (T34). It was
counted against every limit then, and is not a second time.
Does not stop: a message that had arrived and was let out by a looser policy; what is sent is out.
"""

from __future__ import annotations

from fedsilo.treaty.errors import DeniedError, NotFoundError, OperationError, VerificationError
from silo.guard.judge import Judge
from silo.guard.ledger import Ledger, OutboxItem
from silo.guard.messages import Allowed
from silo.guard.outcomes import Outcomes


def once_more(item: OutboxItem, *, judge: Judge, ledger: Ledger, outcomes: Outcomes) -> Allowed:
    """A message of the outbox, to be transmitted again.

    Raises:
        DeniedError: the policy says no by now, or its bytes are gone, or are not those that were allowed; recorded, and
            never tried again.
        OperationError: the ledger takes nothing; the gate is halted.
    """
    try:
        payload = ledger.payloads.read(item.digest)
    except (NotFoundError, OperationError, VerificationError) as error:
        outcomes.drop(item, [error.code])
        raise DeniedError(f"{item.kind} cannot be sent again: {error.message}", code=error.code) from error
    if reasons := judge.denied_by_now(item.kind, item.decision_seq):
        outcomes.drop(item, reasons)
        raise DeniedError(f"{item.kind} waited to be sent, and this site's policy does not let it out any more")
    with judge.halting():
        attempt = ledger.count_attempt(item.id)
        sequence = ledger.next_sequence(item.run)
    place = item.kind, item.run, item.round, item.step
    return Allowed(*place, payload, item.digest, item.decision_seq, sequence, attempt, item.id)


def as_sent(item: OutboxItem, sequence: int, ledger: Ledger) -> Allowed:
    """A message of the outbox as it left under a sequence, for what is recorded of its answer."""
    place = item.kind, item.run, item.round, item.step
    payload = ledger.payloads.read(item.digest)
    return Allowed(*place, payload, item.digest, item.decision_seq, sequence, item.attempts, item.id)
