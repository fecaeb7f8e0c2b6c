"""Starts and ends the trainer, and carries the link to it. What starts a process puts it in a sandbox (`sandbox.py`);
beside the trainer that is the grader of public answers.

The trainer gets no key, no network and no policy: it is handed data paths, a model folder and a secret that keys the
choice of private prompts. A child that dies is started again, in no lesser sandbox than before, and brought to where it
was (`Given`); the guard hears of it only where that fails, or where it dies `RESTARTS_MAX` times over one task. One
that breaks the framing, or that somebody else started, is not: the guard is told, abstains and says so.
Does not stop: what a trainer puts into the values it sends; that is for the gate.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from fedsilo.files.model_folder import read_template
from fedsilo.grading.own_verifiers import find_verifier
from fedsilo.grading.worker import GradingProcess
from fedsilo.protocol.codec import SMALL_PAYLOAD_BYTES_MAX, Buffer
from fedsilo.protocol.errors import FedSiloError, OperationError, UsageError
from fedsilo.protocol.methods import METHODS, TASKS
from fedsilo.protocol.text import harmless
from silo.config import SiloConfig
from silo.guard.site import never_shown, own_verifiers
from silo.guard.trainer_process import probing, sandbox, trainer_link
from silo.guard.trainer_process.probing import NO_CONTROLS, Controls
from silo.guard.trainer_process.rollout_server import RolloutServers
from silo.guard.trainer_process.sandbox import trainer_environment
from silo.guard.trainer_report import TEXT_CHARACTERS_MAX
from silo.link import Link, LinkBroken, LinkClosed, LinkMessage, LinkRefused, Listener

_log = logging.getLogger("fedsilo.silo.supervisor")
STOP_TIMEOUT_SECONDS = 5.0
RESTARTS_MAX = 2  # without a finished task between; what kills it each time (memory, say) would do so for ever
_ACCEPT_SLICE_SECONDS = 0.5
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # of the process itself, of one that waits for it within a sandbox


@dataclass(frozen=True)
class TrainerSaid:
    """One message from the trainer, as the main loop gets it."""

    message: LinkMessage


@dataclass(frozen=True)
class TrainerGone:
    """The link is closed. `exit_status`: of the child, None for an external trainer.

    `confused`: what it said that is no message of the link, where it was the guard that closed it.
    """

    exit_status: int | None
    confused: str = ""


@dataclass
class TrainerState:
    """State of the trainer that the console shows. `controls`: what answered the guard before and after the probes."""

    isolation: str = "waived"
    probes: dict[str, Any] = field(default_factory=dict)
    controls: Controls = NO_CONTROLS
    ready: dict[str, Any] = field(default_factory=dict)


class TrainerHandle(Protocol):
    """A trainer as the guard needs it: started for each run, told, stopped."""

    def start(self) -> None:
        """Start it, configured and ready. Raises OperationError."""

    def send(self, message: LinkMessage) -> None:
        """Send one message. Raises LinkClosed."""

    def stop(self) -> None: ...

    @property
    def isolation(self) -> str: ...

    @property
    def description(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Restart:
    """One restart of a trainer that died; a `trainer.restart` record of the audit log.

    Attributes:
        exit_status: of the one that died; None where it is not known.
        number: how often it died since it last finished a task, this time among them.
        code: why it could not be brought to where it was; empty where it was.
        repeated: tasks of the round that were given once more, whose answers were not taken.
        task: what it worked on; None when it was idle.
    """

    exit_status: int | None
    number: int
    code: str = ""
    repeated: int = 0
    task: LinkMessage | None = None

    def fields(self) -> dict[str, Any]:
        """Return the fields of the record. Nothing that a trainer said is in it: task, round and step are what the
        guard gave it."""
        given = self.task.fields if self.task is not None else {}
        outcome = "failed" if self.code else "round_repeated" if self.repeated else "resumed"
        detail = {"outcome": outcome, "number": self.number, "repeated": self.repeated}
        detail |= {"exit_status": self.exit_status, "task": given.get("task")}
        return {
            "round": given.get("round"),
            "step": given.get("step"),
            "reasons": ["TRAINER_DIED", *([self.code] if self.code not in ("", "TRAINER_DIED") else [])],
            "detail": {name: value for name, value in detail.items() if value is not None},
        }


class Supervisor:
    """Supervises one trainer from start to end.

    Args:
        events: called from the reader thread with TrainerSaid and TrainerGone.
        should_stop: asked while waiting for the trainer to connect.
        body_bytes_max: the longest body that the trainer may send.
        restarted: called from the reader thread when one that died is back, before it says anything, or cannot be.
    """

    def __init__(
        self,
        config: SiloConfig,
        events: Callable[[TrainerSaid | TrainerGone], None],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        body_bytes_max: int = SMALL_PAYLOAD_BYTES_MAX,
        restarted: Callable[[Restart], None] = lambda restart: None,
    ) -> None:
        self._config = config
        self._body_bytes_max = body_bytes_max
        self._events = events
        self._should_stop = should_stop
        self._restarted = restarted
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: Listener | None = None
        self._link: Link | None = None
        self._log_file: IO[bytes] | None = None
        self._log_begins = 0  # where in it the newest trainer's own words begin
        self._rollout: RolloutServers | None = None
        self._ending = False
        self._bring_up: Callable[[Callable[[str], None]], dict[str, Any]] = lambda accepted: {}
        self._reader: threading.Thread | None = None
        self._given = Given()
        self._restarts = 0  # since a task was finished
        self._last_status: int | None = None
        self._reviving = False
        self._talking = threading.Lock()  # around `_given` and `_reviving`: the reader revives while others send
        self.state = TrainerState()

    # ---- start -------------------------------------------------------------------------------------

    def start(
        self,
        site_secret: bytes,
        probe_fields: Mapping[str, Any],
        *,
        never: Sequence[Path] = (),
        accepted: Callable[[str], None] = lambda level: None,
        screen_index: Mapping[str, Any] | None = None,
    ) -> TrainerState:
        """Start (or wait for) the trainer, probe its sandbox, configure it and wait until it is ready.

        Args:
            site_secret: keys the choice of private prompts.
            probe_fields: what the probes try to reach from inside: key files, the control socket. A path where nothing
                is counts as not tried.
            never: files that the sandbox must not show.
            accepted: called with the isolation level that was really got, before the trainer is told where the data
                are; it raises where that is too little.
            screen_index: of `Screens.index_wanted`: the overlap index that it is to make of the private records.

        Raises:
            OperationError: it did not come, or it reports an error; the message names its log.
            UsageError, NotFoundError, NotAllowedError: an external trainer's user or the link's certificate is wrong.
        """
        self._bring_up = functools.partial(self._brought_up, site_secret, probe_fields, never, screen_index)
        try:
            self.state.ready = self._bring_up(accepted)
        except OperationError as error:
            # Killed, as by somebody or for want of memory; one that ends by itself would end again.
            if error.code != "TRAINER_DIED" or self._exit_status() not in _KILLED:
                raise
            _log.warning("the trainer was killed while it started: it is started once more")
            self._end_process()
            self.state.ready = self._bring_up(accepted)
        self._reader = threading.Thread(target=self._read, name="trainer-link", daemon=True)
        self._reader.start()
        return self.state

    def _brought_up(
        self,
        site_secret: bytes,
        probe_fields: Mapping[str, Any],
        never: Sequence[Path],
        screen_index: Mapping[str, Any] | None,
        accepted: Callable[[str], None],
    ) -> dict[str, Any]:
        """Started, probed and configured; what it said when it was ready."""
        trainer = self._config.trainer
        self._listener = trainer_link.listen(self._config)
        scratch: Path | None = None
        if trainer.launch == "child":
            scratch = self._config.state_dir / "scratch"
            scratch.mkdir(exist_ok=True, mode=0o700)
            self.state.isolation = probing.best_level() if trainer.isolation == "auto" else trainer.isolation
            self._start_rollout(self.state.isolation, never)
            self._process = self._launch(self.state.isolation, scratch, never)
        else:
            self._start_rollout("waived" if trainer.isolation == "waived" else "container", never)
            _log.info(
                "waiting up to %.0f s for the trainer to dial %s; it is started by somebody else, with: %s",
                trainer.start_timeout_seconds,
                trainer.address,
                trainer_link.start_command(self._config),
            )
        self._link = self._accept(trainer.start_timeout_seconds)
        self._close_listener()  # one trainer, and nobody after it
        controls = probing.controls(self._config)
        named = probing.only_what_exists(probe_fields)
        fields = {**controls.as_fields(), **named}
        if self._rollout is not None:
            self._rollout.wait_ready(lambda: self._should_stop() or self._ending)
            fields["rollout_sockets"] = [str(path) for path in self._rollout.sockets.values()]
        self.state.probes = self._ask("probe", fields, "probed").get("results", {})
        if not probing.are_results(self.state.probes):
            raise OperationError(
                "what the trainer tells of its sandbox is no list of probes",
                hint=trainer_link.where_it_tells(self._config),
                code="TRAINER_CONFUSED",
            )
        self.state.probes = probing.believable(self.state.probes, named)
        self.state.controls = controls.still_answering()
        self.state.isolation = probing.trainer_level(
            self._config, self.state.isolation, self.state.probes, self.state.controls
        )
        accepted(self.state.isolation)
        if self._rollout is not None:
            self._rollout.require_reached(self.state.probes)
        return self._ask("configure", self._configuration(site_secret, scratch, screen_index), "ready")

    def _configuration(
        self, site_secret: bytes, scratch: Path | None, screen_index: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        config = self._config
        return {
            "silo": config.silo,
            "model": {"path": str(config.model.path), "load": config.model.load},
            "private": [str(path) for path in config.data.private],
            "verifier": config.data.verifier,
            "own_verifiers_sha256": own_verifiers(config),
            "holdout_share": config.data.holdout_share,
            "fields": config.data.fields.model_dump(),
            "template": read_template(config.data.template, config.model.path).text,
            "public": {"path": str(config.data.public.path), "verifier": config.data.public.verifier},
            "held_out": {"path": str(config.data.held_out.path), "verifier": config.held_out_verifier},
            "site_secret": site_secret.hex(),
            "threads": config.threads,
            "microbatch_tokens": config.trainer.microbatch_tokens,
            "cache_bytes": config.trainer.cache_bytes,
            "checkpointing": config.trainer.checkpointing,
            "shard_base": config.trainer.shard_base,
            "rollout": None if self._rollout is None else self._rollout.trainer_fields(),
            "agreement": config.rollout.model_dump(include={"agreement_share", "kl_max", "marker_pushes"}),
            "scratch": str(scratch) if scratch else "",  # an external trainer names its own
            "screen_index": None if screen_index is None else dict(screen_index),
        }

    def _launch(self, level: str, scratch: Path, never: Sequence[Path]) -> subprocess.Popen[bytes]:
        config, socket_path = self._config, self._config.trainer.unix_path
        trainer_link.log_of(config).parent.mkdir(exist_ok=True, mode=0o700)
        self._log_file = trainer_link.log_of(config).open("ab")
        self._log_begins = self._log_file.tell()
        python = str(config.trainer.python or sys.executable)
        readable = [
            config.model.path,
            *config.data.private,
            config.data.public.path,
            config.data.held_out.path,
            *(self._rollout.shown_to_trainer if self._rollout else ()),
        ]
        processes = config.trainer.processes
        if processes > 1 and level == "user":
            raise OperationError(
                f"{processes} processes cannot talk to each other at isolation level user: no socket can be made",
                hint="trainer.processes: 1, or a machine that gives namespaces; `fedsilo doctor` lists the levels",
                code="ISOLATION",
            )
        many = ["--processes", str(processes)] if processes > 1 else []
        try:
            return sandbox.launch_in_sandbox(
                [python, "-P", "-m", "silo.trainer.worker", "--address", config.trainer.address, *many],
                level=level,
                readable=readable,
                writable=[scratch, *([self._rollout.adapters] if self._rollout else [])],
                socket_dir=socket_path.parent if socket_path is not None else None,
                env=trainer_environment(os.environ, threads=config.threads, scratch=scratch),
                never=never,
                accelerators=config.trainer.devices != "cpu",
                stdout=self._log_file,
                stderr=self._log_file,
            )
        except (OSError, ValueError) as error:
            raise OperationError(f"the trainer cannot be started: {error}", code="TRAINER_START") from error

    def _start_rollout(self, level: str, never: Sequence[Path]) -> None:
        """Start the servers that sample, where the site has them. They outlive a trainer that dies."""
        if self._rollout is None and self._config.rollout.chosen == "vllm":
            self._rollout = RolloutServers(self._config, level=level, never=never)
            self._rollout.start()

    def _accept(self, timeout_seconds: float) -> Link:
        assert self._listener is not None  # noqa: S101  # made by start
        refused = ""
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end:
            try:
                return self._listener.accept(_ACCEPT_SLICE_SECONDS, body_bytes_max=self._body_bytes_max)
            except LinkRefused as error:
                # Not the trainer; the right one may still come.
                _log.warning("%s%s", error.message, f" ({error.hint})" if error.hint else "")
                refused = f"; the last one that tried was refused: {error.message}"
            except LinkClosed:
                pass
            if self._should_stop() or self._ending:
                raise OperationError("stopped while the trainer was starting", code="INTERRUPTED")
            status = self._process.poll() if self._process else None
            if status is not None:
                raise OperationError(
                    f"the trainer ended with status {status} before it connected{self._last_words()}",
                    hint=trainer_link.where_it_tells(self._config),
                    code="TRAINER_DIED",
                )
        raise OperationError(
            f"no trainer connected to {self._config.trainer.address} within {timeout_seconds:.0f} s{refused}",
            hint=f"start it with: {trainer_link.start_command(self._config)}",
            code="TRAINER_MISSING",
        )

    def _ask(self, question: str, fields: dict[str, Any], answer: str, body: Buffer = b"") -> dict[str, Any]:
        assert self._link is not None  # noqa: S101  # made by start
        try:
            self._link.send(LinkMessage(question, fields, body))
            while True:
                message = self._link.receive()
                if message.type == answer:
                    return message.fields
                if message.type == "failed":
                    # What is wrong with the site's own files is a usage error, as if they had been read here.
                    refused = UsageError if message.fields.get("input") is True else OperationError
                    raise refused(
                        f"the trainer refuses to {question}: {harmless(message.fields.get('message', ''), 500)}",
                        hint=harmless(message.fields.get("hint", ""), 500),
                        code=harmless(message.fields.get("code", "TRAINER_FAILED"), 64),
                    )
        except LinkClosed as error:
            raise OperationError(
                f"the trainer went away while it was asked to {question}{self._last_words()}",
                hint=trainer_link.where_it_tells(self._config),
                code="TRAINER_DIED",
            ) from error

    # ---- while it runs -----------------------------------------------------------------------------

    def send(self, message: LinkMessage) -> None:
        """Send one message. Raises LinkClosed: the trainer is gone."""
        with self._talking:
            self._given.sent(message)
            if self._reviving:
                return  # it is given to the next one
            if self._link is None:
                raise LinkClosed("no trainer is connected")
            try:
                self._link.send(message)
            except LinkClosed:
                if not self._may_revive:
                    raise
                # The reader sees the same, and gives the message to the next one or says that there is none.

    def _read(self) -> None:
        while True:
            assert self._link is not None  # noqa: S101  # started after the link stands
            try:
                message = self._link.receive()
            except LinkBroken as error:
                _log.error("the trainer breaks the link's rules: %s", error.message)
                self._events(TrainerGone(None, error.message))
                return
            except LinkClosed as error:
                if not self._ending and self._revived():
                    continue
                if not self._ending:
                    _log.error("the trainer is gone: %s%s", error.message, self._last_words())
                    self._events(TrainerGone(self._exit_status()))
                return
            with self._talking:
                self._given.heard(message)
                if message.type == "done":
                    self._restarts = 0
            self._events(TrainerSaid(message))

    # ---- after a death -----------------------------------------------------------------------------

    @property
    def _may_revive(self) -> bool:
        return self._config.trainer.launch == "child" and not self._ending and self._restarts < RESTARTS_MAX

    def _revived(self) -> bool:
        """Start the trainer again and bring it to where it was. False: the guard has to go on without it."""
        with self._talking:
            if not self._may_revive:
                self._reviving = False
                return False
            self._restarts += 1
            number, self._reviving = self._restarts, True
        status = self._exit_status()
        _log.warning("the trainer died (exit status %s)%s; it is started again", status, self._last_words())
        level, ready = self.state.isolation, self.state.ready
        try:
            self._end_process()
            self.state.ready = self._bring_up(lambda got: require_same_isolation(got, level))
            if self.state.ready.get("split") != ready.get("split"):
                raise OperationError("the private rows are not those that it began with", code="TRAINER_DIED")
            repeated = self._go_on()
        except FedSiloError as error:
            _log.error("the trainer cannot be brought to where it was: %s", error.line)
            if error.code != "TRAINER_DIED":  # it would not help to start it once more
                self._restarts = RESTARTS_MAX
            self._end_process()
            self._restarted(Restart(status, number, error.code, task=self._given.task))
            return self._revived()
        self._restarted(Restart(status, number, repeated=repeated, task=self._given.task))
        return True

    def _go_on(self) -> int:
        """The plan, what has to be repeated, the task in hand; how many tasks were repeated.

        Raises:
            OperationError: it cannot be brought there.
        """
        repeated: list[LinkMessage] = []
        if (plan := self._given.plan) is not None:
            first = self._given.planned is None
            planned = self._ask(plan.type, plan.fields if first else {**plan.fields, "resume": True}, "planned")
            if (leads_back := self._given.to_repeat(planned.get("resumed"))) is None:
                raise OperationError("its state is lost, and the round cannot be started over", code="TRAINER_DIED")
            repeated = leads_back
            why = harmless(planned.get("not_resumed", ""), TEXT_CHARACTERS_MAX)
            _log.warning("the trainer %s", f"starts the round over: {why}" if repeated else "goes on where it was")
            for task in (*self._given.stays.values(), *repeated):
                self._ask(task.type, task.fields, "done", task.body)
            self._given.planned = planned
            if first:
                self._events(TrainerSaid(LinkMessage("planned", planned)))
        with self._talking:
            self._reviving = False
            if self._given.task is not None and self._link is not None:
                with contextlib.suppress(LinkClosed):  # it died again: the reader sees it, too, and starts the next
                    self._link.send(self._given.task)
        return len(repeated)

    def _exit_status(self) -> int | None:
        if self._process is None:
            return self._last_status
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(STOP_TIMEOUT_SECONDS)
        return None

    def _last_words(self) -> str:
        return trainer_link.last_words(self._config, self._log_begins)

    # ---- end ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the trainer: asked, then told, then killed. Safe to call twice."""
        self._ending = True
        if self._link is not None:
            with contextlib.suppress(LinkClosed):
                self._link.send(LinkMessage("stop"))
        self._end_process()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(STOP_TIMEOUT_SECONDS)  # it may be starting another one, which then ends as well
        self._end_process()
        if self._rollout is not None:
            self._rollout.stop()
            self._rollout = None
        self._given = Given()  # holds adapters; closures hold this object, so it may wait long for the collector

    def _end_process(self) -> None:
        if self._process is not None:
            sandbox.end_process_group(self._process, STOP_TIMEOUT_SECONDS)
            self._last_status = self._process.returncode
            self._process = None
        if self._link is not None:
            self._link.close()
            self._link = None
        self._close_listener()
        if self._log_file is not None:
            self._log_file.close()
            self._log_file = None

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


# ---- what a trainer was given ------------------------------------------------------------------------


class Given:
    """What a trainer was given in the open round, so that a restarted one can be brought to the same place.

    The trainer keeps its own state at every step boundary (`silo/trainer/resume.py`) and says where that stands. Where
    it fits what the guard was told, the task in hand is given again and nothing else. Where it does not (torn, of
    another run, a lost disk), the round is started over: the same tasks with the same rows, donors and draws, whose
    answers are not taken a second time, since what they offered has gone to the gate. Either way no message leaves
    twice. Does not stop: a trainer that lies about where it stands, which is a trainer that trains on what it likes
    (N1).

    Attributes:
    plan: of the run that the trainer serves, as it was sent; None before the first.
    planned: what it answered to that, once it did.
    task: what it works on; None when it is idle.
    stays: tasks that it did whose content is in no state that it keeps, the last one of each kind.
    """

    def __init__(self) -> None:
        self.plan: LinkMessage | None = None
        self.planned: Mapping[str, Any] | None = None
        self.task: LinkMessage | None = None
        self.stays: dict[str, LinkMessage] = {}
        self._round: list[LinkMessage] = []  # done since the round's adapter was loaded, that task among them
        self._rounds = 0
        self._goes_on = False  # inside a round that another guard's life began: its first tasks are not known here

    def sent(self, message: LinkMessage) -> None:
        if message.type == "plan":
            self.plan, self.planned, self.task, self._round, self._rounds = message, None, None, [], 0
            self._goes_on, self.stays = False, {}
        elif message.type == "task":
            self.task = message

    def heard(self, message: LinkMessage) -> None:
        if message.type == "planned":
            self.planned = message.fields
            self._goes_on = isinstance(message.fields.get("resumed"), Mapping)
        elif message.type == "done" and self.task is not None:
            task, self.task = self.task, None
            kind = TASKS.get(str(task.fields.get("task")))
            if kind is not None and kind.stays:
                self.stays[kind.name] = task
            if kind is None or not kind.changes:
                return
            if kind.begins_round:
                self._round.clear()
                self._rounds += 1
                self._goes_on = False
            self._round.append(task)

    def to_repeat(self, resumed: object) -> list[LinkMessage] | None:
        """Tasks to give once more before the one in hand, their answers not to be taken. None: nothing leads back.

        Args:
            resumed: where the trainer says that it stands: {task, round, step}, or None for the run's beginning.
        """
        if isinstance(resumed, Mapping):
            if self._round and _stands_at(resumed, self._round[-1]):
                return []
            if self.task is not None and _stands_at(resumed, self.task):
                return []  # it was done, and only the answer was lost
        if self._goes_on:
            before = (self.planned or {}).get("resumed")
            return [] if not self._round and resumed is not None and resumed == before else None
        if not self._round:
            return []
        keeps = self.plan is not None and _keeps(self.plan)
        if keeps and (self._rounds > 1 or resumed is not None):
            return None  # what it kept from the round before is gone, and nothing leads back to it
        given = TASKS.get(str(self.task.fields.get("task"))) if self.task is not None else None
        if given is not None and given.begins_round and not keeps:
            return []
        return list(self._round)


def require_same_isolation(got: str, before: str) -> None:
    """Raises OperationError: another isolation level than the policy and the coordinator were told of."""
    if got != before:
        raise OperationError(f"its isolation is {got}, and was {before}", code="ISOLATION")


def _stands_at(resumed: Mapping[str, Any], task: LinkMessage) -> bool:
    kind = TASKS.get(str(task.fields.get("task")))
    if kind is None or not kind.changes:
        return False
    place = (task.fields["task"], task.fields.get("round"), task.fields.get("step", 0))
    return (resumed.get("task"), resumed.get("round"), resumed.get("step")) == place


def _keeps(plan: LinkMessage) -> bool:
    """Return whether a round depends on the one before by more than the adapter it begins with: by the optimiser's
    moments, or by what the silo trained itself. plan: our own message."""
    fields = json.loads(str(plan.fields["canonical_json"]))
    method = METHODS.get(fields.get("method", ""))
    return fields.get("optimiser", {}).get("state") == "keep" or (method is not None and method.keeps_own)


# ---- the grader of public answers --------------------------------------------------------------------


def public_grader(config: SiloConfig) -> GradingProcess:
    """Return the process that grades answers to public prompts; never the guard's own, which holds the keys.

        text verifiers   a child that can be killed (`fedsilo.grading.worker`); not started yet
        `code`           the same child in a sandbox of isolation level `namespaces`, started and tried: no network,
                         none of the site's files, no key, no data, no model. In there each program runs in the sandbox
                         of `fedsilo.grading.code_sandbox`, so there are two sandboxes between a program and this site.
                         The answers to a public prompt come from the models of other silos too: such a program is a
                         stranger's (T14, T22).

    The guard takes nine bytes an answer from it, and gives the answers of one silo to one step, and all answers of one
    message, no longer than their budget (`fedsilo.grading.answers`), whatever the verifier. An answer of which it says
    nothing in time, or something else than a verdict, is dropped; where it cannot be built the silo does not start.
    Programs run only where the policy says so for this public set, and the charter as well, where there is one. What
    this does not stop: faults of the kernel that both sandboxes rest on; a test program of the agreed public set that
    is itself hostile decides what is right; answers that take all their time make a message late.

    Raises:
        UsageError: one of the two sandboxes cannot be built here, or a path that is needed inside would show a key.
        OperationError: the process does not start.
    """
    verifier = config.data.public.verifier
    if not find_verifier(verifier).executes:
        return GradingProcess(verifier)
    if why := probing.sandbox_trial("namespaces"):
        raise UsageError(
            f"data.public.verifier {verifier!r} runs programs of other silos' models, and this machine builds no "
            f"sandbox of isolation level namespaces for them: {why}",
            hint="`fedsilo doctor` lists the isolation levels; or use a verifier that runs nothing",
            code="NO_SANDBOX",
        )
    never = never_shown(config)

    def launch(arguments: Sequence[str], environment: Mapping[str, str]) -> sandbox.SandboxedProcess:
        return sandbox.launch_over_pipes(arguments, env=environment, never=never)

    process = GradingProcess(verifier, runs_programs=True, launch=launch)
    try:
        process.wait_ready()
    except BaseException:
        process.close()
        raise
    return process
