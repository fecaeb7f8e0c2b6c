"""Hostile processes beside real ones, over mTLS, and what each site's own log says of them.

Every attack is made in memory by tests/security/test_X09_*; here are a few of each kind, through everything there is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hostile.attacks import named
from tests.hostile.federation import Attacked, attacked_by_trainer
from tests.loopback.federation import nothing_planted_crossed

LAST_OF_THREE = "hospital_c"
# What is tried by the coordinator of `attacked`, and what must come of it.
COORDINATOR_ATTACKS = {
    "temperature_out_of_range": ("deny", "plan temperature"),
    "other_run": ("deny", "run"),
    "wrong_key": ("deny", "SIGNATURE_INVALID"),
    "wrong_donors": ("drop", "donors graded here"),
    "unknown_prompt_index": ("deny", "prompts are rows of the public set"),
}

pytestmark = [pytest.mark.demo, pytest.mark.slow]


def content(lines: list[dict[str, Any]], run: str, number: int | None = None) -> list[str]:
    return [
        line["kind"]
        for line in lines
        if line["event"] == "egress.sent" and line.get("run") == run and number in (None, line["round"])
        and not line["kind"].startswith("control.")
    ]  # fmt: skip


def test_X09_each_attack_of_the_coordinator_is_refused_by_its_rule_in_the_silos_own_log(attacked: Attacked) -> None:
    assert not any(row["obeyed"] for row in attacked.rows)
    rows = {row["name"]: row for row in attacked.rows}
    assert {name: (row["decision"], row["rule"]) for name, row in rows.items()} == COORDINATOR_ATTACKS
    for name, row in rows.items():
        line = attacked.log_of(row["silo"])[row["record"]]  # a changed plan goes to all
        assert line["event"] == "ingress.decision"
        assert line["decision"] == ("allow" if name == "wrong_donors" else "deny")
    dropped = rows["wrong_donors"]
    assert dropped["silo"] == LAST_OF_THREE
    facts = attacked.log_of(LAST_OF_THREE)[dropped["record"]]["facts"]
    counts = facts["transform"]["donors_dropped"]  # of whichever of the others had right answers in that step
    assert counts and counts.keys() <= {"hospital_a", "hospital_b"} and min(counts.values()) > 0


def test_X09_T12_T13_nothing_was_given_to_what_was_refused_and_the_run_went_on(attacked: Attacked) -> None:
    rows = {row["name"]: row for row in attacked.rows}
    plan, asked = rows["temperature_out_of_range"], rows["unknown_prompt_index"]
    for site in ("hospital_a", LAST_OF_THREE):  # a changed plan went to both
        lines = attacked.log_of(site)
        assert content(lines, plan["run"]) == []
        assert not [line for line in lines if line["event"] == "plan.accept" and line["run"] == plan["run"]]
    lines = attacked.log_of(LAST_OF_THREE)
    assert content(lines, asked["run"], asked["round"]) == []
    assert content(lines, asked["run"], asked["round"] - 1)  # the counterpart: the round before it
    rounds = {row["round"]: row["participants"] for row in attacked.record["rounds"]}
    assert rounds[asked["round"]] == ["hospital_a", "hospital_b"]
    assert rounds[asked["round"] - 1] == ["hospital_a", "hospital_b", LAST_OF_THREE]
    assert attacked.record["state"] == "finished"


def test_X09_nothing_planted_left_for_any_of_it(attacked: Attacked) -> None:
    nothing_planted_crossed(attacked.witness.search(["spiffe://demo/silo/"]))


def test_T03_a_trainer_whose_message_is_none_ends_and_the_run_goes_on(tmp_path: Path) -> None:
    (attack,) = named("unknown_field")
    made = attacked_by_trainer(tmp_path / "out", attack)
    (row,) = made.rows
    assert (row["decision"], row["rule"]) == ("stop", "TRAINER_CONFUSED")
    line = made.log_of(LAST_OF_THREE)[row["record"]]
    assert (line["event"], line["decision"], line["reasons"]) == ("egress.decision", "deny", ["TRAINER_CONFUSED"])
    assert "lora.factors" not in content(made.log_of(LAST_OF_THREE), row["run"])
    assert [each["participants"] for each in made.record["rounds"]] == [["hospital_a", "hospital_b"]]
    nothing_planted_crossed(made.witness.search(["spiffe://demo/silo/"]))
