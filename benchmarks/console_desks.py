"""The daemons that `benchmarks.console` looks at: `python -m benchmarks.console_desks coordinator|silo FOLDER`.

Each has the real control desk behind the real server on a unix socket, in this process of its own. At the coordinator
stand 50 silos, each of which takes a step twice a second; at the silo a log of 100,000 records with the guard's own
queries over it. Both publish 1,000 events a second. What is made up is who says it: no run and no guard's loop stands
behind them.

It prints `ready` once it serves, and ends with one line of JSON when its input is closed: events published, seconds,
processor seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from certs.authority import create_ca
from certs.roles import Roles
from fedsilo.control.server import ControlServer

SOCKET = "c.sock"
SILOS = 50
IN_TROUBLE = ("silo_07", "silo_23", "silo_41")
EVENTS_PER_SECOND = 1000
STATE_SECONDS = 0.5
ROUND_SECONDS = 10.0
RECORDS = 100_000
SLICE_SECONDS = 0.01


def desk_of(site: str) -> ControlServer:
    now = datetime.now(UTC)
    authority = create_ca(site, kind="site", not_before=now - timedelta(days=1), days=30)
    roles = Roles(site, {"alice": frozenset({"approver"})})
    return ControlServer(site, authority.certificate_pem, roles, lambda: datetime.now(UTC))


def _moment() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


# ---- a coordinator of 50 silos ---------------------------------------------------------------------


def coordinator_state(step: int, round_number: int) -> dict[str, Any]:
    """As `coordinator.control.Control.state` makes it."""
    names = [f"silo_{number:02d}" for number in range(SILOS)]
    members = [
        {
            "silo": name, "state": "joined", "since": "", "last_seen": _moment(), "round": round_number,
            "step": step % 64, "error": "OUT_OF_MEMORY" if name in IN_TROUBLE else "",
            "hello": {"isolation": "namespaces"}, "refusal": None,
        }
        for name in names
    ]  # fmt: skip
    run = {
        "run": "run-1", "state": "running", "reason": "", "method": "pubswap", "round": round_number, "rounds": 400,
        "silos": names,
    }  # fmt: skip
    return {
        "party": "coordinator", "coordinator": "hub", "site": "consortium", "federation": "cardio-net",
        "address": "127.0.0.1:7443", "state_dir": "/var/lib/fedsilo", "halted": "", "runs": [run], "silos": members,
    }  # fmt: skip


def run_record(rounds: int) -> dict[str, Any]:
    """As much of a run's record as the console reads, for every round so far."""
    names = [f"silo_{number:02d}" for number in range(SILOS)]
    figures = {name: {"pass_at_1": {"": 0.4}, "reward_mean": {"": 0.5}} for name in names}
    return {
        "run": "run-1", "before": {"metrics": figures},
        "rounds": [{"number": number, "state": "committed", "metrics": figures} for number in range(1, rounds)],
        "traffic": [
            {"silo": name, "direction": way, "kind": kind, "messages": 9, "bytes": 2_000_000}
            for name in names for way in ("in", "out") for kind in ("lora.factors", "public.responses")
        ],
    }  # fmt: skip


class Coordinator:
    """A desk whose state is told anew twice a second."""

    def __init__(self, folder: Path) -> None:
        from fedsilo.control.socket_server import ControlSocket

        self.desk = desk_of("consortium")
        self._round = 1
        self._step = 0
        self.desk.register_query("run", lambda _: run_record(self._round))
        self.tell(0.0)
        self._server = ControlSocket(self.desk, folder / SOCKET, "no-such-group", log=logging.getLogger()).start()

    def tell(self, seconds: float) -> None:
        self._step += 1
        self._round = 1 + int(seconds / ROUND_SECONDS)
        self.desk.set_state(coordinator_state(self._step, self._round), policy_digest="9f2c" * 16)

    def event(self, number: int) -> tuple[str, dict[str, Any]]:
        silo = f"silo_{number % SILOS:02d}"
        if number % 20 == 0:
            return "silo.joined", {"silo": silo, "boot": f"{number:016x}"}
        return "step.done", {"silo": silo, "round": self._round, "step": number % 64, "waiting": SILOS - number % SILOS}

    def close(self) -> None:
        self.desk.close()
        self._server.stop(None)


# ---- a silo with a long log ------------------------------------------------------------------------


class Silo:
    """The queries of a guard over a real gate and a long log; every query is the guard's own."""

    def __init__(self, folder: Path) -> None:
        from fedsilo.control.socket_server import ControlSocket
        from tests.console.states import POLICY_DIGEST, release, silo
        from tests.policies import setting
        from tests.simulated.queries import asked_of, long_log
        from tests.world import Bench

        self.desk = desk_of("hospital_a")
        bench = Bench(folder / "bench", setting.policy_of(setting.policy_text()))
        bench.audit.close()
        bench.audit = long_log(folder / "log", RECORDS)
        for name, handler in asked_of(bench).handlers().items():
            self.desk.register_query(name, handler)
        self._state = silo(release()) | {"audit": {"size": bench.audit.size}}
        self._digest = POLICY_DIGEST
        self.tell(0.0)
        self._server = ControlSocket(self.desk, folder / SOCKET, "no-such-group", log=logging.getLogger()).start()

    def tell(self, seconds: float) -> None:
        self.desk.set_state(self._state | {"step": int(seconds) % 8}, policy_digest=self._digest)

    def event(self, number: int) -> tuple[str, dict[str, Any]]:
        return "task.done", {"task": "PrivateStep", "round": 1, "step": number % 8, "metrics": {"reward_mean": 0.4}}

    def close(self) -> None:
        self.desk.close()
        self._server.close()


KINDS: dict[str, Callable[[Path], Coordinator | Silo]] = {"coordinator": Coordinator, "silo": Silo}


def publish(daemon: Coordinator | Silo, ended: threading.Event, per_second: int) -> tuple[int, float]:
    """Events at that rate, and the state twice a second, until told to end; a slice that was missed is made up for."""
    begun, published, told = time.monotonic(), 0, 0.0
    while not ended.wait(SLICE_SECONDS):
        gone = time.monotonic() - begun
        if gone - told >= STATE_SECONDS:
            told = gone
            daemon.tell(gone)
        while published < gone * per_second:
            daemon.desk.publish(*daemon.event(published))
            published += 1
    return published, time.monotonic() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("folder", type=Path, help="empty; its path must leave room for a socket's name")
    parser.add_argument("--events", type=int, default=EVENTS_PER_SECOND, help="published a second")
    options = parser.parse_args()
    daemon = KINDS[options.kind](options.folder)
    print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    before = time.process_time()
    published, seconds = publish(daemon, ended, options.events)
    daemon.close()
    told = {"published": published, "seconds": seconds, "cpu_seconds": time.process_time() - before}
    print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
