"""What a command does when the other end of stdout or stderr fails: real processes, /dev/full, closed descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fedsilo.cli.output import command
from fedsilo.demo.playing import RECORDING

FULL = Path("/dev/full")  # each write to it fails as on a full disk
LOST = "the answer could not be written to stdout"


def fedsilo(
    *words: str, out: int, err: int = subprocess.PIPE, closes: Callable[[], None] | None = None
) -> tuple[int, str]:
    """Exit status, and what stood on stderr."""
    ended = subprocess.run(
        [sys.executable, "-m", "fedsilo.cli", "fedsilo", *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        text=True, check=False, timeout=60, preexec_fn=closes,
    )  # fmt: skip
    return ended.returncode, ended.stderr or ""


def lost(told: str, why: str) -> bool:
    """Whether stderr has the one line of an answer that could not be written, and its hint."""
    line, hint = told.splitlines()
    return line.startswith(f"error: {LOST}: {why}") and line.endswith("[OUTPUT_LOST]") and hint.startswith("hint: ")


VERSION = (("version",), ("version", "--json"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [*VERSION, ("--help",), ("version", "--schema"), ("nonsense", "--json")])
def test_a_full_disk_ends_with_one_line_and_its_hint_and_a_reader_that_went_away_is_no_news(
    words: tuple[str, ...],
) -> None:
    with FULL.open("wb") as full:
        status, told = fedsilo(*words, out=full.fileno())
    assert status == 1 and lost(told, "No space left"), told
    reading, writing = os.pipe()
    os.close(reading)
    status, told = fedsilo(*words, out=writing)
    os.close(writing)
    assert (status, told) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_an_error_is_told_on_stderr_when_stdout_takes_nothing(form: tuple[str, ...], tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.yaml")
    with FULL.open("wb") as full:
        status, told = fedsilo("config", "show", missing, *form, out=full.fileno())
        assert status == 8 and f"error: {missing}" in told and "Traceback" not in told
        again = fedsilo("config", "show", missing, *form, out=full.fileno(), err=full.fileno())
        assert again == (8, "")  # nowhere left to tell it


@pytest.mark.slow
@pytest.mark.parametrize("words", VERSION)
def test_a_closed_stdout_is_told_and_takes_no_number_of_a_file(words: tuple[str, ...]) -> None:
    status, told = fedsilo(*words, out=subprocess.DEVNULL, closes=lambda: os.close(1))
    assert status == 1 and lost(told, "Bad file descriptor")
    assert fedsilo("version", "--quiet", out=subprocess.DEVNULL, closes=lambda: os.close(1)) == (0, "")
    closes: Callable[[], None] = lambda: os.closerange(0, 3)  # noqa: E731
    assert fedsilo("config", "show", "/nowhere", out=subprocess.DEVNULL, closes=closes)[0] == 8


def test_a_folder_in_place_of_a_file_is_wrong_usage(tmp_path: Path) -> None:
    app = typer.Typer()

    @command(app, "planted")
    def planted(path: Path) -> None:
        path.read_text()

    answer = CliRunner().invoke(app, [str(tmp_path)])
    assert answer.exit_code == 2
    assert answer.stderr == f"error: {tmp_path}: this is a folder, where a file is needed [INVALID_INPUT]\n" + (
        "hint: name a file in it\n"
    )
    (tmp_path / "file").write_text("text")
    assert CliRunner().invoke(app, [str(tmp_path / "file" / "below")]).exit_code == 2
    assert CliRunner().invoke(app, [str(tmp_path / "file")]).exit_code == 0


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "cp437"])
@pytest.mark.parametrize("screen", ["1", "2", "3"])
def test_a_terminal_without_unicode_gets_ascii(encoding: str, screen: str) -> None:
    words = ["fedconsole", "--once", "--screen", screen, "--replay", str(RECORDING)]
    ended = subprocess.run(
        [sys.executable, "-m", "fedsilo.cli", *words], capture_output=True, check=False, timeout=60,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert b"hospital_a" in ended.stdout and ended.stdout.isascii() and b"\\u2" not in ended.stdout


@pytest.mark.parametrize(("encoding", "written"), [("latin-1", b"a \\u2192 \xe9"), ("utf-8", "a \u2192 \xe9".encode())])
def test_no_answer_fails_for_a_sign_that_the_terminal_lacks(encoding: str, written: bytes) -> None:
    program = "from fedsilo.cli.output import *; open_all(); "
    program += "write_out('a ' + chr(0x2192) + ' ' + chr(0xe9) + ' ' + chr(0xdcff))"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, timeout=60,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )  # fmt: skip
    assert ended.stdout == written + b" \\udcff"
