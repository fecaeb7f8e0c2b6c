"""Places 2 and 4 and their twins over a real unix socket: a coordinator in memory, a guard's loop, the command line."""

from __future__ import annotations

import csv
import io
import json
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from console.feed import Feed, connect_to
from console.sharing import QUERIES, Question, released_answer
from coordinator.answers.rounds import RoundView
from fedsilo.cli import curves as cli_curves
from fedsilo.cli import run as cli_run
from fedsilo.cli.output import command
from fedsilo.control.answers import Curves, Round, read
from fedsilo.control.figures import FIGURES
from fedsilo.views import curves, rounds
from fedsilo.views.lines import UNICODE, to_text
from fedsilo.views.state import Snapshot
from tests.console.commands import WAIT_SECONDS, Site
from tests.console.states import unclassified
from tests.policies import setting
from tests.simulated.coordinator_parts import federation, until_quiet
from tests.simulated.test_round_view import in_round
from tests.world import Loop

COMMANDS = typer.Typer()
command(COMMANDS, "curves")(cli_curves.curves)
command(COMMANDS, "silo round")(cli_curves.silo_round)
COMMANDS.add_typer(cli_run.app, name="run")


@dataclass
class Asked:
    """A command line, and the answers behind it."""

    socket: Path
    run: Any


@pytest.fixture
def at_coordinator(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    house, silos = federation(tmp_path / "house")
    house.submit()
    for silo in silos:
        silo.join()
    until_quiet(silos)
    view = RoundView(house.driver, "c" * 64)
    site.desk.register_query("round", view.round)
    site.desk.register_query("curves", view.curves)
    site.answer(run=house.record() | {"folder": ""})
    config = SimpleNamespace(control=SimpleNamespace(socket=site.socket))
    monkeypatch.setattr("coordinator.config.load_config", lambda path: config)
    yield Asked(site.socket, runner())
    house.close()


@pytest.fixture
def at_silo(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Asked]:
    loop = Loop(tmp_path / "silo", setting.policy_of(setting.policy_text()))
    in_round(loop)
    for name in ("round", "curves"):
        site.desk.register_query(name, loop.guard.queries.handlers()[name])
    config = SimpleNamespace(control=SimpleNamespace(socket=site.socket))
    monkeypatch.setattr(cli_curves, "load_site", lambda path: config)
    yield Asked(site.socket, runner())
    loop.close()


def runner() -> Any:
    def run(*arguments: str, text: bool = False) -> tuple[int, Any]:
        result = CliRunner().invoke(COMMANDS, [*arguments, *([] if text else ["--json"])])
        return result.exit_code, result.output if text else json.loads(result.stdout)

    return run


def answers(socket: Path, wanted: dict[str, Any]) -> Snapshot:
    """What the console's own reader has once everything it wants was answered."""
    arrived: queue.Queue[Snapshot] = queue.Queue()
    feed = Feed(connect_to(socket), arrived.put)
    feed.want(wanted)
    feed.start()
    try:
        while not wanted.keys() <= (seen := arrived.get(timeout=WAIT_SECONDS)).answers.keys():
            assert not seen.refused, seen.refused
        return seen
    finally:
        feed.stop()


@pytest.mark.slow
def test_the_console_draws_what_a_real_coordinator_answers_and_may_share_what_was_released(
    at_coordinator: Asked,
) -> None:
    seen = answers(at_coordinator.socket, {"r": ("round", {"round": 1}), "c": ("curves", {"names": "pass_at_1"})})
    answer = seen.answers["r"]
    shown = read(Round, answer)
    text = to_text([*rounds.head_lines(shown, None, 100, UNICODE), *rounds.fact_lines(shown, 100)])
    assert "round 1 of 2" in text and "committed after" in text and "4 of 4 in · quorum 2 met" in text
    assert {row.state for row in rounds.silo_rows(shown, None, 20, UNICODE, ascii_only=False)} == {"accepted"}
    view = curves.View("pass_at_1", 1.0)
    assert curves.plot_of(read(Curves, seen.answers["c"]), view, 80, 12, ascii_only=False)
    assert "hospital_d 35.0" in to_text(curves.value_lines(read(Curves, seen.answers["c"]), view, 300, UNICODE, most=9))
    for query in ("round", "curves"):
        question = QUERIES[query]
        assert isinstance(question, Question)
        answer = answers(at_coordinator.socket, {"q": (query, {})}).answers["q"]
        assert not list(unclassified(answer, question.answer)), query
        (kept,) = released_answer(query, {}, answer) or ({},)
        if query == "curves":
            assert {each["name"] for each in kept["series"]} == {"pass_at_1", "update_norm"}
        else:
            assert all(row["phases"] for row in kept["silos"])


def test_the_console_draws_what_a_real_guard_answers(at_silo: Asked) -> None:
    seen = answers(at_silo.socket, {"r": ("round", {}), "c": ("curves", {"names": "pass_at_1"})})
    rows = rounds.silo_rows(read(Round, seen.answers["r"]), None, 20, UNICODE, ascii_only=True)
    assert rows[0].now.startswith("train") and {row.strip for row in rows[1:]} == {"hidden"}
    text = to_text(
        curves.value_lines(read(Curves, seen.answers["c"]), curves.View("pass_at_1", 0.0), 200, UNICODE, most=9)
    )
    assert "n 484" in text and "hospital_a 25.0 [21.3, 29.0]" in text


@pytest.mark.slow
def test_the_twins_say_what_the_queries_say(at_coordinator: Asked) -> None:
    code, told = at_coordinator.run("curves", "--coordinator", "c.yaml", "--name", "gap", "--name", "update_norm")
    assert code == 0 and told["command"] == "curves"
    assert {each["name"] for each in told["data"]["series"]} == {"gap", "update_norm"}
    code, text = at_coordinator.run("curves", "--coordinator", "c.yaml", "--csv", text=True)
    rows = list(csv.DictReader(io.StringIO(text)))
    values = [each for series in at_coordinator.run("curves", "--coordinator", "c.yaml")[1]["data"]["series"]
              for each in series["points"]]  # fmt: skip
    assert [float(row["value"]) for row in rows] == [each["value"] for each in values]
    assert {row["n_exact"] for row in rows if row["name"] == "pass_at_1"} == {"false"}
    code, text = at_coordinator.run("curves", "--coordinator", "c.yaml", "--values", text=True)
    assert code == 0 and "<=512" in text and "not recorded: cosine" in text
    code, last = at_coordinator.run("curves", "--coordinator", "c.yaml", text=True)
    assert code == 0 and "<=512" in last and "not recorded: cosine" in last
    newest = {(row["name"], row["silo"]): row for row in rows}  # rows are in the order of rounds
    shown = [line for line in last.splitlines() if line.startswith(tuple(name for name, _ in newest))]
    assert len(shown) == len(newest) < len(rows)
    for (name, silo), row in newest.items():
        (line,) = (each.split() for each in shown if each.split()[::3][:2] == [name, silo or "all"])
        assert line[1] == f"r{row['round']}" and line[4] == curves.value_text(float(row["value"]), name)
    assert FIGURES["gap"].meaning in last and "--values" in last
    code, told = at_coordinator.run("run", "show", "run-1", "--round", "1")
    assert code == 0 and told["data"]["round"] == 1 and told["data"]["progress"]["state"] == "committed"
    code, text = at_coordinator.run("run", "show", "run-1", "--round", "1", text=True)
    assert code == 0 and "accepted" in text and "mean pass@1" in text and "transcript" in text
    assert at_coordinator.run("run", "show", "run-1", "--round", "9")[0] == 8
    assert at_coordinator.run("curves", "--coordinator", "c.yaml", "--run", "none")[0] == 8
    assert at_coordinator.run("curves", "--coordinator", "c.yaml", "--x", "time")[0] == 2
    assert at_coordinator.run("curves", "--coordinator", "c.yaml", "--config", "s.yaml")[0] == 2
    assert at_coordinator.run("curves", "--coordinator", "c.yaml", "--csv")[0] == 2  # --json beside it


def test_the_twins_of_a_silo(at_silo: Asked) -> None:
    code, told = at_silo.run("round")
    assert code == 0 and told["command"] == "silo round" and told["data"]["round"] == 1
    code, text = at_silo.run("round", text=True)
    assert code == 0 and "hospital_b  signed" in text and "hidden" in text and "sign 0 s" in text
    assert at_silo.run("round", "--round", "7")[0] == 8 and at_silo.run("round", "--run", "none")[0] == 8
    code, told = at_silo.run("curves", "--config", "silo.yaml", "--name", "kl")
    assert code == 0 and [each["name"] for each in told["data"]["series"]] == ["kl"]
    assert at_silo.run("curves", text=True)[1].startswith("silo hospital_a: run run-1")
    one, every = (at_silo.run("curves", *words, text=True)[1] for words in (("--name", "kl"), ("--values",)))
    assert sum(line.startswith("kl ") for line in one.splitlines()) == len(told["data"]["series"][0]["points"])
    assert len(every.splitlines()) > len(one.splitlines())


def test_a_csv_cell_is_no_formula() -> None:
    data = {"run": "=1+1", "series": [{"name": "@x", "silo": "-a", "source": "s", "unit": "u",
                                       "points": [{"x": 1, "value": -0.5}]}]}  # fmt: skip
    (row,) = csv.DictReader(io.StringIO(cli_curves.csv_text(read(Curves, data))))
    assert (row["run"], row["name"], row["silo"], row["value"], row["n"]) == ("'=1+1", "'@x", "'-a", "-0.5", "")


@pytest.mark.parametrize("query", ["round", "curves"])
def test_every_field_is_classified_and_a_silos_own_stays_there(query: str, at_silo: Asked) -> None:
    question = QUERIES[query]
    assert isinstance(question, Question)
    answer = answers(at_silo.socket, {"q": (query, {})}).answers["q"]
    assert not list(unclassified(answer, question.answer))
    (kept,) = released_answer(query, {}, answer) or ({},)
    if query == "curves":
        assert answer["series"] and kept["series"] == [] and "baseline" not in kept
    else:
        assert answer["silos"][0]["phases"] and all(row["phases"] == [] for row in kept["silos"])
        assert "policy" not in kept["silos"][0] and "digests" not in kept
