"""The queries on a daemon's own audit log: `audit`, `audit.status`, `audit.verify`, `outbox` and `inbox`.

For whoever may open the control socket. Whole records may be read there, although roles.yaml names who may read the
audit log (`audit.read`): a query carries no signature, so nobody knows whose role to look up. What makes it safe is the
record itself, which never holds a prompt, an answer, a tensor value, a private record's id or a key (T40); a site that
wants to keep even that to few gives the socket's group to few. Archived payloads stay behind a signed command.

A verification reads the whole log in a thread of its own, so the daemon goes on meanwhile, and there is one at a time.
A coordinator records the facts of a decision and no rule by name; the rules are judged again here, from these facts and
under the same charter, so what is shown is what was decided.

Does not show: what only another party's log can (a log replaced as a whole with its key): `fedsilo audit verify` with
all logs together does. A verification of a daemon is the word of that very daemon; an auditor runs his own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from fedsilo.audit.checkpoint import cosigned_at, cosigner_key, parse_checkpoint, parse_note, parse_verifier_key
from fedsilo.audit.index import DECISION_EVENTS, HOLD_ENDS, LogIndex, parsed
from fedsilo.audit.log import AuditLog, Broken, LogCheck
from fedsilo.audit.reader import LOOK_RECORDS, line_filter, read_note, record_at
from fedsilo.audit.record import rules_of
from fedsilo.control.server import QueryArguments
from fedsilo.protocol.clocks import utc
from fedsilo.protocol.errors import FedSiloError, NotFoundError, UsageError
from policies.engine import History, decide
from policies.message import EVALUATION_ERRORS
from policies.model import Policy

_log = logging.getLogger("fedsilo.audit")

RECORDS_DEFAULT, RECORDS_MAX = 100, 200
NOTES_LOOKED_AT = 16  # newest checkpoints among which one is sought that somebody countersigned
# What a witness's cosignatures say of this log.
MATCHES, DIFFERS, NOT_SEEN = "matches", "differs", "not seen"


@dataclass
class _Verification:
    verified_to: int | None = None  # records of the last one that ended
    verified_at: str | None = None
    broken: Broken | None = None
    running: bool = False
    looked_at: int = 0
    of: int = 0


class AuditView:
    """Args:
    audit: the log.
    index: of the same log.
    witnesses: SPIFFE ids of the parties whose cosignatures count: a silo's coordinator, or a coordinator's silos.
    contradicting: those of them that showed a note signed with this log's key for a history that it does not have.
    now_seconds: UTC.
    word_as: what the word of a sole witness is called in `status`; without it, each stands by name in "witnesses".
    """

    def __init__(
        self,
        audit: AuditLog,
        index: LogIndex,
        *,
        witnesses: Callable[[], Collection[str]],
        contradicting: Callable[[], Collection[str]],
        now_seconds: Callable[[], float],
        word_as: str = "",
    ) -> None:
        self._audit = audit
        self._index = index
        self._witnesses = witnesses
        self._contradicting = contradicting
        self._now_seconds = now_seconds
        self._word_as = word_as
        self._lock = threading.Lock()
        self._state = _Verification()
        self._shown_checkpoint: tuple[tuple[str, int], dict[str, Any]] | None = None

    # ---- records -----------------------------------------------------------------------------------

    def page(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Whole records, newest first.

        Args:
            arguments: {before}, {limit} (100, at most 200), {event} for the beginning of an event's name, {text} for
                what stands anywhere in a record, in upper or lower case; {control}: false leaves control messages out
                that nobody refused, such as polls.

        Returns:
            {"records", "size", "next"}. With a filter a call looks at `LOOK_RECORDS` records at most, so a page may be
            short, or empty, while "next" is not null. A damaged line is {"seq", "t": 0, "event": "damaged", "why"}.

        Raises:
            UsageError: an argument that is not one of these.
            FedSiloError: the log cannot be read.
        """
        asked = QueryArguments(arguments, "before", "limit", "event", "text", "control")
        size, before = self._audit.size, asked.number("before")
        limit = asked.limit(default=RECORDS_DEFAULT, most=RECORDS_MAX)
        control = arguments.get("control") is None or asked.flag("control")
        wanted = line_filter(asked.text("event"), asked.text("text"), control=control)
        before = size if before is None else min(before, size)
        back = self._index.back(before, wanted, limit=limit, look_max=LOOK_RECORDS)
        return {"records": [record_at(*item) for item in back.rows], "size": size, "next": back.next}

    # ---- verification ------------------------------------------------------------------------------

    def verify(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to verify all records that there are by now, unless that is going on already; the status at once."""
        QueryArguments(arguments)
        with self._lock:
            begins = not self._state.running
            if begins:
                self._state.running, self._state.looked_at, self._state.of = True, 0, self._audit.size
        if begins:
            threading.Thread(target=self._verify, args=(self._state.of,), name="audit-verify", daemon=True).start()
        return self.status({})

    def _verify(self, size: int) -> None:
        # what stands if a fault of this program ends the thread; its traceback goes to stderr
        broken: Broken | None = Broken(0, "the verification itself failed")
        try:
            key = parse_verifier_key(read_note(self._audit.directory / "keys" / "log.vkey").partition("\n")[0])
            broken = LogCheck(self._audit.directory, key, size, self._progress).run()
        except (FedSiloError, OSError) as error:
            broken = Broken(self._state.looked_at, f"it cannot be read: {error}")
        finally:
            with self._lock:
                self._state = _Verification(
                    verified_to=size if broken is None else broken.seq, verified_at=utc(self._now_seconds()),
                    broken=broken, of=size, looked_at=size,
                )  # fmt: skip
        if broken is not None:
            _log.critical("audit log: record %d: %s", broken.seq, broken.why)

    def _progress(self, looked_at: int) -> None:
        self._state.looked_at = looked_at

    def status(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """How far the log was verified, what its newest countersigned checkpoint is, and what its witnesses know.

        Returns:
            {"size", "verified_to", "verified_at", "verifying", "looked_at", "broken", "checkpoint"} and the word on
            each witness. verified_to and verified_at are null before the first verification; looked_at counts while one
            is going on. A word is "matches" where that party countersigned these very records, "differs" where what it
            countersigned is not in this log, "not seen" where it countersigned nothing yet. They stand in
            {"witnesses": {SPIFFE id: word}}, or, of a silo, as {"coordinator": word}.

        Raises:
            FedSiloError: the log cannot be read.
        """
        QueryArguments(arguments)
        with self._lock:
            state = self._state
            shown = {
                "size": self._audit.size,
                "verified_to": state.verified_to,
                "verified_at": state.verified_at,
                "verifying": state.running,
                "looked_at": state.looked_at,
                "of": state.of,
                "broken": None if state.broken is None else {"seq": state.broken.seq, "why": state.broken.why},
            }
        return {**shown, "checkpoint": self._checkpoint(), **self._words()}

    @property
    def broken(self) -> dict[str, Any] | None:
        """{"seq", "why"} of the break that the newest verification found; None where it found none, or none was."""
        broken = self._state.broken
        return None if broken is None else {"seq": broken.seq, "why": broken.why}

    def _checkpoint(self) -> dict[str, Any]:
        """The newest checkpoint that somebody countersigned, else the newest."""
        key = self._audit.latest_note, self._audit.size
        if self._shown_checkpoint is not None and self._shown_checkpoint[0] == key:
            return self._shown_checkpoint[1]
        shown: dict[str, Any] = {"size": 0, "time": "", "cosigned_by": []}
        newest = sorted((self._audit.directory / "checkpoints").glob("*.note"), reverse=True)[:NOTES_LOOKED_AT]
        for path in newest:
            note = read_note(path)
            size, names = parse_checkpoint(parse_note(note).text).size, self._cosigners(note)
            if names or not shown["size"]:
                shown = {"size": size, "time": self._time_of(size - 1), "cosigned_by": names}
            if names:
                break
        self._shown_checkpoint = key, shown
        return shown

    def _cosigners(self, note: str) -> list[str]:
        names = {item.name for item in parse_note(note).signatures} - {self._audit.origin}
        keys = {name: cosigner_key(name, self._audit.key_of(name)) for name in names if self._audit.knows(name)}
        return sorted(name for name, key in keys.items() if cosigned_at(note, key) is not None)

    def _time_of(self, seq: int) -> str:
        found = self._index.records(seq, seq + 1)
        return utc(found[0]["t"] / 1000) if found and found[0]["t"] else ""

    def _words(self) -> dict[str, Any]:
        words = {name: self._word(name) for name in self._witnesses()}
        if not self._word_as:
            return {"witnesses": words}
        return {self._word_as: next(iter(words.values()), NOT_SEEN)}

    def _word(self, witness: str) -> str:
        seen, broken = self._countersigned(1, witness), self._state.broken
        # whatever it countersigned at the break or behind it was of other records
        if witness in self._contradicting() or (broken and seen and self._countersigned(broken.seq + 1, witness)):
            return DIFFERS
        return MATCHES if seen else NOT_SEEN

    def _countersigned(self, size: int, witness: str) -> bool:
        return self._audit.witnesses(size, (witness,)) > 0


# ---- messages ----------------------------------------------------------------------------------------------------

MESSAGES_DEFAULT, MESSAGES_MAX = 100, 500
VERDICTS = ("allow", "deny", "hold")
_WORDS = {"egress": ("outbound", "outbox"), "ingress": ("inbound", "inbox")}


class MessageView:
    """Args:
    index: of the log.
    policy: the one in force.
    program: whose commands tell the same: silo or coordinator.
    """

    def __init__(self, index: LogIndex, policy: Callable[[], Policy], *, program: str = "silo") -> None:
        self._index = index
        self._policy = policy
        self._program = program

    def outbox(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Outbound decisions, newest first.

        Args:
            arguments: {seq} for one with its whole record; else {before}, {limit} (100, at most 500), {verdict},
                {kind}, and {control: true} to include allowed polls and heartbeats.

        Returns:
            {"messages": [...], "total", "held", "denied", "next"}: the counts are of all messages, whatever was asked
            for. A page may have fewer rows than its limit; only "next": null says that nothing older is left. For one:
            {"message", "outcome", "milliseconds", "would_pass"}. The outcome of a message that was held says how the
            hold ended (`index.HOLD_ENDS`), and is empty while people are asked. Milliseconds are those from the
            decision to the sending, null where it was not sent or the machine was started in between.

        Raises:
            UsageError: an argument that is not one of these.
            NotFoundError: no such decision.
        """
        return self._answer("egress", arguments)

    def inbox(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Decisions on what came in, as `outbox`, each with its "peer"; of one that was held with the hold's end."""
        return self._answer("ingress", arguments)

    def _answer(self, direction: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        asked = QueryArguments(arguments, "seq", "before", "limit", "control", "verdict", "kind")
        sequence = asked.number("seq")
        if sequence is not None:
            if sum(value is not None for value in arguments.values()) > 1:
                raise UsageError("seq stands alone: it names one message")
            return self._one(direction, sequence)
        control = asked.flag("control")
        page = self._index.page(
            direction,
            before=asked.number("before"),
            limit=asked.limit(default=MESSAGES_DEFAULT, most=MESSAGES_MAX),
            verdict=asked.text("verdict", among=VERDICTS),
            kind=asked.text("kind"),
            control=control,
        )
        return {"messages": page.rows, **self._index.totals(direction, control=control), "next": page.next}

    def _one(self, direction: str, sequence: int) -> dict[str, Any]:
        line = next(iter(self._index.lines(sequence, sequence + 1)), None)
        record = parsed(*line) if line else None
        word, noun = _WORDS[direction]
        if record is None or record.event != DECISION_EVENTS[direction]:
            hint = f"{self._program} {noun} list shows them"
            raise NotFoundError(f"record {sequence} is no {word} decision", hint=hint)
        policy = self._policy()
        shown = with_rules(record.fields, policy)
        outcome = self._index.outcome(sequence)
        # of a hold that is over no yes lets anything pass
        passes = [] if outcome["outcome"] in HOLD_ENDS else would_pass(shown, policy)
        return {"message": shown, **outcome, "would_pass": passes}


def with_rules(record: Mapping[str, Any], policy: Policy) -> Mapping[str, Any]:
    """A decision with the verdict of every rule, where its record has only what they were judged by.

    Nothing is added where another policy decided, or where judging again comes to another verdict.
    """
    facts = record.get("facts", {})
    final, history = facts.get("final"), facts.get("history")
    if "rules" in record or not final or history is None or _changed(record, policy):
        return record
    try:
        decision = decide(final, policy, History.from_json(history))
    except EVALUATION_ERRORS:  # facts of another version
        return record
    if (decision.verdict, list(decision.reasons)) != (record["decision"], list(record.get("reasons", []))):
        return record
    told = rules_of(decision, policy)
    return {**record, **told, "detail": {**record.get("detail", {}), **told["detail"]}}


# ---- what would have passed ------------------------------------------------------------------------


def would_pass(record: Mapping[str, Any], policy: Policy) -> list[str]:
    """What each rule asked for that denied or held a message, in a sentence; nothing for one that was allowed.

    Args:
        record: the decision.
        policy: in force now. Where another one decided, a last sentence says what this one would do, with the counts
            and approvals of then.
    """
    if record["decision"] == "allow":
        return []
    codes = ", ".join(record.get("reasons", ())) or "no reason on record"
    changed = _changed(record, policy)
    sentences = [
        _sentence(rule, policy, changed) for rule in record.get("rules", ()) if rule["outcome"] in ("deny", "hold")
    ]
    if not sentences:
        sentences = [f"it was refused before a rule of the policy could judge it: {codes}"]
    return sentences + _by_now(record, policy) if changed else sentences


def _changed(record: Mapping[str, Any], policy: Policy) -> bool:
    """Whether another policy than this one decided."""
    return record.get("policy", {}).get("effective") not in (None, policy.digest)


def _sentence(rule: Mapping[str, Any], policy: Policy, changed: bool) -> str:
    name, measured, limit = rule["rule"], rule.get("measured"), rule.get("limit")
    part = policy.charter if rule.get("file") == "charter" and policy.charter else policy.own
    source = Path(part.source).name
    place = f"{source}:{rule.get('line', 0)}" + (" of the policy of then" if changed else "")
    if rule["outcome"] == "hold":
        return f"{name}: {limit} persons must approve exactly these bytes, {measured} have ({place})"
    if _is_number(measured) and _is_number(limit):
        bound = "at most" if measured > limit else "at least"
        return f"{name}: {bound} {_shown(limit)} pass, it had {_shown(measured)} ({place})"
    if isinstance(limit, list) and len(limit) == 2 and all(map(_is_number, limit)):
        return f"{name}: from {_shown(limit[0])} to {_shown(limit[1])} pass, it had {_shown(measured)} ({place})"
    return f"{name}: {_shown(limit)} passes, it had {_shown(measured)} ({place})"


def _by_now(record: Mapping[str, Any], policy: Policy) -> list[str]:
    facts = record.get("facts", {})
    final, history = facts.get("final"), facts.get("history")
    if not final or history is None:
        return []
    try:
        verdict = decide(final, policy, History.from_json(history)).verdict
    except EVALUATION_ERRORS:  # facts of another version, which this one's rules do not read
        return []
    return [f"the policy in force by now, {policy.digest[:12]}, would {verdict} the same message"]


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
