"""A program that was asked for JSON answers in one envelope, also where no command of its own could write it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable

import pytest
import typer

from fedsilo.cli.main import console_main, coordinator_main, fedsilo_main, silo_main
from fedsilo.cli.output import command, emit, in_one_envelope


def program() -> typer.Typer:
    app = typer.Typer()

    @command(app, "ask")
    def ask() -> None:
        answer = typer.prompt("which", err=True)
        emit({"answer": answer}, answer)

    @command(app, "asked")
    def asked() -> None:
        answer = typer.confirm("sure", err=True)
        emit({"answer": answer}, str(answer))

    @app.command()
    def other() -> None: ...

    return app


class Interrupted(io.StringIO):
    """A keyboard at which somebody presses Ctrl-C."""

    def readline(self, size: int | None = -1) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("typed", "words", "status", "code"),
    [
        ("yes\n", ["ask", "--json"], 0, None),
        ("", ["ask", "--json"], 1, "FAILED"),
        ("", ["ask", "--jsn", "--json"], 2, "INVALID_INPUT"),
    ],
    ids=["answered", "nobody answers", "no such option"],
)
def test_what_ends_a_command_is_answered_in_one_envelope(
    typed: str,
    words: list[str],
    status: int,
    code: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    monkeypatch.setattr(sys, "argv", ["program", *words])
    assert in_one_envelope(program(), "program") == status
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "fedsilo.cli/1" and answer["ok"] == (code is None)
    assert (answer["error"] and answer["error"]["code"]) == code


@pytest.mark.parametrize("word", ["ask", "asked"])
def test_control_c_at_a_question_ends_as_an_interrupt(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Interrupted())
    monkeypatch.setattr(sys, "argv", ["program", word, "--json"])
    assert in_one_envelope(program(), "program") == 130
    answer = json.loads(capsys.readouterr().out)
    assert (answer["command"], answer["error"]["code"]) == (word, "INTERRUPTED")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert in_one_envelope(program(), "program") == 0


def test_control_c_at_a_question_without_json_ends_with_the_same_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Interrupted())
    monkeypatch.setattr(sys, "argv", ["program", "asked"])
    with pytest.raises(SystemExit) as ended:
        program()()
    said = capsys.readouterr()
    assert ended.value.code == 130 and said.out.strip() == "" and "interrupted" in said.err


@pytest.mark.parametrize(
    ("main", "words", "command"),
    [
        (fedsilo_main, ["policy", "check"], "policy check"),
        (silo_main, ["status"], "silo status"),
        (coordinator_main, ["status"], "coordinator status"),
        (console_main, [], "fedconsole"),
    ],
)
@pytest.mark.parametrize("package", ["", "fedsilo.cli"], ids=["a program", "python -m"])
def test_a_usage_error_names_the_command_as_its_other_answers_do(
    main: Callable[[], None],
    words: list[str],
    command: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__package__", package)
    monkeypatch.setattr(sys, "argv", ["another name", *words, "--jsn", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert json.loads(capsys.readouterr().out)["command"] == command
