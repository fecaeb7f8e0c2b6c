"""A program that was asked for JSON answers in one envelope, also where no command of its own could write it."""

from __future__ import annotations

import io
import json
import sys

import pytest
import typer

from fedsilo.launch.output import JsonOption, emit, in_one_envelope


def program() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    def ask(json_output: JsonOption = False) -> None:
        answer = typer.prompt("which", err=True)
        emit("ask", {"answer": answer}, json_output=json_output, text=answer)

    @app.command()
    def other() -> None: ...

    return app


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
    assert in_one_envelope(program()) == status
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "fedsilo.cli/1" and answer["ok"] == (code is None)
    assert (answer["error"] and answer["error"]["code"]) == code
