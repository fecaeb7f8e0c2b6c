"""T41 with real processes: the clock of a running silo jumps by 400 days, is right again, and one order ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.chaos_federation import COORDINATOR, LIMIT_SECONDS, STOP_SECONDS, Federation, federation, until
from benchmarks.chaos_tracer import why_not
from fedsilo.audit.reader import read_records

pytestmark = pytest.mark.slow

SILO, DAY = "hospital_a", 86_400.0
RECORDS = "fdatasync state/audit/*.jsonl"  # the call by which each record is durable


def clock(made: Federation) -> dict[str, Any]:
    state = made.state(SILO) or {}
    return {
        "halted": state.get("halted", ""),
        "link": state.get("coordinator", {}).get("link"),
        **state.get("clock", {}),
    }


def accept(made: Federation, person: str, *shown: str) -> int:
    command = [
        "silo", "resume", "--accept-clock", "--operator", person, "--config", str(made.site[SILO].config), *shown,
    ]  # fmt: skip
    return subprocess.run([sys.executable, "-m", "fedsilo.cli", *command], check=False).returncode


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_T41_a_real_coordinator_whose_clock_jumped_says_so_and_goes_on_by_the_time_that_has_passed(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    def off() -> int:
        return int((made.state(COORDINATOR) or {}).get("clock", {}).get("ahead_seconds", 0))

    with federation(tmp_path) as made:
        # its third record, before it is idle: empty polls share one
        made.lives[COORDINATOR].orders = [{"clock": {"label": RECORDS, "occurrence": 3, "seconds": 400 * DAY}}]
        made.start(COORDINATOR)
        made.start(SILO)
        assert until(lambda: off() > 399 * DAY, LIMIT_SECONDS), made.last_words(COORDINATOR)
        assert until(lambda: clock(made)["link"] == "live" and not clock(made)["halted"], LIMIT_SECONDS)
        folder = made.site[COORDINATOR].folder / "state" / "audit"
        assert until(lambda: any(record["event"] == "clock.jump" for record in read_records(folder)), LIMIT_SECONDS)
        records = list(read_records(folder))
        assert max(record["t"] for record in records) / 1000 < time.time() + 60
        (jump,) = [record["detail"] for record in records if record["event"] == "clock.jump"]
        assert jump["followed"] is False and jump["forward_milliseconds"] > 399 * DAY * 1000
        assert made.stop() == []


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")
def test_T41_a_real_silo_whose_clock_jumped_is_halted_over_a_restart_and_goes_on_when_accepted(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    with federation(tmp_path) as made:
        made.lives[SILO].orders = [{"clock": {"label": RECORDS, "occurrence": 6, "seconds": 400 * DAY}}]
        made.start(COORDINATOR)
        made.start(SILO)
        assert until(lambda: bool(clock(made)["halted"]), LIMIT_SECONDS), made.last_words(SILO)
        assert clock(made)["halt"]["code"] == "CLOCK_AHEAD" and "400 d" in clock(made)["halted"]
        made.processes[SILO].send_signal(signal.SIGTERM)
        made.processes[SILO].wait(STOP_SECONDS)
        made.calls(SILO)
        assert [each["struck"] for each in made.lives[SILO].struck] == ["clock"]

        made.start(SILO)  # with the right clock
        assert until(lambda: bool(clock(made)["halted"]), LIMIT_SECONDS), made.last_words(SILO)
        assert accept(made, "alice") == 2  # nobody signs what was not shown, and no terminal is here to show it
        digest = clock(made)["halt"]["digest"]
        assert accept(made, "nobody", "--expect-digest", digest) != 0
        assert accept(made, "alice", "--expect-digest", "ab" * 32) == 6
        assert accept(made, "alice", "--expect-digest", digest) == 0
        assert until(lambda: clock(made)["link"] == "live" and not clock(made)["halted"], LIMIT_SECONDS)
        # no record was made by the wrong time
        folder = made.site[SILO].folder / "state" / "audit"
        records = list(read_records(folder))
        assert max(record["t"] for record in records) / 1000 < time.time() + 60
        # once a process, unless a person was faster than its loop
        halts = [record["reasons"] for record in records if record["event"] == "halt"]
        assert halts in ([["CLOCK_AHEAD"]], [["CLOCK_AHEAD"]] * 2)
        assert [record["detail"]["person"] for record in records if record["event"] == "clock.accept"] == ["alice"]
        assert made.stop() == []
