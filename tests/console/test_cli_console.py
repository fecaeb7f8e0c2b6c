"""`fedconsole` without a terminal, and what importing it costs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from console.app import FedConsole, screen_text
from console.base import Arrived
from console.feed import Store, connect_to
from console.orders import approval
from console.recording import RecordingFile, Replay
from fedsilo.cli.console import app, theme_named
from fedsilo.control.client import Snapshot as Reading
from fedsilo.protocol.errors import UnreachableError, UsageError
from tests.console import states
from tests.console.commands import Site


def test_importing_the_command_loads_neither_textual_nor_grpc() -> None:
    code = "import sys, fedsilo.cli.console; print([m for m in ('textual', 'grpc', 'torch') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--socket", "nowhere.sock"], 2, "silo approvals"),  # without a terminal it names its twin
        ([], 2, ""),
        (["--context", "silo=x"], 2, ""),
        (["--socket", "a", "--context", "silo:a=b"], 2, ""),
        (["--socket", "no.sock", "--once"], 3, "does not exist"),
        (["--replay", "b.fedrec"], 2, ""),
        (["--replay", "b.fedrec", "--once"], 8, ""),
        (["--replay", "a.fedrec", "--once"], 2, "a.fedrec:1"),
        (["--replay", "a", "--socket", "b", "--once"], 2, ""),
        (["--replay", "a", "--record", "b", "--once"], 2, ""),
        (["--socket", "a", "--speed", "3", "--once"], 2, ""),
        (["--socket", "a", "--at", "3", "--once"], 2, ""),
        (["--socket", "a", "--include-local", "LOCAL", "--once"], 2, ""),
        (["--socket", "a", "--screen", "3"], 2, ""),
        *((["--socket", "a", "--once", "--record", "c", "--include-local", word], 2, "LOCAL")
          for word in ("yes", "local", "LOCAL ")),
    ],
)  # fmt: skip
def test_what_is_no_call_of_it_is_refused_and_writes_nothing(
    words: list[str], status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.fedrec").write_text("{}\n")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == status and says in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.fedrec"]


def test_once_prints_the_overview_and_ends(site: Site) -> None:
    result = CliRunner().invoke(app, ["--context", f"silo:hospital_a={site.socket}", "--once"])
    assert result.exit_code == 0, result.stderr
    for word in ("r1/hospital_a/0 held: lora.factors", "public.responses", "round 1 of 3"):
        assert word in result.stdout
    wrong = CliRunner().invoke(app, ["--context", f"silo:other={site.socket}", "--once"])
    assert wrong.exit_code == 6
    as_json = json.loads(CliRunner().invoke(app, ["--socket", str(site.socket), "--json"]).stdout)
    assert as_json["ok"] and as_json["data"]["state"]["held"][0]["id"] == "r1/hospital_a/0"


def test_once_prints_a_recording_without_a_daemon(site: Site, tmp_path: Path) -> None:
    recording = tmp_path / "a.fedrec"
    live = ["--socket", str(site.socket), "--once", "--record", str(recording)]
    made = CliRunner().invoke(app, [*live, "--include-local", "LOCAL"])
    assert made.exit_code == 0, made.stderr
    assert "RECORDING" in made.stdout
    again = CliRunner().invoke(app, ["--replay", str(recording), "--once"])
    assert again.exit_code == 0, again.stderr
    assert "REPLAY" in again.stdout and "WITH LOCAL DATA" in again.stdout
    assert "r1/hospital_a/0 held: lora.factors" in again.stdout
    old = tmp_path / "old.fedrec"
    old.write_text(re.sub(r'"time":"[^"]+"', '"time":"2001-01-01T00:00:00.000Z"', recording.read_text()))
    shown = CliRunner().invoke(app, ["--replay", str(old), "--once"]).stdout
    assert "2001-01-01" in shown and "clocks differ" not in shown
    held = CliRunner().invoke(app, ["--replay", str(recording), "--once", "--screen", "3"])
    for word in ("42 tensors", "every rule\n", "L2 of the delta", "coordinator.example:7443"):
        assert word in held.stdout
    as_json = json.loads(CliRunner().invoke(app, ["--replay", str(recording), "--json"]).stdout)
    assert as_json["data"]["state"]["held"][0]["id"] == "r1/hospital_a/0" and "REPLAY" in as_json["data"]["told"]
    assert CliRunner().invoke(app, [*live]).exit_code == 6  # it replaces no file
    safe = tmp_path / "b.fedrec"
    assert CliRunner().invoke(app, [*live[:-1], str(safe)]).exit_code == 0
    without = CliRunner().invoke(app, ["--replay", str(safe), "--once", "--screen", "3"]).stdout
    assert "r1/hospital_a/0" in without and "42 tensors" not in without and "every rule" not in without


def test_a_screen_is_drawn_without_a_terminal(site: Site) -> None:
    text = screen_text(connect_to(site.socket), "1", lambda: "as told", cells=100, rows=30)
    assert "r1/hospital_a/0" in text and "as told" in text
    assert len(text.splitlines()) == 30 and max(map(len, text.splitlines())) <= 100
    drawn = CliRunner().invoke(app, ["--socket", str(site.socket), "--once", "--screen", "77"])
    assert drawn.exit_code == 2 and "1 overview" in drawn.stderr
    with pytest.raises(UnreachableError):
        screen_text(connect_to(site.folder / "no.sock"), "1", str, cells=100, rows=30)


async def test_the_console_of_a_replay_says_so_pauses_and_unlocks_nothing(tmp_path: Path) -> None:
    path, now = tmp_path / "a.fedrec", [0.0]
    file = RecordingFile(path, include_local=True, clock=lambda: now[0])
    file.snapshot(Reading(7, "2026-12-01T10:00:00.000Z", states.POLICY_DIGEST, states.silo(states.release())))
    now[0] = 600.0
    file.close()
    replay = Replay(path, clock=lambda: now[0])
    console = FedConsole(banner=replay.banner, replay=replay, driven_by_hand=True, clock=lambda: now[0])
    async with console.run_test(size=(140, 42)) as pilot:
        store = Store()
        store.read(replay.snapshot(), now[0], wall_time=replay.wall_time())
        console.post_message(Arrived(store.snapshot))
        await pilot.pause()

        def bar() -> str:
            return "".join(part.text for part in console.screen._compositor.render_strips()[0])

        assert "REPLAY 00:00 of 10:00 x1" in bar() and "READ-ONLY" in bar()
        await pilot.press("full_stop")
        now[0] += 50.0
        assert replay.paused and replay.position == 0.0
        await pilot.press("greater_than_sign", "greater_than_sign", "less_than_sign")
        assert replay.position == 10.0
        await pilot.press("full_stop")
        now[0] += 5.0
        assert replay.position == 15.0 and "REPLAY 00:15" in replay.banner()
        await pilot.press("L")
        now[0] += 1.0
        console.settle_keys()
        assert not console.lock.open and "read-only" in console.why_not_send(approval(store.snapshot.held[0]))


def test_a_theme_may_be_named_without_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert [theme_named(name) for name in ("light", "dark", "mono", "fed-light")] == [
        "fed-light", "fed-dark", "fed-mono", "fed-light"]  # fmt: skip
    assert theme_named("") == "fed-dark"
    monkeypatch.setenv("NO_COLOR", "1")
    assert theme_named("") == "fed-mono" and theme_named("light") == "fed-light"
    for wrong in ("pink", "fed-pink", "fed-", "fed-fed-dark"):
        with pytest.raises(UsageError, match="there is no theme"):
            theme_named(wrong)
