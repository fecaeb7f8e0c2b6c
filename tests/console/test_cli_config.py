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
from typer.testing import CliRunner

from fedsilo.cli import coordinator as cli_coordinator
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli import silo as cli_silo
from fedsilo.cli.contexts import changing
from fedsilo.cli.doctor import CLOCK_BEHIND_SECONDS_MAX, Finding, findings
from fedsilo.files import durable
from fedsilo.files.durable import holder_of, lock_exclusively
from policies.model import GONE
from silo.guard import proxied
from tests.console.test_real_desk import Site, site
from tests.simulated.policy_site import PolicySite, text_of

__all__ = ["site"]  # a fixture is found by its name

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hospital_a.yaml"


def run(*arguments: object) -> tuple[int, dict[str, Any]]:
    answer = CliRunner().invoke(cli_fedsilo.app, [*map(str, arguments), "--json"])
    return answer.exit_code, json.loads(answer.stdout)


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
    code, answer = run("config", "show", "--origin")
    assert code == 0 and answer["data"]["kind"] == "silo"
    rows = {row["key"]: row for row in answer["data"]["settings"]}
    lines = (place.folder / "silo.yaml").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, start=1) if line.startswith("policy:"))
    assert rows["policy"]["origin"] == f"silo.yaml:{number}"
    assert rows["trainer.launch"]["origin"] == "default"
    assert rows["FEDSILO_OPERATOR"] == {"key": "FEDSILO_OPERATOR", "value": "alice", "origin": "environment"}
    assert rows["identity.key"]["value"].endswith("hospital_a.key") and "PRIVATE KEY" not in json.dumps(answer)
    shown = CliRunner().invoke(cli_fedsilo.app, ["config", "show", "--origin"]).stdout
    assert "origin" in shown.splitlines()[0] and "default" in shown
    assert "origin" not in CliRunner().invoke(cli_fedsilo.app, ["config", "show"]).stdout.splitlines()[0]


def test_validate_judges_each_file_and_ends_with_the_first_fault(place: PolicySite) -> None:
    assert run("config", "validate", "silo.yaml", "policy.yaml")[0] == 0
    text = (place.folder / "silo.yaml").read_text()
    (place.folder / "wrong.yaml").write_text(text.replace("state_dir:", "state_dirr:"))
    code, answer = run("config", "validate", "policy.yaml", "wrong.yaml", "silo.yaml")
    assert code == 2 and [row["ok"] for row in answer["data"]["files"]] == [True, False, True]
    assert "wrong.yaml:" in answer["error"]["message"]
    (place.folder / "other.yaml").write_text("a: 1\n")
    assert run("config", "validate", "other.yaml")[0] == 2
    assert run("config", "validate", "nowhere.yaml")[0] == 8


@pytest.mark.parametrize("kind", ["silo", "coordinator", "policy", "run"])
def test_schema_is_a_json_schema(kind: str) -> None:
    code, answer = run("config", "schema", kind)
    assert code == 0 and answer["data"]["type"] == "object"
    assert answer["data"]["additionalProperties"] is False and answer["data"]["properties"]
    assert not any(gone in json.dumps(answer) for gone in GONE)


# ---- context ---------------------------------------------------------------------------------------


def test_contexts_are_kept_used_and_forgotten(place: PolicySite, tmp_path: Path) -> None:
    assert run("context", "list")[1]["data"]["contexts"] == []
    assert run("context", "add", "here", "--config", "silo.yaml")[0] == 0
    assert run("context", "add", "there", "--socket", "c.sock")[0] == 0
    _, answer = run("context", "list")
    rows = {row["name"]: row for row in answer["data"]["contexts"]}
    assert (rows["here"]["kind"], rows["here"]["site"], rows["here"]["current"]) == ("silo", "hospital_a", True)
    assert rows["here"]["socket"] == str(place.folder / "state" / "control.sock")
    assert (rows["there"]["kind"], rows["there"]["current"]) == ("coordinator", False)
    assert rows["there"]["socket"] == str(place.folder / "c.sock")
    assert run("context", "use", "there")[1]["data"]["current"] == "there"
    assert stat.S_IMODE((tmp_path / "kept" / "contexts.yaml").stat().st_mode) == 0o600
    assert run("context", "remove", "there")[1]["data"]["current"] == ""
    assert [row["name"] for row in run("context", "list")[1]["data"]["contexts"]] == ["here"]


def test_commands_at_once_lose_no_context(place: PolicySite, tmp_path: Path) -> None:
    folder, names = tmp_path / "kept", [f"c{number}" for number in range(4)]
    program = "from fedsilo.cli import main as cli; cli.fedsilo_main()"
    with changing():  # so that they all come at one time
        started = [
            subprocess.Popen(
                [sys.executable, "-c", program, "context", "add", name, "--socket", f"{name}.sock", "--json"],
                stdout=subprocess.DEVNULL,
            ) for name in names
        ]  # fmt: skip
        assert wait_for(lambda: all(waits_for_a_lock(each.pid) for each in started))
        assert not (folder / "contexts.yaml").exists()
    assert [each.wait(60) for each in started] == [0] * 4
    assert {row["name"] for row in run("context", "list")[1]["data"]["contexts"]} == set(names)


def waits_for_a_lock(process: int) -> bool:
    rows = [row.split() for row in Path("/proc/locks").read_text().splitlines()]
    return any(row[1] == "->" and str(process) == row[5] for row in rows)


def wait_for(holds: Callable[[], bool], seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def test_a_context_is_not_replaced_by_accident(place: PolicySite) -> None:
    assert run("context", "add", "here", "--config", "silo.yaml")[0] == 0
    assert run("context", "add", "here", "--socket", "c.sock")[0] == 6
    assert run("context", "add", "here", "--socket", "c.sock", "--force")[0] == 0
    for name in ("use", "remove"):
        assert run("context", name, "nowhere")[0] == 8
    assert run("context", "add", "x")[0] == 2
    assert run("context", "add", "x", "--config", "silo.yaml", "--socket", "c.sock")[0] == 2
    assert run("context", "add", "x y", "--socket", "c.sock")[0] == 2


# ---- doctor ----------------------------------------------------------------------------------------


def found(program: str, config: Path | None) -> dict[str, Finding]:
    return {each.check: each for each in findings(program, config)}


def test_doctor_needs_nothing_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSILO_CONTEXTS", str(tmp_path / "contexts.yaml"))
    for app, name in ((cli_silo.app, "silo"), (cli_coordinator.app, "coordinator"), (cli_fedsilo.app, "fedsilo")):
        answer = CliRunner().invoke(app, ["doctor", "--json"])
        checks = {row["check"] for row in json.loads(answer.stdout)["data"]["checks"]}
        assert checks >= {"fedsilo", "contexts", "configuration", "disk", "clock"}, name
        assert ("isolation of the trainer" in checks) == (name != "coordinator")
    assert list(tmp_path.iterdir()) == []


def test_doctor_reads_a_configuration_and_looks_for_its_daemon(place: PolicySite, site: Site) -> None:
    config = place.folder / "silo.yaml"
    checks = found("silo", config)
    assert checks["configuration"].ok is True and checks["control socket"].ok is None
    os.link(site.socket, place.folder / "state" / "control.sock")
    assert found("silo", config)["control socket"].found.endswith("answers, sequence 0")
    site.socket.chmod(0o666)
    assert found("silo", config)["control socket"].ok is False
    config.write_text("silo: 7\n")
    assert found("silo", config)["configuration"].ok is False


def test_doctor_names_the_way_to_the_coordinator(place: PolicySite, monkeypatch: pytest.MonkeyPatch) -> None:
    config, name = place.folder / "silo.yaml", "way to the coordinator"
    plain, login = config.read_text(), place.folder / "id" / "proxy.login"
    for variable in proxied.ENVIRONMENT:
        monkeypatch.delenv(variable, raising=False)
    told = found("silo", config)[name]
    assert told.ok is True and told.found.endswith(", directly")

    monkeypatch.setenv("HTTPS_PROXY", "http://carol:hunter2@proxy.example:3128")
    told = found("silo", config)[name]
    assert told.ok is None and "HTTPS_PROXY" in told.hint and "hunter2" not in str(told)

    named = 'proxy: "http://proxy.example:3128", proxy_credentials: id/proxy.login'
    assert plain.count('"host:1"}') == 1
    config.write_text(plain.replace('"host:1"}', f'"host:1", {named}}}'))
    told = found("silo", config)[name]
    assert told.ok is False and "proxy.login" in told.found
    login.write_text("silo:hunter2\n")
    login.chmod(0o600)
    told = found("silo", config)[name]
    assert told.ok is True and told.found == "host:1, through the proxy proxy.example:3128"
    assert "hunter2" not in str(told)


def test_doctor_finds_a_clock_behind_the_log_and_a_full_disk(
    place: PolicySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.start()
    config = place.folder / "silo.yaml"
    assert found("silo", config)["clock"].ok is True and found("silo", config)["disk"].ok is not False
    (log,) = (place.folder / "state" / "audit").glob("*.jsonl")
    later = log.stat().st_mtime + CLOCK_BEHIND_SECONDS_MAX + 60
    os.utime(log, (later, later))
    assert found("silo", config)["clock"].ok is False
    monkeypatch.setattr(durable, "DISK_BYTES_MIN", 1 << 62)
    answer = CliRunner().invoke(cli_silo.app, ["doctor", "--config", str(config), "--json"])
    told = json.loads(answer.stdout)
    assert answer.exit_code == 1 and "disk" in told["error"]["message"] and "clock" in told["error"]["message"]
    assert told["data"]["checks"]


def test_a_check_that_cannot_be_done_is_a_finding_and_the_others_go_on(
    place: PolicySite, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = place.folder / "silo.yaml"
    place.start()

    def refused(*arguments: Any) -> Any:
        raise PermissionError(13, "Permission denied", "/srv/x")

    good = found("silo", config)
    assert all(good[name].ok is not False for name in ("configuration", "disk", "clock", "control socket"))
    for check, where, what in (
        ("disk", durable.shutil, "disk_usage"), ("clock", Path, "iterdir"),
        ("configuration", Path, "exists"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(where, what, refused)
            told = found("silo", config)
        assert told[check].ok is False and told[check].found.endswith(": Permission denied") and told[check].hint
        assert "isolation of the trainer" in told


# ---- who holds a lock ------------------------------------------------------------------------------


def test_asking_who_holds_a_lock_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert holder_of(path) == 0 and not path.exists()
    path.write_text("4242\n")
    assert holder_of(path) == 0 and path.read_text() == "4242\n"
    with lock_exclusively(path):
        assert holder_of(path) == os.getpid()
