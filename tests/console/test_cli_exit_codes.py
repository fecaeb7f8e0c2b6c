"""Each exit status by a real command, and what a fault of ours leaves behind."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from certs.commands import VerifiedCommand
from fedsilo.cli import approvals as cli_approvals
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli import silo as cli_silo
from fedsilo.cli.contract import EXIT_MEANINGS, INTERRUPTED_EXIT_CODE
from fedsilo.cli.crash import reports_folder
from fedsilo.cli.output import command, emit, ended_by
from fedsilo.protocol.errors import DeniedError
from tests.console.commands import Site, run
from tests.console.states import DIGEST, POLICY_DIGEST, SHOWN
from tests.simulated.policy_site import PolicySite, text_of

ANSWER = ("r1/hospital_a/0", "--expect-digest", DIGEST, "--expect-policy", POLICY_DIGEST, "--operator", "alice")

YES = ("--expect-shown", SHOWN)


class Place:
    """One folder and one silo's desk, in which each command ends as it must."""

    def __init__(self, folder: Path, desk: Site) -> None:
        self.folder, self.desk = folder, desk

    def fedsilo(self, *arguments: object) -> tuple[int, dict[str, Any]]:
        return run(cli_fedsilo.app, *arguments)

    def done(self) -> tuple[int, Any]:
        return self.fedsilo("version")

    def failed(self) -> tuple[int, Any]:
        (self.folder / "policy.yaml").write_text(text_of())
        (self.folder / "looser.yaml").write_text(text_of(("min_peers: 2", "min_peers: 1")))
        return self.fedsilo("policy", "diff", "policy.yaml", "looser.yaml", "--fail-on", "looser")

    def misused(self) -> tuple[int, Any]:
        (self.folder / "silo.yaml").write_text("silo: 7\n")
        return self.fedsilo("config", "validate", "silo.yaml")

    def unreachable(self) -> tuple[int, Any]:
        return self.fedsilo("watch", "--socket", self.folder / "nobody.sock")

    def not_allowed(self) -> tuple[int, Any]:
        return run(cli_silo.app, "approvals", "approve", *ANSWER[:-1], "bob", *YES)

    def denied(self) -> tuple[int, Any]:
        def refuse(command: VerifiedCommand) -> Any:
            raise DeniedError(f"policy says no to {command.arguments['release']}")

        self.desk.desk.register_command("approvals.reject", "release.reject", refuse)
        return run(cli_silo.app, "approvals", "reject", *ANSWER, "--reason", "CONTENT")

    def changed(self) -> tuple[int, Any]:
        return run(cli_silo.app, "approvals", "approve", ANSWER[0], "--expect-digest", "0" * 64, *ANSWER[3:], *YES)

    def unverified(self) -> tuple[int, Any]:
        place = PolicySite(self.folder / "site")
        place.policy_is(text_of())
        place.start()
        (log,) = (place.folder / "state" / "audit").glob("*.jsonl")
        log.write_bytes(log.read_bytes().replace(b"policy", b"poliCy", 1))
        return self.fedsilo("audit", "verify", place.folder / "state")

    def missing(self) -> tuple[int, Any]:
        return self.fedsilo("config", "show", "nowhere.yaml")

    def held(self) -> tuple[int, Any]:
        place = PolicySite(self.folder / "site")
        two = ("policy_change: 1", "policy_change: 2")
        place.policy_is(text_of(two))
        place.start()
        (place.folder / "new.yaml").write_text(text_of(two, ("min_peers: 2", "min_peers: 1")))
        config = ("--config", place.folder / "silo.yaml", "--operator")
        _, told = self.fedsilo("policy", "propose", place.folder / "new.yaml", *config, "alice")
        proposal, digest = told["data"]["proposal"], told["data"]["after"]
        return self.fedsilo("policy", "activate", proposal, *config, "bob", "--expect-digest", digest)


ENDS: dict[int, Callable[[Place], tuple[int, Any]]] = {
    0: Place.done, 1: Place.failed, 2: Place.misused, 3: Place.unreachable, 4: Place.not_allowed, 5: Place.denied,
    6: Place.changed, 7: Place.unverified, 8: Place.missing, 9: Place.held,
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, site: Site, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    site.configure(monkeypatch, cli_approvals)
    return Place(tmp_path, site)


@pytest.mark.quick(keep=5)
@pytest.mark.parametrize("code", ENDS)
def test_exit_status_of_a_real_command(code: int, place: Place) -> None:
    exit_code, answer = ENDS[code](place)
    assert exit_code == code, answer
    assert answer["ok"] == (code == 0)
    assert (answer["error"] is None) == (code == 0)
    if code == 3:
        assert answer["error"]["retryable"] is True


def test_the_table_of_statuses_is_whole() -> None:
    assert set(ENDS) | {70, INTERRUPTED_EXIT_CODE} == set(EXIT_MEANINGS)


# ---- faults of ours --------------------------------------------------------------------------------


SECRET = "Anna Beispiel, born 1971"


class PatientAnnaError(Exception):
    """Its message is what must not be told."""


def _reader(text: str) -> None:
    local_copy = text.upper()
    raise ValueError(f"cannot read {local_copy}")


_faulty = typer.Typer()


@command(_faulty, "silo pause")
def fault(text: str, interrupted: bool = False) -> None:
    if interrupted:
        raise KeyboardInterrupt
    try:
        _reader(text)
    except ValueError as error:
        raise PatientAnnaError(f"{text} is private") from error


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("FEDSILO_TRACEBACK", raising=False)
    return tmp_path


def _report() -> tuple[Path, str]:
    (path,) = reports_folder().glob("crash-*.json")
    return path, path.read_text()


def test_a_fault_of_ours_ends_with_70_and_a_report_without_private_text(state_home: Path) -> None:
    answer = CliRunner().invoke(_faulty, [SECRET])
    path, text = _report()
    assert answer.exit_code == 70 and str(path) in answer.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for shown in (text, answer.output):
        assert "Beispiel" not in shown and "BEISPIEL" not in shown and "1971" not in shown
    report = json.loads(text)
    assert report["command"] == "silo pause" and report["versions"]["fedsilo"]
    assert [each["type"].rpartition(".")[2] for each in report["exceptions"]] == ["PatientAnnaError", "ValueError"]
    frames = [frame for each in report["exceptions"] for frame in each["frames"]]
    assert any(re.fullmatch(r"fedsilo/cli/output\.py:\d+ guarded_function", frame) for frame in frames)
    assert str(Path.home()) not in text and str(state_home) not in text


def test_a_fault_is_told_in_the_envelope(state_home: Path) -> None:
    code, answer = run(_faulty, SECRET)
    assert (code, answer["command"], answer["ok"]) == (70, "silo pause", False)
    assert answer["error"]["code"] == "BUG" and str(_report()[0]) in answer["error"]["message"]
    assert SECRET not in json.dumps(answer)


def test_a_report_finds_another_place_or_says_that_there_is_none(
    state_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fedsilo").write_text("in the way of the folder")
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    assert CliRunner().invoke(_faulty, [SECRET]).exit_code == 70
    assert len(list((tmp_path / "scratch").glob("crash-*.json"))) == 1
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "fedsilo" / "no folder"))
    answer = CliRunner().invoke(_faulty, [SECRET])
    assert answer.exit_code == 70 and "no report could be written" in answer.stderr


def test_a_fault_outside_of_any_command_ends_alike(state_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, ended_by(json_output=False):
        raise PatientAnnaError(SECRET)
    assert ended.value.code == 70 and SECRET not in capsys.readouterr().err
    assert _report()[0].is_file()


def test_an_interrupt_is_no_fault(state_home: Path) -> None:
    assert CliRunner().invoke(_faulty, [SECRET, "--interrupted"]).exit_code == INTERRUPTED_EXIT_CODE
    assert not reports_folder().exists()


def test_what_typer_raises_is_no_fault(state_home: Path) -> None:
    app = typer.Typer()

    @command(app, "version")
    def leave(how: str) -> None:
        if how == "param":
            raise typer.BadParameter("not this")
        if how == "abort":
            raise typer.Abort
        emit({}, "left")
        raise typer.Exit(7)

    codes = [CliRunner().invoke(app, [how]).exit_code for how in ("exit", "param", "abort")]
    assert codes == [7, 2, 1]
    assert not reports_folder().exists() and os.environ["XDG_STATE_HOME"] == str(state_home)
