"""The coordinator process: reads its configuration, wires the parts, serves, and ends cleanly; and its clock.

The parts never hold this module; it holds them: identity, charter, store, payloads, audit log, ingress, driver,
submissions, control server, servers.

Nobody tells a coordinator the time, so its clock is believed as it is at the start (threat T41; the decision is in
`fedsilo.protocol.clocks`). A jump forward beyond the limit is not followed: what is judged, stored and signed goes by
the time for which the machine has run, until the clock is as before or an approver accepts it. People are told of both.

Does not stop: a clock that is wrong at the start, which is recorded where the log's latest time is long over; a jump
below the limit, which is recorded.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from certs.commands import VerifiedCommand
from certs.encoding import in_words
from certs.identity import Identity
from certs.roles import Roles
from coordinator.answers.queries import Files, Panel
from coordinator.blobs import AnyPayload, Blobs
from coordinator.config import CoordinatorConfig, load_config
from coordinator.control import Control, Submissions
from coordinator.driver import Driver
from coordinator.ingress import Ingress
from coordinator.native_log import NativeLog
from coordinator.outbox import Replies
from coordinator.record import Outcome
from coordinator.runs import Dependencies
from coordinator.server import FederationService, federation_server
from coordinator.store import Store
from coordinator.transfer import Transfers
from fedsilo.audit.log import AuditLog
from fedsilo.audit.record import CLOCK_ACCEPTED
from fedsilo.control.server import ControlServer
from fedsilo.control.socket_server import ControlSocket
from fedsilo.files import long_lived
from fedsilo.files.durable import (
    lock_exclusively,
    make_private_directory,
    read_regular,
    require_authority,
    require_space,
)
from fedsilo.files.identity_files import load_identity, load_site
from fedsilo.files.logs import QuietLog, shape
from fedsilo.files.run_request import Agreed, Fixed
from fedsilo.files.task_files import PUBLIC, TaskFile, read_tasks
from fedsilo.grading import require_verifier
from fedsilo.grading.answers import AnswerGrading
from fedsilo.grading.worker import GradingProcess
from fedsilo.protocol.clocks import SIGNED_SECONDS_MAX, SLACK_SECONDS, TOLD_SECONDS, Verdict, apart, judge
from fedsilo.protocol.clocks import in_words as time_in_words
from fedsilo.protocol.codec import canonical_json, sha256_hex
from fedsilo.protocol.errors import ConflictError, FedSiloError, NotFoundError, OperationError, UsageError
from fedsilo.protocol.kinds import TENSOR_KINDS
from policies.load import load_policy
from policies.model import Policy
from policies.schema import LoraSchema, schema_from_json

# ---- the clock ---------------------------------------------------------------------------------------------------


def running() -> float:
    """Seconds since the machine was started, those in which it slept too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClockWatch:
    """Thread-safe.

    Args:
        wall, running: seconds.

    Attributes:
        believed: what the clock showed when it was believed last without a question, UTC seconds.
        jumped: seconds of jumps, and of the gap before the start, that nobody has recorded yet.
        offset: the clock less the time for which the machine has run, seconds. Small steps of the clock do not move it.
    """

    def __init__(self, wall: Callable[[], float], running: Callable[[], float]) -> None:
        self._wall, self._running = wall, running
        self._mutex = threading.Lock()
        self.believed, self._since = wall(), running()
        self.offset = self.believed - self._since
        self.jumped = self._told = 0.0

    def begin(self, latest: float) -> None:
        """Tell of a gap since the audit log's end. latest: UTC seconds of that; 0 before its first record."""
        gap = self.believed - latest if latest else 0.0
        if gap > SIGNED_SECONDS_MAX + SLACK_SECONDS:
            self.jumped += gap

    def wall(self) -> float:
        """Return the time that the clock shows, believed or not, in UTC seconds."""
        return self._wall()

    def time(self) -> float:
        """UTC seconds to judge, store and sign by."""
        return self._look()[0]

    @property
    def ahead(self) -> float:
        """Seconds of a jump that is not followed; 0 while the clock is believed."""
        return self._look()[1]

    def take_jump(self) -> float:
        """Seconds that nobody vouches for and nobody was told of; asked again, they are none."""
        self._look()
        with self._mutex:
            jumped, self.jumped = self.jumped, 0.0
            return jumped

    def accept(self) -> None:
        """An approver accepts the clock as it is now."""
        with self._mutex:
            self.believed, self._since, self._told = self._wall(), self._running(), 0.0

    def _look(self) -> tuple[float, float]:
        """UTC seconds to go by, and by how much the clock is ahead of them."""
        with self._mutex:
            wall, running = self._wall(), self._running()
            if abs(wall - running - self.offset) > TOLD_SECONDS:
                self.offset = wall - running
            judged = judge(wall, stored=0.0, ran=self.believed + running - self._since)
            if abs(judged.seconds - self._told) > TOLD_SECONDS:
                self.jumped += max(0.0, judged.seconds - self._told)
                self._told = judged.seconds  # what it was believed at stays, so that small jumps add up
            return judged.time, judged.seconds if judged.verdict == Verdict.AHEAD else 0.0


# ---- the process -------------------------------------------------------------------------------------------------

log = logging.getLogger("fedsilo.coordinator")

TICK_SECONDS = 0.2
DRAIN_SECONDS = 5.0
SWEEP_SECONDS = 3_600.0  # between two looks for uploads that nobody goes on with
GRADERS_MAX = 4  # each needs 100 MB; so many silos' answers are graded at once
ASK_SECONDS = 1.0  # until a database that went away is noticed, though nobody sends anything
# kinds whose payload nobody can guess; of all others the log keeps a keyed digest (T40)
_UNGUESSABLE = TENSOR_KINDS | {"control.hello", "control.checkpoint"}


@dataclass(frozen=True)
class Shared:
    """A configuration whose files that are no secret are all there and fit each other."""

    config: CoordinatorConfig
    charter: Policy
    schema: LoraSchema
    public: TaskFile
    agreed: Agreed
    warnings: tuple[str, ...]

    @property
    def fixed(self) -> Fixed:
        """The part of a plan that nobody who submits a run can choose."""
        config, public = self.config, self.public
        return Fixed(
            config.federation, config.silos, self.agreed, self.schema, len(public.rows), self.charter, public.unsolved
        )


@dataclass(frozen=True)
class Checked(Shared):
    """A checked configuration, with what only the daemon may read."""

    identity: Identity


@dataclass(frozen=True)
class Ready:
    """Addresses of a started coordinator."""

    federation: str
    coordinator: str
    address: str
    port: int
    control_socket: str


def check(config: CoordinatorConfig) -> Checked:
    """Read and compare everything a start needs, changing nothing.

    Raises:
        FedSiloError: the first thing that is missing or does not fit, by name.
    """
    files = config.identity
    for path in (config.source, config.charter, files.operators, files.federation_ca, files.site_ca):
        require_authority(path)
    identity = load_identity(files.certificate, files.key, files.signing_key, files.federation_ca, role="coordinator")
    if identity.spiffe_id != config.spiffe_id:
        raise UsageError(
            f"{config.source}: the certificate is of {identity.spiffe_id}, the configuration of {config.spiffe_id}"
        )
    load_site(files.site_ca, files.operators, site=config.site)
    shared = check_shared(config)
    require_space(config.state_dir)
    return Checked(**vars(shared), identity=identity)


def check_shared(config: CoordinatorConfig) -> Shared:
    """Check as `check` does, without the daemon's keys: what a person may read who submits a run."""
    charter = load_policy(_read(config.charter, "coordinator init"), str(config.charter))
    expected = config.expected
    if strangers := sorted(expected.models.keys() - set(config.silos)):
        raise UsageError(f"{config.source}: expected.models: {strangers[0]} is not listed under silos")
    schema = schema_from_json(_read(expected.lora_schema, "fedsilo policy schema make"), str(expected.lora_schema))
    if schema.base_model_sha256 != expected.base_model_sha256:
        raise UsageError(f"{expected.lora_schema} is for another base model than {config.source} expects")
    public = read_tasks(config.public.path, PUBLIC)
    if public.sha256 != config.public.sha256:
        raise UsageError(
            f"public set {config.public.path} has SHA-256 {public.sha256}; {config.source.name} says "
            f"{config.public.sha256}",
            hint="restore the file, or agree on the new set with every site",
            code="PUBLIC_SET_MISMATCH",
        )
    warnings = [f"{config.public.path}:{line}: {reason}" for line, reason in public.problems]
    if require_verifier(config.public.verifier).executes:
        warnings.append(f"answers to the public set are not checked here: {config.public.verifier} runs programs")
        responses = charter.file.egress.public_responses
        if responses is not None and responses.send_only_verified:
            warnings.append(
                f"{config.charter}:{charter.line_of(('egress', 'public.responses', 'send_only_verified'))}: so each "
                "message with answers is denied here; write send_only_verified: false, as the sites' policies demand it"
            )
    agreed = Agreed(
        base_model_sha256=expected.base_model_sha256,
        tokenizer_sha256=expected.tokenizer_sha256,
        template_sha256=expected.template_sha256,
        load=expected.load,
        mixed_base=expected.mixed_base,
        lora_schema_sha256=schema.digest,
        public_set_sha256=config.public.sha256,
        held_out_sha256=config.held_out.sha256,
        own_verifiers_sha256=expected.own_verifiers_sha256 or "",
        mixed_verifiers=expected.mixed_verifiers,
        models=expected.models,
    )
    return Shared(config, charter, schema, public, agreed, tuple(warnings))


class Coordinator:
    """All parts of a coordinator. Use it as a context; the state folder is locked while it is open.

    Args:
        checked: the configuration and its files.
        clock: UTC seconds.
        running: seconds that pass whatever the clock shows.
        monotonic: seconds that deadlines go by.
        grading: of answers to public prompts; None: processes of this one's own.
        replies: what seals the replies. No key of the configuration names one: another than the honest one takes
            another program.

    Raises (on entering):
        ConflictError: another process has this state folder, or the port is in use.
        FedSiloError: a part cannot be opened.
    """

    def __init__(
        self,
        checked: Checked,
        *,
        clock: Callable[[], float] = time.time,
        running: Callable[[], float] = running,
        monotonic: Callable[[], float] = time.monotonic,
        replies: Callable[..., Replies] = Replies,
        grading: AnswerGrading | None = None,
    ) -> None:
        self._checked = checked
        self._watch = ClockWatch(clock, running)
        self._monotonic = monotonic
        self._grading = grading
        self._replies = replies
        self._stack = ExitStack()
        self._stopped = threading.Event()
        self._latest = 0.0
        self._latest_lock = threading.Lock()

    def __enter__(self) -> Coordinator:
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def now(self) -> datetime:
        """UTC that never goes back: a certificate that has expired once stays expired (T26, T41)."""
        return datetime.fromtimestamp(self.seconds(), UTC)

    def seconds(self) -> float:
        """UTC seconds that never go back (T41)."""
        with self._latest_lock:
            self._latest = max(self._latest, self._watch.time())
            return self._latest

    def clock(self) -> dict[str, Any]:
        """Return the state of the clock for people: how far it is behind the latest time seen, where time stands still
        for it, or ahead of the elapsed time, where a jump is not followed; else empty.

        Does not notice a clock that is ahead from the start: nobody tells a coordinator the time; silos that start then
        say so.
        """
        with self._latest_lock:
            latest, ahead, behind = self._latest, self._watch.ahead, self._latest - self._watch.wall()
        if not ahead and behind <= TOLD_SECONDS:
            return {}
        # Neither moves while people look at it.
        since = self._watch.believed if ahead else latest
        digest = sha256_hex(canonical_json(["fedsilo coordinator clock", since, self._watch.offset]))
        if ahead:
            off, than = {"ahead_seconds": round(ahead)}, "the time that has passed, and all here goes by that"
        else:
            off, than = {"behind_seconds": round(behind)}, "the latest time seen, and time stands still until then"
        return {**off, "told": f"{apart(ahead or -behind)} {than}", "latest": latest, "digest": digest}

    def accept_clock(self, command: VerifiedCommand) -> dict[str, Any]:
        """An approver accepts the clock: nothing is compared with a later time than it shows any more, and a jump is
        followed (T41).

        Args:
            command: argument {halt}, the digest that `clock` shows.

        Raises:
            NotFoundError: time does not stand still here, and no jump is kept out.
            ConflictError: another time was shown.
            OperationError: the log takes nothing.
        """
        stands = self.clock()
        if not stands:
            raise NotFoundError("time does not stand still here", hint="`coordinator status` says where it does")
        if command.arguments.get("halt") != stands["digest"]:
            hint = "read it again: `coordinator status`"
            raise ConflictError("the latest time is another one than was shown", hint=hint, code="STALE_VIEW")
        with self.driver.changing():
            self.driver.close_windows()  # or polls would go on under one whose hour is in the released time
            number = self.audit.append(
                CLOCK_ACCEPTED,
                policy={"effective": self._checked.charter.digest},
                detail={
                    "person": command.person,
                    "certificate": command.certificate_fingerprint,
                    "request": command.request_id,
                    "halt": stands["digest"],
                    "latest": int(stands["latest"]),
                    "off_seconds": stands.get("ahead_seconds", 0) or stands["behind_seconds"],
                },
                **({"orders": [dict(command.order)]} if command.order else {}),
            )
            self.control_server.accept_clock()
            with self._latest_lock:
                self._watch.accept()
                self._latest = self._watch.time()
            self.driver.turn_back(self.seconds())
        self.control.publish("clock.accepted", {"by": command.person})
        now = {"accepted": self.seconds(), "released": stands["latest"]}
        return {**now, "record": number, "audit_size": self.audit.size}

    def look_at_clock(self) -> None:
        """Tell people of a jump forward, and of a gap before the start. Raises OperationError: the log is full."""
        if not (jumped := self._watch.take_jump()):
            return
        detail: dict[str, Any] = {"forward_milliseconds": int(jumped * 1000)}
        if ahead := self._watch.ahead:
            detail["followed"] = False
            log.critical(
                "the clock is %s ahead of the time that has passed: that is not followed", time_in_words(ahead)
            )
        else:
            log.warning("the clock went on by %s that nobody vouches for", time_in_words(jumped))
        self.audit.append("clock.jump", policy={"effective": self._checked.charter.digest}, detail=detail)

    def _publish(self, name: str, fields: dict[str, Any]) -> None:
        self.store.once_committed(lambda: self.control.publish(name, fields))

    def _text_now(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")

    def _open(self, stack: ExitStack) -> None:
        checked, config, identity = self._checked, self._checked.config, self._checked.identity
        make_private_directory(config.state_dir)
        stack.callback(lock_exclusively(config.state_dir / "lock").release)
        self.store = Store(config.database_url)
        if self.store.locked is not None:
            self.store.locked.give_up = self._stopped.is_set
        stack.callback(self.store.close)
        self.blobs = Blobs(config.state_dir, config.payloads)
        self.audit = AuditLog(
            config.state_dir / "audit",
            origin=identity.spiffe_id,
            key=identity.signing_key,
            actor=identity.spiffe_id,
            clock=self._watch.time,
        )
        stack.callback(self.audit.close)
        self._latest = self.audit.latest_time
        self._watch.begin(self._latest)
        site_ca_pem, roles = load_site(config.identity.site_ca, config.identity.operators, site=config.site)
        self.control_server = ControlServer(
            config.site,
            site_ca_pem,
            roles,
            self.now,
            journal=config.state_dir / "requests.jsonl",
            federation=config.federation,
            wall=lambda: datetime.fromtimestamp(self._watch.wall(), UTC),
        )
        self.control_server.register_command("clock.accept", "halt.release", self.accept_clock, by_clock=True)
        stack.callback(self.control_server.close)
        outcome = Outcome(
            config.state_dir / "runs",
            self.blobs,
            schema=checked.schema,
            base_model=config.expected.base_model,
            signer=identity.spiffe_id,
            key=identity.signing_key,
            charter_digest=checked.charter.digest,
        )
        self.driver = Driver(
            Dependencies(
                federation=config.federation,
                spiffe_id=identity.spiffe_id,
                signing_key=identity.signing_key,
                silos=config.silos,
                agreed=checked.agreed,
                store=self.store,
                blobs=self.blobs,
                audit=self.audit,
                ingress=self._ingress(stack),
                now=self._text_now,
                monotonic=self._monotonic,
                publish=self._publish,
                finished=outcome.write,
                payload_digest=self._payload_digest(),
                poll_wait_seconds_max=config.limits.poll_wait_seconds_max,
                replies=self._replies,
            )
        )
        fixed = checked.fixed
        self.submissions = Submissions(self.driver, fixed, self._text_now, config.source.parent)
        self.driver.after_hello = self.submissions.look
        self.control = Control(
            self.control_server, self.driver, self.submissions, outcome, config, checked.charter.digest
        )
        self._register_panel(roles)
        Transfers(
            self.driver, trust_root_pem=identity.trust_root_pem, now=self.now, charter_digest=checked.charter.digest
        ).register(self.control_server)
        self.driver.load()
        self.submissions.load()

    def _register_panel(self, roles: Roles) -> None:
        checked, config, now = self._checked, self._checked.config, self.seconds
        panel = Panel(
            self.audit,
            self.store,
            self.control_server,
            self.driver.services.relay,
            charter=checked.charter,
            silos=tuple(f"spiffe://{config.federation}/silo/{silo}" for silo in config.silos),
            now_seconds=now,
        )
        self.control.clock = self.clock
        self.control.log_broken = lambda: panel.log_broken
        files = Files(config, checked.identity.certificate_pem, roles, panel, now)
        for name, answer in (panel.queries() | files.queries()).items():
            self.control_server.register_query(name, answer)

    def _ingress(self, stack: ExitStack) -> Ingress:
        checked, config = self._checked, self._checked.config
        grading = self._grading
        if grading is None and not require_verifier(config.public.verifier).executes:
            graders = [GradingProcess(config.public.verifier) for _ in range(min(GRADERS_MAX, len(config.silos)))]
            for grader in graders:
                stack.callback(grader.close)
            graders[-1].start()  # the first that is used
            grading = AnswerGrading(graders, graders[0].budget_seconds)
        metrics = checked.charter.file.egress.metrics_eval
        return Ingress(
            federation=config.federation,
            silos=config.silos,
            policy=checked.charter,
            schema=checked.schema,
            references=tuple(task.answer for task in checked.public.rows),
            public_set_sha256=config.public.sha256,
            # the held-out file stays with the silos; its topics are those the charter names
            topics=frozenset(metrics.topics) if metrics else frozenset(),
            grading=grading,
            now_seconds=self.seconds,
        )

    def _payload_digest(self) -> Callable[[str, AnyPayload], dict[str, Any]]:
        # derived from the signing key, so that it needs no file of its own and nobody else can compute it
        secret = hashlib.sha256(
            b"fedsilo-log-digest\n" + self._checked.identity.signing_key.private_bytes_raw()
        ).digest()

        def digest(kind: str, payload: AnyPayload) -> dict[str, Any]:
            if kind in _UNGUESSABLE:
                return {"bytes": payload.size_bytes, "sha256": payload.digest}
            keyed = hmac.new(secret, bytes.fromhex(payload.digest), hashlib.sha256).hexdigest()
            return {"bytes": payload.size_bytes, "hmac_sha256": keyed}

        return digest

    # ---- serving -------------------------------------------------------------------------------------

    def request_stop(self) -> None:
        """Safe in a signal handler."""
        self._stopped.set()

    @contextmanager
    def serving(self) -> Iterator[Ready]:
        """Listen until the block ends, then drain: waiting polls are answered, calls in flight may finish."""
        config, identity = self._checked.config, self._checked.identity
        service = FederationService(
            self.driver,
            self.blobs,
            trust_root_pem=identity.trust_root_pem,
            limits=config.limits,
            now=self.now,
            monotonic=time.monotonic,
        )
        self.driver.sending = lambda: service.uploads.silos
        silos = len(config.silos)
        self._watchdog, self._uploads = service.watchdog, service.uploads
        federation, port = federation_server(service, identity, config.listen, silos=silos, limits=config.limits)
        control = ControlSocket(self.control_server, config.control.socket, config.control.group, log=log)
        address = f"{config.listen.rpartition(':')[0]}:{port}"
        self.control.address = address
        self.audit.append("start", policy={"effective": self._checked.charter.digest}, detail={"port": port})
        self.control.refresh()
        federation.start()
        control.start()
        try:
            yield Ready(config.federation, config.coordinator, address, port, str(config.control.socket))
        finally:
            self.driver.stop()
            service.uploads.stop()
            federation.stop(DRAIN_SECONDS).wait()
            control.close(DRAIN_SECONDS)
            try:
                self.audit.append("stop")
            except OperationError as error:
                log.error("the stop is not recorded: %s", error.message)

    def native_log(self, *, monotonic: Callable[[], float] = time.monotonic) -> NativeLog:
        """Return what puts failed handshakes into this coordinator's log and events, while it is open as a context."""

        def refused(cause: str, peer: str) -> None:
            self.control.publish("connection.refused", {"cause": cause, "peer": peer})

        presented = in_words(self._checked.identity.certificate_pem)
        return NativeLog(refused, presented=presented, monotonic=monotonic)

    def work(self) -> None:
        """Let deadlines pass, until asked to stop."""
        swept_at = asked_at = -math.inf
        quiet = QuietLog(log)
        while not self._stopped.wait(TICK_SECONDS):
            try:
                self.look_at_clock()
                self.driver.tick()
                self.submissions.look()
                self._watchdog.look()
                if time.monotonic() > asked_at + ASK_SECONDS:
                    asked_at = time.monotonic()
                    self.driver.dependencies.store.ask()
                if time.monotonic() > swept_at + SWEEP_SECONDS:
                    swept_at = time.monotonic()
                    self._uploads.sweep()
            except FedSiloError as error:
                self.driver.halt(error)
            except OSError as error:  # such as too many open files: it passes, and what is due stays due
                cause = error.strerror or type(error).__name__
                quiet.say(
                    cause, f"looks that ended by {cause}", f"a look at what is due ended: {cause}; it is repeated"
                )


def run_coordinator(
    config_path: Path, *, ready: Callable[[Ready], None], replies: Callable[..., Replies] = Replies
) -> None:
    """Run until SIGTERM or SIGINT.

    Args:
        config_path: coordinator.yaml.
        ready: called once when silos may dial.
        replies: what seals the replies; see `Coordinator`.

    Raises:
        FedSiloError: it cannot start; the message names the cause.
    """
    long_lived.bound_heaps()
    long_lived.raise_open_files()
    config = load_config(config_path)
    logging.getLogger("fedsilo").setLevel(config.log_level.upper())
    whose = {"party": "coordinator", "federation": config.federation, "name": config.coordinator}
    shape(logging.getLogger(), config.log_format, whose)
    checked = check(config)
    for warning in checked.warnings:
        log.warning("%s", warning)
    with Coordinator(checked, replies=replies) as coordinator:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, lambda *_: coordinator.request_stop())
        with coordinator.native_log(), coordinator.serving() as where:
            long_lived.set_apart()
            ready(where)
            coordinator.work()


def _read(path: Path, maker: str) -> bytes:
    try:
        return read_regular(path)
    except NotFoundError as error:
        raise NotFoundError(error.message, hint=f"`{maker}` writes it") from error
