"""`fedsilo demo --attack`: hostile processes beside real ones, over mTLS, and what each site's own log says of them.

Every attack is made in memory by tests/security/test_X09_*; here are a few of each kind, through everything there is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.loopback.federation import COORDINATOR_ATTACKS, SHORT, Demo, command, demo, living, records

LAST_OF_THREE = "hospital_c"

pytestmark = pytest.mark.demo


def log_of(made: Demo, site: str) -> list[dict[str, Any]]:
    return records(made.out / site / "state" / "audit")


def content(lines: list[dict[str, Any]], run: str, number: int | None = None) -> list[str]:
    return [
        line["kind"]
        for line in lines
        if line["event"] == "egress.sent" and line.get("run") == run and number in (None, line["round"])
        and not line["kind"].startswith("control.")
    ]  # fmt: skip


def test_X09_each_attack_of_the_coordinator_is_refused_by_its_rule_in_the_silos_own_log(attacked_demo: Demo) -> None:
    assert attacked_demo.reply.exit_code == 0, attacked_demo.reply.stderr
    rows = {row["name"]: row for row in attacked_demo.data["attacks"]}
    assert {name: (row["decision"], row["rule"]) for name, row in rows.items()} == COORDINATOR_ATTACKS
    for name, row in rows.items():
        line = log_of(attacked_demo, row["silo"])[row["record"]]  # a changed plan goes to all
        assert line["event"] == "ingress.decision"
        assert line["decision"] == ("allow" if name == "wrong_donors" else "deny")
    dropped = rows["wrong_donors"]
    assert dropped["silo"] == LAST_OF_THREE
    facts = log_of(attacked_demo, LAST_OF_THREE)[dropped["record"]]["facts"]
    assert facts["transform"]["donors_dropped"]["hospital_a"] > 0
    assert living(attacked_demo.seen) == []


def test_X09_T12_T13_nothing_was_given_to_what_was_refused_and_the_run_went_on(attacked_demo: Demo) -> None:
    rows = {row["name"]: row for row in attacked_demo.data["attacks"]}
    plan, asked = rows["temperature_out_of_range"], rows["unknown_prompt_index"]
    for site in ("hospital_a", LAST_OF_THREE):  # a changed plan went to both
        lines = log_of(attacked_demo, site)
        assert content(lines, plan["run"]) == []
        assert not [line for line in lines if line["event"] == "plan.accept" and line["run"] == plan["run"]]
    lines = log_of(attacked_demo, LAST_OF_THREE)
    assert content(lines, asked["run"], asked["round"]) == []
    assert content(lines, asked["run"], asked["round"] - 1)  # the counterpart: the round before it
    rounds = {row["round"]: row["participants"] for row in attacked_demo.data["rounds"]}
    assert rounds[asked["round"]] == ["hospital_a", "hospital_b"]
    assert rounds[asked["round"] - 1] == ["hospital_a", "hospital_b", LAST_OF_THREE]
    assert attacked_demo.data["state"] == "finished"


def test_X09_nothing_planted_left_for_any_of_it(attacked_demo: Demo) -> None:
    assert (attacked_demo.data["canaries_on_wire"], attacked_demo.data["positive_control_found"]) == (0, True)


def test_T03_a_trainer_whose_message_is_none_ends_and_the_run_goes_on(tmp_path: Path) -> None:
    made = demo(tmp_path / "out", "--silos", "3", "--rounds", "1", *SHORT, "--attack", "unknown_field")
    (row,) = made.data["attacks"]
    assert (row["decision"], row["rule"]) == ("stop", "TRAINER_CONFUSED")
    line = log_of(made, LAST_OF_THREE)[row["record"]]
    assert (line["event"], line["decision"], line["reasons"]) == ("egress.decision", "deny", ["TRAINER_CONFUSED"])
    assert "lora.factors" not in content(log_of(made, LAST_OF_THREE), row["run"])
    assert [each["participants"] for each in made.data["rounds"]] == [["hospital_a", "hospital_b"]]
    assert (made.data["canaries_on_wire"], made.data["positive_control_found"]) == (0, True)


def test_every_attack_is_listed_with_what_must_come_of_it(tmp_path: Path) -> None:
    from fedsilo.launch.hostile_attacks import ATTACKS

    rows = command("fedsilo", "demo", "--list-attacks").data["attacks"]
    assert [row["name"] for row in rows] == list(ATTACKS)
    assert all(row["must"] and row["threats"] and row["tries"] for row in rows)


def test_two_hostile_parties_at_once_are_refused_before_anything_starts(tmp_path: Path) -> None:
    options = ("--attack", "wrong_key", "--attack", "extra_tensor")
    reply = command("fedsilo", "demo", "--no-console", "--out", tmp_path / "out", *options)
    assert reply.exit_code == 2 and "one hostile party" in json.dumps(reply.envelope["error"])
    assert not (tmp_path / "out").exists()
