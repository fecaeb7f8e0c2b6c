"""Commands of the control socket: what people may order a running guard to do, and the lists that they read first.

The control server has verified each command (certificate, signature, expiry, role). It runs on the loop's thread,
between two exchanges, or while a message is graded: nothing of that is decided yet, and a command finds all as it was
before it came. So no command waits for grading, and none finds a message half judged. Each answer names, as `record`,
the audit log's record of the command itself; what is recorded of its effects comes behind it.

*Global adapters* (T52): accept a held one anyway, refuse it, go back to an earlier one. The command names the run and
the digest that the person was shown, and is recorded before it is done (T36, T39). Nothing leaves but the one code: an
accepted adapter is trained on when a round begins with it, or with one that passes against it; the round that is open
goes on without this silo.

*Halts*: a kind that its screens halted (T18), or all of this silo, where somebody signed two
transcripts of one round (T20). More hits on one UTC day than `max_hits_per_day` halt the kind: whoever may choose what
is asked could otherwise learn from what is withheld. The halt outlives the day and every restart. It ends when as many
approvers as the policy's `approvals.release_after_halt` says have signed a command over exactly this halt
(`approvals.release`, which frees no held message).

*Held payloads*: what a held release would send, before it is sent. The action `payload.read` says who may read it, as
for what has left (`archive.py`). The record with the person is written before the ticket is handed out, and says
nothing of what was read. The loop only checks and records; the thread that asks makes what is shown, since a tensor of
many values takes seconds. A ticket holds no content, and is void when the hold has ended.

Does not stop: a person whose role allows the command, whom the log names; approvers who release or approve without
looking; what this silo sent while it trained on an adapter that is rolled back, which is in the federation's mean;
root, who can read the files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certs.commands import VerifiedCommand
from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import CLOCK_ACCEPTED
from fedsilo.audit.segments import LogLostError
from fedsilo.audit.witness import OWN_HISTORY_LOST
from fedsilo.control.answers import Answer, Halt, HaltList, HeldPayload
from fedsilo.control.server import ControlServer, Publish
from fedsilo.files.task_files import Task
from fedsilo.protocol.clocks import CLOCK_UNKNOWN, HALTING
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UsageError,
    VerificationError,
    WireCode,
)
from silo.guard.archive import Tickets, payload_view, require_readable
from silo.guard.clock_watch import ClockWatch
from silo.guard.decisions import Judge, orders_of
from silo.guard.exchange import FileExchange
from silo.guard.gate import Gate
from silo.guard.ledger import Approval, Ledger, Release
from silo.guard.policy_change import reload
from silo.guard.releases import Releases
from silo.guard.run import RunManager, SiloRun
from silo.guard.site import Site, require_isolation
from silo.guard.trainer_process.supervisor import TrainerHandle

# ---- commands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Orders:
    """Carries out what people order, on the loop's thread.

    Attributes:
        publish: tells people what happens.
        show: shows people the present state.
        on_loop: runs work on the loop's thread and waits for it.
        stop: asks the loop to end.
        fail: ends the loop with a cause.
        files: of a silo that has no line.
        watch: what is known of the clock.
    """

    site: Site
    gate: Gate
    judge: Judge
    ledger: Ledger
    audit: AuditLog
    releases: Releases
    halts: Halts
    runs: RunManager
    publish: Publish
    show: Callable[[], None]
    trainer: TrainerHandle
    on_loop: Callable[[Callable[[], Any]], Any]
    stop: Callable[[], None]
    fail: Callable[[FedSiloError], None]
    files: FileExchange | None = None
    watch: ClockWatch | None = None

    def register(self, control_server: ControlServer) -> None:
        """Queries and commands of the control socket."""
        control_server.register_query("adapters", self.runs.acceptance.view)
        control_server.register_query("halts", lambda arguments: HaltList(halts=tuple(self.halts.rows())))
        for name, action, work in (
            ("approvals.approve", "release.approve", self.approve),
            ("approvals.reject", "release.reject", self.reject),
            ("approvals.defer", "release.defer", self.defer),
            ("approvals.release", "halt.release", self.lift_halt),
            ("pause", "silo.pause", self.pause),
            ("resume", "silo.resume", self.resume),
            ("leave", "silo.leave", self.leave),
            ("stop", "silo.stop", self.stop_by),
            ("policy.reload", "change.propose", self.reload),
            ("transfer.export", "transfer.export", self.export_release),
            ("transfer.import", "transfer.import", self.import_plan),
            ("adapter.accept", "adapter.accept", self.accept_adapter),
            ("adapter.refuse", "adapter.refuse", self.refuse_adapter),
            ("adapter.rollback", "adapter.rollback", self.roll_back),
        ):
            control_server.register_command(name, action, self._on_loop_with(work))
        if self.watch is not None:
            watch = self.watch

            def accept(command: VerifiedCommand) -> dict[str, Any]:
                return self.accept_clock(command, watch, control_server.accept_clock)

            control_server.register_command("clock.accept", "halt.release", self._on_loop_with(accept), by_clock=True)
        payloads = HeldPayloads(self.ledger, self.audit, lambda: self.site.public.rows, record=self.judge.record)
        payloads.register(control_server, self.on_loop)

    def _on_loop_with(self, work: Callable[[VerifiedCommand], Any]) -> Callable[[VerifiedCommand], Any]:
        return lambda command: self.on_loop(lambda: self._in_time(command, work))

    def _in_time(self, command: VerifiedCommand, work: Callable[[VerifiedCommand], Any]) -> Any:
        """An answer is no answer before it is known whether what it answers has expired (T41)."""
        if self.watch is not None and self.watch.unknown and command.name.startswith("approvals."):
            raise ConflictError(
                "nobody has vouched for this machine's clock yet: the silo asks its coordinator first",
                hint="give the command again in a minute; `silo status` says how it stands",
                code=CLOCK_UNKNOWN,
            )
        return work(command)

    def accept_clock(
        self, command: VerifiedCommand, watch: ClockWatch, forget_later: Callable[[], None]
    ) -> dict[str, Any]:
        """The clock counts as it is now, and no later time that was seen before it.

        Args:
            command: argument {halt}, the digest of the halt that the person was shown.
            watch: knows it.
            forget_later: has the control server forget later times, too.

        Raises:
            NotFoundError, ConflictError: nothing is halted for its clock, or not this.
            OperationError: the log, or the ledger, takes nothing; then all is as before.
        """
        before, halted, code = self.judge.now(), self.judge.halted, self.judge.halt_code
        fault = watch.begin_acceptance(command)
        detail = {
            "code": fault.code,
            "halt": fault.digest,
            "showed": int(fault.showed),
            "latest": int(max(before, fault.showed)),
            "off_seconds": int(fault.seconds),
        }
        if halted == fault.message:
            self.judge.halt("", "")  # a halted gate records nothing
        try:
            self.gate.close_windows()  # or polls would go on under a window whose hour is in the released time
            receipt = self.recorded(CLOCK_ACCEPTED, command, needed=True, detail=detail)
            forget_later()
            now, difference = watch.to_accept()
            self.judge.accept_clock(now, difference)
        except FedSiloError:
            watch.restore(fault)
            self.judge.halt(halted, code)
            raise
        watch.accepted(now)
        self.publish("clock.accepted", {"by": command.person})
        self.show()
        return {"accepted": now, "released": detail["latest"], **receipt}

    def approve(self, command: VerifiedCommand) -> dict[str, Any]:
        """Count one yes. Where it was the last one needed, the answer says what came of it: sent, denied, or waits (in
        the outbox)."""
        release, settled = self.releases.approve(command)
        state = "held" if settled is None else settled.outcome
        if settled is not None:
            went = self.runs.send_freed_or_report(settled)
            if state == "allowed":
                state = "sent" if went else "waits"
        yeses = [item for item in self.ledger.approvals(release.id) if item.verdict == "approve"]
        record = next((item.record for item in yeses if item.person == command.person), None)
        if self.ledger.release(release.id).state == "denied":
            state = "denied"  # a plan that was approved and cannot begin here
        return {
            "release": release.id,
            "state": state,
            "given": [item.person for item in yeses],
            "needed": release.persons,
            "record": record,
            "audit_size": self.audit.size,
        }

    def reject(self, command: VerifiedCommand) -> dict[str, Any]:
        settled = self.releases.reject(command)
        self.runs.send_freed_or_report(settled)
        return {
            "release": settled.release.id,
            "state": "rejected",
            "record": settled.record,
            "audit_size": self.audit.size,
        }

    def defer(self, command: VerifiedCommand) -> dict[str, Any]:
        """The person is asked later; shown at once, so that no console asks again in between."""
        release, number = self.releases.defer(command)
        until = self.ledger.deferred(release.id)[command.person]
        self.show()
        return {
            "release": release.id,
            "state": "held",
            "deferred_until": until,
            "expires_at": release.expires_at,
            "record": number,
            "audit_size": self.audit.size,
        }

    def lift_halt(self, command: VerifiedCommand) -> dict[str, Any]:
        """See `Halts.lift_halt`. The command is called `approvals.release`, but it frees no held message."""
        answer = self.halts.lift_halt(command)
        self.publish("halt.signed", {"kind": answer["kind"], "released": answer["released"]})
        return {**answer, "audit_size": self.audit.size}

    def pause(self, command: VerifiedCommand) -> dict[str, Any]:
        """Begin no further step, also after a restart. Carried out also where nothing can be written: it lets nothing
        out; then it holds until the guard ends, and says so."""
        run = self.run_of(command)
        receipt = self.recorded("silo.pause", command, needed=False)
        run.paused = True
        try:
            self.ledger.keep_paused(run.plan.run, True)
        except OperationError:
            receipt["until_restart"] = True
        self.publish("paused", {"by": command.person})
        self.show()
        return {"paused": True, **receipt}

    def resume(self, command: VerifiedCommand) -> dict[str, Any]:
        """Resume. Raises OperationError: the log or the ledger cannot be written."""
        run = self.run_of(command)
        receipt = self.recorded("silo.resume", command, needed=True)
        self.ledger.keep_paused(run.plan.run, False)
        run.paused = False
        self.publish("resumed", {"by": command.person})
        run.advance()
        self.show()
        return {"paused": False, **receipt}

    def leave(self, command: VerifiedCommand) -> dict[str, Any]:
        """Raises NotFoundError: there is no run. OperationError: the log, or the ledger, takes nothing."""
        run = self.run_of(command).plan.run
        receipt = self.recorded("silo.leave", command, needed=True)
        self.runs.leave("ORDERED", self.judge.view.round)
        self.show()
        return {"run": run, "left": True, **receipt}

    def export_release(self, command: VerifiedCommand) -> dict[str, Any]:
        """Raises UsageError: this silo dials its coordinator. Further as `FileExchange.export`."""
        files, path = self._files_at(command)
        return files.export(path, lambda detail: self.recorded("transfer.export", command, needed=True, detail=detail))

    def import_plan(self, command: VerifiedCommand) -> dict[str, Any]:
        """Raises UsageError: this silo dials its coordinator. Further as `FileExchange.take`."""
        files, path = self._files_at(command)
        return files.take(path, lambda detail: self.recorded("transfer.import", command, needed=True, detail=detail))

    def _files_at(self, command: VerifiedCommand) -> tuple[FileExchange, Path]:
        if self.files is None:
            raise UsageError("this silo dials its coordinator", hint="files are for `coordinator: {address: files}`")
        path = Path(str(command.arguments.get("path", "")))
        if not path.is_absolute():
            raise UsageError(f"{str(path)[:200]!r} is no absolute path", code="PATH")
        return self.files, path

    def run_of(self, command: VerifiedCommand) -> SiloRun:
        self._require_same_run(command)
        if self.runs.run is None:
            raise NotFoundError("there is no run here")
        return self.runs.run

    def _require_same_run(self, command: VerifiedCommand) -> None:
        """An order that names the run it was given in, or "" for none, holds for that one alone (T36).

        Raises:
            ConflictError: STALE_VIEW.
        """
        shown, here = command.arguments.get("run"), self.runs.run.plan.run if self.runs.run else ""
        if shown is not None and shown != here:
            now = f"in run {here!r}" if here else "in no run"
            raise ConflictError(
                f"this silo is {now}, the order is of {str(shown)[:64]!r}",
                code="STALE_VIEW",
                hint="look again: `silo status`" if here else "an order about a run is given while it is open here",
            )

    def recorded(
        self, event: str, command: VerifiedCommand, *, needed: bool, detail: Mapping[str, Any] | None = None
    ) -> dict[str, int]:
        """The record of who ordered it, before it is done.

        Args:
            event: of the record.
            command: as verified.
            needed: without a record it is not done (T39).
            detail: what it is about.
        """
        fields = {
            "person": command.person,
            "certificate": command.certificate_fingerprint,
            "request": command.request_id,
            **(detail or {}),
        }
        run = {"run": self.judge.view.run} if self.judge.view.run else {}
        try:
            policy = {"effective": self.judge.policy.digest}
            number = self.judge.record(event, detail=fields, policy=policy, **run, **orders_of(command.order))
        except FedSiloError:
            if needed:
                raise
            return {}
        return {"record": number, "audit_size": self.audit.size}

    def reload(self, command: VerifiedCommand) -> dict[str, Any]:
        """Policy and charter from their files, if nothing in them is looser (T34); what is held is judged again."""
        policy, step, number = reload(self.site, self.judge.policy, self.ledger, self.judge.record, command)
        self.judge.policy = policy
        for settled in self.releases.rejudge_held():
            self.runs.send_freed_or_report(settled)
        ends = ""
        try:
            require_isolation(self.trainer.isolation, policy)
        except NotAllowedError as error:
            ends = error.message
            self.fail(error)  # in force all the same: what runs here may not go on under it
        outcome = {"policy": policy.digest, "change": step.how, "fields": [change.name for change in step.changes]}
        self.publish("policy.loaded", outcome)
        # At once, not after the next exchange: nobody who asks now may be shown the former policy.
        self.show()
        return {**outcome, "record": number, "audit_size": self.audit.size, "ends": ends}

    def stop_by(self, command: VerifiedCommand) -> dict[str, Any]:
        """Guard and trainer end, also where the log takes nothing."""
        self._require_same_run(command)
        receipt = self.recorded("silo.stop", command, needed=False)
        self.stop()
        return {"stopping": True, "by": command.person, **receipt}

    # ---- global adapters -------------------------------------------------------------------------------

    def accept_adapter(self, command: VerifiedCommand) -> dict[str, Any]:
        """Arguments {run, digest}. Raises NotFoundError, ConflictError, OperationError."""
        digest = self._held_adapter(command)
        receipt = self.recorded("adapter.accept", command, needed=True, detail={"adapter": digest})
        self.runs.set_view(self.runs.acceptance.accept(digest, self.judge.view))
        return {"adapter": digest, "accepted": True, **receipt}

    def refuse_adapter(self, command: VerifiedCommand) -> dict[str, Any]:
        """Arguments {run, digest}. Raises as `accept_adapter`."""
        digest = self._held_adapter(command)
        receipt = self.recorded("adapter.refuse", command, needed=True, detail={"adapter": digest})
        self.runs.acceptance.refuse(digest)
        return {"adapter": digest, "accepted": False, **receipt}

    def roll_back(self, command: VerifiedCommand) -> dict[str, Any]:
        """Arguments {run, to}. Raises as `Acceptance.target`; OperationError: the log, or the disk, takes nothing."""
        run, acceptance = self.run_of(command), self.runs.acceptance
        digest = acceptance.target(run.plan.run, str(command.arguments.get("to", "")))
        receipt = self.recorded("adapter.rollback", command, needed=True, detail={"adapter": digest})
        self.runs.set_view(acceptance.roll_back(digest, self.judge.view))
        if left := acceptance.is_refused(self.judge.view.base_digest):
            self.runs.abandon_round(WireCode.ADAPTER_REFUSED)
        return {"adapter": digest, "round_left": left, **receipt}

    def _held_adapter(self, command: VerifiedCommand) -> str:
        run, digest = self.run_of(command), str(command.arguments.get("digest", "")).removeprefix("sha256:")
        self.runs.acceptance.require_held(run.plan.run, digest)
        return digest


# ---- halts -------------------------------------------------------------------------------------------------------

ROLE = "approver"
EQUIVOCATION_KIND = "round.open"  # what it is listed and released as: no round opens meanwhile
_OF_A_LOG = frozenset({OWN_HISTORY_LOST, "PEER_KEY_CHANGED", VerificationError.default_code})


def ends_when(code: str, state_dir: Path) -> str:
    """Say what must happen until a silo that is halted with this code sends again; in all other cases than these it is
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
    """Lifts halts, once enough approvers have signed.

    Args:
        judge: knows what is halted, and records.
        ledger: keeps who has signed so far.
    """

    def __init__(self, judge: Judge, ledger: Ledger) -> None:
        self._judge = judge
        self._ledger = ledger

    def rows(self) -> list[Halt]:
        """Each kind that is halted: since when, what people sign to lift it, and who has signed."""
        return [
            Halt(
                kind=kind,
                since=since,
                digest=self._digest(kind, since),
                policy_digest=self._judge.policy.digest,
                needed=self._judge.policy.file.approvals.release_after_halt,
                given=tuple(self._given(kind, since)),
            )
            for kind, since in sorted(self._halts().items())
        ]

    def _halts(self) -> dict[str, float]:
        evidence = self._ledger.equivocation
        return self._judge.book.screen_halts | ({EQUIVOCATION_KIND: float(evidence["since"])} if evidence else {})

    def lift_halt(self, command: VerifiedCommand) -> dict[str, Any]:
        """Count one approver's yes; the last one needed ends the halt. It frees no held message: each of those still
        waits for its own approvals (`Releases.approve`).

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
        digest, needed = self._digest(kind, since), self._judge.policy.file.approvals.release_after_halt
        # Killed between the last yes and its effect: whoever said yes says it again.
        if len(given := self._given(kind, since)) < needed and command.person in given:
            raise ConflictError(f"{command.person} has answered for this halt of {kind} already")
        person, certificate = command.person, command.certificate_fingerprint
        of_transcripts, halted = kind == EQUIVOCATION_KIND, self._judge.halted
        if of_transcripts:
            self._judge.halted = ""  # a halted gate records nothing
        try:
            # Recorded first: no yes counts that nobody finds in the log.
            number = self._judge.record(
                "approval.grant",
                kind=kind,
                reasons=[_reason(kind)],
                detail={"person": person, "certificate": certificate, "since": int(since)},
                policy={"effective": self._judge.policy.digest},
                **orders_of(command.order),
            )
            yes = Approval(_name(digest), person, certificate, digest, "approve", "", self._judge.now(), record=number)
            self._ledger.approve(yes, again=True)
            given = self._given(kind, since)
            if len(given) >= needed:
                self._end(kind, given)
                # A clock that was set back may begin the next halt at the same second: no yes is left for it (T41).
                self._ledger.forget_approvals(_name(digest))
                halted = ""
        finally:
            if of_transcripts:
                self._judge.halted = self._judge.halted or halted
        return {"kind": kind, "released": len(given) >= needed, "given": given, "needed": needed, "record": number}

    def _end(self, kind: str, given: list[str]) -> None:
        """Recorded first, so that no halt is lifted without the names behind it."""
        policy, reasons = {"effective": self._judge.policy.digest}, [_reason(kind)]
        self._judge.record("release", kind=kind, reasons=reasons, detail={"persons": given}, policy=policy)
        if kind == EQUIVOCATION_KIND:
            self._ledger.keep_equivocation({})
        else:
            self._judge.lift_halt(kind)

    def _given(self, kind: str, since: float) -> list[str]:
        """Return whose yes to this halt under the policy in force is in the log; one under another policy is void."""
        yeses = self._ledger.approvals(_name(self._digest(kind, since)))
        return [approval.person for approval in yeses if approval.record >= 0]

    def _digest(self, kind: str, since: float) -> str:
        """Return what people sign to lift it: this halt, under this policy, with what people were to look at."""
        sides = self._ledger.equivocation if kind == EQUIVOCATION_KIND else {}
        evidence = sha256_hex(canonical_json([sides.get("known"), sides.get("shown")])) if sides else ""
        return sha256_hex(canonical_json(["fedsilo halt", kind, since, evidence, self._judge.policy.digest]))


def _reason(kind: str) -> str:
    return "EQUIVOCATION" if kind == EQUIVOCATION_KIND else "SCREEN_HALT"


def _name(digest: str) -> str:
    return f"halt/{digest}"


# ---- what a held release would send ------------------------------------------------------------------------------

COMMAND = QUERY = "approvals.payload"


class HeldPayloads:
    """Shows people the bytes of a held release, by signed command; each look is recorded.

    Args:
        prompts: rows of this site's own copy of the public set.
        record: appends to the log; the gate's, so that a log that takes nothing halts it.
    """

    def __init__(
        self,
        ledger: Ledger,
        audit: AuditLog,
        prompts: Callable[[], Sequence[Task]],
        *,
        record: Callable[..., int],
    ) -> None:
        self._ledger = ledger
        self._audit = audit
        self._prompts = prompts
        self._record = record
        self._tickets = Tickets()

    def register(self, control_server: ControlServer, on_loop: Callable[[Callable[[], Any]], Any]) -> None:
        control_server.register_command(COMMAND, "payload.read", lambda command: self.ask(command, on_loop))
        control_server.register_query(QUERY, self.fetch)

    def fetch(self, arguments: Mapping[str, Any]) -> Answer:
        """Return what a ticket was handed out for, once.

        Raises:
            NotAllowedError: no such ticket. ConflictError: the hold has ended meanwhile.
        """
        return self._tickets.take(arguments)

    def ask(self, command: VerifiedCommand, on_loop: Callable[[Callable[[], Any]], Any]) -> dict[str, Any]:
        """A ticket for the bytes of a held release.

        Args:
            command: arguments {release, digest}: the bytes that the person was shown the facts of.
            on_loop: runs work on the loop's thread and waits for it.

        Raises:
            NotFoundError: there is no such release. ConflictError: it is not held any more, or it holds other bytes.
            VerificationError: the file is not what was held (`PAYLOAD_CHANGED`). UsageError: too big to be read.
        """
        release: Release = on_loop(lambda: self._shown(command))
        require_readable(release.kind, release.payload_bytes)
        self._ledger.payloads.read(release.digest)
        number: int = on_loop(lambda: self._recorded(command))
        ticket = self._tickets.hand_out(lambda: self._content(release.id))
        return {"ticket": ticket, "record": number, "audit_size": self._audit.size}

    def _held(self, release_id: str) -> Release:
        """Return a held release. Raises NotFoundError, ConflictError."""
        release = self._ledger.release(release_id)
        if release.state != "held":
            raise ConflictError(
                f"release {release.id} is {release.state}, no longer held",
                hint="what left and was archived: fedsilo audit show RECORD --payload",
                code="NOT_HELD",
            )
        return release

    def _shown(self, command: VerifiedCommand) -> Release:
        """The release, held, if it still is what the person was shown."""
        release = self._held(str(command.arguments.get("release", "")))
        digest = str(command.arguments.get("digest", "")).removeprefix("sha256:")
        if digest != release.digest:
            raise ConflictError(f"digest of {release.id} is not what was shown", hint="look again", code="STALE_VIEW")
        return release

    def _content(self, release_id: str) -> HeldPayload:
        release = self._held(release_id)
        return payload_view(release, self._ledger.payloads.read(release.digest), self._prompts())

    def _recorded(self, command: VerifiedCommand) -> int:
        """Record the look, if the release is still held: it may have ended while its bytes were read."""
        release = self._shown(command)
        return self._record(
            "payload.read",
            **release.place._asdict(),
            detail={"person": command.person, "certificate": command.certificate_fingerprint, "release": release.id},
        )
