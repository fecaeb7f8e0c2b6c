"""Starts and ends the trainer, and carries the link to it. The only module of the guard that starts processes,
besides `isolation.py`, which it uses to put walls around them.

The trainer gets no key, no network and no policy: it is handed data paths, a model folder and a secret that keys the
choice of private prompts. A trainer that dies or breaks the framing is not restarted in the middle of a round: the
guard is told, abstains and says so. Does not stop: what a trainer puts into the values it sends; that is for the gate.
"""

from __future__ import annotations

import contextlib
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

from fedsilo.treaty.errors import OperationError, UsageError
from fedsilo.treaty.wire.codec import SMALL_PAYLOAD_BYTES_MAX
from silo.config import SiloConfig
from silo.guard import isolation, trainer_link
from silo.guard.isolation_controls import NO_CONTROLS, Controls
from silo.link import OFFLINE, Link, LinkBroken, LinkClosed, LinkMessage, LinkRefused, Listener

_log = logging.getLogger("fedsilo.silo.supervisor")

STOP_TIMEOUT_SECONDS = 5.0
_ACCEPT_SLICE_SECONDS = 0.5

# What the trainer's process may see of the environment: where programs and libraries are, nothing of this site.
_ENVIRONMENT_KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV")
# Telemetry and hub downloads off (threat T10); threads are set beside them.
_ENVIRONMENT_SET = {**OFFLINE, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}


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
    """What the console shows of the trainer. `controls`: what answered the guard before and after the probes."""

    rung: str = "waived"
    probes: dict[str, Any] = field(default_factory=dict)
    controls: Controls = NO_CONTROLS
    ready: dict[str, Any] = field(default_factory=dict)


class TrainerHandle(Protocol):
    """What the guard needs of a trainer: started for each run, told, stopped."""

    def start(self) -> None:
        """Start it, configured and ready. Raises OperationError."""

    def send(self, message: LinkMessage) -> None:
        """Raises LinkClosed."""

    def stop(self) -> None: ...

    @property
    def rung(self) -> str: ...

    @property
    def description(self) -> dict[str, Any]: ...


class Supervisor:
    """One trainer, from start to end.

    Args:
        config: the site.
        events: called from the reader thread with TrainerSaid and TrainerGone.
        should_stop: asked while waiting for the trainer to connect.
        body_bytes_max: the longest body that the trainer may send.
    """

    def __init__(
        self,
        config: SiloConfig,
        events: Callable[[TrainerSaid | TrainerGone], None],
        *,
        should_stop: Callable[[], bool] = lambda: False,
        body_bytes_max: int = SMALL_PAYLOAD_BYTES_MAX,
    ) -> None:
        self._config = config
        self._body_bytes_max = body_bytes_max
        self._events = events
        self._should_stop = should_stop
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: Listener | None = None
        self._link: Link | None = None
        self._log_file: IO[bytes] | None = None
        self._ending = False
        self.state = TrainerState()

    # ---- start -------------------------------------------------------------------------------------

    def start(
        self,
        site_secret: bytes,
        probe_fields: Mapping[str, Any],
        *,
        never: Sequence[Path] = (),
        accepted: Callable[[str], None] = lambda rung: None,
        screen_index: Mapping[str, Any] | None = None,
    ) -> TrainerState:
        """Start (or wait for) the trainer, probe its walls, configure it and wait until it is ready.

        Args:
            site_secret: keys the choice of private prompts.
            probe_fields: what the probes try to reach from inside: key files, the control socket. A path where nothing
                is counts as not tried.
            never: files that the walls must not show.
            accepted: called with the rung that was really got, before the trainer is told where the data are; it
                raises where that is too little.
            screen_index: of `Screens.index_wanted`: the overlap index that it is to make of the private records.

        Raises:
            OperationError: it did not come, or it reports an error; the message names its log.
            UsageError, NotFoundError, NotAllowedError: an external trainer's user or the link's certificate is wrong.
        """
        trainer = self._config.trainer
        self._listener = trainer_link.listen(self._config)
        scratch: Path | None = None
        if trainer.launch == "child":
            scratch = self._config.state_dir / "scratch"
            scratch.mkdir(exist_ok=True, mode=0o700)
            self.state.rung = isolation.best_rung() if trainer.isolation == "auto" else trainer.isolation
            self._process = self._launch(self.state.rung, Path(trainer.address.partition(":")[2]), scratch, never)
        else:
            _log.info(
                "waiting up to %.0f s for the trainer to dial %s; it is started by somebody else, with: %s",
                trainer.start_timeout_seconds, trainer.address, trainer_link.start_command(self._config),
            )  # fmt: skip
        self._link = self._accept(trainer.start_timeout_seconds)
        self._close_listener()  # one trainer, and nobody after it
        controls = trainer_link.controls(self._config)
        named = trainer_link.only_what_exists(probe_fields)
        fields = {**controls.as_fields(), **named}
        self.state.probes = self._ask("probe", fields, "probed").get("results", {})
        if not isolation.are_results(self.state.probes):
            raise OperationError(
                "what the trainer says of its walls is no list of probes", hint=self._where_it_tells(),
                code="TRAINER_CONFUSED",
            )  # fmt: skip
        self.state.probes = trainer_link.believable(self.state.probes, named)
        self.state.controls = controls.still_answering()
        self.state.rung = trainer_link.rung_got(self._config, self.state.rung, self.state.probes, self.state.controls)
        accepted(self.state.rung)
        self.state.ready = self._ask("configure", self._configuration(site_secret, scratch, screen_index), "ready")
        threading.Thread(target=self._read, name="trainer-link", daemon=True).start()
        return self.state

    def _configuration(
        self, site_secret: bytes, scratch: Path | None, screen_index: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        config = self._config
        return {
            "silo": config.silo,
            "model": {"path": str(config.model.path), "load": config.model.load},
            "private": [str(path) for path in config.data.private],
            "verifier": config.data.verifier,
            "holdout_share": config.data.holdout_share,
            "public": {"path": str(config.data.public.path), "verifier": config.data.public.verifier},
            "held_out": {"path": str(config.data.held_out.path), "verifier": config.held_out_verifier},
            "site_secret": site_secret.hex(),
            "threads": config.threads,
            "microbatch_tokens": config.trainer.microbatch_tokens,
            "cache_bytes": config.trainer.cache_bytes,
            "checkpointing": config.trainer.checkpointing,
            "scratch": str(scratch) if scratch else "",  # an external trainer names its own
            "screen_index": None if screen_index is None else dict(screen_index),
        }

    def _launch(self, rung: str, socket_path: Path, scratch: Path, never: Sequence[Path]) -> subprocess.Popen[bytes]:
        config = self._config
        logs = config.state_dir / "logs"
        logs.mkdir(exist_ok=True, mode=0o700)
        self._log_file = (logs / "trainer.log").open("ab")
        python = str(config.trainer.python or sys.executable)
        readable = [
            config.model.path, *config.data.private, config.data.public.path, config.data.held_out.path,
        ]  # fmt: skip
        try:
            return isolation.launch_walled(
                [python, "-P", "-m", "silo.trainer.worker", "--address", config.trainer.address],
                rung=rung,
                readable=readable,
                writable=[scratch],
                socket_dir=socket_path.parent,
                env=trainer_environment(os.environ, threads=config.threads, scratch=scratch),
                never=never,
                accelerators=config.trainer.devices != "cpu",
                stdout=self._log_file,
                stderr=self._log_file,
            )
        except (OSError, ValueError) as error:
            raise OperationError(f"the trainer cannot be started: {error}", code="TRAINER_START") from error

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
            if self._should_stop():
                raise OperationError("stopped while the trainer was starting", code="INTERRUPTED")
            status = self._process.poll() if self._process else None
            if status is not None:
                raise OperationError(
                    f"the trainer ended with status {status} before it connected{self._last_words()}",
                    hint=self._where_it_tells(),
                    code="TRAINER_DIED",
                )
        raise OperationError(
            f"no trainer connected to {self._config.trainer.address} within {timeout_seconds:.0f} s{refused}",
            hint=f"start it with: {trainer_link.start_command(self._config)}",
            code="TRAINER_MISSING",
        )

    def _ask(self, question: str, fields: dict[str, Any], answer: str) -> dict[str, Any]:
        assert self._link is not None  # noqa: S101  # made by start
        try:
            self._link.send(LinkMessage(question, fields))
            while True:
                message = self._link.receive()
                if message.type == answer:
                    return message.fields
                if message.type == "failed":
                    # What is wrong with the site's own files is a usage error, as if they had been read here.
                    refused = UsageError if message.fields.get("input") is True else OperationError
                    raise refused(
                        f"the trainer refuses to {question}: {str(message.fields.get('message', ''))[:2000]}",
                        hint=str(message.fields.get("hint", ""))[:500],
                        code=str(message.fields.get("code", "TRAINER_FAILED"))[:64],
                    )
        except LinkClosed as error:
            raise OperationError(
                f"the trainer went away while it was asked to {question}{self._last_words()}",
                hint=self._where_it_tells(),
                code="TRAINER_DIED",
            ) from error

    # ---- while it runs -----------------------------------------------------------------------------

    def send(self, message: LinkMessage) -> None:
        """Raises LinkClosed: the trainer is gone."""
        if self._link is None:
            raise LinkClosed("no trainer is connected")
        self._link.send(message)

    def _read(self) -> None:
        assert self._link is not None  # noqa: S101  # started after the link stands
        while True:
            try:
                message = self._link.receive()
            except LinkBroken as error:
                _log.error("the trainer breaks the link's rules: %s", error.message)
                self._events(TrainerGone(None, error.message))
                return
            except LinkClosed as error:
                if not self._ending:
                    _log.error("the trainer is gone: %s%s", error.message, self._last_words())
                    self._events(TrainerGone(self._exit_status()))
                return
            self._events(TrainerSaid(message))

    def _exit_status(self) -> int | None:
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(STOP_TIMEOUT_SECONDS)
        return None

    def _last_words(self) -> str:
        """The last line of the child's log, for a local message only: it may hold anything (T8)."""
        if self._config.trainer.launch == "external":
            return ""
        path = self._config.state_dir / "logs" / "trainer.log"
        try:
            lines = path.read_bytes()[-4096:].decode("utf-8", "replace").strip().splitlines()
        except OSError:
            return ""
        return f": {''.join(c for c in lines[-1] if c.isprintable())[:300]}" if lines else ""

    def _where_it_tells(self) -> str:
        if self._config.trainer.launch == "external":
            return "see its own output, where it was started"
        return f"see {self._config.state_dir / 'logs' / 'trainer.log'}"

    # ---- end ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the trainer: asked, then told, then killed. Safe to call twice."""
        self._ending = True
        if self._link is not None:
            with contextlib.suppress(LinkClosed):
                self._link.send(LinkMessage("stop"))
        if self._process is not None:
            end_process_group(self._process, STOP_TIMEOUT_SECONDS)
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


def trainer_environment(outer: Mapping[str, str], *, threads: int, scratch: Path) -> dict[str, str]:
    """The environment of the trainer: a short allow-list, offline switches, one thread count for every library."""
    environment = {name: outer[name] for name in _ENVIRONMENT_KEPT if name in outer}
    environment.update(_ENVIRONMENT_SET)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    # A home and a cache of its own: libraries look there, and the real one is outside the walls.
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        environment[name] = str(scratch)
    return environment


def end_process_group(process: subprocess.Popen[bytes], timeout_seconds: float) -> None:
    """Wait a moment for the child to end by itself, then SIGTERM, then SIGKILL, to its whole group if it leads one."""
    for signal_number in (None, signal.SIGTERM, signal.SIGKILL):
        if signal_number is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getpgid(process.pid) == process.pid:
                    os.killpg(process.pid, signal_number)
                else:
                    process.send_signal(signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_seconds if signal_number is None or signal_number == signal.SIGTERM else None)
            return
