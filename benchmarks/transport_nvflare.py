"""NVFlare's side of `benchmarks.transport`: mTLS, real processes as the kits start them, stock FedAvg.

It lives in an environment of its own, made once and named by `--venv-nvflare FOLDER`:

    python3.11 -m venv FOLDER && FOLDER/bin/pip install nvflare==2.9.0

A round is from its start to the next one's by the log of the server's job; of the last, to the end of FedAvg. CPU time
and memory are of the server and its job's process together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.transport_payload import UNIT, Shape, mean_of
from benchmarks.transport_process import Watched, cpu_seconds, resident_tree_bytes, start_of, tree
from benchmarks.transport_report import Job
from fedsilo.demo.sites import free_port
from fedsilo.protocol.errors import OperationError

JOB_CODE = Path(__file__).with_name("transport_nvflare_job.py")
PROJECT = "transport"
ADMIN = "admin@transport.org"
ALLOWED = (
    "transport_nvflare_job.ConstantFedAvg",
    "nvflare.app_common.executors.client_api_executor.ClientAPIExecutor",
)
LIMIT_SECONDS = 900.0
MEAN_TOLERANCE = 3e-7  # weights are quotients: a few units in the last place of numbers up to 1, as float32
START_SECONDS = 240.0
STOP_SECONDS = 20.0
IDLE_SECONDS = 5.0
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+)")
_STARTED = re.compile(r"Round (\d+) started\.")
_FINISHED = "Finished FedAvg."
_FAILED = "Exception in model controller run"


def run(out: Path, venv: Path, shape: Shape, silos: int, rounds: int) -> Job:
    """One job of so many rounds, on kits of its own.

    Raises:
        OperationError: it did not finish, or its mean is wrong.
    """
    out.mkdir(parents=True, exist_ok=True)
    kits = provisioned(out, venv, silos)
    with started(out, venv, kits, silos) as processes:
        server, *clients = (each.pid for each in processes)
        idle = idle_footprint(server, clients)
        job = written_job(out, venv, shape, silos, rounds)
        with Watched(server) as watched:
            submitted(out, venv, kits, job)
            log = until_finished(out / "server.log", processes)
            ranges = job.parent / "ranges.json"
            until(ranges.is_file, LIMIT_SECONDS, processes, "the job has not said what it came to")
        check_mean(ranges, shape, silos, rounds)
        seconds = seconds_of_rounds(log, rounds)
    crossed = shape.payload_bytes * silos * 2 * rounds
    return Job(seconds, watched.cpu_seconds, crossed, watched.base_bytes, watched.peak_bytes, idle)


def provisioned(out: Path, venv: Path, silos: int) -> dict[str, Path]:
    """A kit for each participant, by name; storage and allowed classes are set in the kits' own local folder."""
    port = free_port()
    sites = "".join(f"  - {{name: site-{each}, type: client, org: bench}}\n" for each in range(1, silos + 1))
    project = f"""\
api_version: 3
name: {PROJECT}
description: {PROJECT}
participants:
  - {{name: localhost, type: server, org: bench, fed_learn_port: {port}}}
{sites}  - {{name: {ADMIN}, type: admin, org: bench, role: project_admin}}
builders:
  - {{path: nvflare.lighter.impl.workspace.WorkspaceBuilder, args: {{template_file: [master_template.yml]}}}}
  - {{path: nvflare.lighter.impl.static_file.StaticFileBuilder, args: {{config_folder: config}}}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""
    (out / "project.yml").write_text(project)
    called(out, venv, "nvflare", "provision", "-p", "project.yml", "-w", "kits")
    root = out / "kits" / PROJECT / "prod_00"
    kits = {path.name: path for path in root.iterdir() if (path / "startup").is_dir()}
    for name, kit in kits.items():
        default = kit / "local" / "resources.json.default"
        resources: dict[str, Any] = json.loads(default.read_text())
        if "class_allow_list" in resources:
            resources["class_allow_list"] += [each for each in ALLOWED if each not in resources["class_allow_list"]]
        text = json.dumps(resources).replace("/tmp/nvflare", str(out / "storage" / name))  # noqa: S108  # its default
        (kit / "local" / "resources.json").write_text(text)
    return kits


@contextlib.contextmanager
def started(out: Path, venv: Path, kits: dict[str, Path], silos: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Server and clients, the server first; all have joined. Ended with all they started, however it went."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        app = "nvflare.private.fed.app"
        server = kits["localhost"]
        common = ("secure_train=true", "org=bench", "config_folder=config")
        processes.append(
            spawned(
                out / "server.log", venv, f"{app}.server.server_train", "-m", server, "-s", "fed_server.json",
                "--set", *common,
            )
        )  # fmt: skip
        for number in range(1, silos + 1):
            name = f"site-{number}"
            processes.append(
                spawned(
                    out / f"{name}.log", venv, f"{app}.client.client_train", "-m", kits[name], "-s", "fed_client.json",
                    "--set", *common, f"uid={name}",
                )
            )  # fmt: skip
        logs = [out / f"site-{number}.log" for number in range(1, silos + 1)]
        until(
            lambda: all("Successfully registered client" in text_of(log) for log in logs), START_SECONDS, processes,
            "the clients have not joined",
        )  # fmt: skip
        yield processes
    finally:
        end(processes)


def spawned(log: Path, venv: Path, module: str, *arguments: object) -> subprocess.Popen[bytes]:
    with log.open("ab") as stream:
        return subprocess.Popen(
            [str(venv / "bin" / "python"), "-u", "-m", module, *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment(), start_new_session=True,
        )  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Each with all it has started: a job's process has a session of its own, so they are found first."""
    all_of_them = [each for process in processes if process.poll() is None for each in tree(process.pid)]
    started_at = {each: start_of(each) for each in all_of_them}
    for number, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
        for each in processes if number == signal.SIGTERM else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, number)
        for pid in all_of_them if number == signal.SIGKILL else ():
            with contextlib.suppress(ProcessLookupError):
                if start_of(pid) == started_at[pid] != "":  # a number may be another process's by now
                    os.kill(pid, number)
        deadline = time.monotonic() + seconds
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))


def until(holds: Any, seconds: float, processes: Sequence[subprocess.Popen[bytes]], otherwise: str) -> None:
    """Raises OperationError: it does not come to hold in time, or a process has ended."""
    deadline = time.monotonic() + seconds
    while not holds():
        if dead := [process for process in processes if process.poll() is not None]:
            raise OperationError(f"NVFlare: {len(dead)} processes have ended by themselves")
        if time.monotonic() > deadline:
            raise OperationError(f"NVFlare: {otherwise} within {seconds:.0f} s")
        time.sleep(0.2)


def called(folder: Path, venv: Path, program: str, *arguments: object) -> str:
    """Raises OperationError: it failed."""
    done = subprocess.run(
        [str(venv / "bin" / program), *map(str, arguments)],
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        env=environment(),
    )  # fmt: skip
    if done.returncode:
        raise OperationError(f"{program} {arguments[0]} failed: {(done.stdout + done.stderr).strip()[-600:]}")
    return done.stdout


def idle_footprint(server: int, clients: Sequence[int]) -> dict[str, float]:
    pids = (server, *clients)
    before = [cpu_seconds(each) for each in pids]
    time.sleep(IDLE_SECONDS)
    shares = [(cpu_seconds(each) - was) / IDLE_SECONDS for each, was in zip(pids, before, strict=True)]
    return {
        "server_mib": resident_tree_bytes(server) / 2**20,
        "client_mib": max(resident_tree_bytes(each) for each in clients) / 2**20,
        "server_cpu_share": shares[0],
        "client_cpu_share": max(shares[1:]),
    }


def written_job(out: Path, venv: Path, shape: Shape, silos: int, rounds: int) -> Path:
    folder = out / "job"
    folder.mkdir()
    code = folder / JOB_CODE.name
    shutil.copy(JOB_CODE, code)
    shapes = folder / "shapes.json"
    shapes.write_text(json.dumps(list(shape.arrays().items())))
    called(
        folder, venv, "python", code.name, folder, "--shapes", shapes, "--sites", silos, "--rounds", rounds,
        "--unit", repr(UNIT),
    )  # fmt: skip
    return folder / "transport"


def submitted(out: Path, venv: Path, kits: dict[str, Path], job: Path) -> None:
    called(
        out, venv, "nvflare", "--connect-timeout", 60, "job", "submit", "-j", job, "--startup-kit",
        kits[ADMIN] / "startup",
    )  # fmt: skip


def until_finished(log: Path, processes: Sequence[subprocess.Popen[bytes]]) -> str:
    """What server and job said, once FedAvg is done. Raises OperationError: it failed."""

    def is_over() -> bool:
        said = text_of(log)
        if _FAILED in said:
            raise OperationError(f"NVFlare: {said[said.index(_FAILED) :][:400]}")
        return _FINISHED in said

    until(is_over, LIMIT_SECONDS, processes, "the job has not finished")
    return text_of(log)


def text_of(path: Path) -> str:
    return path.read_text(errors="replace") if path.is_file() else ""


def seconds_of_rounds(log: str, rounds: int) -> list[float]:
    """Raises OperationError: the log does not tell of so many rounds and an end."""
    moments: list[float] = []
    stamped = 0.0  # what is said in a frame comes some lines after its stamp
    for line in log.splitlines():
        if stamp := _STAMP.match(line):
            stamped = datetime.fromisoformat(stamp.group(1).replace(",", ".")).timestamp()
        if _STARTED.search(line) or _FINISHED in line:
            moments.append(stamped)
    if len(moments) != rounds + 1:
        raise OperationError(f"NVFlare: its log tells of {len(moments)} moments, {rounds + 1} are expected")
    return [after - before for before, after in itertools.pairwise(moments)]


def check_mean(ranges: Path, shape: Shape, silos: int, rounds: int) -> None:
    """Raises OperationError: the model has not grown by `rounds` times the mean, all of it, in every array."""
    found = json.loads(ranges.read_text())
    wanted = rounds * mean_of(silos)
    if found.keys() != shape.arrays().keys():
        raise OperationError("NVFlare: the model has other arrays than the factors")
    wrong = [name for name, ends in found.items() if any(abs(end - wanted) > MEAN_TOLERANCE for end in ends)]
    if wrong:
        raise OperationError(f"NVFlare: the mean of {wrong[0]} is {found[wrong[0]]}, {wanted:g} is right")
