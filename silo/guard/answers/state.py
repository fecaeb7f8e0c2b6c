"""What people see of a guard: the snapshot behind `silo status` and the console, and the lists behind the queries.

Facts, counts and digests of this site only; no prompt, no answer, no tensor value. Built on the loop's thread and
handed to the desk whole, so a reader never sees half of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC
from typing import Any, Protocol

from fedsilo.audit.log import AuditLog
from fedsilo.audit.message_index import MessageIndex
from fedsilo.audit.reader import LogPages
from fedsilo.audit.round_marks import RoundMarks
from fedsilo.audit.witness import OWN_HISTORY_LOST
from fedsilo.control.audit_queries import AuditView, MessageView
from fedsilo.control.desk import ControlDesk, QueryHandler
from fedsilo.control.query_arguments import Asked
from fedsilo.protocol.plan import Plan
from silo.guard.answers.curves import FILE, PROMPTS, CurveView, FigureHistory, prompts_answered
from silo.guard.answers.limits import LimitsView
from silo.guard.answers.queries import SiteView, ledger_page, release_page
from silo.guard.answers.rounds import RoundView
from silo.guard.clock_watch import ClockWatch
from silo.guard.gate import Gate
from silo.guard.ledger import Ledger
from silo.guard.releases import Releases
from silo.guard.site import Site
from silo.guard.trainer_report import PROMPT_SETS, ValuesUnusable, counts, number, phase_in, ready_facts
from silo.measuring import GuardTask

# Of what the trainer reports with a finished task, this is shown.
_METRICS_SHOWN = (
    "reward_mean", "zero_variance_share", "tokens", "kl", "clip_share", "donors_used", "donors_wanted", "donors_found",
    "donors_rejected", "drift", "pass_at_1", "pass_at_1_greedy", "seconds", "rollout_kl", "stale_detectable_steps",
    "rollout_tokens_per_second", "memory_peak_bytes",
)  # fmt: skip
# This is kept for the curves alone.
_METRICS_KEPT = (
    "rollout_seconds", "agreement_seconds", "grade_seconds", "update_seconds", "update_tokens_per_second", "grad_norm",
    "entropy", "logp_own", "logp_donor", "truncated_share", "zero_variance_share_before", "alpha_mean", "alpha_max",
    "swapped_share", "beta_mean", "beta_max", "omega", "rollout_kl_limit", "adapter_visible_share", "stale_previous",
    "stale_start", "stale_base", "marker_distance", "marker_contrast",
)  # fmt: skip


class OpenRun(Protocol):
    """What is shown of the run that this silo takes part in."""

    @property
    def plan(self) -> Plan: ...

    @property
    def paused(self) -> bool: ...

    @property
    def busy(self) -> bool: ...


class Panel:
    """Args:
    site, gate, ledger, audit, releases: read only.
    desk: where it is shown.
    clock: UTC seconds.
    watch: what is known of the clock.
    """

    def __init__(
        self,
        site: Site,
        gate: Gate,
        ledger: Ledger,
        audit: AuditLog,
        releases: Releases,
        desk: ControlDesk,
        *,
        clock: Callable[[], float] = time.time,
        watch: ClockWatch | None = None,
    ) -> None:
        self._watch = watch
        self._site = site
        self._gate = gate
        self._ledger = ledger
        self._audit = audit
        self._releases = releases
        self._desk = desk
        self._trainer: dict[str, Any] = {}
        self._task: dict[str, Any] = {}
        self._phase: dict[str, Any] = {}
        self._finished: tuple[str, int, int] = ("", 0, 0)  # run, round and step of the last step that is done
        self._metrics: dict[str, Any] = {}
        self._overlong: dict[str, Any] = {}
        self._shown: dict[str, Any] = {}
        self.adapter_held = ""  # digest of a global adapter that waits for a person
        self._donors = {"used": 0, "wanted": 0}
        pages = LogPages(audit.directory)
        self.index = MessageIndex(pages, lambda: audit.size)
        self._messages = MessageView(self.index, pages, lambda: gate.policy)
        self._records = AuditView(
            audit, pages, witnesses=self._coordinator, contradicting=self._contradicting, now_seconds=clock,
            word_as="coordinator",
        )  # fmt: skip
        self._limits = LimitsView(
            ledger, self.index, policy=lambda: gate.policy, view=lambda: gate.view, schema=site.schema,
            now_seconds=clock,
        )  # fmt: skip
        self._about = SiteView(site, clock)
        self._clock = clock
        self._history = FigureHistory(audit.directory.parent / FILE)
        self._curves = CurveView(lambda: site.config.silo, ledger, self._history)
        self._rounds = RoundView(
            lambda: site.config.silo, ledger, RoundMarks(pages, lambda: audit.size, messages=True),
            view=lambda: gate.view, policy=lambda: gate.policy.digest, now_seconds=clock,
        )  # fmt: skip

    def _coordinator(self) -> tuple[str, ...]:
        return (self._gate.policy.file.federation.coordinator,)

    def _contradicting(self) -> tuple[str, ...]:
        lost = bool(self._gate.halted) and self._gate.halt_code == OWN_HISTORY_LOST
        return self._coordinator() if lost else ()

    # ---- what happened -----------------------------------------------------------------------------

    def publish(self, name: str, fields: Mapping[str, Any]) -> None:
        self._desk.publish(name, fields)

    def trainer(self, description: Mapping[str, Any]) -> None:
        """Isolation rung, probe results and, of what the trainer said when it was ready, what has a plain form."""
        self._trainer = dict(description)
        if "ready" in self._trainer:
            self._trainer["ready"] = ready_facts(self._trainer["ready"])

    def task(self, fields: Mapping[str, Any]) -> None:
        self._task = {"name": fields.get("task"), "round": fields.get("round"), "step": fields.get("step", 0)}
        self._phase = {}

    def step(self, fields: Mapping[str, Any], task: GuardTask) -> None:
        """What the trainer does now, at the step that it was given. Raises ValuesUnusable."""
        self._phase = {"round": task.round, "step": getattr(task, "step", 0), "phase": phase_in(fields)}

    def planned(self, fields: Mapping[str, Any]) -> None:
        """Raises ValuesUnusable."""
        self._overlong = counts("overlong", fields.get("overlong", {}), PROMPT_SETS)

    def metrics(self, fields: Mapping[str, Any], task: GuardTask) -> None:
        """Keep the last value of each figure with where it comes from, and tell the watchers. Raises ValuesUnusable."""
        reported = fields.get("metrics", {})
        if not isinstance(reported, Mapping):
            raise ValuesUnusable("metrics is no mapping")
        shown = {name: self._figure(name, reported[name]) for name in _METRICS_SHOWN if name in reported}
        where = {"task": type(task).__name__, "round": task.round, "step": getattr(task, "step", 0)}
        for name, value in shown.items():
            self._metrics[name] = {"value": value, "source": "local", **where}
        self._donors["used"] += int(shown.get("donors_used") or 0)
        self._donors["wanted"] += int(shown.get("donors_wanted") or 0)
        kept = {name: number(name, reported[name]) for name in _METRICS_KEPT if reported.get(name) is not None}
        self._keep(where, shown | kept)
        self._task = {}
        if step := getattr(task, "step", 0):
            self._finished = self._gate.view.run, task.round, step
        self.publish("task.done", {**where, "metrics": shown})

    def _figure(self, name: str, value: Any) -> Any:
        if name == "donors_rejected":  # by the silo that an answer came from
            plan = self._gate.view.plan
            return counts(name, value, plan.silos if plan else ())
        return None if value is None else number(name, value)

    def _keep(self, where: Mapping[str, Any], shown: Mapping[str, Any]) -> None:
        """For the curves; a pass rate together with the prompts behind it."""
        plan = self._gate.view.plan
        count = prompts_answered(plan, self._trainer.get("ready", {}), self._overlong) if "pass_at_1" in shown else None
        figures = {**shown} | ({PROMPTS: count} if count else {})
        self._history.add(
            run=plan.run if plan else "", task=where["task"], number=where["round"], step=where["step"],
            at=self._clock(), figures=figures,
        )  # fmt: skip

    # ---- the snapshot ------------------------------------------------------------------------------

    def look(self) -> None:
        """Before somebody looks: what a loop waits for that cannot show anything meanwhile."""
        if self._shown and self._shown.get("waits") != self._ledger.locked.waiting:
            self._shown = {**self._shown, "waits": self._ledger.locked.waiting}
            self._desk.set_state(self._shown, policy_digest=self._gate.policy.digest)

    def show(self, run: OpenRun | None, *, link_fault: str) -> None:
        """Hand the desk the present state, if it differs from what it has."""
        state = self.state(run, link_fault=link_fault)
        if state != self._shown:
            self._shown = state
            self._desk.set_state(state, policy_digest=self._gate.policy.digest)

    def state(self, run: OpenRun | None, *, link_fault: str) -> dict[str, Any]:
        config, policy, view = self._site.config, self._gate.policy, self._gate.view
        counters = self._gate.counters
        held = self._ledger.releases("held")
        last_run, last_state = self._ledger.last_run()
        how = "carried" if config.coordinator.by_files else "live" if counters.last_contact else "connecting"
        return {
            "kind": "silo",
            "silo": config.silo,
            "role": config.role,
            "federation": config.federation,
            "run": run.plan.run if run else "",
            "last_run": {"run": last_run, "state": last_state},
            "method": run.plan.method if run else "",
            "rounds": run.plan.rounds if run else 0,
            "local_steps": run.plan.steps_of(config.silo) if run else 0,
            "round": view.round,
            "step": self._phase.get("step") or self._task.get("step") or self._finished_step(),
            "phase": self._phase_word(run, bool(held)),
            "task": self._task.get("name") or "",
            "paused": bool(run and run.paused),
            "run_paused": bool(run and counters.run_paused),  # the coordinator says so
            "adapter_held": self.adapter_held if run else "",
            "halted": self._gate.halted,
            "waits": self._ledger.locked.waiting,
            "clock": self._watch.state() if self._watch is not None else {},
            "screens": {"halts": sorted(self._gate.screen_halts), "troubles": self._gate.screen_troubles()},
            "trainer": self._trainer,
            "overlong": self._overlong,
            "policy": {
                "name": policy.file.name,
                "digest": policy.digest,
                "mode": policy.file.mode,
                # What it is made of: the site's own file and, where there is one, the federation's charter.
                "made_of": [
                    {"file": part.source, "digest": part.digest, "file_sha256": part.file_sha256}
                    for part in policy.parts or (policy,)
                ],
            },
            "held": [self._releases.view(release) for release in held],
            "metrics": self._metrics,
            "donors": dict(self._donors),
            "left": [
                {"kind": kind, "messages": counters.messages[kind], "bytes": counters.payload_bytes[kind]}
                for kind in sorted(counters.messages)
            ],
            "coordinator": {
                "address": config.coordinator.address,
                "id": policy.file.federation.coordinator,
                "link": "down" if link_fault else how,
                "fault": link_fault,
                "last_contact": counters.last_contact,
            },
            "audit": {"size": self._audit.size, "broken": self._records.broken},
            "certificate_until": self._site.identity.not_after.astimezone(UTC).isoformat(),
            "dp": "off",
        }

    def _finished_step(self) -> int:
        """Of the round that stands open or ended last: what it came to is shown while nothing is trained; after a
        restart, the public step that it had come to."""
        (run, number, step), view = self._finished, self._gate.view
        return step if (run, number) == (view.run, view.round) else view.open_step

    def _phase_word(self, run: OpenRun | None, held: bool) -> str:
        if self._gate.halted:
            return "halted"
        if held:
            return "held: approval"
        if run is None:
            return "idle" if "ready" in self._trainer else "starting"
        if run.busy:
            return str(self._phase.get("phase") or "training")
        return "paused" if run.paused else "waiting"

    # ---- queries -----------------------------------------------------------------------------------

    def queries(self) -> dict[str, QueryHandler]:
        """What may be asked, by name. Each runs in the asking thread, and takes none of the loop's time."""
        return {
            "approvals": self.approvals,
            "approval": self.approval,
            "approval.comparison": self.comparison,
            "outbox": self._messages.outbox,
            "inbox": self._messages.inbox,
            "audit": self._records.page,
            "audit.status": self._records.status,
            "audit.verify": self._records.verify,
            "limits": self._limits.limits,
            "ledger": self.ledger_view,
            "round": self._rounds.round,
            "curves": self._curves.curves,
            "certificates": self._about.certificates,
            "settings": self._about.settings,
            "logs": self._about.logs,
        }

    def approvals(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Releases that were ever held here, a page at a time. Raises UsageError."""
        return release_page(self._ledger, arguments)

    def approval(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One release with every fact. Raises UsageError, NotFoundError."""
        return self._releases.view(self._ledger.release(Asked(arguments, "release").text("release")))

    def comparison(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One release beside the last one of its kind that left. Raises UsageError, NotFoundError."""
        return self._releases.comparison(self._ledger.release(Asked(arguments, "release").text("release")))

    def ledger_view(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the guard remembers: runs, budget counts, a page of outgoing content. Raises UsageError."""
        return ledger_page(self._ledger, arguments)
