"""Ctrl-C and starting again: nothing stays behind, and what was finished can be repeated bit for bit."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

from tests.loopback.federation import SHORT, command, demo, living, records

STOP_SECONDS_MAX = 30.0  # a few on an idle machine; a test suite is not one
POLL_SECONDS = 0.05


def test_ctrl_c_ends_every_process_and_a_second_demo_repeats_the_first_bit_for_bit(tmp_path: Path) -> None:
    same = ("--silos", "2", "--seed", "5", *SHORT)
    first = demo(tmp_path / "first", *same, "--rounds", "3", interrupt="round 2 of 3")
    assert first.reply.exit_code == 130 and first.reply.stdout == ""
    assert "interrupted" in first.reply.stderr and "Traceback" not in first.reply.stderr
    assert len(first.seen) >= 5 and living(first.seen) == []
    assert first.stop_seconds < STOP_SECONDS_MAX
    logs = [tmp_path / "first" / site / "state" / "audit" for site in ("hospital_a", "hospital_b", "coordinator")]
    assert command("fedsilo", "audit", "verify", *logs).exit_code == 0

    # Other processes and other keys, the same seed: the adapter is the same to the last bit.
    second = demo(tmp_path / "second", *same, "--rounds", "1", "--compare", "public-no-swap")
    assert second.data["state"] == "finished" and living(second.seen) == []
    again = second.record()["rounds"][0]
    with sqlite3.connect(tmp_path / "first" / "coordinator" / "state" / "coordinator.db") as database:
        (before,) = database.execute(
            "select adapter_digest from rounds where run like 'run-1%' and number = 1"
        ).fetchone()
    assert again["adapter_sha256"] == second.record()["adapter_sha256"] == before

    # And the control of `--compare` stands beside it, from the same start.
    compared = second.data["compared"]
    assert (compared["method"], compared["state"]) == ("public-no-swap", "finished")
    assert compared["pass_at_1"]["before"] == second.data["pass_at_1"]["before"]
    control = second.record("run-2")
    assert control["base_adapter_sha256"] == second.record()["base_adapter_sha256"]
    assert control["adapter_sha256"] != again["adapter_sha256"]
    left = {row["kind"] for row in control["traffic"] if row["direction"] == "in"}
    assert {"lora.factors", "metrics.eval"} <= left and "public.responses" not in left
    assert "public.responses" in {row["kind"] for row in second.record()["traffic"]}


def test_a_terminated_demo_takes_its_processes_along(tmp_path: Path) -> None:
    ended = demo(tmp_path / "out", "--silos", "1", interrupt="starting 1 silo", number=signal.SIGTERM)
    assert ended.reply.exit_code == 130 and "Traceback" not in ended.reply.stderr
    assert living(ended.seen) == []


def test_what_a_killed_demo_started_ends_by_itself_and_in_order(tmp_path: Path) -> None:
    killed = demo(tmp_path / "out", "--silos", "1", interrupt="processes run", number=signal.SIGKILL)
    assert killed.reply.exit_code == -signal.SIGKILL and len(killed.seen) >= 3  # coordinator, guard, trainer
    deadline = time.monotonic() + STOP_SECONDS_MAX
    try:
        while left := living(killed.seen):
            assert time.monotonic() < deadline, left
            time.sleep(POLL_SECONDS)
    finally:
        for process in killed.seen:
            if living({process}):
                os.kill(process[0], signal.SIGKILL)
    for site in ("hospital_a", "coordinator"):  # asked to end, not killed
        assert records(tmp_path / "out" / site / "state" / "audit")[-1]["event"] == "stop"
