"""Ids complete from files on this machine, within 150 ms or not at all, and never with what a terminal would act on."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.launch.completion import OFFERED_MAX, SECONDS_MAX, _complete_with, within
from tests.simulated.policy_site import PolicySite, text_of

HOSTILE = ("$(touch x)", "r`id`", "r;id", "r&id", "r|id", "r>x", "r x", "r\nx", "r'x", 'r"x', "r*", "r\\x", "~r", "r!x",
           "-r", "--config=x", "r\u202ex", "r\uff1bid", "r{a,b}", "r#x")  # fmt: skip
PROGRAM = "import sys; sys.argv = [{0!r}]; from fedsilo.launch import cli; cli.{0}_main()"


def completed(line: str, folder: Path, **environment: str) -> list[str]:
    """What bash is offered for the last word of a line, by the completion protocol in a process of its own."""
    program, *words = line.split(" ")
    told = {"COMP_WORDS": line, "COMP_CWORD": str(len(words)), f"_{program.upper()}_COMPLETE": "complete_bash"}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program)], cwd=folder, capture_output=True, text=True, check=True,
        env={**os.environ, "HOME": str(folder), **told, **environment},
    )  # fmt: skip
    assert answer.stderr == ""
    return answer.stdout.split()


def database(path: Path, table: str, insert: str, rows: list[tuple[object, ...]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with closing(sqlite3.connect(path)) as opened:
        opened.execute(table)
        opened.executemany(insert, rows)
        opened.commit()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "coordinator.yaml").write_text("state_dir: at_coordinator\nsilos: [hospital_a, hospital_b]\n")
    (tmp_path / "silo.yaml").write_text("state_dir: at_silo\n")
    database(
        tmp_path / "at_coordinator" / "coordinator.db", "CREATE TABLE runs(name, ordinal)",
        "INSERT INTO runs VALUES (?,?)",
        [("r1", 1), ("r2", 2), ("r\x1b[2Jx", 3), ("other", 4),
         *((text, at) for at, text in enumerate(HOSTILE, start=5))],
    )  # fmt: skip
    database(
        tmp_path / "at_silo" / "ledger.sqlite3", "CREATE TABLE releases(id, state, requested_at)",
        "INSERT INTO releases VALUES (?,?,?)",
        [("r1/hospital_a/0", "held", 2.0), ("r0/hospital_a/0", "approved", 1.0), ("r1/hospital_a/1", "held", 3.0)],
    )  # fmt: skip
    (tmp_path / "at_silo" / "audit").mkdir()
    (tmp_path / "contexts.yaml").write_text("contexts:\n  prod:\n    kind: coordinator\n    socket: c.sock\n")
    (tmp_path / "contexts.yaml").chmod(0o600)
    return tmp_path


def test_ids_complete_in_a_process(folder: Path) -> None:
    before = sorted(path.name for path in folder.rglob("*"))
    assert completed("fedsilo run show r", folder) == ["r2", "r1"]
    assert completed("fedsilo run show ", folder) == ["other", "r2", "r1"]  # none of the hostile ones
    assert completed("silo approvals show ", folder) == ["r1/hospital_a/1", "r1/hospital_a/0"]
    assert completed("coordinator silos show hospital_", folder) == ["hospital_a", "hospital_b"]
    assert completed("fedsilo context use p", folder, FEDSILO_CONTEXTS=str(folder / "contexts.yaml")) == ["prod"]
    assert sorted(path.name for path in folder.rglob("*")) == before


def test_a_named_configuration_is_the_one_that_is_read(folder: Path) -> None:
    (folder / "other.yaml").write_text("state_dir: nowhere\nsilos: [clinic_e]\n")
    assert completed("coordinator silos show --config other.yaml c", folder) == ["clinic_e"]
    assert completed("fedsilo run show --config other.yaml r", folder) == []


def test_record_numbers_are_the_newest_of_the_log(tmp_path: Path) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    place.start()
    (log,) = (place.folder / "state" / "audit").glob("*.jsonl")
    newest = len(log.read_bytes().splitlines()) - 1
    line = f"fedsilo audit show --log {place.folder / 'state'} "
    assert completed(line, tmp_path)[0] == str(newest)


@pytest.mark.parametrize("wrong", ["missing", "torn", "garbage"])
def test_what_cannot_be_read_offers_nothing_and_says_nothing(wrong: str, folder: Path) -> None:
    path = folder / "at_coordinator" / "coordinator.db"
    if wrong == "missing":
        path.unlink()
    elif wrong == "torn":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        (folder / "coordinator.yaml").write_text("state_dir: [")
    assert completed("fedsilo run show r", folder) == []


def test_what_takes_too_long_is_not_offered() -> None:
    held = threading.Event()

    def slow() -> list[str]:
        held.wait(60)
        return ["late"]

    started = time.monotonic()
    assert within(SECONDS_MAX, slow) == []
    assert SECONDS_MAX <= time.monotonic() - started < 10  # of 60: the machine may be busy
    held.set()
    assert within(60, lambda: ["in time"]) == ["in time"]
    assert within(60, lambda: ["one"] * 100) == ["one"] * OFFERED_MAX


def test_what_is_not_installed_offers_nothing_and_says_nothing() -> None:
    def missing() -> None:
        raise ImportError("no module of that name")

    line: Any = SimpleNamespace(command_path="silo approvals show", params={})
    assert _complete_with(lambda parameters, program: ["r1"], lambda: None)(line, "") == ["r1"]
    assert _complete_with(lambda parameters, program: ["r1"], missing)(line, "") == []


def test_a_script_for_a_shell_can_be_shown(folder: Path) -> None:
    for program in ("fedsilo", "silo", "coordinator", "fedconsole"):
        answer = subprocess.run(
            [sys.executable, "-c", PROGRAM.format(program).replace("fedconsole_main", "console_main")], cwd=folder,
            capture_output=True, text=True, check=True,
            env={**os.environ, f"_{program.upper()}_COMPLETE": "source_bash"},
        )  # fmt: skip
        assert f"_{program.upper()}_COMPLETE=complete_bash" in answer.stdout


WATCHED = """
from fedsilo.launch import completion
def counted(seconds, work):
    before = set(sys.modules)
    found = work()
    return [*found, *("loaded:" + name for name in set(sys.modules) - before)]
completion.within = counted
"""


@pytest.mark.parametrize("line", [
    "silo approvals show ", "fedsilo run show ", "coordinator silos show ", "fedsilo context use ", "silo audit show ",
])  # fmt: skip
def test_the_limit_is_not_spent_on_loading_modules(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "at_silo" / "audit" / "000000000000.jsonl").write_text("{}\n")
    start, rest = PROGRAM.split("from", 1)
    monkeypatch.setattr(f"{__name__}.PROGRAM", f"{start}\n{WATCHED}from{rest}")
    found = completed(line, folder, FEDSILO_CONTEXTS=str(folder / "contexts.yaml"))
    assert found and not [each for each in found if each.startswith("loaded:")]
