"""What halts until persons release it: a kind that its screens halted (T18), or all of this silo, where somebody signed
two transcripts of one round (T20); threat model 6.

More hits on one UTC day than `max_hits_per_day` halt the kind: whoever may choose what is asked could otherwise learn
from what is withheld. The halt outlives the day and every restart. It ends when as many approvers as the policy's
`approvals.release_after_halt` says have signed a command over exactly this halt.
Does not stop: approvers who release without looking at what was found.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from certs.commands import VerifiedCommand
from fedsilo.audit.log import LogLostError
from fedsilo.audit.witness import OWN_HISTORY_LOST
from fedsilo.protocol.clocks import HALTING
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import ConflictError, NotAllowedError, NotFoundError, VerificationError
from silo.guard.decisions import orders_of
from silo.guard.gate import Gate
from silo.guard.ledger import Approval, Ledger

ROLE = "approver"
EQUIVOCATION_KIND = "round.open"  # what it is listed and released as: no round opens meanwhile
_OF_A_LOG = frozenset({OWN_HISTORY_LOST, "PEER_KEY_CHANGED", VerificationError.default_code})


def ends_when(code: str, state_dir: Path) -> str:
    """What must happen until a silo that is halted with this code sends again; in all other cases than these it is
    space that is lacking in `state_dir`."""
    if code == "EQUIVOCATION":
        return "approvers release it (silo approvals list)"
    if code in HALTING:
        return "the clock is right and an approver accepts it (silo resume --accept-clock)"
    if code in _OF_A_LOG:
        return "its log was compared with the other parties' (fedsilo audit verify) and this silo is started again"
    if code == LogLostError.default_code:
        return "the audit log's file is back in its place and this silo is started again"
    return f"space is free in {state_dir} and this silo is started again"


class Halts:
    """Args:
    gate: knows what is halted, and records.
    ledger: keeps who has signed so far.
    """

    def __init__(self, gate: Gate, ledger: Ledger) -> None:
        self._gate = gate
        self._ledger = ledger

    def rows(self) -> list[dict[str, Any]]:
        """Each kind that is halted: since when, what a release is signed over, and who has signed."""
        return [
            {
                "kind": kind,
                "since": since,
                "digest": self._digest(kind, since),
                "policy_digest": self._gate.policy.digest,
                "needed": self._gate.policy.file.approvals.release_after_halt,
                "given": self._given(kind, since),
            }
            for kind, since in sorted(self._halts().items())
        ]

    def _halts(self) -> dict[str, float]:
        told = self._ledger.equivocation
        return self._gate.screen_halts | ({EQUIVOCATION_KIND: float(told["since"])} if told else {})

    def release(self, command: VerifiedCommand) -> dict[str, Any]:
        """Count one approver's yes; the last one needed ends the halt.

        Args:
            command: arguments {kind, digest}, as the person was shown them.

        Raises:
            NotFoundError: the kind is not halted.
            NotAllowedError: the person is no approver.
            ConflictError: it is another halt or another policy than the person was shown, or a second yes.
            LogFullError, OperationError: the log, or the ledger, takes nothing; then the yes does not count.
        """
        kind, digest = str(command.arguments.get("kind", "")), str(command.arguments.get("digest", ""))
        since = self._halts().get(kind)
        if since is None:
            raise NotFoundError(f"{kind[:40]!r} is not halted", hint="`silo approvals list` shows what is")
        if ROLE not in command.roles:
            raise NotAllowedError(f"{command.person} may not release a halted kind: that takes an {ROLE}")
        if digest.removeprefix("sha256:") != self._digest(kind, since):
            raise ConflictError(
                f"the halt of {kind}, or the policy, is not what was shown", hint="read it again", code="STALE_VIEW"
            )
        digest, needed = self._digest(kind, since), self._gate.policy.file.approvals.release_after_halt
        # Killed between the last yes and its effect: whoever said yes says it again.
        if len(given := self._given(kind, since)) < needed and command.person in given:
            raise ConflictError(f"{command.person} has answered for this halt of {kind} already")
        told, halted = kind == EQUIVOCATION_KIND, self._gate.halted
        if told:
            self._gate.halted = ""  # a halted gate records nothing
        try:
            # Recorded first: no yes counts that nobody finds in the log.
            number = self._gate.record(
                "approval.grant", kind=kind, reasons=["EQUIVOCATION" if told else "SCREEN_HALT"],
                detail={"person": command.person, "certificate": command.certificate_fingerprint, "since": int(since)},
                policy={"effective": self._gate.policy.digest}, **orders_of(command.order),
            )  # fmt: skip
            yes = Approval(
                _name(digest), command.person, command.certificate_fingerprint, digest, "approve", "",
                self._gate.now(), record=number,
            )  # fmt: skip
            self._ledger.approve(yes, again=True)
            given = self._given(kind, since)
            if len(given) >= needed:
                self._end(kind, given)
                # A clock that was set back may begin the next halt at the same second: no yes is left for it (T41).
                self._ledger.forget_approvals(_name(digest))
                halted = ""
        finally:
            if told:
                self._gate.halted = self._gate.halted or halted
        return {"kind": kind, "released": len(given) >= needed, "given": given, "needed": needed, "record": number}

    def _end(self, kind: str, given: list[str]) -> None:
        """Recorded first, so that no release is without the names behind it."""
        if kind != EQUIVOCATION_KIND:
            self._gate.release_halt(kind, given)
            return
        self._gate.record(
            "release", kind=kind, reasons=["EQUIVOCATION"], detail={"persons": given},
            policy={"effective": self._gate.policy.digest},
        )  # fmt: skip
        self._ledger.keep_equivocation({})

    def _given(self, kind: str, since: float) -> list[str]:
        """Whose yes to this halt under the policy in force stands in the log; one under another policy is void."""
        yeses = self._ledger.approvals(_name(self._digest(kind, since)))
        return [approval.person for approval in yeses if approval.record >= 0]

    def _digest(self, kind: str, since: float) -> str:
        """What a release is signed over: this halt, under this policy, with what people were to look at."""
        told = self._ledger.equivocation if kind == EQUIVOCATION_KIND else {}
        evidence = sha256_hex(canonical_json([told.get("known"), told.get("shown")])) if told else ""
        return sha256_hex(canonical_json(["fedsilo halt", kind, since, evidence, self._gate.policy.digest]))


def _name(digest: str) -> str:
    return f"halt/{digest}"
