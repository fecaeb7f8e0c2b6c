"""The status of a silo: the snapshot behind `silo status` and the console, and what the trainer's reports add to it.

Facts, counts and digests of this site only; no prompt, no answer, no tensor value. It is built from given values on the
loop's thread and handed to the control server whole, so a reader never sees half of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from fedsilo.control import answers
from fedsilo.control.server import ControlServer
from fedsilo.protocol.plan import Plan
from fedsilo.protocol.tasks import TrainerTask
from policies.model import Policy
from silo.config import SiloConfig
from silo.guard.answers.curves import PROMPTS, FigureHistory, prompts_answered
from silo.guard.decisions import RunView
from silo.guard.messages import Counters
from silo.guard.trainer_report import NAMES_MAX, PROMPT_SETS, ValuesUnusable, counts, number, phase_in, ready_facts

# Of what the trainer reports with a finished task, this is shown.
_METRICS_SHOWN = (
    "reward_mean", "zero_variance_share", "tokens", "kl", "clip_share", "donors_used", "donors_wanted", "donors_found",
    "donors_rejected", "alpha_histogram", "drift", "pass_at_1", "pass_at_1_greedy", "seconds", "rollout_kl",
    "stale_detectable_steps", "rollout_tokens_per_second", "memory_peak_bytes",
)  # fmt: skip
# This is kept for the curves alone.
_METRICS_KEPT = (
    "rollout_seconds", "agreement_seconds", "grade_seconds", "update_seconds", "update_tokens_per_second", "grad_norm",
    "entropy", "logp_own", "logp_donor", "truncated_share", "zero_variance_share_before",
    "alpha_mean", "alpha_max", "swapped_share", "beta_mean", "beta_max", "omega", "rollout_kl_limit",
    "adapter_visible_share", "stale_previous", "stale_start", "stale_base", "marker_distance", "marker_contrast",
    "importance_truncated_share", "importance_missing",
)  # fmt: skip


@dataclass(frozen=True)
class RunStatus:
    """The run that this silo takes part in.

    Attributes:
        task: that the trainer works on.
        paused: by a person of this site.
        adapter_held: digest of a global adapter that waits for a person; empty where none does.
    """

    plan: Plan
    task: TrainerTask | None
    paused: bool
    adapter_held: str


@dataclass(frozen=True)
class Moment:
    """State of the guard's parts at one moment.

    Attributes:
        trainer: isolation level, probe results, and what the trainer said when it was ready.
        policy: in force.
        view: where the run stands, as the gate has it.
        halted: why nothing is sent; empty while something may be.
        screen_halts: kinds that their screens halted.
        screen_troubles: why a screen cannot run.
        held: releases that wait for persons, as `answers.release` shows them.
        last_run: name and state of the newest run.
        waits: for whom the loop waits, in words.
        clock: what is known of the clock.
        audit_broken: where the newest verification found the log broken.
    """

    run: RunStatus | None
    trainer: Mapping[str, Any]
    policy: Policy
    view: RunView
    counters: Counters
    halted: str
    screen_halts: Sequence[str]
    screen_troubles: Sequence[str]
    held: Sequence[answers.HeldRelease]
    last_run: tuple[str, str]
    waits: str
    clock: Mapping[str, Any]
    audit_size: int
    audit_broken: answers.Broken | None


class Status:
    """Shows each change of the state once.

    Args:
        certificate_until: when this site's certificate ends.
        control_server: where it is shown.
        history: keeps the trainer's figures for the curves.
    """

    def __init__(
        self,
        config: SiloConfig,
        certificate_until: datetime,
        control_server: ControlServer,
        history: FigureHistory,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._certificate_until = certificate_until
        self._control_server = control_server
        self._history = history
        self._clock = clock
        self._phase: tuple[TrainerTask | None, str] = (None, "")
        self._finished: tuple[str, int, int] = ("", 0, 0)  # run, round and step of the last step that is done
        self._metrics: dict[str, answers.Metric] = {}
        self._overlong: dict[str, Any] = {}
        self._donors = answers.Donors(used=0, wanted=0)
        self._shown: answers.SiloStatus | None = None
        self._policy_digest = ""

    # ---- the trainer's reports ---------------------------------------------------------------------

    def step(self, fields: Mapping[str, Any], task: TrainerTask) -> None:
        """Keep what the trainer does now, at the task that it was given. Raises ValuesUnusable."""
        self._phase = task, phase_in(fields)

    def planned(self, fields: Mapping[str, Any]) -> None:
        """Keep how many prompts are too long for the run's plan. Raises ValuesUnusable."""
        self._overlong = counts("overlong", fields.get("overlong", {}), PROMPT_SETS)

    def metrics(self, fields: Mapping[str, Any], task: TrainerTask, plan: Plan, trainer: Mapping[str, Any]) -> None:
        """Keep the last value of each figure with where it comes from, and tell the watchers.

        Args:
            fields: of the trainer's report on a finished task.
            task: that it was given.
            plan: of the run.
            trainer: as in `Moment`.

        Raises:
            ValuesUnusable: a figure is none.
        """
        reported = fields.get("metrics", {})
        if not isinstance(reported, Mapping):
            raise ValuesUnusable("metrics is no mapping")
        shown = {name: _figure(name, reported[name], plan) for name in _METRICS_SHOWN if name in reported}
        where = {"task": task.name, "round": task.round, "step": task.step}
        for name, value in shown.items():
            self._metrics[name] = answers.read(answers.Metric, {"value": value, "source": "local", **where})
        used, wanted = (int(shown.get(name) or 0) for name in ("donors_used", "donors_wanted"))
        self._donors = answers.Donors(used=self._donors.used + used, wanted=self._donors.wanted + wanted)
        figures = {name: number(name, reported[name]) for name in _METRICS_KEPT if reported.get(name) is not None}
        if "pass_at_1" in shown:  # together with the prompts behind it
            answered = prompts_answered(plan, ready_facts(trainer.get("ready")), self._overlong)
            figures |= {PROMPTS: answered} if answered else {}
        self._history.add(
            run=plan.run,
            task=task.name,
            number=task.round,
            step=task.step,
            at=self._clock(),
            figures=shown | figures,
        )
        if task.step:
            self._finished = plan.run, task.round, task.step
        self._control_server.publish("task.done", {**where, "metrics": shown})

    # ---- the snapshot ------------------------------------------------------------------------------

    def show_waiting(self, waits: str) -> None:
        """Show what the loop waits for, which cannot show anything meanwhile."""
        if self._shown is not None and self._shown.waits != waits:
            self._shown = replace(self._shown, waits=waits)
            self._control_server.set_state(self._shown, policy_digest=self._policy_digest)

    def show(self, now: Moment) -> None:
        """Show the present state, if it differs from what was shown."""
        state = self.state(now)
        if state != self._shown:
            self._shown, self._policy_digest = state, now.policy.digest
            self._control_server.set_state(state, policy_digest=now.policy.digest)

    def state(self, now: Moment) -> answers.SiloStatus:
        """Return the snapshot."""
        config, policy, view, run, counters = self._config, now.policy, now.view, now.run, now.counters
        task = run.task if run else None
        how = "carried" if config.coordinator.by_files else "live" if counters.last_contact else "connecting"
        trainer = dict(now.trainer) | ({"ready": ready_facts(now.trainer["ready"])} if "ready" in now.trainer else {})
        return answers.SiloStatus(
            kind="silo",
            silo=config.silo,
            role=config.role,
            federation=config.federation,
            run=run.plan.run if run else "",
            last_run=answers.RunState(run=now.last_run[0], state=now.last_run[1]),
            method=run.plan.method if run else "",
            rounds=run.plan.rounds if run else 0,
            local_steps=run.plan.steps_of(config.silo) if run else 0,
            round=view.round,
            step=task.step if task and task.step else self._finished_step(view),
            phase=self._phase_in_words(now),
            task=task.name if task else "",
            paused=bool(run and run.paused),
            run_paused=bool(run and counters.run_paused),
            adapter_held=run.adapter_held if run else "",
            halted=now.halted,
            waits=now.waits,
            clock=now.clock,
            screens=answers.Screens(halts=tuple(sorted(now.screen_halts)), troubles=tuple(now.screen_troubles)),
            trainer=trainer,
            overlong=self._overlong,
            policy=answers.PolicyInUse(
                name=policy.file.name,
                digest=policy.digest,
                mode=policy.file.mode,
                made_of=tuple(
                    {"file": part.source, "digest": part.digest, "file_sha256": part.file_sha256}
                    for part in policy.parts or (policy,)
                ),
            ),
            held=tuple(now.held),
            metrics=dict(self._metrics),
            donors=self._donors,
            left=tuple(
                answers.LeftRow(kind=kind, messages=counters.messages[kind], bytes=counters.payload_bytes[kind])
                for kind in sorted(counters.messages)
            ),
            coordinator=answers.CoordinatorLink(
                address=config.coordinator.address,
                id=policy.file.federation.coordinator,
                link="down" if counters.last_fault else how,
                fault=counters.last_fault,
                last_contact=counters.last_contact,
            ),
            audit=answers.LogState(size=now.audit_size, broken=now.audit_broken),
            certificate_until=self._certificate_until.astimezone(UTC).isoformat(),
            dp="off",
        )

    def _finished_step(self, view: RunView) -> int:
        """Return the last step of the round that is open or ended last, shown while nothing is trained; after a
        restart, the last public step."""
        run, number, step = self._finished
        return step if (run, number) == (view.run, view.round) else view.open_step

    def _phase_in_words(self, now: Moment) -> str:
        if now.halted:
            return "halted"
        if now.held:
            return "held: approval"
        if now.run is None:
            return "idle" if "ready" in now.trainer else "starting"
        if (task := now.run.task) is not None:
            return self._phase[1] if self._phase[0] is task and self._phase[1] else "training"
        return "paused" if now.run.paused else "waiting"


def _figure(name: str, value: Any, plan: Plan) -> Any:
    if name == "donors_rejected":  # by the silo that an answer came from
        return counts(name, value, plan.silos)
    if name == "alpha_histogram":  # prompts, by the share of their answers that donors took the place of
        samples = plan.samples_per_prompt
        if isinstance(value, Mapping) and len(value) > NAMES_MAX:
            return None  # honest ones of many prompts with many answers may be so long
        return counts(name, value, [f"{swapped / samples:.3f}" for swapped in range(samples + 1)])
    return None if value is None else number(name, value)
