"""`silo init` makes canaries, and with them the strict screen runs on the files as they were written (T15, T31)."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest

from fedsilo.cli import silo as cli_silo
from fedsilo.protocol.errors import NotFoundError
from policies.model import Policy
from silo.config import load_config
from silo.guard.checks import check_site
from silo.guard.screens import Screens, read_canaries, site_canaries
from silo.guard.site import never_shown
from tests.policies.test_plan_size import SMALL, coordinator, files, folder, invoke, silo

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
