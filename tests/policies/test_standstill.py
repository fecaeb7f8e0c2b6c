"""`policy check` names screens that never run and what lets nothing leave; no shipped ruleset has any of that."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policies.capacity import standstill_warnings, unused_screen_warnings
from policies.compare import effective
from policies.load import load_policy
from policies.render import RULESETS
from tests.policies import setting
from tests.policies.test_cli_policy import _init, _run, site
from tests.simulated import screening

__all__ = ["site"]  # a fixture: a folder with what `fedsilo policy init` needs


def found(text: str) -> list[str]:
    return unused_screen_warnings(setting.policy_of(text))


def line_of(text: str, key: str) -> int:
    """Of the only line that begins with it."""
    (number,) = (number for number, line in enumerate(text.split("\n"), 1) if line.strip().startswith(key))
    return number


@pytest.mark.parametrize("name", RULESETS)
def test_every_screen_of_a_shipped_ruleset_runs(name: str) -> None:
    assert found(setting.policy_text(name)) == []


def test_a_screen_that_no_kind_names_is_told_and_one_that_is_named_is_not() -> None:
    text = screening.policy_text(["canary", "charset", "overlap"], donor_screens=["charset"])
    (warning,) = found(text)
    assert f":{line_of(text, 'pii_basic:')}: text_screens.pii_basic never runs: no kind names it" in warning
    assert found(screening.policy_text()) == []
    # a kind that comes in counts as well
    assert found(screening.policy_text(["canary", "charset", "overlap"], donor_screens=["pii_basic"])) == []


def policy_with(key: str, value: float) -> str:
    """The shipped policy with one number changed, of the first key of that name."""
    text = setting.policy_text("pubswap")
    lines = text.split("\n")
    number = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{key}:"))
    before, _, rest = lines[number].partition(":")
    lines[number] = f"{before}: {value}{' ' if '#' in rest else ''}{rest[rest.index('#') :] if '#' in rest else ''}"
    return "\n".join(lines)


def test_policy_check_says_so(site: Path) -> None:
    assert _init(site)[0] == 0
    policy = site / "policy.yaml"
    assert not [each for each in _run(site, "check", str(policy))[1]["warnings"] if "never" in each]
    policy.write_text(policy.read_text() + "text_screens:\n  pii_basic: {patterns: [email]}\n")
    code, answer = _run(site, "check", str(policy))
    (told,) = (each for each in answer["warnings"] if "never" in each)
    assert code == 0 and "text_screens.pii_basic never runs" in told


STANDSTILLS = {
    "over": ({"now_seconds": setting.policy_of(setting.policy_text()).valid_until_seconds}, (), "which is over"),
    "to come": ({"now_seconds": 0.0}, (), "which is to come"),
    "shadow": ({}, ("mode: enforce", "mode: shadow"), "nothing is sent"),
    "no hello": ({}, ("[hello, poll,", "[poll,"), "control messages hello do not leave"),
    "no polls": ({}, ("polls_per_minute: 1200", "polls_per_minute: 0"), "polls_per_minute is 0"),
}


@pytest.mark.parametrize(("changes", "edit", "said"), STANDSTILLS.values(), ids=STANDSTILLS)
def test_a_policy_under_which_nothing_leaves_is_named(
    changes: dict[str, float], edit: tuple[str, str] | tuple[()], said: str
) -> None:
    text = setting.policy_text()
    if edit:
        assert text.count(edit[0]) == 1
        text = text.replace(*edit)
    told = {"now_seconds": setting.NOW, **changes}
    (warning,) = standstill_warnings(setting.policy_of(text), setting.SCHEMA, **told)
    assert said in warning and warning.startswith("policy.yaml:")


@pytest.mark.parametrize("key", ["message_bytes", "round_bytes", "day_bytes"])
def test_a_budget_that_no_update_fits_into_is_named(key: str) -> None:
    text = re.sub(rf"^  {key}: .*$", f"  {key}: 200", setting.policy_text(), flags=re.MULTILINE)
    warnings = list(standstill_warnings(setting.policy_of(text), setting.SCHEMA, setting.NOW))
    size = setting.SCHEMA.bytes_of("lora.factors")
    assert any(f"lora.factors has {size:,} bytes, {key}" in each for each in warnings)


@pytest.mark.parametrize("name", [name for name in RULESETS if name != "deny_all"])
def test_under_a_shipped_ruleset_something_leaves(name: str) -> None:
    assert list(standstill_warnings(setting.policy_of(setting.policy_text(name)), setting.SCHEMA, setting.NOW)) == []
    assert list(standstill_warnings(setting.policy_of(setting.policy_text("deny_all")), setting.SCHEMA, setting.NOW))


def standstills(step: float, charter: str | None) -> list[str]:
    """What is said of a site whose own deltas are at most 0.01 long, and its adapter's step at most `step`."""
    text = re.sub(
        r"^    (clip_l2|max_l2|max_tensor_l2): \$?0\.\d+",
        r"    \1: 0.009",
        policy_with("max_step_l2", step),
        flags=re.M,
    )
    text = text.replace("    max_l2: 0.009", "    max_l2: 0.01", 1)
    policy = setting.policy_of(text)
    own = policy.file.egress.lora_factors
    assert own is not None and own.max_l2 == 0.01
    both = effective(policy, None if charter is None else load_policy(charter.encode(), "charter.yaml"))
    return list(standstill_warnings(both, setting.SCHEMA, setting.NOW))


def test_T20_a_step_shorter_than_a_delta_of_any_peer_is_told() -> None:
    """Three peers at the charter's 0.019 and this site at 0.01: their mean is up to 0.0168 long."""
    charter = setting.policy_text()
    (warning,) = standstills(0.01, charter)
    line = line_of(policy_with("max_step_l2", 0.01), "max_step_l2:")
    assert warning.startswith(
        f"policy.yaml:{line}: max_step_l2 is 0.01, and the charter charter.yaml lets deltas of 0.019 "
    )
    assert "allow at least 0.019" in warning
    assert standstills(0.019, charter) == []
    # without a charter there is only the site's own limit to compare with
    assert standstills(0.01, None) == []
    (warning,) = standstills(0.0099, None)
    assert "max_step_l2 is 0.0099, and this policy lets deltas of 0.01 leave" in warning


def test_T20_policy_check_with_the_charter_says_so(site: Path) -> None:
    assert _init(site)[0] == 0
    policy, charter = site / "policy.yaml", site / "charter.yaml"
    written = policy.read_text()
    charter.write_text(written)
    (step,) = re.findall(r"max_step_l2: (\S+)", written)

    def told(*more: str) -> list[str]:
        code, answer = _run(site, "check", str(policy), *more)
        assert code == 0, answer
        return [each for each in answer["warnings"] if "max_step_l2" in each]

    assert told("--charter", str(charter)) == []
    shorter = float(step) / 2
    policy.write_text(written.replace(f"max_step_l2: {step}", f"max_step_l2: {shorter!r}"))
    (warning,) = told("--charter", str(charter))
    assert f"max_step_l2 is {shorter:g}, and the charter {charter} lets deltas of {float(step):g} leave" in warning
