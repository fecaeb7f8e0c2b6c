"""Ctrl-C, a release that nobody answers, and starting again: nothing stays behind, and what was finished can be
repeated bit for bit."""

from __future__ import annotations

import os
import select
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from fcntl import ioctl
from pathlib import Path

import pytest

from tests.loopback.federation import ENVIRONMENT, LIMIT_SECONDS, SHORT, command, demo, descendants, living, records

STOP_SECONDS_MAX = 30.0  # a few on an idle machine; a test suite is not one
POLL_SECONDS = 0.05


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_terminated_demo_takes_its_processes_along(tmp_path: Path) -> None:
    ended = demo(tmp_path / "out", "--silos", "1", interrupt="starting 1 silo", number=signal.SIGTERM)
    assert ended.reply.exit_code == 130 and "Traceback" not in ended.reply.stderr
    assert living(ended.seen) == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_demo_whose_console_is_left_with_a_release_unanswered_says_how_to_answer_and_ends_as_held(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    main, there = os.openpty()
    ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 140, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "fedsilo.cli", "fedsilo", "demo", "--silos", "1", *SHORT, "--rounds", "1",
         "--answer-minutes", "0.1", "--out", str(out)],
        stdin=there, stdout=there, stderr=there, start_new_session=True,
        env={**os.environ, **ENVIRONMENT, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(there)
    shown, typed = b"", 0.0
    seen: set[tuple[int, int]] = set()
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, shown[-2000:]
            if select.select([main], [], [], 0.2)[0]:
                try:
                    shown += os.read(main, 1 << 16)
                except OSError:  # nobody has the terminal open any more
                    break
            if b"needs you" in shown and b"approvals approve" not in shown and time.monotonic() > typed + 1.0:
                seen |= descendants(process.pid)
                os.write(main, b"\x11")  # ctrl+q; what is typed while the terminal is being taken is lost
                typed = time.monotonic()
        assert process.wait(LIMIT_SECONDS) == 9
    finally:
        process.kill()
        os.close(main)
    told = shown.decode(errors="replace")
    assert f"approvals approve r1/hospital_a/0 --operator alice --config {out}/hospital_a/silo.yaml" in told
    assert "[HELD]" in told and seen and living(seen) == []
    # it was held and never sent, and each log was closed in order
    silo = records(out / "hospital_a" / "state" / "audit")
    assert not [line for line in silo if line["event"] == "egress.sent" and line["kind"] == "lora.factors"]
    for log in (silo, records(out / "coordinator" / "state" / "audit")):
        assert "stop" in [line["event"] for line in log]
