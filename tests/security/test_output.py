"""One envelope, one place for errors, and no text from elsewhere that moves the terminal (T37)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest
import typer
from typer.testing import CliRunner

import fedsilo
from fedsilo.cli import main as cli
from fedsilo.cli import run as cli_run
from fedsilo.cli.output import TRACEBACK_VARIABLE, command, emit, envelope, existing, facts_text, guarded, table
from fedsilo.cli.silo import status_text
from fedsilo.protocol.errors import ConflictError, NotFoundError, UnreachableError, VerificationError
from fedsilo.protocol.text import harmless
from tools.reference import programs

app = typer.Typer()


@command(app, "try it")
def try_it(how: str) -> None:
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
    emit({"n": 1}, lambda: "n is 1", warnings=["w"], error=error)


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
    assert run("conflict") == (6, "", "error: changed \\u001b[2J since [STALE_VIEW]\nhint: look again\n")


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


def test_an_operating_system_error_names_its_file_and_a_bug_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert run("disk") == (1, "", "error: /nowhere: No such file or directory [FAILED]\n")
    assert run("bug")[0] == 70
    monkeypatch.setenv(TRACEBACK_VARIABLE, "1")
    result = CliRunner().invoke(app, ["bug"])
    assert isinstance(result.exception, KeyError)
    assert run("stop")[0] == 130


def test_as_a_context_it_takes_the_choice_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as caught, guarded("demo", json_output=True):
        raise ConflictError("no")
    assert caught.value.exit_code == 6
    assert json.loads(capsys.readouterr().out)["command"] == "demo"


def test_T37_harmless_spells_out_what_would_act() -> None:
    assert harmless("a\u202eb\u200bc\x9bd\re\n", lines=True) == r"a\u202eb\u200bc\u009bd\re" + "\n"
    assert harmless("näher\tan\nGrün 漢字 ✓", lines=True) == "näher\tan\nGrün 漢字 ✓"


def test_the_envelope_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        envelope("x", {"loss": float("nan")})


def test_a_table_lines_up() -> None:
    assert table(("name", "n"), [("a", 1), ("long", 22)]) == "name  n\na     1\nlong  22"


@pytest.mark.parametrize("program", ["silo", "coordinator", "fedsilo", "fedconsole"])
def test_every_program_tells_its_version(program: str) -> None:
    command = dict(programs())[program]
    runner = click.testing.CliRunner()
    answer = runner.invoke(command, ["--version"])
    assert (answer.exit_code, answer.stdout) == (0, f"fedsilo {fedsilo.__version__}\n")
    assert runner.invoke(command, ["--versions"]).exit_code == 2


def test_a_path_that_the_caller_named_is_there_or_is_not_found(tmp_path: Path) -> None:
    assert existing(tmp_path) == tmp_path
    with pytest.raises(NotFoundError, match=r"nowhere\.yaml does not exist"):
        existing(tmp_path / "nowhere.yaml")


def test_facts_are_told_in_no_language_of_programmers() -> None:
    told = facts_text(
        {"silos": ["a", "b"], "by": {"a": 1, "b": None}, "late": False, "seconds": 1 / 3, "none": [], "reason": ""}
    )
    assert told == "silos=a,b by=a:1,b:- late=no seconds=0.333333 none=- reason=-"


class Told:
    """A coordinator's control socket, as far as `run watch` asks."""

    def __init__(self, before: str, after: str, rounds: tuple[str, ...] = ("committed",)) -> None:
        self.states, self.rounds = [before, after], rounds
        self.watched: list[int] = []

    def __enter__(self) -> Told:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def query(self, name: str, arguments: dict[str, str]) -> dict[str, Any]:
        state = self.states.pop(0)
        record = {"state": state, "reason": "ABORTED" if state == "aborted" else "", "ended_at": "2026-01-01T00:00:00Z"}
        return record | {"silo_errors": {}, "rounds": [{"state": done} for done in self.rounds]}

    def watch(self, after: int) -> Iterator[SimpleNamespace]:
        self.watched.append(after)
        for sequence, name, fields in (
            (1, "run.started", {"run": "first", "silos": ["hospital_a", "hospital_b"]}),
            (2, "run.started", {"run": "another", "silos": []}),
            (3, "run.ended", {"run": "first", "outcome": "finished", "reason": ""}),
        ):
            yield SimpleNamespace(sequence=sequence, time="T", name=name, fields=fields)


def test_watching_a_run_tells_its_events_and_of_one_that_has_ended_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(before: str, after: str, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(cli_run, "coordinator_client", lambda config, socket: Told(before, after))
        result = CliRunner().invoke(cli_run.app, ["watch", "first", *options])
        return result.exit_code, result.stdout, result.stderr

    live = "1 T run.started silos=hospital_a,hospital_b\n3 T run.ended outcome=finished reason=-\n"
    assert watched("running", "finished") == (0, live, "")
    code, out, _ = watched("finished", "finished")
    assert (code, out) == (
        0, "- 2026-01-01T00:00:00Z run.ended outcome=finished; `fedsilo run show first` shows its rounds\n"
    )  # fmt: skip
    code, out, _ = watched("finished", "finished", "--json")
    assert json.loads(out)["data"]["fields"] == {"run": "first", "outcome": "finished", "reason": ""}
    code, out, err = watched("aborted", "aborted")
    assert code == 1 and "run.ended outcome=aborted" in out and "has not finished: aborted ABORTED" in err


@pytest.mark.parametrize(
    ("rounds", "warning"),
    [
        (("committed", "committed"), ""),
        (("committed", "abandoned", "abandoned"), "warning: 1 of 3 rounds were committed: fedsilo run show first\n"),
    ],
)
def test_a_run_of_which_rounds_were_abandoned_is_not_said_to_be_whole(
    monkeypatch: pytest.MonkeyPatch, rounds: tuple[str, ...], warning: str
) -> None:
    monkeypatch.setattr(cli_run, "coordinator_client", lambda config, socket: Told("running", "finished", rounds))
    result = CliRunner().invoke(cli_run.app, ["watch", "first"])
    assert (result.exit_code, result.stderr) == (0, warning)


@pytest.mark.parametrize("how", ["gone", "ended its events", "gone before it is asked again"])
def test_a_watch_whose_coordinator_ends_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Killed, stopped in order, or stopped so that nobody answers what became of the run."""

    class Ended(Told):
        def watch(self, after: int) -> Iterator[SimpleNamespace]:
            yield SimpleNamespace(sequence=1, time="T", name="round.opened", fields={"run": "first", "round": 1})
            if how == "gone":
                raise UnreachableError("gone")

        def query(self, name: str, arguments: dict[str, str]) -> dict[str, Any]:
            if how == "gone before it is asked again" and len(self.states) == 1:
                raise UnreachableError("gone", hint="is it started?")
            return super().query(name, arguments)

    monkeypatch.setattr(cli_run, "coordinator_client", lambda config, socket: Ended("running", "running"))
    result = CliRunner().invoke(cli_run.app, ["watch", "first"])
    assert result.exit_code == 3 and result.stdout == "1 T round.opened round=1\n"
    assert "go on, once the coordinator answers, with: fedsilo run watch first --since 1" in result.stderr


def test_a_run_whose_end_is_among_the_events_that_are_missing_is_watched_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of it would come any more: without a look at its state the watch would wait for ever."""

    class Forgotten(Told):
        def watch(self, after: int) -> Iterator[SimpleNamespace]:
            self.watched.append(after)
            yield SimpleNamespace(sequence=7, time="T", name="events.missed", fields={"missed": 7 - after})
            yield SimpleNamespace(sequence=8, time="T", name="run.started", fields={"run": "another"})
            raise AssertionError("it waits on")

    told = Forgotten("running", "finished")
    told.states.append("finished")
    monkeypatch.setattr(cli_run, "coordinator_client", lambda config, socket: told)
    result = CliRunner().invoke(cli_run.app, ["watch", "first", "--since", "2"])
    assert (result.exit_code, told.watched) == (0, [2])
    missing, ended = result.stdout.splitlines()
    assert missing == "7 T events.missed 5 events are missing here: fedsilo run show first"
    assert "run.ended outcome=finished" in ended


def test_status_says_of_which_task_a_figure_is() -> None:
    state = {
        "held": [],
        "metrics": {
            "tokens": {"value": 274, "source": "local", "task": "PrivateStep", "round": 2, "step": 3},
            "seconds": {"value": 0.0029712, "source": "local", "task": "LoadAdapter", "round": 2, "step": 0},
        },
    }
    lines = [line.strip() for line in status_text(state).splitlines() if line.startswith("figure")]
    assert [" ".join(line.split()) for line in lines] == [
        "figure PrivateStep of round 2 step 3: tokens, tokens of the step's own answers; by round their sum: 274",
        "figure LoadAdapter of round 2: seconds, the whole task: 0.002971",
    ]


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"run": "r2", "round": 2, "rounds": 3, "step": 4, "last_run": {}}, "run r2 round 2 of 3 step 4"),
        (
            {"run": "", "step": 4, "last_run": {"run": "r1", "state": "finished"}},
            "run none is open; the last: r1, finished",
        ),
        ({"run": "", "last_run": {"run": "r1", "state": "left"}}, "run none is open; the last: r1, left by this silo"),
        (
            {"run": "", "last_run": {"run": "r1", "state": "running"}},
            "run r1 is not taken up: this silo starts, or is halted",
        ),
        ({"run": "", "step": 0, "last_run": {"run": "", "state": ""}}, "run none is open"),
    ],
)
def test_a_silo_in_no_run_shows_no_round_of_it(state: dict[str, Any], line: str) -> None:
    shown = [" ".join(row.split()) for row in status_text({"held": [], **state}).splitlines()]
    assert [row for row in shown if row.startswith("run ")] == [line]


@pytest.mark.parametrize(
    "words",
    [("polcy", "check"), ("audit", "verify"), ("audit", "tail", "-n", "0"), ("audit", "show", "\x1b[2J")],
    ids=["no such command", "argument missing", "value out of range", "escapes in a value"],
)
def test_T37_a_command_line_that_is_not_understood_is_answered_in_json_where_json_was_asked_for(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fedsilo", *words, "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.fedsilo_main()
    told, other = capsys.readouterr()
    answer = json.loads(told)
    assert (ended.value.code, answer["ok"], answer["error"]["code"], other) == (2, False, "INVALID_INPUT", "")
    assert "\x1b" not in told
