"""The shipped rulesets: one for each set of kinds that a method sends, alike but for what they are for."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.cli import policy as cli_policy
from fedsilo.protocol.errors import UsageError
from fedsilo.protocol.factors import KINDS_OF_FREEZE, initial_frozen_sha256
from fedsilo.protocol.methods import METHODS
from fedsilo.protocol.plan import Lora
from policies.compare import compare
from policies.render import RULESETS
from tests.policies.messages import NAMED, OFFERED_KINDS, R_SCHEMA, SCHEMAS, good
from tests.policies.setting import COORDINATOR, PEERS, PLAN, SCHEMA, SIZE, policy_of, policy_text
from tests.policies.test_model_folder import whole_folder
from tools.ruleset_methods import METHOD_RULESETS

FOLDER = Path(__file__).parents[2] / "policies" / "rulesets"

# By hand: what leaves a silo under each method, beside control.* and where it is allowed metrics.eval.
SENT = {
    "fedavg": {"lora.factors", "metrics.eval"},
    "pubswap": {"lora.factors", "public.responses", "metrics.eval"},
    "pubswap-random": {"lora.factors", "public.responses", "metrics.eval"},
    "pubswap-strict": {"lora.factor_b", "public.responses", "metrics.eval"},
    "ffa-lora": {"lora.factor_b", "metrics.eval"},
    "fedsa-lora": {"lora.factor_a", "metrics.eval"},
    "fed-sb": {"lora.core_r", "metrics.eval"},
    "fedex": {"lora.factors", "metrics.eval"},
    "flora": {"lora.factors", "metrics.eval"},
    "rolora": {"lora.factor_a", "lora.factor_b", "metrics.eval"},
    "knexa": {"profile.vector", "knowledge.package", "bandit.reward"},
    "knexa-random": {"knowledge.package"},
    "knexa-heuristic": {"profile.vector", "knowledge.package"},
    "fedid-central": {"knowledge.package"},
    "local-only": {"metrics.eval"},
    "responses-only": {"public.responses", "metrics.eval"},
    "fedgrpo": {"competence.score", "reward.scalar"},
    "fedreft": {"reft.intervention", "metrics.eval"},
    "deny_all": set(),
}


def test_each_ruleset_names_the_kinds_of_its_methods_and_no_other() -> None:
    found = {
        name: {kind for kind in OFFERED_KINDS if getattr(policy.file.egress, kind.replace(".", "_")) is not None}
        for name, policy in NAMED.items()
    }
    assert found == SENT


def test_every_file_is_a_ruleset_and_every_ruleset_a_file() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*RULESETS}
    assert all(policy.file.name == name for name, policy in NAMED.items())


def test_one_ruleset_for_each_set_of_kinds() -> None:
    """Two methods with the same kinds share a file. Random and Balanced differ in what the kind may hold; packages go
    to a peer or to the coordinator; FedEx and FLoRA take a shift of the base in, with limits of their own."""
    same = Counter(frozenset(kinds) for kinds in SENT.values())
    shared = {kinds for kinds, count in same.items() if count > 1}
    assert shared == {frozenset(SENT[name]) for name in ("pubswap", "knexa-random", "fedavg")}
    receivers = {}
    for name in ("knexa-random", "fedid-central"):
        block = NAMED[name].file.egress.knowledge_package
        assert block is not None
        receivers[name] = block.receiver
    assert receivers == {"knexa-random": "peer", "fedid-central": "coordinator"}


def test_every_method_has_one_ruleset_or_a_reason() -> None:
    methods = list(itertools.chain(*(names for names, _, _ in METHOD_RULESETS)))
    assert len(methods) == len(set(methods)) >= 20
    assert all(bool(ruleset) != bool(why) for _, ruleset, why in METHOD_RULESETS)
    assert {ruleset for _, ruleset, _ in METHOD_RULESETS if ruleset} == {*RULESETS} - {"deny_all"}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_this_version_finds_its_kinds_in_its_ruleset(name: str) -> None:
    method = METHODS[name]
    assert method.kinds == SENT[method.ruleset]


def _blocks(name: str) -> dict[str, list[str]]:
    """Top-level key -> its lines."""
    blocks: dict[str, list[str]] = {}
    key = ""
    for line in (FOLDER / f"{name}.yaml").read_text().splitlines():
        if line and not line.startswith((" ", "#")):
            key = line.partition(":")[0]
        if line and not line.startswith("#"):
            blocks.setdefault(key, []).append(line)
    return blocks


@pytest.mark.parametrize("name", sorted({*RULESETS} - {"pubswap", "pubswap-strict", "deny_all"}))
def test_what_is_not_about_kinds_is_the_same_in_every_file(name: str) -> None:
    """So that a key added to one ruleset is added to all. pubswap-strict is stricter on purpose."""
    one, two = _blocks("pubswap"), _blocks(name)
    own = {"name", "egress", "ingress", "budgets", "lora_schemas", "text_screens"}
    assert {key: lines for key, lines in two.items() if key not in own} == {
        key: lines for key, lines in one.items() if key not in own
    }
    keys = [[line.partition(":")[0] for line in blocks["budgets"]] for blocks in (one, two)]
    assert keys[0] == keys[1]


@pytest.mark.parametrize("name", RULESETS)
def test_the_schema_freezes_what_the_kind_does_not_carry(name: str) -> None:
    file = NAMED[name].file
    for kind, block in file.egress.updates.items():
        freeze = file.lora_schemas[block.schema_name].freeze
        assert freeze == SCHEMAS.get(name, SCHEMA).freeze and kind in KINDS_OF_FREEZE[freeze]


@pytest.mark.parametrize("name", RULESETS)
def test_limits_follow_from_the_size_of_the_plan(name: str) -> None:
    """A larger plan is nowhere tighter, and a ruleset with content is somewhere looser."""
    schema = SCHEMAS.get(name, SCHEMA)
    larger = replace(SIZE, local_steps=8, prompts_per_step=6, samples_per_prompt=8, max_new_tokens=64, rounds=300)
    texts = [policy_text(name, schema=schema, size=size) for size in (SIZE, larger)]
    changes = compare(policy_of(texts[0]).file, policy_of(texts[1]).file)
    assert {change.direction for change in changes} <= {"looser"}
    assert bool(changes) == (name != "deny_all")


def test_a_model_that_does_not_tell_its_layers_has_no_interventions() -> None:
    with pytest.raises(UsageError, match=r"config\.json does not say how many layers"):
        policy_text("fedreft", hidden_shape=(0, 0))
    assert "reft" not in policy_text("fedavg", hidden_shape=(0, 0))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    whole_folder(folder / "model")
    for name in ("public", "held_out"):
        rows = [{"id": f"{name}{n}", "prompt": f"{n}?", "answer": str(n), "topic": f"t{n % 2}"} for n in range(4)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bundle = {
        "federation": "cardio-net",
        "coordinator_spiffe_id": COORDINATOR,
        "coordinator_address": "127.0.0.1:1",
        "coordinator_signing_key_hex": "00" * 32,
        "federation_ca_pem": "",
        "peers": list(PEERS),
    }
    (folder / "federation.json").write_text(json.dumps(bundle))
    return folder


def _run(*arguments: object) -> tuple[int, Any]:
    result = CliRunner().invoke(cli_policy.app, [*map(str, arguments), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.mark.quick(keep=8)
@pytest.mark.parametrize("name", RULESETS)
def test_a_policy_of_each_ruleset_is_written_and_checks(site: Path, name: str) -> None:
    policy = site / name / "policy.yaml"
    policy.parent.mkdir()
    code, answer = _run(
        "init", "--ruleset", name, "--model", site / "model", "--public", site / "public.jsonl", "--federation",
        site / "federation.json", "--held-out", site / "held_out.jsonl", "--site", "hospital_a", "--rank", 2,
        "--alpha", 4, "--out", policy,
    )  # fmt: skip
    assert code == 0, answer
    code, answer = _run("check", policy)
    assert code == 0, answer
    assert {row["kind"] for row in answer["data"]["capacity_per_round"]} - {"control.*"} == SENT[name]
    assert {row["kind"] for row in answer["data"]["worst_case_per_round"]} == SENT[name]


@pytest.mark.parametrize("method", METHODS)
def test_a_plan_over_a_core_is_taken_of_methods_that_send_the_core_alone(method: str) -> None:
    lora = Lora(
        rank=2, alpha=4.0, schema_sha256=R_SCHEMA.digest, freeze="AB",
        frozen_sha256=initial_frozen_sha256(R_SCHEMA.tensors, PLAN.seed, "AB"),
    )  # fmt: skip
    plan = PLAN.model_copy(update={"method": method, "lora": lora})
    reasons = good("run.plan", "fed-sb").but(canonical_json=plan.canonical(), run=plan.run).decided().reasons
    if METHODS[method].stays != "none":
        assert reasons == ("PLAN_METHOD", "PLAN_SCHEMA")
    else:
        assert reasons == (("PLAN_METHOD",) if "public.responses" in METHODS[method].kinds else ())
