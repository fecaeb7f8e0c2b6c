"""Ruleset pubswap-strict on real processes, with a site's files as `silo init` writes them: A is nobody's choice and
never leaves, two people look at every update, the text screens run, and a round must be made of 64 records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from fedsilo.files.site_policy import read_policy, read_schema
from fedsilo.protocol.factors import initial_factors, initial_frozen_sha256
from policies.schema import LoraSchema
from tests.loopback.federation import RUN, Federation, command, counted, federation, records

pytestmark = pytest.mark.slow

SILOS = ["hospital_a", "hospital_b"]
SCREENS = {"pii_basic", "overlap", "canary", "charset"}
# 8 private steps of 8 prompts: 64 distinct records of 96
PLAN = {"rounds": 2, "local_steps": 12, "swap_period": 3, "prompts_per_step": 8}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with federation(
        tmp_path_factory.mktemp("strict"), silos=2, ruleset="pubswap-strict", holds=SILOS[0], viewer="dave",
        rows_per_silo=96, local_steps=12,
    ) as running:  # fmt: skip
        yield running


def schema_of(sites: Federation) -> LoraSchema:
    return read_schema(sites.site(SILOS[0]).folder / "lora_schema.json")


def lines_of(sites: Federation, silo: str, event: str, run: str) -> list[dict[str, Any]]:
    return [line for line in records(sites.site(silo).audit_log) if line["event"] == event and line.get("run") == run]


def approve(sites: Federation, silo: str, number: int) -> str:
    """Alice's yes, which is not enough, and Bob's. Returns the digest of what they approved."""
    config = ("--config", sites.site(silo).config)
    sites.until_state(silo, lambda state: any(held["round"] == number for held in state["held"]))
    (row,) = [row for row in command("silo", "approvals", "list", *config).data["releases"] if row["state"] == "held"]
    assert (row["kind"], row["round"], row["needed"]) == ("lora.factor_b", number, 2)
    sent = len([line for line in lines_of(sites, silo, "egress.sent", "strict") if line["kind"] == row["kind"]])
    shown = command("silo", "approvals", "show", row["id"], *config).data
    opened = [word for one in shown["noticed"] for word in ("--ack-finding", one["id"])]
    for person, given, status in (("alice", ["alice"], 9), ("bob", ["alice", "bob"], 0)):
        answer = command(
            "silo", "approvals", "approve", row["id"], "--operator", person, "--expect-digest", row["digest"],
            "--expect-policy", row["policy_digest"], "--expect-shown", shown["shown"], *opened, *config,
        )  # fmt: skip
        told = answer.envelope["data"]
        assert (answer.exit_code, told["given"], told["needed"]) == (status, given, 2)
        leaves = [line for line in lines_of(sites, silo, "egress.sent", "strict") if line["kind"] == row["kind"]]
        assert len(leaves) == sent + (person == "bob")
    return str(row["digest"])


def test_T06_T07_T36_two_rounds_under_the_strict_ruleset(sites: Federation) -> None:
    assert sites.submit("strict", silos=SILOS, **PLAN).exit_code == 0
    approved = {(silo, number): approve(sites, silo, number) for number in (1, 2) for silo in SILOS}
    record = sites.ended("strict")
    assert (record["state"], [row["participants"] for row in record["rounds"]]) == ("finished", [SILOS, SILOS])
    uploads = {
        (row["silo"], number): row["sha256"]
        for number, each in enumerate(record["rounds"], 1)
        for row in each["uploads"]
        if row["kind"] == "lora.factor_b"
    }
    assert uploads == approved
    schema = schema_of(sites)
    for silo in SILOS:
        sent = counted(lines_of(sites, silo, "egress.sent", "strict"), "egress.sent")
        assert sent["lora.factor_b"] == [2, 2 * schema.update_bytes] and "lora.factors" not in sent
        assert sent["public.responses"][0] == 8 and sent["metrics.eval"][0] == 3
        updates = [
            line["facts"]
            for line in lines_of(sites, silo, "egress.decision", "strict")
            if line["kind"] == "lora.factor_b" and line["decision"] == "allow"
        ]
        for facts in (each["final"] for each in updates):
            assert (facts["records"], facts["epochs"], facts["steps"]) == (64, 1, 12)
            assert facts["tensors"] == len(schema.tensors) / 2 and facts["values_off_bfloat16"] == 0


def test_T06_the_adapter_folder_holds_the_a_of_the_seed_and_a_b_that_has_learned(sites: Federation) -> None:
    schema, seed = schema_of(sites), int(str(RUN["seed"]))
    (folder,) = (sites.sites.coordinator.folder / "state" / "runs").glob("strict")
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    drawn = initial_factors(schema.tensors, seed)
    for name, _ in schema.tensors:
        values = tensors[f"base_model.model.{name}.weight"]
        assert (values.tobytes() == drawn[name].tobytes()) == name.endswith(".lora_A"), name
    lora = sites.record("strict")["plan"]["lora"]
    assert (lora["freeze"], lora["frozen_sha256"]) == ("A", initial_frozen_sha256(schema.tensors, seed, "A"))
    assert initial_frozen_sha256(schema.tensors, seed + 1, "A") != lora["frozen_sha256"]


def test_T05_T15_low_bits_were_random_and_every_screen_ran_over_every_answer(sites: Federation) -> None:
    for silo in SILOS:
        decided = lines_of(sites, silo, "egress.decision", "strict")
        held = [line for line in decided if line["kind"] == "lora.factor_b" and line["decision"] == "hold"]
        assert [line["facts"]["transform"]["randomised_low_bits"] for line in held] == [2, 2]
        answers = [line["facts"]["final"] for line in decided if line["kind"] == "public.responses"]
        assert len(answers) == 8 and all(set(facts["screens"]) == SCREENS for facts in answers)
        assert sum(facts["responses"] for facts in answers) > 0 == sum(facts["responses_hit"] for facts in answers)


def test_T07_a_plan_of_too_few_records_is_refused_by_both_before_anything_is_trained(sites: Federation) -> None:
    assert sites.submit("small", silos=SILOS, **{**PLAN, "prompts_per_step": 7}).exit_code == 0  # 56 records
    record = sites.ended("small")
    assert (record["state"], record["reason"], record["rounds"]) == ("failed", "QUORUM_NOT_REACHED", [])
    for silo in SILOS:
        (denied,) = [
            line
            for line in lines_of(sites, silo, "ingress.decision", "small")
            if line["kind"] == "run.plan" and line["decision"] == "deny"
        ]
        assert denied["reasons"] == ["PLAN_SIZE"]
        assert not lines_of(sites, silo, "plan.accept", "small")


def test_the_site_was_made_by_the_shipped_ruleset(sites: Federation) -> None:
    policy = read_policy(Path(sites.site(SILOS[0]).folder / "policy.yaml"))
    assert policy.file.name == "pubswap-strict" and list(policy.file.egress.updates) == ["lora.factor_b"]


def test_T15_T40_a_stricter_draft_is_asked_about_the_archived_answers(sites: Federation, tmp_path: Path) -> None:
    """The answers of the digit tasks hold digits, and a draft that allows letters alone would have kept them in."""
    site = sites.site(SILOS[0])
    allowed = "allow: [latin, greek, digits, punctuation, math]"
    text = (site.folder / "policy.yaml").read_text(encoding="utf-8")
    assert text.count(allowed) == 1
    draft = tmp_path / "draft.yaml"
    draft.write_text(text.replace(allowed, "allow: [latin]"), encoding="utf-8")

    def asked(person: str) -> Any:
        return command(
            "fedsilo", "audit", "replay", "--rescreen", "--policy", draft, "--charter", site.folder / "charter.yaml",
            "--config", site.config, "--operator", person,
        )  # fmt: skip

    assert asked("dave").exit_code == 4  # a viewer
    answers = [
        line["seq"]
        for line in records(site.audit_log)
        if line["event"] == "egress.decision"
        and line["kind"] == "public.responses"
        and line["facts"]["final"]["responses"]
    ]
    assert answers and not [line for line in records(site.audit_log) if line["event"] == "payload.read"]
    told = asked("bob").data
    changed = [row for row in told["changed"] if row["kind"] == "public.responses"]
    assert [row["seq"] for row in changed] == answers
    assert {(row["recorded"], row["replayed"], *row["reasons"]) for row in changed} == {("allow", "deny", "SCREEN_HIT")}
    read = [line for line in records(site.audit_log) if line["event"] == "payload.read"]
    assert {line["detail"]["person"] for line in read} == {"bob"}
    assert set(answers) <= {line["link"]["decision"] for line in read}
