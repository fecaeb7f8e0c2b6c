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
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from fedsilo.audit.checkpoint import checkpoint_in, cosigned_at, cosigner_key, parse_note, parse_verifier_key
from fedsilo.audit.index import DECISION_EVENTS, HOLD_ENDS, LogIndex, parsed
from fedsilo.audit.log import AuditLog, LogCheck
from fedsilo.audit.reader import LOOK_RECORDS, line_filter, read_note, record_at
from fedsilo.audit.record import rules_of
from fedsilo.control import answers
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


class AuditView:
    """Args:
    audit: the log.
    index: of the same log.
    witnesses: SPIFFE ids of the parties whose cosignatures count: a silo's coordinator, or a coordinator's silos.
    contradicting: those of them that showed a note signed with this log's key for a history that it does not have.
    now_seconds: UTC.
    named: the witnesses are several and are named in `status`; else the only one is the coordinator."""

    def __init__(
        self,
        audit: AuditLog,
        index: LogIndex,
        *,
        witnesses: Callable[[], Collection[str]],
        contradicting: Callable[[], Collection[str]],
        now_seconds: Callable[[], float],
        named: bool = False,
    ) -> None:
        self._audit = audit
        self._index = index
        self._witnesses = witnesses
        self._contradicting = contradicting
        self._now_seconds = now_seconds
        self._lock = threading.Lock()
        self._state = answers.filled(answers.AuditStatus, absent=frozenset({"coordinator" if named else "witnesses"}))
        self._shown_checkpoint: tuple[tuple[str, int], answers.SignedCheckpoint] | None = None

    # ---- records -----------------------------------------------------------------------------------

    def page(self, arguments: Mapping[str, Any]) -> answers.RecordPage:
        """Return whole records, newest first.

        Args:
            arguments: {before}, {limit} (100, at most 200), {event} for the beginning of an event's name, {text} for
                what stands anywhere in a record, in upper or lower case; {control}: false leaves control messages out
                that nobody refused, such as polls.

        With a filter a call looks at `LOOK_RECORDS` records at most, so a page may be short, or empty, and not the
        last. A damaged line is {"seq", "t": 0, "event": "damaged", "why"}.

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
        return answers.RecordPage(records=tuple(record_at(*item) for item in back.rows), size=size, next=back.next)

    # ---- verification ------------------------------------------------------------------------------

    def verify(self, arguments: Mapping[str, Any]) -> answers.AuditStatus:
        """Begin to verify all records that there are by now, unless that is going on already; the status at once."""
        QueryArguments(arguments)
        with self._lock:
            begins, size = not self._state.verifying, self._audit.size
            if begins:
                self._state = replace(self._state, verifying=True, looked_at=0, of=size)
        if begins:
            threading.Thread(target=self._verify, args=(size,), name="audit-verify", daemon=True).start()
        return self.status({})

    def _verify(self, size: int) -> None:
        # what stands if a fault of this program ends the thread; its traceback goes to stderr
        broken: answers.Broken | None = answers.Broken(seq=0, why="the verification itself failed")
        try:
            key = parse_verifier_key(read_note(self._audit.directory / "keys" / "log.vkey").partition("\n")[0])
            found = LogCheck(self._audit.directory, key, size, self._progress).run()
            broken = None if found is None else answers.Broken(seq=found.seq, why=found.why)
        except (FedSiloError, OSError) as error:
            broken = answers.Broken(seq=self._state.looked_at, why=f"it cannot be read: {error}")
        finally:
            verified_to, now = size if broken is None else broken.seq, utc(self._now_seconds())
            with self._lock:
                ended = replace(self._state, verifying=False, broken=broken, looked_at=size)
                self._state = replace(ended, verified_to=verified_to, verified_at=now)
        if broken is not None:
            _log.critical("audit log: record %d: %s", broken.seq, broken.why)

    def _progress(self, looked_at: int) -> None:
        self._state = replace(self._state, looked_at=looked_at)

    def status(self, arguments: Mapping[str, Any]) -> answers.AuditStatus:
        """Return how far the log was verified, its newest countersigned checkpoint, and what its witnesses know.

        A word is "matches" where that party countersigned these very records, "differs" where what it countersigned is
        not in this log, "not seen" where it countersigned nothing yet.

        Raises:
            FedSiloError: the log cannot be read.
        """
        QueryArguments(arguments)
        with self._lock:
            state, size = self._state, self._audit.size
        words = {name: self._word(name) for name in self._witnesses()}
        word = next(iter(words.values()), NOT_SEEN)
        return replace(state, size=size, checkpoint=self._checkpoint(), coordinator=word, witnesses=words)

    @property
    def broken(self) -> answers.Broken | None:
        """The break that the newest verification found; None where it found none, or none was."""
        return self._state.broken

    def _checkpoint(self) -> answers.SignedCheckpoint:
        """Return the newest checkpoint that somebody countersigned, else the newest."""
        key = self._audit.latest_note, self._audit.size
        if self._shown_checkpoint is not None and self._shown_checkpoint[0] == key:
            return self._shown_checkpoint[1]
        shown = answers.filled(answers.SignedCheckpoint)
        newest = sorted((self._audit.directory / "checkpoints").glob("*.note"), reverse=True)[:NOTES_LOOKED_AT]
        for path in newest:
            note = read_note(path)
            size, names = checkpoint_in(note).size, self._cosigners(note)
            if names or not shown.size:
                shown = answers.SignedCheckpoint(size=size, time=self._time_of(size - 1), cosigned_by=names)
            if names:
                break
        self._shown_checkpoint = key, shown
        return shown

    def _cosigners(self, note: str) -> tuple[str, ...]:
        names = {item.name for item in parse_note(note).signatures} - {self._audit.origin}
        keys = {name: cosigner_key(name, self._audit.key_of(name)) for name in names if self._audit.knows(name)}
        return tuple(sorted(name for name, key in keys.items() if cosigned_at(note, key) is not None))

    def _time_of(self, seq: int) -> str:
        found = self._index.records(seq, seq + 1)
        return utc(found[0]["t"] / 1000) if found and found[0]["t"] else ""

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
    program: whose commands tell the same: silo or coordinator."""

    def __init__(self, index: LogIndex, policy: Callable[[], Policy], *, program: str = "silo") -> None:
        self._index = index
        self._policy = policy
        self._program = program

    def outbox(self, arguments: Mapping[str, Any]) -> answers.MessagePage | answers.DecisionInFull:
        """Return outbound decisions, newest first, or one of them.

        Args:
            arguments: {seq} for one with its whole record; else {before}, {limit} (100, at most 500), {verdict},
                {kind}, and {control: true} to include allowed polls and heartbeats.

        A page may have fewer rows than its limit; only `next` says that nothing older is left. The outcome of a message
        that was held says how the hold ended (`index.HOLD_ENDS`), and is empty while people are asked. Milliseconds are
        null where it was not sent or the machine was started in between.

        Raises:
            UsageError: an argument that is not one of these.
            NotFoundError: no such decision.
        """
        return self._answer("egress", arguments)

    def inbox(self, arguments: Mapping[str, Any]) -> answers.MessagePage | answers.DecisionInFull:
        """Return decisions on what came in, as `outbox`, each with its peer; of a hold that is over with its end."""
        return self._answer("ingress", arguments)

    def _answer(self, direction: str, arguments: Mapping[str, Any]) -> answers.MessagePage | answers.DecisionInFull:
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
        return answers.filled(
            answers.MessagePage,
            messages=answers.read_rows(answers.MessageRow, page.rows),
            **self._index.totals(direction, control=control),
            next=page.next,
            absent=frozenset({"sent", "waiting"}),
        )

    def _one(self, direction: str, sequence: int) -> answers.DecisionInFull:
        line = next(iter(self._index.lines(sequence, sequence + 1)), None)
        record = parsed(*line) if line else None
        word, noun = _WORDS[direction]
        if record is None or record.event != DECISION_EVENTS[direction]:
            hint = f"{self._program} {noun} list shows them"
            raise NotFoundError(f"record {sequence} is no {word} decision", hint=hint)
        policy = self._policy()
        shown = with_rules(record.fields, policy)
        outcome, milliseconds = self._index.outcome(sequence)
        # of a hold that is over no yes lets anything pass
        passes = () if outcome in HOLD_ENDS else tuple(would_pass(shown, policy))
        return answers.DecisionInFull(message=shown, outcome=outcome, milliseconds=milliseconds, would_pass=passes)


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
    """Return a sentence for what each rule asked for that denied or held a message; nothing for one that was allowed.

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
    """Return True if another policy than this one decided."""
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
