"""`fedsilo config`, `fedsilo context` and `doctor`: what they say of files and of this machine."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsilo.cli import coordinator as cli_coordinator
from fedsilo.cli import doctor as cli_doctor
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli import silo as cli_silo
from fedsilo.cli.contexts import changing
from fedsilo.cli.doctor import CLOCK_BEHIND_SECONDS_MAX, Finding, findings
from fedsilo.files import durable
from fedsilo.files.durable import holder_of, lock_exclusively
from policies.model import GONE
from silo.guard import proxied
from tests.console.commands import Site, printed, run
from tests.simulated.policy_site import PolicySite, text_of

APP = cli_fedsilo.app


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PolicySite:
    for name in ("FEDSILO_CONTROL", "FEDSILO_OPERATOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FEDSILO_CONTEXTS", str(tmp_path / "kept" / "contexts.yaml"))
    made = PolicySite(tmp_path / "site")
    made.policy_is(text_of())
    monkeypatch.chdir(made.folder)
    return made


# ---- config ----------------------------------------------------------------------------------------


def test_show_tells_every_value_and_its_origin(place: PolicySite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSILO_OPERATOR", "alice")
    status, answer = run(APP, "config", "show", "--origin")
    assert status == 0 and answer["data"]["kind"] == "silo"
    rows = {row["key"]: row for row in answer["data"]["settings"]}
    lines = (place.folder / "silo.yaml").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if line.startswith("policy:"))
    assert rows["policy"]["origin"] == f"silo.yaml:{number}" and rows["trainer.launch"]["origin"] == "default"
    assert rows["FEDSILO_OPERATOR"] == {"key": "FEDSILO_OPERATOR", "value": "alice", "origin": "environment"}
    assert rows["identity.key"]["value"].endswith("hospital_a.key") and "PRIVATE KEY" not in json.dumps(answer)
    for options, told in ((["--origin"], True), ([], False)):
        assert ("origin" in printed(APP, "config", "show", *options)[1].splitlines()[0]) is told


def test_validate_judges_each_file_and_ends_with_the_first_fault(place: PolicySite) -> None:
    assert run(APP, "config", "validate", "silo.yaml", "policy.yaml")[0] == 0
    text = (place.folder / "silo.yaml").read_text()
    (place.folder / "wrong.yaml").write_text(text.replace("state_dir:", "state_dirr:"))
    status, answer = run(APP, "config", "validate", "policy.yaml", "wrong.yaml", "silo.yaml")
    assert status == 2 and [row["ok"] for row in answer["data"]["files"]] == [True, False, True]
    assert "wrong.yaml:" in answer["error"]["message"]
    (place.folder / "other.yaml").write_text("a: 1\n")
    assert [run(APP, "config", "validate", name)[0] for name in ("other.yaml", "nowhere.yaml")] == [2, 8]


@pytest.mark.parametrize("kind", ["silo", "coordinator", "policy", "run"])
def test_schema_is_a_json_schema(kind: str) -> None:
    status, answer = run(APP, "config", "schema", kind)
    assert status == 0 and answer["data"]["type"] == "object"
    assert answer["data"]["additionalProperties"] is False and answer["data"]["properties"]
    assert not any(gone in json.dumps(answer) for gone in GONE)


# ---- context ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_contexts_are_kept_used_replaced_and_forgotten(place: PolicySite, tmp_path: Path) -> None:
    def context(*words: str) -> Any:
        return run(APP, "context", *words)

    def rows() -> dict[str, Any]:
        return {row["name"]: row for row in context("list")[1]["data"]["contexts"]}

    assert rows() == {}
    for words, status in (
        (("add", "here", "--config", "silo.yaml"), 0),
        (("add", "there", "--socket", "c.sock"), 0),
        (("add", "here", "--socket", "c.sock"), 6),
        (("use", "nowhere"), 8),
        (("remove", "nowhere"), 8),
        (("add", "x"), 2),
        (("add", "x", "--config", "silo.yaml", "--socket", "c.sock"), 2),
        (("add", "x y", "--socket", "c.sock"), 2),
    ):
        assert context(*words)[0] == status, words
    here, there = rows()["here"], rows()["there"]
    assert (here["kind"], here["site"], here["current"]) == ("silo", "hospital_a", True)
    assert here["socket"] == str(place.folder / "state" / "control.sock")
    assert (there["kind"], there["current"], there["socket"]) == ("coordinator", False, str(place.folder / "c.sock"))
    assert context("use", "there")[1]["data"]["current"] == "there"
    assert stat.S_IMODE((tmp_path / "kept" / "contexts.yaml").stat().st_mode) == 0o600
    assert context("remove", "there")[1]["data"]["current"] == "" and list(rows()) == ["here"]
    assert context("add", "here", "--socket", "c.sock", "--force")[0] == 0 and rows()["here"]["kind"] == "coordinator"


@pytest.mark.slow
def test_commands_at_once_lose_no_context(place: PolicySite, tmp_path: Path) -> None:
    names = [f"c{number}" for number in range(4)]
    program = "from fedsilo.cli import main as cli; cli.fedsilo_main()"
    command = [sys.executable, "-c", program, "context", "add"]
    with changing():  # so that they all come at one time
        started = [
            subprocess.Popen([*command, name, "--socket", f"{name}.sock"], stdout=subprocess.DEVNULL) for name in names
        ]
        assert wait_for(lambda: all(waits_for_a_lock(each.pid) for each in started))
        assert not (tmp_path / "kept" / "contexts.yaml").exists()
    assert [each.wait(60) for each in started] == [0] * 4
    assert {row["name"] for row in run(APP, "context", "list")[1]["data"]["contexts"]} == set(names)


def waits_for_a_lock(process: int) -> bool:
    rows = [row.split() for row in Path("/proc/locks").read_text().splitlines()]
    return any(row[1] == "->" and str(process) == row[5] for row in rows)


def wait_for(holds: Callable[[], bool], seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


# ---- doctor ----------------------------------------------------------------------------------------


def found(program: str, config: Path | None) -> dict[str, Finding]:
    return {each.check: each for each in findings(program, config)}


@pytest.mark.slow
def test_doctor_needs_nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSILO_CONTEXTS", str(tmp_path / "contexts.yaml"))
    for app, name in ((cli_silo.app, "silo"), (cli_coordinator.app, "coordinator"), (APP, "fedsilo")):
        checks = {row["check"] for row in run(app, "doctor")[1]["data"]["checks"]}
        assert checks >= {"fedsilo", "contexts", "configuration", "disk", "clock"}, name
        assert ("isolation of the trainer" in checks) == (name != "coordinator")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_doctor_reads_a_configuration_and_looks_for_its_daemon(place: PolicySite, site: Site) -> None:
    config = place.folder / "silo.yaml"
    checks = found("silo", config)
    assert checks["configuration"].ok is True and checks["control socket"].ok is None
    os.link(site.socket, place.folder / "state" / "control.sock")
    assert found("silo", config)["control socket"].ok is True
    site.socket.chmod(0o666)
    assert found("silo", config)["control socket"].ok is False
    config.write_text("silo: 7\n")
    assert found("silo", config)["configuration"].ok is False


@pytest.mark.slow
def test_doctor_names_the_way_to_the_coordinator(place: PolicySite, monkeypatch: pytest.MonkeyPatch) -> None:
    config, login = place.folder / "silo.yaml", place.folder / "id" / "proxy.login"
    plain = config.read_text()
    for variable in proxied.ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)

    def told() -> Finding:
        finding = found("silo", config)["way to the coordinator"]
        assert "hunter2" not in str(finding)
        return finding

    assert told().ok is True and told().found.endswith(", directly")
    monkeypatch.setenv("HTTPS_PROXY", "http://carol:hunter2@proxy.example:3128")
    assert told().ok is None and "HTTPS_PROXY" in told().hint
    named = 'proxy: "http://proxy.example:3128", proxy_credentials: id/proxy.login'
    assert plain.count('"host:1"}') == 1
    config.write_text(plain.replace('"host:1"}', f'"host:1", {named}}}'))
    assert told().ok is False and "proxy.login" in told().found
    login.write_text("silo:hunter2\n")
    login.chmod(0o600)
    assert told().ok is True and told().found == "host:1, through the proxy proxy.example:3128"


@pytest.mark.slow
def test_doctor_finds_a_clock_behind_the_log_and_a_full_disk(
    place: PolicySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.start()
    config = place.folder / "silo.yaml"
    assert found("silo", config)["clock"].ok is True and found("silo", config)["disk"].ok is not False
    (log,) = (place.folder / "state" / "audit").glob("*.jsonl")
    later = log.stat().st_mtime + CLOCK_BEHIND_SECONDS_MAX + 60
    os.utime(log, (later, later))
    monkeypatch.setattr(cli_doctor, "DISK_BYTES_MIN", 1 << 62)
    status, told = run(cli_silo.app, "doctor", "--config", config)
    wrong = {row["check"] for row in told["data"]["checks"] if row["ok"] is False}
    assert status == 1 and wrong == {"clock", "disk"} and all(each in told["error"]["message"] for each in wrong)


@pytest.mark.slow
def test_a_check_that_cannot_be_done_is_a_finding_and_the_others_go_on(
    place: PolicySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = place.folder / "silo.yaml"
    place.start()

    def refused(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied", "/srv/x")

    good = found("silo", config)
    cases: tuple[tuple[str, Any, str], ...] = (
        ("disk", durable.shutil, "disk_usage"),
        ("clock", Path, "iterdir"),
        ("configuration", Path, "exists"),
    )
    for check, where, what in cases:
        with monkeypatch.context() as patch:
            patch.setattr(where, what, refused)
            told = found("silo", config)
        assert good[check].ok is not False and told[check].ok is False and told[check].hint
        assert told[check].found.endswith(": Permission denied") and "isolation of the trainer" in told


def test_asking_who_holds_a_lock_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder_of(path) == 0 and not path.exists()
    path.write_text("4242\n")
    assert holder_of(path) == 0 and path.read_text() == "4242\n"
    with lock_exclusively(path):
        assert holder_of(path) == os.getpid()
