"""Every command of the four programs keeps the contract: --schema, --quiet, --no-color, --timeout, --dry-run."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest
import typer
from typer.testing import CliRunner

from certs.roles import ACTIONS
from console import actions
from fedsilo.cli.contract import ALWAYS, COMMANDS, EXIT_MEANINGS, commands_below, schema_of
from fedsilo.cli.output import command as register
from fedsilo.cli.output import emit
from fedsilo.protocol.errors import FedSiloError, UsageError
from tools.reference import programs

TREES = dict(programs())
FILTERS: set[str] = set()  # commands whose output is their data, one JSON object a line, and that take no --json
HELP_SECONDS_MAX = 0.3


def _commands() -> Iterator[tuple[str, Any]]:
    for program, tree in TREES.items():
        for words, command in commands_below(tree, (program,)):
            yield " ".join(words), command


def lacking(found: dict[str, Any]) -> list[str]:
    """What is missing in the table, stands there for no command, or does not have an option that it promises."""
    told = [f"{name}: not in the table" for name in found if name not in COMMANDS]
    told += [f"{name}: no such command" for name in COMMANDS if name not in found]
    for name, command in found.items():
        flags = {flag for each in command.params for flag in each.opts}
        facts = COMMANDS.get(name)
        wanted = {"--schema", "--quiet", "--no-color"} | ({"--json"} - ({"--json"} if name in FILTERS else set()))
        if facts is not None and facts.changes:
            wanted.add(facts.dry_run)
        if facts is not None and facts.waits:
            wanted.add("--timeout")
        told += [f"{name}: {flag}" for flag in sorted(wanted - flags)]
    return told


def test_a_schema_tells_types_choices_defaults_and_repetition() -> None:
    found = dict(_commands())
    told = schema_of("fedsilo certs ca-init", found["fedsilo certs ca-init"])
    assert told["arguments"][0] | {"help": ""} == {
        "name": "NAME", "type": "text", "required": True, "default": None, "multiple": False, "help": "",
    }  # fmt: skip
    options = {each["name"]: each for each in told["options"]}
    assert options["kind"]["choices"] == ["federation", "site"] and options["kind"]["required"]
    assert (options["days"]["type"], options["days"]["default"]) == ("integer", 365)
    listed = schema_of("silo init", found["silo init"])
    assert {each["name"]: each for each in listed["options"]}["person"]["multiple"]
    for program in ("silo", "coordinator", "fedsilo"):  # a program tells all its schemas at once
        answer = click.testing.CliRunner().invoke(TREES[program], ["--schema"], prog_name=program)
        names = {each["name"] for each in json.loads(answer.stdout)["data"]["commands"]}
        assert names == {name for name in COMMANDS if name.split(" ")[0] == program}


def test_a_command_that_is_not_in_the_table_is_noticed() -> None:
    app = typer.Typer()

    @register(app, "planted")
    def planted() -> None: ...

    found = dict(_commands()) | {"fedsilo planted": typer.main.get_command(app)}
    assert lacking(found) == ["fedsilo planted: not in the table"]
    del found["fedsilo planted"]
    found["silo pause"] = found["silo status"]  # which has no dry run
    assert lacking(found) == ["silo pause: --dry-run"]


def test_what_a_person_signs_has_an_action_that_somebody_may_do() -> None:
    for name, command in _commands():
        flags = {flag for each in command.params for flag in each.opts}
        action = COMMANDS[name].action
        assert bool(action) == bool(flags & {"--operator", "--as"}), name
        assert not action or ACTIONS[action], name


def test_a_command_needs_the_role_that_its_key_in_the_console_needs() -> None:
    checked = set()
    for each in actions.ACTIONS:
        for coordinator in (False, True):
            if each.action and each.twin is not None:
                shown = actions.Context(coordinator=coordinator, release="r1/a/0", run="r1", person="alice")
                words = each.twin(shown)
                name = next(
                    " ".join(words[:end]) for end in range(len(words), 0, -1) if " ".join(words[:end]) in COMMANDS
                )
                # what steers a run at a coordinator steers the silo at a silo
                at_silo = each.action.replace("run.", "silo.") if name.startswith("silo ") else each.action
                assert COMMANDS[name].action == at_silo, name
                checked.add(name)
    assert {"silo pause", "fedsilo run pause", "silo approvals approve", "fedsilo run abort"} <= checked


def test_schema_of_every_command_is_printed_and_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, command in _commands():
        program, *words = name.split(" ")
        answer = click.testing.CliRunner().invoke(TREES[program], [*words, "--schema"], prog_name=program)
        assert answer.exit_code == 0, (name, answer.output)
        told = json.loads(answer.stdout)["data"]
        assert told == schema_of(name, command), name
        facts = COMMANDS[name]
        assert (told["changes_state"], told["idempotent"], told["streams"]) == (
            bool(facts.changes), facts.idempotent, facts.streams,
        )  # fmt: skip
        assert {int(code) for code in told["exit_codes"]} >= set(ALWAYS)
        for each in (*told["arguments"], *told["options"]):
            assert each.keys() >= {"name", "type", "required", "default", "help"}
            assert each["type"] in {"text", "path", "integer", "number", "boolean"}
            assert each["help"], (name, each["name"])
    assert list(tmp_path.iterdir()) == []


# ---- --quiet and --no-color ------------------------------------------------------------------------


def _talking() -> typer.Typer:
    app = typer.Typer()

    @register(app, "version")
    def talk(wrong: bool = False) -> None:
        import os

        if wrong:
            raise UsageError("no", hint="try yes")
        text = "plain" if "NO_COLOR" in os.environ else "coloured"
        emit({"text": text}, text, warnings=["mind this"])

    return app


_NO_MORE = [
    ("policy fmt policy.yaml", "policy", "No such command 'fmt'."),
    ("audit export --log log --syslog localhost:6514", "audit export", "No such option: --syslog"),
]


@pytest.mark.parametrize(("line", "command", "message"), _NO_MORE)
def test_what_there_is_no_more_is_unknown_as_anything_else_is(line: str, command: str, message: str) -> None:
    program = "from fedsilo.cli import main as cli; cli.fedsilo_main()"
    ran = subprocess.run([sys.executable, "-c", program, *line.split(), "--json"], check=False, capture_output=True)
    answer = json.loads(ran.stdout)
    assert (ran.returncode, answer["command"], answer["error"]["code"]) == (2, command, "INVALID_INPUT")
    assert answer["error"]["message"].startswith(message)
    assert answer["error"]["hint"] == f"fedsilo {command} --help"


# ---- start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["fedsilo", "silo", "coordinator", "fedconsole"])
def test_help_takes_less_than_three_tenths_of_a_second_of_processor_time(program: str) -> None:
    def seconds(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # The least of up to five: whatever else runs on this machine only adds to it.
    # A slow processor is given so many times what Python itself needs to start: help takes ten times that, with textual
    # it would be seventeen, with torch seventy.
    limit = max(HELP_SECONDS_MAX, 14 * min(seconds("-c", "pass") for _ in range(3)))
    assert any(seconds("-m", "fedsilo.cli", program, "--help") < limit for _ in range(5))


def test_every_command_stands_in_the_table_and_every_exit_status_has_a_meaning() -> None:
    assert lacking(dict(_commands())) == []
    kinds: list[type[FedSiloError]] = [FedSiloError]
    for kind in kinds:
        kinds += [each for each in kind.__subclasses__() if each not in kinds]
    assert {kind.exit_code for kind in kinds} <= EXIT_MEANINGS.keys()
    assert {code for facts in COMMANDS.values() for code in facts.exit_codes} <= EXIT_MEANINGS.keys()


def test_quiet_leaves_errors_and_json_and_no_color_is_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.delenv("NO_COLOR")  # restored afterwards, whatever the command sets

    def told(*arguments: str) -> tuple[int, str, str]:
        answer = CliRunner().invoke(_talking(), list(arguments))
        return answer.exit_code, answer.stdout, answer.stderr

    assert told() == (0, "coloured\n", "warning: mind this\n")
    assert told("--quiet") == (0, "", "")
    assert told("--quiet", "--wrong") == (2, "", "error: no [INVALID_INPUT]\nhint: try yes\n")
    assert json.loads(told("--quiet", "--json")[1])["data"] == {"text": "coloured"}
    assert told()[1] == "coloured\n"  # it was for one call
    assert json.loads(told("--no-color", "--quiet", "--json")[1])["data"] == {"text": "plain"}
