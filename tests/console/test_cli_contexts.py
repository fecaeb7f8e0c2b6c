"""Which daemon the commands that look at one ask: a named context, the file in the folder, the current context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedsilo.cli import coordinator as cli_coordinator
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli import silo as cli_silo
from fedsilo.cli.contexts import ContextEntry, write
from tests.console.commands import Site, printed, run

FEDSILO, SILO, COORDINATOR = cli_fedsilo.app, cli_silo.app, cli_coordinator.app
NOTHING = {"run": "", "x": "round", "series": [], "baseline": [], "not_recorded": []}
POINT = {"x": 1, "round": 1, "step": 0, "value": 0.5, "low": None, "high": None, "n": None, "n_exact": True}
KL = {"name": "kl", "silo": "hospital_a", "source": "local", "unit": "", "points": [POINT]}
PROD = ("--context", "prod")


@pytest.fixture
def kept(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Contexts `prod`, a silo that runs, and `hub`, a coordinator that does not; a folder with nothing in it."""
    path = tmp_path / "kept" / "contexts.yaml"
    monkeypatch.setenv("FEDSILO_CONTEXTS", str(path))
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    site.answer(curves=NOTHING | {"run": "asked"})
    current(path, site, "")
    return path


def current(path: Path, site: Site, name: str) -> None:
    prod = ContextEntry("prod", "silo", site.socket, "hospital_a")
    write({"prod": prod, "hub": ContextEntry("hub", "coordinator", path.parent / "nobody.sock")}, name, path)


def test_status_and_curves_ask_a_named_context_or_the_current_one(kept: Path, site: Site) -> None:
    for app, word, command in ((SILO, "status", "silo status"), (FEDSILO, "curves", "curves")):
        assert run(app, word)[0] == 8  # no silo.yaml here
        status, told = run(app, word, *PROD)
        assert (status, told["command"]) == (0, command)
    current(kept, site, "prod")
    assert run(SILO, "status")[1]["data"]["silo"] == "hospital_a"
    assert run(FEDSILO, "curves")[1]["data"]["run"] == "asked"
    Path("silo.yaml").write_text("silo: 7\n")  # a file goes before the current context, as in the other commands
    status, told = run(SILO, "status")
    assert status == 2 and "silo.yaml" in told["error"]["message"]
    assert run(SILO, "status", *PROD)[0] == 0


def test_what_is_shown_names_whose_it_is_and_the_context(kept: Path, site: Site) -> None:
    assert printed(FEDSILO, "curves", *PROD)[1].startswith("silo hospital_a, context prod: ")
    assert "hospital_a" not in printed(FEDSILO, "curves", *PROD, "--csv")[1]
    twin = "silo approvals show r1/hospital_a/0"
    assert f"{twin}, in the folder of hospital_a's silo.yaml\n" in printed(SILO, "status", *PROD)[1]
    config = (Path("a folder") / "silo.yaml").absolute()
    write({"prod": ContextEntry("prod", "silo", site.socket, "hospital_a", config)}, "prod", kept)
    assert f"{twin} --config '{config}'\n" in printed(SILO, "status")[1]
    site.answer(curves=NOTHING | {"run": "r7", "series": [KL]})
    assert printed(FEDSILO, "curves")[1].splitlines()[0] == "silo hospital_a, context prod: run r7"


@pytest.mark.slow
def test_a_context_at_whose_socket_another_party_answers_is_refused(kept: Path, site: Site) -> None:
    other = ContextEntry("prod", "silo", site.socket, "hospital_b")
    hub = ContextEntry("prod", "coordinator", site.socket)
    for entry, app in ((other, SILO), (hub, COORDINATOR)):
        write({"prod": entry}, "prod", kept)
        for program, word in ((FEDSILO, "curves"), (FEDSILO, "watch"), (app, "status")):
            for named in ((), PROD):
                status, told = run(program, word, *named)
                assert (status, told["error"]["code"]) == (6, "WRONG_DAEMON")
                assert f"silo hospital_a answers at {site.socket}" in told["error"]["message"]
    for name, status in (("hospital_b", 6), ("hospital_a", 0)):
        assert run(FEDSILO, "curves", "--context", f"silo:{name}={site.socket}")[0] == status


def test_a_context_of_the_other_kind_is_refused_by_name_and_else_passed_over(kept: Path, site: Site) -> None:
    current(kept, site, "hub")
    for app, words, status, hint in (
        (SILO, ("status",), 8, ""),  # hub is no silo, and there is no silo.yaml
        (COORDINATOR, ("status",), 3, ""),  # hub is asked, and does not run
        (FEDSILO, ("curves",), 3, ""),
        (SILO, ("status", "--context", "hub"), 2, "coordinator status --context hub"),
        (COORDINATOR, ("status", *PROD), 2, "silo status --context prod"),
        (SILO, ("status", "--context", "none"), 8, ""),
        (SILO, ("status", *PROD, "--config", "silo.yaml"), 2, ""),
        (FEDSILO, ("curves", *PROD, "--coordinator", "c.yaml"), 2, ""),
    ):
        code, told = run(app, *words)
        assert code == status and hint in json.dumps(told["error"]["hint"]), words
