"""`silo approvals release`: a real gate that its screens halted, a real desk, commands signed with real keys (T18)."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.launch import cli_approvals
from silo.guard.halts import Halts
from silo.guard.messages import Allowed, Denied
from tests.console.test_real_desk import Site, site
from tests.simulated import screening
from tests.simulated.guarded import Bench

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
    halts = Halts(bench.gate, bench.ledger)
    answers: dict[str, Any] = {}

    def release(command: Any) -> Any:
        # The desk serves on a thread of its own; the ledger takes that, the audit log of a bench does too.
        answers["person"] = command.person
        return halts.release(command)

    site.desk.register_query("halts", lambda arguments: {"halts": halts.rows()})
    site.desk.register_query("approvals", lambda arguments: {"releases": []})
    site.desk.register_command("approvals.release", "halt.release", release)
    config = SimpleNamespace(
        silo="hospital_a", control=SimpleNamespace(socket=site.socket),
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

    digest = Halts(bench.gate, bench.ledger).rows()[0]["digest"]
    monkeypatch.setattr(cli_approvals.sys, "stdin", Terminal())
    monkeypatch.setattr(cli_approvals.sys, "stdout", screen := Terminal())
    monkeypatch.setattr(cli_approvals.typer, "prompt", lambda text: digest[-4:] if right else "none")
    config = cli_approvals.load_site(Path("silo.yaml"))
    if right:
        assert cli_approvals._halt_shown(config, KIND) == digest
        assert digest in screen.getvalue()
    else:
        with pytest.raises(cli_approvals.UsageError, match="not the last 4 characters"):
            cli_approvals._halt_shown(config, KIND)
