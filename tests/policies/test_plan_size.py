"""How large a run is meant to be: said once at the coordinator, carried in the bundle, and in every site's limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsilo.cli import coordinator as cli_coordinator
from fedsilo.cli import policy as cli_policy
from fedsilo.cli import run as cli_run
from fedsilo.cli import silo as cli_silo
from fedsilo.cli.certs import make_trial
from fedsilo.files.run_request import EXAMPLE
from fedsilo.protocol.errors import UsageError
from policies.capacity import TEXT_DAY_BYTES, TEXT_ROUND_BYTES, text_warnings
from policies.compare import compare, effective
from policies.load import load_policy
from policies.model import Policy
from policies.render import PlanSize
from silo.config import load_config
from silo.guard.site import effective_policy
from tests.policies.setting import policy_of, policy_text
from tests.policies.test_model_folder import whole_folder

SMALL = ("--rounds", "2", "--local-steps", "4", "--prompts-per-step", "8", "--samples-per-prompt", "8",
         "--max-new-tokens", "6", "--learning-rate", "0.0005")  # fmt: skip
CONTEXT = 64


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("s")  # the kernel takes sockets of 107 bytes, the test's own name is long
    whole_folder(tmp_path / "model", max_position_embeddings=CONTEXT)
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
    assert text.max_bytes_per_day == 24 * 2 * text.max_bytes_per_round
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


def test_sizes_come_from_the_run_that_will_be_submitted_and_give_a_policy_without_warnings(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    whole_folder(folder / "model", max_position_embeddings=32768)
    run = folder / "run.yaml"
    assert invoke(cli_run.app, "init", "--out", run)[0] == 0
    assert invoke(cli_run.app, "init", "--out", run)[0] == 6  # it exists
    size = coordinator(folder, "--run", str(run))["plan_size"]
    assert (size["rounds"], size["local_steps"], size["max_new_tokens"], size["learning_rate"]) == (20, 16, 256, 1e-4)
    policy, warnings = silo(folder)
    assert warnings == [] == text_warnings(policy)
    plan = policy.file.ingress.run_plan
    assert plan is not None and (plan.rounds[1], plan.local_steps[1]) == (20, 16)


def test_each_size_follows_the_named_run_and_an_option_changes_one(folder: Path) -> None:
    run = folder / "mine.yaml"
    run.write_text(
        "method: pubswap\nrounds: 3\nlocal_steps: 6\nswap_period: 3\nprompts_per_step: 4\n"
        "samples_per_prompt: 5\nseed: 1\n"
        "rollout: {max_new_tokens: 7}\noptimiser: {learning_rate: 0.002, epochs: 1}\n"
    )
    size = coordinator(folder, "--run", str(run), "--rounds", "9")["plan_size"]
    assert size == {
        "rounds": 9, "local_steps": 6, "swap_period": 3, "prompts_per_step": 4, "samples_per_prompt": 5,
        "max_new_tokens": 7, "epochs": 1, "learning_rate": 0.002,
    }  # fmt: skip


def test_without_a_run_the_sizes_are_those_of_the_example(folder: Path) -> None:
    assert coordinator(folder)["plan_size"]["rounds"] == 20


def test_a_run_that_is_none_is_refused_and_nothing_is_left(folder: Path) -> None:
    (folder / "run.yaml").write_text("rounds: 3\n")
    here = folder / "trial" / "coordinator"
    code, _ = invoke(
        cli_coordinator.app, "init", "--out", here, "--federation", "cardio-net", "--silos", "hospital_a,hospital_b",
        *files(folder), "--run", folder / "run.yaml",
    )  # fmt: skip
    assert code == 2 and not (here / "federation.json").exists()


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
    # a day's updates are many bytes, of which the text may be few
    large = policy_text().replace("  day_bytes: ", "  day_bytes: 99")
    assert policy_of(large).file.budgets.day_bytes > TEXT_DAY_BYTES and text_warnings(policy_of(large)) == []
    unsaid = [row for row in large.splitlines() if "max_bytes_per_day" not in row]
    (told,) = text_warnings(policy_of("\n".join(unsaid)))
    assert "in one day" in told
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
    # What is each site's own to say, the charter leaves to it: isolation of the trainer, who approves what and when.
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


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("tokens", [CONTEXT, CONTEXT + 1])
def test_a_run_beyond_the_context_is_refused_when_the_federation_is_made(folder: Path, tokens: int) -> None:
    run, here = folder / "run.yaml", folder / "trial" / "coordinator"
    text = EXAMPLE.replace("max_new_tokens: 256", f"max_new_tokens: {tokens}")
    run.write_text(text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "max_new_tokens" in row)
    before = written(here)
    options = ("--out", here, "--federation", "cardio-net", "--silos", "hospital_a,hospital_b", "--run", run)
    code, answer = invoke(cli_coordinator.app, "init", *options, *files(folder))
    if tokens == CONTEXT:
        assert code == 0 and answer["data"]["plan_size"]["max_new_tokens"] == CONTEXT
    else:
        assert code == UsageError.exit_code and answer["error"]["message"].startswith(f"{run}:{line}: ")
        assert written(here) == before


@pytest.mark.parametrize(
    "wrong",
    [("--verifier", "nosuch"), ("--listen", "foo"), ("--held-out", "public.jsonl"), ("--verifier", "exact")],
    ids=["verifier", "listen", "held-out", "none"],
)
def test_what_check_would_refuse_is_refused_when_the_federation_is_made(folder: Path, wrong: tuple[str, str]) -> None:
    here = folder / "trial" / "coordinator"
    before = written(here)
    option, value = wrong
    given = value if option != "--held-out" else folder / value
    code, answer = invoke(
        cli_coordinator.app, "init", "--out", here, "--federation", "cardio-net",
        "--silos", "hospital_a,hospital_b", *files(folder), option, given,
    )  # fmt: skip
    assert (code == 0) is (value == "exact"), answer
    assert (written(here) == before) is (code != 0)


@pytest.mark.parametrize("name", ["hospital_a", "hospital_z"])
def test_a_site_that_the_bundle_does_not_name_is_refused(folder: Path, name: str) -> None:
    coordinator(folder, *SMALL)
    here = folder / "trial" / name
    code, answer = invoke(
        cli_silo.app, "init", name, "--out", here, "--private", folder / "private.jsonl",
        "--federation", folder / "trial" / "coordinator" / "federation.json", *files(folder),
    )  # fmt: skip
    assert (code == 0) is (name == "hospital_a"), answer
    assert (here / "silo.yaml").exists() is (code == 0)
