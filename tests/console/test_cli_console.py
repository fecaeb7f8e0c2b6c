"""`fedconsole` without a terminal, and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from textual.color import Color
from typer.testing import CliRunner

from console.themes import THEMES
from fedsilo.launch.cli_console import app
from tests.console.test_real_desk import Site, site

__all__ = ["site"]  # a fixture is found by its name


def test_importing_the_command_loads_neither_textual_nor_grpc() -> None:
    code = (
        "import sys, fedsilo.launch.cli_console; print([m for m in ('textual', 'grpc', 'torch') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_without_a_terminal_it_names_its_twin() -> None:
    result = CliRunner().invoke(app, ["--socket", "nowhere.sock"])
    assert result.exit_code == 2 and "silo approvals" in result.stderr and "--once" in result.stderr


@pytest.mark.parametrize("arguments", [[], ["--context", "silo=x"], ["--socket", "a", "--context", "silo:a=b"]])
def test_whose_console_must_be_said(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_once_prints_the_overview_and_ends(site: Site) -> None:
    result = CliRunner().invoke(app, ["--context", f"silo:hospital_a={site.socket}", "--once"])
    assert result.exit_code == 0, result.stderr
    for word in ("r1/hospital_a/0 held: lora.factors", "public.responses", "round 1 of 3"):
        assert word in result.stdout
    wrong = CliRunner().invoke(app, ["--context", f"silo:other={site.socket}", "--once"])
    assert wrong.exit_code == 6
    as_json = json.loads(CliRunner().invoke(app, ["--socket", str(site.socket), "--json"]).stdout)
    assert as_json["ok"] and as_json["data"]["state"]["held"][0]["id"] == "r1/hospital_a/0"


def test_once_says_that_nobody_answers(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--socket", str(tmp_path / "no.sock"), "--once"])
    assert result.exit_code == 3 and "does not exist" in result.stderr


def _luminance(text: str) -> float:
    parts = [value / 255 for value in Color.parse(text).rgb]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", THEMES)
def test_every_state_colour_can_be_read_on_every_ground(name: str) -> None:
    theme = THEMES[name]
    inks = [theme.success, theme.warning, theme.error, theme.accent, theme.foreground, theme.variables["muted"]]
    for ground in (theme.background, theme.surface, theme.panel):
        for ink in inks:
            light, dark = sorted((_luminance(str(ink)), _luminance(str(ground))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ink, ground)
