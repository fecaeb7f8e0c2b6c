"""Two real coordinators on one PostgreSQL database: the second is refused, and takes over when the first is killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.main import Ready
from fedsilo.control.client import ControlClient
from fedsilo.demo.provision import init_ca, provision_site
from fedsilo.protocol import codec
from fedsilo.protocol._generated import federation_pb2 as pb
from tests.coordinator_folder import write_coordinator
from tests.loopback.test_coordinator_server import exchange, hello
from tests.postgres_server import PostgresServer

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 120
PASSWORD = "S3CRET"  # the server asks for none
ENDED = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname <> current_database()"
PROGRAM = "from fedsilo.cli.coordinator import app; app()"


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, postgresql_url: str) -> Path:
    """One federation; its coordinator's folder, and that of a standby with the same keys and another state folder."""
    folder = tmp_path_factory.mktemp("fs")
    init_ca(folder / "ca", name="cardio-net", kind="federation")
    provision_site(
        folder / "main", site="main", federation_ca=folder / "ca", people={"alice": ["operator"]}, is_coordinator=True
    )
    provision_site(
        folder / "hospital_a", site="hospital_a", federation_ca=folder / "ca", people={},
        coordinator_public_key=(folder / "main" / "id" / "coordinator.pub").read_bytes(),
    )  # fmt: skip
    config = write_coordinator(folder / "main", ["hospital_a"])
    url = postgresql_url.replace("@", f":{PASSWORD}@")
    config.write_text(f"{config.read_text()}database: {url}\n")
    shutil.copytree(folder / "main", folder / "standby")
    return folder


@contextlib.contextmanager
def started(config: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """`coordinator start`, and its one line; killed at the end, if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "start", "--config", str(config), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        said = ""
        try:
            for line in process.stdout:
                said += line
                if line.startswith("{"):
                    break
            yield process, {"said": said, **json.loads(said.splitlines()[-1])}
        finally:
            process.kill()
            process.wait(LIMIT_SECONDS)


def test_T29_T42_a_standby_is_kept_out_until_the_first_coordinator_is_killed_and_then_knows_all(
    site: Path, postgresql: PostgresServer
) -> None:
    main, standby = site / "main", site / "standby"
    with started(main / "coordinator.yaml") as (first, answer):
        ready = Ready(**answer["data"])
        for sequence in (1, 2):
            envelope, _ = exchange(site, ready, "hospital_a", "control.hello", hello(site), sequence)
            assert envelope.kind == "control.ack"
        with started(standby / "coordinator.yaml") as (second, refused):
            assert second.wait(LIMIT_SECONDS) == 6
        assert refused["error"]["code"] == "DATABASE_IN_USE" and f" {first.pid} " in refused["error"]["message"]
        assert refused["error"]["hint"] and PASSWORD not in refused["said"] + answer["said"]
        exchange(site, ready, "hospital_a", "control.heartbeat", pb.Heartbeat(), 3)  # the first goes on undisturbed
        first.kill()
        first.wait(LIMIT_SECONDS)

    shutil.copytree(main / "state" / "audit", standby / "state" / "audit")
    with started(standby / "coordinator.yaml") as (second, answer):
        ready = Ready(**answer["data"])
        with ControlClient(Path(ready.control_socket)) as client:
            assert [row["state"] for row in client.query("silos")] == ["not_heard_yet"]
        # what the first acknowledged is not taken again, and what comes next is
        _, payload = exchange(site, ready, "hospital_a", "control.heartbeat", pb.Heartbeat(), 3)
        assert codec.decode(pb.Refusal, payload).code == "SEQUENCE_REPLAYED"
        envelope, _ = exchange(site, ready, "hospital_a", "control.heartbeat", pb.Heartbeat(), 4)
        assert envelope.kind == "control.ack" and PASSWORD not in answer["said"]

        # the server ends its connections: it halts, says so although it can read nothing, and ends cleanly
        with ControlClient(Path(ready.control_socket)) as client:
            assert client.snapshot().state["halted"] == ""
            postgresql.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname <> current_database()"
            )
            assert next(event for event in client.watch(0) if event.name == "halt")
            limit = time.monotonic() + LIMIT_SECONDS
            while (state := client.snapshot().state)["halted"] != "DATABASE_LOST":
                assert time.monotonic() < limit
            assert [row["state"] for row in state["silos"]] == ["joined"]
        second.terminate()
        assert second.wait(LIMIT_SECONDS) == 0
