"""FedSilo's side of `benchmarks.transport`: a coordinator and N silos as an operator starts them, each with a trainer
process that trains nothing (`transport_trainer`). mTLS, gate, hashing, audit log and witnesses are on.

A round is from its opening to the next one's; of the last, to its commit. In it each silo's guard is given the new
adapter and hands it to the trainer twice (to measure it, and to go on from it), and the trainer's update goes through
the gate: what a round of the product does, but for the training.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.transport_payload import Shape, constant_of, mean_of, write_model_folder
from benchmarks.transport_process import Watched, cpu_seconds, resident_tree_bytes
from benchmarks.transport_report import Job
from fedsilo.control.client import ControlClient, Event, Operator, sign_as
from fedsilo.demo.data import write_digit_folder
from fedsilo.demo.processes import Children
from fedsilo.demo.sites import COORDINATOR_PERSON, FEDERATION, DemoSettings, Site, Sites, make_sites, run_text
from fedsilo.protocol.codec import decode_factors
from fedsilo.protocol.errors import OperationError
from fedsilo.protocol.factors import initial_factors

RUN, SEED, ROWS = "transport", 3, 16
LEARNING_RATE = 0.01  # so that no update of ours is long enough to be clipped
LIMIT_SECONDS = 900.0
IDLE_SECONDS = 5.0
REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True)
class Running:
    """Daemons that stand."""

    sites: Sites
    coordinator: int
    guards: tuple[int, ...]


@contextlib.contextmanager
def federation(out: Path, shape: Shape, silos: int) -> Iterator[Running]:
    """Write the sites below `out`, start everything, and end it however it went.

    Raises:
        OperationError: a process did not start, or had to be killed.
    """
    model = write_model_folder(out / "model", shape)
    data = write_digit_folder(out / "data", SEED, silos=silos, rows_per_silo=ROWS)
    sites = make_sites(
        DemoSettings(
            out=out, model=model, data=data, ruleset="fedavg", seed=SEED, rank=shape.rank, alpha=2.0 * shape.rank,
            holds="", local_steps=1, swap_period=2, prompts_per_step=4, samples_per_prompt=4,
            learning_rate=LEARNING_RATE,
        )
    )  # fmt: skip
    children = Children({"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)})
    try:
        coordinator = children.start(
            "coordinator", ["coordinator", "start", "--config", str(sites.coordinator.config), "--json"],
            out / "logs" / "coordinator.log",
        )  # fmt: skip
        coordinator.ready()
        guards = []
        for number, site in enumerate(sites.silos):
            others_start_the_trainer(site)
            socket = site.folder / "state" / "run" / "trainer.sock"
            children.start(
                f"{site.name} trainer", ["--address", f"unix:{socket}", "--constant", repr(constant_of(number))],
                out / "logs" / f"{site.name}-trainer.log", module="benchmarks.transport_trainer",
            )  # fmt: skip
            arguments = ["silo", "start", "--config", str(site.config), "--json"]
            guards.append(children.start(site.name, arguments, out / "logs" / f"{site.name}.log"))
        for guard in guards:
            guard.ready()
        yield Running(sites, coordinator.process.pid, tuple(guard.process.pid for guard in guards))
        children.raise_for_dead()
    finally:
        killed = children.stop()
    if killed:
        raise OperationError(f"{', '.join(killed)} had to be killed")


def others_start_the_trainer(site: Site) -> None:
    """`trainer.launch: external`, without a sandbox, which is what this trainer has."""
    text = site.config.read_text()
    assert text.count("\n  launch: child\n") == 1
    site.config.write_text(text.replace("\n  launch: child\n", "\n  launch: external\n  isolation: waived\n"))


def run(out: Path, shape: Shape, silos: int, rounds: int) -> Job:
    """One run of so many rounds, on sites of its own.

    Raises:
        OperationError: it did not finish, or its mean is wrong.
    """
    with federation(out, shape, silos) as running:
        idle = idle_footprint(running)
        with Watched(running.coordinator) as server:
            seconds = carried_out(running, rounds)
        check_mean(running.sites, shape, silos, rounds)
    # up: an update a round; down: the first adapter, and one a round
    crossed = shape.payload_bytes * silos * (2 * rounds + 1)
    return Job(seconds, server.cpu_seconds, crossed, server.base_bytes, server.peak_bytes, idle)


def idle_footprint(running: Running) -> dict[str, float]:
    """While all have joined and wait for a run."""
    pids = (running.coordinator, *running.guards)
    before = [cpu_seconds(each) for each in pids]
    time.sleep(IDLE_SECONDS)
    server, *guards = ((cpu_seconds(each) - was) / IDLE_SECONDS for each, was in zip(pids, before, strict=True))
    return {
        "server_mib": resident_tree_bytes(running.coordinator) / 2**20,
        "client_mib": max(resident_tree_bytes(each) for each in running.guards) / 2**20,
        "server_cpu_share": server,
        "client_cpu_share": max(guards),
    }


def carried_out(running: Running, rounds: int) -> list[float]:
    """Submit the run as the coordinator's person, follow its events to the end; seconds of each round."""
    sites = running.sites
    identities = sites.coordinator.folder / "id"
    name = COORDINATOR_PERSON
    person = Operator(sites.coordinator.name, identities / f"{name}.crt", identities / f"{name}.key", FEDERATION)
    plan: dict[str, object] = {
        "run": RUN, "method": "fedavg-grpo", "rounds": rounds, "local_steps": 1, "prompts_per_step": 4,
        "samples_per_prompt": 4, "seed": SEED, "quorum": len(sites.silos), "objective": {"kl_coefficient": 0.0},
        "optimiser": {"learning_rate": LEARNING_RATE},
        "rollout": {"temperature": 1.0, "max_prompt_tokens": 8, "max_new_tokens": 6},
        "evaluation": {"prompts": 4, "samples": 1},
    }  # fmt: skip
    marks: list[tuple[float, Event]] = []
    with ControlClient(sites.coordinator.control_socket) as client:
        since, ended = client.snapshot().sequence, threading.Event()

        def follow() -> None:
            for event in client.watch(since):
                marks.append((time.perf_counter(), event))
                if event.name in ("run.ended", "halt", "round.refused", "round.abandoned"):
                    ended.set()
                    return

        watcher = threading.Thread(target=follow, daemon=True)
        watcher.start()
        client.execute(sign_as(person, "run.submit", {"text": run_text(plan), "source": "run.yaml"}))
        if not ended.wait(LIMIT_SECONDS):
            raise OperationError(f"the run has not ended within {LIMIT_SECONDS:.0f} s")
        watcher.join()
    last = marks[-1][1]
    if last.name != "run.ended" or last.fields["outcome"] != "finished":
        raise OperationError(f"the run came to {last.name} {last.fields}")
    return seconds_of_rounds([(at, event.name, int(event.fields.get("round", 0))) for at, event in marks], rounds)


def seconds_of_rounds(marks: Sequence[tuple[float, str, int]], rounds: int) -> list[float]:
    """From each round's opening to the next one's, of the last to its commit. marks: (moment, event, round)."""
    opened = {number: at for at, name, number in marks if name == "round.opened"}
    committed = {number: at for at, name, number in marks if name == "round.committed"}
    ends = [*(opened[number] for number in range(2, rounds + 1)), committed[rounds]]
    return [end - opened[number] for number, end in enumerate(ends, 1)]


def check_mean(sites: Sites, shape: Shape, silos: int, rounds: int) -> None:
    """Raises OperationError: the adapter on the coordinator's disk is not the first one and `rounds` times the mean."""
    with ControlClient(sites.coordinator.control_socket) as client:
        record: dict[str, Any] = client.query("run", {"run": RUN})
    digest = record["adapter_sha256"]
    path = sites.coordinator.folder / "state" / "blobs" / digest[:2] / digest
    found = decode_factors(path.read_bytes()).tensors
    first = initial_factors(list(shape.arrays().items()), SEED)
    if list(found) != list(shape.arrays()):
        raise OperationError("the adapter has other arrays than the model's factors")
    for name, values in found.items():
        expected = first[name]
        for _ in range(rounds):
            expected = expected + np.float32(mean_of(silos))
        # A number below the smallest normal one is written as 0, which no sum of these is: equal to the last bit.
        if not np.array_equal(values, expected):
            raise OperationError(f"{name}: the mean is wrong by {float(np.abs(values - expected).max()):g}")
