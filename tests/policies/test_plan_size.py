"""How large a run is meant to be: said once at the coordinator, carried in the bundle, and in every site's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.launch import cli_coordinator, cli_policy, cli_silo
from fedsilo.launch.trial import make_trial
from fedsilo.treaty.errors import UsageError
from policies.compare import compare, effective
from policies.load import Policy, load_policy
from policies.render import TEXT_DAY_BYTES, TEXT_ROUND_BYTES, PlanSize, text_warnings
from silo.config import load_config
from silo.guard.startup import effective_policy
from tests.policies.setting import policy_of, policy_text
from tests.policies.test_model_folder import _folder

SMALL = ("--rounds", "2", "--local-steps", "4", "--prompts-per-step", "8", "--samples-per-prompt", "8",
         "--max-new-tokens", "6", "--learning-rate", "0.0005")  # fmt: skip
CONTEXT = 64


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("s")  # the kernel takes sockets of 107 bytes, the test's own name is long
    _folder(tmp_path / "model", {"model_type": "qwen3", "max_position_embeddings": CONTEXT})
    for name in ("private", "public", "held_out"):
        rows = [{"id": f"{name}{n}", "prompt": f"{name} {n}?", "answer": str(n), "topic": "t"} for n in range(4)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_trial("cardio-net", ("hospital_a", "hospital_b"), tmp_path / "trial", dns_names=(), ip_addresses=())
    return tmp_path


def invoke(app: Any, *arguments: object) -> tuple[int, Any]:
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    return done.exit_code, json.loads(done.stdout)


def files(folder: Path) -> tuple[object, ...]:
    return ("--model", folder / "model", "--public", folder / "public.jsonl", "--held-out", folder / "held_out.jsonl",
            "--verifier", "exact", "--rank", 2, "--alpha", 4)  # fmt: skip


def coordinator(folder: Path, *size: str) -> dict[str, Any]:
    here = folder / "trial" / "coordinator"
    code, answer = invoke(
        cli_coordinator.app, "init", "--out", here, "--federation", "cardio-net",
        "--silos", "hospital_a,hospital_b", *files(folder), *size,
    )  # fmt: skip
    assert code == 0, answer
    return dict(json.loads((here / "federation.json").read_bytes()))


def silo(folder: Path, *size: str, name: str = "hospital_a") -> tuple[Policy, list[str]]:
    here = folder / "trial" / name
    code, answer = invoke(
        cli_silo.app, "init", name, "--out", here, "--private", folder / "private.jsonl",
        "--federation", folder / "trial" / "coordinator" / "federation.json", *files(folder), *size,
    )  # fmt: skip
    assert code == 0, answer
    return load_policy((here / "policy.yaml").read_bytes(), "policy.yaml"), answer["warnings"]


def test_a_site_takes_the_size_from_the_bundle(folder: Path) -> None:
    bundle = coordinator(folder, *SMALL)
    assert bundle["plan_size"] == PlanSize(2, 4, 2, 8, 8, 6, 2, 0.0005).to_json()
    policy, warnings = silo(folder)
    plan, text = policy.file.ingress.run_plan, policy.file.egress.public_responses
    assert plan is not None and text is not None and warnings == []
    assert (plan.rounds[1], plan.local_steps[1], plan.max_new_tokens[1]) == (2, 4, 6)
    assert (plan.prompts_per_step[1], plan.samples_per_prompt[1], plan.learning_rate[1]) == (8, 8, 0.0005)
    # 8 prompts x 8 answers in 2 public steps, 6 tokens of 8 bytes and a header of 64 bytes each
    assert text.max_bytes_per_round == 2 * 64 * (6 * 8 + 64)
    # one run of 2 rounds every hour
    assert policy.file.budgets.day_bytes == 24 * 2 * policy.file.budgets.round_bytes
    charter = load_policy((folder / "trial" / "coordinator" / "charter.yaml").read_bytes(), "charter.yaml")
    assert charter.file.ingress.run_plan == plan
    site, pinned = folder / "trial/hospital_a/policy.yaml", folder / "trial/coordinator/charter.yaml"
    both = effective(policy, charter)  # what the silo's records name as the policy that decided
    assert both.digest not in (policy.digest, charter.digest)
    for words, digest in ((("hash", site), policy.digest), (("hash", site, "--charter", pinned), both.digest)):
        assert invoke(cli_policy.app, *words)[1]["data"]["policy_sha256"] == digest
    # both policies name the same files, and the check has nothing to say of either
    for path in ("hospital_a/policy.yaml", "coordinator/charter.yaml"):
        code, answer = invoke(cli_policy.app, "check", folder / "trial" / path)
        assert (code, answer["warnings"]) == (0, [])


def test_a_tighter_site_is_silent_and_a_looser_one_is_told(folder: Path) -> None:
    coordinator(folder, *SMALL)
    tighter, warnings = silo(folder, "--max-new-tokens", "3", "--swap-period", "4")
    text = tighter.file.egress.public_responses
    assert warnings == [] and text is not None
    assert text.generation.max_new_tokens == 3 and text.max_bytes_per_round == 64 * (3 * 8 + 64)
    looser, warnings = silo(folder, "--rounds", "9", "--swap-period", "1", name="hospital_b")
    assert looser.file.ingress.run_plan is not None and looser.file.ingress.run_plan.rounds[1] == 9
    assert warnings == [
        "looser than the federation's bundle: rounds 9 (the federation means 2), swap_period 1 (the federation means 2)"
    ]


def test_no_answer_is_longer_than_the_models_context(folder: Path) -> None:
    assert coordinator(folder)["plan_size"]["max_new_tokens"] == CONTEXT < PlanSize().max_new_tokens
    policy, warnings = silo(folder, "--max-new-tokens", "100")
    text = policy.file.egress.public_responses
    assert text is not None and text.generation.max_new_tokens == CONTEXT
    assert warnings[0] == f"max_new_tokens 100 is beyond the model's context: {CONTEXT}"


def test_a_model_that_tells_no_context_is_not_capped(folder: Path) -> None:
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    assert coordinator(folder)["plan_size"] == PlanSize().to_json()


def test_the_coordinators_options_default_to_the_size_of_the_published_experiments(folder: Path) -> None:
    (folder / "model" / "config.json").write_text('{"text_config": {"max_position_embeddings": 32768}}')
    assert coordinator(folder)["plan_size"] == PlanSize().to_json()


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"local_steps": "4"}, "local_steps '4'"),
        ({"rounds": 0}, "rounds 0"),
        ({"rounds": True}, "rounds True"),
        ({"learning_rate": float("nan")}, "learning_rate nan"),
        ({"max_new_tokens": 10**12}, "max_new_tokens 1000000000000"),
        ({"text": 1}, "'text' is no size"),
        ([], "a mapping"),
    ],
)
def test_a_bundle_with_a_size_that_is_none_is_refused_by_name(folder: Path, stated: object, named: str) -> None:
    bundle = coordinator(folder, *SMALL)
    place = folder / "trial" / "coordinator" / "federation.json"
    place.write_text(json.dumps(bundle | {"plan_size": stated}))
    code, answer = invoke(
        cli_silo.app, "init", "hospital_a", "--out", folder / "trial" / "hospital_a", "--private",
        folder / "private.jsonl", "--federation", place, *files(folder),
    )  # fmt: skip
    assert code == UsageError.exit_code and named in answer["error"]["message"]
    assert not (folder / "trial" / "hospital_a" / "policy.yaml").exists()


def test_text_above_the_thresholds_is_said_with_its_line() -> None:
    small = policy_of(policy_text())
    assert text_warnings(small) == []
    assert text_warnings(policy_of(policy_text("deny_all"))) == []
    text = policy_text(size=PlanSize())
    a_round, a_day = text_warnings(policy_of(text))
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "max_bytes_per_round" in row)
    # 16 x 16 answers, 60 public steps, 2048 tokens of 8 bytes and 64 bytes of header
    size = 16 * 16 * 60 * (2048 * 8 + 64)
    assert size > TEXT_ROUND_BYTES
    assert a_round.startswith(f"policy.yaml:{line}: up to {size:,} bytes of text may leave in one round, more than")
    assert "in one day" in a_day and f"{TEXT_DAY_BYTES:,}" in a_day
    # the same rounds with a small day's budget: only the round is said
    tight = [f"  day_bytes: {TEXT_DAY_BYTES}" if "day_bytes:" in row else row for row in text.splitlines()]
    assert [warning.split("one ")[1][:5] for warning in text_warnings(policy_of("\n".join(tight)))] == ["round"]


def test_T34_a_site_gets_the_charter_of_the_bundle_beside_its_policy(folder: Path) -> None:
    """Pinned by its digest, and what is in force is no looser than either, also where the site asked for more."""
    bundle = coordinator(folder, *SMALL)
    policy, _ = silo(folder, "--rounds", "9")
    here = folder / "trial" / "hospital_a"
    config = load_config(here / "silo.yaml")
    charter = load_policy((here / "charter.yaml").read_bytes(), "charter.yaml")
    assert config.charter == here / "charter.yaml" and config.charter_sha256 == bundle["charter_sha256"]
    assert charter.digest == bundle["charter_sha256"]
    assert (here / "charter.yaml").read_bytes() == (folder / "trial" / "coordinator" / "charter.yaml").read_bytes()
    together = effective_policy(config)
    assert policy.file.ingress.run_plan is not None and together.file.ingress.run_plan is not None
    assert (policy.file.ingress.run_plan.rounds[1], together.file.ingress.run_plan.rounds[1]) == (9, 2)
    tightened = {change.name for change in compare(policy.file, together.file) if change.direction == "tighter"}
    assert {"ingress.run.plan.rounds", "budgets.day_bytes"} <= tightened
    # What is each site's own to say, the charter leaves to it: walls around the trainer, who approves what and when.
    assert not [name for name in tightened if "approvals" in name or "isolation" in name]


def test_T34_a_bundle_whose_charter_was_changed_makes_no_site(folder: Path) -> None:
    bundle = coordinator(folder, *SMALL)
    place = folder / "trial" / "coordinator" / "federation.json"
    place.write_text(json.dumps(bundle | {"charter": bundle["charter"].replace("per_round: 1\n", "per_round: 2\n", 1)}))
    arguments = (
        cli_silo.app, "init", "hospital_a", "--out", folder / "trial" / "hospital_a", "--private",
        folder / "private.jsonl", "--federation", place, *files(folder),
    )  # fmt: skip
    code, answer = invoke(*arguments)
    assert (code, answer["error"]["code"]) == (2, "CHARTER_MISMATCH")
    assert not (folder / "trial" / "hospital_a" / "silo.yaml").exists()
    place.write_text(json.dumps(bundle))
    assert invoke(*arguments)[0] == 0
