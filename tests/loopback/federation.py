"""Real federations for the loopback tests: the processes an operator starts, the commands an operator types.

Nothing is replaced here. The sites are written by the function behind `fedsilo demo`; every daemon is a child process
with its own keys, dialling over mTLS; a person's answer is a command line. Around each of them stands a recorder that
sees every byte in the clear, and what crossed is searched for 200 planted texts at the end (threat X1).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsilo.cli.run import ENDED
from fedsilo.control.client import ControlClient
from fedsilo.demo.data import DataFolder, write_digit_folder
from fedsilo.demo.processes import Child, Children
from fedsilo.demo.provision import enrol_operator, write_roles
from fedsilo.demo.sites import FEDERATION, SILO_PEOPLE, DemoSettings, Site, Sites, free_port, make_sites
from fedsilo.demo.tiny_model import cached_model, recipe_for
from fedsilo.demo.wire import WireVerdict, Witness, make_canaries, search_recordings

LOCAL_STEPS = 4
SWAP_PERIOD = 2
SHORT = ("--local-steps", "4")  # where it is asked whether rounds go on, not what they teach
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# Far above what anything here takes on a machine to itself: a limit that is reached means that something hangs.
LIMIT_SECONDS = 240.0
# What one short run sends and answers; everything that is not said here is the plan's default.
RUN: dict[str, object] = {
    "method": "pubswap",
    "rounds": 1,
    "local_steps": LOCAL_STEPS,
    "swap_period": SWAP_PERIOD,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "seed": 3,
    "quorum": 1,
    "objective": {"kl_coefficient": 0.0},
    "optimiser": {"learning_rate": 0.001},
    "rollout": {"temperature": 1.0, "max_prompt_tokens": 8, "max_new_tokens": 6},
    "evaluation": {"prompts": 16, "samples": 1},
}


@dataclass(frozen=True)
class Reply:
    """What a command came to. `envelope` is empty when it wrote no JSON."""

    exit_code: int
    envelope: dict[str, Any]
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        assert self.exit_code == 0, self.stdout + self.stderr
        return self.envelope["data"]


def command(*arguments: object) -> Reply:
    """Run one of the four commands with `--json`, as a person would type it."""
    done = subprocess.run(
        [sys.executable, "-m", "fedsilo.cli", *map(str, arguments), "--json"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    return Reply(done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stdout, done.stderr)


# ---- a federation under the test's hand --------------------------------------------------------------


@dataclass
class Federation:
    """A coordinator and some silos, all running."""

    sites: Sites
    root: Path
    witness: Witness
    programs: Mapping[str, tuple[str, list[str]]] = field(default_factory=dict)  # module and arguments in place of ours
    children: Children = field(default_factory=lambda: Children(dict(ENVIRONMENT)))
    coordinators: Children = field(default_factory=Children)  # however late one starts: it ends last, to hear goodbyes
    _running: dict[str, Child] = field(default_factory=dict)

    def site(self, name: str) -> Site:
        return next(site for site in self.sites.all() if site.name == name)

    def start(self, *names: str) -> None:
        """Start daemons side by side and wait until each says that it stands. A dead one may be started again."""
        for name in names:
            program = "coordinator" if name == self.sites.coordinator.name else "silo"
            ours = "fedsilo.cli", [program, "start", "--config", str(self.site(name).config), "--json"]
            module, arguments = self.programs.get(name, ours)
            if program == "coordinator":
                self.coordinators.environment = self.children.environment
            group = self.coordinators if program == "coordinator" else self.children
            self._running[name] = group.start(
                name, arguments, self.root / "logs" / f"{name}.log", module=module,
                environment=self.witness.planted.environment(name),
            )  # fmt: skip
        for name in names:
            self._running[name].ready()

    def pid(self, name: str) -> int:
        return self._running[name].process.pid

    def kill(self, name: str) -> None:
        """kill -9 of a daemon, and of nothing else."""
        os.kill(self._running[name].process.pid, signal.SIGKILL)
        self._running[name].process.wait(LIMIT_SECONDS)

    def submit(self, run: str, **fields: object) -> Reply:
        """`fedsilo run submit` by the coordinator's own person."""
        file = self.root / f"{run}.yaml"
        lines = [f"{name}: {json.dumps(value)}\n" for name, value in {"run": run, **RUN, **fields}.items()]
        file.write_text("".join(lines), encoding="utf-8")
        return command("fedsilo", "run", "submit", file, "--as", "carol", *self.coordinator_config)

    def record(self, run: str) -> dict[str, Any]:
        """`fedsilo run show`."""
        return dict(command("fedsilo", "run", "show", run, *self.coordinator_config).data)

    def run(self, run: str, **fields: object) -> dict[str, Any]:
        """Submit, wait for the end, and give the record."""
        submitted = self.submit(run, **fields)
        assert submitted.exit_code == 0, submitted.envelope
        return self.ended(run)

    def settle(self) -> None:
        """After a test: end what it left running and start what it left dead, so that one that failed fails alone."""
        for site in reversed(self.sites.all()):  # the coordinator first
            if self._running[site.name].process.poll() is not None:
                self.start(site.name)
        with ControlClient(self.sites.coordinator.control_socket) as client:
            left = [row["run"] for row in client.query("runs") if row["state"] not in ENDED]
        for run in left:
            command("fedsilo", "run", "abort", run, "--confirm", run, "--as", "carol", *self.coordinator_config)
            self.ended(run)

    def until_committed(self, run: str, number: int) -> dict[str, Any]:
        """Wait until a round is committed, and give its row of the record."""
        row: dict[str, Any] = {}

        def committed(_: Any) -> bool:
            row.update(self.record(run)["rounds"][number - 1])
            return bool(row["state"] == "committed")

        self.until_state(self.sites.coordinator.name, committed)
        return row

    def ended(self, run: str) -> dict[str, Any]:
        self.until_state(self.sites.coordinator.name, lambda _: self._state(run) in ENDED)
        record = self.record(run)
        for silo in record["plan"]["silos"]:
            if self._running[silo].process.poll() is None:
                self.until_state(silo, lambda state: not state.get("run"))
        return record

    def _state(self, run: str) -> str:
        with ControlClient(self.sites.coordinator.control_socket) as client:
            return next(str(row["state"]) for row in client.query("runs") if row["run"] == run)

    def until_state(self, name: str, holds: Any) -> dict[str, Any]:
        """Wait until a daemon's own snapshot says so; reading its socket is what its people do too."""
        deadline = time.monotonic() + LIMIT_SECONDS
        with ControlClient(self.site(name).control_socket) as client:
            while time.monotonic() < deadline:
                state = client.snapshot().state
                if holds(state):
                    return dict(state)
                time.sleep(0.1)
        raise AssertionError(f"{name} did not come to it in {LIMIT_SECONDS} s: {state}")

    @property
    def coordinator_config(self) -> tuple[str, str]:
        return "--config", str(self.sites.coordinator.config)

    def log_of(self, name: str) -> str:
        return (self.root / "logs" / f"{name}.log").read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def federation(
    root: Path,
    *,
    silos: int,
    ruleset: str,
    holds: str = "",
    viewer: str = "",
    external: Collection[str] = (),
    before_daemons: Callable[[Federation], None] = lambda made: None,
    seed: int = 3,
    rows_per_silo: int = 64,
    local_steps: int = LOCAL_STEPS,
    before_start: Callable[[Site], None] = lambda site: None,
    write_data: Callable[..., DataFolder] = write_digit_folder,
    model: Path | None = None,
) -> Iterator[Federation]:
    """Write some silos and a coordinator below `root`, start them, and end them however the tests went.

    Args:
        root: empty folder.
        silos: how many.
        ruleset: of all sites.
        holds: silo whose first factor release waits for a person; none waits without one.
        viewer: one more person of that silo, who may look and nothing else.
        external: silos whose trainer the test starts.
        before_daemons: what is done when all files are written, before any daemon starts.
        seed: of questions and site secrets.
        rows_per_silo: private rows.
        local_steps: of the largest plan.
        before_start: what a site's people do with its files before its daemon starts.
        write_data: as `write_digit_folder`, whose questions the model can read.
        model: folder of the base model; without one the demo's, which answers questions on digits.
    """
    model = model or cached_model(recipe_for("digits"))
    data = write_data(root / "data", seed, silos=silos, rows_per_silo=rows_per_silo)
    recorder_port = free_port()
    sites = make_sites(
        DemoSettings(
            out=root, model=model, data=data, ruleset=ruleset, seed=seed, rank=8, alpha=16.0, holds=holds,
            local_steps=local_steps, swap_period=SWAP_PERIOD, prompts_per_step=8, samples_per_prompt=8,
            learning_rate=0.001, advertise=f"127.0.0.1:{recorder_port}",
        )
    )  # fmt: skip
    made = Federation(sites, root, Witness(sites, data, seed, root / "wire", port=recorder_port, external=external))
    if viewer:
        folder = made.site(holds).folder
        enrol_operator(folder / "site_ca", folder / "id", viewer)
        write_roles(folder / "id", holds, {**SILO_PEOPLE, viewer: ("viewer",)})
    for site in sites.silos:
        before_start(site)
    made.witness.start()
    try:
        before_daemons(made)
        made.start(sites.coordinator.name)
        made.start(*(site.name for site in sites.silos))
        for site in sites.silos:  # what is searched for is really there
            environment = Path(f"/proc/{made.pid(site.name)}/environ").read_bytes()
            assert all(text.encode() in environment for text in made.witness.planted.texts(site.name, "environment"))
        yield made
    finally:
        killed = [*made.children.stop(), *made.coordinators.stop()]
        made.witness.stop()
    assert not killed, f"{killed} did not end when asked"
    # a name that is allowed to leave, so that finding none of the others means something
    nothing_planted_crossed(made.witness.search([f"spiffe://{FEDERATION}/silo/"]))


def nothing_planted_crossed(verdict: WireVerdict) -> None:
    assert not verdict.unreadable and not verdict.found, verdict
    assert verdict.control_found and verdict.messages, verdict


# ---- the demo ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demo:
    """A demo that has ended."""

    out: Path
    reply: Reply
    seen: frozenset[tuple[int, int]]  # every process it ever had
    stop_seconds: float = 0.0

    @property
    def data(self) -> dict[str, Any]:
        return dict(self.reply.data)

    def record(self, run: str = "run-1") -> dict[str, Any]:
        """What the signed run record says; whether it is signed is another question."""
        (path,) = (self.out / "coordinator" / "state" / "runs").glob(f"{run}*/run_record.json")
        return dict(json.loads(path.read_text())["record"])


def demo(out: Path, *options: str, interrupt: str = "", number: int = signal.SIGINT) -> Demo:
    """`fedsilo demo --no-console --json` to its end, recorded; what crossed is searched however it ended.

    Args:
        out: its folder.
        options: more of the command line.
        interrupt: send `number` once a line of progress contains this text.
        number: of the signal.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsilo.cli", "fedsilo", "demo", "--no-console", "--json", "--record",
         "--out", str(out), *options],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    seen: set[tuple[int, int]] = set()
    lines: list[str] = []
    ended, sent_at = threading.Event(), [0.0]

    def watch() -> None:
        while not ended.wait(0.2):
            seen.update(descendants(process.pid))

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if interrupt and interrupt in line and not sent_at[0]:
                seen.update(descendants(process.pid))
                sent_at[0] = time.monotonic()
                process.send_signal(number)

    watching = [threading.Thread(target=watch), threading.Thread(target=listen)]
    for thread in watching:
        thread.start()
    try:
        assert process.stdout is not None
        stdout = process.stdout.read()
        process.wait(LIMIT_SECONDS)
    finally:
        process.kill()
        ended.set()
        for thread in watching:
            thread.join()
    stop_seconds = time.monotonic() - sent_at[0] if sent_at[0] else 0.0
    reply = Reply(process.returncode, json.loads(stdout) if stdout else {}, stdout, "".join(lines))
    if any("starting" in line and "silo" in line for line in lines):
        _nothing_crossed_in(out, options)
    return Demo(out, reply, frozenset(seen), stop_seconds)


def _nothing_crossed_in(out: Path, options: tuple[str, ...]) -> None:
    """Search what a demo recorded, also one that was told to end and says nothing of its own."""
    seed = int(options[options.index("--seed") + 1]) if "--seed" in options else 0
    silos = sorted(path.parent.name for path in out.glob("*/silo.yaml"))
    planted = make_canaries(seed, silos, tokenizer="bytes" if "--data" in options else "digits")
    assert (out / "wire").is_dir()
    crossed = search_recordings(out / "wire", planted, [f"spiffe://{FEDERATION}/silo/"])
    assert not crossed.unreadable and not crossed.found, crossed
    # told to end before the first silo spoke, there is no message in which the control could be
    assert crossed.control_found or not crossed.messages, crossed


# ---- processes ---------------------------------------------------------------------------------------


def descendants(pid: int) -> set[tuple[int, int]]:
    """(pid, start time in ticks) of every process below one; the pair names a process for good, a pid does not."""
    parents: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                values = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = (int(values[1]), int(values[19]))
    found, grew = {pid}, True
    while grew:
        below = {child for child, (parent, _) in parents.items() if parent in found} - found
        found |= below
        grew = bool(below)
    return {(each, parents[each][1]) for each in found - {pid} if each in parents}


def living(processes: frozenset[tuple[int, int]] | set[tuple[int, int]]) -> list[str]:
    """Command lines of those that still run."""
    alive = []
    for pid, started in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(values[19]) == started and values[0] != "Z":
                alive.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
    return alive


# ---- logs, read by hand ------------------------------------------------------------------------------


def records(audit_log: Path) -> list[dict[str, Any]]:
    """Every record of a log as plain JSON, with nothing of ours in between."""
    return [
        json.loads(line) for part in sorted(audit_log.glob("*.jsonl")) for line in part.read_text().splitlines() if line
    ]


def counted(lines: list[dict[str, Any]], event: str, peer: str = "") -> dict[str, list[int]]:
    """{kind: [messages, payload bytes]} of one event, of one peer if named; polls of a window count where it ends."""
    counts: dict[str, list[int]] = {}
    events = {event, "ingress.polls"} if event == "ingress.decision" else {event}
    for line in lines:
        detail = line.get("detail", {})
        if line["event"] in events and "window" not in detail and (not peer or line["peer"].endswith(peer)):
            of_kind = counts.setdefault(line["kind"], [0, 0])
            of_kind[0] += detail.get("polls", 1)
            of_kind[1] += line["payload"]["bytes"]
    return counts
