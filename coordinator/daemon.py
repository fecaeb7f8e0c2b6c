"""The coordinator process: reads its configuration, wires the parts, serves, and ends cleanly.

The parts never hold this module; it holds them: identity, charter, store, payloads, audit log, ingress, driver,
submissions, control desk, servers.
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

from certs.describe import in_words
from certs.identity import Identity
from certs.roles import Roles
from coordinator.blobs import AnyPayload, Blobs
from coordinator.config import CoordinatorConfig, load_config
from coordinator.control import Control
from coordinator.driver import Driver
from coordinator.ingress import Ingress
from coordinator.members import Agreed
from coordinator.native_log import NativeLog
from coordinator.panel import Files, Panel
from coordinator.parts import Parts
from coordinator.record import Outcome
from coordinator.replies import Replies
from coordinator.server import FederationService, control_server, federation_server
from coordinator.store import Store
from coordinator.submission import Submissions
from coordinator.transfer import Transfers
from fedsilo.edge import long_lived
from fedsilo.edge.audit_log import AuditLog
from fedsilo.edge.control_desk import ControlDesk
from fedsilo.edge.disk_space import require_space
from fedsilo.edge.files import lock_exclusively, make_private_directory, read_regular
from fedsilo.edge.grading_process import GradingProcess
from fedsilo.edge.identity_files import load_identity, load_site
from fedsilo.edge.json_log import shape
from fedsilo.edge.run_request import Fixed
from fedsilo.edge.task_files import TaskFile, read_tasks
from fedsilo.treaty.errors import NotFoundError, OperationError, UsageError
from fedsilo.treaty.grading import require_verifier
from fedsilo.treaty.wire.services import TENSOR_KINDS
from policies.load import Policy, load_policy
from policies.schema import LoraSchema, schema_from_json

log = logging.getLogger("fedsilo.coordinator")

TICK_SECONDS = 0.2
DRAIN_SECONDS = 5.0
SWEEP_SECONDS = 3_600.0  # between two looks for uploads that nobody goes on with
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
        """What nobody who submits a run can choose."""
        rows = len(self.public.rows)
        return Fixed(self.config.federation, self.config.silos, self.agreed, self.schema, rows, self.charter)


@dataclass(frozen=True)
class Checked(Shared):
    """With what only the daemon may read."""

    identity: Identity


@dataclass(frozen=True)
class Ready:
    """Where a started coordinator is reached."""

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
    identity = load_identity(files.certificate, files.key, files.signing_key, files.federation_ca, role="coordinator")
    if identity.spiffe_id != config.spiffe_id:
        raise UsageError(
            f"{config.source}: the certificate is of {identity.spiffe_id}, the configuration of {config.spiffe_id}"
        )
    load_site(files.site_ca, files.operators, site=config.site)
    shared = check_shared(config)
    require_space(config.state_dir)
    return Checked(config, shared.charter, shared.schema, shared.public, shared.agreed, shared.warnings, identity)


def check_shared(config: CoordinatorConfig) -> Shared:
    """As `check`, without the daemon's keys: what a person may read who submits a run."""
    charter = load_policy(_read(config.charter, "coordinator init"), str(config.charter))
    expected = config.expected
    schema = schema_from_json(_read(expected.lora_schema, "fedsilo policy schema make"), str(expected.lora_schema))
    if schema.base_model_sha256 != expected.base_model_sha256:
        raise UsageError(f"{expected.lora_schema} is for another base model than {config.source} expects")
    public = read_tasks(config.public.path)
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
    )
    return Shared(config, charter, schema, public, agreed, tuple(warnings))


class Coordinator:
    """All parts, wired. Use as a context; the state folder is locked while it is open.

    Args:
        checked: the configuration and its files.
        clock: UTC seconds.
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
        replies: Callable[..., Replies] = Replies,
    ) -> None:
        self._checked = checked
        self._clock = clock
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
            self._latest = max(self._latest, self._clock())
            return self._latest

    def _publish(self, name: str, fields: dict[str, Any]) -> None:
        self.store.once_committed(lambda: self.control.publish(name, fields))

    def _text_now(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")

    def _open(self, stack: ExitStack) -> None:
        checked, config, identity = self._checked, self._checked.config, self._checked.identity
        make_private_directory(config.state_dir)
        stack.callback(lock_exclusively(config.state_dir / "lock").release)
        self.store = Store(config.database_url)
        stack.callback(self.store.close)
        self.blobs = Blobs(config.state_dir, config.payloads)
        self.audit = AuditLog(
            config.state_dir / "audit",
            origin=identity.spiffe_id,
            key=identity.signing_key,
            actor=identity.spiffe_id,
            clock=self._clock,
        )
        stack.callback(self.audit.close)
        self._latest = self.audit.latest_time
        site_ca_pem, roles = load_site(config.identity.site_ca, config.identity.operators, site=config.site)
        self.desk = ControlDesk(config.site, site_ca_pem, roles, self.now, journal=config.state_dir / "requests.jsonl")
        stack.callback(self.desk.close)
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
            Parts(
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
                monotonic=time.monotonic,
                publish=self._publish,
                finished=outcome.write,
                payload_digest=self._payload_digest(),
                poll_wait_seconds_max=config.limits.poll_wait_seconds_max,
                replies=self._replies,
            )
        )
        fixed = checked.fixed
        self.submissions = Submissions(self.driver, fixed, self._text_now)
        self.driver.after_hello = self.submissions.look_within
        self.control = Control(self.desk, self.driver, self.submissions, outcome, config, checked.charter.digest)
        self._register_panel(roles)
        Transfers(
            self.driver, trust_root_pem=identity.trust_root_pem, now=self.now, charter_digest=checked.charter.digest
        ).register(self.desk)
        self.driver.load()
        self.submissions.load()

    def _register_panel(self, roles: Roles) -> None:
        checked, config, now = self._checked, self._checked.config, self.seconds
        panel = Panel(
            self.audit, self.store, self.desk, self.driver.effects.relay, charter=checked.charter,
            silos=tuple(f"spiffe://{config.federation}/silo/{silo}" for silo in config.silos), now_seconds=now,
        )  # fmt: skip
        self.control.log_broken = lambda: panel.log_broken
        files = Files(config, checked.identity.certificate_pem, roles, panel, now)
        for name, answer in (panel.queries() | files.queries()).items():
            self.desk.register_query(name, answer)

    def _ingress(self, stack: ExitStack) -> Ingress:
        checked, config = self._checked, self._checked.config
        grader = None
        if not require_verifier(config.public.verifier).executes:
            grader = GradingProcess(config.public.verifier)
            grader.start()
            stack.callback(grader.close)
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
            grader=grader,
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
        silos = len(config.silos)
        self._watchdog, self._uploads = service.watchdog, service.uploads
        federation, port = federation_server(service, identity, config.listen, silos=silos, limits=config.limits)
        control = control_server(self.desk, config.control.socket, config.control.group)
        address = f"{config.listen.rpartition(':')[0]}:{port}"
        self.control.address = address
        self.audit.append("start", policy={"effective": self._checked.charter.digest}, detail={"port": port})
        self.control.refresh()
        drift = threading.Thread(target=self.driver.drift.keep_noting, name="drift", daemon=True)
        for each in (federation, control, drift):
            each.start()
        try:
            yield Ready(config.federation, config.coordinator, address, port, str(config.control.socket))
        finally:
            self.driver.stop()
            service.uploads.stop()
            federation.stop(DRAIN_SECONDS).wait()
            self.desk.close()
            control.stop(DRAIN_SECONDS).wait()
            drift.join(DRAIN_SECONDS)
            config.control.socket.unlink(missing_ok=True)
            try:
                self.audit.append("stop")
            except OperationError as error:
                log.error("the stop is not recorded: %s", error.message)

    def native_log(self, *, monotonic: Callable[[], float] = time.monotonic) -> NativeLog:
        """What puts failed handshakes into this coordinator's log and events, while it is open as a context."""

        def refused(cause: str, peer: str) -> None:
            self.control.publish("connection.refused", {"cause": cause, "peer": peer})

        presented = in_words(self._checked.identity.certificate_pem)
        return NativeLog(refused, presented=presented, monotonic=monotonic)

    def work(self) -> None:
        """Let deadlines pass, until asked to stop."""
        swept_at = asked_at = -math.inf
        while not self._stopped.wait(TICK_SECONDS):
            try:
                self.driver.tick()
                self.submissions.look()
                self._watchdog.look()
                if time.monotonic() > asked_at + ASK_SECONDS:
                    asked_at = time.monotonic()
                    self.driver.parts.store.ask()
                if time.monotonic() > swept_at + SWEEP_SECONDS:
                    self._uploads.sweep()
                    swept_at = time.monotonic()
            except OperationError as error:
                self.driver.halt(error)


def run_coordinator(
    config_path: Path,
    *,
    ready: Callable[[Ready], None],
    replies: Callable[..., Replies] = Replies,
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
