"""Daemons without work poll all the time and write next to nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.loopback.federation import Federation, records

POLLS = 4
SILO = "hospital_b"

pytestmark = [pytest.mark.demo, pytest.mark.slow]


def polls_of(state: dict[str, Any]) -> int:
    return sum(row["messages"] for row in state["left"] if row["kind"] == "control.poll")


def test_an_idle_silo_polls_and_its_log_and_the_coordinators_do_not_grow(sites: Federation) -> None:
    logs = (sites.site(SILO).audit_log, sites.sites.coordinator.audit_log)
    begun = polls_of(sites.until_state(SILO, lambda state: polls_of(state) > 0))
    before = [len(records(log)) for log in logs]
    after = polls_of(sites.until_state(SILO, lambda state: polls_of(state) >= begun + POLLS))
    grown = [len(records(log)) - size for log, size in zip(logs, before, strict=True)]
    assert after - begun >= POLLS
    # an hour may end meanwhile: two records of each silo's window; one record a poll was three
    assert all(more <= 2 * 3 for more in grown) and sum(grown) < POLLS * 3
