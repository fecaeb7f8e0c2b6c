"""Measures what joining was worth to this silo, beside the daemon or without it: reads this site's own state, starts a
second trainer in the same sandbox, and keeps what it finds here.

Nothing is sent: with a trainer that it starts itself, this process opens no connection but the trainer's unix socket,
and no message kind exists for what it finds. It writes below `state_dir/report` only, and lays
a decoy of a missing control socket for the trainer's probes beside its place; ledger and adapter store are
read, the audit log is not touched. With an external trainer it listens at `trainer.address`, and tries what must not
answer that trainer, as the daemon does; so that neither gets the other's trainer, it holds the daemon's lock meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedsilo
from fedsilo.files.durable import lock_exclusively, make_private_directory, write_durably
from fedsilo.files.task_files import read_tasks
from fedsilo.protocol.codec import SMALL_PAYLOAD_BYTES_MAX, Buffer, canonical_json, encode_factors, sha256_hex
from fedsilo.protocol.errors import ConflictError, NotFoundError, OperationError, UsageError
from fedsilo.protocol.factors import initial_factors
from fedsilo.protocol.methods import method_named
from fedsilo.protocol.plan import Plan, plan_from_canonical
from fedsilo.protocol.tasks import TrainerTask
from policies.model import Policy
from policies.schema import LoraSchema
from silo.benefit import ARMS, DEFINITION, Answers, Arm, Holdout, compare
from silo.config import Rollout, SiloConfig
from silo.guard.adapters import AdapterStore
from silo.guard.ledger import Ledger
from silo.guard.site import (
    LEDGER,
    LOCK,
    effective_policy,
    never_shown,
    require_isolation,
    site_fingerprints,
    site_schema,
    site_secret,
    trained_with,
)
from silo.guard.trainer_process.probing import probe_fields_beside_the_daemon, why_waived
from silo.guard.trainer_process.supervisor import Supervisor, TrainerGone, TrainerSaid
from silo.link import LinkClosed, LinkMessage
from silo.measuring import MeasureHoldout, PromptSet
from silo.report.alone import plan_alone, train_alone
from silo.sampling import TaskGiver

Say = Callable[[str], None]


@dataclass(frozen=True)
class FinishedRun:
    """A run as this silo remembers it. split: names the private rows it trained on; settings: `trained_with`."""

    plan: Plan
    split: str
    settings: str
    start_digest: str  # of round 1; empty where this silo joined later
    final_digest: str


def report_benefit(config: SiloConfig, *, run: str, samples: int | None, say: Say) -> dict[str, Any]:
    """Base, local-only and federated policy on the private holdout of this silo.

    Args:
        config: the site.
        run: name of a finished run; empty takes the latest.
        samples: answers to each prompt at the rollout temperature; None: as many as the run's own evaluation.
        say: told one line of progress at a time.

    Returns:
        {"run", "adapter", "isolation", "local_only", "holdout", "arms", "differences", "per_topic", "verdict",
        "definition"}.

    Raises:
        UsageError: no holdout is set aside, or data, model or schema are not those of the run.
        NotFoundError: no such finished run here, or its adapter is no longer there.
        ConflictError: the run has not ended, or the trainer is external and the daemon runs.
        NotAllowedError: the policy accepts no trainer in such a sandbox.
        OperationError: the trainer failed.
    """
    if config.data.holdout_share == 0:
        raise UsageError(
            f"{config.source.name} sets no private rows aside: data.holdout_share is 0",
            hint="write data.holdout_share: 0.1 and start the silo again; later runs can be reported on",
            code="NO_HOLDOUT",
        )
    finished = find_run(config, run)
    if method_named(finished.plan.method).keeps_own:
        raise UsageError(
            f"run {finished.plan.run} came to no common adapter: under {finished.plan.method} each silo keeps its own",
            hint="its figures on the held-out set are in the run record, round by round",
            code="NO_COMMON_ADAPTER",
        )
    policy = effective_policy(config)
    schema = site_schema(config, policy)
    check_inputs(config, finished, schema)
    store = AdapterStore(config.state_dir / "adapters")
    federated = store.find(finished.final_digest)
    if federated is None:
        raise NotFoundError(
            f"the final adapter of run {finished.plan.run} ({finished.final_digest[:12]}) is no longer at this silo",
            hint="it keeps the latest adapters only; ask for the report before further runs",
            code="ADAPTER_GONE",
        )
    start = adapter_at_start(finished, schema, store)
    folder = config.state_dir / "report" / finished.plan.run
    make_private_directory(folder.parent)
    make_private_directory(folder)
    inputs = sha256_hex(
        canonical_json(
            [fedsilo.__version__, finished.plan.digest, sha256_hex(start), finished.split, finished.settings]
        )
    )
    kept = _kept(folder, inputs)
    plan = plan_alone(finished.plan, config.silo, f"local-{inputs[:16]}")
    with report_trainer(config, policy, schema, say) as trainer:
        _check_split(trainer.ready, finished)
        trainer.begin(plan, schema)
        wanted = samples if samples is not None else finished.plan.evaluation.samples
        say(f"base: answering the holdout, {wanted} samples a prompt and one greedy answer")
        verdicts: dict[Arm, dict[str, Any]] = {"base": trainer.measure(b"", wanted)}
        say("federated: answering the holdout")
        verdicts["federated"] = trainer.measure(federated, wanted)
        local = kept or train_alone(method_named(plan.method), plan, start, trainer.task)
        if kept is None:
            write_durably(folder / f"{inputs}-{sha256_hex(local)}", local, mode=0o600)
        say(f"local-only: answering the holdout{', adapter kept from an earlier report' if kept else ''}")
        verdicts["local_only"] = trainer.measure(local, wanted)
        found = _compared(verdicts, wanted)
        return {
            "run": finished.plan.run,
            "method": finished.plan.method,
            "adapter": finished.final_digest,
            "isolation": trainer.isolation,
            "local_only": {"adapter": sha256_hex(local), "kept": kept is not None},
            **found,
            "definition": DEFINITION,
        }


# ---- what this silo remembers ------------------------------------------------------------------------


def find_run(config: SiloConfig, name: str) -> FinishedRun:
    """Return a finished run. Raises NotFoundError, ConflictError: see `report_benefit`."""
    path = config.state_dir / LEDGER
    if not path.is_file():
        raise NotFoundError(f"{path} does not exist: this silo has taken part in no run")
    ledger = Ledger(path, read_only=True)
    try:
        states = {row.run: row.state for row in ledger.runs()}
        finished = [run for run, state in states.items() if state == "finished"]
        listed = f"finished here: {', '.join(finished[-5:])}" if finished else "no run has finished here yet"
        if not name and not finished:
            raise NotFoundError("no run has finished at this silo", hint="`silo status` shows where it stands")
        run = name or finished[-1]
        if run not in states:
            raise NotFoundError(f"this silo knows no run {run!r}", hint=listed)
        if states[run] == "running":
            raise ConflictError(f"run {run} has not ended", hint="ask again when it has; `silo status` shows its round")
        if states[run] != "finished":
            raise NotFoundError(f"run {run} came to no adapter here: {states[run]}", hint=listed)
        splits = ledger.remembered_of_run(run, "split")
        if len(splits) > 1:
            raise UsageError(
                f"the private rows or data.holdout_share were changed while run {run} was under way",
                hint="so some of the holdout may have been trained on; report on another run",
                code="HOLDOUT_CHANGED",
            )
        settings = ledger.remembered_of_run(run, "trained_with")
        if len(settings) > 1:
            raise UsageError(
                f"verifiers or model.load were changed while run {run} was under way",
                hint="so no training alone has the same; report on another run",
                code="INPUTS_CHANGED",
            )
        final = ledger.remembered_of_run(run, "final_adapter")
        start = ledger.remembered_of_run(run, "start_adapter")
        return FinishedRun(
            plan=plan_from_canonical(ledger.plan_of(run)),
            split="".join(splits),
            settings="".join(settings),
            start_digest="".join(start[:1]),
            final_digest="".join(final[-1:]),
        )
    finally:
        ledger.close()


def check_inputs(config: SiloConfig, finished: FinishedRun, schema: LoraSchema) -> None:
    """Local-only is trained now, so what it is trained with must be what the run had. Raises UsageError."""
    plan, model = finished.plan, site_fingerprints(config)
    had: dict[str, str] = json.loads(finished.settings or "{}")
    settings: dict[str, str] = json.loads(trained_with(config))
    for what, agreed, found in (
        ("public set", plan.public_set_sha256[:12], read_tasks(config.data.public.path).sha256[:12]),
        ("base model", plan.base_model_sha256[:12], model.base_model_sha256[:12]),
        ("tokenizer", plan.tokenizer_sha256[:12], model.tokenizer_sha256[:12]),
        ("chat template", plan.template_sha256[:12], model.template_sha256[:12]),
        ("LoRA schema", plan.lora.schema_sha256[:12], schema.digest[:12]),
        ("data.verifier", had.get("verifier", "unknown"), settings["verifier"]),
        ("package of data.verifier", had.get("verifier_origin", "none"), settings.get("verifier_origin", "none")),
        ("files of own verifiers", *(each.get("own_verifiers_sha256", "none") for each in (had, settings))),
        ("data.public.verifier", had.get("public_verifier", "unknown"), settings["public_verifier"]),
        ("model.load", had.get("load", "unknown"), settings["load"]),
    ):
        if agreed != found:
            raise UsageError(
                f"run {plan.run} had the {what} {agreed}, this site has {found}",
                hint="put back what the run had, or report on another run",
                code="INPUTS_CHANGED",
            )


def _check_split(ready: Mapping[str, Any], finished: FinishedRun) -> None:
    """The holdout must have been one in the run, and local-only must have the rows the run had. Raises UsageError."""
    if ready.get("split") != finished.split:
        raise UsageError(
            f"the private rows or data.holdout_share are not those of run {finished.plan.run}",
            hint="its holdout may have been trained on; put files and share back, or report on a later run",
            code="HOLDOUT_CHANGED",
        )
    if not ready.get("holdout_rows"):
        raise UsageError(
            f"no private row fell into the holdout, of {ready.get('private_rows')}",
            hint="give more rows or a larger data.holdout_share and start the silo again, for later runs",
            code="NO_HOLDOUT",
        )


def adapter_at_start(finished: FinishedRun, schema: LoraSchema, store: AdapterStore) -> Buffer:
    """The one the run began with: as kept, else drawn again from the plan's seed. Raises NotFoundError."""
    expected = finished.start_digest or finished.plan.start_adapter_sha256
    kept = store.find(expected)
    drawn = kept or encode_factors(
        initial_factors(schema.tensors, finished.plan.seed), base_digest="", schema_sha256=schema.digest,
        rank=schema.rank, scale=schema.scale, dtype="float32",
    )  # fmt: skip
    if expected not in {"", sha256_hex(drawn)}:
        raise NotFoundError(
            f"run {finished.plan.run} began with adapter {expected[:12]}, which its seed does not give "
            "and which is no longer at this silo",
            code="ADAPTER_GONE",
        )
    return drawn


def _kept(folder: Path, inputs: str) -> bytes | None:
    """The local-only adapter of an earlier report with the same inputs, if it is whole."""
    for path in folder.glob(f"{inputs}-*"):
        payload = path.read_bytes()
        if path.name == f"{inputs}-{sha256_hex(payload)}":
            return payload
    return None


# ---- the second trainer ------------------------------------------------------------------------------


class ReportTrainer:
    """The trainer of a report: asked one thing at a time."""

    def __init__(
        self,
        supervisor: Supervisor,
        events: queue.Queue[TrainerSaid | TrainerGone],
        log: Path,
        say: Say,
        site_secret: bytes,
    ) -> None:
        self._supervisor = supervisor
        self._site_secret = site_secret
        self._events = events
        self._log = log
        self._say = say
        self._plan: Plan | None = None
        self._task_giver: TaskGiver | None = None

    @property
    def ready(self) -> dict[str, Any]:
        return self._supervisor.state.ready

    @property
    def isolation(self) -> str:
        return self._supervisor.state.isolation

    def begin(self, plan: Plan, schema: LoraSchema) -> None:
        self._plan = plan
        fields = {"canonical_json": plan.canonical(), "lora_schema": json.loads(schema.canonical())}
        planned = self._ask(LinkMessage("plan", fields), "planned").fields
        # The rows that the run's own guard would have drawn: the same secret, seed and number of prompts.
        self._task_giver = TaskGiver(plan, int(planned["private_prompts"]), self._site_secret)

    def task(self, task: TrainerTask, body: Buffer) -> Buffer:
        """Take one step of local-only."""
        steps = self._plan.local_steps if self._plan else 0
        if task.trains and task.step in {1, steps}:
            rounds = self._plan.rounds if self._plan else 0
            self._say(f"local-only: round {task.round} of {rounds}, step {task.step} of {steps}")
        given = self._task_giver.with_rows_drawn(task) if self._task_giver else task
        return self._ask(LinkMessage("task", given.fields(), body), "done").body

    def measure(self, adapter: Buffer, samples: int, rows: PromptSet = "private") -> dict[str, Any]:
        """Return the verdicts of a holdout on an adapter; empty bytes for the base model. Raises OperationError."""
        task = MeasureHoldout(samples, rows=rows)
        body = self._ask(LinkMessage("task", task.fields(), adapter), "done").body
        try:
            verdicts = dict(json.loads(bytes(body)))
            size = len(verdicts["topics"])
            if any(len(verdicts[name]) != size for name in ("groups", "correct", "greedy")):
                raise ValueError("lists of different lengths")
        except (ValueError, TypeError, KeyError) as error:
            raise OperationError(f"the trainer's verdicts do not parse: {error}", code="TRAINER_CONFUSED") from error
        return verdicts

    def _ask(self, message: LinkMessage, answer: str) -> LinkMessage:
        gone = OperationError("the trainer is gone", hint=f"see {self._log}", code="TRAINER_DIED")
        try:
            self._supervisor.send(message)
        except LinkClosed as error:
            raise gone from error
        while True:
            event = self._events.get()
            if isinstance(event, TrainerGone):
                raise gone
            said = event.message
            if said.type == answer:
                return said
            if said.type == "failed":
                raise OperationError(
                    f"the trainer reports {str(said.fields.get('code', ''))[:64]}: "
                    f"{str(said.fields.get('message', ''))[:500]}",
                    hint=f"see {self._log}",
                    code="TRAINER_FAILED",
                )


def _address_to_itself(config: SiloConfig) -> contextlib.AbstractContextManager[object]:
    """While it is held nobody else of this site waits at `trainer.address`. Raises ConflictError."""
    if config.trainer.launch == "child":  # each has a socket of its own
        return contextlib.nullcontext()
    try:
        return lock_exclusively(config.state_dir / LOCK)
    except ConflictError as error:
        raise ConflictError(
            f"this silo's daemon runs and waits at {config.trainer.address} too, so a trainer might come to either",
            hint="`silo stop` first; start the daemon again after the report",
        ) from error


@contextlib.contextmanager
def report_trainer(config: SiloConfig, policy: Policy, schema: LoraSchema, say: Say) -> Iterator[ReportTrainer]:
    """A trainer as the guard starts it, with scratch folder, log and socket of its own."""
    place = config.state_dir / "report"
    make_private_directory(place)
    with (
        lock_exclusively(place / "lock"),
        _address_to_itself(config),
        # Below /tmp, since a unix socket's path must be short. The sandbox shows the trainer this folder, no other.
        tempfile.TemporaryDirectory(prefix="fedsilo-") as sockets,
        probe_fields_beside_the_daemon(config, os.getpid()) as probe_fields,
    ):
        shutil.rmtree(place / "scratch", ignore_errors=True)  # an interrupted report's
        # It samples by itself: the daemon's rollout servers hold the adapter of its own trainer.
        own = config.model_copy(update={"state_dir": place, "rollout": Rollout()})
        if config.trainer.launch == "child":
            address = f"unix:{sockets}/trainer.sock"
            own = own.model_copy(update={"trainer": config.trainer.model_copy(update={"address": address})})
        else:
            say(f"waiting for a trainer that you start, to dial {config.trainer.address}")
        events: queue.Queue[TrainerSaid | TrainerGone] = queue.Queue()
        supervisor = Supervisor(own, events.put, body_bytes_max=max(2 * schema.payload_bytes, SMALL_PAYLOAD_BYTES_MAX))

        def accepted(level: str) -> None:
            state = supervisor.state
            require_isolation(level, policy, why_waived(state.probes, state.controls) if level == "waived" else "")

        secret = site_secret(config, make=False)
        try:
            say("starting a trainer in this site's sandbox")
            supervisor.start(secret, probe_fields, never=never_shown(config), accepted=accepted)
            say(f"isolation {supervisor.state.isolation}; {supervisor.state.ready.get('holdout_rows')} rows set aside")
            yield ReportTrainer(supervisor, events, place / "logs" / "trainer.log", say, secret)
        finally:
            supervisor.stop()


def _compared(verdicts: Mapping[Arm, Mapping[str, Any]], samples: int) -> dict[str, Any]:
    """Compare the arms. Raises OperationError: they are not about the same prompts, or about none."""
    asked = verdicts["base"]
    if any(verdicts[arm][name] != asked[name] for arm in ARMS for name in ("topics", "groups")):
        raise OperationError("the trainer's verdicts are about different prompts", code="TRAINER_CONFUSED")
    if not asked["topics"]:
        raise UsageError("every prompt of the holdout is public or longer than the plan allows", code="NO_HOLDOUT")
    holdout = Holdout(tuple(asked["topics"]), tuple(asked["groups"]), samples)
    arms = {arm: Answers(tuple(verdicts[arm]["correct"]), tuple(verdicts[arm]["greedy"])) for arm in ARMS}
    found = compare(holdout, arms)
    found["holdout"] |= {"left_out_overlong": int(asked["overlong"]), "left_out_public": int(asked["public"])}
    return found
