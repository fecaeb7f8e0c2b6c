"""What a shell completes: commands and options, of each program, as typer has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = "import sys; sys.argv = [{0!r}]; from fedsilo.cli import main as cli; cli.{1}_main()"
MAINS = {"fedsilo": "fedsilo", "silo": "silo", "coordinator": "coordinator", "fedconsole": "console"}


def answered(program: str, folder: Path, **environment: str) -> str:
    """What the program prints to a shell, in a process of its own."""
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program, MAINS[program])], cwd=folder, capture_output=True, text=True,
        check=True, env={**os.environ, "HOME": str(folder), **environment},
    )  # fmt: skip
    assert answer.stderr == ""
    return answer.stdout


def completed(line: str, folder: Path) -> list[str]:
    """What bash is offered for the last word of a line, by the completion protocol."""
    program, *words = line.split(" ")
    told = {"COMP_WORDS": line, "COMP_CWORD": str(len(words)), f"_{program.upper()}_COMPLETE": "complete_bash"}
    return answered(program, folder, **told).split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("fedsilo run sh", ["show"]),
        ("silo approvals ap", ["approve"]),
        ("coordinator silos l", ["list"]),
        ("silo approvals show --sch", ["--schema"]),
        ("fedsilo policy fm", []),
    ],
)
def test_commands_and_options_complete(line: str, offered: list[str], tmp_path: Path) -> None:
    assert completed(line, tmp_path) == offered


@pytest.mark.parametrize("program", MAINS)
def test_a_script_for_a_shell_can_be_shown(program: str, tmp_path: Path) -> None:
    script = answered(program, tmp_path, **{f"_{program.upper()}_COMPLETE": "source_bash"})
    assert f"_{program.upper()}_COMPLETE=complete_bash" in script
