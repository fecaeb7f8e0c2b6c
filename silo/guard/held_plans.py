"""Plans that persons look at before this silo takes part in a run, and the no to a plan (threats T34, T36).

The coordinator takes a plan that was acknowledged for one that was accepted. So a plan is acknowledged only when it is
accepted here or when the no to it was heard, and each under its own sequence: what is said of one plan is nothing said
of another.
Does not stop: a coordinator that begins a run and counts a silo in that never said yes. Such a silo trains nothing and
sends nothing for it.
"""

from __future__ import annotations

import logging
from typing import Literal

from silo.guard.conversation import Conversation
from silo.guard.ledger import Ledger, Release
from silo.guard.messages import Inbound
from silo.guard.panel import Panel
from silo.guard.releases import Releases

_log = logging.getLogger("fedsilo.silo")

Ruling = Literal["taken", "accept", "decline", "wait"]
_SEQUENCE = "plan_sequence"


class HeldPlans:
    """Args:
    ledger: which names of runs are spent, and under which sequence a held plan first came.
    releases: the inbox where plans wait.
    panel: tells people.
    talk: says no to the coordinator.
    """

    def __init__(self, *, ledger: Ledger, releases: Releases, panel: Panel, talk: Conversation) -> None:
        self._ledger = ledger
        self._releases = releases
        self._panel = panel
        self._talk = talk

    def look(self, item: Inbound, *, busy: bool) -> Ruling:
        """What to do with a plan that the rules let in; one that asks for persons is held here.

        Args:
            item: the plan.
            busy: a run is open, so no other one can begin, whatever persons say.

        Returns:
            taken (nothing to do), accept (or refuse, as what cannot begin), decline, or wait (for persons: not taken in
            yet).
        """
        if state := self._ledger.run_state(item.run):
            # Said no to, or over: the name is spent. The coordinator takes silence for a yes, so it is told each time.
            return "taken" if state == "running" else "decline"
        if item.needs_approval is None or busy:
            return "accept"
        known = self._known(item.run)
        if not known:
            # Before the hold, so that no hold is without it. The first delivery counts at the coordinator.
            self._ledger.remember_of_run(item.run, _SEQUENCE, str(item.sequence))
            release = self._releases.hold_inbound(item)
            _log.warning("plan of run %s waits for approval as %s", item.run, release.id)
            self._panel.publish("release.held", {"release": release.id, "kind": release.kind})
            return "wait"
        if known[-1].digest != item.digest:
            _log.error("the coordinator sends two plans of run %s; it is declined", item.run)
            return "decline"
        if known[-1].state == "held":
            return "wait"
        # Approved just before this silo was killed?
        approved = known[-1].state == "approved" and self._releases.still_allowed(known[-1], item)
        return "accept" if approved else "decline"

    def decline(self, run: str) -> None:
        """Say no to a plan. Only when that was answered may the plan be acknowledged.

        Raises:
            UnreachableError, NotAllowedError, PeerError, DeniedError: it is not known to have been heard.
        """
        self.spend(run, "DECLINED")
        self._talk.decline(run)

    def spend(self, run: str, reason: str) -> None:
        """Nothing comes of this run here: its name is spent, and persons are not asked any more.

        Args:
            run: its name.
            reason: why, as a code for the log and for whoever was asked.
        """
        self.end_hold(run, reason)
        if not self._ledger.run_state(run):
            self._releases.deny_approved_plan(run)
        self._ledger.decline_run(run)

    def end_hold(self, run: str, reason: str) -> None:
        """Persons are not asked about this plan any more, since an answer would come too late."""
        for settled in self._releases.end_plan(run, reason):
            told = {"release": settled.release.id, "outcome": settled.outcome, "reason": reason}
            self._panel.publish("release.settled", told)

    def acknowledge(self, run: str) -> None:
        """The no to a held plan was heard, so it is taken in, as after a rule's no. Else it came once more and brought
        a second no of persons only (T18)."""
        for sequence in self._ledger.remembered_of_run(run, _SEQUENCE):
            self._ledger.acknowledge(int(sequence))

    def run_ended(self, run: str, outcome: str) -> None:
        """The coordinator ended a run that is not open here. Where persons still look at its plan, a yes would join a
        run that is over, and nothing would ever end it here. A run that was never heard of leaves no trace (T24)."""
        if self._ledger.run_state(run) or not self._known(run):
            return
        _log.warning("run %s ended (%s) before its plan was accepted here", run, outcome)
        self.spend(run, "RUN_ENDED")
        self._panel.publish("run.ended", {"run": run, "outcome": outcome})

    def _known(self, run: str) -> list[Release]:
        return [release for release in self._ledger.releases() if release.kind == "run.plan" and release.run == run]
