"""Starts, watches and ends the rollout servers (vLLM), each in a sandbox of its own and at a unix socket of its own.

Private and public prompts go to two servers, so that a public answer cannot hold what a mixed-up batch or a shared
prefix cache took from a private prompt (T14); where the site gives both one address, the trainer drains the server and
empties its cache in between. A server that ends, or says that its engine is dead, is killed and started again; the
trainer waits for it and hands its adapter over anew. Telemetry is off (T10), and at isolation level `namespaces` there
is no network.

What it does not stop: a public answer that holds private text since the adapter learnt it by heart, which is for the
screens (T15); with one server, a fault that outlives an emptied cache; a server that logs prompts into state_dir/logs.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsilo.protocol.errors import OperationError, UsageError
from silo.config import SiloConfig
from silo.guard.trainer_process import sandbox
from silo.guard.trainer_process.probing import ROLLOUT_SOCKETS, best_level
from silo.unix_http import ServerGone, ask

_log = logging.getLogger("fedsilo.silo.rollout")

LOOK_SECONDS = 0.5
ANSWER_SECONDS = 10.0
SILENCE_SECONDS = 120.0  # a server that was ready and has not answered for so long is killed
STOP_SECONDS = 5.0
RESTARTS_MAX = 5  # in RESTARTS_SECONDS; then a person has to look
RESTARTS_SECONDS = 3600.0
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# Beside what the trainer's environment switches off. Sockets between vLLM's own processes go where paths are short.
_ENVIRONMENT = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_RPC_BASE_PATH": "/tmp",  # noqa: S108  # a tmpfs of its own at isolation level namespaces
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def folder_of(config: SiloConfig) -> Path:
    return config.state_dir / "rollout"


def command_of(config: SiloConfig, socket: Path) -> list[str]:
    """Return the command line of one server; `rollout.command` in its place where the site gives one.

    Raises:
        UsageError: the command's placeholders are not known.
    """
    rollout, python = config.rollout, str(config.rollout.python or sys.executable)
    values = {"model": str(config.model.path), "load": _DTYPES[config.model.load], "socket": str(socket)}
    if rollout.command is not None:
        try:
            return [python, *(word.format(**values) for word in rollout.command)]
        except (KeyError, IndexError, ValueError) as error:
            raise UsageError(
                f"rollout.command: {error} stands for nothing", hint="known: {model} {load} {socket}; {{ for a brace"
            ) from error
    options = {
        "--model": values["model"],
        "--served-model-name": "base",
        "--uds": values["socket"],
        "--dtype": values["load"],
        "--max-loras": "2",  # the next one is loaded before the last one goes
        "--max-lora-rank": str(rollout.max_lora_rank),
        "--max-model-len": str(rollout.max_model_tokens),
        "--kv-cache-memory-bytes": str(rollout.kv_cache_bytes),
        "--logprobs-mode": "processed_logprobs",
        "--generation-config": "vllm",
    }
    flags = ["--enable-lora", "--disable-uvicorn-access-log"]
    flags += ["--enable-sleep-mode"] if may_sleep(config) else []
    flags += [] if _accelerated(config) else ["--enforce-eager"]
    words = ["-P", "-m", "vllm.entrypoints.openai.api_server"]
    return [python, *words, *(word for pair in options.items() for word in pair), *flags]


def _accelerated(config: SiloConfig) -> bool:
    return config.trainer.devices != "cpu" and bool(glob.glob("/dev/nvidia[0-9]*"))  # noqa: PTH207


def may_sleep(config: SiloConfig) -> bool:
    """Return whether the trainer may ask a server to sleep: of those that the guard starts, one with a GPU knows
    how."""
    return config.rollout.sleep == "auto" and (config.rollout.launch == "external" or _accelerated(config))


def environment_of(config: SiloConfig, scratch: Path) -> dict[str, str]:
    """Return a trainer's environment, with what vLLM needs besides. scratch: the server's own folder."""
    private, public = config.rollout_sockets
    trainer = sandbox.trainer_environment(os.environ, threads=config.threads, scratch=scratch)
    # Sleeping and emptying the prefix cache are among the calls that vLLM offers to developers only.
    wanted = may_sleep(config) or private == public
    return {**trainer, **_ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1" if wanted else "0"}


@dataclass
class _Server:
    """One server process over all its restarts, watched by a thread of its own."""

    name: str
    socket: Path
    launch: Callable[[], sandbox.SandboxedProcess]
    timeout_seconds: float

    def __post_init__(self) -> None:
        self.process: sandbox.SandboxedProcess | None = None
        self.ready = threading.Event()
        self.failed = ""
        self.restarts: list[float] = []
        self._ending = threading.Event()
        self._started = self._heard = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._begin()
        self._thread = threading.Thread(target=self._watch, name=f"rollout-{self.name}", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        if self.socket.exists() and not self.socket.is_socket():
            raise OperationError(f"{self.socket} is no socket", hint="give the server a folder of its own")
        self.socket.unlink(missing_ok=True)  # of a server that was killed; vLLM would not bind over it
        self._started = self._heard = time.monotonic()
        self.process = self.launch()

    def _watch(self) -> None:
        while not self._ending.wait(LOOK_SECONDS):
            trouble = self._trouble()
            if not trouble:
                continue
            once_ready = self.ready.is_set() or bool(self.restarts)
            self.ready.clear()
            self._kill()
            now = time.monotonic()
            self.restarts = [each for each in self.restarts if now - each < RESTARTS_SECONDS]
            if not once_ready or len(self.restarts) >= RESTARTS_MAX:
                self.failed = trouble
                _log.error("the rollout server for %s prompts %s; it is not started again", self.name, trouble)
                return
            _log.warning("the rollout server for %s prompts %s; it is started again", self.name, trouble)
            self.restarts.append(now)
            try:
                self._begin()
            except (OSError, OperationError) as error:
                self.failed = f"cannot be started again: {error}"
                _log.error("the rollout server for %s prompts %s", self.name, self.failed)
                return

    def _trouble(self) -> str:
        """Return why it has to be started again, or ''."""
        status = None if self.process is None else self.process.poll()
        if status is not None:
            return f"ended with status {status}"
        now = time.monotonic()
        try:
            answer = ask(self.socket, "/health", timeout_seconds=ANSWER_SECONDS)
        except ServerGone:
            if self.ready.is_set():
                silent = now - self._heard > SILENCE_SECONDS
                return f"has not answered for {SILENCE_SECONDS:.0f} s" if silent else ""
            late = now - self._started > self.timeout_seconds
            return f"was not ready within {self.timeout_seconds:.0f} s" if late else ""
        self._heard = now
        if answer.status >= 500:
            return f"says that its engine is dead ({answer.status})"
        if answer.status == 200 and not self.ready.is_set():
            _log.info(
                "the rollout server for %s prompts is ready after %.0f s at %s",
                self.name,
                now - self._started,
                self.socket,
            )
            self.ready.set()
        return ""

    def _kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGTERM)  # it leads a group: see `sandbox`
            sandbox.end_process_group(self.process, STOP_SECONDS)
            self.process.leash.close()
            self.process = None

    def stop(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join()
        self._kill()
        with contextlib.suppress(OSError):
            self.socket.unlink()


class RolloutServers:
    """The servers of one trainer.

    Args:
        config: the site, whose engine is vLLM.
        level: the trainer's isolation level; the servers get the same.
        never: keys and sockets that no server may see.

    Raises:
        UsageError: in this sandbox the trainer could not reach a server.
    """

    def __init__(self, config: SiloConfig, *, level: str, never: Sequence[Path]) -> None:
        self._config = config
        self._level = _server_level(level)
        self._never = never
        self._folder = folder_of(config)
        self.adapters = self._folder / "adapters"
        private, public = config.rollout_sockets
        self.sockets = {"private": private} if private == public else {"private": private, "public": public}
        self._logs = config.state_dir / "logs"
        self.servers = (
            [
                _Server(name, socket, self._launcher(name, socket), config.rollout.start_timeout_seconds)
                for name, socket in self.sockets.items()
            ]
            if config.rollout.launch == "child"
            else []
        )

    def start(self) -> None:
        """Start them; `wait_ready` waits. Raises OperationError: one cannot be started."""
        for path in (self._folder, self.adapters, self._logs):
            path.mkdir(exist_ok=True, mode=0o700)
        _log.info(
            "rollouts come from vLLM: %s",
            ", ".join(f"{name} prompts from unix:{path}" for name, path in self.sockets.items()),
        )
        for server in self.servers:
            server.socket.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                server.start()
            except OSError as error:
                self.stop()
                raise OperationError(f"the rollout server cannot be started: {error}", code="ROLLOUT_START") from error

    def wait_ready(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until every server answers. Raises OperationError: one did not, in time."""
        end = time.monotonic() + self._config.rollout.start_timeout_seconds
        for name, socket in self.sockets.items():
            server = next((each for each in self.servers if each.name == name), None)
            while not (server.ready.wait(LOOK_SECONDS) if server else _is_well(socket)):
                failed = server.failed if server else ""
                if failed or should_stop() or time.monotonic() > end:
                    why = failed or ("is not needed any more" if should_stop() else "does not answer")
                    raise OperationError(
                        f"the rollout server at unix:{socket} {why}",
                        hint=f"see {self._log_path(name)}{self._needs_vllm}"
                        if server
                        else "start it; `docs/how-to/vllm.md` has the command",
                        code="ROLLOUT_START",
                    )
                if server is None:
                    time.sleep(LOOK_SECONDS)

    def stop(self) -> None:
        """End them all, and leave no adapter on the disk. Safe to call twice."""
        for server in self.servers:
            server.stop()
        if self.servers:  # else one that is still there reads them
            shutil.rmtree(self.adapters, ignore_errors=True)

    @property
    def restarts(self) -> int:
        return sum(len(each.restarts) for each in self.servers)

    @property
    def shown_to_trainer(self) -> list[Path]:
        """Folders that the trainer must see to reach the sockets."""
        return [socket.parent for socket in self.sockets.values()]

    def require_reached(self, probes: Mapping[str, Mapping[str, Any]]) -> None:
        """Check the probes of `run_probes`. Raises OperationError: the trainer says that it cannot reach a server."""
        results = probes.get(ROLLOUT_SOCKETS, {})
        if results.get("outcome") != "allowed":
            raise OperationError(
                f"the trainer does not reach {' and '.join(map(str, self.sockets.values()))} from inside its sandbox "
                f"({results.get('errno') or 'not tried'})",
                hint="an external trainer must see these sockets, and the folder of adapters, at the same paths",
                code="ROLLOUT_UNREACHED",
            )

    def trainer_fields(self) -> dict[str, Any]:
        """The `rollout` field of the `configure` message."""
        private, public = self._config.rollout_sockets
        return {
            "private": str(private),
            "public": str(public),
            "adapters": str(self.adapters),
            "sleep": may_sleep(self._config),
            "timeout_seconds": self._config.rollout.start_timeout_seconds,
        }

    @property
    def _needs_vllm(self) -> str:
        rollout = self._config.rollout
        if rollout.command is not None:
            return ""
        return f"; rollout.python, {rollout.python or sys.executable}, needs vLLM: docs/how-to/vllm.md"

    def _log_path(self, name: str) -> Path:
        return self._logs / f"rollout_{name}.log"

    def _launcher(self, name: str, socket: Path) -> Callable[[], sandbox.SandboxedProcess]:
        def launch() -> sandbox.SandboxedProcess:
            scratch = self._folder / name / "scratch"
            scratch.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._log_path(name).open("ab") as log:
                return sandbox.launch_in_sandbox(
                    command_of(self._config, socket),
                    level=self._level,
                    readable=[self._config.model.path, self.adapters],
                    writable=[scratch, socket.parent],
                    env=environment_of(self._config, scratch),
                    never=self._never,
                    accelerators=self._config.trainer.devices != "cpu",
                    stdout=log,
                    stderr=log,
                )

        return launch


def _server_level(level: str) -> str:
    if level == "user":
        raise UsageError(
            "in a sandbox of isolation level user a trainer can open no socket, so it reaches no rollout server",
            hint="trainer.isolation: namespaces where this machine has them, or rollout.engine: embedded",
        )
    return "namespaces" if level == "container" else level


def _is_well(socket: Path) -> bool:
    try:
        return ask(socket, "/health", timeout_seconds=ANSWER_SECONDS).status == 200
    except ServerGone:
        return False


def check(config: SiloConfig) -> str:
    """For `silo check`: return which engine was chosen and why, and what it needs. Starts nothing.

    Raises:
        UsageError: the servers could not be started, or the trainer could not reach them.
    """
    rollout = config.rollout
    if rollout.chosen == "embedded":
        return "embedded, in the trainer" + (" (auto: there is no rollout.url)" if rollout.engine == "auto" else "")
    private, public = config.rollout_sockets
    places = f"unix:{private}" + (
        " for private and public prompts, emptied in between"
        if private == public
        else f", public prompts unix:{public}"
    )
    engine = f"vllm{' (auto: rollout.url is given)' if rollout.engine == 'auto' else ''} at {places}"
    if config.trainer.launch == "child":
        _server_level(best_level() if config.trainer.isolation == "auto" else config.trainer.isolation)
    if rollout.launch == "external":
        return f"{engine}; started by somebody else"
    python = Path(rollout.python or sys.executable)
    if not os.access(python, os.X_OK):
        raise UsageError(f"rollout.python: {python} cannot be executed", hint="an interpreter that has vLLM")
    command_of(config, private)
    return f"{engine}; started with {python}"
