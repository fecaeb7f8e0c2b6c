"""What a wrong configuration of a silo is told, and what `silo init` writes into one."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import stat
from pathlib import Path
from typing import get_args

import pytest

from coordinator import config as coordinator_config
from coordinator.ingress import check_hello
from fedsilo.cli import silo as cli_silo
from fedsilo.protocol.errors import NotFoundError, PeerError, UsageError
from policies.model import Policy
from silo.config import LoadType, config_from, load_config
from silo.guard.checks import check_site, compare_load
from silo.guard.screens import Screens, read_canaries, site_canaries
from silo.guard.site import never_shown, require_part, thread_warning
from tests.algorithms.tiny import make_plan
from tests.coordinator_folder import write_coordinator
from tests.policies.test_plan_size import SMALL, coordinator, files, folder, invoke, silo
from tests.simulated.coordinator_parts import AGREED, hello

EXAMPLE = (Path(__file__).parents[2] / "examples" / "hospital_a.yaml").read_text()


@pytest.mark.parametrize("value", ["0", "-1", "many", "2.5", "true", "null", "[2]"])
def test_a_wrong_number_of_threads_says_what_is_right(value: str) -> None:
    text = EXAMPLE.replace("  threads: auto", f"  threads: {value}")
    line = text.splitlines().index(f"  threads: {value}") + 1
    with pytest.raises(UsageError, match=rf"^/site/silo\.yaml:{line}: trainer\.threads: .* is no number of") as told:
        config_from(text.encode(), Path("/site/silo.yaml"))
    assert told.value.hint == "a whole number from 1, or auto"


@pytest.mark.parametrize("value", ["1", "auto", "64"])
def test_a_right_one_is_taken(value: str) -> None:
    text = EXAMPLE.replace("  threads: auto", f"  threads: {value}")
    assert str(config_from(text.encode(), Path("/site/silo.yaml")).trainer.threads) == value


def test_an_unknown_verifier_leads_to_the_known_ones() -> None:
    text = EXAMPLE.replace("\n  verifier: choice\n", "\n  verifier: chioce\n", 1)
    with pytest.raises(UsageError, match=r":\d+: data\.verifier: unknown verifier 'chioce'$") as told:
        config_from(text.encode(), Path("/site/silo.yaml"))
    assert told.value.hint.startswith("one of math, choice, exact")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("  holdout_share: 0.1\n", ""), r"acceptance: no private rows are set aside to measure on"),
        (("  prompts: [private]\n", "  prompts: []\n"), r"acceptance\.prompts: "),
        (("  prompts: [private]\n", "  prompts: [public]\n"), r"acceptance\.prompts\.0: "),
        (("  drop_max: 0.05\n", "  drop_max: 1\n"), r"acceptance\.drop_max: "),
        (("  drop_max: 0.05\n", "  dropmax: 0.05\n"), r"unknown key"),
    ],
)
def test_T52_what_adapters_are_measured_on_is_checked_with_its_line(change: tuple[str, str], message: str) -> None:
    assert EXAMPLE.count(change[0]) == 1
    with pytest.raises(UsageError, match=rf"^/site/silo\.yaml:\d+: .*{message}"):
        config_from(EXAMPLE.replace(*change).encode(), Path("/site/silo.yaml"))


def test_T52_the_public_held_out_set_needs_no_private_rows_and_without_the_section_nothing_is_measured() -> None:
    text = EXAMPLE.replace("  holdout_share: 0.1\n", "").replace("  prompts: [private]\n", "  prompts: [held_out]\n")
    found = config_from(text.encode(), Path("/site/silo.yaml")).acceptance
    assert found is not None and found.prompts == ("held_out",)
    start, end = EXAMPLE.index("acceptance:"), EXAMPLE.index("\ntrainer:")
    assert config_from((EXAMPLE[:start] + EXAMPLE[end:]).encode(), Path("/site/silo.yaml")).acceptance is None


@pytest.mark.parametrize("port", [0, 65_536, 99_999])
def test_a_port_that_nobody_can_dial_is_named_with_its_line(port: int) -> None:
    text = EXAMPLE.replace("coordinator.example.org:8443", f"coordinator.example.org:{port}")
    assert text != EXAMPLE
    with pytest.raises(
        UsageError, match=r"^/site/silo\.yaml:\d+: coordinator\.address: .*a port to dial is 1 to 65535"
    ):
        config_from(text.encode(), Path("/site/silo.yaml"))
    last = EXAMPLE.replace("coordinator.example.org:8443", "coordinator.example.org:65535")
    assert config_from(last.encode(), Path("/site/silo.yaml")).coordinator.address.endswith(":65535")


def test_the_file_of_the_other_party_is_told_for_what_it_is(tmp_path: Path) -> None:
    own = write_coordinator(tmp_path, ["hospital_a"])
    with pytest.raises(UsageError, match=r"^/site/c\.yaml:\d+: this is a coordinator's configuration, not a silo's"):
        config_from(own.read_bytes(), Path("/site/c.yaml"))
    (tmp_path / "silo.yaml").write_text(EXAMPLE)
    with pytest.raises(UsageError, match=r"silo\.yaml:\d+: this is a silo's configuration, not a coordinator's"):
        coordinator_config.load_config(tmp_path / "silo.yaml")
    assert coordinator_config.load_config(own).silos == ("hospital_a",)  # the counterpart


@pytest.mark.parametrize(
    ("threads", "silos", "said"),
    [(1, 1, ""), (2, 3, "2 threads x 3 silos"), (1, 3, "1 thread x 3 silos")],
)
def test_the_warning_of_too_many_threads_says_what_can_be_set(
    monkeypatch: pytest.MonkeyPatch, threads: int, silos: int, said: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    text = EXAMPLE.replace("  threads: auto", f"  threads: {threads}")
    text = text.replace("silos_on_this_host: 1", f"silos_on_this_host: {silos}")
    warning = thread_warning(config_from(text.encode(), Path("/site/silo.yaml")))
    assert warning.startswith(said) and bool(warning) == bool(said)
    assert ("set trainer.threads lower" in warning) == (threads > 1)


__all__ = ["folder"]  # the fixture: what a site has before `silo init`

STRICT = ("--ruleset", "pubswap-strict")


@pytest.fixture
def made(folder: Path) -> tuple[Path, Policy]:
    coordinator(folder, *SMALL, *STRICT)
    before = os.umask(0)
    try:
        policy, _ = silo(folder, *STRICT)
    finally:
        os.umask(before)
    return folder / "trial" / "hospital_a", policy


def text_screens(here: Path) -> dict[str, object]:
    rows, _, _ = check_site(load_config(here / "silo.yaml"), reach_coordinator=False)
    (row,) = [row for row in rows if row["check"] == "text screens"]
    return row


def test_T31_the_canaries_of_a_site_are_its_own_random_and_private(made: tuple[Path, Policy], folder: Path) -> None:
    here, _ = made
    file = here / "canaries.txt"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    silo(folder, *STRICT, name="hospital_b")
    others = read_canaries(folder / "trial" / "hospital_b" / "canaries.txt")
    canaries = read_canaries(file)
    assert len({*canaries, *others}) == len(canaries) + len(others) >= 8
    # 25 letters of 26 are 117 bits
    assert all(re.fullmatch(r"([a-z]{5}-){4}[a-z]{5}", canary) for canary in canaries)
    assert load_config(here / "silo.yaml").data.canaries == file
    assert file in never_shown(load_config(here / "silo.yaml"))
    for other in ("silo.yaml", "policy.yaml", "lora_schema.json"):
        assert not any(canary in (here / other).read_text() for canary in canaries)


def test_T15_the_strict_ruleset_finds_them_straight_after_init(made: tuple[Path, Policy]) -> None:
    here, policy = made
    assert text_screens(here)["ok"] is True
    canaries = site_canaries(load_config(here / "silo.yaml"), policy)
    screens = Screens(canaries=canaries)
    found = screens.screen(policy, ("canary", "charset"), [f"so it is {canaries[3].upper()}, 12", "so it is 12"])
    assert [dict(hits) for hits in found.hits] == [{"canary/canary": 1}, {}] and found.failed == ()
    # the counterpart: without them the screen cannot run, and neither check nor start get past it
    assert Screens().screen(policy, ("canary",), ["so it is 12"]).failed == ("canary",)
    (here / "canaries.txt").unlink()
    refused = text_screens(here)
    assert refused["ok"] is False and "canaries.txt does not exist" in str(refused["found"])
    with pytest.raises(NotFoundError, match=r"silo\.yaml:\d+: data\.canaries"):
        site_canaries(load_config(here / "silo.yaml"), policy)


def test_an_init_that_refuses_its_arguments_writes_nothing_that_stands_in_the_way_of_the_next(folder: Path) -> None:
    coordinator(folder, *SMALL)
    here = folder / "trial" / "hospital_a"
    words = [
        "init", "hospital_a", "--out", here, "--private", folder / "private.jsonl",
        "--federation", folder / "trial" / "coordinator" / "federation.json", *files(folder),
    ]  # fmt: skip
    code, answer = invoke(cli_silo.app, *words, "--verifier", "exakt")
    assert code == 2 and "data.verifier" in answer["error"]["message"]
    assert all(path.is_dir() for path in here.iterdir())
    assert invoke(cli_silo.app, *words)[0] == 0


def test_canaries_that_are_there_already_stay(folder: Path) -> None:
    coordinator(folder, *SMALL)
    here = folder / "trial" / "hospital_a"
    here.mkdir(exist_ok=True)
    file = here / "canaries.txt"
    file.write_text("planted long ago\n")
    file.chmod(0o600)
    silo(folder)
    assert read_canaries(file) == ("planted long ago",)


LOADS = get_args(LoadType)


@pytest.mark.parametrize(("agreed", "told"), list(itertools.product(LOADS, LOADS)))
def test_a_coordinator_takes_another_load_type_only_if_mixing_is_allowed(agreed: str, told: str) -> None:
    federation = dataclasses.replace(AGREED, load=agreed)
    check_hello(hello(load=told), dataclasses.replace(federation, mixed_base="allow"))
    if agreed == told:
        check_hello(hello(load=told), federation)
        return
    with pytest.raises(PeerError, match=f"load differs: expected {agreed}, got {told}"):
        check_hello(hello(load=told), federation)


@pytest.mark.parametrize(("planned", "own"), list(itertools.product(LOADS, LOADS)))
def test_a_silo_takes_a_plan_with_another_load_type_only_if_mixing_is_allowed(planned: str, own: str) -> None:
    config = config_from(EXAMPLE.replace("load: bf16", f"load: {own}").encode(), Path("/site/silo.yaml"))
    assert config.model.load == own
    plan = make_plan(load=planned, silos=(config.silo, "b"))
    require_part(plan.model_copy(update={"mixed_base": "allow"}), config)
    if planned == own:
        require_part(plan, config)
        return
    with pytest.raises(UsageError, match=f"the base model as {planned}, this silo as {own}"):
        require_part(plan, config)


@pytest.mark.parametrize(("planned", "own"), list(itertools.product(LOADS, LOADS)))
def test_silo_check_compares_with_the_run_that_is_open(planned: str, own: str, tmp_path: Path) -> None:
    path = tmp_path / "silo.yaml"
    path.write_text(EXAMPLE.replace("load: bf16", f"load: {own}"))
    config = load_config(path)
    plan = make_plan(load=planned, silos=(config.silo, "b"))
    compare_load(config, None)  # no run is open, and nothing else of a site says it
    compare_load(config, plan.model_copy(update={"mixed_base": "allow"}))
    if planned == own:
        compare_load(config, plan)
        return
    with pytest.raises(UsageError, match=f"model.load is {own}, that of run {plan.run} {planned}") as told:
        compare_load(config, plan)
    line = path.read_text().splitlines().index(f"  load: {own}") + 1
    assert told.value.message.startswith(f"{path}:{line}: ") and told.value.code == "LOAD_MISMATCH"
