"""Which record of the log the commands name: the one that holds the order, not whatever the log ends with."""

from __future__ import annotations

from typing import Any

import pytest

from fedsilo.cli import approvals as cli_approvals
from fedsilo.cli import silo as cli_silo
from tests.console.commands import ALICE, Site, printed
from tests.console.states import DIGEST, POLICY_DIGEST

RECORD, LOG_SIZE = 41, 97
RELEASE = "r1/hospital_a/0"
PROOF = ("--expect-digest", DIGEST, "--expect-policy", POLICY_DIGEST)
REJECTED = {"release": RELEASE, "state": "rejected"}
DEFERRED = {"release": RELEASE, "state": "held", "deferred_until": 0.0, "expires_at": 1.0}
RELOADED = {"policy": POLICY_DIGEST, "change": "equal", "fields": [], "ends": ""}


@pytest.mark.parametrize(
    ("name", "words", "answer"),
    [
        ("approvals.reject", ("approvals", "reject", RELEASE, "--reason", "CONTENT", *PROOF), REJECTED),
        ("approvals.defer", ("approvals", "defer", RELEASE, "--minutes", "5", *PROOF), DEFERRED),
        ("pause", ("pause",), {"paused": True}),
        ("resume", ("resume",), {"paused": False}),
        ("policy.reload", ("reload",), RELOADED),
    ],
)
def test_an_answer_names_the_record_of_the_order(
    name: str, words: tuple[str, ...], answer: dict[str, Any], site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.configure(monkeypatch, cli_approvals, cli_silo)
    told = answer | {"record": RECORD, "audit_size": LOG_SIZE}
    # any action that the fixture's approver may give: which one a command needs is tested with the real guard
    site.desk.register_command(name, "release.reject", lambda command: told)
    status, text = printed(cli_silo.app, *words, *ALICE)
    assert status == 0 and text.rstrip().endswith(f", audit record {RECORD}")
    del told["record"]  # a daemon whose log takes nothing
    status, text = printed(cli_silo.app, *words, *ALICE)
    assert status == 0 and "audit record" not in text
