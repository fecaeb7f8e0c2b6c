"""Ctrl-C and starting again: nothing stays behind, and what was finished can be repeated bit for bit."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path

from tests.loopback.federation import command, demo, living

STOP_SECONDS_MAX = 30.0  # a few on an idle machine; a test suite is not one


def test_ctrl_c_ends_every_process_and_a_second_demo_repeats_the_first_bit_for_bit(tmp_path: Path) -> None:
    same = ("--silos", "2", "--seed", "5")
    first = demo(tmp_path / "first", *same, "--rounds", "2", interrupt="round 2 of 2")
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
