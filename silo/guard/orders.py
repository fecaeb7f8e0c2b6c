"""What persons may order a running guard to do: commands of the control socket, and the lists they read first.

Each command was verified by the desk (certificate, signature, expiry, role) and runs on the loop's thread: between two
exchanges, or while a message is graded: nothing of that is decided yet, and an order finds all as it was before it
came. So no order waits for grading, and none finds a message half judged. Each answer names, as `record`, the audit
log's record of the order itself; what is recorded of its effects comes behind it.
Does not stop: a person whose role allows the order. The log names who gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certs.commands import VerifiedCommand
from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import CLOCK_ACCEPTED
from fedsilo.control.desk import ControlDesk
from fedsilo.protocol.clocks import CLOCK_UNKNOWN
from fedsilo.protocol.errors import (
    ConflictError,
    FedSiloError,
    NotAllowedError,
    NotFoundError,
    OperationError,
    UsageError,
)
from silo.guard.adapter_orders import AdapterOrders
from silo.guard.clock_watch import ClockWatch
from silo.guard.decisions import orders_of
from silo.guard.exchange import FileExchange
from silo.guard.gate import Gate
from silo.guard.halts import Halts
from silo.guard.held_payloads import HeldPayloads
from silo.guard.in_force import reload
from silo.guard.ledger import LEFT, Ledger
from silo.guard.panel import Panel
from silo.guard.releases import Releases
from silo.guard.run import RunManager, SiloRun
from silo.guard.startup import Site, require_rung
from silo.guard.supervisor import TrainerHandle


@dataclass(frozen=True)
class Orders:
    """Attributes:
    on_loop: runs work on the loop's thread and waits for it.
    stop: asks the loop to end.
    fail: ends the loop with a cause.
    files: of a silo that has no line.
    watch: what is known of the clock.
    """

    site: Site
    gate: Gate
    ledger: Ledger
    audit: AuditLog
    releases: Releases
    halts: Halts
    runs: RunManager
    panel: Panel
    trainer: TrainerHandle
    on_loop: Callable[[Callable[[], Any]], Any]
    stop: Callable[[], None]
    fail: Callable[[FedSiloError], None]
    files: FileExchange | None = None
    watch: ClockWatch | None = None

    def register(self, desk: ControlDesk) -> None:
        """Queries and commands of the control socket."""
        for query, answer in self.panel.queries().items():
            desk.register_query(query, answer)
        desk.register_query("halts", lambda arguments: {"halts": self.halts.rows()})
        for name, action, work in (
            ("approvals.approve", "release.approve", self.approve),
            ("approvals.reject", "release.reject", self.reject),
            ("approvals.defer", "release.defer", self.defer),
            ("approvals.release", "halt.release", self.release_halt),
            ("pause", "silo.pause", self.pause),
            ("resume", "silo.resume", self.resume),
            ("leave", "silo.leave", self.leave),
            ("stop", "silo.stop", self.stop_by),
            ("policy.reload", "change.propose", self.reload),
            ("transfer.export", "transfer.export", self.export_release),
            ("transfer.import", "transfer.import", self.import_plan),
        ):
            desk.register_command(name, action, self._on_loop_with(work))
        if self.watch is not None:
            watch = self.watch

            def accept(command: VerifiedCommand) -> dict[str, Any]:
                return self.accept_clock(command, watch, desk.accept_clock)

            desk.register_command("clock.accept", "halt.release", self._on_loop_with(accept), by_clock=True)
        AdapterOrders(self).register(desk, self._on_loop_with)
        payloads = HeldPayloads(
            self.ledger, self.audit, lambda: self.site.public.rows,
            record=lambda event, **fields: self.gate.record(event, **fields),  # noqa: PLW0108  # looked up when used
        )  # fmt: skip
        payloads.register(desk, self.on_loop)

    def _on_loop_with(self, work: Callable[[VerifiedCommand], Any]) -> Callable[[VerifiedCommand], Any]:
        return lambda command: self.on_loop(lambda: self._in_time(command, work))

    def _in_time(self, command: VerifiedCommand, work: Callable[[VerifiedCommand], Any]) -> Any:
        """An answer is no answer before it is known whether what it answers has expired (T41)."""
        if self.watch is not None and self.watch.unknown and command.name.startswith("approvals."):
            raise ConflictError(
                "nobody has vouched for this machine's clock yet: the silo asks its coordinator first",
                hint="give the command again in a minute; `silo status` says how it stands", code=CLOCK_UNKNOWN,
            )  # fmt: skip
        return work(command)

    def accept_clock(
        self, command: VerifiedCommand, watch: ClockWatch, forget_later: Callable[[], None]
    ) -> dict[str, Any]:
        """The clock counts as it is now, and no later time that was seen before it.

        Args:
            command: argument {halt}, the digest of the halt that the person was shown.
            watch: knows it.
            forget_later: has the desk forget later times, too.

        Raises:
            NotFoundError, ConflictError: nothing is halted for its clock, or not this.
            OperationError: the log, or the ledger, takes nothing; then all is as before.
        """
        before, halted, code = self.gate.now(), self.gate.halted, self.gate.halt_code
        fault = watch.begin_acceptance(command)
        detail = {
            "code": fault.code, "halt": fault.digest, "showed": int(fault.showed),
            "latest": int(max(before, fault.showed)), "off_seconds": int(fault.seconds),
        }  # fmt: skip
        if halted == fault.message:
            self.gate.halt("", "")  # a halted gate records nothing
        try:
            self.gate.close_windows()  # or polls would go on under a window whose hour is in the released time
            told = self.recorded(CLOCK_ACCEPTED, command, needed=True, detail=detail)
            forget_later()
            now, difference = watch.to_accept()
            self.gate.accept_clock(now, difference)
        except FedSiloError:
            watch.restore(fault)
            self.gate.halt(halted, code)
            raise
        watch.accepted(now)
        self.panel.publish("clock.accepted", {"by": command.person})
        self.panel.show(self.runs.run, link_fault=self.gate.counters.last_fault)
        return {"accepted": now, "released": detail["latest"], **told}

    def approve(self, command: VerifiedCommand) -> dict[str, Any]:
        release, settled = self.releases.approve(command)
        if settled is not None:
            self.runs.settle(settled)
        yeses = [item for item in self.ledger.approvals(release.id) if item.verdict == "approve"]
        record = next((item.record for item in yeses if item.person == command.person), None)
        state = settled.outcome if settled else "held"
        if self.ledger.release(release.id).state == "denied":
            state = "denied"  # a plan that was approved and cannot begin here
        return {
            "release": release.id, "state": "sent" if state == "allowed" else state,
            "given": [item.person for item in yeses], "needed": release.persons, "record": record,
            "audit_size": self.audit.size,
        }  # fmt: skip

    def reject(self, command: VerifiedCommand) -> dict[str, Any]:
        settled = self.releases.reject(command)
        self.runs.settle(settled)
        return {
            "release": settled.release.id, "state": "rejected", "record": settled.record,
            "audit_size": self.audit.size,
        }  # fmt: skip

    def defer(self, command: VerifiedCommand) -> dict[str, Any]:
        """The person is asked later; shown at once, so that no console asks again in between."""
        release, number = self.releases.defer(command)
        until = self.ledger.deferred(release.id)[command.person]
        self.panel.show(self.runs.run, link_fault=self.gate.counters.last_fault)
        return {
            "release": release.id, "state": "held", "deferred_until": until, "expires_at": release.expires_at,
            "record": number, "audit_size": self.audit.size,
        }  # fmt: skip

    def release_halt(self, command: VerifiedCommand) -> dict[str, Any]:
        answer = self.halts.release(command)
        self.panel.publish("halt.signed", {"kind": answer["kind"], "released": answer["released"]})
        return {**answer, "audit_size": self.audit.size}

    def pause(self, command: VerifiedCommand) -> dict[str, Any]:
        """Begin no further step, also after a restart. Carried out also where nothing can be written: it lets nothing
        out; then it holds until the guard ends, and says so."""
        run = self.run_of(command)
        told = self.recorded("silo.pause", command, needed=False)
        run.paused = True
        try:
            self.ledger.keep_paused(run.plan.run, True)
        except OperationError:
            told["until_restart"] = True
        self.panel.publish("paused", {"by": command.person})
        self.panel.show(run, link_fault=self.gate.counters.last_fault)
        return {"paused": True, **told}

    def resume(self, command: VerifiedCommand) -> dict[str, Any]:
        """Raises OperationError: the log, or the ledger, takes nothing."""
        run = self.run_of(command)
        told = self.recorded("silo.resume", command, needed=True)
        self.ledger.keep_paused(run.plan.run, False)
        run.paused = False
        self.panel.publish("resumed", {"by": command.person})
        run.advance()
        self.panel.show(run, link_fault=self.gate.counters.last_fault)
        return {"paused": False, **told}

    def leave(self, command: VerifiedCommand) -> dict[str, Any]:
        """Raises NotFoundError: there is no run. OperationError: the log, or the ledger, takes nothing."""
        run = self.run_of(command).plan.run
        told = self.recorded("silo.leave", command, needed=True)
        self.runs.leaving.begin(run)
        self.runs.end_run(LEFT)
        self.panel.show(None, link_fault=self.gate.counters.last_fault)
        return {"run": run, "left": True, **told}

    def export_release(self, command: VerifiedCommand) -> dict[str, Any]:
        """Raises UsageError: this silo dials its coordinator. Further as `FileExchange.export`."""
        files, path = self._files_at(command)
        return files.export(path, lambda told: self.recorded("transfer.export", command, needed=True, detail=told))

    def import_plan(self, command: VerifiedCommand) -> dict[str, Any]:
        """Raises UsageError: this silo dials its coordinator. Further as `FileExchange.take`."""
        files, path = self._files_at(command)
        return files.take(path, lambda told: self.recorded("transfer.import", command, needed=True, detail=told))

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
                f"this silo is {now}, the order is of {str(shown)[:64]!r}", code="STALE_VIEW",
                hint="look again: `silo status`" if here else "an order about a run is given while it is open here",
            )  # fmt: skip

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
        told = {
            "person": command.person, "certificate": command.certificate_fingerprint, "request": command.request_id,
            **(detail or {}),
        }  # fmt: skip
        run = {"run": self.gate.view.run} if self.gate.view.run else {}
        try:
            policy = {"effective": self.gate.policy.digest}
            number = self.gate.record(event, detail=told, policy=policy, **run, **orders_of(command.order))
        except FedSiloError:
            if needed:
                raise
            return {}
        return {"record": number, "audit_size": self.audit.size}

    def reload(self, command: VerifiedCommand) -> dict[str, Any]:
        """Policy and charter from their files, if nothing in them is looser (T34); what is held is judged again."""
        policy, step, number = reload(self.site, self.gate.policy, self.ledger, self.gate.record, command)
        self.gate.adopt(policy)
        for settled in self.releases.judge_again():
            self.runs.settle(settled)
        ends = ""
        try:
            require_rung(self.trainer.rung, policy)
        except NotAllowedError as error:
            ends = error.message
            self.fail(error)  # in force all the same: what runs here may not go on under it
        told = {"policy": policy.digest, "change": step.how, "fields": [change.name for change in step.changes]}
        self.panel.publish("policy.loaded", told)
        # At once, not after the next exchange: nobody who asks now may be shown the former policy.
        self.panel.show(self.runs.run, link_fault=self.gate.counters.last_fault)
        return {**told, "record": number, "audit_size": self.audit.size, "ends": ends}

    def stop_by(self, command: VerifiedCommand) -> dict[str, Any]:
        """Guard and trainer end, also where the log takes nothing."""
        self._require_same_run(command)
        told = self.recorded("silo.stop", command, needed=False)
        self.stop()
        return {"stopping": True, "by": command.person, **told}
