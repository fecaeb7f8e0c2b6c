"""The log is enough to decide again: facts and history of every recorded decision give the verdict beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.launch.cli_audit import app as audit_app
from fedsilo.launch.cli_policy import app as policy_app
from fedsilo.treaty.wire._generated import federation_pb2 as pb
from policies.engine import decide
from policies.history import History
from policies.replay import replay, replayed
from tests.policies import setting
from tests.simulated.guarded import Bench


def test_every_decision_replays_from_its_own_record(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))
    bench.gate.send("control.heartbeat", pb.Heartbeat())
    bench.responses()
    bench.factors()
    bench.factors()  # the second of a round is denied, by the count of the first
    records = bench.events("egress.decision")
    assert [record["decision"] for record in records] == ["allow", "allow", "allow", "deny"]
    for record in records:
        logged = json.loads(json.dumps(record["facts"]))
        again = decide(logged["final"], bench.policy, History.from_json(logged["history"]))
        assert (again.verdict, list(again.reasons)) == (record["decision"], record["reasons"])
    bench.close()


# ---- the commands that ask another policy ------------------------------------------------------------


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """A site folder with a log of five decisions, and three policies."""
    bench = Bench(tmp_path / "a", setting.policy_of(setting.policy_text()))
    bench.gate.send("control.heartbeat", pb.Heartbeat())
    bench.responses()
    bench.factors()
    bench.factors()
    bench.close()
    (tmp_path / "same.yaml").write_text(setting.policy_text())
    (tmp_path / "tighter.yaml").write_text(
        setting.policy_text().replace("max_responses_per_step: 12", "max_responses_per_step: 1")
    )
    (tmp_path / "looser.yaml").write_text(setting.policy_text().replace("per_round: 1", "per_round: 2", 1))
    return tmp_path


def run(app: Any, *arguments: object) -> tuple[int, Any]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


def test_T34_a_draft_is_tried_on_what_was_decided_before(logged: Path) -> None:
    (log,) = {path.parent for path in logged.glob("a/**/audit/*.jsonl")}
    for name, expected in (
        ("same", []),
        ("tighter", [("public.responses", "allow", "deny", ["RESPONSES"])]),
        ("looser", [("lora.factors", "deny", "allow", [])]),
    ):
        code, reply = run(audit_app, "replay", "--log", log, "--policy", logged / f"{name}.yaml")
        changed = [(row["kind"], row["recorded"], row["replayed"], row["reasons"]) for row in reply["data"]["changed"]]
        assert (code, changed) == (0, expected)
        decided = [
            line for path in log.glob("*.jsonl") for line in path.read_text().splitlines() if '.decision"' in line
        ]
        assert reply["data"]["decisions"] == len(decided) > 4 and not reply["data"]["not_replayed"]


def test_explain_gives_every_rule_with_value_limit_and_line(logged: Path) -> None:
    (log,) = {path.parent for path in logged.glob("a/**/audit/*.jsonl")}
    records = [json.loads(line) for path in sorted(log.glob("*.jsonl")) for line in path.read_text().splitlines()]
    denied = next(record for record in records if record.get("decision") == "deny")
    code, reply = run(policy_app, "explain", denied["seq"], "--log", log, "--policy", logged / "same.yaml")
    assert code == 0 and reply["data"]["replayed"] == "deny"
    (rule,) = [rule for rule in reply["data"]["rules"] if rule["outcome"] == "deny"]
    assert (rule["rule"], rule["measured"], rule["limit"]) == ("factor sets per round", 2, 1)
    line = (logged / "same.yaml").read_text().splitlines()[rule["line"] - 1]
    assert line.strip().startswith("per_round: 1")
    other = next(record for record in records if record["event"] == "egress.sent")
    assert run(policy_app, "explain", other["seq"], "--log", log, "--policy", logged / "same.yaml")[0] == 8


def test_diff_names_each_field_and_fails_on_looser_where_asked(logged: Path) -> None:
    same, tighter, looser = (logged / f"{name}.yaml" for name in ("same", "tighter", "looser"))
    assert run(policy_app, "diff", same, same, "--fail-on", "looser")[0] == 0
    code, reply = run(policy_app, "diff", same, tighter, "--fail-on", "looser")
    assert (code, [row["direction"] for row in reply["data"]["changes"]]) == (0, ["tighter"])
    code, reply = run(policy_app, "diff", same, looser, "--fail-on", "looser")
    assert (code, reply["error"]["code"]) == (1, "LOOSER")
    assert run(policy_app, "diff", same, looser)[0] == 0
    assert run(policy_app, "diff", same, looser, "--fail-on", "nothing")[0] == 2


def test_what_no_rule_judged_is_listed_and_not_guessed() -> None:
    policy = setting.policy_of(setting.policy_text())
    refused = {"event": "ingress.decision", "seq": 3, "kind": "run.plan", "decision": "deny"}
    assert replayed(refused, policy).decision is None and replayed(refused, policy).why
    assert [row.seq for row in replay([refused, {"event": "start", "seq": 4}], policy)] == [3]
