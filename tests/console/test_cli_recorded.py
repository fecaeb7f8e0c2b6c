"""Which record of the log the commands name: the one that holds the order, not whatever the log ends with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.cli import approvals as cli_approvals
from fedsilo.cli import silo as cli_silo
from tests.console.states import DIGEST, POLICY_DIGEST
from tests.console.test_real_desk import Site, site

__all__ = ["site"]  # a fixture is found by its name

RECORD, LOG_SIZE = 41, 97
RELEASE = "r1/hospital_a/0"
PROOF = ("--expect-digest", DIGEST, "--expect-policy", POLICY_DIGEST)
ANSWERS: dict[str, dict[str, Any]] = {
    "approvals.reject": {"release": RELEASE, "state": "rejected"},
    "approvals.defer": {"release": RELEASE, "state": "held", "deferred_until": 0.0, "expires_at": 1.0},
    "pause": {"paused": True},
    "resume": {"paused": False},
    "policy.reload": {"policy": POLICY_DIGEST, "change": "equal", "fields": [], "ends": ""},
}
WORDS = {
    "approvals.reject": ("approvals", "reject", RELEASE, "--reason", "CONTENT", *PROOF),
    "approvals.defer": ("approvals", "defer", RELEASE, "--minutes", "5", *PROOF),
    "pause": ("pause",), "resume": ("resume",), "policy.reload": ("reload",),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_names_the_record_of_the_order(name: str, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(
        silo="hospital_a", federation="cardio-net", control=SimpleNamespace(socket=site.socket),
        identity=SimpleNamespace(certificate=site.folder / "hospital_a.crt"),
    )  # fmt: skip
    for module in (cli_approvals, cli_silo):
        monkeypatch.setattr(module, "load_site", lambda path: config)
    told = {"record": RECORD, "audit_size": LOG_SIZE}
    # any action that the fixture's approver may give: which one a command needs is tested with the real guard
    site.desk.register_command(name, "release.reject", lambda command: ANSWERS[name] | told)

    def text() -> str:
        result = CliRunner().invoke(cli_silo.app, [*WORDS[name], "--operator", "alice", "--config", str(Path("x"))])
        assert result.exit_code == 0, result.output
        return result.stdout

    assert text().rstrip().endswith(f", audit record {RECORD}")
    del told["record"]  # a daemon whose log takes nothing
    assert "audit record" not in text()
