"""--dry-run: what is checked is checked, what would be changed first is told, and nothing is changed."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from certs.roles import ACTIONS, render_roles
from fedsilo.audit.orders import COMMANDS
from fedsilo.cli import approvals as cli_approvals
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.cli import policy as cli_policy
from fedsilo.cli import silo as cli_silo
from fedsilo.cli.output import ACTIONS_OF_COMMANDS, command, emit
from fedsilo.control.client import ControlClient, Operator, sign_as
from fedsilo.control.dry_run import DryRun, dry_run
from silo.guard import ledger_check
from silo.guard.commands import Orders
from silo.guard.ledger import Ledger
from silo.guard.site import LEDGER
from tests.console.commands import Site, run
from tests.console.states import DIGEST, POLICY_DIGEST, SHOWN
from tests.policies.test_model_folder import whole_folder
from tests.simulated.policy_site import PolicySite, text_of


def told(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Everything about a folder that a command could change: mode, size and time of change, content."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode, path.lstat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in sorted(folder.rglob("*"))
    }  # fmt: skip


# ---- the hook --------------------------------------------------------------------------------------


def _write(path: Path) -> None:
    path.write_text("x")


CHANGES: dict[str, Callable[[Path], object]] = {
    "write a new file": lambda folder: _write(folder / "new"),
    "append": lambda folder: (folder / "file").open("a"),
    "update": lambda folder: (folder / "file").open("r+b"),
    "open to write": lambda folder: os.open(folder / "file", os.O_WRONLY),
    "make a folder": lambda folder: (folder / "new").mkdir(),
    "remove": lambda folder: (folder / "file").unlink(),
    "remove a folder": lambda folder: (folder / "below").rmdir(),
    "rename": lambda folder: (folder / "file").rename(folder / "new"),
    "replace": lambda folder: (folder / "file").replace(folder / "new"),
    "link": lambda folder: os.link(folder / "file", folder / "new"),
    "link softly": lambda folder: (folder / "new").symlink_to("file"),
    "mode": lambda folder: (folder / "file").chmod(0o777),
    "cut": lambda folder: os.truncate(folder / "file", 0),
    "time": lambda folder: os.utime(folder / "file", (0, 0)),
    "database": lambda folder: sqlite3.connect(folder / "new.db"),
    "process": lambda folder: subprocess.run([sys.executable, "-c", ""], check=True),
    "signal": lambda folder: os.kill(os.getpid(), signal.SIGUSR1),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "below").mkdir()
    (tmp_path / "file").write_text("kept")
    with sqlite3.connect(tmp_path / "old.db") as database:
        database.execute("CREATE TABLE t (n)")
    database.close()
    return tmp_path


@pytest.mark.parametrize("name", CHANGES)
def test_no_change_gets_through(name: str, folder: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # ends this process, if it came
    before = told(folder)
    with dry_run() as trying:
        CHANGES[name](folder)
    assert trying.what and told(folder) == before


def test_reading_gets_through(folder: Path) -> None:
    with dry_run() as trying:
        assert (folder / "file").read_text() == "kept"
        with pytest.raises(FileExistsError):
            (folder / "below").mkdir()
        reading = sqlite3.connect(f"file:{folder / 'old.db'}?mode=ro&immutable=1", uri=True)
        assert reading.execute("SELECT count(*) FROM t").fetchone() == (0,)
        reading.close()
        os.kill(os.getpid(), 0)
        os.open(os.devnull, os.O_WRONLY)
    assert trying.what == ""


def test_afterwards_changes_are_changes_again(folder: Path) -> None:
    with dry_run():
        _write(folder / "new")
    _write(folder / "new")
    assert (folder / "new").read_text() == "x"


def test_a_dry_run_that_finds_nothing_to_change_says_so(folder: Path) -> None:
    app = typer.Typer()

    @command(app, "certs ca-init")
    def satisfied() -> None:
        if not (folder / "file").exists():
            _write(folder / "file")
        emit({"written": False}, "as it should be")

    before = told(folder)
    code, answer = run(app, "--dry-run")
    assert code == 0 and answer["warnings"] == ["dry run: nothing would be changed"]
    assert told(folder) == before
    (folder / "file").unlink()
    assert run(app, "--dry-run")[1]["data"]["first"]["target"] == str(folder / "file")


def test_a_command_that_takes_the_end_for_its_own_says_nothing_of_a_success(folder: Path) -> None:
    app = typer.Typer()

    @command(app, "certs ca-init")
    def stubborn() -> None:
        with contextlib.suppress(BaseException):  # what no command should do
            _write(folder / "new")
        emit({"written": True}, "written")

    code, answer = run(app, "--dry-run")
    assert (code, answer["data"]["first"]["target"]) == (0, str(folder / "new"))
    assert not (folder / "new").exists()
    assert run(app) == (0, {**answer, "data": {"written": True}})
    assert (folder / "new").exists()


# ---- commands that write files ---------------------------------------------------------------------


FILE_COMMANDS = {
    "certs ca-init f --out ca --kind federation": "ca",
    "certs trial f --silos a,b --out trial": "trial",
    "certs invite silo/hospital_a --ca authority": "authority",
    "model build --tokenizer bytes --out model": "model",
    "data make-demo demo-data": "demo-data",
    "policy schema make --model base --rank 2 --out schema.json": "schema.json",
    "context add prod --socket c.sock --silo hospital_a": "contexts.yaml",
    "context use known": "contexts.yaml",
    "context remove known": "contexts.yaml",
    "bundle --out bundle.tar.gz": "bundle.tar.gz",
    "demo --no-console --out run": "run",
    "audit export --log missing --to records.jsonl --format jsonl": "",
}
RUN_FOR_REAL = {
    name for name, changed in FILE_COMMANDS.items() if changed and not name.startswith(("demo", "data", "model"))
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSILO_CONTEXTS", str(tmp_path / "contexts.yaml"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(cli_fedsilo.app, "certs", "ca-init", "f", "--out", "authority", "--kind", "federation")[0] == 0
    assert run(cli_fedsilo.app, "context", "add", "known", "--socket", "k.sock")[0] == 0
    whole_folder(tmp_path / "base")
    return tmp_path


@pytest.mark.quick(keep=4)
@pytest.mark.parametrize("line", FILE_COMMANDS)
def test_a_dry_run_leaves_the_folder_as_it_was(line: str, place: Path) -> None:
    before = told(place)
    code, answer = run(cli_fedsilo.app, *line.split(), "--dry-run")
    assert told(place) == before
    if not FILE_COMMANDS[line]:  # it ends before it would change anything, with what it always says
        assert code != 0 and not answer["ok"]
        return
    assert code == 0, answer
    data = answer["data"]
    assert data["dry_run"] is True and data["changes"] and data["command"] is None
    assert FILE_COMMANDS[line] in data["first"]["target"] or data["first"]["what"] == "make the folder"
    if line in RUN_FOR_REAL:
        assert run(cli_fedsilo.app, *line.split())[0] == 0
        assert told(place) != before


def test_what_is_wrong_is_told_by_the_dry_run_too(place: Path) -> None:
    code, answer = run(cli_fedsilo.app, "context", "add", "known", "--socket", "c.sock", "--dry-run")
    assert (code, answer["error"]["code"]) == (6, "CONFLICT")
    assert run(cli_fedsilo.app, "context", "add", "other", "--socket", "c.sock", "--dry-run")[0] == 0
    assert run(cli_fedsilo.app, "context", "remove", "nobody", "--dry-run")[0] == 8


# ---- commands that are signed ----------------------------------------------------------------------


ANSWER = ("r1/hospital_a/0", "--expect-digest", DIGEST, "--expect-policy", POLICY_DIGEST, "--expect-shown", SHOWN)


@pytest.fixture
def signing(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    (site.folder / "roles.yaml").write_text(render_roles("hospital_a", {"alice": ["approver"], "bob": ["viewer"]}))
    (site.folder / "site_ca.crt").write_bytes(site.authority)
    site.configure(monkeypatch, cli_approvals, cli_silo)
    return site


def test_T36_a_signed_command_is_shown_and_neither_signed_nor_sent(signing: Site) -> None:
    code, answer = run(cli_silo.app, "approvals", "approve", *ANSWER, "--operator", "alice", "--dry-run")
    assert code == 0, answer
    command = answer["data"]["command"]
    assert (command["person"], command["roles"], command["name"]) == ("alice", ["approver"], "approvals.approve")
    assert command["arguments"]["digest"] == DIGEST and signing.approved == []
    assert run(cli_silo.app, "approvals", "approve", *ANSWER, "--operator", "alice")[0] == 0
    assert len(signing.approved) == 1


def test_T36_who_may_not_is_told_before_anything_is_sent(signing: Site) -> None:
    code, answer = run(cli_silo.app, "approvals", "approve", *ANSWER, "--operator", "bob", "--dry-run")
    assert (code, answer["error"]["code"], answer["error"]["hint"]) == (4, "NOT_ALLOWED", "may: alice")
    code, answer = run(cli_silo.app, "approvals", "approve", *ANSWER, "--operator", "nobody", "--dry-run")
    assert (code, answer["error"]["code"]) == (8, "NOT_FOUND")
    (signing.folder / "roles.yaml").unlink()  # then only the daemon knows
    code, answer = run(cli_silo.app, "approvals", "approve", *ANSWER, "--operator", "bob", "--dry-run")
    assert (code, answer["data"]["command"]["roles"]) == (0, [])


def test_every_way_to_the_daemon_is_closed(signing: Site) -> None:
    person = Operator("hospital_a", *signing.person("alice"), "cardio-net")
    with dry_run() as trying, ControlClient(signing.socket) as client:
        client.execute(sign_as(person, "approvals.approve", {"release": "r1/hospital_a/0", "digest": DIGEST}))
    assert isinstance(trying, DryRun) and trying.signing is not None
    assert trying.signing.name == "approvals.approve" and signing.approved == []


def test_T34_a_policy_is_not_proposed_by_a_dry_run(tmp_path: Path) -> None:
    place = PolicySite(tmp_path / "site")
    place.policy_is(text_of())
    place.start()
    (place.folder / "new.yaml").write_text(text_of(("min_peers: 2", "min_peers: 1")))
    line = ("propose", place.folder / "new.yaml", "--config", place.folder / "silo.yaml", "--operator")
    # Who reads a ledger leaves SQLite's two empty files beside it: held open, they are there before and after.
    reading = Ledger(place.folder / "state" / LEDGER, read_only=True)
    assert reading.policy_in_force is not None
    before = told(place.folder)
    code, answer = run(cli_policy.app, *line, "alice", "--dry-run")
    assert (code, answer["data"]["command"]["name"]) == (0, "policy.propose"), answer
    assert told(place.folder) == before
    reading.close()
    assert run(cli_policy.app, *line, "alice")[0] == 0
    assert told(place.folder) != before


class _Registered:
    """A desk that only keeps what daemons register."""

    def __init__(self) -> None:
        self.actions: dict[str, str] = {}

    def register_query(self, name: str, answer: object) -> None: ...

    def register_command(self, name: str, action: str, handler: object, *, by_clock: bool = False) -> None:
        self.actions[name] = action


def test_commands_stand_for_the_actions_that_the_daemons_register() -> None:
    desk: Any = _Registered()
    nothing: dict[str, Any] = {
        each.name: SimpleNamespace(queries=dict, record=dict, acceptance=SimpleNamespace(view=dict))
        for each in dataclasses.fields(Orders)
    }
    Orders(**nothing).register(desk)
    assert len(desk.actions) >= 8
    for name, action in desk.actions.items():
        assert ACTIONS_OF_COMMANDS.get(name, name) == action, name
    assert ACTIONS_OF_COMMANDS[ledger_check.ACCEPT] == ledger_check.MAY_ACCEPT
    assert set(ACTIONS_OF_COMMANDS.values()) <= ACTIONS.keys()
    # T36: what changes something is known to whoever verifies the signature that its record keeps
    known = {*COMMANDS.values(), "approvals.approve", "approvals.release"}
    assert {name for name, action in desk.actions.items() if action != "payload.read"} <= known
    # the coordinator registers `run.VERB` as the action of that name
    assert {f"run.{verb}" for verb in ("submit", "start", "pause", "resume", "abort")} <= ACTIONS.keys()
