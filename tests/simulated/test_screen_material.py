"""What the guard's screens are made of: canaries, the trainer's index, and what `silo check` says of a missing one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsilo.files.durable import write_private
from fedsilo.protocol.errors import NotAllowedError, NotFoundError, UsageError
from silo.guard import screens as guard_screens
from silo.guard.screens import Screens, check_screens, index_key, read_canaries, site_canaries
from tests.policies import setting
from tests.simulated import screening as site


def canaries_file(folder: Path, content: str) -> Path:
    path = folder / "canaries.txt"
    path.unlink(missing_ok=True)
    write_private(path, content.encode())
    return path


def test_canaries_are_lines_bare_or_json(tmp_path: Path) -> None:
    path = canaries_file(tmp_path, 'plain canary one\n\n"quoted canary"\n{"canary": "object canary", "set": 3}\n')
    assert read_canaries(path) == ("plain canary one", "quoted canary", "object canary")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("good canary\nshort\n", "canaries.txt:2: a canary is a text of 8 to 1024"),
        ("good canary\n{broken\n", "canaries.txt:2: not JSON"),
        ('{"text": "good canary"}\n', "canaries.txt:1: a canary is a text"),
        ('["good canary"]x' + "y" * 1024, "canaries.txt:1: a canary is a text"),
        ("\n \n", "holds no canary"),
        ("\n".join(f"canary number {number}" for number in range(10_001)), "10001 canaries"),
    ],
)
def test_a_line_that_is_no_canary_is_refused_with_its_number(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(UsageError, match="canar") as refused:
        read_canaries(canaries_file(tmp_path, content))
    assert said in refused.value.message


def test_T15_canaries_that_others_may_read_are_refused(tmp_path: Path) -> None:
    path = canaries_file(tmp_path, "good canary\n")
    assert read_canaries(path) == ("good canary",)
    path.chmod(0o640)
    with pytest.raises(NotAllowedError):
        read_canaries(path)
    with pytest.raises(NotFoundError):
        read_canaries(tmp_path / "none")


def test_the_trainer_is_told_to_build_what_the_policy_screens_for() -> None:
    screens = Screens(key=index_key(site.SITE_SECRET), public_sha256=setting.HASH["public"])
    wanted = screens.index_wanted(site.policy(["overlap"]).file)
    assert wanted == {
        "key": index_key(site.SITE_SECRET).hex(), "n": 8, "false_positive_rate": 1e-6, "background": True,
    }  # fmt: skip
    assert site.SITE_SECRET.hex() not in str(wanted)
    # Another public set than the one whose passages the policy lets through is no background.
    other = Screens(public_sha256="0" * 64).index_wanted(site.policy(["overlap"]).file)
    assert other is not None and other["background"] is False
    assert screens.index_wanted(site.policy(["canary"]).file) is None
    inbound = site.policy([], max_hits_per_day=None, donor_screens=["overlap"])
    assert screens.index_wanted(inbound.file) == wanted
    assert index_key(site.SITE_SECRET) != index_key(bytes(32))


def test_T23_an_index_beyond_the_bound_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = site.policy(["overlap"])
    assert site.screens(tmp_path / "within").troubles(policy) == []
    (path,) = (tmp_path / "within").iterdir()
    monkeypatch.setattr(guard_screens, "INDEX_BYTES_MAX", path.stat().st_size - 1)
    (trouble,) = site.screens(tmp_path / "beyond").troubles(policy)
    assert "more than" in trouble


@pytest.mark.parametrize(
    "told", [None, {}, {"file": 3}, {"file": "/etc/passwd"}, {"why": "no scratch\n\x1b folder"}, []]
)
def test_what_a_trainer_says_of_no_index_comes_to_none_with_a_reason(tmp_path: Path, told: Any) -> None:
    screens = Screens(key=index_key(site.SITE_SECRET))
    screens.take_index(tmp_path, told)
    (trouble,) = screens.troubles(site.policy(["overlap"]))
    assert trouble.startswith("policy.yaml:") and "overlap" in trouble and trouble.isprintable()
    # its own words stand in the guard's log file alone (T08)
    assert "no scratch" not in trouble and ("log says why" in trouble) is (isinstance(told, dict) and "why" in told)


def test_an_index_taken_before_is_gone_when_the_next_trainer_has_none(tmp_path: Path) -> None:
    screens = site.screens(tmp_path)
    assert screens.troubles(site.policy(["overlap"])) == []
    screens.take_index(tmp_path, {})
    assert len(screens.troubles(site.policy(["overlap"]))) == 1


def config(folder: Path, *, launch: str = "child", scratch: Path | None = None, canaries: bool = True) -> Any:
    path = canaries_file(folder, f"{site.CANARY}\n") if canaries else None
    source = folder / "silo.yaml"
    source.write_text("silo: hospital_a\ndata:\n  collection: c\n  canaries: canaries.txt\n")
    return SimpleNamespace(
        data=SimpleNamespace(canaries=path), trainer=SimpleNamespace(launch=launch, scratch=scratch), source=source
    )


def test_silo_check_says_why_a_screen_cannot_run_here(tmp_path: Path) -> None:
    policy = site.policy()
    assert check_screens(config(tmp_path), policy) == "canary, charset, overlap, pii_basic; 1 canaries"
    assert check_screens(config(tmp_path, launch="external", scratch=tmp_path), policy).startswith("canary")
    for wrong, said in (
        (config(tmp_path, canaries=False), "data.canaries"),
        (config(tmp_path, launch="external"), "trainer.scratch"),
    ):
        with pytest.raises(UsageError) as refused:
            check_screens(wrong, policy)
        assert said in refused.value.message and refused.value.code == "SCREEN_FAILED"
        assert refused.value.message.startswith("policy.yaml:")
    assert check_screens(config(tmp_path, canaries=False), site.policy(["charset"])) == "charset; 0 canaries"
    plain = setting.policy_of(setting.policy_text())
    assert check_screens(config(tmp_path, launch="external", canaries=False), plain) == "the policy names none"


def test_canaries_that_are_gone_are_named_with_both_lines_before_the_start(tmp_path: Path) -> None:
    policy, given = site.policy(["canary"]), config(tmp_path)
    assert site_canaries(given, policy) == (site.CANARY,)
    given.data.canaries.unlink()
    asks = next(
        number for number, line in enumerate(site.policy_text(["canary"]).splitlines(), 1) if "screens:" in line
    )
    for refuse in (site_canaries, check_screens):
        with pytest.raises(NotFoundError) as gone:
            refuse(given, policy)
        assert gone.value.message.startswith(f"{tmp_path / 'silo.yaml'}:4: data.canaries: {given.data.canaries}")
        assert f"policy.yaml:{asks}: public.responses is screened for canaries" in gone.value.message
        assert "silo init" in gone.value.hint
    # A policy that does not ask for them is not blamed, and where no file is named there is none to miss.
    with pytest.raises(NotFoundError) as gone:
        site_canaries(given, site.policy(["charset"]))
    assert "policy.yaml" not in gone.value.message
    assert site_canaries(config(tmp_path, canaries=False), site.policy(["charset"])) == ()
    with pytest.raises(UsageError, match=r"data\.canaries names no file") as unnamed:
        site_canaries(config(tmp_path, canaries=False), policy)
    assert unnamed.value.code == "SCREEN_FAILED" and f"{tmp_path / 'silo.yaml'}:4" in unnamed.value.message
