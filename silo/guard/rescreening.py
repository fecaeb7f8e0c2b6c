"""Archived texts screened again by another policy, for `fedsilo audit replay --rescreen` (threats T15, T18, T40).

The private index and the canaries live here and the texts do not leave this site, so the daemon is asked: a signed
command with the policy, by whoever may read payloads. Each payload that is read for it stands in the log with the
person's name, as one that is shown does. What goes back are counts by screen and code, as facts, never a text.
Does not tell: what the screens would have found with the records, the index and the canaries of that time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from certs.commands import VerifiedCommand
from fedsilo.audit.log import AuditLog
from fedsilo.control.desk import ControlDesk
from fedsilo.protocol.errors import FedSiloError, UsageError
from fedsilo.protocol.services import OUTBOUND_KINDS
from policies.compare import effective
from policies.load import Policy, load_policy
from policies.replay import DECISIONS, screened_otherwise, screens_asked
from policies.screening import screen_facts, texts_of
from silo.guard.ledger import Ledger, OutboxItem
from silo.guard.messages import parsed
from silo.guard.screens import Screens

COMMAND = "audit.rescreen"
# Of one command, which the loop's thread carries out between two exchanges: it goes on where the last one ended.
PAYLOADS_MAX = 64
SECONDS_MAX = 30.0  # with the last message's 60 s of screens, still less than a command waits for its answer
RECORDS_MAX = 20_000

_CAME_IN = "what came in is not archived"
_STAYED = "what did not leave under this record is not archived"
_GONE = "its payload is not archived: the policy did not ask for it then, or retention has deleted it since"


class Rescreening:
    """Args:
    ledger: knows which payload a decision was about, and has the bytes.
    audit: our log.
    screens: of this site, with the index and the canaries that they have now.
    """

    def __init__(self, ledger: Ledger, audit: AuditLog, screens: Screens) -> None:
        self._ledger = ledger
        self._audit = audit
        self._screens = screens

    def register(self, desk: ControlDesk, on_loop: Callable[[Callable[[], Any]], Any]) -> None:
        """The command, for whom `audit show --payload` is too."""
        desk.register_command(COMMAND, "payload.read", lambda command: on_loop(lambda: self.rescreen(command)))

    def rescreen(self, command: VerifiedCommand) -> dict[str, Any]:
        """What a policy's screens find in the archived texts that they have not seen.

        Args:
            command: arguments {policy, charter, custom_file, since}: three files' texts, the second perhaps empty, the
                third left out where the policy names none; the first record.

        Returns:
            {"policy": digest of what was asked, "rows", "next": where to go on, or None}. A row is of one decision
            whose recorded facts do not tell what these screens say: {"seq", "hmac_sha256", "facts"}, or, where nobody
            can tell, {"seq", "hmac_sha256", "why"}.

        Raises:
            UsageError: no policy, or a wrong one; no number.
        """
        asked, since = _policy_of(command.arguments), command.arguments.get("since", 0)
        if not isinstance(since, int) or isinstance(since, bool) or since < 0:
            raise UsageError("from which record on? its number is needed")
        left = {item.decision_seq: item for item in self._ledger.outbox()}
        rows: list[dict[str, Any]] = []
        self._read, end = 0, time.monotonic() + SECONDS_MAX
        for record in self._audit.records(since):
            over = self._read == PAYLOADS_MAX or time.monotonic() > end
            if over or record["seq"] >= since + RECORDS_MAX:
                return {"policy": asked.digest, "rows": rows, "next": record["seq"]}
            final = record.get("facts", {}).get("final", {})
            if record["event"] not in DECISIONS or not final or not screened_otherwise(final, asked):
                continue
            found = self._found(record, asked, left.get(record["seq"]), command)
            key = "why" if isinstance(found, str) else "facts"
            rows.append({"seq": record["seq"], "hmac_sha256": record["payload"].get("hmac_sha256", ""), key: found})
        return {"policy": asked.digest, "rows": rows, "next": None}

    def _found(
        self, record: Mapping[str, Any], asked: Policy, item: OutboxItem | None, command: VerifiedCommand
    ) -> dict[str, Any] | str:
        """Facts of the screens, or why there are none."""
        if record["direction"] == "ingress":
            return _CAME_IN
        if item is None:
            return _STAYED
        names = screens_asked(record["facts"]["final"], asked)
        if lacking := self._screens.lacking(asked.file, names):
            return "; ".join(lacking)
        if not item.archived or item.digest not in self._ledger.payloads:
            return _GONE
        try:
            body, _ = parsed(item.kind, self._ledger.payloads.read(item.digest), OUTBOUND_KINDS)
        except FedSiloError as error:
            return error.message
        self._read += 1
        self._audit.append(
            "payload.read", kind=item.kind, run=item.run, round=item.round, step=item.step,
            detail={
                "person": command.person, "certificate": command.certificate_fingerprint, "command": COMMAND,
                "screened_by": asked.digest,
            },
            link={"decision": item.decision_seq},
        )  # fmt: skip
        texts = list(texts_of(body))
        screened = self._screens.screen(asked, names, texts)
        if screened.failed:
            return f"screens {', '.join(screened.failed)} failed here"
        return screen_facts(screened, len(texts))


def _policy_of(arguments: Mapping[str, Any]) -> Policy:
    """The policy of a command, with its own patterns, tightened by its charter. Raises UsageError."""
    text, charter = arguments.get("policy"), arguments.get("charter", "")
    if not isinstance(text, str) or not isinstance(charter, str):
        raise UsageError("by which policy? its text is needed")
    custom = arguments.get("custom_file")
    if not isinstance(custom, str | None):
        raise UsageError("custom_file is the text of a file")
    beside = None if custom is None else lambda name: (custom.encode(), name)
    own = load_policy(text.encode(), "policy.yaml", beside, kept=True)
    return effective(own, load_policy(charter.encode(), "charter.yaml", kept=True)) if charter else own
