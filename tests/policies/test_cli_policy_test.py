"""`fedsilo policy test` and the two report forms that `fedsilo audit verify` shares with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from junitparser import Failure, JUnitXml
from sarif_pydantic import Sarif
from typer.testing import CliRunner, Result

from fedsilo.cli import audit as cli_audit
from fedsilo.cli import policy as cli_policy
from fedsilo.cli.check_reports import Check, junit, sarif
from tests.policies.setting import SCHEMA, policy_text
from tests.protocol.audit_parties import COORDINATOR, append_send, exchange, introduce, open_log

CASES = """
kind: public.responses
cases:
  - {name: good, expect: allow}
  - name: a prompt too many
    facts: {prompts: max_prompts_per_step + 1, plan_prompts_per_step: max_prompts_per_step + 1}
    expect: deny
    reasons: [PROMPTS]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text(policy_text(first_rounds=1))
    (tmp_path / "lora_schema.json").write_bytes(SCHEMA.canonical())
    (tmp_path / "cases" / "more").mkdir(parents=True)
    (tmp_path / "cases" / "answers.yaml").write_text(CASES)
    return tmp_path


def run(folder: Path, *words: str) -> Result:
    arguments = ["test", str(folder / "cases"), "--policy", str(folder / "policy.yaml"), *words]
    return CliRunner().invoke(cli_policy.app, arguments)


def checked_sarif(text: str) -> list[dict[str, Any]]:
    """Read by an implementation that is not ours; and what SARIF 2.1.0 requires, by its sections."""
    Sarif.model_validate_json(text)
    log = json.loads(text)
    assert set(log) == {"$schema", "version", "runs"} and log["version"] == "2.1.0"  # 3.13
    (found,) = log["runs"]
    driver = found["tool"]["driver"]  # 3.14.6, 3.18.2
    assert driver["name"] and [rule["id"] for rule in driver["rules"]]  # 3.19.8, 3.49.3
    for result in found["results"]:
        assert result["message"]["text"]  # 3.27.11
        assert driver["rules"][result["ruleIndex"]]["id"] == result["ruleId"]  # 3.27.6
        for location in result["locations"]:
            place = location["physicalLocation"]
            assert place["artifactLocation"]["uri"] and " " not in place["artifactLocation"]["uri"]  # 3.4.3
            assert place.get("region", {"startLine": 1})["startLine"] >= 1  # 3.30.5
    return list(found["results"])


def test_cases_that_hold_exit_0_and_one_that_does_not_1(folder: Path) -> None:
    assert run(folder).exit_code == 0
    answer = json.loads(run(folder, "--json").stdout)
    assert answer["ok"] and [case["passed"] for case in answer["data"]["cases"]] == [True, True]
    extra = folder / "cases" / "more" / "wrong.yml"
    extra.write_text("\nname: hopeful\nkind: public.responses\nfacts: {header_set_sha256: another}\nexpect: allow\n")
    failed = run(folder, "--output", "json")
    assert failed.exit_code == 1 and json.loads(failed.stdout)["error"]["code"] == "CASES_FAILED"
    text = run(folder)
    assert text.exit_code == 1 and f"FAILED {extra}:2: hopeful" in text.stdout
    assert "policy says deny (PUBLIC_SET)" in text.stdout and "policy.yaml:" in text.stdout


@pytest.mark.parametrize(
    ("content", "words", "options"),
    [
        ("name: a\nexpect: allow\n", "kind", ()),
        (None, "there are no case files", ()),
        (CASES, "--output 'html' is not known", ("--output", "html")),
        (CASES, "are two forms", ("--output", "junit", "--json")),
    ],
)
def test_invalid_input_exits_2(folder: Path, content: str | None, words: str, options: tuple[str, ...]) -> None:
    (folder / "cases" / "answers.yaml").unlink()
    if content is not None:
        (folder / "cases" / "answers.yaml").write_text(content)
    result = run(folder, *options)
    assert result.exit_code == 2 and words in result.output


def test_coverage_below_what_is_asked_and_a_survivor_exit_1(folder: Path) -> None:
    assert run(folder, "--coverage").exit_code == 1
    assert run(folder, "--coverage", "--fail-under", "0.5").exit_code == 0
    answer = json.loads(run(folder, "--coverage", "--fail-under", "0.5", "--json").stdout)["data"]["coverage"]
    rows = {(row["what"], row["name"]): row for row in answer["rows"]}
    seen = rows["rule", "prompts per step"]
    assert (seen["passed"], seen["stopped"], seen["covered"]) == (1, 1, True)
    assert not rows["rule", "L2 of the delta"]["covered"] and 0.5 < answer["percent"] < 50
    mutants = run(folder, "--mutate")
    assert mutants.exit_code == 1
    lines = (folder / "policy.yaml").read_text().splitlines()
    survivors = [line for line in mutants.stdout.splitlines() if line.startswith("SURVIVES ")]
    assert len(survivors) > 40 and not any("max_prompts_per_step" in line for line in survivors if "egress" in line)
    for line in survivors:
        place, name = line.split()[1:3]
        number = int(place.rstrip(":").rpartition(":")[2])
        keys = name.rstrip(":").split(".")[-2:]
        # a key that is not written has the line of its block, or of the file
        assert any(key in lines[number - 1] for key in keys) or number == 3, line


def test_junit_and_sarif_say_the_same_as_the_text(folder: Path) -> None:
    (folder / "cases" / "wrong cases.yaml").write_text(
        "name: 'hopeful <b>'\nkind: public.responses\nfacts: {header_set_sha256: another}\nexpect: allow\n"
    )
    found = run(folder, "--output", "junit", "--mutate")
    assert found.exit_code == 1
    document = JUnitXml.fromstring(found.stdout.encode())
    suites = {suite.name: suite for suite in document}
    assert set(suites) == {str(folder / "cases" / name) for name in ("answers.yaml", "wrong cases.yaml")} | {"mutants"}
    failed = [case for suite in document for case in suite if any(isinstance(part, Failure) for part in case.result)]
    assert document.tests == sum(len(list(suite)) for suite in document) and document.failures == len(failed)
    assert [case.name for case in failed if "mutants" not in case.classname] == ["hopeful <b>"]
    results = checked_sarif(run(folder, "--output", "sarif", "--mutate").stdout)
    assert len(results) == len(failed)
    (wrong,) = [result for result in results if result["ruleId"] == "CASE_FAILED"]
    assert wrong["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("cases/wrong%20cases.yaml")
    assert checked_sarif(run(folder, "--output", "sarif").stdout)  # one case is wrong still
    (folder / "cases" / "wrong cases.yaml").unlink()
    clean = run(folder, "--output", "sarif")
    assert clean.exit_code == 0 and checked_sarif(clean.stdout) == []


def test_T37_a_name_that_turns_text_around_is_refused_with_its_line(folder: Path) -> None:
    place = folder / "cases" / "wrong cases.yaml"
    place.write_text(
        "kind: public.responses\nfacts: {header_set_sha256: another}\nname: 'hopeful\u202e <b>'\nexpect: allow\n"
    )
    refused = run(folder)
    assert refused.exit_code == 2 and "wrong cases.yaml:3: " in refused.stderr
    assert "invisible characters: U+202E" in refused.stderr and "\u202e" not in refused.stderr
    place.write_text("kind: public.responses\nfacts: {header_set_sha256: another}\nname: 'hopeful <b>'\nexpect: deny\n")
    assert run(folder).exit_code == 0


def test_T37_no_character_that_xml_cannot_carry_gets_into_a_report() -> None:
    nasty = "".join(map(chr, [*range(0x20), 0x7F, 0x85, 0x202E, 0xFFFE, 0xFFFF, 0xD800])) + "]]>&<\"'"
    check = Check(nasty, nasty, "CODE", nasty, "a folder/caf\udce9.yaml", 3)
    (suite,) = JUnitXml.fromstring(junit(nasty, [check]).encode())
    (case,) = suite
    assert r"\u0000" in case.name and r"\u202e" in case.name
    assert len(checked_sarif(sarif("tool", [check], {"CODE": "what it means"}))) == 1


def test_audit_verify_writes_both_forms(tmp_path: Path) -> None:
    folders = [tmp_path / "silo", tmp_path / "coordinator"]
    with open_log(folders[0]) as silo, open_log(folders[1], COORDINATOR) as coordinator:
        introduce(silo, coordinator)
        for sequence in range(1, 6):
            append_send(silo, sequence)
        silo.checkpoint()
        coordinator.append("start")
        coordinator.checkpoint()
        exchange(silo, coordinator)

    def verify(form: str) -> Result:
        return CliRunner().invoke(cli_audit.app, ["verify", *map(str, folders), "--output", form])

    good = verify("junit")
    assert good.exit_code == 0
    document = JUnitXml.fromstring(good.stdout.encode())
    assert {suite.name for suite in document} == {"hospital_a", "coordinator"} and (
        document.tests,
        document.failures,
    ) == (2, 0)
    assert checked_sarif(verify("sarif").stdout) == []
    segment = next(folders[0].glob("*.jsonl"))
    segment.write_bytes(segment.read_bytes().replace(b'"bytes":10', b'"bytes":11', 1))
    bad = verify("junit")
    assert bad.exit_code == 7
    document = JUnitXml.fromstring(bad.stdout.encode())
    assert document.failures >= 1
    results = checked_sarif(verify("sarif").stdout)
    assert len(results) == document.failures and {result["ruleId"] for result in results} == {"LOG_NOT_VERIFIED"}
    assert all(
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("silo") for result in results
    )
    answer = json.loads(verify("json").stdout)
    assert not answer["ok"] and sum(len(row["problems"]) for row in answer["data"]) == len(results)
