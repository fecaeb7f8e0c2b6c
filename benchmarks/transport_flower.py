"""Flower's side of `benchmarks.transport`: TLS and registered node keys (it has no mTLS), real processes, stock FedAvg.

It lives in an environment of its own, made once and named by `--venv-flower FOLDER`. Its pins are given by hand where
the newest certifi is older than the one it asks for:

    python3.11 -m venv FOLDER && FOLDER/bin/pip install --no-deps flwr==1.42.0
    FOLDER/bin/pip install certifi pycryptodome "numpy<3" "grpcio<2" "grpcio-health-checking<1.80" \\
        "protobuf>=5.28,<7" "cryptography>=50,<51" "iterators<0.0.3" "typer<0.21" "uv>=0.13.5,<0.14" "tomli<3" \\
        "tomli-w<2" "pathspec>=1,<2" "prompt-toolkit<4" "rich<15" "pyyaml<7" "requests<3" "httpx<1" "click<9" \\
        "packaging<26" "sqlalchemy[asyncio]>=2.0.45,<3" "alembic<2" "uvicorn[standard]>=0.49,<0.50" \\
        "fastapi>=0.138,<0.139" starlette

A round is from the end of the one before to its own, as the strategy's evaluation hook sees them; the first begins when
the strategy does. CPU time and memory are of the superlink and the server app together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.transport_nvflare import MEAN_TOLERANCE, end, idle_footprint
from benchmarks.transport_payload import Shape, constant_of, mean_of
from benchmarks.transport_process import Watched
from benchmarks.transport_report import Job
from fedsilo.demo.sites import free_port
from fedsilo.protocol.errors import OperationError

APP = Path(__file__).with_name("transport_flower_app.py")
LIMIT_SECONDS = 900.0
START_SECONDS = 240.0


def run(out: Path, venv: Path, shape: Shape, silos: int, rounds: int, *, one_array: bool = False) -> Job:
    """One run of so many rounds.

    Args:
        out: folder for everything.
        venv: of Flower.
        shape: of the factors.
        silos: how many nodes.
        rounds: of the run.
        one_array: the same bytes in one array, since Flower pays for each.

    Raises:
        OperationError: it did not finish, or its mean is wrong.
    """
    shapes = list(shape.arrays().items())
    if one_array:
        shapes = [("all", (sum(math.prod(sides) for _, sides in shapes),))]  # type: ignore[list-item]
    out.mkdir(parents=True, exist_ok=True)
    marks = written_app(out, shapes, silos, rounds)
    with started(out, venv, silos) as processes:
        link, *nodes = (each.pid for each in processes)
        idle = idle_footprint(link, nodes)
        with Watched(link) as watched:
            called(out, venv, "run", "app", "transport")
            until(lambda: f'"round": {rounds},' in text_of(marks), LIMIT_SECONDS, processes, "the run has not finished")
    rows = [json.loads(line) for line in marks.read_text().splitlines()]
    check_mean(rows[-1], len(shapes), silos, rounds)
    crossed = shape.payload_bytes * silos * 2 * rounds
    return Job(seconds_of_rounds(rows), watched.cpu_seconds, crossed, watched.base_bytes, watched.peak_bytes, idle)


def written_app(out: Path, shapes: Sequence[Any], silos: int, rounds: int) -> Path:
    """`out/app`; gives the file that the server writes its marks to."""
    app, marks = out / "app", out / "marks.jsonl"
    app.mkdir()
    shutil.copy(APP, app)
    (out / "shapes.json").write_text(json.dumps(shapes))
    name = APP.stem
    (app / "pyproject.toml").write_text(f"""\
[project]
name = "transport"
version = "1.0.0"
description = "transport"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "transport"

[tool.flwr.app.components]
serverapp = "{name}:server"
clientapp = "{name}:client"

[tool.flwr.app.config]
nodes = {silos}
rounds = {rounds}
shapes = {json.dumps(str(out / "shapes.json"))}
marks = {json.dumps(str(marks))}
""")
    return marks


@contextlib.contextmanager
def started(out: Path, venv: Path, silos: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The superlink first, then a supernode with a registered key for each silo; ended however it went."""
    from fedsilo.demo.provision import init_ca, provision_site

    init_ca(out / "ca", name="transport", kind="federation")
    identity = provision_site(
        out / "link", site="main", federation_ca=out / "ca", people={"carol": ("operator",)}, is_coordinator=True
    )
    root = identity / "federation_ca.crt"
    address = f"127.0.0.1:{free_port()}"
    home = out / "home"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "transport"\n\n[superlink.transport]\n'
        f'address = "{address}"\nroot-certificates = {json.dumps(str(root))}\n'
    )
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes.append(
            spawned(
                out, venv, "flower-superlink", "--ssl-ca-certfile", root, "--ssl-certfile", identity / "main.crt",
                "--ssl-keyfile", identity / "main.key", "--enable-supernode-auth",
                "--disable-runtime-dependency-installation", "--port", address.rpartition(":")[2],
            )
        )  # fmt: skip
        until(lambda: listens(address), START_SECONDS, processes, "the superlink does not listen")
        for number in range(silos):
            key = out / f"node-{number}"
            made = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", str(key)]
            subprocess.run(made, check=True, stdin=subprocess.DEVNULL)  # its documented way to make a key
            called(out, venv, "supernode", "register", key.with_suffix(".pub"), "transport")
            processes.append(
                spawned(
                    out, venv, "flower-supernode", "--root-certificates", root, "--superlink", address,
                    "--auth-supernode-private-key", key, "--node-config", f"constant={constant_of(number)!r}",
                    "--port", free_port(),
                )
            )  # fmt: skip
        until(lambda: online(out, venv) == silos, START_SECONDS, processes, "the nodes have not come")
        yield processes
    finally:
        end(processes)


def online(out: Path, venv: Path) -> int:
    said = json.loads(called(out, venv, "supernode", "list", "transport", "--format", "json"))
    return sum(str(node.get("status", "")).lower() == "online" for node in said.get("nodes", ()))


def listens(address: str) -> bool:
    import socket

    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
        return True
    return False


def spawned(out: Path, venv: Path, program: str, *arguments: object) -> subprocess.Popen[bytes]:
    with (out / f"{program}.log").open("ab") as stream:
        return subprocess.Popen(
            [str(venv / "bin" / program), *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment(out, venv), cwd=out,
            start_new_session=True,
        )  # fmt: skip


def environment(out: Path, venv: Path) -> dict[str, str]:
    """Nothing is told to anybody, and the programs that they start are found."""
    return {
        **os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "FLWR_HOME": str(out / "home"), "PYTHONPATH": "",
        "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def called(out: Path, venv: Path, *arguments: object) -> str:
    """`flwr ARGUMENTS`. Raises OperationError: it failed."""
    done = subprocess.run(
        [str(venv / "bin" / "flwr"), *map(str, arguments)],
        cwd=out, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
        env=environment(out, venv),
    )  # fmt: skip
    if done.returncode:
        said = (done.stdout + done.stderr).strip()[-600:]
        raise OperationError(f"flwr {arguments[0]} {arguments[1]} failed: {said}")
    return done.stdout


def until(holds: Any, seconds: float, processes: Sequence[subprocess.Popen[bytes]], otherwise: str) -> None:
    """Raises OperationError: it does not come to hold in time, or a process has ended."""
    deadline = time.monotonic() + seconds
    while not holds():
        if dead := [process for process in processes if process.poll() is not None]:
            raise OperationError(f"Flower: {len(dead)} processes have ended by themselves")
        if time.monotonic() > deadline:
            raise OperationError(f"Flower: {otherwise} within {seconds:.0f} s")
        time.sleep(0.2)


def text_of(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def seconds_of_rounds(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Between one mark and the next; the first is before the first round."""
    return [after["at"] - before["at"] for before, after in itertools.pairwise(rows)]


def check_mean(row: dict[str, Any], arrays: int, silos: int, rounds: int) -> None:
    """Raises OperationError: the model has not grown by `rounds` times the mean, all of it, in every array."""
    wanted = rounds * mean_of(silos)
    if row["arrays"] != arrays or any(abs(row[end] - wanted) > MEAN_TOLERANCE for end in ("least", "most")):
        raise OperationError(f"Flower: {row} is not {arrays} arrays of {wanted:g}")
