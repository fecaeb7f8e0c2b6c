"""A coordinator, guards and trainers as real processes over mTLS, for `benchmarks.chaos` and `benchmarks.soak`: started
as an operator starts them, ended by faults, started again, and in the end looked at by what they left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.transport_payload import EMPTY, SHAPES, write_model_folder
from benchmarks.transport_process import tree
from fedsilo.audit.audit_verify import verify_logs
from fedsilo.audit.consistency import check_consistency
from fedsilo.audit.reader import read_records
from fedsilo.audit.transcripts import check_rounds
from fedsilo.control.client import ControlClient, Operator, sign_as
from fedsilo.demo.data import write_digit_folder
from fedsilo.demo.sites import COORDINATOR_PERSON, FEDERATION, DemoSettings, Site, make_sites, run_text
from fedsilo.protocol.errors import FedSiloError, OperationError
from tests.loopback.cutting_proxy import CuttingProxy

COORDINATOR = "main"
REPOSITORY = Path(__file__).parent.parent
SEED, ROWS, PUBLIC_PROMPTS = 5, 16, 2
LIMIT_SECONDS, STOP_SECONDS, LOOK_SECONDS = 120.0, 30.0, 0.05
RESTARTS_MAX, UNASKED_MAX = 400, 5
KILLED = (137, -9)


@dataclass
class Life:
    """What befalls one process, life by life: the first order of the list is its next life's."""

    orders: list[dict[str, Any]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    struck: list[dict[str, Any]] = field(default_factory=list)
    traced: bool = False
    read_bytes: int = 0

    def next_order(self) -> dict[str, Any]:
        """The first that can still come true: an earlier life may have passed its place."""
        while self.orders:
            order = self.orders.pop(0)
            fault = next(iter(order.values()))
            if fault["occurrence"] > self.seen[fault["label"]]:
                return order
        return {}


class Federation:
    """Args:
    out: empty folder; its path is short, since a socket's path is.
    silos: how many.
    """

    def __init__(self, out: Path, silos: int = 2) -> None:
        self.out = out
        self.proxy = CuttingProxy(0)
        model = write_model_folder(out / "model", SHAPES[EMPTY])
        data = write_digit_folder(out / "data", SEED, silos=silos, rows_per_silo=ROWS)
        self.sites = make_sites(
            DemoSettings(
                out=out, model=model, data=data, ruleset="pubswap", seed=SEED, rank=1, alpha=2.0, holds="",
                local_steps=3, swap_period=2, prompts_per_step=PUBLIC_PROMPTS, samples_per_prompt=4,
                learning_rate=0.01, advertise=f"127.0.0.1:{self.proxy.port}",
            )
        )  # fmt: skip
        self.proxy.upstream_port = int(self.sites.listen.rpartition(":")[2])
        self.site: dict[str, Site] = {site.name: site for site in self.sites.all()}
        self.silos = [site.name for site in self.sites.silos]
        self.lives = {name: Life() for name in self.site}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.notes: list[str] = []
        self.limit_seconds = LIMIT_SECONDS
        self.starts, self.unasked, self.halts = Counter[str](), Counter[str](), Counter[str]()
        for site in self.sites.silos:
            own_trainer(site)

    # ---- processes -----------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Also one that has ended. It is not waited for: what it finds, it has to live with."""
        life, log = self.lives[name], self.out / "logs" / f"{name}.log"
        log.parent.mkdir(exist_ok=True)
        program = "coordinator" if name == COORDINATOR else "silo"
        command = ["-m", "fedsilo.cli", program, "start", "--config", str(self.site[name].config), "--json"]
        if life.traced or life.orders:
            order = self.out / "logs" / f"{name}.order"
            more = life.next_order()
            order.write_text(json.dumps({"root": str(self.site[name].folder), "report": str(self.report(name)),
                                         "seen": dict(life.seen), **more}))  # fmt: skip
            command = ["-m", "benchmarks.chaos_tracer", str(order), *command]
        with log.open("ab") as stderr:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "fedsilo.cli.ends_with_parent", *command[1:]],
                stdin=subprocess.PIPE, stdout=stderr, stderr=stderr, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
            )  # fmt: skip
        self.starts[name] += 1

    def report(self, name: str) -> Path:
        return self.out / "logs" / f"{name}.calls"

    def calls(self, name: str) -> list[dict[str, Any]]:
        """What its tracer has written down since last asked; counted in its life."""
        life, path = self.lives[name], self.report(name)
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(life.read_bytes)
            data = file.read()
        data = data[: data.rfind(b"\n") + 1]  # a line may be half written
        life.read_bytes += len(data)
        rows = [json.loads(line) for line in data.splitlines()]
        for row in rows:
            if "struck" in row:
                life.struck.append(row)
            else:
                life.seen[row["label"]] += 1
        return rows

    def revive(self) -> None:
        """Start what a fault ended. Raises OperationError: it ends again and again."""
        for name, process in self.processes.items():
            if (status := process.poll()) is None:
                continue
            self.calls(name)
            full = any(row["struck"] == "full" for row in self.lives[name].struck)
            if status not in KILLED and not full:
                self.notes.append(f"{name} ended with {status}: {self.last_words(name)}")
                self.unasked[name] += 1
                if self.unasked[name] > UNASKED_MAX:
                    raise OperationError(f"{name} ends by itself again and again: {self.last_words(name)}")
            if self.starts[name] > RESTARTS_MAX:
                raise OperationError(f"{name} was started {RESTARTS_MAX} times: {self.last_words(name)}")
            if process.stdin is not None:
                process.stdin.close()
            self.start(name)

    def last_words(self, name: str) -> str:
        lines = (self.out / "logs" / f"{name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"

    def pid(self, name: str) -> int:
        """Of the program itself, not of what traces it; 0 where it does not run."""
        return self._pid(name, b"fedsilo.cli")

    def _pid(self, name: str, module: bytes) -> int:
        process = self.processes[name]
        if process.poll() is not None:
            return 0
        for each in tree(process.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{each}/cmdline").read_bytes().split(b"\0")
                if module in words and b"benchmarks.chaos_tracer" not in words:
                    return each
        return 0

    def kill(self, name: str) -> None:
        if pid := self.pid(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_trainer(self, silo: str) -> bool:
        """Whether there was one to kill."""
        if pid := self._pid(silo, b"benchmarks.chaos_trainer"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return pid > 0

    def kill_at(self, name: str, label: str, occurrence: int, how: str) -> None:
        """Of a daemon that runs under its tracer: it dies at this call, counted from this moment on."""
        order = self.out / "logs" / f"{name}.order"
        told = json.loads(order.read_text())
        fault = {"label": label, "occurrence": occurrence, "how": how, "from_now": True}
        order.write_text(json.dumps({**told, "kill": fault}))
        self.processes[name].send_signal(signal.SIGUSR1)

    def let_trainer_die(self, silo: str, deaths: Sequence[tuple[int, str]]) -> None:
        deaths_of(self.site[silo]).write_text(json.dumps({"heard": 0, "died": [], "deaths": deaths}))

    def trainer_deaths(self) -> list[dict[str, Any]]:
        files = {name: deaths_of(self.site[name]) for name in self.silos}
        return [{"process": f"{name} trainer", "struck": "trainer", "message": number, "how": how}
                for name, file in files.items() if file.exists()
                for number, how in json.loads(file.read_text())["died"]]  # fmt: skip

    def wake_halted(self) -> None:
        """What an operator does with a daemon that halted over its disk, once there is room again."""
        for name, process in self.processes.items():
            if any(one["struck"] == "full" for one in self.lives[name].struck) or self.calls(name):
                state = self.state(name)
                if state is not None and state.get("halted"):
                    self.halts[name] += 1
                    process.send_signal(signal.SIGTERM)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_SECONDS)

    def stop(self) -> list[str]:
        """SIGTERM to all, silos first; what is wrong with how they ended."""
        problems = []
        for group in (self.silos, [COORDINATOR]):
            standing = [name for name in group if name in self.processes]
            below = {each for name in standing for each in tree(self.processes[name].pid)}
            for name in standing:
                self.processes[name].send_signal(signal.SIGTERM)
            for name in standing:
                process = self.processes.pop(name)
                try:
                    status = process.wait(STOP_SECONDS)
                    self.calls(name)
                    died = status in KILLED and self.lives[name].struck  # it may die while it ends, too
                    starting = "INTERRUPTED" in self.last_words(name)  # after its last kill: the run was over by then
                    if status and not died and not starting:
                        problems.append(f"{name} ended with {status} when asked: {self.last_words(name)}")
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    problems.append(f"{name} did not end within {STOP_SECONDS:.0f} s")
                if process.stdin is not None:
                    process.stdin.close()
                self.calls(name)
            problems += [
                f"process {each} outlived its parent" for each in below if not until(lambda each=each: ended(each), 5.0)
            ]
        return problems

    # ---- runs ----------------------------------------------------------------------------------------

    def ask(self, name: str, query: str, arguments: Mapping[str, Any] | None = None) -> Any:
        """None: it does not answer now."""
        with contextlib.suppress(FedSiloError, OSError), ControlClient(self.site[name].control_socket) as client:
            return client.query(query, arguments)
        return None

    def state(self, name: str) -> dict[str, Any] | None:
        with contextlib.suppress(FedSiloError, OSError), ControlClient(self.site[name].control_socket) as client:
            return dict(client.snapshot().state)
        return None

    def submit(self, run: str, rounds: int, **fields: object) -> None:
        """Until the coordinator has it, whatever befalls it meanwhile. Raises OperationError: it never had."""
        identities = self.site[COORDINATOR].folder / "id"
        person = Operator(
            COORDINATOR, identities / f"{COORDINATOR_PERSON}.crt", identities / f"{COORDINATOR_PERSON}.key", FEDERATION
        )
        plan: dict[str, object] = {
            "run": run, "method": "pubswap", "rounds": rounds, "local_steps": 3, "swap_period": 2,
            "prompts_per_step": PUBLIC_PROMPTS, "samples_per_prompt": 4, "seed": SEED, "quorum": len(self.silos),
            "objective": {"kl_coefficient": 0.0}, "optimiser": {"learning_rate": 0.01},
            "rollout": {"temperature": 1.0, "max_prompt_tokens": 8, "max_new_tokens": 6},
            "evaluation": {"prompts": 4, "samples": 1}, **fields,
        }  # fmt: skip
        text, failure = run_text(plan), ""

        def had() -> bool:
            nonlocal failure
            self.revive()
            with contextlib.suppress(OSError), ControlClient(self.site[COORDINATOR].control_socket) as client:
                try:
                    if any(row["run"] == run for row in client.query("runs")):
                        return True
                    client.execute(sign_as(person, "run.submit", {"text": text, "source": "run.yaml"}))
                    return True
                except FedSiloError as error:
                    failure = error.line
            return False

        if not until(had, LIMIT_SECONDS):
            raise OperationError(f"{run} cannot be submitted: {failure}")

    def run(self, run: str, rounds: int, each_look: Callable[[], None] = lambda: None, **fields: object) -> str:
        """Submit a run and see it through all faults. Returns its outcome, `stuck` where there is none in time."""
        self.submit(run, rounds, **fields)
        outcome = "stuck"

        def over() -> bool:
            nonlocal outcome
            self.revive()
            each_look()
            rows = self.ask(COORDINATOR, "runs") or []
            state = next((row["state"] for row in rows if row["run"] == run), "")
            if state not in ("finished", "failed", "aborted"):
                return False
            outcome = state
            states = [self.state(name) for name in self.silos]
            return all(state is not None and not state.get("run") for state in states)

        if not until(over, self.limit_seconds):
            for name in self.site:
                state = self.state(name) or {}
                stands = {key: state.get(key) for key in ("run", "round", "step", "halted", "phase")}
                self.notes.append(f"{run} {outcome}: {name} is at {stands}")
            return "stuck"
        return outcome

    # ---- what they left ------------------------------------------------------------------------------

    def adapter(self, run: str) -> str:
        """Digest of a run's final adapter, by the coordinator's database."""
        with contextlib.closing(self.database()) as database:
            return str(database.execute("SELECT adapter_digest FROM runs WHERE name = ?", (run,)).fetchone()[0])

    def database(self) -> sqlite3.Connection:
        path = self.site[COORDINATOR].folder / "state" / "coordinator.db"
        return sqlite3.connect(f"file:{path}?mode=ro", uri=True)

    def problems(self) -> dict[str, list[str]]:
        """By invariant, what does not hold. After `stop`."""
        logs = [site.audit_log for site in self.sites.all()]
        results = verify_logs(logs)
        check_rounds(results, logs)
        check_consistency(results, logs)
        found = {"audit": [f"{one['log']}: {problem}" for one in results for problem in one["problems"]]}
        found["lost"], found["twice"] = self._messages()
        return found

    def _messages(self) -> tuple[list[str], list[str]]:
        """Acknowledged contributions that the coordinator has not, and what it took more than once."""
        with contextlib.closing(self.database()) as database:
            uploads = Counter(database.execute("SELECT silo, run, kind, round, step FROM uploads").fetchall())
            kept = set(database.execute("SELECT silo, run, kind, round, step, digest FROM uploads"))
            contributions = [row for row in self._events(database) if row["event"] == "Contribution"]
        twice = [f"{number} uploads of {place}" for place, number in uploads.items() if number > 1]
        lost = []
        blobs = self.site[COORDINATOR].folder / "state" / "blobs"
        for name in self.silos:
            for record in read_records(self.site[name].audit_log):
                if record["event"] != "egress.acked" or str(record.get("kind", "")).startswith("control."):
                    continue
                place = (name, record["run"], record["kind"], record["round"], record["step"])
                if uploads[place] == 0:
                    lost.append(f"{place} was acknowledged and is not there")
        for silo, run, kind, number, _, digest in kept:
            if kind == "lora.factors" and not (blobs / digest[:2] / digest).exists():
                lost.append(f"the payload of {(silo, run, kind, number)} is gone")
        taken = Counter((one["silo"], one["run"], one["kind"], one["round"], one["step"]) for one in contributions)
        twice += [f"{place} was applied {number} times" for place, number in taken.items() if number > 1]
        return lost, twice

    @staticmethod
    def _events(database: sqlite3.Connection) -> Iterator[dict[str, Any]]:
        for run, text in database.execute("SELECT run, event FROM transitions ORDER BY run, ordinal"):
            yield {"run": run, **json.loads(text)}


def deaths_of(site: Site) -> Path:
    """Where it stands when a silo's trainer dies (`chaos_trainer`)."""
    return site.folder / "trainer_deaths.json"


def own_trainer(site: Site) -> None:
    """`trainer.python`: what runs our trainer instead of the one with torch; it needs no sandbox."""
    program = site.folder / "trainer_python"
    run = f'exec {sys.executable} -P -m benchmarks.chaos_trainer --deaths "{deaths_of(site)}" "$@"'
    ours = f'shift 3; export PYTHONPATH="{REPOSITORY}"; {run}'
    # whatever else is asked of an interpreter, such as where its libraries are, the real one answers
    program.write_text(f'#!/bin/sh\nif [ "$3" = silo.trainer.worker ]; then {ours}; fi\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    text = site.config.read_text()
    assert text.count("\n  launch: child\n") == 1
    more = f"\n  launch: child\n  isolation: waived\n  python: {program}\n"
    site.config.write_text(text.replace("\n  launch: child\n", more))


def until(holds: Callable[[], bool], seconds: float) -> bool:
    """Look again and again; whether it came to hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@contextlib.contextmanager
def federation(out: Path, silos: int = 2) -> Iterator[Federation]:
    made = Federation(out, silos)
    with made.proxy:
        try:
            yield made
        finally:
            made.stop()
