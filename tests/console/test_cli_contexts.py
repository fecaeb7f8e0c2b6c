"""Which daemon the commands that look at one ask: a named context, the file in the folder, the current context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedsilo.cli import coordinator as cli_coordinator
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli import silo as cli_silo
from fedsilo.cli.contexts import ContextEntry, write
from tests.console.test_real_desk import Site, site

__all__ = ["site"]  # a fixture is found by its name

NOTHING = {"run": "", "x": "round", "series": [], "baseline": [], "not_recorded": []}


@pytest.fixture
def kept(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Contexts `prod`, a silo that runs, and `hub`, a coordinator that does not; a folder with nothing in it."""
    path = tmp_path / "kept" / "contexts.yaml"
    monkeypatch.setenv("FEDSILO_CONTEXTS", str(path))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    site.desk.register_query("curves", lambda arguments: NOTHING | {"run": "asked"})
    current(path, site, "")
    return path


def current(path: Path, site: Site, name: str) -> None:
    entries = {
        "prod": ContextEntry("prod", "silo", site.socket, "hospital_a"),
        "hub": ContextEntry("hub", "coordinator", path.parent / "nobody.sock"),
    }
    write(entries, name, path)


def ask(app: typer.Typer, *words: str) -> tuple[int, dict[str, Any]]:
    answer = CliRunner().invoke(app, [*words, "--json"])
    return answer.exit_code, json.loads(answer.stdout)


def test_status_and_curves_ask_a_named_context_or_the_current_one(kept: Path, site: Site) -> None:
    for app, words in ((cli_silo.app, ("status",)), (cli_fedsilo.app, ("curves",))):
        assert ask(app, *words)[0] == 8  # no silo.yaml here
        code, told = ask(app, *words, "--context", "prod")
        assert code == 0 and told["command"] == " ".join(("silo", *words) if app is cli_silo.app else words)
    current(kept, site, "prod")
    assert ask(cli_silo.app, "status")[1]["data"]["silo"] == "hospital_a"
    assert ask(cli_fedsilo.app, "curves")[1]["data"]["run"] == "asked"


def test_what_is_shown_names_whose_it_is_and_the_context(kept: Path, site: Site) -> None:
    def shown(app: typer.Typer, *words: str) -> str:
        answer = CliRunner().invoke(app, list(words))
        assert answer.exit_code == 0, answer.output
        return answer.output

    assert shown(cli_fedsilo.app, "curves", "--context", "prod").startswith("silo hospital_a, context prod: no figures")
    assert "hospital_a" not in shown(cli_fedsilo.app, "curves", "--context", "prod", "--csv")
    assert "silo approvals show r1/hospital_a/0, in the folder of hospital_a's silo.yaml\n" in shown(
        cli_silo.app, "status", "--context", "prod"
    )
    config = Path("a folder") / "silo.yaml"
    write({"prod": ContextEntry("prod", "silo", site.socket, "hospital_a", config.absolute())}, "prod", kept)
    assert f"silo approvals show r1/hospital_a/0 --config '{config.absolute()}'\n" in shown(cli_silo.app, "status")
    values = [{"name": "kl", "silo": "hospital_a", "source": "local", "unit": "", "points": [
        {"x": 1, "round": 1, "step": 0, "value": 0.5, "low": None, "high": None, "n": None, "n_exact": True},
    ]}]  # fmt: skip
    site.desk._queries["curves"] = lambda arguments: NOTHING | {"run": "r7", "series": values}
    assert shown(cli_fedsilo.app, "curves").splitlines()[0] == "silo hospital_a, context prod: run r7"


def test_a_context_at_whose_socket_another_party_answers_is_refused(kept: Path, site: Site) -> None:
    for entry, party in (
        (ContextEntry("prod", "silo", site.socket, "hospital_b"), "silo hospital_b"),
        (ContextEntry("prod", "coordinator", site.socket), "coordinator"),
    ):
        write({"prod": entry}, "prod", kept)
        asks = [(cli_fedsilo.app, "curves"), (cli_fedsilo.app, "watch")]
        asks.append((cli_silo.app if entry.kind == "silo" else cli_coordinator.app, "status"))
        for app, word in asks:
            for named in ((), ("--context", "prod")):
                code, told = ask(app, word, *named)
                assert (code, told["error"]["code"]) == (6, "WRONG_DAEMON")
                message = told["error"]["message"]
                assert message == f"context 'prod' is {party}, and silo hospital_a answers at {site.socket}"
    given = ("curves", "--context")
    assert ask(cli_fedsilo.app, *given, f"silo:hospital_b={site.socket}")[0] == 6
    assert ask(cli_fedsilo.app, *given, f"silo:hospital_a={site.socket}")[0] == 0


def test_a_file_goes_before_the_current_context_where_the_other_commands_read_it(kept: Path, site: Site) -> None:
    current(kept, site, "prod")
    Path("silo.yaml").write_text("silo: 7\n")
    code, told = ask(cli_silo.app, "status")
    assert code == 2 and "silo.yaml" in told["error"]["message"]  # not another silo than `silo pause` here would pause
    assert ask(cli_silo.app, "status", "--context", "prod")[0] == 0


def test_a_context_of_the_other_kind_is_refused_by_name_and_else_passed_over(kept: Path, site: Site) -> None:
    current(kept, site, "hub")
    assert ask(cli_silo.app, "status")[0] == 8  # hub is no silo, and there is no silo.yaml
    assert ask(cli_coordinator.app, "status")[0] == 3  # hub is asked, and does not run
    assert ask(cli_fedsilo.app, "curves")[0] == 3
    code, told = ask(cli_silo.app, "status", "--context", "hub")
    assert (code, told["error"]["hint"]) == (2, "coordinator status --context hub")
    code, told = ask(cli_coordinator.app, "status", "--context", "prod")
    assert (code, told["error"]["hint"]) == (2, "silo status --context prod")
    assert ask(cli_silo.app, "status", "--context", "none")[0] == 8
    assert ask(cli_silo.app, "status", "--context", "prod", "--config", "silo.yaml")[0] == 2
    assert ask(cli_fedsilo.app, "curves", "--context", "prod", "--coordinator", "c.yaml")[0] == 2
