"""A run that cannot be one is refused when it is submitted, and by `--dry-run` before: with file, line and mend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.control import accepted_request
from fedsilo.cli import fedsilo as cli_fedsilo
from fedsilo.files.run_request import OUR_NAMES, _places, check_form, check_request, plan_from_request, read_request
from fedsilo.protocol.errors import FedSiloError, UsageError
from fedsilo.protocol.methods import METHODS, require_exchange
from fedsilo.protocol.plan import Plan
from silo.config import CoordinatorPlace, config_from
from silo.guard.site import require_part
from tests.algorithms.tiny import make_plan
from tests.console.commands import run
from tests.coordinator_folder import write_coordinator
from tests.policies import setting
from tests.simulated.coordinator_parts import RUN_YAML, SILOS, House
from tests.world import Loop

EXAMPLE = (Path(__file__).parents[2] / "examples" / "hospital_a.yaml").read_text()

# what is added to a good run.yaml, or put in place of one of its lines; the key whose line is named; what is said
WRONG: tuple[tuple[str, str, str, str], ...] = (
    ("", "objective: {clip_low: 0}", "objective", "clip_low: must be above 0"),
    ("seed: 7", "seed: !!python/object:os.system {}", "seed", "tag"),
    ("", "seed: 8", "seed", "stands twice"),
    ("run: run-1", "run: '../../x'", "run", "must match"),
    ("method: pubswap", "method: grpo", "method", "there is no method 'grpo'"),
    (
        "method: pubswap",
        "method: pubswap-random\nexchange: round_end",
        "exchange",
        "pubswap-random has no exchange 'round_end' in this version",
    ),
    ("quorum: 2", "quorum: 9", "quorum", "quorum: 9 of 4 silos"),
    ("", "silos: [hospital_a, hospital_a, hospital_b]", "silos", "'hospital_a' is listed twice"),
    ("", "silos: hospital_a", "silos", "silos is a list of names"),
    ("", "optimiser: {learning_rate: 1.0}", "optimiser", "learning_rate: 1.0, and the charter allows 0.0 to 0.001"),
    ("", "rollout2: {temperature: 1000.0}", "rollout2", "unknown key 'rollout2'"),
    (
        "rollout: {max_new_tokens: 32}",
        "rollout: {temperature: 1000.0, max_new_tokens: 9}",
        "rollout",
        "temperature: 1000.0",
    ),
    ("rollout: {max_new_tokens: 32}", "rollout: {max_new_tokens: 1000000000}", "rollout", "max_new_tokens: 1000000"),
    ("samples_per_prompt: 4", "samples_per_prompt: 1", "samples_per_prompt", "teaches nothing"),
    ("quorum: 2", "quorum: 1\nsilos: [hospital_a]", "silos", "plan peers: 1, and the charter allows 2"),
    ("samples_per_prompt: 4", "samples_per_prompt: 5", "samples_per_prompt", "the charter allows 1 to 4"),
    ("local_steps: 4", "local_steps: 400", "local_steps", "the charter allows 1 to 4"),
    ("rollout: {max_new_tokens: 32}", "rollout: {}", "rollout", "2048 (the default), and the charter allows 1 to 32"),
    ("", "beta: 0.1", "beta", "unknown key 'beta'"),
    ("", "temperature: 0.7", "temperature", "unknown key 'temperature'"),
)
NOT_BY_FORM = (
    "the charter allows",
    "quorum: 9",
    "temperature: 1000",
    "max_new_tokens: 100",
)  # who knows needs more files


def text_of(old: str, new: str) -> str:
    if not old:
        return RUN_YAML + new + "\n"
    assert RUN_YAML.count(old) == 1
    return RUN_YAML.replace(old, new)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(tmp_path_factory.mktemp("house"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("coordinator")
    write_coordinator(folder, SILOS)
    return folder


def dry(place: Path, text: str, *, config: str = "coordinator.yaml") -> tuple[int, Any]:
    (place / "run.yaml").write_text(text)
    return run(
        cli_fedsilo.app, "run", "submit", str(place / "run.yaml"), "--as", str(place / "carol.crt"), "--config",
        str(place / config), "--socket", str(place / "nobody.sock"), "--dry-run",
    )  # fmt: skip


@pytest.mark.parametrize(("old", "new", "key", "cause"), WRONG)
def test_what_cannot_be_a_run_is_refused_with_its_line(
    old: str, new: str, key: str, cause: str, house: House, place: Path
) -> None:
    text = text_of(old, new)
    lines = text.splitlines()
    line = max(number for number, each in enumerate(lines, 1) if each.startswith(f"{key}:"))
    with pytest.raises(UsageError) as told:
        house.submit(text)
    assert told.value.message.startswith(f"run.yaml:{line}: ") and cause in told.value.message
    assert told.value.hint and told.value.hint != "write the value in that form"
    code, answer = dry(place, text)
    assert (code, answer["error"]["code"]) == (2, "INVALID_INPUT"), answer
    assert f"run.yaml:{line}: " in answer["error"]["message"] and cause in answer["error"]["message"]
    code, answer = dry(place, text, config="nowhere.yaml")
    assert (code == 2) is not any(words in cause for words in NOT_BY_FORM), answer


def test_a_good_run_passes_all_three_and_the_dry_run_then_dials(house: House, place: Path) -> None:
    document = read_request(RUN_YAML.encode(), "run.yaml")
    assert isinstance(check_request(document, house.submissions.fixed), Plan)
    check_form(document)
    for config in ("coordinator.yaml", "nowhere.yaml"):
        code, answer = dry(place, RUN_YAML, config=config)
        assert (code, answer["error"]["code"]) == (3, "UNREACHABLE")
    nameless = RUN_YAML.replace("run: run-1\n", "").replace("quorum: 2\n", "")
    assert dry(place, nameless)[0] == 3  # the coordinator gives it a name


@pytest.mark.parametrize(
    ("silos", "quorum"),
    [(SILOS[:1], 1), (SILOS[:2], 2), (SILOS[:3], 2), (SILOS, 3)],
    ids=["one", "two", "three", "four"],
)
def test_T58_a_request_that_says_no_quorum_commits_no_lone_update(
    house: House, silos: tuple[str, ...], quorum: int
) -> None:
    text = RUN_YAML.replace("quorum: 2\n", "") + f"silos: [{', '.join(silos)}]\n"
    document = read_request(text.encode(), "run.yaml")
    check_form(document)
    assert plan_from_request(document, house.submissions.fixed, silos).quorum == quorum
    said = read_request((text + "quorum: 1\n").encode(), "run.yaml")
    assert plan_from_request(said, house.submissions.fixed, silos).quorum == 1  # what is said counts


def test_T58_the_quorum_counts_the_silos_asked_for_and_not_those_that_came(tmp_path: Path) -> None:
    one = House(tmp_path)
    one.submit(RUN_YAML.replace("quorum: 2\n", ""))
    one.submissions.waiting.clear()
    one.submissions.load()
    ((_, item),) = one.submissions.waiting.items()
    assert plan_from_request(accepted_request(item.request), one.submissions.fixed, SILOS[:3]).quorum == 3


def test_a_form_that_says_no_quorum_may_ask_for_a_median() -> None:
    text = RUN_YAML.replace("quorum: 2\n", "").replace("method: pubswap", "method: fedavg-grpo") + "aggregate: median\n"
    check_form(read_request(text.encode(), "run.yaml"))


def test_the_charters_own_limit_is_no_fault(house: House) -> None:
    text = RUN_YAML + "optimiser: {learning_rate: 0.001}\n"
    document = read_request(text.encode(), "run.yaml")
    assert check_request(document, house.submissions.fixed).optimiser.learning_rate == 0.001


def test_a_run_that_was_accepted_is_taken_up_after_a_restart_under_a_tighter_charter(tmp_path: Path) -> None:
    from tests.policies.setting import edited

    one = House(tmp_path)
    one.submit()
    one.close()
    tighter = edited("temperature: [0.1, 2.0]", "temperature: [0.1, 0.2]")
    two = House(tmp_path, policy=tighter)  # the silos judge the plan; the coordinator has promised it
    assert two.run().state == "waiting"
    two.close()


@pytest.mark.parametrize("name", sorted(OUR_NAMES))
def test_a_name_of_trl_leads_to_ours(name: str, house: House) -> None:
    with pytest.raises(FedSiloError) as told:
        house.submit(RUN_YAML + f"{name}: 1\n")
    assert f"unknown key {name!r}" in told.value.message and OUR_NAMES[name] in told.value.hint
    assert OUR_NAMES[name] in _places()


def test_a_key_in_the_wrong_block_is_told_its_own() -> None:
    with pytest.raises(UsageError) as told:
        check_form(read_request(b"run: a\nmethod: pubswap\nclip_low: 0.2\n", "run.yaml"))
    assert told.value.hint == "it is objective.clip_low here: objective: {clip_low: ...}"


def test_a_public_file_without_solutions_is_refused_where_a_method_takes_them(tmp_path: Path) -> None:
    one = House(tmp_path)
    worked = RUN_YAML.replace("method: pubswap", "method: worked-key-swap")
    fixed = one.submissions.fixed
    one.submissions.fixed = replace(fixed, unsolved="public.jsonl:17")
    with pytest.raises(FedSiloError, match=r"run\.yaml:\d+: worked-key-swap .*public\.jsonl:17") as told:
        one.submit(worked)
    assert told.value.code == "SOLUTIONS"
    one.submit(RUN_YAML.replace("method: pubswap", "method: key-swap"))
    one.close()
    two = House(tmp_path / "b")
    two.submit(worked)
    assert fixed.unsolved == ""
    two.close()


@pytest.mark.parametrize("unsolved", ["", "public.jsonl:3"])
def test_a_silo_whose_public_file_lacks_a_solution_declines_a_plan_that_takes_them(
    tmp_path: Path, unsolved: str
) -> None:
    loop = Loop(tmp_path, setting.policy_of(setting.policy_text()), unsolved=unsolved)
    loop.offer_plan(setting.PLAN.model_copy(update={"method": "worked-key-swap"}))
    assert (loop.guard.runs.run is None) is bool(unsolved)
    denied = [row["reasons"] for row in loop.bench.events("ingress.decision") if row["decision"] == "deny"]
    assert denied == ([["SOLUTIONS"]] if unsolved else [])
    loop.close()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_plan_with_an_exchange_that_nobody_carries_out_is_refused_by_the_silo_too(name: str) -> None:
    """The coordinator may be of another version, or not honest."""
    config = config_from(EXAMPLE.encode(), Path("/site/silo.yaml"))
    plan = make_plan(method=name, load=config.model.load, silos=(config.silo, "b"))
    require_part(plan, config)
    assert require_exchange(plan) is METHODS[name]
    at_the_end = plan.model_copy(update={"exchange": "round_end"})
    if name == "pubswap":
        require_part(at_the_end, config)
    else:
        with pytest.raises(UsageError, match=f"{name} has no exchange 'round_end'") as told:
            require_part(at_the_end, config)
        assert told.value.hint == "one of: step"
    by_files = config.model_copy(update={"coordinator": CoordinatorPlace(address="files")})
    if METHODS[name].swaps:
        with pytest.raises(UsageError, match="this silo exchanges files"):
            require_part(plan, by_files)
    else:
        require_part(plan, by_files)
    if name == "pubswap":
        require_part(at_the_end, by_files)
    with pytest.raises(UsageError, match="there is no method"):
        require_part(plan.model_copy(update={"method": "nope"}), config)
