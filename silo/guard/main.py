"""Puts a guard together from its configuration, runs it, takes it apart. What `silo start` calls.

Order matters: the lock on `state_dir` before anything is written, the audit log before anything is said, the control
socket before the trainer (the probes try it from inside), the trainer before the coordinator is dialled.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import fedsilo
from fedsilo.audit.index import LogIndex
from fedsilo.audit.log import AuditLog
from fedsilo.control.server import ControlServer
from fedsilo.control.socket_server import ControlSocket
from fedsilo.files import long_lived
from fedsilo.files.durable import lock_exclusively, make_private_directory, require_space
from fedsilo.files.logs import JsonLines, keep_to_one_line
from fedsilo.grading.answers import AnswerGrading
from fedsilo.protocol.codec import SMALL_PAYLOAD_BYTES_MAX
from fedsilo.protocol.errors import ConflictError, FedSiloError, UnreachableError
from fedsilo.protocol.text import harmless
from policies.model import Policy
from silo.config import SiloConfig
from silo.guard.adapters import AdapterStore
from silo.guard.answers.queries import QUOTED
from silo.guard.archive import Archive
from silo.guard.checks import look_at_coordinator
from silo.guard.clock_watch import ClockWatch, slept
from silo.guard.decisions import Judge, PublicView, SiteView, token_counter
from silo.guard.gate import Gate, open_channel
from silo.guard.ledger import Ledger
from silo.guard.ledger_check import open_ledger
from silo.guard.loop import Command, Event, Guard
from silo.guard.messages import Channel
from silo.guard.policy_change import take_over
from silo.guard.releases import Releases
from silo.guard.screens import Rescreening, Screens, index_key, site_canaries
from silo.guard.site import (
    AUDIT,
    LOCK,
    OwnCertificate,
    Site,
    code_sha256,
    load_site_parts,
    never_shown,
    require_authority_files,
    require_isolation,
)
from silo.guard.trainer_process.probing import probe_fields, why_waived
from silo.guard.trainer_process.supervisor import Restart, Supervisor, TrainerHandle, public_grader
from silo.guard.trainer_report import TEXT_CHARACTERS_MAX, ready_facts
from silo.link import LinkMessage

_log = logging.getLogger("fedsilo.silo")
_STDERR = "standard error"  # name of its handler
_FILE_ONLY = {"file_only": True}


class SupervisedTrainer(TrainerHandle):
    """The trainer behind a supervisor, started anew for each run, and held to the policy's least isolation."""

    def __init__(
        self,
        site: Site,
        events: queue.Queue[Event],
        should_stop: Callable[[], bool],
        policy: Callable[[], Policy] | None = None,
        screens: Screens | None = None,
        record: Callable[..., object] = lambda event, **fields: None,
    ) -> None:
        self._site = site
        self._screens = screens
        self._record = record
        self._policy = policy or (lambda: site.policy)  # the one in force, which a reload may have tightened
        self._events = events
        self._should_stop = should_stop
        self._supervisor: Supervisor | None = None
        waits = site.config.trainer.launch == "external"
        self._description: dict[str, Any] = {"waiting_for": site.config.trainer.address} if waits else {}
        self._isolation = "waived"

    def start(self) -> None:
        config = self._site.config
        # The trainer hands over float32; the wire's values may have half the bytes.
        body_bytes_max = max(2 * self._site.schema.payload_bytes, SMALL_PAYLOAD_BYTES_MAX)
        supervisor = Supervisor(
            config,
            self._events.put,
            should_stop=self._should_stop,
            body_bytes_max=body_bytes_max,
            restarted=self._restarted,
        )
        self._supervisor = supervisor
        # Until it has been probed, nothing is known of it.
        self._isolation, self._description = "waived", {}
        wanted = self._screens.index_wanted(self._policy().file) if self._screens is not None else None
        state = supervisor.start(
            self._site.site_secret,
            probe_fields(config, os.getpid()),
            never=never_shown(config),
            accepted=self._accepted,
            screen_index=wanted,
        )
        self._description["ready"] = state.ready
        if self._screens is not None:
            self._take_index(self._screens, state.ready.get("screen_index"), wanted)

    def _take_index(self, screens: Screens, index: object, wanted: dict[str, Any] | None) -> None:
        config = self._site.config
        scratch = config.trainer.scratch if config.trainer.launch == "external" else config.state_dir / "scratch"
        screens.take_index(scratch, index, wanted)
        for trouble in screens.troubles(self._policy()):
            _log.error("%s", trouble)

    def _restarted(self, restart: Restart) -> None:
        """Record a restart on the loop's thread; it stands before whatever the next trainer's words lead to."""
        self._events.put(Command(lambda: self._record("trainer.restart", **restart.fields())))

    def _accepted(self, isolation: str) -> None:
        assert self._supervisor is not None  # noqa: S101  # it is the one that calls
        state = self._supervisor.state
        self._isolation = isolation
        self._description = {
            "isolation": isolation,
            "probes": state.probes,
            "controls": state.controls.as_text(),
            "why_waived": why_waived(state.probes, state.controls) if isolation == "waived" else "",
        }
        require_isolation(isolation, self._policy(), self._description["why_waived"])

    def send(self, message: LinkMessage) -> None:
        if self._supervisor is not None:
            self._supervisor.send(message)

    def stop(self) -> None:
        if self._supervisor is not None:
            self._supervisor.stop()
            self._supervisor = None

    @property
    def isolation(self) -> str:
        return self._isolation

    @property
    def description(self) -> dict[str, Any]:
        return self._description


@dataclass(frozen=True)
class Clocks:
    """Where a guard reads the time, in seconds.

    Attributes:
        wall: UTC.
        monotonic: goes on evenly, but for the time in which the machine sleeps.
        slept: for how long it has slept.
    """

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    slept: Callable[[], float] = slept


@dataclass(frozen=True)
class BuiltGuard:
    """A guard that stands and has not begun: its main path and what it is made of."""

    guard: Guard
    control_server: ControlServer
    trainer: TrainerHandle
    judge: Judge
    ledger: Ledger
    audit: AuditLog
    releases: Releases
    screens: Screens


def guard_of(
    site: Site,
    stack: contextlib.ExitStack,
    *,
    channel: Callable[[], Channel],
    grading: Callable[[], AnswerGrading],
    trainer_of: Callable[[Judge, Screens], TrainerHandle],
    events: queue.Queue[Event],
    clocks: Clocks = Clocks(),
    give_up: Callable[[], bool] = lambda: False,
) -> BuiltGuard:
    """Put a site's guard together on its state folder; the policy is in force and the start is on record.

    Args:
        site: what was read.
        stack: closes what is opened.
        channel: makes that to the coordinator.
        grading: makes that of answers to public prompts. Neither is made before ledger and log are open.
        trainer_of: makes the handle of its trainer, which is not started here.
        events: what the trainer says is put there.
        clocks: where it reads the time.
        give_up: asked while the ledger is locked: whether to wait no longer.

    Raises:
        FedSiloError: why this site's guard may not start.
    """
    config, policy, key = site.config, site.policy, site.identity.signing_key
    canaries = site_canaries(config, policy)

    def log(clock: Callable[[], float]) -> AuditLog:
        folder = config.state_dir / AUDIT
        return AuditLog(folder, origin=config.spiffe_id, key=key, actor=config.spiffe_id, clock=clock)

    ledger = open_ledger(site, log, clocks.wall(), give_up)
    stack.callback(ledger.close)
    watch = ClockWatch(
        ledger,
        asks=not config.coordinator.by_files,
        wall=clocks.wall,
        monotonic=clocks.monotonic,
        slept=clocks.slept,
    )
    audit = stack.enter_context(log(watch.time))
    watch.begin(audit.latest_time)
    audit.trust_peer(policy.file.federation.coordinator, site.coordinator_key)
    program = code_sha256()
    started = {"version": fedsilo.__version__, "code": program}
    step = take_over(site, ledger, audit, now=watch.time(), started=started, program=program, shows=watch.people_time())
    _log.info("policy %s is in force: %s", policy.digest[:12], step.how)
    certificate = OwnCertificate(site.identity, config.state_dir / AUDIT)
    certificate.look(audit.append, audit.latest_time)
    screens = Screens(canaries=canaries, key=index_key(site.site_secret), public_sha256=site.public.sha256)
    adapters = AdapterStore(config.state_dir / "adapters")
    judge = Judge(
        policy=policy,
        ledger=ledger,
        audit=audit,
        site=SiteView(
            spiffe_id=config.spiffe_id,
            coordinator_id=policy.file.federation.coordinator,
            schema=site.schema,
            public=PublicView(site.public, grading(), token_counter(config.model.path)),
            topics=frozenset(task.topic for task in site.held_out.rows if task.topic),
            adapters=adapters,
            by_files=config.coordinator.by_files,
        ),
        site_key=hmac.new(site.site_secret, b"fedsilo audit digests", hashlib.sha256).digest(),
        clock=watch.time,
        screens=screens,
        code_sha256=program,
    )
    archive = Archive(ledger, audit, judge)
    gate = Gate(
        channel=channel(),
        judge=judge,
        ledger=ledger,
        archive=archive,
        federation=config.federation,
        signing_key=key,
        coordinator_key=site.coordinator_key,
    )
    stack.callback(gate.close)
    address = {"address": config.coordinator.address}
    releases = Releases(gate, ledger, silo=config.silo, destination=address)
    control_server = ControlServer(
        config.silo,
        site.site_ca_pem,
        site.roles,
        lambda: _utc(watch.time()),
        journal=config.state_dir / "requests.jsonl",
        federation=config.federation,
        shows=lambda: _utc(watch.people_time()),
        wall=lambda: _utc(watch.wall()),
    )
    trainer = trainer_of(judge, screens)
    stack.callback(trainer.stop)
    guard = Guard(
        site=site, gate=gate, ledger=ledger, audit=audit, releases=releases,
        adapters=adapters, trainer=trainer, control_server=control_server, events=events,
        archive=archive, code_sha256=program, watch=watch, monotonic=clocks.monotonic,
    )  # fmt: skip
    guard.hourly.append(lambda: certificate.look(judge.record, judge.now()))
    return BuiltGuard(guard, control_server, trainer, judge, ledger, audit, releases, screens)


def serve(config: SiloConfig, *, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run a silo until SIGTERM, SIGINT or `silo stop`.

    Args:
        config: the site.
        ready: called once with one line's worth of facts, when trainer and socket stand.

    Raises:
        FedSiloError: why it did not start, or why it ended by itself.
    """
    long_lived.bound_heaps()
    lock = None
    try:
        with lock_exclusively(config.state_dir / LOCK) as lock, contextlib.ExitStack() as stack:
            require_space(config.state_dir)
            require_authority_files(config)
            _serve_locked(load_site_parts(config), stack, ready)
    except FedSiloError as error:
        # The command shows it on stderr; the log must have it too, but not that of another one that runs.
        if lock is not None or not isinstance(error, ConflictError):
            _log.critical("ended: %s [%s]", error.line, error.code, extra=_FILE_ONLY)
        raise


def _serve_locked(site: Site, stack: contextlib.ExitStack, ready: Callable[[dict[str, Any]], None]) -> None:
    config = site.config
    stopped: list[int] = []
    guards: list[Guard] = []

    def on_signal(number: int, _frame: Any) -> None:
        stopped.append(number)
        for guard in guards:
            guard.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        previous = signal.signal(number, on_signal)
        stack.callback(signal.signal, number, previous)

    events: queue.Queue[Event] = queue.Queue()

    def grading() -> AnswerGrading:
        grader = stack.enter_context(public_grader(config))
        return AnswerGrading([grader], grader.budget_seconds)

    def trainer_of(judge: Judge, screens: Screens) -> TrainerHandle:
        return SupervisedTrainer(
            site,
            events,
            lambda: bool(stopped),
            lambda: judge.policy,
            screens,
            lambda event, **fields: judge.record(event, run=judge.view.run or None, **fields),
        )

    built = guard_of(
        site,
        stack,
        channel=lambda: open_channel(config.coordinator, site.tls),
        grading=grading,
        trainer_of=trainer_of,
        events=events,
        give_up=lambda: bool(stopped),
    )
    guard, control_server, judge, trainer = built.guard, built.control_server, built.judge, built.trainer
    _shape(config, lambda: {"run": judge.view.run, "round": judge.view.round, "step": judge.view.open_step})
    guards.append(guard)
    if stopped:
        guard.stop()
    guard.register(control_server)
    # A long log takes seconds to go through, and nobody waits for that here; who asks before it is done does.
    threading.Thread(target=_fold, args=(guard.queries.index,), name="message-index", daemon=True).start()
    Rescreening(built.ledger, built.audit, built.screens).register(control_server, guard.on_loop)
    # before anybody can look: a trainer takes minutes to load a large model, and what is held is held meanwhile
    guard.show()
    control = ControlSocket(
        control_server, config.control.socket, config.control.group, log=logging.getLogger("fedsilo.silo.control")
    ).start()
    stack.callback(control.close)
    if not config.coordinator.by_files:
        try:
            built.releases.destination.update(look_at_coordinator(site, datetime.now(UTC)))
        except UnreachableError as error:
            # It may come up later; until then the log names the cause.
            _log.warning("%s", error.line)
        # It is renewed now and then; dialling may take a while, which the loop has no time for.
        guard.hourly.append(
            lambda: threading.Thread(target=_look_again, args=(site, built.releases), daemon=True).start()
        )
    trainer.start()
    guard.show()
    report = trainer.description["ready"]
    for name, what in (("left_out", "private lines left out"), ("found_twice", "prompts in two places")):
        for text in listed if isinstance(listed := report.get(name), list) else ():
            _log.warning("%s: %s", what, harmless(text, TEXT_CHARACTERS_MAX))
    facts = ready_facts(report)
    long_lived.set_apart()
    ready(
        {
            "private": {name: facts.get(name) for name in ("private_rows", "holdout_rows", "dropped")},
            "silo": config.silo,
            "federation": config.federation,
            "isolation": trainer.isolation,
            "policy": {"name": site.policy.file.name, "digest": site.policy.digest},
            "control_socket": str(config.control.socket),
            "coordinator": config.coordinator.address,
            "process_id": os.getpid(),
        }
    )
    if stopped:
        return
    guard.run()


def _fold(index: LogIndex) -> None:
    try:
        index.catch_up()
    except FedSiloError as error:  # whoever asks is told the same
        _log.warning("the messages of the audit log cannot be listed: %s", error.line)


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _look_again(site: Site, releases: Releases) -> None:
    try:
        releases.destination.update(look_at_coordinator(site, datetime.now(UTC)))
    except FedSiloError as error:
        _log.warning("%s", error.line)


def prepare_logging(config: SiloConfig, *, to_stderr: bool) -> None:
    """This daemon's log: `state_dir/logs/guard.log`, and stderr for whoever started it. Never sent anywhere (T8)."""
    logs = config.state_dir / "logs"
    make_private_directory(config.state_dir)
    make_private_directory(logs)
    handlers: list[logging.Handler] = [logging.FileHandler(logs / "guard.log", encoding="utf-8")]
    if to_stderr:
        shown = logging.StreamHandler()
        shown.addFilter(lambda record: not getattr(record, "file_only", False))
        shown.set_name(_STDERR)
        handlers.append(shown)
    # On a full disk the log's own file fails; that is said once, by the halt, and not as a traceback for every line.
    logging.raiseExceptions = False
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s.%(msecs)03dZ %(levelname)s {config.silo} %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
        handlers=handlers,
        force=True,
    )
    keep_to_one_line(logging.getLogger())
    _shape(config, dict)


def _shape(config: SiloConfig, current: Callable[[], Mapping[str, Any]]) -> None:
    """Standard error as JSON, where it is asked for; the file stays as the console reads it."""
    if config.log_format == "json":
        whose = {"party": "silo", "federation": config.federation, "name": config.silo}
        for handler in logging.getLogger().handlers:
            if handler.get_name() == _STDERR:
                handler.setFormatter(JsonLines(whose, current=current, quoted=QUOTED))
