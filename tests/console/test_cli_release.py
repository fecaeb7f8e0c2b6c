"""`silo approvals release`: a real gate that its screens halted, a real desk, commands signed with real keys (T18)."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.cli import approvals as cli_approvals
from silo.guard.commands import Halts
from silo.guard.messages import Allowed, Denied
from tests.console.test_real_desk import Site, site
from tests.simulated import screening
from tests.world import Bench

__all__ = ["site"]  # a fixture is found by its name

KIND = "public.responses"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Halted: it had one hit, and none is allowed."""
    with closing(screening.bench(tmp_path / "bench", screening.policy(["pii_basic"], max_hits_per_day=0))) as made:
        assert isinstance(made.responses((1, (screening.PLANTED["pii_basic"],)), (4, ()), (7, ())), Denied)
        yield made


@pytest.fixture
def ask(site: Site, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Any:
    halts = Halts(bench.judge, bench.ledger)
    answers: dict[str, Any] = {}

    def release(command: Any) -> Any:
        # The desk serves on a thread of its own; the ledger takes that, the audit log of a bench does too.
        answers["person"] = command.person
        return halts.release(command)

    site.desk.register_query("halts", lambda arguments: {"halts": halts.rows()})
    site.desk.register_query("approvals", lambda arguments: {"releases": []})
    site.desk.register_command("approvals.release", "halt.release", release)
    config = SimpleNamespace(
        silo="hospital_a", federation="cardio-net", control=SimpleNamespace(socket=site.socket),
        identity=SimpleNamespace(certificate=site.folder / "hospital_a.crt"),
    )  # fmt: skip
    monkeypatch.setattr(cli_approvals, "load_site", lambda path: config)

    def run(*arguments: str) -> tuple[int, Any]:
        result = CliRunner().invoke(cli_approvals.app, [*arguments, "--json"])
        return result.exit_code, json.loads(result.output)

    return run


def test_T18_release_is_signed_by_an_approver_over_what_is_halted(bench: Bench, ask: Any) -> None:
    code, listed = ask("list")
    assert code == 0
    (row,) = listed["data"]["halts"]
    assert (row["kind"], row["given"], row["needed"]) == (KIND, [], 1)
    assert "halted by its text screens" in listed["warnings"][0]
    code, answer = ask("release", KIND, "--operator", "bob", "--expect-digest", row["digest"])
    assert (code, answer["error"]["code"]) == (4, "NOT_ALLOWED")  # a viewer
    code, answer = ask("release", KIND, "--operator", "alice", "--expect-digest", "0" * 64)
    assert (code, answer["error"]["code"]) == (6, "STALE_VIEW")
    code, answer = ask("release", KIND, "--operator", "alice")
    assert code == 2 and "--expect-digest" in answer["error"]["message"]  # no terminal
    code, answer = ask("release", "lora.factors", "--operator", "alice")
    assert code == 8
    assert isinstance(bench.responses((1, ("12",)), (4, ()), (7, ())), Denied)
    code, answer = ask("release", KIND, "--operator", "alice", "--expect-digest", row["digest"])
    assert code == 0 and answer["data"]["released"] is True
    assert isinstance(bench.responses((1, ("12",)), (4, ()), (7, ())), Allowed)
    assert ask("list")[1]["data"]["halts"] == []


@pytest.mark.parametrize("right", [True, False])
def test_on_a_terminal_the_digest_is_shown_and_typed_back(
    bench: Bench, ask: Any, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    digest = Halts(bench.judge, bench.ledger).rows()[0]["digest"]
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", screen := Terminal())
    monkeypatch.setattr(cli_approvals.typer, "prompt", lambda text: digest[-4:] if right else "none")
    config = cli_approvals.load_site(Path("silo.yaml"))
    if right:
        assert cli_approvals.halt_shown(config, KIND) == digest
        assert digest in screen.getvalue()
    else:
        with pytest.raises(cli_approvals.UsageError, match="not the last 4 characters"):
            cli_approvals.halt_shown(config, KIND)


@pytest.mark.parametrize("typed", ["right", "wrong at the last"])
def test_a_whole_round_is_read_before_any_of_it_is_approved_and_the_update_goes_last(
    site: Site, ask: Any, monkeypatch: pytest.MonkeyPatch, typed: str
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    held = {
        "r3/hospital_a/0": "lora.factors",
        "r3/hospital_a/1": KIND,
        "r3/hospital_a/10": KIND,
        "r3/hospital_a/2": KIND,
    }
    rows = [{"id": name, "kind": kind} for name, kind in {**held, "r2/hospital_a/0": "lora.factors"}.items()]
    digests = {name: f"{number:064x}" for number, name in enumerate(held, 0xABCD)}
    approved: list[tuple[str, str]] = []

    def approve(config: Any, operator: str, name: str, arguments: Any, request_id: str) -> Any:
        approved.append((arguments["release"], arguments["digest"]))
        return {"release": arguments["release"], "state": "approved", "given": [operator], "needed": 1}

    shown = {"state": "held", "revision": 1, "policy": {"digest": "ef" * 32}, "noticed": []}
    monkeypatch.setattr(cli_approvals, "every_page", lambda client, wanted: {"releases": rows})
    site.desk.register_query(
        "approval", lambda arguments: {**shown, "id": arguments["release"], "digest": digests[arguments["release"]]}
    )
    monkeypatch.setattr(cli_approvals, "command", approve)  # what is signed with real keys has tests of its own
    monkeypatch.setattr(cli_approvals, "release_text", lambda data, columns: str(data["id"]))
    whole = ("approve", "r3/hospital_a", "--operator", "alice")
    code, answer = ask(*whole)
    assert (code, approved) == (2, []) and "r3/hospital_a/1, r3/hospital_a/2, r3/hospital_a/10" in answer["error"][
        "hint"
    ]
    assert ask(*whole, "--expect-digest", "0" * 64)[0] == 2
    assert ask("approve", "r4/hospital_a", "--operator", "alice")[0] == 8

    order = ["r3/hospital_a/1", "r3/hospital_a/2", "r3/hospital_a/10", "r3/hospital_a/0"]
    answers = [digests[name][-4:] for name in order]
    if typed != "right":
        answers[-1] = "none"
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(cli_approvals, "require_terminal", lambda *_: None)
    monkeypatch.setattr(cli_approvals.typer, "prompt", lambda text: answers.pop(0))
    monkeypatch.setattr(cli_approvals.typer, "echo", lambda text: None)
    result = CliRunner().invoke(cli_approvals.app, list(whole))
    if typed == "right":
        assert result.exit_code == 0, result.output
        assert approved == [(name, digests[name]) for name in order]
    else:
        assert (result.exit_code, approved) == (2, [])
