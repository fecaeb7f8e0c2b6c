"""What a running silo answers to its operators while one of its releases is held: every query by its command."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.loopback.conftest import HOLDS
from tests.loopback.federation import Federation, command, records
from tests.loopback.test_hold_and_approve import TAKES_PART, answer, held_release

WAIT_SECONDS = 60


@pytest.mark.slow
def test_each_query_of_a_running_silo_agrees_with_its_log(sites: Federation) -> None:
    assert sites.submit("queried", silos=TAKES_PART).exit_code == 0
    shown = held_release(sites)
    site = sites.site(HOLDS)

    def ask(*arguments: object) -> Any:
        return command("silo", *arguments, "--config", site.config).data

    whole = {line["seq"]: line for line in records(site.audit_log)}
    listed = ask("outbox", "list", "--limit", 500)["messages"]
    (held,) = [row for row in listed if row["verdict"] == "hold" and row["run"] == "queried"]
    assert (held["kind"], held["digest"], held["outcome"]) == ("lora.factors", shown["digest"], "")
    assert all(row["kind"] == whole[row["seq"]]["kind"] for row in listed if row["seq"] in whole)
    assert "persons must approve exactly these bytes" in ask("outbox", "show", held["seq"])["would_pass"][0]
    assert "run.plan" in {row["kind"] for row in ask("inbox", "list", "--limit", 500)["messages"]}
    assert ask("audit", "show", held["seq"]) == whole[held["seq"]]
    limits = {(row["limit"], row["kind"]): row for row in ask("ledger", "limits")["rows"]}
    assert 0 < limits["day_bytes", "all"]["used"] < limits["day_bytes", "all"]["max"]
    assert ask("ledger", "forecast")["dp"] == "off"
    certificates = {row["whose"]: row for row in ask("certs")}
    assert certificates["this silo"]["in_use"] and certificates["this silo"]["role"] == "silo"
    assert {row["key"]: row["value"] for row in ask("settings")}["silo"] == HOLDS

    ask("audit", "verify")
    deadline = time.monotonic() + WAIT_SECONDS
    while (status := ask("audit", "status"))["verifying"]:
        assert time.monotonic() < deadline
    assert status["broken"] is None and status["verified_to"] > held["seq"] and status["coordinator"] == "matches"
    assert answer(sites, "reject", shown, "bob").exit_code == 0
    sites.ended("queried")
