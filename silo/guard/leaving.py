"""This silo leaves its run for good, by a person's order: nothing more of it leaves here, and the coordinator is told.

That it left is on the disk before anything else, so a restart does not go on with the run, and a plan of that name is
declined ever after. What was held ends, and what lay in the outbox is dropped: whether it had arrived stays open. The
goodbye is `control.abstain` with round 0, said again until it is answered; the coordinator then waits for this silo no
more, and keeps what it had already taken. The silo stays in the federation: the plan of the next run is looked at as
usual.

Does not take back: what was sent before. Does not stop: a coordinator that says nothing of the goodbye to the others;
it is in this silo's log, and so is its answer.
"""

from __future__ import annotations

import logging

from fedsilo.protocol.errors import DeniedError
from silo.guard.conversation import Conversation
from silo.guard.gate import Gate
from silo.guard.ledger import LEFT, Ledger

_log = logging.getLogger("fedsilo.silo")

RUN_LEFT = "RUN_LEFT"  # reason of what is dropped
_GOODBYE = "goodbye"


class Leaving:
    """Args:
    ledger, gate, talk: the guard's parts.
    """

    def __init__(self, *, ledger: Ledger, gate: Gate, talk: Conversation) -> None:
        self._ledger = ledger
        self._gate = gate
        self._talk = talk
        self._due = [
            run["run"] for run in ledger.runs()
            if run["state"] == LEFT and not ledger.remembered_of_run(run["run"], _GOODBYE)
        ]  # fmt: skip

    def begin(self, run: str) -> None:
        """Nothing of the run is sent any more, also after a restart.

        Raises:
            OperationError: the ledger, or the log, takes nothing.
        """
        self._ledger.end_run(run, LEFT)
        self._due.append(run)
        for item in self._ledger.outbox("allowed"):
            if item.run == run:
                self._gate.record(
                    "egress.indeterminate", kind=item.kind, run=run, round=item.round, step=item.step,
                    reasons=[RUN_LEFT], link={"decision": item.decision_seq}, direction="egress",
                )  # fmt: skip
                self._ledger.settle_outbox(item.id, "dropped")

    def say_goodbye(self) -> None:
        """Of each run that was left and whose goodbye is not known to have been heard.

        Raises:
            UnreachableError, NotAllowedError, PeerError: not yet; it is said again.
        """
        for run in list(self._due):
            try:
                self._talk.abstain(run)
            except DeniedError as error:
                _log.warning("run %s: the goodbye may not be said, so others wait up to each deadline: %s", run, error)
            self._ledger.remember_of_run(run, _GOODBYE, "said")
            self._due.remove(run)
            self._talk.witness()
