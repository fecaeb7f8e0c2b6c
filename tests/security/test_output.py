"""One envelope, one place for errors, and no text from elsewhere that moves the terminal (T37)."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from fedsilo.launch.output import JsonOption, emit, envelope, guarded, plain, table
from fedsilo.treaty.errors import ConflictError, UnreachableError, VerificationError

app = typer.Typer()


@app.command()
@guarded("try it")
def try_it(how: str, json_output: JsonOption = False) -> None:
    if how == "conflict":
        raise ConflictError("changed \x1b[2J since", hint="look again", code="STALE_VIEW")
    if how == "away":
        raise UnreachableError("nobody answers")
    if how == "disk":
        raise FileNotFoundError(2, "No such file or directory", "/nowhere")
    if how == "bug":
        raise KeyError("a bug stays a bug")
    if how == "stop":
        raise KeyboardInterrupt
    error = VerificationError("one log does not verify") if how == "mixed" else None
    emit("try it", {"n": 1}, json_output=json_output, text=lambda: "n is 1", warnings=["w"], error=error)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_success_as_text_and_as_envelope() -> None:
    assert run("fine") == (0, "n is 1\n", "warning: w\n")
    code, out, err = run("fine", "--json")
    assert (code, err) == (0, "")
    expected = {"schema": "fedsilo.cli/1", "command": "try it", "ok": True, "data": {"n": 1}, "warnings": ["w"]}
    assert json.loads(out) == {**expected, "error": None}


def test_T37_an_error_is_two_lines_without_terminal_escapes() -> None:
    assert run("conflict") == (6, "", "error: changed <U+001B>[2J since [STALE_VIEW]\nhint: look again\n")


def test_errors_as_envelopes_carry_code_hint_and_whether_to_retry() -> None:
    code, out, _ = run("conflict", "--json")
    assert code == 6
    assert json.loads(out)["error"] == {
        "code": "STALE_VIEW",
        "message": "changed \x1b[2J since",
        "hint": "look again",
        "retryable": False,
    }
    code, out, _ = run("away", "--json")
    assert (code, json.loads(out)["error"]["retryable"]) == (3, True)


def test_data_and_failure_together() -> None:
    code, out, err = run("mixed")
    assert (code, out) == (7, "n is 1\n")
    assert err == "warning: w\nerror: one log does not verify [VERIFICATION_FAILED]\n"
    code, out, _ = run("mixed", "--json")
    answer = json.loads(out)
    assert (code, answer["ok"], answer["data"]) == (7, False, {"n": 1})
    assert len(out.splitlines()) == 1


def test_an_operating_system_error_names_its_file_and_a_bug_stays_one() -> None:
    assert run("disk") == (1, "", "error: /nowhere: No such file or directory [FAILED]\n")
    result = CliRunner().invoke(app, ["bug"])
    assert isinstance(result.exception, KeyError)
    assert run("stop")[0] == 130


def test_as_a_context_it_takes_the_choice_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, guarded("demo", json_output=True):
        raise ConflictError("no")
    assert caught.value.exit_code == 6
    assert json.loads(capsys.readouterr().out)["command"] == "demo"


def test_T37_plain_spells_out_what_would_act() -> None:
    assert plain("a\u202eb\u200bc\x9bd\re") == "a<U+202E>b<U+200B>c<U+009B>d<U+000D>e"
    assert plain("näher\tan\nGrün 漢字 ✓") == "näher\tan\nGrün 漢字 ✓"


def test_the_envelope_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        envelope("x", {"loss": float("nan")})


def test_a_table_lines_up() -> None:
    assert table(("name", "n"), [("a", 1), ("long", 22)]) == "name  n\na     1\nlong  22"
