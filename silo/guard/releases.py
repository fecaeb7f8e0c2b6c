"""Held releases: what waits for people, what they are shown, and what their answer does (threat T36).

A release is held after clipping and rounding, serialised once; what is approved is that digest under that policy, and
those very bytes are sent. An approval counts once, names a person and the findings that person opened, and is void when
the policy changed meanwhile. Nobody's silence is a yes: a hold that expires is a refusal.

A held message leaves in one way only. The last yes that is needed comes through `Releases.approve`. `_free` ends the
hold, so that no yes counts twice, and `Gate.decide_payload` judges the same bytes anew, in the run and round that are
open by then; it may deny them, and a kill between the two loses them. What it allows lies in the outbox.
`Gate.transmit` sends it from there, called at once by `RunManager.send_freed_or_report`, or by `RunManager.retry` on a
later turn or in an export to files, where the line is down or something that was allowed earlier still waits. (A held
plan came in: the last yes begins its run, and nothing of it is sent.)

Without a yes a hold ends by a no (`reject`), when its time is over (`expire`), with the end of its step, round or run
or when this silo leaves the run (`miss`, `end_plan`), under a policy that denies it (`rejudge_held`), when its stored
bytes have changed (`_payload`), and when an older ledger is raised to its log (`Ledger.raise_to`). Nothing else ends
it, and none of these sends it. What changes meanwhile (policy, findings, screens) only takes approvals away.

Once a message lies in the outbox it outlives its round and its run: it is sent on a later turn, and the coordinator may
refuse it. `Outcomes.drop` lists why it may be dropped instead.

Beside its facts are kept the base of a release, where its screens found something, and where it went. Texts are
screened again before each yes, since a canary file or an index may say more by now than when the hold began.

Does not stop: a person who approves without understanding; that a finding was opened is all that can be known. Nor what
the site's screens learn after the yes; the decision that lets the release go screens once more, and by a policy that
withholds or refuses it denies what it finds then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message as ProtobufMessage

from certs.commands import VerifiedCommand
from fedsilo.audit.record import NOTE_CHARACTERS_MAX, note_text, secret_in
from fedsilo.control.answers import Finding
from fedsilo.protocol._generated import federation_pb2 as pb
from fedsilo.protocol.codec import Buffer, sha256_hex
from fedsilo.protocol.envelope import parsed
from fedsilo.protocol.errors import (
    ConflictError,
    NotAllowedError,
    NotFoundError,
    UsageError,
    VerificationError,
)
from fedsilo.protocol.kinds import INBOUND_KINDS, OUTBOUND_KINDS, TENSOR_KINDS
from fedsilo.protocol.place import Place
from policies import engine
from policies.engine import Decision, Facts
from policies.fields import Approvals
from policies.screens import screen_facts, texts_of
from silo.guard.decisions import Readings, halted_error, orders_of
from silo.guard.findings import acknowledged_in, counts, ends_of, unread
from silo.guard.gate import Gate
from silo.guard.ledger import Approval, FarEnd, Ledger, PolicyInForce, Release
from silo.guard.messages import Allowed, Held, Inbound
from silo.guard.shown import asked_for, judged_by_now, rows_of, shown_of

REJECT_CODES = ("CONTENT", "TIMING", "POLICY", "UNEXPECTED", "OTHER")


@dataclass(frozen=True)
class Settled:
    """The end of a hold. `outcome`: sent-able (`allowed`), denied or missed; `allowed`: what to transmit; `record`:
    number of the record of a no."""

    release: Release
    outcome: str
    allowed: Allowed | None = None
    inbound: Inbound | None = None
    record: int = -1


class Releases:
    """The inbox.

    Args:
        gate: decides again when the approvals are complete.
        ledger: keeps the exact bytes.
        silo: name for release ids.
        destination: the coordinator's address, certificate fingerprint and its not_after (UTC), for people.
    """

    def __init__(self, gate: Gate, ledger: Ledger, *, silo: str, destination: Mapping[str, str]) -> None:
        self._gate, self._judge = gate, gate.judge
        self._ledger = ledger
        self._silo = silo
        self.destination = dict(destination)

    # ---- hold --------------------------------------------------------------------------------------

    def hold(self, held: Held, *, deadline_seconds: float | None) -> Release:
        """Keep a release until persons answer or it expires.

        Args:
            held: what the gate made of it.
            deadline_seconds: after which the run has gone on without it; None when only the policy's expiry counts.
        """
        return self._keep(held.place, held.payload, held.facts, held.decision, deadline_seconds)

    def hold_inbound(self, inbound: Inbound) -> Release:
        """Keep a plan until persons agree to take part in it."""
        if inbound.needs_approval is None:
            raise UsageError(f"{inbound.kind} needs no approval")
        return self._keep(inbound.place, inbound.payload, inbound.facts, inbound.needs_approval, None)

    def _keep(
        self, place: Place, payload: Buffer, facts: Facts, decision: Decision, deadline_seconds: float | None
    ) -> Release:
        now = self._judge.now()
        expiry_seconds = self._judge.policy.file.approvals.expiry_hours * 3600.0
        missed = deadline_seconds is not None and deadline_seconds < expiry_seconds
        release = Release(
            id=self._ledger.free_release_id(f"r{place.round}/{self._silo}"),
            place=place,
            digest=sha256_hex(payload),
            policy_digest=self._judge.policy.digest,
            payload_bytes=len(payload),
            recorded=self._judge.digests(place.kind, payload),
            facts=facts,
            rules=rows_of(decision),
            persons=self._asked(place.kind).persons,
            requested_at=now,
            expires_at=now + (deadline_seconds if missed and deadline_seconds is not None else expiry_seconds),
            expiry_outcome="missed" if missed else "denied",
            state="held",
            revision=1,
        )
        self._ledger.hold(release, payload)
        if place.kind in OUTBOUND_KINDS:
            self._keep_beside(release, payload)
        self._record("approval.request", release, reasons=list(decision.reasons))
        return release

    def _asked(self, kind: str) -> Approvals:
        return asked_for(kind, self._judge.policy.file)

    # ---- persons' answers --------------------------------------------------------------------------

    def approve(self, command: VerifiedCommand) -> tuple[Release, Settled | None]:
        """Count one person's yes; the last one needed frees the release.

        Args:
            command: arguments {release, digest, policy_digest, shown[, revision][, acknowledged]}, as the person was
                shown them; shown: digest of the facts in its view; acknowledged: ids of the findings that the person
                opened.

        Raises:
            NotFoundError, ConflictError: no such release, no longer held, or what was shown is not what is held, or
                not what its screens find by now; or a finding that is seen here was not opened (`FINDINGS_UNREAD`), or
                nothing was shown at all (`NOT_SHOWN`).
            NotAllowedError: the person has no role that the policy names.
            UsageError: acknowledged is no list of ids.
        """
        self._refuse_while_halted()
        release = self._shown(command)
        if release.expires_at <= self._judge.now():
            raise ConflictError(f"release {release.id} expired", code="EXPIRED")
        if self._no(release) is not None:
            raise ConflictError(f"release {release.id} was rejected already", code="NOT_HELD")
        roles = set(self._asked(release.kind).roles)
        if not roles & set(command.roles):
            raise NotAllowedError(
                f"{command.person} may not approve {release.kind}: the policy asks for {', '.join(sorted(roles))}"
            )
        destination = dict(self.destination)  # it may change in another thread
        self._screen_again(release)
        facts, noticed = self._opened(release, command, destination)
        self._void_unread(release, noticed)
        self._refuse_second(release, command, "approve")
        opened = [one.id for one in noticed]
        # Recorded first: no yes counts that nobody finds in the log.
        number = self._record("approval.grant", release, **_who(command), acknowledged=opened, facts=facts)
        self._answer(release, command, "approve", "", opened, number)
        approvals = self._given(release)
        if len(approvals) < release.persons:
            return self._ledger.release(release.id), None
        return self._free(release, approvals, destination)

    def _screen_again(self, release: Release) -> None:
        """Raises ConflictError: the screens find something else in its texts than people were shown."""
        if "screens" not in release.facts or release.kind not in OUTBOUND_KINDS:
            return
        facts_now, places = self._screened(release, self._payload(release))
        facts, context = {**release.facts, **facts_now}, self._ledger.kept_of_release(release.id)
        if facts == release.facts and places == context.get("hits", []):
            return
        rules = judged_by_now(self._ledger, replace(release, facts=facts), self._judge.policy)
        self._record("approval.request", release, reasons=["SCREEN_HIT"])
        self._ledger.found_since(release.id, facts, rules, {**context, "hits": places})
        raise ConflictError(
            f"the screens find something else in {release.id} than was shown",
            hint=f"read it again: silo approvals show {release.id}",
            code="STALE_VIEW",
        )

    def _void_unread(self, release: Release, noticed: list[Finding]) -> None:
        """A yes whose person has not opened what is seen by now counts no more; whoever gave it is asked again."""
        for one in self._ledger.approvals(release.id):
            if one.verdict == "approve" and not counts(one, noticed):
                self._record(
                    "approval.request",
                    release,
                    person=one.person,
                    fingerprint=one.fingerprint,
                    reasons=["FINDINGS_UNREAD"],
                )
                self._ledger.forget_approvals(release.id, one.person)

    def _opened(
        self, release: Release, command: VerifiedCommand, destination: Mapping[str, str]
    ) -> tuple[str, list[Finding]]:
        """Digest of the facts of this release, which the person was shown, and its findings, each opened by the person.

        Raises:
            ConflictError: the facts are others than the person signed (`STALE_VIEW`), or none (`NOT_SHOWN`); or a
                finding was not opened (`FINDINGS_UNREAD`). UsageError: no list of ids.
        """
        given = acknowledged_in(command.arguments)
        # As they are seen here, at this moment: what has been found since the person looked counts as not opened.
        shown = shown_of(self._ledger, release, self._judge.policy, destination)
        if not (signed := command.arguments.get("shown")):
            raise ConflictError(
                f"a yes to {release.id} says what was shown, and this one does not",
                hint=f"read it: silo approvals show {release.id}",
                code="NOT_SHOWN",
            )
        if signed != shown.digest:
            raise _stale("a fact", release)
        noticed = list(shown.noticed)
        if left := unread(noticed, given):
            names = ", ".join(one.id for one in left)
            raise ConflictError(
                f"{len(left)} of {len(noticed)} findings of {release.id} not opened: {names}",
                hint=f"read them (silo approvals show {release.id}), then name each with --ack-finding",
                code="FINDINGS_UNREAD",
            )
        return shown.facts, noticed

    def _yeses(self, release: Release) -> list[Approval]:
        """Return the approvals that are recorded in the log."""
        return [one for one in self._ledger.approvals(release.id) if counts(one, ()) and one.digest == release.digest]

    def _given(self, release: Release) -> tuple[engine.Approval, ...]:
        roles = tuple(sorted(self._asked(release.kind).roles))
        return tuple(engine.Approval(one.person, roles) for one in self._yeses(release))

    def _granted(self, release: Release) -> list[int]:
        """Numbers of the records of each person's yes: what a decision names in place of the persons."""
        return sorted(one.record for one in self._yeses(release))

    def plan_still_allowed(self, release: Release, inbound: Inbound) -> bool:
        """Return whether an approved plan passes: judged again, since whoever was killed in between left no word of
        it."""
        approvals = self._given(release)
        return self._gate.ingress.decide_inbound(inbound, approvals, self._granted(release)).verdict == "allow"

    def deny_approved_plan(self, run: str) -> None:
        """Persons approved a run's plan, and it did not begin: it cannot, or another rule forbids it."""
        for release in self._ledger.releases("approved"):
            if release.kind == "run.plan" and release.run == run:
                self._ledger.settle_release(release.id, "denied", was="approved")

    def _payload(self, release: Release) -> bytes:
        """Return the held bytes. Raises ConflictError: they are not what was held, which ends the hold (`TAMPERED`)."""
        try:
            return self._ledger.payloads.read(release.digest)
        except (NotFoundError, VerificationError) as error:
            self._record("approval.deny", release, reasons=["DIGEST"])
            self._settle(release, "denied")
            raise ConflictError(
                f"the stored bytes of {release.id} are not those that were held", code="TAMPERED"
            ) from error

    def _free(
        self, release: Release, approvals: tuple[engine.Approval, ...], destination: Mapping[str, str]
    ) -> tuple[Release, Settled | None]:
        payload, granted = self._payload(release), self._granted(release)
        # Ended first: whatever happens next, this approval frees nothing a second time.
        release = self._ledger.settle_release(release.id, "approved")
        if release.kind in INBOUND_KINDS and release.kind not in OUTBOUND_KINDS:
            body, _ = parsed(release.kind, payload, INBOUND_KINDS)
            inbound = Inbound(release.place, 0, body, payload, release.digest, dict(release.facts))
            decision = self._gate.ingress.decide_inbound(inbound, approvals, granted)
            freed = Settled(release, "allowed", inbound=inbound) if decision.verdict == "allow" else None
        else:
            decided = self._gate.decide_payload(
                release.place, payload, approvals=approvals, granted=granted, graded=dict(release.facts)
            )
            freed = Settled(release, "allowed", allowed=decided) if isinstance(decided, Allowed) else None
        self._ledger.drop_payloads([release.digest])
        if freed is not None:
            if freed.allowed is not None:
                self._keep_sent(release, destination)
            return release, freed
        release = self._ledger.settle_release(release.id, "denied", was="approved")
        return release, Settled(release, "denied")

    def reject(self, command: VerifiedCommand) -> Settled:
        """Reject a release. One rejection ends the hold.

        Args:
            command: arguments {release, digest, policy_digest, reason_code[, reason]}; the reason stays here, and
                the record of the no has its salted digest.

        Raises:
            UsageError: no such reason code. ConflictError, NotFoundError: as `approve`.
            LogFullError, OperationError: the log, or the ledger, takes nothing; without a record the no is not kept.
        """
        self._refuse_while_halted()
        code, reason = str(command.arguments.get("reason_code", "")), str(command.arguments.get("reason", ""))
        if what := secret_in(reason):
            raise UsageError(f"a note is kept as it is written, and this one has what looks like {what}")
        if reason != note_text(reason):
            raise UsageError(f"a note is one line of at most {NOTE_CHARACTERS_MAX} printable characters")
        if code not in REJECT_CODES:
            raise UsageError(f"reason code {code[:40]!r} is not known", hint=f"one of: {', '.join(REJECT_CODES)}")
        release = self._shown(command)
        self._refuse_second(release, command, "reject")
        no = self._no(release, command.person)
        if no is None or no.record < 0:  # else a kill kept it from its effect, and it stands in the log already
            # Recorded first, as a yes is; what a kill leaves in the log alone is taken up at the next start.
            note = self._judge.keep_note(command.sealed) if reason else ""  # before the record that names it
            number = self._record("approval.deny", release, reasons=[code], note=note, **_who(command))
            with self._judge.halting():  # else another person's yes would free it after all
                no = self._answer(release, command, "reject", reason, record=number, code=code)
        return self._deny(release, no)

    def defer(self, command: VerifiedCommand) -> tuple[Release, int]:
        """A person wants to be asked later; with the number of its record. It stops no clock and binds nobody else.

        Args:
            command: arguments {release, digest, policy_digest[, revision], until_seconds}; the last in UTC seconds
                since 1970, before the hold ends.

        Raises:
            UsageError: no time, or one that is over. ConflictError: the hold ends before that (`TOO_LATE`); or as
            `approve`. NotFoundError: as `approve`.
        """
        self._refuse_while_halted()
        release, now = self._shown(command), self._judge.now()
        until = command.arguments.get("until_seconds")
        if isinstance(until, bool) or not isinstance(until, int | float) or not now < until < float("inf"):
            raise UsageError("until when? until_seconds is a time to come, in seconds since 1970")
        if until >= release.expires_at:
            raise ConflictError(
                f"the hold of {release.id} ends before that, in {max(release.expires_at - now, 0) / 60:.0f} minutes",
                hint="what expires is refused; ask for a shorter time",
                code="TOO_LATE",
            )
        number = self._record("release.defer", release, **_who(command), until=int(until))
        self._ledger.defer(release.id, command.person, float(until))
        return release, number

    def _no(self, release: Release, person: str = "") -> Approval | None:
        """A no to a held release, of this person or of anybody."""
        answers = self._ledger.approvals(release.id)
        return next((one for one in answers if one.verdict == "reject" and person in ("", one.person)), None)

    def _deny(self, release: Release, no: Approval) -> Settled:
        """The effect of a no that is kept; an earlier version may have kept it without a record."""
        if (number := no.record) < 0:
            number = self._record(
                "approval.deny", release, reasons=["INTERRUPTED"], person=no.person, fingerprint=no.fingerprint
            )
        return Settled(self._settle(release, "rejected"), "denied", record=number)

    def _shown(self, command: VerifiedCommand) -> Release:
        """The release, if it still is what the person was shown."""
        arguments = command.arguments
        release = self._ledger.release(str(arguments.get("release", "")))
        if release.state != "held":
            raise ConflictError(f"release {release.id} is {release.state}, no longer held", code="NOT_HELD")
        current = {"digest": release.digest, "policy_digest": self._judge.policy.digest, "revision": release.revision}
        for name, value in current.items():
            given = arguments.get(name)
            if isinstance(given, str):
                given = given.removeprefix("sha256:")
            if name == "revision" and given is None:
                continue
            if given != value:
                raise _stale(name.replace("_", " "), release)
        if release.policy_digest != self._judge.policy.digest:
            raise ConflictError(
                f"the policy changed since {release.id} was held", hint="read it again", code="STALE_VIEW"
            )
        return release

    def _refuse_while_halted(self) -> None:
        """Refuse an answer before anything is written: one without a record, or without its effect, would be spent for
        nothing."""
        if self._judge.halted:
            raise halted_error("approved or rejected", self._judge.halted)

    def _refuse_second(self, release: Release, command: VerifiedCommand, verdict: str) -> None:
        """Raises ConflictError: the person has answered, and that answer was or will be acted upon."""
        for one in self._ledger.approvals(release.id):
            if one.person != command.person:
                continue
            # Killed between a no, or the last yes, and its effect: whoever gave it gives it again.
            effective = verdict == "reject" or len(self._given(release)) >= release.persons
            if not effective or (one.verdict, one.digest) != (verdict, release.digest):
                raise ConflictError(f"{command.person} has answered for {release.id!r} already")

    def _answer(
        self, release: Release, command: VerifiedCommand, verdict: str, reason: str, opened: Sequence[str] = (),
        record: int = -1, code: str = "",
    ) -> Approval:  # fmt: skip
        given = Approval(
            release.id, command.person, command.certificate_fingerprint, release.digest, verdict, reason,
            self._judge.now(), tuple(opened), record, code,
        )  # fmt: skip
        self._ledger.approve(given, again=True)
        return given

    # ---- without persons ---------------------------------------------------------------------------

    def expire(self) -> list[Settled]:
        """End the holds whose time is over, and those with a no that a kill kept from its effect, so that nobody else's
        yes frees them; each is a refusal. A halted gate ends none: it could record no end."""
        if self._judge.halted:
            return []
        now, ended = self._judge.now(), []
        for release in self._ledger.releases("held"):
            if (no := self._no(release)) is not None:
                ended.append(self._deny(release, no))
            elif release.expires_at <= now:
                reason = "DEADLINE" if release.expiry_outcome == "missed" else "EXPIRED"  # of the step; of the policy
                ended.append(self._end(release, release.expiry_outcome, reason))
        return ended

    def miss(self, run: str, round_number: int | None, step: int | None) -> list[Settled]:
        """The run has gone on: end the holds of a step, of the whole round when `step` is None, or of the run, which is
        over, when `round_number` is None too."""
        return [
            self._end(release, "missed", "RUN_ENDED" if round_number is None else "ROUND_CLOSED")
            for release in self._ledger.releases("held")
            if release.run == run and round_number in (None, release.round) and step in (None, release.step)
        ]

    def end_plan(self, run: str, reason: str) -> list[Settled]:
        """End the hold of a run's plan: without persons it was decided on, or the run is over."""
        return [
            self._end(release, "missed", reason)
            for release in self._ledger.releases("held")
            if release.kind == "run.plan" and release.run == run
        ]

    def _end(self, release: Release, outcome: str, reason: str) -> Settled:
        self._record("approval.expire", release, reasons=[reason])
        return Settled(self._settle(release, "missed" if outcome == "missed" else "expired"), outcome)

    def _settle(self, release: Release, state: str) -> Release:
        """A no, in whichever way: the bytes go."""
        settled = self._ledger.settle_release(release.id, state)
        self._ledger.drop_payloads([release.digest])
        return settled

    def rejudge_held(self) -> list[Settled]:
        """Judge what was held under another policy by the one in force: what that denies ends, all else is shown anew,
        and approvals given so far are void (T36). Nothing leaves by it.

        Returns:
            Holds that ended, since the policy in force denies them.
        """
        ended, policy = [], self._judge.policy
        for release in self._ledger.releases("held"):
            if release.policy_digest == policy.digest or self._no(release) is not None:
                continue  # a no stands under any policy: `expire` ends that hold
            decision = engine.decide(dict(release.facts), policy, engine.History())
            if decision.verdict == "deny":
                ended.append(self._end(release, "denied", "POLICY_CHANGED"))
                continue
            latest = release.requested_at + policy.file.approvals.expiry_hours * 3600.0
            # What left meanwhile is counted: it may not end a hold, for a day is over some time, but people see it.
            self._ledger.replace_judgement(
                release.id,
                policy.digest,
                judged_by_now(self._ledger, release, policy),
                persons=self._asked(release.kind).persons,
                expires_at=min(release.expires_at, latest),
            )
        return ended

    # ---- what is kept beside a release -------------------------------------------------------------

    def _keep_beside(self, release: Release, payload: Buffer) -> None:
        """Store what a later look at this release is compared with, and where its screens found something."""
        view = self._judge.view
        context: dict[str, Any] = {}
        if release.kind in TENSOR_KINDS and view.round == release.round and view.base_digest:
            context = {"base": view.base_digest, "ended_in": view.evaluated.get(release.round - 1, "")}
        if view.training is not None and view.training.of:
            context["private_records"] = view.training.of
        if release.facts.get("responses_hit"):
            context["hits"] = self._screened(release, payload)[1]
        self._ledger.keep_of_release(release.id, context)

    def _screened(self, release: Release, payload: Buffer) -> tuple[dict[str, Any], list[Any]]:
        """Facts of one run of the screens, for a held message only, whose time nobody outside can tell from a person's
        (T18); and which answers they found something in, with the screens, as the ledger gives them back."""
        message = self._judge.outbound(release.place, payload)
        screened = self._judge.screened(message, Readings()).screened
        facts = screen_facts(screened, len(list(texts_of(message.body))))
        places = [] if screened is None or screened.failed else _hit_places(message.body, screened.hits)
        as_stored: tuple[dict[str, Any], list[Any]] = tuple(json.loads(json.dumps([facts, places])))
        return as_stored

    def _keep_sent(self, release: Release, destination: Mapping[str, str]) -> None:
        """Store where it goes and by which policy, for the next release of its kind.

        Args:
            release: that the gate has let go.
            destination: as it was when the last person's findings were looked at.
        """
        context = self._ledger.kept_of_release(release.id) | {"destination": dict(destination)}
        policy = self._judge.policy
        self._ledger.keep_of_release(release.id, context)
        content = policy.file.model_dump(mode="json", by_alias=True)
        self._ledger.keep_policy_of_sent(release.kind, PolicyInForce(policy.digest, content, ""))
        before = self._ledger.far_end
        if ends_of(before.destination if before else {}) != ends_of(destination):
            far_end = FarEnd(dict(destination), release.id, release.run, release.round, release.requested_at)
            self._ledger.keep_far_end(far_end)

    def _record(
        self,
        event: str,
        release: Release,
        *,
        reasons: Sequence[str] = (),
        person: str = "",
        fingerprint: str = "",
        order: Mapping[str, str] | None = None,
        acknowledged: Sequence[str] = (),
        until: int = 0,
        note: str = "",
        facts: str = "",
    ) -> int:
        """Record an event about a held release: `approval.*` or `release.defer`.

        Args:
            event: its name.
            release: which one.
            reasons: codes.
            person: who answered; empty where nobody did.
            fingerprint: SHA-256 of that person's certificate.
            order: the person's signed command, as the log keeps it.
            acknowledged: ids of findings that the person opened.
            until: seconds since 1970, of a release that the person put off.
            note: digest of what the person wrote to a no; the text is kept beside the log.
            facts: digest of what the person was shown.
        """
        detail: dict[str, Any] = {"release": release.id, "expires_at": int(release.expires_at)}
        if person:
            detail |= {"person": person, "certificate": fingerprint}
        further = {"acknowledged": acknowledged, "until": until, "note": note, "facts": facts}
        detail |= {name: value for name, value in further.items() if value}
        return self._judge.record(
            event,
            **release.place._asdict(),
            reasons=list(reasons),
            policy={"effective": self._judge.policy.digest},
            detail=detail,
            payload=release.recorded,
            **orders_of(order or {}),
        )


def _who(command: VerifiedCommand) -> dict[str, Any]:
    """Return who answered, by which certificate, and what that person signed, for `_record`."""
    fingerprint = command.certificate_fingerprint
    return {"person": command.person, "fingerprint": fingerprint, "order": command.order}


def _stale(what: str, release: Release) -> ConflictError:
    return ConflictError(
        f"{what} of {release.id} is not as it was shown",
        hint=f"read it again: silo approvals show {release.id}",
        code="STALE_VIEW",
    )


def keep_recorded_noes(ledger: Ledger, newest: Iterable[Mapping[str, Any]]) -> None:
    """At a start, before anybody answers: a no that a kill kept from the ledger stands in the log, and counts (T36).
    The text that came with it is lost.

    Args:
        ledger: of this site.
        newest: records of our log. Nothing else is recorded between a no and its keeping, so it is among them.

    Raises:
        OperationError: it cannot be written yet.
    """
    noes = [record for record in newest if record["event"] == "approval.deny" and record["detail"].get("person")]
    if not noes:
        return
    held = {release.id: release for release in ledger.releases("held")}
    for record in noes:
        detail = record["detail"]
        release = held.get(str(detail.get("release", "")))
        if release is None or record["payload"] != dict(release.recorded):
            continue
        if any(one.verdict == "reject" and one.record >= 0 for one in ledger.approvals(release.id)):
            continue
        no = Approval(
            release.id, detail["person"], detail["certificate"], release.digest, "reject", "", record["t"] / 1000,
            record=record["seq"], reason_code=record["reasons"][0],
        )  # fmt: skip
        ledger.approve(no, again=True)


def _hit_places(body: ProtobufMessage, hits: Sequence[Mapping[str, int]]) -> list[tuple[str, list[str]]]:
    """Return where in a message its screens found something, and which screens; never a text.

    Args:
        body: of the message.
        hits: for each text, in the order of `policies.screens.texts_of`.
    """
    if isinstance(body, pb.PublicResponses):
        places = [
            f"row {prompt.prompt_index} answer {number}"
            for prompt in body.prompts
            for number in range(1, len(prompt.responses) + 1)
        ]
    else:
        places = [f"text {number}" for number in range(1, len(hits) + 1)]
    return [(place, sorted(found)) for place, found in zip(places, hits, strict=True) if found]
